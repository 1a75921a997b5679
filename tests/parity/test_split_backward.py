"""The backward in two halves: the same bits as in one, when hooks fire, what is held, and what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from harness.gradients import handing
from harness.pool import WorkerPool
from harness.refusals import refused
from harness.split_model import make_comm
from shardwise.models.decoder import Decoder, lm_loss
from shardwise.models.presets import DecoderConfig
from shardwise.pipeline.split_backward import WeightGradQueue
from shardwise.runtime.module_hooks import hook_gradient
from shardwise.runtime.recompute import recompute_forward
from shardwise.runtime.torch_private import fake_tensors
from shardwise.tensor.mappings import TpMappings

Layer = Callable[[Tensor, nn.Parameter, nn.Parameter], Tensor]

LAYERS: dict[str, Layer] = {
    "linear": lambda x, w, b: F.linear(x, w, b),
    "linear by name": lambda x, w, b: F.linear(input=x, weight=w, bias=b),
    "linear without bias": lambda x, w, b: F.linear(x, w),
    "linear, transposed weight": lambda x, w, b: F.linear(x, w.t(), b),
    "addmm": lambda x, w, b: torch.addmm(b, x.reshape(-1, 6), w),
    "matmul": lambda x, w, b: torch.matmul(x, w.T),
    "at": lambda x, w, b: x @ w.t(),
    "mm": lambda x, w, b: x.reshape(-1, 6).mm(w.t()),
}
INPUTS: dict[str, Callable[[], Tensor]] = {
    "2-D": lambda: torch.randn(7, 6),
    "3-D": lambda: torch.randn(3, 4, 6),
    "4-D": lambda: torch.randn(2, 3, 4, 6),
    "not contiguous": lambda: torch.randn(4, 3, 6).transpose(0, 1),
    "column-major": lambda: torch.randn(6, 7).t(),
    "expanded": lambda: torch.randn(4, 1, 6).expand(4, 3, 6),
    "empty": lambda: torch.randn(0, 6),
}


def pulled(*tensors: Tensor) -> list[Tensor | None]:
    """Their gradients, taken off them."""
    gradients = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    return gradients


def assert_same_bits(split: list[Tensor | None], whole: list[Tensor | None]) -> None:
    assert len(split) == len(whole)
    for own, expected in zip(split, whole, strict=True):
        assert (own is None) == (expected is None)
        if own is not None and expected is not None:
            assert own.shape == expected.shape
            assert torch.equal(own, expected)


def both_ways(
    run: Callable[[], Tensor], inputs: list[Tensor], weights: list[Tensor], num_queued: int | None = 1
) -> None:
    """Compare the gradients of `run`'s sum of squares; the weights have none before the queue is drained."""
    y = run()
    y.square().sum().backward()
    whole = pulled(*inputs, *weights)
    queue = WeightGradQueue()
    with queue.splitting():
        y_split = run()
        y_split.square().sum().backward()
    assert torch.equal(y_split, y)
    if num_queued is not None:
        assert all(weight.grad is None for weight in weights)
        assert len(queue._queued) == num_queued
    queue.collect("all")
    queue.drain("all")
    queue.check_empty()
    assert queue.held_bytes == 0
    assert_same_bits(pulled(*inputs, *weights), whole)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("shape", INPUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_bits_are_those_of_one_backward(layer: str, shape: str, dtype: torch.dtype) -> None:
    x = INPUTS[shape]().to(dtype).detach().requires_grad_()
    # As the layer has it: a parameter of its own shape where the weight is the second factor as it is.
    weight = nn.Parameter(torch.randn(5, 6).to(dtype))
    if layer in ("linear, transposed weight", "addmm"):
        weight = nn.Parameter(torch.randn(6, 5).to(dtype))
    bias = nn.Parameter(torch.randn(5).to(dtype))
    both_ways(lambda: LAYERS[layer](x, weight, bias) * 0.5, [x], [weight, bias])


def test_a_weight_as_the_second_factor() -> None:
    x, weight = torch.randn(3, 4, 6, requires_grad=True), nn.Parameter(torch.randn(6, 5))
    both_ways(lambda: x @ weight, [x], [weight])
    both_ways(lambda: torch.matmul(x, weight), [x], [weight])
    both_ways(lambda: x[0].mm(weight), [x], [weight])


def test_weights_used_several_times() -> None:
    x, weight = torch.randn(3, 6, 6, requires_grad=True), nn.Parameter(torch.randn(6, 6))
    bias = nn.Parameter(torch.randn(6))
    both_ways(lambda: F.linear(F.linear(F.linear(x, weight, bias).tanh(), weight).tanh(), weight), [x], [weight], 3)


def test_inputs_that_need_no_gradient() -> None:
    x, weight, bias = torch.randn(3, 6), nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(5))
    both_ways(lambda: F.linear(x, weight, bias), [], [weight, bias])


