"""Which checkpoint a run goes on from, and under which config: decided before anything starts, refused in one line."""

import json
import os
import shutil
from datetime import datetime
from pathlib import Path

import pytest

from harness.refusals import refused
from shardwise.checkpoint.commit import begin, commit
from shardwise.checkpoint.find import IN_RUN
from shardwise.checkpoint.manifest import MANIFEST_NAME, Manifest
from shardwise.config.resolve import AttentionConfig, BatchConfig, Config
from shardwise.models import decoder_config
from shardwise.report.run_folder import run_source
from shardwise.train.checkpoints import (
    Resumed,
    fit_micro_size,
    keep_global_batch,
    make_root,
    resumed_job,
    take_over_metrics,
)
from shardwise.train.metrics import METRICS_NAME
from shardwise.train.setup import CONFIG_NAME, create_folder

SAVED = {
    "model": {"preset": "25m"},
    "batch": {"global_size": 16, "micro_size": 4},
    "optimizer": {"lr": 0.5},
    "run": {"steps": 100, "device": "cpu", "num_procs": 2, "seed": 7},
    "checkpoint": {"every": 5, "path": "elsewhere"},
}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(root: Path, *steps: int, extra: dict | None = None, **fields) -> Path:
    """A root with checkpoints of these steps, by a run of two ranks."""
    config = Config.from_dict(SAVED).resolve(2).model_dump(mode="json")
    position = {"num_samples": 0, "tokens_hash": "abc"} if extra is None else extra
    for step in steps:
        manifest = Manifest(
            **({"step": step, "tensors": (), "files": {}, "config": config, "extra": position} | fields)
        )
        commit(begin(root, step), root, manifest)
    return root


def write_run(name: str, *steps: int, run_name: str | None = None) -> Path:
    """A run's folder in `runs`."""
    folder = Path("runs", name)
    folder.mkdir(parents=True)
    write(folder / IN_RUN, *steps)
    values = SAVED | {"run": SAVED["run"] | {"name": run_name}}
    (folder / "config.json").write_text(Config.from_dict(values).to_json())
    return folder


def resumed(resume, *assignments: str, path: Path | None = None) -> tuple[Config, Path | None]:
    return resumed_job(path, assignments, str(resume))


def tear(folder: Path) -> None:
    (folder / MANIFEST_NAME).write_text("torn")


def test_what_the_user_gives_counts_over_the_saved_config_and_this_over_the_defaults(tmp_path):
    root = write(Path("ck"), 10)
    (tmp_path / "my.toml").write_text("[optimizer]\nlr = 0.25\neps = 1e-6\n")
    config, source = resumed(root, "optimizer.eps=1e-5", "run.steps=300", path=tmp_path / "my.toml")
    assert source == root
    assert (config.optimizer.lr, config.optimizer.eps, config.run.steps) == (0.25, 1e-5, 300)
    assert (config.model.preset, config.run.seed, config.checkpoint.every) == ("25m", 7, 5)
    assert config.scheduler.warmup_steps == Config.from_dict(SAVED).scheduler.warmup_steps, "as the saved run had it"
    assert resumed(root)[0].optimizer.lr == 0.5


def test_a_pipeline_is_taken_over_with_its_schedule_and_neither_without_the_other():
    pipeline = {"schedule": "zb-v", "virtual_stages": 2, "cut": ["blocks.1", "blocks.3", "blocks.5"]}
    saved = Config.from_dict({**SAVED, "mesh": {"pp": 2}, "pipeline": pipeline}).resolve(2).model_dump(mode="json")
    root = write(Path("ck"), 10, config=saved)
    same = resumed(root)[0].pipeline
    assert (same.schedule, same.virtual_stages, list(same.cut)) == tuple(pipeline.values())
    for pp in (1, 4):
        config, _ = resumed(root, f"mesh.pp={pp}")
        assert config.pipeline == Config().pipeline
        assert config.resolve(4).mesh.pp == pp
    config, _ = resumed(root, "mesh.pp=4", "pipeline.schedule=gpipe")
    assert (config.pipeline.schedule, config.pipeline.cut) == ("gpipe", None)


def test_what_belonged_to_the_machines_is_not_taken_over():
    config, _ = resumed(write(Path("ck"), 10))
    assert (config.run.num_procs, config.mesh.dp_shard, config.checkpoint.path) == (None, None, None)
    assert config.run.device == "auto"


ON_NVME = {
    "params": "host",
    "optimizer": "nvme",
    "optimizer_on_device": 0.5,
    "params_on_device": 0.25,
    "nvme_path": "/nvme",
    "bind_cores": True,
    "cores": (0, 1),  # rank 0's, as the engine has filled them in
}


