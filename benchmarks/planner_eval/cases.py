"""Turn the rows of a file of published runs into the planner's own values: a job, and an unchecked config.

A row has `model`, `hardware` and `parallel`, and perhaps `outputs`, which are not read here: what is predicted must
follow from what went in. Any key may be missing or null; what a run must have had is then guessed from what it says,
by one rule for all rows, and `Case.guesses` names it.

>>> row = {"id": "x", "model": {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "seq": 4096},
...        "hardware": {"gpu": "H100-SXM5-80GB", "num_gpus": 16},
...        "parallel": {"tp": 2, "zero_stage": 3, "micro_batch": 1, "global_batch": 64}}
>>> case = read_case(row)
>>> case.config.mesh.dp_shard, case.config.batch.accumulation, case.guesses
(8, 8, ('recompute', 'sequence_parallel'))
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from planner_eval import codes as codes
from planner_eval import words as words
from planner_eval.refusals import refusal, stages_refusal
from planner_eval.rows import tidied
from planner_eval.tools import in_our_words
from planner_eval.traits import PublishedJob, compiles_blocks, is_before_h100, overlaps_of, routing_skew, traits_of
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import ResolvedConfig
from shardwise.models.shape import ExpertsShape, ModelShape
from shardwise.planner.hardware import Cluster, GpuSpec, in_nodes_of, usual_node
from shardwise.planner.job import BASE, PlanJob, changed
from shardwise.schedule.simulate import OpTimes

Row = Mapping[str, Any]

USUAL_VOCAB: Final = MappingProxyType({"gated": 32000, "plain": 51200})
"""The vocabulary of models whose rows give none: Llama's, and GPT-2's as it is padded."""


@dataclass(frozen=True, kw_only=True)
class KnownStates:
    """A model of which only the number of parameters is known, trained in half precision by Adam.

    Attributes:
        tiers: as the config's section.
        gpu: the device; None where any will do.
    """

    num_params: int
    zero_stage: int
    num_gpus: int
    tiers: Mapping[str, str]
    gpu: GpuSpec | None


@dataclass(frozen=True, kw_only=True)
class Case:
    """A published run.

    Attributes:
        quantity: what was measured: end_to_end, memory, schedule_bubble, single_layer_time, activation_memory_ratio.
        job, config: None where the row does not say enough of the model or the device.
        longest: tokens of the longest sequence, which memory is counted at, where the job has the mean.
        tokens_scale: the run's batch over that of the config, which has whole micro-batches.
        num_sharers: ranks that get the same samples, which the candidate counts as different ones.
        trained_share: share of a step's compute that is left where most weights are frozen.
        op_times: of the pipeline's operations, where they were measured.
        searched_schedule: zb-1p or zb-2p, whose order is made for its times; the candidate has the nearest recipe.
        states: what is known where a row gives no more than the number of parameters.
        guesses: keys that the row leaves out, and that matter.
        refusal: why there is no job, in one line; None where there is one.
    """

    id: str
    group: str
    tier: str
    quantity: str
    job: PlanJob | None = None
    config: ResolvedConfig | None = None
    longest: int | None = None
    tokens_scale: float = 1.0
    num_sharers: int = 1
    trained_share: float = 1.0
    op_times: OpTimes | None = None
    searched_schedule: str | None = None
    states: KnownStates | None = None
    guesses: tuple[str, ...] = ()
    refusal: str | None = None


def _lora(row: Row) -> dict[str, Any]:
    """Return the adapters of a row, of rank 16 as no row says; Megatron Bridge's recipes adapt one layer alone."""
    if _section(row, "parallel").get("framework"):
        return codes.lora_of(_section(row, "parallel").get("lora"))
    if not words.is_adapter(_section(row, "parallel")):
        return {}
    targets = ("qkv_proj",) if row.get("group") == "megatron_bridge" else ("all-linear",)
    return {"lora.rank": 16, "lora.targets": targets}


