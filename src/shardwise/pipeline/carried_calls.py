"""Carries what hooks of users see of earlier stages to the last one, where the loss may need what they keep.

A hook on a module runs on the rank of the module's stage. If it keeps a feature, the loss is computed on another rank.
So the calls that hooks saw are sent on, with the stage's output and back with its gradients, and the last stage shows
them to its own copies of the hooks before its forward goes on. A model without hooks sends nothing more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardwise.config.errors import ConfigError
from shardwise.hf.recorded import recorded_lists
from shardwise.pipeline.pytree_codec import take_apart
from shardwise.runtime.param_guard import ReleasedParameterError
from shardwise.runtime.torch_private import hook_dicts
from shardwise.runtime.user_hooks import (
    HookedCall,
    has_any_user_hooks,
    has_global_hooks,
    has_user_hooks,
    record_calls,
    show_call,
    users_hooks_off,
)

Place = tuple[int, str, nn.Module]
"""Of a module: the index of its unit, its name, itself."""


class CarriedCalls(NamedTuple):
    """Holds a boundary value, the names of modules with hooks of users, and the calls that these saw."""

    value: Any
    hooked: list[str]
    calls: list[list[Any]]


class RecordedOutputs(NamedTuple):
    """Holds a boundary value, and what the model has recorded until there."""

    output: Any
    lists: dict[str, list[Any]]


def without_recorded(value: Any) -> Any:
    """Return the boundary value of what was sent."""
    return value.output if isinstance(value, RecordedOutputs) else value


class HookCarrier:
    """Records the calls that hooks see in earlier stages, and shows them in the last one.

    Args:
        model: what the stages are cut from. Its hooks see its output in the last stage alone: that of another stage is
            what it sends.
        units: the names and modules of all units, in the order of the stages.
        holds_loss: whether this rank has the last stage.

    Attributes:
        lists: to which units add; each stage begins with what those before it have added, as with those in which a
            Hugging Face model records outputs.
    """

    def __init__(self, model: nn.Module, units: Sequence[tuple[str, nn.Module]], holds_loss: bool) -> None:
        places: list[Place] = [
            (index, f"{name}.{inner}" if inner else name, module)
            for index, (name, unit) in enumerate(units)
            for inner, module in unit.named_modules()
        ]
        self._dicts = [(hooks, place) for place in places for hooks in hook_dicts(place[2])[:2]]
        self._model, self._holds_loss = model, holds_loss
        self._hooked: list[Place] = []
        self._received: CarriedCalls | None = None
        self._calls: list[HookedCall] = []
        self._recording = ExitStack()
        self.lists: dict[str, list[Any]] = {}

    def begin_step(self) -> None:
        """Find the modules that have hooks of users.

        Raises:
            ConfigError: a hook is on all modules.
        """
        if has_global_hooks():
            raise ConfigError(
                "hook-on-all-modules",
                "a hook of torch.nn.modules.module.register_module_forward_hook is on all modules, and under mesh.pp "
                "a rank has some of them; register it on the modules that it is for",
            )
        found = {place[1]: place for hooks, place in self._dicts if hooks}  # of most modules there are none
        self._hooked = [place for place in found.values() if has_user_hooks(place[2])]

    def begin(self, units: range, is_last: bool, received: Any) -> Any:
        """Begin a stage's forward with what it has received; return the boundary value in it.

        Args:
            units: the indices of the stage's units.
            is_last: whether it is the last stage.
            received: what the stage before has sent.
        """
        self._received = received if isinstance(received, CarriedCalls) else None
        modules = {name: module for index, name, module in self._hooked if index in units}
        if not is_last and has_any_user_hooks(self._model):
            self._recording.enter_context(users_hooks_off(self._model))
        if modules and not is_last:
            self._recording.enter_context(record_calls(modules, self._calls))
        return self._received.value if self._received is not None else received

    def end(self) -> None:
        """End a stage's forward."""
        self._recording.close()
        self._received = None
        self._calls.clear()

    def put_recorded(self, value: Any) -> None:
        """Fill lists with what was recorded before; call it where the sender's forward ended."""
        active = recorded_lists() | self.lists
        for key, items in value.lists.items() if isinstance(value, RecordedOutputs) else ():
            if key in active:
                active[key][:] = items

    def pack(self, units: range, value: Any) -> Any:
        """Return what a stage sends for a boundary value: with it goes what the model has recorded, if anything.

        Raises:
            ConfigError: the loss is computed on this rank, whose hooks have seen the call by now, and others since.
        """
        if self._holds_loss and (call := next((call for call in self._calls if not call.is_changed), None)):
            raise ConfigError(
                "hook-beside-loss",
                f"a hook on {call.name} runs ahead of the loss of its micro-batch, on a rank with several stages, and "
                "what it keeps would be of another one; use pipeline.schedule='1f1b', or return the feature from the "
                "model and remove the hook",
            )
        recorded = {key: list(items) for key, items in (recorded_lists() | self.lists).items() if items}
        value = RecordedOutputs(value, recorded) if recorded else value
        before = self._received or CarriedCalls(None, [], [])
        hooked = before.hooked + [name for index, name, _ in self._hooked if index in units]
        return CarriedCalls(value, hooked, before.calls + list(map(_encoded, self._calls))) if hooked else value

    def show(self, num_units: int) -> None:
        """Show the last stage's hooks the calls of the stages before.

        Raises:
            ConfigError: a hook is on this rank only, or needs a parameter of another stage.
        """
        carried = self._received or CarriedCalls(None, [], [])
        modules = {name: module for index, name, module in self._hooked if index < num_units}
        for name in modules.keys() - set(carried.hooked):
            raise ConfigError(
                "hook-on-some-ranks",
                f"module {name} has a hook on the rank of the loss and none on the rank of its stage, where it runs; "
                "register it on all ranks",
            )
        for name, args, kwargs, output, is_changed in carried.calls:
            if name in modules:
                _show(modules[name], HookedCall(name, args, kwargs, output, is_changed))


def _show(module: nn.Module, call: HookedCall) -> None:
    try:
        show_call(module, call)
    except ReleasedParameterError as error:
        if call.is_changed:  # by a hook with weights, such as of an adapter: it has done its work
            return
        raise ConfigError(
            "hook-reads-other-stage",
            f"a hook on {call.name} runs again on the rank of the loss, for what it keeps, and reads a parameter that "
            f"is not there ({error}); compute this in the model's forward, and return it",
        ) from error


def _encoded(call: HookedCall) -> list[Any]:
    return [call.name, _sendable(call.args), _sendable(call.kwargs), call.output, call.is_changed]


def _sendable(value: Any) -> Any:
    """Return arguments without what no message can carry, such as a cache; None takes its place."""
    if value is None or isinstance(value, Tensor):
        return value
    try:
        take_apart(value)
    except ConfigError:
        if isinstance(value, Mapping):
            return {key: _sendable(inner) for key, inner in value.items()}
        return tuple(map(_sendable, value)) if type(value) in (tuple, list) else None
    return value
