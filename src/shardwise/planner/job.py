"""Describe what is to be priced: a job, one way to split it, and how the code that runs it works.

    PlanJob          the model's shape, tokens of a sequence, samples of a step, the cluster
    Strategy         how that is split over ranks, memories and time; what a config says in its sections
    FrameworkTraits  facts about the code that runs it; `SHARDWISE` are ours, published runs used other code

>>> Strategy(tp=2, pp=2, dp_shard=4, micro_size=1, num_micro_batches=8).num_ranks
16
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from shardwise.config.resolve import Dtype, Tier
from shardwise.planner.hardware import Cluster
from shardwise.planner.shape import ModelShape

Attention = Literal["flash", "fused-softmax", "unfused"]
"""Flash saves no scores; the fused softmax saves them once; unfused code saves scores, softmax and masks."""

MatmulDtype = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Say how a job is split; each field is the config's key of that section, or as described here.

    Attributes:
        pp, dp_replicate, dp_shard, cp, tp: ranks along each axis of the mesh; `ep` splits experts over ranks of the
            data axes, and adds none.
        num_micro_batches: of a step, on each data rank (`batch.accumulation`).
        stage_layers: blocks of each stage, in order, where the cut is not the planner's own.
        param, reduce, accumulate: dtypes, as in the `precision` section.
        matmul: dtype of the matrix products, where it is narrower than `param`, as in fp8 training.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    zero_stage: int = 0
    micro_size: int = 1
    num_micro_batches: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    stage_layers: tuple[int, ...] | None = None
    gather: Literal["batch", "micro-batch"] = "batch"
    sequence_parallel: bool = False
    transport: Literal["ring", "all-gather", "ulysses"] = "ring"
    heads_over: int | None = None
    chunk_tokens: int | None = None
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_every: int = 1
    params_tier: Tier = "device"
    grads_tier: Tier = "device"
    optimizer_tier: Tier = "device"
    activations_tier: Literal["device", "host"] = "device"
    params_on_device: float = 0.0
    grads_on_device: float = 0.0
    optimizer_on_device: float = 0.0
    param: Dtype = "bf16"
    reduce: Literal["param", "fp32"] = "param"
    accumulate: Literal["param", "fp32"] = "fp32"
    matmul: MatmulDtype | None = None

    @property
    def num_data_ranks(self) -> int:
        """Return the number of ranks that take different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of the whole job."""
        return self.pp * self.num_data_ranks * self.cp * self.tp

    @property
    def product_dtype(self) -> MatmulDtype:
        """Return the dtype of the matrix products."""
        return self.matmul or self.param

    @property
    def global_batch(self) -> int:
        """Return the samples of a step."""
        return self.num_data_ranks * self.micro_size * self.num_micro_batches


@dataclass(frozen=True, kw_only=True)
class FrameworkTraits:
    """State facts about the code that runs a job, which change what it holds and how long it takes.

    Attributes:
        attention: what the kernel saves.
        logits_bytes: bytes that each logit takes at the peak of the loss, all copies together; 0 where they never exist
            whole, None where they and their gradient do in the parameters' dtype, as in our loss.
        cached_logits_share: share of these bytes in copies that are freed by then and smaller than all that comes after
            them, so that the allocator holds them unused.
        splits_logits: whether each tp rank has its part of the vocabulary's logits alone.
        optimizer_shards: ranks over which the optimizer's states are sharded, where that is not the shard group.
        unsharded_grad_bytes: bytes a parameter of gradients kept whole on every rank, beyond what the stage says.
        reduces_once: whether these whole gradients are reduced after the last micro-batch alone, whatever the stage.
        is_compiled: whether element-wise kernels are fused.
        is_graphed: whether kernels are launched as one graph.
        overlaps_data: whether gradients are reduced and parameters gathered while others compute.
        defers_gathers: whether parameters that a step leaves sharded are gathered while the next forward runs.
        moves_tensors: whether stage 3 gathers parameters and reduces gradients tensor by tensor, not block by block.
        steps_in_backward: whether parameters are stepped as soon as their gradients are there; not where gradients are
            clipped by the norm of all.
        overlaps_tensor: whether tensor-parallel collectives run while a product's other part is computed.
        saves_norm_in_fp32: whether norms keep a widened copy of their input.
        has_dropout: whether masks are kept.
        has_tuned_attention: whether the attention kernel uses what came with Hopper, as FlashAttention-3 does.
        has_first_flash: whether it is the first FlashAttention.
        trains_all: whether all weights have gradients; False where adapters alone are trained.
        selective: what selective recomputation keeps: the outputs of matrix products and attention, those of every
            other product and attention, or all but the scores of attention.
        fuses_gate: whether the activated gate is made again from the gate, not kept.
        reduces_in_place: whether gradients of weights are added where they are stored, and, where they are stored
            whole,
            are sent from there, through no other buffer.
        frees_outputs: whether what a stage has sent on is freed, though its backward is still to come.
        widens_grads: whether the step widens gradients that are stored narrower than the master; not where its kernel
            reads them as they are.
        params_share: share of the bytes of parameters in their dtype that is really stored.
        optimizer_share: share of the bytes of the optimizer's states, the master among them, that is really stored.
        is_own: whether it is this library's: its loss, where `logits_bytes` is None, its pool of buffers, its tables of
            angles for each micro-batch, its first block that splits sequences.
        cuts_evenly: whether all stages have the same number of blocks; otherwise they are cut by cost, as ours are.
    """

    attention: Attention = "flash"
    logits_bytes: float | None = None
    cached_logits_share: float = 0.0
    splits_logits: bool = True
    optimizer_shards: int | None = None
    unsharded_grad_bytes: float = 0.0
    reduces_once: bool = False
    is_compiled: bool = False
    is_graphed: bool = False
    overlaps_data: bool = True
    defers_gathers: bool = True
    moves_tensors: bool = False
    steps_in_backward: bool = False
    overlaps_tensor: bool = False
    saves_norm_in_fp32: bool = False
    has_dropout: bool = False
    has_tuned_attention: bool = False
    has_first_flash: bool = False
    trains_all: bool = True
    selective: Literal["products", "half", "all-but-scores"] = "products"
    fuses_gate: bool = False
    cuts_evenly: bool = False
    reduces_in_place: bool = False
    frees_outputs: bool = False
    widens_grads: bool = True
    params_share: float = 1.0
    optimizer_share: float = 1.0
    is_own: bool = True


SHARDWISE: Final = FrameworkTraits()


@dataclass(frozen=True, kw_only=True)
class PlanJob:
    """Describe a training job: a model, its batch and its cluster.

    Attributes:
        seq_len: tokens of a sequence.
        global_batch: sequences of an optimizer step.
        traits: facts about the code that trains it.
        optimizer: its name, which says what states it keeps.
    """

    shape: ModelShape
    seq_len: int
    global_batch: int
    cluster: Cluster
    traits: FrameworkTraits = SHARDWISE
    optimizer: str = "adamw"

    @property
    def tokens(self) -> int:
        """Return the tokens of an optimizer step, all ranks together."""
        return self.global_batch * self.seq_len
