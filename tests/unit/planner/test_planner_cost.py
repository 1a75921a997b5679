"""What tokens and runs cost, and on how many GPUs they cost least."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from harness.refusals import refused
from shardwise.models.presets import preset
from shardwise.planner.candidates import SearchSpace
from shardwise.planner.cost import by_num_gpus, cost_per_step, gpu_s_per_token, run_cost, usd_per_million_tokens
from shardwise.planner.hardware import parse_cluster
from shardwise.planner.job import ModelShape, PlanJob, world_size
from shardwise.planner.render import cost_dict, cost_view
from shardwise.planner.search import Limits, SearchResult, search

# Over a slow network, so that many nodes lose much of a step.
CLUSTER = replace(parse_cluster("h100:32"), nic_bytes_per_s=2e9)
JOB = PlanJob(
    shape=ModelShape.of_decoder(preset("llama-3-8b"), "llama-3-8b"), seq_len=8192, global_batch=32, cluster=CLUSTER
)
SPACE = SearchSpace(pins={"mesh.pp": (1,), "mesh.tp": (1,), "mesh.cp": (1,), "recompute.mode": ("full",)})


@pytest.fixture(scope="module")
def sizes() -> tuple[SearchResult, ...]:
    return by_num_gpus(JOB, SPACE, Limits(num_best=2))


def test_the_cheapest_token_comes_first_and_every_size_is_searched_alone(sizes: tuple[SearchResult, ...]) -> None:
    winners = [each.winner for each in sizes if each.winner is not None]
    assert len(winners) == len(sizes)
    assert {each.job.cluster.num_gpus for each in winners} >= {8, 16, 32}
    assert all(world_size(each.config) == each.job.cluster.num_gpus for each in winners)
    costs = [usd_per_million_tokens(each) or 0.0 for each in winners]
    assert costs == sorted(costs)
    assert [gpu_s_per_token(each) for each in sizes] == sorted(map(gpu_s_per_token, sizes))
    # The fastest is on all GPUs, the cheapest is not: no network within a node.
    assert min(winners, key=lambda each: each.time.step_s).job.cluster.num_gpus == 32
    assert winners[0].job.cluster.num_gpus <= 8
    alone = search(winners[0].job, SPACE, Limits(num_best=2)).winner
    assert alone is not None
    assert alone.config == winners[0].config


def test_a_budget_buys_what_tokens_cost(sizes: tuple[SearchResult, ...]) -> None:
    price = sizes[0].winner
    assert price is not None
    bought = run_cost(price, budget_usd=1000.0)
    assert bought is not None
    assert bought.usd == pytest.approx(1000.0)
    back = run_cost(price, num_tokens=bought.num_tokens)
    assert back is not None
    assert (back.usd, back.days) == (pytest.approx(1000.0), pytest.approx(bought.days))
    step_usd = cost_per_step(price)
    assert step_usd is not None
    assert bought.days == pytest.approx(1000.0 / step_usd * price.time.step_s / 86_400)
    assert run_cost(price) is None


def test_sizes_are_shown_and_written(sizes: tuple[SearchResult, ...]) -> None:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    with console.capture() as captured:
        console.print(cost_view(sizes[0], num_tokens=1e12, sizes=sizes))
    lines = captured.get().splitlines()
    assert "1.00 T tokens: $" in captured.get()
    numbers = [line.split()[0] for line in lines if line.strip()[:1].isdigit()]
    found = cost_dict(sizes[0], num_tokens=1e12, sizes=sizes)
    assert numbers == [f"{each['num_gpus']}" for each in found["sizes"]]
    assert found["run"]["num_tokens"] == 1e12
    assert cost_dict(sizes[0]) == {"run": None, "sizes": []}


def test_pins_that_go_with_no_size_are_refused_and_that_go_with_some_are_taken() -> None:
    only_32 = SearchSpace(pins={**SPACE.pins, "mesh.dp_shard": (32,)})
    assert [each.job.cluster.num_gpus for each in by_num_gpus(JOB, only_32, Limits(num_best=1))] == [32]
    with refused("no-layout", "32 GPUs"):
        by_num_gpus(JOB, SearchSpace(pins={"mesh.tp": (7,)}), Limits(num_best=1))
