"""What is taken of the code of a published run: its loss, its fp8 weights, what it keeps of stages, whose log it is."""

from __future__ import annotations

from typing import Any

import pytest

from planner_eval.cases import read_case
from planner_eval.prices import is_of_first_rank, memory_gib, memory_kind_of, predict_row
from planner_eval.traits import PublishedTraits, published_traits
from shardwise.config.resolve import ResolvedConfig

LLAMA = {
    "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "ffn_type": "swiglu", "vocab": 128256,
    "seq": 8192,
}  # fmt: skip
GPT = {"layers": 24, "hidden": 2048, "heads": 16, "ffn": 8192, "ffn_type": "gelu_mlp", "vocab": 51200, "seq": 2048}


def row(model: dict[str, Any], gpu: str = "H100", num_gpus: int = 16, **parallel: Any) -> dict[str, Any]:
    hardware = {"gpu": gpu, "num_gpus": num_gpus}
    return {"id": "x", "model": model, "hardware": hardware, "parallel": {"micro_batch": 1, **parallel}}


def known(row: dict[str, Any]) -> tuple[ResolvedConfig, PublishedTraits]:
    case = read_case(row)
    assert case.job is not None
    assert case.config is not None
    return case.config, published_traits(case.job)


@pytest.mark.parametrize(
    ("parallel", "num_bytes", "is_split"),
    [
        ({"zero_stage": 3}, 4 + 4 + 4, True),  # widened, log-softmax, gradient
        ({"zero_stage": 3, "attention_kernel": "flash"}, 2 + 2, False),
        ({"zero_stage": 3, "attention_kernel": "FA3", "liger": True}, 0, False),
        ({"zero_stage": 2, "attention_kernel": "FA3", "liger": False}, 4 + 4 + 4, False),
        ({"zero_stage": 2, "attention_kernel": "flash"}, 2 + 2, False),
        ({"zero_stage": 2, "attention_kernel": "flash", "liger": False}, 4 + 4 + 4, False),
        ({"zero_stage": 1, "attention_kernel": "flash"}, 4 + 4 + 4, False),
        ({"cp": 2, "zero_stage": 1, "attention_kernel": "flash"}, 4 + 4 + 4, True),
        ({"zero_stage": 1, "compile": True}, 2 + 2, True),
        ({"tp": 4, "zero_stage": 1}, 2 + 4 + 4, True),  # the gradient is written over the softmax
        ({"tp": 4, "zero_stage": 1, "attention_kernel": "flash"}, 2 + 4 + 4 + 4 + 2, False),
        ({"tp": 4, "zero_stage": 1, "attention_kernel": "cudnn", "precision": "fp8"}, 2 + 4 + 4, True),
        ({"tp": 2, "pp": 2, "vpp": 4, "attention_kernel": "flash"}, 2 + 4 + 4, True),
        ({"zero_stage": 3, "compile": True}, 4 + 4 + 4, True),
    ],
)
def test_copies_of_a_logit_are_those_of_its_loss(parallel: dict[str, Any], num_bytes: int, is_split: bool) -> None:
    _, traits = known(row(LLAMA, **parallel))
    assert (traits.logits_bytes, traits.splits_logits) == (num_bytes, is_split)
    assert traits.cached_logits_share == (2 / 12 if num_bytes == 12 else 0)


def test_losses_are_compiled_with_blocks_on_what_came_after_h100() -> None:
    assert [known(row(LLAMA, gpu, zero_stage=3, compile=True))[1].logits_bytes for gpu in ("H100", "B200")] == [12, 4]


