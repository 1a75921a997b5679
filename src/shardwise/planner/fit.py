"""Find the largest model, micro-batch or sequence that a machine holds under a few ways to split it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from shardwise.config.resolve import Dtype, ResolvedConfig
from shardwise.planner.explain import CHUNK_TOKENS
from shardwise.planner.hardware import Cluster
from shardwise.planner.job import BASE, ModelShape, PlanJob, changed
from shardwise.planner.memory import MemoryModel
from shardwise.planner.results import USUAL_MARGIN, missing_memory

_HEAD_DIM: Final = 128
_VOCAB_SIZE: Final = 128_256
_HEADS_STEP: Final = 4
_MOST_HEADS: Final = 512
_MOST_SAMPLES: Final = 4096
_LENGTH_STEP: Final = 1024
_MOST_LENGTHS: Final = 16_384


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Hold the largest of each kind that a way to split a job holds, the other two at their least; None: nothing fits.

    Attributes:
        config: the way to split a job over all GPUs.
        shape: of the largest model of the family, at the given length and one sample.
        micro_size: samples of the given model, at the given length.
        seq_len: tokens of a sequence of the given model, one sample.
    """

    name: str
    config: ResolvedConfig
    shape: ModelShape | None = None
    micro_size: int | None = None
    seq_len: int | None = None


def family_shape(num_heads: int) -> ModelShape:
    """Return a decoder of the Llama family with `num_heads` heads of 128 and as many layers.

    >>> shape = family_shape(32)
    >>> shape.num_layers, shape.hidden_size, round(shape.num_params / 1e9, 1)
    (32, 4096, 8.0)
    """
    hidden = _HEAD_DIM * num_heads
    return ModelShape(
        num_layers=num_heads,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=math.gcd(8, num_heads),
        head_dim=_HEAD_DIM,
        ffn_size=hidden * 7 // 2,
        vocab_size=_VOCAB_SIZE,
        name=f"{num_heads} layers of {hidden:,}",
    )


def setups(cluster: Cluster, param: Dtype = "bf16") -> Iterator[Fit]:
    """Yield well-known ways to split a job, from the simplest to the one that holds most."""
    ranks = cluster.num_gpus
    sharded = changed(BASE, {"mesh.dp_shard": ranks, "precision.param": param})
    yield Fit(name="DDP" if ranks > 1 else "on the device", config=sharded)
    for stage in (1, 2, 3) if ranks > 1 else ():
        yield Fit(name=f"ZeRO-{stage}", config=changed(sharded, {"zero.stage": stage}))
    saving = changed(sharded, {"zero.stage": 3, "recompute.mode": "full"})
    yield Fit(name="... recompute full" if ranks > 1 else "recompute full", config=saving)
    team = min(cluster.gpus_per_node, max(1, cluster.gpu.link_domain), 8)
    if team > 1 and ranks % team == 0:
        tensor = changed(saving, {"mesh.tp": team, "mesh.dp_shard": ranks // team, "tensor.sequence_parallel": True})
        yield Fit(name=f"... TP {team}+SP", config=tensor)
        yield Fit(name=f"... CP {team}", config=changed(saving, {"mesh.cp": team, "mesh.dp_shard": ranks // team}))
    yield Fit(name="... in chunks", config=changed(saving, {"context.chunk_tokens": CHUNK_TOKENS}))
    host = changed(saving, {"tiers.optimizer": "host"})
    yield Fit(name="... optimizer on host", config=host)
    on_host = dict.fromkeys(("tiers.params", "tiers.grads", "tiers.activations"), "host")
    away = changed(host, on_host | {"context.chunk_tokens": CHUNK_TOKENS})
    yield Fit(name="... chunks, all on host", config=away)
    if cluster.host.nvme_bytes > 0:
        on_disk = changed(away, {"tiers.params": "nvme", "tiers.grads": "nvme", "tiers.optimizer": "nvme"})
        yield Fit(name="... chunks, states on NVMe", config=on_disk)


def fit(
    cluster: Cluster,
    *,
    seq_len: int,
    shape: ModelShape | None = None,
    margin_share: float = USUAL_MARGIN,
    param: Dtype = "bf16",
) -> Iterator[Fit]:
    """Yield the largest that each setup holds, one setup after the other.

    Args:
        cluster: the machine; all of it is used.
        seq_len: tokens of a sequence of the largest model.
        shape: the model whose largest micro-batch and sequence are also found; None finds the largest model alone.
        margin_share: share of a device's memory that is to stay free.
    """
    for setup in setups(cluster, param):
        yield _largest_of(setup, partial(_holds, cluster, setup.config, margin_share), seq_len, shape)


def _largest_of(
    setup: Fit, holds: Callable[[ModelShape, int, int], bool], seq_len: int, shape: ModelShape | None
) -> Fit:
    fours = largest(lambda count: holds(family_shape(_HEADS_STEP * count), seq_len, 1), _MOST_HEADS // _HEADS_STEP)
    setup = replace(setup, shape=family_shape(_HEADS_STEP * fours) if fours else None)
    if shape is None or shape.num_heads % setup.config.mesh.tp:
        return setup
    samples = largest(lambda size: holds(shape, seq_len, size), _MOST_SAMPLES)
    length = _LENGTH_STEP * largest(lambda count: holds(shape, _LENGTH_STEP * count, 1), _MOST_LENGTHS)
    return replace(setup, micro_size=samples or None, seq_len=length or None)


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to `most` that fits, 0 for none; where one fits, all below it must fit."""
    return bisect_left(range(1, most + 1), True, key=lambda number: not fits(number))


def _holds(
    cluster: Cluster, config: ResolvedConfig, margin_share: float, shape: ModelShape, seq_len: int, micro_size: int
) -> bool:
    config = changed(config, {"batch.micro_size": micro_size})
    job = PlanJob(shape=shape, seq_len=seq_len, global_batch=config.batch.global_size, cluster=cluster)
    return missing_memory(MemoryModel(job).estimate(config), cluster, margin_share) is None
