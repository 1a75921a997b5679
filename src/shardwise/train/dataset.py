"""Token shards on disk, read as fixed-length sequences in an order that no rank has to agree on.

A shard is a folder: `tokens.bin` (every token of every document, uint16 or uint32), `documents.bin` (uint64,
where each document starts) and `index.json` (`ShardIndex`). Which sequence a sample is depends on (seed,
sample index) alone, so a run can go on at another world size. Not here: writing shards (`prepare`).

>>> [sample_order(seed=0, index=index, num_sequences=5) for index in range(10)]  # two epochs
[2, 0, 4, 3, 1, 2, 0, 4, 1, 3]
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.config import BatchConfig, ConfigError

SHARD_FORMAT = 1
INDEX_NAME, TOKENS_NAME, DOCUMENTS_NAME = "index.json", "tokens.bin", "documents.bin"
_ROUNDS = 12
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class ShardIndex:
    """What `index.json` says; `num_bytes` are of UTF-8 text, `tokens_hash` is blake2b of `tokens.bin`."""

    source: str
    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    eot_id: int
    num_tokens: int
    num_documents: int
    num_bytes: int
    num_skipped: int
    tokens_hash: str
    format: int = SHARD_FORMAT

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)


def read_index(path: Path) -> ShardIndex:
    """Read the index of the shard in folder `path`; ConfigError where the shard is missing or not whole."""
    cure = "delete the folder and run again, or put data.cache_dir where every node sees it"
    try:
        index = ShardIndex(**json.loads((path / INDEX_NAME).read_text(encoding="utf-8")))
        sizes = [(path / name).stat().st_size for name in (TOKENS_NAME, DOCUMENTS_NAME)]
    except (OSError, ValueError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} holds no whole token shard: {reason}; {cure}") from None
    needed = [index.num_tokens * np.dtype(index.dtype).itemsize, index.num_documents * 8]
    if index.format != SHARD_FORMAT or sizes != needed:
        raise ConfigError(f"{path} holds no whole token shard: files of {sizes} bytes where {needed} belong; {cure}")
    return index


class TokenDataset:
    """A range of a shard's tokens, memory-mapped, as sequences that follow one another.

    Args:
        path: folder of the shard.
        start: first token of the range.
        stop: end of the range; the shard's end by default.

    Raises:
        ConfigError: the shard is missing or not whole.
    """

    def __init__(self, path: str | Path, start: int = 0, stop: int | None = None) -> None:
        self.path = Path(path)
        self.index = read_index(self.path)
        shard = np.memmap(self.path / TOKENS_NAME, dtype=self.index.dtype, mode="r")
        self.tokens: NDArray[Any] = shard[start:stop]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def num_sequences(self, seq_len: int) -> int:
        """Whole sequences of `seq_len` tokens whose targets, one token further on, are there too."""
        return max(0, (self.num_tokens - 1) // seq_len)

    def sample(self, index: int, seq_len: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Sequence `index` as views of the map: tokens [seq_len], and targets [seq_len] one token on."""
        if not 0 <= index < self.num_sequences(seq_len):
            raise IndexError(f"sequence {index} of {self.num_sequences(seq_len)} with {seq_len} tokens each")
        start = index * seq_len
        return self.tokens[start : start + seq_len], self.tokens[start + 1 : start + seq_len + 1]


def sample_order(seed: int, index: int, num_sequences: int) -> int:
    """Which sequence sample `index` of the run is; an epoch of `num_sequences` samples visits each once.

    The permutation is a Feistel network over a grid of rows x columns that just holds `num_sequences` cells;
    what falls on a cell too many goes through again (cycle walking). It takes no memory, whatever the size of
    the data.
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
    """64 bits, half of which change with any bit of `value` (splitmix64; Steele et al. 2014, Figure 17)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def sample_positions(batch: BatchConfig, data_rank: int, num_data_ranks: int) -> list[range]:
    """Which positions of the global batch are this data rank's rows, a range for every micro-batch.

    Position = (micro-batch x num_data_ranks + data_rank) x micro_size + row: all ranks' first micro-batches
    come first. So the same `micro_size` positions make a micro-batch, whatever ranks and accumulation share
    the batch.

    >>> batch = BatchConfig(global_size=8, micro_size=2, accumulation=2)
    >>> sample_positions(batch, data_rank=0, num_data_ranks=2)
    [range(0, 2), range(4, 6)]
    >>> sample_positions(batch, data_rank=1, num_data_ranks=2)
    [range(2, 4), range(6, 8)]
    >>> alone = BatchConfig(global_size=8, micro_size=2, accumulation=4)
    >>> sample_positions(alone, data_rank=0, num_data_ranks=1)
    [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]
    """
    size, micro, accumulation = batch.global_size, batch.micro_size, batch.accumulation
    if size is None or micro is None or accumulation is None:
        raise ConfigError("the batch is not resolved; call config.resolve(world_size) first")
    if size != micro * accumulation * num_data_ranks:
        raise ConfigError(
            f"batch.global_size={size} is not micro_size {micro} x accumulation {accumulation} x "
            f"{num_data_ranks} data ranks; resolve the config for {num_data_ranks} data ranks"
        )
    starts = [(number * num_data_ranks + data_rank) * micro for number in range(accumulation)]
    return [range(start, start + micro) for start in starts]


