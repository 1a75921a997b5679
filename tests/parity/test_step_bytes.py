"""Collectives and bytes of a step split over the tp axis, by formula: counted by the engine's records and by watching.

For t ranks, r = (t - 1) / t and U the bytes of a micro-batch's hidden states, a layer sends, as a ring would,

| | TP | with sequence parallelism |
|---|---|---|
| no recomputation, or selective | 4 all-reduces: 8 r U | 6 all-gathers and 4 reduce-scatters: 10 r U |
| full | 6 all-reduces: 12 r U | 6 all-gathers and 6 reduce-scatters: 12 r U |

(Korthikanti et al. 2022, section 4.2.2, whose 8 r U leave out the two all-gathers for the weights' gradients). What
stands around the layers: the embedding's sum forward and the head's backward, 4 r U; with sequence parallelism an
all-gather after the stack and one before it in the backward, 2 r U; the cross entropy's all-gather of two numbers a
token and rank. Once a step: the sum of the gradients of which each rank has a part, and the step's own numbers.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.combinations import cover
from harness.live_bytes import LiveBytes, settled_bytes, storage_bytes
from harness.pool import WorkerPool
from harness.training import make_config
from harness.wire_bytes import Call as WireCall
from harness.wire_bytes import WireBytes, ring_equivalent_bytes
from shardwise import Layout, initialize
from shardwise.comm.records import Collective
from shardwise.layout.zero_stages import Placement
from shardwise.models import Decoder, DecoderConfig, lm_loss, num_params

pytestmark = pytest.mark.begin

MICRO_SIZE, LENGTH = 2, 16
VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEATURES = 37, 48, 4, 2, 8, 40
DTYPE_BYTES = {"bf16": 2, "fp32": 4}
GRAD_BYTES = 4
LOSS_SUM_BYTES = 16
# Calls of a layer, forward and backward together: all-reduces; with sequence parallelism all-gathers, reduce-scatters.
ALL_REDUCES = {"none": 4, "selective": 4, "full": 6}
GATHERS = {"none": 6, "selective": 6, "full": 6}
SCATTERS = {"none": 4, "selective": 4, "full": 6}


@dataclass(frozen=True)
class Measured:
    """What one rank held and sent in its second step, in bytes."""

    layout: Layout
    shard: int
    at_rest_bytes: int
    tracked_bytes: int
    scalar_bytes: int
    calls: tuple[Collective, ...]
    wire: tuple[WireCall, ...]

    def over(self, axis: str) -> tuple[Collective, ...]:
        """Collectives of the records, the step's numbers excepted."""
        return tuple(call for call in self.calls if call.axis == axis and call.op != "all_reduce_scalars")

    def wire_over(self, num_apart: int) -> Fraction:
        """Bytes sent to ranks whose neighbours in the group are so many ranks apart: tp is the last axis."""
        return ring_equivalent_bytes(call for call in self.wire if call.ranks[1] - call.ranks[0] == num_apart)


def shape(num_layers: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=VOCAB,
        num_layers=num_layers,
        hidden_size=HIDDEN,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        ffn_size=FEATURES,
        max_seq_len=LENGTH,
    )


