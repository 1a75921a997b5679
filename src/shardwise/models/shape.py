"""Describe the shape of a transformer: its sizes, the parameters of each kind of its units, and what they cost.

ModelShape     more than `shardwise.models.Decoder` can be: experts, biases, positions
ModelSource    what a file says of a model and its job: ours, a model's, another tool's
with_adapters  the parameters of a layer, and LoRA's beside them

>>> from shardwise.models.presets import preset
>>> f"{num_params(preset('llama-405b')):,}"
'405,853,388,800'
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final, Literal

from shardwise.attention.from_config import structure_of
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config, LoraConfig
from shardwise.config.sections import MAX_LAYERS
from shardwise.layout.facts import ExpertDim
from shardwise.layout.tp_sharding import FusedPart, ParamSplit
from shardwise.models.presets import DecoderConfig
from shardwise.schedule.formulas import training_flops_per_token


@dataclass(frozen=True, kw_only=True)
class ExpertsShape:
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
class SkeletonParam:
    """Describe one parameter of a unit, by its name within it.

    Attributes:
        dim: along which tp splits it into `part`; None where every rank holds all of it.
        experts: how it is made of experts, among whom `mesh.ep` divides it; None for a parameter of no experts.
        is_packed: whether its elements are stored in 4 bits each, as bytes (`lora.base = "nf4"`).
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    part: FusedPart | None = None
    experts: ExpertDim | None = None
    is_packed: bool = False

    @property
    def numel(self) -> int:
        """Return its elements."""
        return math.prod(self.shape)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Return the shape of what is stored: of the bytes, where it is packed."""
        return ((self.numel + 1) // 2, 1) if self.is_packed else self.shape

    def split(self, tp: int) -> ParamSplit:
        """Return its split over the tensor-parallel group."""
        return ParamSplit(self.shape, tp, self.dim, () if self.part is None else (self.part,))


UnitKind = Literal["dense", "experts", "tokens", "positions", "norm", "head"]
"""Blocks, without experts and with them; the tables of tokens and of positions; the norm after the blocks; the head."""


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
    experts: ExpertsShape | None = None
    name: str = "model"

    def __post_init__(self) -> None:
        if self.num_layers > MAX_LAYERS:
            raise ConfigError(
                "too-many-layers", f"{self.name} has {self.num_layers:,} layers; give a model of at most {MAX_LAYERS:,}"
            )

    @classmethod
    def of_decoder(cls, config: DecoderConfig, name: str = "decoder") -> ModelShape:
        """Return the shape of our own decoder."""
        experts = ExpertsShape(
            num_experts=config.num_experts,
            num_chosen=config.num_chosen,
            ffn_size=config.size_of_expert,
            num_shared=config.num_shared_experts,
        )
        return cls(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            ffn_size=config.ffn_size,
            vocab_size=config.vocab_size,
            is_tied=config.tie_embeddings,
            experts=experts if config.num_experts else None,
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
    def blocks(self) -> dict[UnitKind, int]:
        """Return the number of blocks of each kind."""
        return {"dense": self.num_layers - self.num_expert_layers, "experts": self.num_expert_layers}

    def params_of(self, kind: UnitKind) -> tuple[SkeletonParam, ...]:
        """List the parameters of a unit, in the order of its module; the head's as if it were not tied."""
        vocab, hidden = FusedPart(self.vocab_size, is_padded=True), self.hidden_size
        if kind == "positions":
            table = SkeletonParam(name="positions.weight", shape=(self.num_positions, hidden))
            return (table,) if self.num_positions else ()
        if kind == "norm":
            return tuple(_norm(self, "norm"))
        if kind in ("tokens", "head"):
            name = f"{'embed' if kind == 'tokens' else kind}.weight"
            return (SkeletonParam(name=name, shape=(self.vocab_size, hidden), dim=0, part=vocab),)
        ffn = _expert_params(self) if kind == "experts" else _ffn_params(self, "ffn", self.ffn_size)
        return (*_norm(self, "attention_norm"), *_attention_params(self), *_norm(self, "ffn_norm"), *ffn)

    @cached_property
    def num_params(self) -> int:
        """Return the elements of all parameters, tied ones once."""
        counts = {**self.blocks, "tokens": 1, "positions": 1, "norm": 1, "head": int(not self.is_tied)}
        return sum(
            count * sum(param.numel for param in self.params_of(kind)) for kind, count in counts.items() if count
        )

    @cached_property
    def num_expert_params(self) -> int:
        """Return the elements of all experts' parameters, which `mesh.ep` divides."""
        if self.experts is None:
            return 0
        return self.num_expert_layers * sum(param.numel for param in self.params_of("experts") if param.experts)

    @cached_property
    def num_matmul_params(self) -> int:
        """Return the elements of the matrices that multiply each token: the head's are included, a lookup's are not."""
        inner = sum(count * self.matmul_numel(kind) for kind, count in self.blocks.items() if count)
        return inner + self.matmul_numel("head")

    def matmul_numel(self, kind: UnitKind) -> int:
        """Return the elements of a unit's matrices that multiply each token; of the experts, of the chosen ones."""
        chosen, every = (1, 1) if self.experts is None else (self.experts.num_chosen, self.experts.num_experts)
        return sum(
            param.numel * chosen // every if param.experts else param.numel
            for param in self.params_of(kind)
            if len(param.shape) > 1
        )

    def num_keys_read(self, num_keys: float) -> float:
        """Return the keys, of so many, that a query is multiplied by: masked ones of its window's tiles included."""
        return num_keys if self.window is None else min(num_keys, 2 * self.window)

    def flops_per_token(self, num_keys: float, *, is_causal_halved: bool = False, trains_all: bool = True) -> float:
        """Return the FLOPs of forward and backward for one token, as `training_flops_per_token` counts them.

        Args:
            num_keys: those of a sequence: its tokens, or of sparse attention as many as a query sees.
            is_causal_halved: whether half of the attention's matrix products are left out, since keys after a query
                do not count.
            trains_all: whether the gradients of all weights are computed.
        """
        keys, width = self.num_keys_read(num_keys), self.num_layers * self.num_heads * self.head_dim
        keys = keys / 2 if is_causal_halved else keys
        return training_flops_per_token(self.num_matmul_params, width, keys, trains=trains_all)


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Describe a job as a file does, ours or another tool's; what it leaves open is None or missing.

    Attributes:
        shape: of the model; None where the file names none.
        config: the user's own, from which the plan's config starts.
        given: keys that the user's config sets.
        settings: of another tool's layout, by dotted key of our config.
        longest: the longest sequence that the model is made for, in tokens.
        notes: what was read differently than it was written, or left out, for people.
    """

    shape: ModelShape | None = None
    config: Config = field(default_factory=Config)
    given: frozenset[str] = frozenset()
    settings: Mapping[str, object] = field(default_factory=dict)
    seq_len: int | None = None
    global_batch: int | None = None
    longest: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def assignments(self) -> list[str]:
        """Return the settings as `Config.override` takes them.

        >>> ModelSource(settings={"zero.stage": 3, "precision.param": "bf16"}).assignments
        ['zero.stage=3', 'precision.param="bf16"']
        """
        return [f"{key}={json.dumps(value)}" for key, value in self.settings.items()]


def num_params(config: DecoderConfig) -> int:
    """Return the number of parameters of our decoder; tied embeddings count once."""
    return ModelShape.of_decoder(config).num_params


def flops_per_token(config: DecoderConfig, seq_len: int) -> int:
    """Return the model FLOPs of our decoder's forward and backward for one token of a sequence.

    Of experts, those count that a token is sent to. Dense attention counts in full, although the causal mask saves half
    of it; block-sparse attention counts the pairs of tokens that are visible, exactly.
    """
    structure = structure_of(config.attention, config.num_heads)
    num_keys = seq_len if structure is None else seq_len * structure.layout(seq_len).density
    return round(ModelShape.of_decoder(config).flops_per_token(num_keys))


def _norm(shape: ModelShape, name: str) -> Iterator[SkeletonParam]:
    yield SkeletonParam(name=f"{name}.weight", shape=(shape.hidden_size,))
    if shape.has_biases:
        yield SkeletonParam(name=f"{name}.bias", shape=(shape.hidden_size,))


def _attention_params(shape: ModelShape) -> Iterator[SkeletonParam]:
    query = FusedPart(shape.num_heads * shape.head_dim, shape.num_heads)
    kv = FusedPart(shape.num_kv_heads * shape.head_dim, shape.num_kv_heads)
    for name, split in (("query", query), ("key", kv), ("value", kv)):
        yield from _linear(shape, f"attention.{name}", (split.size, shape.hidden_size), 0, split)
    yield from _linear(shape, "attention.out", (shape.hidden_size, query.size), 1, query)


def _ffn_params(shape: ModelShape, name: str, ffn_size: int) -> Iterator[SkeletonParam]:
    split = FusedPart(ffn_size)
    for column in ("gate", "up") if shape.ffn == "gated" else ("up",):
        yield from _linear(shape, f"{name}.{column}", (ffn_size, shape.hidden_size), 0, split)
    yield from _linear(shape, f"{name}.down", (shape.hidden_size, ffn_size), 1, split)


def _expert_params(shape: ModelShape) -> Iterator[SkeletonParam]:
    experts = shape.experts
    if experts is None:
        return
    yield SkeletonParam(name="ffn.router.weight", shape=(experts.num_experts, shape.hidden_size))
    if experts.num_shared:
        yield from _ffn_params(shape, "ffn.shared", experts.num_shared * experts.ffn_size)
    num_experts, size, hidden = experts.num_experts, experts.ffn_size, shape.hidden_size
    for name in ("gate", "up", "down") if shape.ffn == "gated" else ("up", "down"):
        matrix = (hidden, size) if name == "down" else (size, hidden)
        yield SkeletonParam(name=f"ffn.experts.{name}", shape=(num_experts, *matrix), experts=ExpertDim(num_experts))


def _linear(shape: ModelShape, name: str, size: tuple[int, int], dim: int, part: FusedPart) -> Iterator[SkeletonParam]:
    """Yield a layer's weight, and its bias, which tp splits where it splits the outputs."""
    yield SkeletonParam(name=f"{name}.weight", shape=size, dim=dim, part=part)
    if shape.has_biases:
        split: dict[str, Any] = {"dim": 0, "part": part} if dim == 0 else {}
        yield SkeletonParam(name=f"{name}.bias", shape=size[:1], **split)


