"""Sums that lose nothing, and the loss scaler's rule."""

import random
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch

from shardwise.config.resolve import PrecisionConfig
from shardwise.runtime.memory_tracker import MemoryTracker
from shardwise.runtime.precision import (
    SCRATCH_NUMEL,
    TORCH_DTYPES,
    LossScaler,
    add_widened,
    torch_dtype,
)
from shardwise.runtime.torch_private import fake_tensors

WIDTHS = {torch.float16: 0, torch.bfloat16: 0, torch.float32: 1, torch.float64: 2}
WIDENINGS = [(total, addend) for total, addend in product(WIDTHS, WIDTHS) if WIDTHS[total] > WIDTHS[addend]]
SAME = [(dtype, dtype) for dtype in WIDTHS]


def test_names_of_dtypes() -> None:
    assert [torch_dtype(name) for name in ("fp64", "fp32", "bf16", "fp16")] == [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
    ]
    assert set(TORCH_DTYPES) == {"fp64", "fp32", "bf16", "fp16"}


@pytest.mark.parametrize(("total_dtype", "addend_dtype"), [*WIDENINGS, *SAME])
def test_add_widened_is_the_sum_in_the_wider_dtype(total_dtype: torch.dtype, addend_dtype: torch.dtype) -> None:
    for numel in (0, 1, 7, SCRATCH_NUMEL - 1, SCRATCH_NUMEL, SCRATCH_NUMEL + 1, 2 * SCRATCH_NUMEL + 3):
        total, addend = torch.randn(numel).to(total_dtype), torch.randn(numel).to(addend_dtype)
        expected = total + addend.to(total_dtype)
        unchanged = addend.clone()
        add_widened(total, addend)
        assert torch.equal(total, expected)
        assert torch.equal(addend, unchanged)


def test_add_widened_writes_into_a_slice_and_nothing_beside_it() -> None:
    buffer = torch.zeros(10)
    add_widened(buffer[2:5], torch.ones(8, dtype=torch.bfloat16)[1:4])
    assert buffer.tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 0]


def test_add_widened_of_fake_tensors_has_the_scratch_of_real_ones() -> None:
    """A simulation's tracker counts it, and sees two ops rather than two for every block."""
    numels = (7, SCRATCH_NUMEL, 64 * SCRATCH_NUMEL)
    peaks: dict[bool, list[int]] = {}
    for is_simulated in (False, True):
        with fake_tensors() if is_simulated else nullcontext():
            pairs = [(torch.zeros(numel), torch.ones(numel, dtype=torch.bfloat16)) for numel in numels]
            for total, addend in pairs:
                tracker = MemoryTracker()
                with tracker.meter():
                    add_widened(total, addend)
                peaks.setdefault(is_simulated, []).append(tracker.snapshot().peak_bytes)
    assert peaks[True] == peaks[False] == [4 * min(numel, SCRATCH_NUMEL) for numel in numels]


def test_add_widened_refuses_other_sizes() -> None:
    with pytest.raises((ValueError, RuntimeError)):
        add_widened(torch.zeros(2 * SCRATCH_NUMEL), torch.ones(SCRATCH_NUMEL, dtype=torch.bfloat16))


def scaler(**changes: Any) -> LossScaler:
    return LossScaler(PrecisionConfig(param="fp16", initial_loss_scale=16.0, loss_scale_window=3, **changes))


def scales(scaler: LossScaler, outcomes: str) -> list[float]:
    """The scale after each step; `x` is an overflow."""
    found = []
    for outcome in outcomes:
        scaler.update(overflowed=outcome == "x")
        found.append(scaler.scale)
    return found


def test_scale_doubles_after_a_window_without_overflow() -> None:
    assert scales(scaler(), ".......") == [16, 16, 16, 32, 32, 32, 64]


