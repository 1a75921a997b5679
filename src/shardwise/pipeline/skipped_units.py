"""Stands in for units that a stage skips: what their forwards leave is not there, and reading it is an error.

A unit's forward may set attributes of its own, such as its attention weights or its share of an auxiliary loss, and
write into what others hold too: a list, a counter, the containers that it is given. Where the model's code or the loss
reads such a value on a stage that skips the unit, the value is that of another time, or none.

- Tensors that a unit sets are placeholders there, as its output is. So what is computed from one is refused where it
  reaches a unit that runs, or the loss, and may be logged or kept.
- All else shows in the first training step, and in the first evaluation: each stage watches what its units' forwards
  write, and what its code reads of units that it skips, and the stages compare. What reaches no result may be read.
  After that a stage watches what is written elsewhere, and looks whether its units write what others read.
"""

from __future__ import annotations

import copy
import inspect
import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.comm.agreement import Agreement
from shardwise.config.errors import ConfigError
from shardwise.pipeline.attribute_reads import AttributeReads, own_classes, site_of
from shardwise.pipeline.root_state import FIX, NO_PIPELINE, digest, is_same, mark
from shardwise.runtime.class_swap import Call, accessing_frame, set_attribute, watch_attributes
from shardwise.runtime.forward_state import MISSING, ForwardState, is_state, registered_buffers
from shardwise.runtime.forward_values import CONSTANTS, ValueBefore, Walk, value_before
from shardwise.runtime.placeholders import PlaceholderTensors
from shardwise.runtime.torch_private import pytree
from shardwise.runtime.user_hooks import without_user_hooks

_ALL_BUFFERS: Final = "_buffers"
_CLASS: Final = "the class variable "
_VARIABLE: Final = "the variable "
_OF_CODE: Final = (_CLASS, _VARIABLE)
_DEPTH: Final = 3  # of containers and objects in an attribute in which one that others hold too is looked for


class CutError(ConfigError):
    """Says that a model cannot be cut: a value other than the output of the unit before the cut crosses it."""


@dataclass
class _StageNote:
    """Says what the forwards of a stage have shown.

    Attributes:
        writes: what its units have written, by label: the last forward that did, and a digest if that is the first.
        containers: arguments of its units in which these leave something that they do not return.
        reads: what its code has read of units that it skips.
    """

    num_forwards: int = 0
    writes: dict[str, tuple[int, str]] = field(default_factory=dict)
    containers: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)

    def begin(self) -> None:
        """Begin a forward."""
        self.num_forwards += 1

    def is_kept(self, label: str) -> bool:
        """Say whether a value was written once, as a table is that serves all forwards."""
        return self.num_forwards > 1 and label in self.writes and self.writes[label][0] == 1


