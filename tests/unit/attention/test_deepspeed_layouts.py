"""Strict mode against layouts and errors of DeepSpeed's own classes: recorded ones, and the classes where installed."""

import json

import pytest
import torch
from hypothesis import given, settings

from harness.paths import DATA
from harness.sparsity import cases, deepspeed_structures, digest, outcome
from shardwise.attention import structures

CASES = json.loads((DATA / "layout_cases.json").read_text())["cases"]
RECORDED = json.loads((DATA / "deepspeed_layouts.json").read_text())["cases"]


def columns(runs):
    """The columns that "0-3,7" names."""
    spans = [run.split("-") for run in runs.split(",") if run]
    return [column for span in spans for column in range(int(span[0]), int(span[-1]) + 1)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_the_case_comes_out_exactly(case):
    made = outcome(structures, case, strict_deepspeed=True)
    if "raises" in case:
        assert made == (case["raises"], case["message"])
        return
    heads = case["layout"]["heads"] * (case["num_heads"] if case["layout"]["all_heads_equal"] else 1)
    expected = torch.zeros(case["num_heads"], case["num_blocks"], case["num_blocks"], dtype=torch.int64)
    for head, rows in enumerate(heads):
        for row, runs in enumerate(rows):
            expected[head, row, columns(runs)] = 1
    assert made.dtype == torch.int64
    assert torch.equal(made, expected)
    assert digest(made) == case["sha256_uint8"]


@pytest.mark.parametrize("name", sorted({case["cls"] for case in RECORDED}))
def test_what_deepspeed_made_of_random_parameters_comes_out_exactly(name):
    for case in RECORDED:
        if case["cls"] == name:
            made = outcome(structures, case, strict_deepspeed=True)
            if "raises" in case:
                assert made == (case["raises"], case["message"]), case
            else:
                assert not isinstance(made, tuple), (case, made)
                assert (int(made.sum()), digest(made)) == (case["nnz"], case["sha256_uint8"]), case


@settings(deadline=None)
@given(case=cases(are_legal=False))
def test_strict_mode_is_the_installed_deepspeed(case):
    module = deepspeed_structures()
    if module is None:
        pytest.skip("the installed DeepSpeed has no sparse attention")
    theirs, ours = outcome(module, case), outcome(structures, case, strict_deepspeed=True)
    if isinstance(theirs, tuple):
        assert ours == theirs
    else:
        assert torch.equal(ours, theirs)
