"""What an engine can do beside plain training, it does with stages as one plain process does, in float64."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.live_bytes import LiveBytes, settled_bytes, storage_bytes
from harness.pool import WorkerPool
from harness.reference import PARITY, Trace, call_model, check_parity, max_error
from harness.refusals import refusal_of
from harness.tensor import make_case, step_batches, train_split, train_whole
from harness.tier_bytes import HostPages
from harness.time_outs import fail_after
from harness.training import make_config, make_optimizer, merge_ranks
from shardwise import Engine, NonFiniteLossError, initialize
from shardwise.runtime.float64 import float64_throughout
from shardwise.runtime.memory_tracker import Category

pytest.importorskip("transformers")

NUM_STEPS = 2
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


def train_in_parts(rank: int, world_size: int, model: str, sections: Sections, parts: Sequence[int]) -> list[float]:
    """Losses and norms of two steps, whose micro-batches come in as many calls as there are parts."""
    engine = make_engine(rank, sections, model)
    numbers: list[float] = []
    for step in range(NUM_STEPS):
        of_all = step_batches(make_case(model), step, world_size // 2, NUM_MICRO_BATCHES)
        batches = of_all[rank % (world_size // 2) :: world_size // 2]
        for num_batches in parts:
            engine.forward_backward([batches.pop(0) for _ in range(num_batches)])
        result = engine.step()
        numbers += result.loss, result.grad_norm
    engine.close()
    return numbers


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", ["dropout", *VARIANTS])
def test_micro_batches_that_come_in_parts_count_as_if_they_came_at_once(
    ranks: WorkerPool, tmp_path: Path, name: str
) -> None:
    num_ranks, sections = (4, {"zero": {"stage": 0}}) if name == "dropout" else VARIANTS[name]
    if "nvme" in sections.get("tiers", {}).values():
        sections = {**sections, "tiers": {**sections["tiers"], "nvme_path": str(tmp_path)}}
    model = "gpt2" if name == "dropout" else "deep-tied"
    sections = {"pipeline": {}, **sections}
    once, apart = (ranks(num_ranks).run(train_in_parts, model, sections, parts) for parts in ([3], [2, 1]))
    assert apart == [pytest.approx(numbers, rel=1e-9) for numbers in once]


# Beside training steps. Of the deep model stage 0 has the blocks before CUT, or the first quarter of those of a V.

CUT = {"cut": ["blocks.4"]}
LOOPED = {"schedule": "interleaved", "virtual_stages": 2, "cut": ["blocks.2", "blocks.4", "blocks.6"]}
V = {**LOOPED, "schedule": "zb-v"}
SHARDED = {"zero": {"stage": 3}, "pipeline": CUT}
EACH_TIME = {"zero": {"stage": 3}, "pipeline": {"gather": "micro-batch", "schedule": "zb-h1", **CUT}}


def make_engine(rank: int, sections: Sections, model: str = "deep", **given: Any) -> Engine:
    case = make_case(model)
    config = make_config(NUM_MICRO_BATCHES, {"mesh": {"pp": 2}, "pipeline": CUT, **sections})
    return initialize(case.build(torch.float64, seed=rank), config, **{"loss_fn": case.loss, **given})


def batches_of(rank: int, world_size: int, step: int, num_batches: int = NUM_MICRO_BATCHES) -> list[Any]:
    num_data_ranks = world_size // 2
    batches = step_batches(make_case("deep"), step, num_data_ranks, num_batches)
    return batches[rank % num_data_ranks :: num_data_ranks]


def parameters_of(engine: Engine) -> dict[str, Tensor]:
    return {name: engine.read(name) for name, _ in engine.model.named_parameters()}


def plain_loss(model: nn.Module, batches: Iterable[Any], backward: bool) -> float:
    """The mean loss of batches; leaves its gradient."""
    case = make_case("deep")
    total, count = 0.0, 0.0
    for batch in batches:
        batch_sum, batch_count = case.loss(call_model(model, batch, case.loss), batch)
        if backward:
            batch_sum.backward()
        total, count = total + batch_sum.item(), count + float(batch_count)
    for parameter in model.parameters() if backward else ():
        if parameter.grad is not None:
            parameter.grad /= count
    return total / count


def evaluate(rank: int, world_size: int, sections: Sections, nums: Sequence[int]) -> list[float]:
    losses = []
    with float64_throughout(), make_engine(rank, sections) as engine:
        for step, num_batches in enumerate(nums):
            losses.append(engine.eval_step(batches_of(rank, world_size, step + 1, num_batches)).loss)
            losses.append(engine.train_step(batches_of(rank, world_size, step)).loss)
    return losses


@pytest.mark.parametrize(
    ("num_ranks", "sections"), [(2, {"pipeline": LOOPED}), (2, {"pipeline": V}), (4, SHARDED), (4, EACH_TIME)]
)
def test_any_number_of_batches_is_evaluated_between_steps(
    ranks: WorkerPool, num_ranks: int, sections: Sections
) -> None:
    nums = (1, 2, 5)
    model = make_case("deep").build(torch.float64)
    optimizer = make_optimizer(model)
    expected = []
    with float64_throughout():
        for step, num_batches in enumerate(nums):
            batches = step_batches(make_case("deep"), step + 1, num_ranks // 2, num_batches)
            expected.append(plain_loss(model, batches, backward=False))
            optimizer.zero_grad()
            batches = step_batches(make_case("deep"), step, num_ranks // 2, NUM_MICRO_BATCHES)
            expected.append(plain_loss(model, batches, backward=True))
            optimizer.step()
    for losses in ranks(num_ranks).run(evaluate, sections, nums):
        assert max_error(losses, expected) <= PARITY


BOTTOM, TOP = ("embed", *(f"blocks.{index}." for index in range(4))), (*(f"blocks.{i}." for i in range(4, 8)), "norm")
FREEZINGS: dict[str, list[tuple[str, ...]]] = {
    "between-steps": [(), ("blocks.1", "blocks.6.ffn"), ("embed", "blocks.5"), ()],
    "first-stage": [BOTTOM, BOTTOM, ()],
    "last-stage": [(), (*TOP, "head"), ()],
}


def freeze(model: nn.Module, frozen: tuple[str, ...]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else True)


def train_frozen(
    rank: int, world_size: int, name: str, sections: Sections
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    case = make_case("deep")
    model = case.build(torch.float64, seed=rank)
    freeze(model, FREEZINGS[name][0])
    config = make_config(NUM_MICRO_BATCHES, {"mesh": {"pp": 2}, "pipeline": CUT, **sections})
    results = []
    with float64_throughout(), initialize(model, config, loss_fn=case.loss) as engine:
        for step, frozen in enumerate(FREEZINGS[name]):
            freeze(model, frozen)
            results.append(engine.train_step(batches_of(rank, world_size, step)))
        return [each.loss for each in results], [each.grad_norm for each in results], parameters_of(engine)


def train_frozen_plainly(name: str, num_data_ranks: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = make_case("deep").build(torch.float64)
    optimizer = make_optimizer(model)
    losses, norms = [], []
    with float64_throughout():
        for step, frozen in enumerate(FREEZINGS[name]):
            freeze(model, frozen)
            optimizer.zero_grad()
            batches = step_batches(make_case("deep"), step, num_data_ranks, NUM_MICRO_BATCHES)
            losses.append(plain_loss(model, batches, backward=True))
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), math.inf).item())
            optimizer.step()
    return losses, norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("name", "num_ranks", "sections"),
    [
        ("between-steps", 2, {"pipeline": V}),
        ("between-steps", 4, EACH_TIME),
        ("first-stage", 2, {}),
        ("first-stage", 4, SHARDED),
        ("last-stage", 2, {"pipeline": {"schedule": "zb-h1", **CUT}}),
        ("last-stage", 4, SHARDED),
    ],
)
def test_frozen_parameters_and_stages_equal_one_process(
    ranks: WorkerPool, name: str, num_ranks: int, sections: Sections
) -> None:
    expected = train_frozen_plainly(name, num_ranks // 2)
    for found in ranks(num_ranks).run(train_frozen, name, sections):
        assert [max_error(*each) <= PARITY for each in zip(found, expected, strict=True)] == [True] * 3


def overflow(rank: int, world_size: int, at: int) -> list[tuple[bool, float]]:
    found = []
    with make_engine(rank, {"precision": {"param": "fp16"}}) as engine:
        parameter = next(group.parameters[0] for group in engine.parts.sharding.groups if group.grads is not None)
        for step in range(3):
            handle = parameter.register_hook(lambda gradient, bad=step == 1 and rank == at: gradient / (1 - bad))
            result = engine.train_step(batches_of(rank, world_size, step))
            handle.remove()
            found.append((result.skipped, result.loss_scale))
    return found


@pytest.mark.parametrize("at", [0, 1])
def test_an_overflow_in_one_stage_skips_the_step_in_all(ranks: WorkerPool, at: int) -> None:
    expected = [(False, 65536.0), (True, 65536.0), (False, 32768.0)]
    assert ranks(2).run(overflow, at) == [expected] * 2


def lose(rank: int, world_size: int, at: str, sections: Sections) -> tuple[tuple[str, str], bool, float]:
    """A step in which a module's output is not a number, and the same one without."""
    with float64_throughout(), make_engine(rank, sections) as engine:
        engine.train_step(batches_of(rank, world_size, 0))
        before = parameters_of(engine)
        handle = engine.model.get_submodule(at).register_forward_hook(lambda module, args, output: output * math.nan)
        refusal = refusal_of(lambda: engine.train_step(batches_of(rank, world_size, 1)))
        handle.remove()
        after = parameters_of(engine)
        is_same = all(torch.equal(before[name], after[name]) for name in before)
        return refusal, is_same, engine.train_step(batches_of(rank, world_size, 1)).loss


