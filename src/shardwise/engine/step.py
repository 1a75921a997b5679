"""A step of an engine, from its first forward to the update of its parameters: functions over `EngineParts`.

A runner computes the micro-batches and calls `update`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import ScalarSum
from shardwise.comm.loss import LossSum, NonFiniteLossError, check_loss, first_nonfinite_module
from shardwise.config.errors import ConfigError, EngineError
from shardwise.engine.parts import EngineParts
from shardwise.engine.types import StepResult
from shardwise.layout.layout import Layout
from shardwise.layout.resolve import layout_of
from shardwise.layout.zero_stages import Placement
from shardwise.optim.rules import LateFactor
from shardwise.optim.schedules import advance
from shardwise.runtime.param_guard import has_gradient
from shardwise.runtime.precision import torch_dtype
from shardwise.zero.optimizer_plan import NamedGroup
from shardwise.zero.resources import ModelEvents
from shardwise.zero.state_access import (
    MASTER,
    EngineState,
    read_held_state,
    read_optimizer_states,
    read_state,
    write_optimizer_states,
    write_state,
)

_NORM_EPS: Final = 1e-6


class StepEvents(ModelEvents):
    """Follows the model and the optimizer once the engine is built and while it lives: they do not keep it alive."""

    def __init__(self) -> None:
        self._parts: Callable[[], EngineParts | None] = lambda: None

    def follow(self, parts: EngineParts) -> None:
        """Pass events on to an engine from now on."""
        self._parts = weakref.ref(parts)

    def before_model(self) -> None:
        if (parts := self._parts()) is not None:
            before_model(parts)

    def before_backward(self) -> Callable[[], None] | None:
        return before_own_backward(parts) if (parts := self._parts()) is not None else None

    def zero_grad(self) -> None:
        if (parts := self._parts()) is not None:
            follow_zero_grad(parts)


def refuse_unless_trainable(parts: EngineParts) -> None:
    """Raise where every parameter is frozen.

    Raises:
        ConfigError: they are.
    """
    if parts.config.optimizer.name == "none":
        raise ConfigError(
            "evaluates-only", "optimizer.name=none makes an engine that only evaluates; name an optimizer to train"
        )
    if not parts.layout.trained_names:
        raise ConfigError("all-frozen", "every parameter of the model is frozen; set requires_grad on those to train")


def before_model(parts: EngineParts) -> None:
    """Follow what the user has done to the model since the last step; its forward is about to begin."""
    if parts.hooks_once is not None:
        parts.hooks_once.follow()
    if parts.split_values is not None:
        parts.split_values.views.follow()
    # In a pipeline's step it was followed before the first forward: the whole of it counts as a backward.
    is_followed = parts.state.num_backwards > 0 or parts.status.is_in_backward
    if is_followed or not torch.is_grad_enabled() or parts.status.away is not None:
        return
    parts.sharding.check_model()
    follow_freezing(parts)


def agree_on_hooks(parts: EngineParts) -> None:
    """Find in the first step the hooks that some ranks have and others have not, which take part all the same: what
    they see is gathered. Later all ranks register the same.
    """
    mesh, values = parts.layout.mesh, parts.split_values
    if parts.state.num_steps > 0 or mesh.tp * mesh.cp * mesh.ep == 1 or parts.comm.is_simulated:
        return
    handles = [handle for group in parts.sharding.groups for handle in group.gradient_handles]
    names = [name for handle in handles for name in handle.hooked()]
    differing = parts.check_batch.some_have([*names, *(values.views.hooked() if values is not None else ())])
    for handle in handles if differing else ():
        handle.join(differing)
    if values is not None:
        values.views.joined |= differing


def follow_freezing(parts: EngineParts) -> None:
    """Regroup where `requires_grad` has changed since the last step; all ranks do so together.

    A parameter that has taken a step and is frozen now keeps its place and its states: it may be frozen for a while
    only.

    Raises:
        ConfigError: a forward awaits its backward.
    """
    if parts.sharding.is_as_trainable(may_pause=parts.state.num_steps > 0):
        return
    if parts.losses.has_open:
        raise ConfigError(
            "frozen-within-step",
            "requires_grad changed between a forward and its backward; freeze and unfreeze between steps",
        )
    trained = frozenset(parts.layout.trained_names if parts.state.num_steps > 0 else ())
    old = parts.layout
    facts = old.facts.with_trained({name for name, each in parts.model.named_parameters() if each.requires_grad})
    layout = layout_of(facts, parts.config, old.tensor, old.pipeline, trained)
    _regroup(parts.states(), layout, parts.optimizer_plan.groups_of(layout))
    parts.state.layout = layout


def _regroup(states: EngineState, layout: Layout, named_groups: Sequence[NamedGroup]) -> None:
    """Make groups and optimizer follow a layout in which other parameters are trainable. All ranks call it.

    Args:
        named_groups: the optimizer's parameter groups by the names of all that is trainable now.
    """
    sharding = states.sharding
    there = {group.spec for group in sharding.groups}
    changed = {spec.unit for spec in there.symmetric_difference(layout.groups)}
    for unit in [unit.name for unit in sharding.units if unit.name in changed]:
        masters: dict[str, Tensor | None] = {}
        optimizer_states: dict[str, dict[str, Tensor]] = {}
        for spec in there.difference(layout.groups):
            keeps_exact = spec.trainable or layout.gather_codec(spec) is not None
            for place in spec.params if spec.unit == unit and keeps_exact else ():
                masters[place.name] = read_held_state(states, place.name, MASTER)
                if spec.trainable:
                    optimizer_states[place.name] = read_optimizer_states(states, place.name)
        sharding.regroup(unit, layout)
        states.sharded.regroup(sharding.groups, named_groups)
        for spec in set(layout.groups) - there:
            keeps_exact = spec.trainable or layout.gather_codec(spec) is not None
            for place in spec.params if spec.unit == unit and keeps_exact else ():
                if place.name in masters:
                    write_state(states, place.name, masters[place.name], MASTER)
                if spec.trainable and place.name in optimizer_states:
                    write_optimizer_states(states, place.name, optimizer_states[place.name])
    sharding.absent.follow(layout.elsewhere)


def open_loss(parts: EngineParts, batch: Any, total: LossSum | None) -> Tensor:
    """Return the mean loss of a batch, which awaits its backward where gradients are enabled."""
    assert total is not None, "forwards that run alone have their loss"
    if not torch.is_grad_enabled():
        return total.mean()
    parts.state.batches.append(batch)
    return parts.losses.open(total)


def run_backward(parts: EngineParts, loss: Tensor, is_boundary: bool | None = None, retain_graph: bool = False) -> None:
    """Add the gradients of a loss that `open_loss` returned, or in plain mode of any scalar; see `Engine.backward`."""
    parts.status.check()
    refuse_unless_trainable(parts)
    if parts.losses.plain.is_on and not parts.losses.knows(loss):
        check_loss(loss)
        # Both kinds of a plain step's backwards have gradients of one scale, so they may take turns.
        if not parts.status.is_in_backward:  # one in another's hook is a part of that
            parts.losses.add_plain(loss)
        weight = loss.new_full((), parts.scaler.scale / parts.losses.plain.weight)
    else:
        weight = parts.losses.close(loss) * parts.scaler.scale
    backpropagate([parts], loss, weight, is_boundary, retain_graph)


def before_own_backward(parts: EngineParts) -> Callable[[], None] | None:
    """Begin a backward that the user has called on a tensor; return what ends it, None where it is not plain.

    Raises:
        ConfigError: the loss must be scaled.
    """
    if not parts.losses.plain.is_on or not parts.layout.trained_names:
        return None
    parts.status.check()
    parts.losses.plain.check_unseen(parts.scaler.scale)
    parts.losses.add_plain(torch.zeros((), device=parts.device))
    begin_backward(parts)
    return partial(end_backward, parts)


def check_accumulated(parts: EngineParts, partial: bool) -> None:
    """Raise where a step would come after fewer backwards than `batch.accumulation`, and is not `partial`.

    Raises:
        EngineError: it would; gradients stay.
    """
    expected = parts.config.batch.accumulation or 1
    if 0 < parts.state.num_backwards < expected and not partial:
        raise EngineError(
            "accumulation-unfinished",
            f"engine.step() after {parts.state.num_backwards} of batch.accumulation={expected} backwards; call it "
            "after the last one, or engine.step(partial=True) to step with fewer",
        )


def end_backward(parts: EngineParts) -> None:
    """Note that the backward is over, and that gradients from now on are none of the engine's."""
    parts.status.end_backward()
    parts.timeline.clock.switch("outside")
    parts.sharding.expect_no_gradients()
    parts.sharding.watch_gradients()


