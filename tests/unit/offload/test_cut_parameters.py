"""A parameter that is cut anywhere is stepped with the bits of the whole."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.offload.cpu_optimizer import CpuOptimizer, StepPiece, pad_ends, rule_of, step_pieces
from shardwise.runtime.optimizers import Lion

NUMEL = 700
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, weight_decay=0.1, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, fused=True),
    "lion": lambda params: Lion(params, lr=0.1),
}


def make_piece(rule: CpuOptimizer, options: dict[str, object], numel: int) -> StepPiece:
    generator = torch.Generator().manual_seed(0)
    states = {name: torch.rand(numel, generator=generator) for name in rule.tensor_states(options)}
    master, grad = torch.randn(numel, generator=generator), torch.randn(numel, generator=generator)
    return StepPiece(options, master, grad, states, 3.0, False, torch.zeros(numel, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@settings(max_examples=25, deadline=None)
@given(numel=st.integers(1, NUMEL), cuts=st.lists(st.integers(0, NUMEL), max_size=4))
def test_a_cut_changes_no_bit(name: str, numel: int, cuts: list[int]) -> None:
    optimizer = OPTIMIZERS[name]([torch.zeros(1)])
    rule, options = rule_of(optimizer), optimizer.param_groups[0]
    whole, cut = make_piece(rule, options, numel), make_piece(rule, options, numel)
    step_pieces(rule, [whole], 0.5)
    bounds = sorted({0, numel, *(each for each in cuts if each < numel)})
    for start, stop in itertools.pairwise(bounds):
        direct, padded = pad_ends(cut.part(start, stop), start, is_end=stop == numel)
        step_pieces(rule, [*direct, *(each.padded for each in padded)], 0.5)
        for each in padded:
            each.put_back()
    assert torch.equal(cut.master, whole.master)
    assert torch.equal(cut.param, whole.param)
    assert all(torch.equal(cut.states[key], state) for key, state in whole.states.items())
