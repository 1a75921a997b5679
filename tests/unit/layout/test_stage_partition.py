"""Stages by cost: the best cut against all cuts, published models, ties, pinned cuts and what is refused."""

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from harness.huggingface import build_model
from harness.refusals import refused
from harness.scanned import stage_units_of
from shardwise.config.resolve import Config
from shardwise.layout.facts import ParamEntry, StageUnit
from shardwise.layout.stage_partition import (
    StagePartition,
    UnitCost,
    estimate_costs,
    find_partition,
    partition_stages,
)
from shardwise.models import Decoder, preset


def unit(name: str, *, is_cut_allowed_before: bool = True, has_params: bool = True) -> StageUnit:
    params = (ParamEntry(f"{name}.weight", (), name, (1,), requires_grad=True),) if has_params else ()
    return StageUnit(name, (name,), params, is_cut_allowed_before)


def cut_of(times: Sequence[float], memory: Sequence[float], num_stages: int, **options: Any) -> StagePartition:
    names = [f"u{index}" for index in range(len(times))]
    costs = [UnitCost(name, *each) for name, each in zip(names, zip(times, memory, strict=True), strict=True)]
    return partition_stages([unit(name) for name in names], costs, num_stages, **options)


def sizes(cut: StagePartition) -> list[int]:
    return [len(stage) for stage in cut.stages]


def score(times: Sequence[float], memory: Sequence[float], starts: Sequence[int], placement: Sequence[int]) -> Any:
    """What the cut is to minimise, straight from its definition: multiples of the means."""
    stages = [slice(start, stop) for start, stop in pairwise((*starts, len(times)))]
    ranks = [[stage for stage, at in zip(stages, placement, strict=True) if at == rank] for rank in set(placement)]
    stage_times = [sum(times[stage]) * len(stages) / (sum(times) or 1) for stage in stages]
    rank_memory = [sum(sum(memory[each]) for each in rank) * len(ranks) / (sum(memory) or 1) for rank in ranks]
    numbers = [*stage_times, *rank_memory]
    return max(numbers), sum(each * each for each in numbers)


weights = st.integers(0, 6)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    pairs = draw(st.lists(st.tuples(weights, weights), min_size=1, max_size=9))
    return [time for time, _ in pairs], [held for _, held in pairs], draw(st.integers(1, len(pairs)))


@given(problems())
def test_no_cut_is_better(problem: tuple[list[int], list[int], int]) -> None:
    times, memory, num_stages = problem
    found = score(times, memory, cut_of(times, memory, num_stages).starts, range(num_stages))
    all_cuts = [(0, *starts) for starts in combinations(range(1, len(times)), num_stages - 1)]
    best = min(score(times, memory, starts, range(num_stages)) for starts in all_cuts)
    largest = min(score(times, memory, starts, range(num_stages))[0] for starts in all_cuts)
    assert found[0] == pytest.approx(largest, abs=1e-9)
    # Of sums that differ by rounding alone, either may be the least.
    even = min(
        squares
        for most, squares in (score(times, memory, starts, range(num_stages)) for starts in all_cuts)
        if most <= largest + 1e-9
    )
    assert found[1] == pytest.approx(even, abs=1e-9)
    assert best[0] == pytest.approx(found[0], abs=1e-9)


@given(problems(), st.data())
def test_cuts_stand_where_they_may(problem: tuple[list[int], list[int], int], data: st.DataObject) -> None:
    times, memory, num_stages = problem
    flags = st.lists(st.booleans(), min_size=len(times), max_size=len(times))
    allowed, has_params = data.draw(flags), data.draw(flags)
    units = [
        unit(f"u{index}", is_cut_allowed_before=allowed[index], has_params=has_params[index])
        for index in range(len(times))
    ]
    costs = [UnitCost(each.name, *pair) for each, pair in zip(units, zip(times, memory, strict=True), strict=True)]
    legal = [
        (0, *starts)
        for starts in combinations([index for index in range(1, len(times)) if allowed[index]], num_stages - 1)
        if all(any(has_params[start:stop]) for start, stop in pairwise((0, *starts, len(times))))
    ]
    if not legal:
        with refused("too-many-stages"):
            partition_stages(units, costs, num_stages)
        return
    cut = partition_stages(units, costs, num_stages)
    assert cut.starts in legal
    found = score(times, memory, cut.starts, range(num_stages))[0]
    assert found == pytest.approx(min(score(times, memory, each, range(num_stages))[0] for each in legal), abs=1e-9)