OLD_GPT = {"model": GPT, "gpu": "V100-32GB", "precision": "fp16"}
SPLIT = {"tp": 2, "sequence_parallel": True, "zero_stage": 1}
STAGES = {"pp": 4, "vpp": 2}


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("tensor.overlap_chunks", SPLIT | STAGES, 4),
        ("tensor.overlap_chunks", SPLIT, 1),
        ("tensor.overlap_chunks", SPLIT | {"vpp": 0, "precision": "fp8"}, 4),
        ("tensor.overlap_chunks", SPLIT | {"sequence_parallel": False, "precision": "fp8"}, 1),
        ("tensor.overlap_chunks", SPLIT | {"vpp": 0, "precision": "fp8", "zero_stage": 3}, 1),
        ("tensor.overlap_chunks", SPLIT | {"vpp": 0, "precision": "fp8", "async_tp": False}, 1),
        ("tensor.overlap_chunks", SPLIT | STAGES | {"gpu": "A100"}, 1),
        ("tensor.overlap_chunks", {"tp": 2, "async_tp": True, "gpu": "A100"}, 4),
        ("compile.enabled", {"liger": True, "attention_kernel": "flash"}, True),
        ("compile.enabled", {"compile": True, "attention_kernel": "flash"}, True),
        ("compile.enabled", {"tp": 2}, True),
        ("compile.enabled", {"pp": 2}, True),
        ("compile.enabled", {}, False),
        ("compile.enabled", {"tp": 2, "attention_kernel": "flash"}, False),
        ("fuses_gate", {"liger": True}, True),
        ("fuses_gate", {"compile": True}, True),
        ("fuses_gate", {"tp": 2}, False),
        ("saves_norm_in_fp32", {"attention_kernel": "flash"}, True),
        ("saves_norm_in_fp32", {"attention_kernel": "flash + RMS kernel"}, False),
        ("saves_norm_in_fp32", {"attention_kernel": "flash", "liger": True}, False),
        ("saves_norm_in_fp32", {"attention_kernel": "flash", "compile": True}, False),
        ("saves_norm_in_fp32", {"attention_kernel": "flash", "model": GPT}, False),
        ("saves_norm_in_fp32", {}, False),
        ("optimizer_shards", {"zero_stage": 1, "zero_group": 4}, 4),
        ("optimizer_shards", {"zero_stage": 2, "zero_group": 4}, 4),
        ("optimizer_shards", {"zero_stage": 3, "zero_group": 4}, None),
        ("optimizer_shards", {"zero_stage": 0, "zero_group": 4}, None),
        ("optimizer_shards", {"zero_stage": 1, "zero_group": "a node"}, None),
        ("zero.overlap", {"tp": 2, "zero_stage": 1, "gpu": "A100"}, False),
        ("zero.overlap", {"pp": 2, "zero_stage": 0, "gpu": "A100"}, False),
        ("zero.overlap", {"tp": 2, "zero_stage": 2, "gpu": "A100"}, True),
        ("zero.overlap", {"zero_stage": 1, "gpu": "A100"}, True),
        ("zero.overlap", {"tp": 2, "zero_stage": 1}, True),
        ("zero.overlap", OLD_GPT | {"zero_stage": 2}, False),
        ("zero.overlap", OLD_GPT | {"zero_stage": 2, "attention_kernel": "fused"}, True),
        ("has_dropout", OLD_GPT, True),
        ("has_dropout", OLD_GPT | {"attention_kernel": "fused"}, False),
        ("has_dropout", {"model": GPT}, False),
        ("has_tuned_attention", {"attention_kernel": "flash", "gpu": "B200"}, True),
        ("has_tuned_attention", {"attention_kernel": "flash"}, False),
        ("selective", {"zero_stage": 1, "compile": True}, "all-but-scores"),
        ("selective", {"zero_stage": 3, "compile": True, "recompute": "selective"}, "all-but-scores"),
        ("selective", {"zero_stage": 3, "recompute": "selective (op)"}, "half"),
        ("selective", {"zero_stage": 3}, "all-but-scores"),
        ("moves_tensors", OLD_GPT | {"zero_stage": 3}, True),
        ("moves_tensors", OLD_GPT | {"zero_stage": 2}, False),
        ("moves_tensors", {"zero_stage": 3}, False),
        ("params_share", {"zero_stage": 1, "precision": "fp8", "gpu": "B200"}, 0.5),
        ("params_share", {"zero_stage": 1, "gpu": "B200"}, 1.0),
        ("optimizer_share", {"fp32_master": False}, 4 / 12),
        ("optimizer_share", {"fp32_master": True}, 1.0),
        ("optimizer_share", {}, 1.0),
        ("widens_grads", {"fp32_master": False}, False),
        ("widens_grads", {}, True),
        ("reduces_once", {"zero_stage": 3, "fp32_grad_accum_unsharded": True}, True),
        ("reduces_once", {"zero_stage": 3, "fp32_grad_accum": True}, False),
        ("logits_bytes", {"tp": 2, "narrow_loss": True}, 8.0),
        ("logits_bytes", {"tp": 2, "narrow_loss": False}, 10.0),
        ("splits_logits", {"tp": 2, "gathers_logits": True}, False),
        ("splits_logits", {"tp": 2, "gathers_logits": False, "attention_kernel": "flash"}, True),
        ("whole_embedding", {"tp": 2, "whole_embedding": True}, True),
        ("attention", {"model": GPT | {"seq": 8192}, "precision": "fp32"}, "flash"),
        ("attention", {"model": GPT | {"seq": 8191}, "precision": "fp32"}, "unfused"),
        ("attention", {"model": LLAMA | {"seq": 2048}, "precision": "fp32"}, "flash"),
        ("attention", OLD_GPT | {"precision": None}, "fused-softmax"),
        ("attention", OLD_GPT | {"gpu": "A100"}, "fused-softmax"),
        ("attention", OLD_GPT | {"gpu": "A100", "attention_kernel": "flash"}, "flash"),
        ("attention", OLD_GPT | {"gpu": "H100"}, "flash"),
        ("attention", {"model": GPT, "gpu": "A100", "recompute": "full"}, "fused-softmax"),
        ("attention", {"model": GPT, "gpu": "A100", "recompute": "full", "tp": 2, "sequence_parallel": True}, "flash"),
        ("attention", {"model": GPT, "gpu": "A100", "recompute": "none"}, "flash"),
        ("attention", {"model": GPT, "recompute": "full"}, "flash"),
    ],
)
def test_how_code_of_its_time_worked(name: str, given: dict[str, Any], value: Any) -> None:
    config, traits = known(row(**({"model": LLAMA} | given)))
    section, _, leaf = name.rpartition(".")
    assert getattr(getattr(config, section) if section else traits, leaf) == value


