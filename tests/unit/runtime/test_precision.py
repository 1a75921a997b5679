"""Sums that lose nothing, casts of nested data, and the loss scaler's rule."""

import random
from collections import UserDict
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.config.resolve import PrecisionConfig
from shardwise.runtime.memory_tracker import MemoryTracker
from shardwise.runtime.precision import (
    SCRATCH_NUMEL,
    TORCH_DTYPES,
    LossScaler,
    add_widened,
    sum_chunks,
    to_device,
    torch_dtype,
)
from shardwise.runtime.torch_private import fake_tensors

CPU = torch.device("cpu")
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


def in_rank_order(rows: list[Tensor], dtype: torch.dtype) -> Tensor:
    total = rows[0].to(dtype)
    for row in rows[1:]:
        total = total + row.to(dtype)
    return total


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize(("total_dtype", "chunk_dtype"), [*WIDENINGS, *SAME])
@pytest.mark.parametrize("accumulate", [False, True])
def test_sum_chunks_sums_in_rank_order(
    num_ranks: int, total_dtype: torch.dtype, chunk_dtype: torch.dtype, accumulate: bool
) -> None:
    # Values of very different size, so that another order of the sum gives other bits.
    chunks = (torch.randn(num_ranks, 33) * 10.0 ** torch.randint(-3, 3, (num_ranks, 33))).to(chunk_dtype)
    total = torch.randn(33).to(total_dtype) if accumulate else torch.full((33,), torch.nan, dtype=total_dtype)
    wide = total_dtype if total_dtype.itemsize >= 4 else torch.float32
    expected = in_rank_order(list(chunks.unbind()), wide)
    expected = (total.to(wide) + expected if accumulate else expected).to(total_dtype)
    sum_chunks(total, chunks, accumulate)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("num_ranks", [9, 257])
def test_sums_run_in_no_less_than_fp32(num_ranks: int) -> None:
    """256 + 1 is 256 in bf16: a sum in bf16 would stay there."""
    chunks = torch.ones(num_ranks, 1, dtype=torch.bfloat16)  # [ranks, elements]
    chunks[0] = 256
    total = torch.full((1,), torch.nan, dtype=torch.bfloat16)
    sum_chunks(total, chunks, accumulate=False)
    assert total.item() == 255 + num_ranks
    sum_chunks(total, chunks, accumulate=True)
    assert total.item() == 2 * (255 + num_ranks)


def test_to_device_casts_what_floats_and_keeps_the_rest() -> None:
    tree: dict[str, Any] = {
        "x": torch.tensor([1.5]),
        "nested": [torch.tensor([2]), (torch.tensor([True]), torch.tensor([0.5], dtype=torch.float64))],
        "text": "a",
        "none": None,
    }
    cast = to_device(tree, CPU, torch.bfloat16)
    assert cast["x"].dtype == cast["nested"][1][1].dtype == torch.bfloat16
    assert cast["nested"][0].dtype == torch.int64
    assert cast["nested"][1][0].dtype == torch.bool
    assert (cast["x"].item(), cast["nested"][1][1].item()) == (1.5, 0.5)
    assert (cast["text"], cast["none"]) == ("a", None)
    assert tree["x"].dtype == torch.float32
    already = torch.ones(2)
    assert to_device(already, CPU, torch.float32) is already


def test_to_device_keeps_dtypes_where_none_is_given() -> None:
    tree = [torch.ones(1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.int32)]
    assert [tensor.dtype for tensor in to_device(tree, CPU)] == [torch.bfloat16, torch.int32]


def test_to_device_takes_any_mapping_as_a_dict() -> None:
    """As the batches of Hugging Face's tokenizers are, also inside other containers."""
    moved = to_device([UserDict(x=torch.ones(1), inner=UserDict(y=torch.ones(1)))], CPU, torch.float16)
    assert moved == [{"x": torch.ones(1), "inner": {"y": torch.ones(1)}}]
    assert type(moved[0]) is type(moved[0]["inner"]) is dict
    assert moved[0]["x"].dtype == moved[0]["inner"]["y"].dtype == torch.float16


def test_to_device_moves_integers_too() -> None:
    cast = to_device((torch.tensor([1]), torch.tensor([1.0])), torch.device("meta"), torch.float16)
    assert [(tensor.device.type, tensor.dtype) for tensor in cast] == [("meta", torch.int64), ("meta", torch.float16)]


def test_to_device_lets_gradients_through() -> None:
    x = torch.ones(2, requires_grad=True)
    to_device([x], CPU, torch.float64)[0].sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


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