def batches_for_step(
    dataset: TokenDataset,
    first: int,
    batch: BatchConfig,
    *,
    data_rank: int,
    num_data_ranks: int,
    seed: int,
    seq_len: int,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This data rank's micro-batches of one optimizer step: one (tokens, targets) for each accumulation.

    Args:
        dataset: where the sequences are.
        first: the run's samples before this step; with a constant batch, `step * global_size`, steps counted from 0.
        batch: resolved.
        data_rank: this rank's place among the data ranks; the ranks of one pp x tp x cp cell share it.
        num_data_ranks: how many share the global batch.
        seed: of the order.
        seq_len: tokens a sequence.

    Returns:
        A list of (tokens [micro_size, seq_len], targets [micro_size, seq_len]), int64 on the CPU.

    Raises:
        ConfigError: the sequence is longer than the data, or the batch does not fit the ranks.
    """
    num_sequences = dataset.num_sequences(seq_len)
    if num_sequences == 0:
        raise ConfigError(
            f"data.seq_len={seq_len} but the split holds {dataset.num_tokens} tokens; "
            f"use seq_len <= {dataset.num_tokens - 1} or more data"
        )
    shares = sample_positions(batch, data_rank, num_data_ranks)
    batches = []
    for positions in shares:
        numbers = [sample_order(seed, first + position, num_sequences) for position in positions]
        tokens, targets = zip(*(dataset.sample(number, seq_len) for number in numbers), strict=True)
        batches.append((_stack(tokens), _stack(targets)))
    return batches


def _stack(rows: Sequence[NDArray[Any]]) -> torch.Tensor:
    return torch.from_numpy(np.stack(rows).astype(np.int64))  # [micro_size, seq_len]


def split_point(document_starts: NDArray[Any], num_tokens: int, *, val_fraction: float, seq_len: int) -> int:
    """The first held-out token: training takes what is before it, the held-out split the rest.

    The held-out split has about `val_fraction` of the tokens, and each split at least one sequence with its
    targets. The cut is at the start of a document where one is near, else within a document (a single long
    text).

    >>> split_point(np.array([0, 40, 88, 94]), 100, val_fraction=0.1, seq_len=4)
    88
    >>> split_point(np.array([0]), 100, val_fraction=0.1, seq_len=4)
    90

    Args:
        document_starts: [documents] tokens at which documents start, rising.
        num_tokens: tokens of the shard.
        val_fraction: share to hold out; training keeps one sequence whatever it is.
        seq_len: tokens a sequence.

    Raises:
        ConfigError: the data is too short for a sequence in each split.
    """
    needed = seq_len + 1
    if num_tokens < 2 * needed:
        longest = num_tokens // 2 - 1
        cure = f"use seq_len <= {longest} or more data" if longest > 0 else "give more data"
        raise ConfigError(
            f"data.seq_len={seq_len} but the data holds {num_tokens} tokens, and training and held-out "
            f"split need {needed} each; {cure}"
        )
    num_held_out = min(max(round(val_fraction * num_tokens), needed), num_tokens - needed)
    cut = num_tokens - num_held_out
    after = int(np.searchsorted(document_starts, document_starts.dtype.type(cut)))
    nearest = min(
        (int(start) for start in document_starts[max(after - 1, 0) : after + 1]),
        key=lambda start: abs(start - cut),
    )
    is_near = 2 * abs(nearest - cut) <= num_held_out and needed <= nearest <= num_tokens - needed
    return nearest if is_near else cut
