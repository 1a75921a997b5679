"""In which tier each state is stored, what that makes of the stage, and how many bytes each tier stores."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from harness.models import CASES
from shardwise.config.resolve import Config, Tier, TiersConfig, ZeroConfig
from shardwise.construction.scan import build_layout
from shardwise.layout.layout import TIERS, Layout, StateSpec, assign_tiers
from shardwise.layout.param_groups import GroupSpec, GroupTiers, ParamSpec
from shardwise.layout.zero_stages import STAGES, Placement, effective_stage

SHARES = st.floats(0, 1)


def group(name: str, numel: int, trainable: bool = True, is_replicated: bool = False) -> GroupSpec:
    return GroupSpec(name, name, (ParamSpec("w", (), (numel,), 0),), trainable, 1, 1, is_replicated)


def tiers_of(groups: list[GroupSpec], **config: Any) -> dict[str, GroupTiers]:
    return {each.name: each.tiers for each in assign_tiers(groups, TiersConfig(**config))}


def layout_of(model: nn.Module, world_size: int = 2, **sections: dict[str, Any]) -> Layout:
    return build_layout(model, Config.from_dict(sections).resolve(world_size))


def stack(*widths: int) -> nn.Sequential:
    """One block of width x width elements each, and none outside."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False, device="meta") for width in widths))


# Groups


def test_each_state_goes_its_own_way() -> None:
    groups = [group("root", 8), group("0", 16)]
    assert tiers_of(groups) == dict.fromkeys(("root", "0"), GroupTiers())
    assert tiers_of(groups, params="nvme", grads="host", optimizer="nvme") == dict.fromkeys(
        ("root", "0"), GroupTiers("nvme", "host", "nvme")
    )
    parted = tiers_of(groups, params="host", optimizer="nvme", optimizer_on_device=0.4)
    assert parted == {"root": GroupTiers("host", "device", "device"), "0": GroupTiers("host", "device", "nvme")}


@pytest.mark.parametrize(
    ("share", "staying"),
    [
        (0.0, ""),
        (0.09, ""),
        (0.1, "a"),
        (0.29, "a"),
        (0.3, "ab"),
        (0.58, "ab"),
        (0.6, "abc"),
        (0.99, "abc"),
        (1, "abcd"),
    ],
)
def test_a_share_is_the_first_groups_of_the_forward(share: float, staying: str) -> None:
    groups = [group("a", 8), group("b", 16), group("c", 24), group("d", 32)]
    for state in ("params", "grads", "optimizer"):
        found = tiers_of(groups, **{state: "host", f"{state}_on_device": float(share)})
        assert "".join(name for name, tiers in found.items() if getattr(tiers, state) == "device") == staying


def test_a_group_that_does_not_fit_leaves_space_for_the_next_one_that_does() -> None:
    found = tiers_of([group("root", 80), group("a", 8), group("b", 8)], grads="host", grads_on_device=0.1)
    assert [tiers.grads for tiers in found.values()] == ["host", "device", "host"]


@pytest.mark.parametrize("percent", range(101))
def test_a_share_written_in_percent_is_so_many_of_a_hundred_equal_groups(percent: int) -> None:
    """0.58 * 800 is a little less than 464 in binary."""
    groups = [group(str(index), 8) for index in range(100)]
    found = tiers_of(groups, optimizer="host", optimizer_on_device=percent / 100)
    assert sum(tiers.optimizer == "device" for tiers in found.values()) == percent


@given(st.lists(st.tuples(st.integers(1, 300), st.booleans(), st.booleans()), min_size=1, max_size=8), SHARES)
def test_at_most_the_share_stays_and_earlier_groups_before_later_ones(
    shapes: list[tuple[int, bool, bool]], share: float
) -> None:
    """A shape: elements, whether the group is trained, and whether it is replicated where it is not."""
    groups = [
        group(str(index), numel, trained, replicated and not trained)
        for index, (numel, trained, replicated) in enumerate(shapes)
    ]
    shares = {f"{state}_on_device": share for state in ("params", "grads", "optimizer")}
    found = assign_tiers(groups, TiersConfig(params="nvme", grads="host", optimizer="nvme", **shares))
    assert [(each.name, each.params, each.trainable) for each in found] == [
        (each.name, each.params, each.trainable) for each in groups
    ]
    for state, tier in (("params", "nvme"), ("grads", "host"), ("optimizer", "nvme")):
        movable = [each for each in found if (not each.is_replicated if state == "params" else each.trainable)]
        assert all(getattr(each.tiers, state) == "device" for each in found if each not in movable)
        assert {getattr(each.tiers, state) for each in movable} <= {"device", tier}
        is_staying = [getattr(each.tiers, state) == "device" for each in movable]
        staying = sum(each.padded_numel for each, stays in zip(movable, is_staying, strict=True) if stays)
        assert staying <= share * sum(each.padded_numel for each in movable) + 0.5
        for index, each in enumerate(movable):
            if not is_staying[index]:
                later = [other for other, stays in zip(movable[index:], is_staying[index:], strict=True) if stays]
                assert all(other.padded_numel < each.padded_numel for other in later)


