"""What a run needs is compared with what there is before anything is started."""

import io
import os
from types import SimpleNamespace

import pytest
from rich.console import Console

from harness.refusals import refused
from shardwise.checkpoint.commit import begin, commit
from shardwise.checkpoint.manifest import Manifest
from shardwise.config.resolve import Config
from shardwise.tensor.plan_layout import plan_layout
from shardwise.train import needs, run, setup
from shardwise.train.job_model import job_model

TINY = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "ffn_size": 128}
# Parameters and two moments, of fp32.
CHECKPOINT_BYTES = 12


@pytest.fixture
def prepared(tmp_path):
    """Prepare a run as `start` does before it starts ranks; returns what was shown, and the run's folder."""
    (tmp_path / "text.txt").write_text("".join(f"line {number} of some text\n" for number in range(3000)))

    def prepare(**sections) -> tuple[str, object]:
        values = {
            "model": TINY,
            "data": {"path": str(tmp_path / "text.txt"), "seq_len": 64, "tokenizer": "bytes"},
            "run": {"steps": 40, "device": "cpu", "dir": str(tmp_path / "runs")},
            "precision": {"param": "fp32"},
        }
        given = {name: values.get(name, {}) | sections.get(name, {}) for name in values | sections}
        config = setup.resolve_job(Config.from_dict(given), 1, 1)
        shown = io.StringIO()
        _, folder, _ = run._prepare(config, Console(file=shown, width=300), None, 1)
        return shown.getvalue(), folder

    return prepare


@pytest.fixture
def memory(monkeypatch):
    return lambda num_bytes: [monkeypatch.setattr(m, "usable_bytes", lambda: num_bytes) for m in (needs, setup)]


@pytest.fixture
def disk(monkeypatch):
    def limit(num_bytes):
        space = SimpleNamespace(f_blocks=1, f_frsize=1, f_bavail=num_bytes)
        monkeypatch.setattr(os, "statvfs", lambda path: space)

    return limit


@pytest.mark.parametrize(
    ("values", "relief"),
    [
        ({"data": {"seq_len": 8192}}, "lower data.seq_len, or set recompute.mode=full and context.chunk_tokens=1024"),
        ({"data": {"seq_len": 2048}, "batch": {"micro_size": 8}, "recompute": {"mode": "full"}},
         "lower data.seq_len or batch.micro_size, or set context.chunk_tokens=1024"),
    ],
    ids=["one long sequence", "several"],
)  # fmt: skip
def test_a_step_that_is_predicted_not_to_fit_is_refused_before_a_folder_is_made(
    prepared, memory, tmp_path, values, relief
):
    memory(2**23)
    with refused("memory-too-small", relief):
        prepared(**values)
    assert not list((tmp_path / "runs").glob("2*"))
    shown, folder = prepared(**values, run={"on_shortage": "warn"})
    assert "warning: a step of" in shown
    assert folder.is_dir()


def test_what_fits_and_what_the_planner_does_not_know_is_not_refused(prepared, memory, monkeypatch):
    assert "warning" not in prepared()[0]
    memory(2**23)

    def fail(*arguments):
        raise ZeroDivisionError

    monkeypatch.setattr(needs, "job_of", fail)
    assert "warning" not in prepared(data={"seq_len": 8192})[0]


@pytest.mark.parametrize(
    ("checkpoint", "num_needed"),
    [
        ({}, 1),  # the one at the end
        ({"every": 10}, 4),  # the newest three, and one that is written
        ({"every": 10, "keep_last": 1}, 2),
        ({"every": 20}, 2),
        ({"every": 5, "keep_last": 0}, 8),
        ({"every": 5, "keep_last": 1, "keep_every": 10}, 6),
        ({"at_end": False}, 0),
    ],
)
def test_the_disk_must_have_space_for_the_checkpoints_that_are_kept(prepared, disk, checkpoint, num_needed):
    config = setup.resolve_job(Config.from_dict({"model": TINY, "run": {"device": "cpu"}}), 1, 1)
    model = job_model(config).for_tokens(257)
    num_bytes = CHECKPOINT_BYTES * model.num_params
    assert needs.checkpoint_bytes(config, plan_layout(model.skeleton(), config), model.num_params) == num_bytes
    disk(num_needed * num_bytes)
    prepared(checkpoint=checkpoint)
    if num_needed:
        disk(num_needed * num_bytes - 1)
        with refused("too-little-space", "free some, or"):
            prepared(checkpoint=checkpoint)
        assert "warning" in prepared(checkpoint=checkpoint, run={"on_shortage": "warn"})[0]


def test_checkpoints_that_go_leave_space_for_those_that_come(prepared, disk, tmp_path, monkeypatch):
    root = tmp_path / "ck"
    monkeypatch.setattr(run, "make_root", lambda *_: None)
    for step in (1, 2, 3):
        commit(begin(root, step), root, Manifest(step=step, tensors=(), files={}))
    disk(2 * 2**20)
    prepared(checkpoint={"every": 10, "path": str(root)})
    with refused("too-little-space", "lower checkpoint.keep_last"):
        prepared(checkpoint={"every": 10})


@pytest.mark.parametrize(
    ("theirs", "positions"),
    [
        ({}, None),
        ({"max_position_embeddings": None}, None),
        ({"max_position_embeddings": 512}, 512),
        ({"max_position_embeddings": 512, "rope_scaling": {"type": "linear", "factor": 4.0}}, 2048),
        ({"max_position_embeddings": 512, "rope_parameters": {"full": {"factor": 2, "rope_type": "yarn"}}}, 1024),
        ({"max_position_embeddings": 999, "rope_scaling": {"factor": 8, "original_max_position_embeddings": 9}}, 999),
        ({"max_position_embeddings": 512, "rope_scaling": {"factor": "many"}}, 512),
    ],
)  # fmt: skip
def test_a_sequence_beyond_the_positions_of_a_model_is_refused(theirs, positions):
    text = SimpleNamespace(**theirs)
    assert needs.positions_of(text) == positions
    check = needs.check_positions
    check(Config.from_dict({"data": {"seq_len": positions or 10**6}}), "a model", text)
    if positions is not None:
        longer = {"data": {"seq_len": positions + 1}}
        with refused("seq-len-exceeds-positions", f"use data.seq_len={positions} or less"):
            check(Config.from_dict(longer), "a model", text)
        check(Config.from_dict(longer | {"run": {"on_shortage": "warn"}}), "a model", text)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_dtype_that_the_cpu_lacks_is_said_at_the_start(prepared, monkeypatch, dtype):
    monkeypatch.setattr("torch.cpu.get_capabilities", dict)
    assert f"warning: precision.param={dtype}, which this CPU computes in software" in prepared(
        precision={"param": dtype}
    )[0]  # fmt: skip
    assert "warning" not in prepared()[0]
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {f"avx512_{dtype}": True})
    assert "warning" not in prepared(precision={"param": dtype})[0]
