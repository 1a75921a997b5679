"""What a model is given for split sequences, and how it is taken back."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.refusals import refused
from harness.split_sequences import make_case
from shardwise.comm.backends import simulated_comm
from shardwise.comm.collectives import Comm, CommResources, RankPlace
from shardwise.config.resolve import Config
from shardwise.context.apply import apply_context_parallel, check_context
from shardwise.models import Decoder


def simulated(num_ranks: int) -> Comm:
    device = torch.device("cpu")
    return simulated_comm(RankPlace(0, num_ranks, "cp"), CommResources.alone(device, 5.0), "gloo")


def config_of(cp: int) -> Config:
    return Config.from_dict({"mesh": {"cp": cp}, "run": {"device": "cpu"}}).resolve(cp)


def decoder() -> Decoder:
    model = make_case("fixed").build(torch.float64)
    assert isinstance(model, Decoder)
    return model


def test_a_model_is_as_before_when_all_is_undone() -> None:
    model, tokens = decoder(), torch.arange(16).view(1, 16)
    before = [block.attention.attend for block in model.blocks]
    expected = model(tokens)
    sequences, undone = apply_context_parallel(model, config_of(2), simulated(2))
    share = sequences.share(tokens, has_more=False)
    out: Tensor = model(**share.inputs)  # [1, 8, V]
    assert out.shape[1] == 8
    assert model(tokens).equal(expected)  # the model called by itself computes whole sequences
    for undo in reversed(undone):
        undo()
    assert [block.attention.attend for block in model.blocks] == before
    with refused("engine-closed"):
        out.sum().backward()


def test_layers_that_share_their_attention_share_what_is_planned() -> None:
    model = decoder()
    assert len({id(block.attention.attend) for block in model.blocks}) == 1
    _, undone = apply_context_parallel(model, config_of(2), simulated(2))
    assert len({id(block.attention.attend) for block in model.blocks}) == 1
    for undo in reversed(undone):
        undo()


def test_one_rank_keeps_its_batches_and_its_attention() -> None:
    model = decoder()
    attend = model.blocks[0].attention.attend
    sequences, undone = apply_context_parallel(model, config_of(1), simulated(1))
    assert sequences is None
    assert undone == []
    assert model.blocks[0].attention.attend is attend


def test_heads_that_cannot_be_exchanged_are_refused() -> None:
    config = config_of(3).override(["context.transport=ulysses"])
    with refused("cp-query-heads", "mesh.cp=3", "8 query"):
        check_context(decoder(), config)
