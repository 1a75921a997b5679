"""Reads tokens as sequences of one length, in an order that every rank computes without communication.

Which sequence a sample is depends on (seed, sample index) alone, so a run can go on at another world size.

>>> [sample_order(seed=0, index=index, num_sequences=5) for index in range(10)]  # two epochs
[2, 0, 4, 3, 1, 2, 0, 4, 1, 3]
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import BatchConfig
from shardwise.layout.token_ranges import pack
from shardwise.models.decoder import IGNORED_TARGET

PROMPT_TOKENS: Final = 24
COUNTS_BIT: Final = np.uint32(1 << 31)  # of a chat's token, set where it counts in the loss
_ROUNDS = 12
_MASK = (1 << 64) - 1


class TokenDataset:
    """Reads tokens [T], which may be a memory map, as consecutive sequences."""

    def __init__(self, tokens: NDArray[Any]) -> None:
        self.tokens = tokens

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def num_sequences(self, seq_len: int) -> int:
        """Return how many whole sequences of `seq_len` tokens there are; the targets, one token on, count too."""
        return max(0, (self.num_tokens - 1) // seq_len)

    def sample(self, index: int, seq_len: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return sequence `index`: tokens [seq_len], and targets [seq_len] one token on."""
        if not 0 <= index < self.num_sequences(seq_len):
            raise IndexError(f"sequence {index} of {self.num_sequences(seq_len)} with {seq_len} tokens each")
        tokens = self.tokens[index * seq_len : (index + 1) * seq_len + 1]
        return tokens[:-1], tokens[1:]

    def prompt(self, index: int, seq_len: int) -> NDArray[Any]:
        """Return the first tokens of a sequence."""
        return self.sample(index, seq_len)[0][:PROMPT_TOKENS]


