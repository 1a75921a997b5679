"""The harness is held to known answers before anything is held to the harness."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from harness.combinations import combination_id, cover, pairwise, product
from harness.live_bytes import LiveBytes, storage_bytes
from harness.models import CASES, every_rank, make_batches
from harness.pool import GROUP_TIMEOUT_S, RankError, WorkerPool
from harness.reference import Trace, call_model, check_parity, max_error, train_reference
from harness.wire_bytes import Call, WireBytes, ring_equivalent_bytes


@torch.library.custom_op("shardwise_test::sum_over_ranks", mutates_args=())
def sum_over_ranks(x: Tensor) -> Tensor:
    """An out-of-place collective whose backward is another one."""
    total = x.clone()
    dist.all_reduce(total)
    return total


@sum_over_ranks.register_autograd
def _sum_over_ranks_backward(context: Any, gradient: Tensor) -> Tensor:
    return sum_over_ranks(gradient)


# --- pool ---


def _describe(rank: int, world_size: int, values: dict[str, Tensor]) -> tuple[int, int, int, Tensor]:
    total = values["x"] + rank
    dist.all_reduce(total)
    return rank, world_size, dist.get_world_size(), total


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_results_come_back_by_rank(ranks: WorkerPool, num_ranks: int) -> None:
    results = ranks(num_ranks).run(_describe, {"x": torch.tensor([1.0, 2.0])})
    extra = sum(range(num_ranks))
    for rank, (*place, total) in enumerate(results):
        assert place == [rank, num_ranks, num_ranks]
        assert total.tolist() == [num_ranks + extra, 2 * num_ranks + extra]


def _make_mesh(rank: int, world_size: int) -> tuple[float, int, float]:
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("rows", "columns"))
    total = torch.tensor(float(rank))
    dist.all_reduce(total, group=mesh.get_group("columns"))
    return total.item(), len(os.listdir("/proc/self/task")), torch.rand(()).item()


def test_a_call_leaves_nothing_to_the_next(ranks: WorkerPool) -> None:
    first, *others = [ranks(4).run(_make_mesh) for _ in range(3)]
    assert [total for total, _, _ in first] == [1.0, 1.0, 5.0, 5.0]
    assert all(other == first for other in others), "totals, numbers of threads or random numbers differ"


def _raise_in_rank_1(rank: int, world_size: int, others: str) -> None:
    print("printed by rank", rank)
    if rank == 1:
        raise KeyError("no such thing")
    if others == "wait for it":
        dist.barrier()
    if others == "sleep":
        time.sleep(600)


@pytest.mark.parametrize("others", ["return", "wait for it", "sleep"])
def test_an_exception_names_its_rank_and_does_not_wait_for_the_others(ranks: WorkerPool, others: str) -> None:
    start_s = time.monotonic()
    with pytest.raises(RankError, match="_raise_in_rank_1: rank 1 of 3 raised KeyError") as caught:
        ranks(3).run(_raise_in_rank_1, others)
    assert (caught.value.rank, caught.value.kind) == (1, "KeyError")
    assert 'raise KeyError("no such thing")' in str(caught.value), "the traceback is missing"
    assert "printed by rank 1" in str(caught.value)
    assert len(ranks(3).run(_describe, {"x": torch.zeros(1)})) == 3
    assert time.monotonic() - start_s < GROUP_TIMEOUT_S, "it has waited for a timeout of the group or of the pool"


def _kill_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _use_freed_storage(rank: int, world_size: int) -> None:
    x = torch.ones(1_000_000)
    x.untyped_storage().resize_(0)
    x.mul_(2)


@pytest.mark.parametrize(("fn", "code"), [(_kill_rank_0, -9), (_use_freed_storage, -11)])
def test_a_dead_worker_is_named_and_replaced(ranks: WorkerPool, fn: Any, code: int) -> None:
    with pytest.raises(RankError, match=f"rank . of 2 died with exit code {code}") as caught:
        ranks(2).run(fn)
    assert caught.value.kind == "died"
    assert (code == -9) or "in _use_freed_storage" in str(caught.value), "where it died is missing"
    assert len(ranks(2).run(_describe, {"x": torch.zeros(1)})) == 2


def _wait_for_rank_0(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(600)
    dist.barrier()


def test_a_hang_is_ended_and_shown(ranks: WorkerPool) -> None:
    ranks(2).run(_describe, {"x": torch.zeros(1)})  # the ranks have imported this module when the clock starts
    with pytest.raises(RankError, match="rank 0 of 2 has not answered in 5 s") as caught:
        ranks(2).run(_wait_for_rank_0, timeout_s=5.0)  # in which both come to their wait
    assert caught.value.kind == "hung"
    assert str(caught.value).count("in _wait_for_rank_0") == 2, "the stack of each rank is missing"
    assert len(ranks(2).run(_describe, {"x": torch.zeros(1)})) == 2


def test_misuse_of_the_pool_is_refused(ranks: WorkerPool) -> None:
    with pytest.raises(ValueError, match="use a module-level function"):
        ranks(1).run(lambda rank, world_size: None)
    with pytest.raises(ValueError, match="num_ranks=9: the pool has 1 to 8 ranks"):
        ranks(9)


# --- live bytes ---


def test_live_bytes_of_a_small_graph() -> None:
    weight = nn.Parameter(torch.ones(4, 3))  # 48 bytes, made before: counted because it is marked
    with LiveBytes() as live:
        live.mark([weight])
        assert live.live_bytes() == 48
        x = torch.ones(2, 3)  # 24
        y = x @ weight.t()  # [2, 4]: 32, the transpose is a view
        loss = (y * y).sum()  # the square is 32 and dies; 4 stay
        assert live.live_bytes() == 48 + 24 + 32 + 4
        assert live.peak_bytes() == 48 + 24 + 32 + 32 + 4
        assert live.largest(1) == [(48, "marked")]
        loss.backward()
        del y, loss
        assert live.live_bytes() == 48 + 24 + 48  # the gradient has come
        weight.grad = None
    del x
    assert live.live_bytes() == 48, "deaths after the mode was left are not followed"


def test_live_bytes_follow_resized_storages() -> None:
    original = torch.UntypedStorage.resize_
    with LiveBytes() as live:
        flat = torch.zeros(100)
        view = flat[10:20]
        flat.untyped_storage().resize_(0)
        assert live.live_bytes() == 0
        view.untyped_storage().resize_(400)
        assert live.live_bytes() == 400
        flat.resize_(200)
        assert live.live_bytes() == 800
        live.reset_peak()
        del view, flat
        assert (live.live_bytes(), live.peak_bytes()) == (0, 800)
    assert torch.UntypedStorage.resize_ is original


def test_storage_bytes_counts_shared_storages_once() -> None:
    base = torch.zeros(10, dtype=torch.float64)
    assert storage_bytes([base, base.view(2, 5), torch.zeros(3)]) == 92


def test_peak_equals_the_allocators(tmp_path: Path) -> None:
    """torch's profiler reports every allocation of the CPU allocator: a witness that knows no storages."""
    case = CASES["transformer"]
    model, batch = case.build(torch.float64), case.batch(0, 4, torch.float64)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        total, count = case.loss(call_model(model, batch, case.loss), batch)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # the optimizer's states exist from here on
    with LiveBytes() as live:
        step()
        live.reset_peak()
        before = live.live_bytes()
        step()
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    changes = [event["args"]["Bytes"] for event in events if event["name"] == "[memory]"]
    assert max(itertools.accumulate(changes)) == live.peak_bytes() - before


