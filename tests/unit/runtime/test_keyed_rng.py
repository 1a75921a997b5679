"""Keyed draws: stable for ever, independent of order, device of the model and dtype."""

from __future__ import annotations

import dataclasses
import re
from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from harness.refusals import refused
from harness.small_decoder import SMALL_DECODER
from shardwise.models.decoder import Decoder
from shardwise.runtime.keyed_rng import derive_seed, init_parameters, initial_values, keyed_generator

SMALL = replace(SMALL_DECODER, tie_embeddings=True)


def draw(module: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    return dict(initial_values(module, seed))


def test_seeds_are_the_same_in_every_process() -> None:
    """Python's own hash of a text is salted: it would not give this number twice."""
    assert derive_seed(0, "blocks.0", 7) == 1882135243670256048


def test_keys_that_differ_give_seeds_that_differ() -> None:
    keys = [(0,), (1,), (0, 1), (0, "1"), (0, "1", ""), (0, "", "1"), (0, "a,b"), (0, "a", "b"), (1, 0)]
    seeds = {derive_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("key", [np.int64(3), 1.0, True, None])
def test_keys_without_a_stable_text_are_refused(key: object) -> None:
    with pytest.raises(TypeError, match=re.escape(repr(key))):
        derive_seed(0, key)  # type: ignore[arg-type]


def test_a_keyed_generator_starts_its_own_stream() -> None:
    first, again, other = (torch.rand(4, generator=keyed_generator(5, key)) for key in "aab")
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_values_depend_on_seed_and_name_alone() -> None:
    """Not on what was drawn before: fewer layers, or layers in reversed order, have the same values."""
    two, one = draw(Decoder(SMALL)), draw(Decoder(dataclasses.replace(SMALL, num_layers=1)))
    scaled = ("out.weight", "down.weight")  # their spread depends on the number of layers
    same = [name for name in one if not name.endswith(scaled)]
    assert "blocks.0.ffn.up.weight" in same
    assert all(torch.equal(one[name], two[name]) for name in same)
    assert not torch.equal(two["blocks.0.ffn.up.weight"], two["blocks.1.ffn.up.weight"])
    assert not torch.equal(draw(Decoder(SMALL), seed=1)["embed.weight"], two["embed.weight"])

    forward = nn.Sequential(OrderedDict(a=nn.Linear(3, 4), b=nn.Linear(3, 4)))
    reversed_ = nn.Sequential(OrderedDict(b=nn.Linear(3, 4), a=nn.Linear(3, 4)))
    for name, values in draw(forward).items():
        assert torch.equal(values, draw(reversed_)[name])


def test_meta_and_real_models_draw_the_same_and_keep_their_parameters() -> None:
    real, meta = Decoder(SMALL, dtype=torch.float64), Decoder(SMALL, device="meta", dtype=torch.bfloat16)
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in real.named_parameters()}
    values = draw(real)
    assert list(values) == [name for name, _ in real.named_parameters()]
    for name, drawn in draw(meta).items():
        assert torch.equal(drawn, values[name])
        assert drawn.dtype == torch.float32
    for name, parameter in real.named_parameters():
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
    assert all(parameter.is_meta for parameter in meta.parameters())
    assert real.head.weight is real.embed.weight


def test_every_dtype_starts_from_the_rounding_of_the_same_values() -> None:
    values = draw(Decoder(SMALL, device="meta"))
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = Decoder(SMALL, dtype=dtype)
        init_parameters(model, seed=0)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, values[name].to(dtype))


def test_drawing_leaves_the_global_generator_alone() -> None:
    module = nn.Linear(3, 3)
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    draw(module)
    assert torch.equal(torch.rand(3), expected)


def test_frozen_parameters_of_any_depth_are_drawn() -> None:
    module = nn.Sequential(nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 2)))
    module.requires_grad_(False)
    init_parameters(module, seed=0)
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert (module[0].weight == 1).all()


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class HalfReset(NoReset):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


class Rebinding(NoReset):
    def reset_parameters(self) -> None:
        self.scale = nn.Parameter(torch.full((3,), 2.0))


def test_a_module_that_makes_new_parameters_is_read_after_it_made_them() -> None:
    module = Rebinding()
    scale = module.scale
    assert draw(module)["scale"].tolist() == [2.0, 2.0, 2.0]
    assert module.scale is scale


@pytest.mark.parametrize(
    ("module", "code", "values"),
    [
        (
            nn.Sequential(NoReset()),
            "no-reset-parameters",
            ("0.scale", "NoReset"),
        ),
        (
            HalfReset(),
            "reset-leaves-nan",
            ("HalfReset", "shift"),
        ),
        (
            nn.Linear(2, 2, device="meta"),
            "parameter-on-meta",
            ("weight",),
        ),
    ],
)
def test_what_cannot_be_initialised_is_refused(module: nn.Module, code: str, values: tuple[str, ...]) -> None:
    with refused(code, *values):
        init_parameters(module, seed=0)
