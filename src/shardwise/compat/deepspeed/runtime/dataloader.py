"""Offer the loader that `deepspeed.initialize` makes of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from shardwise.compat.deepspeed.finder import answers
from shardwise.compat.deepspeed.runtime.engine import DeepSpeedEngine

__getattr__ = answers(__name__)


class DeepSpeedDataLoader:
    """Loads the micro-batches of this data rank, shuffled again in each epoch where training shuffles.

    Attributes:
        post_process_func: what is done to each batch, with DeepSpeed's arguments: the batch, and None.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._epoch = 0
        self.post_process_func: Callable[..., Any] | None = None

    @classmethod
    def of(
        cls,
        dataset: Any,
        engine: DeepSpeedEngine,
        collate_fn: Callable[..., Any] | None = None,
        *,
        size: int | None = None,
        sampler: Any = None,
        shuffles: bool = True,
        num_workers: int = 0,
    ) -> DeepSpeedDataLoader:
        """Make the loader of a dataset for this data rank.

        Args:
            dataset: of samples, by index or as an iterable that shares itself out.
            size: of a batch; None for the engine's micro-batch.
            sampler: of this rank's samples; None for a share of them.
            shuffles: whether the samples come in another order in each epoch.
        """
        options: dict[str, Any] = {"collate_fn": collate_fn, "num_workers": num_workers}
        size = size or engine.train_micro_batch_size_per_gpu()
        drop_last = bool(engine.config.get("dataloader_drop_last", False))
        if isinstance(dataset, IterableDataset):
            return cls(DataLoader(dataset, size, drop_last=drop_last, **options))
        ranks = engine.dp_world_size, engine.get_data_parallel_rank()
        sampler = sampler or DistributedSampler(dataset, *ranks, shuffle=shuffles)
        return cls(DataLoader(dataset, size, sampler=sampler, drop_last=drop_last, **options))

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        sampler = self._loader.sampler
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(self._epoch)
        self._epoch += 1
        change = self.post_process_func
        return iter(self._loader) if change is None else (change(batch, None) for batch in self._loader)


class RepeatingLoader:
    """Starts a loader, or any iterable, again when it ends."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._iterator = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
            return next(self._iterator)
