"""The closed loop: what the planner says of a run is shown and kept beside what the run takes, and never ends it."""

import io
import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shardwise.config.resolve import Config
from shardwise.planner.hardware import Cluster, cluster_of, find_gpu
from shardwise.planner.profile import AttentionTime, MatmulTime, Profile, write_profile
from shardwise.planner.request import job_of
from shardwise.planner.results import TIMELINE_PARTS
from shardwise.planner.search import Pricer
from shardwise.report.run_folder import PREDICTION_NAME
from shardwise.schedule import Action, TimedAction
from shardwise.train import prediction as prediction_module
from shardwise.train.loop import Trainer, build_trainer
from shardwise.train.prediction import (
    StepFigures,
    compare,
    exposed_s,
    planned_cluster,
    predict,
)
from shardwise.train.prepare import prepare_data
from shardwise.train.progress import Header, Progress
from shardwise.train.summary import RunOutcome, render_outcome

PROFILE = Profile(
    device="cpu",
    num_ranks=1,
    num_threads=1,
    memory_bytes=8e9,
    matmuls=(MatmulTime(dtype="fp32", m=256, n=256, k=256, seconds=1e-3),),
    attentions=(AttentionTime(dtype="fp32", num_heads=2, head_dim=16, seq_len=64, forward_s=1e-4, backward_s=2e-4),),
    stream_bytes_per_s=1e9,
    step_bytes_per_s=1e9,
    copies_bytes_per_s=(("host->host", 5e9),),
)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return trainer_of(tmp_path)


def trainer_of(tmp_path: Path, **sections: dict[str, Any]) -> Trainer:
    (tmp_path / "text.txt").write_text("".join(f"line {number} of some text\n" for number in range(300)))
    config = Config.from_dict(
        {
            "model": {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "ffn_size": 64},
            "data": {"path": str(tmp_path / "text.txt"), "seq_len": 16, "tokenizer": "bytes"},
            "batch": {"global_size": 4},
            "run": {"steps": 3, "device": "cpu", "eval_batches": 1, "sample_tokens": 0},
            **sections,
        }
    )
    return build_trainer(config, prepare_data(config, tmp_path / "cache"))


def take_steps(trainer: Trainer) -> list[float]:
    records = trainer.steps(lambda: False, lambda activity: None)
    return [record.step_s for record in records if record.peak_bytes is None]


def kept(folder: Path) -> dict:
    return json.loads((folder / PREDICTION_NAME).read_text(encoding="utf-8"))


def test_on_a_machine_that_was_not_measured_memory_alone_is_predicted(trainer: Trainer, tmp_path: Path) -> None:
    prediction = predict(trainer, tmp_path, tmp_path)
    assert prediction is not None
    assert prediction.parts == {}
    assert prediction.step_s is None
    assert (prediction.low_s, prediction.high_s) == (0.0, 0.0)
    assert "shardwise doctor --calibrate" in prediction.note
    assert kept(tmp_path)["measured"] is None


def test_a_profile_gives_times_and_the_file_has_both_sides(trainer: Trainer, tmp_path: Path) -> None:
    write_profile(PROFILE, tmp_path)
    prediction = predict(trainer, tmp_path, tmp_path)
    assert prediction is not None
    assert prediction.note == ""
    assert prediction.step_s is not None
    assert prediction.low_s < prediction.step_s < prediction.high_s
    step_s = take_steps(trainer)
    measured = compare(trainer, tmp_path, prediction, step_s)
    assert measured is not None
    assert measured.step_s == step_s[-1]
    assert sum(measured.parts.values()) == pytest.approx(step_s[-1])
    assert measured.parts["compute"] == exposed_s(trainer.engine.timeline)["compute"] > 0
    assert measured.peak["activations"] > 0
    values = kept(tmp_path)
    assert set(values["predicted"]["parts"]) == set(values["measured"]["parts"]) == set(TIMELINE_PARTS)
    assert Config.from_dict(values["config"]) == trainer.config
    assert (values["device"], values["world_size"], values["vocab_size"]) == ("cpu", 1, 257)
    assert values["versions"]["torch"]


def test_what_is_predicted_is_the_price_of_rank_0_in_the_trackers_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_profile(PROFILE, tmp_path)
    trainer = trainer_of(tmp_path, attention={"kind": "sliding-window", "block": 4})
    cluster = cluster_of(PROFILE, 1)
    job = job_of(trainer.config, cluster)
    assert job.shape.window == 8
    job = replace(job, shape=replace(job.shape, vocab_size=257))  # of the tokenizer
    price = Pricer(job).price(trainer.config.resolve(1))
    asked = []
    monkeypatch.setattr(prediction_module, "Pricer", lambda job: asked.append(job) or Pricer(job))
    prediction = predict(trainer, tmp_path, tmp_path)
    assert prediction is not None
    assert [replace(each, shape=replace(each.shape, name=job.shape.name)) for each in asked] == [job]
    peak = price.memory.ranks[0].peak
    assert prediction.peak == {
        "parameters": round(peak["params"]),
        "gradients": round(peak["grads"]),
        "optimizer": round(peak["optimizer"]),
        "gathered": round(peak["gathered"]),
        "buckets": round(peak["buckets"]),
        "activations": round(sum(peak.get(name, 0.0) for name in ("activations", "logits", "workspace"))),
    }
    assert prediction.step_s == pytest.approx(price.time.step_s)
    assert (prediction.low_s, prediction.high_s) == (price.time.low_s, price.time.high_s)
    assert prediction.parts["compute"] == pytest.approx(price.time.parts["compute"])


