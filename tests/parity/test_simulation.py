"""A simulated rank is a real one, byte for byte and call for call; and it costs seconds, whatever the world's size."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.combinations import cover
from harness.models import CASES, make_batches
from harness.pool import WorkerPool
from harness.refusals import refused
from harness.simulated import Measured, measure_steps, simulated
from harness.training import make_config
from shardwise import Simulation, initialize, simulate
from shardwise.models import Decoder, DecoderConfig, lm_loss
from shardwise.runtime.memory_tracker import Category, MemoryTracker

NUM_MEASURED_STEPS = 2

# The script says what it measured of itself, in a process of its own.
LARGE = """
import json, resource, time
import torch
from shardwise import simulate
from shardwise.models import Decoder, DecoderConfig, lm_loss, num_params

torch.set_num_threads(1)
shape = DecoderConfig(vocab_size=32_000, num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=64, head_dim=128,
                      ffn_size=22_528, max_seq_len=4096)
config = {"zero": {"stage": 3}, "precision": {"param": "bf16"}, "recompute": {"mode": "full"}}
tokens = torch.zeros(1, 4096, dtype=torch.int64)
simulation = simulate(lambda: Decoder(shape), config, lambda: (tokens, tokens), rank=17, world_size=4096,
                      loss_fn=lambda logits, batch: lm_loss(logits, batch[1]))
cpu_s = time.process_time()
total = 0
for number in range(10**7):
    total += number