def begin_backward(parts: EngineParts, is_boundary: bool | None = None) -> None:
    """Prepare the next backward of the step: what it reduces, and whether it steps groups as it goes."""
    parts.status.begin_backward()
    parts.timeline.clock.switch("backward")
    parts.sharding.watch_gradients(False)
    parts.timeline.micro_batch = parts.state.num_backwards
    parts.sharding.prepare_backward(*parts.state.take_backward(is_boundary))


def update(parts: EngineParts, forward: Callable[[Any], object]) -> StepResult:
    """Update the parameters by the clipped mean gradient, and advance the schedule.

    Args:
        forward: of one batch, to find where a value that is not finite comes from.

    Raises:
        ConfigError: gradients are not all from the engine, or of other parameters than the step began with.
        EngineError: there was no backward.
        NonFiniteLossError: loss or gradients are not finite.
    """
    parts.timeline.clock.switch("step")
    if parts.state.before_update is not None:
        parts.state.before_update()
    _check_gradients(parts)
    parts.sharding.finish()
    sums = _start_sums(parts, parts.sharded.square_sum())
    early = _late_factor(parts, sums.numbers)
    if early is not None:
        _step_optimizer(parts, early, dict.fromkeys(parts.sharded.names, True))
    loss_sum, count, square_sum, used, chosen = _read_sums(parts, sums)
    if early is not None:
        parts.sharding.end_step()  # so that the model may run, to find what is not finite
    if (error := parts.losses.count_error(count, f"step {parts.state.num_steps + 1}")) is not None:
        zero_grad(parts)
        raise error
    scale = parts.scaler.scale
    to_mean = _to_mean(parts, count)
    grad_norm = math.sqrt(square_sum) * to_mean if square_sum >= 0 and count else math.nan if count else 0.0
    # In plain mode a loss that is a mean over no targets may be NaN; its gradients are 0.
    overflowed, has_loss = not math.isfinite(grad_norm), math.isfinite(loss_sum) or parts.losses.is_plain
    on_nonfinite = parts.config.run.on_nonfinite
    is_taken = (has_loss and not overflowed) or (on_nonfinite == "ignore" and not parts.scaler.is_dynamic)
    can_skip = on_nonfinite == "skip" or (has_loss and parts.scaler.is_dynamic and parts.scaler.can_shrink)
    skipped = count == 0 or (can_skip and not is_taken)
    if not (is_taken or skipped):
        _fail_nonfinite(parts, loss_sum, grad_norm, forward)
    learning_rate = parts.optimizer.param_groups[0]["lr"]
    if skipped:
        parts.sharded.clear()
    else:
        if early is None:
            limit = parts.config.optimizer.clip_norm
            # The term keeps the factor finite at a zero norm, as in torch's clip_grad_norm_.
            clip = min(1.0, limit / (grad_norm + _NORM_EPS)) if limit is not None else 1.0
            _step_optimizer(parts, to_mean * clip, used)
        advance(parts.state.scheduler)
    if count and parts.scaler.is_dynamic:
        parts.scaler.update(overflowed)
    parts.state.num_steps += 1
    loss = loss_sum / (count or 1.0) if parts.losses.plain.is_loss_known else math.nan
    _end_step(parts)
    skew = _balance(parts, chosen, skipped)
    if not skipped:
        parts.sharded.hooks.call_late()
    return StepResult(parts.state.num_steps, loss, count, grad_norm, learning_rate, skipped, scale, skew)


