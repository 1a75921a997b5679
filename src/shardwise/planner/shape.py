"""Describe a transformer as the planner sees it: sizes, and nothing that computes.

It covers more than `shardwise.models.Decoder`: layers with two feed-forward matrices or three, biases, learned
positions, experts. The planner prices it by the Layout of a skeleton of this shape.

>>> from shardwise.models.presets import preset
>>> shape = ModelShape.of_decoder(preset("llama-3-8b"))
>>> round(shape.num_params / 1e9, 2), round(shape.num_matmul_params / 1e9, 2)
(8.03, 7.5)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.config.resolve import ConfigError
from shardwise.config.sections import MAX_LAYERS
from shardwise.models.decoder import DecoderConfig
from shardwise.schedule.formulas import training_flops_per_token


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Describe the experts of each layer's feed-forward, in all layers but the first `num_dense_layers`.

    Attributes:
        num_experts: experts that a token may be sent to.
        num_chosen: experts that it is sent to.
        ffn_size: of each expert.
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
        experts: instead of a dense feed-forward.
        name: for people.
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
            each = ffns * hidden * self.experts.ffn_size
            one = (self.experts.num_experts + self.experts.num_shared) * each + hidden * self.experts.num_experts
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
            seq_len: tokens of a sequence.
            is_causal_halved: whether half of the attention's matrix products are left out, since keys after a query
                do not count.
            trains_all: whether the gradients of all weights are computed.
        """
        keys = seq_len if self.window is None else min(seq_len, 2 * self.window)
        width = self.num_layers * self.num_heads * self.head_dim
        num_keys = keys / 2 if is_causal_halved else keys
        return training_flops_per_token(self.num_matmul_params, width, num_keys, trains=trains_all)