print(json.dumps({
    "num_params": num_params(shape),
    "states": simulation.states_bytes,
    "layout_states": simulation.layout.bytes_at_rest(17),
    "gathered_bytes": 2 * max(group.padded_numel for group in simulation.layout.groups),
    "peak": simulation.peak.peak_live_bytes,
    "num_calls": len(simulation.calls),
    "wire": {op: num_bytes for (axis, op), num_bytes in simulation.wire_bytes.items()},
    "layout_wire": simulation.layout.bytes_on_wire(1),
    "cpu_s": cpu_s,
    "loop_s": time.process_time() - cpu_s,
    "rss_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
}))
"""


@pytest.mark.full
def test_a_rank_of_4096_with_66_billion_parameters() -> None:
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=True, timeout=500)
    found = json.loads(done.stdout)
    print(found)
    assert 66e9 < found["num_params"] < 67e9
    assert found["states"] == found["layout_states"]
    wire, layout_wire = found["wire"], found["layout_wire"]
    assert (wire["all_gather"], wire["reduce_scatter"]) == (layout_wire["all_gather"], layout_wire["reduce_scatter"])
    # Each of 80 blocks twice but for the last, the root once; each reduced; the step's scalars.
    assert found["num_calls"] == (2 * 80 - 1 + 1) + 81 + 1
    # The block at work, the next one ahead, and the root.
    assert found["peak"]["gathered"] <= 3 * found["gathered_bytes"]
    # 80 inputs of blocks, [1, 4096, 8192] in bf16, are what recomputation keeps.
    assert found["peak"]["activations"] > 80 * 4096 * 8192 * 2
    # It costs what was promised: as many additions of Python's, however fast the machine; about 20 of these loops.
    assert found["rss_bytes"] <= 2 * 2**30
    assert found["cpu_s"] <= 80 * found["loop_s"]


def measure(rank: int, world_size: int, case_name: str, num_micro_batches: int, overrides: dict[str, Any]) -> Measured:
    case = CASES[case_name]
    num_steps = 1 + NUM_MEASURED_STEPS
    batches = make_batches(case, num_steps=num_steps, world_size=world_size, num_micro_batches=num_micro_batches)
    engine = initialize(case.build(torch.float32), make_config(num_micro_batches, overrides), loss_fn=case.loss)
    return measure_steps(engine, [step[rank] for step in batches])


def simulate_case(
    case_name: str, num_micro_batches: int, overrides: dict[str, Any], rank: int, world_size: int, **options: Any
) -> Simulation:
    case = CASES[case_name]
    (batch,) = make_batches(case, num_steps=1, world_size=1, num_micro_batches=1)[0][0]
    config = make_config(num_micro_batches, overrides)
    return simulate(
        case.build(torch.float32),
        config,
        lambda: batch,
        loss_fn=case.loss,
        rank=rank,
        world_size=world_size,
        **options,
    )


@pytest.mark.parametrize(
    "options",
    cover(
        {
            "mesh": [(1, 2), (1, 4), (2, 2)],
            "stage": [0, 1, 2, 3],
            "accumulation": [1, 2],
            "recompute": ["none", "full"],
            "precision": ["fp32", "bf16"],
        }
    ),
)
def test_simulated_ranks_are_real_ones(ranks: WorkerPool, options: dict[str, Any]) -> None:
    num_replicas, num_shards = options["mesh"]
    world_size = num_replicas * num_shards
    overrides = {
        "zero": {"stage": options["stage"]},
        "mesh": {"dp_shard": num_shards},
        "recompute": {"mode": options["recompute"]},
        "precision": {"param": options["precision"]},
    }
    arguments = "transformer", options["accumulation"], overrides
    for rank, real in enumerate(ranks(world_size).run(measure, *arguments)):
        assert simulated(simulate_case(*arguments, rank, world_size)) == real


@pytest.mark.parametrize(
    ("case_name", "overrides"),
    [
        ("odd-shapes", {"zero": {"stage": 3, "overlap": False}}),
        ("transformer", {"zero": {"stage": 3, "keep_whole_below": 100}}),
        ("frozen-parameters", {"zero": {"stage": 3}}),
        ("frozen-parameters", {"zero": {"stage": 3, "lockstep": True, "replicate_frozen": True}}),
        ("unused-parameters", {"zero": {"stage": 2}, "precision": {"param": "fp16", "loss_scale": 1.0}}),
        ("unused-parameters", {"zero": {"stage": 3, "lockstep": True}}),
        ("reused-blocks", {"zero": {"stage": 3}, "optimizer": {"name": "sgd"}}),
        ("pytree-output", {"zero": {"stage": 1}, "optimizer": {"name": "adagrad"}}),
    ],
)
def test_simulated_ranks_are_real_ones_of_odd_models(
    ranks: WorkerPool, case_name: str, overrides: dict[str, Any]
) -> None:
    for rank, real in enumerate(ranks(2).run(measure, case_name, 2, overrides)):
        assert simulated(simulate_case(case_name, 2, overrides, rank, 2)) == real


@pytest.mark.parametrize(
    ("case_name", "stage", "tiers", "states"),
    [
        ("transformer", 2, {"grads": "host", "optimizer": "host"}, "master"),
        ("odd-shapes", 3, {"params": "host", "optimizer": "host"}, "master"),
        ("transformer", 3, {"params": "host", "grads": "host", "optimizer": "host", "grads_on_device": 0.5}, "master"),
        ("wide", 3, {"params": "host", "optimizer": "host", "optimizer_on_device": 0.5}, "int8"),
        ("wide", 2, {}, "int8"),
    ],
)
def test_simulated_ranks_hold_as_much_of_the_device_as_real_ones_where_states_are_stored_elsewhere(
    ranks: WorkerPool, case_name: str, stage: int, tiers: dict[str, Any], states: str
) -> None:
    """But for the numbers of their collectives: at its start a real engine also speaks of the memory of its host."""
    arguments = case_name, 2, {"zero": {"stage": stage}, "tiers": tiers, "precision": {"states": states}}
    for rank, real in enumerate(ranks(2).run(measure, *arguments)):
        found = simulated(simulate_case(*arguments, rank, 2))
        assert unnumbered(found) == unnumbered(real)


def unnumbered(measured: Measured) -> Measured:
    return replace(measured, calls=tuple(call._replace(number=0, position=0) for call in measured.calls))


def test_ranks_differ_by_padding_only() -> None:
    """Adam keeps no moments of padding, which is in the last shards; all else is the same on every rank."""
    overrides = {"zero": {"stage": 3}, "precision": {"param": "bf16"}}
    first, *others = (simulate_case("odd-shapes", 1, overrides, rank, 4) for rank in range(4))
    assert first.layout.padding_numel > 0
    numel = first.layout.numel
    optimizer_bytes = 0
    for rank, each in enumerate((first, *others)):
        assert each.states_bytes == first.layout.bytes_at_rest(rank)
        assert (each.calls, each.wire_bytes) == (first.calls, first.wire_bytes)
        differing = {
            category
            for category, size in first.peak.peak_live_bytes.items()
            if each.peak.peak_live_bytes[category] != size
        }
        assert differing <= {Category.OPTIMIZER}
        optimizer_bytes += each.states_bytes["optimizer"]
    assert optimizer_bytes == 8 * numel + 4 * (numel + first.layout.padding_numel)


def decoder(device: str) -> Decoder:
    shape = DecoderConfig(
        vocab_size=64,
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        ffn_size=96,
        max_seq_len=16,
    )
    return Decoder(shape, device=device)


def simulate_decoder(model: Any, world_size: int = 4, rank: int = 1, **options: Any) -> Simulation:
    config = {"zero": {"stage": 3}, "precision": {"param": "bf16"}, "batch": {"accumulation": 2}}
    tokens = torch.zeros(2, 16, dtype=torch.int64)

    def loss_fn(logits: Tensor, batch: Any) -> Any:
        return lm_loss(logits, batch[1])

    return simulate(
        model, config, lambda: (tokens, tokens), rank=rank, world_size=world_size, loss_fn=loss_fn, **options
    )


def test_a_model_may_be_made_or_given_and_stays_as_it_is() -> None:
    made = simulate_decoder(lambda: decoder("meta").to(torch.bfloat16))
    for model in (decoder("meta"), decoder("cpu")):
        before = {name: id(parameter) for name, parameter in model.named_parameters()}
        given = simulate_decoder(model)
        assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        assert simulated(given) == simulated(made)
    assert not model.blocks[0]._forward_hooks
    model(torch.zeros(1, 4, dtype=torch.int64))  # no engine has it


def test_the_cost_does_not_grow_with_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    num_seen = []
    observe = MemoryTracker.observe
    monkeypatch.setattr(MemoryTracker, "observe", lambda *arguments: (num_seen.append(1), observe(*arguments))[1])
    counts = []
    for world_size in (128, 4096):
        simulate_decoder(lambda: decoder("meta"), world_size=world_size)
        counts.append(len(num_seen))
        num_seen.clear()
    assert 0 < counts[1] <= counts[0]  # fewer where the shard holds fewer parameters


def test_nccl_receives_nothing_beside_what_it_sums() -> None:
    """With fp32 on the wire its reduce-scatter is native; gloo takes a buffer as large as the bucket."""
    gloo, nccl = (
        simulate(
            lambda: nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)]),
            {"zero": {"stage": 3}, "precision": {"param": "fp32"}, "run": {"device": device}},
            lambda: torch.zeros(1, 256),
            loss_fn=lambda output, batch: output.sum(),
            rank=0,
            world_size=64,
        )
        for device in ("cpu", "cuda")
    )
    assert nccl.calls == gloo.calls
    # Two reductions may be under way: of each the bucket, and on gloo what is received.
    layer_bytes = 4 * 256 * 256
    assert gloo.peak.peak_live_bytes[Category.BUCKETS] == 4 * layer_bytes
    assert nccl.peak.peak_live_bytes[Category.BUCKETS] <= 2 * layer_bytes + 2 * layer_bytes // 64


class Branching(nn.Module):
    def __init__(self, reads: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.reads == "number":
            return y if y.sum() > 0 else -y
        return y[y > 0]


@pytest.mark.parametrize("reads", ["number", "shape"])
def test_a_model_that_decides_on_values_is_refused(reads: str) -> None:
    with refused("simulated-values-read") as caught:
        simulate(Branching(reads), {}, lambda: torch.ones(2, 4), loss_fn=lambda y, _: y.sum(), rank=0, world_size=2)
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_is_refused() -> None:
    with refused("rank-out-of-range", "rank 4", "0 to 3"):
        simulate_decoder(decoder("meta"), rank=4)
    with refused("world-size-range", "size 0"):
        simulate_decoder(decoder("meta"), world_size=0)
