"""Read the words of recomputation of other codes: what a block does not keep, and what runs again for it.

A word frees tensors of a block and names the operations that make them again. Sizes are elements a token, of a block on
one rank: `hidden`, `queries`, `keys` (both keys and values), `ffn` and `routed`, the copies for its experts.

>>> sorted(recomputation_of("selective modules: moe_act layernorm", "megatron").freed)
['expert_act', 'expert_norm']
>>> recomputation_of("selective, per op (torchtitan's default)", "torchtitan").products
('key', 'out', 'up')
>>> recomputation_of("full", "megatron") is None
True
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """Say what a block frees, and what its backward runs again.

    Attributes:
        freed: names of tensors, as `freed_elements` has them.
        products: matrix products that run again: query, key, value, out, gate, up, down.
        attention, dense, experts: whether attention, the dense feed-forward, the experts with their exchange do.
        exchange: whether experts that run again also send their tokens again.
        streams: whether norms, activation and rotation do.
    """

    freed: frozenset[str] = frozenset()
    products: tuple[str, ...] = ()
    attention: bool = False
    dense: bool = False
    experts: bool = False
    exchange: bool = False
    streams: bool = False

    def __or__(self, other: Recomputation) -> Recomputation:
        return Recomputation(
            freed=self.freed | other.freed,
            products=tuple(sorted({*self.products, *other.products})),
            attention=self.attention or other.attention,
            dense=self.dense or other.dense,
            experts=self.experts or other.experts,
            exchange=self.exchange or other.exchange,
            streams=self.streams or other.streams,
        )


# Megatron-LM's `--recompute-modules` (transformer_config.py, transformer_layer.py, experts.py, moe_layer.py): attention
# that is fused keeps no scores, so that its recomputation frees nothing and runs it once more; Transformer Engine fuses
# a dense layer's norms with the product after it, which leaves those before experts; `mlp` is that of dense layers.
_MEGATRON: Final[Mapping[str, Recomputation]] = MappingProxyType(
    {
        "core_attn": Recomputation(attention=True),
        "layernorm": Recomputation(freed=frozenset({"expert_norm"}), streams=True),
        "moe_act": Recomputation(freed=frozenset({"expert_act"}), streams=True),
        "moe": Recomputation(
            freed=frozenset({"expert_inputs", "expert_wide", "expert_act"}), experts=True, exchange=True
        ),
        "mlp": Recomputation(freed=frozenset({"dense_wide", "dense_act"}), dense=True),
        "mla_up_proj": Recomputation(freed=frozenset({"qkv"}), products=("key", "query", "value")),
    }
)
# prime-rl's `ac.targets` (trainer/models/layers/checkpointing.py): the exchange of experts is not run again.
_PRIME_RL: Final[Mapping[str, Recomputation]] = MappingProxyType(
    {
        "norm": Recomputation(freed=frozenset({"norms"}), streams=True),
        "attn_proj": Recomputation(freed=frozenset({"qkv", "sums"}), products=("key", "out", "query", "value")),
        "mla_up_proj": Recomputation(freed=frozenset({"qkv"}), products=("key", "query", "value")),
        "mlp": Recomputation(freed=frozenset({"dense_wide", "dense_act"}), dense=True),
        "routed_experts": Recomputation(freed=frozenset({"expert_wide", "expert_act"}), experts=True),
    }
)
# LLMQ's flags (README and src/models/llama_model.cpp): of the feed-forward, of the projections, of attention.
_LLMQ: Final[Mapping[str, Recomputation]] = MappingProxyType(
    {
        "recompute-swiglu": Recomputation(freed=frozenset({"act"}), streams=True),
        "recompute-norm": Recomputation(freed=frozenset({"norms"}), streams=True),
        "recompute-ffn": Recomputation(freed=frozenset({"wide", "act"}), products=("gate", "up"), streams=True),
        "recompute-qkv": Recomputation(freed=frozenset({"qkv"}), products=("key", "query", "value")),
        "recompute-att": Recomputation(
            freed=frozenset({"qkv", "mixed"}), products=("key", "query", "value"), attention=True
        ),
    }
)
# MaxText's `remat_policy` (layers/decoders.py): the names that jax keeps beside a layer's input; the rest runs again.
_MAXTEXT: Final[Mapping[str, Recomputation]] = MappingProxyType(
    {
        "minimal_with_context": Recomputation(freed=frozenset({"norms", "act"}), streams=True),
        "minimal_flash": Recomputation(freed=frozenset({"norms", "act"}), streams=True),
        "save_dot_with_context_except_mlp": Recomputation(
            freed=frozenset({"norms", "wide", "act"}), products=("gate", "up"), streams=True
        ),
        "save_dot_except_mlp": Recomputation(
            freed=frozenset({"norms", "wide", "act", "mixed"}), products=("gate", "up"), attention=True, streams=True
        ),
        # What is sent to the host is fetched again.
        "minimal_offloaded": Recomputation(
            freed=frozenset({"norms", "qkv", "mixed", "sums", "wide", "act"}), attention=True, streams=True
        ),
        "minimal": Recomputation(freed=frozenset({"norms", "act", "mixed"}), attention=True, streams=True),
        "save_qkv_proj": Recomputation(
            freed=frozenset({"norms", "wide", "act", "mixed", "sums"}),
            products=("gate", "out", "up"),
            attention=True,
            streams=True,
        ),
        "qkv_proj_offloaded": Recomputation(
            freed=frozenset({"norms", "qkv", "wide", "act", "mixed", "sums"}),
            products=("gate", "out", "up"),
            attention=True,
            streams=True,
        ),
        "save_out_proj": Recomputation(
            freed=frozenset({"norms", "qkv", "wide", "act", "mixed"}),
            products=("gate", "key", "query", "up", "value"),
            attention=True,
            streams=True,
        ),
    }
)
# Torchtitan's SelectiveAC saves every second matrix product, in the order of a block: wq, wk, wv, wo, w1, w3, w2
# (distributed/activation_checkpoint.py); what that leaves is the trait `half`. What it saves has all-to-alls,
# no grouped product, and until 2026 no attention of cuDNN.
_PER_OP: Final = Recomputation(products=("key", "out", "up"), streams=True, experts=True)


# Surogate's blocks under adapters (docs/design/dsl-driven-recompute.md): all but the product after the activation.
_ALL_BUT_DOWN: Final = Recomputation(
    freed=frozenset({"norms", "qkv", "mixed", "sums", "wide", "act"}),
    products=("gate", "key", "out", "query", "up", "value"),
    attention=True,
    experts=True,
    streams=True,
)


def recomputation_of(written: str | None, code: str, *, saves_attention: bool = True) -> Recomputation | None:
    """Return what words of a code mean; None where they are those of a whole block, of none, or unknown.

    Args:
        written: the row's words.
        code: the framework's name, as `codes.code_of` has it.
        saves_attention: whether what selects ops knows the kernel of attention.
    """
    text = (written or "").lower()
    if code == "maxtext" or re.search(r"\bsave_|\bminimal_|proj_offloaded", text):
        return next((found for word, found in _MAXTEXT.items() if word in text), None)
    if "intermediates within a block" in text:
        return _ALL_BUT_DOWN
    if re.search(r"per.op\b|\(op\)|selectiveac", text):
        return _PER_OP if saves_attention else dataclasses.replace(_PER_OP, attention=True)
    table = {"engine": _LLMQ, "prime-rl": _PRIME_RL}.get(code, _MEGATRON)
    words = set(re.findall(r"[a-z_-]+", text))
    found = [each for word, each in table.items() if word in words]
    is_list = bool(re.search(r"modules|targets|selective|_", text)) or code == "engine"
    if not found or not is_list or re.search(r"\bfull\b|recompute-block", text):
        return None
    total = found[0]
    for each in found[1:]:
        total |= each
    return total


def freed_elements(freed: frozenset[str], sizes: Mapping[str, float], *, has_experts: bool) -> float:
    """Return the elements a token that a block frees.

    Args:
        freed: names of tensors.
        sizes: of `hidden`, `queries`, `keys`, `ffn`, `routed`, and `inner`, the copies of the activation that are kept.
        has_experts: whether the feed-forward is experts.
    """
    hidden, ffn = sizes["hidden"], sizes["ffn"]
    of_any = {
        "norms": 2 * hidden,
        "qkv": sizes["queries"] + sizes["keys"],
        "mixed": sizes["queries"],
        "sums": hidden,
        "wide": 2 * ffn,
        "act": sizes["inner"] * ffn,
    }
    of_kind = {
        "expert_norm": has_experts * hidden,
        "expert_inputs": has_experts * 2 * sizes["routed"],
        "expert_wide": has_experts * 2 * ffn,
        "expert_act": has_experts * sizes["inner"] * ffn,
        "dense_wide": (not has_experts) * 2 * ffn,
        "dense_act": (not has_experts) * sizes["inner"] * ffn,
    }
    return sum({**of_any, **of_kind}[name] for name in freed)
