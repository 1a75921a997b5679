"""Log-probabilities of tokens, and entropies, without whole logits where a head defers them.

Reinforcement learning and distillation need a number for each token rather than a loss. The log-probability of a target
is its negated cross entropy, so a head that is split over ranks, or takes some tokens at a time, computes it as it
computes the loss (`shardwise.tensor.cross_entropy`), gradients included.

>>> import torch
>>> logits, targets = torch.randn(2, 3, 8), torch.tensor([[1, 2, -100], [7, 0, 3]])
>>> of_tokens = token_log_probs(logits, targets, entropy=True)
>>> expected = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
>>> torch.allclose(of_tokens.log_probs, expected.where(targets >= 0, 0), atol=1e-6)
True
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field
from torch import Tensor

from shardwise.config.arguments import checked
from shardwise.config.errors import ConfigError
from shardwise.tensor.cross_entropy import TokenLossTerms, VocabSplit, cross_entropy
from shardwise.tensor.loss_parallel import LazyLogits

Temperature = Annotated[float, Field(gt=0)]


@dataclass(frozen=True, eq=False)
class TokenLogProbs:
    """Holds the log-probability of each target and the entropy of the distribution that it is of, [B, S] in fp32 or
    wider, 0 where the target is ignored; no entropies where they were not asked for.
    """

    log_probs: Tensor
    entropies: Tensor | None


@checked
def token_log_probs(
    output: Any, targets: Tensor, *, temperature: Temperature = 1.0, entropy: bool = False
) -> TokenLogProbs:
    """Return the log-probability of each target, and entropies, for a loss: they have a graph where the logits have.

    All ranks of a tensor-parallel group call it, and get equal bits.

    Args:
        output: of a model: its logits [B, S, V], or what has them as `.logits`, as `["logits"]` or first.
        targets: int64 [B, S], the token that each place predicts: shifted already. -100 is ignored.
        temperature: by which logits are divided, as they are when tokens are sampled.

    Raises:
        ConfigError: shapes of logits and targets differ.
    """
    logits = _logits_of(output)
    if logits.shape[:-1] != targets.shape:
        raise ConfigError(
            "log-probs-shape",
            f"targets of shape {tuple(targets.shape)} for logits of shape {tuple(logits.shape)}; give one target for "
            "each place, -100 where it has none",
        )
    terms = TokenLossTerms(temperature=temperature, has_entropy=entropy)
    targets = targets.to(logits.device)
    if isinstance(logits, LazyLogits):
        losses, entropies = logits.token_losses(targets, terms)
    else:
        rows = logits.reshape(-1, logits.shape[-1])
        losses, entropies = cross_entropy(rows, None, None, targets.flatten(), VocabSplit(rows.shape[-1]), terms)
    return TokenLogProbs(-losses.view(targets.shape), entropies.view(targets.shape) if entropy else None)


def _logits_of(output: Any) -> Tensor:
    """Return the logits of a model's output.

    Raises:
        ConfigError: it has none.
    """
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if isinstance(logits, tuple | list) and logits:
        logits = logits[0]
    if not isinstance(logits, Tensor) or logits.dim() < 2:
        raise ConfigError("log-probs-shape", f"a {type(output).__name__} has no logits [B, S, V]; give them")
    return logits
