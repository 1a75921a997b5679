"""Infer how the code of a published run worked: from what a row says of its kernels, and what code of its time did.

>>> from planner_eval.words import gpu_of
>>> from shardwise.planner.job import BASE, changed
>>> shape = ModelShape(
...     num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=4, head_dim=16, ffn_size=256, vocab_size=512
... )
>>> row = {"model": {"seq": 2048}, "parallel": {"attention_kernel": "FA2"}}
>>> traits = traits_of(row, shape, changed(BASE, {"mesh.tp": 2}), gpu_of("A100"))
>>> traits.attention, traits.splits_logits
('flash', False)
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from planner_eval import codes as codes
from planner_eval import words as words
from planner_eval.recomputation import Recomputation, recomputation_of
from shardwise.config.resolve import ResolvedConfig
from shardwise.layout.activation_bytes import FP32_BYTES
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.models.shape import ModelShape
from shardwise.planner.hardware import GpuSpec
from shardwise.planner.job import MatmulDtype, PlanJob, param_of, trains_all

LONG_SEQUENCE: Final = 8192
"""Tokens from which on no run keeps scores whole."""

TORCHS_LOSS_BYTES: Final = 3.0 * FP32_BYTES
"""Bytes of each logit: widened, its log-softmax, its gradient."""

TORCHS_GROUPED_SHARE: Final = 0.62
"""Rate of torch's grouped product in bf16 on B200 over that of a dense one in training: 1.55 ms for 16,640 rows of
Llama 4's experts are 900 TFLOPS (pytorch/ao#2882); on H100 it is as fast as a dense one (#2756: 599)."""

NUM_OF_NARROW_LOSS: Final = 4
"""How often a loss in the logits' own dtype has them: the loop's own, the log-softmax, its gradient and theirs."""


TENSOR_CHUNKS: Final = 4
"""Parts in which codes that overlap tensor-parallel collectives multiply."""


