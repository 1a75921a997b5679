"""Simulates ranks of a job, without starting any, and shows what they would hold and send.

The data are not read, so the vocabulary is the preset's where the config gives no size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.config.resolve import Config, ConfigError, batch_equation
from shardwise.launch.local import default_num_ranks
from shardwise.layout.layout import OPTIMIZER_STATES, Layout
from shardwise.layout.mesh_shape import Coordinate, MeshShape
from shardwise.layout.pipeline_layout import PipelineLayout
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.layout.stage_partition import StagePartition, find_partition
from shardwise.runtime.format import format_bytes
from shardwise.schedule import bubble_share
from shardwise.schedule.simulate import OpTimes
from shardwise.train.job_model import JobModel, job_model
from shardwise.train.setup import check_job, layout_line, sparse_words, tiers_line, wanted_device
from shardwise.verify.dry_run_tables import rank_tables, ranks_tables
from shardwise.verify.few_micro_batches import RankFigures, rank_figures
from shardwise.verify.simulate import RankJob, resolved_for

_LABEL_WIDTH = 11

Choice = Literal["stages", "worst"]
"""Selects one rank of each place in a pipeline, or the one of them with the highest peak."""


@dataclass(frozen=True)
class DryRun:
    """Holds a job and what some of its ranks hold and send; the config is resolved.

    Attributes:
        partition: the stages of its pipeline; None without one.
        elapsed_s: seconds that all simulations took.
        is_worst: whether several ranks were simulated and only the one with the highest peak was kept.
    """

    config: Config
    model: JobModel
    ranks: tuple[RankFigures, ...]
    partition: StagePartition | None
    elapsed_s: float
    is_worst: bool = False

    @property
    def layout(self) -> Layout:
        """Return the layout of the first rank."""
        return self.ranks[0].layout


def dry_run(
    config: Config,
    world_size: int,
    ranks: Sequence[int] | Choice = (0,),
    announce: Callable[[str], None] = lambda doing: None,
) -> DryRun:
    """Simulate ranks of a job.

    Args:
        config: as `job_config` returns it.
        world_size: the job's ranks; this machine need not have as many devices.
        ranks: ranks of the world, or a `Choice` of them.
        announce: called with a few words before each simulation, and once it is known how long that takes.

    Raises:
        ConfigError: the config is wrong, as for a run, or its optimizer cannot be simulated.
    """
    start_s = time.perf_counter()
    config, layout = check_job(config, world_size)
    config = config.model_copy(update={"run": config.run.model_copy(update={"device": wanted_device(config)})})
    model = job_model(config)

    def make_batch() -> Any:
        tokens = torch.zeros(config.batch.micro_size or 1, config.data.seq_len, dtype=torch.int64)  # [B, S]
        return model.batch((tokens, tokens))

    chosen = choose_ranks(layout.mesh, ranks)
    found = []
    for number, rank in enumerate(chosen, 1):
        place = f"simulating rank {rank:,} of {world_size:,} ({number} of {len(chosen)})"
        announce(place)
        made = model.skeleton()
        job = RankJob(made, resolved_for(made, config, rank, world_size), make_batch, rank, model.loss_fn)
        found.append(rank_figures(job, lambda doing, place=place: announce(f"{place}: {doing}")))  # type: ignore[misc]
    if ranks == "worst":
        found = [max(found, key=lambda each: each.peak_bytes)]
    partition = find_partition(model.skeleton(), config) if layout.pipeline is not None else None
    return DryRun(config, model, tuple(found), partition, time.perf_counter() - start_s, ranks == "worst")


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


def choose_ranks(mesh: MeshShape, ranks: Sequence[int] | Choice) -> list[int]:
    """Return the ranks to simulate: of each place in a pipeline the first one, which has the least padding.

    >>> choose_ranks(MeshShape(pp=4, dp_shard=2, tp=2), "stages")
    [0, 4, 8, 12]

    Raises:
        ConfigError: there is no such rank.
    """
    if not isinstance(ranks, str):
        for rank in ranks:
            if not 0 <= rank < mesh.world_size:
                raise ConfigError(
                    "rank-out-of-range",
                    f"rank {rank} is not in a world of {mesh.world_size}; give 0 to {mesh.world_size - 1}",
                )
        return list(dict.fromkeys(ranks))
    return [mesh.rank_of(Coordinate(pp=place)) for place in range(mesh.pp)]


def render(run: DryRun) -> RenderableType:
    """Draw the header and the tables of what the ranks hold and send; 80 columns are enough."""
    tables: list[RenderableType] = [_header(run)]
    if run.partition is not None:
        tables.append(Text(run.partition.describe()))
    if len(run.ranks) == 1:
        tables += rank_tables(run.ranks[0], run.config)
    else:
        tables += ranks_tables(run.ranks)
    tables.append(Text(_footer(run), style="dim"))
    parts = [Padding(table, (1, 1, 0, 1), expand=False) for table in tables]
    return Group(*parts)


def _footer(run: DryRun) -> str:
    ranks = ", ".join(f"{each.rank:,}" for each in run.ranks)
    many = "ranks" if len(run.ranks) > 1 else "rank"
    worst = ", of one rank of each stage that with the highest peak," if run.is_worst else ""
    num_all, numbers = run.config.batch.accumulation or 1, sorted({each.num_simulated for each in run.ranks})
    few = " to ".join(f"{each:,}" for each in dict.fromkeys((numbers[0], numbers[-1])))
    words = f"{many} {ranks}{worst} simulated in {run.elapsed_s:.1f} s; nothing was started and no data read"
    if numbers[0] < num_all and run.layout.pipeline is None:
        words += f". {few} of {num_all:,} micro-batches were simulated: each further one does what the one before did"
    elif numbers[0] < num_all:
        words += (
            f". {few} of {num_all:,} micro-batches were simulated: a rank holds as many at once with them. Calls, "
            "what is sent and what sent gradients hold are extrapolated, as each micro-batch adds the same"
        )
    if run.layout.mesh.pp > len(run.ranks) and not run.is_worst:
        words += ". shardwise plan --dry-run --ranks stages has a rank of each stage"
    return words


def _header(run: DryRun) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", width=_LABEL_WIDTH)
    for label, text in _header_lines(run):
        grid.add_row(label, Text(text, style="bold" if label == "model" else ""))
    return grid


def _header_lines(run: DryRun) -> Iterator[tuple[str, str]]:
    config, mesh = run.config, run.layout.mesh
    sparse = sparse_words(config, run.model.num_heads)
    yield "model", f"{run.model.words}{sparse}, {run.model.vocab_size:,} tokens"
    recompute = "nothing" if config.recompute.mode == "none" else config.recompute.mode
    yield "layout", f"{layout_line(config, mesh)}, {config.precision.param}, recompute {recompute}"
    if run.layout.pipeline is not None:
        yield "pipeline", _pipeline_line(config, run.layout.pipeline)
    elif tiers := tiers_line(run.layout):
        yield "at rest", tiers
    yield (
        "batch",
        f"{batch_equation(config.batch, mesh.num_data_ranks, mesh.pp > 1)}, {config.data.seq_len:,} tokens each",
    )
    if num_bytes := _checkpoint_bytes(run):
        yield "checkpoint", f"{format_bytes(num_bytes)} by all ranks together"
    is_cuda = config.run.device == "cuda"
    yield "device", "cuda: NCCL's collectives" if is_cuda else "cpu: gloo's collectives; run.device=cuda for NCCL's"


def _checkpoint_bytes(run: DryRun) -> int:
    """Return the bytes of a checkpoint; 0 for an optimizer whose states are known only when it runs."""
    if run.config.optimizer.name.lower() not in OPTIMIZER_STATES:
        return 0
    layout = run.layout
    has_master = any(state.name == "master" for state in layout.states)
    saved = [
        state for state in layout.states if state.role == "optimizer" or (state.name == "param" and not has_master)
    ]
    return run.model.num_params * sum(DTYPE_BYTES[state.dtype] for state in saved)


def _pipeline_line(config: Config, pipeline: PipelineLayout) -> str:
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
