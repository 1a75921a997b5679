"""Describe what is to be priced: a job, and how the code that runs it works. A `ResolvedConfig` says how it is split.

ModelShape       sizes of a transformer; more than `shardwise.models.Decoder` can be: experts, biases, positions
PlanJob          the model's shape, tokens of a sequence, samples of a step, the cluster
FrameworkTraits  facts about the code that runs it; `SHARDWISE` are ours, published runs used other code
ModelSource      what a file says of a job: ours, a model's, another tool's
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Literal

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config, Dtype, ResolvedConfig
from shardwise.config.sections import MAX_LAYERS, Section
from shardwise.models.presets import DecoderConfig
from shardwise.planner.hardware import Cluster
from shardwise.schedule.formulas import training_flops_per_token


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Describe the experts of each layer's feed-forward, in all layers but the first `num_dense_layers`.

    Attributes:
        num_experts: experts that a token may be sent to.
        num_chosen: experts that it is sent to.
        num_shared: further experts that every token passes.
    """

    num_experts: int
    num_chosen: int
    ffn_size: int
    num_shared: int = 0
    num_dense_layers: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Hold the sizes of a decoder-only transformer, whole, before anything is split.

    Attributes:
        head_dim: need not be hidden_size / num_heads.
        ffn: gated, of three matrices (SwiGLU), or plain, of two.
        is_tied: whether the head multiplies by the embedding.
        has_biases: whether all linear layers and norms have biases.
        num_positions: rows of a learned table of positions; 0 for rotary ones.
        window: keys that a query sees at most; None for all before it.
        experts: stand in for the dense feed-forward; None where it is dense.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    ffn: Literal["gated", "plain"] = "gated"
    is_tied: bool = False
    has_biases: bool = False
    num_positions: int = 0
    window: int | None = None
    experts: Experts | None = None
    name: str = "model"

    def __post_init__(self) -> None:
        if self.num_layers > MAX_LAYERS:
            raise ConfigError(
                "too-many-layers", f"{self.name} has {self.num_layers:,} layers; give a model of at most {MAX_LAYERS:,}"
            )

    @classmethod
    def of_decoder(cls, config: DecoderConfig, name: str = "decoder") -> ModelShape:
        """Return the shape of our own decoder."""
        return cls(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            ffn_size=config.ffn_size,
            vocab_size=config.vocab_size,
            is_tied=config.tie_embeddings,
            name=name,
        )

    @property
    def num_ffn_matrices(self) -> int:
        """Return the number of matrices of one feed-forward."""
        return 3 if self.ffn == "gated" else 2

    @property
    def num_expert_layers(self) -> int:
        """Return the number of layers whose feed-forward is experts."""
        return 0 if self.experts is None else self.num_layers - self.experts.num_dense_layers

    @property
    def attention_params(self) -> int:
        """Return the elements of one layer's four attention matrices."""
        return 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)

    @property
    def num_params(self) -> int:
        """Return the elements of all parameters, tied ones once."""
        hidden, ffns = self.hidden_size, self.num_ffn_matrices
        norms = (4 if self.has_biases else 2) * hidden
        dense = ffns * hidden * self.ffn_size
        biases = 0
        if self.has_biases:
            biases = self.head_dim * (self.num_heads + 2 * self.num_kv_heads) + 2 * hidden + (ffns - 1) * self.ffn_size
        blocks = self.num_layers * (self.attention_params + norms + biases)
        blocks += (self.num_layers - self.num_expert_layers) * dense
        if self.experts is not None:
            expert_numel = ffns * hidden * self.experts.ffn_size
            one = (
                self.experts.num_experts + self.experts.num_shared
            ) * expert_numel + hidden * self.experts.num_experts
            blocks += self.num_expert_layers * one
        tables = (1 if self.is_tied else 2) * self.vocab_size * hidden + self.num_positions * hidden
        return blocks + tables + (2 if self.has_biases else 1) * hidden

    @property
    def num_matmul_params(self) -> int:
        """Return the elements of the matrices that multiply each token: the head's are included, a lookup's are not."""
        hidden, ffns = self.hidden_size, self.num_ffn_matrices
        total = self.num_layers * self.attention_params + self.vocab_size * hidden
        total += (self.num_layers - self.num_expert_layers) * ffns * hidden * self.ffn_size
        if self.experts is not None:
            taken = self.experts.num_chosen + self.experts.num_shared
            total += self.num_expert_layers * hidden * (ffns * taken * self.experts.ffn_size + self.experts.num_experts)
        return total

    def flops_per_token(self, seq_len: int, *, is_causal_halved: bool = False, trains_all: bool = True) -> float:
        """Return the FLOPs of forward and backward for one token, as `training_flops_per_token` counts them.

        Args:
            is_causal_halved: whether half of the attention's matrix products are left out, since keys after a query
                do not count.
            trains_all: whether the gradients of all weights are computed.
        """
        keys = seq_len if self.window is None else min(seq_len, 2 * self.window)
        width = self.num_layers * self.num_heads * self.head_dim
        num_keys = keys / 2 if is_causal_halved else keys
        return training_flops_per_token(self.num_matmul_params, width, num_keys, trains=trains_all)


Attention = Literal["flash", "fused-softmax", "unfused"]
"""Flash saves no scores; the fused softmax saves them once; unfused code saves scores, softmax and masks."""

