"""Step groups whose optimizer's states are stored encoded on the device (`precision.states`).

A few blocks at a time are decoded to fp32, stepped as the optimizer does, and encoded again: no more exists in fp32.
Parameters of few elements keep their states as they are. Checkpoints read and write decoded values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from shardwise.layout.codec import Encoded, codec_of, is_encoded
from shardwise.layout.precision import StatesDtype
from shardwise.offload.cpu_optimizer import CpuOptimizer, StepPiece, step_pieces
from shardwise.runtime.memory_tracker import Category, MemoryTracker
from shardwise.runtime.state_shards import FlatSlice, FlatState, TensorFlatState
from shardwise.runtime.torch_private import is_fake
from shardwise.zero.offloaded_step import ParamPiece, StepCounts, unknown_state
from shardwise.zero.param_group import ParamGroup

Options = Mapping[str, Any]


class EncodedState:
    """Makes an encoded state a `FlatState` of decoded values.

    What is written is kept as it is until all elements are there, since a block is encoded as a whole.
    """

    tensor: Tensor | None = None
    dtype = torch.float32

    def __init__(self, encoded: Encoded) -> None:
        self.encoded = encoded
        self._written: Tensor | None = None
        self._num_written = 0

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return self.encoded.numel

    def read(self, start: int, stop: int) -> Tensor:
        """Return the elements [start, stop), decoded."""
        whole = self._written if self._written is not None else self.encoded.decode()
        return whole[start:stop]

    def write(self, start: int, values: Tensor) -> None:
        """Replace the elements from `start` on; they are encoded once as many as there are have been written."""
        if self._written is None:
            self._written = self.encoded.decode()
        self._written[start : start + values.numel()].copy_(values)
        self._num_written += values.numel()
        if self._num_written >= self.numel:
            self.settle()

    def settle(self) -> None:
        """Encode what has been written."""
        if self._written is not None:
            self.encoded.encode(self._written)
            self._written, self._num_written = None, 0

    def part(self, start: int, stop: int) -> FlatState:
        """Return the elements [start, stop)."""
        return FlatSlice(self, start, stop)


class EncodedStep:
    """Holds the encoded states of one group's pieces, and steps them.

    Args:
        group: the group.
        pieces: the parameters' pieces in this rank's slice.
        rule: steps as the optimizer does.
        dtype: of `precision.states`.
        tracker: counts the states.
    """

    def __init__(
        self,
        group: ParamGroup,
        pieces: Sequence[ParamPiece],
        rule: CpuOptimizer,
        dtype: StatesDtype,
        tracker: MemoryTracker,
    ) -> None:
        self.group = group
        self.rule = rule
        self._pieces = pieces
        self._dtype = dtype
        self._tracker = tracker
        self._large = {place.name for place in group.spec.params if is_encoded(place.global_shape)}
        self._states: dict[str, dict[str, EncodedState | TensorFlatState]] = {}
        self._counts: dict[str, StepCounts] = {}
        self._initial: dict[str, float] = {}

    def prepare(self, options_of: Callable[[ParamPiece], Options | None], is_present: bool) -> None:
        """Allocate the states that the optimizer's options ask for.

        Args:
            options_of: returns the options of a piece; None for one that the optimizer does not have.
            is_present: whether the optimizer has states before its first step.
        """
        for piece in self._pieces:
            options = options_of(piece)
            self._counts[piece.name] = StepCounts(0.0, is_present and options is not None, options is not None)
            initial = dict(self.rule.tensor_states(options)) if options is not None else {}
            self._initial |= initial
            self._states[piece.name] = {name: self._allocate(piece, name) for name in initial}
            self.forget_states(piece)

    @property
    def states(self) -> Collection[str]:
        """Return the names of the states."""
        return self._initial.keys()

    def step(
        self,
        gradient: Tensor,
        factor: float,
        used: Mapping[str, bool],
        options_of: Callable[[ParamPiece], Options | None],
    ) -> None:
        """Update the masters with `factor` times the gradient.

        Args:
            gradient: of the rank's slice.
            factor: turns accumulated sums into the clipped mean gradient.
            used: whether each parameter, by name, got a gradient; the others stay.
            options_of: returns the optimizer's current options of a piece; None for a piece that it does not have.
        """
        found: list[StepPiece] = []
        for piece in self._pieces:
            options, counts = options_of(piece), self._counts[piece.name]
            if not used[piece.name] or options is None:
                continue
            states = {name: _stored(state) for name, state in self._states[piece.name].items()}
            slice_of = gradient[piece.start : piece.stop]
            master = piece.view.detach()
            found.append(StepPiece(options, master, slice_of, states, counts.num_steps, not counts.is_present, None))
            counts.num_steps, counts.is_present = counts.num_steps + 1, True
        if not is_fake(gradient):
            step_pieces(self.rule, _step_on_gpu(self.rule, found, factor) if gradient.is_cuda else found, factor)

    def states_of(self, piece: ParamPiece) -> dict[str, FlatState | Tensor]:
        """Return the states of a piece: flat states, and the number of steps; nothing before the first step."""
        counts = self._counts[piece.name]
        if not counts.is_present:
            return {}
        found: dict[str, FlatState | Tensor] = {"step": torch.tensor(counts.num_steps)} if self.rule.has_counter else {}
        return found | {name: state.part(0, state.numel) for name, state in self._states[piece.name].items()}

    def write_state(self, piece: ParamPiece, state: str, value: Tensor | float) -> None:
        """Write one state of a piece, which has states from then on.

        Args:
            piece: the piece.
            state: the optimizer's name of the state.
            value: a number, or 1-D and as long as the piece.

        Raises:
            ConfigError: the optimizer keeps no such state.
        """
        states = self._states[piece.name]
        if state in states:
            states[state].write(0, torch.as_tensor(value))
        elif state != "step":
            raise unknown_state(self.rule, states, piece, state)
        self.expect_states(piece, {state: float(value)} if state == "step" else {})

    def expect_states(self, piece: ParamPiece, numbers: Mapping[str, float]) -> None:
        """Mark a piece as one that has states, whose tensors the caller fills."""
        counts = self._counts[piece.name]
        counts.is_present, counts.num_steps = True, numbers.get("step", counts.num_steps)

    def forget_states(self, piece: ParamPiece, filled: Collection[str] = ()) -> None:
        """Reset a piece to its states before the first step, except `filled`, which the caller writes."""
        counts = self._counts[piece.name]
        counts.num_steps, counts.is_present = 0.0, False
        for name, state in self._states[piece.name].items():
            if name not in filled:
                state.write(0, torch.full((state.numel,), self._initial[name]))

    def tensors(self) -> list[Tensor]:
        """Return what is stored."""
        return [tensor for states in self._states.values() for state in states.values() for tensor in _tensors(state)]

    def close(self) -> None:
        """Free the states."""
        self._states.clear()

    def _allocate(self, piece: ParamPiece, name: str) -> EncodedState | TensorFlatState:
        codec = codec_of(name, self._dtype) if piece.name in self._large else None
        numel, device = piece.stop - piece.start, self._tracker.device
        if codec is None:
            dtype = self.group.master.dtype
            state: EncodedState | TensorFlatState = TensorFlatState(torch.zeros(numel, dtype=dtype, device=device))
        else:
            state = EncodedState(codec.empty(numel, device))
        for tensor in _tensors(state):
            self._tracker.track(tensor, Category.OPTIMIZER)
        return state


def _step_on_gpu(rule: CpuOptimizer, pieces: Sequence[StepPiece], factor: float) -> Sequence[StepPiece]:
    """Step by one kernel a piece where Triton is installed; return the pieces that the kernel does not know."""
    if find_spec("triton") is None:
        return pieces
    from shardwise.zero import triton_step  # it needs Triton

    known = [triton_step.can_step(rule.kind, piece) for piece in pieces]
    for piece, is_known in zip(pieces, known, strict=True):
        if is_known:
            triton_step.step_piece(rule.kind, piece, factor)
    return [piece for piece, is_known in zip(pieces, known, strict=True) if not is_known]


def _stored(state: EncodedState | TensorFlatState) -> Encoded | Tensor:
    if isinstance(state, TensorFlatState):
        return state.tensor
    state.settle()
    return state.encoded


def _tensors(state: EncodedState | TensorFlatState) -> list[Tensor]:
    stored = _stored(state)
    found = [stored] if isinstance(stored, Tensor) else [stored.codes, stored.scales]
    return [each for each in found if each is not None]