ALL: Final = "all-linear"
# What Hugging Face's models call the layers of the skeleton; one name may stand for several that are fused there.
_NAMES: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "attention.query": frozenset({"q_proj", "qkv_proj", "query_key_value", "c_attn"}),
        "attention.key": frozenset({"k_proj", "qkv_proj", "query_key_value", "c_attn"}),
        "attention.value": frozenset({"v_proj", "qkv_proj", "query_key_value", "c_attn"}),
        "attention.out": frozenset({"o_proj", "out_proj", "dense", "c_proj"}),
        "ffn.router": frozenset({"gate", "router"}),
        "gate": frozenset({"gate_proj", "gate_up_proj"}),
        "up": frozenset({"up_proj", "gate_up_proj", "fc1", "dense_h_to_4h", "c_fc"}),
        "down": frozenset({"down_proj", "fc2", "dense_4h_to_h", "c_proj"}),
    }
)


SCALE_BYTES: Final = 1 / 64 + 4 / (64 * 256)
"""Bytes of scales for an element that is packed: one of a block of 64, and 4 for 256 of these (Dettmers et al. 2023,
arXiv 2305.14314, section 3)."""

PACKED_BYTES: Final = 0.5
"""Bytes of an element that is packed."""


def packed_params(shape: ModelShape, lora: LoraConfig, *, has_experts: bool) -> list[SkeletonParam]:
    """Return the weights of a layer, with experts or without, that are packed in 4 bits."""
    if lora.base == "keep":
        return []
    params = shape.params_of("experts" if has_experts else "dense")
    return [param for param in with_adapters(params, lora) if param.is_packed]


