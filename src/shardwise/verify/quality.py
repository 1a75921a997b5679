"""Measures what fewer bits cost in quality: a small model trains with and without them, once for each of some seeds.

The model is the preset `tiny`, on the config's data, in one process; everything else that a layout changes is left out,
since no layout changes the numbers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwise.config.resolve import Config, ConfigError
from shardwise.train.loop import build_trainer
from shardwise.train.prepare import PreparedData
from shardwise.train.setup import job_config, prepare_job_data, resolve_job


@dataclass(frozen=True)
class Quality:
    """Holds the held-out losses, in nats a token, by seed.

    Attributes:
        codecs: the keys of `precision` that encode something, each with its value.
        seeds: of weights and order of the data.
        exact, encoded: the losses without the codecs, and with them.
        num_steps: the steps of each training.
    """

    codecs: tuple[str, ...]
    seeds: tuple[int, ...]
    exact: tuple[float, ...]
    encoded: tuple[float, ...]
    num_steps: int

    @property
    def shares(self) -> tuple[float, ...]:
        """Return by how much of itself the loss of each seed is higher with fewer bits."""
        return tuple(found / exact - 1 for found, exact in zip(self.encoded, self.exact, strict=True))


def measure_quality(
    config: Config, seeds: Sequence[int], num_steps: int, announce: Callable[[str], None] = lambda doing: None
) -> Quality:
    """Train with and without the codecs of a config, and return the held-out losses.

    Args:
        config: whose `precision` and `data` are taken.
        seeds: one training of each kind for each.
        num_steps: of each training.
        announce: called with a few words before each training.

    Raises:
        ConfigError: the config encodes nothing.
    """
    given_codecs = {key: getattr(config.precision, key) for key in _EXACT}
    codecs = tuple(f"precision.{key}={value}" for key, value in given_codecs.items() if value != _EXACT[key])
    if not codecs:
        exact = " and ".join(f"precision.{key}={value}" for key, value in _EXACT.items())
        raise ConfigError("nothing-encoded", f"{exact} encode nothing; set one to int8 to see what it costs")
    data_keys = [f"data.{key}={getattr(config.data, key)}" for key in ("path", "text_key") if getattr(config.data, key)]
    exact_losses: list[float] = []
    encoded_losses: list[float] = []
    data: PreparedData | None = None
    for number, seed in enumerate(seeds, 1):
        for chosen, found in (((), exact_losses), (codecs, encoded_losses)):
            given = [f"run.steps={num_steps}", f"run.seed={seed}", *chosen, *data_keys]
            job = resolve_job(job_config(None, given), 1, 1)
            data = data or prepare_job_data(job)
            announce(f"training with {' '.join(chosen) or 'no codec'}, seed {number} of {len(seeds)}")
            found.append(_held_out_loss(job, data))
    return Quality(codecs, tuple(seeds), tuple(exact_losses), tuple(encoded_losses), num_steps)


# The values that encode nothing.
_EXACT: Final[Mapping[str, str]] = MappingProxyType({"states": "master", "gather": "param"})


def _held_out_loss(config: Config, data: PreparedData) -> float:
    trainer = build_trainer(config, data)
    found = math.nan
    try:
        for record in trainer.steps(lambda: False, lambda doing: None):  # the last step is evaluated
            found = found if record.eval_loss is None else record.eval_loss
    finally:
        trainer.engine.close(keep_values=False)
    return found


def render(quality: Quality) -> RenderableType:
    """Draw the losses by seed, and what fewer bits cost beside what another seed costs."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("seed", "fp32", "encoded", "higher by"):
        table.add_column(name, justify="right")
    rows = zip(quality.seeds, quality.exact, quality.encoded, quality.shares, strict=True)
    for seed, exact, encoded, share in rows:
        table.add_row(f"{seed}", f"{exact:.4f}", f"{encoded:.4f}", f"{share:+.2%}")
    mean = statistics.fmean(quality.shares)
    spread = (max(quality.exact) - min(quality.exact)) / statistics.fmean(quality.exact)
    words = f"{' '.join(quality.codecs)} changes the held-out loss by {mean:+.2%}"
    line = f"{words} after {quality.num_steps:,} steps; another seed changes it by up to {spread:.2%}"
    return Group(table, Text(line))
