"""Models without a plan: by a proposed one, or by the user's table, they equal one plain process, in float64.

And what is missing in a user's table is said where torch speaks of shapes only.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
import torch

from harness.pool import WorkerPool
from harness.reference import Trace, check_parity, train_reference
from harness.training import make_config, make_optimizer, merge_ranks
from harness.unknown_models import CASES, LanguageModel, NanoBlock, make_batch, make_loss
from shardwise import initialize, propose_plan

NUM_STEPS: Final = 2
PARTS: Final = "parts=16:4+16:4+16:4"
TABLE: Final[dict[str, Any]] = {
    "embed": "vocab",
    "blocks.*.attn.c_attn": f"column {PARTS}",
    "blocks.*.attn.c_proj": "row units=4",
    "blocks.*.attn": ["region x", "local n_head n_embd"],
    "blocks.*.mlp.0": "column",
    "blocks.*.mlp.2": "row",
    "blocks.*.mlp": "region input",
    "blocks.?": "stack x last=norm",
    "head": "head",
}
CASE_OF: Final = {case.name: case for case in CASES}


def without(*patterns: str) -> dict[str, Any]:
    return {key: value for key, value in TABLE.items() if key not in patterns}


def train(rank: int, world_size: int, name: str, table: Any, sequence_parallel: bool = False) -> Trace:
    """Train on one rank of a tp axis; without a table by the plan that is proposed."""
    case = CASE_OF[name]
    model = case.build(torch.float64, seed=rank)  # rank 0's weights are everybody's
    plan = table or propose_plan(model, case.batch(0, 2, torch.float64)[0], tp=world_size)
    settings = {"mesh": {"tp": world_size}, "tensor": {"sequence_parallel": sequence_parallel}}
    with initialize(model, make_config(1, settings), loss_fn=case.loss, plan=plan) as engine:
        results = [engine.train_step([case.batch(step, 2, torch.float64)]) for step in range(NUM_STEPS)]
        parameters = {key: engine.read(key) for key, _ in model.named_parameters()}
    return Trace([each.loss for each in results], [each.grad_norm for each in results], {}, parameters)


def reference(name: str) -> Trace:
    case = CASE_OF[name]
    batches = [[case.batch(step, 2, torch.float64)] for step in range(NUM_STEPS)]
    trace = train_reference(case.build(torch.float64), batches, case.loss, make_optimizer)
    return Trace(trace.losses, trace.grad_norms, {}, trace.parameters)


@pytest.mark.parametrize("name", [*CASE_OF])
def test_a_proposed_plan_trains_like_one_process(ranks: WorkerPool, name: str) -> None:
    check_parity(merge_ranks(ranks(2).run(train, name, None)), reference(name))


def test_proposals_split_all_that_is_large() -> None:
    """What the parity stands on."""
    for case in CASES:
        plan = propose_plan(case.build(torch.float32), case.batch(0, 2, torch.float32)[0], tp=2)
        styles = {layer.style for layer in plan.layers}
        assert {"vocab", "column", "row"} <= styles
        assert any(layer.gathers_output for layer in plan.layers) == (case.name == "gated")
        num_rows = {"gated": 2, "crossed": 6, "routed": 2, "scaled": 2}.get(case.name, 4)
        assert len([layer for layer in plan.layers if layer.style == "row"]) == num_rows


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_table_trains_like_one_process(ranks: WorkerPool, sequence_parallel: bool) -> None:
    traces = ranks(2).run(train, "nano", TABLE, sequence_parallel)
    check_parity(merge_ranks(traces), reference("nano"))


def fail(rank: int, world_size: int, table: dict[str, Any]) -> str:
    """What is added to the error of a forward."""
    config = make_config(1, {"mesh": {"tp": world_size}})
    with initialize(LanguageModel(NanoBlock), config, loss_fn=make_loss, plan=table) as engine:
        try:
            engine(make_batch(0, 2, torch.float64))
        except (RuntimeError, ValueError) as error:
            return "; ".join(error.__notes__)
    return ""


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            without("blocks.*.attn"),
            "mesh.tp=2: blocks.0.attn computes with 1/2 of the features (c_attn split them); if its code takes a "
            "number of heads or features from an attribute, such as n_head=4, n_embd=16, add 'local <attribute>' for "
            "it to the plan",
        ),
        (
            {**TABLE, "blocks.*.attn": "local n_head"},
            "such as n_embd=16, add 'local n_embd' for it to the plan",
        ),
        (
            without("blocks.*.mlp.2", "blocks.*.mlp"),
            "blocks.0.mlp.2 is whole, but gets some features; give it the style 'row'",
        ),
        (
            without("blocks.*.mlp.0", "blocks.*.mlp"),
            "blocks.0.mlp.2 is a row layer, but gets all features; split the layer before it",
        ),
        (
            {**TABLE, "blocks.*.mlp.2": "column"},
            "blocks.0.mlp.2 is split ('column'), but gets some of the features; end the column layers before it",
        ),
    ],
)
def test_what_a_table_lacks_is_said(ranks: WorkerPool, table: dict[str, Any], message: str) -> None:
    for said in ranks(2).run(fail, table):
        assert message in said
