"""Simulate ranks of a job, without starting any, and show what they would hold and send.

The data are not read, so the vocabulary is the preset's where the config gives no size.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.config.resolve import Config, ResolvedConfig, Tier, batch_equation
from shardwise.launch.local import default_num_ranks
from shardwise.layout.layout import Layout
from shardwise.layout.mesh_shape import SHARD_AXES, Coordinate, MeshShape, check_rank
from shardwise.layout.pipeline_layout import PipelineLayout
from shardwise.planner.results import RankMemory, parts_of
from shardwise.runtime.device import kind_of, wanted_kind
from shardwise.runtime.format import format_bytes, format_count
from shardwise.runtime.memory_tracker import Category
from shardwise.schedule import bubble_share
from shardwise.schedule.simulate import OpTimes
from shardwise.tensor.plan_layout import plan_layout
from shardwise.train.job_model import JobModel, job_model
from shardwise.train.needs import checkpoint_bytes, predicted_memory
from shardwise.train.setup import check_job, layout_line, precision_line, sparse_words
from shardwise.verify.few_micro_batches import RankFigures, rank_figures
from shardwise.verify.simulate import RankJob

_UNITS: Final = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_ROLES: Final[Mapping[str, str]] = {"param": "params", "grad": "grads", "optimizer": "optimizer"}
# Of a limit, what importing torch, layouts and estimates take around simulations.
_AROUND_S: Final = 5.0
_TIERS: Final[Mapping[Tier, str]] = {"device": "device", "host": "host", "nvme": "NVMe"}
_CATEGORIES: Final[Mapping[Category, str]] = {
    Category.PARAMETERS: "params",
    Category.GRADIENTS: "grads",
    Category.ACTIVATIONS: "activ.",
}


@dataclass(frozen=True)
class DryRun:
    """Holds a job and what some of its ranks hold and send."""

    config: ResolvedConfig
    model: JobModel
    ranks: tuple[RankFigures, ...]
    elapsed_s: float

    @property
    def layout(self) -> Layout:
        """Return the layout of the first rank."""
        return self.ranks[0].layout


def dry_run(
    config: Config,
    world_size: int,
    ranks: Sequence[int] | Literal["stages"] = (0,),
    announce: Callable[[str], None] = lambda doing: None,
    limit_s: float | None = None,
) -> DryRun:
    """Simulate ranks of a job.

    Args:
        world_size: the job's ranks; this machine need not have as many devices.
        ranks: ranks of the world, or "stages" for one of each place in a pipeline.
        announce: called with a few words before each simulation, and once it is known how long that takes.
        limit_s: seconds after which the planner estimates what is not simulated yet, if it knows the model; None waits.

    Raises:
        ConfigError: the config is wrong, as for a run, or its optimizer cannot be simulated.
    """
    start_s = time.perf_counter()
    run = config.run.model_copy(update={"device": wanted_kind(config.run.device).name})
    resolved, layout = check_job(config.model_copy(update={"run": run}), world_size)
    model = job_model(resolved)

    def make_batch() -> Any:
        tokens = torch.zeros(resolved.batch.micro_size or 1, resolved.data.seq_len, dtype=torch.int64)  # [B, S]
        return model.batch((tokens, tokens))

    role_bytes = layout.bytes_at_rest()
    roles = ", ".join(
        f"{_ROLES[role]} {format_bytes(size)}" for role, size in role_bytes.items() if role in _ROLES and size
    )
    at_rest = f"{format_bytes(sum(role_bytes.values()))} at rest on a rank ({roles})"
    announce(at_rest)
    chosen = choose_ranks(layout.mesh, ranks)
    estimate = None if limit_s is None else predicted_memory(resolved, model.vocab_size)
    figures = list[RankFigures]()
    try:
        with _within(None if estimate is None or limit_s is None else limit_s - _AROUND_S):
            for number, rank in enumerate(chosen, 1):
                progress = f"{at_rest}; simulating rank {rank:,} of {world_size:,} ({number} of {len(chosen)})"
                announce(progress)
                job = RankJob(model.skeleton(), resolved, make_batch, rank, model.loss_fn)
                figures.append(rank_figures(job, lambda doing, place=progress: announce(f"{place}: {doing}")))  # type: ignore[misc]
    except _OutOfTime:
        assert estimate is not None, "without one there is no limit"
        for rank in chosen[len(figures) :]:
            of_rank = plan_layout(model.skeleton(), resolved, rank=rank)
            figures.append(_estimated(rank, of_rank, estimate.ranks[of_rank.mesh.coordinate(rank).pp]))
    return DryRun(resolved, model, tuple(figures), time.perf_counter() - start_s)


class _OutOfTime(BaseException):
    """Ends a simulation; what catches errors does not catch it."""


@contextmanager
def _within(limit_s: float | None) -> Iterator[None]:
    """Raise `_OutOfTime` in what runs inside once so many seconds have passed; on the main thread alone."""
    if limit_s is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _OutOfTime

    if limit_s <= 0:
        raise _OutOfTime
    before, start_s = signal.signal(signal.SIGALRM, stop), time.perf_counter()
    # Again after a second, if a destructor has swallowed it.
    left_s, every_s = signal.setitimer(signal.ITIMER_REAL, limit_s, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        if left_s:  # a timer of the caller's
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, left_s - (time.perf_counter() - start_s)), every_s)


def _estimated(rank: int, layout: Layout, memory: RankMemory) -> RankFigures:
    """Return what a rank holds by the planner's model; its collectives are not known."""
    peak = {category: round(memory.bytes_of(*parts_of(category))) for category in Category}
    return RankFigures(rank, layout, at_rest={}, peak=peak, num_calls={}, wire_bytes={}, num_simulated=0)


