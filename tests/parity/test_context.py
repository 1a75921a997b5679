"""A decoder whose sequences are split over the cp axis equals one plain process, in every layout, in float64."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

from harness.combinations import cover
from harness.pool import WorkerPool
from harness.reference import Trace, check_parity
from harness.split_sequences import MODELS, train_split, train_whole
from harness.training import merge_ranks

TRANSPORTS = {
    "model": list(MODELS),
    "cp": [2, 4],
    "transport": ["ring", "all-gather", "ulysses", "hybrid"],
    "token_layout": ["auto", "contiguous", "zigzag", "balanced"],
}
OTHERS = {
    "model": ["dense", "bigbird"],
    "axes": ["cp", "cp x dp", "cp x tp", "cp x sp", "cp x pp"],
    "transport": ["ring", "all-gather", "ulysses"],
    "stage": [0, 1, 2, 3],
    "recompute": ["none", "full", "selective"],
}
AXES = {
    "cp": {"cp": 4},
    "cp x dp": {"cp": 2},
    "cp x tp": {"cp": 2, "tp": 2},
    "cp x sp": {"cp": 2, "tp": 2},
    "cp x pp": {"cp": 2, "pp": 2},
}


def has_teams(options: dict[str, Any]) -> bool:
    """A hybrid needs two teams of two."""
    return options["transport"] != "hybrid" or options["cp"] == 4


def context_of(transport: str, token_layout: str = "auto") -> dict[str, Any]:
    hybrid = {"transport": "ring", "heads_over": 2}
    return {**(hybrid if transport == "hybrid" else {"transport": transport}), "token_layout": token_layout}


@functools.cache
def reference(model: str, num_data_ranks: int) -> Trace:
    return train_whole(model, num_data_ranks)


@pytest.mark.quick(3)
@pytest.mark.parametrize("options", cover(TRANSPORTS, has_teams))
def test_every_transport_and_token_layout_equals_one_process(ranks: WorkerPool, options: dict[str, Any]) -> None:
    cp = options["cp"]
    overrides = {"mesh": {"cp": cp}, "context": context_of(options["transport"], options["token_layout"])}
    traces = ranks(cp).run(train_split, options["model"], overrides)
    check_parity(merge_ranks(traces), reference(options["model"], 1))


@pytest.mark.quick(2)
@pytest.mark.parametrize("options", cover(OTHERS))
def test_split_sequences_go_with_every_other_split(ranks: WorkerPool, options: dict[str, Any]) -> None:
    axes = AXES[options["axes"]]
    overrides = {
        "mesh": axes,
        "context": context_of(options["transport"]),
        "tensor": {"sequence_parallel": options["axes"] == "cp x sp"},
        "zero": {"stage": options["stage"]},
        "recompute": {"mode": options["recompute"]},
    }
    traces = ranks(4).run(train_split, options["model"], overrides)
    check_parity(merge_ranks(traces), reference(options["model"], 4 // math.prod(axes.values())))


@pytest.mark.parametrize(
    ("axes", "sequence_parallel"), [({"cp": 4}, False), ({"cp": 2, "tp": 2}, True)], ids=["cp", "cp x sp"]
)
def test_tokens_drop_as_in_one_process(ranks: WorkerPool, axes: dict[str, int], sequence_parallel: bool) -> None:
    overrides = {"mesh": axes, "tensor": {"sequence_parallel": sequence_parallel}, "recompute": {"mode": "full"}}
    traces = ranks(4).run(train_split, "dropping-dense", overrides)
    check_parity(merge_ranks(traces), reference("dropping-dense", 1))


def test_all_axes_together_equal_one_process(ranks: WorkerPool) -> None:
    overrides = {
        "mesh": {"cp": 2, "tp": 2, "dp_shard": 2},
        "tensor": {"sequence_parallel": True},
        "zero": {"stage": 3},
        "recompute": {"mode": "selective"},
    }
    traces = ranks(8).run(train_split, "bigbird", overrides)
    check_parity(merge_ranks(traces), reference("bigbird", 2))


@pytest.mark.full
def test_compiled_blocks_equal_one_process(ranks: WorkerPool) -> None:
    overrides = {"mesh": {"cp": 2}, "zero": {"stage": 3}, "compile": {"enabled": True, "backend": "aot_eager"}}
    check_parity(merge_ranks(ranks(2).run(train_split, "fixed", overrides)), reference("fixed", 1))
