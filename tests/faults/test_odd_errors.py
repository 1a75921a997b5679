"""Uses of an engine that cannot work end in an error that names the value and the fix, on every rank.

What is silent, or unclear, yet is a strict xfail: its reason says where the error belongs.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from harness.odd_models import OddCase, Stack
from harness.odd_training import NUM_STEPS, SGD, TIMEOUT_S, all_ranks, batch_of, engine_of, plain_losses, sgd_engine
from harness.pool import RankError, WorkerPool
from harness.refusals import refusal_of
from harness.time_outs import fail_after
from shardwise import Engine

Misuse = Callable[[Engine, int], None]


# Losses and gradients


def combined_loss(engine: Engine, rank: int) -> None:
    engine.backward(engine(batch_of(0, rank)) + 1)


def same_loss_twice(engine: Engine, rank: int) -> None:
    loss = engine(batch_of(0, rank))
    engine.backward(loss)
    engine.backward(loss)


def own_backward(engine: Engine, rank: int) -> None:
    engine(batch_of(0, rank)).backward()
    engine.step()


def own_backward_between(engine: Engine, rank: int) -> None:
    engine(batch_of(0, rank)).backward()
    engine.train_step([batch_of(1, rank)])


def model_called_directly(engine: Engine, rank: int) -> None:
    engine.model(**batch_of(0, rank)).square().sum().backward()
    engine.train_step([batch_of(1, rank)])


def own_optimizer_step(engine: Engine, rank: int) -> None:
    engine.backward(engine(batch_of(0, rank)))
    engine.optimizer.step()


def training_after_close(engine: Engine, rank: int) -> None:
    engine.close()
    engine.train_step([batch_of(0, rank)])


# Models changed after initialize


def module_added(engine: Engine, rank: int) -> None:
    extra = engine.model.extra = nn.Linear(6, 6).double()
    engine.model.head.register_forward_hook(lambda module, args, output: extra(output))
    engine.train_step([batch_of(0, rank)])


def block_replaced(engine: Engine, rank: int) -> None:
    engine.model.blocks[1] = nn.Linear(6, 6).double()
    engine.train_step([batch_of(0, rank)])


def parameter_replaced(engine: Engine, rank: int) -> None:
    engine.model.head.weight = nn.Parameter(torch.ones(6, 6).double())
    engine.train_step([batch_of(0, rank)])


def parametrized_later(engine: Engine, rank: int) -> None:
    with engine.gathered():
        nn.utils.parametrizations.weight_norm(engine.model.head)
    engine.train_step([batch_of(0, rank)])


def state_assigned(engine: Engine, rank: int) -> None:
    engine.model.load_state_dict(OddCase(Stack).build(1).state_dict(), assign=True)
    engine.train_step([batch_of(0, rank)])


def state_loaded(engine: Engine, rank: int) -> None:
    with engine.gathered():
        engine.model.load_state_dict(OddCase(Stack).build(1).state_dict())
    engine.train_step([batch_of(0, rank)])


def written_in_place(engine: Engine, rank: int) -> None:
    with engine.gathered(), torch.no_grad():
        engine.model.head.weight.clamp_(-0.01, 0.01)
    engine.train_step([batch_of(0, rank)])


def written_through_data(engine: Engine, rank: int) -> None:
    """As clipping of weights is often written; no version counts it."""
    with engine.gathered():
        engine.model.head.weight.data.zero_()


def data_replaced(engine: Engine, rank: int) -> None:
    with engine.gathered():
        engine.model.head.weight.data = torch.ones(6, 6).double()
    engine.train_step([batch_of(0, rank)])


def cast_and_back(engine: Engine, rank: int) -> None:
    with engine.gathered():
        engine.model.float().double()
    engine.train_step([batch_of(0, rank)])


def half(engine: Engine, rank: int) -> None:
    engine.model.half()
    engine.train_step([batch_of(0, rank)])


# Reading and copying


def state_read(engine: Engine, rank: int) -> None:
    copy.deepcopy(engine.model.state_dict())


def saved(engine: Engine, rank: int) -> None:
    with engine.gathered():
        torch.save(engine.model, io.BytesIO())


def read_inside_a_view(engine: Engine, rank: int) -> None:
    torch.vmap(lambda row: row.sum())(engine.model.head.weight)


def second_engine(engine: Engine, rank: int) -> None:
    engine_of(engine.model.blocks[0], {"zero": {"stage": 2}, "optimizer": SGD})


def shared_parameter(engine: Engine, rank: int) -> None:
    other = OddCase(Stack).build()
    other.head.weight = engine.model.head.weight
    engine_of(other, {"zero": {"stage": 2}, "optimizer": SGD})


def tied_by_storage(engine: Engine, rank: int) -> None:
    model = Stack().double()
    model.head.weight.data = model.stem.weight.data
    engine_of(model, {})


class OneParameter(nn.Module):
    """A linear layer and a parameter of any kind."""

    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.odd = parameter


def complex_parameter(engine: Engine, rank: int) -> None:
    engine_of(OneParameter(nn.Parameter(torch.ones(2, dtype=torch.complex64))), {})


def sparse_parameter(engine: Engine, rank: int) -> None:
    engine_of(OneParameter(nn.Parameter(torch.eye(3).to_sparse())), {})


CLEAR: list[tuple[Misuse, list[int], str, str]] = [
    (combined_loss, [2], "loss-not-from-engine", "loss_fn"),
    (same_loss_twice, [2], "loss-not-from-engine", ""),
    (own_backward, [2], "backward-outside-engine", "engine.backward"),
    (own_backward_between, [2, 3], "backward-outside-engine", "engine.backward"),
    (model_called_directly, [3], "backward-outside-engine", "engine.backward"),
    (own_optimizer_step, [2, 3], "optimizer-step-direct", "engine.step()"),
    (training_after_close, [2, 3], "engine-closed", ""),
    (module_added, [3], "model-parameters-changed", "extra.weight"),
    (block_replaced, [3], "model-parameters-changed", "blocks.1.weight"),
    (parameter_replaced, [3], "model-parameters-changed", "head.weight"),
    (parametrized_later, [3], "model-parameters-changed", "head."),
    (state_assigned, [3], "model-parameters-changed", "stem.weight"),
    (data_replaced, [2, 3], "parameter-moved", "head.weight"),
    (cast_and_back, [2, 3], "parameter-moved", "stem.weight"),
    (half, [2], "parameter-moved", "stem.weight"),
    (state_loaded, [2, 3], "parameter-written", ""),
    (written_in_place, [2, 3], "parameter-written", "head.weight"),
    (written_through_data, [3], "parameter-written", "head.weight"),
    (state_read, [3], "parameter-released", "engine.gathered()"),
    (second_engine, [2, 3], "model-has-engine", "up.weight of this Block"),
    (shared_parameter, [2, 3], "model-has-engine", "head.weight of this Stack"),
    (tied_by_storage, [2], "shared-storage", "stem.weight and head.weight"),
    (sparse_parameter, [2], "sparse-parameter", "odd is torch.sparse_coo"),
    (complex_parameter, [2], "parameter-dtype", "odd is torch.complex64"),
]

UNCLEAR: list[tuple[Misuse, list[int], str, str, str]] = [
    (saved, [3], "model-pickled", "state_dict", "a hooked module cannot be pickled: hooks must be objects that refuse"),
    (read_inside_a_view, [3], "parameter-released", "", "torch.vmap asks no class: segmentation fault on the CPU"),
]


def misuse(rank: int, world_size: int, use: Misuse, stage: int) -> tuple[str, str]:
    engine = sgd_engine(stage)
    return refusal_of(lambda: use(engine, rank))


def check(ranks: WorkerPool, use: Misuse, stage: int, code: str, value: str) -> None:
    for found, text in ranks(2).run(misuse, use, stage):
        assert found == code, text
        assert value in text


@pytest.mark.parametrize(
    ("use", "stage", "code", "value"),
    [
        pytest.param(use, stage, code, value, id=f"{use.__name__}-{stage}")
        for use, stages, code, value in CLEAR
        for stage in stages
    ],
)
def test_misuse_ends_in_a_clear_error(ranks: WorkerPool, use: Misuse, stage: int, code: str, value: str) -> None:
    check(ranks, use, stage, code, value)


def later(reason: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(strict=True, reason=reason, raises=(AssertionError, RankError))


@pytest.mark.parametrize(
    ("use", "stage", "code", "value"),
    [
        pytest.param(use, stage, code, value, marks=later(reason), id=f"{use.__name__}-{stage}")
        for use, stages, code, value, reason in UNCLEAR
        for stage in stages
    ],
)
def test_misuse_that_is_silent_or_unclear_yet(
    ranks: WorkerPool, use: Misuse, stage: int, code: str, value: str
) -> None:
    check(ranks, use, stage, code, value)


# Ranks that differ


class OrderByRank(Stack):
    """The blocks run in another order on odd ranks."""

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        x = self.stem(x)
        for index in (1, 0, 2) if rank % 2 else (0, 1, 2):
            x = self.blocks[index](x)
        return self.head(x)  # [B, D]


class SkippedByRank(Stack):
    """Odd ranks skip a block."""

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        x = self.stem(x)
        for index in (0, 2) if rank % 2 else (0, 1, 2):
            x = self.blocks[index](x)
        return self.head(x)  # [B, D]


def differ(rank: int, world_size: int, kind: type[nn.Module], stage: int) -> list[float] | tuple[str, str]:
    engine = sgd_engine(stage, kind=kind, run={"device": "cpu", "timeout_s": TIMEOUT_S})
    fail_after(engine.comm.comm_log, 5.0 if stage == 3 else TIMEOUT_S)
    losses: list[float] = []
    refusal = refusal_of(
        lambda: losses.extend(engine.train_step([batch_of(step, rank)]).loss for step in range(NUM_STEPS))
    )
    return refusal if refusal[0] else losses


@pytest.mark.parametrize("kind", [OrderByRank, SkippedByRank])
def test_ranks_may_differ_where_parameters_are_stored_whole(ranks: WorkerPool, kind: type[nn.Module]) -> None:
    expected = plain_losses(0, all_ranks(2), kind)
    assert ranks(2).run(differ, kind, 2) == [pytest.approx(expected, rel=1e-9)] * 2


def test_rank_that_skips_a_block_names_where_it_waits(ranks: WorkerPool) -> None:
    texts = ranks(2).run(differ, SkippedByRank, 3)
    assert any(text[0] == "collective-failed" and "of unshard blocks" in text[1] for text in texts), texts


def differ_checked(rank: int, world_size: int) -> tuple[str, str]:
    """Blocks of one size, gathered in another order, are mixed silently by gloo."""
    run = {"device": "cpu", "timeout_s": TIMEOUT_S, "check_collectives": True}
    engine = sgd_engine(3, kind=OrderByRank, run=run)
    return refusal_of(lambda: engine.train_step([batch_of(0, rank)]))


def test_ranks_that_gather_in_another_order_are_named(ranks: WorkerPool) -> None:
    first, second = ranks(2).run(differ_checked)
    assert first == second
    assert first[0] == "collectives-differ"
    assert all(value in first[1] for value in ("rank 1 is at all_gather", "blocks"))
