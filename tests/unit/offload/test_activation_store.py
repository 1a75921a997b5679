"""What leaves for host memory, when it comes back, and that the gradients are those of a plain checkpoint."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.live_bytes import LiveBytes, storage_bytes
from harness.refusals import refused
from harness.tier_bytes import offloaded_bytes
from shardwise.layout.activation_bytes import LayerShape, activation_bytes_per_layer
from shardwise.models.decoder import Decoder
from shardwise.models.presets import DecoderConfig
from shardwise.offload.activations import ActivationStore
from shardwise.offload.counters import TransferCounters
from shardwise.runtime.device import Event, Streams
from shardwise.runtime.memory_tracker import Category, MemoryTracker
from shardwise.runtime.recompute import run_forward, run_stored

OUT, BACK = ("device", "host"), ("host", "device")
NUM_FEATURES = 16
ROWS = 16
X_BYTES = ROWS * NUM_FEATURES * 8


@dataclass
class Host:
    """Host memory that knows what is out, and spoils what comes in."""

    leased: dict[int, Tensor] = field(default_factory=dict)

    def acquire(self, num_bytes: int, capacity_bytes: int = 0) -> Tensor:
        memory = torch.full((num_bytes,), 0xAB, dtype=torch.uint8)
        self.leased[id(memory)] = memory
        return memory

    def release(self, tensor: Tensor) -> None:
        self.leased.pop(id(tensor)).fill_(0xCD)


class Rig:
    """A store with all that it stands on."""

    def __init__(self, min_bytes: int = 64) -> None:
        self.host, self.traffic, self.tracker = Host(), TransferCounters(), MemoryTracker()
        self.store = ActivationStore(
            Streams(torch.device("cpu")), self.host, self.traffic, self.tracker, min_bytes=min_bytes
        )

    def call(self, forward: Callable[..., Any], *args: Any, mode: str = "full", **kwargs: Any) -> Any:
        return run_stored(run_forward, forward, mode, args, kwargs, self.store)

    @property
    def moved(self) -> tuple[int, int]:
        return self.traffic.moved_bytes.get(OUT, 0), self.traffic.moved_bytes.get(BACK, 0)


class Plain(Rig):
    """The same without a store."""

    def call(self, forward: Callable[..., Any], *args: Any, mode: str = "full", **kwargs: Any) -> Any:
        return run_forward(forward, mode, args, kwargs)


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Once a graph is gone, all host memory is given back by the next block, without the garbage collector."""
    rig = Rig()
    gc.freeze()  # what earlier tests left is no concern of this one, and to collect it takes half a second
    gc.disable()
    yield rig
    rig.call(lambda x: x * 2, torch.ones(1, requires_grad=True))
    gc.enable()
    gc.unfreeze()
    assert not rig.host.leased