def test_frozen_parameters() -> None:
    x, frozen = torch.randn(3, 6, requires_grad=True), nn.Parameter(torch.randn(5, 6), requires_grad=False)
    weight, bias = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(5))
    both_ways(lambda: F.linear(x, frozen, bias), [x, bias], [], 0)
    bias.requires_grad_(False)
    both_ways(lambda: F.linear(x, weight, bias), [x], [weight])


def test_what_is_not_split_has_its_gradients_at_once() -> None:
    x, weight = torch.randn(3, 6, requires_grad=True), nn.Parameter(torch.randn(5, 6))
    bias = nn.Parameter(torch.randn(3, 5))
    both_ways(lambda: F.linear(x[0], weight), [x, weight], [], 0)  # a vector
    both_ways(lambda: torch.addmm(bias, x, weight.t()), [x, weight, bias], [], 0)  # a bias a row
    both_ways(lambda: F.linear(x, weight * 2), [x, weight], [], 0)
    both_ways(lambda: F.linear(x, weight, bias[0]), [x, weight, bias], [], 0)  # a bias that was computed
    both_ways(lambda: F.linear(x, weight[:, :6]), [x, weight], [], 0)  # a slice is no parameter
    with torch.autocast("cpu", torch.bfloat16):
        both_ways(lambda: F.linear(x, weight).float(), [x, weight], [], 0)
    queue = WeightGradQueue()
    with queue.splitting(), torch.no_grad():
        assert F.linear(x, weight).grad_fn is None
    queue.check_empty()


def test_products_can_be_changed_in_place() -> None:
    x, weight = torch.randn(2, 3, 6, requires_grad=True), nn.Parameter(torch.randn(5, 6))
    both_ways(lambda: F.linear(x, weight).mul_(2).tanh_(), [x], [weight])


def small_decoder(is_tied: bool) -> Decoder:
    config = DecoderConfig(
        vocab_size=11,
        num_layers=2,
        hidden_size=8,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        ffn_size=12,
        max_seq_len=8,
        tie_embeddings=is_tied,
    )
    return Decoder(config, dtype=torch.float64)


def test_a_decoder() -> None:
    model, tokens = small_decoder(is_tied=False), torch.randint(11, (2, 5))
    split = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    others = [each for each in model.parameters() if all(each is not weight for weight in split)]
    both_ways(lambda: lm_loss(model(tokens), tokens)[0], others, split, len(split))


def test_a_weight_tied_to_an_embedding() -> None:
    model, tokens = small_decoder(is_tied=True), torch.randint(11, (2, 5))
    both_ways(lambda: lm_loss(model(tokens), tokens)[0], [], list(model.parameters()), None)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(self.up(x)).relu())


def checkpointed(block: Block, how: str) -> Callable[[Tensor], Any]:
    if how in ("full", "selective"):
        recompute_forward(block, how)
        return block
    return lambda x: checkpoint(block, x, use_reentrant=how == "reentrant")


@pytest.mark.parametrize("how", ["full", "selective", "non-reentrant", "reentrant"])
def test_recomputation(how: str) -> None:
    blocks = [Block(), Block()]
    runs = [checkpointed(block, how) for block in blocks]
    x = torch.randn(2, 3, 6, requires_grad=True)
    linears = [linear for block in blocks for linear in (block.up, block.down)]
    norms = [parameter for block in blocks for parameter in block.norm.parameters()]
    weights = [parameter for linear in linears for parameter in linear.parameters()]
    both_ways(lambda: runs[1](runs[0](x)), [x, *norms], weights, 4)


@pytest.mark.parametrize("how", ["full", "non-reentrant"])
def test_a_recomputation_that_is_not_split_is_an_error(how: str) -> None:
    run, queue = checkpointed(Block(), how), WeightGradQueue()
    with queue.splitting():
        y = run(torch.randn(2, 6, requires_grad=True))
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        y.sum().backward()


def test_micro_batches_in_flight_drain_in_any_order() -> None:
    block = Block().double()
    xs = [torch.randn(2, 6, dtype=torch.float64) for _ in range(4)]
    expected = []
    for x in xs:
        block(x).sum().backward()
        expected.append(pulled(*block.up.parameters(), *block.down.parameters()))
    queue = WeightGradQueue()
    with queue.splitting():
        ys = [block(x).sum() for x in xs]
    for index, y in enumerate(ys):
        with queue.splitting():
            y.backward()
        queue.collect((0, index))
    held = queue.held_bytes
    for num_drained, index in enumerate([2, 0, 3, 1], start=1):
        queue.drain((0, index))
        assert queue.held_bytes == held - num_drained * held // 4
        assert_same_bits(pulled(*block.up.parameters(), *block.down.parameters()), expected[index])
    queue.check_empty()


