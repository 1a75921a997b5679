"""Rows of published runs, read whole: every field of the job that is not the default, worked out by hand."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from harness.planner_configs import differences
from planner_eval.cases import Case, KnownStates, read_case
from planner_eval.models import PublishedStages
from planner_eval.prices import predict_row
from planner_eval.recomputation import recomputation_of
from planner_eval.traits import published_traits
from planner_eval.words import gpu_of
from shardwise.config.resolve import ResolvedConfig
from shardwise.models.shape import ExpertsShape, ModelShape
from shardwise.planner.hardware import find_gpu
from shardwise.planner.job import PlanJob, changed, param_of

# What holds of all published code, whatever it was.
GPT = {"layers": 30, "hidden": 2304, "heads": 24, "ffn_type": "gelu_mlp", "seq": 1024, "name": "GPT"}
GPT_SHAPE = ModelShape(
    num_layers=30, hidden_size=2304, num_heads=24, num_kv_heads=24, head_dim=96, ffn_size=9216, vocab_size=51200,
    ffn="plain", is_tied=True, has_biases=True, num_positions=1024, name="GPT",
)  # fmt: skip
LLAMA = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256, "seq": 8192}
LLAMA_SHAPE = ModelShape(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14336, vocab_size=128256,
    name="model",
)  # fmt: skip


def written(model: dict[str, Any], gpu: str, num_gpus: int, /, **more: Any) -> dict[str, Any]:
    """A row; of `more`, what is of the hardware goes there."""
    hardware = {key: more.pop(key) for key in ("gpus_per_node", "interconnect", "nvlink_domain") if key in more}
    return {"id": "x", "model": model, "hardware": {"gpu": gpu, "num_gpus": num_gpus} | hardware, "parallel": more}


def known(row: dict[str, Any]) -> tuple[Case, PlanJob, ResolvedConfig]:
    case = read_case(row)
    assert case.job is not None
    assert case.config is not None
    return case, case.job, case.config


def layers_of(config: ResolvedConfig, job: PlanJob) -> tuple[int, ...]:
    return PublishedStages(job).of(config).layers


def config_of(**parallel: Any) -> ResolvedConfig:
    return known(written(LLAMA, parallel.pop("gpu", "H100"), parallel.pop("num_gpus", 32), **parallel))[2]


def facts_of(job: PlanJob) -> dict[str, Any]:
    """What is not as usual."""
    value = published_traits(job)
    found = {each.name: getattr(value, each.name) for each in fields(value)}
    usual = {each.name: each.default for each in fields(value)}
    return {name: value for name, value in found.items() if value != usual[name]}


def test_a_run_of_interleaved_stages_in_fp16() -> None:
    row = written(
        GPT, "A100-SXM4-80GB", 64, interconnect="InfiniBand", tp=2, pp=4, vpp=2, zero_stage=1, micro_batch=2,
        global_batch=256, precision="fp16", schedule="interleaved 1f1b", recompute="full",
    )  # fmt: skip
    case, job, config = known(row)
    assert (case.guesses, case.tokens_scale, case.trained_share) == (("sequence_parallel",), 1.0, 1.0)
    assert (job.shape, job.seq_len, job.global_batch) == (GPT_SHAPE, 1024, 256)
    gpu = find_gpu("a100-80")
    assert (job.cluster.gpu, job.cluster.num_gpus, job.cluster.gpus_per_node) == (gpu, 64, 8)
    assert job.cluster.nic_bytes_per_s == gpu.nic_bytes_per_s / 4  # 400 Gb/s a node, where no speed is named
    assert layers_of(config, job) == (3, 4, 4, 4, 4, 4, 4, 3)
    assert differences(changed(config, {"pipeline.cut": None})) == {
        "mesh.pp": 4, "mesh.tp": 2, "mesh.dp_shard": 8, "zero.stage": 1, "batch.micro_size": 2,
        "batch.accumulation": 16,
        "pipeline.schedule": "interleaved", "pipeline.virtual_stages": 2, "recompute.mode": "full",
        "precision.param": "fp16", "compile.enabled": True, "zero.overlap": False,
    }  # fmt: skip
    assert facts_of(job) == {
        "attention": "fused-softmax", "logits_bytes": 10.0,
        "defers_gathers": False, "has_dropout": True, "frees_outputs": True,
    }  # fmt: skip


def test_a_run_of_compiled_blocks_in_fp8_with_replicas_of_a_node() -> None:
    row = written(
        LLAMA, "H100", 32, zero_stage=3, hybrid_shard=True, compile=True, precision="fp8", micro_batch=2,
        attention_kernel="FA3", fp32_grad_accum=True, cuda_graphs=True,
    )  # fmt: skip
    case, job, config = known(row)
    assert case.guesses == ("global_batch",)
    assert job.shape == LLAMA_SHAPE
    assert (job.global_batch, job.cluster.nic_bytes_per_s) == (64, find_gpu("h100").nic_bytes_per_s)
    assert differences(config) == {
        "mesh.dp_replicate": 4, "mesh.dp_shard": 8, "zero.stage": 3, "batch.micro_size": 2,
        "recompute.mode": "selective",
        "precision.linears": "fp8", "compile.enabled": True,
    }  # fmt: skip
    assert facts_of(job) == {
        "cached_logits_share": 2 / 12, "is_graphed": True,
        "has_tuned_attention": True, "selective": "half", "fuses_gate": True, "widens_grads": False,
        "unsharded_grad_bytes": 2.0, "recomputation": recomputation_of("per op", ""),
    }  # fmt: skip


def test_a_run_of_sharded_parameters_on_disks() -> None:
    row = written(
        GPT | {"ffn_type": "relu", "tied_embeddings": False}, "V100-SXM3-32GB", 32, gpus_per_node=16, zero_stage=3,
        interconnect="DGX-2, 8 x EDR", zero_group=16, micro_batch=2, global_batch=128, precision="fp16",
        recompute="selective", offload="NVMe: params, grads, optimizer; activations on CPU",
    )  # fmt: skip
    case, job, config = known(row)
    assert case.guesses == ()
    assert (job.shape.is_tied, job.shape.has_biases, job.shape.num_positions) == (False, False, 0)
    assert (job.cluster.gpus_per_node, job.cluster.nic_bytes_per_s) == (16, 8 * 12.5e9 / 16)
    assert job.cluster.gpu.link_domain == 16
    assert differences(config) == {
        "mesh.dp_replicate": 2, "mesh.dp_shard": 16, "zero.stage": 3, "batch.micro_size": 2, "batch.accumulation": 2,
        "recompute.mode": "full", "tiers.params": "nvme", "tiers.grads": "host", "tiers.optimizer": "nvme",
        "tiers.activations": "host", "precision.param": "fp16", "precision.accumulate": "param", "zero.overlap": False,
    }  # fmt: skip
    assert facts_of(job) == {
        "attention": "fused-softmax", "cached_logits_share": 2 / 12, "defers_gathers": False,
        "moves_tensors": True, "has_dropout": True,
    }  # fmt: skip


def test_a_run_of_experts_in_two_pipelines() -> None:
    model = {
        "layers": 27, "hidden": 2048, "heads": 16, "head_dim": 192, "attention": "MLA", "ffn": 10944, "vocab": 102400,
        "seq": 4096, "moe": {"experts": 64, "top_k": 6, "moe_ffn": 1408, "shared": 2, "first_dense_layers": 1},
    }  # fmt: skip
    row = written(
        model, "H800", 64, pp=4, ep=16, zero_stage=1, schedule="DualPipe", micro_batch=1, global_batch=512,
        precision="fp8", recompute="none",
    )  # fmt: skip
    case, job, config = known(row)
    assert case.guesses == ()
    experts = ExpertsShape(num_experts=64, num_chosen=6, ffn_size=1408, num_shared=2, num_dense_layers=1)
    assert job.shape == ModelShape(
        num_layers=27, hidden_size=2048, num_heads=16, num_kv_heads=1, head_dim=192, ffn_size=10944, vocab_size=102400,
        experts=experts, name="model",
    )  # fmt: skip
    assert layers_of(config, job) == (4, 4, 4, 3, 3, 3, 3, 3)
    assert differences(changed(config, {"pipeline.cut": None})) == {
        "mesh.pp": 4, "mesh.dp_shard": 16, "mesh.ep": 16, "zero.stage": 1, "batch.accumulation": 32,
        "pipeline.schedule": "zb-v", "pipeline.virtual_stages": 2, "precision.accumulate": "param",
        "precision.linears": "fp8", "compile.enabled": True,
    }  # fmt: skip
    assert facts_of(job) == {
        "logits_bytes": 10.0, "fuses_gate": True, "widens_grads": False,
    }  # fmt: skip


def test_a_run_of_long_sequences_in_chunks_with_adapters() -> None:
    row = written(
        LLAMA | {"seq": 65536, "ffn_type": "SwiGLU"}, "A100-40GB", 16, tp=2, cp=4, zero_stage=2, zero_group=2,
        sequence_parallel=True, cp_impl="Ulysses, chunked", global_batch=8, num_microbatches=2, precision="bf16",
        attention_kernel="flash", training="LoRA", recompute="every 4 layers", fp32_grad_accum_unsharded=True,
    )  # fmt: skip
    case, job, config = known(row)
    assert (case.guesses, case.trained_share, case.tokens_scale) == (("micro_batch",), 2 / 3, 1.0)
    assert (job.seq_len, config.lora.rank) == (65536, 16)
    assert differences(config) == {
        "mesh.tp": 2, "mesh.cp": 4, "mesh.dp_shard": 2, "zero.stage": 2, "batch.micro_size": 2, "batch.accumulation": 2,
        "tensor.sequence_parallel": True, "context.transport": "ulysses", "context.chunk_tokens": 16384,
        "tiers.activations": "host",
        "recompute.mode": "full", "recompute.every": 4, "precision.accumulate": "param", "lora.rank": 16,
    }  # fmt: skip
    assert facts_of(job) == {
        "logits_bytes": 10.0, "optimizer_shards": 2, "unsharded_grad_bytes": 4.0, "defers_gathers": False,
        "reduces_once": True,
        "saves_norm_in_fp32": True, "has_first_flash": True,
    }  # fmt: skip


def test_a_run_in_fp8_on_one_domain_of_links() -> None:
    row = written(
        LLAMA, "GB200", 72, gpus_per_node=4, tp=4, zero_stage=1, sequence_parallel=True, micro_batch=1,
        global_batch=36, precision="fp8", recompute="none", num_microbatches=2, attention_kernel="cudnn",
    )  # fmt: skip
    case, job, config = known(row)
    assert case.guesses == ()
    assert (job.cluster.gpus_per_node, job.cluster.gpu.link_domain) == (4, 72)
    assert differences(config) == {
        "mesh.tp": 4, "mesh.dp_shard": 18, "zero.stage": 1, "batch.accumulation": 2, "tensor.sequence_parallel": True,
        "precision.accumulate": "param", "precision.linears": "fp8", "compile.enabled": True,
        "tensor.overlap_chunks": 4,
    }  # fmt: skip
    assert facts_of(job) == {
        "logits_bytes": 10.0, "has_tuned_attention": True,
        "fuses_gate": True, "widens_grads": False, "params_share": 0.5, "saves_norm_in_fp32": True,
    }  # fmt: skip


def test_a_size_alone_is_known_by_its_states() -> None:
    row: dict[str, Any] = {"model": {"params": "7.5B"}, "hardware": {"gpu": "V100-32GB"}}
    row["parallel"] = {"zero_stage": 2, "dp": 64, "offload": "cpu: optimizer and activations"}
    expected = KnownStates(
        num_params=7_500_000_000, zero_stage=2, num_gpus=64, tiers={"optimizer": "host"}, gpu=gpu_of("V100-32GB")
    )
    assert read_case(row).states == expected
    for section, key, value in (("model", "layers", 2), ("model", "params", None), ("parallel", "zero_stage", None)):
        assert read_case(row | {section: row[section] | {key: value}}).states is None
    assert read_case(row | {"parallel": row["parallel"] | {"dp": None}}).states is None
    in_all = read_case(row | {"hardware": {"gpu": "V100-32GB", "num_gpus": 128}}).states
    assert in_all == replace(expected, num_gpus=128)
    small = predict_row(row | {"model": {"params": 1e9}}, read_case(row | {"model": {"params": 1e9}}))
    odd = {"hardware": {"gpu": "abacus"}, "model": {"params": 1e9}}
    assert predict_row(row | odd, read_case(row | odd)).feasible is None
    large = row | {"model": {"params": 40e9}}
    assert predict_row(large, read_case(large)).feasible is False
    # 2 of parameters and of gradients a 64th of 2, in host memory the rest; ZeRO (arXiv 1910.02054), figure 1.
    assert (small.memory_gib_per_gpu, small.feasible) == (pytest.approx((2 + 2 / 64) * 1e9 / 2**30), True)


@pytest.mark.parametrize(
    ("parallel", "sizes"),
    [
        ({"micro_batch": 2, "global_batch": 128}, (2, 2, 1)),
        ({"micro_batch": 2, "grad_accum": 3}, (2, 3, 1)),
        ({"global_batch": 256, "grad_accum": 4}, (2, 4, 1)),
        ({"global_batch": 256, "num_microbatches": 8, "grad_accum": 4}, (1, 8, 1)),
        ({"global_batch": 256}, (1, 8, 1)),
        ({"global_batch": 16}, (1, 1, 16 / 32)),
        ({"global_batch": 16, "grad_accum": 4}, (1, 1, 16 / 32)),
        ({"micro_batch": 2, "global_batch": 224}, (2, 4, 224 / 256)),  # halves of a micro-batch to the even number
        ({"pp": 2}, (1, 16, 1)),
        ({"pp": 4}, (1, 32, 1)),  # enough to fill a pipeline
        ({"pp": 4, "micro_batch": 2, "grad_accum": 5}, (2, 5, 1)),
        ({}, (1, 1, 1)),
    ],
)
def test_the_batch_by_what_is_written(parallel: dict[str, int], sizes: tuple[int, int, float]) -> None:
    case, _, config = known(written(LLAMA, "H100", 32, zero_stage=1, **parallel))
    assert (config.batch.micro_size, config.batch.accumulation, case.tokens_scale) == sizes


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({"pp": 1, "vpp": 4}, ("1f1b", 1)),
        ({"pp": 4}, ("1f1b", 1)),
        ({"pp": 32}, ("1f1b", 1)),
        ({"pp": 4, "schedule": "interleaved"}, ("interleaved", 8)),  # a block each
        ({"pp": 2, "schedule": "interleaved"}, ("interleaved", 8)),
        ({"pp": 8, "schedule": "interleaved", "vpp": 2}, ("interleaved", 2)),
        ({"pp": 8, "schedule": "interleaved", "vpp": 1}, ("interleaved", 2)),
        ({"pp": 4, "schedule": "gpipe", "vpp": 2}, ("gpipe", 1)),
        ({"pp": 4, "tp": 2, "sequence_parallel": True}, ("interleaved", 8)),
        ({"pp": 4, "tp": 2, "sequence_parallel": True, "vpp": 0}, ("1f1b", 1)),
        ({"pp": 16, "schedule": "zb-v"}, ("zb-v", 2)),
        ({"pp": 32, "schedule": "zb-v"}, ("zb-h1", 1)),  # 64 stages of 32 blocks
    ],
)
def test_virtual_stages_by_what_is_written(parallel: dict[str, Any], expected: tuple[str, int]) -> None:
    config = config_of(**parallel)
    assert (config.pipeline.schedule, config.pipeline.virtual_stages) == expected


@pytest.mark.parametrize(("num_layers", "virtual_stages"), [(24, 6), (30, 2), (36, 3), (44, 2)])
def test_interleaved_stages_are_as_many_as_divide_the_blocks(num_layers: int, virtual_stages: int) -> None:
    row = written(LLAMA | {"layers": num_layers}, "H100", 8, pp=4, schedule="interleaved")
    assert known(row)[2].pipeline.virtual_stages == virtual_stages


@pytest.mark.parametrize(
    ("num_layers", "more", "expected"),
    [
        (32, {}, (8, 8, 8, 8)),
        (31, {}, (8, 8, 8, 7)),
        (30, {}, (7, 8, 8, 7)),  # even where both ends count
        (32, {"layers_per_stage": [7, 9, 9, 7]}, (7, 9, 9, 7)),
        (32, {"layers_per_stage": [8, 9, 9, 8]}, (7, 9, 9, 7)),  # both ends counted
        (32, {"layers_per_stage": [8, 8, 9, 8]}, (8, 8, 8, 8)),
        (32, {"layers_per_stage": [16, 16]}, (8, 8, 8, 8)),
        (2, {}, (0, 1, 1, 0)),
    ],
)
def test_blocks_of_each_stage(num_layers: int, more: dict[str, Any], expected: tuple[int, ...]) -> None:
    _, job, config = known(written(LLAMA | {"layers": num_layers}, "H100", 8, pp=4, **more))
    assert layers_of(config, job) == expected


def test_ends_that_count_as_a_block_each_have_one_less() -> None:
    model = LLAMA | {"first_last_stage_one_layer_less": True}
    for row, expected in (
        (written(model, "H100", 8, pp=4), (8, 9, 8, 7)),
        (written(model, "H100", 8), (32,)),
        (written(LLAMA, "H100", 8, pp=2), (16, 16)),
    ):
        _, job, config = known(row)
        assert layers_of(config, job) == expected


def test_what_is_not_written_is_guessed_and_named() -> None:
    case, _, config = known(written(LLAMA, "H100", 8))
    assert (config.zero.stage, case.quantity, case.searched_schedule) == (1, "end_to_end", None)
    assert case.guesses == ("micro_batch", "global_batch", "zero_stage", "recompute")
    assert known(written(LLAMA, "H100", 8, tp=8))[2].zero.stage == 0
    more = {"id": 3, "group": "g", "tier": "core", "quantity": "memory"}
    case, _, _ = known(written(LLAMA, "H100", 8, pp=2, schedule="zb-1p", zero_stage=1, recompute="full") | more)
    assert (case.id, case.group, case.tier, case.quantity) == ("3", "g", "core", "memory")
    assert (case.searched_schedule, case.guesses) == ("zb-1p", ("micro_batch", "global_batch"))


def test_what_cannot_be_is_refused() -> None:
    refused = read_case(written(LLAMA, "H100", 64, pp=16, vpp=3))
    assert refused.refusal == (
        "parallel: pp x vpp = 48 stages are more than the 34 of 32 layers; lower pp or vpp"
    )  # fmt: skip
    assert (refused.job, refused.config) == (None, None)
    unknown = read_case(written(LLAMA, "abacus", 8))
    assert (unknown.refusal or "").startswith("hardware.gpu: abacus is no device")
    assert (unknown.job, unknown.config) == (None, None)


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({"precision": "bf16", "zero_stage": 1}, ("bf16", "param", "param", "keep")),
        ({"precision": "bf16", "zero_stage": 1, "tp": 2}, ("bf16", "fp32", "fp32", "keep")),
        ({"precision": "bf16", "zero_stage": 0, "pp": 2}, ("bf16", "fp32", "fp32", "keep")),
        ({"precision": "bf16", "zero_stage": 2, "tp": 2}, ("bf16", "param", "param", "keep")),
        ({"precision": "bf16", "zero_stage": 2, "tp": 2, "fp32_grad_accum": True}, ("bf16", "fp32", "fp32", "keep")),
        ({"precision": "bf16", "zero_stage": 1, "tp": 2, "fp32_grad_accum": False}, ("bf16", "param", "param", "keep")),
        ({"precision": "bf16", "zero_stage": 2, "fp32_grad_accum": True}, ("bf16", "fp32", "param", "keep")),
        ({"precision": "bf16", "zero_stage": 3, "tp": 2, "fp32_grad_accum": True}, ("bf16", "fp32", "param", "keep")),
        ({"precision": "bf16", "zero_stage": 3, "pp": 2}, ("bf16", "fp32", "fp32", "keep")),
        ({"precision": "bf16", "zero_stage": 3, "fp32_grad_reduce": True}, ("bf16", "param", "fp32", "keep")),
        ({"precision": "bf16", "zero_stage": 3, "pp": 2, "fp32_grad_reduce": "no"}, ("bf16", "fp32", "param", "keep")),
        ({"precision": "fp16", "zero_stage": 3, "pp": 2}, ("fp16", "param", "param", "keep")),
        ({"precision": "fp16", "zero_stage": 1, "tp": 2}, ("fp16", "fp32", "param", "keep")),
        ({"precision": "fp8", "zero_stage": 1, "tp": 2}, ("bf16", "param", "param", "fp8")),
        ({"precision": "fp4", "zero_stage": 1, "tp": 2}, ("bf16", "fp32", "fp32", "keep")),  # no such units
        ({"precision": "fp32"}, ("fp32", "fp32", "param", "tf32")),
        ({"precision": "tf32"}, ("fp32", "fp32", "param", "tf32")),
        ({"precision": "fp32", "gpu": "V100-32GB"}, ("fp32", "fp32", "param", "keep")),
    ],
)
def test_dtypes_by_what_is_written(parallel: dict[str, Any], expected: tuple[str | None, ...]) -> None:
    config = config_of(**parallel)
    assert (
        param_of(config),
        config.precision.accumulate,
        config.precision.reduce,
        config.precision.linears,
    ) == expected


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({"zero_stage": 1}, (1, 32)),
        ({"zero_stage": 3, "zero_group": 16}, (2, 16)),
        ({"zero_stage": 3, "zero_group": 12}, (1, 32)),
        ({"zero_stage": 2, "zero_group": 16}, (1, 32)),  # of the optimizer's states alone
        ({"zero_stage": 3, "hybrid_shard": True}, (4, 8)),
        ({"zero_stage": 3, "hybrid_shard": True, "tp": 4}, (4, 2)),
        ({"zero_stage": 3, "hybrid_shard": True, "tp": 2, "pp": 2, "cp": 8}, (1, 1)),
        ({"zero_stage": 3, "dp": 16}, (1, 16)),
        ({"zero_stage": 3, "hybrid_shard": True, "tp": 16, "num_gpus": 64}, (4, 1)),  # more than a node
    ],
)
def test_over_which_ranks_a_stage_shards(parallel: dict[str, Any], expected: tuple[int, int]) -> None:
    config = config_of(**parallel)
    assert (config.mesh.dp_replicate, config.mesh.dp_shard) == expected


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ({}, ("none", 1)),
        ({"recompute": "selective", "zero_stage": 3}, ("full", 1)),  # it selects blocks
        ({"recompute": "selective", "zero_stage": 3, "tp": 2}, ("selective", 1)),
        ({"recompute": "selective", "zero_stage": 1}, ("selective", 1)),
        ({"recompute": "selective (op)", "zero_stage": 3}, ("selective", 1)),
    ],
)
def test_what_sharded_code_calls_selective(parallel: dict[str, Any], expected: tuple[str, int]) -> None:
    config = config_of(**parallel)
    assert (config.recompute.mode, config.recompute.every) == expected


@pytest.mark.parametrize(
    ("parallel", "is_split", "is_guessed"),
    [
        ({"tp": 2}, True, True),
        ({"tp": 2, "precision": "fp16"}, False, True),
        ({"tp": 2, "sequence_parallel": False}, False, False),
        ({"tp": 1}, False, False),
        ({"tp": 1, "sequence_parallel": True}, False, False),
    ],
)
def test_sequences_are_split_where_tensors_are(parallel: dict[str, Any], is_split: bool, is_guessed: bool) -> None:
    case, _, config = known(written(LLAMA, "H100", 32, **parallel))
    assert config.tensor.sequence_parallel is is_split
    assert ("sequence_parallel" in case.guesses) is is_guessed


@pytest.mark.parametrize(
    ("parallel", "transport"),
    [
        ({"cp": 4}, "ring"),
        ({"cp": 2, "cp_impl": "all-gather of keys"}, "all-gather"),
        ({"cp": 2, "cp_impl": "ulysses"}, "ulysses"),
        ({"cp": 4, "cp_impl": "all-gather, then ring"}, "ring"),
        ({"cp": 1, "cp_impl": "ulysses"}, "ring"),
        ({"cp": 1, "cp_impl": "all-gather"}, "ring"),
    ],
)
def test_how_keys_are_sent(parallel: dict[str, Any], transport: str) -> None:
    assert config_of(**parallel).context.transport == transport


@pytest.mark.parametrize(
    ("offload", "expected"),
    [
        ("none", ("device", "device", "device", "device")),
        ("none (optimizer in bf16)", ("device", "device", "device", "device")),
        ("possibly optimizer", ("device", "device", "device", "device")),
        ("cpu optimizer", ("device", "device", "host", "device")),
        ("grads + params to nvme", ("nvme", "host", "device", "device")),
        ("activations", ("device", "device", "device", "host")),
    ],
)
def test_memories_by_what_is_written(offload: str, expected: tuple[str, ...]) -> None:
    case, _, each = known(written(LLAMA, "H100", 32, offload=offload))
    assert (each.tiers.params, each.tiers.grads, each.tiers.optimizer, each.tiers.activations) == expected
    assert ("offload" in case.guesses) is offload.startswith("possibly")


@pytest.mark.parametrize(
    ("attention", "seq_len", "window"),
    [
        ("full", 8192, None),
        ("heads of 128", 8192, None),
        ("sliding window, 1024 keys", 8192, 1024),
        ("alternating, window 1", 1, 1),
        ("window", 8192, None),
        ("alternating full, window 512", 8192, (8192 + 1024) // 4),
        ("alternating full, window 4096", 2048, 1024),
    ],
)
def test_windows_leave_as_many_keys(attention: str, seq_len: int, window: int | None) -> None:
    _, job, _ = known(written(LLAMA | {"attention": attention, "seq": seq_len}, "H100", 8))
    assert job.shape.window == window


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({}, ("gated", 12288 // 3, 32000, 32, 32, 48, 0, False)),
        ({"ffn_type": "geglu"}, ("gated", 4096, 32000, 32, 32, 48, 0, False)),
        ({"ffn_type": "GELU"}, ("plain", 6144, 51200, 32, 32, 48, 2048, True)),
        ({"ffn_type": "relu^2"}, ("plain", 6144, 51200, 32, 32, 48, 0, True)),
        ({"tied_embeddings": True}, ("gated", 4096, 32000, 32, 32, 48, 0, True)),
        ({"heads": 24, "kv_heads": 4}, ("gated", 4096, 32000, 24, 4, 64, 0, False)),
        ({"heads": 24, "kv_heads": 4, "attention": "MLA"}, ("gated", 4096, 32000, 24, 1, 64, 0, False)),
        ({"head_dim": 96, "ffn": 5000, "vocab": 999}, ("gated", 5000, 999, 32, 32, 96, 0, False)),
    ],
)
def test_shapes_by_what_is_written(model: dict[str, Any], expected: tuple[Any, ...]) -> None:
    shape = known(written({"layers": 4, "hidden": 1536, "seq": 2048} | model, "H100", 8))[1].shape
    assert (
        shape.ffn, shape.ffn_size, shape.vocab_size, shape.num_heads, shape.num_kv_heads, shape.head_dim,
        shape.num_positions, shape.is_tied,
    ) == expected  # fmt: skip
    assert shape.has_biases is ("GELU" in model.get("ffn_type", ""))


def test_experts_that_are_hardly_written_are_as_large_as_the_dense_ones() -> None:
    experts = known(written(LLAMA | {"moe": {"experts": 8}}, "H100", 8))[1].shape.experts
    assert experts == ExpertsShape(num_experts=8, num_chosen=1, ffn_size=14336)
    assert known(written(LLAMA | {"moe": {"top_k": 2}}, "H100", 8))[1].shape.experts is None


@pytest.mark.parametrize(
    ("gpu", "more", "expected"),
    [
        ("H100", {}, (8, 8, 1.0)),
        ("H100", {"gpus_per_node": 4}, (4, 4, 1.0)),
        ("H100 PCIe", {"gpus_per_node": 1}, (1, 1, 1.0)),
        ("V100-32GB", {"gpus_per_node": 16}, (16, 16, 1.0)),
        ("GB200", {"gpus_per_node": 4}, (4, 72, 1.0)),
        ("GB200", {"nvlink_domain": 8}, (4, 8, 1.0)),
        ("GB200", {}, (4, 72, 1.0)),
        ("RTX 4090", {}, (8, 1, 1.0)),
        ("RTX 4090", {"gpus_per_node": 4}, (4, 1, 1.0)),
        ("H100 PCIe", {}, (8, 2, 1.0)),  # bridges of two
        ("H100", {"interconnect": "InfiniBand"}, (8, 8, 1.0)),
        ("A100-80GB", {"interconnect": "InfiniBand"}, (8, 8, 0.25)),
        ("A100-80GB", {"interconnect": "RoCE"}, (8, 8, 1.0)),
    ],
)
def test_nodes_as_they_are_built(gpu: str, more: dict[str, Any], expected: tuple[int, int, float]) -> None:
    cluster = known(written(LLAMA, gpu, 16, **more))[1].cluster
    usual = gpu_of(gpu)
    assert usual is not None
    share = cluster.nic_bytes_per_s / usual.nic_bytes_per_s
    assert (cluster.gpus_per_node, cluster.gpu.link_domain, share) == expected


def test_times_of_operations_are_in_milliseconds() -> None:
    times = read_case({"parallel": {"op_times_ms": {"T_F": 2, "T_B": "3", "T_W": 4.5, "T_comm": 0.5}}}).op_times
    assert times is not None
    assert (times.forward_s, times.backward_input_s, times.backward_weight_s) == (0.002, 0.003, 0.0045)
    assert times.transfer_s == 0.0005
    bare = read_case({"parallel": {"op_times_ms": {"T_F": 2}}}).op_times
    assert bare is not None
    assert (bare.backward_input_s, bare.backward_weight_s, bare.transfer_s) == (0, 0, 0)
    assert read_case({"parallel": {"op_times_ms": {"T_B": 2}}}).op_times is None
