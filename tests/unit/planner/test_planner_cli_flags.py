"""The flags of `shardwise plan`: numbers as people write them, which of them go together, and what starts a config."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from harness.refusals import refused
from shardwise.cli import main as cli
from shardwise.cli.plan import check_flags, parse_ranks, plan, start_words, with_words
from shardwise.planner.hardware import parse_cluster
from shardwise.planner.request import pins_of

QUESTIONS = {"": [], "--explain": ["--explain", "x"], "--fit": ["--fit"]}
QUESTIONS |= {"--dry-run": ["--dry-run"]}
FLAGS = {
    "--model": ["x"], "--cluster": ["x"], "--seq": ["1"], "--margin": ["0"], "--json": ["x"], "--global-batch": ["1"],
    "--compare": ["x"], "--write": ["x"], "--top": ["1"], "--more": [], "--world-size": ["1"], "--ranks": ["0"],
    "--html": ["x"], "--tokens": ["1e9"],
}  # fmt: skip
OF_A_DRY_RUN = {"--world-size", "--ranks"}
OF_SIZES = {"--model", "--cluster", "--seq", "--margin", "--json"}
HEEDED = {
    "": FLAGS.keys() - OF_A_DRY_RUN,
    "--explain": OF_SIZES | {"--global-batch", "--html"},
    "--fit": OF_SIZES,
    "--dry-run": OF_A_DRY_RUN,
}


def arguments_of(*words: str) -> SimpleNamespace:
    parent = click.Context(cli.cli, **cli.cli.context_settings)
    return SimpleNamespace(**plan.make_context("plan", list(words), parent=parent).params)


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_that_would_change_nothing_is_refused(question: str, flag: str) -> None:
    arguments = arguments_of(*QUESTIONS[question], flag, *FLAGS[flag])
    if flag in HEEDED[question]:
        check_flags(arguments)
        return
    with refused("flag-unheeded", flag, question or "a search"):
        check_flags(arguments)


def test_two_questions_are_refused() -> None:
    names = [name for name in QUESTIONS if name]
    for name in names:
        for other in names:
            if name != other:
                with refused("two-questions", name, other):
                    check_flags(arguments_of(*QUESTIONS[name], *QUESTIONS[other]))


def test_flags_that_people_guess_pin_what_keys_do() -> None:
    values = {"--tp": "8", "--pp": "2,4", "--cp": "1", "--dp": "4", "--zero": "3", "--micro-batch": "2"}
    words = [word for flag, value in values.items() for word in (flag, value)]
    keys = ("mesh.tp", "mesh.pp", "mesh.cp", "mesh.dp_shard", "zero.stage", "batch.micro_size")
    found = with_words(arguments_of(*words, "--recompute", "full", "optimizer.name=lion"))
    expected = {f"{key}={value}" for key, value in zip(keys, values.values(), strict=True)}
    assert set(found) == {*expected, "recompute.mode=full", "optimizer.name=lion"}
    assert set(pins_of(sorted(expected))) == set(keys)


@pytest.mark.parametrize(("flag", "value"), [("--lora-targets", "q_proj"), ("--lora-base", "nf4")])
def test_a_flag_of_adapters_alone_asks_for_adapters(flag: str, value: str) -> None:
    assert "lora.rank=16" in with_words(arguments_of("llama-7b", "h100:8", flag, value))


@pytest.mark.parametrize(
    ("cluster", "code"), [("h100", "gpu-count-missing"), ("h100:-8", "gpu-count-missing"), ("M3 Max:1", "apple-device")]
)
def test_a_cluster_without_a_count_is_refused_as_a_cluster(
    cluster: str, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "llama-7b", cluster]) == 2
    assert f"[{code}]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "tool"),
    [("fsdp.yaml", "distributed_type: FSDP\n", "Accelerate"), ("job.toml", "[parallelism]\n", "torchtitan")],
)
@pytest.mark.parametrize("flag", ["--compare", "--explain", "--model"])
def test_a_config_of_another_tool_is_refused_by_its_name(
    name: str, text: str, tool: str, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert cli.main(["plan", flag, str(tmp_path / name), "--cluster", "h100:8"]) == 2
    said = capsys.readouterr().err
    assert "[foreign-config]" in said
    assert tool in said


def test_a_cluster_may_stand_beside_the_model() -> None:
    arguments = arguments_of("llama-70b", "h100:64x8", "zero.stage=3")
    assert with_words(arguments) == ["llama-70b", "zero.stage=3"]
    assert arguments.cluster == "h100:64x8"
    for words in (("h100:8", "a100-80:8"), ("h100:8", "--cluster", "a100-80:8")):
        with refused("two-clusters", "h100:8", "a100-80:8"):
            with_words(arguments_of(*words))


def test_a_config_is_started_on_each_node() -> None:
    path = Path("plan.toml")
    two = parse_cluster("h100:2x8")
    words = start_words(path, two, is_here=False)
    for part in ("--nnodes 2", "--nproc-per-node 8", "--rdzv-endpoint NODE0:", "-m shardwise train plan.toml"):
        assert part in words
    one = replace(two, num_gpus=8)
    line = "torchrun --standalone --nproc-per-node 8 -m shardwise train plan.toml"
    assert start_words(path, one, is_here=False) == f"start it by {line}"
    assert start_words(path, one, is_here=True) == "start it by shardwise train plan.toml"
    for name in ("my plan $HOME.toml", "-x.toml", "a'b\nc.toml"):
        for cluster, is_here in ((two, False), (one, False), (one, True)):
            line = start_words(Path(name), cluster, is_here=is_here).rpartition(" by ")[2].partition("; ")[0]
            assert shlex.split(line)[-1] in (name, f"./{name}")
            assert not shlex.split(line)[-1].startswith("-")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


ASKED = ["plan", "--model", "25m", "--cluster", "h100:4", "--global-batch", "16"]


def test_places_that_cannot_be_written_are_refused_before_the_search(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for content in (b"", b"\xff\xfe", b"# Written by hand"):
        (folder / "mine.toml").write_bytes(content)
        assert cli.main([*ASKED, "--write", "mine.toml"]) == 2
        assert "--write mine.toml is there already, and not from a plan" in capsys.readouterr().err
        assert (folder / "mine.toml").read_bytes() == content
    asked = []
    monkeypatch.setattr("os.access", lambda path, mode: asked.append(path))
    for flag, name in (("--write", "new.toml"), ("--json", "mine.toml"), ("--html", ".")):
        assert cli.main([*ASKED, flag, name]) == 2
        assert "[output-not-writable]" in capsys.readouterr().err
    assert asked == [Path("."), Path("mine.toml")]  # the folder of what is not there yet


def test_a_config_that_fits_with_less_free_is_explained_with_fixes_and_no_error(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "ds.json").write_text(json.dumps({"train_batch_size": 16, "zero_optimization": {"stage": 1}}))
    asked = ["plan", "--explain", "ds.json", "--model", "1b", "--cluster", "h100:4", "--seq", "512", "--json", "-"]
    assert cli.main([*asked, "--margin", "0.9"]) == 0
    crowded = json.loads(capsys.readouterr().out)
    assert cli.main(asked) == 0
    roomy = json.loads(capsys.readouterr().out)
    assert crowded["step_s"] == roomy["step_s"]
    assert bool(crowded["cures"]) is True
    assert roomy["cures"] == []


def test_ctrl_c_ends_the_command_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardwise.cli.plan._answer", interrupted)
    assert cli.main(ASKED) == 130
    assert capsys.readouterr().err == "shardwise: stopped by Ctrl-C\n"


@pytest.mark.parametrize("text", ["", "0,", "0,-1", "\u00b2", "first"])
def test_ranks_are_numbers_or_a_word(text: str) -> None:
    with refused("ranks-to-simulate", f"--ranks {text}"):
        parse_ranks(text)
