"""Attention over some keys at a time: partial results over disjoint keys become that over all of them.

>>> out, lse = torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1), -torch.inf)
>>> for value in (1.0, 4.0, 4.0):
...     merge_partial(out, lse, torch.full_like(out, value), torch.zeros_like(lse))
>>> out.flatten().tolist(), lse.exp().item()
([3.0, 3.0], 3.0)
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def merge_partial(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge into `out` and `lse`, in place, a partial result of the same queries over other keys.

    With w = sigmoid(part_lse - lse), out becomes (1 - w) out + w part_out, and lse becomes log(exp(lse) +
    exp(part_lse)), each shifted by the maximum. That is Section 3.1 of FlashAttention (Dao et al. 2022), as Ring
    Attention (Liu et al. 2023) uses it, with both sums divided through by the larger; where neither side has seen a
    key, w is 0 and not NaN. A side that has seen none leaves the other as it is, to the bit.

    Args:
        out: [B, H, n, D], in the wide dtype; may be a view. 0 where nothing has been seen.
        lse: [B, H, n], likewise; -inf where nothing has been seen.
        part_out: [B, H, n, D], in any floating dtype; finite also where the partial result has seen no key.
        part_lse: [B, H, n], in the dtype of `lse`; -inf where the partial result has seen no key.
    """
    weight = torch.sub(part_lse, lse).sigmoid_()  # [B, H, n]
    weight.masked_fill_(part_lse == -torch.inf, 0.0)
    out.lerp_(part_out.to(out.dtype), weight.unsqueeze_(-1))
    torch.logaddexp(lse, part_lse, out=lse)