def test_parts_of_the_last_step_are_shares_of_the_median_one(trainer: Trainer, tmp_path: Path) -> None:
    prediction = StepFigures({}, {})
    take_steps(trainer)
    last = exposed_s(trainer.engine.timeline)
    total_s = sum(last.values())
    measured = compare(trainer, tmp_path, prediction, [3 * total_s, total_s, 2 * total_s, 8 * total_s])
    assert measured is not None
    assert measured.step_s == 3 * total_s
    expected = {name: 3 / 8 * last.get(name, 0.0) for name in TIMELINE_PARTS} | {"other": (3 - 3 / 8) * total_s}
    assert measured.parts == pytest.approx(expected)
    # What ranks wait for before a step may count as the step's in the timeline alone.
    short = compare(trainer, tmp_path, prediction, [total_s / 2])
    assert short is not None
    assert (short.parts["other"], short.parts["compute"]) == (0.0, pytest.approx(last["compute"]))
    nothing = compare(trainer, tmp_path, prediction, [0.0])
    assert nothing is not None
    assert set(nothing.parts.values()) == {0.0}


def run_on(device: str, num_ranks: int) -> Any:
    engine = SimpleNamespace(device=torch.device(device), comm=SimpleNamespace(world_size=num_ranks))
    return SimpleNamespace(engine=engine)


@pytest.mark.parametrize(("num_ranks", "per_node"), [(16, 8), (4, 4)])
def test_gpus_that_were_not_measured_are_those_of_their_data_sheet(
    num_ranks: int, per_node: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    gpu = find_gpu("h100")
    expected = Cluster(gpu=gpu, num_gpus=num_ranks, gpus_per_node=per_node, nic_bytes_per_s=gpu.nic_bytes_per_s)
    for cache in (None, tmp_path):
        cluster, note = planned_cluster(run_on("cuda", num_ranks), cache)
        assert cluster == expected
        assert note.startswith("times are of data sheets")
    profile = replace(PROFILE, device="NVIDIA H100 80GB HBM3", num_ranks=num_ranks)
    write_profile(profile, tmp_path)
    assert planned_cluster(run_on("cuda", num_ranks), tmp_path) == (cluster_of(profile, num_ranks), "")


@pytest.mark.parametrize(("device", "name"), [("cpu", "cpu"), ("cuda", "an abacus")])
def test_of_an_unknown_device_memory_alone_is_said(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    cluster, note = planned_cluster(run_on(device, 4), None)
    assert (cluster.gpu.name, cluster.num_gpus, cluster.gpus_per_node, cluster.profile) == ("cpu", 4, 4, None)
    assert 4 * cluster.gpu.memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert "was not measured" in note


def test_whatever_goes_wrong_is_a_warning(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("no such speed")

    monkeypatch.setattr(prediction_module, "planned_job", fail)
    with caplog.at_level(logging.WARNING, "shardwise"):
        assert predict(trainer, tmp_path, tmp_path) is None
    assert "ZeroDivisionError: no such speed" in caplog.text
    assert compare(trainer, tmp_path, None, []) is None
    assert not (tmp_path / PREDICTION_NAME).exists()


def test_a_disk_that_is_full_at_the_end_is_a_warning(
    trainer: Trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prediction = predict(trainer, tmp_path, None)
    with caplog.at_level(logging.WARNING, "shardwise"):
        assert compare(trainer, tmp_path / "gone", prediction, []) is not None, "it is still shown"
    assert "what this run took is not kept" in caplog.text


def timed(text: str, start_s: float, end_s: float) -> TimedAction:
    return TimedAction(Action.parse(text), 0, start_s, end_s, "any")


def test_each_moment_counts_once_and_for_what_is_not_hidden() -> None:
    actions = [
        timed("0UNSHARD", 0, 2),
        timed("0F0", 1, 4),
        timed("0EVICT", 3, 6),
        timed("0REDUCE", 5, 8),
        timed("0RECV_B0", 9, 11),
        timed("0STEP", 10, 12),
    ]
    assert exposed_s(actions) == {"data": 4.0, "compute": 3.0, "offload": 1.0, "bubble": 1.0, "step": 2.0}


@given(
    st.lists(st.tuples(st.sampled_from(["0F0", "0REDUCE", "0STEP", "0FETCH"]), st.integers(0, 20), st.integers(0, 5)))
)
def test_parts_sum_to_the_time_in_which_anything_is_under_way(spans: list[tuple[str, int, int]]) -> None:
    covered = {moment for _, start, length in spans for moment in range(start, start + length)}
    found = exposed_s([timed(text, start, start + length) for text, start, length in spans])
    assert sum(found.values()) == len(covered)


@pytest.mark.parametrize(("step_s", "is_expected"), [(0.9, True), (1.1, True), (1.11, False), (0.2, False)])
def test_a_step_that_was_not_expected_is_named(step_s: float, is_expected: bool) -> None:
    prediction = StepFigures({}, {"compute": 1.0}, 1.0, low_s=0.9, high_s=1.1)
    measured = StepFigures({"parameters": 1}, {"compute": step_s}, step_s)
    state = Progress(Header("", ""), total_steps=2, step=2)
    outcome = RunOutcome(state=state, folder=Path("runs/a"), prediction=prediction, measured=measured)
    console = Console(width=120, file=io.StringIO())
    with console.capture() as captured:
        console.print(render_outcome(outcome))
    words = "900 ms to 1.10 s were expected of a step; shardwise doctor --calibrate measures this machine again"
    assert (words in captured.get()) is not is_expected
