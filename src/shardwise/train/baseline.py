"""The held-out loss to beat: what a model that knows only how often each token occurs would reach.

Not a model of this library; a number to set beside a run's loss.

>>> round(unigram_loss(np.array([0, 0, 1]), np.array([0, 1]), vocab_size=2), 4)  # (ln 5/3 + ln 5/2) / 2
0.7136
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shardwise.config import ConfigError

_CHUNK_TOKENS = 1 << 22


def unigram_loss(
    train_tokens: NDArray[np.unsignedinteger], held_out_tokens: NDArray[np.unsignedinteger], vocab_size: int
) -> float:
    """Nats a held-out token, under token frequencies of the training split with add-one smoothing.

    Args:
        train_tokens: [T] token ids; read in chunks, so it may be a memory map.
        held_out_tokens: [H] token ids, H > 0.
        vocab_size: number of ids; tokens never seen in training get 1 / (T + vocab_size).

    Raises:
        ConfigError: there is no held-out token, or an id is not below `vocab_size`.
    """
    if not len(held_out_tokens):
        raise ConfigError("the held-out split has no tokens; raise data.val_fraction or give more data")
    probability = (_count(train_tokens, vocab_size) + 1) / (len(train_tokens) + vocab_size)
    share = _count(held_out_tokens, vocab_size) / len(held_out_tokens)
    return float(-(share * np.log(probability)).sum())


def _count(tokens: NDArray[np.unsignedinteger], vocab_size: int) -> NDArray[np.int64]:
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        chunk = np.bincount(tokens[start : start + _CHUNK_TOKENS], minlength=vocab_size)
        if len(chunk) > vocab_size:
            raise ConfigError(
                f"token id {len(chunk) - 1} is not below vocab_size={vocab_size}; use the tokenizer's own"
            )
        counts += chunk
    return counts
