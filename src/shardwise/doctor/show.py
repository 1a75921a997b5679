"""Draws a diagnosis and a profile as text of any width, with pure functions.

>>> from shardwise.doctor.checks import Finding
>>> list(verdict([Finding("error", "disk-full", "runs has 0 B free", "free some")]))
['1 error']
>>> list(verdict([]))
['nothing is wrong']
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.doctor import Diagnosis
from shardwise.doctor.checks import Finding, num_train_ranks
from shardwise.doctor.measure import CollectiveSpeed, CopySpeed, DiskSpeed, MatmulSpeed, Measurements
from shardwise.doctor.system_info import SwapInfo, SystemInfo
from shardwise.offload.disk_bench import SwapSpeed
from shardwise.planner.hardware import reached_flops_per_s
from shardwise.planner.profile import Profile
from shardwise.runtime.format import format_bytes, format_rate, format_s

_LABEL_WIDTH = 10
_STYLES: Mapping[str, str] = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_OPS: Mapping[str, str] = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
}


def render(diagnosis: Diagnosis) -> RenderableType:
    """Draw facts, measurements and findings, in this order: what matters most is nearest to the prompt."""
    blocks: list[RenderableType] = [_grid(_fact_rows(diagnosis.facts))]
    if diagnosis.measurements is not None:
        blocks += ["", _grid(_measurement_rows(diagnosis.measurements))]
        blocks += [_collective_table(diagnosis.measurements.collectives)] if diagnosis.measurements.collectives else []
    blocks.append("")
    if diagnosis.findings:
        blocks += [_findings_grid(diagnosis.findings), ""]
    style = _STYLES[diagnosis.findings[0].level] if diagnosis.findings else "green"
    blocks.append(Text(", ".join(verdict(diagnosis.findings)), style=style))
    return Padding(Group(*blocks), (0, 1), expand=False)


def verdict(findings: Sequence[Finding]) -> Iterator[str]:
    """Say how many findings of each level there are."""
    if not findings:
        yield "nothing is wrong"
    for level in _STYLES:
        number = sum(finding.level == level for finding in findings)
        if number:
            yield f"{number} {level}{'s' if number > 1 else ''}"


def _grid(rows: Iterator[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", min_width=_LABEL_WIDTH)
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(label, Text(value))
    return grid


def _findings_grid(findings: Sequence[Finding]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(min_width=_LABEL_WIDTH)
    grid.add_column(overflow="fold")
    for finding in findings:
        grid.add_row(Text(finding.level, style=_STYLES[finding.level]), Text(f"{finding.what}; {finding.fix}"))
    return grid


def _fact_rows(facts: SystemInfo) -> Iterator[tuple[str, str]]:
    software, cpu, memory, disk = facts.software, facts.cpu, facts.memory, facts.disk
    yield "shardwise", f"{software.shardwise}, Python {software.python}, {software.platform}"
    build = f"CUDA {software.torch_cuda}" if software.torch_cuda else "for CPU only"
    yield "torch", f"{software.torch}, {build}, triton {software.triton or 'no'}, C++ {software.cxx_path or 'no'}"
    backends = {"gloo": software.has_gloo, "NCCL": software.has_nccl}
    yield "backends", ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in backends.items())
    for index, gpu in enumerate(facts.gpus):
        free = f"{format_bytes(gpu.free_bytes)} free of {format_bytes(gpu.total_bytes)}"
        yield f"GPU {index}", f"{gpu.name}, capability {gpu.capability}, {free}"
    if not facts.gpus:
        yield "GPU", "none that torch sees"
    quota = f", {cpu.quota_cores:g} cores' time" if cpu.quota_cores is not None else ""
    bf16 = f"bf16 in hardware: {'yes' if facts.cpu_has_fast_bf16 else 'no'}"
    yield "cores", f"{cpu.num_usable} usable of {cpu.num_machine}{quota}, {cpu.name}, {bf16}"
    available = f"{format_bytes(memory.available_bytes)} available of " if memory.available_bytes is not None else ""
    shm = f", /dev/shm {format_bytes(memory.shm_bytes)}" if memory.shm_bytes is not None else ""
    yield "memory", f"{available}{format_bytes(memory.total_bytes)}{shm}"
    filesystem = f", {disk.filesystem}" if disk.filesystem else ""
    yield "disk", f"{format_bytes(disk.free_bytes)} free at {disk.path}{filesystem}"
    if facts.swap is not None:
        yield "NVMe", _swap_text(facts.swap)
    addresses = ", ".join(facts.network.addresses) or "nothing"
    yield "network", f"{facts.network.hostname} is {addresses}; interfaces {', '.join(facts.network.interfaces)}"
    num_ranks = num_train_ranks(facts)
    yield "train", f"starts {num_ranks} rank{'s' if num_ranks > 1 else ''}"


def _measurement_rows(measured: Measurements) -> Iterator[tuple[str, str]]:
    for device in dict.fromkeys(matmul.device for matmul in measured.matmuls):
        matmuls = [matmul for matmul in measured.matmuls if matmul.device == device]
        threads = "" if device != "cpu" else f" ({matmuls[0].num_threads} threads)"
        yield "matmul", f"{device}{threads}: {', '.join(map(_matmul_text, matmuls))}"
    for copy in measured.copies:
        yield "copy", _copy_text(copy)
    if measured.disk is not None:
        yield "disk", _disk_text(measured.disk)
    if measured.swap is not None:
        yield "NVMe", _speeds(measured.swap)


def _matmul_text(matmul: MatmulSpeed) -> str:
    unit, name = (1e9, "GFLOP/s") if matmul.device == "cpu" else (1e12, "TFLOP/s")
    speed = f"{matmul.dtype} {matmul.flops_per_s / unit:,.0f} {name}"
    if matmul.peak_flops_per_s is None:
        return speed
    return f"{speed} ({matmul.flops_per_s / matmul.peak_flops_per_s:.0%} of the data sheet's)"


def _copy_text(copy: CopySpeed) -> str:
    speed = format_rate(copy.bytes_per_s, "B/s")
    if copy.source == copy.target:
        return f"within {copy.source}: {speed}, that is {format_rate(2 * copy.bytes_per_s, 'B/s')} read and written"
    return f"{copy.source} to {copy.target}, {'pinned' if copy.pinned else 'pageable'}: {speed}"


def _swap_text(swap: SwapInfo) -> str:
    filesystem = f", {swap.disk.filesystem}" if swap.disk.filesystem else ""
    needed = f", {format_bytes(swap.needed_bytes)} needed" if swap.needed_bytes is not None else ""
    return f"{format_bytes(swap.disk.free_bytes)} free at {swap.disk.path}{filesystem}{needed}"


def _disk_text(disk: DiskSpeed) -> str:
    return f"{_speeds(disk)}; a synced write of 4 KiB takes {format_s(disk.sync_s)}"


def _speeds(disk: DiskSpeed | SwapSpeed) -> str:
    cache = "past the page cache" if disk.direct else "through the page cache"
    return (
        f"write {format_rate(disk.write_bytes_per_s, 'B/s')}, read {format_rate(disk.read_bytes_per_s, 'B/s')}, {cache}"
    )


def _collective_table(collectives: Sequence[CollectiveSpeed]) -> Table:
    """Return a table with a row a backend and op, and two columns a size: a call's time, and the bandwidth."""
    sizes = sorted({collective.num_bytes for collective in collectives})
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=_LABEL_WIDTH, style="dim")
    table.add_column()
    for _ in range(2 * len(sizes)):
        table.add_column(justify="right", no_wrap=True)
    table.add_row("", "", *(cell for num_bytes in sizes for cell in (_size(num_bytes), "GB/s")), style="dim")
    previous = ""
    for backend, op in dict.fromkeys((each.backend, each.op) for each in collectives):
        found = {each.num_bytes: each for each in collectives if (each.backend, each.op) == (backend, op)}
        cells: list[str] = []
        for size in sizes:
            each = found.get(size)
            cells += [format_s(each.call_s), f"{each.bus_bytes_per_s / 1e9:,.3f}"] if each else ["", ""]
        num_ranks = next(iter(found.values())).num_ranks
        table.add_row("" if backend == previous else f"{backend} × {num_ranks}", _OPS[op], *cells)
        previous = backend
    return table


