"""What the host of other codes does for a block: counts are those of their source, times were measured there.

Times are of x86 hosts; the planner's own model makes them longer on Grace.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from planner_eval.codes import TORCHTITANS, Code
from planner_eval.traits import published_traits
from shardwise.config.resolve import ResolvedConfig
from shardwise.planner.host_time import BACKWARD_LAUNCH_S, EAGER_LAUNCHES, LAUNCH_S, HostCosts
from shardwise.planner.job import PlanJob, num_data_ranks, trains_all

TRAINERS: Final = ("hf", "deepspeed")
"""Names of the codes that the Trainer of transformers runs."""
FUSED_LAUNCHES: Final = (14.0, 30.0)
"""Kernels of a block whose norms, rotation and gate are Liger's."""
MORE_OF_NORMS: Final = (16.0, 30.0)
"""More of a block that norms queries and keys eagerly (transformers' `modeling_qwen3.py`)."""
PEFT_LAUNCHES: Final = (8.0, 10.0)
"""Of an adapted layer whose adapters are fp32 on a base of bf16, PEFT's default: both casts with them. We count what
peft 0.21 dispatches under autocast; dropout is one more."""
PACKED_S: Final = (100e-6, 50e-6)
"""Of a layer that bitsandbytes packs, forward and backward, beyond a plain one's: its dispatch in Python takes 92 us
without gradients where a plain layer takes 8, and its unpacking alone 38, which we measure with bitsandbytes 0.50 on a
CPU that is 1.4 times as fast as the host of `LAUNCH_S`. Layers whose adapters are fused unpack for themselves."""
EXPERT_LAUNCHES: Final = (11.0, 25.0)
"""Of each expert with tokens in Hugging Face's loop (integrations/moe.py), which reads two results of the device."""
TORCHTITAN_EXPERTS: Final = (45.0, 90.0)
"""More of a block with experts in torchtitan: router, sorts, both all-to-alls, grouped products, scatter."""

AUTOCAST_LAUNCHES: Final = (7.0, 6.0)
"""More of an adapted block of fp32 under autocast, counted so too: casts of weights and inputs, less those of norms."""

TRAINER_LAUNCH_S, TRAINER_BACKWARD_S = 20e-6, 17e-6
"""Of a launch from a whole trainer, and from its backward: hosts and code differ, so it is the geometric mean of the 12
us of a bare loop (`LAUNCH_S`) and of the 35 between launches on another host (vllm-project/vllm-omni#6516)."""
MODULE_S: Final = 6.5e-6
"""Of `model.train()`, which the Trainer calls before each micro-batch, a module (unslothai/unsloth#10744)."""
COUNTING_SHARE, ZEROING_SHARE = 0.9, 0.5
"""Of that time, what the Trainer takes to count each micro-batch's FLOPs and each step's zeroed gradients, both by
walks over the modules: 2.8 and 1.6 us beside 3.1 of `model.train()`, which we measure with transformers 5.24 on a
CPU. It reads each micro-batch's loss to see whether it is a number (huggingface/transformers#33693)."""
TRAINER_PARAM_S: Final = 20e-6
"""Of a trained parameter in the Trainer's step: 13 us to clip its gradient, 7 of fused AdamW, measured there."""
NUM_MODULES, NUM_ADAPTER_MODULES = 14, 8
"""Modules of a block, and of an adapted layer (peft, `tuners/lora/layer.py`)."""
AGAIN_S: Final = 0.93e-3
"""Of a checkpoint that is not reentrant: 45 saved tensors are packed twice and unpacked once in 5 us each, and random
states stashed (stas00/ml-engineering: 3.05 ms a layer, of which launches are 2.1)."""
FSDP_S, FSDP_PARAM_S = 2e-3, 30e-6
"""Of FSDP around a unit in both passes: 1 ms before a forward (pytorch/pytorch#173680, FSDP2 on Xeon; of FSDP1 454 us
after it, #102434), and the backward gathers and reduces. And for a parameter in the step (docs/benchmarks.md)."""
DDP_PARAM_S: Final = 9e-6
"""Of DDP for each parameter of a backward (docs/benchmarks.md)."""
GATHER_S: Final = 0.26e-3
"""Of DeepSpeed's stage 3 for each parameter that is gathered (deepspeedai/DeepSpeed#1069 and #1188)."""
NUM_PARAMS, NUM_PRODUCTS_OF_ALL, NUM_EXPERT_PARAMS = 9, 7, 3
"""Parameters and linear layers of a block, and parameters of an expert in a loop over experts."""
UNSLOTH_LAUNCHES, UNSLOTH_LAUNCH_S = (35.0, 90.0), 40e-6
"""Kernels of a block in Unsloth, and seconds of each: 20,000 of a step take 850 ms on an idle device, 54 of them in
`model.train()` (unslothai/unsloth#10806 and #10744)."""
ENGINE_MODULE_S, EARLY_ENGINE_MODULE_S = 36e-6, 115e-6
"""Of a module of Transformer Engine forward: 90 us in 2025 on Grace (NVIDIA/TransformerEngine#2053), which is 2.5
times as slow; 115 until 2024 (#1191)."""
NUM_ENGINE_MODULES, NUM_ENGINE_EXPERT_MODULES = 5, 3
"""Modules of Transformer Engine in a block (two with a norm, attention, two products), and more with experts."""
ENGINE_LAUNCHES, ENGINE_EXPERTS = (15.0, 28.0), (45.0, 70.0)
"""Kernels of Megatron's block, and more with experts: router, permutation, its all-to-alls, probabilities."""
GROUPED_LAUNCH_S: Final = 8e-6
"""Of one expert's product in a grouped linear layer of Transformer Engine, launched from C++."""
SUROGATE_LAUNCHES: Final = (35.0, 85.0)
"""Kernels of a block of Surogate where a base is packed, forward and backward with what runs again: of each weight an
unpacking, two to cast it, two to cast its input and a product; norms, rotation, attention and gate (5); backward a
transposition more (csrc/src/recipes/fp8_hybrid/fp8_hybrid_recipe.cpp, csrc/src/runtime/ops)."""
SUROGATE_ADAPTER: Final = (4.0, 10.0)
"""Of an adapted layer of Surogate: two products, a scale and a sum, which run again, and five products and a sum."""
SUROGATE_EXPERTS, SUROGATE_EXPERT = (25.0, 45.0), (6.0, 17.0)
"""More of a block with experts, and of each expert: cuBLAS's grouped product takes each for a group of its own, six of
adapters forward, two of the experts and fifteen of adapters backward (runtime/ops/moe_grouped_gemm_*.cpp)."""
SUROGATE_SYNCS, SUROGATE_EXCHANGE_SYNCS = 1.0, 3.0
"""Waits for the device in each pass of a block with experts, and more where they are divided (its ep_dispatch.cpp)."""
MAIN_GRAD_S: Final = 30e-6
"""Of a parameter's hook in Megatron's backward; each expert's weights are parameters of their own."""


