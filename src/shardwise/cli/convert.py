"""Run the command `shardwise convert`: it prints a DeepSpeed config as one of Shardwise's, with comments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import click

from shardwise.cli.command import COUNT, FILE, OUTPUT, write_file
from shardwise.config.resolve import Config, ConfigError

_SCHEDULES: Final = MappingProxyType({"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"})


@click.command()
@click.argument("file", type=FILE, metavar="DS_CONFIG.JSON", required=False)
@click.option("--out", type=OUTPUT, help="write it to a file instead")
@click.option("--world-size", type=COUNT, help="ranks, to check the batch's equation")
@click.option("--markdown", is_flag=True, help="print the page docs/deepspeed-config.md instead")
def convert(file: Path | None, out: Path | None, world_size: int | None, markdown: bool) -> int:
    """Print a ds_config.json as a config of Shardwise's.

    What has no effect, is unknown or is refused stands in it as comments.
    """
    if markdown:
        print(reference_page())
        return 0
    if file is None:
        raise ConfigError("no-config-file", "convert takes a file; give the path of a ds_config.json")
    text = _as_toml(file, world_size)
    if out is None:
        print(text, end="")
        return 0
    write_file(out, text)
    print(f"wrote {out}")
    return 0


def _as_toml(path: Path, world_size: int | None) -> str:
    from shardwise.compat.deepspeed.config import read_config, translate
    from shardwise.planner.configs import to_toml

    found = translate(read_config(path), world_size, refuse=False)
    config = Config.from_dict(found.config)
    comments = [*(f"refused in a run: {line}" for line in found.refused), *found.notes]
    settings = dict(_schedule(found.section("scheduler"), comments))
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


def reference_page() -> str:
    """Return the docs page of all keys as Markdown: a table for each section."""
    from shardwise.compat.deepspeed.keys import CLASSES, KEYS

    parts = [
        _HEAD,
        "\n".join(["| class | a key of it |", "|---|---|", *(f"| {a} | {b} |" for a, b in CLASSES.items())]),
    ]
    sections: dict[str, dict[tuple[str, str], list[str]]] = {}
    for key in KEYS.values():
        top, _, leaf = key.path.partition(".") if "." in key.path else ("", "", key.path)
        what = {"M": key.text, "N": f"no effect: {key.text}", "R": f"refused: {key.text}"}[key.action]
        sections.setdefault(top, {}).setdefault((key.kind, what), []).append(f"`{leaf}`")
    for section, rows in sections.items():
        table = [f"| {', '.join(names)} | {kind} | {what} |" for (kind, what), names in rows.items()]
        title = f"## {section}" if section else "## At the top"
        parts.append("\n".join([title, "", "| key | class | here |", "|---|---|---|", *table]))
    return "\n\n".join(parts)


_HEAD: Final = """# DeepSpeed's config keys

Made from the table of `shardwise.compat.deepspeed.keys` by `shardwise convert --markdown`. The same table translates a
`ds_config.json` when a script runs by `shardwise.compat.deepspeed`, and makes its messages; `shardwise convert
ds_config.json` prints the translation as a config of Shardwise's, with what was left out as comments.

A value `"auto"` that was not filled in counts as absent, which is said once. A dotted key at the top, such as
`"zero_optimization.stage"`, is read as a path, and wins over the section. An unknown key is said with the nearest
known one, and fails nothing. Keys with `stage3_` are also known without it, and `bf16` as `bfloat16`. The batch is an
equation: `train_batch_size` = `train_micro_batch_size_per_gpu` x `gradient_accumulation_steps` x data ranks; two give
the third.

A section `"shardwise"` holds sections of Shardwise's own config, which reach what DeepSpeed's keys do not:
`{"shardwise": {"mesh": {"tp": 2}, "recompute": {"mode": "full"}}}`.

What the JSON says nothing about is as in DeepSpeed: stage 0, clipping at 1.0, a step without finite gradients is
skipped (`run.on_nonfinite`). In stage 3 small parameters stay whole (`zero.keep_whole_below`), and ranks may run
different blocks (`zero.lockstep`)."""
