"""What counts in a step: micro-batches and ranks without targets, steps without any, counts that no loss can have."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.huggingface import VOCAB_SIZE, build_model
from harness.pool import WorkerPool
from harness.refusals import refusal_of
from harness.training import make_config
from shardwise import Engine, initialize

IGNORED = -100
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero-1": {"zero": {"stage": 1}},
    "zero-3, chunks": {"zero": {"stage": 3}, "context": {"chunk_tokens": 3}},
    "tp": {"mesh": {"tp": 2}},
    "pp": {"mesh": {"pp": 2}},
    "cp": {"mesh": {"cp": 2}},
    "host": {"zero": {"stage": 2}, "tiers": {"optimizer": "host"}},
}
Batch = dict[str, Tensor]


def make_batches() -> list[Batch]:
    """Four micro-batches: the second has no targets, the third has none in the second half of its tokens."""
    tokens = torch.randint(4, VOCAB_SIZE, (4, 2, 8), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[0, :, :3] = IGNORED
    labels[1] = IGNORED
    labels[2, :, 4:] = IGNORED
    return [{"input_ids": ids, "labels": targets} for ids, targets in zip(tokens, labels, strict=True)]


def without_targets(batch: Batch) -> Batch:
    return {**batch, "labels": torch.full_like(batch["labels"], IGNORED)}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return build_model("llama").double()


def shifted_loss(output: Any, batch: tuple[Batch, Tensor]) -> tuple[Tensor, Tensor]:
    targets = batch[1]
    return F.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum"), (targets >= 0).sum()


def given(batch: Batch, kind: str, num_items: int) -> Any:
    """A batch as the model's own loss takes it, with the number of all targets or without, or `shifted_loss`."""
    if kind == "loss_fn":
        return {"input_ids": batch["input_ids"]}, F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    return {**batch, "num_items_in_batch": num_items} if kind == "num_items" else batch


@functools.cache
def whole() -> tuple[float, dict[str, Tensor]]:
    """The step of one process over all targets: its loss, and the parameters after it."""
    model, total, count = make_model(), torch.zeros((), dtype=torch.float64), 0
    for batch in make_batches():
        own, number = shifted_loss(model(batch["input_ids"]), given(batch, "loss_fn", 0))
        total, count = total + own, count + int(number)
    (total / count).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    return float(total.detach() / count), {name: each.detach() for name, each in model.named_parameters()}


def states_of(engine: Engine) -> dict[str, Tensor]:
    names = ["lm_head.weight", "model.norm.weight"]
    read = {f"{name} {state}": engine.read(name, state) for name in names for state in engine.states_of(name)}
    return {name: value for name, value in read.items() if value is not None}


def take_steps(rank: int, world_size: int, overrides: dict[str, Any], kind: str) -> dict[str, Any]:
    num_ranks = 1 if set(overrides.get("mesh", {})) & {"tp", "pp", "cp"} else 2
    mine = make_batches() if num_ranks == 1 else make_batches()[2 * rank : 2 * rank + 2]
    num_items = sum(int((batch["labels"][:, 1:] >= 0).sum()) for batch in make_batches())
    give = functools.partial(given, kind=kind, num_items=num_items)
    optimizer = {"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": None}
    config = make_config(len(mine), {**overrides, "optimizer": optimizer})
    engine = initialize(make_model(), config, loss_fn=shifted_loss if kind == "loss_fn" else None)
    evaluated = engine.eval_step([give(batch) for batch in mine])
    stepped = engine.train_step([give(batch) for batch in mine])
    with engine.gathered() as model:
        parameters = {name: each.detach().clone() for name, each in model.named_parameters() if not each.is_meta}
    parameters = {name: engine.read(name) for name in parameters} if overrides.get("mesh", {}).get("tp") else parameters
    engine.close()
    # Weight decay and moments would move what nothing has counted for.
    decayed = {**optimizer, "name": "adamw", "momentum": 0.9, "weight_decay": 0.5}
    decayed.pop("momentum")
    config = make_config(len(mine), {**overrides, "optimizer": decayed})
    engine = initialize(make_model(), config, loss_fn=shifted_loss if kind == "loss_fn" else None)
    engine.train_step([give(batch) for batch in mine])
    before = states_of(engine)
    empty = engine.train_step([give(without_targets(batch)) for batch in mine])
    after = states_of(engine)
    nothing = [engine.eval_step([give(without_targets(mine[0]))]), engine.eval_step([])]
    engine.close()
    return {
        "losses": [evaluated.loss, stepped.loss],
        "parameters": parameters,
        "is_unchanged": all(torch.equal(before[name], after[name]) for name in before) and len(before) > 4,
        "empty": [empty.loss, empty.count, empty.grad_norm, empty.skipped],
        "nothing": [(each.loss, each.count) for each in nothing],
    }


