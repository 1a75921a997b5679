"""Calibrating: every table is filled with the library's own kernels and collectives; what fails leaves what it had."""

from __future__ import annotations

import io
import itertools
import json
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from shardwise.cli import main as cli
from shardwise.doctor import calibrate as calibration
from shardwise.doctor.calibrate import OPS, SIZES_BYTES, RankTimer, Shapes, block_row, profile_of
from shardwise.doctor.show import render_profile
from shardwise.models.decoder import DecoderBlock
from shardwise.models.presets import DecoderConfig
from shardwise.planner.hardware import cluster_of
from shardwise.planner.profile import Profile

SHAPES = Shapes(((32, 96, 2), (64, 128, 4)), (8, 16), (128,), (torch.float32,))


DECODER = DecoderConfig(
    vocab_size=8, num_layers=1, hidden_size=32, num_heads=2, num_kv_heads=2, head_dim=16, ffn_size=96, max_seq_len=8
)


@pytest.fixture(autouse=True)
def _few_calls(monkeypatch):
    monkeypatch.setattr(calibration, "_BUDGET_S", 0.0)


def lone_timer(limit_s: float = float("inf")) -> RankTimer:
    comm: Any = SimpleNamespace(world_size=1, device=torch.device("cpu"))
    return RankTimer(comm, limit_s)


def test_a_time_is_the_median_of_calls_made_in_turn(monkeypatch):
    now_s = itertools.accumulate(itertools.chain([0.0, 0.0], itertools.cycle([1.0, 0.0, 5.0, 0.0])))
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: next(now_s))
    calls = []
    watch = lone_timer()
    assert watch.times_s(lambda: calls.append("a"), lambda: calls.append("b")) == (1.0, 5.0)
    assert calls == ["a", "b"] * 4, "one round to warm up, three that count, of which the first says how many"


@pytest.mark.parametrize(("is_own", "expected"), [(False, 2.0), (True, 1.0)])  # the median of 3, 1 and 2, or of 1
def test_of_each_call_the_slowest_rank_counts_unless_each_is_asked(monkeypatch, is_own, expected):
    now_s = itertools.accumulate(itertools.chain([0.0, 0.0], itertools.cycle([1.0, 0.0])))
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: next(now_s))
    neighbour = iter([[1.0], [3.0, 0.5, 2.0]])  # to agree how often to call, then call by call
    comm: Any = SimpleNamespace(
        world_size=2,
        device=torch.device("cpu"),
        max_scalars=lambda values, name: torch.maximum(values, values.new_tensor(next(neighbour))).tolist(),
    )
    assert RankTimer(comm, is_own=is_own).time_s(lambda: None) == expected


def test_of_blocks_in_a_row_one_counts():
    found = []

    def times_s(forward: Any, backward: Any) -> tuple[float, float]:
        forward()
        found.extend(backward())
        return 3.0, 6.0

    watch: Any = SimpleNamespace(comm=SimpleNamespace(device=torch.device("cpu")), times_s=times_s)
    row = block_row(watch, torch.float32, 8, (32, 96, 2), most=3.5)
    assert (row["forward_s"], row["backward_s"]) == (1.0, 2.0)
    num_parameters = len(list(DecoderBlock(DECODER).parameters()))
    assert len(found) == 1 + 3 * num_parameters, "gradients of the input and of each block's weights"


def test_nothing_is_begun_when_the_time_is_over():
    assert list(calibration.kernel_rows(lone_timer(limit_s=-1.0), SHAPES)) == []


def test_calls_that_would_take_too_long_are_left_out(monkeypatch):
    asked: list[float] = []

    def cases(*arguments: Any) -> Any:
        for flops in (1e9, 0.31e9, 0.29e9, 0.1e9):
            yield flops, lambda most: asked.append(most) or {"seconds": 1.0}

    monkeypatch.setattr(calibration, "_matmuls", cases)
    rows = list(calibration.kernel_rows(lone_timer(), Shapes((), (), dtypes=(torch.float32,))))
    assert asked == [float("inf"), pytest.approx(0.3 / 0.29), pytest.approx(3.0)], "0.3 s of 1 GFLOP/s each"
    assert rows[0] == ("matmuls", {"dtype": "fp32", "seconds": 1.0})