class PackedDataset:
    """Reads tokens of chats: each sequence is as many whole chats as fit, and padding.

    The longest chats are packed first, each where the least space stays (best-fit decreasing). A chat that is longer
    than a sequence loses its end; `num_cut` counts these. Positions begin again with each chat and with the padding, by
    which transformers' attention keeps them apart.

    Args:
        tokens: uint32 [T], with `COUNTS_BIT` where one counts.
        starts: first tokens of the chats, rising.
    """

    def __init__(self, tokens: NDArray[Any], starts: NDArray[Any], seq_len: int, eot_id: int) -> None:
        self.tokens, self._eot_id = tokens, eot_id
        lengths = np.diff(starts.astype(np.int64), append=len(tokens))
        self.num_cut = int((lengths > seq_len).sum())
        self._starts, self._lengths = starts, np.minimum(lengths, seq_len)
        self._rows = pack(self._lengths.tolist(), seq_len)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def num_sequences(self, seq_len: int) -> int:
        """Return how many sequences there are; `seq_len` is the one that they were packed for."""
        return len(self._rows)

    def sample(self, index: int, seq_len: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Return the tokens, targets and positions of a sequence, each int64 [seq_len]."""
        tokens = np.full(seq_len, self._eot_id, dtype=np.int64)
        targets = np.full(seq_len, IGNORED_TARGET, dtype=np.int64)
        positions = np.empty(seq_len, dtype=np.int64)
        position = 0
        for chat in self._rows[index]:
            ids, counts = self._read(chat)
            chat_slice = slice(position, position + len(ids))
            tokens[chat_slice], positions[chat_slice] = ids, np.arange(len(ids))
            # What a position predicts is the token after it, in the same chat.
            targets[position : position + len(ids) - 1] = np.where(counts[1:], ids[1:], IGNORED_TARGET)
            position += len(ids)
        positions[position:] = np.arange(seq_len - position)
        return tokens, targets, positions

    def prompt(self, index: int, seq_len: int) -> NDArray[Any]:
        """Return the first chat of a sequence up to the first token that counts; half of it where none does."""
        ids, counts = self._read(self._rows[index][0])
        return ids[: max(1, int(counts.argmax()) or len(ids) // 2)]

    def _read(self, chat: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return a chat's tokens, and which of them count."""
        start = int(self._starts[chat])
        tokens = self.tokens[start : start + int(self._lengths[chat])]
        return (tokens & ~COUNTS_BIT).astype(np.int64), tokens >= COUNTS_BIT


def sample_order(seed: int, index: int, num_sequences: int) -> int:
    """Return which sequence sample `index` of the run is; an epoch of `num_sequences` samples visits each once.

    Each epoch has its own permutation, drawn from `seed`: a Feistel network over a grid of rows x columns that just
    holds `num_sequences` cells; a position that falls on a spare cell goes through again (cycle walking). It takes no
    memory, whatever the size of the data.
    """
    epoch, position = divmod(index, num_sequences)
    rows = math.isqrt(num_sequences - 1) + 1
    columns = -(-num_sequences // rows)
    key = _mix(_mix(seed) + epoch)
    while True:
        row, column = divmod(position, columns)
        for turn in range(0, _ROUNDS, 2):
            row = (row + _mix(_mix(key + turn) + column)) % rows
            column = (column + _mix(_mix(key + turn + 1) + row)) % columns
        position = row * columns + column
        if position < num_sequences:
            return position


def _mix(value: int) -> int:
    """Return 64 bits, half of which change with any bit of `value` (splitmix64; Steele et al. 2014, Figure 17)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def sample_positions(batch: BatchConfig, data_rank: int, num_data_ranks: int) -> list[range]:
    """Return the positions of the global batch that are this data rank's rows, a range for every micro-batch.

    All ranks' first micro-batches come first. So the same `micro_size` positions make a micro-batch, whatever ranks
    and accumulation share the batch.

    >>> batch = BatchConfig(global_size=8, micro_size=2, accumulation=2)
    >>> sample_positions(batch, data_rank=0, num_data_ranks=2)
    [range(0, 2), range(4, 6)]
    >>> sample_positions(batch, data_rank=1, num_data_ranks=2)
    [range(2, 4), range(6, 8)]
    """
    size, micro, accumulation = batch.global_size, batch.micro_size, batch.accumulation
    if size is None or micro is None or accumulation is None:
        raise ConfigError("config-not-resolved", "the batch is not resolved; call config.resolve(world_size) first")
    if size != micro * accumulation * num_data_ranks:
        raise ConfigError(
            "batch-equation",
            f"batch.global_size={size} is not micro_size {micro} x accumulation {accumulation} x "
            f"{num_data_ranks} data ranks; resolve the config for {num_data_ranks} data ranks",
        )
    starts = [(number * num_data_ranks + data_rank) * micro for number in range(accumulation)]
    return [range(start, start + micro) for start in starts]


def batches_for_step(
    dataset: TokenDataset | PackedDataset,
    first: int,
    batch: BatchConfig,
    *,
    data_rank: int,
    num_data_ranks: int,
    seed: int,
    seq_len: int,
) -> list[tuple[torch.Tensor, ...]]:
    """Return this data rank's micro-batches of one optimizer step.

    Args:
        dataset: the split that the sequences come from.
        first: the run's samples before this step.
        data_rank: this rank's place among the data ranks; the ranks of one pp x tp x cp cell share it.
        num_data_ranks: how many data ranks share the global batch.

    Returns:
        A list of (tokens, targets), and of packed chats (tokens, targets, positions), each int64 [micro_size, seq_len]
        on the CPU.

    Raises:
        ConfigError: the sequence is longer than the data, or the batch does not fit the ranks.
    """
    num_sequences = dataset.num_sequences(seq_len)
    if num_sequences == 0:
        raise ConfigError(
            "split-too-short",
            f"data.seq_len={seq_len} but the split holds {dataset.num_tokens} tokens; "
            f"use seq_len <= {dataset.num_tokens - 1} or more data",
        )
    batches = []
    for positions in sample_positions(batch, data_rank, num_data_ranks):
        numbers = [sample_order(seed, first + position, num_sequences) for position in positions]
        columns = zip(*(dataset.sample(number, seq_len) for number in numbers), strict=True)
        batches.append(tuple(torch.from_numpy(np.stack(column).astype(np.int64)) for column in columns))
    return batches


def split_point(num_kept: int, num_tokens: int, *, val_fraction: float, seq_len: int) -> int:
    """Return the first held-out token: training takes the tokens before it, the held-out split those from it on.

    It is the first one of the documents to hold out, unless these are far from `val_fraction` of the tokens (a single
    long text), or leave one of the splits without a sequence and its targets.

    >>> split_point(88, 100, val_fraction=0.1, seq_len=4), split_point(100, 100, val_fraction=0.1, seq_len=4)
    (88, 90)

    Args:
        num_kept: tokens before those of the documents to hold out.
        val_fraction: share to hold out; training keeps one sequence whatever it is.

    Raises:
        ConfigError: the data is too short for a sequence in each split.
    """
    needed = seq_len + 1
    if num_tokens < 2 * needed:
        longest = num_tokens // 2 - 1
        fix = f"use seq_len <= {longest} or more data" if longest > 0 else "give more data"
        raise ConfigError(
            "data-too-short",
            f"data.seq_len={seq_len} but the data holds {num_tokens} tokens, and training and held-out "
            f"split need {needed} each; {fix}",
        )
    num_held_out = min(max(round(val_fraction * num_tokens), needed), num_tokens - needed)
    cut = num_tokens - num_held_out
    is_near = 2 * abs(num_kept - cut) <= num_held_out and needed <= num_kept <= num_tokens - needed
    return num_kept if is_near else cut