def make_x(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, NUM_FEATURES, dtype=torch.float64, generator=generator, requires_grad=True)


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(NUM_FEATURES, NUM_FEATURES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.nn.functional.dropout(torch.tanh(self.linear(x)), 0.25)


def run_blocks(rig: Rig, num_blocks: int, mode: str = "full", x: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    """The output of blocks one after another, and the tensors whose gradients count."""
    blocks = [Block(seed) for seed in range(num_blocks)]
    x = first = make_x() if x is None else x
    torch.manual_seed(1)
    for block in blocks:
        x = rig.call(block, x, mode=mode)
    return x, [first, *(parameter for block in blocks for parameter in block.parameters())]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gradients_are_those_of_a_plain_checkpoint(rig: Rig, mode: str) -> None:
    found, expected = (
        torch.autograd.grad(y.square().sum(), leaves)
        for y, leaves in (run_blocks(each, 4, mode) for each in (rig, Plain()))
    )
    assert all(map(torch.equal, found, expected))
    assert rig.moved == (3 * X_BYTES, 3 * X_BYTES)
    assert not rig.host.leased


def test_inputs_are_dead_on_the_device_after_the_forward() -> None:
    """All but the last block's, which the backward needs first; in the backward the one before is there as well."""

    def measure(rig: Rig, num_blocks: int) -> tuple[int, int]:
        """Kept by the forward, and the peak of the backward: both without the output and the leaf."""
        leaf = make_x()
        with LiveBytes() as live:
            x = leaf * 1
            for _ in range(num_blocks):
                x = rig.call(lambda x: x + torch.sin(x).cos(), x)
            kept = live.live_bytes() - storage_bytes([x])
            live.reset_peak()
            x.backward(torch.ones_like(x))
            return kept, live.peak_bytes() - storage_bytes([x])

    for num_blocks in (3, 6, 9):
        plain_kept, plain_peak = measure(Plain(), num_blocks)
        kept, peak = measure(Rig(), num_blocks)
        assert plain_kept == num_blocks * X_BYTES
        assert kept == X_BYTES
        assert peak == measure(Plain(), 3)[1] <= plain_peak  # as if there were three


def test_the_next_input_comes_back_while_a_block_recomputes(rig: Rig) -> None:
    events: list[str] = []
    fetch = rig.store._fetch
    rig.store._fetch = lambda saved: (events.append("fetch"), fetch(saved))[1]  # type: ignore[method-assign]

    def traced(name: str) -> Callable[[Tensor], Tensor]:
        def block(x: Tensor) -> Tensor:
            events.append(name)
            return x + torch.sin(x)

        return block

    x = make_x()
    for name in "abc":
        x = rig.call(traced(name), x)
    assert events == ["a", "b", "c"]
    x.sum().backward()
    assert events[3:] == ["fetch", "c", "fetch", "b", "a"]
    del x


def test_what_every_block_is_given_stays_and_what_some_are_given_leaves_once(rig: Rig) -> None:
    """Keywords and nested arguments are like positional ones; views of one memory are one."""
    mask, positions = torch.rand(ROWS, NUM_FEATURES) > 0.3, torch.arange(ROWS)
    memory = make_x(1) * 2

    def block(x: Tensor, *, mask: Tensor, tables: tuple[dict[str, Tensor], int], memory: Tensor | None) -> Tensor:
        x = torch.sin(x) * mask + tables[0]["positions"][:, None]
        return x if memory is None else x + memory.view(ROWS, NUM_FEATURES).cos()

    def run(rig: Rig) -> list[Tensor]:
        x = first = make_x()
        source = memory.detach().requires_grad_()
        shared = source * 1
        for index in range(6):
            given = shared.view_as(shared) if index % 2 else shared.view(-1)
            tables = ({"positions": positions.view(ROWS)}, index)
            x = rig.call(block, x, mask=mask[:], tables=tables, memory=given if index < 4 else None)
        return list(torch.autograd.grad(x.sum(), [first, source]))

    assert all(map(torch.equal, run(rig), run(Plain())))
    assert rig.moved == (6 * X_BYTES, 6 * X_BYTES)  # five inputs and the memory, which block 5 is not given


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, 2:9],
        lambda x: x[::2],
        lambda x: x[3:],
        lambda x: x[:1].expand(5, NUM_FEATURES),
        lambda x: x[:, :1, None].expand(ROWS, 3, 4),
        lambda x: x.view(4, 4, NUM_FEATURES).permute(2, 0, 1),
        lambda x: x.reshape(-1).unfold(0, 8, 4),
        lambda x: x[:0],
        lambda x: x.sum(),
        lambda x: torch.view_as_complex(x.view(ROWS, -1, 2)).conj(),
        lambda x: x.float().bfloat16(),
    ],
)
def test_views_of_all_kinds_come_back_as_they_were(rig: Rig, view: Callable[[Tensor], Tensor]) -> None:
    seen: list[tuple[Any, ...]] = []

    def block(x: Tensor) -> Tensor:
        seen.append((x.shape, x.stride(), x.dtype, x.requires_grad, x.is_conj(), x.detach().clone()))
        return torch.view_as_real(x * x).sum() if x.is_complex() else (x * x).sum()

    x = make_x()
    (rig.call(block, view(x * 1)) + rig.call(block, make_x(1) * 1)).backward()
    expected = make_x()
    block(view(expected * 1)).backward()
    assert torch.equal(x.grad, expected.grad)
    forward, recomputed = seen[0], seen[3]
    assert forward[:5] == recomputed[:5]
    assert torch.equal(forward[5], recomputed[5])


def test_parameters_and_buffers_stay(rig: Rig) -> None:
    """What the tracker counts as a state, in any view: its storage may be freed and allocated again."""
    flat = torch.randn(2 * ROWS * NUM_FEATURES, dtype=torch.float64)
    rig.tracker.track(flat, Category.GATHERED)
    weight = nn.Parameter(flat[: ROWS * NUM_FEATURES].view(ROWS, NUM_FEATURES))
    buffer = flat[ROWS * NUM_FEATURES :].view(ROWS, NUM_FEATURES)
    x = make_x()
    for _ in range(2):
        y = rig.call(lambda x, weight, tail, buffer: x * weight + tail * buffer, x * 1, weight, weight[:], buffer)
    y = rig.call(torch.sin, y)
    assert rig.moved[0] == 2 * X_BYTES
    y.sum().backward()
    assert weight.grad is not None
    del y


