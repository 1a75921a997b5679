"""What runs in the place of a block's forward: shared code, refusals, errors of the compiler, and putting back."""

from __future__ import annotations

import functools
import gc
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from harness.pool import WorkerPool
from harness.refusals import refusal_of, refused
from shardwise import Config, initialize
from shardwise.construction.scan import build_layout
from shardwise.layout.layout import Layout
from shardwise.runtime.recompute import replace_forwards


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """A small block; `kind` says what is odd in it."""

    def __init__(self, kind: str = "plain", depth: int = 1, width: int = 4) -> None:
        super().__init__()
        self.linear, self.kind, self.depth = nn.Linear(width, width), kind, depth

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.kind == "in-place":
            y.mul_(0.5).relu_()
        y = torch.tanh(y)
        if self.kind == "branch" and y.sum() > 0:
            y = y * 2
        if self.kind == "raise":
            raise KeyError("no such expert")
        if self.kind == "dropout":
            y = nn.functional.dropout(y, 0.5)
        if self.kind == "depth":
            y = y * self.depth
        return x + y


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def make(compile_section: dict[str, Any] | None = None, world_size: int = 1, **sections: Any) -> Config:
    section = {"enabled": True, "backend": "aot_eager", **(compile_section or {})}
    return Config.from_dict({"compile": section, "run": {"device": "cpu"}, **sections}).resolve(world_size)


def replace(model: nn.Module, config: Config) -> Layout:
    layout = build_layout(model, config)
    replace_forwards(model, layout, config)
    return layout


def gradient(model: nn.Module, seed: int = 0) -> Tensor:
    """Of every parameter, flat, for inputs that need gradients themselves, as all blocks but the first have."""
    torch.manual_seed(seed)
    model.zero_grad()
    model(torch.ones(3, 4, requires_grad=True)).square().sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("num_blocks", [2, 6])
def test_equal_blocks_share_their_code_and_unequal_ones_do_not(num_blocks: int) -> None:
    blocks = [Block() for _ in range(num_blocks)]
    model = Stack(*blocks)
    replace(model, make())
    gradient(model)
    assert counters["stats"]["unique_graphs"] == 1
    other = Stack(Block(), nn.Sequential(Block(), Block()))
    replace(other, make())
    gradient(other)
    assert counters["stats"]["unique_graphs"] == 3


def test_blocks_of_ten_widths_do_not_count_towards_one_limit() -> None:
    model = nn.Sequential(*[nn.Sequential(Block(width=width), nn.Linear(width, width + 1)) for width in range(3, 13)])
    replace(model, make(zero={"blocks": ["Sequential"]}))
    with torch._dynamo.config.patch(error_on_recompile=True):
        model(torch.ones(2, 3, requires_grad=True)).sum().backward()
    assert counters["stats"]["unique_graphs"] == 10


