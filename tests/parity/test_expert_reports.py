"""What users of other engines have reported about mixtures of experts, each with the value that is right.

The values are by hand, of a model whose gradients are the numbers of its batch, or those of one plain process. A
report's name is its repository and number: AM NeMo AutoModel, DS DeepSpeed, MLM Megatron-LM, hf transformers, tt
torchtitan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.models import ModelCase
from harness.moe import poisoned
from harness.moe_models import moe_case
from harness.pool import WorkerPool
from harness.reference import PARITY, Trace, check_parity, max_error
from harness.tensor import CLIP_NORM, batches_of, mixture, train_on_mesh, train_plainly
from harness.training import make_config, merge_ranks
from shardwise import Engine, initialize
from shardwise.runtime.float64 import float64_throughout

pytest.importorskip("transformers")

SGD = {"name": "sgd", "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": 1.0}


class ProductExperts(nn.Module):
    """Experts of one number: each multiplies its tokens [N, 1] by it, and adds its bias."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.has_gate, self.has_bias, self.is_transposed, self.has_post_expert_norm = False, True, False, False
        self.up_proj = nn.Parameter(torch.ones(num_experts, 1, 1), requires_grad=False)
        self.up_proj_bias = nn.Parameter(torch.zeros(num_experts, 1), requires_grad=False)
        self.down_proj = nn.Parameter(torch.full((num_experts, 1, 1), 2.0))
        self.down_proj_bias = nn.Parameter(torch.full((num_experts, 1), 5.0), requires_grad=False)

    def act_fn(self, x: Tensor) -> Tensor:
        return x

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        up, down = (each.flatten() for each in (self.up_proj, self.down_proj))
        outputs = hidden * (up * down)[index] + self.down_proj_bias.flatten()[index]
        return (outputs * weights).sum(1, keepdim=True)


class Countable(nn.Module):
    """The gradient of an expert is the sum of its tokens; that of a dense number, what the batch says.

    `scale` is before the experts; it is trained where a batch asks for it.
    """

    def __init__(self, num_experts: int, num_dense: int, has_scale: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1), requires_grad=has_scale)
        self.experts = ProductExperts(num_experts)
        self.dense = nn.Parameter(torch.zeros(num_dense))
        self.up, self.down = (
            nn.Linear(1, 4, bias=False),
            nn.Linear(4, 1, bias=False),
        )  # for tp; no gradient reaches them

    def forward(self, tokens: Tensor, index: Tensor, slopes: Tensor) -> Tensor:
        hidden = (tokens * self.scale).view(-1, 1)
        mixed = self.experts(hidden, index.view(-1, 1), torch.ones_like(hidden))
        return mixed.sum() + (self.dense * slopes[0]).sum() + self.down(self.up(torch.zeros_like(hidden))).sum()


@dataclass(frozen=True)
class Report:
    """The gradients of the whole model, and the norm that they have."""

    experts: tuple[float, ...]
    dense: tuple[float, ...]
    norm: float


REPORTS = {
    "AM#3816": Report((40.0, 0.4), (1.0,) * 16, 40.201492),  # one group had 40.199502, the other 4.019950
    "DS#8475": Report((2.0, 4.0, 6.0, 8.0), (0.0,), math.sqrt(120)),  # it was 7.236068
    "DS#8613": Report((4.0,) * 4, (3.0,) * 4, 10.0),  # it was 6.0
    "MLM#5916": Report((1.0, 1.0), (1.0,), math.sqrt(3)),  # it was sqrt(2)
    "MLM#5916, four": Report((1.0,) * 4, (1.0,), math.sqrt(5)),
}
MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "ep 2": (2, {"ep": 2}),
    "ep 2 twice": (4, {"ep": 2}),
    "ep 4": (4, {"ep": 4}),
    "tp 2, ep 2": (2, {"tp": 2, "ep": 2}),
    "tp 2, ep 4": (4, {"tp": 2, "ep": 4}),
    "tp 4, ep 4": (4, {"tp": 4, "ep": 4}),
    "tp 2": (2, {"tp": 2}),
}
PLAN = {"up": "column", "down": "row"}