def dry_run_size(config: Config, world_size: int | None) -> int:
    """Return the ranks of a dry run: those asked for, else those of the config, else those of a run on this machine."""
    if world_size is not None:
        return world_size
    if config.run.num_procs is not None:
        return config.run.num_procs
    mesh = config.mesh
    if mesh.dp_shard is not None:
        return math.prod((mesh.pp, mesh.dp_replicate or 1, mesh.dp_shard, mesh.cp, mesh.tp))
    return default_num_ranks(config.run.device)


def choose_ranks(mesh: MeshShape, ranks: Sequence[int] | Literal["stages"]) -> list[int]:
    """Return the ranks to simulate: of each place in a pipeline the first one, which has the least padding.

    >>> choose_ranks(MeshShape(pp=4, dp_shard=2, tp=2), "stages")
    [0, 4, 8, 12]

    Raises:
        ConfigError: there is no such rank.
    """
    if isinstance(ranks, str):
        return [mesh.rank_of(Coordinate(pp=stage)) for stage in range(mesh.pp)]
    for rank in ranks:
        check_rank(rank, mesh.world_size)
    return list(dict.fromkeys(ranks))


def render(run: DryRun) -> RenderableType:
    """Draw the header and the tables of what the ranks hold and send; 80 columns are enough."""
    parts: list[RenderableType] = [_header(run)]
    parts += [Text(run.layout.pipeline.summary)] if run.layout.pipeline is not None else []
    parts += [_at_rest_table(run.ranks), *_moves_tables(run), _peak_table(run.ranks)]
    simulated = [rank for rank in run.ranks if rank.num_simulated]
    parts += [_wire_table(simulated)] if simulated else []
    parts.append(Text(_footer(run), style="dim"))
    return Group(*(Padding(block, (1, 1, 0, 1), expand=False) for block in parts))


def _at_rest_table(ranks: Sequence[RankFigures]) -> Table:
    """Return a table of stages, parameters and states, with a row for each memory that stores any."""
    tiers = [rank.layout.bytes_by_tier(rank.layout.mesh.index_along(SHARD_AXES, rank.rank)) for rank in ranks]
    totals = [sum(sum(of_tier.values()) for of_tier in by_tier.values()) for by_tier in tiers]
    unit, shown = _unit(max(totals))
    table = _table(f"at rest, {unit}", "stages", "held", "in", *_ROLES.values(), "total")
    for rank, by_tier in zip(ranks, tiers, strict=True):
        pipeline = rank.layout.pipeline
        stages = "-" if pipeline is None else ", ".join(map(str, sorted(pipeline.held)))
        labels = [f"rank {rank.rank:,}", stages, format_count(rank.layout.numel)]
        for tier, roles in by_tier.items():
            table.add_row(*labels, _TIERS[tier], *map(shown, (*(roles[role] for role in _ROLES), sum(roles.values()))))
            labels = ["", "", ""]
    if len(ranks) > 1:
        table.add_row("largest", *[""] * (len(table.columns) - 2), shown(max(totals)), style="bold")
    return table


def _moves_tables(run: DryRun) -> Iterator[Table]:
    """Yield a table of what moves between memories in a step of the first rank; none where nothing does."""
    if moves := run.layout.bytes_across(run.config.batch.accumulation or 1):
        table = _table("a step moves from", "to", "bytes")
        for (source, target), num_bytes in moves.items():
            table.add_row(_TIERS[source], _TIERS[target], _bytes(num_bytes))
        yield table


def _peak_table(ranks: Sequence[RankFigures]) -> Table:
    """Return a table of the device's memory at its peak, by category."""
    used = [category for category in Category if any(rank.peak[category] for rank in ranks)]
    rows = [[*(rank.peak[category] for category in used), rank.peak_bytes] for rank in ranks]
    unit, shown = _unit(max(row[-1] for row in rows))
    table = _table(f"peak, {unit}", *(_CATEGORIES.get(category, category.value) for category in used), "total")
    for rank, row in zip(ranks, rows, strict=True):
        table.add_row(f"rank {rank.rank:,}{'' if rank.num_simulated else ', about'}", *map(shown, row))
    if len(ranks) > 1:
        table.add_row("largest", *(shown(max(column)) for column in zip(*rows, strict=True)), style="bold")
    return table


