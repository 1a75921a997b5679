"""A campaign: what comes from elsewhere and was changed is read bit-equal or refused, in one line and at once."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from harness import mutations
from harness.campaign import KINDS, run_apart, run_here, table
from harness.campaign_kinds import ERRORS
from harness.mutations import (
    LimitError,
    forge,
    fresh,
    mutated,
    spared,
)
from harness.refusals import refused
from harness.states import engine_of, take_steps
from shardwise import CheckpointError
from shardwise.checkpoint.manifest import MANIFEST_NAME

# Of each kind: two thousand and more in all.
SEEDS = 110


def test_some_mutations_are_read_or_refused(tmp_path: Path) -> None:
    bad = [each for kind in KINDS for each in run_here(kind, range(2), tmp_path / "made") if each.is_bad]
    assert not bad, bad


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_many_mutations_of_a_kind_are_read_or_refused(tmp_path: Path, kind: str) -> None:
    """In a process of its own, whose time and memory are measured: ten seconds, and 1 GiB, which few come near."""
    outcomes = run_apart([kind], 2, 2 + SEEDS, tmp_path / "made")
    print(table(outcomes))
    assert len(outcomes) == SEEDS
    bad = [each for each in outcomes if each.is_bad]
    assert not bad, bad[:5]


def test_the_watch_sees_what_it_is_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait that takes no time of the processor, memory of Python's and of torch's, and a link that is followed."""
    monkeypatch.setattr(mutations, "_WALL_S", 0.2)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(LimitError, match="not done"):
        spared(tmp_path, (tmp_path / "pipe").read_text, ERRORS)
    monkeypatch.setattr(mutations, "_WALL_S", 60.0)
    for num_bytes, take in ((8 * 2**20, bytearray), (2**28, lambda number: torch.ones(number, dtype=torch.uint8))):
        with pytest.raises(LimitError, match="bytes"):
            spared(tmp_path, lambda number=num_bytes, take=take: take(number), ERRORS)
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(AssertionError, match="passwd"):
        spared(tmp_path, (tmp_path / "link").read_text, ERRORS)


def with_adamw(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)
    return {"optimizer": optimizer, "scheduler": CosineAnnealingLR(optimizer, T_max=7)}


ENGINES: tuple[tuple[Any, dict[str, Any]], ...] = (
    (with_adamw, {}),
    (with_adamw, {"tiers": {"optimizer": "host"}}),
    (None, {"precision": {"param": "fp16"}}),
    (None, {"scheduler": {"name": "linear", "total_steps": 10}}),
)


def test_options_that_an_optimizer_refuses_and_a_tensor_without_values_are_refused(tmp_path: Path) -> None:
    """They are kinds that the next test has found."""
    with engine_of(arguments=with_adamw) as engine:
        take_steps(engine, 1)
        engine.save(tmp_path / "whole")
        (whole,) = (tmp_path / "whole").glob("step-*")
        for key, value in (("betas", [0.9, 1.0]), ("betas", [0.9, 1e300]), ("eps", -1.0), ("lr", 1e39)):
            forged = {key: value}
            folder = fresh(whole, tmp_path / "forged" / whole.name)
            forge(folder, lambda saved, new=forged: saved["trajectory"]["optimizer"]["groups"][0].update(new))
            with refused("model-misfit"):
                engine.load(folder)
        folder = fresh(whole, tmp_path / "forged" / whole.name)
        forge(folder, lambda saved: saved["tensors"][-1]["states"].clear())
        with refused("elements-missing"):
            engine.load(folder)
        engine.load(whole)
        take_steps(engine, 1)


@pytest.mark.full
@pytest.mark.parametrize("number", range(len(ENGINES)))
def test_engines_load_or_refuse_what_a_forged_manifest_says(tmp_path: Path, number: int) -> None:
    """Mostly of what a run goes on with; an engine that refuses it can load the whole one, and steps."""
    arguments, sections = ENGINES[number]
    with engine_of(arguments=arguments, **sections) as engine:
        take_steps(engine, 2)
        engine.save(tmp_path / "whole")
    (whole,) = (tmp_path / "whole").glob("step-*")
    for index in range(150):
        draw = random.Random(f"{number} {index}")
        folder = fresh(whole, tmp_path / "forged" / whole.name)
        old = json.loads((folder / MANIFEST_NAME).read_text())["manifest"]
        section = draw.choice(["trajectory", "trajectory", "layout", "tensors", "step"])
        new = {**old, **mutated({section: old[section]}, draw)}
        forge(folder, lambda values, new=new: (values.clear(), values.update(new)))
        try:
            with engine_of(arguments=arguments, **sections) as engine:
                take_steps(engine, 1)
                try:
                    engine.load(folder.parent)
                except CheckpointError:
                    engine.load(whole.parent)
                take_steps(engine, 1)
        except Exception as error:
            raise AssertionError(f"mutation {index}, of {section}: {error!r}") from error
