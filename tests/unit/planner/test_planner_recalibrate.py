"""Profiles corrected by runs: as far as runs that a slower machine would have had bring them."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from harness.refusals import refused
from shardwise.cli import main as cli
from shardwise.config.resolve import Config
from shardwise.planner.configs import job_of, strategy_of
from shardwise.planner.hardware import cluster_of
from shardwise.planner.profile import (
    AttentionTime,
    BlockTime,
    CollectiveTime,
    HeadTime,
    MatmulTime,
    Profile,
    find_profile,
    write_profile,
)
from shardwise.planner.recalibrate import PREDICTION_NAME, StoredRun, by_part, read_runs, refit, scaled
from shardwise.planner.step_time import TimeModel

PROFILE = Profile(
    device="cpu",
    num_ranks=2,
    num_threads=1,
    memory_bytes=8e9,
    matmuls=tuple(MatmulTime(dtype="fp32", m=m, n=256, k=256, seconds=m * 2e-6) for m in (64, 256, 1024)),
    attentions=(AttentionTime(dtype="fp32", num_heads=4, head_dim=32, seq_len=128, forward_s=2e-4, backward_s=4e-4),),
    collectives=tuple(
        CollectiveTime(op=op, num_ranks=2, num_bytes=size, seconds=size / 1e8)
        for op in ("all_gather", "reduce_scatter", "all_reduce")
        for size in (10**4, 10**6, 10**8)
    ),
    stream_bytes_per_s=2e9,
    step_bytes_per_s=2e9,
    copies_bytes_per_s=(("host->host", 5e9),),
)
CONFIGS = [
    Config.from_dict(
        {
            "zero": {"stage": stage, "overlap": False},
            "batch": {"micro_size": micro_size, "accumulation": 1},
            "precision": {"param": "fp32"},
        }
    ).resolve(world_size=2)
    for stage, micro_size in ((1, 2), (2, 4), (3, 8))
]


def slower(profile: Profile, factor: float) -> Profile:
    return replace(
        profile,
        matmuls=tuple(replace(each, seconds=factor * each.seconds) for each in profile.matmuls),
        attentions=tuple(
            replace(each, forward_s=factor * each.forward_s, backward_s=factor * each.backward_s)
            for each in profile.attentions
        ),
        stream_bytes_per_s=profile.stream_bytes_per_s / factor,
    )


def run_on(profile: Profile, config: Config, vocab_size: int = 512) -> StoredRun:
    job = job_of(config, cluster_of(profile))
    job = replace(job, shape=replace(job.shape, vocab_size=vocab_size))
    estimate = TimeModel(job).estimate(strategy_of(config, 2))
    return StoredRun(
        device="cpu",
        world_size=2,
        vocab_size=vocab_size,
        config=config,
        parts=by_part(estimate.parts),
        step_s=estimate.step_s,
    )


def test_runs_as_predicted_leave_a_profile_as_it_is() -> None:
    found = refit(PROFILE, [run_on(PROFILE, config) for config in CONFIGS])
    assert found.profile == PROFILE
    assert found.before == pytest.approx(0.0, abs=1e-9)
    assert set(found.factors.values()) == {1.0}
    assert not found.is_changed


@pytest.mark.parametrize("factor", [0.7, 1.5])
def test_runs_of_a_slower_machine_bring_the_profile_to_it(factor: float) -> None:
    found = refit(PROFILE, [run_on(slower(PROFILE, factor), config) for config in CONFIGS])
    assert found.after < 0.1 * found.before
    assert found.factors["compute"] == pytest.approx(factor, rel=0.1)
    assert found.factors["step"] == pytest.approx(1.0, rel=0.05)
    assert found.num_runs == 3
    assert f"compute x {found.factors['compute']:.2f}" in str(found)


def test_one_run_moves_a_profile_less_than_three() -> None:
    runs = [run_on(slower(PROFILE, 1.5), config) for config in CONFIGS]
    one, three = (refit(PROFILE, runs[:count]).factors["compute"] for count in (1, 3))
    assert 1.3 < one < three - 0.03 < 1.5


def test_what_is_beyond_belief_is_not_believed() -> None:
    found = refit(PROFILE, [run_on(slower(PROFILE, 40.0), config) for config in CONFIGS])
    assert found.factors["compute"] <= 3.0
    assert found.factors["compute"] > 2.5


def test_runs_of_another_number_of_ranks_count_only_where_no_others_are() -> None:
    own, other = run_on(PROFILE, CONFIGS[0]), run_on(slower(PROFILE, 2.0), CONFIGS[1])
    assert refit(PROFILE, [own, replace(other, world_size=4)]).num_runs == 1
    with refused("no-run-of-device", "cpu"):
        refit(PROFILE, [replace(own, device="NVIDIA H100")])


def keep(run: StoredRun, folder: Path) -> None:
    values = {
        "device": run.device,
        "world_size": run.world_size,
        "vocab_size": run.vocab_size,
        "config": run.config.model_dump(mode="json"),
        "measured": {"parts": dict(run.parts), "step_s": run.step_s},
    }
    folder.mkdir(parents=True)
    (folder / PREDICTION_NAME).write_text(json.dumps(values))


def test_plan_refit_writes_the_corrected_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runs = [run_on(slower(PROFILE, 1.5), config) for config in CONFIGS]
    for index, run in enumerate(runs):
        keep(run, tmp_path / "runs" / str(index))
    assert cli.main(["plan", "--refit", str(tmp_path / "runs")]) == 2
    assert "run shardwise doctor --calibrate first" in capsys.readouterr().err
    path = write_profile(PROFILE, tmp_path / "shardwise")
    assert cli.main(["plan", "--refit", str(tmp_path / "runs")]) == 0
    assert find_profile(tmp_path / "shardwise", "cpu", 2) == refit(PROFILE, runs).profile != PROFILE
    printed = capsys.readouterr().out
    assert printed.startswith("cpu, 2 ranks: 3 runs, error of a step ")
    assert printed.rstrip().endswith(f"wrote {path}")
    assert refit(PROFILE, runs).is_changed


def test_runs_are_read_from_wherever_they_are_kept(tmp_path: Path) -> None:
    run = run_on(PROFILE, CONFIGS[2])
    values = {
        "device": "cpu",
        "world_size": 2,
        "vocab_size": 512,
        "config": run.config.model_dump(mode="json"),
        "measured": {"parts": dict(run.parts), "step_s": run.step_s},
    }
    for name, text in {
        "a/one": json.dumps(values),
        "b": json.dumps(values | {"measured": None}),
        "c": "{",
        "d": json.dumps(values | {"config": {"no": "section"}}),
    }.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / PREDICTION_NAME).write_text(text)
    assert read_runs(tmp_path) == (run,)
    with refused("no-timed-run", str(tmp_path)):
        read_runs(tmp_path / "b")


def test_each_factor_scales_what_it_was_fitted_to() -> None:
    whole = replace(
        PROFILE,
        blocks=(
            BlockTime(
                dtype="fp32", seq_len=8, hidden_size=8, num_heads=1, num_kv_heads=1, head_dim=8, ffn_size=8,
                forward_s=1.0, backward_s=2.0,
            ),
        ),
        heads=(HeadTime(dtype="fp32", num_tokens=8, hidden_size=8, vocab_size=8, forward_s=1.0, backward_s=2.0),),
        call_s=1e-6,
        disk_read_bytes_per_s=3e9,
        disk_write_bytes_per_s=2e9,
    )  # fmt: skip
    factors = {"compute": 2.0, "data": 3.0, "offload": 5.0, "step": 7.0}
    found = scaled(whole, {name: math.log(factor) for name, factor in factors.items()})
    assert [each.seconds for each in found.matmuls] == pytest.approx([2 * each.seconds for each in whole.matmuls])
    for name in ("attentions", "blocks", "heads"):
        before, after = getattr(whole, name)[0], getattr(found, name)[0]
        assert (after.forward_s, after.backward_s) == pytest.approx((2 * before.forward_s, 2 * before.backward_s))
    slower = [3 * each.seconds for each in whole.collectives]
    assert [each.seconds for each in found.collectives] == pytest.approx(slower)
    assert (found.call_s, found.stream_bytes_per_s) == pytest.approx((2e-6, 1e9))
    assert found.copy_bytes_per_s("host", "host") == pytest.approx(1e9)
    assert (found.disk_read_bytes_per_s, found.disk_write_bytes_per_s) == pytest.approx((6e8, 4e8))
    assert found.step_bytes_per_s == pytest.approx(2e9 / 7)


def test_a_profile_that_no_factor_makes_better_stays() -> None:
    run = run_on(PROFILE, CONFIGS[0])
    # Parts that are longer than the step that they are of: what they ask for would make it worse.
    odd = replace(run, parts={name: 1.5 * seconds for name, seconds in run.parts.items()})
    found = refit(PROFILE, [odd])
    assert found.profile == PROFILE
    assert found.after == found.before == pytest.approx(0.0, abs=1e-9)


def test_the_error_is_a_share_of_a_step() -> None:
    run = run_on(PROFILE, CONFIGS[0])
    slow, fast = (replace(run, step_s=factor * run.step_s, parts={}) for factor in (1.25, 1 / 1.25))
    assert refit(PROFILE, [slow, fast]).before == pytest.approx(0.25)