@pytest.mark.parametrize(
    ("num_ranks", "at", "found_on", "sections"),
    [
        (2, "blocks.1.ffn", 0, {}),
        (2, "blocks.3.ffn", 1, {"pipeline": LOOPED}),
        (2, "blocks.4.ffn", 1, {"pipeline": V}),
        (4, "blocks.6.ffn", 2, SHARDED),
    ],
)
def test_a_loss_that_is_no_number_names_the_module_on_all_ranks(
    ranks: WorkerPool, num_ranks: int, at: str, found_on: int, sections: Sections
) -> None:
    loss = reference("deep", num_ranks // 2, None).losses[1]
    for (code, message), is_same, later_loss in ranks(num_ranks).run(lose, at, sections):
        assert code == "loss-not-finite"
        assert f"{at} on rank {found_on}" in message
        assert is_same
        assert max_error([later_loss], [loss]) <= PARITY


def fail_in_loss(rank: int, world_size: int) -> list[tuple[str, str]]:
    """What a rank meets where the loss raises in the second micro-batch, and after that."""
    case = make_case("deep")
    losses: list[Tensor] = []

    def loss_fn(output: Tensor, batch: Any) -> Any:
        losses.append(output)
        if len(losses) == NUM_MICRO_BATCHES + 2:
            raise ZeroDivisionError("in the loss")
        return case.loss(output, batch)

    engine = make_engine(rank, {"run": {"timeout_s": 60.0, "watchdog_s": 0.0}}, loss_fn=loss_fn)
    engine.train_step(batches_of(rank, world_size, 0))
    fail_after(engine.comm.comm_log, 5.0)
    refusals = [refusal_of(lambda: engine.train_step(batches_of(rank, world_size, 1)))]
    engine.zero_grad()
    refusals.append(refusal_of(lambda: engine.train_step(batches_of(rank, world_size, 1))))
    refusals.append(refusal_of(lambda: engine.eval_step(batches_of(rank, world_size, 1))))
    return refusals


def test_after_an_exception_amid_a_schedule_no_stage_takes_an_old_message_for_a_new_one(ranks: WorkerPool) -> None:
    first, last = ranks(2).run(fail_in_loss)
    assert last[0] == ("ZeroDivisionError", "in the loss")
    assert first[0][0] == "collective-failed"
    assert "rank 0 failed in " in first[0][1]  # to receive, or to send where the other is gone by then
    assert [code for code, _ in (*first[1:], *last[1:])] == ["stages-out-of-step"] * 4


def fail_before_messages(rank: int, world_size: int) -> tuple[list[tuple[str, str]], float]:
    """Mistakes that every rank reports, each followed by `zero_grad`; then a good step."""
    with float64_throughout(), make_engine(rank, {"run": {"timeout_s": 60.0, "seed": 5}}) as engine:
        engine.model.extra = nn.Linear(2, 2)
        refusals = [refusal_of(lambda: engine.train_step(batches_of(rank, world_size, 0)))]
        del engine.model.extra
        refusals.append(refusal_of(lambda: engine.train_step(batches_of(rank, world_size, rank))))
        refusals.append(refusal_of(lambda: engine.train_step(batches_of(rank, world_size, 0, 1))))
        engine.zero_grad()
        return refusals, engine.train_step(batches_of(rank, world_size, 0)).loss


def test_mistakes_are_reported_on_all_stages_before_they_exchange_anything(ranks: WorkerPool) -> None:
    expected = reference("deep", 1, None).losses[0]
    for refusals, loss in ranks(2).run(fail_before_messages):
        assert [code for code, _ in refusals] == ["model-parameters-changed", "batches-differ", "micro-batch-count"]
        for (_, message), value in zip(refusals, ("extra.weight", "rank 1", "batch.accumulation=3"), strict=True):
            assert value in message
        assert max_error([loss], [expected]) <= PARITY


def close(rank: int, world_size: int, sections: Sections) -> list[dict[str, int]]:
    """What each of two engines, one after the other, leaves when it is closed, and when its model is gone too."""
    batches = batches_of(rank, world_size, 0)
    with LiveBytes() as live, HostPages() as pages:
        live.mark(tensor for batch in batches for tensor in batch)
        return [use_and_close(rank, sections, fails, batches, live, pages) for fails in (False, True)]


def use_and_close(
    rank: int, sections: Sections, fails: bool, batches: list[Any], live: LiveBytes, pages: HostPages
) -> dict[str, int]:
    baseline = settled_bytes(live)
    others = set(threading.enumerate())  # an engine of another test may not have been collected yet
    engine = make_engine(rank, sections, "deep-tied")
    model, driver = engine.model, weakref.ref(engine.parts.sharding)
    engine.eval_step(batches[:2])
    engine.train_step(batches)
    if fails:
        handle = model.head.register_forward_hook(lambda module, args, output: output * math.nan)
        with contextlib.suppress(NonFiniteLossError):
            engine.train_step(batches)
        handle.remove()
    engine.close()
    engine.close()
    gc.collect()
    held = [each for each in model.parameters() if not each.is_meta]
    tracker = engine.memory.snapshot().live_bytes
    found = {
        "closed": settled_bytes(live) - baseline - storage_bytes(held),
        "shared": sum(each.untyped_storage().nbytes() - each.nbytes for each in held),
        "swapped": len({type(each) for each in model.parameters()} - {nn.Parameter}),
        "tracked": sum(num_bytes for category, num_bytes in tracker.items() if category != Category.OTHER),
        "host": engine.tiers.memory.snapshot().total_bytes + pages.live_bytes,
        "threads": sum("shardwise" in each.name for each in threading.enumerate() if each not in others),
        "hooks": sum(
            len(value) for module in model.modules() for key, value in vars(module).items() if "_hooks" in key
        ),
        "forwards": sum("forward" in vars(module) for module in model.modules()),
        "classes": sum("<locals>" in type(module).__qualname__ for module in model.modules()),
    }
    del engine, model, held
    gc.collect()
    return found | {"driver": 0 if driver() is None else 1, "gone": settled_bytes(live) - baseline}


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("num_ranks", "sections"),
    [
        (2, {"pipeline": V, "recompute": {"mode": "full"}}),
        (4, SHARDED),
        pytest.param(4, EACH_TIME, marks=pytest.mark.full),
        (2, {"pipeline": LOOPED, "zero": {"stage": 3}, "tiers": {**HOST, "params": "host"}}),
    ],
)
def test_closed_engines_leave_their_stages_only(ranks: WorkerPool, num_ranks: int, sections: Sections) -> None:
    for engines in ranks(num_ranks).run(close, sections):
        assert [{key: value for key, value in found.items() if value} for found in engines] == [{}, {}]