@given(problems(), st.booleans())
def test_several_stages_a_rank_are_no_worse_than_each_on_its_own(
    problem: tuple[list[int], list[int], int], is_v_shaped: bool
) -> None:
    times, memory, num_stages = problem
    num_ranks = max(1, num_stages // 2)
    looped = [index % num_ranks for index in range(num_stages)]
    placement = [*range(num_ranks), *reversed(range(num_ranks))] if is_v_shaped and num_stages > 1 else looped
    num_stages = len(placement)
    cut = cut_of(times, memory, num_stages, placement=placement)
    alone = cut_of(times, memory, num_stages)
    most = score(times, memory, cut.starts, placement)[0]
    assert most <= score(times, memory, alone.starts, placement)[0] + 1e-9


def test_equal_blocks_are_spread_evenly_and_the_later_stages_take_more() -> None:
    assert sizes(cut_of([1] * 8, [1] * 8, 4)) == [2, 2, 2, 2]
    # Earlier ranks hold the activations of more micro-batches.
    assert sizes(cut_of([1] * 10, [1] * 10, 4)) == [2, 2, 3, 3]
    assert sizes(cut_of([0.1] * 7, [0.3] * 7, 3)) == [2, 2, 3]


def test_what_is_balanced() -> None:
    times, memory = [0, 1, 1, 1, 1, 4], [6, 1, 1, 1, 1, 1]
    assert sizes(cut_of(times, memory, 2, balance="time")) == [5, 1]
    assert sizes(cut_of(times, memory, 2, balance="memory")) == [1, 5]
    assert sizes(cut_of(times, memory, 2, balance="both")) == [3, 3]


def test_costs_that_are_all_zero_make_a_cut() -> None:
    assert sizes(cut_of([0, 0, 0], [1, 1, 1], 2, balance="time")) == [1, 2]
    cut = cut_of([0, 0, 0], [0, 0, 0], 3)
    assert (cut.times, cut.rank_memory) == ((1, 1, 1), (1, 1, 1))


@pytest.mark.parametrize(
    ("times", "memory", "placement"),
    [
        # V-shaped and looped, with a heavy embedding: rank 0 makes up for it in its other stage.
        ([0, *[1] * 8, 2], [6, *[1] * 8, 2], [0, 1, 1, 0]),
        ([0, *[1] * 8, 2], [6, *[1] * 8, 2], [0, 1, 0, 1]),
        # Found from the best times, and not from the best cut of as many ranks as stages.
        ([1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 1, 3], [0, 1, 1, 0]),
        ([0, 2, 1, 0, 1, 2], [1, 3, 1, 0, 1, 0], [0, 1, 0, 1]),
    ],
)
def test_memory_is_balanced_over_ranks(times: list[int], memory: list[int], placement: list[int]) -> None:
    all_starts = ((0, *starts) for starts in combinations(range(1, len(times)), 3))
    best = min(score(times, memory, starts, placement) for starts in all_starts)
    found = cut_of(times, memory, 4, placement=placement)
    assert score(times, memory, found.starts, placement) == pytest.approx(best)
    alone = cut_of(times, memory, 4)
    assert best[0] < 0.9 * score(times, memory, alone.starts, placement)[0]


def decoder_cut(name: str, num_stages: int) -> StagePartition:
    model = Decoder(preset(name), device="meta")
    units = stage_units_of(model)
    return partition_stages(units, estimate_costs(units, bytes_per_element=2), num_stages)


def test_bloom_176b_counts_embedding_and_head_as_layers() -> None:
    """BigScience 2022, arXiv 2211.05100: 70 blocks, embedding and head on 72 slots of 12 stages."""
    from transformers.models.bloom import BloomConfig, BloomForCausalLM

    with torch.device("meta"):
        model = BloomForCausalLM(BloomConfig(vocab_size=250_880, hidden_size=14_336, n_layer=70, n_head=112))
    units = stage_units_of(model)
    costs = estimate_costs(units, bytes_per_element=2)
    gigabytes = {cost.name: round(cost.memory_bytes / 1e9, 1) for cost in costs}
    assert gigabytes["transformer.word_embeddings"] == gigabytes["lm_head"] == 7.2  # a GB of 10^9
    assert gigabytes["transformer.h.0"] == gigabytes["transformer.h.69"] == 4.9
    cut = partition_stages(units, costs, 12)
    num_blocks = [sum(".h." in each.name for each in stage) for stage in cut.stages]
    assert num_blocks == [5, *[6] * 10, 5]
    assert cut.stages_of["lm_head.weight"] == cut.stages_of["transformer.word_embeddings.weight"] == (0, 11)


def test_llama_405b_fills_128_slots() -> None:
    """126 blocks, embedding and head on 16 stages of 8 (Llama Team 2024, arXiv 2407.21783, section 3.3.2)."""
    cut = decoder_cut("llama-405b", 16)
    num_blocks = [sum("blocks." in each.name for each in stage) for stage in cut.stages]
    assert num_blocks == [7, *[8] * 14, 7]
    assert cut.first_units[:2] == ("embed", "blocks.7")


def small_model() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(10, 4), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 6, bias=False), nn.Linear(6, 10)
    )


