"""An export that all ranks make together: rank 0 begins, every rank writes its own, rank 0 finishes; or nobody has it.

>>> import tempfile, torch
>>> from shardwise.flats import MemoryFlat
>>> from shardwise.layout.pieces import LocalTensor
>>> pieces = LocalTensor.whole((2, 3)).pieces
>>> held = Holding("up", (), "param", (2, 3), MemoryFlat(torch.arange(6.0)), pieces, written=pieces)
>>> with tempfile.TemporaryDirectory() as place:
...     request = ExportRequest(Path(place) / "hf", [held], "BF16", set(), {"config.json": b"{}"})
...     folder = export_jointly(request, Rounds(None, 0, 0, 1, 60.0, "export"), rank=0, timeout_s=60.0)
...     sorted(path.name for path in folder.iterdir())
['config.json', 'model.safetensors']
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from shardwise.agreement import listed
from shardwise.checkpoint.disk import await_folder
from shardwise.checkpoint.huggingface.exporting import (
    MAX_FILE_BYTES,
    ExportPlan,
    ExportTensor,
    begin_export,
    discard_export,
    finish_export,
    plan_export,
    temporary_folder,
    write_export,
)
from shardwise.checkpoint.huggingface.names import NameMap
from shardwise.checkpoint.manifest import CheckpointError
from shardwise.checkpoint.rounds import Rounds
from shardwise.checkpoint.tensor_files import dtype_name
from shardwise.holdings import PARAM, Holding

_FLOATS: Final = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class ExportRequest:
    """What is exported, and where to.

    Attributes:
        folder: to be; one and the same for all ranks, by whatever path.
        holdings: parameters and buffers, of this rank.
        dtype: safetensors' name of the one that numbers with a point are written in; others stay as they are.
        kept: names of the tensors that stay in their own dtype whatever it is.
        others: the files beside the weights; what counts is rank 0's.
        names: rules for names that differ in the folder.
        max_file_bytes: of the tensors in a file.
    """

    folder: Path
    holdings: Sequence[Holding]
    dtype: str
    kept: Set[str]
    others: Mapping[str, bytes | Path]
    names: NameMap | Mapping[str, Any] | None = None
    max_file_bytes: int = MAX_FILE_BYTES

    @cached_property
    def plan(self) -> ExportPlan:
        """The same on all ranks."""
        tensors = [
            ExportTensor(
                each.name, each.aliases, each.global_shape, exported_dtype(own, self.dtype, each.name in self.kept)
            )
            for each in self.holdings
            if each.state == PARAM
            for own in [dtype_name(each.flat.dtype)]
        ]
        return plan_export(in_order(tensors), self.names, self.max_file_bytes)


def exported_dtype(dtype: str, wanted: str, is_kept: bool) -> str:
    """The dtype in which a tensor of one dtype is written: the wanted one, unless it is kept, or of integers.

    >>> exported_dtype("F32", "BF16", is_kept=False), exported_dtype("I64", "BF16", is_kept=False)
    ('BF16', 'I64')
    """
    return wanted if dtype in _FLOATS and not is_kept else dtype


def in_order(tensors: Iterable[ExportTensor]) -> list[ExportTensor]:
    """By name, numbers by value: an order that no layout and no checkpoint changes.

    >>> tensors = [ExportTensor(name, (), (), "F32") for name in ("h.10.up", "h.9.up", "h.9.down")]
    >>> [tensor.name for tensor in in_order(tensors)]
    ['h.9.down', 'h.9.up', 'h.10.up']
    """
    return sorted(
        tensors,
        key=lambda tensor: [
            (0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"\.", tensor.name)
        ],
    )


def export_jointly(request: ExportRequest, rounds: Rounds, rank: int, timeout_s: float) -> Path:
    """Export on all ranks, each of which calls this; returns the folder, whole.

    Args:
        request: of the same model, dtype and names on all ranks.
        rounds: of this export alone; left when it ends.
        rank: of this process.
        timeout_s: half of which a folder that rank 0 has made may take to show on other ranks.

    Raises:
        CheckpointError: it failed on whichever rank, with the same words on all; nothing is left of it.
    """
    folder = request.folder

    def plan() -> str:
        parts = [request.plan.index, *map(repr, request.plan.headers.items())]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def begin(said: Mapping[int, str]) -> str:
        odd = [each for each, digest in said.items() if digest != said[0]]
        if odd:
            raise CheckpointError(
                f"{listed(odd)} would export other tensors than rank 0; call it with the same dtype and names on all"
            )
        begin_export(request.plan, folder, request.others)
        return ""

    def write() -> str:
        await_folder(temporary_folder(folder), timeout_s / 2)
        return str(write_export(request.plan, folder, request.holdings, lambda _: rounds.show_progress()))

    def finish(said: Mapping[int, str]) -> str:
        written, planned = sum(map(int, said.values())), request.plan.num_tensor_bytes
        if written != planned:
            raise CheckpointError(f"the ranks have written {written} bytes of {planned}; this is a defect of shardwise")
        finish_export(folder)
        return ""

    try:
        rounds.run("begin", plan, begin)
        rounds.run("finish", write, finish)
    except CheckpointError:
        if rank == 0:
            discard_export(folder)
        raise
    finally:
        rounds.finish()
    return folder
