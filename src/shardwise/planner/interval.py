"""How far from the predicted step time four of five runs lie, by what is known of the device and of the run.

>>> from shardwise.planner.catalogue import find_gpu
>>> from shardwise.planner.hardware import Cluster
>>> from shardwise.planner.shape import ModelShape
>>> from shardwise.models.presets import preset
>>> cluster = Cluster(gpu=find_gpu("h100"), num_gpus=8, gpus_per_node=8, nic_bytes_per_s=50e9)
>>> job = Job(shape=ModelShape.of_decoder(preset("llama-3-8b")), seq_len=8192, global_batch=64, cluster=cluster)
>>> kind_of(job, Strategy(dp_shard=8, zero_stage=3)), kind_of(job, Strategy(dp_shard=8, zero_stage=3, matmul="fp8"))
('gathered', 'narrow')
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

from shardwise.planner.hardware import Fitted
from shardwise.planner.job import Job, Strategy

Kind = Literal["measured", "unfitted", "narrow", "gathered", "usual"]
"""Of a prediction: the machine was measured; constants are defaults, or were fitted to products of another width;
products in fp8 or fp4; parameters gathered before use (stage 3); none of these."""

SHARES: Final[Mapping[Kind, float]] = MappingProxyType(
    {"measured": 0.12, "unfitted": 0.31, "narrow": 0.22, "gathered": 0.25, "usual": 0.14}
)
"""Of the predicted time, to each side: the 80th percentile of |measured / predicted - 1| on all published rows, those
that were held out of the fit too, where a source counts by the root of its rows, as `benchmarks/planner_accuracy.py
--spread` prints it. `measured` holds the twelve runs of `benchmarks/planner_machine.py` (docs/benchmarks.md).
`unfitted` has rows of two sources alone, too few: by default constants those of the fitted devices lie within 0.18, and
besides that a new device is as far off as `gathered`; both together, as independent errors add up."""


def kind_of(job: Job, strategy: Strategy) -> Kind:
    """What a prediction rests on; the first that holds, in the order of `Kind`."""
    if job.cluster.profile is not None:
        return "measured"
    dtype = strategy.product_dtype
    if job.cluster.gpu.fitted == Fitted() or dtype in ("fp64", "fp32", "tf32"):
        return "unfitted"
    if dtype in ("fp8", "fp4"):
        return "narrow"
    return "gathered" if strategy.zero_stage == 3 else "usual"


def interval_s(job: Job, strategy: Strategy, step_s: float) -> tuple[float, float]:
    """The least and the most seconds that are expected of a step, four times of five."""
    share = SHARES[kind_of(job, strategy)]
    return step_s * (1 - share), step_s * (1 + share)
