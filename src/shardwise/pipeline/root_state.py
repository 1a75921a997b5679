"""Keeps the state that code around the units writes: buffers and attributes of modules that belong to no stage.

That code runs once for each stage. So each stage of a rank has such state of its own during a step, as it would have on
a rank of its own, and writes it once for each micro-batch; after the step the model has that of the rank's last stage.

What is computed from a value of a later stage, an earlier one cannot know: it may write such state, but not read it in
a later forward. The first training step shows who reads what, and whether the last stage has found something else.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from shardwise.config.resolve import ConfigError
from shardwise.runtime.class_swap import watch_attributes
from shardwise.runtime.forward_state import MISSING, ForwardState, PassRecord, put_attributes
from shardwise.runtime.forward_values import CONSTANTS
from shardwise.runtime.pinned_memory import memory_of
from shardwise.runtime.torch_private import is_fake, pytree

_FIX: Final = (
    "compute it in the module that reads it, write it from the inputs before the units run, or use mesh.dp_shard with "
    "zero.stage=3 in place of mesh.pp"
)

Place = tuple[int, str]
"""Names an attribute: the id of the dict that holds it, and its name."""


class Meeting(Protocol):
    """Lets the ranks of a pipeline compare notes."""

    def compare(self, note: str, judge: Callable[[Mapping[int, str]], str], subject: str) -> str:
        """Give this rank's note; return what the first rank has found in those of all ranks."""


@dataclass
class _StageNote:
    """Says what the forwards of a stage have done with the state.

    Attributes:
        num_calls: of units, until the stage's last one has run.
        reads: what is read before that and not written first: a digest of it after the step, by label.
        writes: what is written: the number of calls of units before the last access, and a digest after the step.
    """

    num_calls: int = 0
    reads: dict[str, str] = field(default_factory=dict)
    writes: dict[str, tuple[int, str]] = field(default_factory=dict)

    def stale(self, last: Mapping[str, tuple[int, str]], own: Mapping[str, str]) -> list[str]:
        """Return what the last stage has written after this stage's units, and this one has not, or not in that way."""
        return sorted(
            label
            for label, (num_calls, digest) in last.items()
            if num_calls >= self.num_calls and own.get(label, digest) != digest
        )


@dataclass(eq=False)
class _Written:
    """Holds an attribute that a step has written.

    Attributes:
        attributes: that have it.
        original: what it was before the step.
        base: the same contents, for the stages that have not written it yet.
        is_in_place: the step wrote into the original.
    """

    attributes: dict[str, Any]
    original: Any
    base: Any
    is_in_place: bool


