"""Losses as sums and counts: where they are read from, how they are kept, and who produced a bad one."""

import gc
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.refusals import refused
from shardwise.comm.collectives import ScalarSum
from shardwise.comm.loss import LossAccumulator, LossSum, first_nonfinite_module, read_loss


class FakeComm:
    """The scalars' half of `Comm`: this rank and others that always send the same."""

    def __init__(self, rank: int = 0, others: tuple[Tensor, ...] = ()) -> None:
        self.rank = rank
        self.world_size = 1 + len(others)
        self.device = torch.device("cpu")
        self.names: list[str] = []
        self._others = others

    def sum_scalars(self, values: Tensor, name: str, known: Sequence[float] = ()) -> list[float]:
        return self.start_sum_of_scalars(values, name, known).read()

    def start_sum_of_scalars(self, values: Tensor, name: str, known: Sequence[float] = ()) -> ScalarSum:
        self.names.append(name)
        summed = sum(self._others, torch.cat([values, values.new_tensor(known)]))
        return ScalarSum(summed, summed.tolist)

    def max_scalars(self, values: Tensor, name: str) -> list[float]:
        self.names.append(name)
        return torch.stack([values, *self._others]).amax(0).tolist()


def losses_of(*others: list[float]) -> LossAccumulator:
    return LossAccumulator(
        comms_of(FakeComm(others=tuple(torch.tensor(other, dtype=torch.float64) for other in others)))
    )


def comms_of(comm: FakeComm) -> Any:
    return SimpleNamespace(
        data=comm, model=comm, all=comm, tensor=SimpleNamespace(rank=0), context=SimpleNamespace(world_size=1)
    )


def total_of(loss: float, count: float) -> LossSum:
    return LossSum(torch.tensor(loss, requires_grad=True), torch.tensor(count))


# Reading


@pytest.mark.parametrize(
    "output",
    [
        torch.tensor(6.0),
        torch.tensor([[6.0]]),
        {"loss": torch.tensor(6.0), "logits": torch.ones(3)},
        SimpleNamespace(loss=torch.tensor(6.0)),
    ],
)
def test_a_scalar_in_the_output_counts_as_one(output: Any) -> None:
    found = read_loss(output, None, None)
    assert (found.total.item(), found.count.item(), found.total.shape) == (6.0, 1, ())


@pytest.mark.parametrize("count", [4, torch.tensor(4), torch.tensor([4.0])])
def test_sum_and_count_are_taken_as_they_are(count: Any) -> None:
    pair = (torch.tensor(6.0), count)
    for output in (pair, {"loss": pair}, SimpleNamespace(loss=pair)):
        found = read_loss(output, None, None)
        assert (found.total.item(), found.count.item(), found.count.shape) == (6.0, 4, ())
        assert found.mean().item() == 1.5


@pytest.mark.parametrize(
    "output",
    [
        (torch.tensor(6.0), torch.ones(2, 3)),
        (torch.tensor(6.0), torch.ones(2), None),
        (torch.tensor(6.0),),
        (torch.tensor(6.0), None),
        (torch.tensor(6.0), {"a": 1}),
    ],
)
def test_the_first_of_a_models_outputs_is_its_loss(output: tuple[Any, ...]) -> None:
    found = read_loss(output, None, None)
    assert (found.total.item(), found.count.item()) == (6.0, 1)


def test_loss_fn_gets_output_and_batch_and_its_word_is_final() -> None:
    output, batch = {"loss": torch.tensor(99.0)}, torch.tensor([1.0, 2.0])
    assert read_loss(output, batch, lambda out, data: (data.sum() + out["loss"], 2)).total.item() == 102
    assert read_loss(output, batch, lambda out, data: data.sum()).count.item() == 1


def test_gradients_flow_through_the_sum_and_not_through_the_count() -> None:
    x, weights = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    found = read_loss((x.sum(), weights.sum()), None, None)
    found.mean().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3,), 1 / 3))
    assert weights.grad is None


def test_the_mean_of_nothing_is_zero() -> None:
    assert LossSum(torch.tensor(0.0), torch.tensor(0)).mean().item() == 0
    assert LossSum(torch.tensor(1.0), torch.tensor(0.5)).mean().item() == 2


@pytest.mark.parametrize(
    ("output", "loss_fn", "values"),
    [
        (torch.ones(2, 3), None, ("model's output", "(2, 3)")),
        ((torch.ones(2), torch.ones(2)), None, ("model's output", "(2,)")),
        ({"logits": torch.ones(2)}, None, ("model's output", "NoneType")),
        (SimpleNamespace(), None, ("model's output", "NoneType")),
        ({"loss": 3.0}, None, ("model's output", "float")),
        (3, lambda output, batch: "x", ("loss_fn returned", "str")),
        (3, lambda output, batch: {"loss": torch.ones(())}, ("loss_fn returned", "dict")),
        (3, lambda output, batch: (torch.ones(2), 2), ("loss_fn returned", "(2,)")),
        (3, lambda output, batch: (torch.ones(()), 2, 3), ("loss_fn returned", "tuple")),
    ],
)
def test_an_output_without_a_loss_is_described(
    output: Any, loss_fn: Callable[..., Any] | None, values: tuple[str, ...]
) -> None:
    with refused("no-scalar-loss", *values):
        read_loss(output, None, loss_fn)


