"""Reading a checkpoint into what a rank holds: first whether it fits, then the bytes.

plan = plan_load(read_manifest(folder), holdings, strict=True, weights_only=False)   # nothing is changed yet
num_bytes = plan.read(folder, holdings)                                              # only what this rank holds

"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.manifest import CheckpointError, Manifest, StoredState, StoredTensor
from shardwise.checkpoint.matching import Match, Wanted, match
from shardwise.checkpoint.reading import PieceReader
from shardwise.checkpoint.tensor_files import named_dtype
from shardwise.holdings import PARAM, HeldNumber, Holding


@dataclass(frozen=True)
class LoadReport:
    """What a load has done.

    Attributes:
        path: the checkpoint that was loaded.
        step: optimizer steps taken when it was saved.
        missing: parameters and buffers of the model that it has not; they are as before.
        skipped: what of it was not used, a line each.
        damaged: newer checkpoints that were not used, and why.
        extra: what the user gave to `save`.
        num_read_bytes: read on this rank.
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
    """What of a checkpoint goes where.

    Attributes:
        manifest: of the checkpoint.
        match: stored tensors by the model's names.
        with_states: whether the optimizer's states and the trajectory are taken over too.
        skipped: what is left out, a line each.
    """

    manifest: Manifest
    match: Match
    with_states: bool
    skipped: tuple[str, ...]

    def optimizer_states(self) -> dict[str, dict[str, HeldNumber | None]]:
        """By parameter and state: the number, or None for a tensor."""
        if not self.with_states:
            return {}
        return {
            name: {
                state: None if stored.value is None else _number(name, state, stored)
                for state, stored in tensor.states.items()
                if state != PARAM
            }
            for name, tensor in self.match.found.items()
        }

    def read(self, folder: Path, holdings: Iterable[Holding]) -> int:
        """Fill the holdings that the checkpoint has, and return the bytes that were read.

        Raises:
            DamagedError: a file is not what was written; some holdings may have been filled by then.
        """
        with PieceReader(folder) as reader:
            for holding in holdings:
                tensor = self.match.found.get(holding.name)
                if tensor is not None and holding.state in tensor.states and holding.pieces:
                    reader.read(tensor, holding.state, holding.pieces, holding.tensor)
            return reader.num_read_bytes


def plan_load(
    manifest: Manifest,
    holdings: Sequence[Holding],
    where: str,
    optimizer_kind: str,
    *,
    strict: bool,
    weights_only: bool,
) -> LoadPlan:
    """Decide what of a checkpoint goes where; the same on every rank.

    Args:
        manifest: of the checkpoint.
        holdings: this rank's parameters, all of the model's, and its buffers.
        where: the checkpoint, for messages.
        optimizer_kind: class of the engine's optimizer.
        strict: refuse what does not fit, instead of skipping it.
        weights_only: leave optimizer and trajectory alone.

    Raises:
        CheckpointError: it does not fit the model.
    """
    is_partial = manifest.contents == "trainable"
    wanted = [
        Wanted(each.name, each.aliases, each.global_shape)
        for each in holdings
        if each.kind != "rank" and each.state == PARAM and (each.trainable or not is_partial)
    ]
    stored = [tensor for tensor in manifest.tensors if tensor.kind != "rank"]
    result = match(stored, wanted)
    if strict:
        result.check(where)
    skipped = [f"unexpected {name}" for name in result.unexpected]
    skipped += [f"of another shape: {line}" for line in result.misshapen]
    with_states = not weights_only and manifest.contents != "weights"
    saved_kind = manifest.trajectory.get("optimizer", {}).get("kind", optimizer_kind)
    if with_states and saved_kind != optimizer_kind:
        if strict:
            raise CheckpointError(
                f"{where} has states of {saved_kind}, but the engine's optimizer is {optimizer_kind}; use that "
                "optimizer, or load with weights_only=True"
            )
        with_states = False
        skipped.append(f"the states of {saved_kind}, since the optimizer is {optimizer_kind}")
    return LoadPlan(manifest, result, with_states, tuple(skipped))


def _number(name: str, state: str, stored: StoredState) -> HeldNumber:
    is_python = stored.dtype in ("int", "float")
    dtype = stored.dtype if is_python else str(named_dtype(stored.dtype)).removeprefix("torch.")
    return HeldNumber(name, state, stored.value or 0.0, dtype)


def own_tensors(manifest: Manifest, rank: int) -> Mapping[str, StoredTensor]:
    """What was `rank`'s alone, by its name there."""
    prefix = rank_name(rank, "")
    return {
        tensor.name.removeprefix(prefix): tensor
        for tensor in manifest.tensors
        if tensor.kind == "rank" and tensor.name.startswith(prefix)
    }


def rank_name(rank: int, name: str) -> str:
    """The name under which a checkpoint keeps what is one rank's alone."""
    return f"rank-{rank}/{name}"