def _step_optimizer(parts: EngineParts, factor: float | LateFactor, used: Mapping[str, bool]) -> None:
    parts.note_update()
    parts.sharding.refresh(parts.sharded.step(factor, used, parts.timeline), parts.state.is_aliased)


def _balance(parts: EngineParts, counts: Sequence[float], skipped: bool) -> tuple[float, ...]:
    """Move the biases of routers by the tokens of each expert on all ranks; return how uneven these are by layer."""
    if parts.state.balance is None:
        return ()
    skew, changes = parts.state.balance.end_step(counts, skipped)
    for name, change in changes.items():
        states = parts.states()
        bias = read_state(states, name, MASTER)
        assert bias is not None, "parameters have values"
        write_state(states, name, bias + change.view_as(bias), MASTER)
    return skew


def zero_grad(parts: EngineParts, keeps_forwards: bool = True) -> None:
    """Forget the gradients since the last step, and a backward that an exception ended.

    Args:
        keeps_forwards: a forward that awaits its backward may have it after this, unless a backward has failed.
    """
    parts.status.check_present()
    awaits_backward = parts.losses.has_open or any(unit.awaits_backward for unit in parts.sharding.units)
    keeps_forwards &= awaits_backward and not parts.status.is_in_backward
    parts.sharding.abandon()
    for parameter in _untrained(parts):
        parameter.grad = None  # else it is added to the first one after the parameter is unfrozen
    parts.sharded.clear()
    parts.status.end_backward()
    if not keeps_forwards:
        _end_step(parts)
        return
    parts.state.num_backwards = 0
    parts.losses.plain.begin_step()
    parts.losses.clear(keeps_open=True)
    parts.sharding.watch_gradients(False)