def _size(num_bytes: int) -> str:
    return f"{num_bytes // 2**20} MiB" if num_bytes >= 2**20 else f"{num_bytes // 2**10} KiB"


def render_profile(profile: Profile) -> RenderableType:
    """Draw a profile: speeds first, then collectives by size."""
    grid = Table.grid(padding=(0, 2))
    for label, value in _rows(profile):
        grid.add_row(label, value)
    blocks: list[RenderableType] = [grid]
    if profile.collectives:
        blocks += ["", _collectives(profile)]
    return Padding(Group(*blocks), (0, 1), expand=False)


def _rows(profile: Profile) -> Iterator[tuple[str, str]]:
    ranks = "1 rank" if profile.num_ranks == 1 else f"{profile.num_ranks} ranks at work at once"
    threads = ""
    if profile.device == "cpu":
        threads = ", 1 thread each" if profile.num_threads == 1 else f", {profile.num_threads} threads each"
    yield "measured", f"{ranks} on {profile.device}{threads}, torch {profile.torch_version}"
    for dtype, flops_per_s in reached_flops_per_s(profile).items():
        number = sum(each.dtype == dtype for each in profile.matmuls)
        yield f"matmul {dtype}", f"at best {format_rate(flops_per_s, 'FLOP/s')}, of {number} shapes"
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
            yield label, format_rate(speed, "B/s")
    if profile.call_s:
        yield "a call", format_s(profile.call_s)
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
        cells = ["" if time is None else format_s(time) for time in times]
        table.add_row(op.replace("_", "-"), str(num_ranks), *cells)
    return table


def _short(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:g} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:g} KiB"
