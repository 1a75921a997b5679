"""The order of samples, who gets which, the shards and the split."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from harness.refusals import refused
from shardwise.config.resolve import BatchConfig, resolve_batch
from shardwise.train.dataset import (
    TokenDataset,
    batches_for_step,
    sample_order,
    sample_positions,
    split_point,
)
from shardwise.train.prepare import read_index, seal


def dataset_of(num_tokens: int, dtype: str = "uint16") -> TokenDataset:
    return TokenDataset(np.arange(num_tokens, dtype=dtype))


def write_shard(folder: Path, num_tokens: int) -> Path:
    folder.mkdir()
    np.arange(num_tokens, dtype="uint16").tofile(folder / "tokens.bin")
    np.zeros(1, dtype=np.uint64).tofile(folder / "chats.bin")
    (folder / "tokenizer.json").write_text("{}")
    seal(
        folder,
        source="test",
        dtype="uint16",
        vocab_size=num_tokens,
        eot_id=0,
        num_tokens=num_tokens,
        num_kept=num_tokens,
        num_documents=1,
        has_chats=True,
    )
    return folder


def step_batches(dataset, step, batch, data_rank, num_data_ranks, seed=0, seq_len=4):
    return batches_for_step(
        dataset,
        step * batch.global_size,
        batch,
        data_rank=data_rank,
        num_data_ranks=num_data_ranks,
        seed=seed,
        seq_len=seq_len,
    )


# The order


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**70), st.integers(1, 300), st.integers(0, 1000))
def test_every_epoch_is_a_permutation(seed, num_sequences, epoch):
    first = epoch * num_sequences
    order = [sample_order(seed, index, num_sequences) for index in range(first, first + num_sequences)]
    assert sorted(order) == list(range(num_sequences))


def test_order_depends_on_seed_and_epoch():
    orders = {
        tuple(sample_order(seed, epoch * 100 + index, 100) for index in range(100))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_order_is_spread_evenly():
    """All 120 orders of 5 sequences come up about equally often (chi-squared; 99.9 % is 173)."""
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(6000):
        order = tuple(sample_order(seed, index, 5) for index in range(5))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 120
    assert sum((count - 50) ** 2 / 50 for count in counts.values()) < 250


def test_order_of_huge_data_needs_no_table():
    num_sequences = 10**15 + 37
    drawn = {sample_order(1, index, num_sequences) for index in range(500)}
    assert len(drawn) == 500
    assert max(drawn) < num_sequences
    assert max(drawn) > num_sequences * 0.9


# Who gets which


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 5))
def test_positions_are_shared_out_once(num_data_ranks, micro, accumulation):
    batch = resolve_batch(BatchConfig(micro_size=micro, accumulation=accumulation), num_data_ranks)
    taken = [
        position
        for rank in range(num_data_ranks)
        for positions in sample_positions(batch, rank, num_data_ranks)
        for position in positions
    ]
    assert sorted(taken) == list(range(batch.global_size))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 30), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2, 4]), st.integers(0, 5))
def test_every_world_size_sees_the_same_samples(step, num_data_ranks, micro, seed):
    """The same 24 samples in the same micro-batches, however many ranks share them."""
    assume(24 % (num_data_ranks * micro) == 0)
    dataset = dataset_of(401)

    def micro_batches(num_ranks):
        batch = resolve_batch(BatchConfig(global_size=24, micro_size=micro), num_ranks)
        shares = [step_batches(dataset, step, batch, rank, num_ranks, seed) for rank in range(num_ranks)]
        return [share[number][0].tolist() for number in range(batch.accumulation) for share in shares]

    assert micro_batches(num_data_ranks) == micro_batches(1)


def test_an_epoch_of_steps_visits_every_sequence_once():
    dataset = dataset_of(121)
    batch = resolve_batch(BatchConfig(global_size=6, micro_size=3), 2)
    rows = [
        tokens[0].item()
        for step in range(5)
        for rank in range(2)
        for batch_tokens, _ in step_batches(dataset, step, batch, rank, 2)
        for tokens in batch_tokens
    ]
    assert sorted(rows) == list(range(0, 120, 4))


def test_batches_have_shape_dtype_and_shifted_targets():
    dataset = dataset_of(50, dtype="uint32")
    batch = resolve_batch(BatchConfig(micro_size=3, accumulation=2), 2)
    batches = step_batches(dataset, 0, batch, 1, 2)
    assert len(batches) == 2
    for tokens, targets in batches:
        assert tokens.shape == targets.shape == (3, 4)
        assert tokens.dtype == targets.dtype == torch.int64
        assert torch.equal(targets, tokens + 1)


def test_batch_that_does_not_fit_the_ranks():
    with refused("config-not-resolved", "config.resolve"):
        sample_positions(BatchConfig(global_size=4), 0, 1)
    with refused("batch-equation", "batch.global_size=4", "micro_size 2"):
        sample_positions(BatchConfig(global_size=4, micro_size=2, accumulation=1), 0, 1)


# Reading shards


def test_sequences_and_their_targets_stay_inside_the_range():
    tokens = np.arange(30)
    dataset = TokenDataset(tokens[3:12])
    assert dataset.num_tokens == 9
    assert dataset.num_sequences(4) == 2
    assert TokenDataset(tokens[:8]).num_sequences(4) == 1  # a second one would have no last target
    tokens, targets = dataset.sample(1, 4)
    assert tokens.tolist() == [7, 8, 9, 10]
    assert targets.tolist() == [8, 9, 10, 11]
    with pytest.raises(IndexError, match="sequence 2 of 2"):
        dataset.sample(2, 4)
    assert dataset.num_sequences(1000) == 0


def test_sequence_longer_than_the_split():
    dataset = dataset_of(1021)
    with refused("split-too-short", "data.seq_len=4096", "1021", "seq_len <= 1020"):
        step_batches(dataset, 0, resolve_batch(BatchConfig(), 1), 0, 1, seq_len=4096)
    assert step_batches(dataset, 0, resolve_batch(BatchConfig(), 1), 0, 1, seq_len=1020)


@pytest.mark.parametrize("harm", ["missing", "torn tokens", "torn chats", "no index", "not JSON", "other keys"])
def test_shard_that_is_not_whole(tmp_path, harm):
    shard = write_shard(tmp_path / "shard", 10)
    if harm == "missing":
        shard = tmp_path / "nowhere"
    elif harm.startswith("torn"):
        os.truncate(shard / f"{harm.split()[1]}.bin", 7)
    elif harm == "no index":
        (shard / "index.json").unlink()
    else:
        (shard / "index.json").write_text("{" if harm == "not JSON" else '{"a": 1}')
    with refused("token-shard-damaged", str(shard)):
        read_index(shard)


# The split


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=30),
    st.floats(0, 1),
    st.integers(1, 60),
)
def test_split_leaves_a_sequence_in_each_part(lengths, val_fraction, seq_len):
    num_tokens, num_kept = sum(lengths), sum(lengths[:-1])
    assume(num_tokens >= 2 * (seq_len + 1))
    cut = split_point(num_kept, num_tokens, val_fraction=val_fraction, seq_len=seq_len)
    assert seq_len + 1 <= cut <= num_tokens - seq_len - 1
    wanted = max(round(val_fraction * num_tokens), seq_len + 1)
    assert num_tokens - cut <= 1.5 * wanted


@pytest.mark.parametrize(
    ("num_tokens", "fix"),
    [(1080, "seq_len <= 539"), (8193, "seq_len <= 4095"), (3, "more data")],
)
def test_too_little_data_for_two_splits(num_tokens, fix):
    with refused("data-too-short", "data.seq_len=4096", f"{num_tokens} tokens", "4097", fix):
        split_point(num_tokens, num_tokens, val_fraction=0.05, seq_len=4096)
    if num_tokens == 1080:
        assert split_point(num_tokens, num_tokens, val_fraction=0.05, seq_len=539) == 540
