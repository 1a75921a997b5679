"""Split models against the whole one: outputs, gradients, collectives, what is saved; and what a split refuses."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils import _pytree as pytree

from harness.pool import WorkerPool
from harness.split_model import (
    Attention,
    build,
    cut,
    make_comm,
    make_ids,
    make_plan,
    make_splits,
    put_together,
    split_on_rank,
)
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import TensorConfig
from shardwise.layout.tensor_plan import LayerSplit, SequenceStack, SharedInput, TensorPlan
from shardwise.layout.tp_sharding import FusedPart, ParamSplit
from shardwise.runtime.recompute import recompute_forward, run_forward
from shardwise.tensor.apply import split_model

Result = tuple[Tensor, dict[str, Tensor]]


def loss_of(logits: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)
    return (logits * weights).sum() + logits.square().mean()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def expected(dtype: torch.dtype = torch.float64) -> Result:
    model = build(dtype)
    logits = model(make_ids())
    loss_of(logits).backward()
    return logits.detach(), gradients(model)


def compiled(run: Callable[..., Any], forward: Callable[..., Any], recompute: str) -> Callable[..., Any]:
    return lambda *args, **kwargs: run(forward, recompute, args, kwargs)


def train(rank: int, world_size: int, is_sequence: bool, mode: str, options: dict[str, Any]) -> Result:
    split = split_on_rank(rank, world_size, is_sequence, **options)
    if mode.startswith("compiled"):
        torch.compiler.reset()
        counter = CompileCounterWithBackend("aot_eager")
        run = torch.compile(run_forward, fullgraph=True, backend=counter)
        for block in split.model.blocks:
            block.forward = compiled(run, block.forward, mode.removeprefix("compiled "))
    elif mode != "none":
        for block in split.model.blocks:
            recompute_forward(block, mode)
    logits = split.model(make_ids())
    loss_of(logits).backward()
    if mode.startswith("compiled") and counter.frame_count != (2 if is_sequence else 1):
        # Equal blocks share their code, though their modules have names; under sequence parallelism the first is other.
        raise RuntimeError(f"{counter.frame_count} compilations")
    return logits.detach(), gradients(split.model)


def check(results: list[Result], is_sequence: bool, tolerance: float = 1e-12) -> None:
    logits, grads = expected(results[0][0].dtype)
    degree = len(results)
    splits = make_splits(build(), make_plan(degree), degree, is_sequence)
    for found, _ in results:
        torch.testing.assert_close(found, logits, rtol=tolerance, atol=tolerance)
    assert set(results[0][1]) == set(grads)
    for name, grad in grads.items():
        whole = put_together(name, splits[name], [each[1][name] for each in results])
        assert torch.allclose(whole, grad, rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("is_sequence", [False, True])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_split_model_computes_what_the_whole_does(
    ranks: WorkerPool, num_ranks: int, is_sequence: bool, mode: str
) -> None:
    check(ranks(num_ranks).run(train, is_sequence, mode, {}), is_sequence)


@pytest.mark.full
@pytest.mark.parametrize(("is_sequence", "mode"), [(False, "none"), (True, "selective"), (True, "full")])
def test_compiled_blocks_compute_it_too(ranks: WorkerPool, is_sequence: bool, mode: str) -> None:
    check(ranks(2).run(train, is_sequence, f"compiled {mode}", {}), is_sequence)


@pytest.mark.parametrize("is_sequence", [False, True])
@pytest.mark.parametrize("chunks", [2, 3])
def test_chunks_compute_it_too(ranks: WorkerPool, is_sequence: bool, chunks: int) -> None:
    check(ranks(2).run(train, is_sequence, "none", {"overlap_chunks": chunks}), is_sequence)


@pytest.mark.parametrize("is_sequence", [False, True])
def test_bf16_is_near(ranks: WorkerPool, is_sequence: bool) -> None:
    options = {"dtype": torch.bfloat16, "overlap_chunks": 2}
    check(ranks(2).run(train, is_sequence, "selective", options), is_sequence, tolerance=0.25)


def count(rank: int, world_size: int, is_sequence: bool, mode: str, frozen: bool) -> list[dict[str, int]]:
    split = split_on_rank(rank, world_size, is_sequence)
    block = split.model.blocks[1]  # the first one also splits what it gets
    if mode != "none":
        recompute_forward(block, mode)
    if frozen:
        block.requires_grad_(False)
    x = torch.randn(2, 8, 16, dtype=torch.float64, requires_grad=True)
    y = block(x * 1)
    forward = split.calls()
    y.sum().backward()
    backward = split.calls()
    return [forward, backward]


TP = {"all_reduce": 2}
SP = {"all_gather": 2, "reduce_scatter": 2}


@pytest.mark.parametrize(
    ("is_sequence", "mode", "frozen", "calls"),
    [
        (False, "none", False, [TP, TP]),
        (False, "selective", False, [TP, TP]),
        (False, "full", False, [TP, {"all_reduce": 4}]),
        (True, "none", False, [SP, {"all_gather": 4, "reduce_scatter": 2}]),
        (True, "selective", False, [SP, {"all_gather": 4, "reduce_scatter": 2}]),
        (True, "full", False, [SP, {"all_gather": 4, "reduce_scatter": 4}]),
        (False, "none", True, [TP, TP]),
        (True, "none", True, [SP, {"all_gather": 2, "reduce_scatter": 2}]),
    ],
)
def test_collectives_of_a_layer(
    ranks: WorkerPool, is_sequence: bool, mode: str, frozen: bool, calls: list[dict[str, int]]
) -> None:
    assert ranks(2).run(count, is_sequence, mode, frozen) == [calls] * 2


def saved_bytes(rank: int, world_size: int, is_sequence: bool) -> tuple[int, int]:
    """Bytes saved for the backward of a region, and of its input whole."""
    split = split_on_rank(rank, world_size, is_sequence)
    region = split.model.blocks[0].mlp
    length = 64 // world_size if is_sequence else 64
    x = torch.randn(2, length, 16, dtype=torch.float64, requires_grad=True) * 1
    parameters = {each.untyped_storage().data_ptr() for each in region.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = region(x)
    del y
    return sum(saved.values()), 2 * 64 * 16 * 8


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_region_keeps_a_slice_of_its_input(ranks: WorkerPool, num_ranks: int) -> None:
    whole, input_bytes = ranks(num_ranks).run(saved_bytes, False)[0]
    parts, _ = ranks(num_ranks).run(saved_bytes, True)[0]
    # gate, silu(gate), up and their product are split in both; the input is in one of them
    features = 4 * input_bytes * 2 // num_ranks
    assert whole == features + input_bytes
    assert parts == features + input_bytes // num_ranks


def use_in_odd_ways(rank: int, world_size: int, is_sequence: bool) -> dict[str, bool]:
    split = split_on_rank(rank, world_size, is_sequence)
    model, ids = split.model, make_ids()
    loss_of(model(ids)).backward()
    grads = gradients(model)

    def same(found: dict[str, Tensor], factor: float = 1.0) -> bool:
        return all(torch.allclose(found[name], factor * grad, rtol=1e-12, atol=1e-12) for name, grad in grads.items())

    results = {}
    copied = copy.deepcopy(model)
    copied.zero_grad()
    loss_of(copied(ids)).backward()
    results["deep copy"] = same(gradients(copied))
    model.zero_grad()
    (loss_of(model(ids)) + loss_of(model(ids))).backward()
    results["used twice"] = same(gradients(model), 2.0)
    found = torch.autograd.grad(loss_of(model(ids)), list(model.parameters()))
    results["autograd.grad"] = same(dict(zip(dict(model.named_parameters()), found, strict=True)))
    model.zero_grad()
    loss = loss_of(model(ids))
    loss.backward(retain_graph=True)
    loss.backward()
    results["backward twice"] = same(gradients(model), 2.0)
    with torch.no_grad():
        results["no_grad"] = torch.equal(model(ids), model(ids))
    model.zero_grad()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("attention.k" not in name and "up" not in name)
    loss_of(model(ids)).backward()
    grads = {name: grad for name, grad in grads.items() if "attention.k" not in name and "up" not in name}
    results["some frozen"] = set(gradients(model)) == set(grads) and same(gradients(model))
    return results


@pytest.mark.parametrize("is_sequence", [False, True])
def test_odd_uses(ranks: WorkerPool, is_sequence: bool) -> None:
    for results in ranks(2).run(use_in_odd_ways, is_sequence):
        assert results == dict.fromkeys(results, True)


def registered_products() -> set[str]:
    return {name for name in dir(torch.ops.shardwise) if name.startswith("row_product")}


def undo_all(rank: int, world_size: int) -> list[Any]:
    others = registered_products()  # of engines that other tests have dropped and are not collected yet
    model: Any = build()
    plan = make_plan(world_size)
    classes = [type(each) for each in model.modules()]
    state = [{**vars(each)} for each in model.modules()]
    splits = make_splits(model, plan, world_size, is_sequence=True)
    config = TensorConfig(sequence_parallel=True)
    undo = split_model(model, plan, make_comm(), config, splits)
    swapped = [
        repr(model.blocks[0].mlp.down),
        str(inspect.signature(model.blocks[0].attention.forward)),
        model.blocks[0].attention.num_heads,
        type(model.blocks[0].mlp) is type(model.blocks[1].mlp),
        len(registered_products() - others) == 1,
    ]
    for each in reversed(undo):
        each()
    names = sorted(registered_products() - others)
    whole = build()
    return [
        *swapped,
        [type(each) for each in model.modules()] == classes,
        [{**vars(each)} for each in model.modules()] == state,
        torch.equal(model(make_ids()), whole(make_ids())),
        names,
    ]


def test_all_is_undone(ranks: WorkerPool) -> None:
    assert ranks(2).run(undo_all)[1] == [
        "Linear(in_features=16, out_features=16, bias=True, row 1 of tp=2)",
        str(inspect.signature(Attention().forward)),
        4,
        True,
        True,
        True,
        True,
        True,
        [],
    ]


class Odd(nn.Module):
    """Layers outside of regions, fused, transposed, with whole inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, padding_idx=1)
        self.fused = Conv1D(8, 24)
        self.proj = Conv1D(8, 8)
        self.first = nn.Linear(8, 12)
        self.second = nn.Linear(8, 12)
        self.last = nn.Linear(12, 8)

    def forward(self, ids: Tensor) -> Tensor:  # [b, s]
        x = self.embed(input=ids)
        q, k, v = self.fused(x).chunk(3, dim=-1)
        x = self.proj((q * k).tanh() + v) + x
        return self.last(input=self.first(x) * self.second(input=x))


