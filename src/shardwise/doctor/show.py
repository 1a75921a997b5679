"""Draw a diagnosis and a profile as text of any width.

>>> from shardwise.doctor.checks import Finding
>>> verdict([Finding("error", "disk-full", "runs has 0 B free", "free some")])
'1 error'
>>> verdict([])
'nothing is wrong'
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.doctor import Diagnosis
from shardwise.doctor.calibrate import Measurements
from shardwise.doctor.checks import Finding
from shardwise.doctor.system_info import DiskInfo, SystemInfo
from shardwise.planner.hardware import CPU, reached_flops_per_s
from shardwise.planner.profile import Profile
from shardwise.runtime.format import format_bytes, format_rate, format_s
from shardwise.train.loop import peak_flops

_STYLES: Mapping[str, str] = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_NO_YES = ("no", "yes")


def render(diagnosis: Diagnosis) -> RenderableType:
    """Draw facts, measurements and findings, in this order: what matters most is nearest to the prompt."""
    measured, findings = diagnosis.measurements, diagnosis.findings
    blocks: list[RenderableType] = [_grid(_fact_rows(diagnosis.facts)), ""]
    if measured is not None:
        blocks += [_grid(_measured_rows(measured)), *(_collectives(rank) for rank in measured.ranks[:1]), ""]
    if findings:
        lines = (
            (Text(finding.level, style=_STYLES[finding.level]), f"[{finding.name}] {finding.what}; {finding.fix}")
            for finding in findings
        )
        blocks += [_grid(lines), ""]
    style = _STYLES[findings[0].level] if findings else "green"
    return Padding(Group(*blocks, Text(verdict(findings), style=style)), (0, 1), expand=False)


def render_profile(profile: Profile) -> RenderableType:
    """Draw a profile: speeds first, then collectives by size."""
    return Padding(Group(_grid(_profile_rows(profile)), "", _collectives(profile)), (0, 1), expand=False)


def verdict(findings: Sequence[Finding]) -> str:
    """Say how many findings of each level there are."""
    counts = Counter[str](finding.level for finding in findings)
    levels = [f"{counts[level]} {level}{'s' if counts[level] > 1 else ''}" for level in _STYLES if counts[level]]
    return ", ".join(levels) or "nothing is wrong"


def _grid(rows: Iterable[tuple[str | Text, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", min_width=10)
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(label, Text(value))
    return grid


def _fact_rows(facts: SystemInfo) -> Iterator[tuple[str, str]]:
    software, cpu, memory, num_ranks = facts.software, facts.cpu, facts.memory, facts.num_train_ranks
    yield "shardwise", f"{software.shardwise}, Python {software.python}, {software.platform}"
    build = f"CUDA {software.torch_cuda}" if software.torch_cuda else "for CPU only"
    yield "torch", f"{software.torch}, {build}, triton {software.triton or 'no'}, C++ {software.cxx_path or 'no'}"
    yield "backends", f"gloo {_NO_YES[software.has_gloo]}, NCCL {_NO_YES[software.has_nccl]}"
    for index, gpu in enumerate(facts.gpus):
        free = f"{format_bytes(gpu.free_bytes)} free of {format_bytes(gpu.total_bytes)}"
        yield f"GPU {index}", f"{gpu.name}, capability {gpu.capability}, {free}"
    if not facts.gpus:
        yield "GPU", "none that torch sees"
    quota = f", {cpu.quota_cores:g} cores' time" if cpu.quota_cores is not None else ""
    bf16 = f"bf16 in hardware: {_NO_YES[cpu.has_fast_bf16]}"
    yield "cores", f"{cpu.num_usable} usable of {cpu.num_machine}{quota}, {cpu.name}, {bf16}"
    shm = f", /dev/shm {format_bytes(memory.shm_bytes)}" if memory.shm_bytes is not None else ""
    yield "memory", f"{format_bytes(memory.available_bytes)} available of {format_bytes(memory.total_bytes)}{shm}"
    for label, disk in (("disk", facts.disk), ("NVMe", facts.swap)):
        if disk is not None:
            yield label, _disk_text(disk)
    addresses = ", ".join(facts.network.addresses) or "nothing"
    yield "network", f"{facts.network.hostname} is {addresses}; interfaces {', '.join(facts.network.interfaces)}"
    yield "train", f"starts {num_ranks} rank{'s' if num_ranks > 1 else ''}"


def _disk_text(disk: DiskInfo) -> str:
    filesystem = f", {disk.filesystem}" if disk.filesystem else ""
    needed = f", {format_bytes(disk.needed_bytes)} needed" if disk.needed_bytes is not None else ""
    return f"{format_bytes(disk.free_bytes)} free at {disk.path}{filesystem}{needed}"


def _measured_rows(measured: Measurements) -> Iterator[tuple[str, str]]:
    for index, rank in enumerate(measured.ranks):
        peak = peak_flops(rank.device)
        speeds = []
        for dtype, flops_per_s in reached_flops_per_s(rank).items():
            share = f" ({flops_per_s / peak:.0%} of the data sheet's)" if peak and dtype != "fp32" else ""
            speeds.append(f"{dtype} {format_rate(flops_per_s, 'FLOP/s')}{share}")
        speeds += [f"{way.replace('->', ' to ')} {format_rate(speed, 'B/s')}" for way, speed in rank.copies_bytes_per_s]
        yield f"rank {index}", ", ".join(speeds)
    for label, disk in (("disk", measured.disk), ("NVMe", measured.swap)):
        if disk is not None:
            cache = "past the page cache" if disk.direct else "through the page cache"
            read, write = format_rate(disk.read_bytes_per_s, "B/s"), format_rate(disk.write_bytes_per_s, "B/s")
            yield label, f"write {write}, read {read}, {cache}"


def _profile_rows(profile: Profile) -> Iterator[tuple[str, str]]:
    ranks = "1 rank" if profile.num_ranks == 1 else f"{profile.num_ranks} ranks at work at once"
    threads = f", {profile.num_threads} thread{'s' if profile.num_threads > 1 else ''} each"
    where = f"{profile.device}{threads if profile.device == CPU else ''}"
    yield "measured", f"{ranks} on {where}, torch {profile.torch_version}"
    for dtype, flops_per_s in reached_flops_per_s(profile).items():
        number = sum(matmul.dtype == dtype for matmul in profile.matmuls)
        yield f"matmul {dtype}", f"at best {format_rate(flops_per_s, 'FLOP/s')}, of {number} shapes"
    for table, name in ((profile.attentions, "attention"), (profile.blocks, "blocks"), (profile.heads, "heads")):
        if table:
            share = sum(row.backward_s for row in table) / sum(row.forward_s for row in table)
            yield name, f"{len(table)} shapes, backward {share:.1f} times as long as forward"
    for label, speed in (
        ("streams", profile.stream_bytes_per_s),
        ("optimizer", profile.step_bytes_per_s),
        *((way.replace("->", " to "), speed) for way, speed in profile.copies_bytes_per_s),
        ("disk read", profile.disk_read_bytes_per_s),
        ("disk write", profile.disk_write_bytes_per_s),
    ):
        if speed:
            yield label, format_rate(speed, "B/s")
    if profile.call_s:
        yield "a call", format_s(profile.call_s)
    if profile.hidden_share is not None:
        yield "overlap", f"computing hides {profile.hidden_share:.0%} of a gather beside it"


def _collectives(profile: Profile) -> Table:
    """Return a table of the time of a call, with a row for each collective and a column for each size."""
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    sizes = sorted({collective.num_bytes for collective in profile.collectives})
    if sizes:
        table.add_column("collective", no_wrap=True)
        table.add_column("ranks", justify="right")
    for size in sizes:
        short = f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size / 2**10:g} KiB"
        table.add_column(short, justify="right", no_wrap=True)
    seconds = {
        (collective.op, collective.num_ranks, collective.num_bytes): collective.seconds
        for collective in profile.collectives
    }
    for op, num_ranks in dict.fromkeys((collective.op, collective.num_ranks) for collective in profile.collectives):
        times = [seconds.get((op, num_ranks, size)) for size in sizes]
        cells = ["" if time is None else format_s(time) for time in times]
        table.add_row(op.replace("_", "-"), str(num_ranks), *cells)
    return table