def follow_zero_grad(parts: EngineParts) -> None:
    """Forget the gradients since the last step, if there are any, for `zero_grad()` of the model or optimizer."""
    if "clear" in parts.sharding.watch.minds and (
        parts.state.num_backwards > 0 or parts.sharding.has_foreign_gradients
    ):
        zero_grad(parts)


def _check_gradients(parts: EngineParts) -> None:
    refuse_unless_trainable(parts)
    parts.sharding.check_model()
    if parts.sharding.has_foreign_gradients:
        raise ConfigError(
            "backward-outside-engine",
            "gradients came from a backward outside engine.backward(loss), so how much counts in them is unknown; "
            "use engine.backward or shardwise.backward, or drop them with engine.zero_grad()",
        )
    if any(map(has_gradient, _untrained(parts))) and not parts.sharding.is_as_trainable(may_pause=True):
        raise ConfigError(
            "frozen-within-step",
            "a parameter that was frozen in the step's first forward has a gradient; unfreeze between steps",
        )
    if parts.state.num_backwards == 0:
        raise EngineError(
            "step-without-backward",
            "engine.step() without a backward since the last step; call engine.backward(loss) first",
        )


def _untrained(parts: EngineParts) -> Iterator[nn.Parameter]:
    """Return the parameters that were frozen when the step began."""
    return (parameter for group in parts.sharding.groups if group.grads is None for parameter in group.parameters)


def _to_mean(parts: EngineParts, count: float) -> float:
    """Return the factor that turns accumulated sums of gradients into the mean over all that counts."""
    return parts.losses.normaliser / ((count or 1.0) * parts.scaler.scale)


@dataclass(frozen=True)
class _StepSums:
    """Holds what the ranks sum once a step: loss, count and square, the deviation of a tensor-parallel group's losses
    if there is one, the tokens of each expert where they are counted, a flag for each parameter, the normaliser in a
    pipeline, requests to stop.

    Attributes:
        names: of the parameters that the flags are of.
    """

    numbers: ScalarSum
    names: Sequence[str]


def _start_sums(parts: EngineParts, square: Tensor) -> _StepSums:
    """Start to sum over the ranks what all must know."""
    is_whole = parts.layout.stage.optimizer is Placement.REPLICATE
    if parts.comms.replicas.rank > 0 and not is_whole:  # of what all ranks hold, each counts a slice
        square.zero_()  # others hold the same gradient: it counts once
    chosen = [] if parts.state.balance is None else [parts.state.balance.counts.to(square.dtype)]
    values = torch.cat([square.reshape(1).to(parts.device), parts.losses.deviation(), *chosen])
    was_used = dict(zip(parts.sharded.names, parts.sharded.used(), strict=True))
    names = parts.layout.trained_names
    flags = [was_used.get(name, False) for name in names]
    if parts.config.tiers.optimizer != "device":
        flags.append(any(group.is_aliased for group in parts.sharding.groups))
    scale = [parts.losses.normaliser * parts.losses.is_first] if parts.layout.pipeline is not None else []
    known = [*flags, *scale, *parts.state.stops.to_sum(parts.comm.rank)]
    return _StepSums(parts.losses.start_sum_with(values, "step", known), names)


# [Note: The optimizer is enqueued before the norm is read]
# The factor of the gradients, and whether the step is taken at all, follow from sums over the ranks. If the host reads
# these first, the device has nothing to do until the host has enqueued the optimizer. So where one fused kernel steps
# everything, it is given both as numbers on the device: it divides by one, and does nothing where the other is 1. The
# host reads the sums after that, and decides by the same arithmetic in the same precision; a step that it refuses has
# left parameters and states as they were. The first step makes states, and what steps otherwise (encoded states, the
# host, whole matrices) takes its factor from the host.
def _late_factor(parts: EngineParts, sums: ScalarSum) -> LateFactor | None:
    """Return what the step multiplies gradients by, as `update` computes it; None where the host must know it."""
    if parts.comm.waits_on_host or parts.comm.is_simulated or parts.config.run.on_nonfinite == "ignore":
        return None
    if sums.on_device.dtype is not torch.float64 or not parts.sharded.takes_late_factor:
        return None
    losses, limit = parts.losses, parts.config.optimizer.clip_norm
    loss, count, square = sums.on_device[:3].unbind()
    # Not a number divided by a tensor: torch would multiply by its inverse, which rounds twice.
    in_pipeline = parts.layout.pipeline is not None
    normaliser = sums.on_device[-3] if in_pipeline else torch.full_like(count, losses.normaliser)
    to_mean = normaliser / (count.masked_fill(count == 0, 1.0) * parts.scaler.scale)
    norm = square.sqrt() * to_mean
    seen = norm + count if losses.is_plain else norm + count + loss
    is_refused = (seen * 0).ne(0)  # NaN, or infinite
    if parts.comms.tensor.world_size > 1:
        is_refused |= sums.on_device[3].abs() > _tolerance(parts) * loss.abs()
    clip = (torch.full_like(norm, limit) / (norm + _NORM_EPS)).clamp(max=1.0) if limit is not None else 1.0
    return LateFactor((to_mean * clip).reciprocal().float(), is_refused.float())


