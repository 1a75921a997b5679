"""Rows of runs that were never published are predicted plausibly, or not at all; none raises."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import pytest

from planner_eval.cases import read_case
from planner_eval.prices import Prediction, memory_gib, predict_row
from shardwise.planner.job import trains_all

GPT2 = {"layers": 12, "hidden": 768, "heads": 12, "ffn": 3072, "ffn_type": "gelu_mlp", "vocab": 50257, "seq": 1024}
LLAMA_8B = {
    "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "ffn_type": "swiglu", "vocab": 128256,
    "seq": 8192,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {"layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672}
LLAMA_405B = LLAMA_8B | {"layers": 126, "hidden": 16384, "heads": 128, "ffn": 53248}
MIXTRAL = LLAMA_8B | {"vocab": 32000, "seq": 4096, "moe": {"experts": 8, "top_k": 2, "moe_ffn": 14336}}
DEEPSEEK = {
    "layers": 27, "hidden": 2048, "heads": 16, "attention": "MLA", "ffn": 10944, "vocab": 102400, "seq": 4096,
    "moe": {"experts": 64, "top_k": 6, "moe_ffn": 1408, "shared": 2, "first_dense_layers": 1},
}  # fmt: skip
BF16 = {"precision": "bf16", "micro_batch": 1}
FULL = BF16 | {"recompute": "full"}


def row(gpu: Any, num_gpus: Any, model: Mapping[str, Any], **parallel: Any) -> dict[str, Any]:
    return {"id": "x", "model": model, "hardware": {"gpu": gpu, "num_gpus": num_gpus}, "parallel": parallel}


PLAUSIBLE = {
    "RTX 4090": row("RTX 4090", 1, GPT2, **BF16, zero_stage=0, global_batch=8),
    "8 RTX 4090": row("NVIDIA GeForce RTX 4090", 8, GPT2, **BF16, zero_stage=2, global_batch=512),
    "GPT-2 small on 8 A100": row("A100-SXM4-40GB", 8, GPT2, precision="bf16", micro_batch=16, global_batch=512),
    "L4": row("L4", 1, GPT2, **FULL, global_batch=16),
    "T4 in fp16": row("Tesla T4", 4, GPT2, precision="fp16", micro_batch=4, global_batch=64, zero_stage=1),
    "A6000": row("RTX A6000", 4, LLAMA_8B | {"seq": 2048}, **FULL, zero_stage=3, global_batch=32),
    "64 MI300X": row("MI300X", 64, LLAMA_70B, **FULL, zero_stage=3, global_batch=256),
    "2,048 H800": row("H800", 2048, LLAMA_405B, **BF16, tp=8, pp=16, zero_stage=1, global_batch=2048),
    "2,048 H800, interleaved": row(
        "H800-SXM5-80GB", 2048, LLAMA_70B, **BF16, tp=4, pp=4, vpp=5, schedule="interleaved 1f1b", global_batch=1024
    ),
    "adapters of 70B": row("H100", 8, LLAMA_70B, **FULL, training="LoRA", zero_stage=3, global_batch=64),
    "Mixtral with experts split": row("H100", 64, MIXTRAL, **FULL, ep=8, zero_stage=1, global_batch=512),
    "Mixtral with tp and ep": row("A100 80GB", 64, MIXTRAL, **BF16, tp=2, pp=2, ep=8, global_batch=256),
    "like DeepSeek": row("H800", 256, DEEPSEEK, **BF16, ep=16, pp=2, zero_stage=1, global_batch=4096),
    "a million tokens": row(
        "H100", 64, LLAMA_8B | {"seq": 1_048_576}, **FULL, cp=32, tp=2, zero_stage=3, global_batch=1
    ),
    "a million tokens by heads": row(
        "H200", 32, LLAMA_8B | {"seq": 1_000_000}, **FULL, cp=8, cp_impl="ulysses", zero_stage=3, global_batch=4
    ),
    "ZeRO-2 with the optimizer on the host": row(
        "V100-SXM2-32GB", 16, GPT2 | {"layers": 72, "hidden": 3072, "heads": 24, "ffn": 12288},
        precision="fp16", zero_stage=2, offload="cpu (optimizer+grads)", micro_batch=4, global_batch=256,
        recompute="full",
    ),
    "ZeRO-3 with all on NVMe": row(
        "V100-SXM2-32GB", 16, LLAMA_70B | {"seq": 1024}, precision="fp16", zero_stage=3, recompute="full",
        offload="nvme (params+optimizer+grads)", micro_batch=8, global_batch=128,
    ),
    "ZeRO-3 with all on the host": row(
        "A100", 8, LLAMA_70B | {"seq": 4096}, **FULL, zero_stage=3, offload="cpu params optimizer", global_batch=8
    ),
    "fp8 on B200": row("B200", 128, LLAMA_405B, precision="fp8", tp=4, pp=8, recompute="none", global_batch=512),
    "no batch": row("H100", 8, LLAMA_8B, zero_stage=3, precision="bf16", micro_batch=None, global_batch=None),
    "nulls": row(
        "H100", 16, LLAMA_8B | {"heads": None, "kv_heads": None, "ffn": None, "vocab": None, "ffn_type": None},
        tp=None, pp=None, dp=None, cp=None, ep=None, zero_stage=None, recompute=None, precision=None, schedule=None,
        offload=None, global_batch=64, attention_kernel=None, sequence_parallel=None,
    ),
    "numbers as strings": row(
        "h100", "16", {key: str(value) for key, value in LLAMA_8B.items()}, tp="2", zero_stage="1", global_batch="64",
        micro_batch="1", recompute="full",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAUSIBLE)
def test_plausible(name: str) -> None:
    case = read_case(PLAUSIBLE[name])
    found = predict_row(PLAUSIBLE[name], case)
    assert found.price is not None
    check(found)
    least = 1e-4 if "offload" in PLAUSIBLE[name]["parallel"] else 0.01
    assert least < found.price.mfu() < 0.8


def check(found: Prediction) -> None:
    values = [found.iteration_time_s, found.tflops_per_gpu, found.memory_gib_per_gpu]
    assert all(value is None or (math.isfinite(value) and value > 0) for value in values)
    if found.price is None:
        return
    assert isinstance(found.feasible, bool)
    worst = found.price.memory.worst
    tiers = {found.price.config.tiers.params, found.price.config.tiers.grads, found.price.config.tiers.optimizer}
    if tiers == {"device"} and trains_all(
        found.price.config
    ):  # at rest counts states off the device, and of frozen weights
        assert memory_gib(worst, "allocated") >= memory_gib(worst, "states") > 0
    assert found.price.time.low_s < found.price.time.step_s < found.price.time.high_s
    assert found.bubble_rate is None or 0 <= found.bubble_rate < 1


ODD: dict[str, dict[str, Any]] = {
    "nothing": {},
    "sections null": {"id": None, "model": None, "hardware": None, "parallel": None, "outputs": None},
    "no sequence": row("H100", 8, LLAMA_8B | {"seq": None}, **BF16),
    "no device": row(None, 8, LLAMA_8B, **BF16),
    "unknown device": row("abacus", 8, LLAMA_8B, **BF16),
    "no number of devices": row("H100", None, LLAMA_8B, **BF16),
    "words for numbers": row("H100", 8, LLAMA_8B, **BF16, tp="unknown", pp="n/a", zero_stage="?", global_batch="any"),
    "a range": row("H100", 8, LLAMA_8B, precision="bf16", micro_batch="1-4", global_batch="64-128"),
    "thousands with commas": row("H100", "1,024", LLAMA_8B, **BF16, tp=8, global_batch="2,048", zero_stage=1),
    "more model ranks than devices": row("H100", 4, LLAMA_8B, **BF16, tp=8, pp=2, global_batch=8),
    "ranks that do not divide": row("H100", 6, LLAMA_8B, **BF16, tp=4, global_batch=7),
    "more stages than blocks": row("H100", 64, LLAMA_8B | {"layers": 8}, **BF16, pp=16, global_batch=64),
    "heads that tp does not divide": row("H100", 8, GPT2, **BF16, tp=8, global_batch=8),
    "batch smaller than its ranks": row("H100", 64, LLAMA_8B, **BF16, zero_stage=3, global_batch=8),
    "interleaved with few micro-batches": row(
        "H100", 32, LLAMA_8B, **BF16, pp=8, vpp=4, schedule="interleaved", global_batch=6
    ),
    "vpp that does not divide": row("H100", 32, LLAMA_8B, **BF16, pp=8, vpp=3, global_batch=64),
    "zero-bubble of one stage": row("H100", 8, LLAMA_8B, **BF16, schedule="zb-v", global_batch=64),
    "dualpipe": row("H800", 64, DEEPSEEK, **BF16, pp=8, ep=8, schedule="DualPipe", global_batch=256),
    "chimera": row("A100", 16, GPT2, **BF16, pp=4, schedule="chimera", global_batch=256),
    "stage 3 beside tp and pp": row("H100", 64, LLAMA_70B, **FULL, tp=4, pp=4, zero_stage=3, global_batch=64),
    "zero_stage as words": row("H100", 8, LLAMA_8B, **BF16, zero_stage="3 (hybrid)", global_batch=8),
    "no layers": row("H100", 8, {"params": 7e9, "seq": 2048}, **BF16, zero_stage=3, dp=8),
    "only parameters, as words": row("H100", 8, {"params": "7B", "seq": 2048}, **BF16, zero_stage=3, dp=8),
    "batch of 0": row("H100", 8, LLAMA_8B, precision="bf16", micro_batch=0, global_batch=0, dp=0, tp=0),
    "fractions": row("H100", 8.0, LLAMA_8B | {"ffn": 14336.0, "seq": 8192.0}, **BF16, global_batch=64.0),
    "moe as words": row("H100", 8, LLAMA_8B | {"moe": "8 experts, top 2"}, **BF16, global_batch=64),
    "moe as a flag": row("H100", 8, LLAMA_8B | {"moe": False}, **BF16, global_batch=64),
    "one expert of no size": row("H100", 8, LLAMA_8B | {"moe": {"experts": 8}}, **BF16, global_batch=64),
    "more expert ranks than experts": row("H100", 64, MIXTRAL, **BF16, ep=64, global_batch=64),
    "flags for words": row(
        "H100", 8, LLAMA_8B, **BF16, recompute=True, offload=False, schedule=0, attention_kernel=True, cp_impl=True,
        compile="yes", global_batch=64,
    ),
    "lists for words": row("H100", 8, LLAMA_8B, precision=["bf16"], offload=["optimizer"], recompute=["full"]),
    "zero_group as words": row("H100", 8, LLAMA_8B, **BF16, zero_stage=1, zero_group="node", global_batch=64),
    "times of operations null": row("H100", 8, LLAMA_8B, **BF16, op_times_ms={"T_F": None, "T_B": None}),
    "layers_per_stage as words": row("H100", 8, LLAMA_8B, **BF16, pp=4, layers_per_stage="8,8,8,8", global_batch=64),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_rows_do_not_raise(name: str) -> None:
    check(predict_row(ODD[name], read_case(ODD[name])))


@pytest.mark.parametrize("key", ["gpus_per_node", "nvlink_domain", "interconnect"])
@pytest.mark.parametrize("value", [None, "", "unknown", 0, 3])
def test_odd_hardware_does_not_raise(key: str, value: Any) -> None:
    odd = copy.deepcopy(PLAUSIBLE["adapters of 70B"])
    odd["hardware"][key] = value
    check(predict_row(odd, read_case(odd)))


@pytest.mark.parametrize("section", ["model", "hardware", "parallel"])
def test_any_key_may_be_missing_or_odd(section: str) -> None:
    plain = PLAUSIBLE["Mixtral with tp and ep"]
    for key in plain[section]:
        for value in (None, "unknown", -1, 7):
            odd = copy.deepcopy(plain)
            odd[section][key] = value
            check(predict_row(odd, read_case(odd)))