def read_case(row: Row) -> Case:
    """Read a row of a file of cases, by its inputs alone."""
    row = tidied(in_our_words(tidied(row)))
    case = Case(
        id=str(row.get("id", "")),
        group=str(row.get("group", "")),
        tier=str(row.get("tier", "")),
        quantity=str(row.get("quantity") or "end_to_end"),
        op_times=_op_times(_section(row, "parallel").get("op_times_ms")),
        states=_states(row),
    )
    refused = refusal(row)
    if refused is not None:
        return dataclasses.replace(case, refusal=refused)
    etp = int(_section(row, "parallel").get("etp") or 1)
    shape, cluster = _shape(_section(row, "model"), etp), _cluster(_section(row, "hardware"))
    framework = _section(row, "parallel").get("framework")
    if framework and codes.runs_all_experts(framework, shape.name) and shape.experts is not None:
        experts = dataclasses.replace(shape.experts, num_chosen=shape.experts.num_experts)
        shape = dataclasses.replace(shape, experts=experts)
    num_sharers = codes.num_sharers(_section(row, "parallel"))
    if num_sharers > 1 and shape.experts is not None:
        # Of a token that all ranks have, each runs its part of the chosen experts, and sends one sum.
        each = max(1, round(shape.experts.num_chosen / num_sharers))
        shape = dataclasses.replace(shape, experts=dataclasses.replace(shape.experts, num_chosen=each))
    try:
        config, global_batch, guesses = _config(row, shape, cluster)
    except ConfigError as error:
        return dataclasses.replace(case, refusal=str(error))
    config = changed(config, overlaps_of(row, shape, config, cluster.gpu))
    job = PublishedJob(
        shape=shape,
        seq_len=int(_section(row, "model")["seq"]),
        global_batch=config.batch.global_size,
        cluster=cluster,
        traits=traits_of(row, shape, config, cluster.gpu),
        usual_skew=routing_skew(_section(row, "parallel"), shape, config.mesh.ep) if framework else 1.0,
    )
    return dataclasses.replace(
        case,
        job=job,
        config=config,
        longest=_section(row, "model").get("longest"),
        tokens_scale=global_batch / config.batch.global_size,
        num_sharers=num_sharers,
        trained_share=2 / 3
        if words.is_adapter(_section(row, "parallel"))
        else 1.0,  # the gradients of weights are a third, and are not computed
        searched_schedule=words.searched_schedule_of(_section(row, "parallel").get("schedule")),
        guesses=guesses,
    )


def _section(row: Row, name: str) -> Mapping[str, Any]:
    return row.get(name) or {}


def _states(row: Row) -> KnownStates | None:
    model, p, hardware = (_section(row, name) for name in ("model", "parallel", "hardware"))
    num_params, num_gpus = int(model.get("params") or 0), int(hardware.get("num_gpus") or p.get("dp") or 0)
    if model.get("layers") or not num_params or not num_gpus or p.get("zero_stage") is None:
        return None
    tiers = {key.removeprefix("tiers."): tier for key, tier in _tiers(p).items() if key != "tiers.activations"}
    return KnownStates(
        num_params=num_params,
        zero_stage=int(p["zero_stage"]),
        num_gpus=num_gpus,
        tiers=tiers,
        gpu=words.gpu_of(hardware.get("gpu")),
    )


def _op_times(written: Mapping[str, float] | None) -> OpTimes | None:
    if not written or not written.get("T_F"):
        return None
    return OpTimes(
        forward_s=written["T_F"] / 1e3,
        backward_input_s=written.get("T_B", 0.0) / 1e3,
        backward_weight_s=written.get("T_W", 0.0) / 1e3,
        transfer_s=written.get("T_comm", 0.0) / 1e3,
    )