def test_small_tensors_stay() -> None:
    rig = Rig(min_bytes=X_BYTES + 1)
    run_blocks(rig, 3)[0].sum().backward()
    assert rig.moved == (0, 0)


def in_place_of_next(rig: Rig, x: Tensor) -> Tensor:
    """Writes the first block's input once it has left."""
    held = x * 1
    y = rig.call(torch.sin, rig.call(torch.sin, held))
    held.mul_(2)
    return y


def in_place_at_once(rig: Rig, x: Tensor) -> Tensor:
    """Writes a block's input before anything has left."""
    held = x * 1
    y = rig.call(torch.sin, held)
    held.mul_(2)
    return y


def in_place_between(rig: Rig, x: Tensor) -> Tensor:
    """Writes the first block's input before the next block begins."""
    held = x * 1
    y = rig.call(torch.sin, held)
    held.mul_(2)
    return rig.call(torch.sin, y)


@pytest.mark.parametrize("write", [in_place_at_once, in_place_between])
def test_an_input_written_too_early_is_refused(rig: Rig, write: Callable[[Rig, Tensor], Tensor]) -> None:
    with refused("recompute-input-written", "(16, 16)", "version 1, not 0", "x = x + y"):
        write(rig, make_x()).sum().backward()


def test_an_input_written_once_it_has_left_is_right(rig: Rig) -> None:
    x = make_x()
    in_place_of_next(rig, x).sum().backward()
    expected = torch.autograd.grad(torch.sin(torch.sin(make := make_x())).sum(), make)[0]
    assert torch.equal(x.grad, expected)
    assert rig.moved == (X_BYTES, X_BYTES)


def test_one_memory_with_other_values_is_another_piece(rig: Rig) -> None:
    """A state that is written once its values have left, and is then given to a block again."""

    def run(rig: Rig, is_copied: bool) -> list[Tensor]:
        state, x = torch.ones(ROWS, NUM_FEATURES, dtype=torch.float64), make_x()
        y = x
        for step in range(1, 7):
            y = rig.call(lambda y, state: torch.sin(y) * state, y, state.clone() if is_copied else state)
            y = rig.call(torch.sin, y)
            state.add_(step)
        return [y, *torch.autograd.grad(y.sum(), x)]

    assert all(map(torch.equal, run(rig, False), run(Plain(), True)))


def test_a_graph_may_be_walked_twice(rig: Rig) -> None:
    y, leaves = run_blocks(rig, 4)
    first = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    second = torch.autograd.grad(y.sum(), leaves)
    assert all(map(torch.equal, first, second))
    assert rig.moved == (3 * X_BYTES, 6 * X_BYTES)
    del y


def test_two_forwards_before_their_backwards(rig: Rig) -> None:
    outputs = [run_blocks(rig, 3, x=make_x(seed)) for seed in range(2)]
    for (y, leaves), seed in zip(outputs, range(2), strict=True):
        expected, plain_leaves = run_blocks(Plain(), 3, x=make_x(seed))
        found = torch.autograd.grad(y.sum(), leaves)
        assert all(map(torch.equal, found, torch.autograd.grad(expected.sum(), plain_leaves)))
    del outputs, y


def test_without_gradients_nothing_moves(rig: Rig) -> None:
    with torch.no_grad():
        run_blocks(rig, 4)
    assert rig.moved == (0, 0)


def test_an_exception_in_a_block_leaves_nothing(rig: Rig) -> None:
    def fail(x: Tensor) -> Tensor:
        raise KeyError("no such expert")

    def run() -> None:
        y, _ = run_blocks(rig, 3)
        rig.call(fail, y)

    with pytest.raises(KeyError):
        run()
    y, leaves = run_blocks(rig, 3)
    expected, plain_leaves = run_blocks(Plain(), 3)
    found = torch.autograd.grad(y.sum(), leaves)
    assert all(map(torch.equal, found, torch.autograd.grad(expected.sum(), plain_leaves)))
    del y


def test_a_graph_that_is_never_walked_gives_its_memory_back(rig: Rig) -> None:
    y, _ = run_blocks(rig, 4)
    assert len(rig.host.leased) == 3
    del y, _


