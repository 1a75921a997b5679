"""Encoded states off the device: the bits, bytes and checkpoints of those on it; also of a model split over ranks."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from harness.combinations import cover
from harness.exact import (
    CHUNK_NUMEL,
    NUM_STEPS,
    ExactModel,
    assert_equal_bits,
    states_in,
    swap_files,
    take_steps,
    train,
    weighted_sum,
)
from harness.pool import WorkerPool
from harness.training import make_config
from shardwise import Engine, initialize
from shardwise.offload.nvme import SwapError
from shardwise.offload.worker import HostWorkError
from shardwise.runtime.memory_tracker import Category
from shardwise.zero import stored_step

# tiers of parameters, gradients and optimizer
WHERE: Final = {
    "host": ("device", "device", "host"),
    "nvme": ("device", "device", "nvme"),
    "all host": ("host", "host", "host"),
    "all nvme": ("nvme", "nvme", "nvme"),
    "apart": ("host", "device", "nvme"),
}


def tiers_of(where: str, folder: Path, **more: Any) -> dict[str, Any]:
    tiers = dict(zip(("params", "grads", "optimizer"), WHERE[where], strict=True))
    path = {"nvme_path": str(folder)} if "nvme" in tiers.values() else {}
    return {**tiers, **path, **more}


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "options",
    cover(
        {
            "where": list(WHERE),
            "states": ["int8", "bf16"],
            "stage": [1, 2, 3],
            "ranks": [1, 2],
            "accumulation": [1, 2],
            "share": [0.0, 0.4],
        },
        lambda row: row["stage"] == 3 or WHERE[row["where"]][0] == "device",
    ),
)
def test_states_and_updates_are_the_bits_of_the_device(
    ranks: WorkerPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    more = {"optimizer_on_device": options["share"]}
    sections = {
        "zero": {"stage": options["stage"]},
        "batch": {"accumulation": options["accumulation"]},
        "tiers": tiers_of(options["where"], tmp_path, **more),
    }
    (expected, *_), *_ = ranks(1).run(train, "adamw", options["states"], {"zero": {"stage": 0}})
    for actual, counted, at_rest in ranks(options["ranks"]).run(train, "adamw", options["states"], sections):
        assert_equal_bits(actual, expected)
        assert counted == at_rest
        assert counted[WHERE[options["where"]][2]] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["host", "nvme"])
@pytest.mark.parametrize("name", ["sgd", "lion", "adagrad"])
def test_other_optimizers_step_as_on_the_device(ranks: WorkerPool, tmp_path: Path, name: str, where: str) -> None:
    (expected, *_), *_ = ranks(1).run(train, name, "int8", {})
    sections = {"zero": {"stage": 3}, "tiers": tiers_of(where, tmp_path)}
    (actual, *_), *_ = ranks(2).run(train, name, "int8", sections)
    assert_equal_bits(actual, expected)
    (plain, *_), *_ = ranks(2).run(train, name, "master", sections)
    is_small = {key: key.split()[0].endswith(("norm", "bias")) for key in plain}
    assert_equal_bits(*({key: each[key] for key in plain if is_small[key]} for each in (actual, plain)))
    assert any(not torch.equal(actual[key], plain[key]) for key in plain)


def test_narrow_parameters_follow_the_masters(ranks: WorkerPool, tmp_path: Path) -> None:
    precision = {"precision": {"param": "bf16", "reduce": "fp32"}}
    (expected, *_), *_ = ranks(1).run(train, "adamw", "int8", precision)
    for where in ("host", "all nvme"):
        sections = {**precision, "zero": {"stage": 3}, "tiers": tiers_of(where, tmp_path)}
        (actual, *_), *_ = ranks(1).run(train, "adamw", "int8", sections)
        assert_equal_bits(actual, expected)


@pytest.mark.parametrize("states", ["int8", "bf16"])
@pytest.mark.parametrize(
    ("before", "after"), [("device", "host"), ("host", "all nvme"), ("nvme", "device"), ("all nvme", "apart")]
)
def test_a_checkpoint_goes_on_in_another_tier(
    ranks: WorkerPool, tmp_path: Path, before: str, after: str, states: str
) -> None:
    def sections(where: str, stage: int) -> dict[str, Any]:
        return {"zero": {"stage": stage}, "tiers": {} if where == "device" else tiers_of(where, tmp_path / "swap")}

    halfway = str(tmp_path / "half")
    (expected, *_), *_ = ranks(1).run(train, "adamw", states, {}, ("", ""), False, 2 * NUM_STEPS)
    ranks(2).run(train, "adamw", states, sections(before, 2 if before in ("host", "nvme") else 3), ("", halfway))
    for num_ranks in (1, 2):
        (actual, *_), *_ = ranks(num_ranks).run(train, "adamw", states, sections(after, 3), (halfway, ""))
        assert_equal_bits(actual, expected)


def test_fp32_states_go_on_encoded_and_back(ranks: WorkerPool, tmp_path: Path) -> None:
    places = [str(tmp_path / name) for name in ("exact", "encoded", "device")]
    host = {"zero": {"stage": 2}, "tiers": tiers_of("host", tmp_path)}
    (exact, *_), *_ = ranks(2).run(train, "adamw", "master", host, ("", places[0]))
    (encoded, *_), *_ = ranks(2).run(train, "adamw", "int8", host, (places[0], places[1]))
    (on_device, *_), *_ = ranks(1).run(train, "adamw", "int8", {}, (places[0], places[2]))
    assert_equal_bits(encoded, on_device)
    (loaded, *_), *_ = ranks(2).run(train, "adamw", "int8", host, (places[0], ""), False, 0)
    for key, value in exact.items():
        assert (loaded[key] - value).norm() <= 0.03 * value.norm()
    (again, *_), *_ = ranks(2).run(train, "adamw", "master", host, (places[1], ""))
    (expected, *_), *_ = ranks(1).run(train, "adamw", "master", {}, (places[2], ""))
    assert again["blocks.0.up.weight step"] == 3 * NUM_STEPS
    for key, value in expected.items():
        torch.testing.assert_close(again[key], value, rtol=1e-6, atol=1e-7, msg=key)
    assert not torch.equal(again["blocks.0.up.weight exp_avg"], exact["blocks.0.up.weight exp_avg"])


@pytest.mark.parametrize("states", ["int8", "bf16"])
@pytest.mark.parametrize(
    ("num_ranks", "sections"),
    [
        (2, {"zero": {"stage": 0}, "mesh": {"tp": 2}}),
        (4, {"zero": {"stage": 3}, "mesh": {"tp": 2}}),
        (4, {"zero": {"stage": 2}, "mesh": {"tp": 2}, "tiers": {"optimizer": "host"}}),
    ],
)
def test_a_model_split_over_ranks_has_the_bits_of_one_rank(
    ranks: WorkerPool, num_ranks: int, sections: dict[str, Any], states: str
) -> None:
    """Each rank encodes its own blocks of the matrices, which tp cuts by rows and by columns."""
    (expected, *_), *_ = ranks(1).run(train, "adamw", states, {}, ("", ""), True)
    for actual, counted, at_rest in ranks(num_ranks).run(train, "adamw", states, sections, ("", ""), True):
        assert_equal_bits(actual, expected)
        assert counted == at_rest


@pytest.mark.quick(2)
@pytest.mark.parametrize(("optimizer", "to"), [("host", "nvme"), ("host", "host"), ("nvme", "nvme")])
def test_states_that_leave_their_tier_come_back_as_they_were(tmp_path: Path, optimizer: str, to: Any) -> None:
    torch.manual_seed(0)
    with make_engine(tmp_path, optimizer) as engine:
        take_steps(engine, 0, 1, 1)
        before = states_in(engine)
        held = engine.tiers.memory.snapshot().live_bytes[Category.OPTIMIZER]
        engine.offload(to=to, path=tmp_path if to == "nvme" else None)
        if (optimizer, to) == ("host", "nvme"):
            assert engine.tiers.memory.snapshot().live_bytes[Category.OPTIMIZER] == 0 < held
        engine.reload()
        assert_equal_bits(states_in(engine), before)
        assert engine.tiers.memory.snapshot().live_bytes[Category.OPTIMIZER] == held
        take_steps(engine, 0, 1, 1)
        found = states_in(engine)
    expected, *_ = train(0, 1, "adamw", "int8", {}, ("", ""), False, 2 * NUM_STEPS)
    assert_equal_bits(found, expected)


def thawed(folder: Path, optimizer: str) -> dict[str, Tensor]:
    """The states after steps in which a weight was frozen, and as many in which it is trained."""
    torch.manual_seed(0)
    model = ExactModel()
    model.blocks[1].up.weight.requires_grad_(False)
    with make_engine(folder, optimizer, model) as engine:
        take_steps(engine, 0, 1, 1)
        model.blocks[1].up.weight.requires_grad_(True)
        take_steps(engine, 0, 1, 1)
        return states_in(engine)


@pytest.mark.parametrize("optimizer", ["host", "nvme"])
def test_what_is_trained_from_half_way_on_has_the_bits_of_the_device(tmp_path: Path, optimizer: str) -> None:
    found, expected = thawed(tmp_path, optimizer), thawed(tmp_path, "device")
    assert_equal_bits(found, expected)
    assert (found["blocks.1.up.weight step"], found["blocks.1.up.bias step"]) == (NUM_STEPS, 2 * NUM_STEPS)


def make_engine(folder: Path, optimizer: str = "nvme", model: ExactModel | None = None) -> Engine:
    sections = {
        "precision": {"param": "fp32", "states": "int8"},
        "optimizer": {"name": "adamw", "lr": 1e-2, "momentum": 0.9},
        "tiers": {"optimizer": optimizer, **({"nvme_path": str(folder)} if optimizer == "nvme" else {})},
        "batch": {"micro_size": 8},
    }
    return initialize(model or ExactModel(), make_config(1, sections), loss_fn=weighted_sum)


def after_damage(folder: Path, damage: Any) -> dict[str, Tensor] | Exception:
    """The states after some steps, with damage done to a file of codes between them; or the error."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_step, "CHUNK_NUMEL", CHUNK_NUMEL)
        engine = make_engine(folder)
        try:
            take_steps(engine, 0, 1, 1)
            engine.tiers.wait_idle()
            engine.tiers.trim()  # so that the next step reads the file
            (file,) = swap_files(folder, "blocks.1.exp_avg_sq")
            damage(file)
            take_steps(engine, 0, 1, 1)
            return states_in(engine)
        except (HostWorkError, SwapError) as error:
            return error
        finally:
            with suppress(HostWorkError):
                engine.close()