def test_hooks_fire_once_a_drain_with_the_whole_gradient() -> None:
    x, weight, bias = torch.randn(3, 6), nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6))
    F.linear(F.linear(x, weight, bias), weight).sum().backward()
    whole = pulled(weight, bias)
    seen: list[tuple[str, Tensor]] = []
    weight.register_hook(lambda gradient: seen.append(("tensor", gradient.clone())))
    hook_gradient(weight, handing(lambda gradient: seen.append(("weight", gradient))))
    hook_gradient(bias, handing(lambda gradient: seen.append(("bias", gradient))))
    queue = WeightGradQueue()
    with queue.splitting():
        F.linear(F.linear(x, weight, bias), weight).sum().backward()
    assert seen == []
    queue.collect(0)
    queue.drain(0)
    gradients = dict(seen)
    assert sorted(name for name, _ in seen) == ["bias", "tensor", "weight"]
    assert_same_bits([gradients["weight"], gradients["bias"], gradients["tensor"]], [*whole, whole[0]])


def test_each_gradient_is_delivered_before_the_next_is_computed() -> None:
    weights = [nn.Parameter(torch.randn(6, 6)) for _ in range(3)]
    order: list[str] = []
    queue = WeightGradQueue()
    with queue.splitting():
        y = torch.randn(2, 6)
        for weight in weights:
            y = F.linear(y, weight)
        y.sum().backward()
    for entry, name in zip(queue._queued, "210", strict=True):
        assert entry.parameters[0] is weights[int(name)]
        compute = entry.compute
        entry.compute = lambda compute=compute, name=name: (order.append(f"compute {name}"), compute())[1]
    held = {name: weakref.ref(entry.held[0]) for entry, name in zip(queue._queued, "210", strict=True)}
    is_freed = []
    for index, weight in enumerate(weights):
        hook_gradient(weight, handing(lambda gradient, index=index: order.append(f"deliver {index}")))
        weight.register_post_accumulate_grad_hook(lambda weight, name=str(index): is_freed.append(held[name]() is None))
    del y, compute, entry
    queue.collect(0)
    queue.drain(0)
    assert is_freed == [True, True, True]
    assert order == [f"{what} {index}" for index in (2, 1, 0) for what in ("compute", "deliver")]


def test_what_is_held_is_counted_once_and_freed() -> None:
    weights = [nn.Parameter(torch.randn(6, 6)) for _ in range(3)]
    x, queue = torch.randn(4, 6).clone(), WeightGradQueue()
    seen = weakref.ref(x)
    with queue.splitting():
        ys = [F.linear(x, weight) for weight in weights]
        torch.autograd.backward(ys, [torch.ones(4, 6) for _ in ys])
    del x, ys
    assert queue.held_bytes == 4 * 6 * 4 * (1 + 3)
    queue.collect(0)
    gc.collect()
    assert seen() is not None
    queue.drain(0)
    assert seen() is None
    assert queue.held_bytes == 0


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_held_gradient_whose_memory_a_parameter_shares(is_taken: bool) -> None:
    """Autograd leaves views of one gradient in several leaves, and adds the next one in place."""
    x, weight, shift = torch.randn(4, 6), nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.zeros(24))

    def loss() -> Tensor:
        rows = shift.view(4, 6)
        return (F.linear(x, weight) + rows).square().sum()

    loss().backward()
    whole = pulled(weight, shift)
    if is_taken:
        hook_gradient(shift, handing(lambda gradient: None))
    queue = WeightGradQueue()
    for index in range(2):
        with queue.splitting():
            loss().backward()
        queue.collect(index)
    if is_taken:
        queue.drain(0)
        assert_same_bits(pulled(weight), whole[:1])
    else:
        with refused("input-changed-in-place", "(4, 6)"):
            queue.drain(0)


def test_keys() -> None:
    queue, weight = WeightGradQueue(), nn.Parameter(torch.randn(6, 6))
    queue.collect((0, 0))
    queue.drain((0, 0))
    with pytest.raises(RuntimeError, match=r"\(0, 0\) .*drained"):
        queue.drain((0, 0))
    queue.collect((1, 2))
    queue.collect((1, 3))
    with pytest.raises(RuntimeError, match=r"\(1, 2\) .*already"):
        queue.collect((1, 2))
    with queue.splitting():
        F.linear(torch.randn(2, 6), weight).sum().backward()
    with pytest.raises(RuntimeError, match=r"\(1, 2\); \(1, 3\); 1 products"):
        queue.check_empty()
    queue.clear()
    queue.check_empty()