def test_each_kernel_of_each_shape_is_measured():
    timer = lone_timer()
    rows = [{"field": field, "value": value} for field, value in calibration.kernel_rows(timer, SHAPES)]
    profile = profile_of(rows, num_ranks=1)
    assert {(each.m, each.n, each.k) for each in profile.matmuls} >= {(8, 96, 32), (8, 32, 96), (96, 32, 8)}
    heads_and_tokens = {(2, 8), (2, 16), (4, 8), (4, 16)}
    assert {(each.num_heads, each.seq_len) for each in profile.attentions} == heads_and_tokens
    assert {(each.num_heads, each.seq_len) for each in profile.blocks} == heads_and_tokens
    assert {(each.hidden_size, each.vocab_size, each.num_tokens) for each in profile.heads} >= {(32, 128, 8)}
    assert min(each.seconds for each in profile.matmuls) > 0
    for each in (*profile.attentions, *profile.blocks, *profile.heads):
        assert min(each.forward_s, each.backward_s) > 0
    assert min(calibration.speeds(timer).values()) > 0
    assert calibration.copy_speeds(timer)["host->host"] > 0


def test_rows_become_a_profile():
    rows = [
        {"field": "num_threads", "value": 3},
        {"field": "matmuls", "value": {"dtype": "fp32", "m": 1, "n": 2, "k": 3, "seconds": 0.5}},
        {"field": "copies_bytes_per_s", "value": {"way": "host->host", "speed": 2.0}},
    ]
    profile = profile_of(rows, num_ranks=2)
    assert profile.num_threads == 3
    assert profile.matmuls[0].n == 2
    assert profile.copy_bytes_per_s("host", "host") == 2.0
    assert profile.memory_bytes == profile.host_memory_bytes > 0
    assert Profile.from_json(profile.to_json()) == profile


def test_of_several_rounds_the_median_counts():
    product = {"dtype": "fp32", "m": 1, "n": 2, "k": 3}
    head = {"dtype": "fp32", "num_tokens": 1, "hidden_size": 2, "vocab_size": 3}
    rounds = [
        (1.0, 0.5, {"forward_s": 1.0, "backward_s": 4.0}, 2.0),
        (3.0, 0.25, {"forward_s": 2.0, "backward_s": 3.0}, 1.0),
        (2.0, 9.0, {"forward_s": 9.0, "backward_s": 9.0}, 3.0),
    ]
    rows = [{"field": "matmuls", "value": product | {"m": 9, "seconds": 0.1}}]
    for stream, product_s, head_s, copy in rounds:
        rows += [
            {"field": "stream_bytes_per_s", "value": stream},
            {"field": "torch_version", "value": "2.13.0"},
            {"field": "matmuls", "value": product | {"seconds": product_s}},
            {"field": "heads", "value": head | head_s},
            {"field": "copies_bytes_per_s", "value": {"way": "host->host", "speed": copy}},
        ]
    profile = profile_of(rows, num_ranks=2)
    assert [(each.m, each.seconds) for each in profile.matmuls] == [(9, 0.1), (1, 0.5)]
    assert [(each.forward_s, each.backward_s) for each in profile.heads] == [(2.0, 4.0)]
    assert profile.stream_bytes_per_s == 2.0
    assert profile.copies_bytes_per_s == (("host->host", 2.0),)
    assert profile.torch_version == "2.13.0"


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_machine_is_measured_and_the_profile_is_kept(tmp_path, monkeypatch, capsys, num_ranks):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = ["doctor", "--calibrate", "--quick", "--json", "--num-procs", str(num_ranks), "--dir", str(tmp_path)]
    assert cli.main(command) == 0
    profile = Profile.from_json(capsys.readouterr().out)
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in kept] == [f"cpu-{num_ranks}.json"]
    assert Profile.from_json(kept[0].read_text()) == profile
    sizes = {} if num_ranks == 1 else {4: SIZES_BYTES, 2: SIZES_BYTES}
    expected = [(ranks, size, op) for ranks in sizes for size in sizes[ranks] for op in OPS]
    assert [(each.num_ranks, each.num_bytes, each.op) for each in profile.collectives] == expected
    unmeasured = {each.name for each in fields(Profile) if not getattr(profile, each.name)}
    assert unmeasured <= ({"collectives", "hidden_share"} if num_ranks == 1 else {"hidden_share"})
    assert cluster_of(profile).num_gpus == num_ranks


