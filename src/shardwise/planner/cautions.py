"""What is worth a second look in one priced strategy, each with a cure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from shardwise.planner.capacity import shortfall
from shardwise.planner.compute import ComputeModel
from shardwise.planner.results import Price
from shardwise.planner.words import gib_words

# Of a step, from which on a part is worth a word.
_LARGE_SHARE: Final = 0.15
_CURES: Mapping[str, str] = MappingProxyType(
    {
        "tensor": "try a smaller mesh.tp, or tensor.overlap_chunks",
        "context": "try a smaller mesh.cp, or another context.transport",
        "experts": "keep the ranks of an expert group in one node",
        "bubble": "try more micro-batches, more virtual stages, or a zero-bubble schedule",
        "data": "try a smaller mesh.dp_shard with replicas, a lower zero.stage, or more micro-batches",
        "offload": "try to keep a state on the device, or more tokens a step",
        "recompute": "try recompute.mode=selective, or a larger recompute.every",
    }
)
_WHAT: Mapping[str, str] = MappingProxyType(
    {
        "tensor": "collectives of tensor parallelism that nothing hides",
        "context": "exchange of keys and values that nothing hides",
        "experts": "exchange of tokens between experts",
        "bubble": "waiting in the pipeline",
        "data": "gathers and reductions that nothing hides",
        "offload": "moves between memories that nothing hides",
        "recompute": "computing activations again",
    }
)


def cautions(price: Price, compute: ComputeModel, margin_share: float) -> Iterator[str]:
    """What may go wrong or is slow, on one line each.

    Args:
        price: of one strategy.
        compute: of its job.
        margin_share: of a device's memory that should stay free.
    """
    job, strategy = price.job, price.strategy
    missing = shortfall(price.memory, job.cluster, margin_share)
    if missing is not None and missing.tier == "device" and price.margin_bytes >= 0:
        share = price.margin_bytes / job.cluster.gpu.memory_bytes
        yield f"only {gib_words(price.margin_bytes)} ({100 * share:.1f} %) of device memory are left; try less"
    elif missing is not None:
        where = f" on pipeline rank {missing.pipeline_rank}" if strategy.pp > 1 else ""
        free = f"{100 * margin_share:.0f} % is to stay free"
        yield f"{missing.tier} memory lacks {gib_words(missing.missing_bytes)}{where}, where {free}"
    if strategy.tp > max(job.cluster.gpus_per_node, job.cluster.gpu.link_domain):
        yield f"mesh.tp={strategy.tp} reaches beyond a node of {job.cluster.gpus_per_node}, over the network"
    if compute.waits_for_launches(strategy):
        cure = "fewer GPUs or larger micro-batches take as long; try compile.enabled=true"
        yield f"kernels are shorter than the host takes to launch them, so {cure}"
    for part, cure in _CURES.items():
        share = price.time.parts.get(part, 0.0) / price.time.step_s
        if share >= _LARGE_SHARE:
            yield f"{100 * share:.0f} % of a step is {_WHAT[part]}; {cure}"