class SkippedUnits:
    """Watches what units leave and what stages that skip them read of it.

    Args:
        names: of the units' modules, in the order of their calls.
        ranges: the indices of each stage's units.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        ranges: Sequence[tuple[int, int]],
        held: Sequence[int],
        placeholders: PlaceholderTensors,
    ) -> None:
        self._model, self._names, self._ranges = model, names, [range(*pair) for pair in ranges]
        self._modules = [model.get_submodule(name) for name in names]
        self._units_of: dict[int, set[int]] = {}  # by id of a module, the indices of the units that it is in
        for index, unit in enumerate(self._modules):
            for each in unit.modules():
                self._units_of.setdefault(id(each), set()).add(index)
        self._outputs = SkippedOutputs(self._modules, placeholders)
        self._placeholders = placeholders
        self._notes = {stage: _StageNote() for stage in held}
        self._reads = {stage: AttributeReads() for stage in held}
        self._states: dict[int, ForwardState] = {}  # by id of a unit
        self._agreed: set[bool] = set()  # in training, in evaluation
        self._left: dict[str, int] = {}  # what units write in each forward, with a stage of which one does
        self._quiet: dict[int, list[_Quiet]] = {}  # by the index of a unit, what others read of it and it did not write
        # By the prefix of their names, the modules and what holds their values.
        self._places: dict[str, tuple[nn.Module, tuple[dict[str, Any], ...]]] = {}
        self._is_open = True  # the stages have not compared yet what there is in forwards of this mode
        self._late: _Quiet | None = None
        self._stage = 0
        self._is_past_units = False  # reads do not count
        self._shown = ""
        self._undo = ExitStack()

    @property
    def hint(self) -> str:
        """Name the attribute of which the forward has read a placeholder, if it has."""
        return f", such as {self._shown}" if self._shown else ""

    def begin(self, stage: int) -> None:
        """Begin the forward of a stage."""
        self._stage, self._is_past_units, self._shown = stage, False, ""
        self._is_open = self._model.training not in self._agreed
        if self._is_open:
            self._notes[stage].begin()
            self._places = {
                f"{name}." if name else "": (module, (vars(module), registered_buffers(module)))
                for name, module in self._model.named_modules()
            }
        for prefix in self._places if self._is_open else {_parted(label)[0] for label in self._left}:
            module, _ = self._places[prefix]
            if not self._is_own(module, stage):  # which may be compiled code, whose class stays
                self._undo.callback(watch_attributes(module, self._watch(prefix)))

    def end_units(self) -> None:
        """Take note that the stage's last unit has run."""
        self._is_past_units = self._stage != len(self._ranges) - 1

    def end(self) -> None:
        """End the forward of a stage: units have the attributes that they had."""
        self._undo.close()
        self._outputs.remove()

    def skip(self, module: nn.Module, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Set placeholders on a unit that is skipped.

        Args:
            kind: its class as the user built it.
            args: the arguments that it was called with.
        """
        is_past, self._is_past_units = self._is_past_units, True  # what it reads for that does not count
        self._outputs.set_on(module, kind, args, kwargs)
        self._is_past_units = is_past

    def run(self, index: int, own: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit of the stage, and take note of what it writes."""
        if not self._is_open:
            quiets = self._quiet.get(index, ())
            marks = [quiet.mark() for quiet in quiets]
            output = own(*args, **kwargs)
            for quiet, mark_before in zip(quiets, marks, strict=True):
                self._late = self._late or (None if is_same(quiet.mark(), mark_before) else quiet)
            return output
        module = self._modules[index]
        values = [*args, *kwargs.values()]
        held = [value_before(value, Walk(copies=False)) for value in values]
        shared = [*_shared(module)]
        with self._states.setdefault(id(module), ForwardState(module)).first() as record:
            output = own(*args, **kwargs)
        for attributes, name, before in record.written():
            now = attributes.get(name, MISSING)
            self._note_write(self._label(attributes, name), now)
            if now is before.value:
                for label in self._aliases(now):
                    self._note_write(label, now)
        for label, place, name, number in shared:
            if number.differs(place.get(name)):
                self._note_write(label, place.get(name))
        returned = {id(container) for container in _containers(output)}
        names = [*[*inspect.signature(module.forward).parameters][: len(args)], *kwargs]
        for name, value, argument in zip(names, values, held, strict=False):
            if _is_container(value) and id(value) not in returned and argument.differs(value):
                self._note_container(f"argument {name} of {self._names[index]}", value)
        return output

    def agree(self, agreement: Agreement) -> None:
        """Compare after the first training step, and after the first evaluation, what stages have written and read.

        Args:
            agreement: of the ranks of the pipeline.

        Raises:
            ConfigError: a stage has read what a unit of another one has left; or a later step has shown that.
        """
        if self._late is not None:
            raise self._left_value(self._late.label, self._late.reader)
        if not self._is_open:
            return
        self._agreed.add(self._model.training)
        self._is_open = False
        own = {stage: replace(note, reads=self._reads[stage].labels()) for stage, note in self._notes.items()}
        text = json.dumps({stage: asdict(note) for stage, note in own.items()})
        found = json.loads(agreement.compare("what the units of stages leave", text, _merged))
        notes = {int(stage): _StageNote(**note) for stage, note in found.items()}
        for stage, note in notes.items():
            of_modules = (label for label in note.writes if not label.startswith(_OF_CODE))
            self._left.update({label: stage for label in of_modules if not note.is_kept(label)})
        self._states.clear()
        if any(note.writes or note.containers for note in notes.values()):
            bad = (self._find(reader, notes) for reader in self._notes)
            mine = json.dumps(next(filter(None, bad), None))
            worst = json.loads(agreement.compare("what stages read of units that they skip", mine, _worst))
            if worst is not None:
                raise self._left_value(worst[0], worst[1])
            if text := next((text for note in notes.values() for text in note.containers), ""):
                raise CutError(
                    "cut-value-not-sent",
                    f"{text} is a container into which the unit writes; it does not return it, so later stages do not "
                    f"get what it has written; return it with the unit's output, or {NO_PIPELINE}",
                )
        read = {label: stage for stage, note in notes.items() for label in note.reads if label not in self._left}
        self._keep_quiet(read)

    def explain(self, error: Exception) -> ConfigError | None:
        """Return the error to raise for that of a missing attribute of a skipped unit; None for others."""
        module, name = getattr(error, "obj", None), getattr(error, "name", None)
        if not isinstance(error, AttributeError) or not isinstance(module, nn.Module) or name is None:
            return None
        if not self._units_of.get(id(module)) or self._is_own(module, self._stage):
            return None
        prefix = next(prefix for prefix, (each, _) in self._places.items() if each is module)
        return self._left_value(f"{prefix}{name}", self._stage)

    def _is_own(self, module: nn.Module, stage: int) -> bool:
        """Say whether a module is in units of a stage, and in no others."""
        units = self._units_of.get(id(module), set())
        return bool(units) and units <= {*self._ranges[stage]}

    def _watch(self, prefix: str) -> Callable[[nn.Module, str, bool], None]:
        def watch(module: nn.Module, name: str, is_write: bool) -> None:
            if is_write or self._is_past_units or not (is_state(name) or name == _ALL_BUFFERS):
                return
            label = f"{prefix}{name}"
            attributes, buffers = self._places[prefix][1]
            value = attributes.get(name, buffers.get(name))
            leaves = [value] if isinstance(value, Tensor) else pytree.tree_leaves(value)
            if leaves and all(map(self._placeholders.is_one, leaves)):
                self._shown = label
                return
            reads, site = self._reads[self._stage], site_of(accessing_frame())
            if self._is_open:
                reads.note(label, site)
            # A tensor with a graph is of another forward: its backward would fail or mix the two.
            has_graph = any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in leaves)
            is_left = self._is_left(label, self._stage) or (has_graph and id(module) in self._units_of)
            if is_left and reads.judge(site, name) is None:
                raise self._left_value(label, self._stage)

        return watch

    def _is_left(self, label: str, reader: int) -> bool:
        """Say whether units of other stages write an attribute."""
        prefix, name = _parted(label)
        if name == _ALL_BUFFERS:
            return any(self._is_left(f"{prefix}{each}", reader) for each in self._places[prefix][1][1])
        return self._left.get(label, reader) != reader

    def _note_write(self, label: str, value: Any) -> None:
        note = self._notes[self._stage]
        if label:
            is_first = note.num_forwards == 1
            note.writes[label] = note.num_forwards, digest(value) if is_first else ""

    def _note_container(self, text: str, value: Any) -> None:
        labels = self._aliases(value)
        for label in labels:
            self._note_write(label, value)
        containers = self._notes[self._stage].containers
        if not labels and text not in containers and self._stage != len(self._ranges) - 1:
            containers.append(text)

    def _find(self, reader: int, notes: Mapping[int, _StageNote]) -> tuple[str, int] | None:
        """Return what a stage reads though units of another one write it, if anything, and the stage."""
        for writer, note in notes.items():
            for label, (_, value) in note.writes.items() if writer != reader else ():
                own = [notes[stage] for stage in self._notes if notes[stage].is_kept(label)]
                is_table = note.is_kept(label) and any(each.writes[label][1] == value for each in own)
                if not is_table and self._reaches(reader, label):  # a table this rank has made, too
                    return label, reader
        return None

    def _reaches(self, reader: int, label: str) -> bool:
        """Say whether a stage reads an attribute so that it may reach the results."""
        if label.startswith(_OF_CODE):
            return self._reaches_in_code(reader, label)
        prefix, name = _parted(label)
        (module, (_, buffers)), reads = self._places[prefix], self._reads[reader]
        if self._is_own(module, reader):
            return not reads.are_harmless_in(type(module), name)
        labels = [label, f"{prefix}{_ALL_BUFFERS}"] if name in buffers else [label]
        return any(reads.kept(label) is None for label in labels)

    def _reaches_in_code(self, reader: int, label: str) -> bool:
        """Say whether code of a stage lets a number of a class or of a Python module reach its results."""
        name, is_variable, reads = label.rpartition(".")[2], label.startswith(_VARIABLE), self._reads[reader]
        own = {*self._ranges[reader]}
        modules = [module for module in self._model.modules() if self._units_of.get(id(module), own) & own]
        return any(not reads.are_harmless_in(kind, name, is_variable) for kind in set(map(type, modules)))

    def _keep_quiet(self, read: Mapping[str, int]) -> None:
        """Keep what others read of this rank's units, with a stage that does."""
        own = {index for stage in self._notes for index in self._ranges[stage]}
        for prefix, (module, dicts) in self._places.items():
            for index in self._units_of.get(id(module), set()) & own if read else ():
                labels = {f"{prefix}{name}": (attributes, name) for attributes in dicts for name in attributes}
                found = [_Quiet(label, *labels[label], read[label]) for label in labels.keys() & read.keys()]
                self._quiet.setdefault(index, []).extend(found)

    def _label(self, attributes: dict[str, Any], name: str) -> str:
        """Return the full name of an attribute; none for one of a module that is not registered."""
        dicts = ((prefix, each) for prefix, (_, both) in self._places.items() for each in both)
        return next((f"{prefix}{name}" for prefix, each in dicts if each is attributes), "")

    def _aliases(self, value: Any) -> list[str]:
        """Return the full names of the attributes in which a container, an object or a tensor is."""
        wanted = {id(value)} if isinstance(value, Tensor) else {id(container) for container in _containers(value)}
        return [
            f"{prefix}{name}"
            for prefix, (_, dicts) in self._places.items()
            for attributes in dicts
            for name, each in attributes.items()
            if is_state(name) and any(id(part) in wanted for part in (each, *_containers(each)))
        ]

    def _left_value(self, label: str, reader: int) -> ConfigError:
        unit = next((name for name in self._names if label.startswith(f"{name}.")), "")
        if not unit or self._names.index(unit) in self._ranges[reader]:
            return ConfigError(
                "state-over-stages",
                f"the forward of stage {reader} reads {label}, into which units of another stage write too, and no "
                f"stage sends that; {FIX}",
            )
        return CutError(
            "cut-value-not-sent",
            f"the forward of stage {reader} reads {label.removeprefix(f'{unit}.')} of {unit}, which runs on another "
            f"stage; what a unit leaves on itself is not sent; return it with the unit's output, read it in a log "
            f"only, or {NO_PIPELINE}",
        )


