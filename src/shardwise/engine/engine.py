"""The engine composes one training step of the parts below it; `shardwise.engine.initialize.initialize` makes it."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.comm.collectives import CommFactory
from shardwise.comm.consistency import BatchCheck, all_or_none
from shardwise.comm.loss import LossAccumulator, LossFn, LossSum, NonFiniteLossError, first_nonfinite_module
from shardwise.comm.mesh import connect
from shardwise.comm.p2p import P2PChannels
from shardwise.comm.watchdog import watch
from shardwise.config.errors import EngineError
from shardwise.config.resolve import Config, ConfigError
from shardwise.construction.values import ParamInitializer
from shardwise.context.apply import apply_context_parallel
from shardwise.dropout import KeyedDraws, key_dropouts
from shardwise.engine.hf_api import HfApi
from shardwise.engine.pipeline_runner import PipelineRunner, make_stages
from shardwise.engine.steps import SequentialRunner, StepRunner
from shardwise.engine.types import EvalResult, Scheduler, StepResult
from shardwise.layout.layout import Layout, build_layout
from shardwise.layout.mesh_shape import CONTEXT_AXES, PIPELINE_AXES, TENSOR_AXES
from shardwise.layout.zero_stages import Placement
from shardwise.offload.activations import build_store
from shardwise.offload.tiers import Tiers
from shardwise.pipeline.stage_module import StageForward
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.memory_tracker import MemoryTracker
from shardwise.runtime.optimizers import own_scheduler
from shardwise.runtime.precision import LossScaler
from shardwise.runtime.recompute import replace_forwards
from shardwise.runtime.streams import Streams
from shardwise.runtime.timeline import Timeline
from shardwise.tensor.apply import split_model
from shardwise.tensor.chunked import chunk_model
from shardwise.tensor.plan_layout import dropout_zones
from shardwise.zero.optimizer import ShardedOptimizer, StepInBackward, may_step_in_backward
from shardwise.zero.optimizer_plan import OptimizerFactory, plan_optimizer
from shardwise.zero.pipeline_adapter import PipelineAdapter
from shardwise.zero.resources import ShardingResources
from shardwise.zero.sharding_state import ShardingState
from shardwise.zero.startup import agree_on_tied, broadcast_buffers, broadcast_params_across_stages, regroup

Given = ParamSpec("Given")
Result = TypeVar("Result")


def _explained(method: Callable[Concatenate[Engine, Given], Result]) -> Callable[Concatenate[Engine, Given], Result]:
    """Make a method of the engine say, when memory runs out, what holds it and which settings would help."""

    @wraps(method)
    def run(engine: Engine, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        with engine._failures_explained():
            return method(engine, *args, **kwargs)

    return run


class Engine(HfApi):
    """Trains one model under one layout; made by `initialize`.

    Attributes:
        model: the module as given, its parameters views of the engine's buffers.
        config: resolved.
        layout: which slice of each state each rank holds.
        comm: over all ranks that take the same optimizer step.
        memory: the tracker of live bytes on the device on which the engine computes.
        num_steps: optimizer steps taken, skipped ones included.
        optimizer: the torch optimizer over this rank's shards.

    Args:
        comm_factory: makes the communicators, real or simulated.
        loss_fn: as for `initialize`, which gives the optimizer and the scheduler too.
        scheduler: of that optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        layout: Layout,
        memory: MemoryTracker,
        comm_factory: CommFactory,
        *,
        loss_fn: LossFn | None,
        optimizer: Optimizer | OptimizerFactory | None,
        scheduler: Scheduler | None,
    ) -> None:
        self.model = model
        self.config = config
        self.layout = layout
        self.memory = memory
        device = self.device = memory.device
        streams = Streams(device, config.zero.overlap)
        self._pool = BufferPool(device, self.memory)
        self._comm_factory = comm_factory
        self._is_closed = self._is_broken = False
        self._away = None
        self._optimizer_plan = plan_optimizer(optimizer, config.optimizer, model)
        named_groups = self._optimizer_plan.groups_of(layout)
        self._comms = connect(comm_factory, layout.mesh, config, device, streams, self._pool, layout.ties)
        self.comm = self._comms.all
        self._timeline = Timeline(comm_factory.rank)
        self._watchdog = watch(comm_factory.store, self.comm.comm_log, self._timeline, config.run)
        self._prepare_checkpoints(follows_config=optimizer is None and scheduler is None)
        cell = layout.mesh.ranks_along((*PIPELINE_AXES, *CONTEXT_AXES, *TENSOR_AXES), comm_factory.rank)
        self._check_batch = BatchCheck(comm_factory.store, cell, comm_factory.rank, config.run)
        values = ParamInitializer(model, config.run.seed)
        broadcast_buffers(model, config.precision, memory, self.comm)
        self._undo: list[Callable[[], None]] = []
        stages = make_stages(model, layout, device, self.comm.is_simulated)
        self._draws = KeyedDraws(config.run.seed, device)
        resources = self._open_tiers(streams, values)
        self._sharding = self._move_parameters(resources)
        values.close()
        try:
            with all_or_none(comm_factory.store, comm_factory.rank, config.run.timeout_s, "optimizer"):
                self._alter_modules()
                self._run = self._make_run(stages, streams)
                factory = self._optimizer_plan.factory
                self._sharded = ShardedOptimizer(self._sharding.groups, named_groups, factory, resources)
                self.optimizer = self._sharded.optimizer
                self.scheduler = scheduler or own_scheduler(config, self.optimizer)
        except Exception:
            self.close()
            raise
        self._step_in_backward = StepInBackward(self._sharding, self._sharded, may_step_in_backward(config, layout))
        self._scaler = LossScaler(config.precision)
        self._losses = LossAccumulator(self._comms)
        self._loss_fn = loss_fn
        self._batches: deque[Any] = deque(maxlen=config.batch.accumulation)
        self.num_steps = 0
        self._num_backwards = 0
        self._syncs = True
        self._undo += [self._sharded.close, self._step_in_backward.close, self._losses.clear, self._batches.clear]

    def _open_tiers(self, streams: Streams, values: ParamInitializer) -> ShardingResources:
        """Reserve memory on the host and on NVMe, on all ranks or none, and collect what param groups need."""
        comm_factory, config = self._comm_factory, self.config
        self.tiers = Tiers(config.tiers, self.layout, streams, self.memory, comm_factory.rank, self.comm.is_simulated)
        if "nvme" in (config.tiers.params, config.tiers.grads, config.tiers.optimizer):
            try:
                with all_or_none(comm_factory.store, comm_factory.rank, config.run.timeout_s, "tiers"):
                    self.tiers.reserve()
            except BaseException:
                self.tiers.close()
                raise
        zero, comms = config.zero, self._comms
        return ShardingResources(
            comms, self._pool, self.memory, self._timeline, values, self.tiers, zero.overlap, zero.lockstep
        )

    def _move_parameters(self, resources: ShardingResources) -> ShardingState:
        """Move the parameters to the tiers where they are stored, and make the state that shards them."""
        try:
            broadcast_params_across_stages(resources.values, self.layout, self._comms)
            sharding = ShardingState(self.model, self.layout, resources)
            agree_on_tied(sharding.groups, self._comms)
        except BaseException:
            self.tiers.close()
            raise
        sharding.before_model = weakref.WeakMethod(self._before_model)
        return sharding

    def _alter_modules(self) -> None:
        """Set up attention, split layers, key dropouts, chunk, recompute and compile blocks, in this order."""
        given = apply_context_parallel(self.model, self.config, self._comms.context)
        self._sequences = given.sequences
        self._undo += given.undo
        tensor, tp = self.layout.tensor, self._comms.tensor
        if tensor is not None:
            is_in_pipeline, cp = self.layout.pipeline is not None, self.config.mesh.cp
            self._undo += split_model(
                self.model, tensor.plan, tp, self.config.tensor, tensor.splits, is_in_pipeline, cp
            )
        zones = dropout_zones(self.model, tensor, tp.rank) if tensor is not None else {}
        compiled = self.layout.units if self.config.compile.enabled else ()
        self._undo += key_dropouts(self.model, self._draws, zones, must_be_keyed=tensor is not None, compiled=compiled)
        self._undo += chunk_model(self.model, self.config, self.layout, self._draws)
        tiers = self.tiers
        self._activations = build_store(self.config, tiers.streams, tiers.buffers, tiers.traffic, self.memory)
        self._undo += replace_forwards(self.model, self.layout, self.config, self._activations)

    def _make_run(self, stages: StageForward | None, streams: Streams) -> StepRunner:
        if stages is None:
            return SequentialRunner()
        self._undo += stages.install()
        timeout_s, comm_log = self.config.run.timeout_s, self.comm.comm_log
        pipes = P2PChannels(self._comm_factory, self.layout.mesh, self.device, timeout_s, streams, comm_log)
        groups = PipelineAdapter(self._sharding, self.layout)
        run = PipelineRunner(self.config, self.layout, stages, groups, pipes, self._timeline)
        self._undo.append(run.close)
        return run

    @property
    def timeline(self) -> tuple[Any, ...]:
        """Return the timed actions of this rank's last step."""
        return self._timeline.last_step

    def __call__(self, batch: Any) -> Tensor:
        """Run the model forward and return the mean loss of this batch, a 0-d tensor, for `backward`.

        With a `loss_fn`, a tuple or list is (inputs, what only the loss needs, ...); otherwise the batch is the inputs.
        Inputs that are a dict go to the model as keyword arguments, a tuple or list as positional ones.
        """
        self._run.check_direct("engine(batch)")
        self._timeline.micro_batch = self._num_backwards
        total = self._forward(batch)
        assert total is not None, "forwards that run alone have their loss"
        if not torch.is_grad_enabled():
            return total.mean()
        self._batches.append(batch)
        return self._losses.open(total)

    @_explained
    def backward(self, loss: Tensor) -> None:
        """Add the gradients of what counted in `loss` to the accumulated ones.

        Args:
            loss: what `engine(batch)` returned.

        Raises:
            ConfigError: `engine(batch)` did not return it, so how much counts in it is not known.
            torch.OutOfMemoryError: with the table of what holds the memory; `engine(batch)` and `step` raise it too.
        """
        self._run.check_direct("engine.backward")
        self._check_usable()
        self._refuse_unless_trainable()
        backpropagate([self], loss, self._losses.close(loss) * self._scaler.scale)

    @_explained
    def step(self, *, partial: bool = False) -> StepResult:
        """Update the parameters by the clipped mean gradient since the last step, and advance the schedule.

        Args:
            partial: step after fewer backwards than `batch.accumulation` too, such as at the end of an epoch.

        Raises:
            EngineError: there were fewer backwards than `batch.accumulation`; the gradients stay.
            NonFiniteLossError: loss or gradients are not finite; parameters and optimizer stay as they were.
            CheckpointError: a save in the background has failed; call it again to take the step.
        """
        self._run.check_direct("engine.step")
        self._check_usable()
        expected = self.config.batch.accumulation or 1
        if 0 < self._num_backwards < expected and not partial:
            raise EngineError(
                "accumulation-unfinished",
                f"engine.step() after {self._num_backwards} of batch.accumulation={expected} backwards; call it after "
                "the last one, or engine.step(partial=True) to step with fewer",
            )
        self._saver.poll()
        return self._step()

    def _step(self) -> StepResult:
        self._refuse_unless_trainable()
        self._sharding.check_model()
        if self._sharding.has_foreign_gradients:
            raise ConfigError(
                "backward-outside-engine",
                "gradients came from a backward outside engine.backward(loss), so how much counts in them is unknown; "
                "use engine.backward or shardwise.backward, or drop them with engine.zero_grad()",
            )
        if not self._sharding.is_as_trainable(may_pause=True):
            raise ConfigError(
                "frozen-within-step", "requires_grad was set between a step's backwards; unfreeze between steps"
            )
        if self._num_backwards == 0:
            raise EngineError(
                "step-without-backward",
                "engine.step() without a backward since the last step; call engine.backward(loss) first",
            )
        self._sharding.finish()
        self._step_in_backward.end()
        loss_sum, count, square_sum, used, has_stepped = self._agree(self._sharded.square_sums())
        scale = self._scaler.scale
        to_mean = self._to_mean(count)
        grad_norm = math.sqrt(square_sum) * to_mean if square_sum >= 0 else math.nan
        overflowed = not math.isfinite(grad_norm)
        skipped = overflowed and math.isfinite(loss_sum) and self._scaler.can_shrink
        if (overflowed or not math.isfinite(loss_sum)) and not skipped:
            self._fail_nonfinite(loss_sum, grad_norm, has_stepped)
        learning_rate = self.optimizer.param_groups[0]["lr"]
        if skipped:
            self._sharded.clear()
        else:
            limit = self.config.optimizer.clip_norm
            # The term keeps the factor finite at a zero norm, as in torch's clip_grad_norm_.
            clip = min(1.0, limit / (grad_norm + 1e-6)) if limit is not None else 1.0
            self._sharding.refresh(self._sharded.step(to_mean * clip, used, self._timeline))
            self.scheduler.step()
        self._scaler.update(overflowed)
        self._end_step()
        return StepResult(self.num_steps, loss_sum / (count or 1.0), count, grad_norm, learning_rate, skipped, scale)

    def zero_grad(self) -> None:
        """Forget the gradients since the last step, and a backward that an exception ended. All ranks call it."""
        self._refuse_if_away()
        self._sharding.abandon()
        self._step_in_backward.end()
        if self._sharded.has_stepped_in_backward:
            self._is_half_loaded = self._has_mixed_states = True
        self._sharded.clear()
        self._is_broken = False
        self._end_step(is_taken=False)

    @_explained
    def train_step(self, batches: Sequence[Any] | Mapping[str, Any] | Tensor) -> StepResult:
        """Take one optimizer step over this data rank's micro-batches.

        Args:
            batches: as many as `batch.accumulation`, each as for `engine(batch)`; a dict or a tensor is one.

        Raises:
            ConfigError: they are more or fewer.
            CheckpointError: a save in the background has failed; nothing was done, call it again to take the step.
        """
        self._check_usable()
        self._saver.poll()
        expected = self.config.batch.accumulation
        if isinstance(batches, Mapping | Tensor):
            batches = [batches]
        if len(batches) != expected:
            raise ConfigError(
                "micro-batch-count",
                f"train_step takes a list of batch.accumulation={expected} micro-batches and got {len(batches)}; "
                f"give {expected} or set batch.accumulation={len(batches)}",
            )
        return self._run.train(self, batches)

    @_explained
    def eval_step(self, batches: Sequence[Any] | Mapping[str, Any] | Tensor) -> EvalResult:
        """Return the mean loss over `batches` of all data ranks, forward only, in the model's eval mode."""
        batches = [batches] if isinstance(batches, Mapping | Tensor) else batches
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        losses = LossAccumulator(self._comms)
        try:
            with torch.no_grad():
                self._run.evaluate(self, batches, losses)
        finally:
            for module in training:
                module.training = True
        loss_sum, count = losses.sum_over_ranks("evaluation")
        return EvalResult(loss_sum / (count or 1.0), count)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate whole gradients on this rank in the backwards inside, in every stage; `step` reduces them."""
        self._run.check_direct("engine.no_sync")
        self._syncs = False
        try:
            yield
        finally:
            self._syncs = True

    def close(self, keep_values: bool = True) -> None:
        """Release the model: hooks go, parameters become whole tensors of their own, all other states are dropped.

        All ranks call it; a second call does nothing. An optimizer that was given holds the model's parameters again.

        Args:
            keep_values: False leaves the parameters without values, on meta: a model that is larger than the memory
                cannot be whole on any rank. Save it before.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._saver.close()
        finally:
            self._give_back(keep_values)

    def _give_back(self, keep_values: bool) -> None:
        if keep_values:
            self.reload()
        with ExitStack() as stack:  # this rank frees what is its own even where other ranks do not come
            stack.callback(self._comm_factory.close)
            if self._watchdog is not None:
                stack.callback(self._watchdog.close)
            stack.callback(self._pool.trim)
            stack.callback(self.tiers.close)
            for undo in self._undo:
                stack.callback(undo)
            self._undo.clear()
            # Parameters become whole even if their values are spoilt; the failure that spoilt them is raised once.
            unreported = self.tiers.recover().unreported
            self._sharding.close(keep_values)
            if unreported is not None:
                raise unreported

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    @_explained
    def _forward(self, batch: Any) -> LossSum | None:
        return self._run.forward(self, batch)

    def _begin_backward(self) -> None:
        self._is_broken = True
        self._sharding.watch_gradients(False)
        self._timeline.micro_batch = self._num_backwards
        self._num_backwards += 1
        is_boundary = self._num_backwards >= (self.config.batch.accumulation or 1)
        self._sharding.is_last = self._syncs and is_boundary
        self._sharding.will_reduce = self._syncs and (self.layout.stage.reduce_each_backward or is_boundary)
        self._sharding.prepare_backward()
        if self._step_in_backward.is_armed and self._step_in_backward.is_allowed and self._sharding.is_last:
            read = self._losses.start_sum("count of the step")
            is_refused = self._sharding.has_foreign_gradients

            def read_factor() -> float | None:
                loss_sum, count = read()
                return self._to_mean(count) if math.isfinite(loss_sum) and not is_refused else None

            self._step_in_backward.begin(read_factor)

    def _to_mean(self, count: float) -> float:
        """Return the factor that turns accumulated sums of gradients into the mean over all that counts."""
        return self._losses.normaliser / ((count or 1.0) * self._scaler.scale)

    def _before_model(self) -> None:
        """Follow what the user has done to the model since the last step; its forward is about to begin."""
        if self._num_backwards > 0 or not torch.is_grad_enabled() or self._away is not None:
            return
        self._sharding.check_model()
        self._follow_freezing()

    def _follow_freezing(self) -> None:
        """Regroup where `requires_grad` has changed since the last step; all ranks do so together.

        A parameter that has taken a step and is frozen now keeps its place and its states: it may be frozen for a while
        only.
        """
        if self._sharding.is_as_trainable(may_pause=self.num_steps > 0):
            return
        if self._losses.has_open:
            raise ConfigError(
                "frozen-within-step",
                "requires_grad changed between a forward and its backward; freeze and unfreeze between steps",
            )
        trained = frozenset(self.layout.trained_names if self.num_steps > 0 else ())
        layout = build_layout(self.model, self.config, self.layout.tensor, self.layout.pipeline, trained)
        regroup(self._states(), layout, self._optimizer_plan.groups_of(layout))
        self.layout = layout

    def _refuse_unless_trainable(self) -> None:
        if not self.layout.trained_names:
            raise ConfigError(
                "all-frozen", "every parameter of the model is frozen; set requires_grad on those to train"
            )

    def _agree(self, squares: list[Tensor]) -> tuple[float, float, float, dict[str, bool], bool]:
        """Sum over the ranks what all of them must know.

        Returns:
            loss, count, squared norm, which parameters were used, and whether any rank has stepped some of them.
        """
        own_square = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=self.device)
        is_whole = self.layout.stage.optimizer is Placement.REPLICATE
        if self._comms.replicas.rank > 0 and not is_whole:  # of what all ranks hold, each counts a slice
            own_square.zero_()  # others hold the same gradient: it counts once
        own = own_square.reshape(1).to(self.device)
        was_used = dict(zip(self._sharded.names, self._sharded.used(), strict=True))
        names = self.layout.trained_names
        flags = [was_used.get(name, False) for name in names]
        stepped = [self._sharded.has_stepped_in_backward] if self._step_in_backward.is_allowed else []
        scale = [self._losses.normaliser * self._losses.is_first] if self.layout.pipeline is not None else []
        summed = self._losses.sum_with(own, "step", [*flags, *stepped, *scale])
        if scale:  # ranks without a loss do not know it, and simulated ranks do not send it
            self._losses.normaliser = summed.pop() or self._losses.normaliser
        loss_sum, count, square_sum, *counts = summed
        used = {name: number > 0 for name, number in zip(names, counts, strict=False)}
        return loss_sum, count, square_sum, used, bool(stepped) and counts[-1] > 0

    def _end_step(self, is_taken: bool = True) -> None:
        self.num_steps += is_taken
        self._num_backwards = 0
        self._run.end_step()
        self._draws.forget()
        self._sharding.end_step()
        self._batches.clear()
        self._losses.clear()
        self._timeline.close_step()

    def _fail_nonfinite(self, loss_sum: float, grad_norm: float, has_stepped: bool) -> None:
        if has_stepped:
            self._is_half_loaded = self._has_mixed_states = True
            left = "some parameters were stepped before that was known: load a checkpoint, tiers.step_in_backward=false"
        else:
            module = first_nonfinite_module(self.model, self._batches, self._forward, self.comm)
            left = f"{module}; parameters and optimizer are as before the step"
        self.zero_grad()
        raise NonFiniteLossError(
            "loss-not-finite",
            f"step {self.num_steps + 1}: loss {loss_sum} and gradient norm {grad_norm} must be finite; {left}: "
            "lower optimizer.lr, clip (optimizer.clip_norm) or drop the batch",
        )