def test_estimates() -> None:
    model = small_model()
    model[3].requires_grad_(False)
    units = stage_units_of(model)
    costs = estimate_costs(units, lambda entry: 16 if entry.requires_grad else 2)
    assert costs == (
        UnitCost("0", 0.0, 640.0),
        UnitCost("1", 32.0, 320.0),
        UnitCost("2", 0.0, 128.0),
        UnitCost("3", 48.0, 48.0),
        UnitCost("4", 120.0, 1120.0),
    )
    assert estimate_costs(units, 16)[3] == UnitCost("3", 48.0, 384.0)


@pytest.mark.parametrize(("stage", "narrow", "wide"), [(0, 18, 16), (1, 6 + 12 / 2, 8 + 8 / 2)])
def test_what_stays_in_fp32_takes_what_the_layout_gives_it(stage: int, narrow: float, wide: float) -> None:
    """Parameters, gradients and AdamW's states, with a master of what is narrow alone."""
    model = small_model()
    model[4].requires_grad_(False)
    model._keep_in_fp32_modules_strict = ["1", "4"]
    mesh = {"pp": 2, "dp_shard": 2}
    sections = {"mesh": mesh, "zero": {"stage": stage}, "precision": {"param": "bf16"}, "batch": {"accumulation": 2}}
    cut = find_partition(stage_units_of(model), Config.from_dict(sections).resolve(world_size=4))
    costs = {cost.name: cost.memory_bytes for cost in cut.costs}
    assert costs == {"0": 40 * narrow, "1": 20 * wide, "2": 8 * narrow, "3": 24 * narrow, "4": 70 * 4}


def test_a_tied_head_computes_where_it_stands() -> None:
    with torch.device("meta"):
        model = build_model("gpt2")
    first, *_, head = estimate_costs(stage_units_of(model), bytes_per_element=1)
    assert (first.compute, first.memory_bytes) == (0, (41 + 32) * 16)
    assert (head.compute, head.memory_bytes) == (2 * 41 * 16, 41 * 16)


def test_experts_count_by_the_share_that_a_token_is_sent_to() -> None:
    with torch.device("meta"):
        model = build_model("mixtral")
    block = estimate_costs(stage_units_of(model), bytes_per_element=1)[1]
    experts = 16 * (2 * 24 * 16 + 16 * 24)
    dense = 2 * 16 * 16 + 2 * 8 * 16 + 16 * 16  # query, out; key, value; router
    assert block.compute == 2 * (dense + experts * 2 / 16)
    assert block.memory_bytes == dense + experts + 2 * 16  # and the norms


def test_measured_times_replace_estimates() -> None:
    model = small_model()
    units = stage_units_of(model)
    costs = estimate_costs(units, 1, measured={"1": 0.5, "0": 0.25, "[0-3]": 0.75})
    assert [cost.compute for cost in costs[:4]] == [0.25, 0.5, 0.75, 0.75]
    assert costs[4].compute == pytest.approx((0.5 + 0.75) / (32 + 48) * 120)
    every = estimate_costs(units, 1, measured={"*": 2.0})
    assert [cost.compute for cost in every] == [2.0] * 5
    assert [cost.memory_bytes for cost in every] == [cost.memory_bytes for cost in estimate_costs(units, 1)]


