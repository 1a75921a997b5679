"""Bound the host memory for what moves between tiers, from the Layout alone; the functions are pure.

>>> from torch import nn
>>> from shardwise.config.resolve import Config
>>> from shardwise.construction.scan import build_layout
>>> tiers = {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "nvme_path": "swap"}
>>> config = Config.from_dict({"zero": {"stage": 3}, "tiers": tiers}).resolve(world_size=1)
>>> def mib(num_blocks):
...     blocks = nn.ModuleList(nn.Linear(1024, 1024, device="meta") for _ in range(num_blocks))
...     return most_buffer_bytes(build_layout(nn.Sequential(blocks), config)) // 2**20
>>> mib(8) == mib(80)
True
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from shardwise.layout.layout import Layout
from shardwise.layout.param_groups import GroupSpec
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.offload.step_pipeline import CHUNK_NUMEL, DEPTH
from shardwise.offload.storage import MOST_ARRIVING, MOST_FETCHED, MOST_STAGED
from shardwise.runtime.pinned_memory import ALIGNMENT_BYTES

# Chunks of the optimizer's states that stay in memory between two steps; slices of parameters or gradients too.
NUM_KEPT: Final = 2
# A disk needs more time than a gather: this many blocks are read after the one that is gathered ahead.
NUM_PREFETCHED: Final = 2


def most_buffer_bytes(layout: Layout) -> int:
    """Return the most bytes of host memory that one rank's buffers take, beside the states that are stored there.

    The bound does not grow with the number of groups. For the largest slice of S elements and chunks of C <= S
    elements, it is the sum of these:

    - for the step: 3 chunks that are open, of all states that are not stored on the host, C*(P+G+K); 2 that are kept;
      and of parameters that are stored on the device, 2 chunks that move there, C*P each;
    - for gradients that leave: 3 slices that are staged, one before and one after these; one to which they are added;
      2 that are kept: 8 S*G;
    - for parameters that come from NVMe: the next, 2 after it, 3 that the device has not taken yet and one that it
      takes, 2 that are kept: 9 S*P;
    - for parameters that leave the device where the optimizer is stored there: 8 S*P, as for gradients.

    Inputs of recomputed blocks (`tiers.activations`) come on top, and a block that a model skips now and then may
    keep what was read for it.
    """
    slices: dict[str, int] = defaultdict(int)
    for group in layout.groups:
        for name, num_bytes in _slices(layout, group).items():
            slices[name] = max(slices[name], num_bytes)
    num_staged = MOST_STAGED + 2 + 1 + NUM_KEPT
    num_fetched = 1 + NUM_PREFETCHED + MOST_FETCHED + 1 + NUM_KEPT
    return (
        (DEPTH * slices["chunk"] + NUM_KEPT * slices["optimizer chunk"] + MOST_ARRIVING * slices["arriving chunk"])
        + num_staged * (slices["gradients"] + slices["parameters that leave"])
        + num_fetched * slices["parameters"]
    )


def _slices(layout: Layout, group: GroupSpec) -> dict[str, int]:
    """Return the bytes that move at a time for one group, by kind."""
    tiers, numel = group.tiers, group.shard_numel
    found: dict[str, int] = {}
    if tiers.params == "nvme":
        found["parameters"] = _buffer_bytes(numel * DTYPE_BYTES[layout.precision_of(group).param])
    if not group.trainable:
        return found
    if tiers.grads != "device":
        found["gradients"] = _buffer_bytes(numel * DTYPE_BYTES[layout.precision_of(group).accumulate])
    if tiers.optimizer == "device":
        if tiers.params != "device":
            found["parameters that leave"] = _buffer_bytes(numel * DTYPE_BYTES[layout.precision_of(group).param])
        return found
    chunk_numel = min(CHUNK_NUMEL, numel)
    for state in layout.states:
        if state.is_kept_by(group):
            num_bytes = _buffer_bytes(chunk_numel * DTYPE_BYTES[state.dtype_in(group)])
            if state.tier_in(group) != "host":
                found["chunk"] = found.get("chunk", 0) + num_bytes
            if state.role == "param" and tiers.params == "device":
                found["arriving chunk"] = num_bytes
            if state.role == "optimizer" and tiers.optimizer == "nvme":
                found["optimizer chunk"] = found.get("optimizer chunk", 0) + num_bytes
    return found


def _buffer_bytes(num_bytes: int) -> int:
    """Return the size of the buffer for so many bytes: whole blocks of the file, up to 1/8 wasted, in whole pages."""
    num_blocks = -(-num_bytes // ALIGNMENT_BYTES)
    return -(-num_blocks * 9 // 8) * ALIGNMENT_BYTES
