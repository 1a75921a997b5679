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

from shardwise.planner.job import PlanJob, Strategy
from shardwise.runtime.format import format_count, three_digits


def layout_words(strategy: Strategy) -> str:
    """Write a strategy on one line; what has its usual value is left out.

    >>> layout_words(Strategy(pp=8, schedule="interleaved", virtual_stages=10))
    'PP 8 interleaved (10 virtual stages), micro-batch 1'
    """
    return ", ".join(_layout_parts(strategy))


def _layout_parts(s: Strategy) -> Iterator[str]:
    if s.tp > 1:
        yield f"TP {s.tp}+SP" if s.sequence_parallel else f"TP {s.tp}"
    if s.pp > 1:
        yield f"PP {s.pp} {s.schedule}" + (
            f" ({s.virtual_stages} virtual stages)" if s.schedule == "interleaved" else ""
        )
    if s.cp > 1:
        heads = f" with Ulysses over {s.heads_over}" if s.heads_over and s.transport != "ulysses" else ""
        yield f"CP {s.cp} {s.transport}{heads}"
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


def money_words(dollars: float) -> str:
    """Write an amount of dollars in three digits.

    >>> money_words(1.834), money_words(36_740), money_words(2_180_000), money_words(0.00214)
    ('$1.83', '$36.7 k', '$2.18 M', '$0.0021')
    """
    if dollars < 1:
        return f"${dollars:.2g}"
    return f"${three_digits(dollars)}" if dollars < 1e3 else f"${format_count(dollars)}"


def batch_words(job: PlanJob) -> str:
    """Write the batch of a step."""
    return f"{job.global_batch:,} sequences of {job.seq_len:,} tokens a step, {format_count(job.tokens)} tokens"