class Conv1D(nn.Module):
    """As GPT-2's."""

    def __init__(self, nx: int, nf: int) -> None:
        super().__init__()
        self.nx, self.nf = nx, nf
        self.weight = nn.Parameter(torch.randn(nx, nf) / 4)
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:  # [b, s, nx]
        return torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


ODD_PLAN = TensorPlan(
    layers=(
        LayerSplit("embed", "column-embedding", (FusedPart(8),), gathers_output=True),
        LayerSplit("fused", "column", (FusedPart(8), FusedPart(8), FusedPart(8)), is_transposed=True),
        LayerSplit("proj", "row", (FusedPart(8),), is_transposed=True),
        LayerSplit("first", "column", (FusedPart(8), FusedPart(4, 2)), gathers_output=True),
        LayerSplit("second", "column", (FusedPart(12, 4),), gathers_output=True),
        LayerSplit("last", "row", (FusedPart(8), FusedPart(4)), splits_input=True),
    )
)


def build_odd() -> Odd:
    torch.manual_seed(3)
    return Odd().double()


def train_odd(rank: int, world_size: int) -> tuple[Tensor, dict[str, Tensor], list[str]]:
    model, comm = build_odd(), make_comm()
    splits = make_splits(model, ODD_PLAN, world_size, is_sequence=False)
    split_model(model, ODD_PLAN, comm, TensorConfig(), splits)
    cut(model, splits, rank)
    y = model(make_ids() % 11)
    (y * torch.arange(8)).square().sum().backward()
    reduced = [call.name for call in comm.comm_log.recent if call.op == "all_reduce"]
    return y.detach(), gradients(model), reduced


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_fused_transposed_and_whole_layers(ranks: WorkerPool, num_ranks: int) -> None:
    whole = build_odd()
    y = whole(make_ids() % 11)
    (y * torch.arange(8)).square().sum().backward()
    splits = make_splits(whole, ODD_PLAN, num_ranks, is_sequence=False)
    results = ranks(num_ranks).run(train_odd)
    for found, _, reduced in results:
        torch.testing.assert_close(found, y, rtol=1e-12, atol=1e-12)
        # forward: the rows' sums; backward: one for `fused`, one for `first` and `second`, which share their input
        assert sorted(reduced) == ["first", "fused", "last", "proj"]
    for name, parameter in whole.named_parameters():
        found = put_together(name, splits[name], [each[1][name] for each in results])
        torch.testing.assert_close(found, parameter.grad, rtol=1e-12, atol=1e-12, msg=name)


