"""Logits that wait: which operations leave them uncomputed, what the others see, and what the engine makes of them."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from harness.huggingface import FAMILIES, build_model
from harness.live_bytes import LiveBytes
from harness.pool import WorkerPool
from harness.refusals import refused
from harness.training import make_config
from shardwise import backward, initialize
from shardwise.comm.backends import process_group_comm
from shardwise.comm.collectives import Comm, CommResources
from shardwise.models.decoder import lm_loss
from shardwise.runtime.float64 import float64_throughout
from shardwise.tensor.cross_entropy import VocabSplit
from shardwise.tensor.loss_parallel import LazyLogits, LazyLogitsHead

B, S, E, V = 2, 5, 4, 7
Operation = Callable[[Any], Any]

DEFERRED: dict[str, Operation] = {
    "shift": lambda x: x[..., :-1, :].contiguous().view(-1, V),
    "slice": lambda x: x[:, 1:],
    "last": lambda x: x[:, -1, :],
    "one": lambda x: x[0],
    "new dim": lambda x: x[:, None, 2:4],
    "mask": lambda x: x[torch.arange(B * S).view(B, S) % 3 == 0],
    "rows": lambda x: x[torch.tensor([1, 0]), torch.tensor([2, 3])],
    "vocabulary cut at its end": lambda x: x[..., :V],
    "view": lambda x: x.view(-1, x.size(-1)),
    "view with -1 last": lambda x: x.view(B * S, -1),
    "reshape": lambda x: torch.reshape(x, (-1, V)),
    "flatten": lambda x: x.flatten(0, 1),
    "torch.flatten": lambda x: torch.flatten(x, end_dim=-2),
    "double": lambda x: x.float().double() if x.dtype == torch.float32 else x.double(),
    "float": lambda x: x.double().float(),
    "to": lambda x: x.to(torch.float64).to("cpu").to(torch.zeros(1, dtype=torch.float64)),
    "narrow": lambda x: x.narrow(1, 0, S - 1),
    "split": lambda x: x.split(3, dim=1)[1],
    "chunk": lambda x: torch.chunk(x, 2, dim=-2)[0],
    "unbind": lambda x: x.unbind()[1],
    "unsqueeze": lambda x: x.unsqueeze(0).squeeze(0),
    "select": lambda x: x.select(1, -2),
    "transposed tokens": lambda x: x.transpose(0, 1),
    "classes second": lambda x: x.transpose(1, 2),
    "permute": lambda x: x.permute(1, 2, 0),
    "mT and back": lambda x: x.mT.mT,
    "clone": lambda x: x.clone(),
}
COMPUTED: dict[str, Operation] = {
    "softmax": lambda x: x.softmax(-1),
    "add": lambda x: 1 + x,
    "argmax": lambda x: x.detach().argmax(-1),
    "one token": lambda x: x[..., 3],
    "part of the vocabulary": lambda x: x[..., :3],
    "last dim new": lambda x: x[..., None],
    "row of the vocabulary dim": lambda x: x.transpose(1, 2)[:, 2],
    "narrower": lambda x: x.to(torch.bfloat16),
    "half": lambda x: x.half(),
    "integers": lambda x: x.to(torch.int64),
    "reshape through the vocabulary": lambda x: x.reshape(B, -1),
    "flatten all": lambda x: x.flatten(),
    "cat": lambda x: torch.cat([x, x]),
    "last then softmax": lambda x: x[:, -1].softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, dim=-1),
    "iteration": lambda x: torch.stack(list(x)),
    "in place": lambda x: x.div_(2),
    "item": lambda x: torch.tensor(x[0, 0, 0].item()),
    "text": lambda x: torch.tensor(len(str(x[0].detach()))),
    "out": lambda x: torch.mul(x, 2, out=torch.empty(0, dtype=x.dtype)) if not x.requires_grad else x * 2,
}


def make(dtype: torch.dtype = torch.float64, has_bias: bool = True) -> tuple[LazyLogits, Tensor, list[Tensor]]:
    """Deferred logits, plain ones of the same, and the leaves of both."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(*shape, generator=generator).to(dtype) for shape in ((B, S, E), (V, E), (V,))]
    hidden, weight, bias = (leaf.requires_grad_() for leaf in leaves)
    given = bias if has_bias else None
    return (
        LazyLogits(hidden * 1, weight, given, LazyLogitsHead(VocabSplit(V))),
        F.linear(hidden * 1, weight, given),
        leaves,
    )


