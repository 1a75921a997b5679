"""Offer `DeepSpeedEngine` and its optimizer over `shardwise.Engine` in plain mode."""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import MethodType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.checkpoint.commit import is_of_deepspeed
from shardwise.checkpoint.deepspeed import read_run_state
from shardwise.checkpoint.manifest import CheckpointError, Contents
from shardwise.comm.backends import world_comm
from shardwise.comm.loss import PlainMode
from shardwise.compat.deepspeed.config import Translation, given_sums
from shardwise.compat.deepspeed.finder import answers
from shardwise.compat.deepspeed.runtime.getters import EngineGetters
from shardwise.compat.deepspeed.runtime.loss_scaler import LossScalerBase, scaler_of
from shardwise.compat.deepspeed.runtime.zero.offload_config import released_states
from shardwise.compat.deepspeed.utils import logger
from shardwise.compat.deepspeed.utils.zero_to_fp32 import write_zero_to_fp32
from shardwise.config.errors import ConfigError, EngineError
from shardwise.construction.shards import ParamShard, mark
from shardwise.engine.engine import Engine
from shardwise.engine.runner import to_device
from shardwise.engine.types import StepResult
from shardwise.layout.precision import dtype_key
from shardwise.optim.schedules import advance
from shardwise.runtime.precision import TORCH_DTYPES
from shardwise.runtime.torch_private import persistent_buffers

__getattr__ = answers(__name__)

_COUNTERS: Final = ("global_steps", "micro_steps", "global_samples", "skipped_steps")


class AssertedError(ConfigError, AssertionError):
    """What DeepSpeed asserts does not hold."""


class NoSchedule:
    """Leaves learning rates to the script."""

    def step(self) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing, so that a checkpoint has no schedule."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: as in DeepSpeed, an engine without a schedule leaves that of a checkpoint."""


class _NoHooks:
    """Answers scripts that take DeepSpeed's hooks off the model for generation: none are in their way here."""

    def __init__(self) -> None:
        self.module = nn.Module()
        self.module.ds_external_parameters = tuple  # type: ignore[assignment]
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Do nothing: no hook was removed."""


class DeepSpeedOptimizer:
    """Is what `deepspeed.initialize` returns beside the engine: torch's optimizer, which the engine steps."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.optimizer = engine.inner.optimizer
        self._engine = engine
        self.parameter_offload = _NoHooks()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the live groups: a learning rate that is written there counts."""
        return self.optimizer.param_groups

    @property
    def overflow(self) -> bool:
        """Say whether the last step was left out, since its gradients were not finite."""
        return self._engine.has_overflowed

    @property
    def loss_scale(self) -> float:
        return self._engine.loss_scale()

    cur_scale = loss_scale

    @property
    def loss_scaler(self) -> LossScalerBase:
        """Return what has the engine's loss scale, at any time."""
        return scaler_of(self._engine)

    @property
    def dynamic_loss_scale(self) -> bool:
        """Say whether the loss scale changes."""
        return self.loss_scaler.dynamic

    def needs_scaler(self) -> bool:
        """Say whether a loss of one's own `backward()` goes through `engine.scale`."""
        return self._engine.fp16_enabled()

    def step(self, *args: Any, **options: Any) -> None:
        """Take `engine.step` where none has followed the last backward, as in Lightning Fabric's loop."""
        if self._engine.awaits_step:
            self._engine.step()

    def zero_grad(self, *args: Any, **options: Any) -> None:
        """Drop the gradients since the last step, as `DeepSpeedEngine.zero_grad` does."""
        self._engine.zero_grad()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def lend(engine: DeepSpeedEngine) -> Callable[[], None]:
    """Let a script call the engine's own optimizer of torch; return what takes that back.

    Its methods do there what those of `DeepSpeedOptimizer` do.
    """
    optimizer, this = engine.inner.optimizer, weakref.ref(engine)
    hooks = weakref.ref(engine.inner.parts.sharded.hooks)
    own_step, own_zero_grad, before = optimizer.step, optimizer.zero_grad, dict(optimizer.__dict__)

    @functools.wraps(own_step)  # a schedule has marked it
    def step(_: Optimizer, *args: Any, **options: Any) -> Any:
        stepping, engine = hooks(), this()
        if engine is None or stepping is None or stepping.is_stepping:
            return own_step(*args, **options)
        if engine.awaits_step:
            engine.step()
        return None

    @functools.wraps(own_zero_grad)
    def zero_grad(_: Optimizer, *args: Any, **options: Any) -> None:
        own_zero_grad(*args, **options)
        if (engine := this()) is not None:
            engine.zero_grad()

    lent = {"step": MethodType(step, optimizer), "zero_grad": MethodType(zero_grad, optimizer)}
    optimizer.__dict__.update(lent)

    def take_back() -> None:
        for name in lent:
            optimizer.__dict__.pop(name, None)
            if name in before:
                optimizer.__dict__[name] = before[name]

    return take_back


