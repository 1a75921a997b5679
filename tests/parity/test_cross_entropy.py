"""The cross entropy of a split head: equal to torch's on gathered logits, and never with all logits in memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from harness.live_bytes import LiveBytes
from harness.pool import WorkerPool
from harness.refusals import refused
from shardwise.comm.backends import process_group_comm
from shardwise.comm.collectives import Comm, CommResources
from shardwise.models.decoder import lm_loss
from shardwise.tensor import cross_entropy as module
from shardwise.tensor.cross_entropy import TokenLossTerms, VocabSplit, cross_entropy, cross_entropy_sum

NUM_TOKENS, HIDDEN = 11, 6
TERMS = [
    TokenLossTerms(),
    TokenLossTerms(ignore_index=3),
    TokenLossTerms(label_smoothing=0.1),
    TokenLossTerms(z_loss=0.01),
    TokenLossTerms(ignore_index=3, label_smoothing=0.3, z_loss=0.1),
    TokenLossTerms(ignore_index=3, temperature=0.7, has_entropy=True),
    TokenLossTerms(label_smoothing=0.3, z_loss=0.1, temperature=1.3, has_entropy=True),
]
Loss = Callable[..., Tensor]
Case = tuple[Tensor, Tensor, Tensor | None, Tensor]


def token_losses(*args: Any, **kwargs: Any) -> Tensor:
    return cross_entropy(*args, **kwargs)[0]


def make_comm() -> Comm:
    device = torch.device("cpu")
    return process_group_comm(dist.group.WORLD, "tp", CommResources.alone(device, 20.0))


def make_case(vocab_size: int, has_bias: bool, dtype: torch.dtype = torch.float64) -> Case:
    generator = torch.Generator().manual_seed(vocab_size)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab_size, HIDDEN, generator=generator, dtype=torch.float64)
    bias = torch.randn(vocab_size, generator=generator, dtype=torch.float64).to(dtype) if has_bias else None
    targets = torch.randint(vocab_size, (NUM_TOKENS,), generator=generator)
    targets[::4] = 3
    return hidden.to(dtype), weight.to(dtype), bias, targets


def factors(per_token: bool) -> Tensor:
    """The gradient by the result."""
    return (
        torch.arange(NUM_TOKENS, dtype=torch.float64) / 4 - 1 if per_token else torch.tensor(0.7, dtype=torch.float64)
    )


def expected(case: Case, terms: TokenLossTerms, per_token: bool) -> list[Tensor]:
    """The loss and the gradients by hidden states, weight and bias, by torch's own cross entropy."""
    hidden, weight, bias, targets = case
    leaves = [each.detach().requires_grad_() for each in (hidden, weight, bias) if each is not None]
    logits = F.linear(*leaves) / terms.temperature
    kwargs = {"ignore_index": terms.ignore_index, "label_smoothing": terms.label_smoothing}
    losses = F.cross_entropy(logits, targets, reduction="none", **kwargs)
    losses = losses + terms.z_loss * (logits.logsumexp(-1) ** 2).where(targets != terms.ignore_index, 0)
    loss = losses if per_token else losses.sum()
    if per_token and terms.has_entropy:
        entropies = torch.distributions.Categorical(logits=logits).entropy().where(targets != terms.ignore_index, 0)
        loss = losses + 3 * entropies
    return [loss.detach(), *torch.autograd.grad(loss, leaves, factors(per_token).to(loss.dtype))]


def local_rows(whole: Tensor, vocab: VocabSplit) -> Tensor:
    """This rank's rows; padding that would be seen if it were read."""
    own = whole[vocab.start : vocab.start + vocab.num_own]
    surplus = own.new_full((vocab.num_rows - vocab.num_own, *own.shape[1:]), torch.nan)
    return torch.cat([own, surplus]).requires_grad_()


