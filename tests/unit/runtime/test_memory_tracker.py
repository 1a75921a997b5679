"""The memory tracker's counts against counts that know nothing of it."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shardwise.runtime.memory_tracker import AllocatorStats, Category, MemoryTracker, TorchAllocator


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def num_bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def live(tracker: MemoryTracker, category: Category) -> int:
    return tracker.snapshot().live_bytes[category]


# Registered storages.


def test_a_storage_is_one_object_until_it_dies() -> None:
    """The tracker relies on this: a torch that makes a new object for each call would empty its records."""
    source = torch.ones(8, requires_grad=True)
    saved = (source * 2).exp()
    assert saved.untyped_storage() is saved.view(2, 4).untyped_storage()
    reference = weakref.ref(saved.untyped_storage())
    total = saved.sum()
    del saved
    gc.collect()
    assert reference() is not None, "the autograd graph holds the storage, so its object must live"
    total.backward()
    assert reference() is None


def test_views_are_booked_once() -> None:
    tracker = MemoryTracker()
    weight = torch.zeros(6, 4)
    for view in (weight, weight.t(), weight[1:], weight.view(-1), weight.detach(), nn.Parameter(weight)):
        tracker.track(view, Category.PARAMETERS)
    tracker.track(weight.untyped_storage(), Category.PARAMETERS)
    assert live(tracker, Category.PARAMETERS) == tracker.snapshot().total_bytes == 96


def test_bytes_leave_with_the_storage_not_with_the_tensor() -> None:
    tracker = MemoryTracker()
    weight = torch.zeros(10)
    tracker.track(weight, Category.PARAMETERS)
    view = weight[5:]
    del weight
    assert live(tracker, Category.PARAMETERS) == 40
    del view
    assert live(tracker, Category.PARAMETERS) == 0


def test_resizing_is_followed_exactly() -> None:
    tracker = MemoryTracker()
    full = torch.zeros(100)
    view = full[:3]
    tracker.track(full, Category.GATHERED)
    tracker.resize(full, 0)
    assert (live(tracker, Category.GATHERED), full.untyped_storage().nbytes()) == (0, 0)
    tracker.reset_peak()
    tracker.resize(view, 400)
    assert (live(tracker, Category.GATHERED), full.untyped_storage().nbytes()) == (400, 400)
    tracker.resize(full, 0)
    assert tracker.snapshot().peak_bytes == 400
    tracker.resize(full, 400)
    del full, view
    assert tracker.snapshot().total_bytes == 0


def test_resizing_an_unknown_storage_is_refused() -> None:
    with pytest.raises(ValueError, match="12 bytes"):
        MemoryTracker().resize(torch.zeros(3), 0)


def test_tracking_again_moves_the_bytes() -> None:
    tracker = MemoryTracker()
    tensor = torch.zeros(5)
    tracker.track(tensor, Category.OTHER)
    tracker.track(tensor, Category.GRADIENTS)
    snapshot = tracker.snapshot()
    assert (snapshot.live_bytes[Category.OTHER], snapshot.live_bytes[Category.GRADIENTS]) == (0, 20)
    assert snapshot.peak_live_bytes[Category.GRADIENTS] == snapshot.peak_bytes == 20


def test_the_tracker_says_what_a_storage_is() -> None:
    tracker, weight = MemoryTracker(), torch.zeros(4)
    tracker.track(weight, Category.PARAMETERS)
    assert tracker.category_of(weight[1:].untyped_storage()) is Category.PARAMETERS
    assert tracker.category_of(torch.zeros(4).untyped_storage()) is None


def test_tensors_of_another_device_are_left_out() -> None:
    tracker = MemoryTracker()
    elsewhere = torch.zeros(5, device="meta")
    tracker.track(elsewhere, Category.OTHER)
    with tracker.meter():
        kept = torch.empty_like(elsewhere)
    assert kept.device.type == "meta"
    assert tracker.snapshot().total_bytes == 0


def test_peak_keeps_the_categories_of_its_moment() -> None:
    tracker = MemoryTracker()
    weight, bucket = torch.zeros(10), torch.zeros(100)
    tracker.track(weight, Category.PARAMETERS)
    tracker.track(bucket, Category.BUCKETS)
    del bucket
    tracker.track(torch.zeros(1), Category.OTHER)
    snapshot = tracker.snapshot()
    assert snapshot.peak_bytes == 440
    assert {category: n for category, n in snapshot.peak_live_bytes.items() if n} == {
        Category.PARAMETERS: 40,
        Category.BUCKETS: 400,
    }
    tracker.reset_peak()
    assert tracker.snapshot().peak_bytes == 40


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_counts_equal_a_model_of_them(data: st.DataObject) -> None:
    tracker = MemoryTracker()
    tensors: dict[int, tuple[Tensor, Category]] = {}
    peak_bytes = 0
    for step in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["make", "drop", "resize", "move"]))
        if action == "make" or not tensors:
            tensors[step] = (torch.empty(data.draw(st.integers(0, 50))), data.draw(st.sampled_from(Category)))
            tracker.track(*tensors[step])
        else:
            key = data.draw(st.sampled_from(sorted(tensors)))
            tensor, category = tensors.pop(key)
            if action == "resize":
                tracker.resize(tensor, data.draw(st.integers(0, 300)))
            elif action == "move":
                category = data.draw(st.sampled_from(Category))
                tracker.track(tensor, category)
            if action != "drop":
                tensors[key] = (tensor, category)
            del tensor
        expected = dict.fromkeys(Category, 0)
        for tensor, category in tensors.values():
            expected[category] += tensor.untyped_storage().nbytes()
            del tensor
        peak_bytes = max(peak_bytes, sum(expected.values()))
        snapshot = tracker.snapshot()
        assert snapshot.live_bytes == expected
        assert snapshot.peak_bytes == peak_bytes


def test_storages_may_be_made_and_die_on_any_thread() -> None:
    tracker = MemoryTracker()

    def churn() -> None:
        for _ in range(200):
            tracker.track(torch.empty(7), Category.BUCKETS)

    kept = torch.empty(3)
    tracker.track(kept, Category.PARAMETERS)
    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tracker.snapshot().total_bytes == 12


# The meter.


def block(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width), nn.LayerNorm(width))


def profiled_bytes(run: Callable[[], None]) -> tuple[int, int]:
    """(bytes left live, peak) of a run, by torch's own allocator events."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        run()
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    live_bytes = peak_bytes = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live_bytes += event.nbytes()
        peak_bytes = max(peak_bytes, live_bytes)
    return live_bytes, peak_bytes


