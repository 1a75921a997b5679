"""Questions that have no answer as they are: what is tried then, and what is said of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.refusals import refused
from shardwise.cli import main as cli
from shardwise.models.presets import preset
from shardwise.planner.explain import why_chosen
from shardwise.planner.hardware import parse_cluster
from shardwise.planner.job import ModelShape, ModelSource, PlanJob, changed
from shardwise.planner.plan import find, plan
from shardwise.planner.pricer import Pricer
from shardwise.planner.request import Question, read_model
from shardwise.planner.results import missing_memory
from shardwise.planner.search import search

GIB = 2**30


def cluster_of(memory_gib: float, host_gib: float = 1000.0):
    cluster = parse_cluster("rtx-4090:1")
    host = replace(cluster.host, memory_bytes=host_gib * GIB)
    return replace(cluster, gpu=replace(cluster.gpu, memory_bytes=memory_gib * GIB), host=host)


def test_the_loss_in_chunks_is_tried_before_nothing_fits() -> None:
    """128,256 logits of 32,768 tokens take 16 GiB."""
    found = plan("llama-3-8b", cluster_of(22.0), seq_len=32_768, global_batch=2, settings=["tiers.params=host"])
    assert found.best.config().context.chunk_tokens == 1024
    assert any("context.chunk_tokens=1024" in note for note in found.asked.notes)


def test_what_the_user_has_said_of_chunks_stays() -> None:
    settings = ("tiers.params=host", "context.chunk_tokens=8192")
    question = Question(read_model("llama-3-8b"), cluster_of(8.0), 8192, 2, settings)
    assert list(question.easier(question.ask())) == []


def test_where_the_longest_sequence_fits_nowhere_the_usual_one_is_answered() -> None:
    model = replace(read_model("llama-3-8b"), longest=1_048_576)
    lengths = []

    def look(asked):
        lengths.append((asked.job.seq_len, asked.job.base.context.chunk_tokens))
        return search(asked.job, asked.space)

    question = Question(model, parse_cluster("h100:1"), None, 8, ())
    asked, result = find(question, look)
    assert lengths == [(1_048_576, None), (1_048_576, 1024), (4096, None)]
    assert result.winner is not None
    assert result.job.seq_len == asked.job.seq_len == 4096
    assert any("1,048,576" in note and "4,096" in note for note in asked.notes)


def test_a_length_that_is_given_is_not_changed() -> None:
    model = read_model("llama-3-8b")
    given = Question(model, parse_cluster("h100:8"), 1_048_576, 8, ())
    assert {each.seq_len for each in given.easier(given.ask())} == {1_048_576}
    in_file = Question(replace(model, seq_len=1_048_576), parse_cluster("h100:8"), None, 8, ())
    assert {each.seq_len for each in in_file.easier(in_file.ask())} == {None}


@pytest.mark.parametrize("cluster", ["h100:64", "rtx-4090:2", "a100-80:8"])
def test_each_part_that_was_chosen_has_a_clause_that_holds(cluster: str) -> None:
    job = PlanJob(
        shape=ModelShape.of_decoder(preset("llama-7b")), seq_len=4096, global_batch=128, cluster=parse_cluster(cluster)
    )
    pricer = Pricer(job)
    winner = search(job, pricer=pricer).winner
    assert winner is not None
    clauses = list(why_chosen(winner, pricer, 0.06))
    config = winner.config
    for part, is_there in (
        (f"ZeRO-{config.zero.stage}", config.zero.stage > 0 and config.tiers.params == "device"),
        (f"PP {config.mesh.pp}", config.mesh.pp > 1),
        (f"TP {config.mesh.tp}", config.mesh.tp > 1),
        ("optimizer on host", config.tiers.optimizer == "host"),
    ):
        assert any(clause.startswith(f"{part}, ") for clause in clauses) == is_there, part
    if config.zero.stage == 3 and config.tiers.params == "device":
        lower = changed(config, {"zero.stage": 2})
        lacks = missing_memory(pricer.memory.estimate(lower), job.cluster, 0.06) is not None
        (clause,) = (each for each in clauses if each.startswith("ZeRO-3"))
        assert ("lacks" in clause) == lacks


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_no_config_can_have_is_said_before_the_search(folder, capsys, monkeypatch) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    values = {
        "model_type": "qwen3_moe",
        "intermediate_size": 256,
        "vocab_size": 512,
        "head_dim": 64,
        **sizes,
        **experts,
    }
    (folder / "config.json").write_text(json.dumps(values))
    asked = ["plan", "--model", "config.json", "--cluster", "h100:2", "--seq", "64", "--global-batch", "4"]
    assert cli.main(asked) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "experts" in said
    assert "--write plan.toml" not in said, "it would be refused"
    monkeypatch.setattr("shardwise.planner.search.search", lambda *_, **__: pytest.fail("a search"))
    assert cli.main([*asked, "--write", "plan.toml"]) == 2
    assert "[no-config-for-model]" in capsys.readouterr().err


def test_adapters_of_a_shape_without_weights_are_planned_and_not_written(folder, capsys, monkeypatch) -> None:
    asked = ["plan", "25m", "h100:1", "--lora", "--simulate", "0"]
    assert cli.main(asked) == 0
    assert "a shape without any; plan only" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr("shardwise.planner.search.search", lambda *_, **__: pytest.fail("a search"))
    assert cli.main([*asked, "--write", "plan.toml"]) == 2
    assert "[no-config-for-model]" in capsys.readouterr().err


def test_a_config_to_compare_names_the_model(folder, capsys) -> None:
    (folder / "two.toml").write_text(
        '[model]\npreset = "25m"\n[data]\nseq_len = 512\n[batch]\nglobal_size = 16\nmicro_size = 4\n[zero]\nstage = 3\n'
    )
    assert cli.main(["plan", "--compare", "two.toml", "--cluster", "h100:4", "--json", "-"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["job"]["model"]["name"] == "25m"
    assert (answer["job"]["seq_len"], answer["job"]["global_batch"]) == (512, 16)
    assert answer["yours"]["config"]["zero"]["stage"] == 3


def test_a_config_without_a_model_asks_for_one(folder) -> None:
    (folder / "ds.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 2}}')
    with refused("model-not-named", "ds.json"):
        read_model("ds.json")


def test_mfu_is_said_in_both_conventions(capsys) -> None:
    assert cli.main(["plan", "llama-7b", "h100:8", "--simulate", "0", "--json", "-"]) == 0
    best = json.loads(capsys.readouterr().out)["best"][0]
    assert cli.main(["plan", "llama-7b", "h100:8", "--simulate", "0"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"MFU {100 * best['mfu']:.1f} % of bf16 with all keys of attention" in said
    shape = ModelShape.of_decoder(preset("llama-7b"))
    halved = shape.flops_per_token(4096, is_causal_halved=True) / shape.flops_per_token(4096)
    assert f"{100 * best['mfu'] * halved:.1f} % with the causal half" in said


def test_a_source_without_a_length_is_no_longer_than_asked() -> None:
    source = ModelSource(shape=ModelShape.of_decoder(preset("llama-7b")))
    question = Question(source, parse_cluster("h100:8"), 2048, 8, ())
    assert [each.seq_len for each in question.easier(question.ask())] == [2048]