@dataclass(frozen=True, kw_only=True)
class PublishedTraits:
    """State facts about the code of a published run, beyond what the config of our engine says; the models read them.

    Attributes:
        logits_bytes: bytes that each logit takes at the peak of the loss, all copies together; 0 where they never exist
            whole.
        splits_logits: whether each tp rank has its part of the vocabulary's logits alone.
        saves_norm_in_fp32: whether norms keep a widened copy of their input.
        has_dropout: whether dropout runs, whose masks are kept for the backward.
        selective: what selective recomputation keeps: the outputs of every other matrix product and of attention, or
            all but the scores of attention.
        fuses_gate: whether the activated gate is made again from the gate, not kept.
        cached_logits_share: share of the logits' bytes in copies that are freed by the peak of the loss and smaller
            than all that comes after them, so that the allocator holds them unused.
        optimizer_shards: ranks over which the optimizer's states are sharded, where that is not the shard group.
        unsharded_grad_bytes: bytes a parameter of gradients kept whole on every rank, beyond what the stage says.
        reduces_once: whether these whole gradients are reduced after the last micro-batch alone, whatever the stage;
            until then there are no others.
        whole_embedding: whether tensor-parallel ranks each hold the whole table of tokens.
        is_graphed: whether kernels are launched as one graph.
        moves_tensors: whether stage 3 gathers parameters and reduces gradients tensor by tensor, not block by block.
        frees_outputs: whether what a stage has sent on is freed, though its backward is still to come.
        defers_gathers: whether parameters that a step leaves sharded are gathered while the next forward runs.
        has_tuned_attention: whether the attention kernel uses what came with Hopper, as FlashAttention-3 does.
        has_first_flash: whether it is the first FlashAttention.
        masks_attention: whether SDPA gets a mask of padding, with which torch takes its memory-efficient kernel.
        is_deterministic: whether torch takes deterministic algorithms alone.
        widens_grads: whether the step widens gradients that are stored narrower than the master; not where its kernel
            reads them as they are.
        code: the code that ran it, where the row names one.
        recomputation: what a block frees and runs again, where words of the code say it; the strategy's mode otherwise.
        steps_by_tensor: whether the optimizer's step is torch's without a fused kernel.
        widens_adapters: whether adapters are fp32 on a base of bf16.
        fuses_adapters: whether adapters' element-wise work is fused.
        autocasts: whether products are cast to bf16, whatever their weights are of.
        widens_stream: whether tables, norms and the residual stream are fp32 around products in bf16.
        widens_all: whether all that layers of bitsandbytes read and write is fp32 too, as they return what they get.
        holds_inputs: whether blocks' inputs that are kept, and their gradients, stay until the backward ends.
        shards_at_rest: whether parameters are sharded but from the first forward to the last backward, as FSDP's
            `SHARD_GRAD_OP` does.
        packs_experts: whether experts are linear layers that are packed as the others are.
        fetches_experts: whether experts wait in the host's memory, where each pass fetches a block's.
        unpacks_by_ops: whether packed layers are GPTQ's, which unpack a weight operator by operator.
        saves_tables: whether the tables of tokens train whole beside adapters.
        frees_grads: whether each gradient is stepped with and freed as soon as it is there.
        unpacked_bytes: of a frozen weight that is unpacked for each pass; 0 where none is, or it is of nf4.
        keeps_frozen_inputs: whether packed layers keep inputs that no gradient reads, as bitsandbytes' did before its
            pull request 1270 of July 2024.
        is_latent: whether attention is DeepSeek's, whose heads are expanded to 192 elements of queries and keys.
        norms_heads: whether queries and keys pass norms of their own, as Qwen 3's do.
        grouped_share: rate of experts' grouped products over that of the same rows in one product.
        experts_dtype: of experts' products; None for that of the others.
        logs_entropy: whether each step logs entropy and accuracy of all logits.
        chunks_head: whether the head is Liger's, which multiplies chunk by chunk.
        runs_head_again: whether the head and the loss run once more in the backward.
        casts_weights: whether weights are fp32, and autocast makes each product's a copy in bf16, which it saves.
        scales_dynamically: whether a tensor's or row's scale in fp8 comes from itself, not from earlier steps.
        has_scaled_rows: whether torch's products in fp8 scale rows.
        casts_gathered: whether weights are cast to fp8 after they are gathered, by every rank.
        casts_unpacked: whether weights that are unpacked to bf16 are cast to fp8 in each pass.
        dedups_tokens: whether a token goes to a node once, as with DeepEP, not once for each of its experts.
        splits_experts: whether tensor-parallel ranks split each expert; otherwise they hold different ones.
        permutation: passes over tokens' copies for their experts, forward and backward, where the code is known.
        params_share: share of the bytes of parameters in their dtype that is really stored.
        optimizer_share: share of the bytes of the optimizer's states, the master among them, that is really stored.
    """

    attention: words.Attention = "flash"
    logits_bytes: float = TORCHS_LOSS_BYTES
    splits_logits: bool = True
    saves_norm_in_fp32: bool = False
    has_dropout: bool = False
    selective: Literal["half", "all-but-scores"] = "all-but-scores"
    fuses_gate: bool = False
    cached_logits_share: float = 0.0
    optimizer_shards: int | None = None
    unsharded_grad_bytes: float = 0.0
    reduces_once: bool = False
    whole_embedding: bool = False
    is_graphed: bool = False
    moves_tensors: bool = False
    frees_outputs: bool = False
    defers_gathers: bool = True
    has_tuned_attention: bool = False
    has_first_flash: bool = False
    masks_attention: bool = False
    is_deterministic: bool = False
    widens_grads: bool = True
    permutation: tuple[float, float] | None = None
    code: codes.Code | None = None
    recomputation: Recomputation | None = None
    steps_by_tensor: bool = False
    widens_adapters: bool = False
    fuses_adapters: bool = False
    autocasts: bool = False
    widens_stream: bool = False
    widens_all: bool = False
    holds_inputs: bool = False
    shards_at_rest: bool = False
    packs_experts: bool = False
    fetches_experts: bool = False
    unpacks_by_ops: bool = False
    saves_tables: bool = False
    frees_grads: bool = False
    unpacked_bytes: float = 0.0
    keeps_frozen_inputs: bool = False
    is_latent: bool = False
    norms_heads: bool = False
    grouped_share: float = 1.0
    experts_dtype: MatmulDtype | None = None
    logs_entropy: bool = False
    chunks_head: bool = False
    runs_head_again: bool = False
    casts_weights: bool = False
    scales_dynamically: bool = False
    has_scaled_rows: bool = False
    casts_gathered: bool = False
    casts_unpacked: bool = False
    dedups_tokens: bool = True
    params_share: float = 1.0
    optimizer_share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class PublishedJob(PlanJob):
    """Describe a job that other code ran."""

    traits: PublishedTraits = PublishedTraits()
    usual_skew: float = 1.0  # benchmarks send as many tokens to each expert


