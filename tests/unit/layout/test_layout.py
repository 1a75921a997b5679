"""The layout's bytes against the tables that papers and the design give, on meta tensors."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from harness.models import CASES
from harness.refusals import refused
from shardwise.config.resolve import Config, PrecisionConfig, ZeroConfig
from shardwise.construction.scan import build_layout
from shardwise.layout.layout import Layout
from shardwise.layout.mesh_shape import MeshShape
from shardwise.layout.precision import PrecisionPolicy, precision_policy
from shardwise.layout.zero_stages import STAGES, Placement, effective_stage
from shardwise.models.decoder import Decoder
from shardwise.models.presets import preset
from shardwise.runtime.torch_private import OpMode

STAGE_NUMBERS = st.integers(0, 3)
# section `precision`: bytes an element of parameter (P), gradient at rest (G), optimizer under Adam (K)
PRECISIONS: dict[str, tuple[dict[str, str], int, int, int]] = {
    "bf16": ({"param": "bf16"}, 2, 4, 12),
    "bf16-thin": ({"param": "bf16", "accumulate": "param"}, 2, 2, 12),
    "fp16": ({"param": "fp16"}, 2, 4, 12),
    "fp32": ({"param": "fp32"}, 4, 4, 8),
    "fp64": ({"param": "fp64"}, 8, 8, 16),
}


def layout_of(model: nn.Module, world_size: int, **sections: dict[str, Any]) -> Layout:
    return build_layout(model, Config.from_dict(sections).resolve(world_size))


def stack(*widths: int) -> nn.Sequential:
    """One block of width x width elements each, and none outside."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False, device="meta") for width in widths))


# At rest