def _unwrap_in_trainer(engine: DeepSpeedEngine) -> None:
    """Let a Trainer that destroys its engine in order to train again make one of the bare model, as at the first time.

    Nothing names the Trainer but the stack. It would go on with what it wrapped, whose backward Accelerate has dropped.
    """
    frame = sys._getframe(2)
    while (caller := frame.f_back) is not None and not hasattr(frame.f_locals.get("self"), "model_wrapped"):
        frame = caller
    trainer = frame.f_locals.get("self")
    if trainer is not None and getattr(trainer, "model_wrapped", None) is engine:
        trainer.model_wrapped = engine.module


class DeepSpeedEngine(EngineGetters, nn.Module):
    """Trains a model by DeepSpeed's calls; methods without a word of their own answer what its methods do.

    Args:
        config: the JSON as it was given; `engine.config` is this very object.
        schedule: of the learning rate; None where the script has its own.
        frozen: parameters that an engine without an optimizer has frozen.

    Attributes:
        inner: the engine of Shardwise, for what DeepSpeed has no call for.
    """

    def __init__(
        self,
        inner: Engine,
        config: Mapping[str, Any],
        translation: Translation,
        schedule: Any = None,
        frozen: list[nn.Parameter] | None = None,
    ) -> None:
        super().__init__()
        self.module = inner.model
        self.inner, self.config, self.lr_scheduler = inner, config, schedule
        self.device = inner.device
        self.training_dataloader: Any = None
        self.global_steps = self.micro_steps = self.global_samples = self.skipped_steps = 0
        self.global_rank, self.world_size = inner.comm.rank, dist.get_world_size()
        self.local_rank = dist.get_node_local_rank(fallback_rank=0)
        mesh = inner.layout.mesh
        self.dp_world_size, self.mp_world_size = mesh.num_data_ranks, mesh.tp
        self._given = translation.given
        self.evaluates_whole = False  # where ranks that share sequences in training each evaluate their own
        self._frozen = frozen or []
        self._boundary: bool | None = None
        self._num_backwards = 0  # since the last step
        self._num_counted = 0  # of the inner engine's backwards, those that `step` has counted as micro-batches
        self._warned: set[str] = set()
        self._was_applied = False
        self._is_managed = bool(self._given.get("managed_gradient_accumulation", True))
        self._has_autocast = bool(self._given.get("torch_autocast.enabled", False))
        self._autocast_dtype = TORCH_DTYPES.get(dtype_key(str(self._given.get("torch_autocast.dtype", "bfloat16"))))
        self._result: StepResult | None = None
        self.is_destroyed = False
        evaluates = inner.config.optimizer.name == "none"
        # Without ZeRO and 16 bits it is torch's own, which torch's schedules take.
        is_wide = not (self.fp16_enabled() or self.bfloat16_enabled())
        has_own = is_wide and self.zero_optimization_stage() == 0 and not evaluates
        self.optimizer: Any = None if evaluates else inner.optimizer if has_own else DeepSpeedOptimizer(self)
        self._take_back = lend(self) if has_own else None
        self.client_optimizer = inner.optimizer
        # As in DeepSpeed, both do nothing; but where no state is sharded, torch's functions clip there.
        inner.parts.sharding.watch.minds = frozenset() if self.zero_optimization() else frozenset({"clip"})
        # Where losses are scaled it is `scale` that divides, so that both kinds of backwards overflow at one scale.
        scaler = inner.parts.scaler
        is_scaled = scaler.is_dynamic or scaler.scale != 1.0
        self._sum_over = mesh.num_data_ranks if given_sums(self._given) else 1
        scale = None if is_scaled else 1 / self.gradient_accumulation_steps()
        # It is on from the start, as the script may run `engine.module` itself.
        inner.parts.losses.plain = PlainMode(True, scale, 1 / self._sum_over)
        inner.checkpoints.may_save_within_step = True

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self._modules.get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
            raise

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model and return its own output."""
        if self.is_destroyed:
            raise EngineError(
                "engine-destroyed",
                "the engine is destroyed, as accelerator.free_memory() does; call deepspeed.initialize again",
            )
        if self.evaluates_whole and not self.module.training:
            return self.module(*inputs, **kwargs)
        if self._given.get("fp16.enabled") and self._given.get("fp16.auto_cast"):
            inputs, kwargs = to_device((inputs, kwargs), self.device, torch.float16)
        with torch.autocast(self.device.type, self._autocast_dtype, enabled=self._has_autocast):
            return self.inner.forward(*inputs, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Add the gradients of a scalar, and return it as it was scaled; the arguments are those of DeepSpeed."""
        scaled = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss
        is_boundary = self.is_gradient_accumulation_boundary()
        self.inner.backward(scaled, is_boundary=is_boundary, retain_graph=retain_graph)
        self._num_backwards += 1
        return scaled

    def scale(self, loss: Tensor) -> Tensor:
        """Return a loss as its own `backward()` needs it, which is to come next: under fp16 by the loss scale."""
        if loss.numel() != 1:
            raise AssertedError(
                "loss-not-scalar", f"engine.scale got a tensor of shape {tuple(loss.shape)}; give it a scalar tensor"
            )
        parts = self.inner.parts
        parts.losses.plain.is_next_scaled = True
        if parts.losses.plain.scale is not None:
            return loss
        return loss * (parts.scaler.scale / self.gradient_accumulation_steps())

    def is_gradient_accumulation_boundary(self) -> bool:
        """Say whether the next `step` updates the parameters."""
        if self._boundary is not None:
            return self._boundary
        return self._is_managed and (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the next `step` updates the parameters, in place of the count of micro-batches."""
        if not self._is_managed:
            raise AssertedError(
                "boundary-unmanaged",
                f"set_gradient_accumulation_boundary({is_boundary}) says nothing where managed_gradient_accumulation "
                "is false: each step updates the parameters; call step where it is to",
            )
        self._boundary = is_boundary

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Update the parameters at a boundary; count a micro-batch in any case."""
        self._was_applied = False
        if not self._is_managed or self.is_gradient_accumulation_boundary():
            parts = self.inner.parts
            is_empty = parts.state.num_backwards == 0 and not parts.sharding.has_foreign_gradients
            if is_empty and self.optimizer is not None and not parts.status.is_in_backward:
                self._warn_once("step() without a backward since the last one updates no parameter, as in torch")
                # A rank that went on alone would add its next gradients to those of the others' present step.
                parts.agreement.run(f"step {self.global_steps + 1}, without a backward before it", str).checked()
                advance(parts.state.scheduler)
                self._count(StepResult(self.inner.num_steps, 0.0, 0.0, 0.0, self.get_lr()[0], False, self.loss_scale()))
            else:
                self._count(self.inner.step(partial=True))
        self._num_counted = self.inner.parts.state.num_backwards
        self.micro_steps += 1

    @property
    def awaits_step(self) -> bool:
        """Say whether `step` has not been called after the last backward."""
        return self.inner.parts.state.num_backwards > self._num_counted

    def _count(self, result: StepResult) -> None:
        """Count a step of the optimizer.

        Raises:
            EngineError: it is left out under the smallest loss scale, where DeepSpeed's ZeRO ends the run, too.
        """
        self._result, self._was_applied = result, not result.skipped
        self.global_steps += 1
        self.skipped_steps += result.skipped
        accumulation = self.gradient_accumulation_steps()
        num_micro_batches = accumulation if self._is_managed else self._num_backwards
        self.global_samples += self.train_batch_size() // accumulation * num_micro_batches
        self._num_backwards = 0
        if result.skipped and self.inner.parts.scaler.is_stuck and self.zero_optimization():
            raise EngineError(
                "loss-scale-at-minimum",
                f"step {self.global_steps} overflows at fp16.min_loss_scale={result.loss_scale:g}, so each step would "
                "be left out; lower the learning rate, train in bf16, or set a smaller min_loss_scale",
            )

    @property
    def has_overflowed(self) -> bool:
        """Say whether the last step was left out, since its gradients were not finite."""
        return self._result is not None and self._result.skipped

    def was_step_applied(self) -> bool:
        """Say whether the last `step` has updated the parameters."""
        return self._was_applied

    def get_global_grad_norm(self) -> float | None:
        """Return the norm of the last step's gradient, before clipping; infinity where the step was left out."""
        if self._result is None:
            return None
        return math.inf if self._result.skipped else self._result.grad_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients since the last step, and a backward that an exception ended; all ranks call it.

        Right after a `step` that was no boundary there are those of micro-batches that it has counted. As in
        DeepSpeed, they are dropped in stages 0 and 1 and kept in stages 2 and 3, where they are reduced already.
        """
        parts = self.inner.parts
        if self.is_destroyed or parts.state.num_backwards == 0:
            return
        are_counted = parts.state.num_backwards == self._num_counted and not parts.status.is_in_backward
        keeps = are_counted and self.zero_optimization_stage() >= 2
        if are_counted:
            self._warn_once(
                f"zero_grad() between the micro-batches of a step {'keeps' if keeps else 'drops the gradients of'} "
                f"them, as in DeepSpeed's stage {self.zero_optimization_stage()}; call it at gradient accumulation "
                "boundaries only"
            )
        if not keeps:
            self.inner.zero_grad()
            self._num_counted = 0

    def _warn_once(self, text: str) -> None:
        if text not in self._warned and self.global_rank == 0:
            logger.warning(text)
        self._warned.add(text)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate on this rank, without collectives."""
        with self.inner.no_sync():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Reduce the gradients of the backwards inside once, at the step."""
        with self.inner.no_sync():
            yield

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Do nothing: backward and step reduce."""

    def compile(self, backend: Any = None, compile_kwargs: Mapping[str, Any] | None = None, **options: Any) -> None:
        """Say how to compile, which the engine decides when it starts; the arguments are those of DeepSpeed."""
        if not self.inner.config.compile.enabled:
            fix = 'put "shardwise": {"compile": {"enabled": true}} into the JSON'
            logger.warning("engine.compile has no effect, since the engine has started; %s", fix)

    def destroy(self) -> None:
        """Give the model its parameters back; under stage 3 each rank keeps a slice of them, as `zero.Init` does."""
        _unwrap_in_trainer(self)
        if self.is_destroyed:
            return
        self.is_destroyed = True
        shards: list[tuple[nn.Parameter, ParamShard]] = []
        keep_shards = self.zero_optimization_stage() == 3 and self.dp_world_size == self.world_size > 1
        if keep_shards:
            comm = world_comm(self.inner.config.run.timeout_s)
            for name, parameter in self._own_parameters():
                value = self.inner.read(name)
                assert value is not None, "every rank gets it"
                shards.append((parameter, ParamShard.of(comm, value, source=None)))
        if self._take_back is not None:
            self._take_back()
        self.inner.close(keep_values=not keep_shards)
        for parameter, shard in shards:
            mark(parameter, shard)
        for parameter in self._frozen:
            parameter.requires_grad_(True)

    def _own_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the model's parameters, but for those that a script has put in since, as it resized embeddings."""
        groups = self.inner.parts.sharding.groups
        ids = {id(parameter) for group in groups for parameter in group.parameters}
        return [(name, parameter) for name, parameter in self.module.named_parameters() if id(parameter) in ids]

    # Checkpoints.

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save into `save_dir/tag`, from which any layout can load; the arguments are those of DeepSpeed.

        Gradients since the last step are not in it: training goes on with them, and a load begins their step again.

        Raises:
            CheckpointError: it cannot be written, or `client_state` has what would not come back as it is.
        """
        if not save_dir:
            raise ConfigError("save-dir-missing", f"save_dir={save_dir!r} names no folder; give the one of checkpoints")
        counters = {name: getattr(self, name) for name in _COUNTERS}
        extra = {"client_state": dict(client_state or {}), "deepspeed": counters}
        tag = self._agreed_tag(str(tag or f"global_step{self.global_steps}"))
        contents: Contents = "trainable" if exclude_frozen_parameters else "all"
        try:
            self.inner.save(save_dir, contents=contents, extra=extra, tag=tag)
        except CheckpointError as error:
            if error.code == "extra-not-json":
                raise CheckpointError("client-state-not-json", f"{error}, or save it in a file of its own") from None
            raise
        if self.global_rank == 0:
            write_zero_to_fp32(Path(save_dir))
        return True

    def _agreed_tag(self, tag: str) -> str:
        """Return rank 0's tag, under which all ranks save; say a word where another rank's differs, by the JSON."""
        if self.world_size == 1 or not self.checkpoint_tag_validation_enabled():
            return tag
        tags = self.inner.checkpoints.tags_of_ranks(tag)
        odd = next((rank for rank in tags if tags[rank] != tags[0]), 0)
        if odd:
            tags_differ = f"tag={tags[0]!r:.120} on rank 0 and {tags[odd]!r:.120} on rank {odd}"
            if self.checkpoint_tag_validation_fail():
                raise AssertedError(
                    "tags-differ", f"{tags_differ}: a checkpoint has one name; give all ranks the same tag"
                )
            if self.global_rank == 0:
                logger.warning("%s: all ranks save under rank 0's; give all ranks the same tag", tags_differ)
        return tags[0]

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load a checkpoint that any layout, or DeepSpeed, has saved; return its folder and the client's state.

        The arguments are those of DeepSpeed. Without a `tag` it is the newest that is whole.
        """
        if custom_load_fn is not None:
            raise ConfigError("custom-load-fn", "load_checkpoint takes no custom_load_fn here; load by engine.module")
        weights_only = load_module_only or not load_optimizer_states or self.optimizer is None
        keeps_schedule = self.lr_scheduler is not None and not load_lr_scheduler_states
        schedule_state = deepcopy(self.lr_scheduler.state_dict()) if keeps_schedule else None
        try:
            report = self.inner.load(load_dir, strict=load_module_strict, weights_only=weights_only, tag=str(tag or ""))
        except CheckpointError as error:
            if tag or error.code not in ("no-checkpoint", "no-such-path"):
                raise
            logger.warning("%s: nothing is loaded", error)
            return None, None
        if schedule_state is not None:
            self.lr_scheduler.load_state_dict(schedule_state)
        elif weights_only and not load_module_only and self.lr_scheduler is not None:
            self.inner.checkpoints.load_schedule(report.path)
        if is_of_deepspeed(report.path):
            run = read_run_state(report.path)
            state, counters = run.client_state, vars(run)
        else:
            extra = report.extra if isinstance(report.extra, dict) else {}
            state = extra.get("client_state", {})
            counters = extra.get("deepspeed", {})
        for name in _COUNTERS if not load_module_only else ():
            setattr(self, name, counters.get(name, getattr(self, name)))
        self.micro_steps -= self.micro_steps % self.gradient_accumulation_steps()
        self._num_backwards = self._num_counted = 0
        return str(report.path), state

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        return bool(self._given.get("zero_optimization.stage3_gather_16bit_weights_on_model_save", False))

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Return the model's state dict on rank 0, on the CPU, and None on the other ranks; all ranks call it."""
        walk = self.inner.weights(None, adapters=None, to_rank=0)
        values = {name: tensor.cpu() for name, tensor in walk if tensor is not None}
        if self.global_rank:
            return None
        names, firsts, state = {name for name, _ in self._own_parameters()}, dict[int, str](), dict[str, Tensor]()
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            first = firsts.setdefault(id(parameter), name)
            if parameter.requires_grad or not exclude_frozen_parameters:
                state[name] = values[first] if first in names else parameter.detach().cpu()
        return state | {name: buffer.cpu() for name, buffer in persistent_buffers(self.module)}

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def module_state_dict(
        self, *args: Any, prefix: str = "", exclude_frozen_parameters: bool = False, **options: Any
    ) -> dict[str, Tensor]:
        """Return the model's state dict with whole values, on every rank; others of the arguments are not used."""
        trained = {name for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        names = {name for name, _ in self.module.named_parameters()}
        with self.inner.gathered() as model:
            state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        names_kept = (trained | (state.keys() - names)) if exclude_frozen_parameters else state.keys()
        return {prefix + name: tensor for name, tensor in state.items() if name in names_kept}

    def load_module_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True, **options: Any) -> None:
        """Write `checkpoint["module"]`, or a state dict, into the model; every rank gives the same whole tensors."""
        state = checkpoint["module"] if isinstance(checkpoint.get("module"), Mapping) else checkpoint
        with self.inner.gathered(write=True) as model:
            model.load_state_dict(state, strict=strict)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the weights into one file of torch's; return False under stage 3 where the JSON does not allow it.

        The arguments are those of DeepSpeed.
        """
        if self.zero_optimization_stage() == 3 and not self.zero_gather_16bit_weights_on_model_save():
            return False
        state = self._consolidated_16bit_state_dict(exclude_frozen_parameters)
        if state is not None:
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            torch.save(state, Path(save_dir) / save_filename)
        self.inner.parts.holds_anywhere(False, "the end of save_16bit_model")
        return True

    save_fp16_model = save_16bit_model

    def offload_states(self, include: Any = None, device: Any = None, pin_memory: bool = True, **options: Any) -> None:
        """Move states to host memory until `reload_states`; the arguments are those of DeepSpeed."""
        self.inner.offload(released_states(include), pin_memory=pin_memory)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move the states back; `non_blocking` is not used."""
        self.inner.reload()

    def empty_partition_cache(self) -> None:
        """Do nothing: parameters are released after each pass."""
