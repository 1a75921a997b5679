"""Tokens that go where a batch sends them: every layout equals one process whose routers are made to choose the same.

The model is Hugging Face's Mixtral, unmodified; in the one process its routers are replaced by what they would do.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from harness.combinations import cover
from harness.expert_layouts import fits_ranks, num_data_ranks, sections_of
from harness.models import ModelCase
from harness.pool import WorkerPool
from harness.reference import Trace, check_parity
from harness.refusals import refusal_of, refused
from harness.tensor import CLIP_NORM, MICRO_SIZE, batches_of, mixture, train_on_mesh, train_plainly
from harness.training import make_config, merge_ranks
from shardwise import Config, initialize, plan_layout
from shardwise.runtime.float64 import float64_throughout

pytest.importorskip("transformers")

NUM_STEPS = 2
FACTORS = {
    "ep": [1, 2],
    "tp": [1, 2],
    "cp": [1, 2],
    "pp": [1, 2],
    "sequence_parallel": [False, True],
    "stage": [0, 2, 3],
    "accumulation": [1, 2],
    "recompute": ["none", "full", "selective"],
}


def replayed() -> ModelCase:
    """The mixture with batches that name experts at random."""
    case = mixture()
    config: Any = case.make().config

    def batch(seed: int, num_samples: int, dtype: torch.dtype) -> dict[str, Tensor]:
        inputs = case.batch(seed, num_samples, dtype)
        generator = torch.Generator().manual_seed(seed)
        shape = (*inputs["input_ids"].shape, config.num_hidden_layers, config.num_local_experts)
        chosen = torch.rand(shape, generator=generator).topk(config.num_experts_per_tok)[1]
        return {**inputs, "routed_experts": chosen.to(torch.uint8)}

    return replace(case, batch=batch)


def force(model: nn.Module) -> None:
    """Make the routers of a plain model choose as a batch says, by Mixtral's formula written again."""
    gates: list[Any] = [module for name, module in model.named_modules() if name.endswith(".gate")]
    forward = model.forward

    def choose(gate: Any, index: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden.flatten(0, -2), gate.weight)
        weights = logits.softmax(-1).gather(1, index)
        return logits, weights / weights.sum(-1, keepdim=True), index

    def forced(routed_experts: Tensor, **inputs: Tensor) -> Any:
        for gate, index in zip(gates, routed_experts.long().flatten(0, 1).unbind(1), strict=True):
            gate.forward = functools.partial(choose, gate, index)
        return forward(**inputs)

    model.forward = forced


def train(rank: int, world_size: int, num_micro_batches: int, overrides: Any) -> Trace:
    return train_on_mesh(rank, replayed(), overrides, None, num_micro_batches, NUM_STEPS)


@functools.cache
def reference(num_data_ranks: int, num_micro_batches: int) -> Trace:
    return train_plainly(replayed(), num_data_ranks, num_micro_batches, NUM_STEPS, CLIP_NORM, force)


@pytest.mark.quick(6)
@pytest.mark.parametrize("options", cover(FACTORS, fits_ranks, has_pairs=False))
def test_replay_equals_one_process(ranks: WorkerPool, options: dict[str, Any]) -> None:
    overrides = sections_of(options, experts={"replay": True})
    traces = ranks(4).run(train, options["accumulation"], overrides)
    check_parity(merge_ranks(traces), reference(num_data_ranks(options), options["accumulation"]))


@pytest.mark.full
@pytest.mark.parametrize("mesh", [{"ep": 2}, {"tp": 2, "ep": 2}, {"pp": 2}, {"cp": 2}], ids=str)
def test_replay_on_two_ranks_equals_one_process(ranks: WorkerPool, mesh: dict[str, int]) -> None:
    overrides = {"mesh": mesh, "zero": {"stage": 3}, "recompute": {"mode": "full"}, "experts": {"replay": True}}
    num_data_ranks = 2 // math.prod(mesh.get(axis, 1) for axis in ("tp", "cp", "pp"))
    check_parity(merge_ranks(ranks(2).run(train, 2, overrides)), reference(num_data_ranks, 2))


