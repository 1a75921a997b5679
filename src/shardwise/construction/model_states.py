"""Estimate what a model's states need on each device and host, by ZeRO stage, from the Layout that a run would have.

>>> for each in estimate_model_states(7_500_000_000, num_gpus=64, config={"precision": {"accumulate": "param"}}):
...     print(each.stage, round(each.device_bytes / 1e9, 1))
0 120.0
1 31.4
2 16.6
3 1.9
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.config.arguments import checked
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config, Tier
from shardwise.config.sections import Positive
from shardwise.construction.scan import scan_model
from shardwise.layout.facts import ModelFacts, ParamEntry
from shardwise.layout.layout import Layout
from shardwise.layout.param_groups import ROOT
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.layout.resolve import layout_of
from shardwise.runtime.format import format_bytes


@dataclass(frozen=True, kw_only=True)
class ModelStates:
    """Hold the bytes of parameters, gradients and the optimizer's states while nothing is computed.

    Attributes:
        by_tier: bytes that one rank holds, by memory and role.
        unsharded_bytes: further bytes on the device while the largest block is computed: its parameters gathered, where
            they are stored as shards, and its gradients whole, where these are.
        ranks_per_host: ranks that share a host's memory.
    """

    stage: int
    by_tier: Mapping[Tier, Mapping[str, int]]
    unsharded_bytes: int
    ranks_per_host: int

    @property
    def device_bytes(self) -> int:
        """Return the bytes on each device."""
        return self._of_tier("device")

    @property
    def host_bytes(self) -> int:
        """Return the bytes on each host, for all its ranks."""
        return self.ranks_per_host * self._of_tier("host")

    @property
    def nvme_bytes(self) -> int:
        """Return the bytes on each host's disks, for all its ranks."""
        return self.ranks_per_host * self._of_tier("nvme")

    def _of_tier(self, tier: Tier) -> int:
        return sum(self.by_tier.get(tier, {}).values())

    def __str__(self) -> str:
        others = (
            (self.unsharded_bytes, "more for the largest block"),
            (self.host_bytes, "of each host"),
            (self.nvme_bytes, "of its disks"),
        )
        texts = [f"{format_bytes(size)} {where}" for size, where in others if size]
        return ", ".join([f"stage {self.stage}: {format_bytes(self.device_bytes)} a GPU", *texts])


@checked
def estimate_model_states(
    model: nn.Module | int,
    *,
    num_gpus: int,
    gpus_per_node: Positive = 8,
    stages: Sequence[int] = (0, 1, 2, 3),
    config: Mapping[str, Mapping[str, Any]] | None = None,
    largest_block: int | None = None,
) -> tuple[ModelStates, ...]:
    """Estimate what the states of a model need in each ZeRO stage, data-parallel over `num_gpus`.

    Args:
        model: a module, on meta too; or the number of its parameters.
        num_gpus: data-parallel ranks, of which `gpus_per_node` share a host's memory.
        config: sections and keys as in a config file, such as `{"tiers": {"optimizer": "host"}}`; parameters are bf16,
            gradients fp32 and the optimizer AdamW where it says nothing else.
        largest_block: parameters of the largest block, where `model` is a number.

    Raises:
        ConfigError: a number below 1, a block larger than the model, or what the config refuses.
    """
    if num_gpus < 1:
        raise ConfigError("gpu-count-positive", f"num_gpus={num_gpus} is below 1; states are stored on one at least")
    values: dict[str, Any] = dict(config or {})
    if isinstance(model, nn.Module):
        facts = scan_model(model, Config.from_dict(values))
    else:
        facts = _facts_of(model, largest_block or 0)
    values["precision"] = {"param": "bf16", **values.get("precision", {})}
    estimates = []
    for stage in stages:
        zero = {**values.get("zero", {}), "stage": int(stage)}
        layout = layout_of(facts, Config.from_dict({**values, "zero": zero}).resolve(world_size=num_gpus))
        estimates.append(
            ModelStates(
                stage=stage,
                by_tier=layout.bytes_by_tier(),
                unsharded_bytes=_unsharded_bytes(layout),
                ranks_per_host=min(num_gpus, gpus_per_node),
            )
        )
    return tuple(estimates)


def _unsharded_bytes(layout: Layout) -> int:
    """Return the bytes of the block that needs most: gathered parameters, and gradients before they are reduced."""
    blocks: Counter[str] = Counter()
    for group in layout.groups:
        stage = layout.stage_of(group)
        num_times = stage.unshard_for_use + stage.reduce_each_backward
        blocks[group.unit] += num_times * group.padded_numel * DTYPE_BYTES[layout.precision_of(group).param]
    return max((size for name, size in blocks.items() if name != ROOT), default=0)


def _facts_of(num_params: int, largest_block: int) -> ModelFacts:
    """Return the facts of a model of that size: the largest block, and all other parameters as one vector."""
    if num_params < 1:
        raise ConfigError(
            "params-positive", f"{num_params} parameters are none; give a model or the number of its parameters"
        )
    if not 0 <= largest_block <= num_params:
        raise ConfigError(
            "largest-block-range",
            f"largest_block={largest_block} of {num_params} parameters; a block is a part of the model",
        )
    sizes = {"block": largest_block, ROOT: num_params - largest_block}
    params = [ParamEntry(unit, (), unit, (size,), requires_grad=True) for unit, size in sizes.items() if size]
    return ModelFacts(units=("block",) if largest_block else (), params=tuple(params))
