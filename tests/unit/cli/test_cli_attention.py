"""`shardwise attention show`: a config's block layout, drawn and counted."""

from xml.etree import ElementTree

import pytest
import torch

from shardwise.attention.block_layout import BlockLayout
from shardwise.cli import main as cli
from shardwise.cli.attention import figures, panels
from shardwise.report.layout_drawing import LayoutPanel, cells_across, terminal

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


DENSE = ["model.preset=tiny", "precision.param=bf16", "batch.micro_size=1", "--seq-len", "4096"]


def test_bytes_are_those_of_a_tensor_parallel_rank_and_of_its_samples(capsys):
    one = shown(capsys, *DENSE, "--cp", "2")[7].split()
    half = shown(capsys, *DENSE, "--cp", "2", "mesh.tp=2")[7].split()
    assert (one[2:4], half[2:4]) == (["960", "KiB,"], ["480", "KiB,"])
    assert shown(capsys, *DENSE[:2], *DENSE[3:], "--cp", "2", "batch.micro_size=2")[7].split()[2:4] == ["1.88", "MiB,"]


def test_a_picture_of_shared_attention_has_the_table(capsys):
    shown(capsys, *FIXED, "--seq-len", "512", "--cp", "4", "--svg", "layout.svg")
    assert "taken by auto" in "".join(ElementTree.parse("layout.svg").getroot().itertext()).replace("\xa0", " ")


def test_a_picture_is_written_instead(capsys):
    assert shown(capsys, *FIXED, "--seq-len", "256", "--svg", "layout.svg")
    text = "".join(ElementTree.parse("layout.svg").getroot().itertext()).replace("\xa0", " ")
    drawn = [line.rstrip() for line in shown(capsys, *FIXED, "--seq-len", "256") if "█" in line]
    assert len(drawn) == 4
    assert all(line in text for line in drawn), "the terminal's drawing"
    assert "fixed, causal: 256 tokens, 4 heads" in text


def test_rows_without_keys_and_long_rows_are_named():
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


def test_more_layouts_than_there_is_space_for_are_counted():
    blocks = torch.stack([torch.eye(8).roll(shift, 0) for shift in range(6)])
    drawn = panels(BlockLayout.from_blocks(blocks, 16), max_cells=4)
    assert [panel.title for panel in drawn] == ["head 0", "head 1", "head 2", "head 3 and 2 more layouts, not drawn"]
    assert drawn[0].shares[0] == [0.5, 0, 0, 0]


def test_any_share_shows_and_only_whole_ones_are_whole():
    panel = LayoutPanel("", ((0.0, 0.001, 0.4, 0.7, 0.999, 1.0),) * 6)
    assert terminal([panel], 80, is_causal=False).plain.splitlines()[0] == "··░░▒▒▓▓▓▓██"


def test_cells_fit_the_width():
    for width in (40, 80, 200):
        for num_panels in (1, 2, 4):
            assert 8 <= cells_across(width, num_panels) <= max(8, min(40, width // 2))