@pytest.mark.parametrize("name", DEFERRED)
def test_token_operations_stay_deferred(name: str) -> None:
    logits, plain, _ = make(torch.float32)
    result, expected = DEFERRED[name](logits), DEFERRED[name](plain)
    assert isinstance(result, LazyLogits)
    assert result.is_deferred
    assert (result.shape, result.dtype, result.requires_grad) == (expected.shape, expected.dtype, True)
    torch.testing.assert_close(result.compute(), expected)


@pytest.mark.parametrize("name", COMPUTED)
def test_all_else_is_computed(name: str) -> None:
    logits, plain, leaves = make()
    result, expected = COMPUTED[name](logits), COMPUTED[name](plain * 1)
    assert not isinstance(result, LazyLogits)
    torch.testing.assert_close(result, expected)
    if expected.requires_grad:
        given = torch.autograd.grad(result.double().square().sum(), leaves)
        for gradient, want in zip(given, torch.autograd.grad(expected.double().square().sum(), leaves), strict=True):
            torch.testing.assert_close(gradient, want)


LOSSES: dict[str, tuple[Callable[[Any, Tensor], Tensor], bool]] = {
    "mean": (lambda x, y: F.cross_entropy(x.view(-1, V), y.view(-1)), True),
    "sum": (lambda x, y: F.cross_entropy(x.view(-1, V), y.view(-1), reduction="sum"), True),
    "none": (lambda x, y: (F.cross_entropy(x.transpose(1, 2), y, reduction="none") * y).sum(), True),
    "module": (lambda x, y: nn.CrossEntropyLoss(ignore_index=2, label_smoothing=0.2)(x.view(-1, V), y.view(-1)), True),
    "keywords": (lambda x, y: F.cross_entropy(input=x.permute(0, 2, 1), target=y), True),
    "one token": (lambda x, y: F.cross_entropy(x[0, 0], y[0, 0]), True),
    "shifted": (lambda x, y: F.cross_entropy(x[:, :-1].float().reshape(-1, V), y[:, 1:].reshape(-1)), True),
    "lm_loss": (lambda x, y: lm_loss(x, y)[0], True),
    "class weights": (lambda x, y: F.cross_entropy(x.view(-1, V), y.view(-1), torch.arange(V).to(x.dtype)), False),
    "soft targets": (lambda x, y: F.cross_entropy(x.view(-1, V), F.one_hot(y.view(-1), V).to(x.dtype)), False),
    "old arguments": (lambda x, y: F.cross_entropy(x.view(-1, V), y.view(-1), size_average=False), False),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.filterwarnings("ignore:size_average")
def test_losses(name: str, caplog: pytest.LogCaptureFixture) -> None:
    loss_fn, is_deferred = LOSSES[name]
    logits, plain, leaves = make()
    targets = torch.arange(B * S).view(B, S) % V
    targets[0, 2] = -100 if name not in ("none", "soft targets", "module") else 1
    loss, expected = loss_fn(logits, targets), loss_fn(plain, targets)
    tolerance = 1e-6 if name == "shifted" else 1e-12  # it rounds to fp32
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    for given, want in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(given, want, rtol=tolerance, atol=tolerance)
    assert ("full logits" not in caplog.text) == is_deferred


def test_lm_loss_passes_its_terms_on() -> None:
    logits, plain, leaves = make()
    targets = torch.arange(B * S).view(B, S) % V
    loss, expected = lm_loss(logits, targets, 0.1, 0.01)[0], lm_loss(plain, targets, 0.1, 0.01)[0]
    torch.testing.assert_close(loss, expected)
    for given, want in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(given, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_loss_has_the_dtype_that_plain_logits_give(dtype: torch.dtype) -> None:
    targets = torch.zeros(B * S, dtype=torch.int64)
    for view in (lambda x: x.view(-1, V), lambda x: x.view(-1, V).float(), lambda x: x.view(-1, V).double()):
        for reduction in ("mean", "sum", "none"):
            loss, expected = (F.cross_entropy(view(x), targets, reduction=reduction) for x in make(dtype)[:2])
            torch.testing.assert_close(loss, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_what_is_done_in_place_reaches_the_loss() -> None:
    results = []
    for logits in make()[:2]:
        logits[..., 0] = -1.0
        logits *= 2
        logits.div_(3)
        results.append(F.cross_entropy(logits.view(-1, V), torch.zeros(B * S, dtype=torch.int64)))
    torch.testing.assert_close(*results)


def test_a_hook_of_the_user_gets_the_gradient_of_the_logits() -> None:
    gradients: list[Tensor] = []
    for logits in make()[:2]:
        logits.register_hook(gradients.append)
        F.cross_entropy(logits.view(-1, V), torch.zeros(B * S, dtype=torch.int64)).backward()
    torch.testing.assert_close(*gradients)
    assert gradients[0].shape == (B, S, V)
    logits, _, _ = make()
    logits.retain_grad()
    logits.sum().backward()
    assert torch.equal(logits.grad, torch.ones(B, S, V, dtype=torch.float64))


def test_the_graph_is_known_without_computing() -> None:
    logits, _, _ = make()
    assert (logits.requires_grad, logits.is_leaf, logits.grad_fn is None, logits.grad) == (True, False, False, None)
    assert (logits.is_floating_point(), logits.numel(), len(logits)) == (True, B * S * V, B)
    with torch.no_grad():
        silent = make()[0]
    assert (silent.requires_grad, silent.is_leaf, silent.grad_fn) == (False, True, None)
    assert (logits.is_deferred, silent.is_deferred) == (True, True)


def test_the_user_is_warned_once_and_never_without_gradients(caplog: pytest.LogCaptureFixture) -> None:
    logits, _, _ = make()
    with torch.no_grad():
        logits.argmax(-1)
        make()[0].softmax(-1)
    assert "full logits" not in caplog.text
    logits.view(-1, V).log_softmax(-1)
    logits.exp()
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("shardwise", logging.WARNING)
    assert "log_softmax reads the logits of head" in record.message
    assert "10 x 7" in record.message


def test_reading_without_gradients_leaves_the_graph_to_the_loss() -> None:
    logits, plain, leaves = make()
    with torch.no_grad():
        assert not logits.softmax(-1).requires_grad
    result = logits.square().sum()
    for given, want in zip(
        torch.autograd.grad(result, leaves), torch.autograd.grad(plain.square().sum(), leaves), strict=True
    ):
        torch.testing.assert_close(given, want)


def test_what_is_made_without_gradients_has_none_later() -> None:
    targets = torch.zeros(B * S, dtype=torch.int64)
    hidden, weight = torch.randn(B, S, E), torch.randn(V, E, requires_grad=True)
    with torch.no_grad():
        logits = LazyLogits(hidden, weight, None, LazyLogitsHead(VocabSplit(V)))
        views = [view(make()[0]) for view in (lambda x: x.flatten(0, 1), lambda x: x.double().transpose(0, 1))]
    views[1] = views[1].flatten(0, 1)
    for each in (logits.view(-1, V), *views):
        loss = F.cross_entropy(each, targets)
        assert (each.requires_grad, loss.requires_grad, each.exp().requires_grad) == (False, False, False)
    assert make()[0].flatten(0, 1).requires_grad
    with torch.no_grad():
        assert not F.cross_entropy(make()[0].flatten(0, 1), targets).requires_grad


def test_copies_and_pickles_are_plain_tensors() -> None:
    with torch.no_grad():
        logits, plain, _ = make()
    buffer = io.BytesIO()
    torch.save(logits, buffer)
    buffer.seek(0)
    for copied in (copy.deepcopy(logits), pickle.loads(pickle.dumps(logits)), torch.load(buffer)):
        assert type(copied) is Tensor
        torch.testing.assert_close(copied, plain)
    assert copy.deepcopy(LazyLogitsHead(VocabSplit(V))).vocab.size == V


def test_code_that_bypasses_torch_functions_fails_rather_than_lose_gradients() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    deferred, plain, _ = make()
    # Another term of the loss has a graph, and its backward would run.
    with refused("head-logits-unseen", "logits.compute()"):
        (Double.apply(deferred).sum() + torch.ones((), requires_grad=True)).backward()
    torch.testing.assert_close(Double.apply(deferred.compute()), 2 * plain)


def test_what_is_done_in_place_through_a_view_reaches_the_loss() -> None:
    deferred, plain, _ = make()
    targets = torch.arange(B * S) % (V // 2)
    losses = []
    for logits in (deferred, plain):
        logits[..., V // 2 :].fill_(-30.0)
        losses.append(F.cross_entropy(logits.flatten(0, -2), targets))
    torch.testing.assert_close(*losses)


def test_a_loss_of_deferred_logits_never_holds_them() -> None:
    hidden, weight = torch.randn(4, 1024, 8, requires_grad=True), torch.randn(4096, 8, requires_grad=True)
    targets = torch.zeros(4, 1024, dtype=torch.int64)
    with LiveBytes() as live:
        logits = LazyLogits(hidden * 1, weight, None, LazyLogitsHead(VocabSplit(4096)))
        F.cross_entropy(logits[:, :-1].contiguous().view(-1, 4096), targets[:, 1:].reshape(-1)).backward()
    assert live.peak_bytes() < 0.25 * 4 * 1024 * 4096 * 4


# --- several ranks ---------------------------------------------------------------------------------------------------


def make_comm() -> Comm:
    device = torch.device("cpu")
    return process_group_comm(dist.group.WORLD, "tp", CommResources.alone(device, 20.0))


def split_logits(rank: int, world_size: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Computed logits, the summed gradient of the hidden states, the own one of the weight, and whether it is first."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, E, generator=generator, dtype=torch.float64).requires_grad_()
    whole = torch.randn(vocab_size, E, generator=generator, dtype=torch.float64)
    vocab = VocabSplit(vocab_size, make_comm())
    own = whole[vocab.start : vocab.start + vocab.num_own]
    weight = F.pad(own, (0, 0, 0, vocab.num_rows - vocab.num_own)).requires_grad_()
    logits = LazyLogits(hidden, weight, None, LazyLogitsHead(vocab))
    full = logits.sin()
    full.sum().backward()
    dist.all_reduce(hidden.grad)
    error = full.detach() - (hidden @ whole.T).detach().sin()
    reference = hidden.detach().requires_grad_()
    whole.requires_grad_()
    (reference @ whole.T).sin().sum().backward()
    own_error = weight.grad[: vocab.num_own] - whole.grad[vocab.start : vocab.start + vocab.num_own]
    return error, hidden.grad - reference.grad, own_error, bool(weight.grad[vocab.num_own :].any())


@pytest.mark.parametrize(("num_ranks", "vocab_size"), [(2, 8), (2, 7), (4, 5)])
def test_computed_logits_are_gathered_without_padding(ranks: WorkerPool, num_ranks: int, vocab_size: int) -> None:
    for *errors, trains_padding in ranks(num_ranks).run(split_logits, vocab_size):
        assert errors[0].shape == (3, vocab_size)
        assert all(error.abs().max() < 1e-12 for error in errors if error.numel())
        assert not trains_padding


# --- losses of Hugging Face models -----------------------------------------------------------------------------------


def huggingface_losses() -> dict[str, Callable[[Any, Tensor], Tensor]]:
    from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

    def t5_and_bert(logits: Any, labels: Tensor) -> Tensor:
        return nn.CrossEntropyLoss(ignore_index=-100)(logits.view(-1, logits.size(-1)), labels.view(-1))

    return {
        "causal": lambda x, y: ForCausalLMLoss(x, y, vocab_size=V),
        "causal, counted": lambda x, y: ForCausalLMLoss(x, y, vocab_size=V, num_items_in_batch=torch.tensor(4)),
        "causal, last tokens": lambda x, y: ForCausalLMLoss(x[:, slice(-3, None), :].contiguous(), y[:, -3:], V),
        "masked": lambda x, y: ForMaskedLMLoss(x, y, vocab_size=V),
        "t5 and bert": t5_and_bert,
    }


@pytest.mark.parametrize("name", ["causal", "causal, counted", "causal, last tokens", "masked", "t5 and bert"])
def test_huggingface_losses(name: str, caplog: pytest.LogCaptureFixture) -> None:
    loss_fn = huggingface_losses()[name]
    logits, plain, leaves = make(torch.float32)
    targets = torch.arange(B * S).view(B, S) % V
    targets[1, :2] = -100
    loss, expected = loss_fn(logits, targets), loss_fn(plain, targets)
    torch.testing.assert_close(loss, expected)
    for given, want in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(given, want)
    assert "full logits" not in caplog.text


class SplitLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return LazyLogits(x * 1, self.weight, self.bias, LazyLogitsHead(VocabSplit(self.out_features)))


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5"])
def test_huggingface_models_leave_their_logits_deferred(family: str, caplog: pytest.LogCaptureFixture) -> None:
    batch = FAMILIES[family].batch(0, 2, torch.float64)
    with float64_throughout():
        model = build_model(family).double()
        plain = model(**batch)
        expected = torch.autograd.grad(plain.loss, list(model.parameters()))
        model.get_output_embeddings().__class__ = SplitLinear
        split = model(**batch)
        assert isinstance(split.logits, LazyLogits)
        assert split.logits.is_deferred
        torch.testing.assert_close(split.loss, plain.loss, rtol=1e-12, atol=1e-12)
        for given, want in zip(torch.autograd.grad(split.loss, list(model.parameters())), expected, strict=True):
            torch.testing.assert_close(given, want, rtol=1e-12, atol=1e-12)
    assert "full logits" not in caplog.text


# --- inside an engine ------------------------------------------------------------------------------------------------


class Head(nn.Linear):
    is_split = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_split:
            return super().forward(x)
        return LazyLogits(x, self.weight, self.bias, LazyLogitsHead(VocabSplit(self.out_features)))


class Model(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(V, E, dtype=torch.float64)
        self.blocks = nn.ModuleList(nn.Linear(E, E, dtype=torch.float64) for _ in range(2))
        self.head = Head(E, V, dtype=torch.float64)

    def forward(self, tokens: Tensor) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        return {"logits": self.head(x)}


def loss_of(name: str) -> Callable[[Any, Any], tuple[Tensor, int]]:
    def sum_of(output: Any, batch: Any) -> tuple[Tensor, int]:
        logits, targets = output["logits"], batch[1].flatten()
        if name == "tokens":
            losses = F.cross_entropy(logits.view(-1, V), targets, reduction="none")
            return (losses * torch.arange(len(losses))).sum(), targets.numel()
        if name == "computed":
            return -logits.flatten(0, 1).log_softmax(-1).gather(1, targets[:, None]).sum(), targets.numel()
        return F.cross_entropy(logits.view(-1, V), targets, reduction="sum"), targets.numel()

    return sum_of


def train(rank: int, world_size: int, stage: int, loss: str, is_split: bool, frozen: str) -> SimpleNamespace:
    """Three steps with an evaluation before each: losses, and what was present in between."""
    model = Model()
    model.head.is_split = is_split
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or not name.startswith(frozen))
    engine = initialize(model, make_config(2, {"zero": {"stage": stage}}), loss_fn=loss_of(loss))
    generator = torch.Generator().manual_seed(rank)
    losses, present = [], []
    for _ in range(3):
        batches = [tuple(torch.randint(V, (2, S), generator=generator) for _ in range(2)) for _ in range(2)]
        losses.append(engine.eval_step(batches).loss)
        present.append([group.is_released for group in engine.parts.sharding.groups])
        losses.append(engine.train_step(batches).loss)
        present.append([group.is_released for group in engine.parts.sharding.groups])
        with torch.no_grad():  # not through the engine, as generation does
            losses.append(model(batches[0][0])["logits"].exp().sum().item())
        present.append([group.is_released for group in engine.parts.sharding.groups])
    weight = engine.read("head.weight")
    engine.close()
    return SimpleNamespace(losses=losses, present=present, weight=weight)


@pytest.mark.quick(2)
@pytest.mark.parametrize("loss", ["sum", "tokens", "computed"])
@pytest.mark.parametrize(("stage", "frozen"), [(1, ""), (3, ""), (3, "head"), (3, "blocks"), (3, ("embed", "blocks"))])
def test_training_with_deferred_logits(ranks: WorkerPool, stage: int, loss: str, frozen: Any) -> None:
    split, plain = (ranks(2).run(train, stage, loss, is_split, frozen) for is_split in (True, False))
    for result, expected in zip(split, plain, strict=True):
        assert result.losses == pytest.approx(expected.losses, rel=1e-12)
        torch.testing.assert_close(result.weight, expected.weight, rtol=1e-12, atol=1e-12)
        assert result.present == expected.present
        assert all(map(all, result.present)) == (stage == 3)


def train_directly(rank: int, world_size: int, is_split: bool, frozen: Any) -> list[float]:
    """Losses of models that are called without the engine, so that nothing says that a loss will follow."""
    model = Model()
    model.head.is_split = is_split
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or not name.startswith(frozen))
    engine = initialize(model, make_config(1, {"zero": {"stage": 3}}))
    losses, deferred = [], []
    for step in range(3):
        tokens = torch.randint(V, (2, S), generator=torch.Generator().manual_seed(10 * step + rank))
        logits = model(tokens)["logits"]
        deferred.append(float(getattr(logits, "is_deferred", False)))
        loss = F.cross_entropy(logits.view(-1, V), tokens.view(-1))
        backward(loss, [engine])
        losses.append(engine.step().loss)
    released = all(group.is_released for group in engine.parts.sharding.groups)
    engine.close()
    return [*losses, float(released), min(deferred)]


@pytest.mark.parametrize("frozen", ["", "head", ("embed", "blocks")])
def test_training_without_a_loss_of_the_engine(ranks: WorkerPool, frozen: Any) -> None:
    split, plain = (ranks(2).run(train_directly, is_split, frozen) for is_split in (True, False))
    assert split[0][:-1] == pytest.approx(plain[0][:-1], rel=1e-12)
    # Without a graph under the hidden states the head's parameters are about to be released.
    assert split[0][-2:] == [1.0, float(not isinstance(frozen, tuple))]