def test_gradients_of_gradients_are_refused() -> None:
    x, weight = torch.randn(2, 6, requires_grad=True), nn.Parameter(torch.randn(6, 6))
    with WeightGradQueue().splitting(), refused("create-graph-split-backward", "create_graph=True"):
        torch.autograd.grad(F.linear(x, weight).sum(), x, create_graph=True)


def test_changes_in_place_are_seen() -> None:
    x, weight, queue = torch.randn(2, 6), nn.Parameter(torch.randn(6, 6)), WeightGradQueue()
    with queue.splitting():
        y = F.linear(x, weight)
        with torch.no_grad():
            weight.mul_(2)
        with refused("weight-changed-in-place", "(6, 6)"):
            y.sum().backward()
        F.linear(x, weight).sum().backward()
    queue.collect(0)
    x.mul_(2)
    with refused("input-changed-in-place", "(2, 6)"):
        queue.drain(0)


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.parametrize("is_warm", [False, True])
def test_compiled_code_is_not_split(is_warm: bool) -> None:
    layer, x = nn.Linear(6, 6), torch.randn(2, 6, requires_grad=True)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    if is_warm:
        compiled(x).sum().backward()
        pulled(x, *layer.parameters())
    both_ways(lambda: compiled(x), [x, *layer.parameters()], [], 0)


class Parallel(nn.Module):
    """A column and a row layer; with sequences, the row scatters its sum."""

    def __init__(self, ops: TpMappings, is_sequence: bool, is_transposed: bool) -> None:
        super().__init__()
        self.ops, self.is_sequence, self.is_transposed = ops, is_sequence, is_transposed
        shapes = [(6, 4), (4, 6)]
        self.up, self.down = (
            nn.Parameter(torch.randn(shape[::-1] if is_transposed else shape, dtype=torch.float64)) for shape in shapes
        )
        self.bias = nn.Parameter(torch.randn(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        up, down = (each.t() if self.is_transposed else each for each in (self.up, self.down))
        whole = self.ops.gather_sequence(x, "t") if self.is_sequence else self.ops.copy_to_tp(x, "t")
        return self.ops.row(self.ops.column(whole, up, None).tanh(), down, self.bias, self.is_sequence, "t")


def split_parallel(rank: int, world_size: int, overlap_chunks: int) -> dict[str, int]:
    ops = TpMappings(make_comm(), overlap_chunks)
    counts = {}
    for is_sequence in (False, True):
        for is_transposed in (False, True):
            for mode in ("none", "full", "selective"):
                torch.manual_seed(rank)
                layer = Parallel(ops, is_sequence, is_transposed)
                if mode != "none":
                    recompute_forward(layer, mode)
                x = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
                queue = WeightGradQueue()
                with queue.splitting():
                    layer(x).square().sum().backward()
                num_split = len(queue._queued)
                assert layer.down.grad is None
                queue.collect(0)
                queue.drain(0)
                split = pulled(x, layer.up, layer.down, layer.bias)
                layer(x).square().sum().backward()
                assert_same_bits(split, pulled(x, layer.up, layer.down, layer.bias))
                counts[f"{is_sequence} {is_transposed} {mode}"] = num_split
    ops.close()
    return counts


@pytest.mark.parametrize("overlap_chunks", [1, 2])
def test_tensor_parallel_layers(ranks: WorkerPool, overlap_chunks: int) -> None:
    """A column of a gathered sequence is not split: it would hold the whole sequence, or gather it a third time."""
    for counts in ranks(2).run(split_parallel, overlap_chunks):
        assert len(counts) == 12
        assert all(count == (1 if key.startswith("True") else 2) for key, count in counts.items())


def test_fake_tensors() -> None:
    """A simulated rank's products are split too, and what they hold has its size."""
    with fake_tensors():
        x, weight, queue = torch.randn(4, 6, requires_grad=True), nn.Parameter(torch.randn(6, 6)), WeightGradQueue()
        with queue.splitting():
            (F.linear(x, weight) + F.linear(x, weight)).sum().backward()
        assert weight.grad is None
        assert queue.held_bytes >= 4 * 6 * 4
        queue.collect(0)
        queue.drain(0)
        assert weight.grad is not None
        assert weight.grad.shape == (6, 6)
