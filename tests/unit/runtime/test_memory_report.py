"""The memory tracker's counts as values: JSON, the table of an out-of-memory message, and advice to follow."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.config.resolve import Config
from shardwise.runtime.memory_report import oom_message
from shardwise.runtime.memory_tracker import Category, MemorySnapshot, format_table, oom_advice


def snapshot_of(**live_bytes: int) -> MemorySnapshot:
    live = dict.fromkeys(Category, 0) | {Category(name): value for name, value in live_bytes.items()}
    total_bytes = sum(live.values())
    return MemorySnapshot("cpu", live, total_bytes, live, total_bytes, fragment_bytes=0, metered=True)


def test_a_snapshot_is_a_line_of_json() -> None:
    line = json.loads(json.dumps(snapshot_of(parameters=3, other=4).to_dict()))
    assert line["live_bytes"] == dict.fromkeys(map(str, Category), 0) | {"parameters": 3, "other": 4}
    assert (line["total_bytes"], line["peak_bytes"], line["peak_live_bytes"]["other"]) == (7, 7, 4)
    assert (line["device_type"], line["reserved_bytes"], line["fragment_bytes"], line["metered"]) == (
        "cpu",
        7,
        0,
        True,
    )


def test_the_table_is_sorted_and_adds_up() -> None:
    rows = format_table(snapshot_of(parameters=2**30, optimizer=3 * 2**30))
    assert rows == [("optimizer", "3.000", "75%"), ("parameters", "1.000", "25%"), ("total", "4.000", "100%")]
    assert format_table(snapshot_of()) == [("total", "0.000", "0%")]


def test_the_table_shows_the_peak_and_now_where_its_categories_are_not_known() -> None:
    now = dict.fromkeys(Category, 0) | {Category.OTHER: 2**30}
    peak = now | {Category.ACTIVATIONS: 2**30}
    known = MemorySnapshot("cuda", now, 2**31, peak, 2**31, fragment_bytes=2**30, metered=True)
    unknown = MemorySnapshot("cuda", now, 2**31, {}, 2**31, fragment_bytes=2**30, metered=False)
    assert format_table(known)[-1] == ("total", "2.000", "100%")
    assert format_table(unknown)[0] == ("other", "1.000", "100%")


def resolved(world_size: int = 4, **sections: dict[str, object]) -> Config:
    return Config.from_dict(sections).resolve(world_size)


def advised(snapshot: MemorySnapshot, config: Config) -> list[str]:
    return [" ".join(advice.assignments) for advice in oom_advice(snapshot, config)]


def test_advice_follows_what_fills_the_memory() -> None:
    config = resolved(zero={"stage": 0}, precision={"param": "bf16"}, batch={"micro_size": 6})
    assert advised(snapshot_of(optimizer=800, gradients=300, activations=10), config) == [
        "zero.stage=2",
        "precision.accumulate=param",
        "recompute.mode=full recompute.every=1",
    ]
    assert advised(snapshot_of(activations=1000), config)[:2] == [
        "recompute.mode=full recompute.every=1",
        "batch.micro_size=3 batch.accumulation=2",
    ]
    assert advised(snapshot_of(parameters=1000), resolved(zero={"stage": 2}))[0] == "zero.stage=3"
    savings = {advice.assignments[0]: advice.saved_bytes for advice in oom_advice(snapshot_of(gradients=400), config)}
    assert savings["zero.stage=2"] == 300, "three of four shards are stored elsewhere"


def test_no_advice_for_what_is_set_or_cannot_help() -> None:
    everything = resolved(
        zero={"stage": 3, "overlap": False},
        precision={"param": "bf16", "accumulate": "param"},
        recompute={"mode": "full"},
        batch={"micro_size": 1},
    )
    assert advised(snapshot_of(parameters=10, activations=10), everything) == ["tiers.params=host"]
    away = everything.model_copy(update={"tiers": everything.tiers.model_copy(update={"params": "host"})})
    assert advised(snapshot_of(parameters=10, activations=10), away) == []
    one_rank = resolved(world_size=1, zero={"stage": 0})
    assert not any("zero" in advice for advice in advised(snapshot_of(optimizer=10), one_rank))


@settings(max_examples=100, deadline=None)
@given(
    world_size=st.integers(1, 4),
    stage=st.integers(0, 3),
    micro_size=st.integers(1, 12),
    precision=st.fixed_dictionaries(
        {
            "param": st.sampled_from(["fp32", "bf16", "fp16"]),
            "accumulate": st.sampled_from(["param", "fp32"]),
            "reduce": st.sampled_from(["param", "fp32"]),
        }
    ),
    recompute=st.fixed_dictionaries(
        {"mode": st.sampled_from(["none", "full", "selective"]), "every": st.integers(1, 3)}
    ),
    sizes=st.dictionaries(st.sampled_from([str(category) for category in Category]), st.integers(0, 2**40)),
)
def test_advice_can_be_followed_to_its_end(
    world_size: int,
    stage: int,
    micro_size: int,
    precision: dict[str, object],
    recompute: dict[str, object],
    sizes: dict[str, int],
) -> None:
    """Each advice is a legal config of the same global batch that differs; following all of them ends."""
    config = resolved(
        world_size,
        zero={"stage": stage},
        batch={"micro_size": micro_size},
        precision=precision,
        recompute=recompute,
    )
    snapshot = snapshot_of(**sizes)
    for _ in range(20):
        advice = oom_advice(snapshot, config)
        assert len(advice) <= 3
        assert [item.saved_bytes for item in advice] == sorted((item.saved_bytes for item in advice), reverse=True)
        if not advice:
            return
        for item in advice:
            changed = config.override(item.assignments).resolve(world_size)
            assert changed != config
            assert changed.batch.global_size == config.batch.global_size
        config = config.override(advice[-1].assignments).resolve(world_size)
    pytest.fail("the advice never ends")


def test_a_fragmented_allocator_is_pointed_out() -> None:
    live = dict.fromkeys(Category, 0) | {Category.PARAMETERS: 2**30}
    cuda = MemorySnapshot("cuda", live, 2**30, {}, 2**31, fragment_bytes=2**30, metered=False)
    message = oom_message(MemoryError(), "here", cuda, resolved())
    assert "reserved but idle: 1.00 GiB of 2.00 GiB; PYTORCH_ALLOC_CONF=expandable_segments:True" in message
    assert "idle" not in oom_message(MemoryError(), "here", snapshot_of(parameters=2**30), resolved())
