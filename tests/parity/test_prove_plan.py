"""Wrong plans are refuted by numbers before they are used, wherever they come from; right ones are not."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from harness.huggingface import FAMILIES, build_model
from harness.pool import WorkerPool
from harness.refusals import refused
from harness.scanned import scanned
from harness.training import make_config
from harness.unknown_models import CASES
from harness.zoo_cells import case_of
from shardwise import Config, ConfigError, initialize, propose_plan
from shardwise.layout.layout import Layout
from shardwise.layout.tensor_plan import SharedInput
from shardwise.tensor.plan_layout import check_provable, check_small_copy, prove_plan, proved_layout
from shardwise.tensor.prove import NotProvedError, refute

CROSSED: Final = next(case for case in CASES if case.name == "crossed")
# The norm works on whole tensors, outside of all regions: the sum of its gradients counts it once a rank.
WRONG_TABLE: Final[dict[str, Any]] = {
    "model.layers.*.mlp.gate_proj": "column",
    "model.layers.*.mlp.up_proj": "column",
    "model.layers.*.mlp.down_proj": "row",
    "model.layers.*.input_layernorm": "partial",
}
RIGHT_TABLE: Final = {key: value for key, value in WRONG_TABLE.items() if value != "partial"}


def test_a_region_around_queries_that_enter_elsewhere_is_refuted() -> None:
    model, (tokens, _) = CROSSED.build(torch.float32), CROSSED.batch(0, 2, torch.float32)
    plan = propose_plan(model, tokens, tp=2)
    assert not any("cross" in region.module for region in plan.regions)
    assert refute(model, plan, tokens, 2) == ""
    wrong = replace(plan, regions=(*plan.regions, SharedInput("blocks.0.cross", ("memory",))))
    assert "the gradient of" in refute(model, wrong, tokens, 2)


class Blurred(torch.autograd.Function):
    """Element by element in the forward, so a trace of that says nothing; its backward mixes all features."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.mean(-1, keepdim=True).expand_as(grad)


class Hiding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(Blurred.apply(self.up(x)))


def test_what_is_wrong_in_the_backward_alone_is_not_proposed() -> None:
    with refused("tp-nothing-to-split", "the gradient of up"):
        propose_plan(Hiding(), torch.randn(2, 8), tp=2)


def test_values_that_a_model_does_not_know_prove_nothing_so_nothing_is_proposed() -> None:
    with refused("tp-plan-unproved", "index out of range"):
        propose_plan(CROSSED.build(torch.float32), torch.full((2, 8), 10**6), tp=2)


@pytest.mark.parametrize("family", ["llama", "qwen2", "bert", "t5"])
def test_plans_of_families_are_right_on_tiny_copies(family: str) -> None:
    if family in FAMILIES:
        for model in (build_model(family), nn.Sequential(build_model(family))):
            for sequence_parallel in (False, True):
                assert check_small_copy(model, None, 4, sequence_parallel) == ""


def test_a_default_device_of_the_callers_plays_no_part(caplog: pytest.LogCaptureFixture) -> None:
    model = CROSSED.build(torch.float32)
    tokens = torch.ones(2, 8, dtype=torch.long)
    with torch.device("meta"):
        proved = prove_plan(model, tokens, propose_plan(model, tokens, tp=2), tp=2)
    assert "proved in float64 over tp=2" in proved.notes
    assert not caplog.records


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_plans_of_models_with_towers_are_proved_by_their_text(family: str) -> None:
    pytest.importorskip("transformers")
    assert check_small_copy(case_of(family, {}).build(torch.float32), None, 2) == ""


def test_a_large_proposal_is_proved_by_that_of_a_tiny_copy(caplog: pytest.LogCaptureFixture) -> None:
    tiny: Any = build_model("llama")
    large = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 1024, "vocab_size": 8192, "num_hidden_layers": 3}
    with torch.device("meta"):
        model = type(tiny)(type(tiny.config).from_dict(tiny.config.to_dict() | large))
    with pytest.raises(NotProvedError):
        check_provable(model, ())
    tokens = torch.ones(2, 8, dtype=torch.long)
    plan = propose_plan(model, {"input_ids": tokens, "labels": tokens}, tp=2)
    assert "proved in float64 over tp=2" in plan.notes
    assert not caplog.records


