"""The words of published runs as values: each word that is known, what is like it and is not, and odd types."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from harness.refusals import refused
from planner_eval.refusals import MAX_STAGES, refusal, stages_refusal
from planner_eval.rows import flag, number, tidied
from planner_eval.words import (
    attention_of,
    find_written_gpu,
    gpu_of,
    is_adapter,
    is_first_flash,
    is_tuned_attention,
    matmul_dtype,
    nic_bytes_per_s,
    recompute_of,
    schedule_of,
    searched_schedule_of,
)

READINGS: list[tuple[Callable[[str | None], Any], dict[Any, tuple[str | None, ...]]]] = [
    (
        matmul_dtype,
        {
            "fp4": ("nvfp4", "MXFP4", "float4", "fp8 and fp4"),
            "fp8": ("mxfp8", "fp8-cs", "float8_e4m3", "e4m3", "bf16+fp8"),
            "bf16": ("amp_bf16", "bfloat16", "bf16 (fp16 at first)", "int8", "", None),
            "fp16": ("fp16", "float16", "half", "16-mixed"),
            "tf32": ("tf32", "tf32 (fp32 states)"),
            "fp32": ("fp32", "float32", "32-true"),
        },
    ),
    (
        recompute_of,
        {
            ("none", 1): ("none", "No", "false", "off", "without", "disabled", "not full; disable"),
            ("full", 3): ("every 3rd block", "selective (every 3 layers)"),
            ("selective", 1): ("selective", "op", "SAC", "core_attn", "coreattn", "full op"),
            ("full", 1): (
                "full",
                "True",
                "uniform",
                "block",
                "on",
                "yes",
                "all",
                "activation checkpointing",
                "granular",
            ),
            None: ("sometimes", "snow", "only", "", None),
        },
    ),
    (
        attention_of,
        {
            "flash": ("flash", "FA2", "fa", "cuDNN", "sdpa", "triton", "memory-efficient", "fused flash"),
            "fused-softmax": ("fused", "megatron fused softmax"),
            "unfused": ("eager", "torch", "sofa"),
            None: ("", None),
        },
    ),
    (
        is_tuned_attention,
        {
            True: ("FA3", "fa4", "flash_attention-3", "FlashAttention4", "flashattention3", "cudnn 9"),
            False: ("FA2", "flash_attention2", "fa35", "flash", "", None),
        },
    ),
    (
        is_first_flash,
        {
            True: ("fa1", "flash", " Flash Attention ", "flash-attn", "flash_attn v1", "FlashAttention1"),
            False: ("fa11", "flash_attention2", "flash kernel", "FA2", "", None),
        },
    ),
    (searched_schedule_of, {"zb-1p": ("ZB-1p",), "zb-2p": ("zb-2p, searched",), None: ("zb-h1", "1f1b", "", None)}),
]


@pytest.mark.parametrize(
    ("read", "written", "value"),
    [(read, each, value) for read, table in READINGS for value, some in table.items() for each in some],
)
def test_what_is_written_is_read(read: Callable[[str | None], Any], written: str | None, value: Any) -> None:
    assert read(written) == value


@pytest.mark.parametrize(
    ("written", "num_stages", "virtual_stages", "name"),
    [
        ("ZB-V", 4, 1, "zb-v"),
        ("zbv", 4, 1, "zb-v"),
        ("DualPipe", 4, 1, "zb-v"),
        ("zb-2p", 4, 1, "zb-h2"),
        ("zb-h2", 4, 1, "zb-h2"),
        ("zb-1p", 4, 1, "zb-h1"),
        ("ZB-H1", 4, 1, "zb-h1"),
        ("zb1p", 4, 1, "zb-h1"),
        ("gpipe", 4, 2, "gpipe"),
        ("AFAB", 4, 1, "gpipe"),
        ("naive", 4, 1, "naive"),
        ("interleaving", 4, 1, "interleaved"),
        (None, 4, 2, "interleaved"),
        (None, 4, 1, "1f1b"),
        ("chimera", 4, 1, "1f1b"),
        ("gpipe", 1, 1, "1f1b"),
    ],
)
def test_schedules_by_what_people_write(written: str | None, num_stages: int, virtual_stages: int, name: str) -> None:
    assert schedule_of(written, num_stages, virtual_stages) == name


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("A100-SXM4-80GB", "a100-80"),
        ("A100-40GB", "a100-40"),
        ("H100-96GB-HBM2e(2.4TB/s,500W)", "h100-96"),
        ("GB200-NVL72", "gb200"),
        ("H800", "h800"),
        ("NVIDIA RTX 4090", "rtx-4090"),
        ("MI300X", "mi300x"),
        ("8xA100", "a100-80"),
        ("H100-SXM + A100-40GB", "a100-40"),  # the slower, which the others wait for
        ("A100-40GB/H100", "a100-40"),
        ("H100 + RTX 4090", "rtx-4090"),  # though it is the faster one in fp32
        ("Selene, DGX A100 80GB", "a100-80"),
        ("Summit V100 16GiB nodes", "v100-16"),
        ("any", None),
        ("", None),
        (None, None),
    ],
)
def test_devices_by_what_people_write(written: str | None, name: str | None) -> None:
    gpu = gpu_of(written)
    assert (gpu and gpu.name) == name


@pytest.mark.parametrize(
    ("written", "gpus_per_node", "gigabits"),
    [
        ("8x200Gb HDR IB", 8, 200),
        ("8 x 200 Gb/s", 4, 400),
        ("NVLink + 4x100Gb Omni-Path per node", 8, 50),
        ("800Gbps per node", 8, 100),
        ("100 Gb/s per node", 4, 25),
        ("400Gb/s", 8, 400),  # a device's own
        ("401 Gb/s", 8, 401 / 8),
        ("1600Gb/s RoCE", 8, 200),
        ("800Gb/s per GPU", 8, 800),
        ("NVSwitch + 400Gb/s per GPU RDMA", 8, 400),
        ("DGX-2 with 8 EDR", 16, 50),
        ("Slingshot-11", 4, 200),
        ("ethernet of a lab", 4, 2.5),
        ("ethernet", 8, None),
        ("a lab", 8, None),
        ("NVLink + InfiniBand", 8, None),
        (None, 8, None),
    ],
)
def test_networks_by_what_people_write(written: str | None, gpus_per_node: int, gigabits: float | None) -> None:
    found = nic_bytes_per_s(written, gpus_per_node)
    assert found is None if gigabits is None else found == pytest.approx(gigabits * 1e9 / 8)


def test_a_device_that_must_be_known_is_named_where_it_is_not() -> None:
    assert find_written_gpu("Selene, DGX A100 80GB").name == "a100-80"
    with refused("unknown-device", "abacus"):
        find_written_gpu("abacus")


def test_adapters_are_named_among_what_is_trained_or_recomputed() -> None:
    assert is_adapter({"training": "QLoRA"})
    assert is_adapter({"recompute": "full, LoRA"})
    assert not is_adapter({"training": "full", "attention_kernel": "lora"})


def test_numbers_and_flags_of_any_type() -> None:
    numbers = {
        "1,024.5": 1024.5, "3e4": 30000.0, "12 k": 12288.0, "1.5M": 1.5e6, "7b": 7e9, "2T": 2e12, " 3 (hybrid) ": 3.0,
        "64-128": None, "-1": None, "1 2": None, "": None, -1: None, math.inf: None, math.nan: None, 0: 0, 2.5: 2.5,
        1e30: 1e30,
    }  # fmt: skip
    assert {each: number(each) for each in numbers} == numbers
    assert number(True) is None
    no = ("no", "False", "off (default)", "none", "never", "disabled", "0", "f", "n", 0, None, [])
    assert [flag(each) for each in no] == [False] * len(no)
    assert [flag(each) for each in ("yes", "inductor", "1", 1, 2.5, "no1")] == [True] * 6
    assert [flag(each) for each in ("", "unknown", "n/a", "NA, perhaps", "null", "?")] == [None] * 6


def test_each_value_of_a_row_has_the_type_of_its_key() -> None:
    row = {
        "id": 7,
        "model": {"layers": "32", "ffn": "unknown", "hidden": 64.9, "seq": 10**15, "vocab": 10**15 + 1, "name": 3,
                  "tied_embeddings": "no", "moe": {"experts": "8", "top_k": "two"}, "attention": None},
        "hardware": ["H100"],
        "parallel": {"zero_stage": 3, "vpp": 1.0, "tp": -1, "precision": ["fp8", "bf16"], "compile": "",
                     "zero_group": "x", "op_times_ms": {"T_F": "2.5", "T_B": "?"}, "layers_per_stage": (1, "2"),
                     "offload": False},
        "outputs": {"mfu": "0.5", "memory_kind": 5, "tflops_per_gpu": "high"},
        "memory_kind": ["peak"],
    }  # fmt: skip
    assert tidied(row) == {
        "id": 7,
        "model": {"layers": 32, "ffn": None, "hidden": 64, "seq": 10**15, "vocab": None, "name": "3",
                  "tied_embeddings": False, "moe": {"experts": 8, "top_k": None}, "attention": None},
        "hardware": {},
        "parallel": {"zero_stage": 3, "vpp": 1, "tp": None, "precision": "fp8, bf16", "compile": None,
                     "zero_group": "x", "op_times_ms": {"T_F": 2.5}, "layers_per_stage": [1, 2], "offload": "False"},
        "outputs": {"mfu": 0.5, "memory_kind": "5", "tflops_per_gpu": None},
        "memory_kind": "peak",
    }  # fmt: skip
    odd = {"zero_stage": 4, "moe": 8, "op_times_ms": "2", "layers_per_stage": [1, None]}
    nothing = {"zero_stage": None, "moe": None, "op_times_ms": {}, "layers_per_stage": None}
    assert tidied({"parallel": odd, "quantity": 3}) == {
        "model": {}, "hardware": {}, "parallel": nothing, "outputs": {}, "quantity": "3",
    }  # fmt: skip
    unread = {"layers_per_stage": "88", "compile": None, "tp": None}
    assert tidied({"parallel": unread})["parallel"] == dict.fromkeys(unread)
    assert tidied({"memory_kind": None})["memory_kind"] is None


def row_of(section: str, key: str, value: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": {"layers": 8, "hidden": 1024, "seq": 1024},
        "hardware": {"gpu": "H100", "num_gpus": 8},
        "parallel": {"tp": 2, "cp": 2},
    }
    row[section][key] = value
    return row


@pytest.mark.parametrize(
    ("section", "key", "most", "words"),
    [
        ("model", "layers", 2048, "model.layers={} is no whole number from 1 to 2048; write the number of its layers"),
        ("model", "hidden", 10**6, "model.hidden={} is no whole number from 1 to 1000000; write the hidden size"),
        ("model", "seq", 10**9, "model.seq={} is no whole number from 1 to 1000000000; write the tokens"),
        ("hardware", "num_gpus", 10**7, "hardware.num_gpus={} is no whole number from 1 to 10000000; write how many"),
        ("parallel", "pp", 2, "parallel: tp=2 x pp={} x cp=2 are more ranks than hardware.num_gpus=8; lower one"),
    ],
)
def test_the_most_that_is_believed(section: str, key: str, most: int, words: str) -> None:
    assert refusal(row_of(section, key, most)) is None
    for value in (most + 1, *((0, None) if section != "parallel" else ())):
        assert (refusal(row_of(section, key, value)) or "").startswith(words.format(value))


def test_axes_that_are_not_written_have_one_rank() -> None:
    assert refusal(row_of("parallel", "tp", 4)) is None


def test_a_row_without_a_device_is_not_mistaken_for_one_with_a_wrong_one() -> None:
    assert (refusal(row_of("hardware", "gpu", "")) or "").startswith("hardware.gpu= names no device; write one")
    assert (refusal(row_of("hardware", "gpu", "abacus")) or "").startswith("hardware.gpu: abacus is no device")


def test_a_pipeline_has_no_more_stages_than_blocks_and_ends() -> None:
    assert stages_refusal(10, 8) is None
    assert stages_refusal(11, 8) == (
        "parallel: pp x vpp = 11 stages are more than the 10 of 8 layers; lower pp or vpp"
    )  # fmt: skip
    assert stages_refusal(MAX_STAGES, 2000) is None
    assert "than the 1024 of 2000 layers" in (stages_refusal(MAX_STAGES + 1, 2000) or "")
