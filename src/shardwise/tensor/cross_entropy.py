"""Compute cross entropy from hidden states and a head split by rows over the ranks; no rank ever holds all logits.

A rank has the rows `weight` [v, E] of the vocabulary's V; the last ranks' surplus rows are padding, which is never
read. The loss is that of the vocabulary-parallel cross entropy of Megatron-LM (Shoeybi et al. 2019, section 3): with
x the logits, y the target, e the label smoothing (as torch's, over the whole vocabulary) and z the z-loss (PaLM, arXiv
2204.02311, section 5), a token costs

    L - (1 - e) x_y - e/V sum_j x_j + z L^2,  where L = log sum_j exp x_j,

and its gradient by x_j is softmax_j (1 + 2 z L) - (1 - e) [j = y] - e/V. With p = softmax x, the entropy of a token is
H = L - sum_j p_j x_j, and its gradient by x_j is -p_j (x_j - L + H). A temperature divides the logits to give x. Each
rank computes the sums over its rows, and one all-gather of two to four numbers per token and rank gives all of them the
sums over all rows, in equal bits.

The tokens are processed in chunks: product, statistics, collective, gradient. So a summed loss has its gradients when
its forward ends, and the backward only scales them. Keeping only the logits' statistics would save all collectives but
one, and would need two passes over the product, a third more of the head's FLOPs. A chunk's collective moves kilobytes
between products that take milliseconds on CPU and GPU, so it costs about 1%. Losses of single tokens do take the second
pass, because the factors of their gradients are known in the backward only.

The gradient of the hidden states is this rank's part: the caller that split the head sums it over the ranks.

>>> hidden, weight, targets = torch.randn(6, 8), torch.randn(16, 8), torch.arange(6)
>>> loss = cross_entropy_sum(hidden, weight, None, targets, VocabSplit(16))
>>> torch.allclose(loss, F.cross_entropy(hidden @ weight.T, targets, reduction="sum"))
True
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.comm.collectives import Comm
from shardwise.config.errors import EngineError
from shardwise.layout.activation_bytes import head_tokens_at_a_time
from shardwise.runtime.batch_errors import check_indices
from shardwise.tensor import collectives

_LEAST_LOG: Final = -1e4  # of a probability; that of a smaller one is 0, whose product with -inf would be NaN


@dataclass(frozen=True)
class VocabSplit:
    """Says how a vocabulary of `size` tokens is split over the ranks of `comm`; None where one rank has all of it.

    At most `chunk_tokens` tokens of a text are processed at a time; None chooses a number for the device.
    """

    size: int
    comm: Comm | None = None
    chunk_tokens: int | None = None

    @property
    def num_rows(self) -> int:
        """Return the number of rows that each rank holds, padding included."""
        return -(-self.size // (1 if self.comm is None else self.comm.world_size))

    @property
    def start(self) -> int:
        """Return the token of this rank's first row."""
        return min(self.size, self.num_rows * (0 if self.comm is None else self.comm.rank))

    @property
    def num_own(self) -> int:
        """Return the number of this rank's rows that are not padding."""
        return min(self.size - self.start, self.num_rows)


@dataclass(frozen=True)
class TokenLossTerms:
    """Says which terms the loss of a token has.

    Attributes:
        ignore_index: the target of tokens that do not count.
        label_smoothing: the share of the target's probability that is spread over the whole vocabulary.
        z_loss: weight of the squared log-sum-exp that is added.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    temperature: float = 1.0
    has_entropy: bool = False


def cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    vocab: VocabSplit,
    terms: TokenLossTerms | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the loss, summed over the tokens that count; all ranks call it, and get equal bits.

    Args:
        hidden: [N, E], the same on all ranks.
        weight: [v, E], this rank's rows; `bias` is [v], of the same rows, or None.
        targets: [N] int64, the same on all ranks.
        vocab: how the rows are split over the ranks.
        terms: None for the plain cross entropy.
        dtype: the result and all sums have the widest of this dtype, fp32 and the dtype of `hidden`.

    Raises:
        IndexError: a target is neither ignored nor in the vocabulary; an assertion of the device on CUDA.
    """
    job = _ChunkJob.of(hidden, vocab, terms, dtype)
    return _Sum.apply(hidden, weight, bias, targets, job)


