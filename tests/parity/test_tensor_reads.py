"""Code of a forward that reads a split parameter, and is not its module's own forward, reads the whole of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.pool import WorkerPool
from harness.reference import PARITY
from harness.refusals import refusal_of
from harness.training import make_config
from shardwise import initialize
from shardwise.runtime.float64 import float64_throughout

VOCAB, WIDTH, FEATURES = 14, 8, 12
SGD: Final = {"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}

Read = Callable[["Reading", Tensor, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, FEATURES), nn.Linear(FEATURES, WIDTH)
        self.tables: list[nn.Embedding] = []

    def forward(self, x: Tensor) -> Tensor:
        for table in self.tables:
            x = x + torch.tanh(F.linear(x, table.weight)) @ table.weight
        return x + self.down(torch.tanh(self.up(x)))


class Reading(nn.Module):
    """A model whose forward reads a parameter of one of its modules: it gets ids and hidden states."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.embed, self.side = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(WIDTH, VOCAB)
        self.seen = 0.0
        if name == "in a block":
            self.blocks[1].tables.append(self.embed)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.side(ids)
        for block in self.blocks:
            x = block(x)
        read = READS.get(self.name)
        return self.head(x if read is None else read(self, ids, x))


def note(model: Reading, *values: Tensor) -> Tensor | float:
    with torch.no_grad():
        model.seen = sum(float(each.norm()) for each in values)
    return model.seen


READS: Final[dict[str, Read]] = {
    "in a block": lambda model, ids, x: x,
    "indexing": lambda model, ids, x: x + model.embed.weight[ids],
    "embedding": lambda model, ids, x: x + F.embedding(ids, model.embed.weight),
    "index_select": lambda model, ids, x: x + model.side.weight.index_select(0, ids.flatten()).view_as(x),
    "tied by hand": lambda model, ids, x: x + torch.tanh(F.linear(x, model.embed.weight)) @ model.side.weight,
    "transposed": lambda model, ids, x: x + (x @ model.blocks[0].up.weight.t() + model.blocks[0].up.bias)[..., :WIDTH],
    "row": lambda model, ids, x: x + model.blocks[0].down.weight.sum(1) + model.blocks[0].down.bias,
    "head": lambda model, ids, x: x + model.head.weight.mean(0) * model.head.bias.sum(),
    "a penalty": lambda model, ids, x: x + sum(each.pow(2).sum() for each in model.parameters()),
    "statistics": lambda model, ids, x: x * note(model, model.embed.weight, model.blocks[0].up.weight.data),
    "detached": lambda model, ids, x: x + model.embed.weight.detach()[ids] + model.side.weight.data.mean(0),
    "a table's rows": lambda model, ids, x: x * model.embed.weight.shape[0] * model.side.weight.size(1),
}
PLAN: Final = {"embed": "vocab", "side": "vocab", "blocks.*.up": "column", "blocks.*.down": "row", "head": "head"}
LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "stage 1": {"zero": {"stage": 1}},
    "stage 3": {"zero": {"stage": 3}},
    "recompute": {"zero": {"stage": 3}, "recompute": {"mode": "full"}},
}


