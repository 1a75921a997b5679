"""Sample from any callable that maps tokens to logits: a `Decoder`, or an engine around one.

It is not meant for serving: there is no key and value cache, and each token costs one forward of all tokens before it.

>>> def successor(tokens):  # favours, after each token, the next one of 10
...     return 50.0 * torch.nn.functional.one_hot((tokens + 1) % 10, 10).float()
>>> generate(successor, torch.tensor([[3]]), 4, max_seq_len=8)
tensor([[3, 4, 5, 6, 7]])
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.config.errors import ConfigError


@torch.no_grad()
def generate(
    model: Callable[[Tensor], Tensor],
    tokens: Tensor,
    num_tokens: int,
    *,
    max_seq_len: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Append `num_tokens` sampled tokens to each sequence.

    Args:
        model: maps int64 [B, S] to logits [B, S, V].
        tokens: int64 [B, S], the prompts, S at least 1.
        max_seq_len: the longest input the model takes; earlier tokens are cut off.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: sample among the k likeliest tokens only; None for all.
        generator: on the device of the logits, for reproducible samples; None for torch's default.

    Returns:
        int64 [B, S + num_tokens].

    Raises:
        ConfigError: an empty prompt, a negative temperature, or a top_k below 1.
    """
    if tokens.shape[1] == 0:
        raise ConfigError(
            "prompt-empty", "the prompt has 0 tokens, but a sample needs one before it; begin with any token"
        )
    if temperature < 0:
        raise ConfigError(
            "temperature-negative", f"temperature={temperature} is negative; give 0 for the likeliest token, or more"
        )
    if top_k is not None and top_k < 1:
        raise ConfigError("top-k-empty", f"top_k={top_k} keeps no token; give at least 1, or leave it out")
    for _ in range(num_tokens):
        logits = model(tokens[:, -max_seq_len:])[:, -1].float()  # [B, V]
        tokens = torch.cat((tokens, _sample(logits, temperature, top_k, generator)), dim=1)
    return tokens


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)  # [B, 1]
    if top_k is not None and top_k < logits.shape[-1]:
        smallest_kept = logits.topk(top_k).values[:, -1:]  # [B, 1]
        logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)  # [B, 1]