@pytest.mark.parametrize(
    ("assignments", "expected"),
    [
        ((), ON_NVME | {"cores": None}),
        (("tiers.nvme_path=/other",), ON_NVME | {"cores": None, "nvme_path": "/other"}),
        (("tiers.optimizer=host",), ON_NVME | {"cores": None, "nvme_path": None, "optimizer": "host"}),
        (
            ("tiers.optimizer=device", "tiers.params=device", "zero.stage=1"),
            {"bind_cores": True},
        ),
    ],
)
def test_tiers_are_taken_over_as_far_as_they_mean_something_beside_those_that_are_given(assignments, expected):
    values = SAVED | {"tiers": ON_NVME, "zero": {"stage": 3}}
    write(Path("ck"), 10, config=Config.from_dict(values).resolve(2).model_dump(mode="json"))
    config, _ = resumed("ck", *assignments)
    assert config.tiers == Config.from_dict({"tiers": expected}).tiers
    config.resolve(2)


def test_what_is_given_and_means_nothing_is_refused_all_the_same():
    values = SAVED | {"tiers": ON_NVME, "zero": {"stage": 3}}
    write(Path("ck"), 10, config=Config.from_dict(values).resolve(2).model_dump(mode="json"))
    config, _ = resumed("ck", "tiers.optimizer=host", "tiers.nvme_path=/other")
    with refused("path-without-nvme", "tiers.nvme_path=/other"):
        config.resolve(2)


@pytest.mark.parametrize("place", ["ck", "ck/step-00000010", "mine", "mine/checkpoints"])
def test_a_checkpoint_a_root_and_a_runs_folder_are_all_taken(place):
    write(Path("ck"), 10)
    write(Path("mine/checkpoints"), 10)
    source = resumed(place)[1]
    assert source == Path("mine/checkpoints") if place == "mine" else source == Path(place)


def test_a_users_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "ck", 10)
    assert resumed("~/ck")[1] == tmp_path / "ck"
    assert resumed("auto", "checkpoint.path=~/ck")[1] == tmp_path / "ck"


def test_auto_takes_the_folder_that_is_given_and_starts_afresh_where_there_is_nothing():
    assert resumed("auto", "checkpoint.path=ck", "run.steps=3")[1] is None
    Path("ck").mkdir()
    config, source = resumed("auto", "checkpoint.path=ck", "run.steps=3")
    assert (source, config.run.steps, config.model.preset) == (None, 3, "tiny")
    write(Path("ck"), 5)
    config, source = resumed("auto", "checkpoint.path=ck", "run.steps=3")
    assert (source, config.run.steps, config.model.preset, config.checkpoint.path) == (Path("ck"), 3, "25m", "ck")


def test_auto_takes_the_newest_run_of_that_name_that_has_saved():
    assert resumed("auto")[1] is None
    write_run("20250101-000000-mine", 30, run_name="mine")
    newest = write_run("20250102-000000-mine", 10, run_name="mine")
    write_run("20250102-000001-mine", run_name="mine")  # killed before its first save
    write_run("20250103-000000-mine-2", 10, run_name="mine-2")
    by_preset = write_run("20250104-000000-25m", 10)
    assert resumed("auto", "run.name=mine")[1] == newest / IN_RUN
    assert resumed("auto", "model.preset=25m")[1] == by_preset / IN_RUN
    assert resumed("auto")[1] is None, "there is no run of the tiny preset"


def test_auto_takes_the_last_run_though_the_clock_was_set_back_before_it():
    write_run("20250102-000000-mine", 30, run_name="mine")
    now = datetime(2025, 1, 1)
    for _ in range(2):
        last = create_folder(Config.from_dict({"run": {"name": "mine"}}), now)
        write(last / IN_RUN, 10)
        assert resumed("auto", "run.name=mine")[1] == last / IN_RUN


def test_auto_finds_what_the_newest_run_of_that_name_has_saved_elsewhere():
    write_run("20250101-000000-mine", 30, run_name="mine")
    newest = write_run("20250102-000000-mine", run_name="mine")
    assert resumed("auto", "run.name=mine")[1] == Path("runs/20250101-000000-mine", IN_RUN)
    elsewhere = write(Path("elsewhere"), 10)  # the checkpoint.path that its config names
    assert resumed("auto", "run.name=mine")[1] == elsewhere
    assert resumed(newest)[1] == elsewhere