def host_costs(code: Code, found: HostCosts, job: PlanJob, s: ResolvedConfig) -> HostCosts:
    """Return what a code's host takes.

    Args:
        code: that a row names.
        found: the planner's own, without an engine.
        job: whose shape, adapters and traits count.
        s: how it is split.
    """
    if code.name == "megatron":
        return _of_megatron(code, found, job, s)
    is_all = s.lora.targets == ("all-linear",)
    num_adapted = 0 if trains_all(s) else NUM_PRODUCTS_OF_ALL if is_all else len(s.lora.targets)
    if code.name == "engine":
        return _of_surogate(found, job, s, num_adapted)
    num_modules = NUM_MODULES + NUM_ADAPTER_MODULES * num_adapted
    if code.name == "unsloth":
        return dataclasses.replace(
            found,
            launches=UNSLOTH_LAUNCHES,
            launch_s=UNSLOTH_LAUNCH_S,
            backward_launch_s=UNSLOTH_LAUNCH_S,
            alone_s=MODULE_S * num_modules,
            reads_loss=True,
            param_s=TRAINER_PARAM_S,
        )
    shards_s = _shards_s(code, job, s, num_adapted)
    more, num_syncs = _of_experts(code, found, job, s)
    traits = published_traits(job)
    num_packed = NUM_PRODUCTS_OF_ALL if s.lora.base == "nf4" and code.name in TRAINERS else 0
    if num_packed and traits.packs_experts and job.shape.experts is not None:
        num_packed += NUM_EXPERT_PARAMS * job.shape.experts.num_experts // s.mesh.ep
    found = dataclasses.replace(
        found,
        launches=_launches(code, found, job, s, num_adapted),
        experts_launches=more,
        num_syncs=num_syncs,
        block_s=(shards_s / 2 + num_packed * PACKED_S[0], shards_s / 2 + num_packed * PACKED_S[1]),
        again_s=AGAIN_S,
        param_s=FSDP_PARAM_S * (s.zero.stage >= 2),
    )
    if code.name not in TRAINERS:
        launches_s = (LAUNCH_S, BACKWARD_LAUNCH_S)
        if s.compile.enabled:
            launches_s = (found.launch_s, found.backward_launch_s)
        return dataclasses.replace(found, launch_s=launches_s[0], backward_launch_s=launches_s[1])
    walks = 1 + COUNTING_SHARE + ZEROING_SHARE / s.batch.accumulation
    return dataclasses.replace(
        found,
        launch_s=TRAINER_LAUNCH_S,
        backward_launch_s=TRAINER_BACKWARD_S,
        alone_s=walks * MODULE_S * num_modules,
        reads_loss=True,
        param_s=found.param_s + TRAINER_PARAM_S,
    )


