"""What a step moves between memories, against the formula written a second time, and against figures worked by hand."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import nn

from harness.models import CASES
from shardwise.config.resolve import Config, Tier
from shardwise.construction.scan import build_layout
from shardwise.layout.layout import TIERS, Layout

# Through which memories the way leads.
ROUTES: dict[tuple[str, str], tuple[str, ...]] = {
    ("device", "host"): ("device", "host"),
    ("host", "device"): ("host", "device"),
    ("host", "nvme"): ("host", "nvme"),
    ("nvme", "host"): ("nvme", "host"),
    ("device", "nvme"): ("device", "host", "nvme"),
    ("nvme", "device"): ("nvme", "host", "device"),
}
# section `precision`: bytes an element of parameter and of gradient, and whether there is a master beside them
PRECISIONS: dict[str, tuple[dict[str, str], int, int, bool]] = {
    "bf16": ({"param": "bf16"}, 2, 4, True),
    "bf16-thin": ({"param": "bf16", "accumulate": "param"}, 2, 2, True),
    "fp32": ({"param": "fp32"}, 4, 4, False),
}


class Blocks(nn.Module):
    """An embedding of 16 x 16 in the root, and three blocks of 16 x 16, 32 x 32 and 16 x 16."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 16, device="meta")
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False, device="meta") for width in (16, 32, 16))


def layout_of(model: nn.Module, num_ranks: int, stage: int, tiers: dict[str, Any], **sections: Any) -> Layout:
    path = {"nvme_path": "swap"} if "nvme" in tiers.values() else {}
    sections |= {"zero": {"stage": stage, **sections.get("zero", {})}, "tiers": {**tiers, **path}}
    return build_layout(model, Config.from_dict(sections).resolve(num_ranks))


def expected_across(layout: Layout, stage: int, num_micro_batches: int, precision: str) -> dict[tuple[str, str], int]:
    """The docstring's words, group by group; for Adam."""
    _, p, g, has_master = PRECISIONS[precision]
    total: Counter[tuple[str, str]] = Counter()

    def move(source: str, target: str, num_bytes: int) -> None:
        for hop in pairwise(ROUTES.get((source, target), ())):
            total[hop] += num_bytes

    for group in layout.groups:
        params, grads, optimizer = group.tiers.params, group.tiers.grads, group.tiers.optimizer
        numel = group.padded_numel // layout.mesh.dp_shard
        num_uses = 1 if group.unit in ("root", layout.units[-1]) else 2
        if stage == 3 and not group.is_replicated:
            move(params, "device", num_uses * num_micro_batches * p * numel)
        if not group.trainable:
            continue
        is_reduced_often = stage >= 2 or "device" not in {each.tiers.grads for each in layout.groups}
        num_reductions = num_micro_batches if is_reduced_often else 1
        move("device", grads, num_reductions * g * numel)
        if grads == "nvme":
            move("nvme", "host", (num_reductions - 1) * g * numel)
        steps_on = "device" if optimizer == "device" else "host"
        move(grads, steps_on, g * numel)
        keeps_master = has_master or params != optimizer
        moved = (2 * 4 + (4 if keeps_master else 0)) * numel
        move(optimizer, steps_on, moved)
        if not keeps_master:
            move(params, steps_on, p * numel)
        move(steps_on, optimizer, moved)
        move(steps_on, params, p * numel)
    return dict(total)


@pytest.mark.quick(28)
@pytest.mark.parametrize(("params", "grads", "optimizer"), list(product(TIERS, TIERS, TIERS)))
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_combination_follows_the_formula(precision: str, params: Tier, grads: Tier, optimizer: Tier) -> None:
    tiers = {"params": params, "grads": grads, "optimizer": optimizer}
    for stage, num_ranks in product((3,) if params != "device" else (1, 2, 3), (1, 2)):
        layout = layout_of(Blocks(), num_ranks, stage, tiers, precision=PRECISIONS[precision][0])
        for num_micro_batches in (1, 4):
            found = layout.bytes_across(num_micro_batches)
            assert found == expected_across(layout, stage, num_micro_batches, precision), (stage, num_ranks)
            assert bool(found) == (set(tiers.values()) != {"device"})


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("case", ["odd-shapes", "frozen-parameters", "transformer"])
def test_shares_and_frozen_and_padded_groups_follow_it_too(case: str, stage: int) -> None:
    tiers = {"grads": "nvme", "optimizer": "host", "grads_on_device": 0.5, "optimizer_on_device": 0.3}
    if stage == 3:
        tiers |= {"params": "nvme", "params_on_device": 0.4}
    for replicate_frozen in (False, True):
        layout = layout_of(
            CASES[case].build(torch.float32),
            2,
            stage,
            tiers,
            zero={"replicate_frozen": replicate_frozen},
            precision=PRECISIONS["bf16"][0],
        )
        assert layout.bytes_across(3) == expected_across(layout, stage, 3, "bf16")