def loss_fn(logits: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(logits.flatten(0, 1), batch.flatten(), reduction="sum"), batch.numel()


def build(name: str) -> Reading:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Reading(name).double()


def batches(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(VOCAB, (2, 6), generator=generator) for _ in range(2)]


def train(rank: int, world_size: int, names: list[str], sections: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    for name in names:
        model = build(name)
        with float64_throughout():
            mesh = {"mesh": {"tp": world_size}, "optimizer": SGD, **sections}
            with initialize(model, make_config(2, mesh), loss_fn=loss_fn, plan=PLAN) as engine:
                losses = [engine.eval_step(batches(9)).loss]
                losses += [engine.train_step(batches(step)).loss for step in range(2)]
                found.append((losses, model.seen, {each: engine.read(each) for each, _ in model.named_parameters()}))
    return found


def train_alone(name: str) -> tuple[list[float], float, dict[str, Tensor]]:
    model = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def mean(step: int) -> Tensor:
        return sum((loss_fn(model(batch), batch)[0] for batch in batches(step)), torch.zeros(())) / 24

    with torch.no_grad():
        losses = [float(mean(9))]
    for step in range(2):
        optimizer.zero_grad()
        loss = mean(step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.seen, dict(model.named_parameters())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_forward_reads_of_other_modules_is_whole(ranks: WorkerPool, layout: str) -> None:
    names = ["", *READS]
    for found in ranks(2).run(train, names, LAYOUTS[layout]):
        for name, (losses, seen, parameters) in zip(names, found, strict=True):
            expected_losses, expected_seen, expected = train_alone(name)
            torch.testing.assert_close(losses, expected_losses, rtol=PARITY, atol=0.0, msg=name)
            torch.testing.assert_close(seen, expected_seen, rtol=PARITY, atol=0.0, msg=name)
            for each, value in expected.items():
                torch.testing.assert_close(
                    parameters[each], value.detach(), rtol=PARITY, atol=1e-12, msg=f"{name} {each}"
                )


LATE: Final = ("indexing", "a penalty", "tied by hand", "row", "statistics", "in a block")
FEW, MANY = 5, 2  # steps of two forwards before a read, which are more than any look at the first ones, and after


def begin_to_read(model: Reading, name: str) -> None:
    model.name = name
    if name == "in a block":
        model.blocks[1].tables.append(model.embed)


def train_late(rank: int, world_size: int, sections: dict[str, Any]) -> list[Any]:
    found = []
    for name in LATE:
        model = build("")
        with float64_throughout():
            config = make_config(2, {"mesh": {"tp": world_size}, "optimizer": SGD, **sections})
            with initialize(model, config, loss_fn=loss_fn, plan=PLAN) as engine:
                losses = [engine.train_step(batches(step)).loss for step in range(FEW)]
                losses += [engine.eval_step(batches(9)).loss for _ in range(FEW)]
                begin_to_read(model, name)
                losses.append(engine.eval_step(batches(9)).loss)
                losses += [engine.train_step(batches(step)).loss for step in range(MANY)]
                with engine.gathered(), torch.no_grad():  # a call that the engine does not make
                    model.eval()
                    losses.append(float(loss_fn(model(batches(9)[0]), batches(9)[0])[0]))
                found.append((losses, {each: engine.read(each) for each, _ in model.named_parameters()}))
    return found


def train_late_alone(name: str) -> tuple[list[float], dict[str, Tensor]]:
    model = build("")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def mean(step: int) -> Tensor:
        return sum((loss_fn(model(batch), batch)[0] for batch in batches(step)), torch.zeros(())) / 24

    def train(num_steps: int) -> list[float]:
        losses = []
        for step in range(num_steps):
            optimizer.zero_grad()
            loss = mean(step)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    losses = train(FEW) + [float(mean(9))] * FEW
    begin_to_read(model, name)
    losses += [float(mean(9)), *train(MANY)]
    losses.append(float(loss_fn(model(batches(9)[0]), batches(9)[0])[0]))
    return losses, dict(model.named_parameters())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_read_that_first_comes_late_is_whole(ranks: WorkerPool, layout: str) -> None:
    for found in ranks(2).run(train_late, LAYOUTS[layout]):
        for name, (losses, parameters) in zip(LATE, found, strict=True):
            expected_losses, expected = train_late_alone(name)
            torch.testing.assert_close(losses, expected_losses, rtol=PARITY, atol=0.0, msg=name)
            for each, value in expected.items():
                found_value = parameters[each]
                torch.testing.assert_close(found_value, value.detach(), rtol=PARITY, atol=1e-12, msg=f"{name} {each}")


class OwnSum(Block):
    """Reads its own layer's weight beside that layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up.weight.sum(0)


def train_compiled(rank: int, world_size: int, mode: str) -> list[Any]:
    found: list[Any] = []
    for name in ("", "indexing", "row", "in a block", "of its own"):
        torch._dynamo.reset()
        model = build("" if name == "of its own" else name)
        if name == "of its own":
            model.blocks[1] = OwnSum().double()
        compiled = {"compile": {"enabled": True, "backend": "aot_eager"}, "recompute": {"mode": mode}}
        config = make_config(2, {"mesh": {"tp": world_size}, "optimizer": SGD, **compiled})
        losses: list[float] = []

        def run(model: nn.Module = model, config: Any = config, losses: list[float] = losses) -> None:
            with initialize(model, config, loss_fn=loss_fn, plan=PLAN) as engine:
                losses += [engine.eval_step(batches(9)).loss]
                losses += [engine.train_step(batches(step)).loss for step in range(2)]

        found.append((refusal_of(run)[0], losses))
    return found


@pytest.mark.parametrize("mode", ["none", "full"])
def test_compiled_blocks_read_no_parts_and_code_around_them_reads_wholes(ranks: WorkerPool, mode: str) -> None:
    for plain, indexing, row, *others in ranks(2).run(train_compiled, mode):
        for name, (code, losses) in (("", plain), ("indexing", indexing), ("row", row)):
            assert not code
            torch.testing.assert_close(losses, train_alone(name)[0], rtol=PARITY, atol=0.0, msg=name)
        assert [code for code, _ in others] == ["split-parameter-read"] * 2


class ReadingNorm(nn.Module):
    """Norms, and reads a table of another module."""

    def __init__(self, norm: nn.Module, tables: list[nn.Embedding]) -> None:
        super().__init__()
        self.norm, self.tables = norm, tables

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) + self.tables[0].weight.mean(0)


def train_llama(rank: int, world_size: int, splits_sequence: bool) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=VOCAB)
    losses = []
    for tp in (1, world_size):
        with torch.random.fork_rng(devices=[]), float64_throughout():
            torch.manual_seed(3)
            model = transformers.LlamaForCausalLM(config).double()
            layer = model.model.layers[1]
            layer.input_layernorm = ReadingNorm(layer.input_layernorm, [model.model.embed_tokens])
            sections = {"mesh": {"tp": tp, "dp_shard": world_size // tp}, "optimizer": SGD}
            if tp > 1:
                sections["tensor"] = {"sequence_parallel": splits_sequence}
            with initialize(model, make_config(2, sections)) as engine:
                given = [{"input_ids": each, "labels": each} for step in range(2) for each in batches(step)]
                losses.append([engine.train_step(given[:2]).loss, engine.train_step(given[2:]).loss])
    return losses


def test_a_block_of_an_automatic_plan_reads_whole_parameters(ranks: WorkerPool) -> None:
    for whole, split in ranks(2).run(train_llama, False):
        torch.testing.assert_close(split, whole, rtol=PARITY, atol=0.0)


def refused_llama(rank: int, world_size: int) -> Any:
    return refusal_of(lambda: train_llama(rank, world_size, True))


def test_a_read_where_a_rank_has_some_tokens_is_refused(ranks: WorkerPool) -> None:
    assert [each[0] for each in ranks(2).run(refused_llama)] == ["split-parameter-read"] * 2