MatmulDtype = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4"]


def changed(config: ResolvedConfig, values: Mapping[str, Any]) -> ResolvedConfig:
    """Return a resolved config with other values of some dotted keys; the samples of a step follow.

    Values are taken as they are: nothing is checked. Equal changes of equal sections give one object.

    >>> changed(Config().resolve(world_size=4), {"mesh.dp_shard": 2, "mesh.tp": 2}).batch.global_size
    2
    """
    by_section: dict[str, list[tuple[str, Any]]] = {}
    for key, value in values.items():
        section, _, leaf = key.partition(".")
        by_section.setdefault(section, []).append((leaf, value))
    made: dict[str, Any] = {name: _section(getattr(config, name), *leaves) for name, leaves in by_section.items()}
    if "mesh" in made or "batch" in made:
        mesh, batch = made.get("mesh", config.mesh), made.get("batch", config.batch)
        samples = mesh.dp_replicate * mesh.dp_shard * batch.micro_size * batch.accumulation
        made["batch"] = _section(batch, ("global_size", samples))
    return config.model_copy(update=made)


@lru_cache(maxsize=2**14)
def _section(section: Section, *leaves: tuple[str, Any]) -> Section:
    if unknown := {leaf for leaf, _ in leaves} - type(section).model_fields.keys():
        raise KeyError(f"{type(section).__name__} has no {', '.join(unknown)}")
    return section.model_copy(update=dict(leaves))


class SectionNumbers:
    """Number sections, equal ones by the same number: parts of a cache's key that are hashed sooner than a section."""

    def __init__(self) -> None:
        self._numbers: dict[Section, int] = {}
        self._known: dict[int, tuple[Section, int]] = {}  # by id, which stays that of a section that is kept here

    def of(self, section: Section) -> int:
        """Return the number of a section."""
        known = self._known.get(id(section))
        if known is None:
            number = self._numbers.setdefault(section, len(self._numbers))
            known = self._known[id(section)] = section, number
        return known[1]


def num_data_ranks(config: ResolvedConfig) -> int:
    """Return the number of ranks that take different samples."""
    return config.mesh.dp_replicate * config.mesh.dp_shard


def world_size(config: ResolvedConfig) -> int:
    """Return the number of ranks of the whole job."""
    return num_data_ranks(config) * config.mesh.pp * config.mesh.cp * config.mesh.tp


def trains_all(config: ResolvedConfig) -> bool:
    """Say whether all weights have gradients and optimizer states, not adapters alone."""
    return config.lora.rank == 0


def param_of(config: ResolvedConfig) -> Dtype:
    """Return the dtype of the parameters as the model computes with them."""
    return config.precision.param or "fp32"


def product_dtype(config: ResolvedConfig) -> MatmulDtype:
    """Return the dtype of the blocks' matrix products: that of the parameters, or a narrower one."""
    linears = config.precision.linears
    return param_of(config) if linears == "keep" or linears == "fp8-emulated" else linears


@dataclass(frozen=True, kw_only=True)
class FrameworkTraits:
    """State facts about the code that runs a job, which change what it holds and how long it takes.

    Runs of other frameworks are priced by `benchmarks/planner_eval`, whose subclass has further facts. These are read
    in the midst of the models' sums, so that both need them here.

    Attributes:
        logits_bytes: bytes that each logit takes at the peak of the loss, all copies together; 0 where they never exist
            whole, None where they and their gradient do in the parameters' dtype, as in our loss.
        splits_logits: whether each tp rank has its part of the vocabulary's logits alone.
        is_compiled: whether a compiler has fused element-wise kernels.
        overlaps_data: whether gradients are reduced and parameters gathered while others compute.
        overlaps_tensor: whether tensor-parallel collectives run while a product's other part is computed.
        saves_norm_in_fp32: whether norms keep a widened copy of their input.
        has_dropout: whether dropout runs, whose masks are kept for the backward.
        expert_imbalance: tokens of the fullest rank of experts over the mean, where `ep` splits them. The fullest
            expert has 1.04 to 1.72 times the mean (Wang et al. 2024, arXiv 2408.15664, table 2); a rank's several even
            out.
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
    overlaps_tensor: bool = False
    saves_norm_in_fp32: bool = False
    has_dropout: bool = False
    expert_imbalance: float = 1.2
    selective: Literal["products", "half", "all-but-scores"] = "products"
    fuses_gate: bool = False
    reduces_in_place: bool = False
    is_own: bool = True


SHARDWISE: Final = FrameworkTraits()
BASE: Final = Config.from_dict({"zero": {"stage": 0}, "precision": {"param": "bf16"}}).resolve(world_size=1)
"""A config that splits nothing, for half precision."""


@dataclass(frozen=True, kw_only=True)
class PlanJob:
    """Describe a training job: a model, its batch and its cluster.

    Attributes:
        global_batch: sequences of `seq_len` tokens in an optimizer step.
        traits: facts about the code that trains it.
        base: the config that every candidate has, but for the keys that say how it is split; one rank runs it.
        ep: ranks of the data axes over which experts are split; our engine runs none yet.
    """

    shape: ModelShape
    seq_len: int
    global_batch: int
    cluster: Cluster
    traits: FrameworkTraits = SHARDWISE
    base: ResolvedConfig = BASE
    ep: int = 1

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
        settings: of another tool's layout, by dotted key of our config.
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
