"""Steps groups whose optimizer is stored on the host or on NVMe there, chunk by chunk.

Each state is one flat tensor over the rank's slice of the group. A chunk brings together what its step needs from all
tiers: gradient, master, the optimizer's states; and what it makes: the parameters, narrowed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.config.resolve import ConfigError
from shardwise.offload.cpu_optimizer import CpuOptimizer, StepPiece, step_pieces
from shardwise.offload.step_pipeline import CHUNK_NUMEL, SIMULATED_CHUNK_NUMEL, ChunkInput, StepChunk, even_chunk_numel
from shardwise.offload.storage import DeviceStorage, StateStorage
from shardwise.offload.tiers import Tiers
from shardwise.offload.worker import Task
from shardwise.runtime.memory_tracker import Category
from shardwise.runtime.state_shards import FlatState
from shardwise.runtime.streams import Event
from shardwise.runtime.torch_private import is_fake
from shardwise.zero.param_group import ParamGroup

_GRAD: Final = "grad"
_MASTER: Final = "master"
_PARAM: Final = "param"

Options = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class ParamPiece:
    """A parameter's piece is its part in this rank's slice of a group.

    Attributes:
        name: of the parameter.
        group: the group that it belongs to.
        view: 1-D view of the master, which the optimizer sees; empty where the optimizer is stored off the device.
        start: the first element of the piece, in the slice.
        stop: the element after the last.
    """

    name: str
    group: ParamGroup
    view: nn.Parameter
    start: int
    stop: int


@dataclass
class StepCounts:
    """Tracks how often a piece has been stepped, whether it has states, and whether it ever will."""

    num_steps: float = 0.0
    is_present: bool = False
    is_trained: bool = True


@dataclass(eq=False)
class OffloadedStep:
    """Holds the optimizer's states of one group off the device.

    Attributes:
        group: the group.
        pieces: the parameters' pieces in this rank's slice.
        rule: steps as the optimizer does.
        tiers: the engine's tiers.
        has_states_at_once: whether the optimizer has states before its first step.
        states: by the optimizer's names, each 1-D over the slice.
    """

    group: ParamGroup
    pieces: Sequence[ParamPiece]
    rule: CpuOptimizer
    tiers: Tiers
    has_states_at_once: bool
    states: dict[str, StateStorage] = field(default_factory=dict)
    _counts: dict[str, StepCounts] = field(default_factory=dict)
    _initial: dict[str, float] = field(default_factory=dict)

    def prepare(self, options_of: Callable[[ParamPiece], Options | None]) -> None:
        """Allocate the states that the optimizer's options ask for; skip pieces for which `options_of` returns None."""
        for piece in self.pieces:
            options = options_of(piece)
            is_trained = options is not None
            self._counts[piece.name] = StepCounts(0.0, self.has_states_at_once and is_trained, is_trained)
            self._initial |= self.rule.tensor_states(options) if options is not None else {}
        master, spec = self.group.master, self.group.spec
        for name, value in self._initial.items():
            if name not in self.states:
                where = f"{spec.name}.{name}"
                self.states[name] = self.tiers.place(
                    spec.tiers.optimizer, where, master.numel, master.dtype, Category.OPTIMIZER
                )
                self._fill(self.states[name], 0, master.numel, value, is_new=True)

    def chunks(
        self, factor: float, used: Mapping[str, bool], options_of: Callable[[ParamPiece], Options | None]
    ) -> list[StepChunk]:
        """Return the chunks that step the masters with `factor` times the gradients, and update the parameters.

        The step counts as taken: the caller must submit all of them.

        Args:
            factor: turns accumulated sums into the clipped mean gradient.
            used: whether each parameter, by name, got a gradient; the others stay.
            options_of: returns the optimizer's current options of a piece; None for a piece that it does not have.
        """
        pieces = [piece for piece in self.pieces if used[piece.name]]
        grads = self.group.grads
        if grads is None or not pieces:
            return []
        group = self.group
        # The options are copied now: the learning rate changes before the worker thread reads them.
        options: dict[int, Options] = {}
        plans = []
        for piece in pieces:
            if (current := options_of(piece)) is None:
                continue
            snapshot = options.setdefault(id(current), _snapshot(current))
            counts = self._counts[piece.name]
            plans.append((piece, snapshot, counts.num_steps, not counts.is_present))
            counts.num_steps, counts.is_present = counts.num_steps + 1, True
        parts = {_GRAD: ChunkInput(grads.storage, is_written=False), _MASTER: ChunkInput(group.master)}
        if group.master is not group.shard:
            parts[_PARAM] = ChunkInput(group.shard, is_read=False)
        parts |= {name: ChunkInput(storage) for name, storage in self.states.items()}
        after = Event.record(self.tiers.device)
        found = []
        numel = group.master.numel
        length = even_chunk_numel(numel, SIMULATED_CHUNK_NUMEL if self.tiers.is_simulated else CHUNK_NUMEL)
        for start in range(0, numel, length or 1):
            stop = min(start + length, numel)
            work = partial(self._step_chunk, plans, factor, start, stop)
            found.append(StepChunk(parts, start, stop, work, after, grads.taking))
        return found

    def end(self, last: Task) -> Task:
        """Return the task that ends when all of an update is stored; `last` is the task of its last chunk."""
        written = self.group.shard
        return self.tiers.worker.submit(written.wait_arrived) if isinstance(written, DeviceStorage) else last

    def states_of(self, piece: ParamPiece) -> dict[str, FlatState | Tensor]:
        """Return the states of a piece: flat states, and the number of steps; nothing before the first step."""
        counts = self._counts[piece.name]
        if not counts.is_present:
            return {}
        found: dict[str, FlatState | Tensor] = {"step": torch.tensor(counts.num_steps)} if self.rule.has_counter else {}
        return found | {name: storage.part(piece.start, piece.stop) for name, storage in self.states.items()}

    def write_state(self, piece: ParamPiece, state: str, value: Tensor | float) -> None:
        """Write one state of a piece, which has states from then on.

        Args:
            piece: the piece.
            state: the optimizer's name of the state.
            value: a number, or 1-D and as long as the piece.

        Raises:
            ConfigError: the optimizer keeps no such state.
        """
        if state in self.states:
            self.states[state].write(piece.start, torch.as_tensor(value))
        elif state != "step":
            raise unknown_state(self.rule, self.states, piece, state)
        self.expect_states(piece, {state: float(value)} if state == "step" else {})

    def expect_states(self, piece: ParamPiece, numbers: Mapping[str, float]) -> None:
        """Mark a piece as one that has states, whose tensors the caller fills."""
        counts = self._counts[piece.name]
        counts.is_present, counts.num_steps = True, numbers.get("step", counts.num_steps)

    def forget_states(self, piece: ParamPiece, filled: Collection[str] = ()) -> None:
        """Reset a piece to its states before the first step, except `filled`, which the caller writes."""
        is_trained = self._counts[piece.name].is_trained
        self._counts[piece.name] = StepCounts(0.0, self.has_states_at_once and is_trained, is_trained)
        for name in self.states.keys() - filled:
            self._fill(self.states[name], piece.start, piece.stop, self._initial[name])

    def close(self) -> None:
        """Free the states."""
        for storage in self.states.values():
            storage.close()
        self.states.clear()

    def _step_chunk(
        self,
        plans: Sequence[tuple[ParamPiece, Options, float, bool]],
        factor: float,
        start: int,
        stop: int,
        tensors: Mapping[str, Tensor],
    ) -> None:
        if is_fake(tensors[_MASTER]):
            return  # no values to step, and no tracker counts the step's buffers
        found: list[StepPiece] = []
        end = 0
        for piece, options, num_steps, is_first in plans:
            low, high = max(piece.start, start) - start, min(piece.stop, stop) - start
            if low < high:
                self._narrow(tensors, end, low)
                end = high
                states = {name: tensors[name][low:high] for name in self.states}
                param = tensors[_PARAM][low:high] if _PARAM in tensors else None
                master, grad = tensors[_MASTER][low:high], tensors[_GRAD][low:high]
                found.append(StepPiece(options, master, grad, states, num_steps, is_first, param))
        self._narrow(tensors, end, stop - start)
        step_pieces(self.rule, found, factor, self.tiers.step_threads)

    @staticmethod
    def _narrow(tensors: Mapping[str, Tensor], low: int, high: int) -> None:
        """Copy the masters of padding and of parameters that are not stepped to the output, since it was not read."""
        if _PARAM in tensors and low < high:
            tensors[_PARAM][low:high].copy_(tensors[_MASTER][low:high])

    def _fill(self, storage: StateStorage, start: int, stop: int, value: float, is_new: bool = False) -> None:
        if value == 0 and is_new:
            return
        for low in range(start, stop, CHUNK_NUMEL):
            high = min(low + CHUNK_NUMEL, stop)
            storage.write(low, torch.full((high - low,), value, dtype=storage.dtype))


def unknown_state(rule: CpuOptimizer, names: Collection[str], piece: ParamPiece, state: str) -> ConfigError:
    """Return the error for a `state` of a `piece` that is none of the `names` that an optimizer's `rule` keeps."""
    known = ", ".join(["step", *names])
    return ConfigError(
        "unknown-state", f"{rule.kind.__name__} keeps no state {state} of {piece.name}; there are {known}"
    )


def _snapshot(options: Options) -> Options:
    """Copy the options, tensors too: a scheduler writes into a learning rate that is a tensor."""
    return {
        key: value.clone() if isinstance(value, Tensor) else value for key, value in options.items() if key != "params"
    }
