"""The registered op under all that acts on ops: fake tensors, compilers, checkpoints, saved tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.live_bytes import LiveBytes
from shardwise.attention import (
    BlockLayout,
    BSLongformerSparsityConfig,
    block_sparse_attention,
    block_sparse_attention_with_lse,
)
from shardwise.attention.backends import AttentionGrads, BackendPlan
from shardwise.attention.custom_op import BACKENDS, backend_named
from shardwise.runtime.recompute import run_forward
from shardwise.runtime.torch_private import OpMode, fake_tensors

P = 0.3


def layout() -> BlockLayout:
    return BlockLayout.from_blocks(torch.ones(2, 4, 4), 16, causal=True, num_tokens=60)


def tensors() -> list[Tensor]:
    shapes = [(2, 2, 60, 8), (2, 1, 60, 8), (2, 1, 60, 8)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The output and the gradients, from one state of torch's generator."""
    torch.manual_seed(3)
    out = function(*inputs)
    return [out, *torch.autograd.grad(out.square().sum(), inputs)]


def form(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, dtype, and strides where they matter."""
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return tensor.shape, tensor.dtype, strides


class Counted:
    """The CPU's back end, which counts what is asked of it."""

    def __init__(self, calls: list[str]) -> None:
        self._own, self._calls = backend_named("cpu"), calls

    def plan(self, layout: BlockLayout, q: Tensor, k: Tensor) -> BackendPlan:
        self._calls.append("plan")
        return self._own.plan(layout, q, k)

    def forward(self, *given: Any) -> tuple[Tensor, Tensor]:
        self._calls.append("forward")
        return self._own.forward(*given)

    def backward(self, *given: Any) -> AttentionGrads:
        self._calls.append("backward")
        return self._own.backward(*given)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What back ends are asked for, in order."""
    found: list[str] = []
    counted = Counted(found)
    monkeypatch.setattr("shardwise.attention.custom_op.backend_named", lambda name: counted)
    return found


@pytest.mark.parametrize("p", [0.0, P])
@pytest.mark.parametrize(("mode", "num_forwards"), [("none", 1), ("full", 2), ("selective", 1)])
def test_recomputation(calls: list[str], mode: str, num_forwards: int, p: float) -> None:
    """It gives the same, with the same draw; its plan is made once; the selective one does not attend again."""
    whole, inputs = layout(), tensors()

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_sparse_attention(q * 2, k, v, whole, dropout=p).sin()

    expected = gradients(forward, inputs)
    calls.clear()
    whole = layout()
    found = gradients(lambda *given: run_forward(forward, mode, given, {}), inputs)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert calls == ["plan"] + ["forward"] * num_forwards + ["backward"]


def test_keeps_its_inputs_output_and_log_sum_exp_alone() -> None:
    inputs, saved = tensors(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        results = block_sparse_attention_with_lse(*inputs, layout())
    assert [each.data_ptr() for each in saved] == [each.data_ptr() for each in (*inputs, *results)]
    assert sum(each.nbytes for each in saved) == 8 * (2 * 60) * (2 * 2 * 8 + 2 * 1 * 8 + 2)


@pytest.mark.parametrize("p", [0.0, P])
def test_memory_grows_no_faster_than_the_length(p: float) -> None:
    peaks = []
    for num_tokens in (1024, 2048, 4096):
        whole = BSLongformerSparsityConfig(num_heads=2, block=64).layout(num_tokens)
        inputs = [torch.randn(1, 2, num_tokens, 16, requires_grad=True) for _ in range(3)]
        with LiveBytes() as live:
            block_sparse_attention(*inputs, whole, dropout=p).sum().backward()
        peaks.append(live.peak_bytes())
    assert 0 < peaks[2] - peaks[1] < 2.1 * (peaks[1] - peaks[0])  # 4 times, where it grew by the square


def test_dropout_keeps_two_numbers_a_row_and_one_a_column() -> None:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        block_sparse_attention(*tensors(), layout(), dropout=P)
    assert [tuple(each.shape) for each in saved[5:]] == [(2, 2, 60), (2, 2, 60), (60,)]


def test_two_graphs_through_one_layout() -> None:
    whole, inputs = layout(), tensors()

    def once(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_sparse_attention(q, k, v, whole)

    single = gradients(once, inputs)
    both = gradients(lambda *given: once(*given) + once(*given), inputs)
    torch.testing.assert_close(both, [single[0] * 2, *(each * 4 for each in single[1:])])


def test_only_what_is_asked_for_gets_gradients() -> None:
    (q, k, v), bias = tensors(), torch.randn(1, 2, 60, 60, dtype=torch.float64, requires_grad=True)
    out, lse = block_sparse_attention_with_lse(q.detach(), k, v.detach(), layout(), bias=bias)
    assert [each.shape for each in torch.autograd.grad(out.sum(), (k, bias), retain_graph=True)] == [
        k.shape,
        bias.shape,
    ]
    assert torch.autograd.grad(lse.sum(), k, retain_graph=True)[0].any()
    with torch.no_grad():
        assert not block_sparse_attention(q, k, v, layout()).requires_grad


def dual(run: Any, q: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        return run(torch.autograd.forward_ad.make_dual(q, q))


@pytest.mark.parametrize(
    "transform",
    [
        lambda run, q: torch.vmap(run)(q[None]),
        lambda run, q: torch.func.grad(lambda each: run(each).sum())(q),
        lambda run, q: torch.func.jvp(run, (q,), (q,)),
        dual,
    ],
)
def test_transforms_are_refused(transform: Any) -> None:
    """Forward-mode derivatives would be 0 without a word."""
    q, blocks = torch.randn(1, 2, 60, 8), layout()
    with pytest.raises(NotImplementedError, match=r"has no rule for torch.func's transforms"):
        transform(lambda each: block_sparse_attention(each, q, q, blocks), q)


def test_gradients_of_gradients_are_refused() -> None:
    q, k, v = tensors()
    out = block_sparse_attention(q, k, v, layout())
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="leave out create_graph=True"):
        grad.sum().backward()


class TestFakes:
    def test_have_the_forms_of_real_ones_and_need_no_plan(self, calls: list[str]) -> None:
        whole = layout()

        def results() -> list[Tensor]:
            q, k, v = (torch.empty(each.shape, requires_grad=True) for each in tensors())
            bias = torch.empty(1, 2, 60, 60, requires_grad=True)
            padding = torch.empty(2, 60, dtype=torch.bool)
            q2 = q.transpose(1, 2).contiguous().transpose(1, 2)
            out, lse = block_sparse_attention_with_lse(q2, k, v, whole, key_padding=padding, bias=bias, dropout=P)
            return [out, lse, *torch.autograd.grad(out.sum() + lse.sum(), (q2, k, v, bias))]

        real = results()
        calls.clear()
        with fake_tensors():
            fake = results()
        assert calls == []
        assert [form(each) for each in fake] == [form(each) for each in real]

    def test_meta_tensors_need_no_plan_either(self, calls: list[str]) -> None:
        inputs = [each.detach().to("meta").requires_grad_() for each in tensors()]
        out = block_sparse_attention(*inputs, layout(), dropout=P)
        assert [each.device.type for each in (out, *torch.autograd.grad(out.sum(), inputs))] == ["meta"] * 4
        assert calls == []

    def test_who_comes_first_leaves_nothing_fake(self) -> None:
        whole, inputs = layout(), tensors()
        with fake_tensors():
            block_sparse_attention(*(torch.empty(each.shape) for each in inputs), whole, dropout=P)
            whole.of_heads(0, 1)
        out = block_sparse_attention(*inputs, whole)
        assert out.isfinite().all()
        assert whole.of_heads(0, 1).allowed().any()


@pytest.mark.quick(1)
@pytest.mark.parametrize("p", [0.0, P])
def test_compiles_whole(p: float) -> None:
    whole, inputs = layout(), tensors()

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_sparse_attention(q * 2, k, v, whole, dropout=p).sin()

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(gradients(compiled, inputs), gradients(forward, inputs))
    others = [torch.randn(4, *each.shape[1:], dtype=each.dtype, requires_grad=True) for each in inputs]
    torch.testing.assert_close(gradients(compiled, others), gradients(forward, others))  # another batch size


def test_modes_see_one_op() -> None:
    class Seen(OpMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.name())
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    q, k, v = (each.detach() for each in tensors())
    with Seen():
        block_sparse_attention(q, k, v, layout())
    assert [name for name in names if name.startswith("shardwise")] == ["shardwise::block_sparse_attention"]
    assert not any("aten::mm" in name or "bmm" in name or "attention_for_cpu" in name for name in names)


def test_the_cpu_has_its_back_end() -> None:
    assert BACKENDS.keys() >= {"cpu", "triton"}
    assert callable(backend_named("cpu").forward)