@pytest.mark.parametrize(("stage", "expected"), [(0, "120"), (1, "31.4"), (2, "16.6"), (3, "1.88")])
def test_published_figures_of_16_bytes_a_parameter(stage: int, expected: str) -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5 B parameters, 64 ranks, mixed-precision Adam; GB of 1e9 bytes."""
    precision = {"param": "bf16", "accumulate": "param"}
    layout = layout_of(stack(*[10_000] * 75), 64, zero={"stage": stage}, precision=precision)
    assert layout.numel == 7_500_000_000
    assert f"{sum(layout.bytes_at_rest().values()) / 1e9:.3g}" == expected


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_at_rest_follow_the_stage_table(stage: int, num_ranks: int, precision: str) -> None:
    section, p, g, k = PRECISIONS[precision]
    layout = layout_of(stack(48, 96), num_ranks, zero={"stage": stage}, precision=section)
    numel, n = 48**2 + 96**2, num_ranks
    assert layout.padding_numel == 0
    params = numel * p // (n if stage == 3 else 1)
    grads = numel * g // (n if stage >= 2 else 1)
    optimizer = numel * k // (n if stage >= 1 else 1)
    assert layout.bytes_at_rest() == {"param": params, "grad": grads, "optimizer": optimizer}


@settings(max_examples=40)
@given(st.sampled_from(["odd-shapes", "transformer", "frozen-parameters"]), STAGE_NUMBERS, st.integers(1, 9))
def test_over_all_shards_nothing_is_missing_and_padding_is_stated(case: str, stage: int, num_ranks: int) -> None:
    model = CASES[case].build(torch.float32)
    layout = layout_of(model, num_ranks, zero={"stage": stage}, precision={"param": "bf16"})
    trained = [group for group in layout.groups if group.trainable]
    assert layout.numel == sum(parameter.numel() for parameter in model.parameters())
    assert layout.numel + layout.padding_numel == sum(group.padded_numel for group in layout.groups)
    for state in layout.states:
        groups = layout.groups if state.role == "param" else trained
        of_each_shard = [sum(state.bytes_at_rest(group, shard) for group in groups) for shard in range(num_ranks)]
        assert state.is_flat == (state.name in ("param", "grad", "master"))  # the optimizer makes a tensor a piece
        numel = sum(group.padded_numel if state.is_flat else group.numel for group in groups)
        width = 2 if state.name == "param" else 4
        if state.placement is Placement.SHARD:
            assert sum(of_each_shard) == numel * width
        else:
            assert of_each_shard == [numel * width] * num_ranks
    for shard in range(num_ranks):
        total = sum(state.bytes_at_rest(group, shard) for state in layout.states for group in layout.groups)
        assert sum(layout.bytes_at_rest(shard).values()) == total


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [
        ({"name": "adamw"}, ["exp_avg", "exp_avg_sq"]),
        ({"name": "sgd", "momentum": 0.9}, ["momentum_buffer"]),
        ({"name": "adagrad"}, ["sum"]),
        ({"name": "AdamW"}, ["exp_avg", "exp_avg_sq"]),
        ({"name": "sgd", "momentum": 0.0}, []),
        ({"name": "rmsprop"}, ["square_avg", "momentum_buffer"]),
        ({"name": "rmsprop", "momentum": 0.0}, ["square_avg"]),
    ],
)
def test_states_of_the_optimizer(optimizer: dict[str, Any], states: list[str]) -> None:
    layout = layout_of(stack(8), 2, optimizer=optimizer, precision={"param": "bf16"})
    assert [state.name for state in layout.states] == ["param", "grad", "master", *states]
    assert [state.name for state in layout_of(stack(8), 2, optimizer=optimizer).states] == ["param", "grad", *states]


# Frozen parameters


def half_frozen() -> nn.Sequential:
    model = stack(16, 16)
    model[0].requires_grad_(False)
    return model


def test_frozen_parameters_form_groups_of_their_own() -> None:
    layout = layout_of(CASES["frozen-parameters"].build(torch.float32), 2, zero={"stage": 3})
    frozen = [group for group in layout.groups if not group.trainable]
    assert frozen
    assert all(group.name == f"{group.unit}:frozen" for group in frozen)
    assert {group.unit for group in layout.groups} <= {"root", *layout.units}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_parameters_have_no_gradients_and_no_optimizer_states(stage: int) -> None:
    layout = layout_of(half_frozen(), 2, zero={"stage": stage}, precision={"param": "bf16"})
    trained = layout_of(stack(16), 2, zero={"stage": stage}, precision={"param": "bf16"}).bytes_at_rest()
    assert layout.bytes_at_rest() == {**trained, "param": 2 * trained["param"]}
    wire, m, once = layout.bytes_on_wire(num_micro_batches=3), 3, 16 * 16 * 2 // 2
    assert wire == {
        "all_reduce": 2 * once if stage == 0 else 0,
        "reduce_scatter": {0: 0, 1: once}.get(stage, m * once),
        # The gradient may pass through a frozen block, so it is gathered twice as others; the last stays in between.
        "all_gather": {0: 0, 3: m * (2 * once + once)}.get(stage, once),
    }


# On the wire


@given(STAGE_NUMBERS, st.integers(1, 8), st.integers(1, 5), st.sampled_from(sorted(PRECISIONS)))
def test_bytes_on_the_wire_follow_the_stage_table(stage: int, n: int, m: int, precision: str) -> None:
    """In units of (n - 1) / n; of three blocks the last is gathered once a micro-batch, the others twice."""
    section, p, _, _ = PRECISIONS[precision]
    side = 8 * n
    wire = layout_of(stack(side, side, side), n, zero={"stage": stage}, precision=section).bytes_on_wire(m)
    one_block = side * side * p * (n - 1) // n
    psi = 3 * one_block
    assert wire == {
        "all_reduce": 2 * psi if stage == 0 or n == 1 else 0,
        "reduce_scatter": {0: 0, 1: psi}.get(stage, m * psi),
        "all_gather": {0: 0, 3: m * (2 * psi - one_block)}.get(stage, psi),
    }


def test_gradients_on_the_wire_have_the_dtype_of_reduce() -> None:
    for reduce, width in (("param", 2), ("fp32", 4)):
        section = {"param": "bf16", "reduce": reduce}
        wire = layout_of(stack(16), 2, zero={"stage": 2}, precision=section).bytes_on_wire(1)
        assert (wire["reduce_scatter"], wire["all_gather"]) == (16 * 16 * width // 2, 16 * 16 * 2 // 2)


def test_the_root_is_gathered_once_a_micro_batch() -> None:
    model = nn.Module()
    model.embedding = nn.Embedding(16, 16).to("meta")
    model.blocks = nn.ModuleList(stack(16, 16))
    layout = layout_of(model, 2, zero={"stage": 3})
    assert [group.name for group in layout.groups] == ["root", "blocks.0", "blocks.1"]
    assert layout.bytes_on_wire(1)["all_gather"] == (1 + 2 + 1) * 16 * 16 * 4 // 2


# Presets, meta, values


class NoOps(OpMode):
    """Raises at any op on any tensor."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func.name()} ran")


