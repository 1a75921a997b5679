"""A profile as a table for people: what one rank reaches while the others are at work too. Pure.

>>> rate(2.5e9, "FLOP/s")
'2.5 GFLOP/s'
>>> duration(0.00025)
'250 us'
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table

from shardwise.planner.machine import reached_flops_per_s
from shardwise.planner.profile import Profile


def render_profile(profile: Profile) -> RenderableType:
    """Speeds first, then collectives by size."""
    grid = Table.grid(padding=(0, 2))
    for label, value in _rows(profile):
        grid.add_row(label, value)
    blocks: list[RenderableType] = [grid]
    if profile.collectives:
        blocks += ["", _collectives(profile)]
    return Padding(Group(*blocks), (0, 1), expand=False)


def rate(value: float, unit: str) -> str:
    """With the prefix that leaves one to three digits before the point."""
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def duration(seconds: float) -> str:
    """In seconds, ms or us."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _rows(profile: Profile) -> Iterator[tuple[str, str]]:
    ranks = "1 rank" if profile.num_ranks == 1 else f"{profile.num_ranks} ranks at work at once"
    threads = ""
    if profile.device == "cpu":
        threads = ", 1 thread each" if profile.num_threads == 1 else f", {profile.num_threads} threads each"
    yield "measured", f"{ranks} on {profile.device}{threads}, torch {profile.torch_version}"
    for dtype, flops_per_s in reached_flops_per_s(profile).items():
        number = sum(each.dtype == dtype for each in profile.matmuls)
        yield f"matmul {dtype}", f"at best {rate(flops_per_s, 'FLOP/s')}, of {number} shapes"
    for table, name in ((profile.attentions, "attention"), (profile.blocks, "blocks"), (profile.heads, "heads")):
        if table:
            share = sum(each.backward_s for each in table) / sum(each.forward_s for each in table)
            yield name, f"{len(table)} shapes, backward {share:.1f} times as long as forward"
    for label, speed in (
        ("streams", profile.stream_bytes_per_s),
        ("optimizer", profile.step_bytes_per_s),
        *((source.replace("->", " to "), speed) for source, speed in profile.copies_bytes_per_s),
        ("disk read", profile.disk_read_bytes_per_s),
        ("disk write", profile.disk_write_bytes_per_s),
    ):
        if speed:
            yield label, rate(speed, "B/s")
    if profile.call_s:
        yield "a call", duration(profile.call_s)
    if profile.hidden_share is not None:
        yield "overlap", f"computing hides {profile.hidden_share:.0%} of a gather beside it"


def _collectives(profile: Profile) -> Table:
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    sizes = sorted({each.num_bytes for each in profile.collectives})
    table.add_column("collective", no_wrap=True)
    table.add_column("ranks", justify="right")
    for size in sizes:
        table.add_column(_short(size), justify="right", no_wrap=True)
    seconds = {(each.op, each.num_ranks, each.num_bytes): each.seconds for each in profile.collectives}
    for op, num_ranks in dict.fromkeys((each.op, each.num_ranks) for each in profile.collectives):
        times = [seconds.get((op, num_ranks, size)) for size in sizes]
        cells = ["" if time is None else duration(time) for time in times]
        table.add_row(op.replace("_", "-"), str(num_ranks), *cells)
    return table


def _short(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:g} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:g} KiB"
