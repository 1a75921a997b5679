"""What `shardwise launch` writes is read back by each target's own rules, and is what was given, whatever that was.

What cannot be written is refused in a line with a code before anything is.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.launch_texts import HOSTILE, TARGETS, Machine, check, sbatch_options, seeded
from harness.refusals import refused
from shardwise.cli.main import main
from shardwise.launch import deepspeed
from shardwise.launch.environment import detect
from shardwise.launch.local import launch_local


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("PYTHON")]:
        monkeypatch.delenv(name)
    return Machine(tmp_path)


@pytest.mark.parametrize("target", TARGETS)
def test_a_text_gives_the_arguments_as_they_were(target: str, machine: Machine) -> None:
    check(target, ["train.py", *HOSTILE], machine)
    check(target, ["$HOME's `x`\n.py", "--", "--", *reversed(HOSTILE)], machine)
    check(target, ["-m", "my.module", "--", "-m"], machine)
    for seed in range(4):
        check(target, ["train.py", *seeded(seed)], machine)


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_a_text_gives_arguments_of_any_kind(target: str, machine: Machine) -> None:
    for word in HOSTILE:
        check(target, ["train.py", word], machine)
    for seed in range(500):
        check(target, ["train.py", *seeded(seed)], machine)


def test_a_host_gets_hostile_variables_as_they_are_and_no_odd_names(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (machine.folder / "torch" / "distributed" / "run.py").write_text(
        f"import os\nnames = ['NCCL_%d' % n for n in range({len(HOSTILE)})]\n"
        "open('said', 'ab').write(b''.join(os.environb[n.encode()] + bytes(1) for n in names))\n"
    )
    for number, value in enumerate(HOSTILE):
        monkeypatch.setenv(f"NCCL_{number}", value)
    monkeypatch.setenv("NCCL_X;touch pwned;A", "1")
    monkeypatch.setenv("NCCL_Y", "\udcff")
    assert main(["launch", "--hosts", "n1", "--gpus", "1", "-o", "start.sh", "--", "train.py"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "'NCCL_X;touch pwned;A', 'NCCL_Y'" in line
    text = Path("start.sh").read_bytes().decode()
    assert "pwned;" not in text
    assert machine.said(text, "sh") == list(HOSTILE)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_a_written_script_has_no_secrets_and_is_its_owners(
    umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [
        *("MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "MLFLOW_S3_SECRET", "NCCL_API_KEY", "PYTHON_PASS"),
        *("UCX_CREDENTIALS", "MLFLOW_ACCESS_KEY_ID", "MLFLOW_apikey", "MLFLOW_AUTH", "MLFLOW_TOKEN2"),
    ]
    for name in names:
        monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:hunter2@host")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    Path("start.sh").write_text("old")
    Path("start.sh").chmod(0o644)
    before = os.umask(umask)
    try:
        command = ["launch", "--hosts", "n1", "--gpus", "1"]
        assert main([*command, "-o", "start.sh", "--", "train.py"]) == 0
    finally:
        os.umask(before)
    (line,) = capsys.readouterr().err.splitlines()
    assert all(name in line for name in [*names, "MLFLOW_TRACKING_URI"])
    text = Path("start.sh").read_text()
    assert "hunter2" not in text
    assert "NCCL_DEBUG=INFO" in text
    assert all(f"SendEnv={name}" in text for name in names)
    assert stat.S_IMODE(Path("start.sh").stat().st_mode) == 0o700
    assert main([*command, "--", "train.py"]) == 0
    printed = capsys.readouterr()
    assert "hunter2" not in printed.out
    assert "MLFLOW_TRACKING_TOKEN" in printed.err


# Writes down its words, and who may read what a line left; the host n3 takes nothing.
RECORDING_SSH = """#!/bin/sh
echo "$*" >> {folder}/argv
case "$*" in *' n3 '*) exit 255;; esac
while [ "${{1#-}}" != "$1" ]; do case "$1" in -o|-p) shift 2;; *) shift;; esac; done
shift
sh -c "$*"
code=$?
stat -c %a "$HOME"/.shardwise-* 2>&- >> {folder}/modes
exit $code
"""
SECRETS = {
    "MLFLOW_TRACKING_TOKEN": "hunter2 it's\n$HOME",
    "NCCL_API_KEY": "hunter2",
    "MLFLOW_URI": "https://me:hunter2@h",
}


@pytest.mark.parametrize("hosts", ["n1,n2", "n1,n3"])
def test_what_is_submitted_has_no_secret_on_a_command_line(
    hosts: str, machine: Machine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Everybody on a machine reads these; each host has the variables all the same, and no file is left."""
    home, folder = machine.folder / "home", machine.folder
    home.mkdir()
    (folder / "bin" / "ssh").write_text(RECORDING_SSH.format(folder=folder))
    (folder / "torch" / "distributed" / "run.py").write_text(
        f"import os\nprint([os.environ[name] for name in {list(SECRETS)}])\n"
    )
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(home))
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    code = main(["launch", "--hosts", hosts, "--gpus", "1", "--submit", "--", "train.py"])
    printed = capfd.readouterr()
    argv = (folder / "argv").read_text()
    assert "hunter2" not in argv + printed.err
    assert not list(home.iterdir())
    assert set((folder / "modes").read_text().split()) == {"600"}
    if "n3" in hosts:
        assert code == 2
        assert "[host-unreachable]" in printed.err
        assert "torch.distributed.run" not in argv
        return
    assert code == 0
    assert printed.out.splitlines() == 2 * [str(list(SECRETS.values()))]


