"""`shardwise attention show`: what it counts; what it prints is in the snapshot `attention`."""

import pytest

from shardwise.attention.from_config import structure_of
from shardwise.cli import main as cli
from shardwise.config.resolve import Config

WINDOWS = ["attention.kind=sliding-window", "attention.block=16"]


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert cli.main(["attention", "show", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("flag", [[], ["--bidirectional"]])
def test_the_drawing_has_the_blocks_of_the_layout(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    config = Config().override(WINDOWS)
    structure = structure_of(config.attention, 4, causal=not flag)
    assert structure is not None
    blocks = structure.layout(512).patterns[0].blocks[0]
    _, *drawn = shown(capsys, *WINDOWS, "--seq-len", "512", *flag)[: 1 + len(blocks)]
    for number, (line, row) in enumerate(zip(drawn, blocks.tolist(), strict=True), 1):
        cells = "".join("██" if each else "··" for each in (row if flag else row[:number]))
        assert line == cells


def test_a_cell_of_many_blocks_shows_any_share_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, *WINDOWS, "--seq-len", "8192")
    assert "a cell is 13 x 13 blocks" in lines[41]
    assert all(line[-1] in "░▒▓" for line in lines[1:41]), "the diagonal is seen, and not whole"


def test_layouts_that_some_heads_have_are_shaded(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ["attention.different_layout_per_head=true", "attention.num_different_global_patterns=2"]
    one, two = (shown(capsys, "attention.kind=fixed", *keys, "--seq-len", "1024") for keys in ([], kinds))
    assert not set("░▒▓") & set("".join(one[:17]))
    assert set("░▒▓") & set("".join(two[:17]))
