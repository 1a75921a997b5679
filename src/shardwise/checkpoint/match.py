"""Match the tensors that a checkpoint stores with those that a model has, before anything is read.

Apart from `load`, so that the tools that only list a checkpoint need no torch.

Names are the unmodified model's, so matching is by name; a tied tensor answers to each of its names. What a checkpoint
lacks, what it has too much and what has another shape is listed all at once. Of two tensors of a checkpoint that the
model has tied, one is too much.

>>> stored = [StoredTensor("up.weight", (), (3, 4), {}), StoredTensor("query.scale", (), (3,), {})]
>>> wanted = [WantedState("up.weight", (), (3, 4)), WantedState("up.bias", (), (3,))]
>>> result = match(stored, wanted)
>>> sorted(result.found), result.missing, result.unexpected
(['up.weight'], ('up.bias',), ('query.scale',))
>>> result.check("step-00000100")
Traceback (most recent call last):
    ...
shardwise.checkpoint.manifest.CheckpointError: step-00000100 does not fit the model: missing up.bias; unexpected \
query.scale; load with strict=False to take what fits
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from shardwise.checkpoint.manifest import CheckpointError, StoredTensor, number_kind
from shardwise.runtime.state_shards import PARAM

# How a caller of `Engine.load` goes on; `shardwise train` says what its user can do instead.
LENIENT_FIX: Final = "; load with strict=False to take what fits"
_NUM_NAMED, _MAX_COMPARED = 8, 1000


@dataclass(frozen=True)
class WantedState:
    """Describes a parameter or buffer of the model: its names, its whole shape, and what its numbers are.

    Attributes:
        name: the first of its names; `aliases` are the others.
        kind: as `number_kind` says it; empty to take any.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    kind: str = ""


@dataclass(frozen=True)
class StateMatch:
    """Holds the result of `match`: which stored tensors fit the model, and which names do not.

    Attributes:
        found: stored tensors by the model's name.
        missing: names of the model that the checkpoint lacks.
        unexpected: names of the checkpoint that the model lacks, or has tied to another.
        misshapen: a line for each tensor that both have in different shapes.
        mistyped: a line for each tensor that is of floating numbers in one of them, and of integers in the other.
    """

    found: Mapping[str, StoredTensor]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: tuple[str, ...]
    mistyped: tuple[str, ...] = ()

    def check(self, where: str, others: Sequence[str] = (), fix: str = "") -> None:
        """Raise unless everything fits.

        Args:
            others: other parts of it that do not fit, a text each.

        Raises:
            CheckpointError: something does not fit; the message lists it.
        """
        parts = []
        if self.missing:
            close = difflib.get_close_matches(self.missing[0], self.unexpected[:_MAX_COMPARED], n=1)
            parts.append(f"missing {listed_names(self.missing)}" + (f" (is {close[0]} meant?)" if close else ""))
        if self.unexpected:
            parts.append(f"unexpected {listed_names(self.unexpected)}")
        if self.misshapen:
            parts.append(f"of another shape {listed_names(self.misshapen)}")
        if self.mistyped:
            parts.append(f"of another kind of numbers {listed_names(self.mistyped)}")
        parts += others
        if parts:
            raise CheckpointError(
                "model-misfit", f"{where} does not fit the model: {'; '.join(parts)}{LENIENT_FIX}{fix}"
            )


def match(stored: Sequence[StoredTensor], wanted: Sequence[WantedState]) -> StateMatch:
    """Find the stored tensor of each wanted one.

    Args:
        stored: parameters and buffers of a checkpoint.
        wanted: all that the checkpoint should have of the model.
    """
    by_name = {name: tensor for tensor in stored for name in (tensor.name, *tensor.aliases)}
    found: dict[str, StoredTensor] = {}
    missing, misshapen, mistyped = [], [], []
    used: set[str] = set()
    tied: dict[str, str] = {}
    for each in wanted:
        name = next((name for name in (each.name, *each.aliases) if name in by_name), None)
        if name is None:
            missing.append(each.name)
            continue
        tensor = by_name[name]
        used.add(tensor.name)
        tied.update(dict.fromkeys((each.name, *each.aliases), each.name))
        values = tensor.states.get(PARAM)
        if tensor.shape != each.shape:
            misshapen.append(f"{each.name} ({tensor.shape} there, {each.shape} in the model)")
        elif values is not None and each.kind not in ("", number_kind(values.dtype)):
            mistyped.append(f"{each.name} ({values.dtype} there, {each.kind} in the model)")
        else:
            found[each.name] = tensor
    unexpected = tuple(
        f"{tensor.name} (tied to {tied[tensor.name]} in the model)" if tensor.name in tied else tensor.name
        for tensor in stored
        if tensor.name not in used
    )
    return StateMatch(found, tuple(missing), unexpected, tuple(misshapen), tuple(mistyped))


def listed_names(names: Sequence[str]) -> str:
    """Return a text of the first of some names, and how many more there are.

    >>> listed_names(["up", "down"])
    'up, down'
    """
    more = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
