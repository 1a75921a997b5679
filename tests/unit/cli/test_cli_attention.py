"""`shardwise attention show`: a config's block layout, drawn and counted."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from shardwise.attention.block_layout import BlockLayout
from shardwise.cli import main as cli
from shardwise.cli.attention import figures, panels
from shardwise.report.layout_drawing import LayoutPanel, cells_across, svg, terminal

FIXED = ["attention.kind=fixed", "attention.block=64", "attention.num_local_blocks=2"]


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)


def shown(capsys, *arguments):
    assert cli.main(["attention", "show", *arguments]) == 0
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_the_layout_is_drawn_with_its_figures(capsys):
    Path("my.toml").write_text('[attention]\nkind = "bigbird"\n[data]\nseq_len = 64\n')
    assert shown(capsys, "my.toml", *FIXED, "--seq-len", "384", "--heads", "8") == [
        "fixed, causal: 384 tokens, 8 heads",
        "██",
        "████",
        "··████",
        "··██████",
        "··██··████",
        "··██··██████",
        "",
        "blocks       15 of 36 a head, of 64 tokens",
        "visible      33.5 % of all pairs, 66.8 % of the causal half",
        "tiles of 64  41.7 % computed: at most 1.4 times as fast as dense",
        "tiles of 128 55.6 % computed: at most 1.2 times as fast as dense",
        "longest row  1.7 times the mean row of blocks",
        "hint         little is saved at 384 tokens; --seq-len shows other lengths",
    ]


def test_length_and_heads_are_those_of_the_config_when_left_out(capsys):
    lines = shown(capsys, *FIXED, "data.seq_len=100", "model.num_heads=2", "model.num_kv_heads=1")
    assert lines[:3] == ["fixed, causal: 100 tokens, 2 heads", "██", "████"]


def test_more_blocks_than_memory_holds_are_refused_before_they_are_made(capsys):
    assert cli.main(["attention", "show", *FIXED, "--seq-len", "100000000"]) == 2
    assert capsys.readouterr().err == (
        "shardwise: 100,000,000 tokens in blocks of 64 are too many to draw; draw 2,097,152 or fewer, or take a larger "
        "attention.block\n"
    )


def test_both_ways_above_the_diagonal_too(capsys):
    lines = shown(capsys, "attention.kind=sliding-window", "--seq-len", "256", "--bidirectional")
    assert lines[:5] == [
        "sliding-window, both ways: 256 tokens, 4 heads",
        "████····",
        "██████··",
        "··██████",
        "····████",
    ]
    assert "of the causal half" not in "\n".join(lines)


def test_heads_that_differ_are_drawn_beside_each_other(capsys):
    heads = ["attention.different_layout_per_head=true", "attention.num_different_global_patterns=2"]
    lines = shown(capsys, *FIXED, *heads, "--seq-len", "256", "--heads", "3")
    assert lines[1:6] == [
        "heads 0, 2   head 1",
        "██           ██",
        "████         ████",
        "··████       ██··██",
        "··██████     ██··████",
    ]


def test_a_long_sequence_is_drawn_in_cells_of_several_blocks(capsys):
    lines = shown(capsys, "attention.kind=sliding-window", "attention.block=16", "--seq-len", "16384")
    assert lines[1] == "░░"
    assert lines[39] == 37 * "··" + "░░░░"
    assert all(len(line) <= 80 for line in lines[1:40])
    assert "cells        of 26 x 26 blocks, from ░ to █ as more of them are visible" in lines
    assert any("attention.block=64 wastes less (divide the counts of blocks by 4" in line for line in lines)


DENSE = ["model.preset=tiny", "precision.param=bf16", "batch.micro_size=1", "--seq-len", "4096"]


def test_what_ranks_share_and_send_is_told_of_dense_attention_too(capsys):
    """2 KV heads of 80, keys and values of 2,048 tokens in bf16: 1.25 MiB, of which a rank sends 3/4 of the time."""
    assert shown(capsys, *DENSE, "mesh.cp=2") == [
        "dense, causal: 4,096 tokens, 4 heads",
        "ranks        cp=2, 2,048 tokens of a sequence each",
        "token layout   most work    keys that travel",
        "  contiguous   1.50 x mean  50 % of other ranks'",
        "  zigzag       1.00 x mean  75 % of other ranks', taken by auto",
        "  balanced     1.00 x mean  75 % of other ranks'",
        "sent         by a rank, a layer and micro-batch",
        "  ring         forward 960 KiB, backward 2.81 MiB (all-gather the same)",
        "  ulysses      forward 1.88 MiB, backward 1.88 MiB",
    ]


def test_ranks_that_are_given_stand_behind_the_drawing(capsys):
    lines = shown(capsys, *FIXED, "--seq-len", "512", "--cp", "4", "context.heads_over=2", "batch.micro_size=2")
    assert lines[1] == "██"
    ranks = lines.index("ranks        cp=4, 128 tokens of a sequence each, 2 teams of 2 ranks")
    assert lines[ranks + 2].startswith("  contiguous ")
    assert lines[ranks + 2].endswith(" % of other teams'") or lines[ranks + 2].endswith("taken by auto")
    names = [line.split("  ")[1] for line in lines[ranks + 6 :]]
    assert names == ["2 x ring", "ring", "ulysses"]


def test_a_chosen_token_layout_is_marked_and_heads_that_cannot_be_exchanged_are_told(capsys):
    lines = shown(capsys, *DENSE, "--cp", "8", "context.token_layout=contiguous")
    assert lines[3].endswith("% of other ranks', taken by the config")
    assert lines[-1] == (
        "  ulysses      mesh.cp=8 does not divide 4 query heads; nearest legal: 4; or set context.transport=ring, "
        "which exchanges no heads"
    )


def test_no_token_layout_is_taken_where_all_ranks_have_all_tokens(capsys):
    lines = shown(capsys, *DENSE, "--cp", "2", "context.transport=ulysses")
    assert lines[2] == "token layout   most work    keys that travel in a ring; even by ulysses, with any"
    assert "taken by" not in "\n".join(lines)


def test_bytes_are_those_of_a_tensor_parallel_rank_and_of_its_samples(capsys):
    one = shown(capsys, *DENSE, "--cp", "2")[7].split()
    half = shown(capsys, *DENSE, "--cp", "2", "mesh.tp=2")[7].split()
    assert (one[2:4], half[2:4]) == (["960", "KiB,"], ["480", "KiB,"])
    assert shown(capsys, *DENSE[:2], *DENSE[3:], "--cp", "2", "batch.micro_size=2")[7].split()[2:4] == ["1.88", "MiB,"]


def test_a_picture_of_shared_attention_has_the_table(capsys):
    shown(capsys, *FIXED, "--seq-len", "512", "--cp", "4", "--svg", "layout.svg")
    assert "taken by auto" in Path("layout.svg").read_text()


def test_a_picture_is_written_instead(capsys):
    assert shown(capsys, *FIXED, "--seq-len", "256", "--svg", "layout.svg") == ["wrote layout.svg"]
    root = ElementTree.parse("layout.svg").getroot()
    name = "{http://www.w3.org/2000/svg}"
    seen = [each for each in root.iter(f"{name}rect") if each.get("class") == "seen"]
    area = sum(float(each.get("width")) * float(each.get("height")) for each in seen)
    assert area == pytest.approx(480**2 * 8 / 16)
    assert any(text.text == "fixed, causal: 256 tokens, 4 heads" for text in root.iter(f"{name}text"))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "attention.kind=dense has no blocks to draw; set attention.kind=fixed, variable, bigbird, bslong"),
        (["--seq-len", "256", "--cp", "3"], 2, "256 tokens into 3 equal parts; nearest legal: 255, 258"),
        (["--cp", "0"], 2, "mesh.cp=0 must be an integer >= 1"),
        (["--cp", "4", "context.heads_over=3"], 2, "context.heads_over=3 does not divide mesh.cp=4; nearest legal: 2"),
        (["--cp", "2", "--seq-len", "0"], 2, "seq_len=0 has no token; give 1 or more"),
        ([*FIXED, "--seq-len", "0"], 2, "seq_len=0 has no token; give 1 or more"),
        ([*FIXED, "attention.num_global_blocks=3"], 2, "does not divide num_local_blocks=2; nearest legal: 1, 2"),
        ([*FIXED, "model.preset=huge"], 2, "huge is not a preset"),
        ([*FIXED, "--svg", "missing/layout.svg"], 1, "cannot write missing/layout.svg: No such file or directory"),
    ],
)
def test_errors_are_one_line(capsys, arguments, code, message):
    assert cli.main(["attention", "show", *arguments]) == code
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert message in captured.err
    assert not captured.out


def test_rows_without_keys_and_long_rows_are_told():
    blocks = torch.eye(16)
    blocks[0] = 1
    blocks[3] = 0
    lines = figures(BlockLayout.from_blocks(blocks, 64))
    assert "empty rows   1 of blocks see no key, and give 0" in lines
    assert "longest row  8.5 times the mean row of blocks; kernels split it" in lines
    assert figures(BlockLayout.from_blocks(torch.zeros(2, 2), 64)) == [
        "blocks       0 of 4 a head, of 64 tokens",
        "visible      0 % of all pairs",
        "empty rows   2 of blocks see no key, and give 0",
    ]


def test_more_layouts_than_there_is_room_for_are_counted():
    blocks = torch.stack([torch.eye(8).roll(shift, 0) for shift in range(6)])
    drawn = panels(BlockLayout.from_blocks(blocks, 16), max_cells=4)
    assert [panel.title for panel in drawn] == ["head 0", "head 1", "head 2", "head 3 and 2 more layouts, not drawn"]
    assert drawn[0].shares[0] == [0.5, 0, 0, 0]


def test_any_share_shows_and_only_whole_ones_are_whole():
    panel = LayoutPanel("", ((0.0, 0.001, 0.4, 0.7, 0.999, 1.0),) * 6)
    assert terminal([panel], 80, is_causal=False).plain.splitlines()[0] == "··░░▒▒▓▓▓▓██"
    assert svg([panel], []).count('fill-opacity="0.251"') == 6


def test_cells_fit_the_width():
    for width in (40, 80, 200):
        for num_panels in (1, 2, 4):
            assert 8 <= cells_across(width, num_panels) <= max(8, min(40, width // 2))
