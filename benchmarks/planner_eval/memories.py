"""Count what runs of other frameworks store: the planner's memory, with what `PublishedTraits` says of the code."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from planner_eval.codes import TORCHTITANS
from planner_eval.recomputation import freed_elements
from planner_eval.traits import PublishedTraits, published_traits
from shardwise.config.resolve import ResolvedConfig, Tier
from shardwise.layout.activation_bytes import FP32_BYTES, LayerShape
from shardwise.layout.layout import Layout
from shardwise.layout.param_groups import GroupSpec
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.layout.zero_stages import Placement
from shardwise.models.shape import SCALE_BYTES, ModelShape, is_adapter, with_adapters
from shardwise.planner.folded_layout import FoldedLayout, FoldedLayouts, LayerCount, StageTable
from shardwise.planner.job import PlanJob, changed, param_of, trains_all
from shardwise.planner.memory import (
    CONTEXT_BYTES,
    BlockBytes,
    Buffers,
    HeadBytes,
    MemoryModel,
    Recompute,
    StageBytes,
    defers_weights,
    unread_size,
)
from shardwise.schedule.placement import StagePlacement

MASK_BYTES: Final = 1.0
"""Bytes that are kept of each element that dropout works on, in addition to its output."""
# Elements that a head of DeepSeek's attention keeps beyond 128 of its queries and of its output: 64 of queries, 192 of
# keys and 128 of values (arXiv 2412.19437, section 4.2).
LATENT_MORE: Final = 384.0
# Blocks whose experts are on the device where they wait on the host: the one that runs and the next.
NUM_GROUPS_HELD: Final = 2
# Parameters that DeepSpeed's stage 3 leaves gathered, as they are needed again soon (`stage3_max_live_parameters`).
MAX_LIVE_PARAMS: Final = 10**9
# Of an expert's weight that bitsandbytes packs, with a scale in fp32 for each 64.
PACKED_EXPERT_BYTES: Final = 0.5 + 4 / 64


class PublishedStages(StageTable):
    """Give all stages the same number of blocks; the library cuts by cost."""

    def _cut(self, config: ResolvedConfig, placement: StagePlacement) -> tuple[tuple[int, ...], int]:
        shape, cut = self.job.shape, config.pipeline.cut
        layers = even_layers(shape.num_layers, placement.num_stages) if cut is None else layers_between(cut, shape)
        return layers, placement.num_stages - 1


class PublishedLayout(FoldedLayouts):
    """Shard the optimizer's states over another number of ranks, where the code does."""

    def __init__(self, job: PlanJob) -> None:
        super().__init__(job, PublishedStages(job))

    def _fold(self, config: ResolvedConfig, pipeline_rank: int) -> FoldedLayout:
        """Let blocks be compiled beside experts that are divided, which our engine refuses."""
        return super()._fold(changed(config, {"compile.enabled": False}), pipeline_rank)

    def _bytes_at_rest(self, config: ResolvedConfig, pipeline_rank: int, tier: Tier | None) -> dict[str, int]:
        totals = super()._bytes_at_rest(config, pipeline_rank, tier)
        num_shards = published_traits(self.job).optimizer_shards
        if num_shards is None:
            return totals
        rank = self.rank(config, pipeline_rank)
        states = tuple(dataclasses.replace(each, placement=Placement.SHARD) for each in rank.layout.states)
        layout = dataclasses.replace(rank.layout, states=states)
        resharded = rank.total(
            lambda group: layout.group_bytes_at_rest(dataclasses.replace(group, num_shards=num_shards), 0, tier)
        )
        return {**totals, "optimizer": resharded["optimizer"]}


def _score_bytes(traits: PublishedTraits, element_bytes: int) -> float:
    """Return the bytes kept of each attention score.

    A fused softmax keeps its output, any other also its output in fp32, and dropout its own output and mask.
    """
    if traits.attention == "flash":
        return 0.0
    is_widened = traits.attention == "unfused" and element_bytes < FP32_BYTES
    softmax = element_bytes + (FP32_BYTES if is_widened else 0.0)
    return softmax + (element_bytes + MASK_BYTES if traits.has_dropout else 0.0)


