"""Facts of a model under a few keys of a config."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwise import Config
from shardwise.construction.scan import scan_model
from shardwise.layout.facts import ModelFacts, StageUnit


def scanned(model: nn.Module, blocks: Sequence[str] | None = None) -> ModelFacts:
    """Of a model whose blocks are named by patterns."""
    return scan_model(model, Config.from_dict({"zero": {"blocks": blocks}}))


def stage_units_of(
    model: nn.Module, units: Sequence[str] | None = None, replicate: Sequence[str] | None = None
) -> tuple[StageUnit, ...]:
    """Where a pipeline may cut a model, by `pipeline.units` and `pipeline.replicate`."""
    pipeline = {"units": units, "replicate": replicate}
    return scan_model(model, Config.from_dict({"mesh": {"pp": 2}, "pipeline": pipeline})).stage_units