def is_adapter(param: SkeletonParam) -> bool:
    """Say whether a parameter is one of an adapter's matrices."""
    return ".lora_" in param.name


def with_adapters(params: Sequence[SkeletonParam], lora: LoraConfig) -> tuple[SkeletonParam, ...]:
    """Return the parameters of a layer, and after each linear layer that is adapted its two matrices.

    The linear layers themselves are packed where `lora.base` says so; experts, which are no such layers, are not. What
    a layer splits over tensor-parallel ranks, its inputs or its outputs, the matrix on that side splits too.

    Raises:
        ConfigError: no layer has one of the targets' names.
    """
    if not lora.rank:
        return tuple(params)
    targets = {target.rpartition(".")[2] for target in lora.targets}
    known_names = frozenset[str]().union(*_NAMES.values())
    if ALL not in targets and not targets & known_names:
        names = ", ".join(sorted(known_names))
        raise ConfigError("lora-targets-unknown", f"lora.targets={[*lora.targets]} name no layer; use some of {names}")
    adapters: list[SkeletonParam] = []
    for param in params:
        layer = param.name.removesuffix(".weight")
        called = _NAMES.get(layer) or _NAMES.get(layer.rpartition(".")[2], frozenset())
        is_linear = bool(called) and not param.name.endswith(".bias")
        is_packed = is_linear and lora.base == "nf4" and param.experts is None and layer != "ffn.router"
        adapters.append(replace(param, is_packed=is_packed))
        if is_linear and (ALL in targets or called & targets):
            adapters += _beside_experts(param, lora.rank) if param.experts else _beside(param, layer, lora.rank)
    return tuple(adapters)


def _beside(layer: SkeletonParam, layer_name: str, rank: int) -> Iterator[SkeletonParam]:
    outputs, inputs = layer.shape
    for name, shape, dim in (("A", (rank, inputs), 1), ("B", (outputs, rank), 0)):
        split: dict[str, Any] = {"dim": dim, "part": layer.part} if layer.dim == dim else {}
        yield SkeletonParam(name=f"{layer_name}.lora_{name}.weight", shape=shape, **split)


def _beside_experts(experts: SkeletonParam, rank: int) -> Iterator[SkeletonParam]:
    """Yield what PEFT puts beside all experts; it takes gate and up as one weight, of twice the rank."""
    num_experts, outputs, inputs = experts.shape
    num_repeats = rank if experts.name.endswith("down") else 2 * rank
    first, second = ExpertDim(num_experts), ExpertDim(num_experts, 1, num_repeats)
    yield SkeletonParam(name=f"{experts.name}.lora_A.weight", shape=(num_experts * rank, inputs), experts=first)
    wide = (outputs, num_experts * num_repeats)
    yield SkeletonParam(name=f"{experts.name}.lora_B.weight", shape=wide, experts=second)