ODD_HOSTS = (
    *(
        "-oProxyCommand=touch pwned",
        "-n1",
        "me@-n1",
        "-x@n1",
        "n 1",
        "n\t1",
        "n\n1",
        "n;1",
        "n$(x)",
        "n`x`",
        "'n1'",
        "",
    ),
    *("@n1", "me@", "n1:22", "[::1]", ":::", "fe80::1%;x", "n\x1b1", "nö", "n/1", "ssh://n1", "*", "a" * 300),
    "\udcff",
)
ODD_TIMES = (
    *("", "1:00\n#SBATCH --nodelist=all", "1:00 --nodelist=x", "1h", "-1", "1:00;", "$(id)", "１:00", "1:00\r", "1-"),
    *("9" * 5000, "1:2:3:4", " 1:00", "1:00 # x", "1:00\u2028"),
)
ODD_IMAGES = (
    *("", "-x", "a b", "a/b:1\n  command: [id]", "a/b:", "/a", "a//b", '"', "$(NAME)", "a:b:c", "{{x}}", "a@sha256:1"),
    *("é", "😀", "a" * 1000, "a-" * 250 + "!", "https://x/a"),
)
HOSTS, SLURM, PODS = ("--gpus", "1", "--hosts"), ("--on", "slurm", "--gpus", "1"), ("--on", "jobset", "--gpus", "1")
ODD_NUMBERS = ("0", "-5", "99999999", f"{10**20}")
REFUSED = [
    *(([*HOSTS, f"n0,{host}"], "host-name") for host in ODD_HOSTS if host),
    *(([*HOSTS, hosts], "host-name") for hosts in ("", ",", ",,", "n0,,n1")),
    *(([*SLURM, "--time", text], "time-limit") for text in ODD_TIMES),
    *(([*PODS, "--image", text], "image-name") for text in ODD_IMAGES if text),
    ([*PODS, "--image", ""], "image-name"),
    *(([*HOSTS, "n0", "--port", number], "master-port") for number in ODD_NUMBERS),
    *((["--on", target, "--gpus", "H100:1", "--port", "0"], "master-port") for target in ("sky", "slurm", "ray")),
    *(([*SLURM, "--nodes", number], "launch-number") for number in ODD_NUMBERS),
    *(([*SLURM, "--max-restarts", number], "launch-number") for number in ODD_NUMBERS[1:]),
    *(
        ([*SLURM[:2], "--gpus", text], "gpus-of-a-node")
        for text in ("", "0", "-1", "1\n", "a b:1", "x:1;", f"{10**20}")
    ),
    *(([*SLURM, "--name", text], "job-name") for text in ("", "a\nb", "-a", "a b", "é", "$x", "a" * 41, '"', "a-")),
]