def batch_of(report: Report, engine: Engine, rank: int) -> dict[str, Tensor]:
    """Each token on a rank that does not have its expert, where there is another one."""
    mesh = engine.layout.mesh
    num_data_ranks, here = mesh.num_data_ranks, mesh.data_index(rank)
    own = [e for e in range(len(report.experts)) if (e + 1) % num_data_ranks == here]
    return {  # a step takes the mean over the data ranks
        "tokens": torch.tensor([[num_data_ranks * report.experts[e] for e in own]], dtype=torch.float64),
        "index": torch.tensor([own]),
        "slopes": torch.tensor([report.dense], dtype=torch.float64),
    }


def count_one(output: Tensor, batch: Any) -> tuple[Tensor, int]:
    return output, 1


def make_engine(model: nn.Module, overrides: dict[str, Any]) -> Engine:
    config = make_config(1, {"optimizer": SGD, "batch": {"micro_size": 1}, **overrides})
    return initialize(model.double(), config, loss_fn=count_one, plan=PLAN)


Stepped = tuple[float, float, Tensor, Tensor]


def step_all(rank: int, world_size: int, overrides: dict[str, Any]) -> dict[str, Stepped]:
    found = {}
    for name, report in REPORTS.items():
        if len(report.experts) % overrides["mesh"].get("ep", 1):
            continue
        with make_engine(Countable(len(report.experts), len(report.dense)), overrides) as engine:
            result = engine.train_step([batch_of(report, engine, engine.comm.rank)])
            experts, dense = engine.read("experts.down_proj"), engine.read("dense")
        assert experts is not None
        assert dense is not None
        found[name] = (result.loss, result.grad_norm, 2.0 - experts.flatten(), -dense)
    return found


@pytest.mark.quick(4)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("mesh", sorted(MESHES))
def test_norm_and_clipping_are_of_all_experts_once(ranks: WorkerPool, mesh: str, stage: int) -> None:
    """AM#3816, DS#8475, DS#8613, MLM#5916: the norm is of the whole model, and all ranks clip by it."""
    num_ranks, axes = MESHES[mesh]
    for found in ranks(num_ranks).run(step_all, {"mesh": axes, "zero": {"stage": stage}}):
        assert found
        for name, (_, norm, experts, dense) in found.items():
            report = REPORTS[name]
            assert norm == pytest.approx(report.norm, rel=1e-7), name
            clipped = torch.tensor(report.experts + report.dense, dtype=torch.float64) / report.norm
            assert torch.cat([experts, dense]).tolist() == pytest.approx(clipped.tolist(), rel=1e-6), name


def step_shared(rank: int, world_size: int, overrides: dict[str, Any], num_micro_batches: int) -> tuple[Any, ...]:
    model = Countable(4, 1, has_scale=True)
    model.experts.down_proj_bias.requires_grad_()
    with make_engine(model, {"batch": {"micro_size": 1, "accumulation": num_micro_batches}, **overrides}) as engine:
        batches = [
            {"tokens": torch.tensor([values]), "index": torch.tensor([index]), "slopes": torch.zeros(1, 1)}
            for values, index in (([1.0, 2.0, 3.0], [0, 1, 1]), ([4.0], [3]))
        ]
        num_data_ranks = engine.layout.mesh.num_data_ranks
        result = engine.train_step(batches[engine.layout.mesh.data_index(rank) :: num_data_ranks])
        gradients = [2.0 - engine.read("experts.down_proj"), 5.0 - engine.read("experts.down_proj_bias")]
        gradients.append(1.0 - engine.read("scale"))
    return (
        result.loss,
        result.grad_norm,
        (torch.cat([each.flatten() for each in gradients]) * result.grad_norm).tolist(),
    )


SHARING: dict[str, tuple[int, dict[str, int], int]] = {
    "one process": (1, {}, 2),
    "tp 2": (2, {"tp": 2}, 2),
    "tp 2, ep 2": (2, {"tp": 2, "ep": 2}, 2),
    "tp 4, ep 4": (4, {"tp": 4, "ep": 4}, 2),  # the first batch has 3 tokens, the second has one
    "ep 2": (2, {"ep": 2}, 1),
    "tp 2, ep 4": (4, {"tp": 2, "ep": 4}, 1),
}


