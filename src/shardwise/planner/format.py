"""Write strategies, sizes, times and money in a few words.

>>> print(layout_words(Strategy(tp=8, sequence_parallel=True, pp=4, dp_shard=16, zero_stage=1, num_micro_batches=16)))
TP 8+SP, PP 4 1f1b, ZeRO-1 over 16, micro-batch 1 x 16
>>> print(layout_words(Strategy(dp_shard=8, dp_replicate=4, zero_stage=3, recompute="full", optimizer_tier="host")))
ZeRO-3 over 8 x 4 replicas, micro-batch 1, recompute full, optimizer on host
>>> print(layout_words(Strategy(dp_shard=8, zero_stage=1, optimizer_tier="host", optimizer_on_device=0.5)))
ZeRO-1 over 8, micro-batch 1, optimizer but 50 % on host
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from shardwise.planner.hardware import GIB
from shardwise.planner.job import PlanJob, Strategy

_COUNTS: Final = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def layout_words(strategy: Strategy) -> str:
    """Write a strategy on one line; what has its usual value is left out."""
    return ", ".join(_layout_parts(strategy))


def _layout_parts(s: Strategy) -> Iterator[str]:
    if s.tp > 1:
        yield f"TP {s.tp}+SP" if s.sequence_parallel else f"TP {s.tp}"
    if s.pp > 1:
        yield f"PP {s.pp} {s.schedule}" + (f" x{s.virtual_stages}" if s.virtual_stages > 1 else "")
    if s.cp > 1:
        teams = f" of teams of {s.heads_over}" if s.heads_over and s.transport != "ulysses" else ""
        yield f"CP {s.cp} {s.transport}{teams}"
    if s.ep > 1:
        yield f"EP {s.ep}"
    yield from _data_parts(s)
    yield f"micro-batch {s.micro_size}" + (f" x {s.num_micro_batches}" if s.num_micro_batches > 1 else "")
    if s.recompute != "none":
        every = f" every {s.recompute_every}" if s.recompute_every > 1 else ""
        yield f"recompute {s.recompute}{every}"
    placed = (
        ("params", s.params_tier, s.params_on_device),
        ("grads", s.grads_tier, s.grads_on_device),
        ("optimizer", s.optimizer_tier, s.optimizer_on_device),
        ("activations", s.activations_tier, 0.0),
    )
    for tier in ("host", "nvme"):
        states = [f"{name} but {100 * share:.0f} %" if share else name for name, of, share in placed if of == tier]
        if states:
            yield f"{' and '.join(states)} on {tier}"


def _data_parts(s: Strategy) -> Iterator[str]:
    num_shards, replicas = s.dp_shard * s.cp, s.dp_replicate
    if num_shards * replicas == 1:
        return
    if s.zero_stage == 0:
        yield f"DDP over {num_shards * replicas}"
        return
    each_time = " each micro-batch" if s.zero_stage == 3 and s.pp > 1 and s.gather == "micro-batch" else ""
    yield f"ZeRO-{s.zero_stage} over {num_shards}" + (f" x {replicas} replicas" if replicas > 1 else "") + each_time


def count_words(number: float) -> str:
    """Write a number in three digits.

    >>> count_words(69_000_000_000), count_words(8_388_608), count_words(950)
    ('69.0 B', '8.39 M', '950')
    """
    for unit, suffix in _COUNTS:
        if number >= unit:
            return f"{_three_digits(number / unit)} {suffix}"
    return f"{number:.0f}"


def seconds_words(seconds: float) -> str:
    """Write a time in three digits.

    >>> seconds_words(4.3121), seconds_words(0.01234), seconds_words(312.4)
    ('4.31 s', '12.3 ms', '312 s')
    """
    return f"{_three_digits(seconds)} s" if seconds >= 1 else f"{_three_digits(1e3 * seconds)} ms"


def span_words(low_s: float, high_s: float) -> str:
    """Write a range of times, with the unit once where both have the same.

    >>> span_words(13.5, 17.2), span_words(0.95, 1.1)
    ('13.5 to 17.2 s', '950 ms to 1.10 s')
    """
    low, high = seconds_words(low_s), seconds_words(high_s)
    return f"{low.partition(' ')[0] if low.split()[1] == high.split()[1] else low} to {high}"


def money_words(dollars: float) -> str:
    """Write an amount of dollars in three digits.

    >>> money_words(1.834), money_words(36_740), money_words(2_180_000), money_words(0.00214)
    ('$1.83', '$36.7 k', '$2.18 M', '$0.0021')
    """
    if dollars < 1:
        return f"${dollars:.2g}"
    return f"${_three_digits(dollars)}" if dollars < 1e3 else f"${count_words(dollars)}"


def gib_words(num_bytes: float) -> str:
    """Write bytes as GiB, or as MiB where they are few.

    >>> gib_words(3.14 * 2**30), gib_words(200 * 2**20)
    ('3.1 GiB', '200 MiB')
    """
    return f"{num_bytes / GIB:,.1f} GiB" if abs(num_bytes) >= GIB else f"{num_bytes / 2**20:.0f} MiB"


def _three_digits(number: float) -> str:
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def batch_words(job: PlanJob) -> str:
    """Write the batch of a step."""
    return f"{job.global_batch:,} sequences of {job.seq_len:,} tokens a step, {count_words(job.tokens)} tokens"