# Counters


@pytest.mark.parametrize(
    ("count", "normaliser"),
    [(0, 1), (1, 1), (2, 2), (3, 4), (5, 4), (6, 8), (1000, 1024), (0.25, 0.25), (0.1875, 0.25)],
)
def test_gradients_weigh_count_over_a_power_of_two_near_it(count: float, normaliser: float) -> None:
    kept = losses_of()
    mean = kept.open(total_of(6.0, count))
    assert kept.close(mean).item() == (count or 1) / normaliser
    assert kept.normaliser == normaliser


def test_ranks_agree_on_the_largest_count_once() -> None:
    comm = FakeComm(others=(torch.tensor([1000.0], dtype=torch.float64),))
    kept = LossAccumulator(comms_of(comm))
    weights = [kept.close(kept.open(total_of(1.0, count))).item() for count in (4.0, 5000.0)]
    assert weights == [4 / 1024, 5000 / 1024]
    assert comm.names == ["loss normaliser"]
    kept.clear()
    kept.close(kept.open(total_of(1.0, 7.0)))
    assert (kept.normaliser, comm.names) == (1024, ["loss normaliser"])


def test_weighted_means_give_the_gradient_of_the_sum() -> None:
    """What the engine does: back(mean, weight) for each micro-batch, then one division at the step."""
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64, requires_grad=True)
    kept = losses_of()
    for part in (x[:3], x[3:]):
        mean = kept.open(read_loss(((part**2).sum(), part.numel()), None, None))
        torch.autograd.backward(mean, kept.close(mean).to(mean.dtype))
    loss_sum, count = kept.sum_over_ranks("loss")
    assert (loss_sum, count) == (30.0, 4.0)
    assert x.grad is not None
    torch.testing.assert_close(x.grad * kept.normaliser / count, 2 * x.detach() / 4, rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("num_others", "per_step", "is_counted", "expected"),
    [(0, 1, False, 0), (0, 2, False, 1), (1, 1, False, 1), (1, 2, True, 0)],
    ids=["alone", "several micro-batches", "several ranks", "with a count"],
)
def test_that_losses_without_a_count_weigh_the_same_is_said_once_where_it_matters(
    caplog: pytest.LogCaptureFixture, num_others: int, per_step: int, is_counted: bool, expected: int
) -> None:
    kept = losses_of(*[[1.0]] * num_others)
    loss = torch.tensor(3.0, requires_grad=True)
    for _ in range(2):
        for _ in range(per_step):
            kept.close(kept.open(read_loss(None, None, lambda *_: (loss * 4, 4) if is_counted else loss)))
        kept.clear()
    assert len(caplog.records) == expected
    assert all("(sum, count)" in record.getMessage() for record in caplog.records)


def test_a_models_own_mean_over_known_targets_has_its_count(caplog: pytest.LogCaptureFixture) -> None:
    kept = losses_of()
    for num_targets in (6, 126):
        kept.close(kept.open(read_loss({"loss": torch.ones(())}, None, None, num_targets=torch.tensor(num_targets))))
    assert not caplog.records


def test_only_closed_losses_count() -> None:
    kept = losses_of()
    first, _ = kept.open(total_of(6.0, 2.0)), kept.open(total_of(100.0, 1.0))
    kept.close(first)
    kept.add(total_of(1.0, 3.0))
    assert kept.sum_over_ranks("loss") == (7.0, 5.0)
    kept.clear()
    assert kept.sum_over_ranks("loss") == (0.0, 0.0)


def test_losses_close_in_any_order_each_once() -> None:
    kept = losses_of()
    means = [kept.open(total_of(1.0, count)) for count in (1.0, 2.0, 4.0)]
    assert [kept.close(means[index]).item() * kept.normaliser for index in (2, 0, 1)] == [4, 1, 2]
    for mean in means:
        with refused("loss-not-from-engine"):
            kept.close(mean)


def test_a_loss_from_elsewhere_or_from_before_the_step_is_refused() -> None:
    kept = losses_of()
    mean = kept.open(total_of(1.0, 1.0))
    with refused("loss-not-from-engine"):
        kept.close(mean * 2)
    kept.clear()
    with refused("loss-not-from-engine"):
        kept.close(mean)


def test_losses_that_are_dropped_are_forgotten() -> None:
    """A forward for its own sake must not hold its graph, nor grow the accumulator."""
    kept = losses_of()
    x = torch.ones(3, requires_grad=True) * 2
    for _ in range(5):
        kept.open(LossSum(x.sum(), torch.tensor(1)))
    gc.collect()
    assert not kept.has_open


