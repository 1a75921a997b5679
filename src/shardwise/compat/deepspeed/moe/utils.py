"""Offer what programs ask of parameters of experts, of which there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn


def is_moe_param(param: Tensor) -> bool:
    """Return False: no parameter is of an expert that one rank has alone."""
    return False


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return that there are no layers of experts."""
    return False, 0


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Sequence[Mapping[str, Any]], max_group_size: int | None = None
) -> list[dict[str, Any]]:
    """Return the parameter groups as they are, in a list."""
    groups = [param_groups] if isinstance(param_groups, Mapping) else param_groups
    return [dict(group) for group in groups]