def test_frozen_groups_have_parameters_only_and_replicated_ones_stay() -> None:
    away = {"params": "host", "grads": "host", "optimizer": "host"}
    found = tiers_of([group("a", 8), group("f", 8, trainable=False), group("r", 8, False, is_replicated=True)], **away)
    assert list(found.values()) == [
        GroupTiers("host", "host", "host"),
        GroupTiers("host", "device", "device"),
        GroupTiers(),
    ]
    # What others keep is no part of the share.
    shared = tiers_of([group("r", 80, False, is_replicated=True), group("a", 8)], params="host", params_on_device=0.5)
    assert shared["a"].params == "host"


def test_what_is_stored_whole_has_nothing_to_be_brought_back() -> None:
    alone = group("a", 8)
    assert alone.is_stored_whole
    assert not assign_tiers([alone], TiersConfig(params="host"))[0].is_stored_whole
    assert assign_tiers([alone], TiersConfig(optimizer="host"))[0].is_stored_whole
    assert not GroupSpec("a", "a", alone.params, True, num_ranks=2, num_shards=2).is_stored_whole


# Stages


@pytest.mark.parametrize(("params", "grads", "optimizer"), list(product(TIERS, TIERS, TIERS)))
@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_stage_is_the_tables_but_for_two_cases(
    stage: int, num_shards: int, params: Tier, grads: Tier, optimizer: Tier
) -> None:
    """Gradients off the device are slices in stage 1 too; one rank whose device stores all has nothing to shard."""
    tiers = TiersConfig(params=params, grads=grads, optimizer=optimizer)
    found = effective_stage(ZeroConfig(stage=stage), num_shards, tiers)
    if (params, grads, optimizer) == ("device", "device", "device"):
        assert found is STAGES[0 if num_shards == 1 else stage]
    else:
        assert found.optimizer is Placement.SHARD
        assert (found.grads is Placement.SHARD) == (stage >= 2 or grads != "device")
        assert (found.params is Placement.SHARD) == (stage == 3)


def test_activations_on_the_host_change_no_stage() -> None:
    assert effective_stage(ZeroConfig(stage=3), 1, TiersConfig(activations="host")) is STAGES[0]
    assert effective_stage(ZeroConfig(stage=1), 2, TiersConfig(activations="host")) is STAGES[1]


# States


@pytest.mark.parametrize(("params", "optimizer"), list(product(TIERS, TIERS)))
def test_a_copy_is_kept_where_parameters_and_optimizer_part(params: Tier, optimizer: Tier) -> None:
    """The step runs beside the optimizer: without a copy there it would fetch the parameters first."""
    copy = StateSpec("master", "optimizer", "fp32", Placement.SHARD, is_copy_of_param=True)
    own = StateSpec("master", "optimizer", "fp32", Placement.SHARD)
    param, grad = (
        StateSpec("param", "param", "fp32", Placement.SHARD),
        StateSpec("grad", "grad", "fp32", Placement.SHARD),
    )
    (trained, frozen) = assign_tiers(
        [group("a", 8), group("f", 8, trainable=False)], TiersConfig(params=params, optimizer=optimizer)
    )
    assert copy.is_kept_by(trained) == (params != optimizer)
    assert [each.is_kept_by(trained) for each in (param, grad, own)] == [True, True, True]
    assert [each.is_kept_by(frozen) for each in (param, grad, own, copy)] == [True, False, False, False]
    assert (param.tier_in(trained), grad.tier_in(trained), own.tier_in(trained)) == (params, "device", optimizer)
    assert copy.bytes_at_rest(frozen, 0) == 0


def test_shares_may_part_them_though_both_name_one_memory() -> None:
    """fp32: the first block's parameters stay and its optimizer does not, so that block alone has a copy."""
    tiers = {"params": "host", "optimizer": "host", "params_on_device": 0.5}
    layout = layout_of(stack(16, 16), zero={"stage": 3}, tiers=tiers)
    (copy,) = (state for state in layout.states if state.name == "master")
    assert [copy.is_kept_by(each) for each in layout.groups] == [True, False]
    numel = 16 * 16 // 2
    assert layout.bytes_by_tier() == {
        "device": {"param": 4 * numel, "grad": 8 * numel, "optimizer": 0},
        "host": {"param": 4 * numel, "grad": 0, "optimizer": (8 + 4) * numel + 8 * numel},
    }
    together = layout_of(stack(16, 16), zero={"stage": 3}, tiers={"params": "host", "optimizer": "host"})
    assert [state.name for state in together.states] == ["param", "grad", "exp_avg", "exp_avg_sq"]


