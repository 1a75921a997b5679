"""Small copies train as one process does; a fault that is put into the library is found and named."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from harness.pool import WorkerPool
from shardwise.comm.backends import GlooComm
from shardwise.config.resolve import Config
from shardwise.pipeline.boundary import RemoteEnd
from shardwise.runtime.float64 import float64_throughout
from shardwise.verify.compare import PARITY, TrainingTrace, first_difference
from shardwise.verify.job import VerifyJob, make_job, small_layout
from shardwise.verify.run import VerifyOutcome, judge, train_layout, train_reference

QWEN2 = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "attention_dropout": 0.1,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "architectures": ["Qwen2ForCausalLM"],
    "tie_word_embeddings": False,
}


def scaled_gradients(own):
    """The second stage sends wrong gradients for the second micro-batch."""

    def send(end, micro_batch, tree):
        if micro_batch == 1 and not end._is_source:
            tree = [None if each is None else each * 1.01 for each in tree]
        return own(end, micro_batch, tree)

    return send


def dropped_reduction(own):
    """Of one block, rank 1's gradients get lost."""

    def reduce_scatter(comm, source, out, *, accumulate, name):
        if "blocks.1" in name and comm.rank == 1:
            source.zero_()
        return own(comm, source, out, accumulate=accumulate, name=name)

    return reduce_scatter


def train(rank: int, world_size: int, text: str, folder: Path, fault: str) -> TrainingTrace:
    patches = {
        "": nullcontext(),
        "scaled": mock.patch.object(RemoteEnd, "send", scaled_gradients(RemoteEnd.send)),
        "dropped": mock.patch.object(GlooComm, "reduce_scatter", dropped_reduction(GlooComm.reduce_scatter)),
    }
    with patches[fault]:
        return train_layout(VerifyJob.from_json(text), rank, folder)


def run(
    ranks: WorkerPool, job: VerifyJob, folder: Path, fault: str = "", expected: TrainingTrace | None = None
) -> VerifyOutcome:
    traces = ranks(job.world_size).run(train, job.to_json(), folder, fault)
    assert all(not trace.gradients for trace in traces[1:])
    # As the ranks hand it over: through a file.
    traces[0].save(folder / "trace.safetensors")
    trace = TrainingTrace.load(folder / "trace.safetensors")
    return judge(small_layout(job), trace, expected or train_reference(job), 0.0)


@pytest.mark.full
def test_a_config_of_512_gpus(ranks, tmp_path):
    config = Config.from_dict(
        {
            "model": {"preset": "llama-3-70b"},
            "mesh": {"pp": 8, "dp_shard": 8, "tp": 8},
            "batch": {"micro_size": 1, "accumulation": 32},
            "tensor": {"sequence_parallel": True},
            "pipeline": {"schedule": "interleaved", "virtual_stages": 5},
            "precision": {"param": "bf16"},
            "recompute": {"mode": "full"},
            "zero": {"stage": 3},
            "scheduler": {"warmup_steps": 2000},
        }
    )
    job = make_job(config, 512, most_processes=8, num_steps=1)
    assert job.folded == (
        "pp 8 -> 2",
        "dp_shard 8 -> 2",
        "tp 8 -> 2",
        "virtual stages 5 -> 2",
        "micro-batches 32 -> 6",
    )
    outcome = run(ranks, job, tmp_path)
    assert (outcome.exit_code, outcome.difference) == (0, None)
    assert 0 < outcome.error < PARITY / 1000


def test_a_hugging_face_model_with_dropout_and_states_on_nvme(ranks, tmp_path):
    pytest.importorskip("transformers")
    config = Config.from_dict(
        {
            "mesh": {"pp": 2, "tp": 4},
            "batch": {"micro_size": 4, "accumulation": 3},
            "pipeline": {"schedule": "zb-h1"},
            "tiers": {"optimizer": "nvme", "nvme_path": "/nowhere"},
            "scheduler": {"name": "linear"},
        }
    )
    job = make_job(config, 8, huggingface=QWEN2, num_steps=2)
    assert job.world_size == 4
    assert job.model.values["attention_dropout"] == 0.1
    expected = train_reference(job)
    assert expected.losses != train_reference(_without_dropout(job)).losses
    assert run(ranks, job, tmp_path, expected=expected).difference is None


GPT2 = {
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "vocab_size": 50257,
    "n_positions": 1024,
    "architectures": ["GPT2LMHeadModel"],
}


