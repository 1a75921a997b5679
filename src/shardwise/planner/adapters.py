"""List the matrices that LoRA trains beside frozen linear layers (Hu et al. 2021, arXiv 2106.09685), packed or not.

It is a file of its own since both the states and the time of a job read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from shardwise.config.resolve import ConfigError, LoraConfig
from shardwise.planner.shape import ModelShape
from shardwise.planner.stages import SkeletonParam, block_params

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
    """Return the weights of a layer that are packed in 4 bits.

    Args:
        shape: of the model.
        lora: the adapters, and how their base is stored.
        has_experts: whether the layer's feed-forward is experts.
    """
    if lora.base == "keep":
        return []
    return [each for each in with_adapters(block_params(shape, has_experts=has_experts), lora) if each.is_packed]


def is_adapter(param: SkeletonParam) -> bool:
    """Say whether a parameter is one of an adapter's matrices."""
    return ".lora_" in param.name


def with_adapters(params: Sequence[SkeletonParam], lora: LoraConfig) -> tuple[SkeletonParam, ...]:
    """Return the parameters of a layer, and after each linear layer that is adapted its two matrices.

    The linear layers themselves are packed where `lora.base` says so; experts, which are no such layers, are not. What
    a layer splits over tensor-parallel ranks, its inputs or its outputs, the matrix on that side splits too.

    Args:
        params: of a layer.
        lora: the adapters' rank and the layers that have them.

    Raises:
        ConfigError: no layer has one of the targets' names.
    """
    if not lora.rank:
        return tuple(params)
    targets = {target.rpartition(".")[2] for target in lora.targets}
    known = frozenset[str]().union(*_NAMES.values())
    if ALL not in targets and not targets & known:
        names = ", ".join(sorted(known))
        raise ConfigError("lora-targets-unknown", f"lora.targets={[*lora.targets]} name no layer; use some of {names}")
    found: list[SkeletonParam] = []
    for each in params:
        layer = each.name.removesuffix(".weight")
        called = _NAMES.get(layer) or _NAMES.get(layer.rpartition(".")[2], frozenset())
        is_linear = bool(called) and not each.name.endswith(".bias")
        is_packed = is_linear and lora.base == "nf4" and not each.is_of_experts and layer != "ffn.router"
        found.append(replace(each, is_packed=is_packed))
        if is_linear and (ALL in targets or called & targets):
            found += _beside_experts(each, lora.rank) if each.is_of_experts else _beside(each, layer, lora.rank)
    return tuple(found)


def _beside(layer: SkeletonParam, layer_name: str, rank: int) -> Iterator[SkeletonParam]:
    outputs, inputs = layer.shape
    for name, shape, dim in (("A", (rank, inputs), 1), ("B", (outputs, rank), 0)):
        is_split = layer.dim == dim
        part = layer.part if is_split else None
        yield SkeletonParam(
            name=f"{layer_name}.lora_{name}.weight", shape=shape, dim=dim if is_split else None, part=part
        )


def _beside_experts(experts: SkeletonParam, rank: int) -> Iterator[SkeletonParam]:
    """Yield what PEFT puts beside all experts; it takes gate and up as one weight, of twice the rank."""
    num_experts, outputs, inputs = experts.shape
    ranks = num_experts * rank
    yield SkeletonParam(name=f"{experts.name}.lora_A.weight", shape=(ranks, inputs), is_of_experts=True)
    second = (outputs, ranks if experts.name.endswith("down") else 2 * ranks)
    yield SkeletonParam(name=f"{experts.name}.lora_B.weight", shape=second, is_of_experts=True)