def backpropagate(engines: Sequence[Engine], loss: Tensor, weight: Tensor) -> None:
    """Run the backward of a loss through the models of engines.

    Args:
        engines: those whose models took part.
        loss: a tensor of one element.
        weight: the gradient of the loss, 0-d.
    """
    for engine in engines:
        engine._begin_backward()
    torch.autograd.backward(loss, weight.to(loss.dtype).reshape(loss.shape))
    for engine in engines:
        engine._is_broken = False
        engine._sharding.expect_no_gradients()
        engine._sharding.watch_gradients()


def backward(loss: Tensor, engines: Sequence[Engine], *, count: float = 1.0) -> None:
    """Add the gradients of one loss, computed from the models of several engines, to what each has accumulated.

    Each engine counts it as a loss of mean `loss` over `count`, and each takes its own `step`. The models are called
    directly, or through `engine(batch)`; a frozen engine may take part, such as a teacher's.

    >>> from torch import nn
    >>> from shardwise import initialize
    >>> config = {"run": {"device": "cpu"}}
    >>> with initialize(nn.Linear(4, 3), config) as encoder, initialize(nn.Linear(3, 1), config) as decoder:
    ...     backward(decoder.model(encoder.model(torch.ones(2, 4))).square().mean(), [encoder, decoder])
    ...     encoder.step().loss == decoder.step().loss
    True

    Args:
        loss: a scalar.
        engines: all engines whose models took part and are to learn from it.
        count: what `loss` is the mean of, such as target tokens, against the step's other losses.

    Raises:
        ConfigError: `loss` is no scalar, no engine is given, or one scales its gradients differently from the others.
    """
    if loss.numel() != 1 or not engines or len(set(map(id, engines))) < len(engines):
        raise ConfigError(
            "backward-arguments",
            f"backward takes a scalar loss and engines, each once; got shape {tuple(loss.shape)} and {len(engines)}",
        )
    for engine in engines:
        engine._run.check_direct("shardwise.backward")
        engine._check_usable()
    # An engine without gradients so far can still take the others' normaliser.
    taken = {engine._losses.normaliser for engine in engines if not engine._losses.is_empty}
    if len(taken) > 1 or len({engine._scaler.scale for engine in engines}) > 1:
        raise ConfigError(
            "gradient-scales-differ",
            "the engines scale their gradients differently, so one backward cannot serve them; let each take its step "
            "before the common loss, and under fp16 set precision.loss_scale to one number",
        )
    total = LossSum(loss.detach().reshape(()) * count, torch.full((), count, device=loss.device))
    normaliser = next(iter(taken or {engine._losses.normaliser for engine in engines}))
    for engine in engines:
        engine._losses.normaliser = normaliser
        weight = engine._losses.count_in(total) * engine._scaler.scale
        normaliser = engine._losses.normaliser
    backpropagate(engines, loss, weight)