def plain(model: nn.Sequential, hidden: Tensor) -> Tensor:
    return model(hidden)


def recomputed(model: nn.Sequential, hidden: Tensor) -> Tensor:
    for layer in model:
        hidden = checkpoint(layer, hidden, use_reentrant=False, preserve_rng_state=False)
    return hidden


def selectively_recomputed(model: nn.Sequential, hidden: Tensor) -> Tensor:
    def contexts() -> object:
        return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])

    for layer in model:
        hidden = checkpoint(layer, hidden, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return hidden


@pytest.mark.parametrize("forward", [plain, recomputed, selectively_recomputed])
def test_forward_and_backward_equal_torchs_own_events(
    forward: Callable[[nn.Sequential, Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[block() for _ in range(3)])
    inputs = torch.randn(16, 32)  # [batch, width]
    tracker = MemoryTracker()

    def run() -> None:
        with tracker.meter():
            forward(model, inputs).square().mean().backward()

    live_bytes, peak_bytes = profiled_bytes(run)
    snapshot = tracker.snapshot()
    assert live_bytes == num_bytes(*model.parameters()), "only the gradients are left"
    assert snapshot.total_bytes == snapshot.live_bytes[Category.ACTIVATIONS] == live_bytes
    assert snapshot.peak_bytes == peak_bytes
    model.zero_grad()
    assert tracker.snapshot().total_bytes == 0


def test_recomputation_needs_less() -> None:
    """Guards the test above: were the forwards the same, it would say nothing of checkpointing."""
    peaks = []
    for forward in (plain, selectively_recomputed, recomputed):
        torch.manual_seed(0)
        model, tracker = nn.Sequential(*[block() for _ in range(6)]), MemoryTracker()
        with tracker.meter():
            forward(model, torch.randn(64, 32)).square().mean().backward()
        peaks.append(tracker.snapshot().peak_bytes)
    assert peaks[0] > peaks[1] > peaks[2]


def train_one_step(model: nn.Module, optimizer: torch.optim.Optimizer, tracker: MemoryTracker) -> None:
    inputs = torch.ones(16, 32)  # [batch, width]
    with tracker.meter():
        loss = model(inputs).square().mean()
        assert live(tracker, Category.ACTIVATIONS) > 16 * 32 * 4
        loss.backward()
    for parameter in model.parameters():
        tracker.track(parameter.grad, Category.GRADIENTS)
    with tracker.meter(Category.OTHER):
        optimizer.step()
    for state in optimizer.state.values():
        for tensor in state.values():
            tracker.track(tensor, Category.OPTIMIZER)


def test_training_steps_by_category_and_nothing_is_left() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(block(), block())
    optimizer = torch.optim.AdamW(model.parameters())
    tracker = MemoryTracker()
    for name in model.state_dict():
        tracker.track(model.get_parameter(name), Category.PARAMETERS)
    size_bytes = num_bytes(*model.parameters())
    expected = dict.fromkeys(Category, 0) | {
        Category.PARAMETERS: size_bytes,
        Category.GRADIENTS: size_bytes,
        Category.OPTIMIZER: 2 * size_bytes + 4 * len(model.state_dict()),
    }
    live_bytes, peak_bytes = profiled_bytes(functools.partial(train_one_step, model, optimizer, tracker))
    snapshot = tracker.snapshot()
    assert snapshot.live_bytes == expected
    assert live_bytes == snapshot.total_bytes - size_bytes
    # Scratch scalars that AdamW's kernels make and drop within one op are all that the meter misses.
    inputs_bytes = 16 * 32 * 4
    assert 0 <= peak_bytes - inputs_bytes + size_bytes - snapshot.peak_bytes <= 32
    train_one_step(model, optimizer, tracker)
    assert tracker.snapshot().live_bytes == expected, "after a second step nothing more is live"
    del model, optimizer
    gc.collect()
    assert tracker.snapshot().total_bytes == 0


def test_saved_activations_of_a_forward_are_the_formula() -> None:
    tracker = MemoryTracker()
    first, second = nn.Linear(8, 16), nn.Linear(16, 4)
    inputs = torch.randn(5, 8)  # [batch, width]
    with tracker.meter():
        output = second(first(inputs).relu())
    # relu and the second layer save the same storage; the first layer's output dies; inputs are not ours.
    assert live(tracker, Category.ACTIVATIONS) == num_bytes(output) + 5 * 16 * 4
    output.sum().backward()
    assert live(tracker, Category.ACTIVATIONS) == num_bytes(output)
    del output
    assert live(tracker, Category.ACTIVATIONS) == 0


def test_what_was_made_outside_is_not_an_activation() -> None:
    tracker = MemoryTracker()
    outside = torch.zeros(4, 4)
    with tracker.meter():
        views = [
            outside.t(),
            outside.view(16),
            outside[0],
            *outside.split(2),
            outside.add_(1),
            outside.detach(),
        ]
        assert tracker.snapshot().total_bytes == 0
        copy = outside.contiguous().clone()
    assert live(tracker, Category.ACTIVATIONS) == num_bytes(copy)
    del views


def test_the_meter_sees_constructors_multiple_outputs_and_resizing_ops() -> None:
    tracker = MemoryTracker()
    with tracker.meter():
        constant = torch.tensor([1.0, 2.0])
        assert live(tracker, Category.ACTIVATIONS) == 8
        values, indices = constant.sort()
        assert live(tracker, Category.ACTIVATIONS) == 8 + 8 + 16
        out = torch.empty(0)
        torch.add(constant, 1, out=out)
        assert live(tracker, Category.ACTIVATIONS) == 8 + 8 + 16 + 8
        values.resize_(100)
        assert live(tracker, Category.ACTIVATIONS) == 8 + 400 + 16 + 8
        pieces = torch.zeros(6).unbind()
        assert live(tracker, Category.ACTIVATIONS) == 8 + 400 + 16 + 8 + 24
    del constant, values, indices, out, pieces
    assert tracker.snapshot().total_bytes == 0


def test_the_meter_lets_sparse_gradients_pass() -> None:
    embedding = nn.Embedding(10, 4, sparse=True)
    tracker = MemoryTracker()
    with tracker.meter():
        embedding(torch.tensor([1, 2])).sum().backward()
    assert embedding.weight.grad.layout is torch.sparse_coo


def test_resizing_within_the_meter_reaches_the_peak() -> None:
    """As the engine does: unsharded parameters grow for a block's forward and go before the next."""
    tracker = MemoryTracker()
    full = torch.zeros(64, 64)
    tracker.track(full, Category.GATHERED)
    tracker.resize(full, 0)
    tracker.reset_peak()
    with tracker.meter():
        hidden = torch.ones(1, 64)
        tracker.resize(full, 64 * 64 * 4)
        output = hidden @ full.fill_(1.0)
        tracker.resize(full, 0)
        output = output * 2
    snapshot = tracker.snapshot()
    assert snapshot.peak_live_bytes[Category.GATHERED] == 64 * 64 * 4
    assert snapshot.peak_live_bytes[Category.ACTIVATIONS] == num_bytes(hidden, output)
    assert snapshot.total_bytes == num_bytes(hidden, output)


def test_the_meter_is_of_its_thread_and_of_backwards_started_there() -> None:
    tracker = MemoryTracker()
    kept: list[Tensor] = []
    weight = torch.zeros(50, requires_grad=True)
    with tracker.meter():
        thread = threading.Thread(target=lambda: kept.append(torch.zeros(50)))
        thread.start()
        thread.join()
        assert tracker.snapshot().total_bytes == 0, "another thread's tensors are not seen"
        (weight * 2).sum().backward()
    assert tracker.snapshot().total_bytes == num_bytes(weight.grad)


def test_two_meters_at_once_are_refused_and_an_error_leaves_the_meter() -> None:
    tracker = MemoryTracker()
    with pytest.raises(RuntimeError, match="meter"), tracker.meter(), tracker.meter():
        pass
    outside = torch.zeros(3) + 1
    assert tracker.snapshot().total_bytes == 0
    with tracker.meter():
        inside = torch.zeros(3)
    assert tracker.snapshot().total_bytes == num_bytes(inside) == num_bytes(outside)


def test_snapshots_say_whether_a_meter_was_on() -> None:
    tracker = MemoryTracker()
    assert not tracker.snapshot().metered
    with tracker.meter():
        tracker.reset_peak()
    assert tracker.snapshot().metered
    tracker.reset_peak()
    assert not tracker.snapshot().metered


# Devices with an allocator of their own.


class FakeAllocator:
    """An allocator whose counters the test sets, as CUDA's stand between two entries of the tracker."""

    def __init__(self) -> None:
        self.allocated_bytes = self.peak_bytes = self.reserved_bytes = 0

    def set(self, allocated_bytes: int) -> None:
        self.allocated_bytes = allocated_bytes
        self.peak_bytes = max(self.peak_bytes, allocated_bytes)
        self.reserved_bytes = max(self.reserved_bytes, allocated_bytes)

    def stats(self) -> AllocatorStats:
        return AllocatorStats(self.allocated_bytes, self.peak_bytes, self.reserved_bytes)

    def reset_peak(self) -> None:
        self.peak_bytes = self.allocated_bytes


def test_an_allocator_gives_the_totals_and_the_rest_is_activations() -> None:
    allocator = FakeAllocator()
    tracker = MemoryTracker(allocator=allocator)
    weight = torch.zeros(25)
    tracker.track(weight, Category.PARAMETERS)
    allocator.set(1000)
    allocator.set(700)
    snapshot = tracker.snapshot()
    assert snapshot.live_bytes == dict.fromkeys(Category, 0) | {
        Category.PARAMETERS: 100,
        Category.ACTIVATIONS: 600,
    }
    assert (snapshot.total_bytes, snapshot.peak_bytes, snapshot.reserved_bytes) == (700, 1000, 1000)
    assert snapshot.fragment_bytes == 300
    assert snapshot.peak_live_bytes == {}, "the tracker did not look when the peak passed"
    tracker.reset_peak()
    snapshot = tracker.snapshot()
    assert (snapshot.peak_bytes, snapshot.peak_live_bytes[Category.ACTIVATIONS]) == (700, 600)


def test_a_metered_peak_is_reported_by_the_counts_of_its_moment() -> None:
    allocator = FakeAllocator()
    tracker = MemoryTracker(allocator=allocator)
    weight, full = torch.zeros(25), torch.zeros(50)
    with tracker.meter():
        allocator.set(100)
        tracker.track(weight, Category.PARAMETERS)
        allocator.set(300)
        tracker.track(full, Category.GATHERED)
        peak = tracker.snapshot().peak_live_bytes
        assert (peak[Category.PARAMETERS], peak[Category.GATHERED], peak[Category.ACTIVATIONS]) == (
            100,
            200,
            0,
        )
        # Activations come and go while both are live; only then is one freed.
        allocator.set(1300)
        allocator.set(300)
        tracker.resize(full, 0)
        allocator.set(100)
        peak = tracker.snapshot().peak_live_bytes
        assert (peak[Category.PARAMETERS], peak[Category.GATHERED], peak[Category.ACTIVATIONS]) == (
            100,
            200,
            1000,
        )
        with_no_op = torch.ones(3) + 1
    assert with_no_op.numel() == 3
    assert tracker.snapshot().live_bytes[Category.ACTIVATIONS] == 0, "no op is watched where the allocator counts"


def test_registered_memory_beside_the_allocator_makes_no_negative_count() -> None:
    tracker = MemoryTracker(allocator=FakeAllocator())
    weight = torch.zeros(25)
    tracker.track(weight, Category.PARAMETERS)
    snapshot = tracker.snapshot()
    assert (snapshot.total_bytes, snapshot.live_bytes[Category.ACTIVATIONS]) == (100, 0)
    assert (snapshot.reserved_bytes, snapshot.fragment_bytes) == (100, 0)


def test_the_cuda_allocator_reads_the_counters_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = {
        "allocated_bytes": {"all": {"current": 5, "peak": 9}},
        "reserved_bytes": {"all": {"current": 20, "peak": 30}},
    }
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: counters)
    assert TorchAllocator(torch.device("cuda:0")).stats() == AllocatorStats(5, 9, 20)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: {})
    assert TorchAllocator(torch.device("cuda:0")).stats() == AllocatorStats(0, 0, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_counts_on_cuda() -> None:
    tracker = MemoryTracker("cuda")
    before_bytes = torch.cuda.memory_allocated()
    tracker.reset_peak()
    weight = torch.zeros(1024, 1024, device="cuda")
    tracker.track(weight, Category.PARAMETERS)
    with tracker.meter():
        product = weight @ weight
        del product
        tracker.resize(weight, 0)
        snapshot = tracker.snapshot()
    assert snapshot.total_bytes == torch.cuda.memory_allocated() >= before_bytes
    assert snapshot.peak_bytes == torch.cuda.max_memory_allocated() >= before_bytes + 2 * 4 * 2**20
    assert snapshot.peak_live_bytes[Category.PARAMETERS] == 4 * 2**20
    assert snapshot.reserved_bytes == torch.cuda.memory_reserved()


# Pools.


class HalfIdle:
    fragment_bytes = 24


def test_snapshots_count_the_idle_bytes_of_pools_and_do_not_keep_them() -> None:
    tracker, pool = MemoryTracker(), HalfIdle()
    tensor = torch.zeros(10)
    tracker.track(tensor, Category.BUCKETS)
    tracker.attach_pool(pool)
    snapshot = tracker.snapshot()
    assert (snapshot.total_bytes, snapshot.reserved_bytes, snapshot.fragment_bytes) == (40, 40, 24)
    del pool
    assert tracker.snapshot().fragment_bytes == 0