@pytest.mark.quick(6)
@pytest.mark.parametrize("mesh", sorted(SHARING))
def test_ranks_that_share_a_batch_count_it_once(ranks: WorkerPool, mesh: str) -> None:
    """trl#5712; tt#4245: the bias of an output is added once; tt#4054: so is what reaches the layer before experts."""
    num_ranks, axes, num_micro_batches = SHARING[mesh]
    # Of two batches the mean: 10 tokens' worth times 2, and 4 biases of 5; 3 tokens were 1, 2, 3, and one 4.
    loss = (2 * (1 + 2 + 3 + 4) + 4 * 5) / 2
    gradients = [each / 2 for each in (1, 5, 0, 4, 1, 2, 0, 1, 2 * 10)]
    norm = math.hypot(*gradients)
    for found in ranks(num_ranks).run(step_shared, {"mesh": axes, "zero": {"stage": 2}}, num_micro_batches):
        assert found == (loss, pytest.approx(norm, rel=1e-12), pytest.approx(gradients, rel=1e-6))


def biased_gpt_oss() -> ModelCase:
    """gpt-oss with biases of experts that are as large as its weights; its own are zeros at first."""
    case = moe_case("gpt_oss")

    def make() -> nn.Module:
        model = case.make()
        for name, parameter in model.named_parameters():
            if name.endswith("_bias"):
                nn.init.normal_(parameter)
        return model

    return ModelCase("gpt_oss", make, case.batch, None)


def train_gpt_oss(rank: int, world_size: int, overrides: dict[str, Any]) -> Trace:
    return train_on_mesh(rank, biased_gpt_oss(), overrides, None, 1, 1)


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"tp": 2, "ep": 2}], ids=str)
def test_biases_of_gpt_oss_are_added_once_under_tp(ranks: WorkerPool, mesh: dict[str, int]) -> None:
    """tt#4245: under tp without ep the bias of an expert's output was multiplied by tp."""
    traces = ranks(2).run(train_gpt_oss, {"mesh": mesh, "zero": {"stage": 2}})
    check_parity(merge_ranks(traces), train_plainly(biased_gpt_oss(), 1, 1, 1, CLIP_NORM))


SIXTEEN = {"num_local_experts": 16}
ARMS: dict[str, tuple[int, dict[str, Any]]] = {  # with as many micro-batches as make 4 with the data ranks
    "ep 2": (2, {"mesh": {"ep": 2}, "zero": {"stage": 2}}),
    "ep 4": (4, {"mesh": {"ep": 4}, "zero": {"stage": 3}}),
    "ep 2 beside 2": (4, {"mesh": {"ep": 2}, "zero": {"stage": 3}}),
    "tp 2, ep 4": (4, {"mesh": {"tp": 2, "ep": 4}, "zero": {"stage": 1}}),
    "pp 2, ep 2": (4, {"mesh": {"pp": 2, "ep": 2}, "zero": {"stage": 0}}),
}


def train_arm(rank: int, world_size: int, overrides: dict[str, Any], folder: Path) -> tuple[list[float], list[float]]:
    case = mixture(**SIXTEEN)
    mesh = overrides["mesh"]
    num_micro_batches = 4 * mesh.get("tp", 1) * mesh.get("pp", 1) // world_size
    settings = {"optimizer": {"clip_norm": CLIP_NORM}, **overrides}
    model = case.build(torch.float64, seed=rank)
    with float64_throughout(), initialize(model, make_config(num_micro_batches, settings)) as engine:
        results = [engine.train_step(batches_of(engine, case, step, num_micro_batches)) for step in range(6)]
        engine.export_weights(folder)
    return [each.loss for each in results], [each.grad_norm for each in results]