def _shared(unit: nn.Module) -> Iterator[tuple[str, Mapping[str, Any], str, ValueBefore]]:
    """Yield numbers that the classes and the Python modules of a unit have, alone or in a dict.

    Yields:
        the label, what holds it, the name there, and the value.
    """
    kinds = {kind for module in unit.modules() for kind in own_classes(type(module), with_joined=True)}
    places = [(f"{_CLASS}{kind.__qualname__}.", vars(kind)) for kind in kinds]
    modules = {name: sys.modules[name] for kind in kinds if (name := kind.__module__) in sys.modules}
    places += [(f"{_VARIABLE}{name}.", MappingProxyType(vars(module))) for name, module in modules.items()]
    for prefix, values in places:
        for name, value in [*values.items()]:
            parts = [*value.values()] if type(value) is dict else [value]
            if parts and not name.startswith("__") and all(type(item) in (int, float, Tensor) for item in parts):
                yield f"{prefix}{name}", values, name, value_before(value, Walk())


def _parted(label: str) -> tuple[str, str]:
    """Return the prefix of an attribute's full name, and the name."""
    prefix, dot, name = label.rpartition(".")
    return f"{prefix}{dot}", name


@dataclass(frozen=True)
class _Quiet:
    """Names an attribute that other stages read and its unit has not written."""

    label: str
    attributes: dict[str, Any]
    name: str
    reader: int

    def mark(self) -> tuple[Any, ...]:
        """Return what tells whether it was written."""
        return mark(self.attributes.get(self.name))


