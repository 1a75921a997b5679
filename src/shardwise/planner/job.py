"""Describe what is to be priced: a job, one way to split it, and how the code that runs it works.

    PlanJob          the model's shape, tokens of a sequence, samples of a step, the cluster
    Strategy         how that is split over ranks, memories and time; what a config says in its sections
    FrameworkTraits  facts about the code that runs it; `SHARDWISE` are ours, published runs used other code
    ModelSource      what a file says of a job: ours, a model's, another tool's

>>> Strategy(tp=2, pp=2, dp_shard=4, micro_size=1, num_micro_batches=8).num_ranks
16
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from shardwise.config.resolve import Config, Dtype, LoraConfig, Reduce, Tier
from shardwise.layout.precision import GatherCodec, StatesDtype
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
    reduce: Reduce = "param"
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

    Runs of other frameworks are priced by `benchmarks/planner_eval`, whose subclass has further facts. These are read
    in the midst of the models' sums, so that both need them here.

    Attributes:
        attention: what the kernel saves.
        logits_bytes: bytes that each logit takes at the peak of the loss, all copies together; 0 where they never exist
            whole, None where they and their gradient do in the parameters' dtype, as in our loss.
        splits_logits: whether each tp rank has its part of the vocabulary's logits alone.
        is_compiled: whether element-wise kernels are fused.
        overlaps_data: whether gradients are reduced and parameters gathered while others compute.
        steps_in_backward: whether parameters are stepped as soon as their gradients are there; not where gradients are
            clipped by the norm of all.
        overlaps_tensor: whether tensor-parallel collectives run while a product's other part is computed.
        saves_norm_in_fp32: whether norms keep a widened copy of their input.
        has_dropout: whether masks are kept.
        expert_imbalance: tokens of the fullest rank of experts over the mean, where `ep` splits them.
        selective: what selective recomputation keeps: the outputs of matrix products and attention, those of every
            other product and attention, or all but the scores of attention.
        fuses_gate: whether the activated gate is made again from the gate, not kept.
        reduces_in_place: whether gradients of weights are added where they are stored, and, where they are stored
            whole, are sent from there, through no other buffer.
        is_own: whether it is this library's: its loss, where `logits_bytes` is None, its pool of buffers, its tables of
            angles for each micro-batch, its first block that splits sequences.
    """

    attention: Attention = "flash"
    logits_bytes: float | None = None
    splits_logits: bool = True
    is_compiled: bool = False
    overlaps_data: bool = True
    steps_in_backward: bool = False
    overlaps_tensor: bool = False
    saves_norm_in_fp32: bool = False
    has_dropout: bool = False
    expert_imbalance: float = 1.2
    selective: Literal["products", "half", "all-but-scores"] = "products"
    fuses_gate: bool = False
    reduces_in_place: bool = False
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
        states: how the optimizer's moments are stored, as `precision.states`.
        gather_codec: how parameters are sent to where they are used, as `precision.gather`.
        secondary_shard: ranks that share secondary shards in stage 3, as `zero.secondary_shard`; 0 for none.
        reduce_feedback: whether what encoding gradients rounds off is kept, as `precision.reduce_feedback`.
        keep_whole_below: elements below which ZeRO-3 keeps a parameter whole.
        replicate_frozen: whether every rank keeps frozen parameters whole.
        lora: the adapters that train beside frozen weights; of rank 0, all weights train.
    """

    shape: ModelShape
    seq_len: int
    global_batch: int
    cluster: Cluster
    traits: FrameworkTraits = SHARDWISE
    optimizer: str = "adamw"
    states: StatesDtype = "master"
    gather_codec: GatherCodec = "param"
    secondary_shard: int = 0
    reduce_feedback: bool = False
    keep_whole_below: int = 0
    replicate_frozen: bool = False
    lora: LoraConfig = field(default_factory=LoraConfig)

    @property
    def trains_all(self) -> bool:
        """Say whether all weights have gradients and optimizer states."""
        return self.lora.rank == 0

    @property
    def tokens(self) -> int:
        """Return the tokens of an optimizer step, all ranks together."""
        return self.global_batch * self.seq_len


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Describe a job as a file does, ours or another tool's; what it leaves open is None or missing.

    Attributes:
        shape: of the model; None where the file names none.
        config: the user's own, from which the plan's config starts.
        given: keys that the user's config sets.
        settings: of another tool's strategy, by dotted key of our config.
        seq_len: tokens of a sequence.
        global_batch: sequences of an optimizer step.
        longest: the longest sequence that the model is made for, in tokens.
        ep: ranks over which experts are split.
        notes: what was read differently than it was written, or left out, for people.
    """

    shape: ModelShape | None = None
    config: Config = field(default_factory=Config)
    given: frozenset[str] = frozenset()
    settings: Mapping[str, object] = field(default_factory=dict)
    seq_len: int | None = None
    global_batch: int | None = None
    longest: int | None = None
    ep: int = 1
    notes: tuple[str, ...] = ()

    @property
    def assignments(self) -> list[str]:
        """Return the settings as `Config.override` takes them.

        >>> ModelSource(settings={"zero.stage": 3, "precision.param": "bf16"}).assignments
        ['zero.stage=3', 'precision.param="bf16"']
        """
        return [f"{key}={json.dumps(value)}" for key, value in self.settings.items()]
