"""docs/attention.md says what is so: its examples run, its drawing and its table are what the library gives."""

from __future__ import annotations

import re
import tomllib

import pytest
import torch

from harness.paths import DOCS
from shardwise import Config
from shardwise.attention import from_config as chosen
from shardwise.attention.structures import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    VariableSparsityConfig,
)

TEXT = (DOCS / "attention.md").read_text(encoding="utf-8")


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_examples_run_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    names: dict[str, object] = {"__name__": "docs.attention"}
    for number, example in enumerate(fenced("python")):
        exec(compile(example, f"docs/attention.md, example {number}", "exec"), names)
    said = capsys.readouterr().out
    assert re.match(r"\d+\.\d% of the pairs", said)
    assert 4 < float(said.split()[-1]) < 5.5, "a loss near ln 100"


def test_configs_are_legal() -> None:
    for section in fenced("toml"):
        config = Config.from_dict(tomllib.loads(section))
        assert chosen.structure_of(config.attention, num_heads=4) is not None


def test_the_drawing_is_the_librarys() -> None:
    (drawing,) = [text for text in fenced("text") if text.startswith("█")]
    assert drawing.rstrip() == str(FixedSparsityConfig(4, block=64, attention="unidirectional").layout(1024))


@pytest.mark.parametrize(
    ("name", "structure"),
    [
        ("Fixed", FixedSparsityConfig(1)),
        ("Fixed, windows of 16 with 4 global", FixedSparsityConfig(1, num_local_blocks=16, num_global_blocks=4)),
        ("BigBird", BigBirdSparsityConfig(1)),
        ("BSLongformer", BSLongformerSparsityConfig(1)),
        ("Variable", VariableSparsityConfig(1)),
        ("sliding window", LocalSlidingWindowSparsityConfig(1, attention="bidirectional")),
    ],
)
def test_the_table_of_densities_is_the_librarys(name: str, structure: FixedSparsityConfig) -> None:
    layout = structure.layout(8192)
    shares = [layout.density, *(layout.tile_density(tile, tile) for tile in (32, 64, 128))]
    cells = " | ".join(f"{100 * share:.3g} %" for share in shares)
    assert f"| {name} | {cells} |" in TEXT


def test_links_lead_to_headings() -> None:
    headings = {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in re.findall(r"^#+ (.*)$", TEXT, re.M)}
    links = re.findall(r"\]\(#([^)]*)\)", TEXT)
    assert len(links) > 4
    assert set(links) <= headings
