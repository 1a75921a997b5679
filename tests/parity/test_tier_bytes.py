"""Bytes in each tier and what a step moves between them equal the Layout's figures, by counts of the tests' own."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.combinations import cover, pairwise, product
from harness.live_bytes import LiveBytes, settled_bytes, storage_bytes
from harness.models import CASES, make_batches
from harness.pool import WorkerPool
from harness.tier_bytes import Crossings, HostPages, code_tables, host_tensors, settle, swap_bytes
from harness.training import make_config
from shardwise import Engine, Layout, initialize
from shardwise.layout.precision import DTYPE_BYTES
from shardwise.runtime.memory_tracker import Category

# A file, and each part of one that is read or written, is as many whole blocks as hold it.
BLOCK_BYTES = 4096
PRECISIONS = {
    "fp32": {"param": "fp32"},
    "bf16": {"param": "bf16"},
    "bf16-thin": {"param": "bf16", "accumulate": "param"},
}
OPTIMIZERS = {"adamw": {"name": "adamw"}, "sgd": {"name": "sgd", "momentum": 0.9}}
TIERS = ["device", "host", "nvme"]

Overrides = Mapping[str, Mapping[str, Any]]
Ways = Mapping[tuple[str, str], int]


@dataclass(frozen=True)
class Measured:
    """What one rank held between its third step's last backward and the step, and what that step moved."""

    layout: Layout
    device_bytes: int
    device_tracked_bytes: int
    host_bytes: int
    host_tracked: dict[Category, int]
    swap_bytes: int
    moved: Ways
    moved_counted: Ways
    kept_bytes: int
    mixed: Counter[str]


def measure(rank: int, world_size: int, case_name: str, num_micro_batches: int, overrides: Overrides) -> Measured:
    case = CASES[case_name]
    batches = make_batches(case, num_steps=3, world_size=world_size, num_micro_batches=num_micro_batches)
    model = case.build(torch.float32)
    code_tables()  # which stay, and belong to no engine
    with LiveBytes() as live, HostPages() as pages:
        live.mark(tensor for step in batches for batch in step[rank] for tensor in batch.values())
        batch_bytes = live.live_bytes()
        engine = initialize(model, make_config(num_micro_batches, overrides), loss_fn=case.loss)
        for step in batches[:2]:  # the first makes states, and nothing is kept from before it
            engine.train_step(step[rank])
        settle(engine)
        engine.tiers.traffic.reset()
        with Crossings(engine, pages) as seen:
            for batch in batches[2][rank]:
                engine.backward(engine(batch))
            engine.tiers.wait_idle()
            hosts = host_tensors(engine)
            settled_bytes(live)
            device_bytes = _device_bytes(live, hosts, pages) - _scalar_bytes(engine, live) - batch_bytes
            device_tracked_bytes = sum(engine.memory.snapshot().live_bytes.values()) - _counter_bytes(engine)
            host_tracked = engine.tiers.memory.snapshot().live_bytes
            num_swap_bytes = swap_bytes(engine)
            engine.step()
            settle(engine)
        measured = Measured(
            layout=engine.layout,
            device_bytes=device_bytes,
            device_tracked_bytes=device_tracked_bytes,
            host_bytes=storage_bytes(hosts),
            host_tracked=dict(host_tracked),
            swap_bytes=num_swap_bytes,
            moved=dict(seen.bytes),
            moved_counted=engine.tiers.traffic.moved_bytes,
            kept_bytes=engine.tiers.traffic.kept_bytes,
            mixed=seen.mixed,
        )
        engine.close()
    return measured


def _device_bytes(live: LiveBytes, hosts: list[torch.Tensor], pages: HostPages) -> int:
    """Of all storages but the host's, of which a view has been seen now and then."""
    in_host = {id(each.untyped_storage()) for each in hosts}
    storages = live.live_storages()
    return sum(each.nbytes() for each in storages if id(each) not in in_host and not pages.hold(each))


def _scalar_bytes(engine: Engine, live: LiveBytes) -> int:
    """The sum and count of each loss, squared norms, the optimizer's counts of steps, and a number for each piece."""
    found = [group.grads._square for group in engine.parts.sharding.groups if group.grads is not None]
    seen = {id(each) for each in live.live_storages()}
    squares = [each for each in found if each is not None and id(each.untyped_storage()) in seen]
    pieces = [each for group in engine.optimizer.param_groups for each in group["params"]]
    numbers = [each for each in pieces if each.untyped_storage().nbytes() == each.element_size()]
    return storage_bytes([*squares, *numbers, *engine.parts.losses._rows]) + _counter_bytes(engine)


def _counter_bytes(engine: Engine) -> int:
    states = [state for state in engine.optimizer.state.values() if type(state) is dict]
    values = [value for state in states for value in state.values()]
    return storage_bytes(value for value in values if isinstance(value, torch.Tensor) and value.dim() == 0)


def num_reads_and_writes(layout: Layout, num_micro_batches: int) -> dict[tuple[str, str], tuple[int, int]]:
    """How often a step reads and writes each state, by group and state."""
    found = {}
    has_master = {
        group.name: any(state.name == "master" and state.is_kept_by(group) for state in layout.states)
        for group in layout.groups
    }
    num_reduced = num_micro_batches if layout.stage.reduce_each_backward else 1
    for group in layout.groups:
        reads = layout.num_unshards(group, num_micro_batches)
        is_stepped_itself = group.trainable and not has_master[group.name]
        found[group.name, "param"] = reads + is_stepped_itself, int(group.trainable)
        found[group.name, "grad"] = num_reduced, num_reduced
    return found


