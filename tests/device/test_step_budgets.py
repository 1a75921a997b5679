"""What a step asks of a device: the host waits once, for loss and norm, and few kernels depend on how many tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from device.virtual import reason_to_skip
from harness.warm_python import WarmPython

pytestmark = pytest.mark.skipif(reason_to_skip() is not None, reason=reason_to_skip() or "")

TESTS = Path(__file__).parents[1]
FUSED = ("stage 0", "stage 1", "stage 3", "one rank", "tp", "sgd", "lockstep", "batches on the host")
REFUSED = ("stage 3", "sgd")
NUM_SUMMING = 57  # loss, norm, factor and flags, for any number of parameters
NUM_COMPARING = 20


@pytest.fixture(scope="module")
def budgets(warm_programs: WarmPython) -> dict[str, dict[str, Any]]:
    """What `device.budgets` prints, by name."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent / "src")))}
    environ["PYTHONWARNINGS"] = "ignore"
    command = [sys.executable, "-m", "device.budgets"]
    with mock.patch.object(subprocess, "Popen", warm_programs.popen()):
        ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    return {line["name"]: line for line in map(json.loads, ended.stdout.splitlines())}


@pytest.mark.parametrize("name", [*FUSED, "states in bf16", "lion", "muon"])
def test_the_host_waits_once_a_step(budgets: dict[str, dict[str, Any]], name: str) -> None:
    assert len(budgets[name]["waits"]) == 1


@pytest.mark.parametrize("name", FUSED)
def test_the_optimizer_is_enqueued_before_the_host_waits(budgets: dict[str, dict[str, Any]], name: str) -> None:
    ((what, was_enqueued),) = budgets[name]["waits"]
    assert was_enqueued
    assert what.startswith("event")  # before the optimizer: a copy now would wait for that too


@pytest.mark.parametrize("name", FUSED)
def test_the_step_launches_no_kernel_for_each_parameter(budgets: dict[str, dict[str, Any]], name: str) -> None:
    kernels, num_groups = budgets[name]["kernels"], budgets[name]["num_groups"]
    assert sum(number for kernel, number in kernels.items() if "norm" in kernel) == 1
    # Masters are rounded, and gathered where they are whole; ranks of a tensor-parallel group compare their losses.
    assert sum(kernels.values()) <= NUM_SUMMING + 3 * num_groups + NUM_COMPARING * (name == "tp")


@pytest.mark.parametrize("name", ["Lion", "AdEMAMix"])
def test_the_library_steps_lists_of_tensors(budgets: dict[str, dict[str, Any]], name: str) -> None:
    stepped = budgets[f"lists of {name}"]
    assert all(stepped["are_same"])  # to the bit
    assert sum(stepped["kernels"].values()) <= 12  # of four tensors
    assert all(kernel.startswith("_foreach_") for kernel in stepped["kernels"])


def test_momenta_and_updates_of_matrices_are_lists(budgets: dict[str, dict[str, Any]]) -> None:
    kernels = budgets["muon"]["kernels"]
    assert not {"lerp_", "lerp"} & kernels.keys()
    assert kernels["_foreach_lerp_"] == kernels["_foreach_lerp"] == 1
    assert kernels["_foreach_add_"] < kernels["baddbmm"] / 10  # as many as there are shapes


def test_gradients_are_copied_a_group_at_a_time(budgets: dict[str, dict[str, Any]]) -> None:
    fewest = 2 * budgets["sgd"]["num_parameters"]  # by copies of each one, in two micro-batches
    assert budgets["sgd"]["num_copies"] < fewest


def test_what_is_sent_in_codes_takes_one_kernel_to_encode_and_one_to_decode(
    budgets: dict[str, dict[str, Any]],
) -> None:
    pytest.importorskip("triton")
    kernels, of_torch = (budgets[f"coded, {how}"]["kernels"] for how in ("triton", "torch"))
    kernels.pop("triton:_drop")  # the model's
    encoded, *decoded = (kernels.pop(f"triton:_{verb}_blocks") for verb in ("encode", "decode", "sum"))
    assert encoded == sum(decoded) > 0
    assert kernels == {}
    assert sum(of_torch.values()) > 8 * encoded


def test_a_dropout_is_one_kernel_and_so_is_its_backward(budgets: dict[str, dict[str, Any]]) -> None:
    pytest.importorskip("triton")
    assert budgets["dropout, triton"]["kernels"] == {"forward": 1, "backward": 1}
    assert budgets["dropout, torch"]["kernels"]["forward"] > 8


def test_inputs_of_two_lengths_leave_through_the_same_pages(budgets: dict[str, dict[str, Any]]) -> None:
    short, long = budgets["activations on the host"]["lengths"]
    assert short < long
    assert budgets["activations on the host"]["num_pins"] == 0


def test_ranks_are_compared_without_a_wait(budgets: dict[str, dict[str, Any]]) -> None:
    assert budgets["ranks compared"]["waits"] == []


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_a_step_that_the_device_refuses_leaves_all_as_it_was(
    budgets: dict[str, dict[str, Any]], name: str, on_nonfinite: str
) -> None:
    refused = budgets[f"{name}, {on_nonfinite}"]
    assert refused["was_enqueued_before"]
    assert refused["changed"] == []
    assert (refused["error"], refused["skipped"]) == (("loss-not-finite", False), ("", True))[on_nonfinite == "skip"]
    assert refused["is_finite_after"]
    assert refused["share_moved"] == 1.0
