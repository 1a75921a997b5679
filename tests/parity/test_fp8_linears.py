"""Linear layers in fp8, emulated: the same losses in every layout, ways to and from plain layers, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from harness.pool import WorkerPool
from harness.refusals import refused
from harness.training import make_config
from shardwise import initialize, simulate
from shardwise.models import Decoder, lm_loss
from shardwise.models.presets import preset

float8 = pytest.importorskip("torchao.float8")

GLOBAL_BATCH: Final = 4
NUM_STEPS: Final = 3
SEQ_LEN: Final = 16
VOCAB: Final = 128
EMULATED: Final = {"param": "fp64", "linears": "fp8-emulated"}
TOLERANCE: Final = 1e-9  # sums in float64: the same values round to the same numbers of fp8


def make_model() -> Decoder:
    """Two blocks whose linear layers are all large enough."""
    shape = replace(preset("tiny"), num_layers=2, hidden_size=128, num_heads=2, num_kv_heads=2, head_dim=64)
    torch.manual_seed(0)
    return Decoder(replace(shape, ffn_size=160, vocab_size=VOCAB, max_seq_len=SEQ_LEN))


def convert(model: nn.Module, recipe: str) -> nn.Module:
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    return float8.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: name.startswith("blocks")
    )


def fp8_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if hasattr(module, "linear_mm_config")]


def batches_of(step: int, micro_size: int) -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(0, VOCAB, (GLOBAL_BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step))
    return [(each[:, :-1], each[:, 1:]) for each in tokens.split(micro_size)]


def loss_of(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return lm_loss(logits, batch[1])


def train(
    rank: int, world_size: int, recipe: str, sections: dict[str, Any], places: tuple[str, str] = ("", "")
) -> list[float]:
    """Return the losses of steps and of an evaluation; `recipe` is of torchao, or "" for the config's key.

    `places` are the folders from which it begins and to which it saves.
    """
    mesh = sections.get("mesh", {})
    num_data = world_size // (mesh.get("pp", 1) * mesh.get("cp", 1))
    micro_size = sections.get("batch", {}).get("micro_size", 1)
    accumulation = GLOBAL_BATCH // num_data // micro_size
    given = {"precision": EMULATED, **sections, "batch": {"micro_size": micro_size, "accumulation": accumulation}}
    model: nn.Module = make_model()
    if recipe:
        given["precision"], model = {"param": "fp64"}, convert(model, recipe)
    with initialize(model, make_config(1, given), loss_fn=loss_of) as engine:
        if places[0]:
            engine.load(places[0])
        place, first = engine.layout.mesh.data_index(rank), engine.num_steps
        steps = range(first, first + NUM_STEPS)
        losses = [engine.train_step(batches_of(step, micro_size)[place::num_data]).loss for step in steps]
        losses.append(engine.eval_step(batches_of(99, micro_size)[place::num_data]).loss)
        if places[1]:
            engine.save(places[1])
    return losses


LAYOUTS: Final[list[tuple[int, dict[str, Any]]]] = [
    (1, {"batch": {"micro_size": 4}}),
    (1, {"recompute": {"mode": "full"}, "zero": {"stage": 3}}),
    (1, {"compile": {"enabled": True, "backend": "aot_eager"}}),
    *((2, {"zero": {"stage": stage}}) for stage in range(4)),
    (2, {"zero": {"stage": 3}, "batch": {"micro_size": 2}}),
    (2, {"zero": {"stage": 3}, "tiers": {"params": "host", "optimizer": "host"}}),
    (2, {"zero": {"stage": 3}, "mesh": {"cp": 2}}),
    (2, {"mesh": {"pp": 2}}),
    (2, {"mesh": {"pp": 2}, "pipeline": {"schedule": "zb-h1"}}),
    (4, {"zero": {"stage": 3}, "mesh": {"pp": 2}}),
]


@pytest.mark.parametrize(("num_ranks", "sections"), LAYOUTS, ids=range(len(LAYOUTS)))
def test_losses_are_the_same_in_every_layout(ranks: WorkerPool, num_ranks: int, sections: dict[str, Any]) -> None:
    (expected,) = ranks(1).run(train, "", {"zero": {"stage": 0}})
    for losses in ranks(num_ranks).run(train, "", sections):
        assert losses == pytest.approx(expected, rel=TOLERANCE)


def test_losses_differ_from_those_without_fp8(ranks: WorkerPool) -> None:
    (plain,) = ranks(1).run(train, "", {"precision": {"param": "fp64"}})
    (rounded,) = ranks(1).run(train, "", {})
    assert rounded == pytest.approx(plain, rel=0.02)
    assert min(abs(one - other) for one, other in zip(rounded, plain, strict=True)) > 1e-6


@pytest.mark.parametrize("recipe", ["rowwise_with_gw_hp", "rowwise", "tensorwise"])
def test_a_model_that_torchao_converted_trains_sharded(ranks: WorkerPool, recipe: str) -> None:
    (expected,) = ranks(1).run(train, recipe, {"zero": {"stage": 0}})
    for sections in ({"zero": {"stage": 3}}, {"mesh": {"pp": 2}, "zero": {"stage": 1}}):
        for losses in ranks(2).run(train, recipe, sections):
            assert losses == pytest.approx(expected, rel=TOLERANCE)
    if recipe == "rowwise_with_gw_hp":
        assert ranks(1).run(train, "", {}) == [pytest.approx(expected, rel=TOLERANCE)]


def test_a_checkpoint_goes_on_in_another_layout_and_without_fp8(ranks: WorkerPool, tmp_path: Path) -> None:
    half = str(tmp_path / "half")
    ranks(2).run(train, "", {"zero": {"stage": 3}}, ("", half))
    (expected,) = ranks(1).run(train, "", {}, (half, ""))
    for losses in ranks(2).run(train, "", {"mesh": {"pp": 2}}, (half, "")):
        assert losses == pytest.approx(expected, rel=TOLERANCE)
    (plain,) = ranks(1).run(train, "", {"precision": {"param": "fp64"}}, (half, ""))
    assert plain == pytest.approx(expected, rel=0.02)
    assert plain != pytest.approx(expected, rel=1e-6)


def test_blocks_alone_are_converted_and_close_puts_their_layers_back() -> None:
    model = make_model()
    seen: list[str] = []
    model.blocks[0].ffn.up.register_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    engine = initialize(model, make_config(1, {"precision": EMULATED}), loss_fn=lambda logits, _: logits.sum())
    engine.train_step([batches_of(0, 1)[0]])
    assert seen == ["DecoderLinear"]  # hooks and classes stay those of the model
    assert fp8_layers(model) == [
        name for name, each in model.named_modules() if "Linear" in str(type(each)) and "blocks" in name
    ]
    engine.close()
    assert fp8_layers(model) == []
    assert type(model.blocks[0].ffn.up).forward is nn.Linear.forward


def start(precision: dict[str, str], mesh: dict[str, int] | None = None, model: nn.Module | None = None) -> None:
    initialize(model or make_model(), make_config(1, {"precision": precision, "mesh": mesh or {}})).close()


def test_what_cannot_be_in_fp8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused("fp8-split", "mesh.tp=2"):
        make_config(1, {"precision": EMULATED, "mesh": {"tp": 2}}).resolve(2)
    with refused("fp8-needs-bf16", "precision.param=fp32"):
        start({"param": "fp32", "linears": "fp8"})
    with refused("no-fp8-products", "a CPU", "fp8-emulated"):
        start({"param": "bf16", "linears": "fp8"})
    with refused("no-fp8-layers"):
        start(EMULATED, model=nn.Sequential(nn.Linear(128, 120), nn.Linear(64, 64)))
    monkeypatch.setattr("shardwise.runtime.fp8_linears.find_spec", lambda name: None)
    with refused("extra-missing", "shardwise[fp8]"):
        start(EMULATED)


def test_fp8_is_simulated_on_any_machine() -> None:
    """The products of a GPU run on fake tensors; what is at rest is what it is without fp8."""
    at_rest = []
    tokens = torch.zeros(2, SEQ_LEN, dtype=torch.long, device="meta")
    for linears in ("keep", "fp8"):
        config = make_config(1, {"precision": {"param": "bf16", "linears": linears}, "zero": {"stage": 3}})
        found = simulate(make_model, config, lambda: (tokens, tokens), rank=0, world_size=2, loss_fn=loss_of)
        at_rest.append(found.at_rest.live_bytes)
    assert at_rest[0] == at_rest[1]


def test_a_layer_that_torchao_converted_is_not_split(ranks: WorkerPool) -> None:
    with pytest.raises(Exception, match=r"the forward of Float8Linear is not nn\.Linear's"):
        ranks(2).run(train_split)


def train_split(rank: int, world_size: int) -> None:
    initialize(convert(make_model(), "rowwise"), make_config(1, {"mesh": {"tp": 2}}))