@contextmanager
def chosen(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """The experts that each layer of experts is called with, by its name."""
    calls: dict[str, list[Tensor]] = {}

    def note(name: str, args: tuple[Any, ...]) -> None:
        calls.setdefault(name, []).append(args[1].clone())

    hooks = [
        module.register_forward_pre_hook(lambda module, args, name=name: note(name, args))
        for name, module in model.named_modules()
        if name.endswith(".experts")
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def replay_own(rank: int, world_size: int, overrides: Any) -> bool:
    """Whether a step in which tokens are sent where they went in another has the same bits."""
    case, results, recorded = mixture(), [], {}
    for replays in (False, True):
        model = case.build(torch.float64)
        settings = {**overrides, "optimizer": {"clip_norm": CLIP_NORM}, "experts": {"replay": replays}}
        with float64_throughout(), initialize(model, make_config(1, settings)) as engine:
            (batch,) = batches_of(engine, case, 0, 1)
            if replays:
                layers = [calls[0].view(*batch["input_ids"].shape, -1) for calls in recorded.values()]
                batch = {**batch, "routed_experts": torch.stack(layers, 2)}
            with chosen(model) as calls:
                result = engine.train_step([batch])
            parameters = [engine.read(name) for name, _ in model.named_parameters()]
        recorded = recorded or calls
        results.append((torch.tensor([result.loss, result.grad_norm]), *parameters))
    return all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.parametrize("recompute", ["full", "none"])
@pytest.mark.parametrize("mesh", [{"ep": 2}, {"ep": 1}, {"tp": 2}], ids=str)
def test_what_routers_chose_themselves_changes_no_bit(ranks: WorkerPool, mesh: dict[str, int], recompute: str) -> None:
    overrides = {"mesh": mesh, "zero": {"stage": 3}, "recompute": {"mode": recompute}}
    assert ranks(2).run(replay_own, overrides) == [True, True]


class Reads(TorchDispatchMode):
    """Counts the ops by which the host reads values of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.num: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        if name in ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero"):
            self.num[name] += 1
        return func(*args, **(kwargs or {}))


def count_reads(rank: int, world_size: int, overrides: Any) -> Counter[str]:
    case = replayed() if overrides["experts"]["replay"] else mixture()
    model = case.build(torch.float64)
    with float64_throughout(), initialize(model, make_config(1, overrides)) as engine:
        (batch,) = batches_of(engine, case, 0, 1)
        loss = engine(**batch).loss
        with Reads() as reads:
            engine.backward(loss)
        engine.step()
    return reads.num


@pytest.mark.parametrize("replays", [False, True])
def test_a_recomputation_reads_nothing_from_the_device(ranks: WorkerPool, replays: bool) -> None:
    counts = {}
    for mode in ("none", "full", "selective"):
        overrides = {"mesh": {"ep": 2}, "recompute": {"mode": mode}, "experts": {"replay": replays}}
        counts[mode] = ranks(2).run(count_reads, overrides)
    assert counts["none"] == counts["full"] == counts["selective"]


def evaluate(rank: int, world_size: int, overrides: Any) -> tuple[float, float, float]:
    case = replayed()
    model = case.build(torch.float64)
    with float64_throughout(), initialize(model, make_config(1, overrides)) as engine:
        batches = batches_of(engine, case, 0, 1)
        plain = engine(**batches[0]).loss.item() if overrides["mesh"].get("pp", 1) == 1 else math.nan
        own = [{name: value for name, value in each.items() if name != "routed_experts"} for each in batches]
        return engine.eval_step(batches).loss, engine.eval_step(own).loss, plain


@pytest.mark.quick(2)
@pytest.mark.parametrize("mesh", [{"ep": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_evaluations_and_calls_of_the_engine_follow_too(ranks: WorkerPool, mesh: dict[str, int]) -> None:
    case = replayed()
    num_data_ranks = 2 if "ep" in mesh else 1
    expected, own = [], []
    for with_force, losses in ((True, expected), (False, own)):
        model = case.build(torch.float64)
        if with_force:
            force(model)
        for number in range(num_data_ranks):
            batch = case.batch(number, MICRO_SIZE, torch.float64)
            inputs = batch if with_force else {name: batch[name] for name in batch if name != "routed_experts"}
            num_targets = int((batch["labels"][:, 1:] >= 0).sum())
            with float64_throughout(), torch.no_grad():
                losses.append((model.eval()(**inputs).loss.item(), num_targets))
    overrides = {"mesh": mesh, "experts": {"replay": True}}
    for rank, (followed, chose, plain) in enumerate(ranks(2).run(evaluate, overrides)):
        for loss, losses in ((followed, expected), (chose, own)):
            mean = sum(each * num for each, num in losses) / sum(num for _, num in losses)
            assert loss == pytest.approx(mean, rel=1e-12)
        assert "pp" in mesh or plain == pytest.approx(expected[rank % num_data_ranks][0], rel=1e-12)


def refuse(rank: int, world_size: int, overrides: Any, wrong: str) -> tuple[str, str]:
    case = replayed()
    model = case.build(torch.float64)
    with initialize(model, make_config(1, overrides)) as engine:
        (batch,) = batches_of(engine, case, 0, 1)
        routing = batch["routed_experts"].int()
        changed = {"as it is": routing, "no expert": routing - 16, "of one layer": routing[:, :, :1]}[wrong]
        return refusal_of(lambda: engine.train_step([{**batch, "routed_experts": changed}]))


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("code", "replay", "wrong"),
    [
        ("routing-not-followed", False, "as it is"),
        ("routing-range", True, "no expert"),
        ("routing-shape", True, "of one layer"),
    ],
)
@pytest.mark.parametrize("mesh", [{}, {"ep": 2}], ids=str)
def test_wrong_batches_are_refused(
    ranks: WorkerPool, mesh: dict[str, int], code: str, replay: bool, wrong: str
) -> None:
    for found, message in ranks(2).run(refuse, {"mesh": mesh, "experts": {"replay": replay}}, wrong):
        assert found == code, message


def test_models_and_blocks_that_cannot_follow_are_refused() -> None:
    replays = {"experts": {"replay": True}}
    with refused("ep-without-experts", "experts.replay=true"):
        plan_layout(nn.Linear(3, 3), Config.from_dict(replays).resolve(world_size=1))
    compiled = Config.from_dict({**replays, "compile": {"enabled": True}})
    with refused("compile-with-experts", "experts.replay=false"):
        plan_layout(mixture().make(), compiled.resolve(world_size=1))
