"""What the attention benchmark for GPUs does without one: masks of a wanted density, table, search, options."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from harness.paths import BENCHMARKS
from shardwise.attention.block_layout import BlockLayout

SCRIPT = BENCHMARKS / "gpu_attention.py"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[SCRIPT.stem] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules[SCRIPT.stem]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_tokens", [256, 250])
def test_density_is_the_share_of_what_dense_attention_computes(
    script: ModuleType, num_tokens: int, causal: bool
) -> None:
    layout = script.window_layout(num_tokens, 32, 1, 1, causal=causal)
    dense = BlockLayout.from_blocks(torch.ones(8, 8), 32, causal=causal, num_tokens=num_tokens).allowed()
    share = layout.allowed().sum() / dense.sum()
    assert script.density_of(layout) == pytest.approx(share.item())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("wanted", [0.05, 0.1, 0.25])
@pytest.mark.parametrize("block", [64, 128])
def test_masks_have_the_density_wanted(script: ModuleType, block: int, wanted: float, causal: bool) -> None:
    layout = script.layout_of_density(script.Case(16_384, 64, 1, causal), block, wanted, 1)
    assert script.density_of(layout) == pytest.approx(wanted, abs=1.01 * block / 16_384)  # half of a step of the window


def test_the_table_relates_times_to_both_dense_ones_and_to_flex(script: ModuleType) -> None:
    mask = script.Mask(128, 0.1, 0.125)
    rows = [
        script.Row("flash", None, 0.008, 0.020, 1.0),
        script.Row("cudnn", None, 0.004, 0.010, 1.0),
        script.Row("triton", mask, 0.001, 0.004, 0.5),
        script.Row("flex", mask, 0.002, 0.002, 0.5),
    ]
    notes = [
        {"mask": {"block": 128, "wanted": 0.1, "density": 0.125}, "diff": 0.01},
        {"system": "flex", "mask": None, "failed": "RuntimeError: no"},
    ]
    lines = script.table(script.Case(1024, 64, 2, True), rows, notes)
    triton, flex = lines[4].split(), lines[5].split()
    assert triton[:3] == ["triton", "128", "12.5%"]
    flash, cudnn, efficiency, over_flex = ["8.00x", "5.00x"], ["4.00x", "2.50x"], ["1.00", "0.62"], ["0.500", "2.000"]
    assert triton[3:] == ["1.000", "4.000", *flash, *cudnn, *efficiency, *over_flex, "0.50", "0.0100"]
    assert flex[3:] == ["2.000", "2.000", "4.00x", "10.00x", "2.00x", "5.00x", "0.50", "1.25", "0.50", "0.0100"]
    assert lines[-1] == "flex failed: RuntimeError: no"


@pytest.mark.parametrize("limit", [3000, 4096, 5000, 20_000, 100_001])
def test_the_longest_is_found(script: ModuleType, limit: int) -> None:
    tried = []

    def attempt(num_tokens: int) -> bool | None:
        tried.append(num_tokens)
        return True if num_tokens <= limit else None

    assert script.longest(attempt, 16_384, 4096, lambda: True) == limit // 4096 * 4096
    assert len(tried) < 12
    assert script.longest(attempt, 16_384, 4096, lambda: False) == 0


def test_options(script: ModuleType) -> None:
    options = script.parsed(["--lengths", "1024,2048", "--directions", "causal", "--head-dims", "64"])
    assert script.cases_of(options) == [script.Case(1024, 64, 16, True), script.Case(2048, 64, 16, True)]
    assert script.cases_of(script.parsed(["--lengths", "", "--longest"])) == []
    assert {case.num_tokens for case in script.cases_of(script.parsed(["--quick"]))} == {16_384}
    with pytest.raises(SystemExit):
        script.parsed(["--systems", "flsh"])


def test_a_tiling_reaches_the_plan_of_its_side_and_the_launch(script: ModuleType) -> None:
    pytest.importorskip("triton")
    from shardwise.attention.triton import launch as launches
    from shardwise.attention.triton import plan as plans
    from shardwise.attention.triton.lut import HeadGroups

    def numbers() -> tuple[int, ...]:
        layout = BlockLayout.from_blocks(torch.ones(4, 4), 128)
        kinds = {"head_dim": 64, "dtype": torch.bfloat16, "device": torch.device("cpu")}
        return plans.plan_of(layout, HeadGroups(1, 1), **kinds).numbers

    def warps(of_keys: bool) -> tuple[int, int]:
        return launches.warps_and_stages(64, 64, torch.bfloat16, of_keys=of_keys)

    usual = numbers(), warps(False), warps(True)
    tiling = script.Tiling(32, 16, 2, 5)
    with script.tiled(tiling, of_queries=True):
        assert numbers()[:2] == (32, 16)
        assert numbers()[5:] == usual[0][5:]
        assert (warps(False), warps(True)) == ((2, 5), usual[2])
    with script.tiled(tiling, of_queries=False):
        assert numbers()[:5] == usual[0][:5]
        assert numbers()[5:7] == (32, 16)
        assert (warps(False), warps(True)) == (usual[1], (2, 5))
    assert (numbers(), warps(False), warps(True)) == usual
