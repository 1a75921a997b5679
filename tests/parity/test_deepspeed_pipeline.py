"""Scripts that train a `PipelineModule`: the same losses and parameters as one process of plain torch, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise.compat.deepspeed as deepspeed
from harness.pool import RankError, WorkerPool
from harness.refusals import refused
from shardwise.compat.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from shardwise.compat.deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from shardwise.config.errors import ConfigError

STEPS, MICRO, LR, WORDS, WIDTH = 3, 4, 0.05, 11, 8


class Embedding(nn.Module):
    """Of words and positions, as GPT's; at the end its words are the head."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH))
        self.positions = nn.Embedding(6, WIDTH)

    def forward(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        tokens, mask = batch
        return F.embedding(tokens, self.weight) + self.positions.weight[: tokens.shape[1]], mask


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.Linear(width, 3 * width, bias=False)  # a bias of keys has no gradient
        self.mlp = nn.Linear(width, width)

    def forward(self, carried: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = carried
        q, k, v = self.attention(x).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + torch.tanh(self.mlp(x)), mask


def head(embedding: nn.Module, x: Tensor) -> Tensor:
    return x @ embedding.weight.T


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def gpt(**options: Any) -> PipelineModule:
    layers: list[Any] = [TiedLayerSpec("words", Embedding)]
    layers += [LayerSpec(Block, WIDTH) for _ in range(3)]
    layers += [
        lambda carried: carried[0],
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("words", Embedding, forward_fn=head),
    ]
    return PipelineModule(layers, loss_fn=token_loss, **options)


def alexnet(**options: Any) -> PipelineModule:
    features = nn.Sequential(
        *(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d((2, 2))),
    )
    layers = [*features, lambda x: torch.flatten(x, 1), nn.Linear(32, 16), nn.ReLU(inplace=True), nn.Linear(16, 5)]
    return PipelineModule(layers=layers, loss_fn=nn.CrossEntropyLoss(), **options)


@contextmanager
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODELS = {"gpt": gpt, "alexnet": alexnet}


def data(model: str, rank: int, first: int = 0) -> Iterator[tuple[Any, Tensor]]:
    """Micro-batches of a data rank, without end."""
    number = first
    while True:
        generator = torch.Generator().manual_seed(1000 * rank + number)
        if model == "gpt":
            tokens = torch.randint(WORDS, (2, 6), generator=generator)
            yield [tokens, torch.ones(6, 6, dtype=torch.bool).tril()], tokens.roll(-1, 1)
        else:
            yield torch.randn(2, 3, 8, 8, generator=generator), torch.randint(5, (2,), generator=generator)
        number += 1


def expected(name: str, num_data_ranks: int, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(3)
    model = MODELS[name](num_stages=1, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    sources, losses = [data(name, rank) for rank in range(num_data_ranks)], []
    for _ in range(STEPS):
        parts = []
        for source in sources:
            for _ in range(MICRO):
                inputs, labels = next(source)
                inputs = tuple(inputs) if isinstance(inputs, list) else inputs
                for layer in model:
                    inputs = layer(inputs)
                parts.append(model.loss_fn(inputs, labels))
        loss = torch.stack(parts).mean()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {key: value.detach() for key, value in model.named_parameters()}


def settings(world_size: int, stage: int = 0) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}},
        "zero_optimization": {"stage": stage},
    }


def train(rank: int, world_size: int, name: str, stage: int, own: bool, options: dict[str, Any]) -> Any:
    with float64():
        torch.manual_seed(3)
        if "num_data_ranks" in options:
            options = {"topology": PipeDataParallelTopology(2, options["num_data_ranks"])}
        model = MODELS[name](**options)
        parameters = [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=0.01) if own else None
        config = settings(world_size, stage)
        engine, _, _, _ = deepspeed.initialize(
            model=model, config=config, optimizer=optimizer, model_parameters=parameters
        )
        assert isinstance(engine, deepspeed.PipelineEngine)
        data_rank = engine.get_data_parallel_rank()
        batches = data(name, data_rank)
        losses = [engine.train_batch(data_iter=batches).item() for _ in range(STEPS)]
        assert engine.global_steps == STEPS
        evaluated = [engine.eval_batch(data(name, data_rank)).item() for _ in range(2)]
        loss, outputs = engine.eval_batch(data(name, data_rank), return_logits=True, num_micro_batches=3)
        assert (outputs is not None) == engine.is_last_stage() == (rank >= world_size - world_size // model.num_stages)
        assert engine.is_first_stage() == (rank < world_size // model.num_stages)
        if outputs is not None:
            labels = [labels for _, (_, labels) in zip(range(3), data(name, data_rank), strict=False)]
            own_loss = torch.stack([model.loss_fn(*each) for each in zip(outputs, labels, strict=True)]).mean()
            assert engine.dp_world_size > 1 or own_loss.item() == pytest.approx(loss.item(), rel=1e-12)
        listed = {"compute_loss": False, "reduce_output": None}
        means = {"num_micro_batches": 3, "reduce_output": None, "bcast_loss": False}
        evaluations = [engine.eval_batch(data(name, data_rank), **each) for each in (listed, means)]
        if outputs is not None:
            assert len(evaluations[0]) == MICRO
            assert torch.stack(evaluations[1]).mean().item() == pytest.approx(own_loss.item(), rel=1e-12)
        else:
            assert evaluations == [None, None]
        if engine.is_data_parallel:
            with refused("eval-reduction", "reduce_output=None"):
                engine.eval_batch(data(name, data_rank), compute_loss=False)
        elif (mean := engine.eval_batch(data(name, data_rank), compute_loss=False)) is not None:
            torch.testing.assert_close(mean, torch.stack(evaluations[0]).mean(0))
        names = [key for key, _ in model.named_parameters()]
        return losses, evaluated, {key: engine.inner.read(key) for key in names}


RUNS = {
    "alexnet": ("alexnet", 2, 0, False, {"num_stages": 2}),
    "alexnet, uniform": ("alexnet", 2, 1, True, {"num_stages": 2, "partition_method": "uniform"}),
    "alexnet, by class": ("alexnet", 2, 0, False, {"num_stages": 2, "partition_method": "type:linear|conv"}),
    "alexnet, recomputed": ("alexnet", 2, 0, False, {"num_stages": 2, "activation_checkpoint_interval": 1}),
    "alexnet, one stage": ("alexnet", 2, 2, False, {"num_stages": 1}),
    "gpt": ("gpt", 2, 0, False, {"num_stages": 2}),
    "gpt, own optimizer": ("gpt", 2, 0, True, {"num_stages": 2, "partition_method": "type:block"}),
    "gpt, seeded": ("gpt", 2, 0, False, {"num_stages": 2, "seed_layers": True}),
    "gpt, data ranks": ("gpt", 4, 1, False, {"num_data_ranks": 2}),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", RUNS)
def test_a_pipeline_equals_plain_torch(ranks: WorkerPool, name: str) -> None:
    model, world_size, stage, own, options = RUNS[name]
    num_data_ranks = world_size // options.get("num_stages", 2)
    with float64():
        losses, parameters = expected(model, num_data_ranks, seed_layers=options.get("seed_layers", False))
    for found, evaluated, states in ranks(world_size).run(train, model, stage, own, options):
        assert found == pytest.approx(losses, rel=1e-9)
        assert evaluated[0] == evaluated[1] < losses[0]
        for key, value in parameters.items():
            torch.testing.assert_close(states[key], value, rtol=1e-9, atol=1e-12)


def train_on_dataset(rank: int, world_size: int) -> tuple[list[float], str]:
    """As DeepSpeed's example of AlexNet: `training_data`, and no iterator."""
    images, labels = torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 5
    model = alexnet(num_stages=2)
    engine, _, loader, _ = deepspeed.initialize(
        model=model, config=settings(world_size), training_data=torch.utils.data.TensorDataset(images, labels)
    )
    assert len(loader) == 6
    losses = [engine.train_batch().item() for _ in range(2 * STEPS)]
    with pytest.raises(ConfigError, match="call train_batch"):
        engine(images)
    return losses, model.topology().get_coord(rank)._asdict()


def test_training_data_is_taken_again_and_again(ranks: WorkerPool) -> None:
    (first, place), (second, _) = ranks(2).run(train_on_dataset)
    assert first == second
    assert min(first[1:]) < first[0]
    assert place == {"pipe": 0, "data": 0}


def train_without_data(rank: int, world_size: int) -> None:
    engine, *_ = deepspeed.initialize(model=alexnet(num_stages=2), config=settings(world_size))
    engine.train_batch()


def test_a_stage_without_data_is_refused(ranks: WorkerPool) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(train_without_data)
    assert caught.value.code == "pipeline-no-data"