@pytest.mark.parametrize(
    ("gpu", "precision", "zero_stage", "share"),
    [
        ("B200", "fp8", 1, 0.5),  # as products take them
        ("H100", "fp8", 1, 1.0),  # beside its transpose
        ("B200", "mxfp8", 1, 1.0),  # one of each direction of scales
        ("B200", "fp8", 3, 1.0),
    ],
)
def test_weights_of_fp8_are_stored_as_products_take_them(
    gpu: str, precision: str, zero_stage: int, share: float
) -> None:
    rows = (
        row(LLAMA, gpu, tp=4, zero_stage=zero_stage, precision=dtype, recompute="none") for dtype in (precision, "bf16")
    )
    fp8, bf16 = (predict_row(each, read_case(each)).price for each in rows)
    assert fp8 is not None
    assert bf16 is not None
    assert fp8.memory.worst.peak["params"] == share * bf16.memory.worst.peak["params"] > 0


def test_stages_that_are_interleaved_let_go_what_they_sent() -> None:
    assert known(row(GPT, tp=2, pp=4, vpp=3))[1].frees_outputs
    assert not known(row(GPT, tp=2, pp=4, vpp=1, schedule="1f1b"))[1].frees_outputs


@pytest.mark.parametrize(
    ("precision", "attention", "has_dropout"), [("fp16", "fused-softmax", True), ("fp32", "unfused", False)]
)
def test_scores_that_fp32_keeps_say_nothing_of_the_codes_age(precision: str, attention: str, has_dropout: bool) -> None:
    traits = known(row(GPT, "A100", tp=4, precision=precision))[1]
    assert (traits.attention, traits.has_dropout) == (attention, has_dropout)


