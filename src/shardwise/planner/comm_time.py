"""Price what ranks exchange: in a block, between stages, and to shard parameters, gradients and optimizer states.

Times are of collectives alone; `exposed_s` says how much of them remains visible in a step that computes at the same
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, get_args

from shardwise.config.resolve import ResolvedConfig
from shardwise.layout.grad_sums import Moment, StepCollective
from shardwise.layout.layout import Layout
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.models.shape import ModelShape
from shardwise.planner.collectives import NetworkModel, Op
from shardwise.planner.folded_layout import FoldedLayouts, LayerCount
from shardwise.planner.job import PlanJob, expert_skew, param_of, world_size

OVERLAP_SLOWDOWN: Final = 0.25
"""How much longer kernels take beside a collective, which takes cores and memory bandwidth from them: 38 % at most in
Echo (arXiv 2412.12487), and less where copies alone move."""
HIDDEN_SHARE: Final = 1 / (1 + OVERLAP_SLOWDOWN)
"""The most of a collective's time that computing beside it hides."""
DISPATCH_SHARE: Final = 0.9
DISPATCH_LINKS_SHARE: Final = 0.7
"""Shares of networks and of links that the all-to-alls of experts reach, whatever rings reach (deepseek-ai/DeepEP): 43
to 58 of 50 GB/s by InfiniBand, 726 GB/s of 900 by NVLink 5 and 153 of 200 by NVLink on H800, of both seven eighths of
eight ranks' on the links."""


@dataclass(frozen=True, kw_only=True)
class TokenExchange:
    """Hold the seconds of the collectives of one unit in one pass of one micro-batch.

    Attributes:
        tensor_s: of activations, for tensor and sequence parallelism.
        context_s: of keys and values, or of heads.
        experts_s: of tokens that go to experts and come back.
        hidden_tensor: the share of `tensor_s` that may run beside the unit's matrix products.
        hidden_context: the share of `context_s` that may run beside its attention.
    """

    tensor_s: float = 0.0
    context_s: float = 0.0
    experts_s: float = 0.0
    hidden_tensor: float = 0.0
    hidden_context: float = 0.0

    def exposed(self, compute_s: float, attention_s: float) -> dict[str, float]:
        """Return by part the seconds by which the pass, whose attention is part of `compute_s`, takes longer."""
        products_s = max(0.0, compute_s - attention_s)
        return {
            "tensor": _beside(self.tensor_s, self.hidden_tensor, products_s),
            "context": _beside(self.context_s, self.hidden_context, attention_s),
            "experts": self.experts_s,
        }


@dataclass(frozen=True, kw_only=True)
class BlockComm:
    """Hold the collectives of one unit in one micro-batch; `recompute` is what running the forward again adds."""

    forward: TokenExchange
    backward: TokenExchange
    recompute: TokenExchange = TokenExchange()


