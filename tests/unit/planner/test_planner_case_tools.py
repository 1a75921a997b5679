"""A row in the words of a tool becomes the candidate that the tool's code would run."""

from __future__ import annotations

from typing import Any

import pytest

from planner_eval.cases import Case, read_case
from planner_eval.recomputation import recomputation_of
from planner_eval.tools import in_our_words
from planner_eval.traits import PublishedJob, PublishedTraits

MODEL = {
    "name": "dense", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256,
    "seq": 4096, "ffn_type": "swiglu",
}  # fmt: skip


def case_of(num_gpus: int = 8, model: dict[str, Any] = MODEL, **row: Any) -> Case:
    parallel = {"micro_batch": 1, "global_batch": 64} | row.pop("parallel", {})
    hardware = {"gpu": "H100-SXM5-80GB", "num_gpus": num_gpus, "gpus_per_node": 8}
    case = read_case({"id": "x", "model": model, "hardware": hardware, "parallel": parallel} | row)
    assert case.refusal is None
    assert case.config is not None
    return case


def traits_of(case: Case) -> PublishedTraits:
    assert isinstance(case.job, PublishedJob)
    return case.job.traits


def values_of(case: Case, *keys: str) -> tuple[Any, ...]:
    found: list[Any] = []
    for key in keys:
        section, _, leaf = key.partition(".")
        found.append(getattr(getattr(case.config, section), leaf))
    return tuple(found)


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"group": "ms_swift_docs"}, "hf"),
        ({"group": "x", "source": {"ref": "modelscope/ms-swift docs"}}, "hf"),
        ({"group": "megatron-swift"}, "megatron"),
        ({"group": "trl"}, "hf"),
        ({"group": "torchtune_readme"}, "torchtune"),
        ({"group": "qwen_readme"}, "hf"),
        ({"group": "prime_rl"}, "prime-rl"),
        ({"group": "primus"}, "megatron"),
        ({"group": "maxtext_gpu"}, "maxtext"),
        ({"group": "gpu_recipes"}, "megatron"),
        ({"group": "x", "notes": "run by Unsloth"}, "unsloth"),
        ({"group": "x", "software": "torchtune 0.6"}, "torchtune"),
        ({"group": "x", "parallel": {"codebase": "LLaMA-Factory"}}, "hf"),
        ({"group": "mbridge", "source": {"ref": "NVIDIA-NeMo/Megatron-Bridge", "file": "skills/x.md"}}, "megatron"),
    ],
)
def test_a_tool_is_known_by_whatever_names_it(row: dict[str, Any], code: str) -> None:
    found = traits_of(case_of(**row)).code
    assert found is not None
    assert found.name == code


def test_rows_of_the_older_tables_are_read_without_a_code() -> None:
    assert traits_of(case_of(group="megatron_bridge", tier="core")).code is None
    assert traits_of(case_of(group="my own trainer")).code is None


@pytest.mark.parametrize(
    ("said", "rank", "targets", "base"),
    [
        ({"train_type": "lora"}, 8, ("all-linear",), "keep"),
        ({"training": "LoRA r=32 all-linear"}, 32, ("all-linear",), "keep"),
        ({"tuner_type": "lora", "lora_rank": 64, "target_modules": ["o_proj"]}, 64, ("o_proj",), "keep"),
        ({"lora": True, "quantization": "4-bit bitsandbytes"}, 8, ("all-linear",), "nf4"),
        ({"training": "QLoRA"}, 8, ("all-linear",), "nf4"),
        ({"lora": {"r": 4, "target_modules": "c_attn"}}, 4, ("k_proj", "q_proj", "v_proj"), "keep"),
    ],
)
def test_adapters_are_read_from_keys_and_words(
    said: dict[str, Any], rank: int, targets: tuple[str, ...], base: str
) -> None:
    case = case_of(group="ms-swift", parallel=said)
    assert values_of(case, "lora.rank", "lora.targets", "lora.base") == (rank, targets, base)
    assert case.trained_share < 1


def test_full_training_has_no_adapters() -> None:
    assert values_of(case_of(group="ms-swift", parallel={"training": "full"}), "lora.rank") == (0,)


@pytest.mark.parametrize(
    ("group", "said", "stage", "mode", "activations"),
    [
        ("ms-swift", {"deepspeed": "zero3"}, 3, "full", "device"),
        ("ms-swift", {"gradient_checkpointing": False}, 0, "none", "device"),
        ("trl", {"sharding": "FSDP2", "activation_offloading": True}, 3, "full", "host"),
        ("torchtune", {"enable_activation_offloading": True}, 3, "full", "host"),
        ("prime-rl", {"recompute": "Recompute"}, 3, "full", "device"),
        ("prime-rl", {"recompute": "Offload"}, 3, "full", "host"),
        ("primus", {"recompute_granularity": "full", "recompute_num_layers": 16}, 1, "full", "device"),
        ("megatron-swift", {}, 1, "selective", "device"),
        ("maxtext", {"remat_policy": "minimal_offloaded"}, 3, "selective", "device"),
        ("maxtext", {}, 3, "full", "device"),
    ],
)
def test_switches_and_defaults_are_those_of_the_tool(
    group: str, said: dict[str, Any], stage: int, mode: str, activations: str
) -> None:
    case = case_of(group=group, parallel=said)
    assert values_of(case, "zero.stage", "recompute.mode", "tiers.activations") == (stage, mode, activations)


def test_a_block_of_layers_runs_again() -> None:
    said = {"recompute": "full, block, 8 layers", "pp": 2}
    assert values_of(case_of(group="primus", parallel=said), "recompute.mode", "recompute.every") == ("full", 2)


def test_part_of_the_optimizer_is_on_the_host() -> None:
    for said in ({"offload": "optimizer 75 %"}, {"optimizer_offload_fraction": 0.75}):
        case = case_of(group="megatron bridge", parallel=said)
        assert values_of(case, "tiers.optimizer", "tiers.optimizer_on_device") == ("host", 0.25)


def test_a_tool_that_runs_another_sets_its_arguments() -> None:
    own = in_our_words({"parallel": {"framework": "TRL 0.24"}})["parallel"]
    others = in_our_words({"parallel": {"framework": "some wrapper of TRL 0.24"}})["parallel"]
    assert own["recompute"] == "full"
    assert others.get("recompute") is None


@pytest.mark.parametrize(
    ("words", "code", "freed"),
    [
        ("selective [moe_act, layernorm]", "megatron", {"expert_act", "expert_norm"}),
        ("moe_act,layernorm", "", {"expert_act", "expert_norm"}),
        ("selective: moe, mla_up_proj", "megatron", {"expert_inputs", "expert_wide", "expert_act", "qkv"}),
        ("selective targets: norm, routed_experts", "prime-rl", {"norms", "expert_wide", "expert_act"}),
        ("remat_policy save_out_proj", "maxtext", {"norms", "qkv", "wide", "act", "mixed"}),
    ],
)
def test_lists_of_modules_need_no_word_before_them(words: str, code: str, freed: set[str]) -> None:
    found = recomputation_of(words, code)
    assert found is not None
    assert found.freed == freed