# Bytes


@pytest.mark.parametrize(("params", "grads", "optimizer"), list(product(TIERS, TIERS, TIERS)))
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_bytes_by_tier_follow_the_stage_table(
    num_ranks: int, precision: str, params: Tier, grads: Tier, optimizer: Tier
) -> None:
    tiers = {"params": params, "grads": grads, "optimizer": optimizer}
    path = {"nvme_path": "swap"} if "nvme" in tiers.values() else {}
    for stage in (3,) if params != "device" else (1, 2, 3):
        layout = layout_of(
            stack(16, 32), num_ranks, zero={"stage": stage}, tiers={**tiers, **path}, precision={"param": precision}
        )
        numel, p = 16**2 + 32**2, 2 if precision == "bf16" else 4
        has_master = precision == "bf16" or params != optimizer
        is_sliced = stage >= 2 or grads != "device"
        expected: dict[str, dict[str, int]] = {}
        for tier, role, num_bytes in (
            (params, "param", p * numel // (num_ranks if stage == 3 else 1)),
            (grads, "grad", 4 * numel // (num_ranks if is_sliced else 1)),
            (optimizer, "optimizer", (12 if has_master else 8) * numel // num_ranks),
        ):
            expected.setdefault(tier, {"param": 0, "grad": 0, "optimizer": 0})[role] = num_bytes
        assert layout.bytes_by_tier() == expected


@settings(max_examples=60)
@given(
    st.sampled_from(["odd-shapes", "transformer", "frozen-parameters"]),
    st.integers(1, 3),
    st.integers(1, 5),
    st.tuples(st.sampled_from(TIERS), st.sampled_from(TIERS), st.sampled_from(TIERS)),
    st.tuples(SHARES, SHARES, SHARES),
)
def test_no_byte_is_lost_between_tiers(
    case: str, stage: int, num_ranks: int, tiers: tuple[Tier, Tier, Tier], shares: tuple[float, float, float]
) -> None:
    params, grads, optimizer = tiers
    stage = stage if params == "device" else 3
    given_shares = {
        f"{state}_on_device": share
        for state, tier, share in zip(("params", "grads", "optimizer"), tiers, shares, strict=True)
        if tier != "device"
    }
    path = {"nvme_path": "swap"} if "nvme" in tiers else {}
    layout = layout_of(
        CASES[case].build(torch.float32),
        num_ranks,
        zero={"stage": stage, "replicate_frozen": True},
        tiers={"params": params, "grads": grads, "optimizer": optimizer, **given_shares, **path},
    )
    for shard in range(num_ranks):
        by_tier = layout.bytes_by_tier(shard)
        assert set(by_tier) <= {"device", *tiers}
        at_rest = layout.bytes_at_rest(shard)
        assert at_rest == {role: sum(totals[role] for totals in by_tier.values()) for role in at_rest}
        assert all(layout.bytes_at_rest(shard, tier) == totals for tier, totals in by_tier.items())


def test_replicated_frozen_parameters_stay_whole_on_the_device() -> None:
    model = stack(16, 16)
    model[0].requires_grad_(False)
    sections = {"precision": {"param": "bf16"}, "tiers": {"params": "host", "grads": "host", "optimizer": "host"}}
    layout = layout_of(model, 2, zero={"stage": 3, "replicate_frozen": True}, **sections)
    assert layout.bytes_by_tier() == {
        "device": {"param": 2 * 256, "grad": 0, "optimizer": 0},
        "host": {"param": 2 * 128, "grad": 4 * 128, "optimizer": 12 * 128},
    }
    sharded = layout_of(model, 2, zero={"stage": 3}, **sections)
    assert sharded.bytes_by_tier() == {"host": {"param": 2 * 128 * 2, "grad": 4 * 128, "optimizer": 12 * 128}}


def test_padding_counts_off_the_device_and_moments_have_none_on_it() -> None:
    """Beside the device the step walks the flat range; torch's optimizer on it sees a tensor a parameter."""
    model = nn.Sequential(nn.Linear(3, 3, device="meta"))  # 9 + 3 elements at offsets 0 and 16, padded to 32
    on_device = layout_of(model, 2, zero={"stage": 3}).bytes_at_rest(1)
    assert on_device == {"param": 4 * 16, "grad": 4 * 16, "optimizer": 8 * 3}
    on_host = layout_of(model, 2, zero={"stage": 3}, tiers={"params": "host", "optimizer": "host"}).bytes_at_rest(1)
    assert on_host == {"param": 4 * 16, "grad": 4 * 16, "optimizer": 8 * 16}