# --- wire bytes ---


def _issue_each_collective(rank: int, world_size: int) -> list[Call]:
    part, full = torch.ones(6), torch.ones(6 * world_size)
    neighbours = [(rank + 1) % world_size, (rank - 1) % world_size]
    with WireBytes() as wire:
        dist.all_reduce(part)
        dist.all_reduce(part, async_op=True).wait()
        dist.all_gather_into_tensor(full, part)
        dist.all_gather(list(full.chunk(world_size)), part)
        dist.reduce_scatter_tensor(part, full, async_op=True).wait()
        dist.reduce_scatter(part, list(full.chunk(world_size)))
        dist.all_to_all_single(torch.empty_like(full), full)
        dist.broadcast(part, 0)
        dist.reduce(part, 0)
        dist.barrier()
        send = dist.P2POp(dist.isend, part, neighbours[0])
        receive = dist.P2POp(dist.irecv, torch.empty(6), neighbours[1])
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
    return wire.calls


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_wire_bytes_of_each_collective(ranks: WorkerPool, num_ranks: int) -> None:
    part_bytes, full_bytes = 24, 24 * num_ranks
    ring = Fraction(num_ranks - 1, num_ranks)
    expected = [
        ("allreduce_", part_bytes, 2 * ring),
        ("allreduce_", part_bytes, 2 * ring),
        ("_allgather_base_", full_bytes, ring),
        ("allgather_", full_bytes, ring),
        ("_reduce_scatter_base_", full_bytes, ring),
        ("reduce_scatter_", full_bytes, ring),
        ("alltoall_base_", full_bytes, ring),
        ("broadcast_", part_bytes, ring),
        ("reduce_", part_bytes, ring),
        ("barrier", None, 0),
        ("send", part_bytes, 1),
        ("recv_", part_bytes, 0),
    ]
    for calls in ranks(num_ranks).run(_issue_each_collective):
        for call, (name, tensor_bytes, share) in zip(calls, expected, strict=True):
            assert (call.name, call.group_size) == (name, num_ranks)
            assert tensor_bytes in (call.tensor_bytes, None)
            assert ring_equivalent_bytes([call]) == share * call.tensor_bytes


