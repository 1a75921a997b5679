"""Hugging Face models whose sequences are split over the cp axis equal one plain process, in float64.

They drop, inside attention too; so the plain process has the same structure, which draws the same numbers.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness import tensor
from harness.huggingface import VOCAB_SIZE, build_model
from harness.models import IGNORED, ModelCase
from harness.pool import WorkerPool
from harness.reference import Trace, check_parity
from harness.tensor import SEED, step_batches, train_on_mesh, train_plainly
from harness.training import make_config, make_optimizer, merge_ranks
from shardwise import initialize
from shardwise.attention.cp_hook import DenseVisibility
from shardwise.config.resolve import AttentionConfig, Config
from shardwise.models.apply_attention import apply_attention
from shardwise.runtime.float64 import float64_throughout
from shardwise.verify.simulate import simulate

pytest.importorskip("transformers")
from shardwise.attention.huggingface import attends_causally, use_sparse_attention

NUM_STEPS = 2
NUM_MICRO_BATCHES = 2
SPARSE = AttentionConfig(kind="bigbird", block=2, different_layout_per_head=True)
Options = dict[str, Any]


def make_case(name: str) -> ModelCase:
    """A family's model, as it is, or after "sparse-" for a config's attention."""
    return tensor.make_case(name.removeprefix("sparse-"))


def train(rank: int, world_size: int, name: str, overrides: Options) -> Trace:
    attention = {"attention": SPARSE.model_dump()} if name.startswith("sparse-") else {}
    return train_on_mesh(rank, make_case(name), {**attention, **overrides}, None, NUM_MICRO_BATCHES, NUM_STEPS)


@functools.cache
def reference(name: str, num_data_ranks: int) -> Trace:
    case = make_case(name)
    return train_plainly(case, num_data_ranks, NUM_MICRO_BATCHES, NUM_STEPS, prepare=lambda model: give(model, name))


def give(model: nn.Module, name: str) -> None:
    if name.startswith("sparse-"):
        apply_attention(model, SPARSE)
    else:
        use_sparse_attention(model, DenseVisibility(attends_causally(model)))


CASES: dict[str, tuple[str, int, Options]] = {
    "cp": ("llama", 2, {"mesh": {"cp": 2}, "zero": {"stage": 1}}),
    "cp x dp": ("qwen2", 4, {"mesh": {"cp": 2}, "zero": {"stage": 3}, "recompute": {"mode": "full"}}),
    "cp x tp": ("llama", 4, {"mesh": {"cp": 2, "tp": 2}, "zero": {"stage": 2}}),
    "cp x sp": ("sparse-llama", 4, {"mesh": {"cp": 2, "tp": 2}, "tensor": {"sequence_parallel": True}}),
    "cp x pp": ("mistral", 4, {"mesh": {"cp": 2, "pp": 2}, "zero": {"stage": 1}}),
    "a learned table": ("gpt2", 2, {"mesh": {"cp": 2}, "context": {"transport": "all-gather"}}),
    "an encoder": ("bert", 2, {"mesh": {"cp": 2}, "context": {"transport": "ulysses"}, "zero": {"stage": 3}}),
    "sparse, an encoder": ("sparse-bert", 4, {"mesh": {"cp": 2, "tp": 2}, "recompute": {"mode": "full"}}),
    "sparse, pipelined": ("sparse-gpt2", 4, {"mesh": {"cp": 2, "pp": 2}, "recompute": {"mode": "full"}}),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", CASES)
def test_a_model_of_transformers_equals_one_process(ranks: WorkerPool, case: str) -> None:
    name, num_ranks, overrides = CASES[case]
    traces = ranks(num_ranks).run(train, name, overrides)
    check_parity(merge_ranks(traces), reference(name, num_ranks // math.prod(overrides["mesh"].values())))


def live(rank: int, world_size: int, name: str) -> tuple[float, list[list[int]], float]:
    """A loss, what is generated of whole sequences, and a step's loss after it."""
    case = make_case(name)
    model = case.build(torch.float64, seed=rank)
    settings = {"mesh": {"cp": 2}, "zero": {"stage": 3}, "run": {"seed": SEED}}
    (batch,) = step_batches(case, 0, 1, 1)
    prompt = {each: batch[each] for each in ("input_ids", "attention_mask")}
    with float64_throughout(), initialize(model, make_config(1, settings)) as engine:
        evaluated = engine.eval_step([batch]).loss
        with engine.gathered():
            tokens = model.eval().generate(**prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        model.train()
        return evaluated, tokens.tolist(), engine.train_step([batch]).loss


def test_evaluation_and_generation_are_the_models_own(ranks: WorkerPool) -> None:
    case = make_case("llama")
    model = case.build(torch.float64).eval()
    (batch,) = step_batches(case, 0, 1, 1)
    prompt = {each: batch[each] for each in ("input_ids", "attention_mask")}
    with float64_throughout(), torch.no_grad():
        expected = model(**batch).loss.item()
        tokens = model.generate(**prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False).tolist()
    for evaluated, generated, trained in ranks(2).run(live, "llama"):
        assert evaluated == pytest.approx(expected, rel=1e-11)
        assert generated == tokens
        assert math.isfinite(trained)


def packed_model() -> nn.Module:
    torch.manual_seed(3)
    return build_model("llama").double()


def packed_batch() -> dict[str, Any]:
    """Documents of 5 and 11 tokens in both rows, whose labels were shifted by the data."""
    tokens = torch.randint(4, VOCAB_SIZE, (2, 16), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(5), torch.arange(11)])[None]
    return {"input_ids": tokens, "labels": tokens, "position_ids": positions, "use_cache": False}


