"""Reads a checkpoint into what a rank holds: checks first whether it fits, then reads the bytes.

In the example the rows of a 2 x 4 layer are split over a mesh of 2 x 2, two ranks to a row. One rank has written the
checkpoint; the second rank of a row reads what it holds, the row's last half.

>>> import tempfile
>>> from dataclasses import replace
>>> from shardwise.checkpoint.manifest import merge_parts
>>> from shardwise.checkpoint.writer import write_state_shards
>>> from shardwise.runtime.state_shards import TensorFlatState
>>> from shardwise.layout.slicing import Chunk, Rect
>>> whole = (Chunk(Rect((0, 0), (2, 4)), 0),)
>>> saved = StateShard("up.weight", (), "param", (2, 4), TensorFlatState(torch.arange(8.0)), whole, written=whole)
>>> half = (Chunk(Rect((1, 2), (2, 4)), 0),)
>>> mine = StateShard("up.weight", (), "param", (2, 4), TensorFlatState(torch.zeros(2)), half, written=())
>>> with tempfile.TemporaryDirectory() as folder:
...     tensors, files = merge_parts([write_state_shards(Path(folder), "all.safetensors", [saved], [])])
...     plan = plan_load(Manifest(3, tensors, files), [mine], folder, {}, strict=True, weights_only=False)
...     num_bytes = plan.read(Path(folder), [mine])  # until now nothing was changed
>>> mine.flat.tensor, num_bytes
(tensor([6., 7.]), 32)
>>> other = replace(mine, name="up.wieght")
>>> plan_load(Manifest(3, tensors, files), [other], "step-00000003", {}, strict=True, weights_only=False)
Traceback (most recent call last):
    ...
shardwise.checkpoint.manifest.CheckpointError: step-00000003 does not fit the model: missing up.wieght (is up.weight \
meant?); unexpected up.weight; load with strict=False to take what fits
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.file_ranges import windows_of
from shardwise.checkpoint.manifest import DamagedError, Manifest, StoredState, StoredTensor, number_kind
from shardwise.checkpoint.match import StateMatch, WantedState, match
from shardwise.checkpoint.reader import ChunkReader
from shardwise.checkpoint.safetensors_io import named_dtype
from shardwise.runtime.state_shards import PARAM, ScalarState, StateShard


@dataclass(frozen=True)
class LoadReport:
    """Says what a load has read and left out.

    Attributes:
        step: optimizer steps taken when it was saved.
        missing: parameters and buffers of the model that it lacks; they are unchanged.
        skipped: a line for each part of it that was not used.
        damaged: newer checkpoints that were not used, and why.
        extra: what the user gave to `save`.
        num_read_bytes: bytes that this rank has read.
    """

    path: Path
    step: int
    missing: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    extra: Any = None
    num_read_bytes: int = 0


@dataclass(frozen=True)
class LoadPlan:
    """Lists the stored tensors that a load will read, and what it will leave out.

    Attributes:
        match: stored tensors by the model's names.
        with_states: whether the optimizer's states and the trajectory are loaded too.
        misfits: the parts of the trajectory that are left out, each with the reason; see `training_state.misfits`.
        skipped: a line for each thing that is left out.
    """

    manifest: Manifest
    match: StateMatch
    with_states: bool
    misfits: Mapping[str, str]
    skipped: tuple[str, ...]

    def optimizer_states(self) -> dict[str, dict[str, ScalarState | torch.dtype | None]]:
        """Return, by parameter and state, the number; or a tensor's dtype, None where that is the parameter's."""
        if not self.with_states:
            return {}
        return {
            name: {
                state: _wanted(name, state, stored, tensor.states.get(PARAM))
                for state, stored in tensor.states.items()
                if state != PARAM
            }
            for name, tensor in self.match.found.items()
        }

    def read(
        self, folder: Path, state_shards: Iterable[StateShard], progress: Callable[[], None] = lambda: None
    ) -> int:
        """Fill the state shards that the checkpoint has, and return the bytes that were read.

        Args:
            state_shards: those given to `plan_load`, or some of them.

        Raises:
            DamagedError: a file is not what was written; some state shards may have been filled by then.
            OSError: a state that is stored in a file cannot be written.
        """
        with ChunkReader(folder) as reader:
            for state_shard in state_shards:
                progress()
                tensor = self.match.found.get(state_shard.name)
                if tensor is not None and state_shard.state in tensor.states and state_shard.pieces:
                    _fill(reader, tensor, state_shard, progress)
            return reader.num_read_bytes


def _fill(reader: ChunkReader, stored: StoredTensor, state_shard: StateShard, progress: Callable[[], None]) -> None:
    """Read a state into its storage; where that is a file, through a buffer of at most `WINDOW_BYTES`."""
    flat = state_shard.flat
    if flat.tensor is not None:
        before = flat.tensor.clone() if state_shard.kind == "buffer" else None
        reader.read(stored, state_shard.state, state_shard.pieces, flat.tensor)
        if before is not None and _is_rounded(before, flat.tensor, named_dtype(stored.states[state_shard.state].dtype)):
            flat.tensor.copy_(before)
        return
    found = list(windows_of(flat, state_shard.pieces))
    buffer = torch.empty(max(window.stop - window.start for window in found), dtype=flat.dtype)
    for window in found:
        values = buffer[: window.stop - window.start]
        reader.read(stored, state_shard.state, window.pieces, values)
        flat.write(window.start, values)
        progress()


def _is_rounded(values: Tensor, read: Tensor, dtype: torch.dtype) -> bool:
    """Say whether `read`, from a narrower dtype, is `values` rounded: a table from a run that cast its buffers."""
    is_narrower = dtype.is_floating_point and dtype.itemsize < values.dtype.itemsize
    return is_narrower and torch.equal(values.to(dtype), read.to(dtype))


def plan_load(
    manifest: Manifest,
    state_shards: Sequence[StateShard],
    where: str,
    misfits: Mapping[str, str],
    *,
    strict: bool,
    weights_only: bool,
) -> LoadPlan:
    """Decide which stored tensor goes where; the decision is the same on every rank.

    Args:
        state_shards: all parameters of the model, as this rank has them, and its buffers.
        misfits: the parts of the checkpoint's trajectory that do not fit the engine's optimizer and schedule.
        strict: refuse what does not fit, instead of skipping it.

    Raises:
        CheckpointError: it does not fit the model.
        DamagedError: it names a tensor without values.
    """
    stored = [tensor for tensor in manifest.tensors if tensor.kind != "rank"]
    # Adapters alone may be loaded into a model that is frozen now, such as one that only generates.
    is_partial = manifest.contents == "trainable"
    there = {name for tensor in stored for name in (tensor.name, *tensor.aliases)} if is_partial else set()
    wanted = [
        WantedState(
            shard.name, shard.aliases, shard.global_shape, number_kind(str(shard.flat.dtype).removeprefix("torch."))
        )
        for shard in state_shards
        if shard.kind != "rank"
        and shard.state == PARAM
        and (shard.trainable or not is_partial or not there.isdisjoint((shard.name, *shard.aliases)))
    ]
    result = match(stored, wanted)
    for name, tensor in result.found.items():
        if PARAM not in tensor.states or tensor.states[PARAM].value is not None:
            raise DamagedError("manifest-malformed", f"{where} has no values of {name}; use an older checkpoint")
    with_states = not weights_only and manifest.contents != "weights"
    misfits = misfits if with_states else {}
    if strict:
        fix = "; weights_only=True takes no optimizer and no schedule" if misfits else ""
        result.check(where, [*misfits.values()], fix)
    skipped = [f"unexpected {name}" for name in result.unexpected]
    skipped += [f"of another shape: {line}" for line in result.misshapen]
    skipped += [f"of another kind of numbers: {line}" for line in result.mistyped]
    skipped += misfits.values()
    return LoadPlan(manifest, result, with_states and "states" not in misfits, misfits, tuple(skipped))


def _wanted(name: str, state: str, stored: StoredState, values: StoredState | None) -> ScalarState | torch.dtype | None:
    if stored.value is None:
        # A state in the parameter's precision follows the precision; counts and the like keep their dtype.
        return None if values is not None and values.dtype == stored.dtype else named_dtype(stored.dtype)
    is_python = stored.dtype in ("int", "float")
    dtype = stored.dtype if is_python else str(named_dtype(stored.dtype)).removeprefix("torch.")
    return ScalarState(name, state, stored.value, dtype)


def own_tensors(manifest: Manifest, rank: int) -> Mapping[str, StoredTensor]:
    """Return the tensors that belonged to `rank` alone, by their names there."""
    prefix = rank_name(rank, "")
    return {
        tensor.name.removeprefix(prefix): tensor
        for tensor in manifest.tensors
        if tensor.kind == "rank" and tensor.name.startswith(prefix)
    }


def rank_name(rank: int, name: str) -> str:
    """Return the name under which a checkpoint stores a tensor that belongs to one rank alone."""
    return f"rank-{rank}/{name}"