def test_torchs_own_code_recomputes_every_other_product_where_it_does_not_say() -> None:
    config, traits = known(row(LLAMA, zero_stage=3, compile=True))
    assert (config.recompute.mode, traits.selective) == ("selective", "half")
    config, _ = known(row(LLAMA, zero_stage=3, compile=True, recompute="none"))
    assert config.recompute.mode == "none"
    assert [read_case(row(LLAMA, zero_stage=3, compile=each)).guesses for each in (True, False)] == [
        ("global_batch",),
        ("global_batch", "recompute"),
    ]


@pytest.mark.parametrize(("pp", "dtype"), [(1, "param"), (4, "fp32")])
def test_sharded_parameters_in_a_pipeline_have_gradients_in_fp32(pp: int, dtype: str) -> None:
    config, _ = known(row(LLAMA, pp=pp, zero_stage=3, precision="bf16"))
    assert (config.precision.accumulate, config.precision.reduce) == (dtype, dtype)


@pytest.mark.parametrize(
    ("written", "kind", "is_first"),
    [
        ("torch max_memory_allocated GiB as logged", "allocated", True),
        ("peak GB as printed", "allocated", True),
        ("peak GB", "allocated", False),
        ("torch peak reserved, max over ranks", "reserved", False),
        ("max memory over ranks, bytes in file", "device", False),
        ('nvidia-smi used, worst rank, integer "GB" as printed', "device", False),
        ("memory used, rank 0", "device", True),
        ("peak activation memory of the first stage", "activations", False),
        ("model states plus activations", "states+activations", False),
        (None, "allocated", False),
    ],
)
def test_memory_is_of_the_kind_and_rank_that_a_row_names(written: str | None, kind: str, is_first: bool) -> None:
    assert (memory_kind_of(written), is_of_first_rank(written)) == (kind, is_first)


def test_a_figure_of_activations_counts_nothing_else() -> None:
    plain = row(LLAMA, num_gpus=8, zero_stage=3, global_batch=8, recompute="full")
    found = predict_row(plain | {"memory_kind": "activations"}, read_case(plain))
    assert found.price is not None
    assert found.memory_gib_per_gpu == found.price.memory.worst.peak["activations"] / 2**30


def test_what_a_run_logged_is_its_first_ranks_memory() -> None:
    plain = row(LLAMA | {"vocab": 512_000}, num_gpus=2, pp=2, zero_stage=1, global_batch=8, recompute="none")
    peak, logged = (predict_row(plain | {"memory_kind": kind}, read_case(plain)) for kind in ("peak", "peak as logged"))
    assert peak.price is not None
    first, last = (memory_gib(rank, "allocated") for rank in peak.price.memory.ranks)
    assert peak.memory_gib_per_gpu == last > first == logged.memory_gib_per_gpu


@pytest.mark.parametrize(("kernel", "num_bytes"), [(None, 2), ("flash", 0)])
def test_narrow_logits_that_torchs_loss_lets_go_stay_with_the_allocator(kernel: str | None, num_bytes: int) -> None:
    plain = row(LLAMA, num_gpus=8, zero_stage=3, global_batch=8, recompute="full", attention_kernel=kernel)
    allocated, reserved, device = (
        predict_row(plain | {"memory_kind": kind}, read_case(plain)) for kind in ("peak", "reserved", "nvidia-smi")
    )
    assert allocated.price is not None
    worst = allocated.price.memory.worst
    cached_bytes = num_bytes * LLAMA["seq"] * LLAMA["vocab"]
    held = [2**30 * (each.memory_gib_per_gpu or 0.0) for each in (allocated, reserved, device)]
    assert held[1] == pytest.approx(held[0] + worst.peak["rounding"] + cached_bytes)
    assert held[2] == pytest.approx(held[1] + worst.peak["overhead"])
    assert allocated.price.margin_bytes == read_case(plain).job.cluster.gpu.memory_bytes - worst.peak_bytes  # type: ignore[union-attr]
