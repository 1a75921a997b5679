"""Bubble rates of schedules against those that Qi et al. 2023 (arXiv 2401.10241) publish in their tables 5 and 9."""

import json
from typing import Any

import pytest

from harness.paths import DATA
from planner_eval.bubbles import bubble_rate, deferred_share
from planner_eval.cases import read_case
from planner_eval.prices import predict
from shardwise.schedule.simulate import OpTimes

CASES = DATA / "planner_cases.json"
POINTS = 0.005


def rows_with_times() -> list[dict[str, Any]]:
    rows = json.loads(CASES.read_text(encoding="utf-8"))["cases"]
    return [row for row in rows if "op_times_ms" in row["parallel"] and row["outputs"]["bubble_rate"] is not None]


def test_there_are_rows() -> None:
    assert len(rows_with_times()) >= 18


@pytest.mark.quick(3)
@pytest.mark.parametrize("row", rows_with_times(), ids=lambda row: row["id"])
def test_the_bubble_rate_is_within_half_a_point_of_the_published_one(row: dict[str, Any]) -> None:
    parallel, model = row["parallel"], row["model"]
    milliseconds = parallel["op_times_ms"]
    times = OpTimes(*(milliseconds[key] / 1e3 for key in ("T_F", "T_B", "T_W", "T_comm")))
    name = {"interleaved_1f1b": "interleaved"}.get(parallel["schedule"], parallel["schedule"])
    rate = bubble_rate(
        name,
        parallel["pp"],
        parallel["num_microbatches"],
        parallel["vpp"],
        times,
        deferred_share=deferred_share(model["hidden"], model["heads"], model["seq"]),
    )
    assert rate == pytest.approx(row["outputs"]["bubble_rate"], abs=POINTS)


def test_what_is_searched_is_no_worse_than_its_recipe() -> None:
    times = OpTimes(1.0, 1.0, 0.6, 0.05)
    for searched, recipe in (("zb-1p", "zb-h1"), ("zb-2p", "zb-h2")):
        for share in (0.3, 1.0):
            assert bubble_rate(searched, 6, 18, 1, times, deferred_share=share) <= bubble_rate(recipe, 6, 18, 1, times)


def rows_without_times() -> list[dict[str, Any]]:
    rows = json.loads(CASES.read_text(encoding="utf-8"))["cases"]
    return [row for row in rows if row["quantity"] == "schedule_bubble" and "op_times_ms" not in row["parallel"]]


@pytest.mark.quick(4)
@pytest.mark.parametrize("row", rows_without_times(), ids=lambda row: row["id"])
def test_where_no_times_are_given_the_time_models_own_come_near(row: dict[str, Any]) -> None:
    rate = predict(read_case({key: value for key, value in row.items() if key != "outputs"})).bubble_rate
    assert rate == pytest.approx(row["outputs"]["bubble_rate"], abs=0.008)