def _read_sums(parts: EngineParts, sums: _StepSums) -> tuple[float, float, float, dict[str, bool], Sequence[float]]:
    """Return loss, count, squared norm, which parameters were used, and the tokens of each expert, over the ranks."""
    summed = parts.state.stops.take(sums.numbers.read())
    if parts.layout.pipeline is not None:  # ranks without a loss do not know it, and simulated ranks do not send it
        parts.losses.normaliser = summed.pop() or parts.losses.normaliser
    loss_sum, count, square_sum, *counts = summed
    if parts.comms.tensor.world_size > 1:
        _check_one_loss(parts, counts.pop(0), loss_sum)
    num_experts = 0 if parts.state.balance is None else len(parts.state.balance.counts)
    chosen, counts = counts[:num_experts], counts[num_experts:]
    used = {name: number > 0 for name, number in zip(sums.names, counts, strict=False)}
    parts.state.is_aliased = len(counts) > len(sums.names) and counts[len(sums.names)] > 0
    return loss_sum, count, square_sum, used, chosen


def _tolerance(parts: EngineParts) -> float:
    """Return by how much of the loss ranks that compute one loss may differ."""
    return 1e-9 if torch_dtype(parts.layout.precision.param) is torch.float64 else 1e-3


def _check_one_loss(parts: EngineParts, deviation: float, loss_sum: float) -> None:
    """Raise where the ranks of a tensor-parallel group have computed different losses.

    Raises:
        ConfigError: they have; the step is not taken.
    """
    if parts.comm.is_simulated or not abs(deviation) > _tolerance(parts) * abs(loss_sum):
        return
    zero_grad(parts)
    raise ConfigError(
        "loss-differs-over-tp",
        f"the ranks of mesh.tp={parts.comms.tensor.world_size} computed different losses (off by {deviation:.3g} of "
        f"{loss_sum:.3g}), so the loss reads what each rank has a part of, or draws for itself; take it from the "
        "model's output, from a hook on a module, or from parameters in loss_fn",
    )


def _end_step(parts: EngineParts) -> None:
    parts.state.begin_again()
    parts.losses.plain.begin_step()
    parts.draws.forget()
    parts.sharding.end_step()
    parts.losses.clear()
    parts.timeline.close_step()


def _fail_nonfinite(parts: EngineParts, loss_sum: float, grad_norm: float, forward: Callable[[Any], object]) -> None:
    module = first_nonfinite_module(parts.model, parts.state.batches, forward, parts.comm)
    left = f"{module}; parameters and optimizer are as before the step"
    zero_grad(parts)
    raise NonFiniteLossError(
        "loss-not-finite",
        f"step {parts.state.num_steps + 1}: loss {loss_sum} and gradient norm {grad_norm} must be finite; {left}: "
        "lower optimizer.lr, clip (optimizer.clip_norm) or drop the batch",
    )


def backpropagate(
    engines: Sequence[EngineParts],
    loss: Tensor,
    weight: Tensor,
    is_boundary: bool | None = None,
    retain_graph: bool = False,
) -> None:
    """Run the backward of a loss through the models of engines.

    Args:
        weight: the gradient of the loss, 0-d.
    """
    check_loss(loss)
    # In a hook of a backward of these engines, such as one that fills a cache of features, it is a part of that one.
    begun = [parts for parts in engines if not parts.status.is_in_backward]
    for parts in begun:
        begin_backward(parts, is_boundary)
    torch.autograd.backward(loss, weight.to(loss.dtype).reshape(loss.shape), retain_graph=retain_graph)
    for parts in begun:
        end_backward(parts)