class RootState:
    """Holds the state of the modules around the units by stage.

    Args:
        model: the whole model.
        units: the modules of all units.
        held: the stages of this rank.
        num_stages: of the pipeline.
    """

    def __init__(self, model: nn.Module, units: Sequence[nn.Module], held: Sequence[int], num_stages: int) -> None:
        inner = {id(module) for unit in units for module in unit.modules()}
        outside = [(name, module) for name, module in model.named_modules() if id(module) not in inner]
        self._modules = {f"{name}." if name else "": module for name, module in outside}  # by the prefix of their names
        self._state = ForwardState(model, left_out=inner)
        self._held, self._last, self._num_stages = sorted(held), max(held), num_stages
        self._written: dict[Place, _Written] = {}
        self._own: dict[int, dict[Place, Any]] = {}
        self._notes = {stage: _StageNote() for stage in held}
        self._stale: dict[int, frozenset[str]] = {}
        self._is_agreed = False
        self._pass = ExitStack()
        self._record: PassRecord | None = None
        self._stage = 0
        self._num_calls: Callable[[], int] = int
        self._accessed: dict[str, int] = {}
        self._is_past_units = False

    def begin(self, stage: int, num_calls: Callable[[], int]) -> None:
        """Begin the forward of a stage, with the state that it has left.

        Args:
            stage: of this rank.
            num_calls: counts the calls of units in the forward.
        """
        self._stage, self._num_calls, self._is_past_units = stage, num_calls, False
        is_watched = not self._is_agreed or bool(self._stale.get(stage))
        if is_watched:
            self._accessed = {}
            for prefix, module in self._modules.items():
                self._pass.callback(watch_attributes(module, self._watch(prefix)))
        if is_watched or len(self._held) > 1:
            for place, value in self._own.get(stage, {}).items():
                put_attributes(self._written[place].attributes, {place[1]: value})
            self._record = self._pass.enter_context(self._state.first())

    def end_units(self) -> None:
        """Take note that the stage's last unit has run."""
        self._is_past_units = True
        self._notes[self._stage].num_calls = self._num_calls()

    def end(self) -> None:
        """End the forward of a stage: keep what it has written, and give the other stages what they had."""
        record, self._record = self._record, None
        self._pass.close()
        if record is None:
            return
        own, made = self._own.setdefault(self._stage, {}), dict[int, Any]()
        for attributes, name, before in record.written():
            place, now = (id(attributes), name), attributes.get(name, MISSING)
            if place not in own:
                base = before.remake(made) if len(self._held) > 1 else None
                known = self._written.setdefault(
                    place, _Written(attributes, before.value, base, is_in_place=now is before.value)
                )
                known.base = base
            own[place] = now
            if not self._is_agreed and (label := self._label(attributes, name)):
                self._notes[self._stage].writes[label] = (self._accessed.get(label, self._num_calls()), "")
        for place in own:
            written = self._written[place]
            own[place] = written.attributes.get(place[1], MISSING)
            if len(self._held) > 1:
                put_attributes(written.attributes, {place[1]: written.base})

    def end_step(self) -> None:
        """Give the model the state that the rank's last stage has left."""
        own = self._own.get(self._last, {})
        for place, written in self._written.items() if len(self._held) > 1 else ():
            now = own.get(place, written.base)
            if written.is_in_place and now is not written.original and _fill(written.original, now):
                now = written.original
            put_attributes(written.attributes, {place[1]: now})
        self._written.clear()
        self._own.clear()

    def agree(self, meeting: Meeting) -> None:
        """Compare in the first training step what the stages have read and written.

        Args:
            meeting: of the ranks of the pipeline.

        Raises:
            ConfigError: a stage has read what only a later one can write.
        """
        if self._is_agreed:
            return
        self._is_agreed = True
        digests = {stage: self._digests(stage) for stage in self._held}
        for stage, note in self._notes.items():
            note.reads = {label: digests[stage][label] for label in note.reads if label in digests[stage]}
            note.writes = {label: (num, digests[stage].get(label, "")) for label, (num, _) in note.writes.items()}
            if stage != self._num_stages - 1:
                note.writes = {}
        text = json.dumps({stage: asdict(note) for stage, note in self._notes.items()})
        found = json.loads(meeting.compare(text, _judge, "the state of the stages"))
        if found["stale"]:
            raise stale_state(*found["stale"])
        last = {label: (num, digest) for label, (num, digest) in found["writes"].items()}
        for stage, note in self._notes.items():
            self._stale[stage] = frozenset(note.stale(last, digests[stage]))

    def _watch(self, prefix: str) -> Callable[[nn.Module, str, bool], None]:
        def watch(module: nn.Module, name: str, is_write: bool) -> None:
            label = f"{prefix}{name}"
            is_first = label not in self._accessed
            self._accessed[label] = self._num_calls()
            if not is_first or is_write or self._is_past_units or self._stage == self._num_stages - 1:
                return
            self._notes[self._stage].reads[label] = ""
            value = module._buffers.get(name, vars(module).get(name))
            is_left = any(isinstance(each, Tensor) and (is_fake(each) or each.is_meta) for each in _leaves(value))
            if is_left or label in self._stale.get(self._stage, ()):
                raise stale_state(label, self._stage)

        return watch

    def _label(self, attributes: dict[str, Any], name: str) -> str:
        """Return the full name of an attribute; none for one of a module that is not registered."""
        for prefix, module in self._modules.items():
            if attributes is vars(module) or attributes is module._buffers:
                return f"{prefix}{name}"
        return ""

    def _digests(self, stage: int) -> dict[str, str]:
        """Return a digest of each attribute, as a stage has left it."""
        own = self._own.get(stage, {})
        return {
            f"{prefix}{name}": _digest(own.get((id(attributes), name), value))
            for prefix, module in self._modules.items()
            for attributes in (vars(module), module._buffers)
            for name, value in attributes.items()
        }


def stale_state(label: str, stage: int) -> ConfigError:
    """Return the error for state that a stage reads and cannot know."""
    return ConfigError(
        "state-over-stages",
        f"the forward of stage {stage} reads {label}, which was written after the units of this stage had run: it "
        f"follows from values of a later stage, and under mesh.pp no stage sends them back; {_FIX}",
    )


def _judge(notes: Mapping[int, str]) -> str:
    stages = {int(stage): note for text in notes.values() for stage, note in json.loads(text).items()}
    last = {label: (num, digest) for label, (num, digest) in stages[max(stages)]["writes"].items()}
    for stage, note in sorted(stages.items()):
        stale = _StageNote(note["num_calls"]).stale(last, note["reads"])
        if stale and stage != max(stages):
            return json.dumps({"stale": (stale[0], stage)})
    return json.dumps({"stale": None, "writes": last})


def _leaves(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) else pytree.tree_leaves(value)


def _digest(value: Any, depth: int = 4) -> str:
    """Return a hash of a value's contents; objects whose contents are not known all have one."""
    if isinstance(value, Tensor):
        if is_fake(value) or value.is_meta:
            return "not here"
        with torch.no_grad():
            contents = bytes(memory_of(value.detach().cpu().contiguous().view(-1)))
        return hashlib.blake2b(contents, digest_size=16).hexdigest()
    if isinstance(value, bool | int | float | complex | str | bytes | type(None)):
        return repr(value)
    if isinstance(value, CONSTANTS) or not depth:
        return ""
    if isinstance(value, dict):
        return "".join(f"{key!r}:{_digest(each, depth - 1)}," for key, each in value.items())
    if isinstance(value, list | tuple | deque):
        return f"{len(value)}:" + ",".join(_digest(each, depth - 1) for each in value)
    return _digest(vars(value), depth - 1) if hasattr(value, "__dict__") else ""


def _fill(original: Any, now: Any) -> bool:
    """Give an object the contents of another; return whether that can be."""
    if type(now) is not type(original):
        return False
    if isinstance(now, Tensor):
        if now.shape != original.shape or original.is_meta or now.is_meta:
            return False
        with torch.no_grad():
            original.copy_(now)
    elif isinstance(now, list | deque):
        kept = [*now]
        original.clear()
        original.extend(kept)
    elif isinstance(now, set | dict):
        original.clear()
        original.update(now)
    elif hasattr(now, "__dict__"):
        vars(original).clear()
        vars(original).update(vars(now))
    else:
        return False
    return True
