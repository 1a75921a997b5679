"""`shardwise plan --dry-run`: what the ranks of a job would hold and send, one of every pipeline stage."""

from pathlib import Path

import pytest

from shardwise.cli import main as cli
from shardwise.config.resolve import Config
from shardwise.layout.mesh_shape import MeshShape
from shardwise.verify.dry_run import choose_ranks, dry_run, dry_run_size

SMALL = """
[model]
num_layers = 2
hidden_size = 32
num_heads = 4
num_kv_heads = 4
ffn_size = 48
vocab_size = 64
[data]
seq_len = 16
[precision]
param = "fp32"
[batch]
micro_size = 2
accumulation = 2
[mesh]
pp = 2
dp_shard = 2
[run]
device = "cpu"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    Path("my.toml").write_text(SMALL)


def printed(capsys, *arguments: str) -> list[str]:
    assert cli.main([*arguments]) == 0
    captured = capsys.readouterr()
    lines = [line.rstrip() for line in captured.out.splitlines()]
    assert max(map(len, lines)) <= 80
    return lines


def table(lines: list[str], title: str) -> list[list[str]]:
    """The words of a table's rows, the head among them."""
    start = next(index for index, line in enumerate(lines) if line.strip().startswith(title))
    return [line.split() for line in lines[start : lines.index("", start)]]


def test_one_rank_of_every_stage_is_shown(capsys):
    lines = printed(capsys, "plan", "--dry-run", "my.toml", "--ranks", "stages")
    assert [row[:3] for row in table(lines, "stage ")[1:3]] == [
        ["0", "0", "embed..blocks.0"],
        ["1", "1", "blocks.1..head"],
    ]
    run = dry_run(Config.from_toml("my.toml"), 4, "stages")
    assert [each.rank for each in run.ranks] == [0, 2]
    _, *ranks, largest = table(lines, "at rest, ")
    for row, figures in zip(ranks, run.ranks, strict=True):
        held = figures.layout.bytes_at_rest()
        sizes = [f"{num_bytes / 2**10:,.2f}" for num_bytes in (*held.values(), sum(held.values()))]
        assert (row[:2], row[-5:]) == (["rank", str(figures.rank)], ["device", *sizes])
    assert largest == ["largest", max(row[-1] for row in ranks)]
    peaks = [each.peak_bytes for each in run.ranks]
    _, *ranks, largest = table(lines, "peak, ")
    assert [row[-1] for row in ranks] == [f"{peak / 2**10:,.2f}" for peak in peaks]
    assert largest[-1] == f"{max(peaks) / 2**10:,.2f}"
    sent = {tuple(row[:2]): row[2:] for row in table(lines, "a step sends over")[1:]}
    assert sent["pp", "send"][0] == "2"  # of each micro-batch one message


def test_one_rank_is_shown_as_a_dry_run_of_train_shows_it(capsys):
    planned = printed(capsys, "plan", "--dry-run", "my.toml", "--ranks", "0")
    trained = printed(capsys, "train", "--dry-run", "my.toml")
    footers = [line for lines in (planned, trained) for line in lines if "nothing was started" in line]
    assert len(footers) == 2
    assert [line for line in planned if line not in footers] == [line for line in trained if line not in footers]
    assert not list(Path().glob("runs/*"))


def test_which_ranks_are_simulated():
    long = MeshShape(pp=16, dp_shard=2, tp=4)
    assert choose_ranks(long, "stages") == list(range(0, 128, 8))
    assert choose_ranks(long, [5, 3, 5]) == [5, 3]


def test_the_world_is_that_of_the_mesh_unless_it_is_given():
    config = Config().override(["mesh.pp=2", "mesh.dp_shard=8", "mesh.tp=4"])
    assert dry_run_size(config, None) == 64
    assert dry_run_size(config, 128) == 128
    assert dry_run_size(config.override(["run.num_procs=8"]), None) == 8


@pytest.mark.parametrize("value", ["nan", "NaN", "inf", "-inf", "1e999", "0", "-1", "1e19", "", "x"])
@pytest.mark.parametrize("flag", ["--tokens", "--margin", "--simulate"])
def test_numbers_that_are_none_are_refused_at_once(flag, value, capsys):
    if (flag, value) in (("--margin", "0"), ("--simulate", "0")):
        return
    assert cli.main(["plan", "--model", "llama-7b", "--cluster", "h100:8", flag, value]) == 2
    assert f"'{flag}'" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--seq", "--global-batch", "--top", "--world-size"])
@pytest.mark.parametrize("value", ["0", "-1", "1e3", "nan", "9" * 30, "9" * 5000])
def test_counts_that_are_none_are_refused_at_once(flag, value, capsys):
    assert cli.main(["plan", "--model", "llama-7b", "--cluster", "h100:8", flag, value]) == 2
    assert f"'{flag}'" in capsys.readouterr().err
