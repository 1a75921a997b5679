"""Step param groups: one interface for whatever steps a group and wherever its optimizer's states are stored.

`ShardedOptimizer` has a list of `GroupStep`s, and of `StateKeeper`s, and asks none of them what it is:

- `TorchStep`: torch's optimizer steps views of the masters, on the device, and keeps the states.
- `StoredStep` (`shardwise.zero.stored_step`): the library keeps the states, off the device or encoded, and steps them.
- `MatrixStep` (`shardwise.zero.matrix_step`): owners orthogonalize whole matrices; the others keep the states.
- `WholeStep` (`shardwise.zero.whole_step`): torch's optimizer steps whole parameters at their owners.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.config.errors import ConfigError, EngineError
from shardwise.offload.step_pipeline import StepChunk
from shardwise.offload.storage import StateStorage
from shardwise.offload.worker import Task
from shardwise.optim.rules import (
    LateFactor,
    lacks_some_momentum,
    may_scale_in_step,
    rule_of_kind,
    scaled_in_step,
    stepped_unfused,
)
from shardwise.runtime.state_shards import FlatState, ScalarState, TensorFlatState
from shardwise.runtime.torch_private import step_hooks
from shardwise.runtime.user_hooks import reads_first_argument
from shardwise.zero.param_group import ParamGroup
from shardwise.zero.stored_state import ParamPiece, place_state

Options = Mapping[str, Any]
OptionsOf = Callable[[ParamPiece], Options | None]
FirstStates = Callable[[Mapping[str, nn.Parameter]], None]
Wanted = ScalarState | torch.dtype | None
"""A state that a checkpoint has: a number, or a tensor of a dtype of its own, or of the parameter's."""


@dataclass(frozen=True)
class HostUpdate:
    """Is an update of one group that the host takes in the background.

    Attributes:
        chunks: what is stepped; none where no parameter of the group is used.
        end: given the task of the last chunk, returns the one that ends when all is stored.
    """

    group: ParamGroup
    chunks: Sequence[StepChunk]
    end: Callable[[Task], Task]


@dataclass(eq=False)
class OptimizerUpdate:
    """Is one step of the optimizer, which all of its `GroupStep`s take part in.

    Attributes:
        factor: turns accumulated sums into the clipped mean gradient.
        late: the factor that counts in its place, where the device alone knows it; see `GroupStep.takes_late_factor`.
        used: whether each parameter, by name, got a gradient on some rank; the others stay, as in plain torch.
        gradients: of groups, on the device, until their steps take them.
        options_of: returns the optimizer's current options of a piece; None for a piece that it does not have.
    """

    factor: float
    used: dict[str, bool]
    gradients: dict[ParamGroup, Tensor]
    hooks: StepHooks
    options_of: OptionsOf
    late: LateFactor | None = None

    def take(self, group: ParamGroup) -> Tensor | None:
        """Take a group's summed gradient, brought to the device; None if no backward has reached it."""
        gradient = self.gradients.pop(group, None)
        return group.grads.gradient() if gradient is None and group.grads is not None else gradient

    def means(self) -> Callable[[ParamPiece], Tensor]:
        """Return what gives a piece's mean gradient, as long as that function lives; it takes those of whole groups."""
        means: dict[ParamGroup, Tensor] = {}

        def mean_of(piece: ParamPiece) -> Tensor:
            group = piece.group
            if group not in means:
                group.await_step()
                total = self.take(group)
                assert total is not None, "a parameter that was used on some rank has a gradient on all"
                means[group] = total.mul_(self.factor)
            return means[group][piece.start : piece.stop]

        return mean_of


def final_gradient(group: ParamGroup, gradients: Mapping[ParamGroup, Tensor]) -> FlatState:
    """Return a group's gradients, final and where they are now: in `gradients`, or where they are stored."""
    assert group.grads is not None, "the group is trained"
    group.grads.await_taken()
    on_device = gradients.get(group)
    return group.grads.storage if on_device is None else TensorFlatState(on_device)


class GroupStep(ABC):
    """Steps param groups.

    Attributes:
        is_settled: a step makes no new states.
    """

    is_settled = False

    def takes_late_factor(self, gradients: Mapping[ParamGroup, Tensor]) -> bool:
        """Say whether a step by these gradients may be enqueued before the host knows its factor, and if it is taken.

        Then it makes no states, since a step that is not taken leaves all as it was.
        """
        return False

    @abstractmethod
    def step(self, update: OptimizerUpdate) -> list[HostUpdate]:
        """Update the masters on the device; return what the host is still to do, in the background."""

    def show(self, update: OptimizerUpdate) -> None:
        """Show the hooks before torch's step the gradients that torch's optimizer does not get."""
        return

    def change_weights(self, change: Callable[[], object]) -> None:
        """Call a function that writes the parameters which torch's optimizer has."""
        return


