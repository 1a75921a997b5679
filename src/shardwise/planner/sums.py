"""Buffers in which ranks sum what each of them has a part of: activations and their gradients, and shared parameters.

Which ones a sum takes is told by `shardwise.comm`, `shardwise.tensor.collectives` and `shardwise.zero.sharers`.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.layout.activations import FP32_BYTES
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.layout.skeleton import ROOT
from shardwise.layout.stages import Placement
from shardwise.links import RING_BYTES
from shardwise.planner.folded import RankFolds
from shardwise.planner.job import Strategy


def sums_of(strategy: Strategy, whole_bytes: float, folds: RankFolds) -> tuple[float, ...]:
    """Bytes of the buffers that tensor-parallel sums on a CPU have at once: `shardwise.comm` and `tensor.collectives`.

    Two ranks exchange what they have: what is summed where it stands is received beside it, a large tensor in fp32
    goes round in a ring. More ranks widen narrow tensors, send them as they were, and receive all parts of a slice.

    Args:
        whole_bytes: of the residual stream, its sequences unsplit.
        folds: of the rank: blocks sum where it stands, embedding and head do not, and they sum whole sequences.
    """
    s, size = strategy, DTYPE_BYTES[strategy.param]
    has_blocks = any(fold.group.unit != ROOT for fold in folds.folds)
    has_ends = any(fold.group.unit == ROOT for fold in folds.folds)
    if s.tp == 2:
        is_exchanged = has_blocks and not s.sequence_parallel and (whole_bytes < RING_BYTES or size < FP32_BYTES)
        return (whole_bytes,) if is_exchanged else ()
    if s.tp > 1 and size < FP32_BYTES and (has_ends or not s.sequence_parallel):
        return (whole_bytes / size * FP32_BYTES, whole_bytes, whole_bytes)
    return (whole_bytes,) if s.tp > 1 and s.sequence_parallel and has_blocks else ()


def sums_in_backward(strategy: Strategy, whole_bytes: float, folds: RankFolds) -> tuple[float, ...]:
    """Of those buffers, what backwards of blocks need while their gradients come.

    Gradients of the blocks' inputs are summed beside where they stand, which two ranks do without a buffer. A product
    that is recomputed is summed where it stands, before gradients of its block come; but a pipeline has those of other
    micro-batches by then.
    """
    s = strategy
    if s.tp == 2 and (s.pp == 1 or s.recompute != "full"):
        return ()
    of_blocks = tuple(fold for fold in folds.folds if fold.group.unit != ROOT)
    return sums_of(s, whole_bytes, replace(folds, folds=of_blocks))


def tied_bytes(folds: RankFolds) -> int:
    """Of the table in which a step sums gradients of what two ranks of a pipeline share: `shardwise.zero.sharers`.

    A small one has a buffer too, in which the other's arrives; a large one is summed where it is.
    """
    shared = [fold.group for fold in folds.folds if len(folds.layout.holders(fold.group)) == 2]
    is_replicated = folds.layout.stage.optimizer is Placement.REPLICATE
    return FP32_BYTES * sum(group.padded_numel if is_replicated else group.shard_numel for group in shared)


def shared_bytes(strategy: Strategy, folds: RankFolds) -> int:
    """Of the table in which a step sums gradients of norms that saw parts of sequences: `shardwise.zero.sharers`."""
    if not strategy.sequence_parallel:
        return 0
    is_replicated = folds.layout.stage.optimizer is Placement.REPLICATE
    numels = [
        fold.count * param.numel // (1 if is_replicated else fold.group.num_shards)
        for fold in folds.folds
        for param in fold.group.params
        if len(param.shape) == 1
    ]
    return FP32_BYTES * sum(numels)
