"""A simulated device of so much memory: what fits into it completes, and what needs a byte more dies and says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import Simulation, simulate
from shardwise.models import Decoder, DecoderConfig, lm_loss, num_params
from shardwise.runtime.memory_tracker import Category, MemoryTracker

pytestmark = pytest.mark.begin

# The tracker's limit


def booked(limit_bytes: int | None, num_bytes: int) -> tuple[MemoryTracker, Tensor]:
    tracker, tensor = MemoryTracker(limit_bytes=limit_bytes), torch.empty(num_bytes, dtype=torch.uint8)
    tracker.track(tensor, Category.PARAMETERS)
    return tracker, tensor


def test_a_storage_that_fits_to_the_byte_is_booked_and_one_more_byte_is_not() -> None:
    tracker, kept = booked(1000, 600)
    tracker.track(torch.empty(400, dtype=torch.uint8), Category.OTHER)  # dead at once
    too_much = torch.empty(401, dtype=torch.uint8)
    with pytest.raises(torch.OutOfMemoryError, match=r"^cpu would hold 0\.59 KiB \+ 0\.39 KiB, of 0\.98 KiB$"):
        tracker.track(too_much, Category.OTHER)
    snapshot = tracker.snapshot()
    assert (snapshot.total_bytes, snapshot.peak_bytes) == (600, 1000)
    fits = torch.empty(400, dtype=torch.uint8)
    tracker.track(fits, Category.OTHER)
    assert tracker.snapshot().total_bytes == kept.nbytes + fits.nbytes == 1000


def test_a_storage_that_may_not_grow_stays_as_it_is() -> None:
    tracker, tensor = booked(1000, 600)
    with pytest.raises(torch.OutOfMemoryError):
        tracker.resize(tensor, 1001)
    assert tensor.untyped_storage().nbytes() == tracker.snapshot().total_bytes == 600
    tracker.resize(tensor, 1000)
    tracker.resize(tensor, 0)
    tracker.resize(tensor, 600)
    assert tracker.snapshot().total_bytes == 600


def test_what_moves_to_another_category_or_shrinks_is_never_refused() -> None:
    tracker, tensor = booked(600, 600)
    tracker.track(tensor, Category.GRADIENTS)
    tracker.resize(tensor, 599)
    assert tracker.snapshot().live_bytes[Category.GRADIENTS] == 599


def test_what_ops_make_under_a_meter_counts() -> None:
    tracker, tensor = booked(1000, 600)
    with tracker.meter():
        half = tensor[:300].clone()
        with pytest.raises(torch.OutOfMemoryError):
            tensor[:101].clone()
        del half
        other = tensor[:400].clone()
        with pytest.raises(torch.OutOfMemoryError):
            other.resize_(401)
    assert tracker.snapshot().total_bytes == 600 + 400


def test_without_a_limit_nothing_is_refused() -> None:
    tracker, _ = booked(None, 600)
    with tracker.meter():
        big = torch.empty(2**24, dtype=torch.uint8)
    assert tracker.snapshot().total_bytes == 600 + big.nbytes


# A simulated rank


def small(stage: int = 2, accumulate: str = "fp32", **options: Any) -> Simulation:
    shape = DecoderConfig(
        vocab_size=64,
        num_layers=3,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        ffn_size=96,
        max_seq_len=16,
    )
    config = {"zero": {"stage": stage}, "precision": {"param": "bf16", "accumulate": accumulate}}
    return run(shape, config, world_size=4, **options)


def run(shape: DecoderConfig, config: dict[str, Any], world_size: int = 1, **options: Any) -> Simulation:
    tokens = torch.zeros(1, shape.max_seq_len, dtype=torch.int64)  # [1, S]

    def loss_fn(logits: Tensor, batch: Any) -> Any:
        return lm_loss(logits, batch[1])

    return simulate(
        lambda: Decoder(shape),
        config,
        lambda: (tokens, tokens),
        loss_fn=loss_fn,
        world_size=world_size,
        rank=0,
        **options,
    )


@pytest.mark.quick(1)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_completes_in_its_peak_and_in_no_byte_less(stage: int) -> None:
    free = small(stage)
    peak_gib = free.peak.peak_bytes / 2**30
    capped = small(stage, device_gib=peak_gib)
    assert (capped.at_rest, capped.peak, capped.calls) == (free.at_rest, free.peak, free.calls)
    with pytest.raises(torch.OutOfMemoryError, match=r"^out of memory on rank 0 in step \d: cpu would hold"):
        small(stage, device_gib=peak_gib - 2**-30)


def test_states_that_do_not_fit_are_explained_before_the_first_step() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="out of memory on rank 0 while its engine is made: ") as raised:
        small(device_gib=100_000 / 2**30)
    assert "what it holds:" in str(raised.value)


# One device of 32 GB, without offload


def gpt(num_layers: int, hidden_size: int, num_heads: int) -> DecoderConfig:
    """A depth and width of Brown et al. 2020, table 2.1, in our family: 12 h^2 parameters a layer."""
    return DecoderConfig(
        vocab_size=50_257,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        ffn_size=8 * hidden_size // 3 // 64 * 64,
        max_seq_len=1024,
        tie_embeddings=True,
    )


def train_on_32_gib(shape: DecoderConfig) -> Simulation:
    return run(shape, {"precision": {"param": "bf16"}, "recompute": {"mode": "full"}}, device_gib=32)


@pytest.mark.full
def test_without_offload_1_8_billion_parameters_are_the_most() -> None:
    """At 18 bytes a parameter no more than 1.9 billion can be. ZeRO-Offload's paper (arXiv 2101.06840) found 1.4
    billion for PyTorch's data parallelism on a V100 of 32 GB, which holds more beside the states."""
    largest, smallest_too_large = gpt(34, 2048, 16), gpt(36, 2048, 16)
    peak_bytes = train_on_32_gib(largest).peak.peak_bytes
    print(f"{num_params(largest) / 1e9:.2f} billion parameters complete with a peak of {peak_bytes / 2**30:.1f} GiB")
    assert 18 * num_params(largest) < peak_bytes <= 32 * 2**30
    assert 1.8e9 < num_params(largest) < num_params(smallest_too_large) < 1.95e9
    with pytest.raises(torch.OutOfMemoryError):
        train_on_32_gib(smallest_too_large)


def test_without_offload_2_7_billion_parameters_die_with_the_table() -> None:
    shape = gpt(32, 2560, 32)
    assert 2.6e9 < num_params(shape) < 2.7e9
    with pytest.raises(torch.OutOfMemoryError) as raised:
        train_on_32_gib(shape)
    headline, *lines = str(raised.value).splitlines()
    assert headline.startswith("out of memory on rank 0 ")
    assert headline.partition("of 32.0 GiB")[1]
    assert lines[0] == "what it holds:"
    held = {words[0]: float(words[1]) for words in map(str.split, lines[1:]) if words[-1].endswith("%")}
    assert held["total"] <= 32
    assert held["parameters"] == pytest.approx(2 * num_params(shape) / 2**30, rel=1e-3)
