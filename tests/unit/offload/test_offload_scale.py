"""What fits where with offload: the real engine's step under fake tensors, on devices of 32 GB.

Run with `-s` to see the bytes of each memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise import Simulation, simulate
from shardwise.config.resolve import Tier
from shardwise.models import Decoder, DecoderConfig, lm_loss, num_params, preset
from shardwise.runtime.format import format_bytes
from shardwise.runtime.memory_tracker import Category

pytestmark = pytest.mark.begin

SEQ_LEN = 1024
DEVICE_GIB = 32
HOST = {"grads": "host", "optimizer": "host"}


def train(shape: DecoderConfig, stage: int, world_size: int = 1, **sections: Any) -> Simulation:
    """Two steps of one sequence a rank in bf16, with every block recomputed, within the device's memory."""
    tokens = torch.zeros(1, SEQ_LEN, dtype=torch.int64)  # [B, S]
    config = {"zero": {"stage": stage}, "precision": {"param": "bf16"}, "recompute": {"mode": "full"}, **sections}

    def loss_fn(logits: Tensor, batch: Any) -> Any:
        return lm_loss(logits, batch[1])

    return simulate(
        lambda: Decoder(shape),
        config,
        lambda: (tokens, tokens),
        loss_fn=loss_fn,
        rank=world_size - 1,
        world_size=world_size,
        device_gib=DEVICE_GIB,
    )


def show(title: str, simulation: Simulation, by_tier: dict[Tier, dict[str, int]]) -> None:
    peak = format_bytes(simulation.peak.peak_bytes)
    print(f"\n{title}: the device holds {peak} of {DEVICE_GIB} GiB at its peak; at rest a rank has")
    for tier, totals in by_tier.items():
        print(f"  {tier:<8}", *(f"{role} {format_bytes(num_bytes):>12}" for role, num_bytes in totals.items()))


def by_role(live_bytes: Any) -> dict[str, int]:
    roles = {"param": Category.PARAMETERS, "grad": Category.GRADIENTS, "optimizer": Category.OPTIMIZER}
    return {role: live_bytes[category] for role, category in roles.items()}


@pytest.mark.full
def test_13_billion_parameters_do_not_fit_without_offload() -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"of 32\.00 GiB"):
        train(preset("llama-13b"), stage=2)
    with pytest.raises(torch.OutOfMemoryError):
        train(preset("llama-13b"), stage=2, tiers={"optimizer": "host"})  # whole gradients are 52 GB


@pytest.mark.full
@pytest.mark.parametrize(("stage", "tiers"), [(2, HOST), (3, {**HOST, "params": "host"})])
def test_13_billion_parameters_train_on_one_device_and_its_host(stage: int, tiers: dict[str, str]) -> None:
    """ZeRO-Offload's headline (Ren et al. 2021, arXiv 2101.06840): 13 billion on one V100 of 32 GB."""
    shape = preset("llama-13b")
    simulation = train(shape, stage, tiers=tiers)
    by_tier = simulation.layout.bytes_by_tier()
    show(f"{num_params(shape) / 1e9:.1f} billion parameters, tiers {tiers}", simulation, by_tier)
    assert num_params(shape) > 13e9
    nothing = {"param": 0, "grad": 0, "optimizer": 0}
    assert simulation.states_bytes == by_tier.get("device", nothing)
    assert by_role(simulation.host_at_rest.live_bytes) == by_tier["host"]
    assert simulation.moved_bytes == simulation.layout.bytes_across(1)
    assert simulation.peak.peak_bytes <= DEVICE_GIB * 2**30


# ZeRO-Infinity's own (Rajbhandari et al. 2021, arXiv 2104.07857): one DGX-2 of 16 V100, 4-way tensor slicing.
TRILLION = DecoderConfig(
    vocab_size=50_257,
    num_layers=128,
    hidden_size=25_600,
    num_heads=160,
    num_kv_heads=160,
    head_dim=160,
    ffn_size=68_224,
    max_seq_len=SEQ_LEN,
)


@pytest.mark.full
def test_a_trillion_parameters_train_on_16_devices_and_nvme() -> None:
    """NCCL's collectives, and blocks gathered and reduced ahead: with `zero.overlap=false` 8 GiB less would do."""
    away = {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "nvme_path": "swap", "activations": "host"}
    mesh, run = {"tp": 4}, {"device": "cuda"}
    simulation = train(TRILLION, 3, world_size=16, mesh=mesh, run=run, tiers=away)
    layout = simulation.layout
    by_tier = layout.bytes_by_tier(shard=3)
    show(f"{num_params(TRILLION) / 1e12:.3f} trillion parameters over 16 ranks", simulation, by_tier)
    assert num_params(TRILLION) > 1e12
    # No state is stored on the device, and in host memory there are buffers of what was on its way to the disk.
    assert by_tier.keys() == {"nvme"}
    assert set(simulation.states_bytes.values()) == set(by_role(simulation.host_at_rest.live_bytes).values()) == {0}
    assert sum(by_tier["nvme"].values()) == pytest.approx(18 * num_params(TRILLION) / 16, rel=1e-3)
    # A block's input is [1, S, h] in bf16; the last block's stays.
    input_bytes = (TRILLION.num_layers - 1) * SEQ_LEN * TRILLION.hidden_size * 2
    across = layout.bytes_across(1)
    for way in (("device", "host"), ("host", "device")):
        assert simulation.moved_bytes[way] == across[way] + input_bytes
    # The disk moves whole blocks; and what the last step left in memory is not read again.
    written, read = simulation.moved_bytes["host", "nvme"], simulation.moved_bytes["nvme", "host"]
    assert across["host", "nvme"] <= written < across["host", "nvme"] * (1 + 1e-5)
    assert across["nvme", "host"] * (1 - 1e-3) < read < across["nvme", "host"] * (1 + 1e-5)