def padding_of_files(layout: Layout, num_micro_batches: int) -> tuple[int, Counter[tuple[str, str]]]:
    """Bytes of all swap files beyond their states, and of what a step reads and writes beyond these."""
    times = num_reads_and_writes(layout, num_micro_batches)
    at_rest, moved = 0, Counter[tuple[str, str]]()
    for state, group in itertools.product(layout.states, layout.groups):
        if state.is_kept_by(group) and state.tier_in(group) == "nvme":
            width = DTYPE_BYTES[state.dtype]
            if state.codec is not None and any(math.prod(each.global_shape) >= 4096 for each in group.params):
                width = {"int8": 1, "bf16": 2}[state.codec.name]
            padding_bytes = -group.shard_numel * width % BLOCK_BYTES
            num_reads, num_writes = times.get((group.name, state.name), (1, 1))
            at_rest += padding_bytes
            moved["nvme", "host"] += num_reads * padding_bytes
            moved["host", "nvme"] += num_writes * padding_bytes
    return at_rest, moved


def check(measured: Measured, shard: int, num_micro_batches: int) -> None:
    layout = measured.layout
    expected = {tier: sum(layout.bytes_at_rest(shard, tier).values()) for tier in ("device", "host", "nvme")}
    assert sum(expected.values()) == sum(layout.bytes_at_rest(shard).values())
    file_padding_bytes, moved_padding = padding_of_files(layout, num_micro_batches)
    assert measured.device_bytes == measured.device_tracked_bytes == expected["device"]
    assert measured.host_bytes == expected["host"]
    assert measured.swap_bytes == expected["nvme"] + file_padding_bytes
    roles = {Category.PARAMETERS: "param", Category.GRADIENTS: "grad", Category.OPTIMIZER: "optimizer"}
    in_host = layout.bytes_at_rest(shard, "host")
    assert {role: measured.host_tracked[category] for category, role in roles.items()} == in_host
    across = Counter(layout.bytes_across(num_micro_batches)) + moved_padding
    assert without_zeros(measured.moved) == without_zeros(measured.moved_counted)
    moved = Counter(measured.moved)
    moved["nvme", "host"] += measured.kept_bytes
    assert without_zeros(moved) == without_zeros(across)
    assert not measured.mixed


def without_zeros(ways: Ways) -> dict[tuple[str, str], int]:
    return {way: num_bytes for way, num_bytes in ways.items() if num_bytes}


# Every tier of every state; what else there is goes along in turn, and with `--full` all of it with each.
WHERE = product({"params": TIERS, "grads": TIERS, "optimizer": TIERS}, lambda row: set(row.values()) != {"device"})
HOW = pairwise(
    {
        "stage": [1, 2, 3],
        "ranks": [1, 2, 3],
        "precision": list(PRECISIONS),
        "accumulation": [1, 3],
        "share": [0.0, 0.4],
        "method": list(OPTIMIZERS),
        "case": ["odd-shapes", "frozen-parameters"],
    }
)


def combinations() -> list[Any]:
    found = []
    for (index, where), (number, how) in itertools.product(enumerate(WHERE), enumerate(HOW)):
        marks = () if number == index % len(HOW) else pytest.mark.full
        name = "-".join([*where.values(), *(f"{key}={value}" for key, value in how.items())])
        found.append(pytest.param({**where, **how}, id=name, marks=marks))
    return found


@pytest.mark.quick(2)
@pytest.mark.parametrize("options", combinations())
def test_bytes_by_tier_and_across(ranks: WorkerPool, tmp_path: Path, options: dict[str, Any]) -> None:
    tiers = {state: options[state] for state in ("params", "grads", "optimizer")}
    tiers |= {f"{state}_on_device": options["share"] for state, tier in list(tiers.items()) if tier != "device"}
    if "nvme" in tiers.values():
        tiers["nvme_path"] = str(tmp_path)
    overrides = {
        "zero": {"stage": 3 if options["params"] != "device" else options["stage"]},
        "precision": PRECISIONS[options["precision"]],
        "optimizer": OPTIMIZERS[options["method"]],
        "tiers": tiers,
    }
    for rank, measured in enumerate(
        ranks(options["ranks"]).run(measure, options["case"], options["accumulation"], overrides)
    ):
        check(measured, rank, options["accumulation"])
    assert not list(tmp_path.iterdir())


ENCODED = cover(
    {
        "where": [("device", "device", "host"), ("device", "host", "nvme"), ("nvme", "nvme", "nvme"), ("host",) * 3],
        "states": ["int8", "bf16"],
        "stage": [1, 3],
        "ranks": [1, 2],
        "accumulation": [1, 3],
        "share": [0.0, 0.4],
        "param": ["fp32", "bf16"],
    }
)


@pytest.mark.quick(2)
@pytest.mark.parametrize("options", ENCODED)
def test_bytes_of_encoded_states(ranks: WorkerPool, tmp_path: Path, options: dict[str, Any]) -> None:
    tiers = dict(zip(("params", "grads", "optimizer"), options["where"], strict=True))
    tiers |= {f"{state}_on_device": options["share"] for state, tier in list(tiers.items()) if tier != "device"}
    if "nvme" in tiers.values():
        tiers["nvme_path"] = str(tmp_path)
    stage = 3 if tiers["params"] != "device" else options["stage"]
    precision = {"param": options["param"], "states": options["states"]}
    overrides = {"zero": {"stage": stage}, "precision": precision, "tiers": tiers}
    for rank, measured in enumerate(ranks(options["ranks"]).run(measure, "wide", options["accumulation"], overrides)):
        check(measured, rank, options["accumulation"])
    assert not list(tmp_path.iterdir())
