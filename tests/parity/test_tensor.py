"""Every model under tensor and sequence parallelism, with ZeRO and recomputation, equals one plain process, in float64.

Dropout is on: keyed draws make the masks of every layout those of one process.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from harness.combinations import cover
from harness.huggingface import float64_throughout
from harness.pool import WorkerPool
from harness.reference import Trace, call_model, check_parity
from harness.tensor import MICRO_SIZE, MODELS, make_case, step_batches, train_split, train_whole
from harness.training import merge_ranks
from shardwise.dropout import KeyedDraws, key_dropouts

pytest.importorskip("transformers")

FACTORS = {
    "model": MODELS,
    "tp": [2, 4],
    "sequence_parallel": [False, True],
    "stage": [0, 1, 2, 3],
    "recompute": ["none", "full", "selective"],
    "num_data_ranks": [1, 2],
}


def fits(options: dict[str, Any]) -> bool:
    """Four ranks are enough for both axes to have two, and for tp to exceed the KV heads."""
    return options["tp"] * options["num_data_ranks"] <= 4


@functools.cache
def reference(model: str, num_data_ranks: int) -> Trace:
    return train_whole(model, num_data_ranks)


@pytest.mark.parametrize("options", cover(FACTORS, fits))
def test_a_split_model_equals_one_process(ranks: WorkerPool, options: dict[str, Any]) -> None:
    overrides = {
        "mesh": {"tp": options["tp"]},
        "tensor": {"sequence_parallel": options["sequence_parallel"]},
        "zero": {"stage": options["stage"]},
        "recompute": {"mode": options["recompute"]},
    }
    num_ranks = options["tp"] * options["num_data_ranks"]
    traces = ranks(num_ranks).run(train_split, options["model"], overrides)
    check_parity(merge_ranks(traces), reference(options["model"], options["num_data_ranks"]))


@pytest.mark.parametrize("model", MODELS)
def test_masks_follow_the_number_of_the_sample(model: str) -> None:
    """What the parity stands on: all that can drop does, and by the sample's number."""
    losses = [loss_of(model, first) for first in (0, 0, 8)]
    assert losses[0] == losses[1]
    assert (losses[0] == losses[2]) == (model == "decoder")  # which has no dropout


def loss_of(model: str, first: int) -> float:
    """Of one batch whose samples have the numbers from `first` on."""
    case = make_case(model)
    module, batch = case.build(torch.float64), step_batches(case, 0, 1)[0]
    draws = KeyedDraws(0)
    key_dropouts(module, draws)
    with float64_throughout(), draws.at(step=0, micro_batch=0, first_sample=first, num_samples=MICRO_SIZE):
        output = call_model(module, batch, case.loss)
    return (case.loss(output, batch)[0] if case.loss else output["loss"]).item()