ROUTING_SPREAD: Final = 0.25
"""The spread of experts' shares of tokens over their mean: of 64 experts the fullest has 1.72 times the mean where an
auxiliary loss alone balances them (Wang et al. 2024, arXiv 2408.15664, table 2), and the largest of n normal deviates
is about sqrt(2 ln n)."""


def routing_skew(p: Mapping[str, Any], shape: ModelShape, ep: int) -> float:
    """Return the tokens of the fullest rank of experts over the mean; the several of a rank even out.

    Benches of Megatron and NeMo send as many to each, as their scripts' `moe-router-force-load-balancing` does.
    """
    words = " ".join(str(p.get(key)) for key in ("framework", "dispatcher", "experts_kernel", "routing")).lower()
    name = codes.code_of(words).name
    if shape.experts is None or ep == 1 or name in ("megatron", "automodel", "maxtext") or "balanced" in words:
        return 1.0
    num_local = max(1.0, shape.experts.num_experts / ep)
    return 1.0 + ROUTING_SPREAD * math.sqrt(2 * math.log(ep) / num_local)


def published_traits(job: PlanJob) -> PublishedTraits:
    """Return the traits of a job's code."""
    return job.traits if isinstance(job, PublishedJob) else PublishedTraits()


def run_by(job: PlanJob, traits: PublishedTraits) -> PublishedJob:
    """Return the job as other code runs it."""
    fields = {field.name: getattr(job, field.name) for field in dataclasses.fields(PlanJob)}
    return PublishedJob(**fields | {"usual_skew": 1.0, "traits": traits})


def overlaps_of(row: Mapping[str, Any], shape: ModelShape, config: ResolvedConfig, gpu: GpuSpec) -> dict[str, Any]:
    """Return what the code of the run fused and overlapped, by key of our config.

    The arguments are those of `traits_of`.
    """
    p = row.get("parallel") or {}
    if p.get("framework"):
        is_compiled, overlaps_data = _is_fused(p), True
        overlaps_tensor = codes.overlaps_tensor(p) and config.tensor.sequence_parallel
    else:
        kernel = str(p.get("attention_kernel") or "").lower()
        is_new = config.precision.linears in ("fp8", "fp4")
        attention = _kernel(row, shape, config, gpu)
        is_compiled = _fuses(p, config) or (_splits_model(config) and not kernel)
        overlaps_data = _overlaps_data(config, gpu) and (attention == "flash" or bool(kernel))
        overlaps_tensor = config.tensor.sequence_parallel and (is_new or config.pipeline.schedule == "interleaved")
        overlaps_tensor &= "fp8" in gpu.peak_flops_per_s and config.zero.stage < 3
        overlaps_tensor = bool(p.get("async_tp", overlaps_tensor))
    chunks = TENSOR_CHUNKS if overlaps_tensor else 1
    return {"compile.enabled": is_compiled, "zero.overlap": overlaps_data, "tensor.overlap_chunks": chunks}


