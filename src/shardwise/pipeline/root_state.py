"""Keeps the state that code around the units writes: buffers and attributes of modules that belong to no stage.

That code runs once for each stage. So each stage of a rank has such state of its own during a step, as it would have on
a rank of its own, and writes it once for each micro-batch; after the step the model has that of the rank's last stage.

What is computed from a value of a later stage, an earlier one cannot know: it may write such state, and in a later
forward log it, clear it or add to it, but not let it reach the results. The first training step shows who reads what,
and whether the last stage has found something else. After it the last stage looks whether its forward writes what an
earlier stage reads and no stage had written till then.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self

import torch
from torch import Tensor, nn

from shardwise.comm.agreement import Agreement
from shardwise.config.errors import ConfigError
from shardwise.pipeline.attribute_reads import AttributeReads, Site, site_of
from shardwise.runtime.class_swap import accessing_frame, watch_attributes
from shardwise.runtime.forward_state import MISSING, ForwardState, PassRecord, put_attributes, registered_buffers
from shardwise.runtime.forward_values import CONSTANTS
from shardwise.runtime.pinned_memory import memory_of
from shardwise.runtime.torch_private import hook_dicts, is_fake, pytree, version
from shardwise.runtime.user_hooks import hook_contents, hook_dicts_of

NO_PIPELINE: Final = "use mesh.dp_shard with zero.stage=3 in place of mesh.pp"
FIX: Final = (
    "compute it in the module that reads it, write it from the inputs before the units run, or "
    f"{NO_PIPELINE}; what is only for a log, read it after the units, or in the call that logs it"
)

Place = tuple[int, str]
"""Names an attribute: the id of the dict that holds it, and its name."""


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
class _Kept:
    """Holds the value of an attribute, and its own parts where it is a container or an object.

    An object stays the same one, to which hooks and closures may refer; its parts are exchanged.
    """

    value: Any
    parts: Any = None

    @classmethod
    def of(cls, value: Any, parts_of: Any = None) -> Self:
        """Keep a value, with the parts of another one of its kind where that is given."""
        return cls(value, _parts(value if parts_of is None else parts_of))

    def put(self, attributes: dict[str, Any], name: str) -> None:
        """Give the value its parts, and the attribute its value."""
        if self.parts is not None:
            _fill(self.value, self.parts)
        put_attributes(attributes, {name: self.value})


@dataclass(eq=False)
class _Written:
    """Holds an attribute that a step has written.

    Attributes:
        original: what it was before the step.
        base: the same, for the stages that have not written it yet.
        is_in_place: the step wrote into the original.
    """

    attributes: dict[str, Any]
    original: Any
    base: _Kept
    is_in_place: bool


@dataclass
class _Accesses:
    """Holds the accesses to the state.

    Attributes:
        calls: the number of calls of units before the last access in this forward, by label.
        fresh: what this forward has written or cleared first.
        reads: the places that read it before the last unit, in any forward.
        taken: what takes over values that only the last stage knows.
    """

    calls: dict[str, int] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)
    reads: AttributeReads = field(default_factory=AttributeReads)
    taken: set[str] = field(default_factory=set)

    def begin(self) -> None:
        """Begin a forward."""
        self.calls, self.fresh = {}, set()


class RootState:
    """Holds the state of the modules around the units by stage."""

    def __init__(self, model: nn.Module, units: Sequence[nn.Module], held: Sequence[int], num_stages: int) -> None:
        inner = {id(module) for unit in units for module in unit.modules()}
        outside = [(name, module) for name, module in model.named_modules() if id(module) not in inner]
        self._modules = {  # with what holds their values, by the prefix of their names
            f"{name}." if name else "": (module, (vars(module), registered_buffers(module))) for name, module in outside
        }
        self._state = ForwardState(model, left_out=inner)
        self._held, self._last, self._num_stages = sorted(held), max(held), num_stages
        self._written: dict[Place, _Written] = {}
        self._own: dict[int, dict[Place, _Kept]] = {}
        # Those on a unit run in its stage, and once more in the last one, where all of them have run after a step.
        seen_twice = units if max(held) == num_stages - 1 else ()
        of_units = [hooks for unit in seen_twice for module in unit.modules() for hooks in hook_dicts(module)[:2]]
        self._hooks = [*hook_dicts_of(module for _, module in outside), *of_units]
        self._put_hooks: Callable[[], None] | None = None  # what their variables have before the step
        self._own_hooks: dict[int, Callable[[], None]] = {}
        self._notes = {stage: _StageNote() for stage in held}
        self._stale: dict[int, frozenset[str]] = {}
        self._is_agreed = False
        self._pass = ExitStack()
        self._record: PassRecord | None = None
        self._stage = 0
        self._num_calls: Callable[[], int] = int
        self._accesses = _Accesses()
        self._is_past_units = False
        # What earlier stages read first, and the last one did not write.
        self._quiet: dict[str, tuple[dict[str, Any], str]] = {}
        self._before_units: dict[str, tuple[Any, ...]] = {}
        self._late = ""

    def begin(self, stage: int, num_calls: Callable[[], int]) -> None:
        """Begin the forward of a stage, with the state that it has left.

        Args:
            num_calls: counts the calls of units in the forward.
        """
        self._stage, self._num_calls, self._is_past_units = stage, num_calls, False
        is_watched = not self._is_agreed or bool(self._stale.get(stage))
        if is_watched:
            self._accesses.begin()
            for prefix, (module, _) in self._modules.items():
                self._pass.callback(watch_attributes(module, self._watch(prefix)))
        if is_watched or len(self._held) > 1:
            for place, kept in self._own.get(stage, {}).items():
                kept.put(self._written[place].attributes, place[1])
            self._record = self._pass.enter_context(self._state.first())
        if len(self._held) > 1 and any(self._hooks):
            self._put_hooks = self._put_hooks or hook_contents(self._hooks)
            self._own_hooks.get(stage, self._put_hooks)()

    def begin_units(self) -> None:
        """Take note that the forward calls its first unit."""
        if self._quiet and self._stage == self._num_stages - 1:
            self._before_units = self._marks()

    def end_units(self) -> None:
        """Take note that the stage's last unit has run."""
        self._is_past_units = True
        self._notes[self._stage].num_calls = self._num_calls()

    def end(self) -> None:
        """End the forward of a stage: keep what it has written, and give the other stages what they had."""
        record, self._record = self._record, None
        self._pass.close()
        if self._before_units:
            marks, self._before_units = self._before_units, {}
            changed = (label for label, now in self._marks().items() if not is_same(now, marks[label]))
            self._late = self._late or next(changed, "")
        if record is None:
            return
        # [Note: State around the units]
        # The stages of a rank run the code around the units in turn. So what this one has written is put away for its
        # next forward, and the other stages find what there was before it, as on ranks of their own: otherwise a
        # counter would count once for each stage.
        if self._put_hooks is not None:
            self._own_hooks[self._stage] = hook_contents(self._hooks)
        own, made = self._own.setdefault(self._stage, {}), dict[int, Any]()
        for attributes, name, before in record.written():
            place, is_in_place = (id(attributes), name), attributes.get(name, MISSING) is before.value
            if place not in own:
                base = before.remake(made) if len(self._held) > 1 else before.value
                stays = is_in_place and _parts(base) is not None
                kept = _Kept.of(before.value, base) if stays else _Kept.of(base)
                self._written.setdefault(place, _Written(attributes, before.value, kept, is_in_place)).base = kept
                own[place] = kept
            if not self._is_agreed and (label := self._label(attributes, name)):
                self._notes[self._stage].writes[label] = (self._accesses.calls.get(label, self._num_calls()), "")
        for place in own:
            written = self._written[place]
            own[place] = _Kept.of(written.attributes.get(place[1], MISSING))
            if len(self._held) > 1:
                written.base.put(written.attributes, place[1])
        if self._put_hooks is not None:
            self._put_hooks()

    def end_step(self) -> None:
        """Give the model the state that the rank's last stage has left."""
        own = self._own.get(self._last, {})
        for place, written in self._written.items() if len(self._held) > 1 else ():
            kept, original = own.get(place, written.base), written.original
            if written.is_in_place and isinstance(original, Tensor) and isinstance(kept.value, Tensor):
                with torch.no_grad():
                    kept = _Kept(original.copy_(kept.value) if kept.value is not original else original)
            kept.put(written.attributes, place[1])
        if self._last in self._own_hooks:
            self._own_hooks[self._last]()
        self._put_hooks = None
        self._own_hooks.clear()
        self._written.clear()
        self._own.clear()

    def agree(self, agreement: Agreement) -> None:
        """Compare in the first training step what the stages have read and written.

        Args:
            agreement: of the ranks of the pipeline.

        Raises:
            ConfigError: a stage has read what only a later one can write.
        """
        if self._late:
            raise stale_state(self._late, 0)
        if self._is_agreed:
            return
        self._is_agreed = True
        digests = {stage: self._digests(stage) for stage in self._held}
        for stage, note in self._notes.items():
            reads = [
                label for label in note.reads if label in digests[stage] and self._accesses.reads.kept(label) is None
            ]
            note.reads = {label: digests[stage][label] for label in reads}
            note.writes = {label: (num, digests[stage].get(label, "")) for label, (num, _) in note.writes.items()}
            if stage != self._num_stages - 1:
                note.writes = {}
        text = json.dumps({stage: asdict(note) for stage, note in self._notes.items()})
        found = json.loads(agreement.compare("the state of the stages", text, _judge))
        if found["stale"]:
            raise stale_state(*found["stale"])
        last = {label: (num, digest) for label, (num, digest) in found["writes"].items()}
        for stage, note in self._notes.items():
            stale = note.stale(last, digests[stage])
            taken = {label for name in stale for label in self._accesses.reads.kept(name) or ()} - {*stale}
            self._stale[stage] = frozenset({*stale, *taken})
            self._accesses.taken.update(taken)
        if self._last == self._num_stages - 1:
            self._quiet = {
                f"{prefix}{name}": (attributes, name)
                for prefix, (_, dicts) in self._modules.items()
                for attributes in dicts
                for name in attributes
                if f"{prefix}{name}" in found["reads"]
            }

    def _marks(self) -> dict[str, tuple[Any, ...]]:
        """Return what tells whether an attribute was written, by label."""
        return {label: mark(attributes.get(name)) for label, (attributes, name) in self._quiet.items()}

    def _watch(self, prefix: str) -> Callable[[nn.Module, str, bool], None]:
        def watch(module: nn.Module, name: str, is_write: bool) -> None:
            label = f"{prefix}{name}"
            is_first = label not in self._accesses.calls
            self._accesses.calls[label] = self._num_calls()
            if self._is_past_units or self._stage == self._num_stages - 1:
                return
            if is_first and is_write:
                self._accesses.fresh.add(label)
            if not is_write:
                self._look(label, name, is_first, site_of(accessing_frame()))

        return watch

    def _look(self, label: str, name: str, is_first: bool, site: Site) -> None:
        """Take note that a stage reads an attribute before its last unit has run, or refuse it."""
        _, (attributes, buffers) = self._modules[label.removesuffix(name)]
        value = buffers.get(name, attributes.get(name))
        if is_first and isinstance(value, list | dict | set | deque) and self._accesses.reads.clears(site, name):
            self._accesses.fresh.add(label)
        if not self._is_agreed:
            self._accesses.reads.note(label, site)
        if label in self._accesses.fresh and label not in self._accesses.taken:
            return
        if not self._is_agreed:
            self._notes[self._stage].reads[label] = ""
        is_left = any(isinstance(leaf, Tensor) and (is_fake(leaf) or leaf.is_meta) for leaf in _leaves(value))
        if (is_left or label in self._stale.get(self._stage, ())) and self._accesses.reads.judge(site, name) is None:
            raise stale_state(label, self._stage)

    def _label(self, attributes: dict[str, Any], name: str) -> str:
        """Return the full name of an attribute; none for one of a module that is not registered."""
        for prefix, (_, dicts) in self._modules.items():
            if any(attributes is each for each in dicts):
                return f"{prefix}{name}"
        return ""

    def _digests(self, stage: int) -> dict[str, str]:
        """Return a digest of each attribute, as a stage has left it."""
        states = self._own.get(stage, {})
        return {
            f"{prefix}{name}": digest(_value_of(states.get((id(attributes), name)), value))
            for prefix, (_, dicts) in self._modules.items()
            for attributes in dicts
            for name, value in attributes.items()
        }


