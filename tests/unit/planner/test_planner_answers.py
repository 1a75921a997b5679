"""Questions that have no answer as they are: what is tried then, and what is said of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.refusals import refused
from shardwise.cli import main as cli
from shardwise.models.shape import ModelSource
from shardwise.planner.hardware import parse_cluster
from shardwise.planner.job import BASE, changed
from shardwise.planner.plan import find, plan
from shardwise.planner.request import Question, read_model
from shardwise.planner.results import num_extras
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


def test_the_loss_in_chunks_is_taken_where_logits_fill_a_device_and_it_is_faster() -> None:
    """Of 24 GiB, 151,936 logits of 16,384 tokens take 9."""
    shape = replace(read_model("1b").shape, vocab_size=151_936, name="wide")
    settings = ["mesh.cp=1", "mesh.tp=1", "mesh.pp=1", "batch.micro_size=1"]
    found, whole = (
        plan(shape, "rtx-3090:2", seq_len=16_384, global_batch=4, settings=[*settings, *given])
        for given in ((), ("context.chunk_tokens=none",))
    )
    assert found.best.price.time.step_s < whole.best.price.time.step_s
    assert any("context.chunk_tokens=1024" in note for note in found.asked.notes)
    assert whole.asked.notes == ()


def test_pins_that_go_with_no_chunks_are_answered_without() -> None:
    shape = replace(read_model("1b").shape, vocab_size=151_936, num_layers=2, name="wide")
    settings = ["mesh.cp=1", "mesh.tp=1", "mesh.pp=2", "batch.micro_size=4", "pipeline.schedule=zb-h1"]
    found = plan(shape, "h100:2", seq_len=2048, global_batch=16, settings=settings)
    assert found.best.config().context.chunk_tokens is None


def test_of_answers_that_take_as_long_the_one_without_chunks_is_simpler() -> None:
    assert num_extras(changed(BASE, {"context.chunk_tokens": 1024})) == num_extras(BASE) + 1


LLAMA = read_model("llama-3-8b")


@pytest.mark.parametrize(
    ("source", "seq_len", "settings", "easier"),
    [
        (LLAMA, 8192, ("context.chunk_tokens=8192",), set()),  # what the user has said of chunks stays
        (LLAMA, 8192, ("compile.enabled=true",), set()),  # the engine refuses chunks with it
        (LLAMA, 1_048_576, (), {1_048_576}),
        (replace(LLAMA, seq_len=1_048_576), None, (), {None}),
        (ModelSource(shape=LLAMA.shape), 2048, (), {2048}),  # no longest is known
    ],
)
def test_what_is_given_is_not_changed(source, seq_len, settings, easier) -> None:
    question = Question(source, parse_cluster("h100:8"), seq_len, 8, settings)
    assert {each.seq_len for each in question.easier(question.ask())} == easier


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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_no_config_can_have_is_said_before_the_search(folder, capsys, monkeypatch) -> None:
    asked = ["plan", "--model", "25m", "--lora", "--cluster", "h100:2", "--seq", "64", "--global-batch", "4"]
    asked += ["--simulate", "0"]
    assert cli.main(asked) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "a shape without any" in said
    assert "--write plan.toml" not in said, "it would be refused"
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
