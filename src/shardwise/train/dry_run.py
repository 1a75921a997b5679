"""What a job's rank 0 would hold and send, without starting any: the job's model, simulated, and the picture of it.

The data are not read, so the vocabulary is the preset's where the config gives no size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.config import Config, Tier, batch_equation
from shardwise.layout.layout import OPTIMIZER_STATES
from shardwise.layout.mesh_shape import SHARD_AXES
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.memory import Category, format_bytes
from shardwise.models import Decoder, DecoderConfig, decoder_config, lm_loss, num_params
from shardwise.simulation import Simulation, simulate
from shardwise.train.job import check_job, layout_line, wanted_device
from shardwise.train.progress import short_count
from shardwise.train.tiers import tiers_line

_LABEL_WIDTH = 11


@dataclass(frozen=True)
class DryRun:
    """A job and the simulation of its rank 0; the config is resolved."""

    config: Config
    shape: DecoderConfig
    simulation: Simulation


def dry_run(config: Config, world_size: int) -> DryRun:
    """Simulate rank 0 of a job.

    Args:
        config: as `job_config` returns it.
        world_size: of the job; this machine need not have as many devices.

    Raises:
        ConfigError: what is wrong with the config, as for a run, or that its optimizer cannot be simulated.
    """
    config, _ = check_job(config, world_size)
    config = config.model_copy(update={"run": config.run.model_copy(update={"device": wanted_device(config)})})
    shape = decoder_config(config.model, max_seq_len=config.data.seq_len)

    def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.zeros(config.batch.micro_size or 1, config.data.seq_len, dtype=torch.int64)  # [B, S]
        return tokens, tokens

    simulation = simulate(
        lambda: Decoder(shape),
        config,
        make_batch,
        loss_fn=lambda logits, batch: lm_loss(logits, batch[1]),
        rank=0,
        world_size=world_size,
    )
    return DryRun(config, shape, simulation)


def render(run: DryRun) -> RenderableType:
    """The header, and what rank 0 holds and sends; 80 columns will do."""
    simulation = run.simulation
    footer = Text(
        f"rank 0 simulated in {simulation.elapsed_s:.1f} s; nothing was started and no data read", style="dim"
    )
    tables: list[Table | Text] = [_header(run), _memory_table(simulation), *_tier_tables(run), _wire_table(simulation)]
    parts = [Padding(table, (1, 1, 0, 1), expand=False) for table in (*tables, footer)]
    return Group(*parts)


def _header(run: DryRun) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", width=_LABEL_WIDTH)
    for label, text in _header_lines(run):
        grid.add_row(label, Text(text, style="bold" if label == "model" else ""))
    return grid


def _header_lines(run: DryRun) -> Iterator[tuple[str, str]]:
    config, mesh = run.config, run.simulation.layout.mesh
    params, layers = short_count(num_params(run.shape)), f"{run.shape.num_layers} layers of {run.shape.hidden_size:,}"
    yield "model", f"{config.model.preset}, {params} parameters, {layers}, {run.shape.vocab_size:,} tokens"
    recompute = "nothing" if config.recompute.mode == "none" else config.recompute.mode
    yield "layout", f"{layout_line(config, mesh)}, {config.precision.param}, recompute {recompute}"
    if tiers := tiers_line(run.simulation.layout):
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
    """Of what a checkpoint has of each parameter, once; 0 for an optimizer whose states are known only when it runs."""
    if run.config.optimizer.name.lower() not in OPTIMIZER_STATES:
        return 0
    layout = run.simulation.layout
    has_master = any(state.name == "master" for state in layout.states)
    saved = [
        state for state in layout.states if state.role == "optimizer" or (state.name == "param" and not has_master)
    ]
    return num_params(run.shape) * sum(DTYPE_BYTES[state.dtype] for state in saved)


def _memory_table(simulation: Simulation) -> Table:
    table = _table("rank 0's device", "at rest", "at the peak")
    at_rest, peak = simulation.at_rest.live_bytes, simulation.peak.peak_live_bytes
    for category in Category:
        if at_rest[category] or peak[category]:
            table.add_row(category.value, _bytes(at_rest[category]), _bytes(peak[category]))
    table.add_row("total", _bytes(sum(at_rest.values())), _bytes(sum(peak.values())), style="bold")
    return table


def _tier_tables(run: DryRun) -> Iterator[Table]:
    """Where states rest and what moves in a step; nothing where all rest on the device."""
    layout = run.simulation.layout
    by_tier = layout.bytes_by_tier(layout.mesh.index_along(SHARD_AXES, run.simulation.rank))
    if set(by_tier) == {"device"}:
        return
    rests = _table("at rest in", *_ROLES.values(), "total")
    for tier, totals in by_tier.items():
        row_bytes = [*(totals[role] for role in _ROLES), sum(totals.values())]
        rests.add_row(_TIER_NAMES[tier], *map(_bytes, row_bytes))
    yield rests
    moves = _table("a step moves from", "to", "bytes")
    for (source, target), num_bytes in layout.bytes_across(run.config.batch.accumulation or 1).items():
        moves.add_row(_TIER_NAMES[source], _TIER_NAMES[target], _bytes(num_bytes))
    yield moves


_ROLES: Final[Mapping[str, str]] = MappingProxyType(
    {"param": "parameters", "grad": "gradients", "optimizer": "optimizer"}
)
_TIER_NAMES: Final[Mapping[Tier, str]] = MappingProxyType({"device": "device", "host": "host", "nvme": "NVMe"})


def _wire_table(simulation: Simulation) -> Table:
    table = _table("a step sends over", "collective", "calls", "bytes")
    for (axis, op), num_bytes in simulation.wire_bytes.items():
        num_calls = sum((call.axis, call.op) == (axis, op) for call in simulation.calls)
        table.add_row(axis, op.replace("_", "-"), f"{num_calls:,}", _bytes(num_bytes))
    total_bytes = sum(simulation.wire_bytes.values())
    table.add_row("total", "", f"{len(simulation.calls):,}", _bytes(total_bytes), style="bold")
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        is_text = column in (columns[0], "collective", "to")
        table.add_column(column, justify="left" if is_text else "right", min_width=12, no_wrap=True)
    return table


def _bytes(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"