def _shape(model: Mapping[str, Any], etp: int = 1) -> ModelShape:
    layers, hidden = int(model["layers"]), int(model["hidden"])
    heads = int(model.get("heads") or _usual_heads(hidden))
    written = str(model.get("ffn_type") or "").lower()
    is_gated = any(mark in written for mark in ("swiglu", "geglu", "gated", "silu")) or not written
    ffn: Literal["gated", "plain"] = "gated" if is_gated else "plain"
    attention = str(model.get("attention") or "").lower()
    seq_len = int(model["seq"])
    is_tied = model.get("tied_embeddings")
    ffn_size = int(model.get("ffn") or (8 * hidden // 3 if is_gated else 4 * hidden))
    # The latent attention of DeepSeek has about as many parameters as queries and outputs have without keys.
    kv_heads = 1 if "mla" in attention else int(model.get("kv_heads") or heads)
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=int(model.get("head_dim") or max(1, hidden // heads)),
        ffn_size=ffn_size,
        vocab_size=int(model.get("vocab") or USUAL_VOCAB[ffn]),
        ffn=ffn,
        is_tied=not is_gated if is_tied is None else bool(is_tied),
        has_biases=written.startswith("gelu"),
        num_positions=seq_len if not is_gated and "relu" not in written else 0,
        window=_window(attention, seq_len),
        experts=_experts(model.get("moe"), ffn_size, etp),
        name=str(model.get("name") or "model"),
    )


def _usual_heads(hidden: int) -> int:
    """Return the heads that give dims nearest to 128, in multiples of 32 where possible, as ranks need.

    >>> _usual_heads(4096), _usual_heads(14400)
    (32, 96)
    """
    counts = [each for each in range(1, hidden // 16 + 1) if hidden % each == 0] or [1]
    counts = [each for each in counts if each % 32 == 0] or counts
    return min(counts, key=lambda each: abs(hidden // each - 128))


def _window(attention: str, seq_len: int) -> int | None:
    """Return the window that leaves as many keys as the mean of layers that alternate between a window and none."""
    if "window" not in attention:
        return None
    numbers = [int(word) for word in attention.replace(",", " ").split() if word.isdigit()]
    if not numbers:
        return None
    if "alternating" not in attention:
        return numbers[0]
    return max(1, (seq_len + min(seq_len, 2 * numbers[0])) // 4)


def _experts(moe: Mapping[str, Any] | None, dense_ffn_size: int, etp: int = 1) -> ExpertsShape | None:
    """Return the experts; where each is split over `etp` ranks, its parts, which are experts that tokens all go to."""
    if not moe or not moe.get("experts"):
        return None
    return ExpertsShape(
        num_experts=etp * int(moe["experts"]),
        num_chosen=etp * int(moe.get("top_k") or 1),
        ffn_size=int(moe.get("moe_ffn") or dense_ffn_size) // etp,
        num_shared=etp * int(moe.get("shared") or 0),
        num_dense_layers=int(moe.get("first_dense_layers") or 0),
    )


def _cluster(hardware: Mapping[str, Any]) -> Cluster:
    gpu, num_gpus = words.find_written_gpu(hardware["gpu"]), int(hardware["num_gpus"])
    written = int(hardware.get("gpus_per_node") or 0)
    gpus_per_node = written or usual_node(gpu)
    within = in_nodes_of(written, gpu).link_domain if written else gpu.link_domain
    domain = int(hardware.get("nvlink_domain") or max(within, written if gpu.link_bytes_per_s else 0))
    nic = words.nic_bytes_per_s(hardware.get("interconnect"), gpus_per_node)
    return Cluster(
        gpu=dataclasses.replace(gpu, link_domain=domain),
        num_gpus=num_gpus,
        gpus_per_node=gpus_per_node,
        nic_bytes_per_s=nic or _usual_nic(hardware.get("interconnect"), gpu),
    )


def _usual_nic(interconnect: str | None, gpu: GpuSpec) -> float:
    """Return the network share of the device's own systems.

    Where InfiniBand is named without its speed, A100 and older devices get what most others name: 400 Gb/s a node, a
    fourth of that.
    """
    is_bare = "infiniband" in (interconnect or "").lower()
    return gpu.nic_bytes_per_s * (0.25 if is_bare and is_before_h100(gpu) else 1.0)


def _config(row: Row, shape: ModelShape, cluster: Cluster) -> tuple[ResolvedConfig, int, tuple[str, ...]]:
    """Return the candidate, the run's own batch, and what was guessed.

    Raises:
        ConfigError: more stages than layers.
    """
    p = _section(row, "parallel")
    guesses = []
    tp, pp, cp = (int(p.get(key) or 1) for key in ("tp", "pp", "cp"))
    sharers = codes.num_sharers(p)
    dp = max(1, int(p.get("dp") or 0) or cluster.num_gpus // (tp * pp * cp * sharers))
    micro_size, num_micro_batches, global_batch = _batch(p, dp, pp)
    dp = cluster.num_gpus // (tp * pp * cp) if sharers > 1 else dp
    guesses += [key for key in ("micro_batch", "global_batch") if not p.get(key)]
    stage = p.get("zero_stage")
    if stage is None or p.get("is_stage_open"):
        guesses.append("zero_stage")
        stage = stage if stage is not None else 0 if dp == 1 else 1
    recompute = words.recompute_of(codes.recompute_words(p) if p.get("framework") else p.get("recompute"))
    if recompute is None and compiles_blocks(p, int(stage)):
        recompute = ("selective", 1)
    if recompute is None:
        guesses.append("recompute")
    mode, every = recompute or ("none", 1)
    if mode == "full" and (num_again := words.num_of_block(p.get("recompute"))):
        every = max(1, round(shape.num_layers / pp / max(1, int(p.get("vpp") or 1)) / num_again))
    if tp == 1 and stage == 3 and p.get("recompute") == "selective":
        mode = "full"  # sharded data parallelism selects blocks, not what is in them
    if "possibly" in str(p.get("offload")):
        guesses.append("offload")
    guesses += codes.left_open(p)
    is_split = p.get("sequence_parallel")
    if is_split is None and tp > 1:
        guesses.append("sequence_parallel")
        is_split = "fp16" not in str(p.get("precision"))  # which came about when bf16 did
    virtual = _virtual_stages(p, shape.num_layers, pp)
    schedule = words.schedule_of(p.get("schedule"), pp, virtual)
    if schedule == "zb-v" and stages_refusal(2 * pp, shape.num_layers):
        schedule = "zb-h1"
    virtual = {"interleaved": max(2, virtual), "zb-v": 2}.get(schedule, 1)
    refused = stages_refusal(pp * virtual, shape.num_layers)
    if refused is not None:
        raise ConfigError("too-many-stages", refused)
    shard = _shard_ranks(p, dp, int(stage), cluster, tp * pp * cp)
    config = changed(
        BASE,
        {
            "mesh.pp": pp,
            "mesh.dp_replicate": dp // shard,
            "mesh.dp_shard": shard,
            "mesh.cp": cp,
            "mesh.tp": tp,
            "mesh.ep": _expert_ranks(p, shape, shard * cp * tp),
            "zero.stage": int(stage),
            "batch.micro_size": micro_size,
            "batch.accumulation": num_micro_batches,
            "pipeline.schedule": schedule,
            "pipeline.virtual_stages": virtual,
            "pipeline.cut": _cut(_stage_layers(row, shape.num_layers, pp * virtual), shape.num_layers),
            "tensor.sequence_parallel": bool(is_split) and tp > 1,
            "recompute.mode": mode,
            "recompute.every": every,
            **_dtypes(p, int(stage), tp, pp, cluster.gpu),
            **_tiers(p),
            **_context(p, cp),
            **_lora(row),
        },
    )
    return config, global_batch, tuple(guesses)


def _expert_ranks(p: Mapping[str, Any], shape: ModelShape, num_model_ranks: int) -> int:
    """Return the ranks that divide the experts: as many as are written, if so many ranks and experts can be."""
    written = int(p.get("ep") or 1) * int(p.get("etp") or 1)
    return math.gcd(written, num_model_ranks, shape.experts.num_experts) if shape.experts else 1


def _batch(p: Mapping[str, Any], dp: int, pp: int) -> tuple[int, int, int]:
    """Return the samples of a micro-batch, the micro-batches of a step, and the samples of the run's step."""
    micro_size = int(p.get("micro_batch") or 0)
    global_batch = int(p.get("global_batch") or 0)
    written = int(p.get("num_microbatches") or p.get("grad_accum") or 0)
    if not micro_size:
        micro_size = max(1, global_batch // dp // written) if written else 1
    if not global_batch:
        # Enough to fill a pipeline; else one, since what several cost beyond one is the same for each.
        global_batch = micro_size * dp * (written or (8 * pp if pp > 1 else 1))
    num_micro_batches = max(1, round(global_batch / (dp * micro_size)))
    return micro_size, num_micro_batches, global_batch


def _virtual_stages(p: Mapping[str, Any], num_layers: int, pp: int) -> int:
    """Return the virtual stages as written; for "interleaved", the most of 2 to 8 that divides the layers of a rank."""
    if p.get("vpp"):
        return int(p["vpp"])
    # The code that splits sequences interleaves too by default.
    is_open = p.get("vpp") is None and p.get("sequence_parallel")
    if "interleav" not in str(p.get("schedule")).lower() and not is_open:
        return 1
    each = num_layers // pp
    return max((v for v in range(1, 9) if num_layers % pp == 0 and each % v == 0), default=1)


def _stage_layers(row: Row, num_layers: int, num_stages: int) -> tuple[int, ...] | None:
    """Return the blocks of each stage as written, else as evenly as frameworks cut them.

    Where the embedding and the head count as a block each, because the row says so or because only then the division is
    even, the first stage and the last have one block less.
    """
    if num_stages == 1:
        return None
    written: Sequence[int] | None = _section(row, "parallel").get("layers_per_stage")
    if written and len(written) == num_stages and sum(written) in (num_layers, num_layers + 2):
        layers, counts_ends = [int(each) for each in written], sum(written) == num_layers + 2
    else:
        is_said = bool(_section(row, "model").get("first_last_stage_one_layer_less"))
        counts_ends = is_said or (num_layers + 2) % num_stages == 0  # of two stages it is the same either way
        each, left = divmod(num_layers + 2 * counts_ends, num_stages)
        layers = [each + (stage < left) for stage in range(num_stages)]
    if counts_ends:
        layers[0] -= 1
        layers[-1] -= 1
    return tuple(layers)


def _cut(layers: tuple[int, ...] | None, num_layers: int) -> tuple[str, ...] | None:
    """Return the first modules of all stages but the first, as `pipeline.cut`.

    >>> _cut((3, 2, 3, 0), 8)
    ('blocks.3', 'blocks.5', 'head')
    """
    if layers is None:
        return None
    starts = itertools.accumulate(layers[:-1])
    return tuple(f"blocks.{start}" if start < num_layers else "head" for start in starts)


def _shard_ranks(p: Mapping[str, Any], dp: int, stage: int, cluster: Cluster, model_ranks: int) -> int:
    """Return the number of data ranks over which the stage shards."""
    group = p.get("zero_group")
    if stage >= 3 and isinstance(group, int) and dp % group == 0:
        return group
    if p.get("hybrid_shard"):
        return math.gcd(dp, max(1, cluster.gpus_per_node // model_ranks))
    return dp


def _dtypes(p: Mapping[str, Any], stage: int, tp: int, pp: int, gpu: GpuSpec) -> dict[str, Any]:
    matmul = words.matmul_dtype(p.get("precision"))
    if matmul in ("fp32", "tf32"):
        has_tf32 = "tf32" in gpu.peak_flops_per_s
        return {
            "precision.param": "fp32",
            "precision.accumulate": "fp32",
            "precision.linears": "tf32" if has_tf32 else "keep",
        }
    param = "fp16" if matmul == "fp16" else "bf16"
    is_narrow = matmul in ("fp8", "fp4") and matmul in gpu.peak_flops_per_s
    # Megatron's code adds gradients in fp32; sharded data parallelism keeps them as wide as it reduces them.
    says_wide = p.get("fp32_grad_accum")
    usual = stage < 2 and (tp > 1 or pp > 1) and not is_narrow
    is_wide = usual if says_wide is None else bool(says_wide)
    # Of the codes that shard parameters only torch's own has pipelines too; it adds gradients as it reduces them, wide.
    is_torchs = stage == 3 and pp > 1 and param == "bf16"
    is_reduced_wide = is_torchs or (is_wide and stage < 3 and param == "bf16" and (tp > 1 or pp > 1))
    if p.get("fp32_grad_reduce") is not None:
        is_reduced_wide = bool(p["fp32_grad_reduce"])
    if p.get("framework"):
        is_wide = is_torchs = is_reduced_wide = codes.code_of(str(p["framework"])).name == "megatron"
    return {
        "precision.param": param,
        "precision.accumulate": "fp32" if is_wide or is_torchs else "param",
        "precision.reduce": "fp32" if is_reduced_wide else "param",
        "precision.linears": matmul if is_narrow else "keep",
    }


_BARE_OFFLOAD: Final = r"\bcpu\b|\bhost\b|\bnvme\b|offload|^\s*(true|yes|on)\s*$"


def _tiers(p: Mapping[str, Any]) -> dict[str, Any]:
    text = str(p.get("offload") or "none").lower()
    if "possibly" in text or "none" in text:
        return {}
    text = text.replace("master", "master params")  # which are LLMQ's parameters
    text = re.sub("residual|checkpoints", "activations", re.sub("master|opt-[mv]|states|ds_z[23]", "optimizer", text))
    if "param" in text and "fsdp" in str(p.get("sharding")).lower():  # its gradients go, too, and its step runs there
        text += " grads optimizer"
    if "_offload.json" in str(p.get("offload")):  # DeepSpeed's optimizer takes the gradients with it
        text += " grads params" if "_z3_" in str(p.get("offload")) else " grads"
    elif "z3_offload" in str(p.get("offload")).lower():
        text += " grads params"
    elif not re.search("optim|grad|param|activation|expert|embed", text) and re.search(_BARE_OFFLOAD, text):
        # Where no state is named, all go that the stage shards.
        text += " optimizer grads" + " params" * (p.get("zero_stage") == 3)
    tier = "nvme" if "nvme" in text else "host"
    found: dict[str, Any] = {}
    if "optim" in text:
        found["tiers.optimizer"] = tier
        if match := re.search(r"(\d+(?:\.\d+)?) ?(?:%|per cent|percent)", text):
            found["tiers.optimizer_on_device"] = max(0.0, 1 - float(match.group(1)) / 100)
        elif match := re.search(r"(?<![\d.])(0?\.\d+)(?![\d.])", text):  # a fraction
            found["tiers.optimizer_on_device"] = 1 - float(match.group(1))
        # Of two moments in bf16 without a master, one is half.
        if "opt-m" in str(p.get("offload")) and "opt-v" not in str(p.get("offload")):
            found["tiers.optimizer_on_device"] = 0.5
    if "grad" in text:
        found["tiers.grads"] = "host"
    if "param" in text:
        found["tiers.params"] = tier
    if "activation" in text:
        found["tiers.activations"] = "host"
    return found


def _context(p: Mapping[str, Any], cp: int) -> dict[str, Any]:
    text = str(p.get("cp_impl") or "").lower()
    found: dict[str, Any] = {}
    if "ulysses" in text and cp > 1:
        found["context.transport"] = "ulysses"
    elif "gather" in text and "ring" not in text and cp > 1:
        found["context.transport"] = "all-gather"
    if "chunk" in text:
        found |= {"context.chunk_tokens": max(1, 65536 // cp), "tiers.activations": "host"}
    return found