@pytest.mark.parametrize(
    ("name", "numel", "num_layers"), [("llama-7b", 6_738_415_616, 32), ("llama-405b", 405_853_388_800, 126)]
)
def test_presets_are_laid_out_without_storage(name: str, numel: int, num_layers: int) -> None:
    model = Decoder(preset(name), device="meta")
    config = Config.from_dict({"zero": {"stage": 3}, "precision": {"param": "bf16"}}).resolve(world_size=512)
    with NoOps():
        layout = build_layout(model, config)
        at_rest = layout.bytes_at_rest(shard=511)
    assert layout.numel == numel
    assert layout.units == tuple(f"blocks.{index}" for index in range(num_layers))
    assert [group.name for group in layout.groups] == ["root", *layout.units]
    assert layout.padding_numel < (num_layers + 1) * 8 * 512
    assert sum(at_rest.values()) == pytest.approx(numel * 18 / 512, rel=1e-4)


def test_a_layout_is_a_value() -> None:
    real, meta = CASES["odd-shapes"].build(torch.float32), CASES["odd-shapes"].build(torch.float32).to("meta")
    layout = layout_of(real, 3, zero={"stage": 3})
    assert layout == layout_of(meta, 3, zero={"stage": 3})
    assert layout != layout_of(meta, 2, zero={"stage": 3})
    assert layout != layout_of(meta, 3, zero={"stage": 2})
    assert layout.mesh == MeshShape(dp_shard=3)
    assert all(state.codec is None for state in layout.states)
    assert all(state.tier_in(group) == "device" for state in layout.states for group in layout.groups)


def test_blocks_of_the_config_form_the_units() -> None:
    model = CASES["transformer"].build(torch.float32)
    assert layout_of(model, 2, zero={"blocks": ["*.qkv"]}).units == tuple(f"blocks.{index}.qkv" for index in range(3))
    with refused("no-module-matches", "zero.blocks='Nothing'"):
        layout_of(model, 2, zero={"blocks": ["Nothing"]})


def test_what_cannot_be_laid_out_is_refused() -> None:
    with refused("no-parameters", "Tanh"):
        layout_of(nn.Tanh(), 2)
    with refused("config-not-resolved", "config.resolve"):
        build_layout(stack(8), Config())


# Stages and precision


def test_stages_shard_one_role_after_another() -> None:
    for number, stage in enumerate(STAGES):
        sharded = [place is Placement.SHARD for place in (stage.optimizer, stage.grads, stage.params)]
        assert sharded == [number >= 1, number >= 2, number >= 3]
        assert (stage.grads is Placement.PARTIAL) == (number < 2)
        assert effective_stage(ZeroConfig(stage=number), num_shards=2) is stage
        assert effective_stage(ZeroConfig(stage=number), num_shards=1) is STAGES[0]


@pytest.mark.parametrize(
    ("section", "policy"),
    [
        ({}, PrecisionPolicy("fp32", "fp32", "fp32", "fp32")),
        ({"param": "bf16"}, PrecisionPolicy("bf16", "bf16", "fp32", "fp32")),
        ({"param": "bf16", "reduce": "fp32"}, PrecisionPolicy("bf16", "fp32", "fp32", "fp32")),
        ({"param": "fp16", "accumulate": "param"}, PrecisionPolicy("fp16", "fp16", "fp16", "fp32")),
        ({"param": "fp64", "reduce": "fp32"}, PrecisionPolicy("fp64", "fp64", "fp64", "fp64")),
    ],
)
def test_precision_by_role(section: dict[str, str], policy: PrecisionPolicy) -> None:
    found = precision_policy(PrecisionConfig.model_validate(section))
    assert found == policy
    assert found.keeps_master == (policy.param in ("bf16", "fp16"))