class PublishedMemoryModel(MemoryModel):
    """Count states as other code stores them, and what it gathers and keeps."""

    def __init__(self, job: PlanJob, layouts: FoldedLayouts | None = None) -> None:
        super().__init__(job, layouts or PublishedLayout(job))

    def _sums(
        self, folds: Iterable[LayerCount], width_of: Callable[[GroupSpec], int] = lambda group: 1
    ) -> tuple[int, int, int]:
        root, block, whole = super()._sums(folds, width_of)
        traits = published_traits(self.job)
        share = largest_share(self.job.shape) if traits.moves_tensors else 1.0
        if traits.packs_experts and self.job.shape.experts is not None:
            share *= PACKED_EXPERT_BYTES / DTYPE_BYTES["bf16"]
        if traits.code is not None and traits.code.name in TORCHTITANS and not self.job.shape.is_tied:
            root //= 2  # the table and the head are groups of their own
        return root, int(block * share), whole

    def _sent_on_bytes(self, block: BlockBytes) -> float:
        return 0.0 if published_traits(self.job).frees_outputs else super()._sent_on_bytes(block)

    def _given_bytes(self, config: ResolvedConfig, block: BlockBytes) -> float:
        return 0.0

    def _buffers(self, config: ResolvedConfig, folds: FoldedLayout, stage: int) -> Buffers:
        """Let the last block's gradients find what any other block's find: how other codes begin is not known."""
        found, code = super()._buffers(config, folds, stage), published_traits(self.job).code
        if code is not None and code.name == "deepspeed" and config.zero.stage == 3:
            live = min(MAX_LIVE_PARAMS, folds.numel) * DTYPE_BYTES[param_of(config)]
            found = dataclasses.replace(found, root=max(found.root, live - 2 * found.block))
        return dataclasses.replace(found, first=found.waiting)

    def _backward(
        self, config: ResolvedConfig, stage: StageBytes, kept: float, buffers: Buffers, *, has_table: bool
    ) -> Iterator[dict[str, float]]:
        """Let FSDP1 hold each block's input and its gradient until the backward ends, where its parameters are frozen.

        Its `_register_post_backward_reshard_only_hook` holds what accumulates the gradient of a unit's input, which in
        a checkpoint that is reentrant is a leaf, with its gradient.
        """
        yield from super()._backward(config, stage, kept, buffers, has_table=has_table)
        if published_traits(self.job).holds_inputs and stage.again and config.recompute.mode == "full":
            head_bytes = stage.head.kept if stage.head is not None else 0.0
            yield {
                "activations": kept - stage.ends - head_bytes + len(stage.again) * stage.block.stream + stage.again[0],
                "workspace": stage.block.working,
                "gathered": buffers.root + buffers.block,
                "buckets": buffers.waiting,
            }

    def _pooled(self, buffers: dict[int, Buffers]) -> dict[int, Buffers]:
        return buffers

    def _sent_bytes(self, layout: Layout, width: int) -> float:
        """Send gradients from where they are stored; what is sharded arrives in a buffer."""
        num_bytes = super()._sent_bytes(layout, width)
        is_sharded = layout.stage.grads is Placement.SHARD
        return float(DTYPE_BYTES[layout.precision.reduce] * is_sharded) if num_bytes else 0.0

    def _weight_grad_bytes(self, config: ResolvedConfig, numel: float) -> float:
        """Add gradients of weights where they are stored."""
        return 0.0

    def _layer_shape(self, config: ResolvedConfig, *, has_experts: bool) -> LayerShape:
        found, traits = super()._layer_shape(config, has_experts=has_experts), published_traits(self.job)
        weighs_early = traits.code is not None and traits.code.name == "megatron" and traits.code.year > 2024
        return dataclasses.replace(
            found,
            # A token's weight is multiplied in before an expert's last product, whose output no backward reads then
            # (Megatron-LM's experts.py, `permuted_probs`, since core 0.12).
            num_routed=found.num_routed / (2 if weighs_early else 1),
            score_bytes=_score_bytes(traits, DTYPE_BYTES[param_of(config)]),
            mask_bytes=MASK_BYTES if traits.has_dropout else 0.0,
            norm_bytes=float(2 * FP32_BYTES) if traits.saves_norm_in_fp32 else 0.0,
            fuses_gate=traits.fuses_gate and found.is_gated,
            products_share=0.5 if traits.selective == "half" else 1.0,
        )

    def _kept_bytes(self, shape: LayerShape, s: ResolvedConfig, recompute: Recompute) -> float:
        if recompute == "selective" and published_traits(self.job).selective == "all-but-scores":
            return super()._kept_bytes(dataclasses.replace(shape, score_bytes=0.0), s, "none")
        return super()._kept_bytes(shape, s, recompute)

    def head_bytes(self, config: ResolvedConfig) -> HeadBytes:
        """Count all copies of the logits at the peak of the loss."""
        s, traits, shape = config, published_traits(self.job), self.job.shape
        found, tokens = super().head_bytes(config), self.job.seq_len / s.mesh.cp * s.batch.micro_size
        vocab = math.ceil(shape.vocab_size / (s.mesh.tp if traits.splits_logits else 1))
        stream, size = self._feature_bytes(s) * shape.hidden_size, DTYPE_BYTES[param_of(s)]
        made = traits.logits_bytes * vocab * min(tokens, s.context.chunk_tokens or tokens)
        deferred = stream + tokens * size * vocab if defers_weights(s) else 0.0
        given = stream / (s.mesh.tp if s.tensor.sequence_parallel else 1)
        return HeadBytes(given, 0.0, max(made, stream), found.weight, deferred)

    def block_bytes(self, config: ResolvedConfig, *, has_experts: bool) -> BlockBytes:
        """Free what the code's own words of recomputation free, where they are more than a mode."""
        found, again = super().block_bytes(config, has_experts=has_experts), published_traits(self.job).recomputation
        if published_traits(self.job).keeps_frozen_inputs and config.recompute.mode == "none":
            tokens = self.job.seq_len / config.mesh.cp * config.batch.micro_size * DTYPE_BYTES[param_of(config)]
            layer = self._layer_shape(config, has_experts=False)
            unread = tokens * unread_size(self.job, config, layer, has_experts=has_experts)
            found = dataclasses.replace(found, kept=found.kept + unread, whole=found.whole + unread)
        if config.lora.dropout > 0 and not has_experts and published_traits(self.job).code is not None:
            dropped = self.job.seq_len / config.mesh.cp * config.batch.micro_size * self._dropped_bytes(config)
            kept = found.kept + dropped * (config.recompute.mode == "none")
            found = dataclasses.replace(found, kept=kept, whole=found.whole + dropped)
        if published_traits(self.job).is_latent:
            tokens = self.job.seq_len / config.mesh.cp * config.batch.micro_size * DTYPE_BYTES[param_of(config)]
            more = tokens * LATENT_MORE * self.job.shape.num_heads / config.mesh.tp
            kept = found.kept + more * (config.recompute.mode != "full")
            found = dataclasses.replace(found, kept=kept, whole=found.whole + more)
        if published_traits(self.job).norms_heads:
            shape, each_bytes = self.job.shape, 2.0 * FP32_BYTES * published_traits(self.job).saves_norm_in_fp32
            heads = (shape.num_heads + shape.num_kv_heads) * shape.head_dim / config.mesh.tp
            tokens = self.job.seq_len / config.mesh.cp * config.batch.micro_size
            more = tokens * heads * (DTYPE_BYTES[param_of(config)] + each_bytes)
            found = dataclasses.replace(
                found, kept=found.kept + more * (config.recompute.mode == "none"), whole=found.whole + more
            )
        if published_traits(self.job).widens_stream:
            kept, whole = found.kept + found.stream, found.whole + 2 * found.stream
            found = dataclasses.replace(found, kept=kept, whole=whole, stream=2 * found.stream)
        if config.recompute.mode != "selective" or again is None:
            return found
        if not again.freed and not has_experts and published_traits(self.job).code is not None:
            return dataclasses.replace(found, kept=self._saved_bytes(config))
        if has_experts and again.experts and not again.freed:
            return dataclasses.replace(found, kept=found.kept - self._unsaved_bytes(config))
        if not again.freed:
            return found
        s, shape, experts = config, self.job.shape, self.job.shape.experts if has_experts else None
        hidden = shape.hidden_size / (s.mesh.tp if s.tensor.sequence_parallel else 1)
        chosen = experts.num_chosen + experts.num_shared if experts else 0
        sizes = {
            "hidden": hidden,
            "queries": shape.num_heads * shape.head_dim / s.mesh.tp,
            "keys": 2 * shape.num_kv_heads * shape.head_dim / s.mesh.tp,
            "ffn": (experts.ffn_size * chosen if experts else shape.ffn_size) / s.mesh.tp,
            "routed": self._layer_shape(s, has_experts=has_experts).num_routed * hidden,
            "inner": 1.0 if published_traits(self.job).fuses_gate else 2.0,
        }
        tokens = self.job.seq_len / s.mesh.cp * s.batch.micro_size * DTYPE_BYTES[param_of(s)]
        freed = tokens * freed_elements(again.freed, sizes, has_experts=has_experts)
        return dataclasses.replace(found, kept=found.whole - min(freed, found.whole - found.stream))

    def _dropped_bytes(self, s: ResolvedConfig) -> float:
        """Return the bytes of a token's inputs of adapters as dropped out, each with a mask: PEFT drops for each layer.

        See its `tuners/lora/layer.py`.
        """
        adapters = [each for each in with_adapters(self.job.shape.params_of("dense"), s.lora) if is_adapter(each)]
        inputs = sum(each.split(s.mesh.tp).local_shape[1] for each in adapters if ".lora_A" in each.name)
        return inputs * (DTYPE_BYTES[param_of(s)] + MASK_BYTES)

    def _saved_bytes(self, s: ResolvedConfig) -> float:
        """Return what torchtitan's choice of ops saves: wq, wv, w1, attention, the input, and w2 unless compiled.

        A compiler drops what no backward reads, as w2's output.
        """
        shape = self.job.shape
        hidden = (2 - s.compile.enabled) * shape.hidden_size / (s.mesh.tp if s.tensor.sequence_parallel else 1)
        heads = (2 * shape.num_heads + shape.num_kv_heads) * shape.head_dim + 2 * shape.num_heads  # lse is fp32
        return (
            self.job.seq_len
            / s.mesh.cp
            * s.batch.micro_size
            * DTYPE_BYTES[param_of(s)]
            * (hidden + (heads + shape.ffn_size) / s.mesh.tp)
        )

    def _unsaved_bytes(self, s: ResolvedConfig) -> float:
        """Return the half of experts' wide tensors that is counted as saved, less what their exchange brought."""
        experts = self.job.shape.experts
        if experts is None:
            return 0.0
        tokens = self.job.seq_len / s.mesh.cp * s.batch.micro_size * DTYPE_BYTES[param_of(s)] / s.mesh.tp
        brought = experts.num_chosen * self.job.shape.hidden_size if s.mesh.ep > 1 else 0
        return tokens * (experts.num_chosen * experts.ffn_size - brought)

    def _of_device(self, config: ResolvedConfig, moving_bytes: float) -> dict[str, float]:
        """Leave out torch's kernels and its allocator where the code has neither."""
        found, code = super()._of_device(config, moving_bytes), published_traits(self.job).code
        if code is None or not code.is_graphed:
            return found
        return {"overhead": found["overhead"] - CONTEXT_BYTES / 2, "rounding": 0.0}

    def _scale_bytes(self, config: ResolvedConfig, rank: int) -> float:
        """Return those of bitsandbytes, which does not quantize scales again unless it is asked to."""
        return super()._scale_bytes(config, rank) * (4 / 64 / SCALE_BYTES if published_traits(self.job).code else 1.0)

    def _states(self, config: ResolvedConfig, rank: int, here: Mapping[str, int]) -> dict[str, float]:
        traits, states = published_traits(self.job), super()._states(config, rank, here)
        numel, shape = self.layouts.rank(config, rank).numel, self.job.shape
        states["params"] *= traits.params_share
        states["optimizer"] *= traits.optimizer_share
        if traits.shards_at_rest:
            states["params"] = states["params"] / config.mesh.dp_shard + DTYPE_BYTES[param_of(config)] * numel
        if trains_all(config) and traits.unsharded_grad_bytes:
            waits = traits.reduces_once and config.zero.stage >= 2  # until the last micro-batch there are no others
            states["grads"] = (0.0 if waits else states["grads"]) + traits.unsharded_grad_bytes * numel
        if traits.widens_stream and not traits.casts_weights:  # the tables too
            states["params"] += 2 * DTYPE_BYTES["bf16"] * shape.vocab_size * shape.hidden_size / (1 + shape.is_tied)
        if (traits.packs_experts or traits.fetches_experts) and shape.experts is not None:
            stored = sum(
                fold.count * param.numel / fold.group.num_shards
                for fold in self.layouts.rank(config, rank).folds
                for param in fold.group.params
                if ".experts." in param.name and ".lora_" not in param.name
            )
            held = min(1.0, NUM_GROUPS_HELD / shape.num_expert_layers) if traits.fetches_experts else 1.0
            narrow = held * expert_bytes(traits)
            states["params"] -= stored * (DTYPE_BYTES["bf16"] * traits.params_share - narrow)
        if traits.frees_grads:
            states["grads"] = 0.0
        if tables := saved_tables(self.job):
            shards = config.mesh.dp_shard if config.zero.stage else 1
            states["params"] += DTYPE_BYTES["bf16"] * tables
            states["grads"] += DTYPE_BYTES["bf16"] * tables / (shards if config.zero.stage > 1 else 1)
            states["optimizer"] += 3 * FP32_BYTES * traits.optimizer_share * tables / shards
        more = (1 - 1 / config.mesh.tp) * shape.vocab_size * shape.hidden_size if traits.whole_embedding else 0.0
        return {name: size * (1 + more / numel) for name, size in states.items()}

    def _step_bytes(self, config: ResolvedConfig, folds: FoldedLayout) -> float:
        return super()._step_bytes(config, folds) if published_traits(self.job).widens_grads else 0.0