def test_the_attention_is_taken_over_and_may_be_another():
    """No parameter depends on it, so a model may go on with longer sequences."""
    saved = Config.from_dict({**SAVED, "attention": {"kind": "variable", "local_window_blocks": [2, 4]}}).resolve(2)
    root = write(Path("ck"), 10, config=saved.model_dump(mode="json"))
    assert resumed(root)[0].attention == saved.attention
    other, source = resumed(root, "attention.kind=fixed", "attention.local_window_blocks=none")
    assert (source, other.attention) == (root, AttentionConfig(kind="fixed"))


def test_another_model_is_refused_before_anything_starts():
    root = write(Path("ck"), 10)
    with refused("checkpoint-of-other-model", "ck/step-00000010", "model.num_layers=3"):
        resumed(root, "model.num_layers=3")
    hidden_size = decoder_config(Config.from_dict(SAVED).model).hidden_size
    assert resumed(root, f"model.hidden_size={hidden_size}")[1] == root, "the same, said in other words"


def test_a_damaged_newest_checkpoint_leaves_the_older_ones_config_and_the_choice_to_the_load():
    root = write(Path("ck"), 5, 10)
    tear(root / "step-00000010")
    assert resumed(root)[1] == root
    assert resumed("auto", "checkpoint.path=ck")[1] == root


@pytest.mark.parametrize("resume", ["ck", "ck/step-00000005", "auto"])
def test_where_nothing_is_whole_no_run_starts_from_nothing_in_silence(resume):
    root = write(Path("ck"), 5)
    tear(root / "step-00000005")
    with refused("no-whole-checkpoint", "ck/step-00000005/manifest.json"):
        resumed(resume, "checkpoint.path=ck")


@pytest.mark.parametrize(
    ("resume", "refusal"),
    [
        ("chk", ("no-such-path", "--resume chk", "did you mean ck?")),
        ("ck/step-00000006", ("no-such-path", "did you mean step-00000005?")),
        ("ck/step-00000005/manifest.json", ("not-a-folder", "manifest.json")),
        ("empty", ("no-checkpoint", "empty")),
        ("runs", ("runs-not-checkpoints", "did you mean runs/20250101-000000-25m?")),
        ("weights", ("checkpoint-not-all", "weights/step-00000001")),
        ("scripts", ("checkpoint-of-script", "scripts/step-00000001", "engine.load")),
    ],
)
def test_what_cannot_be_gone_on_from_is_refused_in_one_line(resume, refusal):
    write(Path("ck"), 5)
    Path("empty").mkdir()
    write_run("20250101-000000-25m", 10)
    write(Path("weights"), 1, contents="weights")
    write(Path("scripts"), 1, extra={"epoch": 3})
    with refused(*refusal) as raised:
        resumed(resume)
    assert "\n" not in str(raised.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_refused():
    root = write(Path("ck"), 5)
    root.chmod(0)
    try:
        for resume in ("ck", "auto"):
            with refused("folder-refused", "Permission denied"):
                resumed(resume, "checkpoint.path=ck")
    finally:
        root.chmod(0o755)


def batch_of(*assignments: str, world_size: int) -> tuple:
    config, _ = resumed(write(Path("ck", str(world_size), *assignments), 5), *assignments)
    batch = keep_global_batch(config, world_size).resolve(world_size).batch
    return batch.global_size, batch.micro_size, batch.accumulation


@pytest.mark.parametrize(
    ("assignments", "world_size", "expected"),
    [
        ((), 1, (16, 4, 4)),
        ((), 2, (16, 4, 2)),
        ((), 4, (16, 4, 1)),
        ((), 8, (16, 2, 1)),
        (("mesh.tp=2",), 4, (16, 4, 2)),
        (("batch.micro_size=8",), 1, (16, 8, 2)),
        (("batch.micro_size=3",), 2, (16, 2, 4)),
        (("batch.accumulation=8",), 2, (16, 1, 8)),
        (("batch.global_size=24",), 2, (24, 4, 3)),
        (("batch.global_size=24", "batch.accumulation=2"), 2, (24, 6, 2)),
        (("batch.micro_size=2", "batch.accumulation=2"), 2, (8, 2, 2)),
    ],
)
def test_the_global_batch_is_kept_on_any_number_of_ranks_unless_the_user_says_otherwise(
    assignments, world_size, expected
):
    assert batch_of(*assignments, world_size=world_size) == expected


def test_ranks_that_cannot_make_up_the_batch_are_refused():
    with refused("batch-multiple", "3 data-parallel ranks", "16"):
        batch_of(world_size=3)


def test_a_batch_without_a_total_is_left_alone():
    batch = BatchConfig(micro_size=3, accumulation=2)
    assert fit_micro_size(batch, 5) is batch


def job(path: str | None) -> Config:
    return Config.from_dict({"checkpoint": {"path": path}})


def test_a_run_saves_only_where_it_starts_afresh_or_goes_on(tmp_path):
    ours, theirs = write(Path("ours"), 5), write(Path("theirs"), 5)
    Path("empty").mkdir()
    for source in (None, theirs):
        for path in (None, "new", "empty"):
            make_root(job(path), source)
    for source in (ours, ours / "step-00000005", tmp_path / "ours"):
        make_root(job("ours"), source)
    for source in (None, theirs, theirs / "step-00000005"):
        with refused("checkpoints-of-another-run", "checkpoint.path=ours", "step-00000005"):
            make_root(job("ours"), source)
    Path("file").touch()
    with refused("not-a-folder", "checkpoint.path=file"):
        make_root(job("file"), None)


def test_a_folder_that_cannot_be_saved_to_is_refused_before_anything_starts(tmp_path):
    make_root(job("new/deep"), None)
    assert Path("new/deep").is_dir()
    assert not list(Path("new/deep").iterdir())
    with refused("folder-not-writable", "checkpoint.path=/proc/ck"):
        make_root(job("/proc/ck"), None)
    make_root(Config.from_dict({"checkpoint": {"path": "/proc/ck", "at_end": False}}), None)


def lines_of(*steps: int) -> str:
    return "".join(json.dumps({"step": step, "loss": 1.0 / step}) + "\n" for step in steps)


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / METRICS_NAME).read_text().splitlines()]