@dataclass(frozen=True, kw_only=True)
class OverlapTimes:
    """Hold the seconds in which one rank moves data for a step, by when, and say what computing does not hide.

    Attributes:
        forward_s, backward_s: in that pass of each micro-batch.
        first_forward_s, last_backward_s: in addition, in that pass of one micro-batch alone, as after a step.
        alone_forward_s, alone_backward_s: what is part of these and has nothing to run beside.
        step_s: in the step itself; nothing hides it.
        num_hiding: micro-batches at the step's ends whose computation may hide what is needed once.
        may_hide: whether data move while others compute.
        hidden_share: the most of their time that computing hides.
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    first_forward_s: float = 0.0
    last_backward_s: float = 0.0
    alone_forward_s: float = 0.0
    alone_backward_s: float = 0.0
    step_s: float = 0.0
    num_micro_batches: int = 1
    num_hiding: int = 1
    may_hide: bool = True
    hidden_share: float = HIDDEN_SHARE

    @property
    def total_s(self) -> float:
        """Return the seconds of all moves of a step."""
        passes_s = self.num_micro_batches * (self.forward_s + self.backward_s)
        return passes_s + self.first_forward_s + self.last_backward_s + self.step_s

    def exposed_s(self, forward_s: float, backward_s: float) -> float:
        """Return the seconds of a step that the passes of micro-batches, recomputation included, do not hide."""
        if not self.may_hide:
            return self.total_s
        num_ends, share = self.num_hiding, self.hidden_share
        inner = exposed_s(self.forward_s, forward_s, share) + exposed_s(self.backward_s, backward_s, share)
        first_s = num_ends * self.forward_s + self.first_forward_s - self.alone_forward_s
        last_s = num_ends * self.backward_s + self.last_backward_s - self.alone_backward_s
        ends = exposed_s(first_s, num_ends * forward_s, share) + exposed_s(last_s, num_ends * backward_s, share)
        alone_s = self.alone_forward_s + self.alone_backward_s
        return (self.num_micro_batches - num_ends) * inner + ends + alone_s + self.step_s


def exposed_s(communication_s: float, compute_s: float, hidden_share: float = HIDDEN_SHARE) -> float:
    """Return the seconds by which a collective of `communication_s` lengthens `compute_s` of computing beside it.

    Even where the computation lasts longer, the collective slows it: at most `hidden_share` of its time is hidden.

    >>> exposed_s(3.0, 0.0), exposed_s(0.0, 3.0), round(exposed_s(1.0, 9.0), 3)
    (3.0, 0.0, 0.2)
    """
    return max(communication_s - compute_s, communication_s * (1 - hidden_share))


def _beside(communication_s: float, hidden: float, compute_s: float) -> float:
    return (1 - hidden) * communication_s + exposed_s(hidden * communication_s, compute_s)


class CommTimeModel:
    """Price what the candidates of a job exchange, by folded layouts that others may have too."""

    def __init__(self, job: PlanJob, layouts: FoldedLayouts | None = None) -> None:
        self.job = job
        self.layouts = layouts or FoldedLayouts(job)
        self.network = NetworkModel(job.cluster)
        gpu = job.cluster.gpu
        links = gpu.link_bytes_per_s * DISPATCH_LINKS_SHARE / DISPATCH_SHARE
        gpu = replace(gpu, link_bytes_per_s=links, fitted=replace(gpu.fitted, network_share=DISPATCH_SHARE))
        self.dispatch_network = NetworkModel(replace(job.cluster, gpu=gpu), collisions=0.0)
        self._blocks: dict[tuple[object, ...], BlockComm] = {}
        self._data: dict[tuple[object, ...], OverlapTimes] = {}

    def block(self, s: ResolvedConfig) -> BlockComm:
        """Price the collectives of one block on one rank, in one micro-batch.

        Collectives are those of `shardwise.tensor.mappings` and of `context_bytes`; dispatching to experts and back are
        two all-to-alls each way (Lepikhin et al. 2020, arXiv 2006.16668).
        """
        split = (s.mesh.tp, s.mesh.cp, s.mesh.ep, s.batch.micro_size, s.tensor, param_of(s))
        key = (*split, s.experts.skew, s.context.transport, s.context.heads_over, s.recompute.mode, s.recompute.every)
        if key not in self._blocks:
            self._blocks[key] = self._block(s)
        return self._blocks[key]

    def embedding(self, config: ResolvedConfig) -> BlockComm:
        """Price the embedding: each tp rank looks up its part of the vocabulary, and the results are summed."""
        if config.tensor.sequence_parallel:
            return _of_end(self._tensor_s("reduce_scatter", config), self._tensor_s("all_gather", config))
        return _of_end(self._tensor_s("all_reduce", config), 0.0)

    def head(self, s: ResolvedConfig) -> BlockComm:
        """Price the head and the loss: the input is gathered, its gradient summed; between, three numbers a token."""
        tokens_bytes = 4.0 * self._tokens(s)
        forward_s = 3 * self.network.collective_s("all_reduce", tokens_bytes, s.mesh.tp)
        backward_s = self._tensor_s("all_reduce", s)
        if s.tensor.sequence_parallel:
            forward_s += self._tensor_s("all_gather", s)
            backward_s = self._tensor_s("all_gather", s) + self._tensor_s("reduce_scatter", s)
        return _of_end(forward_s, backward_s)

    def transfer_s(self, s: ResolvedConfig) -> float:
        """Return the seconds of one micro-batch's activation from a stage to the next, or of its gradient back."""
        if s.mesh.pp == 1:
            return 0.0
        num_bytes = self._activation_bytes(s) / (s.mesh.tp if s.tensor.sequence_parallel else 1)
        # A ring goes as fast as its slowest rank, which is why it reaches a share of its links; a stage waits for one.
        num_bytes *= self.job.cluster.gpu.fitted.network_share
        return self.network.collective_s("send", num_bytes, s.mesh.pp, world_size(s) // s.mesh.pp)

    def data(self, config: ResolvedConfig, pipeline_rank: int = 0) -> OverlapTimes:
        """Price a step's gathers and reductions over the ranks that share parameters.

        Where a rank has several stages, the first's parameters are needed, and the last's gradients reduced, while the
        others compute: each takes groups of as many micro-batches as there are ranks (Narayanan et al. 2021, arXiv
        2104.04473, figure 4).
        """
        s, stages_per_rank = config, self.layouts.stages.of(config).placement.stages_per_rank
        key = (self.layouts.key(s, pipeline_rank), s.batch.accumulation, s.mesh.pp, stages_per_rank)
        if key not in self._data:
            self._data[key] = self._data_times(s, pipeline_rank, stages_per_rank)
        return self._data[key]

    def _data_times(self, s: ResolvedConfig, pipeline_rank: int, stages_per_rank: int) -> OverlapTimes:
        measured = self.job.cluster.measured.hidden_share
        seconds: dict[str, float] = dict.fromkeys(get_args(Moment), 0.0)
        alone = {"forward": 0.0, "backward": 0.0}
        folds = self.layouts.rank(s, pipeline_rank)
        for fold in folds.folds:
            # Those of the first group run alone: the forward needs it first, and the backward reduces it last.
            is_first = fold is folds.folds[0]
            for call in self._calls_of(s, folds.layout, fold):
                each_s = self.network.collective_s(call.op, call.num_bytes, call.num_ranks, call.stride)
                seconds[call.moment] += call.count * each_s
                if is_first and (call.op != "all_gather" or call.moment != "backward"):
                    alone[call.moment.rpartition(" ")[2]] += each_s
        return OverlapTimes(
            forward_s=seconds["forward"],
            backward_s=seconds["backward"],
            first_forward_s=seconds["first forward"],
            last_backward_s=seconds["last backward"],
            alone_forward_s=alone["forward"],
            alone_backward_s=alone["backward"],
            num_micro_batches=s.batch.accumulation,
            num_hiding=min(s.batch.accumulation, s.mesh.pp) if stages_per_rank > 1 else 1,
            may_hide=s.zero.overlap,
            hidden_share=HIDDEN_SHARE if measured is None else measured,
        )

    def data_calls(self, config: ResolvedConfig, pipeline_rank: int = 0) -> tuple[StepCollective, ...]:
        """Return a step's collectives over the ranks that share parameters."""
        folds = self.layouts.rank(config, pipeline_rank)
        return tuple(call for fold in folds.folds for call in self._calls_of(config, folds.layout, fold))

    def _calls_of(self, s: ResolvedConfig, layout: Layout, fold: LayerCount) -> Iterator[StepCollective]:
        return layout.step_collectives(fold.group, s.batch.accumulation, fold.count)

    def _block(self, s: ResolvedConfig) -> BlockComm:
        pass_s = self._tensor_pass_s(s)
        hidden = 1 - 1 / s.tensor.overlap_chunks  # the last part's sum has no product beside it
        forward_s, backward_s = self._context_passes(s)
        experts_s = self._experts_s(s)
        repeats = 1.0 / s.recompute.every if s.recompute.mode == "full" else 0.0
        # Beside the gradients of inputs, in every code; what runs again gathers anyway.
        gathers = self._num_split(s) * self._tensor_s("all_gather", s) if s.tensor.sequence_parallel else 0.0
        regathered_s = (1 - repeats) * gathers
        tensor_s = pass_s + regathered_s
        forward = TokenExchange(
            tensor_s=pass_s,
            context_s=forward_s,
            experts_s=experts_s,
            hidden_tensor=hidden,
            hidden_context=1.0 if s.context.transport == "ring" and (s.context.heads_over or 1) < s.mesh.cp else 0.0,
        )
        return BlockComm(
            forward=forward,
            backward=replace(
                forward,
                tensor_s=tensor_s,
                context_s=backward_s,
                hidden_tensor=(hidden * pass_s + regathered_s) / tensor_s if tensor_s else 0.0,
            ),
            recompute=replace(
                forward, tensor_s=repeats * pass_s, context_s=repeats * forward_s, experts_s=repeats * experts_s
            ),
        )

    def _tensor_pass_s(self, s: ResolvedConfig) -> float:
        """Return the seconds of a forward, or of a backward without what it gathers again."""
        if s.mesh.tp == 1:
            return 0.0
        num_split = self._num_split(s)
        if s.tensor.sequence_parallel:
            return num_split * (self._tensor_s("all_gather", s) + self._tensor_s("reduce_scatter", s))
        # Experts' results of a rank's part of the tokens are gathered, as are the gradients of their inputs.
        return num_split * self._tensor_s("all_reduce", s) + (2 - num_split) * self._tensor_s("all_gather", s)

    def _num_split(self, s: ResolvedConfig) -> float:
        """Return how many of attention and feed-forward tp splits, a mean over blocks: experts alone are whole."""
        shape = self.job.shape
        is_whole = shape.experts is not None and not shape.experts.num_shared
        return 2 - is_whole * shape.num_expert_layers / shape.num_layers

    def _tensor_s(self, op: Op, s: ResolvedConfig) -> float:
        return self.network.collective_s(op, self._activation_bytes(s), s.mesh.tp)

    def _context_passes(self, s: ResolvedConfig) -> tuple[float, float]:
        """Return the seconds of the exchange forward and backward."""
        if s.mesh.cp == 1:
            return 0.0, 0.0
        over = _heads_over(s)
        heads, keys = context_bytes(self.job.shape, s, self.job.seq_len)

        def pass_s(sent_for_heads: int, sent_for_keys: int) -> float:
            seconds, ring = 0.0, s.mesh.cp // over
            if over > 1:
                num_bytes = sent_for_heads * (over / (over - 1)) / 2  # an all-to-all keeps its n-th at home
                seconds += 2 * self.network.collective_s("all_to_all", num_bytes, over, s.mesh.tp)
            if ring > 1:
                seconds += self._around_s(s, sent_for_keys, ring, s.mesh.tp * over)
            return seconds

        return pass_s(heads[0], keys[0]), pass_s(heads[1], keys[1])

    def _around_s(self, s: ResolvedConfig, sent_bytes: float, num_ranks: int, stride: int) -> float:
        """Return the seconds until keys and values reach all ranks, each having sent `sent_bytes`."""
        if s.context.transport == "all-gather":
            whole_bytes = sent_bytes * num_ranks / (num_ranks - 1)
            return self.network.collective_s("all_gather", whole_bytes, num_ranks, stride)
        steps = num_ranks - 1
        return steps * self.network.collective_s("send", sent_bytes / steps, num_ranks, stride)

    def _experts_s(self, s: ResolvedConfig) -> float:
        """Return the seconds of one pass of an average block; some layers may be dense."""
        shape, ep = self.job.shape, s.mesh.ep
        if shape.experts is None or ep == 1:
            return 0.0
        of_tokens = expert_skew(self.job, s) * self._activation_bytes(s) / s.mesh.tp  # each tp rank sends a part
        one_s = self._dispatch_s(of_tokens, shape.experts.num_chosen, ep)
        return 2 * one_s * shape.num_expert_layers / shape.num_layers

    def _dispatch_s(self, num_bytes: float, num_chosen: int, num_ranks: int) -> float:
        """Return the seconds in which tokens go to the ranks of their experts, or come back: a copy for each expert."""
        return self.dispatch_network.collective_s("all_to_all", num_bytes * num_chosen, num_ranks)

    def _tokens(self, s: ResolvedConfig) -> float:
        return self.job.seq_len / s.mesh.cp * s.batch.micro_size

    def _activation_bytes(self, s: ResolvedConfig) -> float:
        return DTYPE_BYTES[param_of(s)] * self._tokens(s) * self.job.shape.hidden_size


def _of_end(forward_s: float, backward_s: float) -> BlockComm:
    return BlockComm(forward=TokenExchange(tensor_s=forward_s), backward=TokenExchange(tensor_s=backward_s))


def _heads_over(s: ResolvedConfig) -> int:
    """Return how many ranks exchange heads for tokens."""
    return s.mesh.cp if s.context.transport == "ulysses" else s.context.heads_over or 1


def context_bytes(shape: ModelShape, s: ResolvedConfig, seq_len: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Count what a rank sends in a block's attention over all keys, forward and backward: heads, then keys and values.

    Of n tokens a rank, B samples, H query and K key heads of D in e bytes, u ranks that exchange heads, and c ranks
    that have the same heads then:

    | | forward | backward |
    |---|---|---|
    | heads for tokens (Jacobs et al. 2023, arXiv 2309.14509) | (u - 1) / u  n B (2 H + 2 K) D e | the same |
    | ring, all-gather (Liu et al. 2023, arXiv 2310.01889) | (c - 1) 2 u n B K / u D e | the same with (e + 4) for e |

    Each rank has at least one KV head, though u be more; then several sum its gradients, in fp32. The backward of a
    ring moves keys and values again, and their gradients in fp32. Causal attention over a zigzag split moves 3/4 of it
    in the mean; the rank that sends most, for which the others wait, sends as much.
    """
    over, width, wide = _heads_over(s), DTYPE_BYTES[param_of(s)], DTYPE_BYTES["fp32"]
    of_head = s.batch.micro_size * (seq_len // s.mesh.cp) * shape.head_dim
    kv_heads = max(1, shape.num_kv_heads // s.mesh.tp)
    own_heads, own_kv_heads = shape.num_heads // s.mesh.tp // over, max(1, kv_heads // over)
    exchanged, around = 2 * (over - 1) * of_head, 2 * (s.mesh.cp // over - 1) * over * of_head * own_kv_heads
    kv_width = wide if kv_heads < over else width
    heads = tuple(exchanged * (own_heads * width + own_kv_heads * each) for each in (width, kv_width))
    return (heads[0], heads[1]), (around * width, around * (width + wide))
