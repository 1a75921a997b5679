"""The step context has what a step of an engine needs, and the parts of a step that all runners share.

A runner computes the micro-batches and calls `StepContext.step`. State access and checkpoints read it too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint.manifest import CheckpointError
from shardwise.comm.collectives import Comm, CommFactory
from shardwise.comm.consistency import BatchCheck
from shardwise.comm.loss import LossAccumulator, LossFn, LossSum, NonFiniteLossError, check_loss, first_nonfinite_module
from shardwise.comm.mesh import CommGroups
from shardwise.comm.watchdog import Watchdog
from shardwise.config.errors import EngineError
from shardwise.config.resolve import Config, ConfigError
from shardwise.context.batch import BatchSharder
from shardwise.dropout import KeyedDraws
from shardwise.engine.hook_views import SplitModelValues
from shardwise.engine.status import EngineStatus
from shardwise.engine.types import Scheduler, StepResult
from shardwise.layout.layout import Layout, build_layout
from shardwise.layout.zero_stages import Placement
from shardwise.offload.activations import ActivationStore
from shardwise.offload.nvme import SwapError
from shardwise.offload.tiers import Tiers
from shardwise.offload.worker import HostWorkError
from shardwise.optim.schedules import advance
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.codec_errors import CodecErrors, relative_errors
from shardwise.runtime.memory_tracker import MemoryTracker, explain_out_of_memory
from shardwise.runtime.param_guard import has_gradient
from shardwise.runtime.precision import LossScaler, torch_dtype
from shardwise.runtime.timeline import Timeline
from shardwise.runtime.torch_private import in_transform
from shardwise.runtime.user_hooks import HooksOnce
from shardwise.tensor.loss_parallel import LazyLogitsHead
from shardwise.zero.optimizer import ShardedOptimizer
from shardwise.zero.optimizer_plan import OptimizerPlan
from shardwise.zero.sharding_state import ShardingState
from shardwise.zero.startup import regroup
from shardwise.zero.state_access import EngineState


@dataclass(eq=False)
class StepContext:
    """Holds the parts of an engine, which `build` makes, and how far its step has come."""

    model: nn.Module
    config: Config
    layout: Layout  # another one after parameters were frozen
    memory: MemoryTracker  # of the device
    comm_factory: CommFactory
    comms: CommGroups
    pool: BufferPool
    tiers: Tiers
    timeline: Timeline
    watchdog: Watchdog | None  # None where there is one rank
    status: EngineStatus
    check_batch: BatchCheck
    loss_fn: LossFn | None
    losses: LossAccumulator
    scaler: LossScaler
    draws: KeyedDraws
    sequences: BatchSharder
    activations: ActivationStore | None
    sharding: ShardingState
    sharded: ShardedOptimizer
    optimizer_plan: OptimizerPlan
    scheduler: Scheduler
    batches: deque[Any]  # of this step, to search them for values that are not finite
    codec_errors: CodecErrors
    split_values: SplitModelValues | None  # None where no layer is split
    heads: Sequence[LazyLogitsHead]  # whose logits are deferred
    hooks_once: HooksOnce | None  # None where nothing is recomputed
    num_steps: int = 0
    num_backwards: int = 0  # since the last step, as are the next two
    num_forwards: int = 0
    num_samples: int = 0
    syncs: bool = True  # False inside `no_sync`
    is_plain: bool = False  # any scalar may be given to `backward`
    own_backward_scale: float | None = 1.0  # of a backward that the user called on a tensor; None: scale its loss first
    is_own_loss_scaled: bool = False  # the next one's is
    is_loss_known: bool = True  # False after a backward in this step that the user called on a tensor
    before_update: Callable[[], None] | None = None  # called after the last backward of a step, such as to measure
    should_stop: Callable[[], bool] = bool  # says whether this rank was asked to stop
    asking: tuple[int, int] = (0, 0)  # how many ranks were, at the last agreement, and the sum of their numbers
    is_aliased: bool = False  # the user has views of parameters on some rank: updates on the host come at once

    @property
    def device(self) -> torch.device:
        """Return the device on which the engine computes."""
        return self.memory.device

    @property
    def comm(self) -> Comm:
        """Return the ranks that take the same optimizer step."""
        return self.comms.all

    @property
    def optimizer(self) -> Optimizer:
        """Return torch's optimizer over this rank's shards."""
        return self.sharded.optimizer

    def states(self) -> EngineState:
        """Return what holds the states of this rank, once no update of them is under way."""
        self.sharding.drain()
        self.tiers.wait_idle()
        self.sharded.take_changes()
        for group in self.sharding.groups:
            if group not in self.sharding.held:  # else `gathered` says what becomes of it
                group.follow_writes()
        return EngineState(
            self.sharding, self.sharded, self.comms, self.losses, self.scaler.scale, self.layout.elsewhere
        )

    def usable_states(self) -> EngineState:
        """Return the same where the engine may be used, and raise as `EngineStatus.check` where not."""
        self.status.check()
        return self.states()

    @contextmanager
    def failures_explained(self) -> Iterator[None]:
        """Raise a failure of memory inside with the table of what this rank holds and the settings that help.

        A failure of the host or of NVMe happens on this rank alone, so it is noted for the others.
        """
        where = f"on rank {self.comm.rank} in step {self.num_steps + 1}"
        try:
            with explain_out_of_memory(self.memory, self.config, where):
                yield
        except (HostWorkError, SwapError) as error:
            self.note_failure(str(error))
            raise

    def note_failure(self, text: str) -> None:
        """Note why this rank has failed, for the ranks that wait for it; an empty text says that all is well again."""
        if self.watchdog is not None:
            self.watchdog.note_failure(text)

    def holds_anywhere(self, is_so: bool, subject: str) -> bool:
        """Say whether something holds on any rank; `subject` is for messages. All ranks call it."""
        flag = torch.tensor([float(is_so)], dtype=torch.float64, device=self.device)
        return self.comm.max_scalars(flag, subject) > [0.0]

    def refuse_if_simulated(self) -> None:
        """Raise where the other ranks are not there.

        Raises:
            CheckpointError: they are not.
        """
        if self.comm_factory.store is None and self.comm.world_size > 1:
            raise CheckpointError(
                "simulated-rank", "a simulated rank has no states to save or load; do so on real ranks"
            )

    def refuse_unless_trainable(self) -> None:
        """Raise where every parameter is frozen.

        Raises:
            ConfigError: they are.
        """
        if self.config.optimizer.name == "none":
            raise ConfigError(
                "evaluates-only", "optimizer.name=none makes an engine that only evaluates; name an optimizer to train"
            )
        if not self.layout.trained_names:
            raise ConfigError(
                "all-frozen", "every parameter of the model is frozen; set requires_grad on those to train"
            )

    def note_update(self) -> None:
        """Note that parameters are about to be written: logits that wait to be computed would get the new values."""
        for head in self.heads:
            head.note_update()

    def before_model(self) -> None:
        """Follow what the user has done to the model since the last step; its forward is about to begin."""
        if self.hooks_once is not None:
            self.hooks_once.follow()
        if self.split_values is not None:
            self.split_values.views.follow()
        if self.num_backwards > 0 or not torch.is_grad_enabled() or self.status.away is not None:
            return
        if in_transform():  # of torch.func, which puts tensors of its own in place of parameters
            return
        self.sharding.check_model()
        self.follow_freezing()

    def agree_on_hooks(self) -> None:
        """Find in the first step the hooks that some ranks have and others have not, which take part all the same: what
        they see is gathered. Later all ranks register the same.
        """
        mesh, values = self.layout.mesh, self.split_values
        if self.num_steps > 0 or mesh.tp * mesh.cp == 1 or self.comm.is_simulated:
            return
        handles = [handle for group in self.sharding.groups for handle in group.gradient_handles]
        names = [name for handle in handles for name in handle.hooked()]
        differing = self.check_batch.some_have([*names, *(values.views.hooked() if values is not None else ())])
        for handle in handles if differing else ():
            handle.join(differing)
        if values is not None:
            values.views.joined |= differing

    def follow_freezing(self) -> None:
        """Regroup where `requires_grad` has changed since the last step; all ranks do so together.

        A parameter that has taken a step and is frozen now keeps its place and its states: it may be frozen for a while
        only.

        Raises:
            ConfigError: a forward awaits its backward.
        """
        if self.sharding.is_as_trainable(may_pause=self.num_steps > 0):
            return
        if self.losses.has_open:
            raise ConfigError(
                "frozen-within-step",
                "requires_grad changed between a forward and its backward; freeze and unfreeze between steps",
            )
        trained = frozenset(self.layout.trained_names if self.num_steps > 0 else ())
        old = self.layout
        layout = build_layout(self.model, self.config, old.tensor, old.pipeline, trained, old.fused)
        regroup(self.states(), layout, self.optimizer_plan.groups_of(layout))
        self.layout = layout

    def open_loss(self, batch: Any, total: LossSum | None) -> Tensor:
        """Return the mean loss of a batch, which awaits its backward where gradients are enabled."""
        assert total is not None, "forwards that run alone have their loss"
        if not torch.is_grad_enabled():
            return total.mean()
        self.batches.append(batch)
        return self.losses.open(total)

    def backward(self, loss: Tensor, is_boundary: bool | None = None, retain_graph: bool = False) -> None:
        """Add the gradients of a loss that `open_loss` returned, or in plain mode of any scalar.

        Args:
            is_boundary: whether the step follows; None where `batch.accumulation` tells.
            retain_graph: as torch's.
        """
        self.status.check()
        self.refuse_unless_trainable()
        if self.is_plain and not self.losses.knows(loss):
            check_loss(loss)
            # Both kinds of a plain step's backwards have gradients of one scale, so they may take turns.
            scale = 1.0 if self.own_backward_scale is None else self.own_backward_scale
            if not self.status.is_in_backward:  # one in another's hook is a part of that
                self.losses.add_plain(loss, scale)
            weight = loss.new_full((), self.scaler.scale / scale)
        else:
            weight = self.losses.close(loss) * self.scaler.scale
        backpropagate([self], loss, weight, is_boundary, retain_graph)

    def before_own_backward(self) -> Callable[[], None] | None:
        """Begin a backward that the user has called on a tensor; return what ends it, None where it is not plain.

        Raises:
            ConfigError: the loss must be scaled.
        """
        if not self.is_plain or not self.layout.trained_names:
            return None
        self.status.check()
        scale = self.own_backward_scale
        if (scale is None or self.scaler.scale != 1.0) and not self.is_own_loss_scaled:
            raise ConfigError(
                "backward-unscaled",
                f"loss.backward() under a loss scale of {self.scaler.scale:g}; call engine.backward(loss)",
            )
        self.losses.add_plain(torch.zeros((), device=self.device), 1.0 if scale is None else scale)
        self.is_loss_known = self.is_own_loss_scaled = False
        self.begin_backward()
        return self.end_backward

    def micro_batches(self, batches: Sequence[Any] | Mapping[str, Any] | Tensor) -> Sequence[Any]:
        """Return the micro-batches of a step as a sequence; a dict or a tensor is one.

        Raises:
            ConfigError: they are more or fewer than `batch.accumulation`, or the parts of one.
        """
        expected = self.config.batch.accumulation
        if isinstance(batches, Mapping | Tensor):
            batches = [batches]
        if len(batches) != expected:
            got, fix = f"{len(batches)}", f"give {expected} or set batch.accumulation={len(batches)}"
            if expected == 1 and isinstance(batches, tuple):
                got, fix = f"a tuple of {len(batches)}", "give [batch] where it is one micro-batch"
            raise ConfigError(
                "micro-batch-count",
                f"train_step takes a list of batch.accumulation={expected} micro-batches and got {got}; {fix}",
            )
        return as_list(batches)

    def check_accumulated(self, partial: bool) -> None:
        """Raise where a step would come after fewer backwards than `batch.accumulation`, and is not `partial`.

        Raises:
            EngineError: it would; gradients stay.
        """
        expected = self.config.batch.accumulation or 1
        if 0 < self.num_backwards < expected and not partial:
            raise EngineError(
                "accumulation-unfinished",
                f"engine.step() after {self.num_backwards} of batch.accumulation={expected} backwards; call it after "
                "the last one, or engine.step(partial=True) to step with fewer",
            )

    def end_backward(self) -> None:
        """Note that the backward is over, and that gradients from now on are none of the engine's."""
        self.status.end_backward()
        self.timeline.clock.switch("outside")
        self.sharding.expect_no_gradients()
        self.sharding.watch_gradients()

    def begin_backward(self, is_boundary: bool | None = None) -> None:
        """Prepare the next backward of the step: what it reduces, and whether it steps groups as it goes.

        Args:
            is_boundary: whether it is the last before the step; None where `batch.accumulation` tells.
        """
        self.status.begin_backward()
        self.timeline.clock.switch("backward")
        self.sharding.watch_gradients(False)
        self.timeline.micro_batch = self.num_backwards
        self.num_backwards += 1
        if is_boundary is None:
            is_boundary = self.num_backwards >= (self.config.batch.accumulation or 1)
        self.sharding.is_last = self.syncs and is_boundary
        self.sharding.will_reduce = self.syncs and (self.layout.stage.reduce_each_backward or is_boundary)
        self.sharding.prepare_backward()

    def step(self, forward: Callable[[Any], object]) -> StepResult:
        """Update the parameters by the clipped mean gradient, and advance the schedule.

        Args:
            forward: of one batch, to find where a value that is not finite comes from.

        Raises:
            ConfigError: gradients are not all from the engine, or of other parameters than the step began with.
            EngineError: there was no backward.
            NonFiniteLossError: loss or gradients are not finite.
        """
        self.timeline.clock.switch("step")
        if self.before_update is not None:
            self.before_update()
        self._check_gradients()
        self.sharding.finish()
        loss_sum, count, square_sum, used = self._agree(self.sharded.square_sums())
        if (error := self.losses.count_error(count, f"step {self.num_steps + 1}")) is not None:
            self.zero_grad()
            raise error
        scale = self.scaler.scale
        to_mean = self._to_mean(count)
        grad_norm = math.sqrt(square_sum) * to_mean if square_sum >= 0 and count else math.nan if count else 0.0
        # In plain mode a loss that is a mean over no targets may be NaN; its gradients are 0.
        overflowed, has_loss = not math.isfinite(grad_norm), math.isfinite(loss_sum) or self.losses.is_plain
        on_nonfinite = self.config.run.on_nonfinite
        is_taken = (has_loss and not overflowed) or (on_nonfinite == "ignore" and not self.scaler.is_dynamic)
        can_skip = on_nonfinite == "skip" or (has_loss and self.scaler.can_shrink)
        skipped = count == 0 or (can_skip and not is_taken)
        if not (is_taken or skipped):
            self._fail_nonfinite(loss_sum, grad_norm, forward)
        learning_rate = self.optimizer.param_groups[0]["lr"]
        if skipped:
            self.sharded.clear()
        else:
            limit = self.config.optimizer.clip_norm
            # The term keeps the factor finite at a zero norm, as in torch's clip_grad_norm_.
            clip = min(1.0, limit / (grad_norm + 1e-6)) if limit is not None else 1.0
            self.note_update()
            self.sharding.refresh(self.sharded.step(to_mean * clip, used, self.timeline), self.is_aliased)
            advance(self.scheduler)
        if count:
            self.scaler.update(overflowed)
        self.num_steps += 1
        loss, errors = (loss_sum / (count or 1.0) if self.is_loss_known else math.nan), self._codec_errors()
        self._end_step()
        if not skipped:
            self.sharded.hooks.call_late()
        return StepResult(self.num_steps, loss, count, grad_norm, learning_rate, skipped, scale, errors)

    def _codec_errors(self) -> dict[str, float]:
        """Return what codecs have rounded off in a step that is measured, over all ranks; all of them call it."""
        if not self.codec_errors.is_on:
            return {}
        self.tiers.wait_idle()  # a step on the host
        summed = self.comm.sum_scalars(self.codec_errors.take(self.device), "errors of codecs")
        return {} if self.comm.is_simulated else relative_errors(summed)

    def zero_grad(self, keeps_forwards: bool = True) -> None:
        """Forget the gradients since the last step, and a backward that an exception ended.

        Args:
            keeps_forwards: a forward that awaits its backward may have it after this, unless a backward has failed.
        """
        self.status.check_present()
        awaits_backward = self.losses.has_open or any(unit.awaits_backward for unit in self.sharding.units)
        keeps_forwards &= awaits_backward and not self.status.is_in_backward
        self.sharding.abandon()
        for parameter in self._untrained():
            parameter.grad = None  # else it is added to the first one after the parameter is unfrozen
        self.sharded.clear()
        self.status.end_backward()
        if not keeps_forwards:
            self._end_step()
            return
        self.num_backwards, self.is_loss_known = 0, True
        self.losses.clear(keeps_open=True)
        self.sharding.watch_gradients(False)

    def follow_zero_grad(self) -> None:
        """Forget the gradients since the last step, if there are any, for `zero_grad()` of the model or optimizer."""
        if self.sharding.watch.refuses and (self.num_backwards > 0 or self.sharding.has_foreign_gradients):
            self.zero_grad()

    def _check_gradients(self) -> None:
        self.refuse_unless_trainable()
        self.sharding.check_model()
        if self.sharding.has_foreign_gradients:
            raise ConfigError(
                "backward-outside-engine",
                "gradients came from a backward outside engine.backward(loss), so how much counts in them is unknown; "
                "use engine.backward or shardwise.backward, or drop them with engine.zero_grad()",
            )
        if not self.sharding.is_as_trainable(may_pause=True) and any(map(has_gradient, self._untrained())):
            raise ConfigError(
                "frozen-within-step",
                "a parameter that was frozen in the step's first forward has a gradient; unfreeze between steps",
            )
        if self.num_backwards == 0:
            raise EngineError(
                "step-without-backward",
                "engine.step() without a backward since the last step; call engine.backward(loss) first",
            )

    def _untrained(self) -> Iterator[nn.Parameter]:
        """Return the parameters that were frozen when the step began."""
        return (each for group in self.sharding.groups if group.grads is None for each in group.parameters)

    def _to_mean(self, count: float) -> float:
        """Return the factor that turns accumulated sums of gradients into the mean over all that counts."""
        return self.losses.normaliser / ((count or 1.0) * self.scaler.scale)

    def _agree(self, squares: list[Tensor]) -> tuple[float, float, float, dict[str, bool]]:
        """Sum over the ranks what all must know; return loss, count, squared norm, and which parameters were used."""
        own_square = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=self.device)
        is_whole = self.layout.stage.optimizer is Placement.REPLICATE
        if self.comms.replicas.rank > 0 and not is_whole:  # of what all ranks hold, each counts a slice
            own_square.zero_()  # others hold the same gradient: it counts once
        own = torch.cat([own_square.reshape(1).to(self.device), self.losses.deviation()])
        was_used = dict(zip(self.sharded.names, self.sharded.used(), strict=True))
        names = self.layout.trained_names
        flags = [was_used.get(name, False) for name in names]
        if self.config.tiers.optimizer != "device":
            flags.append(any(group.is_aliased for group in self.sharding.groups))
        scale = [self.losses.normaliser * self.losses.is_first] if self.layout.pipeline is not None else []
        summed = self.take_asking(self.losses.sum_with(own, "step", [*flags, *scale, *self.own_asking()]))
        if scale:  # ranks without a loss do not know it, and simulated ranks do not send it
            self.losses.normaliser = summed.pop() or self.losses.normaliser
        loss_sum, count, square_sum, *counts = summed
        if self.comms.tensor.world_size > 1:
            self._check_one_loss(counts.pop(0), loss_sum)
        used = {name: number > 0 for name, number in zip(names, counts, strict=False)}
        self.is_aliased = len(flags) > len(names) and counts[len(names)] > 0
        return loss_sum, count, square_sum, used

    def _check_one_loss(self, deviation: float, loss_sum: float) -> None:
        """Raise where the ranks of a tensor-parallel group have computed different losses.

        Raises:
            ConfigError: they have; the step is not taken.
        """
        is_exact = torch_dtype(self.layout.precision.param) is torch.float64
        if self.comm.is_simulated or not abs(deviation) > (1e-9 if is_exact else 1e-3) * abs(loss_sum):
            return
        self.zero_grad()
        raise ConfigError(
            "loss-differs-over-tp",
            f"the ranks of mesh.tp={self.comms.tensor.world_size} computed different losses (off by {deviation:.3g} of "
            f"{loss_sum:.3g}), so the loss reads what each rank has a part of, or draws for itself; take it from the "
            "model's output, from a hook on a module, or from parameters in loss_fn",
        )

    def own_asking(self) -> tuple[float, float]:
        """Return what this rank adds to a sum over the ranks, so that all of them know who was asked to stop."""
        is_asked = self.should_stop()
        return float(is_asked), float(is_asked * self.comm.rank)

    def take_asking(self, summed: Sequence[float]) -> list[float]:
        """Take the sum of `own_asking` from the end of a vector, and return the others."""
        *others, num_asked, rank_sum = summed
        self.asking = int(num_asked), int(rank_sum)
        return others

    def _end_step(self) -> None:
        self.num_backwards = self.num_forwards = self.num_samples = 0
        self.is_loss_known, self.is_own_loss_scaled = True, False
        self.draws.forget()
        self.sharding.end_step()
        self.batches.clear()
        self.losses.clear()
        self.timeline.close_step()
        self.codec_errors.prepare(self.num_steps)

    def _fail_nonfinite(self, loss_sum: float, grad_norm: float, forward: Callable[[Any], object]) -> None:
        module = first_nonfinite_module(self.model, self.batches, forward, self.comm)
        left = f"{module}; parameters and optimizer are as before the step"
        self.zero_grad()
        raise NonFiniteLossError(
            "loss-not-finite",
            f"step {self.num_steps + 1}: loss {loss_sum} and gradient norm {grad_norm} must be finite; {left}: "
            "lower optimizer.lr, clip (optimizer.clip_norm) or drop the batch",
        )