def test_muon_of_fused_weights(ranks, tmp_path):
    pytest.importorskip("transformers")
    config = Config.from_dict({"mesh": {"tp": 2, "dp_shard": 2}, "optimizer": {"name": "muon"}, "zero": {"stage": 3}})
    job = make_job(config, 4, huggingface=GPT2, num_steps=2)
    assert any(place.fused for group in small_layout(job).groups for place in group.params)
    assert run(ranks, job, tmp_path).difference is None


def test_ranks_that_share_kv_heads(ranks, tmp_path):
    config = Config.from_dict(
        {
            "model": {"preset": "tiny", "num_heads": 8, "num_kv_heads": 2},
            "mesh": {"tp": 8},
            "optimizer": {"name": "sgd"},
        }
    )
    job = make_job(config, 8)
    assert job.world_size == 4
    assert run(ranks, job, tmp_path).difference is None


def test_block_sparse_attention_with_layouts_of_each_head(ranks, tmp_path):
    config = Config.from_dict(
        {
            "model": {"preset": "tiny", "num_heads": 8, "num_kv_heads": 4},
            "data": {"seq_len": 4096},
            "attention": {"kind": "bigbird", "different_layout_per_head": True},
            "mesh": {"tp": 2},
            "optimizer": {"name": "sgd"},
        }
    )
    job = make_job(config, 2)
    assert "attention.block 64 -> 2" in job.replaced
    assert job.model.values["attention"]["block"] == job.config.attention.block == 2
    assert run(ranks, job, tmp_path).difference is None


def test_a_wrong_gradient_between_stages_is_found(ranks, tmp_path):
    config = Config.from_dict({"mesh": {"pp": 2}, "batch": {"accumulation": 4}})
    job = make_job(config, 2, num_steps=1)
    outcome = run(ranks, job, tmp_path, "scaled")
    found = outcome.difference
    assert outcome.exit_code == 1
    assert (found.what, found.step, found.names[0]) == ("gradient", 1, "embed.weight")
    assert outcome.holders[0] == "stages 0-1, ranks 0-1"  # it is tied
    # What the second stage computes from its own gradients is right.
    layout = small_layout(job)
    assert {layout.pipeline.stages_of[name] for name in found.names} == {(0, 1), (0,)}
    assert outcome.holders[1] == "stage 0, rank 0"
    assert 1e-4 < found.error < 1


def test_a_lost_reduction_is_found(ranks, tmp_path):
    job = make_job(Config.from_dict({"zero": {"stage": 2}}), 64, num_steps=1)
    outcome = run(ranks, job, tmp_path, "dropped")
    assert outcome.exit_code == 1
    assert outcome.difference.what == "gradient"
    assert outcome.difference.names[0] == "blocks.1.attention_norm.weight"
    assert all(name.startswith("blocks.1.") for name in outcome.difference.names)
    assert outcome.holders[0] == "all ranks"


def test_the_first_difference_in_time():
    expected = TrainingTrace(
        [2.0, 1.0], [1.0, 1.0], {"up": torch.ones(2)}, [{"up": torch.ones(2)}, {"up": torch.ones(2)}]
    )
    assert first_difference(expected, expected) is None
    for step in (1, 2):
        losses = [2.0, 1.0]
        losses[step - 1] = float("nan")
        assert (
            first_difference(TrainingTrace(losses, [1.0, 1.0], expected.gradients, expected.parameters), expected).step
            == step
        )
    later = [expected.parameters[0], {"up": torch.tensor([1.0, 1.0 + 1e-6])}]
    found = first_difference(TrainingTrace([2.0, 1.0], [1.0, 1.0], expected.gradients, later), expected)
    assert (found.what, found.step, found.names) == ("parameter", 2, ("up",))
    assert first_difference(TrainingTrace([2.0], [1.0], expected.gradients, later), expected).what == "loss"
    assert first_difference(TrainingTrace([2.0, 1.0], [1.0, 1.0], {}, later), expected).what == "gradient"


def test_casts_keep_float64_for_as_long_as_is_asked():
    wide = torch.ones(2, dtype=torch.float64)
    with float64_throughout():
        assert {wide.to(torch.float32).dtype, wide.float().dtype, F.softmax(wide, 0, dtype=torch.float32).dtype} == {
            torch.float64
        }
        assert torch.ones(2).to(torch.bfloat16).dtype == torch.bfloat16
    assert wide.to(torch.float32).dtype == wide.float().dtype == torch.float32
    assert not {"to", "float"} & vars(torch.Tensor).keys()


def _without_dropout(job: VerifyJob) -> VerifyJob:
    text = job.to_json().replace('"attention_dropout": 0.1', '"attention_dropout": 0.0')
    return VerifyJob.from_json(text)