def refusal(capsys: pytest.CaptureFixture[str], start: Callable[[], int]) -> str:
    """The code of the one line that a command which ends by 2 has written."""
    assert start() == 2
    printed = capsys.readouterr()
    assert not printed.out
    (line,) = printed.err.splitlines()
    assert line.isprintable()
    return line.rpartition("[")[2].removesuffix("]")


@pytest.mark.parametrize(("options", "code"), REFUSED)
def test_what_is_no_host_port_count_time_or_image_is_refused(
    options: list[str], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, lambda: main(["launch", *options, "--", "train.py"])) == code


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("program", "code"),
    [
        (["train.py", "a\0b"], "word-not-text"),
        (["train.py", "caf\udce9"], "word-not-text"),
        (["-x.py"], "program-not-python"),
        (["--standalone"], "program-not-python"),
        (["-m"], "module-name"),
        (["-m", ""], "module-name"),
        (["-m", "--nnodes=9"], "module-name"),
    ],
)
def test_a_program_that_torchrun_or_a_text_cannot_take_is_refused(
    target: str, program: list[str], code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, lambda: main(["launch", *TARGETS[target][0].split(), "--", *program])) == code


@pytest.mark.parametrize("text", ["0", "30", "90:00", "12:00:00", "1-0", "1-12:00", "7-00:00:00", "UNLIMITED"])
def test_each_form_of_a_time_of_slurm_is_written(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *SLURM, "--time", text, "--", "train.py"]) == 0
    assert sbatch_options(capsys.readouterr().out)["time"] == text


@pytest.mark.parametrize("host", ["n1", "me@n1", r"DOM\me@n1", "me@realm@n1", "n1.a-b.c", "10.0.0.1", "::1", "n_1"])
def test_hosts_of_each_form_are_reached(host: str, machine: Machine) -> None:
    assert main(["launch", *HOSTS, f"{host}, n2,", "-o", "start.sh", "--", "train.py"]) == 0
    calls = machine.run(Path("start.sh").read_text(), "sh")
    name = host.rpartition("@")[2]
    endpoint = f"[{name}]:29500" if ":" in name else f"{name}:29500"
    assert [words[words.index("--rdzv-endpoint") + 1] for words in calls] == [endpoint] * 2
    assert sorted(words[words.index("--local-addr") + 1] for words in calls) == sorted([name, "n2"])


