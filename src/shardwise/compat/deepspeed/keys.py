"""Say what each key of DeepSpeed's JSON is here: messages, translation and the docs page are made of this one table.

A key is in exactly one class. M means a Shardwise key or call. N has no effect here, which is said once, and why. R
is refused before a run starts, with the reason and the fix. X is a key that DeepSpeed 0.19.8 itself dropped: what is
done with it here is M, N or R too.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from shardwise.config.resolve import all_keys

CLASSES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "M": "means what is named",
        "N": "has no effect here, which is said once",
        "R": "is refused before a run starts",
        "X": "DeepSpeed 0.19.8 has dropped it",
    }
)

_UNITS: Final = "units are blocks, and buffers are sized and pooled by the library"
_SUMS: Final = "sums run in fp32, or wider"
_IO: Final = "reads and writes of states are sized by the library, and overlap the step"
_LOGS: Final = "the script logs what `engine.step` returns: loss, norm, rate"
_MASTERS: Final = "masters and moments are fp32 here, which is more exact and takes more memory"
_OF_FP16: Final = "a key of fp16; bf16 has no loss scale"
_GATHERS: Final = "`engine.save_16bit_model` gathers only where it is true"
_ANY_OPTIMIZER: Final = "any element-wise optimizer is stepped, on the host too"
_PIPELINE: Final = "the PipelineModule's own arguments say it"
_SAVES: Final = "checkpoints are safetensors, written in parallel; `engine.save(wait=False)` writes in the background"
_QUANTIZED: Final = "it is not quantized; leave it out"
_ALL_WEIGHTS: Final = "frozen weights are sent as the others are; set zero_quantized_weights"
_MUP: Final = "mup's optimizers are not known; pass an optimizer with mup's groups to `initialize`"
_ONE_BIT: Final = "DeepSpeed removed 1-bit optimizers (#8489); use AdamW"
_DATA: Final = "it changes which data are seen, or the model; do it in the script, and leave it out"
_WITH_SECTION: Final = "counts only where its section is enabled"
_TP: Final = "the plan of `mesh.tp` says which layers are split; `initialize(plan=...)` takes one of your own"

# (class, what it is, keys): `section: a b` stands for section.a and section.b, and `*` for any key of a section without
# a row of its own. Of XM, XN and XR the second part is what is done here.
_TABLE: Final = (
    ("M", "batch.global_size", "train_batch_size"),
    ("M", "batch.micro_size", "train_micro_batch_size_per_gpu"),
    ("M", "batch.accumulation", "gradient_accumulation_steps"),
    ("M", "`engine.step`: where false, each call takes a step", "managed_gradient_accumulation"),
    ("M", "optimizer.clip_norm: 1.0 by default, 0 is off", "gradient_clipping"),
    ("M", "precision.reduce", "communication_data_type"),
    ("N", _SUMS, "seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor disable_allgather"),
    ("M", "`engine.backward`: where sum, data ranks' gradients are added; in stage 3 too", "gradient_allreduce_op"),
    ("XN", "gradients are dense", "sparse_gradients"),
    ("M", "any section of Shardwise's own config, merged over all of this; mesh.pp is refused", "shardwise.*"),
    ("M", "optimizer.name: in any case; any element-wise one of torch.optim", "optimizer: type"),
    ("M", "optimizer.name: AdamW unless adam_w_mode=false", "optimizer: type=adam type=fusedadam type=cpuadam"),
    ("R", "its step needs norms of whole matrices; use AdamW or Lion", "optimizer: type=lamb"),
    ("R", "its options are others; set shardwise.optimizer.name=muon, without this section", "optimizer: type=muon"),
    ("R", _MUP, "optimizer: type=muadam type=muadamw type=musgd"),
    ("XR", _ONE_BIT, "optimizer: type=onebitadam type=onebitlamb type=zerooneadam"),
    ("N", "there is one kernel of each optimizer", "optimizer.legacy_fusion optimizer.params.set_grad_none"),
    ("M", "optimizer.lr", "optimizer.params: lr"),
    ("M", "optimizer.betas", "optimizer.params: betas"),
    ("M", "optimizer.eps", "optimizer.params: eps"),
    ("M", "optimizer.weight_decay: of all parameters, 1-D ones too", "optimizer.params: weight_decay"),
    ("M", "optimizer.momentum", "optimizer.params: momentum"),
    ("M", "torch's Adam or AdamW", "optimizer.params: adam_w_mode torch_adam"),
    ("M", "the optimizer's own option of that name", "optimizer.params: *"),
    ("R", "torch's optimizers correct the bias; leave it out", "optimizer.params: bias_correction"),
    ("R", "DeepSpeed refuses it, too; use gradient_clipping", "optimizer.params: max_grad_norm"),
    ("N", _MASTERS, "optimizer.params: fp32_optimizer_states"),
    ("XN", "of 1-bit optimizers", "optimizer.params: comm_backend_name cuda_aware freeze_step"),
    ("M", "a schedule with DeepSpeed's values, step by step", "scheduler: type"),
    ("M", "the schedule's own option of that name", "scheduler.params: *"),
    ("M", "precision.param: fp16", "fp16: enabled"),
    ("M", "precision.loss_scale: 0 is dynamic", "fp16: loss_scale"),
    ("M", "precision.initial_loss_scale: 2 to that power", "fp16: initial_scale_power"),
    ("M", "precision.loss_scale_window", "fp16: loss_scale_window"),
    ("M", "precision.min_loss_scale", "fp16: min_loss_scale"),
    ("M", "precision.loss_scale_hysteresis: 2 by default; as in DeepSpeed, not in stage 0", "fp16: hysteresis"),
    ("M", "precision.consecutive_hysteresis", "fp16: consecutive_hysteresis"),
    ("M", "`engine.forward` casts floating inputs", "fp16: auto_cast"),
    ("N", _MASTERS, "fp16: fp16_master_weights_and_grads"),
    ("M", "precision.param: bf16", "bf16: enabled"),
    ("M", "run.on_nonfinite: where false, a step is taken whatever its gradients are", "bf16: check_grad_overflow"),
    ("N", "gradients are summed as each backward goes", "bf16: immediate_grad_update"),
    ("N", _MASTERS, "bf16: bf16_master_weights_and_grads bf16_optimizer_states"),
    ("N", _OF_FP16, "bf16: auto_cast loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale"),
    ("M", "`engine.forward` runs under torch.autocast, over fp32 parameters", "torch_autocast: enabled dtype"),
    ("N", "torch.autocast says which operations take the lower dtype", "torch_autocast: lower_precision_safe_modules"),
    ("M", "precision.accumulate", "data_types: grad_accum_dtype"),
    ("M", "precision.param: instead of fp16's or bf16's", "data_types: param_dtype"),
    ("M", "precision.buffers", "data_types: buffer_dtype"),
    ("N", "buffers keep their dtype", "data_types: keep_in_fp32_modules"),
    ("M", "zero.stage: 0 by default", "zero_optimization: stage"),
    ("M", "zero.overlap", "zero_optimization: overlap_comm"),
    ("M", "zero.keep_whole_below: 1e5 by default", "zero_optimization: stage3_param_persistence_threshold"),
    ("M", _GATHERS, "zero_optimization: stage3_gather_16bit_weights_on_model_save"),
    (
        "N",
        _UNITS,
        "zero_optimization: reduce_bucket_size allgather_bucket_size sub_group_size"
        " stage3_prefetch_bucket_size stage3_max_live_parameters stage3_max_reuse_distance"
        " stage3_module_granularity_threshold stage3_model_persistence_threshold stage3_allgather_sequential"
        " stage3_use_all_reduce_for_fetch_params contiguous_gradients reduce_scatter allgather_partitions"
        " use_multi_rank_bucket_allreduce round_robin_gradients parameter_alignment memory_efficient_linear"
        " override_module_apply pipeline_loading_checkpoint legacy_stage1 log_trace_cache_warnings",
    ),
    ("N", _UNITS, "allgather_size"),
    ("M", "marks of modules, which scripts read; ranks may run different ones", "zero_optimization.leaf_module: *"),
    (
        "N",
        "it always is so here",
        "zero_optimization: load_from_fp32_weights elastic_checkpoint ignore_unused_parameters compute_grad_norm",
    ),
    ("N", "run.check_collectives compares what ranks send", "zero_optimization: enable_sanity_checks"),
    (
        "N",
        "Muon's momentum is stored as other states are",
        "zero_optimization: save_muon_momentum_buffer_in_memory",
    ),
    ("M", "tiers.optimizer: gradients go to the host, too", "zero_optimization.offload_optimizer: device"),
    ("M", "tiers.params", "zero_optimization.offload_param: device"),
    ("M", "tiers.nvme_path", "zero_optimization: offload_optimizer.nvme_path offload_param.nvme_path"),
    ("M", "tiers.pin_memory", "zero_optimization: offload_optimizer.pin_memory offload_param.pin_memory"),
    ("M", "tiers.optimizer_on_device: what the ratio leaves", "zero_optimization.offload_optimizer: ratio"),
    (
        "N",
        _IO,
        "zero_optimization.offload_optimizer: buffer_count buffer_size pipeline pipeline_read pipeline_write fast_init"
        " super_offload cpuadam_cores_perc",
    ),
    ("N", _IO, "zero_optimization.offload_param: buffer_count buffer_size max_in_cpu"),
    ("M", "tiers.optimizer: an old spelling of offload_optimizer", "zero_optimization: cpu_offload"),
    ("M", "tiers.params: an old spelling of offload_param", "zero_optimization: cpu_offload_param"),
    ("M", "tiers.pin_memory: an old spelling", "zero_optimization: cpu_offload_use_pin_memory"),
    ("R", "it steps with gradients of earlier steps; leave it out: the step overlaps", "zero_optimization.zenflow: *"),
    ("M", "zero.secondary_shard", "zero_optimization: zero_hpz_partition_size"),
    ("M", "precision.gather: int8", "zero_optimization: zero_quantized_weights"),
    ("M", "precision.reduce: int4", "zero_optimization: zero_quantized_gradients"),
    ("R", _ALL_WEIGHTS, "zero_optimization: zero_quantized_nontrainable_weights"),
    ("XM", "mesh.dp_shard", "zero_optimization: mics_shard_size"),
    ("XN", "gathers go over the shard group", "zero_optimization: mics_hierarchical_params_gather"),
    ("XR", _QUANTIZED, "zero_optimization.zeropp_loco_param: *"),
    ("N", _ANY_OPTIMIZER, "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"),
    (
        "N",
        "the model or `deepspeed.checkpointing` says what is recomputed; recompute.mode=full recomputes each block",
        "activation_checkpointing: partition_activations number_checkpoints contiguous_memory_optimization"
        " cpu_checkpointing synchronize_checkpoint_boundary profile",
    ),
    ("M", "recompute.mode: full, where it is not 0", "pipeline: activation_checkpoint_interval"),
    ("N", _PIPELINE, "pipeline: stages partition seed_layers pipe_partitioned grad_partitioned use_reentrant"),
    ("M", "mesh.tp", "tensor_parallel: autotp_size tp.tp_size"),
    ("M", "tensor.overlap_chunks: 2", "tensor_parallel: tp_overlap_comm"),
    ("R", _TP, "tensor_parallel: partition_config.* injection_policy_tuple kernel_inject"),
    ("R", "ranks of tensor parallelism follow from mesh.tp; leave it out", "tensor_parallel.tp: mpu tp_group"),
    ("N", _TP, "tensor_parallel: preset_model dtype keep_module_on_host vocab_parallel_lm_head tp.tp_grain_size"),
    ("N", _TP, "tensor_parallel: vocab_parallel_ce_backend"),
    ("M", "`mesh.ep` is autoep_size where it is true", "expert_parallel: enabled"),
    ("M", "mesh.ep: where enabled is true", "expert_parallel: autoep_size"),
    ("R", "an expert is never split over ranks; set it to 1", "expert_parallel: expert_tensor_parallel_size"),
    ("N", "the model's own code routes, and its experts are found by their attributes", "expert_parallel.*"),
    ("M", "mesh.cp: with context.transport=ulysses", "sequence_parallel_size"),
    ("N", "it follows from the ranks and the other sizes", "data_parallel_size"),
    ("XM", "attention.kind: fixed by default", "sparse_attention: mode"),
    (
        "XM",
        "attention.*: the key of that name",
        "sparse_attention: block different_layout_per_head num_local_blocks num_global_blocks"
        " horizontal_global_attention num_different_global_patterns num_random_blocks local_window_blocks"
        " global_block_indices global_block_end_indices num_sliding_window_blocks",
    ),
    ("XN", "the model's own mask says it", "sparse_attention: attention"),
    (
        "M",
        "`engine.save_checkpoint` warns, raises or takes rank 0's tag where ranks differ",
        "checkpoint: tag_validation",
    ),
    ("M", "`engine.load_checkpoint` reads every layout anyway", "checkpoint: load_universal"),
    ("R", "a checkpoint is one folder that all ranks share; give such a folder", "checkpoint: use_node_local_storage"),
    ("N", _SAVES, "checkpoint: checkpoint_serialization parallel_write.* writer.*"),
    ("N", _SAVES, "datastates_ckpt.*"),
    ("XN", _SAVES, "nebula.*"),
    ("R", "there is no GPUDirect Storage; leave it out", "aio: use_gds"),
    ("N", _IO, "aio: block_size queue_depth intra_op_parallelism thread_count single_submit overlap_events"),
    ("N", _LOGS, "tensorboard.* wandb.* csv_monitor.* comet.* timers.throughput.*"),
    ("N", _LOGS, "steps_per_print wall_clock_breakdown dump_state"),
    ("M", "the level of the logger `DeepSpeed`", "log_level"),
    ("N", "`engine.memory` counts what memory holds", "memory_breakdown"),
    ("N", "run.check_collectives and `shardwise.simulate` say what ranks send", "comms_logger.*"),
    ("N", "`shardwise plan --explain` and torch's profiler count operations", "flops_profiler.*"),
    ("N", "Python's collector stays as the script sets it", "disable_python_gc"),
    ("M", "compile.enabled", "compile: deepcompile"),
    ("N", "`compile.enabled` compiles each block, and has no such part", "compile: *"),
    ("XN", "`compile.enabled` compiles each block, and has no such part", "graph_harvesting"),
    ("R", "`shardwise plan --compare ds_config.json` searches layouts; leave it out", "autotuning: enabled"),
    ("R", "`engine.gathered` and `engine.offloaded` serve generation; leave it out", "hybrid_engine: enabled"),
    ("R", _DATA, "data_efficiency: enabled"),
    ("N", _WITH_SECTION, "autotuning.* hybrid_engine.* data_efficiency.*"),
    ("XR", "a run goes on with any number of ranks; set the batch, and leave it out", "elasticity: enabled"),
    ("XR", _DATA, "curriculum_learning.enabled progressive_layer_drop.enabled eigenvalue.enabled"),
    ("XR", _QUANTIZED, "quantize_training.enabled compression_training.*"),
    ("XR", "Apex is not used; set bf16.enabled or fp16.enabled", "amp: enabled"),
    ("XN", _WITH_SECTION, "elasticity.* curriculum_learning.* progressive_layer_drop.* eigenvalue.*"),
    ("XN", _WITH_SECTION, "quantize_training.* amp.*"),
    ("R", _QUANTIZED, "weight_quantization.*"),
    ("N", "sizes that do not divide are padded", "vocabulary_size"),
    ("N", "`mesh.ep` divides neighbouring ranks", "use_data_before_expert_parallelism"),
    ("M", "the loader that `deepspeed.initialize(training_data=...)` makes", "dataloader_drop_last"),
)

_ASK_NOTHING: Final = (None, False, 0, "", "none")
# Values of refused keys that ask for nothing; of every other key `_ASK_NOTHING` are.
_HARMLESS: Final[Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        "optimizer.params.bias_correction": (None, True),
        "expert_parallel.expert_tensor_parallel_size": (None, 1),
    }
)


@dataclass(frozen=True)
class Key:
    """Say what one key of DeepSpeed's is here.

    Attributes:
        path: dotted; it ends with `.*` for any key of a section, and with `=value` for one value of a key.
        action: M (means a key or call here), N (has no effect) or R (is refused).
        text: the Shardwise key or call that it means, why it has no effect, or why it is refused and the fix.
        is_dropped: whether DeepSpeed 0.19.8 refuses or ignores it.
    """

    path: str
    action: str
    text: str
    is_dropped: bool

    @property
    def kind(self) -> str:
        """Return the one class of the key."""
        return "X" if self.is_dropped else self.action

    @property
    def target(self) -> str | None:
        """Return the Shardwise key that it means, if it means one."""
        name = self.text.partition(":")[0]
        return name if self.action == "M" and name in all_keys() else None

    def asks(self, value: Any) -> bool:
        """Say whether a value asks for something: false, 0 and empty sections mostly do not."""
        harmless = _HARMLESS.get(self.path, _ASK_NOTHING)
        return value not in harmless and value not in ([], {})


def _rows() -> Iterator[Key]:
    for verdict, text, names in _TABLE:
        section, _, leaves = names.rpartition(": ")
        for leaf in leaves.split():
            path = f"{section}.{leaf}" if section else leaf
            yield Key(path, verdict[-1], text, verdict[0] == "X")


KEYS: Final[Mapping[str, Key]] = MappingProxyType({key.path: key for key in _rows()})
"""The table by path, in the order of the page."""


_GATHER_KEY: Final = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
# Other spellings, which DeepSpeed takes or took.
_SPELLINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bfloat16": "bf16",
        "tensor_parallel.tensor_parallel": "tensor_parallel.tp",
        "tensor_parallel.replace_with_kernel_inject": "tensor_parallel.kernel_inject",
        "zero_optimization.cpu_offload_params": "zero_optimization.cpu_offload_param",
        "zero_optimization.stage3_gather_fp16_weights_on_model_save": _GATHER_KEY,
        "zero_optimization.gather_fp16_weights_on_model_save": _GATHER_KEY,
        **{path.replace(".stage3_", "."): path for path in KEYS if ".stage3_" in path},
    }
)


def usual_path(path: str) -> str:
    """Return a dotted key as the table spells it.

    >>> usual_path("bfloat16.enabled"), usual_path("zero_optimization.prefetch_bucket_size")
    ('bf16.enabled', 'zero_optimization.stage3_prefetch_bucket_size')
    """
    section, _, leaf = path.rpartition(".")
    if section in _SPELLINGS:
        path = f"{_SPELLINGS[section]}.{leaf}"
    return _SPELLINGS.get(path, path)


def key_of(path: str, value: Any = None) -> Key | None:
    """Return what a dotted key is, as `usual_path` spells it, or None where DeepSpeed knows none of that name.

    Args:
        value: for keys of which some values have a row of their own.
    """
    if isinstance(value, str) and (of_value := KEYS.get(f"{path}={value.lower()}")):
        return of_value
    if path in KEYS:
        return KEYS[path]
    sections = path.split(".")
    parents = (".".join([*sections[:size], "*"]) for size in range(len(sections), 0, -1))
    return next((KEYS[parent] for parent in parents if parent in KEYS), None)


def nearest(path: str) -> str | None:
    """Return the key that an unknown one may be meant as: of the nearest section, then by the name alone."""
    section, _, leaf = path.rpartition(".")
    paths = [key.path for key in KEYS.values() if "=" not in key.path]
    sections = {path.rpartition(".")[0] for path in paths}
    if section not in sections:
        for near in difflib.get_close_matches(section, sections, n=1):
            return f"{near}.{leaf}" if key_of(f"{near}.{leaf}") else nearest(f"{near}.{leaf}")
    siblings = [path.rpartition(".")[2] for path in paths if path.rpartition(".")[0] == section]
    for near in difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.75):
        return f"{section}.{near}" if section else near
    return next((path for path in paths if path.rpartition(".")[2] == leaf), None)