def refusals(rank: int, world_size: int) -> list[Any]:
    found: list[Any] = []

    def refuse(model: nn.Module, plan: TensorPlan, splits: dict[str, ParamSplit]) -> None:
        classes = [type(each) for each in model.modules()]
        try:
            split_model(model, plan, make_comm(), TensorConfig(sequence_parallel=True), splits)
        except ConfigError as error:
            found.append((error.code, str(error)))
        found.append(classes == [type(each) for each in model.modules()])

    refuse(nn.Sequential(nn.Linear(8, 8)), TensorPlan(regions=(SharedInput("0", ("hidden",)),)), {})
    split = split_on_rank(rank, world_size, is_sequence=True)
    try:
        split.model(make_ids(length=7))
    except ConfigError as error:
        found.append((error.code, str(error)))
    return found


def test_what_cannot_be_split_is_refused(ranks: WorkerPool) -> None:
    (code, message), is_unchanged, (other_code, other_message) = ranks(2).run(refusals)[0]
    assert (code, other_code) == ("tp-plan-argument", "tp-divides-tokens")
    assert "module 0" in message
    assert "'hidden'" in message
    assert is_unchanged
    assert "length 7 " in other_message
    assert "6, 8" in other_message


LENGTHS = (7, 8, 3)


def evaluate(rank: int, world_size: int, is_compiled: bool) -> tuple[list[Tensor], Result]:
    """Logits of lengths that need not divide, between a recomputed forward and its backward."""
    split = split_on_rank(rank, world_size, is_sequence=True)
    for block in split.model.blocks:
        if is_compiled:
            torch.compiler.reset()
            run = torch.compile(run_forward, fullgraph=True, backend="eager")
            block.forward = compiled(run, block.forward, "none")
        else:
            recompute_forward(block, "full")
    logits = split.model(make_ids())
    with torch.no_grad():
        evaluated = [split.model(make_ids(length=length)) for length in LENGTHS]
    loss_of(logits).backward()
    return evaluated, (logits.detach(), gradients(split.model))


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_without_a_backward_sequences_need_not_divide(ranks: WorkerPool, is_compiled: bool) -> None:
    results = ranks(2).run(evaluate, is_compiled)
    with torch.no_grad():
        wholes = [build()(make_ids(length=length)) for length in LENGTHS]
    for evaluated, _ in results:
        torch.testing.assert_close(evaluated, wholes, rtol=1e-12, atol=1e-12)
    check([result for _, result in results], is_sequence=True)


