"""Run the command `shardwise convert`: it prints a DeepSpeed config as one of Shardwise's, with comments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import click

from shardwise.cli.command import FILE, Count, OutputFile
from shardwise.config.errors import printable_lines
from shardwise.config.resolve import Config
from shardwise.config.written_files import write_asked
from shardwise.report.console import write_line

_SCHEDULES: Final = MappingProxyType({"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"})


@click.command()
@click.argument("file", type=FILE, metavar="DS_CONFIG.JSON")
@click.option("--out", type=OutputFile(), help="write it to a file instead")
@click.option("--world-size", type=Count(1), help="ranks, to check the batch's equation")
def convert(file: Path, out: Path | None, world_size: int | None) -> int:
    """Print a ds_config.json as a config of Shardwise's.

    What has no effect, is unknown or is refused stands in it as comments.
    """
    text = printable_lines(_as_toml(file, world_size))  # comments quote the file
    if out is None:
        print(text, end="")
        return 0
    write_asked(out, text)
    write_line(f"wrote {out}")
    return 0


def _as_toml(path: Path, world_size: int | None) -> str:
    from shardwise.compat.deepspeed.config import read_config, translate
    from shardwise.config.toml_text import to_toml

    translation = translate(read_config(path), world_size, refuse=False)
    config = Config.from_dict(translation.config)
    comments = [*(f"refused in a run: {line}" for line in translation.refused), *translation.notes]
    settings = dict(_schedule(translation.section("scheduler"), comments))
    if config.optimizer.clip_norm is None:
        settings["optimizer.clip_norm"] = 1.0
        comments.append("gradient_clipping=0: TOML cannot say none; give optimizer.clip_norm=none beside this file")
    config = config.override([f"{key}={value}" for key, value in settings.items()])
    head = [f"# Made from {path.name} by shardwise convert; docs/deepspeed-config.md has all keys."]
    return "\n".join([*head, *(f"# {line}" for line in comments), "", to_toml(config)])


def _schedule(section: Mapping[str, Any], comments: list[str]) -> Iterator[tuple[str, object]]:
    """Yield the settings of the nearest schedule of ours; say in the comments how it differs."""
    name, params = section.get("type"), section.get("params", {})
    if name is None:
        return
    if name not in _SCHEDULES:
        comments.append(f"scheduler.type={name} is no schedule of a config; pass one by initialize(scheduler=...)")
        return
    yield "scheduler.name", _SCHEDULES[name]
    yield "scheduler.warmup_steps", params.get("warmup_num_steps", 1000)
    if "total_num_steps" in params:
        yield "scheduler.total_steps", params["total_num_steps"]
    yield "scheduler.final_ratio", params.get("cos_min_ratio", 1e-4) if name == "WarmupCosineLR" else 0.0
    if "warmup_max_lr" in params:
        yield "optimizer.lr", params["warmup_max_lr"]
    if params.get("warmup_type", "log") != "linear":
        comments.append("the warm-up of a config is linear; DeepSpeed's is logarithmic where warmup_type is not linear")
