"""Feed-forwards and heads that take some tokens at a time: equal to whole ones in float64, and what never exists."""

from __future__ import annotations

import copy
import functools
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.huggingface import build_model
from harness.live_bytes import LiveBytes
from harness.pool import WorkerPool
from harness.reference import Trace, check_parity
from harness.refusals import refused
from harness.tensor import NUM_MICRO_BATCHES, train_split, train_whole
from harness.training import make_config, merge_ranks
from shardwise import Config, initialize
from shardwise.config.errors import ConfigError
from shardwise.construction.scan import build_layout
from shardwise.dropout import KeyedDraws
from shardwise.models.decoder import Decoder, lm_loss
from shardwise.models.presets import DecoderConfig
from shardwise.tensor.chunked import ChunkedForward, DeferredHead, chunk_model

NUM_STEPS = 2
# gpt2 drops after its feed-forward, t5 within it.
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "decoder": (1, "decoder", {"recompute": {"mode": "full"}}),
    "llama": (1, "llama", {"recompute": {"mode": "none"}}),
    "gpt2": (1, "gpt2", {"recompute": {"mode": "selective"}}),
    "inputs on the host": (1, "gpt2", {"recompute": {"mode": "full"}, "tiers": {"activations": "host"}}),
    "zero-3": (2, "decoder", {"zero": {"stage": 3}, "recompute": {"mode": "selective"}}),
    "zero-2": (2, "gpt2", {"zero": {"stage": 2}}),
    "tp": (2, "t5", {"mesh": {"tp": 2}, "recompute": {"mode": "full"}}),
    "sequence parallel": (
        *(2, "gpt2"),
        {
            "mesh": {"tp": 2},
            "tensor": {"sequence_parallel": True, "overlap_chunks": 2},
            "recompute": {"mode": "selective"},
        },
    ),
    "pipeline": (2, "llama", {"mesh": {"pp": 2}, "recompute": {"mode": "full"}}),
}


@functools.cache
def whole(model: str, num_data_ranks: int) -> Trace:
    return train_whole(model, num_data_ranks, num_steps=NUM_STEPS)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", CASES)
def test_training_in_parts_equals_training_whole(ranks: WorkerPool, name: str) -> None:
    pytest.importorskip("transformers")
    num_ranks, model, sections = CASES[name]
    overrides = {"mesh": {}, **sections, "context": {"chunk_tokens": 3}}
    traces = ranks(num_ranks).run(train_split, model, overrides, NUM_MICRO_BATCHES, NUM_STEPS)
    check_parity(merge_ranks(traces), whole(model, 2 if "zero" in sections else 1))


def drop_in_gathered_sequence(rank: int, world_size: int) -> str:
    sections = {"mesh": {"tp": 2}, "tensor": {"sequence_parallel": True}, "context": {"chunk_tokens": 4}}
    try:
        train_split(rank, world_size, "t5", sections, num_steps=1)
    except ConfigError as error:
        return error.code
    return ""


def test_a_dropout_on_unknown_tokens_is_refused(ranks: WorkerPool) -> None:
    pytest.importorskip("transformers")
    assert ranks(2).run(drop_in_gathered_sequence) == ["chunk-dropout"] * 2


class Tally:
    """Counts recomputations too: what is in slots is not the state of a module."""

    __slots__ = ("seen",)

    def __init__(self) -> None:
        self.seen: list[int] = []


