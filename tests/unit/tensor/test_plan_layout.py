"""The layout of a split model says which elements of whole parameters each rank holds: all that a checkpoint needs."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from harness.refusals import refused
from shardwise import Config, build_layout, plan_layout
from shardwise.construction.scan import scan_model
from shardwise.layout.layout import Layout
from shardwise.layout.resolve import resolve_layout
from shardwise.models import Decoder, DecoderConfig


def make_model(**sizes: int) -> Decoder:
    """With KV heads that ranks share at tp=4, and a vocabulary that does not divide."""
    shape = {"vocab_size": 13, "num_layers": 2, "hidden_size": 8, "num_heads": 4, "num_kv_heads": 2, "head_dim": 2}
    return Decoder(DecoderConfig(**{**shape, "ffn_size": 12, "max_seq_len": 8, **sizes}), device="meta")


def make_layout(tp: int, num_shards: int, stage: int, sequence_parallel: bool) -> Layout:
    sections = {"mesh": {"tp": tp}, "tensor": {"sequence_parallel": sequence_parallel}, "zero": {"stage": stage}}
    return plan_layout(make_model(), Config.from_dict(sections).resolve(tp * num_shards))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("tp", "num_shards"), [(1, 3), (2, 1), (2, 3), (4, 2)])
def test_shards_of_all_ranks_hold_every_element_as_often_as_ranks_share_it(
    tp: int, num_shards: int, sequence_parallel: bool
) -> None:
    layout = make_layout(tp, num_shards, 3, sequence_parallel)
    whole = {name: tuple(parameter.shape) for name, parameter in make_model().named_parameters()}
    held = {name: np.zeros(shape, dtype=int) for name, shape in whole.items()}
    for group in layout.groups:
        for tp_index in range(tp):
            for shard in range(num_shards):
                for slot in group.slots(*group.shard_range(shard)):
                    for piece in slot.pieces(tp_index):
                        index = tuple(map(slice, piece.rect.start, piece.rect.stop))
                        held[slot.param.name][index] += 1
    for name, counts in held.items():
        is_shared_head = tp == 4 and ("key" in name or "value" in name)
        is_split = any(word in name for word in ("query", "key", "value", "out", "gate", "up", "down", "embed", "head"))
        expected = 2 if is_shared_head else 1 if is_split else tp
        assert (counts == expected).all(), name


def test_ranks_of_a_group_have_equal_buffers() -> None:
    layout = make_layout(2, 1, 0, sequence_parallel=False)
    shapes = {param.name: param.shape for group in layout.groups for param in group.params}
    assert shapes["embed.weight"] == (7, 8), "13 tokens, padded to 14"
    assert shapes["blocks.0.attention.query.weight"] == (4, 8)
    assert shapes["blocks.0.attention.out.weight"] == (8, 4)
    assert shapes["blocks.0.ffn_norm.weight"] == (8,)


def test_a_layout_without_a_plan_is_refused() -> None:
    config = Config.from_dict({"mesh": {"tp": 2}}).resolve(2)
    with refused("tp-needs-plan", "mesh.tp=2"):
        build_layout(make_model(), config)


def test_heads_that_do_not_divide_are_refused_with_the_nearest_that_do() -> None:
    config = Config.from_dict({"mesh": {"tp": 3}}).resolve(3)
    with refused("tp-divides-units", "tp=3", "num_heads=4", "2, 4"):
        plan_layout(make_model(), config)


def test_without_tensor_parallelism_any_model_has_a_layout() -> None:
    layout = plan_layout(torch.nn.Linear(3, 2), Config().resolve(1))
    assert (layout.tensor, layout.numel) == (None, 8)


@pytest.mark.parametrize("rank", [0, 7])
def test_facts_and_a_plan_are_all_that_a_layout_needs(rank: int) -> None:
    sections = {"mesh": {"pp": 2, "tp": 2}, "optimizer": {"name": "muon"}, "precision": {"param": "bf16"}}
    config, model = Config.from_dict(sections).resolve(8), make_model()
    layout = plan_layout(model, config, rank=rank)
    assert layout.tensor is not None
    facts = pickle.loads(pickle.dumps(scan_model(model, config)))  # as another process would get them
    assert resolve_layout(facts, config, layout.tensor.plan, rank=rank) == layout
