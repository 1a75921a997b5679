"""Hugging Face models, unmodified and with random weights, train, evaluate and generate as in one plain process."""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from harness.combinations import cover
from harness.huggingface import FAMILIES, VOCAB_SIZE, build_model, make_case
from harness.models import IGNORED, ModelCase
from harness.pool import WorkerPool
from harness.reference import Trace, check_parity, own_loss
from harness.refusals import refused
from harness.scanned import scanned
from harness.training import make_config, make_optimizer, merge_ranks, reference_of, train_case
from shardwise import initialize
from shardwise.runtime.float64 import float64_throughout
from shardwise.runtime.param_guard import ReleasedParameterError

pytest.importorskip("transformers")

NUM_STEPS = 2
CLIP_NORM = 0.05
MAIN = ("llama", "qwen2", "gpt2", "bert", "t5", "mixtral")
STAGES = [pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full), 3]
CHECKPOINTING = ("none", "full", "selective", "own non-reentrant", "own reentrant")

Options = dict[str, Any]


def train(
    rank: int, world_size: int, family: str, options: Options, num_micro_batches: int, overrides: Options
) -> Trace:
    case = make_case(family, **options)
    with float64_throughout():
        return train_case(rank, world_size, case, num_micro_batches, NUM_STEPS, overrides)


@functools.cache
def reference(family: str, options: tuple[tuple[str, Any], ...], world_size: int, num_micro_batches: int) -> Trace:
    case = make_case(family, **dict(options))
    with float64_throughout():
        return reference_of(case, world_size, num_micro_batches, NUM_STEPS, CLIP_NORM)


def check(ranks: WorkerPool, family: str, options: Options, run: Options) -> None:
    """Train a family's model both ways.

    Args:
        ranks: the pool.
        family: of `FAMILIES`.
        options: of `build_model`, for both.
        run: stage, num_ranks, accumulation, and checkpointing, which the plain process does without.
    """
    num_ranks, accumulation, checkpointing = run["num_ranks"], run["accumulation"], run["checkpointing"]
    is_own = checkpointing.startswith("own ")
    overrides = {
        "zero": {"stage": run["stage"]},
        "optimizer": {"clip_norm": CLIP_NORM},
        "recompute": {"mode": "none" if is_own else checkpointing, "every": run.get("every", 1)},
    }
    own = {"checkpointing": checkpointing.removeprefix("own ")} if is_own else {}
    traces = ranks(num_ranks).run(train, family, {**options, **own}, accumulation, overrides)
    check_parity(merge_ranks(traces), reference(family, (*options.items(),), num_ranks, accumulation))


