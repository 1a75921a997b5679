"""A closed engine leaves the model's own parameters and nothing else: no bytes, hooks, threads or process groups."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness import split_model
from harness.live_bytes import LiveBytes, settled_bytes, storage_bytes
from harness.models import CASES, make_batches
from harness.pool import WorkerPool
from harness.refusals import refused
from harness.tier_bytes import HostPages
from harness.training import make_config
from harness.waiting import wait_until
from shardwise import Engine, initialize
from shardwise.config.errors import code_of
from shardwise.runtime.memory_tracker import Category

STAGES = [0, 1, 2, 3]
CASE = CASES["transformer"]
PLAN = {
    "embedding": "vocab",
    "head": "head",
    "blocks.*.qkv": "column parts=3 units=2",
    "blocks.*.out": "row units=2",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "blocks.?": "local num_heads",
}
PRECISION = {"param": "bf16"}


def make_engine(stage: int, model: nn.Module | None = None, **overrides: dict[str, Any]) -> Engine:
    sections = {
        "zero": {"stage": stage},
        "precision": PRECISION,
        "recompute": {"mode": "full", "every": 2},
        **overrides,
    }
    plan = PLAN if "mesh" in overrides else None
    return initialize(model or CASE.build(torch.float32), make_config(2, sections), loss_fn=CASE.loss, plan=plan)


def batches_of(rank: int, world_size: int) -> list[Any]:
    return make_batches(CASE, num_steps=1, world_size=world_size, num_micro_batches=2)[0][rank]


def collected_bytes(live: LiveBytes) -> int:
    """Live bytes once they stand still, and garbage is gone."""
    gc.collect()
    return settled_bytes(live)


def fail_in_forward(engine: Engine, batches: list[Any]) -> None:
    engine.backward(engine(batches[0]))
    engine(batches[1] | {"tokens": batches[1]["tokens"] + 1000})


def fail_in_backward(engine: Engine, batches: list[Any]) -> None:
    def fail(gradient: Tensor) -> None:
        raise ZeroDivisionError

    with engine.no_sync():
        engine.backward(engine(batches[0]))
    handle = engine.model.blocks[1].register_forward_hook(
        lambda module, args, output: output.register_hook(fail) and None
    )
    try:
        engine.backward(engine(batches[1]))
    finally:
        handle.remove()


def fail_in_step(engine: Engine, batches: list[Any]) -> None:
    for batch in batches:
        engine.backward(engine(batch))
    engine.optimizer.param_groups[0]["lr"] = None
    engine.step()


def fail_gathered(engine: Engine, batches: list[Any]) -> None:
    with engine.gathered():
        raise ZeroDivisionError


FAILURES = {
    "none": lambda engine, batches: engine.train_step(batches),
    "forward": fail_in_forward,
    "backward": fail_in_backward,
    "step": fail_in_step,
    "gathered": fail_gathered,
}


def close(
    rank: int, world_size: int, stage: int, failure: str, tp: int = 1, tiers: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Bytes, hooks and weak references after an engine was closed, and after the model is gone."""
    batches = batches_of(rank // tp, world_size)
    overrides: dict[str, Any] = {"mesh": {"tp": tp}} if tp > 1 else {}
    overrides |= {"tiers": tiers} if tiers else {}
    with LiveBytes() as live, HostPages() as pages:
        live.mark(tensor for batch in batches for tensor in batch.values())
        baseline = collected_bytes(live)
        # Of engines that other tests have dropped and that are not collected yet.
        others, other_threads = registered_products(), set(threading.enumerate())
        engine = make_engine(stage, **overrides)
        model = engine.model
        engine.train_step(batches)
        with contextlib.suppress(Exception):
            FAILURES[failure](engine, batches)
        full = [weakref.ref(group.full.untyped_storage()) for group in engine.parts.sharding.groups]
        driver = weakref.ref(engine.parts.sharding)
        engine.close()
        engine.close()
        gc.collect()
        found = {
            "host": engine.tiers.memory.snapshot().total_bytes + pages.live_bytes,
            "threads": [
                each.name for each in threading.enumerate() if "shardwise" in each.name and each not in other_threads
            ],
            "closed": collected_bytes(live) - baseline - storage_bytes(model.parameters()),
            "own": [parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in model.parameters()],
            "plain": all(type(parameter) is nn.Parameter for parameter in model.parameters()),
            "tracked": engine.memory.snapshot().live_bytes,
            "hooks": num_hooks(model),
            "ops": sorted(registered_products() - others),
            "attributes": [key for module in model.modules() for key in module.__dict__ if "shardwise" in key],
            "forwards": [name for name, module in model.named_modules() if "forward" in module.__dict__],
        }
        model(**batches[0]).float().sum().backward()
        engine.model.zero_grad()
        del engine
        gc.collect()
        found["driver"] = driver()
        del model
        found["gone"] = collected_bytes(live) - baseline
        found["full"] = [reference() for reference in full]
    return found


def registered_products() -> set[str]:
    names = [name for name in dir(torch.ops.shardwise) if "row_product" in name]
    return {name for name in names if torch._C._jit_get_schemas_for_operator(f"shardwise::{name}")}


def num_hooks(model: nn.Module) -> int:
    of_modules = [len(hooks) for module in model.modules() for key, hooks in module.__dict__.items() if "_hooks" in key]
    of_parameters = [len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters()]
    return sum(of_modules) + sum(of_parameters)


@pytest.mark.quick(2)
@pytest.mark.parametrize("failure", list(FAILURES))
@pytest.mark.parametrize("stage", STAGES)
def test_a_closed_engine_leaves_the_model_only(ranks: WorkerPool, stage: int, failure: str) -> None:
    for found in ranks(2).run(close, stage, failure):
        check_left(found)


@pytest.mark.parametrize(("stage", "failure"), [(0, "none"), (2, "backward"), (3, "forward"), (3, "gathered")])
def test_a_closed_split_model_is_whole(ranks: WorkerPool, stage: int, failure: str) -> None:
    for found in ranks(2).run(close, stage, failure, 2):
        check_left(found)


@pytest.mark.quick(2)
@pytest.mark.parametrize("failure", [each for each in FAILURES if each != "step"])  # reported later
@pytest.mark.parametrize(("stage", "tier"), [(2, "host"), (3, "host"), (3, "nvme")])
def test_a_closed_engine_leaves_no_tier(ranks: WorkerPool, tmp_path: Path, stage: int, tier: str, failure: str) -> None:
    tiers: dict[str, Any] = {"grads": tier, "optimizer": tier, "activations": "host"}
    tiers |= {"params": tier} if stage == 3 else {}
    tiers |= {"nvme_path": str(tmp_path)} if tier == "nvme" else {}
    for found in ranks(2).run(close, stage, failure, 1, tiers):
        check_left(found)
    assert not list(tmp_path.iterdir())


def check_left(found: dict[str, Any]) -> None:
    assert (found["host"], found["threads"]) == (0, [])
    assert found["closed"] == 0
    assert all(found["own"])
    assert found["plain"]
    assert {category for category, num_bytes in found["tracked"].items() if num_bytes} <= {Category.OTHER}
    assert (found["hooks"], found["attributes"], found["forwards"], found["ops"]) == (0, [], [], [])
    assert found["driver"] is None
    assert found["gone"] == 0
    assert found["full"] == [None] * len(found["full"])


class Large(nn.Module):
    """4 MB of parameters in blocks, so that one engine's states that stay would show."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def make_ten(rank: int, world_size: int, stage: int) -> tuple[int, int, int]:
    """Growth of resident memory in MB, of threads and of process groups from the second to the twelfth engine."""
    before = usage()
    for number in range(12):
        engine = initialize(Large(), make_config(1, {"zero": {"stage": stage}}), loss_fn=mean_square)
        engine.train_step([torch.ones(2, 512, dtype=torch.float64)])
        engine.close()
        del engine
        gc.collect()
        if number == 1:
            before = usage()
    after = usage()
    return after[0] - before[0], after[1] - before[1], after[2] - before[2]


def mean_square(output: Tensor, batch: Tensor) -> Tensor:
    return output.square().mean()


def usage() -> tuple[int, int, int]:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    num_groups = len(dist.distributed_c10d._world.pg_map)
    return int(status["VmRSS"].split()[0]) // 1024, int(status["Threads"]), num_groups


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("stage", [0, 3])
def test_engines_one_after_the_other_do_not_grow(ranks: WorkerPool, stage: int) -> None:
    for grown_mb, num_threads, num_groups in ranks(2).run(make_ten, stage):
        assert grown_mb < 40  # one engine that stays is 16 to 40 MB, ten are ten times that
        assert num_threads <= 1
        assert num_groups == 0


def test_the_second_close_leaves_a_later_engine_alone() -> None:
    first = make_engine(2)
    first.close()
    second = make_engine(2, first.model)
    first.close()
    with refused("model-has-engine"):
        make_engine(2, first.model)
    second.close()


def test_a_closed_engine_is_refused() -> None:
    engine = make_engine(0)
    engine.close()
    batches = batches_of(0, 1)
    for use in (
        lambda: engine.train_step(batches),
        lambda: engine.eval_step(batches),
        lambda: engine.read("positions"),
        lambda: engine.offload(),
        lambda: engine.zero_grad(),
        lambda: engine.gathered().__enter__(),
    ):
        with refused("engine-closed"):
            use()


def test_a_given_optimizer_is_given_back() -> None:
    model = CASE.build(torch.float32)
    groups = [{"params": list(model.blocks.parameters()), "lr": 0.1}, {"params": [model.positions], "lr": 0.2}]
    optimizer = torch.optim.AdamW(groups)
    for _ in range(2):
        config = make_config(2, {"precision": {"param": "fp32"}})
        engine = initialize(model, config, loss_fn=CASE.loss, optimizer=optimizer)
        engine.train_step(batches_of(0, 1))
        engine.close()
        assert [[id(each) for each in group["params"]] for group in optimizer.param_groups] == [
            [id(each) for each in model.blocks.parameters()],
            [id(model.positions)],
        ]
        assert not optimizer.state


def test_a_failed_start_leaves_nothing() -> None:
    model = CASE.build(torch.float32)
    sections = {"optimizer": {"name": "admw"}}
    with refused("unknown-optimizer", "admw"):
        make_engine(2, model, **sections)
    assert num_hooks(model) == 0
    assert not [name for name, module in model.named_modules() if "forward" in module.__dict__]
    make_engine(2, model).close()


def initialize_failing(rank: int, world_size: int, stage: int, failing_rank: int) -> dict[str, Any]:
    """What is left of the model where one rank's optimizer cannot be made."""
    model = split_model.build(torch.float32)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    kinds = [type(module) for module in model.modules()]

    def make(groups: Any) -> torch.optim.Optimizer:
        if rank == failing_rank:
            raise ZeroDivisionError("no optimizer")
        return torch.optim.SGD(groups, lr=0.1)

    sections = {"zero": {"stage": stage}, "mesh": {"tp": 2}}
    try:
        initialize(model, make_config(1, sections), optimizer=make, plan=split_model.make_plan(2))
    except Exception as error:
        refusal = code_of(error, type(error).__name__), str(error)
    return {
        "refusal": refusal,
        "same": all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters()),
        "kinds": [type(module) for module in model.modules()] == kinds,
        "hooks": num_hooks(model),
    }