class Parts(nn.Module):
    """Counts the tokens that it is called with, and drops some features twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(4, 8), nn.Linear(8, 4), nn.Dropout(0.5)
        self.tally = Tally()

    def forward(self, x: Tensor) -> Tensor:  # [B, S, E]
        self.tally.seen.append(x.shape[1])
        return self.dropout(self.down(self.dropout(self.up(x).relu())))


class Block(nn.Module):
    def __init__(self, feed_forward: nn.Module | None = None) -> None:
        super().__init__()
        self.mlp = feed_forward or Parts()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


def make_chunked(model: nn.Module, chunk_tokens: int) -> list[Any]:
    config = Config.from_dict({"context": {"chunk_tokens": chunk_tokens}, "run": {"device": "cpu"}}).resolve(1)
    return chunk_model(model, config, build_layout(model, config), KeyedDraws(0))


@pytest.mark.parametrize(("chunk_tokens", "seen"), [(3, [3, 3, 1]), (7, [7]), (100, [7]), (1, [1] * 7)])
def test_tokens_of_a_part(chunk_tokens: int, seen: list[int]) -> None:
    model = nn.Sequential(Block(), Block()).eval()
    x = torch.randn(2, 7, 4)
    expected = model(x)
    for block in model:
        block.mlp.tally.seen.clear()
    undo = make_chunked(model, chunk_tokens)
    torch.testing.assert_close(model(x), expected)
    assert [block.mlp.tally.seen for block in model] == [seen, seen]
    copied = copy.deepcopy(model)
    for each in reversed(undo):
        each()
    assert type(model[0].mlp) is Parts
    assert isinstance(copied[0].mlp, ChunkedForward)
    torch.testing.assert_close(copied(x), expected)


def train_dropping(rank: int, world_size: int, chunk_tokens: int | None) -> list[Tensor]:
    """Gradients of blocks each of which draws twice at one site, twice a forward."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        block = Block()
        model = nn.Sequential(block, block, Block()).double()
        x = torch.randn(2, 7, 4, dtype=torch.float64)
    sections = {"context": {"chunk_tokens": chunk_tokens}, "recompute": {"mode": "full"}}
    with initialize(model, make_config(1, sections), loss_fn=lambda y, _: y.square().mean()) as engine:
        engine.backward(engine(x))
        return [engine.read(name, "grad") for name, _ in model.named_parameters()]


def test_parts_drop_what_the_whole_drops(ranks: WorkerPool) -> None:
    (expected,), (found,) = (ranks(1).run(train_dropping, each) for each in (None, 3))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert all(each.any() for each in found)


class PostNorm(Block):
    """Keeps something of its feed-forward's result, unlike `Block`."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square()


@pytest.mark.parametrize(("block", "num_runs"), [(Block, 2), (PostNorm, 3)])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_parts_run_no_more_than_they_must(block: type[Block], num_runs: int, mode: str) -> None:
    """A block's recomputation runs none of them for their own backwards, which do so themselves."""
    sections = {"context": {"chunk_tokens": 3}, "recompute": {"mode": mode}}
    model = nn.Sequential(block(), block()).double()
    with initialize(model, make_config(1, sections), loss_fn=lambda y, _: y.square().mean()) as engine:
        engine.backward(engine(torch.ones(2, 7, 4, dtype=torch.float64)))
    assert [sorted(each.mlp.tally.seen) for each in model] == [sorted([3, 3, 1] * num_runs)] * 2