@pytest.mark.quick(4)
@pytest.mark.parametrize("kind", ["own", "num_items", "loss_fn"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_has_no_targets_adds_nothing(ranks: WorkerPool, layout: str, kind: str) -> None:
    pytest.importorskip("transformers")
    loss, parameters = whole()
    for result in ranks(2).run(take_steps, LAYOUTS[layout], kind):
        # transformers computes a model's own loss in fp32
        assert result["losses"] == pytest.approx([loss, loss], rel=1e-6 if kind != "loss_fn" else 1e-12)
        for name, value in result["parameters"].items():
            tolerance = 1e-7 if kind != "loss_fn" else 1e-8
            torch.testing.assert_close(value, parameters[name], rtol=0, atol=tolerance)
        assert result["is_unchanged"]
        assert result["empty"] == [0.0, 0.0, 0.0, True]
        assert result["nothing"] == [(0.0, 0.0)] * 2


COUNTS: dict[str, Callable[[int], tuple[float, Any]]] = {
    "below 0": lambda rank: (1.0, -3),
    "0 beside a loss": lambda rank: (1.0, torch.tensor(0)),
    "NaN": lambda rank: (1.0, math.nan),
    "infinite": lambda rank: (1.0, torch.tensor(math.inf)),
    "of one rank": lambda rank: (1.0, 4 - 8 * rank),
    "of one micro-batch": lambda rank: (1.0, [4, -1]),
    "a mean over nothing": lambda rank: (math.nan, 0),
    "nothing at all": lambda rank: (0.0, 0.0),
}


def use_counts(rank: int, world_size: int, overrides: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, values in COUNTS.items():
        factor, count = values(rank)
        number = iter(count * 2 if isinstance(count, list) else [count] * 4)

        def loss_fn(output: Tensor, batch: Any, number: Any = number, factor: float = factor) -> tuple[Tensor, Any]:
            return output.square().sum() * factor, next(number)

        model = nn.Linear(3, 2)
        engine = initialize(model, make_config(2, overrides), loss_fn=loss_fn)
        before = engine.read("weight")
        batches = [(torch.ones(2, 3), None), (torch.ones(2, 3), None)]
        codes = [refusal_of(functools.partial(call, batches))[0] for call in (engine.train_step, engine.eval_step)]
        found[name] = (codes, torch.equal(before, engine.read("weight")))
        engine.close()
    return found


@pytest.mark.parametrize("layout", ["zero-3, chunks", "host"])
def test_counts_that_no_loss_has_are_refused_on_every_rank(ranks: WorkerPool, layout: str) -> None:
    overrides = {name: values for name, values in LAYOUTS[layout].items() if name != "context"}
    nothing = ("a mean over nothing", "nothing at all")
    expected = {name: (["" if name in nothing else "loss-count"] * 2, True) for name in COUNTS}
    assert ranks(2).run(use_counts, overrides) == [expected] * 2


def train_plainly(rank: int, world_size: int, overrides: dict[str, Any], kind: str) -> dict[str, Any]:
    """A step of plain mode, in which the loss of transformers over no targets is NaN, and its gradients are 0."""
    mine = make_batches() if overrides else make_batches()[2 * rank : 2 * rank + 2]
    num_items = sum(int((batch["labels"][:, 1:] >= 0).sum()) for batch in make_batches())
    optimizer = {"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": None}
    engine = initialize(make_model(), make_config(len(mine), {**overrides, "optimizer": optimizer}))
    for batch in mine:
        engine.backward(engine(**given(batch, kind, num_items)).loss)
    skipped = engine.step().skipped
    parameters = {name: engine.read(name) for name in ("lm_head.weight", "model.embed_tokens.weight")}
    engine.close()
    return {"skipped": skipped, "parameters": parameters}


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("overrides", "kind"),
    [({}, "own"), ({"mesh": {"cp": 2}}, "num_items"), ({"mesh": {"tp": 2}}, "own"), ({"mesh": {"tp": 2}}, "num_items")],
)
def test_plain_losses_over_nothing_add_nothing(ranks: WorkerPool, overrides: dict[str, Any], kind: str) -> None:
    pytest.importorskip("transformers")
    model, batches = make_model(), make_batches()
    count = sum(int((batch["labels"][:, 1:] >= 0).sum()) for batch in batches)
    for batch in batches:
        mean = copy.deepcopy(model)(**batch).loss
        if kind == "num_items":
            model(**batch, num_items_in_batch=count).loss.backward()
        elif not mean.isnan():
            (model(**batch).loss / (1 if overrides else 2)).backward()
    for result in ranks(2).run(train_plainly, overrides, kind):
        assert not result["skipped"]
        for name, value in result["parameters"].items():
            parameter = model.get_parameter(name)
            torch.testing.assert_close(value, (parameter - 0.1 * parameter.grad).detach(), rtol=0, atol=1e-6)