def run_all(rank: int, world_size: int, vocab_size: int) -> list[list[Tensor]]:
    """For every combination, four tokens at a time: loss, summed gradient of hidden states, this rank's gradients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "head_tokens_at_a_time", lambda device, vocab_size: 4)
        return run_each(world_size, vocab_size)


def run_each(world_size: int, vocab_size: int) -> list[list[Tensor]]:
    vocab, results = VocabSplit(vocab_size, make_comm() if world_size > 1 else None), []
    for terms, per_token, has_bias in product(TERMS, (False, True), (False, True)):
        hidden, weight, bias, targets = make_case(vocab_size, has_bias)
        hidden.requires_grad_()
        rows, own_bias = local_rows(weight, vocab), None if bias is None else local_rows(bias, vocab)
        if per_token:
            losses, entropies = cross_entropy(hidden, rows, own_bias, targets, vocab, terms)
            loss = losses + 3 * entropies
        else:
            loss = cross_entropy_sum(hidden, rows, own_bias, targets, vocab, terms)
        loss.backward(factors(per_token))
        gradients = [each.grad for each in (hidden, rows, own_bias) if each is not None]
        dist.all_reduce(gradients[0])
        results.append([loss.detach(), *gradients])
    return results


@pytest.mark.parametrize(("num_ranks", "vocab_size"), [(1, 10), (2, 10), (2, 9), (4, 12), (4, 9), (4, 5)])
def test_equals_torch(ranks: WorkerPool, num_ranks: int, vocab_size: int) -> None:
    results = ranks(num_ranks).run(run_all, vocab_size)
    combinations = product(TERMS, (False, True), (False, True))
    for index, (terms, per_token, has_bias) in enumerate(combinations):
        loss, by_hidden, *by_rows = expected(make_case(vocab_size, has_bias), terms, per_token)
        for result in results:
            assert torch.equal(result[index][0], results[0][index][0])
            torch.testing.assert_close(result[index][0], loss, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(result[index][1], by_hidden, rtol=1e-12, atol=1e-12)
        for position, whole in enumerate(by_rows):
            gathered = torch.cat([result[index][2 + position] for result in results])
            torch.testing.assert_close(gathered[:vocab_size], whole, rtol=1e-12, atol=1e-12)
            assert torch.count_nonzero(gathered[vocab_size:]) == 0


def count_calls(rank: int, world_size: int) -> int:
    comm = make_comm()
    hidden, weight, _, targets = make_case(8, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "head_tokens_at_a_time", lambda device, vocab_size: 4)
        rows, vocab = local_rows(weight, VocabSplit(8, comm)), VocabSplit(8, comm)
        cross_entropy_sum(hidden.requires_grad_(), rows, None, targets, vocab).backward()
    return comm.comm_log.num_calls


def test_one_collective_a_chunk_and_none_in_backward(ranks: WorkerPool) -> None:
    assert ranks(2).run(count_calls) == [3, 3]  # 11 tokens, 4 at a time


@pytest.mark.parametrize("function", [cross_entropy_sum, token_losses])
def test_a_backward_may_run_twice(function: Loss) -> None:
    hidden, weight, _, targets = make_case(8, False)
    hidden.requires_grad_()
    loss = function(hidden, weight, None, targets, VocabSplit(8)).sum()
    first, second = (torch.autograd.grad(loss * factor, hidden, retain_graph=True)[0] for factor in (1, 3))
    torch.testing.assert_close(second, 3 * first)


@pytest.mark.parametrize("target", [-1, 8])
def test_a_target_beyond_the_vocabulary_is_refused(target: int) -> None:
    hidden, weight, _, targets = make_case(8, False)
    targets[5] = target
    with pytest.raises(IndexError, match="out of bounds"):
        cross_entropy_sum(hidden, weight, None, targets, VocabSplit(8))


@pytest.mark.parametrize("function", [cross_entropy_sum, token_losses])
def test_bf16_gradients_are_summed_over_chunks_in_fp32(monkeypatch: pytest.MonkeyPatch, function: Loss) -> None:
    monkeypatch.setattr(module, "head_tokens_at_a_time", lambda device, vocab_size: 2)
    hidden = torch.ones(2048, 2, dtype=torch.bfloat16)
    weight, bias = (torch.zeros(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((4, 2), (4,)))
    losses = function(hidden, weight, bias, torch.zeros(2048, dtype=torch.int64), VocabSplit(4))
    losses.sum().backward()
    # Each of a thousand chunks adds 1/2: sums in bf16 stand still at 128.
    assert losses.dtype == torch.float32
    assert weight.grad.tolist() == [[-1536.0] * 2] + [[512.0] * 2] * 3
    assert bias.grad.tolist() == [-1536.0, 512.0, 512.0, 512.0]


def test_fp16_takes_a_loss_scale_beyond_its_range() -> None:
    hidden, weight, _, targets = make_case(8, False, torch.float16)
    hidden.requires_grad_()
    (cross_entropy_sum(hidden, weight, None, targets, VocabSplit(8)) * 2.0**17 / 2.0**14).backward()
    (gradient,) = torch.autograd.grad(cross_entropy_sum(hidden, weight, None, targets, VocabSplit(8)), hidden)
    torch.testing.assert_close(hidden.grad, gradient * 8, rtol=1e-3, atol=1e-3)


def peak_bytes(function: Loss, num_tokens: int, num_vocab: int) -> int:
    hidden = torch.randn(num_tokens, 16, requires_grad=True)
    weight = torch.randn(num_vocab, 16, requires_grad=True)
    targets = torch.zeros(num_tokens, dtype=torch.int64)
    with LiveBytes() as live:
        function(hidden, weight, targets).sum().backward()
    return live.peak_bytes()


@pytest.mark.parametrize("function", [cross_entropy_sum, token_losses])
def test_full_logits_never_exist(function: Loss) -> None:
    num_tokens, num_vocab = 4096, 4096
    logits_bytes = num_tokens * num_vocab * 4
    split = peak_bytes(lambda h, w, y: function(h, w, None, y, VocabSplit(num_vocab)), num_tokens, num_vocab)
    plain = peak_bytes(lambda h, w, y: F.cross_entropy(F.linear(h, w), y), num_tokens, num_vocab)
    assert split < 0.25 * logits_bytes
    assert plain > 2 * logits_bytes


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_lm_loss_of_plain_logits_knows_the_same_terms(terms: TokenLossTerms, dtype: torch.dtype) -> None:
    hidden, weight, _, targets = make_case(10, False)
    targets = targets.where(targets != terms.ignore_index, -100)
    logits = (hidden @ weight.T).to(dtype).requires_grad_()
    loss, count = lm_loss(logits, targets, terms.label_smoothing, terms.z_loss)
    loss.backward()
    reference = logits.detach().double().requires_grad_()
    identity = torch.eye(10, dtype=torch.float64)
    plain_terms = TokenLossTerms(-100, terms.label_smoothing, terms.z_loss)
    want = cross_entropy_sum(reference, identity, None, targets, VocabSplit(10), plain_terms)
    want.backward()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-2
    torch.testing.assert_close(loss.double(), want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(logits.grad.double(), reference.grad, rtol=tolerance, atol=tolerance)
    assert count == (targets != -100).sum()


@pytest.mark.parametrize("function", [cross_entropy_sum, token_losses])
def test_second_derivatives_are_refused(function: Callable[..., Tensor]) -> None:
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    loss = function(hidden, weight, None, torch.arange(3), VocabSplit(5)).sum()
    with refused("no-second-derivatives"):
        torch.autograd.grad(loss, hidden, create_graph=True)