def flip(file: Path) -> None:
    """Turn the bits of a code over, as a disk would that says nothing."""
    with file.open("r+b") as opened:
        opened.seek(257)  # of the weight's second column, after the block of `norm`
        code = opened.read(1)[0]
        opened.seek(257)
        opened.write(bytes([code ^ 0xFF]))


def test_a_file_of_codes_that_is_cut_is_refused_by_its_name(tmp_path: Path) -> None:
    found = after_damage(tmp_path, lambda file: os.truncate(file, 4096))
    assert isinstance(found, HostWorkError | SwapError)
    assert found.code == "swap-file-cut"
    assert "blocks.1.exp_avg_sq" in str(found)


def test_a_code_that_a_disk_turned_over_changes_its_element_alone(tmp_path: Path) -> None:
    expected, found = after_damage(tmp_path, lambda file: None), after_damage(tmp_path, flip)
    assert isinstance(expected, dict)
    assert isinstance(found, dict)
    changed = {name: (found[name] != value).nonzero() for name, value in expected.items()}
    places = [each for name, each in changed.items() if name.startswith("blocks.1.up.weight") and len(each)]
    assert places
    assert all(len(each) == 1 for each in places)
    assert all(not len(each) for name, each in changed.items() if not name.startswith("blocks.1.up.weight"))
    assert all(value.isfinite().all() for value in found.values())