class Outputs(nn.Module):
    """Returns its input in a structure."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:  # [b, s]
        if self.kind == "tensor":
            return x * 1
        if self.kind == "output":
            from transformers.modeling_outputs import BaseModelOutput

            return BaseModelOutput(last_hidden_state=x * 1)
        return {"tuple": (None, x * 1, x), "list": [x * 1, 3], "dict": {"x": x * 1}}[self.kind]


def pass_a_stack(rank: int, world_size: int, kind: str) -> list[Any]:
    model = nn.Sequential(Outputs(kind))
    plan = TensorPlan(stacks=(SequenceStack("0", "x", "0", ("0",)),))
    split_model(model, plan, make_comm(), TensorConfig(sequence_parallel=True), {})
    x = torch.arange(8.0).view(1, 8).requires_grad_()
    output = model(x)
    leaves = [each for each in pytree.tree_leaves(output) if isinstance(each, Tensor)]
    (grad,) = torch.autograd.grad((leaves[0] * torch.arange(8)).sum(), x)
    return [type(output).__name__, leaves[0].tolist(), grad.tolist()]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("tensor", "Tensor"),
        ("tuple", "tuple"),
        ("list", "list"),
        ("dict", "dict"),
        ("output", "BaseModelOutput"),
    ],
)
def test_a_stack_may_begin_and_end_in_one_module(ranks: WorkerPool, kind: str, name: str) -> None:
    numbers = [[float(i) for i in range(8)]]
    assert ranks(2).run(pass_a_stack, kind) == [[name, numbers, numbers]] * 2
