"""What a machine was measured to do: tables of kernels, copies and collectives, written and read as JSON.

`shardwise doctor --calibrate` writes one; the planner looks a time up here before it estimates one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MatmulTime:
    """A product [m, k] by [k, n] on one rank, while its neighbours compute too."""

    dtype: str
    m: int
    n: int
    k: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class AttentionTime:
    """Causal attention forward and backward, of `num_heads` heads and one sequence."""

    dtype: str
    num_heads: int
    head_dim: int
    seq_len: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True)
class CollectiveTime:
    """One collective over `num_ranks` ranks on a whole buffer of `num_bytes`; op as in `shardwise.comm`, or send."""

    op: str
    num_ranks: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What was measured on one machine, with `num_ranks` ranks at work at once.

    Attributes:
        device: such as `cpu` or the GPU's name.
        num_ranks: processes that were at work together; `num_threads` of each on a CPU.
        stream_bytes_per_s: that an element-wise kernel reads and writes, of one rank.
        step_bytes_per_s: of an optimizer's fused step, all it reads and writes, of one rank.
        call_s: that a kernel's call takes beyond its work.
        copies_bytes_per_s: by (from, to), such as `device->host`.
        disk_read_bytes_per_s, disk_write_bytes_per_s: past the page cache.
    """

    device: str
    num_ranks: int
    num_threads: int
    memory_bytes: float
    matmuls: tuple[MatmulTime, ...] = ()
    attentions: tuple[AttentionTime, ...] = ()
    collectives: tuple[CollectiveTime, ...] = ()
    stream_bytes_per_s: float = 0.0
    step_bytes_per_s: float = 0.0
    call_s: float = 0.0
    copies_bytes_per_s: tuple[tuple[str, float], ...] = ()
    disk_read_bytes_per_s: float = 0.0
    disk_write_bytes_per_s: float = 0.0
