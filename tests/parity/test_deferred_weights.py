"""Models that no rank holds whole train from the weights that plain construction gives, in every layout."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.live_bytes import LiveBytes
from harness.models import Transformer
from harness.pool import RankError, WorkerPool
from harness.reference import PARITY, max_error
from harness.training import make_config
from shardwise import init, initialize
from shardwise.models.decoder import Decoder, lm_loss
from shardwise.models.presets import DecoderConfig
from shardwise.runtime.keyed_rng import init_parameters
from shardwise.runtime.memory_tracker import trim_host_memory

SHAPE = DecoderConfig(
    vocab_size=37, num_layers=3, hidden_size=24, num_heads=4, num_kv_heads=2, head_dim=6, ffn_size=40, max_seq_len=16
)
RUN_SEED = 5


def make_transformer() -> nn.Module:
    return Transformer(tied=True).double()


def plain(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make_transformer()


def deferred(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    with init():
        return make_transformer()


def keyed(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    with init(seed=7):
        return Decoder(SHAPE, dtype=torch.float64)


def meta(seed: int) -> nn.Module:
    return Decoder(SHAPE, device="meta", dtype=torch.float64)


KINDS: dict[str, Callable[[int], nn.Module]] = {"deferred": deferred, "keyed": keyed, "meta": meta}
LAYOUTS = ((1, 0), (2, 0), (2, 1), (2, 2), (2, 3), (4, 3))  # ranks and stage


def wide(hidden_size: int, num_layers: int) -> nn.Module:
    """A model whose modules draw their parameters themselves, as a seed needs."""
    sizes = {"hidden_size": hidden_size, "num_layers": num_layers, "head_dim": hidden_size // 4}
    return Decoder(dataclasses.replace(SHAPE, **sizes, num_kv_heads=4, ffn_size=4 * hidden_size))


def loss_of(output: Tensor, tokens: Tensor) -> tuple[Tensor, Any]:
    return lm_loss(output, tokens)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def start_and_step(rank: int, world_size: int, kind: str, stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gathered weights before and after one step on a batch that all ranks share."""
    model = KINDS[kind](rank)  # other ranks' generators are elsewhere: rank 0's values are everybody's
    config = make_config(1, {"zero": {"stage": stage}, "run": {"seed": RUN_SEED, "device": "cpu"}})
    engine = initialize(model, config, loss_fn=loss_of)
    with engine.gathered():
        before = weights(model)
    engine.train_step([torch.randint(37, (2, 11), generator=torch.Generator().manual_seed(0))])
    engine.close()
    if any(parameter.is_meta or vars(parameter) for parameter in model.parameters()):
        raise ValueError("a parameter is not a plain one again")
    return before, weights(model)


def expected_weights(kind: str) -> dict[str, Tensor]:
    if kind == "meta":
        model = Decoder(SHAPE, dtype=torch.float64)
        init_parameters(model, RUN_SEED)
        return weights(model)
    return weights(plain(0))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_the_same_in_every_layout(ranks: WorkerPool, kind: str) -> None:
    results = {
        (num_ranks, stage, rank): result
        for num_ranks, stage in LAYOUTS
        for rank, result in enumerate(ranks(num_ranks).run(start_and_step, kind, stage))
    }
    first_before, first_after = results[1, 0, 0]
    if kind != "keyed":
        expected = expected_weights(kind)
        assert first_before.keys() == expected.keys()
        assert all(torch.equal(values, expected[name]) for name, values in first_before.items())
    for before, after in results.values():
        assert all(torch.equal(values, before[name]) for name, values in first_before.items())
        assert max_error(after, first_after) <= PARITY
    assert max_error(first_before, first_after) > 1e-4


def measure_peak(rank: int, world_size: int, kind: str) -> dict[str, int]:
    """Bytes while the model is built and initialized at stage 3."""
    torch.manual_seed(rank)
    config = make_config(1, {"zero": {"stage": 3}, "precision": {"param": "bf16"}})
    with LiveBytes() as live:
        with init(seed=7 if kind == "keyed" else None):
            model = wide(hidden_size=64, num_layers=8)
        built_bytes = live.live_bytes()
        build_peak_bytes = live.peak_bytes()
        live.reset_peak()
        engine = initialize(model, config, loss_fn=loss_of)
    groups = engine.layout.groups
    sizes = [place.numel for group in groups for place in group.params]
    return {
        "built": built_bytes,
        "build_peak": build_peak_bytes,
        "peak": live.peak_bytes(),
        "at_rest": (2 + 4) * sum(group.shard_numel for group in groups),
        "group": 2 * max(group.padded_numel for group in groups),
        "largest": 4 * max(sizes),
        "whole": 4 * sum(sizes),
    }


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("kind", ["deferred", "keyed"])
def test_no_rank_holds_the_model(ranks: WorkerPool, kind: str, num_ranks: int) -> None:
    """At most this rank's shards (bf16, and their fp32 masters) and, of more, one group in bf16 or one parameter."""
    for measured in ranks(num_ranks).run(measure_peak, kind):
        recipes = measured["built"]
        assert measured["build_peak"] <= recipes + 2 * measured["largest"]
        assert measured["peak"] <= recipes + measured["at_rest"] + max(measured["group"], measured["largest"])
        assert measured["at_rest"] + max(measured["group"], measured["largest"]) < measured["whole"]


def measure_resident(rank: int, world_size: int) -> dict[str, int]:
    """By how much the process grows at most, as the system sees it, and what the layout stores here."""
    config = make_config(1, {"zero": {"stage": 3}, "precision": {"param": "bf16"}})
    trim_host_memory()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before_kib = resident_peak_kib()
    with init(seed=7):
        model = wide(hidden_size=512, num_layers=12)
    engine = initialize(model, config, loss_fn=loss_of)
    groups = engine.layout.groups
    return {
        "grown": 1024 * (resident_peak_kib() - before_kib),
        "at_rest": (2 + 4) * sum(group.shard_numel for group in groups),
        "group": 2 * max(group.padded_numel for group in groups),
        "whole": 4 * sum(group.numel for group in groups),
    }


def resident_peak_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_grows_by_its_shards_and_a_group(ranks: WorkerPool) -> None:
    """A megabyte or two for each parameter in flight, the collectives' threads and the objects of modules."""
    for measured in ranks(2).run(measure_resident):
        assert measured["grown"] <= measured["at_rest"] + measured["group"] + 24 * 2**20
        assert measured["grown"] <= measured["whole"]


def start_without_values(rank: int, world_size: int) -> None:
    initialize(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to("meta"), make_config(1, {}))


def test_a_model_without_values_is_refused_on_every_rank(ranks: WorkerPool) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(start_without_values)
    assert caught.value.code == "buffer-on-meta"
    assert "1.running_mean" in str(caught.value)
