"""The router of a layer of experts, in models of all families: its matrix gives a logit for each expert."""

from __future__ import annotations

import pytest
from torch import nn

from harness.moe_models import MOE_FAMILIES, build_moe
from shardwise.construction.experts import is_experts, router_of

# Their routers have one row more, for a shared expert or for tokens that no expert computes.
_UNKNOWN = ("inkling_text", "zaya")


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if is_experts(module)}


@pytest.mark.parametrize("family", sorted(set(MOE_FAMILIES) - set(_UNKNOWN)))
def test_every_layer_has_a_router(family: str) -> None:
    model = build_moe(family)
    layers = _layers(model)

    for at, experts in layers.items():
        parent, width = at.rpartition(".")[0], model.config.get_text_config().hidden_size
        router = router_of(model.get_submodule(parent), experts)
        assert router is not None, at
        assert router not in experts.modules()
        assert [tuple(weight.shape) for weight in router.parameters(recurse=False) if weight.dim() == 2] == [(8, width)]
        assert not any("attn" in name for name, module in model.named_modules() if module is router)
    assert layers


@pytest.mark.parametrize("family", _UNKNOWN)
def test_none_is_guessed(family: str) -> None:
    model = build_moe(family)

    assert not [
        at
        for at, experts in _layers(model).items()
        if router_of(model.get_submodule(at.rpartition(".")[0]), experts) is not None
    ]
