"""Sums over ranks run in one order and lose nothing."""

from itertools import product

import pytest
import torch
from torch import Tensor

from shardwise.comm.backends import sum_chunks

WIDTHS = {torch.float16: 0, torch.bfloat16: 0, torch.float32: 1, torch.float64: 2}
WIDENINGS = [(total, addend) for total, addend in product(WIDTHS, WIDTHS) if WIDTHS[total] > WIDTHS[addend]]
SAME = [(dtype, dtype) for dtype in WIDTHS]


def in_rank_order(rows: list[Tensor], dtype: torch.dtype) -> Tensor:
    total = rows[0].to(dtype)
    for row in rows[1:]:
        total = total + row.to(dtype)
    return total


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize(("total_dtype", "chunk_dtype"), [*WIDENINGS, *SAME])
@pytest.mark.parametrize("accumulate", [False, True])
def test_sum_chunks_sums_in_rank_order(
    num_ranks: int, total_dtype: torch.dtype, chunk_dtype: torch.dtype, accumulate: bool
) -> None:
    # Values of very different size, so that another order of the sum gives other bits.
    chunks = (torch.randn(num_ranks, 33) * 10.0 ** torch.randint(-3, 3, (num_ranks, 33))).to(chunk_dtype)
    total = torch.randn(33).to(total_dtype) if accumulate else torch.full((33,), torch.nan, dtype=total_dtype)
    wide = total_dtype if total_dtype.itemsize >= 4 else torch.float32
    expected = in_rank_order(list(chunks.unbind()), wide)
    expected = (total.to(wide) + expected if accumulate else expected).to(total_dtype)
    sum_chunks(total, chunks, accumulate)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("num_ranks", [9, 257])
def test_sums_run_in_no_less_than_fp32(num_ranks: int) -> None:
    """256 + 1 is 256 in bf16: a sum in bf16 would stay there."""
    chunks = torch.ones(num_ranks, 1, dtype=torch.bfloat16)  # [ranks, elements]
    chunks[0] = 256
    total = torch.full((1,), torch.nan, dtype=torch.bfloat16)
    sum_chunks(total, chunks, accumulate=False)
    assert total.item() == 255 + num_ranks
    sum_chunks(total, chunks, accumulate=True)
    assert total.item() == 2 * (255 + num_ranks)
