"""Offer Ulysses for models of transformers: the engine cuts whole sequences over `mesh.cp`, so nothing is patched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwise.compat.deepspeed import comm
from shardwise.compat.deepspeed.finder import answers
from shardwise.compat.deepspeed.runtime.sequence_parallel import parallel_state_sp
from shardwise.engine.runner import to_device

__getattr__ = answers(__name__)


class UlyssesSPAttentionHF:
    """Registers sequence parallelism; the model's attention stays, and the engine exchanges heads for tokens."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        *args: Any,
        disable_in_eval: bool = False,
        **options: Any,
    ) -> Any:
        """Return what `deepspeed.initialize` takes as `mpu`; None for one rank a sequence.

        The arguments are those of DeepSpeed. Only two count: the ranks that share a sequence, and `disable_in_eval`,
        with which each rank evaluates sequences of its own.
        """
        if sequence_parallel_size == 1:
            return None
        parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size, disable_in_eval)
        return parallel_state_sp


class UlyssesSPDataLoaderAdapter:
    """Yields the batches of all ranks that share sequences, one after the other, whole and the same on each of them.

    `labels` become `shift_labels`, the target of each token. The loss is the model's own, as with `mesh.cp`. The
    arguments are those of DeepSpeed.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: torch.device) -> None:
        self.dl, self.sp_group, self.sp_world_size, self.device = dl, sp_group, sp_world_size, device

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.dl:
            batches: list[Any] = [None] * self.sp_world_size
            own_batch = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in batch.items()}
            comm.all_gather_object(batches, own_batch, group=self.sp_group)
            for gathered in batches:
                labels = gathered.pop("labels", None)
                if labels is not None:
                    gathered["shift_labels"] = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
                yield to_device(gathered, self.device)
