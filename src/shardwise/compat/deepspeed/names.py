"""Says where each name of DeepSpeed 0.19.8 is here, or who answers for it and what to do.

`_HOMES` says which module has a name that is not in a file at DeepSpeed's path; `_ANSWERS` has one sentence for every
sub-tree of DeepSpeed, for what is not here at all. `names.txt` lists the public names by module: names that scripts
may import, whether they are used or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Final

_LEAF: Final = (
    "set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module z3_leaf_parameter"
    " set_z3_leaf_module set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix"
)
_SAFE: Final = (
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_set_full_fp32_param"
    " safe_set_full_grad safe_set_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad"
    " safe_get_local_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state"
    " safe_update_full_grad_vectorized"
)
_TIMERS: Final = "SynchronizedWallClockTimer ThroughputTimer"
_ADAM: Final = "DeepSpeedCPUAdam FusedAdam"
_LION: Final = "DeepSpeedCPULion=Lion FusedLion=Lion"
_PROFILE: Final = (
    "FlopsProfiler get_model_profile number_to_string flops_to_string macs_to_string params_to_string"
    " duration_to_string"
)

# Keys of DeepSpeed's checkpoints that are their names in lower case.
_KEYS: Final = (
    "OPTIMIZER_STATE_DICT FP32_GROUPS FP32_FLAT_GROUPS BASE_OPTIMIZER_STATE BASE_OPTIMIZER_STATE_STEP "
    "SINGLE_PARTITION_OF_FP32_GROUPS PARAM_GROUPS GROUP_PADDINGS PARAM_ALIGNMENT_PADDINGS PARTITION_COUNT "
    "ZERO_STAGE CLIP_GRAD LOSS_SCALER PARAM PARAM_SHAPES BUFFER_NAMES FROZEN_PARAM_SHAPES "
    "FROZEN_PARAM_FRAGMENTS DS_VERSION UNIVERSAL_CHECKPOINT_INFO AFFINE_MAP VOCAB_TENSOR "
    "PADDED_VOCAB_SIZE ORIGINAL_VOCAB_SIZE PARAM_SLICE_MAPPINGS CAT_DIM PARAM_N_SUB_PARAMS "
    "SUB_PARAM_SHAPE VOCABULARY_PARAMETER_PATTERNS PIPELINE_REPLICATED_PARAMETER_PATTERNS "
    "PARAMETER_TO_AVERAGE_PATTERNS PARAMETER_WITH_ROW_PARALLELISM_PATTERNS "
    "TP_REPLICATED_PARAMETER_PATTERNS PARAMETER_WITH_2_SUB_PARAMS_CAT_DIM_0 PARAMETER_WITH_SUB_PARAMS "
    "SUB_PARAM_SHARD_WIDTHS SUB_PARAMS_SHAPE DS_AUTOEP_UC_META EXPERT_PARAMETER_PATTERNS"
)

# (DeepSpeed's modules, the module that has the names, the names): `a=b` is DeepSpeed's a, which is called b there,
# `a=` is the module itself, and `*` is every name. A home is below this package, or begins with shardwise or torch; "-"
# among the modules is DeepSpeed itself.
_HOMES: Final = (
    ("-", "start", "initialize tp_model_init"),
    ("-", "comm", "init_distributed dist="),
    ("-", "runtime.engine", "DeepSpeedEngine DeepSpeedOptimizer"),
    ("-", "runtime.dataloader", "DeepSpeedDataLoader"),
    ("- pipe runtime.pipe", "runtime.pipe.module", "PipelineModule LayerSpec TiedLayerSpec"),
    ("pipe runtime.pipe", "runtime.pipe.topology", "ProcessTopology"),
    ("-", "runtime.pipe.engine", "PipelineEngine"),
    ("-", "utils", "log_dist logger OnDevice"),
    ("- runtime.utils runtime.zero.partition_parameters", "accelerator", "get_accelerator"),
    ("-", "runtime.zero", "zero="),
    ("- runtime.config", "runtime.kinds", "DeepSpeedConfig DeepSpeedConfigError"),
    ("runtime.activation_checkpointing.checkpointing", "checkpointing", "*"),
    ("runtime.base_optimizer", "runtime.engine", "DeepSpeedOptimizer"),
    ("runtime.base_optimizer", "runtime.kinds", "ZeROOptimizer"),
    ("runtime.bf16_optimizer", "runtime.kinds", "BF16_Optimizer"),
    ("runtime.fp16.fused_optimizer", "runtime.kinds", "FP16_Optimizer"),
    ("runtime.fp16.unfused_optimizer", "runtime.kinds", "FP16_UnfusedOptimizer"),
    ("runtime.fp16.loss_scaler", "runtime.loss_scaler", "LossScalerBase LossScaler DynamicLossScaler"),
    ("runtime.zero.stage_1_and_2", "runtime.kinds", "DeepSpeedZeroOptimizer"),
    ("runtime.zero.stage_1_and_2 runtime.zero.stage3", "runtime.zero.estimates", "*"),
    ("runtime.zero.stage3", "runtime.zero", "unwrap_model_for_generation"),
    ("runtime.zero.stage3", "runtime.kinds", "DeepSpeedZeroOptimizer_Stage3"),
    ("runtime.zero.config runtime.config", "runtime.kinds", "DeepSpeedZeroConfig ZeroStageEnum"),
    ("runtime.zero.utils", "runtime.kinds", "is_zero_param ZeRORuntimeException"),
    ("runtime.sequence_parallel.ulysses_sp", "runtime.sequence_parallel.tiled", "*"),
    ("utils.logging", "utils", "logger *"),
    ("utils utils.mixed_precision_linkage", "utils.tensor_fragment", f"{_SAFE} get_full_hp_param get_full_hp_grad"),
    ("utils", "utils.tensor_fragment", "fragment_address"),
    ("utils utils.z3_leaf_module", "utils.leaf_modules", _LEAF),
    ("utils", "utils.groups", "*"),
    ("utils", "runtime.dataloader", "RepeatingLoader"),
    ("utils.init_on_device utils.nvtx utils.module_utils", "utils", "*"),
    ("utils.timer", "helpers", _TIMERS),
    ("monitor.monitor", "runtime.getters", "MonitorMaster=Monitor Monitor"),
    ("moe.utils checkpoint.utils env_report", "helpers", "*"),
    ("env_report", "helpers", "main=op_report cli_main=op_report"),
    ("comm.comm", "comm", "*"),
    ("comm.reduce_op", "comm", "ReduceOp"),
    ("accelerator.real_accelerator", "accelerator", "*"),
    ("accelerator accelerator.abstract_accelerator", "accelerator", "DeepSpeedAccelerator=Accelerator"),
    ("accelerator.cuda_accelerator", "accelerator", "CUDA_Accelerator=Accelerator"),
    ("accelerator.cpu_accelerator", "accelerator", "CPU_Accelerator=Accelerator"),
    ("profiling.flops_profiler profiling.flops_profiler.profiler", "profiler", _PROFILE),
    ("launcher.runner", "shardwise.launch.deepspeed", "main DEEPSPEED_ENVIRONMENT_NAME=ENV_FILE_NAME"),
    ("ops.adam.cpu_adam ops.adam.fused_adam", "ops.adam", _ADAM),
    ("ops.adagrad ops.adagrad.cpu_adagrad", "torch.optim", "DeepSpeedCPUAdagrad=Adagrad"),
    ("ops.lion ops.lion.cpu_lion ops.lion.fused_lion", "shardwise.optim.elementwise", _LION),
    ("ops ops.op_builder", "helpers", "__compatible_ops__"),
    ("ops.op_builder", "helpers", "*"),
    ("ops.aio", "helpers", "AsyncIOBuilder"),
    ("utils.torch", "helpers", "required_torch_version"),
    ("checkpoint.constants", "helpers", _KEYS),
    ("git_version_info", "helpers", "torch_info installed_ops compatible_ops"),
    ("git_version_info", "", "version git_hash=__git_hash__ git_branch=__git_branch__"),
    ("-", "", "git_hash=__git_hash__ git_branch=__git_branch__"),
)

_SERVE: Final = "Shardwise trains; export the weights by engine.save_16bit_model and serve them by an inference library"
_TP: Final = "the JSON splits layers: tensor_parallel.autotp_size, or mesh.tp in its section shardwise"
_KERNELS: Final = "nothing is compiled here; torch's own operators and optimizers run, in any layout"
_EXPERTS: Final = (
    "experts are plain modules, of transformers or your own; the JSON's expert_parallel.autoep_size divides them"
)
_OPTIMIZER: Final = "the optimizer that deepspeed.initialize returns is torch's, and ZeRO is the engine's own part"
_ZERO: Final = "ZeRO is shardwise's own engine; deepspeed.zero and deepspeed.utils.safe_* reach parameters and states"
_CHECKPOINT: Final = "engine.save_checkpoint writes safetensors that any layout loads, DeepSpeed's checkpoints too"
_SPARSE_DATA: Final = "it changes which data are seen; choose them in the script's own loader"
_CONFIG: Final = "the JSON is read by shardwise.compat.deepspeed.config; docs/deepspeed-config.md lists every key"
_CONSTANTS: Final = "it holds names of keys; write the key of the JSON itself, which docs/deepspeed-config.md lists"
_RANKS: Final = "ranks of experts have no groups of their own; the JSON's sizes make all other groups"
_OF_SEQUENCE: Final = "give whole sequences to the model; sequence_parallel_size in the JSON cuts them"
_NORMS: Final = (
    "runtime.utils.clip_grad_norm_ runtime.utils.get_global_norm runtime.utils.get_flattened_grad_norm"
    " runtime.utils.get_global_norm_of_tensors runtime.utils.clip_tensors_by_global_norm runtime.utils.CheckOverflow"
)
_IO: Final = "states are read and written by the library, which sizes and overlaps it; nothing is to be tuned"

# (how, who answers and what to do, sub-trees). "import": the module itself raises, so that a script's `try: import`
# takes its other branch. "use": its names can be imported, and raise where they are used. The longest sub-tree counts.
_TABLE: Final = (
    (
        "use",
        "it is DeepSpeed's own part; the engine, deepspeed.zero and deepspeed.utils answer scripts",
        "",
    ),
    ("import", _SERVE, "inference model_implementations ops.transformer.inference module_inject.containers"),
    ("use", _SERVE, "init_inference default_inference_config InferenceEngine DeepSpeedInferenceConfig"),
    ("use", _TP, "module_inject tp_model_init runtime.tensor_parallel set_autotp_mode"),
    ("use", "the JSON divides experts: expert_parallel.autoep_size", "module_inject.auto_ep"),
    (
        "use",
        "write the head as nn.Linear: the JSON's tensor_parallel splits it",
        "sequence.cross_entropy",
    ),
    ("import", _KERNELS, "ops.gds ops.compile ops.csrc ops.deepspeed4science ops.pin_memory ops.triton_ops"),
    ("import", _KERNELS, "ops.fp_quantizer ops.quantizer ops.random_ltd git_version_info_installed"),
    ("import", _KERNELS, "ops.op_builder.cpu ops.op_builder.hpu ops.op_builder.klxpu ops.op_builder.mlu"),
    ("import", _KERNELS, "ops.op_builder.mps ops.op_builder.npu ops.op_builder.sdaa ops.op_builder.supa"),
    ("import", _KERNELS, "ops.op_builder.xpu"),
    ("use", _KERNELS, "ops ops.op_builder ops.transformer env_report"),
    ("use", "use torch.optim.AdamW, or an optimizer of your own: one that needs whole tensors gets them", "ops.lamb"),
    ("use", _EXPERTS, "moe"),
    ("import", "the layouts are searched by `shardwise plan --compare ds_config.json`", "autotuning"),
    (
        "import",
        "DeepSpeed 0.19.8 itself has dropped it; compress the weights when they are trained",
        "compression",
    ),
    ("import", "a run goes on with any number of ranks: load the checkpoint there", "elasticity"),
    ("import", "DeepSpeed 0.19.8 itself has dropped it; checkpoints are safetensors", "nebula"),
    ("import", _CHECKPOINT, "datastates io runtime.model_checkpointing"),
    ("use", _CHECKPOINT, "checkpoint runtime.checkpoint_engine runtime.state_dict_factory"),
    ("import", f"{_IO}; `shardwise doctor --nvme-path` measures the disk", "nvme runtime.swap_tensor"),
    ("import", "each block is compiled by compile.enabled in the JSON's section shardwise", "compile"),
    ("use", "each block is compiled by compile.enabled in the JSON's section shardwise", "runtime.compiler"),
    ("import", "generate under engine.gathered(), or with engine.offloaded() beside a server", "runtime.rollout"),
    ("use", "generate under deepspeed.zero.GatheredParameters", "runtime.hybrid_engine runtime.hybrid_engine_graph"),
    ("use", "generate under deepspeed.zero.GatheredParameters", "DeepSpeedHybridEngine"),
    (
        "import",
        "tensor.overlap_chunks of the JSON's section shardwise overlaps what is sent",
        "runtime.domino",
    ),
    ("import", "the optimizer's step on the host overlaps already", "runtime.superoffload runtime.zenflow"),
    ("use", _SPARSE_DATA, "runtime.data_pipeline"),
    (
        "use",
        "shardwise prepare reads Megatron's indexed data sets",
        "runtime.data_pipeline.data_sampling.indexed_dataset",
    ),
    ("use", "LoRA is PEFT's: give its model to deepspeed.initialize, which trains the adapters alone", "linear"),
    ("use", _OPTIMIZER, "runtime.base_optimizer runtime.bf16_optimizer runtime.fp16"),
    ("use", _ZERO, "runtime.zero zero"),
    (
        "use",
        "deepspeed.initialize shards every layer; nn.Linear is enough",
        "runtime.zero.tiling",
    ),
    ("use", "take optimizer.name=muon in the JSON's section shardwise", "runtime.zero.muon"),
    ("use", "gradient_clipping in the JSON clips, and engine.get_global_grad_norm says the norm", _NORMS),
    ("use", _CONFIG, "runtime.config runtime.config_utils runtime.zero.config runtime.precision_config"),
    ("use", _CONSTANTS, "runtime.constants constants profiling.constants autotuning.constants"),
    ("use", "gradients are dense; leave sparse_gradients out", "runtime.sparse_tensor"),
    ("use", "weights keep their dtype; leave weight_quantization out", "runtime.weight_quantizer"),
    ("use", "the engine runs under torch.autocast where torch_autocast.enabled says it", "runtime.torch_autocast"),
    ("use", "a chunked head is context.chunk_tokens of the section shardwise", "runtime.chunked_cross_entropy"),
    ("use", "a pipeline's schedule is pipeline.schedule of the section shardwise", "runtime.pipe pipe"),
    ("use", "collectives are torch.distributed's, under the same names in deepspeed.comm", "comm runtime.comm"),
    ("use", _OF_SEQUENCE, "sequence runtime.sequence_parallel"),
    ("use", "log what engine.step returns and what engine.get_lr says, by the writer of your choice", "monitor"),
    ("use", "count operations by get_model_profile, or by torch's profiler", "profiling"),
    ("use", "start ranks by `deepspeed`, torchrun or `shardwise launch`", "launcher"),
    ("use", "the device is torch's: get_accelerator() answers for it", "accelerator"),
    ("use", _RANKS, "utils.groups"),
    ("use", "torch.profiler and `shardwise report` time a step", "utils.timer utils.nvtx utils.comms_logging"),
    ("use", "deepspeed.utils.safe_get_* and safe_set_* read and write states", "utils.tensor_fragment"),
    ("use", "deepspeed.utils.safe_get_* and safe_set_* read and write states", "utils.mixed_precision_linkage"),
    ("use", "torch.utils.checkpoint and deepspeed.checkpointing recompute", "runtime.activation_checkpointing"),
)


@dataclass(frozen=True)
class Answer:
    """Say what to do in place of a sub-tree of DeepSpeed, and whether its modules fail when they are imported."""

    text: str
    fails_at_import: bool


@cache
def _answers() -> Mapping[str, Answer]:
    rows = ((tree, Answer(text, how == "import")) for how, text, trees in _TABLE for tree in trees.split() or [""])
    return MappingProxyType(dict(rows))


def answer_of(path: str) -> Answer:
    """Return who answers for a dotted name below `deepspeed`."""
    parts = path.split(".")
    trees = (".".join(parts[:size]) for size in range(len(parts), -1, -1))
    return next(_answers()[tree] for tree in trees if tree in _answers())


def sentence(path: str) -> str:
    """Return what to say of a dotted name that is not here.

    >>> sentence("inference.engine.InferenceEngine").partition(";")[0]
    'deepspeed.inference.engine.InferenceEngine is not here: Shardwise trains'
    """
    return f"deepspeed.{path} is not here: {answer_of(path).text}"


@cache
def _listed() -> Mapping[str, frozenset[str]]:
    lines = files(__package__).joinpath("names.txt").read_text().splitlines()
    return MappingProxyType(
        {module: frozenset(members.split()) for module, _, members in (x.partition(":") for x in lines)}
    )


def public_names(module: str) -> frozenset[str]:
    """Return the public classes and functions of a module of DeepSpeed's, whether they are here or not."""
    return _listed().get(module, frozenset())


def is_module(path: str) -> bool:
    """Say whether DeepSpeed has this module, and importing it is no error here."""
    return path in _listed() and not answer_of(path).fails_at_import


@cache
def _homes() -> Mapping[str, tuple[tuple[str, str], ...]]:
    by_module: dict[str, list[tuple[str, str]]] = {}
    for modules, home, listed in _HOMES:
        for entry in listed.split():
            name, is_renamed, destination = entry.partition("=")
            for module in modules.split():
                by_module.setdefault(f"{module}.{name}", []).append((home, destination if is_renamed else name))
    return MappingProxyType({name: tuple(homes) for name, homes in by_module.items()})


def homes_of(module: str, name: str) -> tuple[tuple[str, str], ...]:
    """Return the modules that may have a name of one of DeepSpeed's modules, each with what it is called there."""
    of_all = _homes().get(f"{module}.*", ()) if name in public_names(module) else ()
    return (*_homes().get(f"{module or '-'}.{name}", ()), *((home, name) for home, _ in of_all))
