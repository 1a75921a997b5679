"""Say how ranks sum the gradients of a group: over which ranks, in which bits, by which collectives.

>>> from shardwise.layout.wire_codec import WireCodec
>>> a_sum = GradSum(num_ranks=4, numel=4096, dtype="bf16", codec=WireCodec("int8"))
>>> [call.sent_bytes(1) for call in a_sum.collectives(1, "backward")]  # 3 rows of 1,024 codes and 4 scales
[3120]
>>> by_node = GradSum(num_ranks=4, numel=4096, dtype="bf16", codec=WireCodec("int8"), node_size=2)
>>> by_node.hops                                             # to a rank of the node, and of the other node
((2, 2080), (2, 1040))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardwise.layout.param_groups import GroupSpec
from shardwise.layout.precision import DTYPE_BYTES, PrecisionPolicy, StoredDtype
from shardwise.layout.zero_stages import Placement, ZeroStage

if TYPE_CHECKING:
    from shardwise.layout.wire_codec import WireCodec

SumRanks = Literal["data", "shards", "replicas"]
"""The ranks that sum: all that average gradients, those of the shard group, or those that hold the same shard."""

StepOp = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
Moment = Literal["forward", "backward", "first forward", "last backward", "step"]
"""A moment of a step: a pass of each micro-batch, or of one of them alone, or the optimizer's step."""


@dataclass(frozen=True)
class StepCollective:
    """Describe a collective that a step has over ranks that share parameters.

    Attributes:
        num_bytes: of the whole tensor, of which each rank has or gets a slice.
        num_ranks, stride: of the group, in rank order.
        wire_key: under which `Layout.bytes_on_wire` counts what is sent.
        count: how many such calls the pass of `moment` has.
        num_spared: calls of a step that do not happen, as another collective stands for them.
    """

    op: StepOp
    num_bytes: int
    num_ranks: int
    stride: int
    moment: Moment
    wire_key: str
    count: int = 1
    num_spared: int = 0

    def sent_bytes(self, num_micro_batches: int) -> int:
        """Return the bytes that a rank sends by all such calls of a step, with ring algorithms."""
        num_calls = self.count * (num_micro_batches if self.moment in ("forward", "backward") else 1) - self.num_spared
        passes = 2 if self.op == "all_reduce" else 1
        return num_calls * (passes * self.num_bytes * (self.num_ranks - 1) // self.num_ranks)


@dataclass(frozen=True)
class GradSum:
    """Describe a sum of gradients over ranks.

    Attributes:
        numel: elements that each of them adds; `num_ranks` divides them.
        dtype: in which they are sent where they are not encoded, and in which sums are sent to all ranks.
        codec: how they are encoded; None for as they are, and for one rank.
        is_for_all: whether all ranks get the whole sum; otherwise each gets a slice.
        node_size: ranks of a node; an encoded sum over several nodes runs within them first. 1 where they are unknown.
        has_feedback: whether a rank adds to its gradients what their last encoding has rounded off.
    """

    num_ranks: int
    numel: int
    dtype: StoredDtype
    codec: WireCodec | None = None
    is_for_all: bool = False
    node_size: int = 1
    has_feedback: bool = False

    @property
    def num_nodes(self) -> int:
        """Return the nodes of an encoded sum: with several it runs within each, and then across them."""
        return self.num_ranks // self.node_size if 1 < self.node_size < self.num_ranks else 1

    @property
    def hops(self) -> tuple[tuple[int, int], ...]:
        """Return for each all-to-all of an encoded sum its ranks, and the bytes that a rank sends to each of them."""
        if self.codec is None:
            return ()
        row_bytes = self.codec.num_bytes(self.numel // self.num_ranks)
        if self.num_nodes == 1:
            return ((self.num_ranks, row_bytes),)
        return (self.node_size, self.num_nodes * row_bytes), (self.num_nodes, row_bytes)

    def collectives(self, stride: int, moment: Moment, times: int = 1) -> Iterator[StepCollective]:
        """Yield the collectives of `times` such sums over ranks at a stride."""
        wire_key: StepOp = "all_reduce" if self.is_for_all else "reduce_scatter"
        whole_bytes, hop_stride = self.numel * DTYPE_BYTES[self.dtype], stride
        for num_ranks, row_bytes in self.hops:
            yield StepCollective("all_to_all", num_ranks * row_bytes, num_ranks, hop_stride, moment, wire_key, times)
            hop_stride *= num_ranks
        if self.is_for_all or not self.hops:
            op: StepOp = "all_gather" if self.hops else wire_key
            yield StepCollective(op, whole_bytes, self.num_ranks, stride, moment, wire_key, times)

    @property
    def residual_numels(self) -> tuple[int, int]:
        """Return the elements of what a rank keeps of the first and of the second encoding; 0 without feedback."""
        if not self.has_feedback or self.codec is None:
            return 0, 0
        return self.numel, (self.num_nodes > 1) * self.num_nodes * (self.numel // self.num_ranks)

    @property
    def residual_bytes(self) -> int:
        """Return the bytes of what a rank keeps with feedback."""
        return sum(self.residual_numels) * DTYPE_BYTES[self.dtype]


def sums_of(group: GroupSpec, stage: ZeroStage, policy: PrecisionPolicy) -> Mapping[SumRanks, GradSum]:
    """Return the sums of a trained group's gradients, by their ranks, in the order in which they run.

    Args:
        group: its gradients are encoded if its parameters may be.
    """

    def summed(num_ranks: int, numel: int, is_for_all: bool, nearby: int) -> GradSum:
        codec = None
        if policy.reduce_codec is not None and group.is_encodable and num_ranks > 1:
            from shardwise.layout.wire_codec import WireCodec

            codec = WireCodec(policy.reduce_codec)
        return GradSum(num_ranks, numel, policy.reduce, codec, is_for_all, nearby, policy.reduce_feedback)

    if stage.optimizer is Placement.REPLICATE:
        return {"data": summed(group.num_ranks, group.padded_numel, True, stage.node_size)}
    replicas = group.num_ranks // group.num_shards
    return {
        "shards": summed(group.num_shards, group.padded_numel, False, stage.node_size),
        "replicas": summed(replicas, group.shard_numel, True, 1),
    }