def stale_state(label: str, stage: int) -> ConfigError:
    """Return the error for state that a stage reads and cannot know."""
    return ConfigError(
        "state-over-stages",
        f"the forward of stage {stage} reads {label}, which was written after the units of this stage had run: it "
        f"follows from values of a later stage, and under mesh.pp no stage sends them back; {FIX}",
    )


def _judge(notes: Mapping[int, str]) -> str:
    stages = {int(stage): note for text in notes.values() for stage, note in json.loads(text).items()}
    last = {label: (num, digest) for label, (num, digest) in stages[max(stages)]["writes"].items()}
    for stage, note in sorted(stages.items()):
        stale = _StageNote(note["num_calls"]).stale(last, note["reads"])
        if stale and stage != max(stages):
            return json.dumps({"stale": (stale[0], stage)})
    read = {label for stage, note in stages.items() if stage != max(stages) for label in note["reads"]}
    return json.dumps({"stale": None, "writes": last, "reads": sorted(read - set(last))})


def mark(value: Any) -> tuple[Any, ...]:
    """Return a value, and what writes into it change."""
    if isinstance(value, Tensor):
        return value, None if value.is_inference() else version(value), None if is_fake(value) else value.data_ptr()
    return value, len(value) if isinstance(value, list | dict | set | deque) else None