@pytest.mark.quick(1)
@pytest.mark.parametrize("arm", sorted(ARMS))
def test_six_steps_of_sixteen_experts_are_those_of_one_process(ranks: WorkerPool, tmp_path: Path, arm: str) -> None:
    """hf#48516: losses, norms under active clipping, and the weights that are saved."""
    from transformers import AutoModelForCausalLM

    expected = train_plainly(mixture(**SIXTEEN), 4, 1, 6)
    assert min(expected.grad_norms) > CLIP_NORM
    num_ranks, overrides = ARMS[arm]
    for losses, norms in ranks(num_ranks).run(train_arm, overrides, tmp_path):
        assert max_error(losses, expected.losses) <= PARITY
        assert max_error(norms, expected.grad_norms) <= PARITY
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert max_error(dict(saved.named_parameters()), expected.parameters) <= PARITY


def train_poisoned(rank: int, world_size: int, overrides: dict[str, Any], is_poisoned: bool) -> list[Any]:
    case = mixture()
    model = case.build(torch.float64, seed=0)
    with initialize(model, make_config(1, overrides)) as engine:
        batches = [batches_of(engine, case, step, 1) for step in range(2)]
        if is_poisoned:
            with poisoned():
                results = [engine.train_step(batch) for batch in batches]
        else:
            results = [engine.train_step(batch) for batch in batches]
        values = [engine.read(name) for name in sorted(engine.layout.trained_names)]
    return [[(each.loss, each.grad_norm) for each in results], values]


POISONED: Sequence[dict[str, Any]] = (
    {"mesh": {"ep": 2}, "zero": {"stage": 3}, "recompute": {"mode": "full"}},
    {"mesh": {"tp": 2, "ep": 2}, "zero": {"stage": 2}, "recompute": {"mode": "selective"}},
    {"mesh": {"tp": 2, "ep": 2}, "zero": {"stage": 3}, "tensor": {"sequence_parallel": True}},
)


@pytest.mark.parametrize("overrides", POISONED, ids=lambda each: str(each["mesh"]))
def test_memory_that_is_not_written_reaches_no_sum_of_a_step(ranks: WorkerPool, overrides: dict[str, Any]) -> None:
    """MLM#7400: new memory that is full of NaN changes no bit of losses, norms and weights."""
    expected = ranks(2).run(train_poisoned, overrides, False)
    for (numbers, values), (plain_numbers, plain_values) in zip(
        ranks(2).run(train_poisoned, overrides, True), expected, strict=True
    ):
        assert numbers == plain_numbers
        assert all(torch.equal(*pair) for pair in zip(values, plain_values, strict=True))


class LateWork:
    """Is an exchange whose result is not there before it has been waited for."""

    def __init__(self, out: Tensor, received: Tensor, work: Any) -> None:
        self.out, self.received, self.work = out, received, work

    def wait(self, *args: Any) -> bool:
        self.work.wait()
        self.out.copy_(self.received)
        return True

    def is_completed(self) -> bool:
        return False


def train_late(rank: int, world_size: int, is_late: bool) -> tuple[float, float, int]:
    case, num_late = mixture(), 0
    exchange = dist.all_to_all_single

    def late(out: Tensor, rows: Tensor, *sizes: Any, group: Any = None, async_op: bool = False) -> Any:
        nonlocal num_late
        num_late += 1
        received = torch.empty_like(out)
        out.fill_(0xFF)  # of floats it makes NaN
        return LateWork(out, received, exchange(received, rows, *sizes, group=group, async_op=True))

    model = case.build(torch.float64, seed=0)
    patched = mock.patch.object(dist, "all_to_all_single", late if is_late else exchange)
    with initialize(model, make_config(1, {"mesh": {"ep": 2}})) as engine, patched:
        result = engine.train_step(batches_of(engine, case, 0, 1))
    return result.loss, result.grad_norm, num_late


def test_experts_see_no_exchange_that_is_under_way(ranks: WorkerPool) -> None:
    """hf#49421: experts that know of no collective read rows that had not arrived."""
    expected = ranks(2).run(train_late, False)
    for found, plain in zip(ranks(2).run(train_late, True), expected, strict=True):
        assert found[:2] == plain[:2]
        assert found[2] >= 10  # of each layer: counts, rows, results, and two backwards