def _launches(code: Code, found: HostCosts, job: PlanJob, s: ResolvedConfig, num_adapted: int) -> tuple[float, float]:
    """Return the kernels of a block in both passes."""
    is_trainers, traits = code.name in TRAINERS, published_traits(job)
    forward, backward = found.launches
    if not s.compile.enabled:
        forward, backward = EAGER_LAUNCHES
    elif is_trainers:
        forward, backward = FUSED_LAUNCHES
    if traits.norms_heads and not s.compile.enabled:
        forward, backward = forward + MORE_OF_NORMS[0], backward + MORE_OF_NORMS[1]
    if is_trainers and not trains_all(s):
        of_dropout = num_adapted * (s.lora.dropout > 0)
        forward += num_adapted * PEFT_LAUNCHES[0] + of_dropout
        backward += num_adapted * PEFT_LAUNCHES[1] + of_dropout - NUM_PRODUCTS_OF_ALL
    if traits.casts_weights:
        forward, backward = forward + AUTOCAST_LAUNCHES[0], backward + AUTOCAST_LAUNCHES[1]
    return forward, backward


def _shards_s(code: Code, job: PlanJob, s: ResolvedConfig, num_adapted: int) -> float:
    """Return what sharded or plain data parallelism takes around a block, both passes together."""
    if code.name == "deepspeed" and s.zero.stage == 3:
        experts = job.shape.experts
        num_experts = experts.num_experts if experts is not None and not code.groups_experts else 0
        share = job.shape.num_expert_layers / job.shape.num_layers
        return 2 * GATHER_S * (NUM_PARAMS + 2 * num_adapted + share * NUM_EXPERT_PARAMS * num_experts)
    # PEFT's `fsdp_auto_wrap_policy` makes both matrices of each adapter units of their own.
    num_units = 1 + 2 * num_adapted * code.wraps_adapters
    return num_units * FSDP_S if s.zero.stage >= 2 else DDP_PARAM_S * NUM_PARAMS * (num_data_ranks(s) > 1)


def _of_experts(code: Code, found: HostCosts, job: PlanJob, s: ResolvedConfig) -> tuple[tuple[float, float], float]:
    """Return the kernels more of a block with experts in both passes, and the waits for the device in each."""
    experts = job.shape.experts
    if experts is not None and code.name in TORCHTITANS:
        return TORCHTITAN_EXPERTS, 1.0 * (s.mesh.ep > 1)
    if experts is not None and code.name in TRAINERS and not code.groups_experts:
        num_local = experts.num_experts / s.mesh.ep
        return (num_local * EXPERT_LAUNCHES[0], num_local * EXPERT_LAUNCHES[1]), 2.0 * num_local
    return found.experts_launches, 0.0


def _of_megatron(code: Code, found: HostCosts, job: PlanJob, s: ResolvedConfig) -> HostCosts:
    module_s = EARLY_ENGINE_MODULE_S if code.year < 2025 else ENGINE_MODULE_S
    experts = job.shape.experts
    share = job.shape.num_expert_layers / job.shape.num_layers
    num_local = experts.num_experts / s.mesh.ep if experts else 0.0
    num_modules = NUM_ENGINE_MODULES + share * NUM_ENGINE_EXPERT_MODULES
    num_params = NUM_PARAMS + share * 2 * num_local
    forward_s = num_modules * module_s + share * 2 * num_local * GROUPED_LAUNCH_S
    backward_s = num_modules * module_s + share * 4 * num_local * GROUPED_LAUNCH_S
    return dataclasses.replace(
        found,
        launches=ENGINE_LAUNCHES,
        experts_launches=ENGINE_EXPERTS,
        launch_s=LAUNCH_S,
        backward_launch_s=BACKWARD_LAUNCH_S,
        num_syncs=2.0 * (s.mesh.ep > 1),
        block_s=(forward_s, backward_s + MAIN_GRAD_S * num_params * trains_all(s)),
    )


def _of_surogate(found: HostCosts, job: PlanJob, s: ResolvedConfig, num_adapted: int) -> HostCosts:
    num_local = job.shape.experts.num_experts / s.mesh.ep if job.shape.experts else 0.0
    forward, backward = (a + num_adapted * b for a, b in zip(SUROGATE_LAUNCHES, SUROGATE_ADAPTER, strict=True))
    more, more_backward = (a + num_local * b for a, b in zip(SUROGATE_EXPERTS, SUROGATE_EXPERT, strict=True))
    return dataclasses.replace(
        found,
        launches=(forward, backward),
        experts_launches=(more, more_backward),
        launch_s=GROUPED_LAUNCH_S,
        backward_launch_s=GROUPED_LAUNCH_S,
        num_syncs=SUROGATE_SYNCS + SUROGATE_EXCHANGE_SYNCS * (s.mesh.ep > 1),
    )
