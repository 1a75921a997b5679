"""Units at run time, the phases of a step, and parameters of other ranks: data of `shardwise.zero.sharding_state`."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from types import FrameType
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from shardwise.config.errors import ConfigError
from shardwise.layout.layout import Layout
from shardwise.layout.param_groups import ROOT, GroupSpec
from shardwise.offload.worker import Task
from shardwise.runtime.param_guard import (
    ParameterEvents,
    ReleasedParameterError,
    parameter_classes,
    released_type,
)
from shardwise.runtime.precision import torch_dtype
from shardwise.runtime.torch_private import parameter_class, plain_torch_functions, set_data, set_parameter_class
from shardwise.zero.flat_buffer import ParamState, PartType
from shardwise.zero.param_group import ParamGroup

log = logging.getLogger("shardwise")

# What reads gradients to change them: torch's own clipping, and `Module.zero_grad`.
_CLIP_FILE: Final = clip_grad.__file__
_ZERO_GRAD_CODE: Final = nn.Module.zero_grad.__code__


class Phase(Enum):
    """Says what the engine does with the model."""

    IDLE = "nothing of a pass is under way"
    FORWARD = "the model's forward runs"
    PRE_BACKWARD = "the engine expects gradients, and no hook has reported the backward"
    BACKWARD = "autograd runs a backward through the model"
    STEPPING = "gradients are reduced, and the optimizer steps"


# An exception may end a forward unseen, and a new forward may follow whatever an exception has ended. A backward goes
# back to where it began: one that a forward runs, to that forward.
LEGAL: Final[Mapping[Phase, frozenset[Phase]]] = {
    Phase.IDLE: frozenset(Phase),
    Phase.FORWARD: frozenset(Phase),
    Phase.PRE_BACKWARD: frozenset({Phase.IDLE, Phase.FORWARD, Phase.BACKWARD}),
    Phase.BACKWARD: frozenset({Phase.IDLE, Phase.FORWARD, Phase.PRE_BACKWARD}),
    Phase.STEPPING: frozenset({Phase.IDLE}),
}


@dataclass(eq=False)
class BackwardPass:
    """Holds what is known of the backward that is under way, or was the last one.

    Attributes:
        began_in: the phase to which it goes back.
        num_units: blocks whose backward is under way.
        will_reduce: ranks sum the gradients of the engine's next backwards.
        is_inner: a forward or a loss runs it, or another is to run through it: it gives no gradients.
    """

    began_in: Phase = Phase.IDLE
    num_units: int = 0
    will_reduce: bool = True
    is_inner: bool = False
    reduces: bool = False
    after: Callable[[], None] | None = None

    def begin(
        self, began_in: Phase, is_inner: bool, has_gradients: bool, after: Callable[[], None] | None = None
    ) -> None:
        """Begin a backward; `has_gradients` if it may give gradients to parameters that are trained.

        Args:
            after: what is to be called at its end.
        """
        self.began_in, self.is_inner, self.num_units, self.after = began_in, is_inner, 0, after
        self.reduces = self.will_reduce and has_gradients and not is_inner

    def count_units(self, change: int) -> int:
        """Count blocks whose backward begins or, less than 0, ends; return how many were under way."""
        before, self.num_units = self.num_units, self.num_units + change
        return before

    def take_after(self) -> Callable[[], None] | None:
        """Return what is to be called, once."""
        after, self.after = self.after, None
        return after


@dataclass(eq=False)
class Unit:
    """Holds the groups of one module, and what is known of its passes.

    Attributes:
        groups: of the trainable and of the frozen parameters.
        stage: of a pipeline, which computes now; None for all that the module belongs to.
        backward_start_s: when the backward began; None where none is under way.
        num_awaited_inputs: forwards whose inputs are to get their gradients.
        has_all_inputs: the inputs of all forwards have them.
        has_untracked_forward: the inputs of a forward cannot be watched.
    """

    name: str
    groups: tuple[ParamGroup, ...] = ()
    stage: int | None = None
    forward_start_s: float = 0.0
    backward_start_s: float | None = None
    num_awaited_inputs: int = 0
    has_all_inputs: bool = False
    has_untracked_forward: bool = False

    @cached_property
    def is_root(self) -> bool:
        """Say whether the unit holds what no block does."""
        return self.name == ROOT

    @property
    def awaits_backward(self) -> bool:
        """Say whether a graph through the unit waits for its backward."""
        return self.num_awaited_inputs > 0 or self.has_untracked_forward

    def expect_inputs(self, are_tracked: bool) -> None:
        """Note a forward: its backward ends only after its inputs have their gradients, if they are tracked."""
        self.num_awaited_inputs += are_tracked
        self.has_untracked_forward |= not are_tracked

    def note_inputs(self) -> bool:
        """Note that the inputs of one forward have their gradients; say whether those of all have."""
        self.num_awaited_inputs -= 1
        self.has_all_inputs = self.num_awaited_inputs == 0 and not self.has_untracked_forward
        return self.has_all_inputs

    def end_backward(self) -> float | None:
        """Expect nothing of the forwards so far any more; return when their backward began, if it has."""
        start_s, self.backward_start_s = self.backward_start_s, None
        self.num_awaited_inputs, self.has_all_inputs, self.has_untracked_forward = 0, False, False
        return start_s

    @property
    def used_groups(self) -> tuple[ParamGroup, ...]:
        """Return the groups whose parameters the computing stage uses."""
        if self.stage is None:
            return self.groups
        return tuple(group for group in self.groups if self.stage in group.spec.stages)

    def reshard(self, keeps_views: bool = False) -> None:
        """Release the parameters that are stored as shards; `keeps_views` as for `ParamGroup.reshard`."""
        for group in self.groups:
            group.reshard(keeps_views)

    # [Note: Records of micro-batches]
    # When a unit's backward is over follows from the forwards that it has counted, and these belong to one micro-batch.
    # A pipeline runs forwards of other micro-batches before that backward. So each one's record is put away after its
    # forward, and brought back before its backward.
    def save_record(self) -> tuple[int, bool]:
        """Forget the forwards so far, whose backwards come later; return what `restore_record` needs before them."""
        record = self.num_awaited_inputs, self.has_untracked_forward
        self.num_awaited_inputs, self.has_untracked_forward = 0, False
        return record

    def restore_record(self, record: tuple[int, bool]) -> None:
        """Expect the backward of the forwards whose record was saved."""
        self.num_awaited_inputs, self.has_untracked_forward = record


class HostUpdates:
    """Gathers what steps on the host have changed, in the order in which all ranks have started them."""

    # [Note: Gathers after the step]
    # Ranks may use groups in different orders, or skip a block, but gathers need one order on all of them. So they
    # follow the order in which the steps were started: to use a group gathers those before it first. What a forward has
    # not used is gathered at its end, before the reductions of its backward, which is the same place on all ranks.
    def __init__(self) -> None:
        self._ungathered: deque[ParamGroup] = deque()

    def start(self, group: ParamGroup, stepping: Task) -> None:
        """Let a group take over an update that is under way."""
        self._ungathered.append(group)
        group.refresh_in_background(stepping, partial(self.gather, group))

    def gather(self, last: ParamGroup | None = None) -> None:
        """Start the gathers of the updated groups, up to `last` or all."""
        while self._ungathered and (last is None or last in self._ungathered):
            self._ungathered[0].gather_update()
            self._ungathered.popleft()

    def finish(self) -> None:
        """Return once the updates are in the parameters that are stored whole; all ranks call it together."""
        groups = tuple(self._ungathered)
        self.gather()
        for group in groups:
            if not group.is_released_between_uses:
                group.wait()


MOST_LENT: Final = 4
"""Groups that stay gathered outside the model's forward beside the root's: code walks over a few modules at a time."""


class LentGroups:
    """Holds the groups that are gathered where no unit's hook says when they are used no more.

    They stay until others are gathered so, or their unit claims them. All ranks that run the same code gather the same
    groups here, as in a forward.

    Attributes:
        unannounced: those that stay until the end of the backward, or of an evaluation's forward.
    """

    def __init__(self) -> None:
        self.unannounced: list[ParamGroup] = []
        self._groups: list[ParamGroup] = []  # the last one last

    def keep(self, group: ParamGroup) -> None:
        """Keep a group, whose use no hook ends, until the end of the backward."""
        group.pin()
        if group not in self.unannounced:
            self.unannounced.append(group)

    def forget(self, group: ParamGroup) -> None:
        """Leave out a group that is no more."""
        self.unannounced = [other for other in self.unannounced if other is not group]

    def lend(self, group: ParamGroup, index: int, stays: bool) -> Tensor | None:
        """Gather a group; return one of its parameters as `ParamGroup.lend` does.

        Args:
            stays: others do not take its place.
        """
        if group.state is not ParamState.UNSHARDED:
            # Before the next one is gathered, so that never more are whole at the same time.
            for other in self._groups[: 1 - MOST_LENT]:
                other.reshard(keeps_views=True)
            group.wait()
        if not stays:
            others = (each for each in self._groups if each is not group and each.state is ParamState.UNSHARDED)
            self._groups = [*others, group]
        return group.lend(index)

    def claim(self, group: ParamGroup) -> None:
        """Leave a group to its unit, which is about to use it."""
        self._groups = [other for other in self._groups if other is not group]
        group.claim()


class ShownParts:
    """Lets code in a forward read the whole of a parameter of another module, of which this rank has a part.

    Compiled code is for the classes of its parameters with which it was compiled.
    """

    def __init__(self) -> None:
        self._part_type: PartType | None = None
        self._are_blocks_compiled = False
        self._shown: PartType | None = None
        self._root_groups: list[ParamGroup] = []

    def follow(self, part_type: PartType, are_blocks_compiled: bool) -> None:
        """Give such parameters the classes that `part_type` returns while forwards run."""
        self._part_type, self._are_blocks_compiled = part_type, are_blocks_compiled

    def show(self, groups: Iterable[ParamGroup], is_on: bool = True) -> None:
        """Begin or end to show whole parameters."""
        self._shown = self._part_type if is_on else None
        all_groups = [*groups] if self._part_type is not None else []
        self._root_groups = [group for group in all_groups if is_on and group.spec.unit == ROOT]
        for group in all_groups:
            group.show_parts(self._shown)

    def enter(self, unit: Unit) -> None:
        """Give a compiled block parameters as they are; what it reads is checked when it is compiled."""
        if self._are_blocks_compiled and not unit.is_root:
            for group in (*unit.groups, *self._root_groups):
                group.show_parts(None)

    def leave(self, unit: Unit) -> None:
        """Go on to show them after a compiled block."""
        if self._are_blocks_compiled and not unit.is_root:
            for group in (*unit.groups, *self._root_groups):
                group.show_parts(self._shown)


class GradientWatch:
    """Answers what other code does to `grad` of parameters while the engine has the gradients, where nothing is.

    Args:
        receiver: of what happens to guarded parameters.

    Attributes:
        classes: of guarded parameters, and of those that are watched.
        minds: of "clear" and "clip", what torch's functions may not do in vain; scripts may be used to that.
    """

    def __init__(
        self, model: nn.Module, receiver: Callable[[], ParameterEvents | None], zero_grad: Callable[[], None]
    ) -> None:
        self.classes = parameter_classes(receiver, self.on_read, self.on_write)
        self._model = weakref.ref(model)
        self._zero_grad = zero_grad
        self._mode: Literal["off", "on", "paused"] = "off"
        self._has_warned = False
        self.minds = frozenset({"clear", "clip"})

    def turn(self, is_on: bool, groups: Sequence[ParamGroup]) -> None:
        """Watch the parameters of groups that are stored whole, or stop."""
        before, self._mode = self._mode, "on" if is_on else "off"
        if is_on != (before == "on"):
            for group in groups:
                group.watch(self.classes.watched if is_on else None)

    def pause(self, groups: Sequence[ParamGroup]) -> None:
        """Stop for a forward, which needs plain parameters, until `resume`."""
        before = self._mode
        self.turn(False, groups)
        self._mode = "paused" if before == "on" else "off"

    def resume(self, groups: Sequence[ParamGroup]) -> None:
        """Watch on, if a forward has paused it."""
        if self._mode == "paused":
            self.turn(True, groups)

    def on_read(self, reader: FrameType) -> None:
        """Clear the gradients where `zero_grad` reads one; warn the first time where others do.

        Args:
            reader: the frame that reads a gradient.

        Raises:
            ConfigError: what reads it would change the gradients.
        """
        if self._mode != "on":
            return
        if "clip" in self.minds and reader.f_code.co_filename == _CLIP_FILE:
            raise ConfigError(
                "gradients-clipped-outside",
                "torch.nn.utils finds no gradients to clip between engine.backward and engine.step: the engine has "
                "them, sharded, and clips them itself; set optimizer.clip_norm (DeepSpeed's gradient_clipping)",
            )
        if "clear" in self.minds and reader.f_code is _ZERO_GRAD_CODE:
            self._clear(reader.f_locals.get("self"))
        elif not self._has_warned:
            self._has_warned = True
            log.warning(
                "a parameter's grad is None between engine.backward and engine.step: the engine has the gradients, "
                "sharded, and clips them itself; set optimizer.clip_norm, or read them by engine.read(name, 'grad')"
            )

    def _clear(self, module: Any) -> None:
        if not isinstance(module, nn.Module) or all(submodule is not self._model() for submodule in module.modules()):
            raise ConfigError(
                "gradients-cleared-partly",
                f"{type(module).__name__}.zero_grad() of a part of the model, between engine.backward and engine.step: "
                "the engine has the gradients; engine.zero_grad() clears all, engine.write(name, 0, 'grad') some",
            )
        self._zero_grad()

    def on_write(self, parameter: nn.Parameter, value: Tensor | None) -> None:
        """Refuse to set a parameter's `grad` where the engine takes no notice.

        Raises:
            ConfigError: it would be lost.
        """
        is_lost = self._mode == "on" and parameter.requires_grad and ("clear" in self.minds or value is not None)
        if is_lost and (model := self._model()) is not None:
            name = next((name for name, other in model.named_parameters() if other is parameter), "")
            write = f"use engine.write({name!r}, value, 'grad'), or safe_set_full_grad"
            fix = "call engine.zero_grad()" if value is None else write
            raise ConfigError(
                "gradient-assigned",
                f"grad of parameter {name} was set between engine.backward and engine.step, but the engine has the "
                f"gradients, sharded; {fix}",
            )


class RemoteParams:
    """Holds a model's parameters that are not on this rank.

    Args:
        layout: a layout; `elsewhere` has the groups of these parameters.
        held_stages: the stages of this rank, for messages.
    """

    def __init__(self, model: nn.Module, layout: Layout, held_stages: Sequence[int]) -> None:
        specs = layout.elsewhere
        self._specs = {id(model.get_parameter(place.name)): (spec, place) for spec in specs for place in spec.params}
        self._parameters = [model.get_parameter(place.name) for spec in specs for place in spec.params]
        self._kinds = [parameter_class(parameter) for parameter in self._parameters]
        here = ", ".join(map(str, sorted(held_stages)))
        places = self._specs

        def refuse(parameter: nn.Parameter) -> torch.Tensor:
            spec, place = places[id(parameter)]
            stages = ", ".join(map(str, spec.stages))
            raise ReleasedParameterError(
                "parameter-used-off-stage",
                f"parameter {place.name} is of pipeline stage {stages}, but used on a rank with stage {here}; "
                "use it in a module of its own stage, tie it to a parameter of a module that runs here, or name its "
                "module in pipeline.replicate",
            )

        for parameter, kind in zip(self._parameters, self._kinds, strict=True):
            spec, place = places[id(parameter)]
            shape, dtype = place.shape, torch_dtype(layout.precision_of(spec).param)  # models build masks in their own
            if spec.is_opaque:
                shape, dtype = tuple(parameter.shape), parameter.dtype
            parameter.grad = None
            set_data(parameter, torch.empty(shape, dtype=dtype, device="meta"))
            set_parameter_class(parameter, released_type(refuse, kind))

    @property
    def names(self) -> dict[int, str]:
        """Return the parameters' names by their identities."""
        return {key: place.name for key, (_, place) in self._specs.items()}

    def trains(self) -> Iterator[tuple[GroupSpec, bool]]:
        """Return for each parameter its group and its current `requires_grad`."""
        return ((self._specs[id(parameter)][0], parameter.requires_grad) for parameter in self._parameters)

    def follow(self, specs: Sequence[GroupSpec]) -> None:
        """Take over new groups of the same parameters."""
        by_name = {place.name: (spec, place) for spec in specs for place in spec.params}
        for parameter in self._parameters:
            _, place = self._specs[id(parameter)]
            self._specs[id(parameter)] = by_name[place.name]

    def close(self) -> None:
        """Make the parameters plain ones, without values, on meta."""
        for parameter, kind in zip(self._parameters, self._kinds, strict=True):
            set_parameter_class(parameter, kind)
        self._parameters.clear()
        self._specs.clear()


def check_members(model: nn.Module, known: Mapping[int, str]) -> None:
    """Raise if a model's parameters are not those that an engine knows, by their identities.

    Raises:
        ConfigError: names the parameter.
    """
    with plain_torch_functions():
        there = {id(parameter): (name, parameter) for name, parameter in model.named_parameters()}
    if there.keys() == known.keys():
        return
    fix = "call engine.close(), change the model, then initialize again"
    # During `torch.func.functional_call` tensors stand for parameters, such as those after an inner step.
    stand_ins = {name for name, value in there.values() if not isinstance(value, nn.Parameter)}
    added = [name for key, (name, _) in there.items() if key not in known and name not in stand_ins]
    if added:
        raise ConfigError(
            "model-parameters-changed",
            f"parameter {added[0]} was added or replaced after initialize, so no engine trains it; {fix}",
        )
    removed = [name for key, name in known.items() if key not in there and name not in stand_ins]
    if not removed:
        return
    raise ConfigError(
        "model-parameters-changed", f"parameter {removed[0]} was removed from the model after initialize; {fix}"
    )