def as_list(batches: Sequence[Any] | Mapping[str, Any] | Tensor) -> Sequence[Any]:
    """Return batches as a sequence; a dict or a tensor is one.

    Raises:
        ConfigError: they are the parts of one batch, such as inputs and targets, or an array of others.
    """
    if isinstance(batches, Mapping | Tensor):
        return [batches]
    is_array = hasattr(batches, "__array__")
    if isinstance(batches, list | tuple) and len(batches) > 1 and all(isinstance(each, Tensor) for each in batches):
        kinds = {(each.dtype, each.dim()) for each in batches}
        is_one = isinstance(batches, tuple) or len(kinds) > 1
    else:
        is_one = False
    if is_array or is_one:
        found = f"a {type(batches).__name__} of {len(batches)}" + ("" if is_array else " tensors")
        raise ConfigError(
            "micro-batch-parts",
            f"train_step and eval_step take a list of micro-batches and got {found}, which may be the parts of one; "
            "give [batch] where it is one, and a list of tensors of one kind where each is one",
        )
    return batches


def backpropagate(
    contexts: Sequence[StepContext],
    loss: Tensor,
    weight: Tensor,
    is_boundary: bool | None = None,
    retain_graph: bool = False,
) -> None:
    """Run the backward of a loss through the models of engines.

    Args:
        contexts: of the engines whose models took part.
        weight: the gradient of the loss, 0-d.
        is_boundary: whether it is the last before the step; None where `batch.accumulation` tells.
        retain_graph: as torch's.
    """
    check_loss(loss)
    # In a hook of a backward of these engines, such as one that fills a cache of features, it is a part of that one.
    begun = [context for context in contexts if not context.status.is_in_backward]
    for context in begun:
        context.begin_backward(is_boundary)
    torch.autograd.backward(loss, weight.to(loss.dtype).reshape(loss.shape), retain_graph=retain_graph)
    for context in begun:
        context.end_backward()