def shifted_loss(output: Any, batch: tuple[Any, Tensor]) -> tuple[Tensor, Tensor]:
    """Of targets that the data have shifted."""
    losses = F.cross_entropy(output.logits.flatten(0, 1), batch[1].flatten(), reduction="sum")
    return losses, (batch[1] != IGNORED).sum()


def pack(rank: int, world_size: int, options: Options, has_loss: bool) -> list[float]:
    """Losses of packed documents, by the model itself or by a function of its logits."""
    batch: Any = packed_batch()
    if has_loss:
        batch = batch, F.pad(batch.pop("labels")[:, 1:], (0, 1), value=IGNORED)
    loss_fn = shifted_loss if has_loss else None
    with float64_throughout(), initialize(packed_model(), make_config(1, options), loss_fn=loss_fn) as engine:
        return [engine.train_step([batch]).loss for _ in range(2)]


@pytest.mark.parametrize("has_loss", [False, True])
def test_packed_documents_equal_one_process(ranks: WorkerPool, has_loss: bool) -> None:
    model = packed_model()
    optimizer, expected = make_optimizer(model), []
    with float64_throughout():
        for _ in range(2):
            loss = model(**packed_batch()).loss
            expected.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for losses in ranks(2).run(pack, {"mesh": {"cp": 2}, "optimizer": {"clip_norm": None}}, has_loss):
        assert losses == pytest.approx(expected, rel=1e-9)


def compile_blocks(rank: int, world_size: int, enabled: bool, is_padded: bool) -> list[float]:
    batch = packed_batch()
    del batch["position_ids"]
    if is_padded:
        batch["attention_mask"] = (torch.arange(16) < torch.tensor([[16], [9]])).long()  # [B, S]
    model = packed_model().float()
    compiling = {"compile": {"enabled": enabled, **({"backend": "aot_eager"} if enabled else {})}}
    with initialize(model, make_config(1, {"mesh": {"cp": 2}, **compiling})) as engine:
        return [engine.train_step([batch]).loss for _ in range(2)]


@pytest.mark.full
@pytest.mark.parametrize("is_padded", [False, True])
def test_compiled_blocks_compute_the_same(ranks: WorkerPool, is_padded: bool) -> None:
    plain, compiled = (ranks(2).run(compile_blocks, enabled, is_padded) for enabled in (False, True))
    assert compiled[0] == pytest.approx(plain[0], rel=1e-5)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_simulated_rank_exchanges_keys(is_packed: bool) -> None:
    batch = packed_batch()
    if not is_packed:
        batch = {**batch, "position_ids": None, "attention_mask": torch.ones(2, 16)}
    config = Config.from_dict({"mesh": {"cp": 2}, "zero": {"stage": 3}})
    simulation = simulate(packed_model, config, lambda: batch, rank=1, world_size=4)
    assert sum(call.name == "context keys" for call in simulation.calls) >= 3
