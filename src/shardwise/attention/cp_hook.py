"""What attention is told where a sequence is spread over ranks: a mask that speaks of all its tokens, and who computes.

transformers hands a mask of four dims to every layer as it is. So an ordinary argument says what a layer's own tokens
do not: the documents and the padding of the whole sequence. Recomputation, pipelines and copies keep it. Its dtype says
what there is to be read: where nothing, neither does the host wait for the device, nor compiled code meet values.

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
    """What a mask says of the sequences of a batch.

    Attributes:
        lengths: of the documents of a row, one behind another, as in all rows.
        real: bool [B, S], False for padding; None where there is none.
    """

    lengths: tuple[int, ...]
    real: Tensor | None


class ContextHook(Protocol):
    """Computes attention whose sequence is spread over ranks, each with queries, keys and values of its tokens."""

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
        """Attention of the tokens of this rank.

        Args:
            q: [B, H, n, D], of the rank's tokens, ascending.
            k: [B, K, n, D].
            v: [B, K, n, D].
            layout: of the whole sequence, for one head or H.
            lengths: of its documents; who has which tokens may depend on them, and on nothing else of a batch.
            key_padding: bool [B, S], of the whole sequence, False for padding; None where there is none.
            dropout: rate at which probabilities are dropped.
            scale: of the scores; 1 / sqrt(D) if None.

        Returns:
            [B, H, n, D].
        """


@dataclass(frozen=True)
class DenseVisibility:
    """Each token sees all of its document, or all up to itself: a structure like others, for attention that is dense.

    Attributes:
        is_causal: a token sees none after it.
    """

    is_causal: bool

    def layout(self, seq_len: int) -> BlockLayout:
        """Of one sequence."""
        return dense_layout(seq_len, causal=self.is_causal)

    def layout_of_documents(self, lengths: Sequence[int]) -> BlockLayout:
        """Of documents packed one behind another."""
        return dense_layout_of_documents(lengths, causal=self.is_causal)


# What a mask of each dtype says.
_WHOLE: Final = torch.int8  # one document without padding
_PADDED: Final = torch.uint8  # one document; 1 for real tokens
_PACKED: Final = torch.int64  # the number, from 1, of each token's document, negative for padding


def sequence_mask(num_samples: int, lengths: tuple[int, ...], real: Tensor | None = None) -> Tensor:
    """The mask that tells layers of whole sequences, on the CPU or where `real` is.

    Args:
        num_samples: B.
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
    """Whether a mask is one of `sequence_mask`."""
    return mask is not None and mask.dtype in (_WHOLE, _PADDED, _PACKED) and mask.ndim == 4 and mask.shape[2] == 1


def read_sequence_mask(mask: Tensor) -> SequenceMask:
    """What a mask of `sequence_mask` says; where tokens are simulated, packed ones are one document without padding.

    Args:
        mask: [B, 1, 1, S].
    """
    numbers = mask[:, 0, 0]  # [B, S]
    if mask.dtype == _PADDED:
        return SequenceMask((numbers.shape[1],), numbers.bool())
    if mask.dtype == _WHOLE or is_fake(mask):
        return SequenceMask((numbers.shape[1],), None)
    real = numbers > 0
    lengths = numbers[0].abs().bincount()[1:].tolist()
    return SequenceMask(tuple(lengths), None if bool(real.all()) else real)