def test_sums_are_kept_in_double_and_sent_with_other_values() -> None:
    kept = losses_of([1.0, 2.0, 10.0, 20.0])
    kept.add(LossSum(torch.tensor(2.0**24 + 1, dtype=torch.float64), torch.tensor(1)))
    kept.add(total_of(1.0, 1.0))
    assert kept.sum_with(torch.tensor([5.0, 6.0], dtype=torch.float64), "step") == [2.0**24 + 3, 4.0, 15.0, 26.0]


def test_ranks_without_a_loss_take_part_in_the_sum() -> None:
    assert losses_of([3.0, 2.0]).sum_over_ranks("loss") == (3.0, 2.0)


# The first bad module


class Poison(nn.Module):
    """Makes the batches with a negative first element infinite; integers and nested outputs pass by."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"x": x / 0 if x[0] < 0 else x, "indices": x.long()}


class Unwrap(nn.Module):
    def forward(self, output: dict[str, Any]) -> Tensor:
        return output["x"]


def poisoned_model() -> nn.Sequential:
    return nn.Sequential(nn.Identity(), nn.Sequential(nn.Identity(), Poison()), Unwrap(), nn.Identity())


GOOD, BAD = torch.ones(2), -torch.ones(2)
FINITE = "every module's output is finite, so it arose in the loss or in the backward"


def run_first_nonfinite(model: nn.Module, batches: list[Tensor], comm: FakeComm) -> str:
    grad_modes: list[bool] = []

    def forward(batch: Tensor) -> LossSum:
        grad_modes.append(torch.is_grad_enabled())
        return read_loss(model(batch).sum(), None, None)

    found = first_nonfinite_module(model, batches, forward, comm)
    assert grad_modes == [False] * len(batches)
    return found


def test_the_first_module_with_a_bad_output_is_named() -> None:
    assert run_first_nonfinite(poisoned_model(), [GOOD, BAD], FakeComm()) == (
        "the first module with a non-finite output is 1.1 on rank 0, whose input and parameters were finite: "
        "training diverges there"
    )


def test_what_the_first_bad_module_was_given_tells_bad_data_from_divergence() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    assert "is 0 on rank 0, whose input was not finite already" in run_first_nonfinite(
        model, [GOOD, GOOD / 0], FakeComm()
    )
    with torch.no_grad():
        model[1].weight[0, 0] = math.inf
    assert "is 1 on rank 0, whose input was finite and whose parameters are not" in run_first_nonfinite(
        model, [GOOD], FakeComm()
    )
    batch = {"x": GOOD / 0, "mask": torch.ones(2, dtype=torch.int64)}

    class Named(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x * mask

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Named()

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.inner(**batch)

    assert "is inner on rank 0, whose input was not finite already" in run_first_nonfinite(Root(), [batch], FakeComm())


def test_a_bad_model_without_submodules_goes_by_its_class() -> None:
    class Alone(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.log()

    assert "is Alone on rank 0" in run_first_nonfinite(Alone(), [BAD], FakeComm())


def test_finite_outputs_point_to_the_loss() -> None:
    assert run_first_nonfinite(poisoned_model(), [GOOD], FakeComm()) == FINITE


def test_the_first_bad_module_of_all_ranks_is_named() -> None:
    """Rank 1 is this one and finds "1.1"; rank 0 or rank 2 found another of the modules "", "0", "1", "1.0", ..."""
    names = [name for name, _ in poisoned_model().named_modules()]

    def report(rank: int, name: str) -> Tensor:
        return torch.zeros(3, dtype=torch.float64).index_fill_(0, torch.tensor(rank), names.index(name) or len(names))

    silent = torch.zeros(3, dtype=torch.float64)
    for batch, others, expected in (
        (BAD, (report(0, "1.0"), silent), "is 1.0 on rank 0"),
        (BAD, (silent, report(2, "1.0")), "is 1.0 on rank 2"),
        (BAD, (report(0, "1.1"), silent), "is 1.1 on rank 0"),
        (BAD, (report(0, ""), silent), "is 1.1 on rank 1"),
        (GOOD, (silent, report(2, "1.0")), "is 1.0 on rank 2"),
        (GOOD, (silent, report(2, "")), "is Sequential on rank 2"),
    ):
        found = run_first_nonfinite(poisoned_model(), [batch], FakeComm(rank=1, others=others))
        assert f"{found},".partition(",")[0].endswith(expected)


def test_ranks_that_share_tokens_count_their_scalars_once() -> None:
    """Whose weights are given where the model's own means are over different numbers of tokens."""
    losses, weights = torch.tensor([3.0, 6.0]), torch.tensor([0.25, 0.75])
    own = [read_loss(loss, None, None, 2, weight) for loss, weight in zip(losses, weights, strict=True)]
    assert sum(float(each.total) for each in own) / sum(float(each.count) for each in own) == 5.25
    sums = [read_loss(None, None, lambda *_, loss=loss: loss, 2) for loss in losses]
    assert sum(float(each.total) for each in sums) / sum(float(each.count) for each in sums) == 4.5
    assert sum(float(each.count) for each in sums) == 1.0
    pair = read_loss(None, None, lambda *_: (losses.sum(), 4), 2)
    assert (float(pair.total), float(pair.count)) == (9.0, 4.0)
