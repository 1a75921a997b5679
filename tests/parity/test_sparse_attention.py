"""A decoder with block-sparse attention under ZeRO, tensor, sequence and pipeline parallelism equals one plain process.

In float64. Heads of `sparse-bigbird` have different layouts, so a rank must take those of its own heads.
"""

from __future__ import annotations

import functools
import shutil
from typing import Any

import pytest
import torch

from harness.combinations import cover
from harness.pool import WorkerPool
from harness.reference import Trace, check_parity
from harness.tensor import GIVEN, GIVEN_ATTENTION, SPARSE_MODELS, make_case, step_batches, train_split, train_whole
from harness.training import merge_ranks, reference_of, train_case

NUM_STEPS = 2
NUM_MICRO_BATCHES = 2
FACTORS = {
    "model": list(SPARSE_MODELS),
    "stage": [0, 3],
    "tp": [1, 2, 4],
    "pp": [1, 2],
    "sequence_parallel": [False, True],
    "recompute": ["none", "full", "selective"],
}


def fits(options: dict[str, Any]) -> bool:
    """Four ranks, of which two share data where the ranks suffice; four share two KV heads."""
    return options["tp"] * options["pp"] <= 4


@functools.cache
def reference(model: str, num_data_ranks: int) -> Trace:
    return train_whole(model, num_data_ranks, NUM_MICRO_BATCHES, NUM_STEPS)


def train_compiled(rank: int, world_size: int, backend: str) -> Trace:
    overrides = {"zero": {"stage": 3}, "compile": {"enabled": True, "backend": backend}}
    torch._dynamo.reset()
    return train_case(rank, world_size, make_case("sparse-fixed"), NUM_MICRO_BATCHES, NUM_STEPS, overrides)


@pytest.mark.parametrize("options", cover(FACTORS, fits))
def test_sparse_attention_equals_one_process_in_every_layout(ranks: WorkerPool, options: dict[str, Any]) -> None:
    num_ranks = max(2, options["tp"] * options["pp"])
    overrides = {
        "mesh": {"tp": options["tp"], "pp": options["pp"]},
        "tensor": {"sequence_parallel": options["sequence_parallel"]},
        "zero": {"stage": options["stage"]},
        "recompute": {"mode": options["recompute"]},
    }
    traces = ranks(num_ranks).run(train_split, options["model"], overrides, NUM_MICRO_BATCHES, NUM_STEPS)
    num_data_ranks = num_ranks // options["tp"] // options["pp"]
    check_parity(merge_ranks(traces), reference(options["model"], num_data_ranks))


GIVEN_FACTORS = {
    "model": ["llama", "bert"],
    "stage": [0, 3],
    "tp": [1, 2],
    "pp": [1, 2],
    "recompute": ["none", "full", "selective"],
}


@pytest.mark.parametrize("options", cover(GIVEN_FACTORS))
def test_a_hugging_face_model_given_the_configs_attention_equals_one_process(
    ranks: WorkerPool, options: dict[str, Any]
) -> None:
    pytest.importorskip("transformers")
    num_ranks = max(2, options["tp"] * options["pp"])
    overrides = {
        "mesh": {"tp": options["tp"], "pp": options["pp"]},
        "zero": {"stage": options["stage"]},
        "recompute": {"mode": options["recompute"]},
        "attention": GIVEN_ATTENTION.model_dump(),
    }
    traces = ranks(num_ranks).run(train_split, options["model"], overrides, NUM_MICRO_BATCHES, NUM_STEPS)
    num_data_ranks = num_ranks // options["tp"] // options["pp"]
    check_parity(merge_ranks(traces), reference(GIVEN + options["model"], num_data_ranks))


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on the CPU")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_compiled_blocks_equal_one_process(ranks: WorkerPool, backend: str) -> None:
    traces = ranks(2).run(train_compiled, backend)
    check_parity(merge_ranks(traces), reference_of(make_case("sparse-fixed"), 2, NUM_MICRO_BATCHES, NUM_STEPS, None))


def test_the_models_differ_from_the_dense_one_and_heads_from_each_other() -> None:
    """What the parity stands on: the layouts leave pairs out, and other ones for each half of the heads."""
    names = ("decoder", *SPARSE_MODELS, *(GIVEN * given + model for model in ("llama", "bert") for given in (0, 1)))
    losses = [reference(model, 1).losses for model in names]
    assert len(set(map(tuple, losses))) == len(losses)
    case = make_case("sparse-bigbird")
    seq_len = step_batches(case, 0, 1)[0][0].shape[1]
    model = case.build(torch.float64)
    layout = model.blocks[0].attention.attend.structure.layout(seq_len)
    assert layout.num_heads == 4
    assert not layout.of_heads(0, 2).allowed().equal(layout.of_heads(2, 2).allowed())