@pytest.mark.parametrize(
    ("text", "code"),
    [
        *((f"{host} slots=1", "host-name") for host in ODD_HOSTS if host and not set(host) & set(" \t\n\udcff")),
        *((f"n1 slots={number}", "launch-number") for number in ("0", "99999999", f"{10**20}")),
        *((f"n1 slots={number}", "hostfile-line") for number in ("-5", "1e3", "4.5", "4x", "", "٤", "9" * 5000)),
        ("n1", "hostfile-line"),
        ("n1 slots=1\nn1 slots=1", "hostfile-host-twice"),
        ("\0", "hostfile-line"),
        ("", "hostfile-empty"),
        (b"\xff\xfe slots=1", "not-utf8"),
        (None, "file-unreadable"),
    ],
)
def test_a_hostfile_is_checked_by_both_programs(
    text: str | bytes | None,
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("hosts").write_bytes(text if isinstance(text, bytes) else text.encode())
        assert refusal(capsys, lambda: deepspeed.main(["-H", "hosts", "train.py"])) == code
    else:
        os.mkfifo("hosts")
    assert refusal(capsys, lambda: main(["launch", "--hostfile", "hosts", "--", "train.py"])) == code


@pytest.mark.parametrize(
    ("options", "code"),
    [
        *(([f"--master_port={number}"], "master-port") for number in ODD_NUMBERS),
        *(([f"--ssh_port={number}"], "ssh-port") for number in ODD_NUMBERS),
        *(([f"--num_nodes={number}"], "launch-number") for number in ODD_NUMBERS),
        *(([f"--num_gpus={number}"], "launch-number") for number in ODD_NUMBERS),
        *(([f"--master_addr={host}"], "host-name") for host in ODD_HOSTS if host),
        (["-i", f"n1:{10**20}"], "slots-not-read"),
        (["-i", "n1:9"], "no-such-slot"),
        (["--master_port=1e3"], "options-not-read"),
        (["--master_port=--"], "options-not-read"),
        (["--num_gpus", "9" * 5000], "options-not-read"),
        (["--nonesuch\x1b[31m"], "options-not-read"),
    ],
)
def test_the_program_deepspeed_checks_its_numbers_and_hosts(
    options: list[str], code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("n1 slots=2\nn2 slots=2\n")
    command = ["-H", str(tmp_path / "hosts"), *options, "train.py"]
    assert refusal(capsys, lambda: deepspeed.main(command)) == code


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("A;touch pwned=1", "variable-name"),
        ("1A=x", "variable-name"),
        ("=x", "variable-name"),
        ("A=\0", "word-not-text"),
    ],
)
def test_a_file_of_variables_has_names_that_a_shell_can_set(
    line: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("n1 slots=1\nn2 slots=1\n")
    Path(".deepspeed_env").write_text(f"# A=1\n\nexport B=2\n{line}\n")
    command = ["-H", "hosts", "--master_addr=n1", "train.py"]
    assert refusal(capsys, lambda: deepspeed.main(command)) == code


def test_ssh_that_is_not_installed_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    Path("hosts").write_text("n1 slots=1\nn2 slots=1\n")
    assert refusal(capsys, lambda: main(["launch", "--hostfile", "hosts", "--submit", "--", "x.py"])) == "ssh-not-found"
    assert refusal(capsys, lambda: deepspeed.main(["-H", "hosts", "train.py"])) == "ssh-not-found"


def test_a_folder_that_was_deleted_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("n1 slots=1\nn2 slots=1\n")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    hosts = str(tmp_path / "hosts")
    code = "no-current-folder"
    assert refusal(capsys, lambda: main(["launch", "--hostfile", hosts, "--", "train.py"])) == code
    assert refusal(capsys, lambda: deepspeed.main(["-H", hosts, "--master_addr=n1", "train.py"])) == code


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ("--on jobset --gpus 1 --image a --time 1:00", "--time"),
        ("--on slurm --gpus 1 --image a", "--image"),
        ("--on slurm --gpus 1 --port 1234", "--port"),
        ("--hosts n1 --gpus H100:1", "H100"),
    ],
)
def test_a_flag_that_a_target_has_no_use_for_is_named(
    options: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *options.split(), "--", "train.py"]) == 0
    assert flag in capsys.readouterr().err


def test_no_machine_starts_a_million_ranks(tmp_path: Path) -> None:
    with refused("launch-number", "1000000"):
        launch_local(["-c", "pass"], 1_000_000, tmp_path)


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


@pytest.mark.parametrize(
    ("environ", "code"),
    [
        *(({**TORCHRUN, "MASTER_ADDR": host}, "host-name") for host in ODD_HOSTS),
        *(({**TORCHRUN, name: "9" * 5000}, "launcher-number") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x999999999)"}, "slurm-tasks-per-node"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1(x99999)," * 9 + "1"}, "slurm-tasks-per-node"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "9" * 5000}, "slurm-tasks-per-node"),
        ({**SRUN, "SLURM_STEP_NODELIST": "-oX"}, "host-name"),
    ],
)
def test_what_a_launcher_left_is_checked(environ: dict[str, str], code: str) -> None:
    with refused(code):
        detect(environ)