def expert_bytes(traits: PublishedTraits) -> float:
    """Return the bytes of a stored element of an expert."""
    return PACKED_EXPERT_BYTES if traits.packs_experts else DTYPE_BYTES["bf16"] * traits.params_share


def saved_tables(job: PlanJob) -> float:
    """Return the elements of tables that train whole beside adapters: PEFT copies a module that is to be saved (peft,
    `ModulesToSaveWrapper`).
    """
    shape = job.shape
    return published_traits(job).saves_tables * shape.vocab_size * shape.hidden_size * (2.0 - shape.is_tied)


def largest_share(shape: ModelShape) -> float:
    """Return the share of a dense block's elements that its largest weight has."""
    num_matrices = 3 if shape.ffn == "gated" else 2
    attention = 2 * shape.head_dim * (shape.num_heads + shape.num_kv_heads)
    return shape.ffn_size / (attention + num_matrices * shape.ffn_size)


def layers_between(cut: Sequence[str], shape: ModelShape) -> tuple[int, ...]:
    """Count the blocks of each stage, where every stage but the first begins with a named module: a block or the head.

    The last may have none, and the norm.
    """
    indices = [name.removeprefix("blocks.") for name in cut]
    starts = [int(index) if index.isdecimal() else shape.num_layers for index in indices]
    return tuple(stop - start for start, stop in itertools.pairwise((0, *starts, shape.num_layers)))


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Spread blocks evenly over stages; what is left over goes to the stages in the middle.

    >>> even_layers(14, 4)
    (3, 4, 4, 3)
    """
    each, left = divmod(num_layers, num_stages)
    middle_first = sorted(range(num_stages), key=lambda stage: (abs(2 * stage - num_stages + 1), stage))
    extra = set(middle_first[:left])
    return tuple(each + (stage in extra) for stage in range(num_stages))