def _wire_table(ranks: Sequence[RankFigures]) -> Table:
    """Return a table, by axis and collective, of the least and the most that a rank sends."""
    table = _table("a step sends over", "collective", "calls", "least", "most", "by rank")
    for axis, op in sorted({call_kind for rank in ranks for call_kind in rank.wire_bytes}):
        sizes = {rank.rank: rank.wire_bytes.get((axis, op), 0) for rank in ranks}
        most = max(ranks, key=lambda each: (sizes[each.rank], -each.rank))
        calls, least, highest = f"{most.num_calls[axis, op]:,}", min(sizes.values()), sizes[most.rank]
        table.add_row(axis, op.replace("_", "-"), calls, _bytes(least), _bytes(highest), f"{most.rank:,}")
    totals = [sum(rank.wire_bytes.values()) for rank in ranks]
    most = max(ranks, key=lambda each: sum(each.wire_bytes.values()))
    calls = f"{sum(most.num_calls.values()):,}"
    table.add_row("total", "", calls, _bytes(min(totals)), _bytes(max(totals)), f"{most.rank:,}", style="bold")
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        is_text = column in (columns[0], "collective", "to", "stages", "in")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    return table


def _unit(num_bytes: int) -> tuple[str, Callable[[int], str]]:
    """Return one unit for a table with this largest size, and the function that writes a size in it."""
    name, unit_bytes = next((unit for unit in _UNITS if num_bytes >= unit[1]), _UNITS[-1])
    return name, lambda size: f"{size / unit_bytes:,.2f}" if size else "-"


def _bytes(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"


def _footer(run: DryRun) -> str:
    simulated, estimated = (
        [rank for rank in run.ranks if (rank.num_simulated > 0) == is_simulated] for is_simulated in (True, False)
    )
    about = ""
    if estimated:
        about = f"{_numbers(estimated)} estimated by the planner, since a simulation takes longer than its limit; "
        about += "shardwise plan --dry-run FILE --simulate 600 waits for it"
    if not simulated:
        return about
    num_all, numbers = run.config.batch.accumulation or 1, sorted({rank.num_simulated for rank in simulated})
    few = " to ".join(f"{number:,}" for number in dict.fromkeys((numbers[0], numbers[-1])))
    text = f"{_numbers(simulated)} simulated in {run.elapsed_s:.1f} s; nothing was started and no data read"
    if numbers[0] < num_all and run.layout.pipeline is None:
        text += f". {few} of {num_all:,} micro-batches were simulated: each further one does what the one before did"
    elif numbers[0] < num_all:
        text += (
            f". {few} of {num_all:,} micro-batches were simulated: a rank holds as many at once with them. Calls, "
            "what is sent and what sent gradients hold are extrapolated, as each micro-batch adds the same"
        )
    if run.layout.mesh.pp > len(run.ranks):
        text += ". shardwise plan --dry-run --ranks stages has a rank of each stage"
    return f"{text}. {about}" if about else text


def _numbers(ranks: Sequence[RankFigures]) -> str:
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(f'{rank.rank:,}' for rank in ranks)}"


def _header(run: DryRun) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", width=11)
    config, mesh = run.config, run.layout.mesh
    model = f"{run.model.words}{sparse_words(config, run.model.num_heads)}, {run.model.vocab_size:,} tokens"
    grid.add_row("model", Text(model, style="bold"))
    grid.add_row("layout", f"{layout_line(config, mesh.world_size)}, {precision_line(config.precision)}")
    if run.layout.pipeline is not None:
        grid.add_row("pipeline", _pipeline_line(config, run.layout.pipeline))
    batch = batch_equation(config.batch, mesh.num_data_ranks, mesh.pp > 1)
    grid.add_row("batch", f"{batch}, {config.data.seq_len:,} tokens each")
    if num_bytes := checkpoint_bytes(config, run.layout, run.model.num_params):
        grid.add_row("checkpoint", f"{format_bytes(num_bytes)} by all ranks together")
    row = kind_of(config.run.device)
    more = "; run.device=cuda for NCCL's" if row.is_cpu else ""
    grid.add_row(
        "device",
        f"{row.name}: {row.backend if row.is_cpu else row.backend.upper()}'s collectives{more}",
    )
    return grid


def _pipeline_line(config: ResolvedConfig, pipeline: PipelineLayout) -> str:
    """Describe the schedule and its bubble if a forward and both halves of a backward take equally long."""
    schedule, placement = config.pipeline.schedule, pipeline.placement
    num_micro_batches, num_per_rank = config.batch.accumulation or 1, placement.stages_per_rank
    stages = f" x {num_per_rank} stages" if num_per_rank > 1 else ""
    line = f"{schedule} over {placement.num_ranks} ranks{stages}, {num_micro_batches} micro-batches; "
    share = bubble_share(schedule, placement.num_ranks, num_micro_batches, config.pipeline.virtual_stages, OpTimes())
    return line + (
        "the bubble has no closed form: see shardwise timeline"
        if share is None
        else f"bubble {share:.1%} by the formula"
    )