NUMEL = 3 * 16 * 16 + 32 * 32


def test_zero_offload_moves_two_bytes_a_parameter_each_way() -> None:
    """Ren et al. 2021, arXiv 2101.06840: gradients leave and parameters come back, in 16 bits."""
    tiers = {"grads": "host", "optimizer": "host"}
    layout = layout_of(Blocks(), 2, 2, tiers, precision={"param": "bf16", "accumulate": "param"})
    assert layout.bytes_across(1) == {("device", "host"): NUMEL, ("host", "device"): NUMEL}  # 2 bytes, half a rank


def test_the_optimizer_on_nvme_is_read_and_written_once() -> None:
    """Rajbhandari et al. 2021, arXiv 2104.07857: 2 x 16 bytes a parameter with an fp32 gradient among them;
    here that comes straight from the device."""
    layout = layout_of(Blocks(), 1, 2, {"optimizer": "nvme"}, precision={"param": "bf16"})
    assert layout.bytes_across(1) == {
        ("device", "host"): 4 * NUMEL,
        ("nvme", "host"): 12 * NUMEL,
        ("host", "nvme"): 12 * NUMEL,
        ("host", "device"): 2 * NUMEL,
    }


def test_codes_move_in_place_of_values_and_their_scales_stay_on_the_host() -> None:
    """A weight of 64 x 64 and its bias, which is too small to be encoded, in whole blocks of codes."""
    model = nn.ModuleList([nn.Linear(64, 64, device="meta")])
    slots = 64 * 64 + 256  # of elements
    for states, code_bytes, near_bytes in (("int8", 1, 4 * slots // 256 + 4 * 64), ("bf16", 2, 4 * 64)):
        numel = slots if states == "int8" else 64 * 64 + 64
        layout = layout_of(model, 1, 2, {"optimizer": "nvme"}, precision={"param": "bf16", "states": states})
        moved = (4 + 2 * code_bytes) * numel
        assert layout.bytes_across(1) == {
            ("device", "host"): 4 * numel,
            ("nvme", "host"): moved,
            ("host", "nvme"): moved,
            ("host", "device"): 2 * numel,
        }
        assert layout.bytes_at_rest(tier="nvme")["optimizer"] == moved
        assert layout.bytes_at_rest(tier="host")["optimizer"] == 2 * near_bytes
        assert layout.bytes_at_rest(tier="device")["optimizer"] == 0
        on_host = layout_of(model, 1, 2, {"optimizer": "host"}, precision={"param": "bf16", "states": states})
        assert on_host.bytes_at_rest(tier="host")["optimizer"] == moved + 2 * near_bytes


def test_all_on_nvme() -> None:
    layout = layout_of(Blocks(), 1, 3, dict.fromkeys(("params", "grads", "optimizer"), "nvme"))
    # The root and the last block come once a micro-batch, the others twice; fp32 without a master.
    gathered = 2 * 4 * (NUMEL + 16 * 16 + 32 * 32)
    assert layout.bytes_across(2) == {
        ("nvme", "host"): gathered + 4 * NUMEL + 4 * NUMEL + (8 + 4) * NUMEL,
        ("host", "device"): gathered,
        ("device", "host"): 2 * 4 * NUMEL,
        ("host", "nvme"): 2 * 4 * NUMEL + (8 + 4) * NUMEL,
    }


def test_later_micro_batches_cost_no_more_where_gradients_are_reduced_once() -> None:
    layout = layout_of(Blocks(), 2, 1, {"optimizer": "host"})
    assert layout.bytes_across(1) == layout.bytes_across(4)


def test_nothing_crosses_for_groups_that_stay() -> None:
    layout = layout_of(Blocks(), 2, 2, {"optimizer": "host", "optimizer_on_device": 0.5})
    away = [group for group in layout.groups if group.tiers.are_away]
    assert 0 < len(away) < len(layout.groups)
    numel = sum(group.shard_numel for group in away)
    assert layout.bytes_across(1) == {("device", "host"): 4 * numel, ("host", "device"): 4 * numel}