@pytest.mark.parametrize("inner_mode", ["full", "selective"])
@pytest.mark.parametrize("is_outer_stored", [False, True])
def test_checkpoints_nest(rig: Rig, is_outer_stored: bool, inner_mode: str) -> None:
    """A block inside a checkpoint of the user's, and a block inside a block."""

    def run(rig: Rig) -> list[Tensor]:
        blocks = [Block(seed) for seed in range(4)]

        def pair(x: Tensor, first: Block, second: Block) -> Tensor:
            x = rig.call(first, torch.sin(x), mode=inner_mode)
            return torch.sin(rig.call(second, torch.sin(x), mode=inner_mode))  # saves, so recomputation comes here

        x = first = make_x()
        torch.manual_seed(1)
        for index in (0, 2):
            two = blocks[index], blocks[index + 1]
            x = rig.call(pair, x, *two) if is_outer_stored else checkpoint(pair, x, *two, use_reentrant=False)
        leaves = [first, *(parameter for block in blocks for parameter in block.parameters())]
        out_bytes = rig.moved[0]
        gradients = torch.autograd.grad(x.sum(), leaves)
        assert rig.moved[0] == out_bytes  # nothing leaves while a backward recomputes
        return list(gradients)

    assert all(map(torch.equal, run(rig), run(Plain())))
    assert rig.moved[0] > 0


def test_a_list_that_a_block_fills_is_the_callers(rig: Rig) -> None:
    found: list[Tensor] = []

    def block(x: Tensor, sink: list[Tensor]) -> Tensor:
        sink.append(x.detach())
        return torch.sin(x)

    rig.call(block, make_x(), found).sum().backward()
    assert len(found) == 1


def test_memory_of_the_same_address_is_not_taken_for_the_former(rig: Rig) -> None:
    """The id of a storage that is gone may be another's."""

    def run(rig: Rig) -> list[Tensor]:
        x = make_x()
        total = x.sum()
        for index in range(30):
            total = total + rig.call(lambda y: (y * y).sum(), x * index)
        return list(torch.autograd.grad(total, x))

    with mock.patch("shardwise.offload.activations.id", return_value=0, create=True):
        found = run(rig)
    assert all(map(torch.equal, found, run(Plain())))
    assert rig.moved[0] == 29 * X_BYTES


def test_compiled_blocks_move_their_inputs_and_no_parameters(rig: Rig) -> None:
    """There hooks see all that compiled code saves: parameters, and products under selective recomputation."""
    torch._dynamo.reset()
    compiled = torch.compile(run_forward, fullgraph=True, backend="aot_eager")

    def run(rig: Rig, mode: str, is_compiled: bool) -> list[Tensor]:
        blocks = [Block(seed) for seed in range(3)]
        x = first = make_x()
        torch.manual_seed(1)
        for block in blocks:
            if is_compiled:
                x = run_stored(compiled, block.forward, mode, (), {"x": x}, rig.store)
            else:
                x = compiled(block.forward, mode, (), {"x": x})
        leaves = [first, *(parameter for block in blocks for parameter in block.parameters())]
        return list(torch.autograd.grad(x.sum(), leaves))

    for mode in ("full", "selective"):
        rig.traffic.reset()
        assert all(map(torch.equal, run(rig, mode, True), run(rig, mode, False)))
        assert rig.moved == (2 * X_BYTES, 2 * X_BYTES)
    torch._dynamo.reset()


@pytest.mark.parametrize("every", [1, 2])
def test_what_a_decoder_moves_is_the_formula(every: int) -> None:
    sizes = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_size": 48}
    num_layers, seq_len, micro_size = 5, 16, 2
    model = Decoder(DecoderConfig(vocab_size=64, num_layers=num_layers, max_seq_len=16, **sizes), dtype=torch.bfloat16)
    rig = Rig()
    for block in list(model.blocks)[::every]:
        block.forward = (lambda forward: lambda *args: rig.call(forward, *args))(block.forward)
    model(torch.zeros(micro_size, seq_len, dtype=torch.long)).float().sum().backward()
    shape = {"seq_len": seq_len, "micro_size": micro_size}
    input_bytes = activation_bytes_per_layer(LayerShape(**sizes), **shape, recompute="full")
    expected = offloaded_bytes(input_bytes, num_layers, every)
    assert rig.moved == (expected, expected)
    assert expected > 0


def test_the_store_keeps_no_graph_alive(rig: Rig) -> None:
    y, leaves = run_blocks(rig, 3)
    reference = weakref.ref(y.untyped_storage())
    del y, leaves
    assert reference() is None


