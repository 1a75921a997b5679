"""Under sequence parallelism, code of a block that computes tokens from others, or by their number, is refused before a
number is wrong: at each length and number of samples that a run has.
"""

from __future__ import annotations

import functools
import io
import logging
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.pool import WorkerPool
from harness.reference import PARITY
from harness.refusals import refusal_of, refused
from harness.scanned import scanned
from harness.training import make_config
from shardwise import initialize
from shardwise.config.resolve import Config
from shardwise.layout.tensor_plan import TensorLayout, param_splits
from shardwise.models import Decoder, DecoderConfig
from shardwise.runtime.float64 import float64_throughout
from shardwise.tensor.hf_plans import find_plan
from shardwise.tensor.sequence_proof import prove_sequences

VOCAB, WIDTH, FEATURES, HEADS = 12, 8, 16, 2
SGD: Final = {"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}

By = Callable[["Block", Tensor], Tensor]
# What a block does between its regions; x is [B, S, D].
REFUSED: Final[dict[str, By]] = {
    "a mean where long": lambda block, x: x - x.mean(1, keepdim=True) if x.shape[1] > 16 else x,
    "a mean": lambda block, x: x - x.mean(1, keepdim=True),
    "a factor by length": lambda block, x: x * 2 if x.shape[1] > 16 else x,
    "in training": lambda block, x: x - x.mean(1, keepdim=True) if block.training and x.shape[1] > 16 else x,
    "noise by length": lambda block, x: x + torch.randn_like(x) / x.shape[1] if block.training else x,
    "a shift": lambda block, x: x + F.pad(x, (0, 0, 1, 0))[:, :-1],
    "by the number of samples": lambda block, x: x * x.shape[1] if x.shape[0] > 2 else x,
    "of all elements": lambda block, x: x * 2 if x.numel() > 2 * 16 * WIDTH else x,
    "where a mask is given": lambda block, x: x - x.mean(1, keepdim=True) if block.has_mask else x,
}
TAKEN: Final[dict[str, By]] = {
    "nothing": lambda block, x: x,
    "chunks": lambda block, x: torch.cat([2 * each for each in x.split(5, 1)], 1) if x.shape[1] > 16 else 2 * x,
    "padding": lambda block, x: F.pad(x, (0, 0, 0, -x.shape[1] % 16))[:, : x.shape[1]].tanh(),
    "in place": lambda block, x: x.mul(2).add_(x),
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2)) * (2 if x.shape[1] > 16 else 1)