def test_scale_halves_at_an_overflow_and_the_window_starts_again() -> None:
    assert scales(scaler(), "..x...") == [16, 16, 8, 8, 8, 8]
    assert scales(scaler(), "..x....") == [16, 16, 8, 8, 8, 8, 16]


def test_scale_has_a_floor() -> None:
    assert scales(scaler(min_loss_scale=3.0), "xxxx") == [8, 4, 3, 3]


def test_only_a_scale_above_the_floor_can_shrink() -> None:
    dynamic = scaler(min_loss_scale=8.0)
    assert dynamic.can_shrink
    dynamic.update(overflowed=True)
    assert not dynamic.can_shrink
    assert not scaler(loss_scale=128.0).can_shrink


def test_scale_is_restored_in_mid_window() -> None:
    first, second = scaler(), scaler()
    scales(first, "x...")
    second.load_state_dict(first.state_dict())
    assert second.scale == first.scale == 8
    assert scales(second, ".x..") == scales(first, ".x..") == [16, 8, 8, 8]


class OfDeepSpeed:
    """The arithmetic of DeepSpeed's `DynamicLossScaler.update_scale`."""

    def __init__(self, scale: float, window: int, least: float, hysteresis: int, consecutive: bool) -> None:
        self.scale, self.window, self.least, self.consecutive = scale, window, least, consecutive
        self.hysteresis = self.left = hysteresis
        self.step, self.last_overflow, self.raises = 0, -1, False

    def update(self, overflowed: bool) -> None:
        self.raises = False
        if overflowed:
            if self.hysteresis == 1 or self.left == 1:
                self.raises = self.scale == self.least
                self.scale = max(self.scale / 2, self.least)
            else:
                self.left -= 1
            self.last_overflow = self.step
        else:
            stable = self.step - self.last_overflow - 1
            grows = stable > 0 and stable % self.window == 0
            if grows or self.consecutive:
                self.left = self.hysteresis
            self.scale *= 2 if grows else 1
        self.step += 1


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize(("hysteresis", "consecutive"), [(1, False), (2, False), (2, True), (4, True)])
def test_scale_goes_as_that_of_deepspeed(window: int, hysteresis: int, consecutive: bool) -> None:
    drawn = random.Random(10 * window + hysteresis)
    options = {"loss_scale_hysteresis": hysteresis, "consecutive_hysteresis": consecutive, "min_loss_scale": 4.0}
    config = PrecisionConfig(param="fp16", initial_loss_scale=16.0, loss_scale_window=window, **options)
    ours, theirs = LossScaler(config), OfDeepSpeed(16.0, window, 4.0, hysteresis, consecutive)
    found = set()
    for share in (1.0, 0.0, 0.6, 0.2):
        for _ in range(40):
            overflowed = drawn.random() < share
            ours.update(overflowed)
            theirs.update(overflowed)
            assert (ours.scale, ours.is_stuck) == (theirs.scale, theirs.raises)
            found.add((ours.scale > 16.0, ours.is_stuck))
            taken_over = LossScaler(config)
            taken_over.load_state_dict(ours.state_dict())
            ours = taken_over if drawn.random() < 0.2 else ours
    assert {(True, False), (False, True)} <= found


def test_a_state_without_a_count_of_overflows_is_taken() -> None:
    old = scaler(loss_scale_hysteresis=2)
    old.load_state_dict({"scale": 8.0, "num_good_steps": 1})
    assert scales(old, "..xx") == [8, 16, 16, 8]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"param": "fp16", "loss_scale": 128.0}, 128.0),
        ({"param": "bf16", "loss_scale": 128.0}, 1.0),
        ({"param": "bf16"}, 1.0),
        ({"param": "fp32"}, 1.0),
    ],
)
def test_fixed_scales_stay(config: dict[str, Any], expected: float) -> None:
    fixed = LossScaler(PrecisionConfig(**config, loss_scale_window=1))
    assert not fixed.is_dynamic
    assert fixed.scale == expected
    assert scales(fixed, ".x.") == [expected] * 3