def test_blocks_that_differ_in_a_number_are_compiled_each() -> None:
    model, plain = (Stack(*[Block("depth", depth) for depth in range(9)]) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    replace(model, make())
    torch.testing.assert_close(gradient(model), gradient(plain))
    assert counters["stats"]["unique_graphs"] == 9


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize("kind", ["dropout", "in-place"])
def test_recomputed_and_compiled_equals_plain(kind: str, mode: str) -> None:
    model, plain = (Stack(Block(kind), Block(kind)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    replace(model, make(recompute={"mode": mode}))
    for seed in range(2):
        torch.testing.assert_close(gradient(model, seed), gradient(plain, seed))


class _Saved:
    """Elements of what autograd saves, parameters left out."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {parameter.data_ptr() for parameter in model.parameters()}
        self.numels: list[int] = []

    def pack(self, tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in self._parameters:
            self.numels.append(tensor.numel())
        return tensor


def test_compiled_code_saves_what_the_mode_says() -> None:
    """Checkpoints inside compiled code: around it, selective recomputation would save nothing but the inputs."""
    saved = {}
    for mode in ("none", "full", "selective"):
        model = Stack(Block())
        replace(model, make(recompute={"mode": mode}))
        recorder = _Saved(model)
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor):
            model(torch.ones(3, 4, requires_grad=True)).sum().backward()
        saved[mode] = sum(recorder.numels)
    assert saved["full"] == 3 * 4  # the input
    assert saved["selective"] == 2 * 3 * 4  # the product too


def failure(kind: str, backend: str = "aot_eager") -> tuple[str, str]:
    model = Stack(Block(), Block(kind))
    replace(model, make({"backend": backend}))
    return refusal_of(lambda: model(torch.ones(3, 4)))


def test_a_graph_break_names_the_block_the_reason_and_the_place() -> None:
    code, message = failure("branch")
    assert code == "compile-one-graph"
    assert message.startswith("block blocks.1 ")
    assert "Data-dependent branching" in message
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "y.sum() > 0:" in text)
    assert f"{__file__}:{line}; " in message
    assert "\n" not in message


def test_an_exception_of_the_blocks_own_is_shown() -> None:
    assert re.search("no such expert|KeyError", failure("raise")[1])  # torch 2.11's compiler shows only the class


class _Borrower(nn.Module):
    """Uses its own layer and, which cannot be known before, the other block's."""

    def __init__(self, lender: Block) -> None:
        super().__init__()
        self.linear, self._lender = nn.Linear(4, 4), [lender]

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.linear(x), self._lender[0].linear.weight)


def borrow(rank: int, world_size: int, is_compiled: bool) -> tuple[list[float], str, str]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    lender = Block()
    model = Stack(lender, _Borrower(lender))
    config = make({"enabled": is_compiled}, world_size=2, zero={"stage": 3})
    engine = initialize(model, config, loss_fn=lambda output, batch: output.sum())
    losses: list[float] = []
    step = lambda: losses.append(engine.train_step([torch.ones(3, 4)]).loss)  # noqa: E731
    step()  # the lender is still there: it has just run for the first time
    code, message = refusal_of(step)
    engine.close()
    return losses, code, message


def test_a_block_that_uses_a_released_parameter_of_another_is_named_or_right(ranks: WorkerPool) -> None:
    """torch 2.11's compiler leaves the read to the guard of released parameters, later ones refuse it."""
    uncompiled = ranks(2).run(borrow, False)
    for (losses, code, message), (expected, *_) in zip(ranks(2).run(borrow, True), uncompiled, strict=True):
        if code:
            assert code == "compile-one-graph"
            assert message.startswith("block blocks.1 ")
        else:
            assert losses == pytest.approx(expected, rel=1e-6)
            assert len(losses) == 2


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config, cpp_builder

    cpp_builder.cpp_compiler_search.cache_clear()
    with config.patch({"cpp.cxx": (None, "/no/such/g++"), "force_disable_caches": True}):
        code, message = failure("plain", backend="inductor")
    cpp_builder.cpp_compiler_search.cache_clear()
    assert code == "compile-backend-failed"
    assert all(value in message for value in ("blocks.0", "compile.backend=inductor", "InvalidCxxCompiler"))


@pytest.mark.parametrize(
    ("section", "stage", "code", "values"),
    [
        ({"backend": "inducter"}, 0, "compile-backend", ("compile.backend='inducter'", "inductor?")),
        ({"mode": "default"}, 0, "compile-mode-backend", ("compile.mode=default", "aot_eager")),
        ({"backend": "inductor", "mode": "max-autotune"}, 3, "compile-mode-stage", ("max-autotune",)),
    ],
)
def test_what_cannot_work_is_refused(section: dict[str, Any], stage: int, code: str, values: tuple[str, ...]) -> None:
    with refused(code, *values):
        replace(Stack(Block()), make(section, world_size=2, zero={"stage": stage}))


def test_graphs_are_refused_in_a_pipeline() -> None:
    with refused("compile-mode-pipeline", "reduce-overhead"):
        section = {"backend": "inductor", "mode": "reduce-overhead"}
        replace(Stack(Block(), Block()), make(section, world_size=2, mesh={"pp": 2}, zero={"stage": 1}))


@pytest.mark.parametrize(("mode", "num_begun"), [("reduce-overhead", 3), ("max-autotune", 3), ("default", 0)])
def test_each_forward_begins_a_step_of_cuda_graphs(monkeypatch: pytest.MonkeyPatch, mode: str, num_begun: int) -> None:
    """Else a block of an evaluation would overwrite what the block before it has returned."""
    begun: list[None] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(None))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    model = Stack(Block(), Block())
    replace(model, make({"backend": "inductor", "mode": mode}, world_size=2, recompute={"mode": "full"}))
    model(torch.ones(3, 4)).sum().backward()
    with torch.no_grad():
        model(torch.ones(3, 4))
        model(torch.ones(3, 4))
    assert len(begun) == num_begun


def train(rank: int, world_size: int) -> dict[str, Any]:
    """A compiled engine's life: a metered step, a step, close, and no trace left of it."""
    torch._dynamo.reset()
    counters.clear()
    model = Stack(Block(), Block())
    own = functools.partial(Block.forward, model.blocks[1])
    model.blocks[1].forward = own  # the user has put it there
    config = make(world_size=world_size, zero={"stage": 3}, recompute={"mode": "full"})
    engine = initialize(model, config, loss_fn=lambda output, batch: output.square().mean())
    with engine.memory.meter():
        engine.train_step([torch.ones(3, 4)])
    metered = counters["stats"]["unique_graphs"]
    engine.train_step([torch.ones(3, 4)])
    with refused("model-has-engine"):
        initialize(model, config)
    compiled = counters["stats"]["unique_graphs"]
    engine.close()
    found = {
        "metered": metered,
        "compiled": compiled,
        "put_back": "forward" not in model.blocks[0].__dict__ and model.blocks[1].forward is own,
    }
    watched = [weakref.ref(engine), weakref.ref(model), *map(weakref.ref, model.parameters())]
    del engine, model, own
    gc.collect()
    return {**found, "alive": sum(ref() is not None for ref in watched)}


def test_close_puts_the_forwards_back_and_leaves_nothing_alive(ranks: WorkerPool) -> None:
    for found in ranks(2).run(train):
        # The first block's input needs no gradient, the second's does: two graphs.
        assert found == {"metered": 0, "compiled": 2, "put_back": True, "alive": 0}