def test_a_machine_that_was_not_measured_is_said(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    empty = Profile(device="cpu", num_ranks=2, num_threads=1, memory_bytes=1e9)
    monkeypatch.setattr(calibration, "calibrate", lambda *arguments, **options: (empty, "rank 1 died"))
    assert cli.main(["doctor", "--calibrate"]) == 1
    assert "rank 1 died" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_profile_is_shown_in_80_columns():
    rows = [
        {"field": "matmuls", "value": {"dtype": "bf16", "m": 512, "n": 512, "k": 512, "seconds": 0.001}},
        {"field": "stream_bytes_per_s", "value": 2.5e9},
        {"field": "hidden_share", "value": 0.5},
    ]
    values = [{"op": op, "num_ranks": 2, "num_bytes": size, "seconds": 1e-3} for op in OPS for size in SIZES_BYTES]
    rows += [{"field": "collectives", "value": value} for value in values]
    out = io.StringIO()
    Console(file=out, width=80).print(render_profile(profile_of(json.loads(json.dumps(rows)), 2)))
    text = out.getvalue()
    assert "at best 268 GFLOP/s, of 1 shapes" in text
    assert "2.50 GB/s" in text
    assert "computing hides 50% of a gather" in text
    assert "reduce-scatter" in text
    assert "64 MiB" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_profile_that_cannot_be_kept_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*args: object, **kwargs: object) -> None:
        raise AssertionError("minutes were spent on it")

    monkeypatch.setattr("shardwise.doctor.calibrate.calibrate", measured)
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/cache")
    assert cli.main(["doctor", "--calibrate"]) == 2
    err = capsys.readouterr().err
    assert "/dev/null/cache" in err
    assert "[profile-not-writable]" in err


def test_what_computing_hides_is_a_share_of_the_shorter_of_both():
    # A gather of 2 s and a product of 1 s, so two of them; in turn they take 4 s, the gather 2 s, and both at once 5 s.
    seconds = iter((2.0, 1.0))
    pending = SimpleNamespace(wait=lambda: order.append("waited"))
    order: list[str] = []
    comm = SimpleNamespace(
        world_size=2, device=torch.device("cpu"), all_gather=lambda full, name: order.append(name) or pending
    )

    def times_s(compute: Any, gather: Any, both: Any, *, min_calls: int) -> tuple[float, float, float]:
        assert compute.args[1] == 2, "as many products as take about as long"
        gather()
        both()
        return 4.0, 2.0, 5.0

    watch: Any = SimpleNamespace(comm=comm, time_s=lambda call: next(seconds), times_s=times_s)
    assert calibration.measure_hidden_share(watch) == 0.5
    assert order == ["alone", "waited", "beside", "waited"]


def test_a_collective_is_timed_after_some_computing():
    asked: list[tuple[int, int]] = []

    def times_s(*calls: Any, min_calls: int) -> tuple[float, ...]:
        asked.append((len(calls), min_calls))
        return tuple(float(index) for index in range(1, len(calls) + 1))

    for kind, num_calls in (("cpu", 2), ("cuda", 1)):
        comm: Any = SimpleNamespace(world_size=2, rank=0, device=torch.device("meta"))
        watch: Any = SimpleNamespace(comm=SimpleNamespace(device=SimpleNamespace(type=kind)), times_s=times_s)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(calibration, "_factor", lambda device: None)
            found = list(calibration.time_collectives(watch, [comm]))
        assert {each["seconds"] for each in found} == {float(num_calls)}, "the collective's own time"
        assert set(asked) == {(num_calls, calibration.MIN_COLLECTIVES)}
        asked.clear()


def test_an_odd_number_of_ranks_makes_no_pairs():
    comm: Any = SimpleNamespace(world_size=5)
    assert calibration.rank_groups(comm) == [comm]


def test_a_limit_of_the_machine_is_all_its_memory(monkeypatch):
    monkeypatch.setattr(calibration, "usable_bytes", lambda: 4)
    assert profile_of([], num_ranks=1).memory_bytes == 4.0
