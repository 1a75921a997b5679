"""Rows of published runs, whole and with anything missing, are read as jobs and candidates."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.paths import DATA
from planner_eval.cases import Case, read_case
from planner_eval.models import PublishedStages
from planner_eval.prices import convention_of, flops_per_token, predict
from shardwise.planner.job import world_size

ROWS: list[dict[str, Any]] = json.loads((DATA / "planner_cases.json").read_text(encoding="utf-8"))["cases"]


def row_of(case_id: str) -> dict[str, Any]:
    return next(row for row in ROWS if row["id"] == case_id)


def inputs_of(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "outputs"}


@pytest.mark.parametrize("tier", ["core", "bulk"])
def test_a_case_has_as_many_ranks_as_its_cluster_and_all_its_layers(tier: str) -> None:
    cases = [read_case(row) for row in ROWS if row["tier"] == tier]
    known = [case for case in cases if case.job is not None and case.config is not None]
    assert len(known) > 0.9 * len(cases)
    for case in known:
        assert world_size(case.config) == case.job.cluster.num_gpus, case.id
        assert case.config.batch.global_size == case.job.global_batch, case.id
        assert case.tokens_scale == pytest.approx(1, abs=0.02), case.id
        layers = PublishedStages(case.job).of(case.config).layers
        assert sum(layers) == case.job.shape.num_layers, case.id
        assert min(layers) >= 0, case.id


def test_a_row_is_read_from_its_inputs_alone() -> None:
    for row in ROWS[::7]:
        other = inputs_of(row) | {"group": "x", "source": {}, "notes": "x"}
        left, right = read_case(row), read_case(other)
        assert (left.job, left.config, left.guesses) == (right.job, right.config, right.guesses)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_key_may_be_missing_or_null(data: st.DataObject) -> None:
    row = inputs_of(copy.deepcopy(data.draw(st.sampled_from(ROWS))))
    for section in ("model", "hardware", "parallel"):
        keys = data.draw(st.lists(st.sampled_from(sorted(row[section])), unique=True))
        for key in keys:
            if data.draw(st.booleans()):
                del row[section][key]
            else:
                row[section][key] = None
    for section in data.draw(
        st.lists(st.sampled_from(["model", "hardware", "parallel", "id", "quantity"]), unique=True)
    ):
        row.pop(section, None)
    case = read_case(row)
    if case.config is not None:
        assert world_size(case.config) >= 1


def test_what_counts_embedding_and_head_as_layers_has_fewer_blocks_at_the_ends() -> None:
    case = read_case(row_of("sailor-clariden-GPT-NEO-N32-N32_D8"))
    assert case.config is not None
    assert case.job is not None
    assert PublishedStages(case.job).of(case.config).layers == (6, 9, 9, 8)
    assert case.config.precision.linears == "tf32"


def test_flops_that_are_reported_count_what_their_convention_says() -> None:
    row = row_of("narayanan21-t1-145.6b")
    case = read_case(row)
    assert case.job is not None
    assert case.config is not None
    layers, hidden, seq, vocab = 80, 12288, 2048, 51200
    published = 96 * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))
    assert flops_per_token(case.job, case.config, "hardware") == pytest.approx(published, rel=2e-3)
    assert flops_per_token(case.job, case.config, "hardware") > flops_per_token(case.job, case.config, "all-keys")
    assert flops_per_token(case.job, case.config, "causal") < flops_per_token(case.job, case.config, "all-keys")


@pytest.mark.parametrize(
    ("written", "convention"),
    [
        ("hardware incl. full recompute", "hardware"),
        ("Megatron SC21 formula (counts recompute when on)", "hardware"),
        ("model 72BLsh^2(1+s/6h+v/12hL); hw uses s/3h", "all-keys"),
        ("3*(2Ns+4Ld s^2) non-causal attention", "all-keys"),
        ("model, causal attention 6 s^2 d h L, recompute excluded", "causal"),
    ],
)
def test_conventions_by_what_people_write(written: str, convention: str) -> None:
    assert convention_of(written, Case(id="", group="", tier="", quantity="")) == convention


def test_the_states_of_a_model_of_which_only_the_size_is_known() -> None:
    row = row_of("zero-t1-7.5B-s2-n64")
    predicted = predict(read_case(row)).memory_gib_per_gpu
    assert predicted == pytest.approx(row["outputs"]["memory_gib_per_gpu"], rel=5e-3)
    assert predict(read_case(row)).iteration_time_s is None


def test_adapters_take_neither_gradients_nor_states_of_frozen_weights() -> None:
    row = row_of("automodel-lora-llama3-8b-1")
    whole = predict(read_case(row | {"parallel": row["parallel"] | {"training": "all"}})).price
    frozen = predict(read_case(row)).price
    assert whole is not None
    assert frozen is not None
    assert whole.memory.worst.bytes_of("optimizer") > frozen.memory.worst.bytes_of("params") > 0
    states = ("grads", "optimizer")
    assert 0 < frozen.memory.worst.bytes_of(*states) < 0.01 * whole.memory.worst.bytes_of(*states)
    assert frozen.margin_bytes > 0 > whole.margin_bytes


def test_offload_that_is_possible_is_taken_where_nothing_else_fits() -> None:
    row = row_of("ds-azure-2t")
    price = predict(read_case(row)).price
    never = predict(read_case(row | {"parallel": row["parallel"] | {"offload": "none"}})).price
    assert price is not None
    assert never is not None
    assert (price.config.tiers.optimizer, never.config.tiers.optimizer) == ("host", "device")
    assert price.margin_bytes >= 0 > never.margin_bytes


def test_bubbles_of_measured_operations() -> None:
    row = row_of("zb-t5-1.5B-ZB-H1-m32")
    assert predict(read_case(row)).bubble_rate == pytest.approx(row["outputs"]["bubble_rate"], abs=0.005)