class Pair(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return x, x


class TinyMoE(nn.Linear):
    """By its name a mixture of experts."""


@pytest.mark.parametrize(
    ("feed_forward", "code", "values"),
    [
        (nn.Sequential(TinyMoE(4, 4)), "chunk-experts", ["0.mlp", "Sequential"]),
        (nn.ModuleDict({"experts": nn.Linear(4, 4)}), "chunk-experts", ["0.mlp", "ModuleDict"]),
        (nn.Sequential(nn.Conv1d(4, 4, 3)), "chunk-mixes-tokens", ["0.mlp", "Conv1d"]),
    ],
)
def test_what_does_not_work_in_parts_is_refused(feed_forward: nn.Module, code: str, values: list[str]) -> None:
    with refused(code, *values):
        make_chunked(nn.Sequential(Block(feed_forward), Block(feed_forward)), 3)


@pytest.mark.parametrize(
    ("feed_forward", "shape", "value"),
    [
        (Pair(4, 4), (2, 7, 4), "0.mlp returns tuple"),
        (nn.Linear(4, 5), (2, 7, 4), "0.mlp returns (2, 3, 5)"),
        (nn.Linear(4, 4), (7, 4), "0.mlp is called with (7, 4)"),
    ],
)
def test_what_a_part_cannot_be_is_refused(feed_forward: nn.Module, shape: tuple[int, ...], value: str) -> None:
    model = nn.Sequential(Block(feed_forward), Block(feed_forward))
    make_chunked(model, 3)
    with refused("chunk-one-tensor", value):
        model(torch.ones(shape))


def test_config_refuses_what_it_cannot_be() -> None:
    for section, *refusal in (
        ({"context": {"chunk_tokens": 0}}, "out-of-range", "context.chunk_tokens=0"),
        ({"context": {"chunk_tokens": 8}, "compile": {"enabled": True}}, "chunks-with-compile", "chunk_tokens=8"),
        (
            {"context": {"chunk_tokens": 8}, "mesh": {"pp": 2}, "pipeline": {"schedule": "zb-h1"}},
            "chunks-with-zero-bubble",
            "zb-h1",
        ),
    ):
        with refused(*refusal):
            Config.from_dict(section).resolve(2)


def test_blocks_and_heads_that_stay_whole_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)))
    with caplog.at_level(logging.WARNING, "shardwise"):
        make_chunked(model, 3)
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "context.chunk_tokens=3: block 0 has no feed-forward of its own (DenseReluDense",
        "context.chunk_tokens=3: logits exist whole",
    ]


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_the_head_of_a_model_of_transformers_waits(family: str) -> None:
    pytest.importorskip("transformers")
    model = build_model(family)
    make_chunked(model, 3)
    assert isinstance(model.get_output_embeddings(), DeferredHead)
    tokens = torch.arange(12).view(2, 6)
    output = model(input_ids=tokens, labels=tokens)
    assert output.logits.is_deferred
    output.loss.backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "mlp" in name)


HIDDEN, FFN, VOCAB = 16, 512, 16_384


def peak_bytes(chunk_tokens: int | None, mode: str, num_tokens: int, vocab_size: int) -> int:
    """Of forward and backward of a decoder without attention, beside what lives before."""
    shape = DecoderConfig(
        vocab_size=vocab_size,
        num_layers=1,
        hidden_size=HIDDEN,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        ffn_size=FFN,
        max_seq_len=num_tokens,
    )
    sections = {
        "precision": {"param": "fp32"},
        "zero": {"stage": 0},
        "recompute": {"mode": mode},
        "context": {"chunk_tokens": chunk_tokens},
    }
    model, tokens = Decoder(shape), torch.arange(num_tokens).unsqueeze(0) % vocab_size
    for block in model.blocks:
        block.attention = Skipped()
    with initialize(model, make_config(1, sections), loss_fn=lambda y, batch: lm_loss(y, batch[1])) as engine:
        batch = (tokens, tokens)
        engine.backward(engine((tokens[:, :64], tokens[:, :64])))  # buffers that stay
        engine.step()
        with LiveBytes() as live:
            engine.backward(engine(batch))
        return live.peak_bytes()


class Skipped(nn.Module):
    def forward(self, x: Tensor, rope: Tensor, positions: None) -> Tensor:
        return x


def test_whole_logits_never_exist() -> None:
    num_tokens = 2048
    logits_bytes, part_bytes = num_tokens * VOCAB * 4, 32 * VOCAB * 4
    assert peak_bytes(None, "full", num_tokens // 2, VOCAB) > 2 * logits_bytes / 2  # and their gradient
    assert peak_bytes(32, "full", num_tokens, VOCAB) < 8 * part_bytes == logits_bytes / 8


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_inner_states_never_exist_whole(mode: str) -> None:
    num_tokens = 8192
    inner_bytes = num_tokens * FFN * 4
    assert peak_bytes(None, mode, num_tokens, 64) > 2 * inner_bytes
    assert peak_bytes(256, mode, num_tokens, 64) < inner_bytes / 2