class Averaging(nn.Module):
    """A block that adds the mean over the sequence (dim 1) to each token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.network = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1, keepdim=True) + self.network(self.norm(x))


SEQUENCE_TABLE: Final = {
    "0.network.0": "column",
    "0.network.2": "row",
    "0.network": "region input",
    "0": "stack x last=1",
}


def test_a_plan_is_proved_along_the_sequence_too() -> None:
    model, batch = nn.Sequential(Averaging(), nn.LayerNorm(8)), torch.randn(2, 4, 8)
    proved = prove_plan(model, batch, SEQUENCE_TABLE, tp=2)
    assert prove_plan(model, batch, proved, tp=2) == proved
    with refused("tp-plan-refuted", "tp=2"):
        prove_plan(model, batch, SEQUENCE_TABLE, tp=2, sequence_parallel=True)
    with refused("tp-plan-unproved", "does not run"):
        prove_plan(model, torch.randn(2, 4, 9), SEQUENCE_TABLE, tp=2)


def laid_out(model: nn.Module, config: Config, plan: Any, *, rank: int) -> Layout:
    return proved_layout(scanned(model), model, config, plan, rank=rank)


def test_what_is_not_proved_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model, table = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), {"0": "column", "1": "row"}
    config = Config.from_dict({"mesh": {"tp": 2}}).resolve(2)
    for rank in range(2):
        laid_out(model, config, table, rank=rank)
    assert len(caplog.records) == 1
    caplog.clear()
    laid_out(model, config, prove_plan(model, torch.ones(2, 8), table, tp=2), rank=0)
    laid_out(model, config, propose_plan(model, torch.ones(2, 8), tp=2), rank=0)
    assert not caplog.records
    laid_out(model, config, replace(propose_plan(model, torch.ones(2, 8), tp=2), notes=()), rank=0)
    assert len(caplog.records) == 1


class Wide(nn.Module):
    """A model of one's own, with fused gates, whose table has numbers of features; no config says how it is made."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.width = width
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(width, 4 * width), "down": nn.Linear(2 * width, width)})
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            gate, up = block["up"](x).chunk(2, -1)
            x = x + block["down"](gate.sigmoid() * up)
        return self.head(x)


class Bringing(Wide):
    def tensor_plan(self, degree: int) -> dict[str, Any]:
        return wide_table(f"parts={2 * self.width}+{2 * self.width}")


def wide_table(parts: str) -> dict[str, Any]:
    return {"blocks.*.up": f"column {parts}", "blocks.*.down": "row", "head": "column-gather"}


LARGE: Final = (512, 3)
TWO: Final = Config.from_dict({"mesh": {"tp": 2}}).resolve(2)


def test_a_proof_on_a_small_model_serves_a_large_one(caplog: pytest.LogCaptureFixture) -> None:
    small, batch = Wide(8, 2), torch.randn(2, 8)
    large, table = Wide(*LARGE), wide_table("parts=2")
    with pytest.raises(NotProvedError):
        check_provable(large, ())
    sized, small_sized = (wide_table(f"parts={size}+{size}") for size in (1024, 16))
    for model, proved in (
        (large, prove_plan(small, batch, table, tp=2)),
        (large, prove_plan(small, batch, small_sized, tp=2, large_plan=sized)),
        (Bringing(*LARGE), prove_plan(Bringing(8, 2), batch, None, tp=2)),
        (small, prove_plan(small, batch, table, tp=2)),
    ):
        found, expected = (laid_out(model, TWO, each, rank=rank).tensor for rank, each in enumerate((proved, table)))
        assert found is not None
        assert expected is not None
        assert found.splits == expected.splits
    assert not caplog.records
    four = Config.from_dict({"mesh": {"tp": 4}}).resolve(4)
    laid_out(large, four, prove_plan(small, batch, table, tp=2), rank=0)
    assert "prove_plan(small_model, batch, small_plan, tp=4, large_plan=plan)" in caplog.text  # over more ranks