def traits_of(row: Mapping[str, Any], shape: ModelShape, config: ResolvedConfig, gpu: GpuSpec) -> PublishedTraits:
    """Infer how the code of the run worked, from what it says of its kernels and from what code of its time did.

    Args:
        row: of the file of cases, tidied.
        shape: of the model.
        config: how the run was split.
        gpu: the device that ran it.
    """
    p = row.get("parallel") or {}
    if p.get("framework"):
        attention, has_norms = str(row["model"].get("attention")), "qwen3" in shape.name.lower()
        is_latent = "mla" in attention.lower()
        found = _named_code(p, shape, config, gpu, f"{shape.name} {attention}")
        return dataclasses.replace(found, is_latent=is_latent, norms_heads=has_norms)
    kernel = str(p.get("attention_kernel") or "").lower()
    attention = _kernel(row, shape, config, gpu)
    is_early = attention != "flash" and not kernel
    is_fused = bool(p.get("compile")) or bool(p.get("liger"))
    group = p.get("zero_group")
    is_new = config.precision.linears in ("fp8", "fp4")
    splits_logits = not p.get("gathers_logits", _gathers_logits(kernel, config))
    logits_bytes = _logits_bytes(p, config, gpu, splits_logits=splits_logits)
    has_fused_norm = "rms" in kernel or is_fused
    return PublishedTraits(
        attention=attention,
        logits_bytes=logits_bytes,
        # Torch's loss frees the narrow logits, but needs wide ones from then on.
        cached_logits_share=DTYPE_BYTES["bf16"] / logits_bytes if logits_bytes == TORCHS_LOSS_BYTES else 0.0,
        optimizer_shards=group if isinstance(group, int) and config.zero.stage in (1, 2) else None,
        # Gradients come in the parameters' dtype, and stay beside those that they are added to.
        unsharded_grad_bytes=4.0 if p.get("fp32_grad_accum_unsharded") else 2.0 if p.get("fp32_grad_accum") else 0.0,
        reduces_once=bool(p.get("fp32_grad_accum_unsharded")),
        whole_embedding=bool(p.get("whole_embedding")),
        is_graphed=bool(p.get("cuda_graphs")),
        defers_gathers=not is_before_h100(gpu),
        frees_outputs=config.pipeline.schedule == "interleaved",
        widens_grads=not is_new and _keeps_master(p),
        optimizer_share=1.0 if _keeps_master(p) else 2.0 * DTYPE_BYTES[param_of(config)] / (3.0 * FP32_BYTES),
        params_share=_params_share(str(p.get("precision")), config, gpu),
        saves_norm_in_fp32=shape.ffn == "gated" and bool(kernel) and not has_fused_norm,
        has_dropout=is_early and param_of(config) != "fp32",
        splits_logits=splits_logits,
        selective=_selective(p, config.zero.stage),
        fuses_gate=_fuses(p, config),
        # Code that sharded parameters in fp16 hooked into each layer of the model; later code, in bf16, wraps blocks.
        moves_tensors=config.zero.stage == 3 and param_of(config) == "fp16",
        has_tuned_attention=words.is_tuned_attention(p.get("attention_kernel")) or is_after_h100(gpu),
        has_first_flash=words.is_first_flash(p.get("attention_kernel")),
        recomputation=recomputation_of(p.get("recompute") or _usual_words(p, config), ""),
    )


def _usual_words(p: Mapping[str, Any], config: ResolvedConfig) -> str | None:
    return "per op" if compiles_blocks(p, config.zero.stage) else None


