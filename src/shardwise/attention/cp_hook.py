"""Defines how context parallelism enters: a mask that describes the whole sequence, a function that computes attention.

transformers passes a mask of four dims to every layer unchanged. So this ordinary argument carries the documents and
the padding of the whole sequence, which a rank's own tokens do not show. Recomputation, pipelines and copies keep it.
Its dtype says what must be read: a mask of one document without padding is never read, so the host does not wait for
the device, and compiled code does not depend on its values.

>>> sequence_mask(1, (5,)).dtype
torch.int8
>>> mask = sequence_mask(1, (3, 2), torch.tensor([[True, True, False, True, True]]))
>>> mask.tolist()
[[[[1, 1, -1, 2, 2]]]]
>>> read_sequence_mask(mask)
SequenceMask(lengths=(3, 2), real=tensor([[ True,  True, False,  True,  True]]))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor

from shardwise.attention.block_layout import BlockLayout
from shardwise.attention.dense import dense_layout, dense_layout_of_documents
from shardwise.runtime.torch_private import is_fake


class SequenceMask(NamedTuple):
    """Holds the documents and the padding that a mask describes.

    Attributes:
        lengths: tokens of the documents of a row, in order; the same in all rows.
        real: bool [B, S], False for padding; None where there is none.
    """

    lengths: tuple[int, ...]
    real: Tensor | None


class ContextHook(Protocol):
    """A hook computes attention over a sequence spread over ranks, each with queries, keys and values of its tokens."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: BlockLayout,
        *,
        lengths: tuple[int, ...],
        key_padding: Tensor | None,
        dropout: float,
        scale: float | None,
    ) -> Tensor:
        """Compute the attention of the tokens of this rank.

        Args:
            q: [B, H, n, D], of the rank's tokens, ascending; k and v are [B, K, n, D].
            layout: of the whole sequence, for one head or H.
            lengths: tokens of its documents; the split of tokens over ranks may depend on them, and on nothing else of
                a batch.
            key_padding: bool [B, S], of the whole sequence, False for padding; None where there is none.
            dropout: rate at which probabilities are dropped.
            scale: of the scores; 1 / sqrt(D) if None.

        Returns:
            [B, H, n, D].
        """


@dataclass(frozen=True)
class DenseVisibility:
    """Describes dense attention: each token sees all of its document, or all up to itself.

    Attributes:
        is_causal: a token sees none after it.
    """

    is_causal: bool

    def layout(self, seq_len: int) -> BlockLayout:
        return dense_layout(seq_len, causal=self.is_causal)

    def layout_of_documents(self, lengths: Sequence[int]) -> BlockLayout:
        return dense_layout_of_documents(lengths, causal=self.is_causal)


# The dtypes of masks, and what they mean.
_WHOLE: Final = torch.int8  # one document without padding
_PADDED: Final = torch.uint8  # one document; 1 for real tokens
_PACKED: Final = torch.int64  # the number, from 1, of each token's document, negative for padding


def sequence_mask(num_samples: int, lengths: tuple[int, ...], real: Tensor | None = None) -> Tensor:
    """Make the mask that describes whole sequences to layers, on the CPU or on the device of `real`.

    Args:
        lengths: of the documents of each row, S tokens in all.
        real: False for padding, bool [B, S]; None where there is none.

    Returns:
        [B, 1, 1, S], to be read by `read_sequence_mask`.
    """
    shape = num_samples, sum(lengths)
    if len(lengths) == 1:
        said = torch.ones(shape, dtype=_WHOLE) if real is None else real.to(_PADDED)  # [B, S]
        return said[:, None, None]
    numbers = torch.arange(1, len(lengths) + 1).repeat_interleave(torch.tensor(lengths)).expand(shape)  # [B, S]
    if real is not None:
        numbers = numbers.to(real.device)
        numbers = torch.where(real, numbers, -numbers)
    return numbers[:, None, None]


def is_sequence_mask(mask: Tensor | None) -> TypeGuard[Tensor]:
    """Say whether a mask was made by `sequence_mask`."""
    return mask is not None and mask.dtype in (_WHOLE, _PADDED, _PACKED) and mask.ndim == 4 and mask.shape[2] == 1


def read_sequence_mask(mask: Tensor) -> SequenceMask:
    """Read a mask [B, 1, 1, S] of `sequence_mask`; a fake packed one, without values, is one unpadded document."""
    numbers = mask[:, 0, 0]  # [B, S]
    if mask.dtype == _PADDED:
        return SequenceMask((numbers.shape[1],), numbers.bool())
    if mask.dtype == _WHOLE or is_fake(mask):
        return SequenceMask((numbers.shape[1],), None)
    on_host = numbers.cpu()
    lengths = on_host[0].abs().bincount()[1:].tolist()
    return SequenceMask(tuple(lengths), None if bool((on_host > 0).all()) else numbers > 0)