def test_a_proof_does_not_serve_other_kinds_of_modules() -> None:
    small, batch, large = Wide(8, 2), torch.randn(2, 8), Wide(*LARGE)
    table = wide_table("parts=2")
    with refused("tp-proof-other-kinds", "blocks.*.up"):  # fused gates, as one matrix
        laid_out(large, TWO, prove_plan(small, batch, table, tp=2, large_plan=wide_table("")), rank=0)
    headless = {key: style for key, style in table.items() if key != "head"}
    with refused("tp-proof-other-kinds", "head"):
        laid_out(large, TWO, prove_plan(small, batch, headless, tp=2, large_plan=table), rank=0)


def test_a_large_proposal_is_proved_by_a_small_model(caplog: pytest.LogCaptureFixture) -> None:
    small, large = (Wide(8, 2), torch.randn(2, 8)), (Wide(*LARGE), torch.randn(2, 512))
    plan = propose_plan(*large, tp=2, small=small)
    laid_out(large[0], TWO, plan, rank=0)
    assert not caplog.records
    with refused("tp-plan-unproved", "propose_plan(model, batch, tp=2, small="):
        propose_plan(*large, tp=2)
    with refused("tp-plan-unproved", "its small model is split otherwise"):
        propose_plan(*large, tp=2, small=(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), small[1]))


def test_a_table_that_a_tiny_copy_refutes_is_refused_by_every_rank(ranks: WorkerPool) -> None:
    assert ranks(2).run(start, RIGHT_TABLE) == [(), ()]
    for code, message in ranks(2).run(start, WRONG_TABLE):
        assert code == "tp-plan-refuted"
        assert "the gradient of model.layers.0.input_layernorm.weight is off by" in message
        assert "propose_plan(model, batch, tp=2)" in message


def start(rank: int, world_size: int, table: dict[str, Any]) -> tuple[str, ...]:
    model = build_model("llama")
    try:
        initialize(model, make_config(1, {"mesh": {"tp": world_size}}), plan=table).close()
    except ConfigError as error:
        return error.code, str(error)
    return ()


READING_TABLE: Final = {key.replace("network.2", "network.3"): value for key, value in SEQUENCE_TABLE.items()}


class ReadsInTraining(nn.Module):
    """A block whose code in training alone reads the number of tokens, or other tokens; "none" reads neither."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.LayerNorm(8)
        self.network = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = self.read(x)
        return x + nn.functional.dropout(self.network(self.norm(x)), 0.5, self.training)

    def read(self, x: Tensor) -> Tensor:
        if self.kind == "noise":  # as NEFTune's
            scale = 5.0 / (x.shape[1] * x.shape[2]) ** 0.5
            return x + torch.zeros_like(x).uniform_(-scale, scale)
        if self.kind == "length":
            return x * x.shape[1]
        if self.kind == "mean":
            return x - x.mean(1, keepdim=True)
        if self.kind == "per sample":
            return x / x[0].numel() ** 0.5
        return x + torch.randn_like(x) * (torch.rand(x.shape[0], 1, 1) < 0.9)


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", ["noise", "length", "mean", "per sample"])
def test_what_only_training_reads_of_other_tokens_refutes_a_plan_along_the_sequence(kind: str) -> None:
    model, batch = nn.Sequential(ReadsInTraining(kind), nn.LayerNorm(8)), torch.randn(2, 4, 8)
    assert "proved in float64 over tp=2" in prove_plan(model, batch, READING_TABLE, tp=2).notes
    with refused("tp-plan-refuted", "in training mode"):
        prove_plan(model, batch, READING_TABLE, tp=2, sequence_parallel=True)


def test_dropouts_and_noise_of_each_token_refute_no_plan() -> None:
    model, batch = nn.Sequential(ReadsInTraining("none"), nn.LayerNorm(8)), torch.randn(2, 4, 8)
    for sequence_parallel in (False, True):
        prove_plan(model, batch, READING_TABLE, tp=2, sequence_parallel=sequence_parallel)
    assert model.training


def test_numbers_that_the_proof_cannot_give_to_all_ranks_prove_nothing() -> None:
    class Skipping(ReadsInTraining):
        def read(self, x: Tensor) -> Tensor:
            return x * random.random()

    model, batch = nn.Sequential(Skipping(""), nn.LayerNorm(8)), torch.randn(2, 4, 8)
    with refused("tp-plan-unproved", "in training mode the model draws"):
        prove_plan(model, batch, READING_TABLE, tp=2)