def _is_container(value: Any) -> bool:
    """Say whether code may leave something in a value; a cache of transformers has an entry for each block."""
    if isinstance(value, (Tensor, *CONSTANTS)):
        return False
    has_attributes = hasattr(value, "__dict__") and not type(value).__module__.startswith(("torch", "transformers"))
    return isinstance(value, list | dict | set | deque) or has_attributes


def _containers(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """Yield the containers and objects in a value, itself among them."""
    if isinstance(value, tuple):
        for part in value:
            yield from _containers(part, depth)
    if not _is_container(value) or not depth:
        return
    yield value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | set | deque) else None
    for part in [*(vars(value).values() if parts is None else parts)]:
        yield from _containers(part, depth - 1)


def _merged(notes: Mapping[int, str]) -> str:
    return json.dumps({stage: note for text in notes.values() for stage, note in json.loads(text).items()})


def _worst(notes: Mapping[int, str]) -> str:
    return json.dumps(next((each for _, text in sorted(notes.items()) if (each := json.loads(text))), None))


class SkippedOutputs:
    """Sets placeholders as attributes where skipped units would leave values.

    Args:
        modules: the units that may be skipped, as the user built them.
    """

    def __init__(self, modules: Sequence[nn.Module], placeholders: PlaceholderTensors) -> None:
        self._placeholders = placeholders
        self._copies: dict[type, nn.Module] = {}
        self._left: dict[type, list[tuple[str, str, Any]]] = {}
        self._undo: list[Callable[[], None]] = []
        for module in modules:
            if type(module) not in self._copies:
                tensors = [*module.parameters(), *module.buffers()]
                with suppress(Exception):  # of a unit that cannot be copied the attributes are not found
                    memo = {id(tensor): placeholders.like(tensor) for tensor in tensors}
                    self._copies[type(module)] = without_user_hooks(copy.deepcopy(module, memo))

    def set_on(self, module: nn.Module, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Set on a skipped unit the attributes that units of its class leave on themselves.

        Args:
            kind: its class as the user built it.
            args: the arguments that it was called with.
        """
        if kind in self._copies:
            self._left[kind] = list(self._run(self._copies.pop(kind), args, kwargs))
        for path, name, value in self._left.get(kind, ()):
            with suppress(AttributeError):  # another unit of the class may lack the part
                self._undo.append(set_attribute(module.get_submodule(path), name, value))

    def remove(self) -> None:
        """Give the units back the attributes that they had."""
        while self._undo:
            self._undo.pop()()

    def _run(self, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
        """Yield what a copy leaves on itself: the submodule's name, the attribute's name and its value."""
        before = {id(leaf) for *_, value in _attributes(unit) for leaf in self._placeholders_in(value)}
        own_args, own_kwargs = pytree.tree_map(
            lambda leaf: self._placeholders.like(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
        )
        # Where it fails, what it has left until then counts.
        with suppress(Exception), torch.no_grad(), self._placeholders.only():
            unit(*own_args, **own_kwargs)
        for path, name, value in _attributes(unit):
            if any(id(leaf) not in before for leaf in self._placeholders_in(value)):
                yield path, name, value

    def _placeholders_in(self, value: Any) -> list[Any]:
        return [leaf for leaf in pytree.tree_leaves(value) if self._placeholders.is_one(leaf)]


def _attributes(module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield the attributes of a module and its submodules, except parameters, buffers and modules."""
    for path, part in module.named_modules():
        for name, value in [*vars(part).items()]:
            if not name.startswith(("_parameters", "_buffers", "_modules")):
                yield path, name, value