@pytest.mark.parametrize(
    ("measured", "refusal"),
    [
        ({"9": 1.0}, ("no-unit-matches", "'9'", "0, 4")),
        ({"1": 0.0}, ("measured-time-range", "1=0.0")),
        ({"1": float("nan")}, ("measured-time-range", "1=nan")),
        ({"0": 1.0}, ("measured-no-matrices",)),
    ],
)
def test_measured_times_that_say_nothing_are_refused(measured: dict[str, float], refusal: tuple[str, ...]) -> None:
    model = small_model()
    with refused(*refusal):
        estimate_costs(stage_units_of(model), 1, measured=measured)


def test_every_name_of_a_parameter_has_its_stages() -> None:
    model = small_model()
    model[4].weight = nn.Parameter(torch.zeros(10, 4))
    model[4].weight = model[0].weight
    units = stage_units_of(model)
    cut = partition_stages(units, estimate_costs(units, 1), 3, pinned=["1", "3"])
    assert cut.stages_of["0.weight"] == cut.stages_of["4.weight"] == (0, 2)
    assert cut.stages_of["4.bias"] == (2,)
    assert cut.stages_of["2.weight"] == (1,)


def test_the_table_shows_every_stage_and_the_ends_imbalance() -> None:
    costs = [UnitCost("a", 0, 3 * 2**20), UnitCost("b", 6, 2**20), UnitCost("c", 9, 2**21)]
    cut = partition_stages([unit(name) for name in "abc"], costs, 2, pinned=["c"])
    assert cut.describe().splitlines() == [
        "stage  rank  units  parameters  memory MiB    time",
        "    0     0  a..b            2         4.0  0.80 x",
        "    1     1  c               1         2.0  1.20 x",
        "stage 0 takes 0.80 x the mean time, the last 1.20 x; rank 0 holds most, 1.33 x the mean memory",
    ]


def test_pinned_units_are_the_cut() -> None:
    cut = cut_of([1] * 6, [1] * 6, 3, pinned=["u1", "u5"])
    assert cut.first_units == ("u0", "u1", "u5")
    assert cut_of([1] * 6, [1] * 6, 3, pinned=cut.first_units[1:]) == cut


@pytest.mark.parametrize(
    ("pinned", "refusal"),
    [
        (
            ["b"],
            ("cut-count", "name 2"),
        ),
        (["blocks.1", "blcks.2"], ("unknown-unit", "'blcks.2'", "blocks.2?")),
        (["x", "head"], ("unknown-unit", "'x'", "blocks.1, blocks.2, relu")),
        (
            ["blocks.0", "head"],
            ("cut-not-allowed", "'blocks.0'", "blocks.1"),
        ),
        (
            ["first", "head"],
            ("cut-not-allowed", "'first'", "blocks.1"),
        ),
        (
            ["head", "blocks.1"],
            ("cut-order", "blocks.1 after head"),
        ),
        (
            ["head", "head"],
            ("cut-order", "head after head"),
        ),
        (
            ["relu", "head"],
            ("stage-without-parameters", "stage 1 (relu to relu)"),
        ),
    ],
)
def test_pinned_cuts_that_are_none_are_refused(pinned: list[str], refusal: tuple[str, ...]) -> None:
    units = [
        unit("first"),
        unit("blocks.0", is_cut_allowed_before=False),
        unit("blocks.1"),
        unit("blocks.2"),
        unit("relu", has_params=False),
        unit("head"),
    ]
    with refused(*refusal):
        partition_stages(units, [UnitCost(each.name, 1, 1) for each in units], 3, pinned=pinned)


@pytest.mark.parametrize("num_stages", [0, 5])
def test_fewer_units_than_stages_are_refused(num_stages: int) -> None:
    units = [unit("a"), unit("b"), unit("c", is_cut_allowed_before=False), unit("d"), unit("e", has_params=False)]
    costs = [UnitCost(each.name, 1, 1) for each in units]
    with refused("too-many-stages", f"{num_stages} pipeline stages", "from 1 to 3"):
        partition_stages(units, costs, num_stages)
    assert sizes(partition_stages(units, costs, 3)) == [1, 2, 2]


def test_what_does_not_belong_together_is_refused() -> None:
    with pytest.raises(ValueError, match="costs"):
        partition_stages([unit("a")], [UnitCost("b", 1, 1)], 1)
    with pytest.raises(ValueError, match=r"placement.* num_stages=2"):
        cut_of([1, 1], [1, 1], 2, placement=[0])
