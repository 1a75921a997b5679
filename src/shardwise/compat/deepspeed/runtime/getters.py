"""Offer the getters of DeepSpeed's engine: most are what the JSON says at one key, or DeepSpeed's default."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.distributed as dist

from shardwise.compat.deepspeed.config import TAG_RULES
from shardwise.compat.deepspeed.finder import MissingNameError
from shardwise.compat.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from shardwise.compat.deepspeed.utils import groups, logger
from shardwise.config.errors import ConfigError
from shardwise.layout.mesh_shape import DATA_AXES, GRADIENT_AXES, TENSOR_AXES
from shardwise.layout.precision import dtype_key
from shardwise.runtime.precision import TORCH_DTYPES

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine

# Of the JSON's `optimizer.type`, what `optimizer_name` says in lower case.
_OPTIMIZER_NAMES: Final = (
    *("adagrad", "adam", "adamw", "lamb", "onebitadam", "onebitlamb", "zerooneadam"),
    *("muadam", "muadamw", "musgd", "lion", "muon"),
)
# (section of the JSON, the key and DeepSpeed's default by the getter's name).
_TABLE: Final[tuple[tuple[str, Mapping[str, tuple[str, Any]]], ...]] = (
    (
        "",
        {
            "steps_per_print": ("steps_per_print", None),
            "wall_clock_breakdown": ("wall_clock_breakdown", False),
            "memory_breakdown": ("memory_breakdown", False),
            "dump_state": ("dump_state", False),
            "log_level": ("log_level", None),
            "dataloader_drop_last": ("dataloader_drop_last", False),
            "gradient_predivide_factor": ("gradient_predivide_factor", 1.0),
            "managed_gradient_accumulation": ("managed_gradient_accumulation", True),
            "zero_allow_untested_optimizer": ("zero_allow_untested_optimizer", False),
            "zero_force_ds_cpu_optimizer": ("zero_force_ds_cpu_optimizer", True),
        },
    ),
    ("optimizer.", {"optimizer_legacy_fusion": ("legacy_fusion", False)}),
    ("scheduler.", {"scheduler_name": ("type", None)}),
    (
        "fp16.",
        {
            "fp16_auto_cast": ("auto_cast", False),
            "fp16_master_weights_and_gradients": ("fp16_master_weights_and_grads", False),
        },
    ),
    (
        "bf16.",
        {
            "bf16_master_weights_and_gradients": ("bf16_master_weights_and_grads", False),
            "bf16_optimizer_states": ("bf16_optimizer_states", False),
        },
    ),
    (
        "torch_autocast.",
        {
            "torch_autocast_enabled": ("enabled", False),
            "torch_autocast_lower_precision_safe_modules": ("lower_precision_safe_modules", None),
        },
    ),
    (
        "checkpoint.",
        {
            "use_node_local_storage": ("use_node_local_storage", False),
            "load_universal_checkpoint": ("load_universal", False),
            "checkpoint_serialization_enabled": ("checkpoint_serialization", True),
        },
    ),
    (
        "zero_optimization.",
        {
            "zero_reduce_scatter": ("reduce_scatter", True),
            "zero_overlap_comm": ("overlap_comm", None),
            "zero_sub_group_size": ("sub_group_size", 1_000_000_000),
            "zero_reduce_bucket_size": ("reduce_bucket_size", 500_000_000),
            "zero_multi_rank_bucket_allreduce": ("use_multi_rank_bucket_allreduce", True),
            "zero_allgather_bucket_size": ("allgather_bucket_size", 500_000_000),
            "zero_allgather_partitions": ("allgather_partitions", True),
            "zero_compute_grad_norm": ("compute_grad_norm", True),
            "zero_contiguous_gradients": ("contiguous_gradients", True),
            "zero_load_from_fp32_weights": ("load_from_fp32_weights", True),
            "zero_elastic_checkpoint": ("elastic_checkpoint", False),
            "zero_max_live_parameters": ("stage3_max_live_parameters", 1_000_000_000),
            "zero_max_reuse_distance": ("stage3_max_reuse_distance", 1_000_000_000),
            "zero_prefetch_bucket_size": ("stage3_prefetch_bucket_size", 50_000_000),
            "zero_module_granularity_threshold": ("stage3_module_granularity_threshold", 0),
            "zero_param_persistence_threshold": ("stage3_param_persistence_threshold", 100_000),
            "zero_model_persistence_threshold": ("stage3_model_persistence_threshold", None),
            "zero_gather_16bit_weights_on_model_save": ("stage3_gather_16bit_weights_on_model_save", False),
            "zero_allgather_sequential": ("stage3_allgather_sequential", False),
            "zero_legacy_stage1": ("legacy_stage1", False),
            "zero_ignore_unused_parameters": ("ignore_unused_parameters", True),
            "zero_save_muon_momentum_buffer_in_memory": ("save_muon_momentum_buffer_in_memory", False),
            "zero_round_robin_gradients": ("round_robin_gradients", False),
            "zero_parameter_alignment": ("parameter_alignment", False),
            "zero_hpz_partition_size": ("zero_hpz_partition_size", 1),
            "zero_quantized_weights": ("zero_quantized_weights", False),
            "zero_quantized_nontrainable_weights": ("zero_quantized_nontrainable_weights", False),
            "zero_quantized_gradients": ("zero_quantized_gradients", False),
            "zero_log_trace_cache_warnings": ("log_trace_cache_warnings", False),
            "is_sanity_checks_enabled": ("enable_sanity_checks", False),
            "zero_partial_offload": ("offload_optimizer.ratio", 1.0),
            "super_offload": ("offload_optimizer.super_offload", False),
            "cpuadam_cores_perc": ("offload_optimizer.cpuadam_cores_perc", 0.8),
        },
    ),
    ("tensor_parallel.", {"autotp_size": ("autotp_size", 0)}),
    (
        "flops_profiler.",
        {
            "flops_profiler_enabled": ("enabled", False),
            "flops_profiler_recompute_fwd_factor": ("recompute_fwd_factor", 0.0),
            "flops_profiler_profile_step": ("profile_step", 1),
            "flops_profiler_module_depth": ("module_depth", -1),
            "flops_profiler_top_modules": ("top_modules", 1),
            "flops_profiler_detailed": ("detailed", True),
            "flops_profiler_output_file": ("output_file", None),
        },
    ),
)
# Features that are refused where the JSON asks for them, so that an engine that runs has none of them.
_NEVER: Final = (
    "autotuning_enabled data_efficiency_enabled data_sampling_enabled curriculum_learning_enabled random_ltd_enabled"
    " checkpoint_writer_enabled compile_autosp compile_autotp"
    " compile_zero_optimization_stage uses_parallelization_pass_only is_deepcompile_enabled is_deepcompile_active"
    " autotuning_profile_model_info is_first_weights_partition_group"
)
_NO_CONFIG: Final = "data_efficiency_config data_sampling_config curriculum_learning_config random_ltd_config"
_SECTIONS: Final = (
    ("tensor_parallel_config", "tensor_parallel"),
    ("aio_config", "aio"),
    ("zenflow_config", "zero_optimization.zenflow"),
    ("zero_offload_optimizer", "zero_optimization.offload_optimizer"),
    ("zero_offload_param", "zero_optimization.offload_param"),
)
# Parts of DeepSpeed's own reduction, which scripts call in loops of their own: the engine reduces as backwards go.
_REDUCES: Final = (
    "allreduce_bucket allreduce_and_copy allreduce_no_retain buffered_allreduce_fallback sparse_allreduce"
    " sparse_allreduce_bucket sparse_allreduce_no_retain sparse_all_gather all_gather_scalar clip_fp32_gradients"
)


def _with_table(kind: type[EngineGetters]) -> type[EngineGetters]:
    """Give a class the getters of the tables."""

    def add(name: str, function: Callable[..., Any], text: str) -> None:
        function.__name__, function.__qualname__ = name, f"{kind.__name__}.{name}"
        function.__doc__ = text
        setattr(kind, name, function)

    def of_key(path: str, default: Any) -> Callable[..., Any]:
        return lambda self: self._given.get(path, default)

    def of_section(path: str) -> Callable[..., Any]:
        return lambda self: self._section(path)

    def refusal(name: str) -> Callable[..., Any]:
        def refuse(self: EngineGetters, *args: Any, **options: Any) -> Any:
            fix = "backward and step reduce; write gradients by safe_set_full_grad"
            raise MissingNameError("deepspeed-own-reduction", f"engine.{name} is of DeepSpeed's own reduction; {fix}")

        return refuse

    for section, getters in _TABLE:
        for name, (key, default) in getters.items():
            add(name, of_key(section + key, default), f"Return `{section}{key}` of the JSON.")
    for name, section in _SECTIONS:
        add(name, of_section(section), f"Return the section `{section}` of the JSON, or None.")
    for name in _NEVER.split():
        add(name, lambda self: False, "Return False: no engine has it.")
    for name in _NO_CONFIG.split():
        add(name, lambda self: {}, "Return nothing: no engine has it.")
    for name in _REDUCES.split():
        add(name, refusal(name), "Refuse a part of DeepSpeed's own reduction.")
    return kind


@_with_table
class EngineGetters:
    """Answers what scripts ask of an engine; the tables above have the getters of one key."""

    if TYPE_CHECKING:  # of the engine
        inner: Engine
        module: Any
        optimizer: Any
        lr_scheduler: Any
        config: Mapping[str, Any]
        _given: Mapping[str, Any]
        world_size: int
        global_rank: int

    mpu: Any = None
    loaded_checkpoint_tag: str | None = None
    loaded_checkpoint_mp_world_size: int | None = None
    has_moe_layers = False
    is_compiled = False
    timers: Any = None
    tput_timer: Any = None
    losses: Any = None
    collate_fn: Any = None
    training_data: Any = None
    gradient_average = True
    pipeline_parallelism = False

    def _section(self, name: str) -> Any:
        keys = {
            path.removeprefix(f"{name}."): value for path, value in self._given.items() if path.startswith(f"{name}.")
        }
        return SimpleNamespace(**keys) if keys else None

    # What the JSON says.

    def train_batch_size(self) -> int:
        return self.inner.config.batch.global_size or 1

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.inner.config.batch.micro_size or 1

    def gradient_accumulation_steps(self) -> int:
        return self.inner.config.batch.accumulation or 1

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        return self.inner.config.zero.stage

    def fp16_enabled(self) -> bool:
        return self.inner.layout.precision.param == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self.inner.layout.precision.param == "bf16"

    def gradient_clipping(self) -> float:
        return self.inner.config.optimizer.clip_norm or 0.0

    def loss_scale(self) -> float:
        return self.inner.parts.scaler.scale

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.inner.optimizer.param_groups]

    def get_data_parallel_rank(self) -> int:
        return self.inner.layout.mesh.data_index(self.global_rank)

    # What the JSON says in other words.

    def optimizer_name(self) -> str | None:
        """Return the type of the JSON's optimizer, DeepSpeed's own in lower case, or the class of the script's own."""
        if "optimizer.type" in self._given:
            optimizer_name = str(self._given["optimizer.type"])
            return optimizer_name.lower() if optimizer_name.lower() in _OPTIMIZER_NAMES else optimizer_name
        return type(self.basic_optimizer).__name__ if self.optimizer is not None else None

    def optimizer_params(self) -> dict[str, Any] | None:
        """Return the options of the JSON's optimizer."""
        params = self._section("optimizer.params")
        return None if params is None else vars(params)

    def scheduler_params(self) -> dict[str, Any] | None:
        """Return the options of the JSON's schedule."""
        params = self._section("scheduler.params")
        return None if params is None else vars(params)

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return the global batch, the micro-batch, and the micro-batches a step."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def postscale_gradients(self) -> bool:
        """Return whether gradients are scaled after their sum."""
        return not self._given.get("prescale_gradients", False)

    @property
    def communication_data_type(self) -> torch.dtype:
        """Return the dtype in which gradients are sent, by the JSON."""
        name = self._given.get("communication_data_type")
        return TORCH_DTYPES[dtype_key(str(name))] if name else self.get_data_types()[0]

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtype of the parameters, and that in which gradients are summed."""
        model_dtype = (
            torch.float16 if self.fp16_enabled() else torch.bfloat16 if self.bfloat16_enabled() else torch.float32
        )
        name = self._given.get("data_types.grad_accum_dtype")
        return model_dtype, TORCH_DTYPES[dtype_key(str(name))] if name else model_dtype

    def torch_autocast_dtype(self) -> torch.dtype:
        """Return the dtype of `torch.autocast`."""
        return TORCH_DTYPES[dtype_key(str(self._given.get("torch_autocast.dtype", "bfloat16")))]

    def dynamic_loss_scale(self) -> bool:
        """Return whether the loss scale changes."""
        return self.fp16_enabled() and not self._given.get("fp16.loss_scale", 0)

    def initial_dynamic_scale(self) -> float:
        """Return the first loss scale."""
        return float(2.0 ** self._given.get("fp16.initial_scale_power", 16))

    def zero_use_cpu_optimizer(self) -> bool:
        """Return whether the optimizer's states leave the device."""
        return self.inner.config.tiers.optimizer != "device"

    def zero_cpu_offload(self) -> bool:
        """Return whether the optimizer's states are on the host."""
        return self.inner.config.tiers.optimizer == "host"

    def zero_has_nvme_offload(self) -> bool:
        """Return whether a state is on a disk."""
        return "nvme" in (self.inner.config.tiers.optimizer, self.inner.config.tiers.params)

    def zero_nvme_offload_optimizer(self) -> bool:
        """Return whether the optimizer's states are on a disk."""
        return self._given.get("zero_optimization.offload_optimizer.device") == OffloadDeviceEnum.nvme

    def zero_optimization_partition_gradients(self) -> bool:
        """Return whether gradients are sharded."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Return whether parameters are sharded."""
        return self.zero_optimization_stage() >= 3

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Return whether a word is said where ranks give a checkpoint different tags."""
        return self._tag_rule() != "IGNORE"

    def checkpoint_tag_validation_fail(self) -> bool:
        """Return whether that raises."""
        return self._tag_rule() == "FAIL"

    def _tag_rule(self) -> str:
        return str(self._given.get("checkpoint.tag_validation", TAG_RULES[0])).upper()

    # What the optimizer and the schedule have.

    @property
    def basic_optimizer(self) -> Any:
        """Return torch's optimizer, which the engine steps."""
        return self.inner.optimizer

    @property
    def sparse_tensor_module_names(self) -> set[str]:
        """Return the modules whose gradients are sent as rows: none."""
        return set()

    def get_mom(self) -> list[Any]:
        """Return the momentum, or the betas, of each param group."""
        is_momentum = self.optimizer_name() in ("SGD", "RMSprop")
        return self._options("momentum" if is_momentum else "betas")

    def get_type(self) -> list[Any]:
        """Return the type of each param group, where the script has written one."""
        return self._options("type")

    def _options(self, name: str) -> list[Any]:
        """Return an option of each param group; DeepSpeed has zero for one that is not there."""
        return [group.get(name, 0.0) for group in self.inner.optimizer.param_groups] if self.optimizer else []

    # Ranks.

    def get_tensor_parallel_rank(self) -> int:
        """Return this rank's place among those that share a layer."""
        return self.inner.layout.mesh.index_along(TENSOR_AXES, self.global_rank)

    get_model_parallel_rank = get_tensor_parallel_rank

    def get_sequence_parallel_group(self) -> Any:
        """Return the group of the ranks that share this one's sequences, or None."""
        return groups.get_sequence_parallel_group() if self.sequence_parallel_size > 1 else None

    @property
    def sequence_parallel_size(self) -> int:
        """Return the ranks that share a sequence."""
        return self.inner.layout.mesh.cp

    @property
    def seq_parallel_group(self) -> Any:
        """Return what `get_sequence_parallel_group` does."""
        return self.get_sequence_parallel_group()

    @property
    def data_parallel_group(self) -> Any:
        """Return torch's group of the ranks whose samples differ."""
        return groups.group(DATA_AXES)

    @property
    def seq_data_parallel_group(self) -> Any:
        """Return torch's group of the ranks over which gradients are means."""
        return groups.group(GRADIENT_AXES)

    seq_dp_world_size = property(lambda self: self.inner.layout.mesh.size_along(GRADIENT_AXES))

    @property
    def dist_backend(self) -> str:
        """Return the name of torch's back end."""
        return dist.get_backend()

    # Others.

    @property
    def monitor(self) -> Any:
        """Return a monitor that writes nothing: the script logs what `engine.step` returns."""
        return Monitor()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Set the global batch by the number of micro-batches a step, between two steps.

        Raises:
            ConfigError: the micro-batches of all data ranks do not divide it, or some of a step's have been taken.
        """
        size = self.train_micro_batch_size_per_gpu() * self.inner.layout.mesh.num_data_ranks
        if train_batch_size <= 0 or train_batch_size % size:
            fix = "give a multiple of it"
            raise ConfigError(
                "batch-not-divided", f"train_batch_size={train_batch_size} is no multiple of {size}; {fix}"
            )
        self._set_batch(train_batch_size, self.train_micro_batch_size_per_gpu(), train_batch_size // size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Set the micro-batch; the number of them a step stays."""
        steps = self.gradient_accumulation_steps()
        self._set_batch(micro_batch_size * steps * self.inner.layout.mesh.num_data_ranks, micro_batch_size, steps)

    def _set_batch(self, whole: int, micro: int, steps: int) -> None:
        parts = self.inner.parts
        taken, before = parts.state.num_backwards, self.gradient_accumulation_steps()
        if taken and steps != before and parts.losses.plain.scale is not None:
            raise ConfigError(
                "batch-set-within-step",
                f"set_train_batch_size({whole}) after {taken} of a step's {before} micro-batches, whose losses are "
                f"divided by {before} and the next ones' by {steps}; call it after engine.step() at a boundary",
            )
        batch = {"global_size": whole, "micro_size": micro, "accumulation": steps}
        changed = parts.config.model_copy(update={"batch": parts.config.batch.model_copy(update=batch)})
        self.inner.config = parts.state.config = changed
        if parts.losses.plain.scale is not None:
            parts.losses.plain.scale = 1 / steps

    def set_data_post_process_func(self, post_process_func: Callable[..., Any]) -> None:
        """Set what the loader of `training_data` does to each batch."""
        loader: Any = getattr(self, "training_dataloader", None)
        if loader is None:
            raise ConfigError("no-training-data", "there is no loader to change; pass training_data to initialize")
        loader.post_process_func = post_process_func

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """Return a loader of this data rank's micro-batches; the arguments are those of DeepSpeed.

        Only the samples' order depends on the `route`: those of "eval" and "predict" keep theirs.
        """
        from shardwise.compat.deepspeed.runtime.dataloader import DeepSpeedDataLoader

        return DeepSpeedDataLoader.of(
            dataset,
            cast(Any, self),
            collate_fn if collate_fn is not None else self.collate_fn,
            size=batch_size,
            sampler=data_sampler,
            shuffles=route == "train",
            num_workers=num_local_io_workers or 0,
        )

    def get_pg_info(self) -> None:
        """Return None: groups are torch's."""

    def print_forward_breakdown(self, fwd_time: Any) -> None:
        """Do nothing: torch's profiler times a forward."""

    def dump_state_info(self) -> None:
        """Log the JSON."""
        logger.info("%s", self.config)

    def collect_python_gc(self) -> None:
        """Do nothing: Python's collector stays as the script sets it."""

    def get_compile_time(self) -> float:
        """Return 0.0: blocks are compiled when they first run."""
        return 0.0


class Monitor:
    """Writes nothing, as DeepSpeed's does where no writer is enabled."""

    enabled = False

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def write_events(self, event_list: Any, flush: bool = True) -> None:
        """Do nothing: the script logs what `engine.step` returns; the arguments are those of DeepSpeed."""

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_monitor"):
            return self
        raise AttributeError(name)