FACTORS = {
    "family": MAIN,
    "checkpointing": CHECKPOINTING,
    "stage": [1, 2, 3],
    "num_ranks": [2, 3],
    "accumulation": [1, 2],
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("run", cover(FACTORS))
def test_family_equals_one_process(ranks: WorkerPool, run: Options) -> None:
    # Reentrant checkpointing has no graph inside a block, so there the router's logits give the loss no gradient.
    cuts_router = run["family"] == "mixtral" and run["checkpointing"] == "own reentrant"
    check(ranks, run["family"], {"output_router_logits": False} if cuts_router else {}, run)


VARIANTS: dict[str, tuple[str, Options]] = {
    "adapters on a frozen model": ("llama", {"has_adapters": True}),
    "resized embeddings": ("llama", {"vocab_size": VOCAB_SIZE + 2}),
    "resized tied embeddings": ("gpt2", {"vocab_size": VOCAB_SIZE + 2}),
    "tied embeddings": ("qwen2", {"tie_word_embeddings": True}),
    "untied embeddings": ("t5", {"tie_word_embeddings": False}),
    "eager attention": ("llama", {"attn_implementation": "eager"}),
    "one block used three times": ("albert", {}),
    "a state space": ("mamba", {}),
    "experts of modules": ("switch", {}),
    "images": ("vit", {}),
    "speech": ("whisper", {}),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variant_equals_one_process(ranks: WorkerPool, variant: str, stage: int) -> None:
    run = {"stage": stage, "num_ranks": 2, "accumulation": 1, "checkpointing": "full", "every": 2}
    check(ranks, *VARIANTS[variant], run)


@pytest.mark.parametrize("checkpointing", ["own non-reentrant", "own reentrant"])
def test_adapters_under_the_models_own_checkpointing(ranks: WorkerPool, checkpointing: str) -> None:
    run = {"stage": 3, "num_ranks": 2, "accumulation": 1, "checkpointing": checkpointing}
    check(ranks, "llama", {"has_adapters": True}, run)


def idle_experts(family: str, seed: int) -> set[str]:
    """The experts that a batch leaves without a token: modules without gradient, slices whose gradient is zero."""
    case = make_case(family)
    model = case.build(torch.float64)
    with float64_throughout():
        model(**case.batch(seed, 2, torch.float64)).loss.backward()
    idle = set()
    for name, parameter in model.named_parameters():
        if "experts" in name:
            gradients = [parameter.grad] if parameter.dim() == 2 else list(parameter.grad)
            idle |= {f"{name} {i}" for i, grad in enumerate(gradients) if grad is None or not grad.any()}
    return idle


@pytest.mark.parametrize("family", ["mixtral", "switch"])
def test_batches_leave_other_experts_idle_on_other_ranks(family: str) -> None:
    """What the parity of these families stands on: the batches of two ranks, step by step."""
    steps = [(idle_experts(family, 2 * step), idle_experts(family, 2 * step + 1)) for step in range(NUM_STEPS)]
    assert any(first - second for first, second in steps)
    assert any(second - first for first, second in steps)


@dataclass
class Life:
    """What a model went through: losses of steps, losses of evaluations, and what it generated, step by step."""

    losses: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    generated: list[Any] = field(default_factory=list)


NUM_NEW_TOKENS = 4


def life_case(family: str) -> ModelCase:
    # While it generates, transformers holds the router's logits of one token against the mask of all, and fails.
    return make_case(family, **({"output_router_logits": False} if family == "mixtral" else {}))


def life_batches(family: str, step: int, world_size: int) -> tuple[list[Any], list[Any]]:
    """For training and for evaluation, one a rank; lengths and numbers of samples differ."""
    case = life_case(family)
    return (
        [case.batch(10 * step + rank, 2, torch.float64) for rank in range(world_size)],
        [case.batch(100 + 10 * step + rank, 3, torch.float64) for rank in range(world_size)],
    )


def prompt(rank: int) -> Tensor:
    return torch.randint(4, VOCAB_SIZE, (2, 3 + rank), generator=torch.Generator().manual_seed(rank))  # [B, S]


def generate(model: nn.Module, tokens: Tensor) -> Any:
    """Greedy new tokens; the message where a parameter is not present."""
    model.eval()
    try:
        return model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=NUM_NEW_TOKENS,
            min_new_tokens=NUM_NEW_TOKENS,
            do_sample=False,
        ).tolist()
    except ReleasedParameterError as error:
        return str(error)
    finally:
        model.train()


def live(rank: int, world_size: int, family: str, stage: int) -> Life:
    """Train, evaluate, generate inside and outside `gathered`, and so again."""
    model = life_case(family).build(torch.float64, seed=rank)
    life = Life()
    with float64_throughout(), initialize(model, make_config(1, {"zero": {"stage": stage}})) as engine:
        for step in range(2):
            train_batches, eval_batches = life_batches(family, step, world_size)
            life.losses.append(engine.train_step([train_batches[rank]]).loss)
            life.evaluations.append(engine.eval_step([eval_batches[rank]]).loss)
            if family != "bert":
                life.generated.append(generate(model, prompt(rank)))
                with engine.gathered():
                    life.generated.append(generate(model, prompt(rank)))
    return life


def mean_loss(model: nn.Module, batches: list[Any]) -> Tensor:
    totals, counts = zip(*(own_loss(model, model(**batch), batch) for batch in batches), strict=True)
    return sum(totals, torch.tensor(0.0)) / sum(counts)


@functools.cache
def plain_lives(family: str, world_size: int) -> list[Life]:
    """The same by one process; the lives of the ranks differ in what they generate."""
    model = life_case(family).build(torch.float64)
    optimizer = make_optimizer(model)
    lives = [Life() for _ in range(world_size)]
    with float64_throughout():
        for step in range(2):
            train_batches, eval_batches = life_batches(family, step, world_size)
            model.zero_grad()
            loss = mean_loss(model, train_batches)
            loss.backward()
            optimizer.step()
            evaluation = mean_loss(model, eval_batches).item()
            for rank, life in enumerate(lives):
                life.losses.append(loss.item())
                life.evaluations.append(evaluation)
                if family != "bert":
                    life.generated += 2 * [generate(model, prompt(rank))]
    return lives


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("family", MAIN)
def test_training_alternates_with_evaluation_and_generation(ranks: WorkerPool, family: str, stage: int) -> None:
    for life, expected in zip(ranks(2).run(live, family, stage), plain_lives(family, 2), strict=True):
        assert life.losses == pytest.approx(expected.losses, rel=1e-9)
        assert life.evaluations == pytest.approx(expected.evaluations, rel=1e-9)
        if family == "t5" and stage == 3:
            # `generate` calls the encoder by itself, outside the model's forward that would gather the embedding.
            outside, life.generated = life.generated[::2], life.generated[1::2]
            assert all("shared.weight is released" in text and "engine.gathered()" in text for text in outside)
            assert life.generated == expected.generated[1::2]
        else:
            assert life.generated == expected.generated


def mixed_model() -> nn.Module:
    """A bf16 model whose norms are fp32, with the experts computed as transformers does by default."""
    torch.manual_seed(0)
    model = build_model("mixtral", experts="grouped_mm").to(torch.bfloat16)
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.float()
    return model


def train_bf16(rank: int, world_size: int, stage: int) -> list[float]:
    overrides = {"zero": {"stage": stage}, "precision": {"param": "bf16"}}
    batch = FAMILIES["mixtral"].batch(rank, 2, torch.bfloat16)
    with initialize(mixed_model(), make_config(1, overrides)) as engine:
        return [engine.train_step([batch]).loss for _ in range(4)]


def test_a_bf16_model_with_fp32_norms_trains_the_same_in_every_stage(ranks: WorkerPool) -> None:
    model = mixed_model().to(torch.bfloat16)
    first = mean_loss(model, [FAMILIES["mixtral"].batch(rank, 2, torch.bfloat16) for rank in range(2)]).item()
    expected = ranks(2).run(train_bf16, 0)[0]
    assert expected[0] == pytest.approx(first, rel=1e-6)
    assert expected[-1] < expected[0] - 0.1
    for stage in (1, 2, 3):
        assert ranks(2).run(train_bf16, stage)[0] == pytest.approx(expected, rel=1e-3)


def uneven_batch(number: int, num_targets: int) -> dict[str, Tensor]:
    tokens = torch.randint(4, VOCAB_SIZE, (2, 64), generator=torch.Generator().manual_seed(number))
    is_target = (torch.arange(126) < num_targets).view(2, 63)
    return {"input_ids": tokens, "labels": torch.cat([tokens[:, :1], tokens[:, 1:].where(is_target, IGNORED)], 1)}


UNEVEN = [uneven_batch(0, 6), uneven_batch(1, 126)]


NUM_ITEMS = "num_items_in_batch"  # the Trainer's: a model given it returns sum / 132 in place of its mean


def train_unevenly(
    rank: int, world_size: int, mesh: dict[str, int], extra: Options
) -> tuple[float, float, float, float, float]:
    torch.manual_seed(0)
    model = build_model("llama", max_position_embeddings=64).double()
    num_data_ranks = world_size // (mesh.get("pp", 1) * mesh.get("tp", 1) * mesh.get("cp", 1))
    config = make_config(2 // num_data_ranks, {"mesh": mesh})
    batches = [{**batch, **extra} for batch in ([UNEVEN[rank]] if num_data_ranks == 2 else UNEVEN)]
    with float64_throughout(), initialize(model, config) as engine:
        result = engine.train_step(batches)
        evaluation = engine.eval_step(batches)
    return result.loss, result.grad_norm, result.count, evaluation.loss, evaluation.count


def uneven_sum(model: nn.Module) -> Tensor:
    total = torch.tensor(0.0, dtype=torch.float64)
    for batch in UNEVEN:
        logits = model(batch["input_ids"]).logits[:, :-1].flatten(0, 1)
        total = total + F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum")
    return total


@functools.cache
def uneven_reference() -> tuple[float, float, float, float, float]:
    """Loss, gradient norm and count of a step, then loss and count of an evaluation after it."""
    torch.manual_seed(0)
    model = build_model("llama", max_position_embeddings=64).double()
    optimizer = make_optimizer(model)
    with float64_throughout():
        loss = uneven_sum(model) / 132
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()
        optimizer.step()
        with torch.no_grad():
            return loss.item(), norm, 132, uneven_sum(model).item() / 132, 132


@pytest.mark.parametrize("mesh", [{}, {"pp": 2}, {"tp": 2}, {"cp": 2}], ids=str)
def test_every_target_of_uneven_micro_batches_weighs_the_same(ranks: WorkerPool, mesh: dict[str, int]) -> None:
    for found in ranks(2).run(train_unevenly, mesh, {}):
        assert found == pytest.approx(uneven_reference(), rel=1e-9)


@pytest.mark.parametrize("given", [132, torch.tensor(132)], ids=["a number", "a tensor"])
@pytest.mark.parametrize("mesh", [{}, {"pp": 2}, {"tp": 2}], ids=str)
def test_a_count_of_items_in_the_batch_changes_no_weight(
    ranks: WorkerPool, mesh: dict[str, int], given: int | Tensor
) -> None:
    for found in ranks(2).run(train_unevenly, mesh, {NUM_ITEMS: given}):
        assert found == pytest.approx(uneven_reference(), rel=1e-9)


def test_a_loss_fn_gets_the_models_loss_by_the_count_of_items_given() -> None:
    torch.manual_seed(0)
    model = build_model("llama", max_position_embeddings=64).double()
    batch = {**UNEVEN[0], NUM_ITEMS: 132}
    with float64_throughout(), torch.no_grad():
        expected = model(**batch).loss.item()
        with initialize(model, make_config(1, {}), loss_fn=lambda output, _: output.loss) as engine:
            assert engine.eval_step([batch]).loss == pytest.approx(expected, rel=1e-9)


class MeanLoss(nn.Module):
    """A model of no library, with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: Tensor, num_items_in_batch: int) -> dict[str, Tensor]:  # [B, 4]
        return {"loss": self.linear(x).sum() / num_items_in_batch}


def test_a_count_of_items_for_a_loss_of_unknown_targets_is_refused() -> None:
    with (
        initialize(MeanLoss(), make_config(1, {})) as engine,
        refused("num-items-in-batch", "num_items_in_batch=7", "MeanLoss", "loss_fn") as caught,
    ):
        engine.train_step([{"x": torch.ones(2, 4), NUM_ITEMS: 7}])
    assert "\n" not in str(caught.value)


def train_both_ways(rank: int, world_size: int, family: str) -> list[list[float]]:
    """Losses of a model built under `shardwise.init`, and of the same built plainly."""
    losses = []
    batch = FAMILIES[family].batch(rank, 2, torch.float64)
    for context in (shardwise.init, nullcontext):
        torch.manual_seed(0)
        with context():
            model = build_model(family)
        with initialize(model, make_config(1, {"zero": {"stage": 3}})) as engine:
            losses.append([engine.train_step([batch]).loss for _ in range(2)])
    return losses


@pytest.mark.quick(3)
@pytest.mark.parametrize("family", MAIN)
def test_a_deferred_model_trains_as_one_built_plainly(ranks: WorkerPool, family: str) -> None:
    for deferred, plain in ranks(2).run(train_both_ways, family):
        assert deferred == plain


BLOCKS = {
    "llama": ["model.layers"] * 3,
    "qwen2": ["model.layers"] * 3,
    "gpt2": ["transformer.h"] * 3,
    "bert": ["bert.encoder.layer"] * 3,
    "t5": ["encoder.block"] * 3 + ["decoder.block"] * 2,
    "mixtral": ["model.layers"] * 3,
    "switch": ["encoder.block"] * 3 + ["decoder.block"] * 2,
}


@pytest.mark.parametrize("family", BLOCKS)
def test_the_default_units_are_the_blocks(family: str) -> None:
    """Both stacks', and no expert: ranks route differently, so a gather must not hang on a single one."""
    units = scanned(build_model(family)).units
    assert [unit.rpartition(".")[0] for unit in units] == BLOCKS[family]