class Block(nn.Module):
    def __init__(self, by: By) -> None:
        super().__init__()
        self.by, self.has_mask = by, False
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, FEATURES), nn.Linear(FEATURES, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.down(torch.tanh(self.up(self.by(self, x))))


class Model(nn.Module):
    def __init__(self, by: By, num_blocks: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks, self.norm = nn.ModuleList([Block(by) for _ in range(num_blocks)]), nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(ids)
        if x.shape[1] > 16:  # here all ranks have all tokens
            x = x - x.mean(1, keepdim=True)
        for block in self.blocks:
            block.has_mask = mask is not None
            x = block(x)
        return self.head(self.norm(x))


PLAN: Final = {
    "blocks.*.attention.qkv": f"column parts=3 units={HEADS}",
    "blocks.*.attention.out": f"row units={HEADS}",
    "blocks.*.attention": ["region x", "local num_heads"],
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "blocks.?": "stack x last=norm",
    "embed": "vocab",
    "head": "head",
}


def loss_fn(logits: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(logits.flatten(0, 1), batch.flatten(), reduction="sum"), batch.numel()


def batch_of(num_samples: int, length: int) -> Tensor:
    return torch.randint(VOCAB, (num_samples, length), generator=torch.Generator().manual_seed(length))


def losses_of(by: By, tp: int, sizes: list[tuple[int, int]], is_evaluation: bool, **sections: Any) -> list[float]:
    with torch.random.fork_rng(devices=[]), float64_throughout():
        torch.manual_seed(3)
        model = Model(by).double()
        config = {"mesh": {"tp": tp, "dp_shard": 1}, "optimizer": SGD, **sections}
        if tp > 1:
            config["tensor"] = {"sequence_parallel": True}
        with initialize(model, make_config(1, config), loss_fn=loss_fn, plan=PLAN) as engine:
            step = engine.eval_step if is_evaluation else engine.train_step
            return [step([batch_of(*each)]).loss for each in sizes]


SHORT, LONG, MORE = (2, 12), (2, 24), (3, 12)


class ProvedError(Exception):
    """Ends a forward before it computes."""


def prove(by: By, *sizes: tuple[int, int], masks: bool = False, **mesh: int) -> None:
    """Prove sizes of batches as an engine would, in this process."""
    prove_model(Model(by), *sizes, masks=masks, **mesh)


def prove_model(model: nn.Module, *sizes: tuple[int, int], masks: bool = False, **mesh: int) -> None:
    plan = find_plan(model, 2, PLAN, True)
    config = Config.from_dict({"mesh": {"tp": 2, **mesh}, "tensor": {"sequence_parallel": True}})
    splits = param_splits(scanned(model).params, plan, 2, True)
    shapes = {name: split.global_shape for name, split in splits.items()}
    prove_sequences(model, TensorLayout(plan, splits, 2, True), config, shapes)

    def end(*_: Any) -> None:
        raise ProvedError

    model.register_forward_pre_hook(end)
    for number, each in enumerate(sizes):
        ids = torch.zeros(each, dtype=torch.long)
        with pytest.raises(ProvedError):
            model(ids, torch.ones(each, dtype=torch.bool) if masks and number else None)


@pytest.mark.parametrize("name", REFUSED)
def test_a_block_whose_tokens_meet_outside_of_regions_is_refused(name: str) -> None:
    with refused("tp-tokens-apart", "tensor.sequence_parallel", "blocks.0", "Model"):
        prove(REFUSED[name], SHORT, SHORT, LONG, MORE, masks="mask" in name)


def test_each_size_is_proved_when_it_comes() -> None:
    """A refusal comes with the first batch that is wrong, and none before."""
    for name, wrong in (("a mean where long", LONG), ("by the number of samples", MORE)):
        prove(REFUSED[name], SHORT, (2, 8), (1, 12))
        with refused("tp-tokens-apart"):
            prove(REFUSED[name], SHORT, (2, 8), (1, 12), wrong)
    prove(REFUSED["where a mask is given"], SHORT, SHORT)
    prove(REFUSED["a mean where long"], SHORT, (2, 15))  # an evaluation leaves such a sequence whole


def test_long_sequences_are_proved_by_what_the_code_decides(caplog: pytest.LogCaptureFixture) -> None:
    length = 2**21

    def prove_long(by: By, *sizes: tuple[int, int]) -> None:
        prove_model(Model(by, num_blocks=1), *sizes)

    prove_long(lambda block, x: 2 * x if x.shape[1] > 2 else x, (4, length), (4, length + 64))
    with refused("tp-length-unproved", "tokens > 1000", f"{length:,}", "sequence_parallel=false"):
        prove_long(lambda block, x: 2 * x if x.shape[0] > 2 and x.shape[1] > 1000 else x, (2, length), (4, length))
    assert "could not be proved" not in caplog.text
    prove_long(lambda block, x: 2 * x if x.isfinite().all() else x, (1, length))
    assert "could not be proved" in caplog.text


@functools.cache
def table(length: int) -> Tensor:
    return torch.linspace(0.0, 1.0, length).float()


class Tabled(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * table(WIDTH)


def test_a_proof_leaves_nothing_where_code_keeps_what_it_computes() -> None:
    kept: dict[str, Any] = {}

    def keep(block: Block, x: Tensor) -> Tensor:
        return x + kept.setdefault("first", x.detach().clone())[:, :1] * 0

    prove(keep, SHORT)
    assert not kept
    model = Model(lambda block, x: x)
    model.blocks[0] = Tabled(lambda block, x: x)
    prove_model(model, SHORT)
    assert table(WIDTH).dtype is torch.float32


def runs(rank: int, world_size: int) -> Any:
    taken = [losses_of(by, world_size, [SHORT, LONG, (3, 24), SHORT], False) for by in TAKEN.values()]
    if world_size == 1:
        return taken, None
    wrong = REFUSED["a mean where long"]
    return taken, [refusal_of(lambda each=each: losses_of(wrong, 2, [SHORT, LONG], each)) for each in (False, True)]


def test_runs_of_blocks_that_compute_tokens_apart_equal_one_process_and_others_end(ranks: WorkerPool) -> None:
    expected, _ = ranks(1).run(runs)[0]
    for taken, refusals in ranks(2).run(runs):
        torch.testing.assert_close(taken, expected, rtol=PARITY, atol=0.0)
        assert [code for code, _ in refusals] == ["tp-tokens-apart"] * 2


SIZES: Final[dict[str, int]] = {"hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "ffn_size": 24}


def lengths_under_cp(rank: int, world_size: int) -> Any:
    """Run a model that is split by cp and tp together, whose norm mixes tokens only where there are many."""
    shape = DecoderConfig(vocab_size=VOCAB, num_layers=1, max_seq_len=512, **SIZES)
    model, messages = Decoder(shape), logging.StreamHandler(io.StringIO())
    mixing = lambda _, args, out: out - out.mean(1, keepdim=True) if out.shape[1] > 150 else out  # noqa: E731
    next(each for each in model.modules() if "Norm" in type(each).__name__).register_forward_hook(mixing)
    logging.getLogger("shardwise").addHandler(messages)
    try:
        with initialize(model, make_config(1, {"mesh": {"cp": 2, "tp": 2}}), loss_fn=loss_fn) as engine:
            for length in (8, 8, 160):
                code, _ = refusal_of(lambda length=length: engine.train_step([batch_of(2, length)]))
    finally:
        logging.getLogger("shardwise").removeHandler(messages)
    return code, "could not be proved" in messages.stream.getvalue()


def test_lengths_under_cp_and_tp_are_proved_with_whole_shapes(ranks: WorkerPool) -> None:
    assert ranks(4).run(lengths_under_cp) == [("cp-tokens-apart", False)] * 4
