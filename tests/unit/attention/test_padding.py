"""Padding to whole blocks, and cutting it off again."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.refusals import refused
from shardwise.attention.padding import pad_to_block_size, unpad_sequence_output


@given(block=st.integers(1, 9), seq_len=st.integers(1, 20))
def test_lengths_become_multiples_and_come_back(block: int, seq_len: int) -> None:
    ids = torch.arange(2 * seq_len).view(2, seq_len)
    padded = pad_to_block_size(block, ids, torch.ones_like(ids), pad_token_id=7)
    assert padded.input_ids is not None
    assert padded.input_ids.shape[1] % block == 0
    assert 0 <= padded.pad_len < block
    assert torch.equal(unpad_sequence_output(padded.pad_len, padded.input_ids), ids)
    assert (padded.input_ids[:, seq_len:] == 7).all()


def test_every_input_gets_its_own_filling() -> None:
    rows = torch.ones(1, 3, dtype=torch.long)
    embeddings = torch.nn.Embedding(9, 2)
    padded = pad_to_block_size(
        5,
        rows,
        rows.bool(),
        rows,
        rows,
        embeddings(rows),
        pad_token_id=4,
        model_embeddings=embeddings,
    )
    assert padded.pad_len == 2
    assert padded.input_ids is not None
    assert padded.input_ids.tolist() == [[1, 1, 1, 4, 4]]
    assert padded.attention_mask is not None
    assert padded.attention_mask.tolist() == [[True, True, True, False, False]]
    for each in (padded.token_type_ids, padded.position_ids):
        assert each is not None
        assert each.tolist() == [[1, 1, 1, 0, 0]]
    assert padded.inputs_embeds is not None
    assert torch.equal(padded.inputs_embeds, embeddings(padded.input_ids))


def test_a_mask_is_made_where_tokens_are_added_without_one() -> None:
    padded = pad_to_block_size(4, torch.ones(1, 3, dtype=torch.long))
    assert padded.attention_mask is not None
    assert padded.attention_mask.tolist() == [[1, 1, 1, 0]]
    assert pad_to_block_size(3, torch.ones(1, 3, dtype=torch.long)).attention_mask is None


def test_nothing_to_pad_is_refused() -> None:
    with refused("nothing-to-pad"):
        pad_to_block_size(4)
    with refused("padding-embeddings", "1 tokens"):
        pad_to_block_size(4, inputs_embeds=torch.zeros(1, 3, 2))