def _named_code(
    p: Mapping[str, Any], shape: ModelShape, config: ResolvedConfig, gpu: GpuSpec, model: str
) -> PublishedTraits:
    """Return what a row says of its code, and what that code does where the row does not say."""
    code = codes.code_of(str(p["framework"]))
    written, precision = f"{p.get('loss')} {p.get('framework')}".lower(), str(p.get("precision")).lower()
    # Surogate's fp8 is for dense layers (its runtime/ops/moe_grouped_gemm_gate_up.cpp gives no buffers of fp8).
    experts_dtype = words.experts_dtype(precision) or ("bf16" if code.name == "engine" else None)
    is_slow_grouped = code.name in codes.TORCHTITANS and is_after_h100(gpu) and codes.dated(code, p).year < 2026
    is_slow_grouped &= experts_dtype in (None, "bf16")
    is_fused = _is_fused(p)
    return PublishedTraits(
        code=codes.dated(code, p),
        attention="unfused" if re.search("eager|math", str(p.get("attention_kernel")).lower()) else "flash",
        steps_by_tensor=code.name == "hf" and not codes.fuses_step(p),
        widens_adapters=code.name in ("hf", "deepspeed")
        and not codes.is_of_early_2024(written)
        and not (config.lora.base == "nf4" and (codes.trl_release(written) or (0, 0)) >= (0, 26)),
        fuses_adapters=codes.fuses_adapters(p, code),
        autocasts=not re.search(r"whole|no autocast|-true", precision),
        widens_stream=p.get("stream") == "fp32" or codes.is_wide(p),
        widens_all=p.get("stream") == "fp32" and config.lora.base == "nf4",
        grouped_share=TORCHS_GROUPED_SHARE if is_slow_grouped else 1.0,
        experts_dtype=experts_dtype,
        logs_entropy=(codes.trl_release(written) or (0, 0)) >= (0, 22) and codes.loss_of(p, code) != 0,
        chunks_head="liger" in str(p.get("loss")).lower() and codes.loss_of(p, code) == 0,
        runs_head_again=codes.runs_head_again(p),
        casts_weights=codes.is_wide(p),
        scales_dynamically=bool(re.search(r"tensorwise|rowwise", precision)) and code.name != "megatron",
        has_scaled_rows="rowwise" in precision and code.name != "megatron",
        casts_gathered="fp8 all-gather" not in precision,
        casts_unpacked=code.name == "engine" and codes.is_packed(p),
        keeps_frozen_inputs=config.lora.base == "nf4" and codes.is_of_early_2024(written),
        holds_inputs=codes.holds_inputs(p, code) and config.zero.stage > 1 and not trains_all(config),
        shards_at_rest=config.zero.stage == 2 and "fsdp" in str(p.get("sharding")).lower(),
        packs_experts=code.name in ("hf", "deepspeed", "engine") and config.lora.base == "nf4",
        fetches_experts="expert" in str(p.get("offload")).lower(),
        logits_bytes=codes.loss_of(p, code),
        splits_logits=code.splits_logits or "parallel" in str(p.get("loss")),
        is_graphed=codes.is_graphed(p, code, has_experts=shape.experts is not None),
        unpacked_bytes=codes.unpacked_bytes(p, code),
        unpacks_by_ops="gptq" in str((p.get("lora") or {}).get("base")).lower(),
        saves_tables=bool((p.get("lora") or {}).get("saves_tables")),
        frees_grads=codes.frees_grads(p),
        frees_outputs=config.pipeline.schedule == "interleaved",
        widens_grads=not codes.is_narrow(p) and config.zero.stage < 3 and code.name == "hf",
        optimizer_share=codes.optimizer_share(p, code),
        params_share=codes.params_share(p),
        saves_norm_in_fp32=shape.ffn == "gated" and not is_fused and not codes.has_torchs_norm(p, code),
        selective=_selective({"recompute": codes.recompute_words(p)}, config.zero.stage),
        fuses_gate=is_fused,
        recomputation=recomputation_of(
            codes.recompute_words(p),
            code.name,
            saves_attention=codes.dated(code, p).year > 2025 or not codes.is_tuned_on(gpu, p, code, model),
        ),
        dedups_tokens=bool(re.search("deepep|hybridep", str(p.get("dispatcher")).lower())),
        permutation=codes.permutation_of(p, codes.dated(code, p), shape.experts.num_experts if shape.experts else 0),
        has_tuned_attention=codes.is_tuned_on(gpu, p, code, model),
        masks_attention=words.is_masked(p.get("attention_kernel")),
        is_deterministic=bool(p.get("deterministic")),
    )


def _is_fused(p: Mapping[str, Any]) -> bool:
    """Say whether a code that is named fuses element-wise kernels."""
    written = f"{p.get('loss')} {p.get('framework')}".lower()
    is_said = bool(p.get("compile")) or "liger" in written or "foak" in written
    return is_said or codes.code_of(str(p["framework"])).is_fused


def _fuses(p: Mapping[str, Any], config: ResolvedConfig) -> bool:
    """Say whether another code does."""
    return bool(p.get("compile")) or bool(p.get("liger")) or config.precision.linears in ("fp8", "fp4")


def _kernel(row: Mapping[str, Any], shape: ModelShape, config: ResolvedConfig, gpu: GpuSpec) -> words.Attention:
    written = words.attention_of((row.get("parallel") or {}).get("attention_kernel"))
    return written or _attention(config, shape, gpu, int(row["model"]["seq"]))


def compiles_blocks(p: Mapping[str, Any], zero_stage: int) -> bool:
    """Say whether blocks are compiled and gathered one by one, as by torch's own code for sharded parameters."""
    return bool(p.get("compile")) and zero_stage == 3


def _selective(p: Mapping[str, Any], zero_stage: int) -> Literal["half", "all-but-scores"]:
    """Return what selective recomputation keeps, as written.

    By default torch's own code keeps every other product (torchtitan's configs, and those of torchtune and NeMo
    AutoModel that follow them).
    """
    written = str(p.get("recompute") or "").lower()
    is_usual = not written and compiles_blocks(p, zero_stage)
    return "half" if is_usual or re.search(r"\bop\b|selectiveac", written) else "all-but-scores"