class _SumGradients(torch.autograd.Function):
    """The identity; its backward all-reduces, as a module hook would."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        dist.all_reduce(gradient, async_op=True).wait()
        return gradient


def _issue_in_unusual_places(rank: int, world_size: int) -> list[list[Call]]:
    x = torch.ones(5, requires_grad=True)
    half = dist.new_group([0, 1])
    with LiveBytes(), WireBytes() as backward:
        _SumGradients.apply(x).sum().backward()
    with WireBytes() as custom:
        sum_over_ranks(x).sum().backward()
    with WireBytes() as coalesced, dist._coalescing_manager():
        dist.all_reduce(torch.ones(5))
        dist.all_reduce(torch.ones(2))
    with WireBytes() as subgroup:
        if rank < 2:
            dist.all_reduce(torch.ones(5), group=half)
    return [mode.calls for mode in (backward, custom, coalesced, subgroup)]


def test_wire_bytes_see_backward_custom_ops_coalesced_calls_and_groups(ranks: WorkerPool) -> None:
    results = ranks(3).run(_issue_in_unusual_places)
    for rank, (backward, custom, coalesced, subgroup) in enumerate(results):
        assert backward == [Call("allreduce_", 3, 20)]
        assert custom == [Call("allreduce_", 3, 20)] * 2
        assert coalesced == [Call("allreduce_coalesced_", 3, 28)]
        assert subgroup == [Call("allreduce_", 2, 20)] * (rank < 2)
        assert [call.ranks for call in (*backward, *subgroup)] == [(0, 1, 2), (0, 1)][: 1 + (rank < 2)]


def _issue_gather(rank: int, world_size: int) -> None:
    with WireBytes():
        dist.gather(torch.ones(1), [torch.ones(1)])


def test_an_op_without_a_rule_is_refused(ranks: WorkerPool) -> None:
    with pytest.raises(RankError, match="c10d::gather_ has no rule"):
        ranks(1).run(_issue_gather)


# --- models and reference ---


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_every_case_trains_and_is_deterministic(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    batches = make_batches(case, num_steps=3, world_size=1, num_micro_batches=2, dtype=dtype)
    first, second = (train_reference(case.build(dtype), every_rank(batches), case.loss, _sgd) for _ in range(2))
    check_parity(first, second, tolerance=0.0)
    assert all(parameter.dtype == dtype for parameter in first.parameters.values())


@pytest.mark.parametrize("name", CASES)
def test_exactly_the_parameters_without_gradient_stay(name: str) -> None:
    case = CASES[name]
    batches = make_batches(case, num_steps=1, world_size=2, num_micro_batches=1)
    trace = train_reference(case.build(torch.float64), every_rank(batches), case.loss, _sgd)
    start = {key: value.detach() for key, value in case.build(torch.float64).named_parameters()}
    still = {key for key, value in trace.parameters.items() if torch.equal(value, start[key])}
    assert still == {key for key in start if not trace.gradients.get(key, torch.zeros(1)).any()}
    assert bool(still) == (name in ("frozen-parameters", "unused-parameters", "pytree-output"))


def test_cases_hold_what_their_names_say() -> None:
    odd = CASES["odd-shapes"].build(torch.float64)
    block_numels = {sum(p.numel() for p in block.parameters()) for block in odd.get_submodule("blocks").children()}
    assert block_numels == {217}
    assert sum(p.numel() for p in odd.parameters()) == 3 * 217 + 533
    assert any(p.ndim == 0 for p in odd.parameters())
    tied = CASES["transformer"].build(torch.float64)
    assert tied.get_parameter("head.weight") is tied.get_parameter("embedding.weight")
    frozen = CASES["frozen-parameters"].build(torch.float64)
    assert {p.requires_grad for p in frozen.get_submodule("blocks.1").parameters()} == {True, False}


def test_weights_depend_on_the_seed_and_on_no_random_state() -> None:
    build = CASES["transformer"].build
    first = nn.utils.parameters_to_vector(build(torch.float64).parameters())
    torch.manual_seed(99)
    state = torch.get_rng_state()
    again, other = (nn.utils.parameters_to_vector(build(torch.float64, seed).parameters()) for seed in (0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_reference_gradient_is_that_of_sum_over_count() -> None:
    """Micro-batches of different counts give what one large batch does; the mean of their means would not."""
    case = CASES["transformer"]
    small = [case.batch(seed, 2, torch.float64) for seed in range(3)]
    large = {key: torch.cat([batch[key] for batch in small]) for key in small[0]}
    split, whole = (train_reference(case.build(torch.float64), [b], case.loss, _sgd) for b in (small, [large]))
    check_parity(split, whole, tolerance=1e-12)
    assert len({int((batch["labels"] >= 0).sum()) for batch in small}) > 1

    model = case.build(torch.float64)
    total, count = case.loss(call_model(model, large, case.loss), large)
    (total / count).backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    assert max_error(whole.gradients, gradients) < 1e-12
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
    assert whole.grad_norms == pytest.approx([norm], rel=1e-12)
    assert whole.losses == pytest.approx([(total / count).item()], rel=1e-12)


def test_reference_clips_to_the_norm() -> None:
    case = CASES["residual-mlp"]
    batches = every_rank(make_batches(case, num_steps=1, world_size=1, num_micro_batches=1))
    start = {key: value.detach() for key, value in case.build(torch.float64).named_parameters()}
    clipped, free = (
        train_reference(case.build(torch.float64), batches, case.loss, _sgd, clip_norm) for clip_norm in (0.01, None)
    )
    assert clipped.grad_norms == free.grad_norms
    assert clipped.grad_norms[0] > 0.01
    moved = torch.cat([(clipped.parameters[key] - start[key]).flatten() for key in start])
    assert moved.norm().item() == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_batches_of_a_step_do_not_depend_on_how_ranks_and_micro_batches_share_them() -> None:
    case = CASES["pytree-output"]
    shapes = [(1, 4), (2, 2), (4, 1)]
    flat = [
        torch.stack(every_rank(make_batches(case, num_steps=2, world_size=n, num_micro_batches=m))[1])
        for n, m in shapes
    ]
    assert torch.equal(flat[0], flat[1])
    assert torch.equal(flat[0], flat[2])


def test_max_error_is_relative_to_the_largest_of_all() -> None:
    expected = {"a": torch.tensor([100.0, 1.0]), "b": torch.tensor(0.0)}
    assert max_error({"a": torch.tensor([100.0, 1.5]), "b": torch.tensor(0.0)}, expected) == 0.005
    assert max_error({"a": expected["a"], "b": torch.tensor(float("nan"))}, expected) == float("inf")
    assert max_error([0.0], [0.0]) == 0.0
    assert max_error([1.0], [0.0]) == float("inf")
    with pytest.raises(AssertionError, match=r"only one side has: \['b'\]"):
        max_error({"a": expected["a"]}, expected)
    with pytest.raises(AssertionError, match=r"b: shape \(1,\), expected \(\)"):
        max_error({"a": expected["a"], "b": torch.zeros(1)}, expected)


def test_check_parity_names_field_and_entry() -> None:
    expected = Trace([1.0], [1.0], {"w": torch.ones(2)}, {"v": torch.ones(2), "w": torch.ones(2)})
    actual = Trace([1.0], [1.0], {"w": torch.ones(2)}, {"v": torch.ones(2), "w": torch.tensor([1.0, 1.1])})
    check_parity(expected, expected)
    with pytest.raises(AssertionError, match=r"parameters: max error 0\.1 > 1e-09, largest at w"):
        check_parity(actual, expected)


# --- combinations ---


@settings(max_examples=40)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 5))
def test_pairwise_covers_every_allowed_pair(sizes: list[int], modulus: int) -> None:
    factors = {f"factor{index}": list(range(size)) for index, size in enumerate(sizes)}

    def allowed(row: dict[str, int]) -> bool:
        return modulus == 0 or sum(row.values()) % modulus != 1

    def pairs(rows: list[dict[str, int]]) -> set[Any]:
        return {pair for row in rows for pair in itertools.combinations(row.items(), min(2, len(sizes)))}

    every, chosen = product(factors, allowed), pairwise(factors, allowed)
    assert pairs(chosen) == pairs(every)
    assert all(row in every for row in chosen)
    assert chosen == pairwise(factors, allowed)


def test_pairwise_is_small() -> None:
    factors = {
        "stage": [0, 1, 2, 3],
        "accumulation": [1, 4],
        "clip": [0, 1],
        "recompute": [0, 1],
        "n": [1, 2, 3, 4],
    }
    assert len(product(factors)) == 128
    assert len(pairwise(factors)) == 16


def test_cover_marks_what_pairwise_leaves_out() -> None:
    factors = {"a": [0, 1], "b": ["x", "y"], "c": [None, 2.0]}
    parameters = cover(factors)
    assert len(parameters) == 8
    ordinary = [parameter.id for parameter in parameters if not parameter.marks]
    assert sorted(ordinary) == sorted(combination_id(row) for row in pairwise(factors))


def test_cover_takes_what_is_quick_and_loses_no_value() -> None:
    factors = {"a": [0, 1, 2], "b": ["x", "y"], "c": [None, 2.0]}
    parameters = cover(factors, lambda row: row["a"] != 1, lambda row: row["c"] is None or row["b"] == "x")
    assert len(parameters) == 8
    ordinary = [parameter.values[0] for parameter in parameters if not parameter.marks]
    assert all(row["c"] is None or row["b"] == "x" for row in ordinary)
    assert {(row["a"], row["b"]) for row in ordinary} == {(0, "x"), (0, "y"), (2, "x"), (2, "y")}
    with pytest.raises(ValueError, match=r"`quick` leaves out \['a=2', 'b=y'\]"):
        cover(factors, None, lambda row: row["a"] < 2 and row["b"] == "x")


@pytest.mark.full
def test_full_tests_run_on_request_only(request: pytest.FixtureRequest) -> None:
    assert request.config.getoption("--full")
