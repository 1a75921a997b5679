"""A row in the words of a tool becomes the candidate that the tool's code would run."""

from __future__ import annotations

from typing import Any

import pytest

from planner_eval.cases import Case, read_case
from planner_eval.models import PublishedTimeModel
from planner_eval.prices import predict
from planner_eval.recomputation import recomputation_of
from planner_eval.tools import in_our_words
from planner_eval.traits import PublishedJob, PublishedTraits

MODEL: dict[str, Any] = {
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
        ({"group": "cards at home", "parallel": {"training": "QLoRA"}}, "hf"),
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
        ({"lora": "r = 12"}, 12, ("all-linear",), "keep"),
        ({"lora": {"rank": "r16"}}, 8, ("all-linear",), "keep"),
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
    for said in (
        {"offload": "optimizer 75 %"},
        {"optimizer_offload_fraction": 0.75},
        {"optimizer_offload_fraction": "75%"},
    ):
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


MIXTURE: dict[str, Any] = MODEL | {"ffn": 768, "moe": {"experts": 128, "top_k": 8, "moe_ffn": 768}}


def test_ranks_that_share_their_samples_take_a_whole_step_for_fewer_tokens() -> None:
    shared, sent = (
        case_of(
            model=MIXTURE,
            parallel={"framework": "HF Trainer", "ep": 8, "micro_batch": 2, "global_batch": None, "grad_accum": 1}
            | said,
        )
        for said in ({}, {"dispatcher": "all-to-all"})
    )
    assert (shared.num_sharers, sent.num_sharers) == (8, 1)
    assert shared.tokens_scale == pytest.approx(1 / 8)
    assert shared.job is not None
    assert shared.job.shape.experts is not None
    assert shared.job.shape.experts.num_chosen == 1
    times = [predict(case).iteration_time_s or 0.0 for case in (shared, sent)]
    assert 0.4 < times[0] / times[1] < 1.0


@pytest.mark.parametrize(
    ("lora", "more_gib"),
    [
        ({"rank": 64, "targets": "q_proj"}, 0.0),
        # Two tables of 128,256 x 4,096 elements: a copy, a gradient and two moments in bf16, and their master in fp32.
        ({"rank": 64, "targets": "q_proj", "saves_tables": True}, 16 * 2 * 128256 * 4096 / 2**30),
    ],
)
def test_tables_that_train_beside_adapters_are_stored_with_their_states(lora: dict[str, Any], more_gib: float) -> None:
    plain, case = (
        predict(case_of(1, parallel={"framework": "HF Trainer", "lora": each, "global_batch": 1, "recompute": "full"}))
        for each in ({"rank": 64, "targets": "q_proj"}, lora)
    )
    more = (case.memory_gib_per_gpu or 0) - (plain.memory_gib_per_gpu or 0)
    assert more == pytest.approx(more_gib, rel=0.05)
    assert (case.iteration_time_s or 0) >= (plain.iteration_time_s or 0)


def test_gradients_that_are_stepped_with_in_the_backward_are_not_stored() -> None:
    said: dict[str, Any] = {"framework": "torchtune", "global_batch": 1, "recompute": "full"}
    whole, freed = (
        predict(case_of(1, parallel=said | more)).memory_gib_per_gpu or 0.0 for more in ({}, {"optimizer_in_bwd": True})
    )
    assert whole - freed == pytest.approx(2 * 8.03e9 / 2**30, rel=0.05)


def test_gptq_unpacks_operator_by_operator_and_bitsandbytes_takes_the_host_longer() -> None:
    times = {}
    for name, base in (("none", "bf16"), ("nf4", "nf4"), ("gptq", "nf4 (GPTQ)")):
        lora = {"rank": 8, "targets": "all-linear", "base": base}
        said = {"framework": "HF Trainer", "lora": lora, "global_batch": 1, "recompute": "full"}
        model = MODEL | {"seq": 64}
        times[name] = predict(case_of(1, model=model, parallel=said)).iteration_time_s or 0.0
    assert times["none"] < times["nf4"]
    model = MODEL | {"seq": 8192}
    nf4, gptq = (
        predict(
            case_of(
                1,
                model=model,
                parallel={"framework": "HF Trainer", "global_batch": 1, "recompute": "full"}
                | {"lora": {"rank": 8, "targets": "all-linear", "base": base}},
            )
        )
        for base in ("nf4", "nf4 (GPTQ)")
    )
    assert (nf4.iteration_time_s or 0) < (gptq.iteration_time_s or 0)


@pytest.mark.parametrize(
    ("framework", "loss", "logits_bytes", "logs", "again"),
    [
        ("TRL 0.21", None, 12.0, False, False),
        ("TRL 0.24", None, 12.0, True, False),
        ("TRL 1.8", None, 0.0, False, True),
        ("TRL 1.8", "nll", 12.0, True, False),
        ("TRL 1.5", "chunked_nll", 0.0, False, True),
    ],
)
def test_what_sft_trainer_does_follows_its_release(
    framework: str, loss: str | None, logits_bytes: float, logs: bool, again: bool
) -> None:
    traits = traits_of(case_of(parallel={"framework": framework, "loss": loss, "precision": "bf16"}))
    assert (traits.logits_bytes, traits.logs_entropy, traits.runs_head_again) == (logits_bytes, logs, again)


def test_deepspeed_gathers_each_expert_and_leaves_parameters_gathered() -> None:
    said: dict[str, Any] = {
        "group": "ms-swift",
        "parallel": {"deepspeed": "zero3", "micro_batch": 1, "global_batch": 8},
    }
    small = MIXTURE | {"moe": MIXTURE["moe"] | {"experts": 8}}
    few, many = (predict(case_of(model=model, **said)) for model in (small, MIXTURE))
    assert (many.iteration_time_s or 0) > 2 * (few.iteration_time_s or 0)
    other = predict(case_of(group="ms-swift", parallel={"sharding": "fsdp2", "micro_batch": 1, "global_batch": 8}))
    deepspeed = predict(case_of(**said))
    assert (deepspeed.memory_gib_per_gpu or 0) > (other.memory_gib_per_gpu or 0)


def test_fsdp1_holds_what_blocks_keep_beside_frozen_parameters() -> None:
    lora = {"rank": 16, "targets": "q_proj"}
    said: dict[str, Any] = {
        "framework": "HF Trainer, accelerate FSDP1", "zero_stage": 3, "recompute": "full", "global_batch": 64,
        "micro_batch": 8, "loss": "Liger fused linear cross-entropy",
    }  # fmt: skip
    stream_gib = 8 * 4096 * 4096 * 2 / 2**30
    for more, held in (({"lora": lora}, 32), ({"lora": lora, "sharding": "FSDP2"}, 0), ({}, 0)):
        case = case_of(parallel=said | more)
        assert traits_of(case).holds_inputs == (held > 0)
    one, two = (
        predict(case_of(parallel=said | {"lora": lora, "sharding": each})).memory_gib_per_gpu or 0.0
        for each in ("FSDP1", "FSDP2")
    )
    assert one - two == pytest.approx(32 * stream_gib, rel=0.1)


def test_adapters_of_experts_are_grouped_products_beside_frozen_weights() -> None:
    model = MIXTURE | {"seq": 16384}
    said: dict[str, Any] = {"global_batch": 8, "recompute": "none", "zero_stage": 0, "compile": False}
    without, beside, whole = (
        predict(case_of(group="prime-rl", model=model, parallel=said | more)).iteration_time_s or 0.0
        for more in ({"lora": {"targets": "q_proj"}}, {"lora": {"targets": "all-linear"}}, {})
    )
    assert without < beside
    case = case_of(group="prime-rl", model=model, parallel=said | {"lora": 16})
    assert case.job is not None
    assert case.config is not None
    block = PublishedTimeModel(case.job).compute.block(case.config)
    assert block.backward_weight_s < 0.5 * block.backward_input_s
    assert whole > without


def test_eager_attention_keeps_its_scores() -> None:
    said: dict[str, Any] = {"framework": "HF Trainer", "global_batch": 1, "recompute": "none"}
    flash, eager = (
        predict(case_of(1, parallel=said | {"attention_kernel": each})) for each in ("flash-attention 2", "eager")
    )
    assert (eager.memory_gib_per_gpu or 0) > 1.5 * (flash.memory_gib_per_gpu or 0)
    assert (eager.iteration_time_s or 0) > (flash.iteration_time_s or 0)
