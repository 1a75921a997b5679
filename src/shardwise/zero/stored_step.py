"""Step the groups whose optimizer's states the library stores: off the device, or encoded (`precision.states`).

Each state is flat over the rank's slice of the group. On the device all of a slice is stepped at once; off it, chunk by
chunk on the host. A chunk brings together what its step needs from all tiers: gradient, master, the optimizer's states;
and what it makes: the parameters, narrowed. Encoded states are decoded, stepped and encoded a few blocks at a time: no
more of them exists in fp32.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.config.errors import ConfigError
from shardwise.layout.precision import BLOCK_NUMEL, StatesDtype
from shardwise.offload.cpu_optimizer import StepPiece, step_pieces
from shardwise.offload.step_pipeline import CHUNK_NUMEL, SIMULATED_CHUNK_NUMEL, ChunkInput, StepChunk, even_chunk_numel
from shardwise.offload.storage import DeviceStorage, StateStorage
from shardwise.offload.tiers import Tiers
from shardwise.offload.worker import Task
from shardwise.optim.rules import OptimizerRule
from shardwise.runtime.device import Event
from shardwise.runtime.kernels import has_kernels
from shardwise.runtime.state_shards import FlatState, ScalarState
from shardwise.runtime.torch_private import is_fake, version
from shardwise.zero.group_step import (
    GroupStep,
    HostUpdate,
    OptimizerUpdate,
    Options,
    OptionsOf,
    StateKeeper,
    Wanted,
    final_gradient,
)
from shardwise.zero.param_group import ParamGroup
from shardwise.zero.stored_state import GroupState, ParamPiece

_GRAD: Final = "grad"
_MASTER: Final = "master"
_PARAM: Final = "param"

Read = Callable[[str], Tensor]


class LentStates(dict[str, Any]):
    """Shows a user the states of one parameter's piece, where torch's optimizer has its own.

    `optimizer.state[parameter]` is a dict as ever: its tensors are read from where they are stored once they are asked
    for. What was changed, replaced or cleared there is taken over before the next step, read or save.

    Args:
        read: returns a state's values, as they are or as a copy.
    """

    def __init__(self, names: Iterable[str], read: Read) -> None:
        super().__init__(dict.fromkeys(names))
        self._read = read
        self._lent: dict[str, tuple[Tensor, int]] = {}

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if value is None:
            value = self._read(name)
            self._lent[name] = (value, version(value))
            super().__setitem__(name, value)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        """Return a state, or the default."""
        if name not in self:
            return default
        return self[name]

    def pop(self, name: str, *default: Any) -> Any:
        """Remove a state, which starts afresh then."""
        value = self.get(name, *default)
        super().pop(name, *default)
        return value

    def values(self) -> Any:
        """Return all states."""
        return [self[name] for name in self]

    def items(self) -> Any:
        """Return all states with their names."""
        return [(name, self[name]) for name in self]

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Return a state, which is the default from now on where there is none."""
        if name not in self:
            self[name] = default
        return self[name]

    def popitem(self) -> tuple[str, Any]:
        """Remove the last state, which starts afresh then."""
        name = list(self)[-1]
        return name, self.pop(name)

    def copy(self) -> dict[str, Any]:
        """Return the states in a dict of their own."""
        return dict(self.items())

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()  # `dict(states)` and `{**states}` ask for each state where this is not dict's own

    def __eq__(self, other: object) -> bool:
        return self.copy() == other

    __hash__ = None

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return self.copy() | dict(other)

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return dict(other) | self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return deepcopy(self.copy(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy or a file has the values, not the engine. Of dicts, torch.load takes this one from a file.
        return OrderedDict, (), None, None, iter(self.items())

    def take_changes(self) -> Mapping[str, Any]:
        """Return the states that were changed or replaced since the last call; all are read again from then on."""
        changed: dict[str, Any] = {}
        for name in self:
            value = super().__getitem__(name)
            lent, seen = self._lent.get(name, (None, 0))
            if value is not None and (value is not lent or version(lent) != seen):
                changed[name] = value
            super().__setitem__(name, None)
        self._lent.clear()
        return changed


StepPlan = tuple[ParamPiece, Options, float, bool]
"""A piece that is stepped, its options, how many steps it has taken, and whether it has no state yet."""


@dataclass(frozen=True)
class StepCounts:
    """Says how often a piece has been stepped, whether it has states, and whether it ever will."""

    num_steps: float = 0.0
    is_present: bool = False
    is_trained: bool = True


@dataclass(eq=False)
class StoredStep(GroupStep, StateKeeper):
    """Keeps the optimizer's states of one group, off the device or encoded, and steps them.

    Attributes:
        has_states_at_once: whether the optimizer has states before its first step.
        shown: torch's optimizer, whose `state` shows a user the states.
    """

    group: ParamGroup
    pieces: Sequence[ParamPiece]
    rule: OptimizerRule
    tiers: Tiers
    dtype: StatesDtype
    has_states_at_once: bool
    shown: Optimizer
    states: dict[str, GroupState] = field(default_factory=dict)
    _counts: dict[str, StepCounts] = field(default_factory=dict)
    _initial: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reads_stored = self.group.spec.tiers.optimizer != "device"
        self._counts |= {piece.name: StepCounts(is_trained=False) for piece in self.pieces}

    def train(self, names: Collection[str], options_of: OptionsOf) -> None:
        # While other groups are replaced, what is to be frozen next has no options.
        for piece in self.pieces:
            if piece.name in names and (options := options_of(piece)) is not None:
                self._train(piece, options)

    def _train(self, piece: ParamPiece, options: Options) -> None:
        self._counts[piece.name] = StepCounts(0.0, self.has_states_at_once)
        for name, value in self.rule.first_values(options).items():
            self._initial[name] = value
            if name not in self.states:
                self.states[name] = GroupState(name, self.group, self.pieces, self.dtype, self.tiers)
            if value:  # new storage has zeros
                _fill(self.states[name].of_piece(piece), value)
        self._show(piece)

    def show(self, update: OptimizerUpdate) -> None:
        if self.group.grads is not None and self.group.grads.holds_sum:
            update.hooks.show(self.pieces, final_gradient(self.group, update.gradients), update)

    def step(self, update: OptimizerUpdate) -> list[HostUpdate]:
        factor = update.hooks.factor(self.group, update.factor)
        if self.reads_stored:
            return [HostUpdate(self.group, self._chunks(update, factor), self._end)]
        if (gradient := update.take(self.group)) is not None:
            numel = self.group.master.numel
            tensors = {name: state.whole.read(0, numel) for name, state in self.states.items()}
            tensors |= {_GRAD: gradient, _MASTER: self.group.master.read(0, numel)}
            self._step_range(self._plans(update), factor, 0, numel, tensors)
        return []

    def _chunks(self, update: OptimizerUpdate, factor: float) -> list[StepChunk]:
        """Return the chunks that step the masters with `factor` times the gradients, and update the parameters.

        The step counts as taken: the caller must submit all of them.
        """
        group, grads = self.group, self.group.grads
        if grads is None or not grads.holds_sum or not any(update.used[piece.name] for piece in self.pieces):
            return []
        plans = self._plans(update)
        parts = {_GRAD: ChunkInput(grads.storage, is_written=False), _MASTER: ChunkInput(group.master)}
        if group.master is not group.shard:
            parts[_PARAM] = ChunkInput(group.shard, is_read=False)
        parts |= {name: ChunkInput(state.whole) for name, state in self.states.items()}
        # [Note: What a chunk waits for]
        # `after` is the place in the compute stream at which gradients on the device are final and the backward has
        # read its parameters. Side streams copy from the device, and new parameters to it, from there on, and do not
        # wait for what is enqueued later, such as the next forward: the worker thread opens and closes a chunk at any
        # time. What is stored off the device is ready when the worker thread has done what was submitted before.
        after = Event.record(self.tiers.device)
        chunks = []
        numel = group.master.numel
        length = even_chunk_numel(numel, SIMULATED_CHUNK_NUMEL if self.tiers.is_simulated else CHUNK_NUMEL)
        for start in range(0, numel, length or 1):
            stop = min(start + length, numel)
            work = partial(self._step_range, plans, factor, start, stop)
            chunks.append(StepChunk(parts, start, stop, work, after, grads.taking))
        return chunks

    def _end(self, last: Task) -> Task:
        """Return the task that ends when all of an update is stored; `last` is the task of its last chunk."""
        written = self.group.shard
        return self.tiers.worker.submit(written.wait_arrived) if isinstance(written, DeviceStorage) else last

    def states_of(self, piece: ParamPiece) -> dict[str, FlatState | Tensor]:
        counts = self._counts[piece.name]
        if not counts.is_present:
            return {}
        found: dict[str, FlatState | Tensor] = {"step": torch.tensor(counts.num_steps)} if self.rule.has_counter else {}
        flats = {name: state.of_piece(piece) for name, state in self.states.items()}
        return found | {name: flat.part(0, flat.numel) for name, flat in flats.items()}

    def flat_state(self, piece: ParamPiece, state: str) -> FlatState:
        self._expect(piece, {})
        return self.states[state].of_piece(piece)

    def cannot_store(self, piece: ParamPiece, states: Collection[str]) -> Collection[str]:
        return set(states) - {"step", *self.states}

    def take_changes(self) -> None:
        needed = {*self.states, *(["step"] if self.rule.has_counter else [])}
        for piece in self.pieces:
            if not self._counts[piece.name].is_present:
                continue
            given = self.shown.state.get(piece.view, {})
            changed = given.take_changes() if isinstance(given, LentStates) else given
            is_whole = needed <= given.keys()
            if changed or not is_whole:
                self.tiers.wait_idle()
                if not is_whole:
                    self._forget(piece)
                for name, value in changed.items():
                    self.write_state(piece, name, value)
            self._show(piece)

    def _show(self, piece: ParamPiece) -> None:
        state = self.shown.state
        if not self._counts[piece.name].is_present:
            state.pop(piece.view, None)
        elif not isinstance(state.get(piece.view), LentStates):
            state[piece.view] = LentStates(self.states_of(piece), partial(self._lend, piece))

    def _lend(self, piece: ParamPiece, name: str) -> Tensor:
        """Return a state's values once no step of it is under way."""
        self.tiers.wait_idle()
        state = self.states_of(piece)[name]
        return state if isinstance(state, Tensor) else state.read(0, state.numel)

    def write_state(self, piece: ParamPiece, state: str, value: Tensor | float) -> None:
        if state in self.states:
            self.states[state].of_piece(piece).write(0, torch.as_tensor(value).view(-1))
        elif state != "step":
            known, kind = ", ".join(["step", *self.states]), self.rule.kind.__name__
            raise ConfigError("unknown-state", f"{kind} keeps no state {state} of {piece.name}; there are {known}")
        self._expect(piece, {state: float(value)} if state == "step" else {})

    def prepare(self, wanted: Mapping[str, Mapping[str, Wanted]]) -> None:
        for piece in self.pieces:
            states = wanted.get(piece.name, {})
            numbers = {name: value.value for name, value in states.items() if isinstance(value, ScalarState)}
            self._forget(piece, filled=states.keys() - numbers.keys())
            if states:
                self._expect(piece, numbers)

    def _expect(self, piece: ParamPiece, numbers: Mapping[str, float]) -> None:
        """Mark a piece as one that has states, whose tensors the caller fills."""
        counts = self._counts[piece.name]
        self._counts[piece.name] = StepCounts(numbers.get("step", counts.num_steps), True, counts.is_trained)
        self._show(piece)

    def _forget(self, piece: ParamPiece, filled: Collection[str] = ()) -> None:
        """Reset a piece to its states before the first step, except `filled`, which the caller writes."""
        is_trained = self._counts[piece.name].is_trained
        self._counts[piece.name] = StepCounts(0.0, self.has_states_at_once and is_trained, is_trained)
        for name in self.states.keys() - filled:
            _fill(self.states[name].of_piece(piece), self._initial[name])
        self._show(piece)

    def storages(self) -> list[StateStorage]:
        return [storage for state in self.states.values() for storage in state.storages]

    def close(self) -> None:
        for state in self.states.values():
            state.close()
        self.states.clear()

    def _plans(self, update: OptimizerUpdate) -> list[StepPlan]:
        """Return what is stepped, and count the step."""
        self.take_changes()
        # The options are copied now: the learning rate changes before the worker thread reads them.
        options: dict[int, Options] = {}
        plans = []
        for piece in self.pieces:
            if not update.used[piece.name] or (current := update.options_of(piece)) is None:
                continue
            snapshot = options.setdefault(id(current), _snapshot(current))
            counts = self._counts[piece.name]
            plans.append((piece, snapshot, counts.num_steps, not counts.is_present))
            self._counts[piece.name] = StepCounts(counts.num_steps + 1, True, counts.is_trained)
            for state in self.states.values():
                state.settle(piece)
            self._show(piece)
        return plans

    def _step_range(
        self, plans: Sequence[StepPlan], factor: float, start: int, stop: int, tensors: Mapping[str, Tensor]
    ) -> None:
        if is_fake(tensors[_MASTER]):
            return  # no values to step, and no tracker counts the step's buffers
        by_kernel = has_kernels(tensors[_MASTER].device)
        if by_kernel:
            plans = self.runs(plans)
        pieces: list[StepPiece] = []
        end = 0
        for piece, options, num_steps, is_first in plans:
            first, last = max(piece.start, start), min(piece.stop, stop)
            low, high = first - start, last - start
            if low < high:
                self._narrow(tensors, end, low)
                end = high
                states = {
                    name: state.to_step(piece, first, last, tensors[name][low:high])
                    for name, state in self.states.items()
                }
                param = tensors[_PARAM][low:high] if _PARAM in tensors else None
                master, grad = tensors[_MASTER][low:high], tensors[_GRAD][low:high]
                pieces.append(StepPiece(options, master, grad, states, num_steps, is_first, param))
        self._narrow(tensors, end, stop - start)
        left = _step_on_gpu(self.rule, pieces, factor) if by_kernel else pieces
        step_pieces(self.rule, left, factor, self.tiers.step_threads if self.reads_stored else None)

    # [Note: Pieces that a kernel steps at once]
    # Pieces whose states are encoded begin at block borders, so between two of them is at most the rest of a block.
    # Its gradients and states are zeros, as padding is: a step of it changes nothing, nor a scale. So pieces that are
    # neighbours, and step by the same numbers, are one piece to a kernel whose launch costs more than its work.
    def runs(self, plans: Sequence[StepPlan]) -> list[StepPlan]:
        """Return plans in which neighbours that have encoded states, and step by the same numbers, are one piece."""
        merged: list[StepPlan] = []
        for plan in plans:
            piece, *how = plan
            if merged and self._is_encoded(piece):
                before, *how_before = merged[-1]
                is_next = 0 <= piece.start - before.stop < BLOCK_NUMEL and self._is_encoded(before)
                if is_next and id(how[0]) == id(how_before[0]) and how[1:] == how_before[1:]:
                    merged[-1] = replace(before, stop=piece.stop), *merged[-1][1:]
                    continue
            merged.append(plan)
        return merged

    def _is_encoded(self, piece: ParamPiece) -> bool:
        return bool(self.states) and all(state.encodes(piece) for state in self.states.values())

    @staticmethod
    def _narrow(tensors: Mapping[str, Tensor], low: int, high: int) -> None:
        """Copy the masters of padding and of parameters that are not stepped to the output, since it was not read."""
        if _PARAM in tensors and low < high:
            tensors[_PARAM][low:high].copy_(tensors[_MASTER][low:high])


def _step_on_gpu(rule: OptimizerRule, pieces: Sequence[StepPiece], factor: float) -> Sequence[StepPiece]:
    """Step by one kernel a piece; return the pieces that the kernel does not know."""
    from shardwise.zero import triton_step  # it needs Triton

    can_step = partial(triton_step.can_step, rule.kind)
    for piece in filter(can_step, pieces):
        triton_step.step_piece(rule.kind, piece, factor)
    return [piece for piece in pieces if not can_step(piece)]


def _fill(flat: FlatState, value: float) -> None:
    for low in range(0, flat.numel, CHUNK_NUMEL):
        numel = min(CHUNK_NUMEL, flat.numel - low)
        flat.write(low, torch.full((numel,), value, dtype=flat.dtype))


def _snapshot(options: Options) -> Options:
    """Copy the options, tensors too: a scheduler writes into a learning rate that is a tensor."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value for key, value in options.items() if key != "params"
    }
