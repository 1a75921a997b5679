"""Copy tensors before `torch.save`, which else writes the whole memory that a view is part of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.runtime.torch_private import pytree


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return a nested object with copies of its tensors on a device, each of its own memory."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone().to(device), item)
