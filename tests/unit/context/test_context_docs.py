"""docs/context.md: its configs are configs, and its table is what the library computes."""

from __future__ import annotations

import re
import tomllib

import pytest

from harness.context import balance_table
from harness.paths import DOCS
from shardwise.attention.block_layout import BlockLayout
from shardwise.attention.dense import dense_layout
from shardwise.attention.from_config import structure_of
from shardwise.config.resolve import AttentionConfig, Config
from shardwise.context.load_balance import choose_split

TEXT = (DOCS / "context.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```toml\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.partition("<!-- balance table -->")[2].partition("\n\n")[0].strip().splitlines()[2:]
]
NUM_TOKENS = 16_384
NUM_RANKS = 8
# By a row's name.
LAYOUTS = {
    "dense, causal": (AttentionConfig(), True),
    "dense, both ways": (AttentionConfig(), False),
    "Fixed, causal": (AttentionConfig(kind="fixed"), True),
    "sliding window, causal": (AttentionConfig(kind="sliding-window"), True),
    "BSLongformer, causal": (AttentionConfig(kind="bslongformer"), True),
    "BSLongformer, both ways": (AttentionConfig(kind="bslongformer"), False),
    "BigBird, causal": (AttentionConfig(kind="bigbird"), True),
    "BigBird, both ways": (AttentionConfig(kind="bigbird"), False),
}


def layout_of(name: str) -> BlockLayout:
    section, causal = LAYOUTS[name]
    structure = structure_of(section, 1, causal=causal)
    return dense_layout(NUM_TOKENS, causal=causal) if structure is None else structure.layout(NUM_TOKENS)


def row_of(name: str) -> list[str]:
    """Work and traffic of each token layout, and what auto takes."""
    layout = layout_of(name)
    cells = [f"{each.work:.2f} / {100 * each.traffic:.3g} %" for each in balance_table(layout, NUM_RANKS)]
    return [name, *cells, choose_split("auto", layout, NUM_RANKS).kind]


def test_the_page_has_configs_and_all_rows() -> None:
    assert len(BLOCKS) == 2
    assert [row[0] for row in ROWS] == list(LAYOUTS)


@pytest.mark.parametrize("block", BLOCKS)
def test_configs_are_configs(block: str) -> None:
    assert Config.from_dict(tomllib.loads(block)) != Config()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_table_is_what_the_library_computes(row: list[str]) -> None:
    assert row == row_of(row[0])