def is_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return one[0] is other[0] and one[1:] == other[1:]


def _leaves(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) else pytree.tree_leaves(value)


def digest(value: Any, depth: int = 4) -> str:
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
        return "".join(f"{key!r}:{digest(item, depth - 1)}," for key, item in value.items())
    if isinstance(value, list | tuple | deque):
        return f"{len(value)}:" + ",".join(digest(item, depth - 1) for item in value)
    return digest(vars(value), depth - 1) if hasattr(value, "__dict__") else ""


def _value_of(kept: _Kept | None, otherwise: Any) -> Any:
    """Return what digests read of a value: its parts, where it has some."""
    if kept is None:
        return otherwise
    return kept.value if kept.parts is None else kept.parts


def _parts(value: Any) -> Any:
    """Return a container or a dict that has the parts of a value; None for a value without parts."""
    if isinstance(value, (Tensor, *CONSTANTS)):
        return None
    if isinstance(value, list | deque):
        return [*value]
    if isinstance(value, dict | set):
        return value.copy()
    is_plain = hasattr(value, "__dict__") and not type(value).__module__.startswith(("torch", "functools"))
    return dict(vars(value)) if is_plain else None


def _fill(value: Any, parts: Any) -> None:
    """Give a value the parts that `_parts` returned."""
    if isinstance(value, list | deque):
        value.clear()
        value.extend(parts)
    else:
        inner = value if isinstance(value, dict | set) else vars(value)
        inner.clear()
        inner.update(parts)
