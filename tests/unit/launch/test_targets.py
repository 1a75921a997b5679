"""`shardwise launch`: its texts are valid by the clusters' own schemas, and what cannot be started is refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from harness.paths import DATA
from shardwise.cli.main import main
from shardwise.launch.targets import TARGETS

SCHEMAS = json.loads((DATA / "cluster_schemas.json").read_text())
PROGRAM = ["--", "train.py", "--lr", "1e-3", "a b", "yes"]


def written(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["launch", *options, *PROGRAM]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("schema", "options", "wrong"),
    [
        ("TrainJob", "--on trainjob --nodes 4 --gpus 8 --image a/b:1 --max-restarts 2", "numNodes"),
        ("JobSet", "--on jobset --nodes 4 --gpus 8 --image a/b:1 --max-restarts 2", "completionMode"),
        ("sky", "--on sky --nodes 2 --gpus H100:8 --image a/b:1", "num_nodes"),
        ("sky", "--on sky --gpus H100:8", "accelerators"),
    ],
)
def test_a_text_fits_its_schema(schema: str, options: str, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    text = written(capsys, *options.split())
    jsonschema.validate(yaml.safe_load(text), SCHEMAS[schema]["schema"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(text.replace(f"{wrong}:", f"{wrong}s:")), SCHEMAS[schema]["schema"])


@pytest.mark.parametrize("target", ["trainjob", "jobset"])
def test_a_pod_gets_the_program_and_a_gpu_for_each_rank(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    spec = yaml.safe_load(written(capsys, "--on", target, "--nodes", "4", "--gpus", "8", "--image", "a/b:1"))["spec"]
    if target == "trainjob":
        container, num_nodes = spec["trainer"], spec["trainer"]["numNodes"]
        limits = container["resourcesPerNode"]["limits"]
    else:
        job = spec["replicatedJobs"][0]["template"]["spec"]
        (container,) = job["template"]["spec"]["containers"]
        assert job["parallelism"] == job["completions"]
        num_nodes, limits = job["completions"], container["resources"]["limits"]
    assert container["command"][-5:] == PROGRAM[1:]
    assert (num_nodes, limits) == (4, {"nvidia.com/gpu": 8})


def test_the_text_for_ray_is_python(capsys: pytest.CaptureFixture[str]) -> None:
    for nodes in ("1", "2"):
        compile(written(capsys, "--on", "ray", "--nodes", nodes, "--gpus", "8"), "launch.py", "exec")


@pytest.mark.parametrize("target", TARGETS)
def test_scripts_of_a_shell_are_its_language(target: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if target not in ("local", "ssh", "slurm"):
        return
    hosts = ["--hosts", "n1,me@n2"] if target == "ssh" else []
    text = written(capsys, "--on", target, "--gpus", "2", *hosts)
    (tmp_path / "script.sh").write_text(text)
    assert subprocess.run(["bash", "-n", tmp_path / "script.sh"], check=False).returncode == 0
    assert "'a b'" in text or "a b" in text


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("--", "no-program"),
        ("--on local -- ./start.sh", "program-not-python"),
        ("--on ssh -- train.py", "gpus-of-a-node"),
        ("--on ssh --gpus 2 -- train.py", "target-needs"),
        ("--hosts a,b -- train.py", "gpus-of-a-node"),
        ("--hosts a,a --gpus 1 -- train.py", "host-twice"),
        ("--hosts a,b --hostfile file --gpus 1 -- train.py", "hosts-and-hostfile"),
        ("--hosts a,b --gpus 1 --nodes 3 -- train.py", "nodes-are-hosts"),
        ("--hosts a,b --gpus 1 --on slurm -- train.py", "hosts-of-ssh"),
        ("--on slurm -- train.py", "gpus-of-a-node"),
        ("--on slurm --gpus H100: -- train.py", "gpus-of-a-node"),
        ("--on slurm --gpus 8 --nodes 0 -- train.py", "launch-number"),
        ("--on slurm --gpus 8 --max-restarts -1 -- train.py", "launch-number"),
        ("--on slurm --gpus 8 --name My_Job -- train.py", "job-name"),
        ("--on local --gpus 8 --nodes 2 -- train.py", "local-is-one-node"),
        ("--on jobset --gpus 8 -- train.py", "target-needs"),
        ("--on sky --gpus 8 -- train.py", "target-needs"),
        ("--on slurm --gpus 8 --submit -- train.py", "submitter-not-found"),
    ],
)
def test_refusals(
    command: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", *command.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"[{code}]")


def test_a_target_that_is_not_known_is_refused_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--on", "slrum", *PROGRAM]) == 2
    assert "'slurm'" in capsys.readouterr().err


def test_a_hostfile_gives_hosts_and_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("n1 slots=4\nn2 slots=2\n")
    lines = [line for line in written(capsys, "--hostfile", "hosts").splitlines() if line.startswith("ssh")]
    assert ["--nproc-per-node 4" in line for line in lines] == [True, False]
    assert ["--nproc-per-node 2" in line for line in lines] == [False, True]
    assert all("--rdzv-endpoint n1:29500" in line and "--nnodes 2" in line for line in lines)


def test_a_text_is_written_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.sh"
    assert not written(capsys, "--on", "slurm", "--gpus", "8", "-o", str(path))
    assert path.read_text().startswith("#!/bin/bash")