def loss_of(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return lm_loss(logits, batch[1])


def measure(rank: int, world_size: int, num_layers: int, overrides: dict[str, Any]) -> Measured:
    """One micro-batch a step. Values play no part."""
    tokens = torch.randint(VOCAB, (MICRO_SIZE, LENGTH))
    config = make_config(1, overrides)
    with LiveBytes() as live:
        live.mark([tokens])
        engine = initialize(Decoder(shape(num_layers)), config, loss_fn=loss_of)
        engine.train_step([(tokens, tokens)])
        engine.comm.comm_log.recent = deque()
        with WireBytes() as wire:
            engine.backward(engine((tokens, tokens)))
            at_rest_bytes = settled_bytes(live) - tokens.nbytes
            tracked_bytes = sum(engine.memory.snapshot().live_bytes.values())
            states = [value for state in engine.optimizer.state.values() for value in state.values()]
            scalar_bytes = storage_bytes(value for value in states if value.dim() == 0) + LOSS_SUM_BYTES
            engine.step()
        calls, shard = tuple(engine.comm.comm_log.recent), engine.parts.comms.shards.rank
        engine.close()
    return Measured(engine.layout, shard, at_rest_bytes, tracked_bytes, scalar_bytes, calls, tuple(wire.calls))


def overrides_of(tp: int, is_sequence: bool, mode: str = "none", precision: str = "fp32", stage: int = 0) -> dict:
    return {
        "mesh": {"tp": tp},
        "tensor": {"sequence_parallel": is_sequence},
        "recompute": {"mode": mode},
        "precision": {"param": precision},
        "zero": {"stage": stage},
    }


def shared_numels(num_layers: int, tp: int, is_sequence: bool) -> dict[int, int]:
    """By number of sharers, the elements of the table in which gradients that are parts of a sum are summed."""
    norms = {tp: (2 * num_layers + 1) * HIDDEN} if is_sequence else {}
    heads = {tp // KV_HEADS: KV_HEADS * num_layers * 2 * HEAD_DIM * HIDDEN} if tp > KV_HEADS else {}
    return norms | heads


def shared_bytes(num_layers: int, tp: int, is_sequence: bool) -> Fraction:
    """That a tensor-parallel rank sends for it, once a step, over all that hold its shards."""
    return 2 * Fraction(tp - 1, tp) * GRAD_BYTES * sum(shared_numels(num_layers, tp, is_sequence).values())


def activation_wire_bytes(num_layers: int, tp: int, is_sequence: bool, mode: str, element_bytes: int) -> Fraction:
    """That a rank sends over the tp axis in the forward and backward of a micro-batch: the table above."""
    units = num_layers * 2 * ALL_REDUCES[mode] + 4
    if is_sequence:
        units = num_layers * (GATHERS[mode] + SCATTERS[mode]) + 4 + 2
    tokens = MICRO_SIZE * LENGTH
    return Fraction(tp - 1, tp) * (units * tokens * HIDDEN * element_bytes + tp * 2 * tokens * 4)


def step_scalar_bytes(num_layers: int, num_ranks: int) -> Fraction:
    """Of one all-reduce: loss, count, norm, how far the losses of a group differ, who was asked to stop (two numbers),
    and for each parameter whether it was used."""
    return 2 * Fraction(num_ranks - 1, num_ranks) * 8 * (6 + 9 * num_layers + 3)


@dataclass(frozen=True)
class Counted:
    """What one rank sent in its second step."""

    calls: tuple[Collective, ...]
    wire: tuple[WireCall, ...]


def count(rank: int, world_size: int, is_sequence: bool) -> dict[tuple[str, str, int], Counted]:
    """By recomputation, precision and layers."""
    tokens = torch.randint(VOCAB, (MICRO_SIZE, LENGTH))
    found = {}
    for mode, precision, num_layers in [*product(ALL_REDUCES, ["fp32"], [2, 3]), ("none", "bf16", 2)]:
        config = make_config(1, overrides_of(world_size, is_sequence, mode, precision))
        with initialize(Decoder(shape(num_layers)), config, loss_fn=loss_of) as engine:
            engine.train_step([(tokens, tokens)])
            engine.comm.comm_log.recent = deque()
            with WireBytes() as wire:
                engine.train_step([(tokens, tokens)])
            found[mode, precision, num_layers] = Counted(tuple(engine.comm.comm_log.recent), tuple(wire.calls))
    return found


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("is_sequence", [False, True])
def test_collectives_and_bytes_of_a_step(ranks: WorkerPool, tp: int, is_sequence: bool) -> None:
    """Those of a layer are the difference that a third one makes; what is left stands around the layers."""
    for found in ranks(tp).run(count, is_sequence):
        for mode in ALL_REDUCES:
            check_calls(found[mode, "fp32", 2], found[mode, "fp32", 3], tp, is_sequence, mode)
        for (mode, precision, num_layers), counted in found.items():
            expected = activation_wire_bytes(num_layers, tp, is_sequence, mode, DTYPE_BYTES[precision])
            expected += shared_bytes(num_layers, tp, is_sequence) + step_scalar_bytes(num_layers, tp)
            assert ring_equivalent_bytes(counted.wire) == expected
            assert sum(call.wire_bytes for call in counted.calls) == expected


def check_calls(two: Counted, three: Counted, tp: int, is_sequence: bool, mode: str) -> None:
    """Of models of two and of three layers."""
    layer = {"all_reduce": ALL_REDUCES[mode]}
    if is_sequence:
        layer = {"all_gather": GATHERS[mode], "reduce_scatter": SCATTERS[mode]}
    # The embedding's and the head's, and those of shared gradients; the stack's two and the cross entropy's.
    ends = {"all_reduce": 2 + len(shared_numels(2, tp, is_sequence)), "all_gather": 3 if is_sequence else 1}
    counts = [Counter(call.op for call in each.calls) for each in (two, three)]
    assert counts[1] - counts[0] == layer
    assert counts[0] - twice(layer) == {**ends, "all_reduce_scalars": 1}
    watched = [Counter(call.name for call in each.wire) for each in (two, three)]
    assert watched[1] - watched[0] == as_watched(layer, tp)
    assert watched[0] - twice(as_watched(layer, tp)) == as_watched(ends, tp, num_scalars=1)


def twice(calls: dict[str, int]) -> Counter[str]:
    return Counter({op: 2 * num for op, num in calls.items()})


def as_watched(calls: dict[str, int], tp: int, num_scalars: int = 0) -> dict[str, int]:
    """On gloo all-gathers are sends and receives, and so are the sums of two ranks; of more, reduce-scatters are
    all-to-alls. The step's scalars are one all-reduce in any case."""
    is_pair = tp == 2
    sums = calls.get("all_reduce", 0), calls.get("reduce_scatter", 0)
    found = {"allreduce_": num_scalars + (not is_pair) * sums[0], "alltoall_base_": (not is_pair) * sums[1]}
    found["send"] = found["recv_"] = (tp - 1) * calls.get("all_gather", 0) + is_pair * sum(sums)
    return {name: num for name, num in found.items() if num}


MESHES = [(2, 1), (2, 2), (4, 1)]  # tp, data ranks


@pytest.mark.parametrize(
    "options",
    cover(
        {
            "mesh": MESHES,
            "stage": [0, 1, 2, 3],
            "precision": ["bf16", "fp32"],
            "is_sequence": [False, True],
        }
    ),
)
def test_bytes_under_zero(ranks: WorkerPool, options: dict[str, Any]) -> None:
    (tp, dp), precision, is_sequence, num_layers = options["mesh"], options["precision"], options["is_sequence"], 2
    overrides = overrides_of(tp, is_sequence, "none", precision, options["stage"])
    found = ranks(tp * dp).run(measure, num_layers, overrides)
    for measured in found:
        layout = measured.layout
        assert measured.at_rest_bytes - measured.scalar_bytes == sum(layout.bytes_at_rest(measured.shard).values())
        assert measured.tracked_bytes == measured.at_rest_bytes - LOSS_SUM_BYTES
        assert measured.wire_over(tp) == sum(layout.bytes_on_wire(1).values())
        assert sum(call.wire_bytes for call in measured.over("dp_shard")) == sum(layout.bytes_on_wire(1).values())
        at_work = activation_wire_bytes(num_layers, tp, is_sequence, "none", DTYPE_BYTES[precision])
        sharing = sum(call.wire_bytes for call in measured.over("tp") if call.name.startswith("gradients that"))
        scalars = step_scalar_bytes(num_layers, tp * dp)
        assert measured.wire_over(1) == at_work + sharing + scalars
        assert sum(call.wire_bytes for call in measured.over("tp")) == at_work + sharing
    check_sums(found, num_layers, tp, dp, is_sequence, precision)


def check_sums(found: list[Measured], num_layers: int, tp: int, dp: int, is_sequence: bool, precision: str) -> None:
    """Over all ranks the states are the model's, its padding, and what is held more than once."""
    layout = found[0].layout
    stage = layout.stage
    vocab_padding = 2 * (-VOCAB % tp) * HIDDEN
    replicated = (tp - 1) * (2 * num_layers + 1) * HIDDEN
    num_sharers = max(1, tp // KV_HEADS)
    shared_heads = (num_sharers - 1) * num_layers * 2 * KV_HEADS * HEAD_DIM * HIDDEN
    numel = num_params(shape(num_layers)) + vocab_padding + replicated + shared_heads
    padded = numel + tp * layout.padding_numel
    assert padded == tp * sum(group.padded_numel for group in layout.groups)

    def copies(placement: Placement) -> int:
        return 1 if placement is Placement.SHARD else dp

    master_bytes = 4 if precision == "bf16" else 0
    expected = padded * DTYPE_BYTES[precision] * copies(stage.params) + padded * GRAD_BYTES * copies(stage.grads)
    expected += (padded * master_bytes + numel * 8) * copies(stage.optimizer)
    assert sum(each.at_rest_bytes - each.scalar_bytes for each in found) == expected
    sharing = sum(
        call.wire_bytes for each in found for call in each.over("tp") if call.name.startswith("gradients that")
    )
    assert sharing == tp * copies(stage.optimizer) * shared_bytes(num_layers, tp, is_sequence)