class StateKeeper(ABC):
    """Keeps the optimizer's states of pieces, wherever they are stored.

    Attributes:
        reads_stored: a step reads gradients where they are stored, not on the device.
    """

    reads_stored: bool

    @abstractmethod
    def states_of(self, piece: ParamPiece) -> Mapping[str, Any]:
        """Return what is kept of a piece now, by name: flat states as long as the piece, numbers, other."""

    @abstractmethod
    def flat_state(self, piece: ParamPiece, state: str) -> FlatState:
        """Return where a state as long as the piece is; make it, of zeros, if it is not there."""

    @abstractmethod
    def write_state(self, piece: ParamPiece, state: str, value: Tensor | float) -> None:
        """Write one state of a piece, a number or 1-D and as long as the piece; make it if it is not there."""

    def cannot_store(self, piece: ParamPiece, states: Collection[str]) -> Collection[str]:
        """Return those of some states of a piece that have no place here."""
        return ()

    @abstractmethod
    def train(self, names: Collection[str], options_of: OptionsOf) -> None:
        """Keep states of these parameters from now on: the optimizer has just got them."""

    @abstractmethod
    def prepare(self, wanted: Mapping[str, Mapping[str, Wanted]]) -> None:
        """Have exactly the wanted states, by parameter: numbers are set, tensors are ready to be filled.

        Parameters of which none are wanted get the states of an optimizer that has not stepped.
        """

    def take_changes(self) -> None:
        """Take over what a user has changed in the `state` of torch's optimizer."""
        return

    def odd_states(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield parameter, name and value of the states that are tensors of another shape, such as factors."""
        return iter(())

    def storages(self) -> list[StateStorage]:
        """Return what stores the states that the library keeps itself."""
        return []

    def kept_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that torch's optimizer keeps itself."""
        return iter(())

    def close(self) -> None:
        """Free the states that the library keeps itself."""
        return


class TorchStep(GroupStep, StateKeeper):
    """Lets torch's optimizer step parameters that it sees, and keep their states.

    Args:
        groups: that it steps; it may keep states of others too.
        first_states: gives views the states that the optimizer has before its first step, if it has any.
    """

    reads_stored = False

    def __init__(
        self,
        optimizer: Optimizer,
        groups: Sequence[ParamGroup],
        pieces: Sequence[ParamPiece],
        first_states: FirstStates,
    ) -> None:
        self._pieces = pieces
        self._optimizer = optimizer
        self._groups = groups
        self._pieces_of = {group: [piece for piece in pieces if piece.group is group] for group in groups}
        self._places_of = {
            group: [(slice(piece.start, piece.stop), piece.view.shape) for piece in of_group]
            for group, of_group in self._pieces_of.items()
        }
        self._first_states = first_states
        self._settled: tuple[int, int] | None = None  # what `optimizer.state` was once all pieces had states

    @property
    def views(self) -> Mapping[str, nn.Parameter]:
        """Return what the optimizer steps, by name of the parameter."""
        return {piece.name: piece.view for piece in self._pieces}

    @property
    def is_settled(self) -> bool:  # type: ignore[override]
        return self._settled == (id(self._optimizer.state), len(self._optimizer.state))

    def takes_late_factor(self, gradients: Mapping[ParamGroup, Tensor]) -> bool:
        if not self.is_settled or len(gradients) < len(self._groups):
            return False
        has_momentum = any(group.get("momentum") for group in self._optimizer.param_groups)
        has_all = not has_momentum or all("momentum_buffer" in states for states in self._optimizer.state.values())
        return has_all and may_scale_in_step(self._optimizer, gradients.values())

    def step(self, update: OptimizerUpdate) -> list[HostUpdate]:
        gradients = {group: update.gradients.pop(group) for group in self._groups if group in update.gradients}
        self._step(gradients, update)
        gradients.clear()
        for group in self._groups:  # stored off the device: one at a time is brought there
            if group.grads is not None and group.grads.is_away and (brought := group.grads.gradient()) is not None:
                self._step({group: brought}, update)
        return []

    def _step(self, gradients: Mapping[ParamGroup, Tensor], update: OptimizerUpdate) -> None:
        optimizer, used = self._optimizer, update.used
        parts = [
            (piece.view, part)
            for group, gradient in gradients.items()
            if group.grads is not None
            for piece, part in zip(
                self._pieces_of[group], group.grads.cut(gradient, self._places_of[group]), strict=True
            )
            if used[piece.name]
        ]
        is_mixed = lacks_some_momentum(optimizer, [view for view, _ in parts])
        # Other code may read the gradients, or a step without the fused kernel.
        scaled = () if is_mixed or update.hooks.are_there else gradients.values()
        with scaled_in_step(optimizer, update.late or update.factor, scaled) as is_scaled:
            if not is_scaled:
                for gradient in gradients.values():
                    gradient.mul_(update.factor)
            for view, part in parts:
                view.grad = part
            with stepped_unfused(optimizer) if is_mixed else nullcontext():
                update.hooks.step_torch()
        for view, _ in parts:
            view.grad = None
        if len(parts) == len(self._pieces) and rule_of_kind(type(optimizer)) is not None:
            self._settled = (id(optimizer.state), len(optimizer.state))

    def change_weights(self, change: Callable[[], object]) -> None:
        change()

    def states_of(self, piece: ParamPiece) -> Mapping[str, Any]:
        shape, states = piece.view.shape, self._optimizer.state.get(piece.view, {})
        # Of a piece of one element, a count in a tensor of one element looks like a flat state.
        odd = self._odd_names() if shape.numel() == 1 else ()
        return {
            name: TensorFlatState(value.detach().view(-1))
            if isinstance(value, Tensor) and value.dim() and value.shape == shape and name not in odd
            else value
            for name, value in states.items()
        }

    def _odd_names(self) -> set[str]:
        """Return the names of states that are tensors of another shape than one of the views."""
        states = self._optimizer.state
        return {name for view in self.views.values() for name, _ in odd_states(states.get(view, {}), view)}

    def odd_states(self) -> Iterator[tuple[str, str, Tensor]]:
        odd = self._odd_names()
        for name, view in self.views.items():
            for state, value in self._optimizer.state.get(view, {}).items():
                if state in odd and isinstance(value, Tensor) and value.dim():
                    yield name, state, value

    def flat_state(self, piece: ParamPiece, state: str) -> FlatState:
        self._settled = None
        states = self._optimizer.state[piece.view]
        if state not in states:
            states[state] = torch.zeros_like(piece.view, requires_grad=False)
        return TensorFlatState(states[state])

    def write_state(self, piece: ParamPiece, state: str, value: Tensor | float) -> None:
        self._settled = None
        place_state(self._optimizer, piece.view, state, value)

    def train(self, names: Collection[str], options_of: OptionsOf) -> None:
        self._settled = None
        self._first_states({name: view for name, view in self.views.items() if name in names})

    def prepare(self, wanted: Mapping[str, Mapping[str, Wanted]]) -> None:
        self._settled = None
        views = self.views
        reset = {name: view for name, view in views.items() if not wanted.get(name)}
        for view in reset.values():
            self._optimizer.state.pop(view, None)
        self._first_states(reset)
        for name, view in views.items():
            states = wanted.get(name, {})
            kept = self._optimizer.state[view] if states else {}
            for state in [state for state in kept if state not in states]:
                del kept[state]
            for state, value in states.items():
                self._prepare_one(view, state, value)

    def _prepare_one(self, view: nn.Parameter, state: str, wanted: Wanted) -> None:
        current = self._optimizer.state[view].get(state)
        if isinstance(wanted, ScalarState):
            is_python = wanted.dtype in ("int", "float")
            value = wanted.value if is_python else torch.tensor(wanted.value, dtype=getattr(torch, wanted.dtype))
            place_state(self._optimizer, view, state, value)
        elif not (isinstance(current, Tensor) and current.shape == view.shape and wanted in (None, current.dtype)):
            dtype = view.dtype if wanted is None else wanted
            self._optimizer.state[view][state] = torch.zeros(view.shape, dtype=dtype, device=view.device)

    def kept_tensors(self) -> Iterator[Tensor]:
        states = self._optimizer.state
        for view in self.views.values():
            if view in states:
                yield from (value for value in states[view].values() if isinstance(value, Tensor))


def odd_states(states: Mapping[str, Any], view: nn.Parameter) -> Iterator[tuple[str, Tensor]]:
    """Yield the states that are tensors of other shapes than their parameter, such as factors."""
    for key, value in states.items():
        if isinstance(value, Tensor) and value.dim() and value.shape != view.shape:
            yield key, value


class StepHooks:
    """Calls torch's step, and lets hooks of other code change gradients that torch's optimizer does not see.

    Hooks after the step that do not read the optimizer may read the model, so they wait until its parameters are new.

    Args:
        optimizer: torch's, on which the hooks are registered.

    Attributes:
        is_stepping: the engine calls the optimizer's step; no other code may.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.is_stepping = False
        self._optimizer = optimizer
        this = weakref.ref(self)

        def before(*_: Any) -> None:
            hooks = this()
            if hooks is None:
                return
            if not hooks.is_stepping:
                raise EngineError(
                    "optimizer-step-direct",
                    "optimizer.step() has no gradients, which the engine keeps; call engine.step() instead",
                )
            hooks.take()

        self._handle = optimizer.register_step_pre_hook(before)
        self._shown: list[tuple[ParamPiece, FlatState, float]] = []
        self._changed: set[ParamGroup] = set()
        self._used: dict[str, bool] = {}

    def step_torch(self) -> None:
        """Call the step of torch's optimizer."""
        self.is_stepping = True
        try:
            with self._late_ones_held():
                self._optimizer.step()
        finally:
            self.is_stepping = False

    @property
    def are_there(self) -> bool:
        """Say whether other code has registered hooks."""
        return self._has_own or bool(step_hooks(self._optimizer)[2])

    @property
    def _has_own(self) -> bool:
        return len(step_hooks(self._optimizer)[0]) > 1

    def refuse(self) -> None:
        """Raise where hooks would not see the gradients of matrices.

        Raises:
            ConfigError: there are hooks.
        """
        if self._has_own:
            raise ConfigError(
                "step-hook-of-matrices",
                "a hook before the optimizer's step sees no gradients of matrices that Muon steps; remove the hook, "
                "and change gradients by engine.write(name, value, 'grad') before engine.step()",
            )

    def show(self, pieces: Sequence[ParamPiece], total: FlatState, update: OptimizerUpdate) -> None:
        """Show the mean gradients of a group's pieces in torch's step; what hooks take away is used no longer.

        Args:
            total: the gradients of the group, summed.
        """
        step_hooks(self._optimizer)[0].move_to_end(self._handle.id)  # it calls `take`
        self._used = update.used
        shown = [(piece, total, update.factor) for piece in pieces if update.used[piece.name]]
        for piece, flat, factor in shown:
            piece.view.grad = _mean(piece, flat, factor)
        self._shown += shown

    def take(self) -> None:
        """Store the gradients that hooks have changed, of all of a group."""
        shown, self._shown = self._shown, []
        left = [(piece, flat, factor, piece.view.grad) for piece, flat, factor in shown]
        for piece, flat, factor, gradient in left:
            piece.view.grad = None
            if gradient is None:
                self._used[piece.name] = False
            elif not torch.equal(gradient, _mean(piece, flat, factor)):
                self._changed.add(piece.group)
        for piece, flat, _, gradient in left:
            if piece.group in self._changed and gradient is not None:
                flat.write(piece.start, gradient.detach().reshape(-1))

    @contextmanager
    def _late_ones_held(self) -> Iterator[None]:
        """Keep the hooks after the step that do not read the optimizer from running: `call_late` does."""
        hooks = step_hooks(self._optimizer)[1]
        held = {key: hook for key, hook in hooks.items() if not reads_first_argument(hook)}
        for key in held:
            del hooks[key]
        try:
            yield
        finally:
            hooks.update(held)
            for key in sorted(hooks) if held else ():
                hooks.move_to_end(key)

    def call_late(self) -> None:
        """Call the hooks that a step holds."""
        for hook in list(step_hooks(self._optimizer)[1].values()):
            if not reads_first_argument(hook):
                hook(self._optimizer, (), {})

    def factor(self, group: ParamGroup, factor: float) -> float:
        """Return what is still to be multiplied with a group's gradients."""
        return 1.0 if group in self._changed else factor

    def forget(self) -> None:
        """Forget what hooks have seen and changed: a step has ended."""
        self._shown.clear()
        self._changed.clear()

    def close(self) -> None:
        """Remove the hook of the library."""
        self._handle.remove()


def _mean(piece: ParamPiece, flat: FlatState, factor: float) -> Tensor:
    view = piece.view
    return (flat.read(piece.start, piece.stop).to(view.device, view.dtype) * factor).view(view.shape)
