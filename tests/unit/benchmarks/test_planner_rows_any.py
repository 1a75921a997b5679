"""Any row is answered: by figures that its outputs do not change, or by nulls and one line that says why."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.paths import ROOT
from planner_eval.refusals import refusal
from planner_eval.rows import tidied

ROWS: list[dict[str, Any]] = json.loads((ROOT / "tests/data/planner_cases.json").read_text(encoding="utf-8"))["cases"]
SECTIONS = ("model", "hardware", "parallel")
WAYS_OF_COUNTING = ("flops_convention", "memory_kind")
KEYS = ("iteration_time_s", "tflops_per_gpu", "memory_gib_per_gpu", "feasible", "bubble_rate")
GPUS = [
    "NVIDIA H100 80GB HBM3", "A100-SXM4-40GB", "GB200 NVL72", "MI300X", "RTX 4090", "V100-32GB", "8xA100", "HGX B200",
    "abacus", "TPU v5p", "", None, 7, ["H100"],
]  # fmt: skip
ODD = [None, "", "unknown", 0, -1, 3, 2.5, 1e30, float("nan"), True, "no", "8", [], [1, 2], {}, {"a": 1}]
WORDS = {
    "precision": ["fp8", "mxfp8", "nvfp4", "fp16", "bf16-mixed", "int8"],
    "schedule": ["DualPipe", "chimera", "zb-v", "afab", "interleaved"],
    "recompute": ["selective", "every 2nd layer", "activation checkpointing", "off", "sometimes"],
}


@pytest.fixture(scope="module")
def accuracy() -> Iterator[Any]:
    path = str(ROOT / "benchmarks")
    sys.path.insert(0, path)
    yield importlib.import_module("planner_accuracy")
    sys.path.remove(path)


@st.composite
def odd_rows(draw: st.DrawFn) -> dict[str, Any]:
    """A published row of which a few fields are missing, null or odd."""
    row = copy.deepcopy(draw(st.sampled_from(ROWS)))
    for _ in range(draw(st.integers(0, 3))):
        section = draw(st.sampled_from([each for each in (*SECTIONS, "outputs") if row.get(each)]))
        key = draw(st.sampled_from(sorted(row[section])))
        if draw(st.booleans()):
            row[section][key] = draw(st.sampled_from(WORDS.get(key, ODD)))
        elif len(row[section]) > 1:
            del row[section][key]
    if draw(st.booleans()):
        row["hardware"]["gpu"] = draw(st.sampled_from(GPUS))
    if draw(st.integers(0, 9)) == 0:
        row[draw(st.sampled_from([*SECTIONS, "outputs", "id", "quantity"]))] = draw(st.sampled_from(ODD))
    return row


@settings(max_examples=30, deadline=None)
@given(row=odd_rows())
def test_any_row_is_answered_and_its_outputs_change_nothing(accuracy: Any, row: dict[str, Any]) -> None:
    (found,) = accuracy.scored_rows([row])
    answer = found.prediction.as_row()
    assert tuple(answer) == KEYS
    json.dumps(answer, allow_nan=False)
    assert (found.problem is not None) == all(value is None for value in answer.values())
    assert found.problem is None or "Error:" not in found.problem  # a rule, not a surprise
    outputs = row.get("outputs") if isinstance(row.get("outputs"), dict) else {}
    bare = {key: row[key] for key in (*SECTIONS, "quantity") if key in row}
    bare |= {key: outputs[key] for key in WAYS_OF_COUNTING if outputs.get(key)}
    (again,) = accuracy.scored_rows([bare])
    assert again.prediction.as_row() == answer


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("model", "layers", None, "model.layers=None is no whole number from 1 to 2048; write"),
        ("model", "seq", 10**12, "model.seq=1000000000000 is no whole number from 1 to"),
        ("hardware", "gpu", "abacus", "hardware.gpu: abacus is no device that the planner knows; "),
        ("hardware", "gpu", None, "hardware.gpu=None names no device; write one"),
        ("hardware", "num_gpus", 4, "tp=4 x pp=2 x cp=1 are more ranks than hardware.num_gpus=4; lower one"),
        ("parallel", "tp", 4, None),
    ],
)
def test_a_refusal_says_the_value_the_rule_and_the_fix(section: str, key: str, value: Any, words: str | None) -> None:
    row: dict[str, Any] = {
        "model": {"layers": 8, "hidden": 1024, "seq": 1024},
        "hardware": {"gpu": "H100", "num_gpus": 8},
        "parallel": {"tp": 4, "pp": 2},
    }
    row[section][key] = value
    found = refusal(tidied(row))
    assert (found is None) if words is None else words in (found or "")


def test_odd_rows_among_others_are_named_one_by_one(
    accuracy: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = next(row for row in ROWS if row["id"] == "llama3-t4-16384-cp16" or row["group"] == "megatron_readme_h100")
    rows = [good, good, "x", {"id": "y"}, good | {"id": None}, good | {"id": "z", "parallel": {"pp": 500}}]
    cases, predictions = tmp_path / "cases.json", tmp_path / "out.json"
    cases.write_text(json.dumps(rows))
    accuracy.main([str(cases), "--json", str(predictions)])
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["row 3", "y", "z"]
    found = json.loads(predictions.read_text())
    name = good["id"]
    assert list(found) == [name, f"{name} (row 2)", "row 3", "y", "row 5", "z"]
    assert found[name] == found["row 5"] == found[f"{name} (row 2)"] != found["z"] == dict.fromkeys(KEYS)