@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["own folder", "checkpoint.path"])
def test_the_metrics_of_a_resumed_run_begin_with_those_of_the_runs_before(tmp_path, is_elsewhere):
    first, second = write_run("20260101-000000-25m", 5), Path("runs", "20260102-000000-25m")
    third = Path("runs", "20260103-000000-25m")
    root = first / IN_RUN
    if is_elsewhere:
        root = tmp_path / "elsewhere"
        (first / IN_RUN).rename(root)
    # The first has gone on after it saved, and was killed in the middle of a line.
    (first / METRICS_NAME).write_text(lines_of(1, 2, 3, 4, 5, 6) + '{"step": 7')
    config = Config.from_dict(SAVED)
    second.mkdir()
    take_over_metrics(config, second, Resumed(root / "step-00000005", 5))
    assert steps_in(second) == [1, 2, 3, 4, 5]
    with (second / METRICS_NAME).open("a") as file:
        file.write(lines_of(6, 7, 8))
    own = write(second / IN_RUN, 8)
    third.mkdir()
    take_over_metrics(config, third, Resumed(own / "step-00000008", 8))
    assert steps_in(third) == list(range(1, 9))
    curves = run_source(third, 2**20)["curves"]
    assert curves["num_steps"] == 8


def test_the_metrics_of_a_run_that_died_in_a_save_lack_that_step_alone():
    """A step is recorded after its save; of the runs that saved into one folder the one that came furthest counts."""
    first, second = write_run("20260101-000000-25m", 5), Path("runs", "20260102-000000-25m")
    root = Path("shared")
    (first / IN_RUN).rename(root)
    (first / METRICS_NAME).write_text(lines_of(1, 2, 3, 4))
    other = write_run("20260101-000001-25m", 2)
    shutil.rmtree(other / IN_RUN)
    for run in (first, other):
        text = json.loads((run / CONFIG_NAME).read_text())
        text.setdefault("checkpoint", {})["path"] = str(root)
        (run / CONFIG_NAME).write_text(json.dumps(text))
    (other / METRICS_NAME).write_text(lines_of(1, 2))
    second.mkdir()
    take_over_metrics(Config.from_dict(SAVED), second, Resumed(root / "step-00000005", 5))
    assert steps_in(second) == [1, 2, 3, 4]


def test_metrics_that_there_are_not_or_that_are_not_wanted_are_left_out():
    first, second = write_run("20260101-000000-25m", 5), Path("runs", "20260102-000000-25m")
    second.mkdir()
    resumed_at = Resumed(first / IN_RUN / "step-00000005", 5)
    take_over_metrics(Config.from_dict(SAVED), second, resumed_at)  # there are none
    (first / METRICS_NAME).write_text(lines_of(6, 7) + '{"step": 5')
    take_over_metrics(Config.from_dict(SAVED), second, resumed_at)
    (first / METRICS_NAME).write_text(lines_of(1, 2, 3, 4, 5))
    take_over_metrics(Config.from_dict(SAVED | {"run": {"sinks": []}}), second, resumed_at)
    assert not (second / METRICS_NAME).exists()