def _gathers_logits(kernel: str, config: ResolvedConfig) -> bool:
    """Say whether each tp rank takes the loss of all logits, as torch's own loss does.

    Code whose kernels are chosen one by one does. The codes that brought interleaving, split sequences and fp8 do not:
    their loss is split by vocabulary.
    """
    is_of_megatron = (
        config.pipeline.schedule == "interleaved" or config.mesh.cp > 1 or config.precision.linears != "keep"
    )
    return bool(kernel) and not is_of_megatron


def _logits_bytes(p: Mapping[str, Any], config: ResolvedConfig, gpu: GpuSpec, *, splits_logits: bool) -> float:
    """Return the bytes of each logit at the peak of the loss, all its copies together.

    Torch's loss holds logits widened, their log-softmax and its gradient; code that splits the model holds the narrow
    ones and their gradient besides, as a stage's output. A loss that is split by vocabulary writes the gradient over
    the softmax. A fused loss has the narrow logits and their gradient, one that is fused with the head neither.
    """
    narrow = DTYPE_BYTES["bf16"]
    if p.get("liger"):
        return 0.0
    if p.get("narrow_loss"):
        return NUM_OF_NARROW_LOSS * narrow
    is_model_split = _splits_model(config)
    kernel = str(p.get("attention_kernel") or "").lower()
    # FlashAttention comes with a fused loss; codes that can split the model do not take it.
    is_data_alone = config.zero.stage >= 2 and not is_model_split
    has_fused_loss = is_data_alone and "flash" in kernel and p.get("liger") is None
    # Where blocks are gathered one by one they are compiled one by one; the loss came in with the next devices.
    compiles_loss = bool(p.get("compile")) and (is_after_h100(gpu) or not compiles_blocks(p, config.zero.stage))
    if has_fused_loss or compiles_loss:
        return 2.0 * narrow
    if is_model_split and splits_logits:
        return narrow + 2.0 * FP32_BYTES
    return TORCHS_LOSS_BYTES + (2.0 * narrow if is_model_split else 0.0)


def _keeps_master(p: Mapping[str, Any]) -> bool:
    """Say whether Adam steps an fp32 copy of the parameters, with fp32 moments; else its moments have their dtype."""
    return p.get("fp32_master") is not False


def _params_share(precision: str, config: ResolvedConfig, gpu: GpuSpec) -> float:
    """Return the share of half precision's bytes that parameters take: fp8 code that splits the model stores them in
    fp8.

    Before Blackwell a product in fp8 takes both factors along rows alone, so a weight and its transpose are both
    stored; where blocks have their own scales that is so on Blackwell too (Transformer Engine, "FP8 primary weights").
    """
    is_of_blocks = "mx" in precision.lower()
    takes_any_layout = is_after_h100(gpu) and not is_of_blocks
    return 0.5 if config.precision.linears == "fp8" and config.zero.stage == 1 and takes_any_layout else 1.0


def _overlaps_data(config: ResolvedConfig, gpu: GpuSpec) -> bool:
    """Say whether gathers and reductions overlap; codes that split models in stages 0 and 1 do so only after A100."""
    return not (is_before_h100(gpu) and _splits_model(config) and config.zero.stage < 2)


def _splits_model(config: ResolvedConfig) -> bool:
    return config.mesh.tp > 1 or config.mesh.pp > 1


def is_before_h100(gpu: GpuSpec) -> bool:
    """Say whether a device is as slow as those before H100."""
    return max(gpu.peak_flops_per_s.get(dtype, 0.0) for dtype in ("bf16", "fp16")) < 500e12


def is_after_h100(gpu: GpuSpec) -> bool:
    """Say whether a device multiplies in fp4, as those after H100 and its like do."""
    return "fp4" in gpu.peak_flops_per_s


def _attention(config: ResolvedConfig, shape: ModelShape, gpu: GpuSpec, seq_len: int) -> words.Attention:
    """Guess the kernel: scores were written out before bf16 was usual, and where only full recomputation saved the
    memory.
    """
    if seq_len >= LONG_SEQUENCE or shape.ffn == "gated":
        return "flash"
    if param_of(config) == "fp32":
        return "unfused"  # flash and kernels of fused softmax take half precision alone
    is_late = "fp8" in gpu.peak_flops_per_s  # no code kept scores when such devices came
    if "v100" in gpu.name or (param_of(config) == "fp16" and not is_late):
        return "fused-softmax"
    is_full = config.recompute.mode == "full" and not config.tensor.sequence_parallel
    return "fused-softmax" if is_full and "a100" in gpu.name else "flash"
