"""What an engine can do beside plain training, it does with stages as one plain process does, in float64."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from harness.pool import WorkerPool
from harness.reference import Trace, check_parity
from harness.tensor import train_split, train_whole
from harness.training import merge_ranks

pytest.importorskip("transformers")

NUM_STEPS = 3
NUM_MICRO_BATCHES = 3

Sections = dict[str, dict[str, Any]]
HOST = {"optimizer": "host", "grads": "host"}
VARIANTS: dict[str, tuple[int, Sections]] = {
    # number of ranks, sections
    "recompute": (2, {"recompute": {"mode": "full"}}),
    "recompute-some": (2, {"recompute": {"mode": "full", "every": 3}, "pipeline": {"schedule": "zb-h1"}}),
    "recompute-selectively": (2, {"recompute": {"mode": "selective"}}),
    "recompute-and-gather": (
        4,
        {
            "recompute": {"mode": "full"},
            "zero": {"stage": 3},
            "pipeline": {"gather": "micro-batch", "schedule": "interleaved", "virtual_stages": 2},
        },
    ),
    "recompute-and-split": (
        4,
        {
            "recompute": {"mode": "selective"},
            "zero": {"stage": 3},
            "pipeline": {"gather": "micro-batch", "schedule": "zb-v", "virtual_stages": 2},
        },
    ),
    "activations-on-host": (2, {"recompute": {"mode": "full"}, "tiers": {"activations": "host"}}),
    "activations-on-host-split": (
        2,
        {"recompute": {"mode": "full"}, "tiers": {"activations": "host"}, "pipeline": {"schedule": "zb-h1"}},
    ),
    "optimizer-on-host": (2, {"tiers": {"optimizer": "host"}, "zero": {"stage": 1}}),
    "gradients-on-host": (4, {"tiers": HOST, "zero": {"stage": 2}}),
    "stepped-in-backward": (2, {"tiers": HOST, "zero": {"stage": 2}, "optimizer": {"clip_norm": None}}),
    "all-on-host": (4, {"tiers": {**HOST, "params": "host"}, "zero": {"stage": 3}}),
    "all-on-host-interleaved": (
        2,
        {
            "tiers": {**HOST, "params": "host"},
            "zero": {"stage": 3},
            "pipeline": {"schedule": "interleaved", "virtual_stages": 2},
        },
    ),
    "all-on-host-each-micro-batch": (
        4,
        {
            "tiers": {**HOST, "params": "host"},
            "zero": {"stage": 3},
            "pipeline": {"gather": "micro-batch", "schedule": "gpipe"},
        },
    ),
    "all-on-nvme": (2, {"tiers": {"optimizer": "nvme", "grads": "nvme", "params": "nvme"}, "zero": {"stage": 3}}),
    "some-on-host": (
        4,
        {
            "tiers": {**HOST, "optimizer_on_device": 0.5, "grads_on_device": 0.5},
            "zero": {"stage": 2},
            "pipeline": {"schedule": "zb-v", "virtual_stages": 2},
        },
    ),
    "some-params-on-host": (
        4,
        {"tiers": {**HOST, "params": "host", "params_on_device": 0.5}, "zero": {"stage": 3}},
    ),
    "virtual-stages-sharded": (
        4,
        {"zero": {"stage": 3}, "pipeline": {"schedule": "interleaved", "virtual_stages": 4}},
    ),
    "without-overlap": (4, {"zero": {"stage": 3, "overlap": False}}),
    "checked": (4, {"zero": {"stage": 3}, "run": {"check_collectives": True, "seed": 5}}),
    "reduced-in-backward": (4, {"zero": {"stage": 2}, "precision": {"accumulate": "param"}}),
}


@functools.cache
def reference(model: str, num_data_ranks: int, clip_norm: float | None) -> Trace:
    return train_whole(model, num_data_ranks, NUM_MICRO_BATCHES, NUM_STEPS, clip_norm)


@pytest.mark.parametrize("name", list(VARIANTS))
def test_a_variant_equals_one_process(ranks: WorkerPool, tmp_path: Path, name: str) -> None:
    num_ranks, sections = VARIANTS[name]
    overrides = {"mesh": {"pp": 2}, "optimizer": {"clip_norm": 0.05}, **sections}
    if "nvme" in overrides.get("tiers", {}).values():
        overrides["tiers"] = {**overrides["tiers"], "nvme_path": str(tmp_path)}
    traces = ranks(num_ranks).run(train_split, "deep-tied", overrides, NUM_MICRO_BATCHES, NUM_STEPS)
    expected = reference("deep-tied", num_ranks // 2, overrides["optimizer"]["clip_norm"])
    check_parity(merge_ranks(traces), expected)


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("stage", [0, 3])
def test_dropout_draws_the_numbers_of_one_process(ranks: WorkerPool, model: str, stage: int) -> None:
    overrides = {"mesh": {"pp": 2}, "zero": {"stage": stage}, "recompute": {"mode": "full" if stage else "none"}}
    traces = ranks(4).run(train_split, model, overrides, NUM_MICRO_BATCHES, NUM_STEPS)
    check_parity(merge_ranks(traces), reference(model, 2, 0.05))