class LateCopies:
    """A side stream whose copies happen late: when an event after them is waited for, or has asked often enough.

    At that moment the memory on both sides must still be there: nothing here holds it.
    """

    def __init__(self, host: Host, num_asks: int | None) -> None:
        self.queue: list[tuple[weakref.ref[Any], Tensor, Callable[[], object]]] = []
        self.host, self.num_asks, self.num_done = host, num_asks, 0
        self.is_in_stream = False

    @contextmanager
    def side_stream(self, name: str) -> Iterator[None]:
        assert name in ("offload", "reload")
        own, self.is_in_stream = Tensor.copy_, True
        with mock.patch.object(Tensor, "copy_", lambda target, source, non_blocking: self.put(own, target, source)):
            yield
        self.is_in_stream = False

    def put(self, copy: Callable[[Tensor, Tensor], object], target: Tensor, source: Tensor) -> None:
        is_out = any(memory.untyped_storage() is target.untyped_storage() for memory in self.host.leased.values())
        near, far = (source, target) if is_out else (target, source)
        memory = next(each for each in self.host.leased.values() if each.untyped_storage() is far.untyped_storage())
        storage, place = weakref.ref(near.untyped_storage()), (near.storage_offset(), near.size(), near.stride())
        empty = near.new_empty(0)

        def run() -> None:
            device = empty.set_(storage(), *place)
            copy(far, device) if is_out else copy(device, far)
            empty.set_()

        self.queue.append((storage, memory, run))

    def run_until(self, position: int) -> None:
        for storage, memory, run in self.queue[self.num_done : position]:
            self.num_done += 1
            if storage() is None or id(memory) not in self.host.leased:
                raise AssertionError("memory was given back while a copy used it")
            run()


class LateEvent:
    """A point after the copies so far."""

    def __init__(self, copies: LateCopies) -> None:
        self.copies, self.position, self.num_asks = copies, len(copies.queue), 0

    def wait(self) -> None:
        if not self.copies.is_in_stream:  # there, what comes after it in the queue is done after it anyway
            self.copies.run_until(self.position)

    def is_reached(self) -> bool:
        self.num_asks += 1
        if self.copies.num_asks is not None and self.num_asks > self.copies.num_asks:
            self.copies.run_until(self.position)
        return self.copies.num_done >= self.position


def stop(gradient: Tensor) -> None:
    raise KeyError("stop")


@pytest.mark.parametrize("num_asks", [0, 1, 3, None])
@pytest.mark.parametrize("end", ["walked", "stopped", "dropped"])
def test_memory_stays_until_late_copies_are_over(num_asks: int | None, end: str) -> None:
    """As on a GPU, where copies run beside the blocks; a graph may also be dropped while copies are under way."""
    rig = Rig()
    copies = LateCopies(rig.host, num_asks)
    rig.store._streams = SimpleNamespace(device=torch.device("cpu"), side_stream=copies.side_stream)  # type: ignore[assignment]
    expected = late_blocks(Plain(), "walked")
    with mock.patch("shardwise.offload.activations.Event", LateEvents(copies)):
        found = [late_blocks(rig, end) for _ in range(3)][-1]
        copies.run_until(len(copies.queue))
        rig.call(torch.sin, make_x())
    assert (found is not None) == (end == "walked")
    assert found is None or torch.equal(found, expected)
    assert copies.num_done > 0
    assert not rig.host.leased
    assert not rig.store._arriving
    assert not rig.store._leaving


def test_an_input_written_while_it_leaves_is_refused() -> None:
    rig = Rig()
    copies = LateCopies(rig.host, None)
    rig.store._streams = SimpleNamespace(device=torch.device("cpu"), side_stream=copies.side_stream)  # type: ignore[assignment]
    held = make_x() * 1
    with mock.patch("shardwise.offload.activations.Event", LateEvents(copies)):
        y = rig.call(torch.sin, held)
        y = rig.call(lambda y: (held.detach().mul_(2), torch.sin(y))[1], y)
        with refused("recompute-input-written"):
            y.sum().backward()


def late_blocks(rig: Rig, end: str) -> Tensor | None:
    """The gradient of blocks that share an input; None where an exception ends the backward, or there is none."""
    x, shared = make_x(), make_x(9)
    first = x
    for index in range(6):
        if index == 5 and end == "stopped":
            x.register_hook(stop)  # once the last block's backward is through, and the one before has been fetched
        x = rig.call(lambda x, shared: torch.sin(x) * x + shared, x, shared if index < 4 else shared * 2)
    with suppress(KeyError):
        return None if end == "dropped" else torch.autograd.grad(x.sum(), first)[0]
    return None


class LateEvents:
    """In the place of the class `Event`."""

    def __init__(self, copies: LateCopies) -> None:
        self._copies = copies

    def __call__(self, mark: None) -> Event:
        return Event(mark)

    def record(self, device: torch.device) -> LateEvent:
        return LateEvent(self._copies)