def cross_entropy(
    hidden: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    targets: Tensor,
    vocab: VocabSplit,
    terms: TokenLossTerms | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token and its entropy, [N] each, 0 where it does not count; the entropies are 0 unless
    the terms have them.

    The arguments are those of `cross_entropy_sum`. A `weight` of None says that `hidden` are the logits, [N, V].
    """
    job = _ChunkJob.of(hidden, vocab, terms, dtype)
    losses, entropies = _EachToken.apply(hidden, weight, bias, targets, job)
    return losses, entropies


@dataclass(frozen=True)
class _ChunkJob:
    vocab: VocabSplit
    terms: TokenLossTerms
    wide: torch.dtype
    is_recorded: bool

    @staticmethod
    def of(hidden: Tensor, vocab: VocabSplit, terms: TokenLossTerms | None, dtype: torch.dtype | None) -> _ChunkJob:
        wide = torch.promote_types(torch.promote_types(hidden.dtype, torch.float32), dtype or torch.float32)
        return _ChunkJob(vocab, terms or TokenLossTerms(), wide, torch.is_grad_enabled())

    def chunks(self, hidden: Tensor, targets: Tensor) -> Iterator[tuple[slice, Tensor, _Targets]]:
        """Yield some tokens at a time: which, their hidden states, their targets."""
        most = head_tokens_at_a_time(hidden.device.type, self.vocab.num_rows)
        step = min(most, self.vocab.chunk_tokens or len(targets) or 1)
        for start in range(0, len(targets), step):
            part = slice(start, start + step)
            yield part, hidden[part], _Targets.of(targets[part], self)

    def logits(self, rows: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return this rank's logits [n, own] in memory of their own, computed in the dtype of `rows` and then
        widened.
        """
        num_own = self.vocab.num_own
        if weight is None:
            logits = rows.to(self.wide, copy=True)
        else:
            logits = F.linear(rows, weight[:num_own], None if bias is None else bias[:num_own]).to(self.wide)
        return logits if self.terms.temperature == 1 else logits.div_(self.terms.temperature)

    def statistics(self, logits: Tensor, targets: _Targets) -> tuple[Tensor, Tensor, Tensor]:
        """Return the log-sum-exp, the term that is subtracted from it, and the entropy, 0 where it is not asked for,
        [n] each, over the logits of all ranks.
        """
        own = [logits.logsumexp(-1), targets.pick(logits)] if logits.shape[-1] else _of_no_row(logits)
        if self.terms.label_smoothing:
            own.append(logits.sum(-1))
        if self.terms.has_entropy:
            # A logit of -inf, or a rank that has no other, adds 0. The log-sum-exp shows a NaN all the same.
            own.append(logits.softmax(-1).mul_(logits).nan_to_num_(0.0).sum(-1))
        stats = torch.stack(own).unsqueeze(0)  # [1, 2 to 4, n]
        if self.vocab.comm is not None and self.vocab.comm.world_size > 1:
            stats = collectives.all_gather(self.vocab.comm, stats, 0, "cross entropy")  # [ranks, 2 to 4, n]
        log_total, picked = stats[:, 0].logsumexp(0), stats[:, 1].sum(0)
        smoothing, entropy = self.terms.label_smoothing, torch.zeros_like(log_total)
        if smoothing:
            picked = picked * (1 - smoothing) + stats[:, 2].sum(0) * (smoothing / self.vocab.size)
        if self.terms.has_entropy:
            shares = (stats[:, 0] - log_total).exp()  # of each rank's rows in the whole probability
            entropy = (log_total - (shares * stats[:, -1]).sum(0)).where(targets.counts, 0)
        return log_total, picked, entropy

    def losses(self, log_total: Tensor, picked: Tensor, targets: _Targets) -> Tensor:
        """Return the loss of each token, [n]."""
        losses = log_total - picked
        if self.terms.z_loss:
            losses = losses + self.terms.z_loss * log_total.square()
        return losses.where(targets.counts, 0)

    def gradient(
        self,
        logits: Tensor,
        log_total: Tensor,
        targets: _Targets,
        factor: Tensor | None,
        by_entropy: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Return the gradient by the logits before the temperature, in their memory, [n, own].

        Args:
            factor: [n], that by the tokens' losses; None for 1.
            by_entropy: the entropies, and the gradient by them, [n] each; None where no result depends on them.
        """
        factor = targets.counts.to(self.wide) if factor is None else factor.to(self.wide).where(targets.counts, 0)
        logs = logits.sub_(log_total.unsqueeze(-1))
        scale = factor * (1 + 2 * self.terms.z_loss * log_total) if self.terms.z_loss else factor
        if by_entropy is None:
            gradient = logs.exp_().mul_(scale.unsqueeze(-1))
        else:
            entropies, of_entropies = by_entropy[0], by_entropy[1].to(self.wide).where(targets.counts, 0)
            probs = logs.exp()
            gradient = logs.clamp_(min=_LEAST_LOG).add_(entropies.unsqueeze(-1)).mul_(of_entropies.neg().unsqueeze(-1))
            gradient.add_(scale.unsqueeze(-1)).mul_(probs)
        smoothing = self.terms.label_smoothing
        if smoothing:
            gradient.sub_((factor * (smoothing / self.vocab.size)).unsqueeze(-1))
        if gradient.shape[-1]:
            hit = (factor * (smoothing - 1)).where(targets.is_own, 0)
            gradient.scatter_add_(-1, targets.index.unsqueeze(-1), hit.unsqueeze(-1))
        return gradient if self.terms.temperature == 1 else gradient.div_(self.terms.temperature)


@dataclass(frozen=True)
class _Targets:
    """Says for a chunk's targets which count, which are in this rank's rows, and in which row; [n] each."""

    counts: Tensor
    is_own: Tensor
    index: Tensor

    @staticmethod
    def of(targets: Tensor, job: _ChunkJob) -> _Targets:
        counts = targets != job.terms.ignore_index
        valid = targets.where(counts, 0)
        check_indices(valid, job.vocab.size)
        local = valid - job.vocab.start
        is_own = counts & (local >= 0) & (local < job.vocab.num_own)
        return _Targets(counts, is_own, local.where(is_own, 0))

    def pick(self, logits: Tensor) -> Tensor:
        """Return the targets' logits, 0 where another rank has them."""
        return logits.gather(-1, self.index.unsqueeze(-1)).squeeze(-1).where(self.is_own, 0)


class _Gradients:
    """Holds the gradients by hidden states, weight and bias; those of the last two are summed in fp32 or wider."""

    def __init__(self, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, needed: tuple[bool, ...]) -> None:
        sum_dtype = torch.promote_types(hidden.dtype if weight is None else weight.dtype, torch.float32)
        self.hidden = torch.empty_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=sum_dtype) if weight is not None and needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=sum_dtype) if bias is not None and needed[2] else None
        self.is_needed = any(needed[:3])

    def add(self, part: slice, rows: Tensor, weight: Tensor | None, by_logits: Tensor) -> None:
        """Add the gradient by the logits of the tokens `part`, [n, own]."""
        num_own = by_logits.shape[-1]
        if self.bias is not None:
            self.bias[:num_own] += by_logits.sum(0)
        by_logits = by_logits.to(rows.dtype)
        if self.hidden is not None and weight is None:
            self.hidden[part] = by_logits
        elif self.hidden is not None and weight is not None:
            torch.mm(by_logits, weight[:num_own], out=self.hidden[part])
        if self.weight is not None and self.weight.dtype == rows.dtype:
            self.weight[:num_own].addmm_(by_logits.T, rows)
        elif self.weight is not None:
            self.weight[:num_own] += by_logits.T @ rows


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, job: _ChunkJob
    ) -> Tensor:  # [N, E], [v, E], [v], [N]
        needed = tuple(each and job.is_recorded for each in ctx.needs_input_grad)
        gradients = _Gradients(hidden, weight, bias, needed)
        total = torch.zeros((), dtype=job.wide, device=hidden.device)
        for part, rows, own_targets in job.chunks(hidden, targets):
            logits = job.logits(rows, weight, bias)
            log_total, picked, _ = job.statistics(logits, own_targets)
            total += job.losses(log_total, picked, own_targets).sum()
            if gradients.is_needed:
                gradients.add(part, rows, weight, job.gradient(logits, log_total, own_targets, None))
        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        ctx.dtypes = [hidden.dtype, weight.dtype, None if bias is None else bias.dtype]
        return total

    @staticmethod
    def backward(ctx: Any, grad_sum: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        # A factor of shape [1], unlike a 0-d one, is multiplied in its own dtype: a loss scale may be beyond fp16.
        factor = grad_sum.reshape(1)
        scaled = [
            None if each is None else torch.mul(each, factor, out=torch.empty_like(each, dtype=dtype))
            for each, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None


class _EachToken(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, targets: Tensor, job: _ChunkJob
    ) -> tuple[Tensor, Tensor]:  # [N, E], [v, E], [v], [N]
        losses = torch.empty(len(targets), dtype=job.wide, device=hidden.device)
        log_totals, entropies = torch.empty_like(losses), torch.empty_like(losses)
        for part, rows, own_targets in job.chunks(hidden, targets):
            logits = job.logits(rows, weight, bias)
            log_totals[part], picked, entropies[part] = job.statistics(logits, own_targets)
            losses[part] = job.losses(log_totals[part], picked, own_targets)
        ctx.save_for_backward(hidden, weight, bias, targets, log_totals, entropies)
        ctx.job = job
        return losses, entropies

    @staticmethod
    def backward(ctx: Any, by_losses: Tensor, by_entropies: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second_derivatives()
        job: _ChunkJob = ctx.job
        hidden, weight, bias, targets, log_totals, entropies = ctx.saved_tensors
        gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad)
        for part, rows, own_targets in job.chunks(hidden, targets):
            logits = job.logits(rows, weight, bias)
            of_entropy = (entropies[part], by_entropies[part]) if job.terms.has_entropy else None
            by_logits = job.gradient(logits, log_totals[part], own_targets, by_losses[part], of_entropy)
            gradients.add(part, rows, weight, by_logits)
        by_weight = None if weight is None or gradients.weight is None else gradients.weight.to(weight.dtype)
        by_bias = None if bias is None or gradients.bias is None else gradients.bias.to(bias.dtype)
        return gradients.hidden, by_weight, by_bias, None, None


def _refuse_second_derivatives() -> None:
    # torch's `once_differentiable` lets a graph pass whose upstream gradient is a constant, and loses its gradients.
    if torch.is_grad_enabled():
        raise EngineError(
            "no-second-derivatives",
            "the cross entropy of a split head has no second derivatives (create_graph=True); take the loss of "
            "logits.compute() for them",
        )


def _of_no_row(logits: Tensor) -> list[Tensor]:
    """Return log-sum-exp and picked logit of a rank that has only padding."""
    return [logits.new_full(logits.shape[:1], -torch.inf), logits.new_zeros(logits.shape[:1])]