@pytest.mark.parametrize(("num_ranks", "stage"), [(2, 0), (4, 3)])
def test_all_ranks_raise_where_one_fails_to_start(ranks: WorkerPool, num_ranks: int, stage: int) -> None:
    """The others would go on alone, and meet its collectives of taking the model back with those of a forward."""
    for rank, found in enumerate(ranks(num_ranks).run(initialize_failing, stage, 1)):
        code, message = found["refusal"]
        assert code == ("ZeroDivisionError" if rank == 1 else "other-rank-start")
        assert all(value in message for value in ("no optimizer", *(["rank 1"] if rank == 0 else [])))
        assert (found["same"], found["kinds"], found["hooks"]) == (True, True, 0)


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_engine_may_be_closed_without_its_values(stage: int) -> None:
    with LiveBytes() as live:
        baseline = collected_bytes(live)
        engine = make_engine(stage, tiers={"optimizer": "host"})
        engine.train_step(batches_of(0, 1))
        model, shapes = engine.model, [parameter.shape for parameter in engine.model.parameters()]
        engine.close(keep_values=False)
        assert all(parameter.is_meta and type(parameter) is nn.Parameter for parameter in model.parameters())
        assert [parameter.shape for parameter in model.parameters()] == shapes
        assert num_hooks(model) == 0
        assert collected_bytes(live) == baseline


def test_engines_with_tiers_live_beside_each_other_and_one_that_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    tiers = {"params": "nvme", "grads": "host", "optimizer": "nvme", "nvme_path": str(tmp_path)}
    with HostPages() as pages:
        engines = [make_engine(3, tiers=tiers) for _ in range(3)]
        batches = batches_of(0, 1)
        losses = [[engine.train_step(batches).loss for engine in engines] for _ in range(2)]
        assert all(len(set(each)) == 1 for each in losses)
        assert len(list(tmp_path.iterdir())) == 3
        engines.pop().close()
        assert len(list(tmp_path.iterdir())) == 2
        engines.pop()  # and the model with it
        await_true(lambda: len(list(tmp_path.iterdir())) == 1)
        assert engines[0].train_step(batches).loss < losses[0][0]
        engines.pop().close()
        await_true(lambda: pages.live_bytes == 0)
    assert not list(tmp_path.iterdir())
    await_true(lambda: not [each for each in threading.enumerate() if "shardwise" in each.name])


def await_true(check: Callable[[], bool]) -> None:
    """Threads of a dropped engine end what is under way first."""

    def is_true() -> bool:
        gc.collect()
        return check()

    assert wait_until(is_true)
