"""What an engine can beside plain training, it can wherever states are stored, and computes the same bits."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.models import CASES, make_batches
from harness.pool import WorkerPool
from harness.refusals import refused
from harness.training import make_config
from shardwise import Engine, backward, initialize

CASE = CASES["odd-shapes"]
FIRST = "blocks.0.up.weight"

TIERS: dict[str, dict[str, str]] = {
    "host-2": {"optimizer": "host", "grads": "host"},
    "nvme-2": {"optimizer": "nvme"},
    "nvme-3": {"optimizer": "nvme", "grads": "nvme", "params": "nvme"},
    "mixed-3": {"optimizer": "host", "grads": "nvme", "params": "nvme"},
}
Make = Callable[..., Engine]
Seen = list[Any]


def batches_of(rank: int, step: int) -> list[Any]:
    return make_batches(CASE, num_steps=step + 1, world_size=rank + 1, num_micro_batches=1)[step][rank]


def use_states(make: Make, rank: int) -> Seen:
    """Reads and writes of every state, also through `gathered`, between backwards of which some stay on the rank."""
    engine = make()
    seen: Seen = [engine.train_step(batches_of(rank, 0)).grad_norm]
    with engine.no_sync():
        engine.backward(engine(batches_of(rank, 1)[0]))
    for step in (2, 3):
        engine.backward(engine(batches_of(rank, step)[0]))
    seen += [engine.read(FIRST, "grad"), engine.states_of(FIRST)]
    engine.write(FIRST, engine.read(FIRST, "grad") * 2, "grad")
    seen.append(engine.step().grad_norm)
    engine.write(FIRST, engine.read(FIRST, "exp_avg") * 0.5, "exp_avg")
    engine.write(FIRST, 7.0, "step")
    with engine.gathered(write=True) as model, torch.no_grad():
        model.head.weight.mul_(0.5)
    seen.append(engine.eval_step(batches_of(rank, 2)).loss)
    return [*seen, engine.train_step(batches_of(rank, 4)).loss, engine]


def freeze(make: Make, rank: int) -> Seen:
    """Blocks frozen and unfrozen between steps: their groups are made again."""
    engine = make()
    seen: Seen = []
    for step, frozen in enumerate([("blocks.1",), ("embedding", "blocks.1.up"), ("blocks.0", "norm"), ()]):
        for name, parameter in engine.model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
        seen.append(engine.train_step(batches_of(rank, step)).loss)
    return [*seen, engine]


def give_an_optimizer(make: Make, rank: int) -> Seen:
    """One that does not have all parameters, and one from a factory."""

    def some(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": list(model.blocks.parameters()), "lr": 1e-2}], lr=1e-3, fused=True)

    first, second = make(optimizer=some), make(optimizer=lambda _: lambda groups: torch.optim.Adagrad(groups, lr=0.1))
    seen: Seen = []
    for step in range(3):
        seen += [engine.train_step(batches_of(rank, step)).loss for engine in (first, second)]
    return [*seen, first.states_of("head.weight"), second.states_of(FIRST), second.read(FIRST, "sum"), first]


def follow_a_schedule(make: Make, rank: int) -> Seen:
    """Rates that are tensors, which the schedule writes into before the host has come to the step."""

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), fused=True)

    engine = make(optimizer=adam)
    engine.scheduler = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.1)
    return [*(engine.train_step(batches_of(rank, step)).loss for step in range(3)), engine]


def overflow(make: Make, rank: int) -> Seen:
    """A loss scale that is too large at first: steps are skipped on the way down."""
    engine = make({"precision": {"param": "fp16"}})
    results = [engine.train_step(batches_of(rank, 0)) for _ in range(8)]
    assert results[0].skipped
    return [*((each.loss, each.skipped, each.loss_scale) for each in results), engine]


def fail_midway(make: Make, rank: int) -> Seen:
    """Losses that are not finite, exceptions in the forward and in the backward: nothing was stepped."""
    engine = make({"optimizer": {"clip_norm": 1.0}})
    seen: Seen = [engine.train_step(batches_of(rank, 0)).loss]
    with torch.no_grad():
        weight = engine.read("head.weight")
    engine.write("head.weight", torch.full_like(weight, float("inf")))
    with refused("loss-not-finite", "step 2", "as before the step"):
        engine.train_step(batches_of(rank, 1))
    engine.write("head.weight", weight)
    handle = engine.model.blocks[1].register_forward_hook(_raise_later)
    with pytest.raises(ZeroDivisionError):
        engine.train_step(batches_of(rank, 1))
    handle.remove()
    engine.zero_grad()
    return [*seen, engine.train_step(batches_of(rank, 2)).loss, engine]


def _raise_later(module: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(lambda gradient: 1 / 0)


def train_two(make: Make, rank: int) -> Seen:
    """Two engines with one loss."""
    first, second = make(), make()
    seen: Seen = []
    for step in range(3):
        losses = [engine(batches_of(rank, step)[0]) for engine in (first, second)]
        backward(losses[0] + 2 * losses[1], [first, second])
        seen += [losses[0].item(), first.step().grad_norm, second.step().grad_norm]
    return [*seen, first]


SCENARIOS = {
    each.__name__: each
    for each in (use_states, freeze, give_an_optimizer, follow_a_schedule, overflow, fail_midway, train_two)
}


def run(rank: int, world_size: int, name: str, overrides: dict[str, Any]) -> tuple[Seen, dict[str, Tensor | None], int]:
    engines: list[Engine] = []

    def make(more: dict[str, Any] | None = None, optimizer: Any = None) -> Engine:
        config = make_config(1, {"precision": {"param": "fp32"}, **overrides, **(more or {})})
        model = CASE.build(torch.float32)
        given = None if optimizer is None else optimizer(model)
        engines.append(initialize(model, config, loss_fn=CASE.loss, optimizer=given))
        return engines[-1]

    *seen, engine = SCENARIOS[name](make, rank)
    names = [place.name for group in engine.layout.groups for place in group.params]
    states = {name: engine.read(name, "master") for name in names}
    folders = [Path(each.config.tiers.nvme_path or "none") for each in engines]
    files = [file for folder in set(folders) for file in folder.glob(f"*-rank-{rank}*/[0-9]*")]
    expected = [
        1
        for each in engines
        for state in each.layout.states
        for group in each.layout.groups
        if state.tier_in(group) == "nvme" and state.is_kept_by(group)
    ]
    for each in engines:
        each.close()
    return seen, states, len(files) - len(expected)


@pytest.mark.parametrize("where", list(TIERS))
@pytest.mark.parametrize("name", list(SCENARIOS))
def test_features_compute_the_same_bits(ranks: WorkerPool, tmp_path: Path, name: str, where: str) -> None:
    tiers, stage = TIERS[where], int(where[-1])
    path = {"nvme_path": str(tmp_path)} if "nvme" in tiers.values() else {}
    plain = ranks(2).run(run, name, {"zero": {"stage": stage}})
    actual = ranks(2).run(run, name, {"zero": {"stage": stage}, "tiers": {**tiers, **path}})
    for (seen, states, num_surplus), (wanted, wanted_states, _) in zip(actual, plain, strict=True):
        assert repr(seen) == repr(wanted)
        assert all(torch.equal(states[each], wanted_states[each]) for each in wanted_states)
        if name != "give_an_optimizer":  # whose states are others than those that were reserved
            assert num_surplus == 0
    assert not list(tmp_path.iterdir())


def test_optimizers_without_a_step_of_states_on_nvme_are_refused(tmp_path: Path) -> None:
    model = CASE.build(torch.float32)
    tiers = {"optimizer": "nvme", "nvme_path": str(tmp_path)}
    config = make_config(1, {"precision": {"param": "fp32"}, "tiers": tiers})
    with refused("host-step-optimizer", "NAdam"):
        initialize(model, config, loss_fn=CASE.loss, optimizer=torch.optim.NAdam(model.parameters()))


def test_an_exception_in_a_backward_steps_nothing_at_close(tmp_path: Path) -> None:
    config = make_config(1, {"precision": {"param": "fp32"}, "tiers": {"optimizer": "host"}})
    engine = initialize(CASE.build(torch.float32), config, loss_fn=CASE.loss)
    engine.train_step(batches_of(0, 0))
    before = engine.read("head.weight")
    engine.model.blocks[2].register_forward_hook(_raise_later)
    with pytest.raises(ZeroDivisionError):
        engine.train_step(batches_of(0, 1))
    engine.close()
    assert torch.equal(engine.model.head.weight.detach(), before)


@pytest.mark.parametrize("where", ["host-2", "nvme-3"])
def test_an_engine_that_is_dropped_leaves_nothing(tmp_path: Path, where: str) -> None:
    path = {"nvme_path": str(tmp_path)} if where == "nvme-3" else {}
    config = make_config(1, {"zero": {"stage": int(where[-1])}, "tiers": {**TIERS[where], **path}})
    engine = initialize(CASE.build(torch.float64), config, loss_fn=CASE.loss)
    engine.train_step(batches_of(0, 0))
    engine.tiers.wait_idle()
    left = weakref.ref(engine.tiers)
    del engine
    # A thread says that its work is done just before it lets go of it.
    deadline = time.monotonic() + 10
    while left() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    assert left() is None
    assert list(tmp_path.iterdir()) == []


def save_almost_nothing(rank: int, world_size: int, root: Path) -> tuple[int, bool, bool]:
    config = make_config(1, {"tiers": {"optimizer": "nvme", "nvme_path": str(root / "swap")}})
    model = nn.Linear(1, 1, bias=False).double()
    with initialize(model, config, loss_fn=lambda output, batch: output.sum()) as engine:
        engine.train_step([torch.ones(1, 1)])
        engine.save(root / "saved", wait=False)
        pieces = len(engine.parts.sharded.pieces)
        return pieces, engine.checkpoints.saver.is_saving, engine.checkpoints.saver._has_said_so


def test_all_ranks_wait_for_a_save_or_none(ranks: WorkerPool, tmp_path: Path) -> None:
    """Also one that holds nothing but padding."""
    assert ranks(2).run(save_almost_nothing, tmp_path) == [(1, False, True), (0, False, True)]
