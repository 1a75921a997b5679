"""What states on NVMe cost in time, from the Layout's bytes and a disk's bandwidth. Pure.

>>> from torch import nn
>>> from shardwise.config import Config
>>> from shardwise.layout.layout import build_layout
>>> config = Config.from_dict({"tiers": {"optimizer": "nvme", "grads": "host", "nvme_path": "swap"}})
>>> layout = build_layout(nn.Linear(1000, 1000, bias=False), config.resolve(world_size=1))   # fp32: 2 moments, 1 copy
>>> sweep_s(layout, read_bytes_s=12e6, write_bytes_s=6e6), passes_s(layout, 1, 12e6, 6e6)
(3.0, 0.0)
"""

from __future__ import annotations

from shardwise.layout.layout import Layout


def sweep_s(layout: Layout, read_bytes_s: float, write_bytes_s: float) -> float:
    """Seconds that one rank's disk works for a step of the optimizer over all groups: bytes by bandwidth.

    read bytes / read bandwidth + written bytes / write bandwidth (Rajbhandari et al. 2021, arXiv 2104.07857, section 4:
    the time of a state is its bytes by the bandwidth to where it rests): a disk reads and writes by turns, so the two
    times add up. The bytes are the Layout's: with S elements of a group on this rank, S*K are read and written of an
    optimizer on NVMe, S*G read of gradients, S*P written of parameters.

    Args:
        layout: of the run.
        read_bytes_s: what one rank reads a second while all that share its disk do.
        write_bytes_s: likewise, what it writes.
    """
    return _disk_s(layout, 0, read_bytes_s, write_bytes_s)


def passes_s(layout: Layout, num_micro_batches: int, read_bytes_s: float, write_bytes_s: float) -> float:
    """Seconds that one rank's disk works for the forwards and backwards of a step: gathers read, reductions write.

    Args:
        layout: of the run.
        num_micro_batches: a step.
        read_bytes_s: as for `sweep_s`.
        write_bytes_s: likewise.
    """
    both = _disk_s(layout, num_micro_batches, read_bytes_s, write_bytes_s)
    return both - _disk_s(layout, 0, read_bytes_s, write_bytes_s)


def _disk_s(layout: Layout, num_micro_batches: int, read_bytes_s: float, write_bytes_s: float) -> float:
    """Of the passes of so many micro-batches, and the step."""
    across = layout.bytes_across(num_micro_batches)
    return across.get(("nvme", "host"), 0) / read_bytes_s + across.get(("host", "nvme"), 0) / write_bytes_s
