"""What rows of this year say of their code: words become traits, and traits become bytes and seconds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.paths import ROOT
from planner_eval.cases import Case, read_case
from planner_eval.models import PublishedPricer, PublishedTimeModel
from planner_eval.prices import predict
from planner_eval.traits import PublishedJob, PublishedTraits
from shardwise.planner.results import Estimate

LLAMA = {
    "name": "llama", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256,
    "seq": 4096, "ffn_type": "swiglu",
}  # fmt: skip
MIXTURE = LLAMA | {"ffn": 768, "moe": {"experts": 128, "top_k": 8, "moe_ffn": 768}}
HUGGING_FACE = "HF Trainer, transformers 4.48 (2025-02)"


def case_of(framework: str, model: dict[str, Any] = LLAMA, gpu: str = "H100-SXM5-80GB", **parallel: Any) -> Case:
    said: dict[str, Any] = {"framework": framework, "dp": 8, "zero_stage": 3, "micro_batch": 1, "grad_accum": 1}
    hardware = {"gpu": gpu, "num_gpus": 8, "gpus_per_node": 8}
    row = {"id": "x", "model": model, "hardware": hardware, "parallel": said | {"recompute": "none"} | parallel}
    case = read_case(row)
    assert case.refusal is None
    return case


def traits_of(*args: Any, **parallel: Any) -> PublishedTraits:
    case = case_of(*args, **parallel)
    assert case.job is not None
    assert isinstance(case.job, PublishedJob)
    return case.job.traits


def price_of(*args: Any, **parallel: Any) -> Estimate:
    case = case_of(*args, **parallel)
    assert case.job is not None
    assert case.config is not None
    return PublishedPricer(case.job).price(case.config)


@pytest.mark.parametrize(
    ("framework", "facts", "logits_bytes"),
    [
        (HUGGING_FACE, {}, 12.0),
        (HUGGING_FACE, {"precision": "bf16 autocast"}, 12.0),
        ("peft's own loop, transformers 4.57", {}, 14.0),
        ("fsdp_qlora train.py (2024-03)", {}, 16.0),
        ("HF Trainer, transformers 4.44", {}, 12.0),
        (HUGGING_FACE, {"bf16": True}, 12.0),
        (HUGGING_FACE, {"loss": "nn.CrossEntropyLoss on bf16 logits"}, 6.0),
        ("Transformer Engine's layers in a loop", {}, 10.0),
        (HUGGING_FACE, {"loss": "Liger fused linear cross-entropy"}, 0.0),
        (HUGGING_FACE, {"loss": "cut-cross-entropy"}, 0.0),
        ("torchtitan 2025-06", {"loss": "compiled cross-entropy"}, 4.0),
        ("torchtitan 2025-06", {"loss": "plain cross-entropy (fp32 logits)"}, 10.0),
        ("Megatron-LM", {}, 8.0),
        ("Megatron-LM", {"loss": "TE fused cross-entropy"}, 4.0),
        ("LLMQ (C++/CUDA)", {"loss": "LM head and loss in 4 chunks, fused, in place"}, 0.5),
    ],
)
def test_a_loss_has_the_logits_that_its_code_makes(framework: str, facts: dict[str, str], logits_bytes: float) -> None:
    assert traits_of(framework, **facts).logits_bytes == logits_bytes


def test_hugging_face_runs_flash_attention_2_where_others_take_the_tuned_kernel() -> None:
    assert not traits_of(HUGGING_FACE, attention_kernel="flash-attention 2").has_tuned_attention
    assert traits_of("Megatron-LM", attention_kernel="TE").has_tuned_attention
    assert not traits_of("Megatron-LM", attention_kernel="TE", gpu="A100-80GB").has_tuned_attention
    assert traits_of("Megatron-LM", attention_kernel="TE").attention == "flash"


@pytest.mark.parametrize(
    ("framework", "model", "gpu", "is_tuned"),
    [
        ("torchtitan 2025-06", {}, "H100-SXM5-80GB", False),
        ("torchtitan 2025-11", {}, "H100-SXM5-80GB", True),
        ("torchtitan 2025-06", {}, "B200", True),
        ("torchtitan 2025-11", {"attention": "MLA"}, "B200", False),
        ("torchtitan 2025-11", {"name": "Llama-4-Scout"}, "B200", False),
        ("MaxText", {}, "H100-SXM5-80GB", True),
        ("Primus (ROCm)", {}, "MI300X", True),
        ("torchtune", {}, "H100-SXM5-80GB", False),
    ],
)
def test_attention_is_the_kernel_that_a_code_took_at_its_date(
    framework: str, model: dict[str, str], gpu: str, is_tuned: bool
) -> None:
    assert traits_of(framework, LLAMA | model, gpu).has_tuned_attention == is_tuned


def test_a_mask_of_padding_takes_torchs_slow_kernel_over_all_keys() -> None:
    plain, masked, alone = (
        price_of(HUGGING_FACE, attention_kernel=kernel, deterministic=is_alone, micro_batch=2)
        for kernel, is_alone in (
            ("SDPA", True),
            ("SDPA with a padding mask", False),
            ("SDPA with a padding mask", True),
        )
    )
    attention = [PublishedTimeModel(each.job).compute.attention(each.config) for each in (plain, masked, alone)]
    assert attention[1].forward_s == pytest.approx(4 * attention[0].forward_s)
    assert attention[2].forward_s == attention[1].forward_s
    # Of 132 cores each of 64 heads has one.
    assert attention[2].backward_input_s == pytest.approx(132 / 64 * attention[1].backward_input_s)
    assert masked.time.step_s > plain.time.step_s


@pytest.mark.parametrize(
    ("framework", "facts", "overlaps"),
    [
        ("Megatron-LM core 0.6", {}, False),
        ("Megatron-LM core 0.6", {"tp_comm_overlap": True}, True),
        ("NVIDIA NeMo 25.09", {}, True),
        ("Megatron-Bridge", {"tp_comm_overlap": False}, False),
        ("torchtitan", {}, False),
    ],
)
def test_tensor_parallel_collectives_overlap_where_a_code_turns_it_on(
    framework: str, facts: dict[str, bool], overlaps: bool
) -> None:
    config = case_of(framework, tp=2, dp=4, sequence_parallel=True, zero_stage=1, **facts).config
    assert config is not None
    assert (config.tensor.overlap_chunks > 1) == overlaps


@pytest.mark.parametrize(
    ("sharding", "stage"),
    [("distributed optimizer", 1), ("FULL_SHARD", 3), ("FSDP2", 3), ("ZeRO-2", 2), ("DDP", 0)],
)
def test_words_of_sharding_mean_a_stage(sharding: str, stage: int) -> None:
    config = case_of("Megatron-LM", zero_stage=None, sharding=sharding).config
    assert config is not None
    assert config.zero.stage == stage


def test_adapters_in_fp32_pass_more_often_over_what_they_read_where_nothing_fuses_them() -> None:
    lora = {"rank": 16, "targets": "q,k,v and o", "base": "bf16", "dropout": 0.1}
    said: dict[str, Any] = {"lora": lora, "zero_stage": 0, "micro_batch": 4}
    liger = {"loss": "Liger fused linear cross-entropy"}
    times = [
        price_of(HUGGING_FACE, precision=precision, **facts, **said).time.step_s
        for precision, facts in (("bf16", {"compile": True}), ("bf16", liger), ("bf16 whole", liger))
    ]
    assert times == sorted(times)
    assert len(set(times)) == 3
    assert not traits_of(HUGGING_FACE, **liger, **said).fuses_adapters
    assert traits_of("Unsloth", **said).fuses_adapters


def test_matrices_of_adapters_are_units_of_fsdp1_alone() -> None:
    lora = {"rank": 16, "targets": "q,k,v and o", "base": "bf16"}
    short = LLAMA | {"seq": 64}
    first, second = (
        price_of(HUGGING_FACE, short, lora=lora, sharding=sharding).time.step_s for sharding in ("FSDP1", "FSDP2")
    )
    assert first > 2 * second
    whole = [price_of(HUGGING_FACE, short, sharding=sharding).time.step_s for sharding in ("FSDP1", "FSDP2")]
    assert whole[0] == whole[1]


def test_streams_of_fp32_around_packed_layers_take_longer() -> None:
    lora = {"rank": 16, "targets": "q,k,v and o", "base": "nf4"}
    narrow, wide = (price_of(HUGGING_FACE, lora=lora, zero_stage=0, stream=each).time.step_s for each in (None, "fp32"))
    assert wide > 1.05 * narrow


@pytest.mark.parametrize(
    ("optimizer", "precision", "each_bytes"),
    [
        ("AdamW", "bf16, fp32 masters", 12.0),
        ("AdamW", "bf16 parameters, gradients and states", 4.0),
        ("AdamW", "amp (bf16)", 12.0),
        ("AdamW", "pure bf16", 4.0),
        ("AdamW torchao 8-bit", "bf16", 2 * (1 + 4 / 256)),
    ],
)
def test_an_optimizer_stores_what_its_words_say(optimizer: str, precision: str, each_bytes: float) -> None:
    share = traits_of(HUGGING_FACE, optimizer=optimizer, precision=precision).optimizer_share
    assert 12 * share == pytest.approx(each_bytes)


def test_adapters_are_read_with_their_rank_targets_base_and_dropout() -> None:
    lora = {"rank": 8, "targets": "q_proj,v_proj", "base": "nf4", "dropout": 0.1}
    case = case_of(HUGGING_FACE, lora=lora)
    assert case.job is not None
    found = case.config.lora
    assert (found.rank, found.targets, found.base, found.dropout) == (8, ("q_proj", "v_proj"), "nf4", 0.1)
    narrow, wide = (price_of(HUGGING_FACE, zero_stage=0, lora=lora | {"base": base}) for base in ("bf16", "fp32"))
    assert wide.memory.worst.peak["params"] == pytest.approx(3 * narrow.memory.worst.peak["params"])
    assert wide.time.step_s > narrow.time.step_s  # autocast makes each weight's copy in bf16
    dropped, kept = (price_of(HUGGING_FACE, lora=lora | {"dropout": each}).time.step_s for each in (0.1, 0.0))
    assert dropped > kept


def test_words_of_recomputation_free_tensors_and_run_their_products_again() -> None:
    words = ("none", "selective modules: moe_act layernorm", "selective modules: moe", "full")
    prices = [price_of("Megatron-LM", MIXTURE, ep=8, zero_stage=1, recompute=each) for each in words]
    held = [each.memory.worst.peak["activations"] for each in prices]
    seconds = [each.time.step_s for each in prices]
    assert held == sorted(held, reverse=True)
    assert seconds == sorted(seconds)
    assert len(set(held)) == len(set(seconds)) == 4
    again = [each.time.parts["experts"] for each in prices]
    assert again[1] == again[0]
    assert again[2] == pytest.approx(1.5 * again[0])  # its dispatch runs again, which moe_act's does not


def test_torchtitan_selects_ops_where_a_row_is_silent() -> None:
    silent = case_of("torchtitan 2025-11", recompute=None)
    assert silent.config is not None
    assert silent.config.recompute.mode == "selective"
    assert "recompute" not in silent.guesses
    said, none = (price_of("torchtitan 2025-11", recompute=each).time for each in ("selective, per op", "none"))
    assert said.parts["recompute"] > 0.05 * none.step_s  # wk, wo and w3 run again


def test_moments_and_gradients_go_where_words_of_offload_send_them() -> None:
    found = case_of("LLMQ (C++/CUDA)", zero_stage=1, offload="offload-opt-m (pinned host memory)").config
    assert found is not None
    assert (found.tiers.optimizer, found.tiers.optimizer_on_device) == ("host", 0.5)
    whole = case_of("LLMQ (C++/CUDA)", zero_stage=1, offload="offload-opt-m, offload-opt-v, offload-residual").config
    assert whole is not None
    assert (whole.tiers.optimizer, whole.tiers.optimizer_on_device, whole.tiers.activations) == ("host", 0.0, "host")


def test_loops_over_experts_wait_for_the_host_and_grouped_products_do_not() -> None:
    loop, grouped = (
        price_of("HF Trainer (2025-02)", MIXTURE, experts_kernel=kernel).time.step_s for kernel in (None, "grouped")
    )
    assert loop > 2 * grouped
    short: dict[str, Any] = {"zero_stage": 0, "grad_accum": 32}
    graphed, eager = (
        price_of("Megatron-LM", LLAMA | {"seq": 128}, cuda_graphs=each, **short).time.parts for each in (True, False)
    )
    assert eager["compute"] > graphed["compute"]


def test_chunks_of_ligers_head_read_and_cast_a_frozen_weight_each() -> None:
    def head_s(loss: str, base: str) -> float:
        lora = {"rank": 8, "base": base}
        case = case_of(HUGGING_FACE, loss=loss, lora=lora, zero_stage=0)
        assert case.job is not None
        assert case.config is not None
        times = PublishedTimeModel(case.job).compute.head(case.config)
        return times.forward_s + times.backward_input_s

    liger, cut = "Liger fused linear cross-entropy", "cut-cross-entropy"
    numel, num_chunks, bandwidth = 128256 * 4096, 32, 3.35e12  # bytes a second of an H100
    assert head_s(liger, "bf16") > head_s(cut, "bf16")
    casts_s = (num_chunks - 1) * 2 * 6 * numel / bandwidth
    assert head_s(liger, "fp32") - head_s(cut, "fp32") > casts_s


def test_llama_4_linearized_adds_the_gradients_of_each_expert_to_those_of_all() -> None:
    lora = {"rank": 8, "base": "nf4 (linearized experts)"}
    forward, backward = traits_of("axolotl (2025-04)", MIXTURE, lora=lora).permutation or (0.0, 0.0)
    assert (forward, backward) == (10.0, 8.0 + 6.0 * 128)


def test_fsdp_steps_where_it_stores_parameters_and_shards_them_between_steps() -> None:
    offloaded = case_of(HUGGING_FACE, sharding="FSDP full_shard", offload="parameters to CPU").config
    assert offloaded is not None
    assert (offloaded.tiers.params, offloaded.tiers.grads, offloaded.tiers.optimizer) == ("host", "host", "host")
    held = [
        price_of(HUGGING_FACE, zero_stage=2, sharding=sharding).memory.worst.peak["params"]
        for sharding in ("FSDP shard_grad_op", "ZeRO-2")
    ]
    assert held[0] == pytest.approx(held[1] * (1 + 1 / 8))


SUROGATE = "Surogate (2026-02), C++ engine"


def surogate(base: str, model: dict[str, Any] = LLAMA, **parallel: Any) -> Estimate:
    said: dict[str, Any] = {"zero_stage": 0, "precision": f"{base} base, fp8 matmuls", "gpu": "RTX 5090"}
    return price_of(SUROGATE, model, **said | {"lora": {"rank": 16, "targets": "q,k", "base": base}} | parallel)


def test_surogate_casts_a_packed_base_in_each_pass_and_launches_it_without_a_graph() -> None:
    assert traits_of(SUROGATE, lora={"rank": 16, "base": "bf16"}).is_graphed
    for base in ("nf4", "nvfp4", "fp8"):
        traits = traits_of(SUROGATE, precision=f"{base} base, fp8 matmuls", lora={"rank": 16, "base": base})
        assert (traits.is_graphed, traits.casts_unpacked, traits.experts_dtype) == (False, True, "bf16")
    few = LLAMA | {"seq": 32}
    casts_s = surogate("fp8", few).time.step_s - surogate("fp8", few, precision="fp8 base, bf16 matmuls").time.step_s
    bandwidth = 1.7e12  # bytes a second of an RTX 5090
    assert casts_s > 7e9 * 12 / bandwidth  # of 7 B elements 5 bytes forward and 7 backward


def test_surogate_launches_each_expert_that_a_rank_has() -> None:
    few = MIXTURE | {"seq": 64}
    whole, divided = (surogate("nf4", few, ep=each).time.parts["compute"] for each in (1, 8))
    assert whole - divided > 0.9 * 32 * (128 - 16) * 23 * 8e-6


def test_surogate_fetches_only_the_experts_that_do_not_fit() -> None:
    def fetching_s(base: str) -> float:
        return surogate(base, MIXTURE, offload="experts").time.step_s - surogate(base, MIXTURE).time.step_s

    assert fetching_s("nf4") == 0.0
    assert fetching_s("fp8") > 0.1


def test_tokens_go_to_a_node_once_with_deepep() -> None:
    hardware = {"gpu": "H100-SXM5-80GB", "num_gpus": 32, "gpus_per_node": 8}
    seconds = []
    for dispatcher in (None, "DeepEP"):
        case = case_of("Megatron-LM", MIXTURE, dispatcher=dispatcher)
        row = {
            "id": "x", "model": MIXTURE, "hardware": hardware,
            "parallel": {"framework": "Megatron-LM", "ep": 32, "zero_stage": 1, "micro_batch": 1, "grad_accum": 1,
                         "recompute": "none", "dispatcher": dispatcher},
        }  # fmt: skip
        case = read_case(row)
        assert case.job is not None
        assert case.config is not None
        seconds.append(PublishedTimeModel(case.job).communication.block(case.config).forward.experts_s)
    assert seconds[1] < 0.7 * seconds[0]


def test_frozen_layers_keep_no_inputs_but_those_of_adapters() -> None:
    def kept(targets: str, **more: Any) -> float:
        lora = {"rank": 8, "targets": targets, "base": "bf16"}
        return price_of(HUGGING_FACE, zero_stage=0, lora=lora, **more).memory.worst.peak["activations"]

    every = kept("all linears")
    assert kept("q_proj,v_proj") == pytest.approx(every - 32 * 2 * 4096 * (4096 + 14336), rel=1e-3)
    assert kept("down_proj") == pytest.approx(every - 32 * 2 * 4096 * 2 * 4096, rel=1e-3)
    assert kept("q_proj", recompute="full") == pytest.approx(kept("all linears", recompute="full"), rel=0.1)


def test_memory_is_that_of_the_longest_sequence_where_the_mean_is_given() -> None:
    mean, longest = (
        predict(case_of(HUGGING_FACE, LLAMA | {"seq": 512} | more)).memory_gib_per_gpu
        for more in ({}, {"longest": 4096})
    )
    assert mean is not None
    assert longest is not None
    assert longest > 1.3 * mean


@pytest.mark.parametrize("half", ["fitted", "held_out"])
def test_rows_of_this_year_name_their_source_and_code(half: str) -> None:
    rows = json.loads((ROOT / f"tests/data/planner_cases_2026_{half}.json").read_text())["cases"]
    assert len(rows) >= 150
    assert all(row["source"]["ref"] and row["source"]["quote"] and row["parallel"]["framework"] for row in rows)
    assert len({row["id"] for row in rows}) == len(rows)
    assert not [row["id"] for row in rows if read_case(row).refusal]


def test_no_source_is_in_both_halves() -> None:
    groups = [
        {row["group"] for row in json.loads((ROOT / f"tests/data/planner_cases_2026_{half}.json").read_text())["cases"]}
        for half in ("fitted", "held_out")
    ]
    assert all(len(each) >= 8 for each in groups)
    assert not groups[0] & groups[1]


def test_rows_that_were_priced_once_are_of_sources_of_their_own() -> None:
    data = ROOT / "tests/data"
    found = json.loads((data / "planner_cases_fresh2.json").read_text(encoding="utf-8"))
    rows, halves = found["cases"], {row["group"]: row["half"] for row in found["cases"]}
    others = [each for each in data.glob("planner_cases*.json") if "fresh2" not in each.name]
    used = {row.get("group") for each in others for row in json.loads(each.read_text(encoding="utf-8"))["cases"]}
    assert len(others) == 4
    assert not halves.keys() & used
    assert all(halves[row["group"]] == row["half"] for row in rows)
    assert all(row["source"]["ref"] and row["source"]["quote"] and row["quality"] in "AB" for row in rows)
    assert set(halves) | {"all", "studied", "held"} == set(found["first_priced"])
