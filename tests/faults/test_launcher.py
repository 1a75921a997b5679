"""The local launcher with real processes that import no torch: every way in which ranks end or are ended.

Ranks sleep for longer than a test may take: one that passes has not waited for their own end.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.fake_device import FakeDevice
from harness.refusals import refused
from harness.waiting import PATIENCE_S, is_running, wait_until
from shardwise.launch import local
from shardwise.launch.local import default_num_ranks, launch_local

# Each rank notes its process id; `meet` waits until all have.
PRELUDE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
rank, world_size, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1])
def note(name, value):
    (folder / f"{name}.tmp").write_text(json.dumps(value))
    (folder / f"{name}.tmp").rename(folder / name)
def meet():
    note(f"pid-{rank}", os.getpid())
    while len(list(folder.glob("pid-?"))) < world_size:
        time.sleep(0.01)
def stop(signum, frame):
    print("stopped by", signal.Signals(signum).name, file=sys.stderr)
    sys.exit(0)
"""
STOPPABLE = "signal.signal(signal.SIGTERM, stop); signal.signal(signal.SIGINT, stop); meet()\n"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); meet()\n"


@pytest.fixture
def launch(tmp_path):
    """Launch ranks that run the prelude and then `code`, with no signal ignored, as `nohup make test` does."""
    ignored = [each for each in (signal.SIGINT, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_IGN]
    for each in ignored:
        signal.signal(each, signal.SIG_DFL if each is signal.SIGHUP else signal.default_int_handler)

    def run(code: str, num_ranks: int = 2, **options) -> int:
        return launch_local([write_script(tmp_path, code), str(tmp_path)], num_ranks, tmp_path / "logs", **options)

    yield run
    for each in ignored:
        signal.signal(each, signal.SIG_IGN)


def write_script(folder: Path, code: str) -> str:
    script = folder / "script.py"
    script.write_text(PRELUDE + code)
    return str(script)


def log(folder: Path, rank: int) -> str:
    return (folder / "logs" / f"rank-{rank}.log").read_text()


def noted_pids(folder: Path) -> list[int]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*pid-?"))]


def test_ranks_get_torchruns_environment_and_their_logs(launch, tmp_path, capfd):
    code = """
note(f"env-{rank}", dict(os.environ))
note(f"session-{rank}", os.getsid(0))
print("out of", rank); print("err of", rank, file=sys.stderr)
import socket
socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
"""
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    assert launch(code, 3, environ=environ) == 0
    envs = [json.loads((tmp_path / f"env-{rank}").read_text()) for rank in range(3)]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
    num_threads = str(max(1, local.num_cores() // 3))
    assert [tuple(env[name] for name in names) for env in envs] == [
        (str(rank), str(rank), "3", "3", "127.0.0.1", num_threads) for rank in range(3)
    ]
    assert len({env["MASTER_PORT"] for env in envs}) == 1
    sessions = {(tmp_path / f"session-{rank}").read_text() for rank in range(3)} | {str(os.getsid(0))}
    assert len(sessions) == 4
    assert capfd.readouterr() == ("out of 0\n", "")
    assert [log(tmp_path, rank) for rank in range(3)] == ["err of 0\n", "out of 1\nerr of 1\n", "out of 2\nerr of 2\n"]


@pytest.mark.parametrize(
    ("threads_per_rank", "environ", "expected"),
    [(3, {"OMP_NUM_THREADS": "5"}, "3"), (None, {"OMP_NUM_THREADS": "5"}, "5"), (None, {}, "2")],
)
def test_threads_per_rank(launch, tmp_path, monkeypatch, threads_per_rank, environ, expected):
    monkeypatch.setattr(local, "num_cores", lambda: 2)
    launch('note("threads", os.environ["OMP_NUM_THREADS"])', 1, threads_per_rank=threads_per_rank, environ=environ)
    assert json.loads((tmp_path / "threads").read_text()) == expected


@pytest.mark.parametrize(("given", "expected"), [({}, "lo"), ({"GLOO_SOCKET_IFNAME": "eth0"}, "eth0")])
def test_gloo_has_to_listen_on_loopback_unless_the_user_says_where(launch, tmp_path, monkeypatch, given, expected):
    monkeypatch.setattr(local.sys, "platform", "linux")
    launch('note("where", os.environ["GLOO_SOCKET_IFNAME"])', 1, environ=given)
    assert json.loads((tmp_path / "where").read_text()) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, {"PYTORCH_CUDA_ALLOC_CONF": ""}),
    ],
)
def test_segments_are_expandable_unless_the_user_says_how_to_allocate(launch, tmp_path, environ, expected):
    launch('note("alloc", {k: v for k, v in os.environ.items() if "ALLOC_CONF" in k})', 1, environ=environ)
    assert json.loads((tmp_path / "alloc").read_text()) == expected


@pytest.mark.parametrize(("environ", "expected"), [({}, "32"), ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "1")])
def test_a_gpu_has_queues_for_all_streams_unless_the_user_says_how_many(launch, tmp_path, environ, expected):
    launch('note("queues", os.environ["CUDA_DEVICE_MAX_CONNECTIONS"])', 1, environ=environ)
    assert json.loads((tmp_path / "queues").read_text()) == expected


def test_a_killed_rank_is_named_and_takes_the_others_with_it(launch, tmp_path, capfd):
    code = (
        STOPPABLE
        + """
for step in range(30):
    print("step", step)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
    )
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    assert launch(code, 3, environ=environ, failure_grace_s=PATIENCE_S) == 128 + signal.SIGKILL
    message = capfd.readouterr().err.splitlines()
    assert message[0] == "shardwise: rank 1 killed by SIGKILL: out of memory, or kill -9"
    assert message[1] == f"the end of its log, {tmp_path / 'logs' / 'rank-1.log'}:"
    assert message[2:] == [f"  | step {step}" for step in range(15, 30)]
    assert "stopped by SIGTERM" in log(tmp_path, 0)
    assert "stopped by SIGTERM" in log(tmp_path, 2)
    assert not any(map(is_running, noted_pids(tmp_path)))


def test_an_exception_is_reported_and_a_deaf_rank_is_killed(launch, tmp_path, capfd):
    code = (
        DEAF
        + """
if rank == 0:
    raise ValueError("no such data")
time.sleep(600)
"""
    )
    assert launch(code, grace_s=600, failure_grace_s=0.3) == 1
    assert "rank 0 exited with code 1: ValueError: no such data\n" in capfd.readouterr().err
    assert not any(map(is_running, noted_pids(tmp_path)))


def test_what_a_dead_rank_started_dies_too(launch, tmp_path):
    code = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
note(f"child-pid-{rank}", child.pid)
meet()
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
    launch(code)
    pids = noted_pids(tmp_path)
    assert len(pids) == 4
    assert wait_until(lambda: not any(map(is_running, pids)))


def test_a_rank_that_lost_its_peer_is_not_the_one_named(launch, capfd, monkeypatch):
    monkeypatch.setattr(local, "_SETTLE_S", PATIENCE_S)
    code = (
        STOPPABLE
        + """
if rank == 0:
    raise RuntimeError("gloo/transport/tcp/pair.cc:547: Connection closed by peer")
time.sleep(0.2)
raise ValueError("the cause")
"""
    )
    assert launch(code) == 1
    assert "rank 1 exited with code 1: ValueError: the cause" in capfd.readouterr().err


def test_a_lost_connection_alone_is_reported_and_ends_the_run(launch, capfd):
    code = (
        STOPPABLE
        + """
if rank == 0:
    raise RuntimeError("Connection reset by peer")
time.sleep(600)
"""
    )
    assert launch(code) == 1
    assert "rank 0 exited with code 1: RuntimeError: Connection reset by peer" in capfd.readouterr().err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_lets_the_ranks_end_by_their_own_path(launch, tmp_path, capfd, signum):
    code = (
        STOPPABLE
        + f"""
if rank == 0:
    os.kill(os.getppid(), {int(signum)})
time.sleep(600)
"""
    )
    handler = signal.getsignal(signum)
    assert launch(code, grace_s=PATIENCE_S) == 128 + signum
    assert [log(tmp_path, rank) for rank in range(2)] == ["stopped by SIGTERM\n"] * 2
    assert capfd.readouterr().err.splitlines() == [
        f"shardwise: {signum.name}: the ranks stop after this step; once more kills them"
    ]
    assert signal.getsignal(signum) is handler


def test_a_rank_that_does_not_stop_is_killed_after_the_grace(launch, tmp_path, capfd, monkeypatch):
    code = """
if rank == 0:
    signal.signal(signal.SIGTERM, stop); meet()
    os.kill(os.getppid(), signal.SIGTERM)
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN); meet()
time.sleep(600)
"""

    def has_been_fetched(pid):
        return pid.exists() and not Path("/proc", pid.read_text()).exists()

    # The grace is over when the launcher has fetched the one that stops, however long that takes.
    monkeypatch.setattr(local.time, "monotonic", lambda: 10.0 if has_been_fetched(tmp_path / "pid-0") else 0.0)
    assert launch(code, grace_s=5.0) == 128 + signal.SIGTERM
    assert log(tmp_path, 0) == "stopped by SIGTERM\n"
    assert "killed, not having stopped in time: ranks 1\n" in capfd.readouterr().err


def test_a_second_ctrl_c_kills_but_not_a_signal_that_comes_with_the_first(launch, tmp_path, capfd, monkeypatch):
    code = (
        DEAF
        + """
if rank == 0:
    os.kill(os.getppid(), signal.SIGINT)
    os.kill(os.getppid(), signal.SIGTERM)
    while not (folder / "received-2").exists():
        time.sleep(0.01)
    time.sleep(0.5)
    note("alive", True)
    os.kill(os.getppid(), signal.SIGINT)
time.sleep(600)
"""
    )
    num_received = 0

    def receive(signum, at_s):
        nonlocal num_received
        num_received += 1
        (tmp_path / f"received-{num_received}").touch()
        return received(signum, 10.0 if num_received > 2 else 0.0)

    received = local._Signalled
    monkeypatch.setattr(local, "_Signalled", receive)
    assert launch(code, grace_s=600) == 128 + signal.SIGINT
    assert (tmp_path / "alive").exists()
    assert "killed, not having stopped in time: ranks 0, 1\n" in capfd.readouterr().err


def test_a_rank_that_fails_while_stopping_is_reported_and_shortens_the_grace(launch, capfd):
    code = """
def fail(signum, frame):
    raise OSError("disk full")
signal.signal(signal.SIGTERM, fail if rank == 0 else signal.SIG_IGN); meet()
if rank == 0:
    os.kill(os.getppid(), signal.SIGINT)
time.sleep(600)
"""
    assert launch(code, grace_s=600, failure_grace_s=0.3) == 1
    assert "rank 0 exited with code 1: OSError: disk full" in capfd.readouterr().err


def test_a_signal_that_is_ignored_stays_ignored(launch):
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        assert launch("os.kill(os.getppid(), signal.SIGHUP); time.sleep(0.1)") == 0
    finally:
        signal.signal(signal.SIGHUP, previous)


def launcher_script(folder: Path, code: str) -> str:
    """A program that launches two ranks, for tests that need a launcher in a process of its own."""
    script, logs = write_script(folder, code), folder / "logs"
    return f"""
import fcntl, sys, termios
from pathlib import Path
from shardwise.launch.local import launch_local
if sys.stdin.isatty():
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # now the terminal's Ctrl-C comes here
sys.exit(launch_local([{script!r}, {str(folder)!r}], 2, Path({str(logs)!r}), grace_s={PATIENCE_S}))
"""


def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path):
    code = """
from shardwise.launch.signals import exit_with_parent
exit_with_parent(os.environ)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
note(f"child-pid-{rank}", subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
meet()
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", launcher_script(tmp_path, code)]) as launcher:
        try:
            assert wait_until(lambda: len(list(tmp_path.glob("pid-?"))) == 2)
        finally:
            launcher.kill()
    pids = noted_pids(tmp_path)
    assert len(pids) == 4
    assert wait_until(lambda: not any(map(is_running, pids)))
    assert log(tmp_path, 1) == "shardwise: the launcher died; this rank ends with it\n"


def test_in_a_terminal_rank_0_sees_it_and_ctrl_c_reaches_the_launcher_only(tmp_path):
    code = STOPPABLE + 'note(f"tty-{rank}", sys.stdout.isatty()); note(f"waits-{rank}", True); time.sleep(600)'
    ours, terminal = os.openpty()
    command = [sys.executable, "-c", launcher_script(tmp_path, code)]
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True
    ) as launcher:
        os.close(terminal)
        try:
            assert wait_until(lambda: len(list(tmp_path.glob("waits-?"))) == 2)
            os.write(ours, b"\x03")
            assert launcher.wait(timeout=PATIENCE_S) == 128 + signal.SIGINT
        finally:
            launcher.kill()
            os.close(ours)
    assert [json.loads((tmp_path / f"tty-{rank}").read_text()) for rank in range(2)] == [True, False]
    assert [log(tmp_path, rank) for rank in range(2)] == ["stopped by SIGTERM\n"] * 2


def test_ranks_do_not_wait_for_ever_for_a_launcher_that_is_stopped(tmp_path):
    code = """
from shardwise.launch.signals import exit_with_parent
exit_with_parent(os.environ)
meet()
time.sleep(600)
"""
    program = launcher_script(tmp_path, code).replace("grace_s", "timeout_s=0.5, grace_s")
    with subprocess.Popen([sys.executable, "-c", program]) as launcher:
        try:
            assert wait_until(lambda: len(list(tmp_path.glob("pid-?"))) == 2)
            launcher.send_signal(signal.SIGSTOP)
            pids = noted_pids(tmp_path)
            assert wait_until(lambda: not any(map(is_running, pids)))
        finally:
            launcher.kill()
    said = r"shardwise: the launcher has been stopped for \d+ s; this rank ends with it\n"
    assert re.fullmatch(said, log(tmp_path, 1))


def test_a_rank_that_stays_stopped_ends_the_run_and_is_named(launch, capfd, monkeypatch):
    monkeypatch.setattr(local, "_NOTICE_S", 0.0)
    code = DEAF + "os.kill(os.getpid(), signal.SIGSTOP if rank == 1 else 0); time.sleep(600)"
    assert launch(code, timeout_s=0.5, failure_grace_s=0.3) == 1
    message = capfd.readouterr().err
    assert re.search(r"rank 1 was stopped \(SIGSTOP or Ctrl-Z\) for \d+ s when the run ended", message)
    assert "rank 0 was" not in message


def test_a_rank_that_was_woken_is_not_said_to_be_stopped(launch, capfd, monkeypatch):
    monkeypatch.setattr(local, "_LOOK_S", 0.3)
    code = """
meet()
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)
other = json.loads((folder / "pid-1").read_text())
while Path(f"/proc/{other}/stat").read_text().rpartition(")")[2].split()[0] != "T":
    time.sleep(0.01)
time.sleep(1.0)  # in which the launcher looks
os.kill(other, signal.SIGCONT)
sys.exit(3)
"""
    assert launch(code, failure_grace_s=0.3) == 3
    message = capfd.readouterr().err
    assert "rank 0 exited with code 3" in message
    assert "was stopped" not in message


def test_a_rank_that_is_stopped_hears_the_request_to_stop(launch, tmp_path, capfd):
    code = (
        STOPPABLE
        + """
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
else:
    other = json.loads((folder / "pid-1").read_text())
    while Path(f"/proc/{other}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.01)
    os.kill(os.getppid(), signal.SIGTERM)
time.sleep(600)
"""
    )
    assert launch(code, grace_s=PATIENCE_S) == 128 + signal.SIGTERM
    assert [log(tmp_path, rank) for rank in range(2)] == ["stopped by SIGTERM\n"] * 2


def test_a_rank_that_a_request_to_stop_kills_leaves_the_others_little_time(launch, capfd):
    code = """
signal.signal(signal.SIGTERM, signal.SIG_DFL if rank else signal.SIG_IGN); meet()
if rank == 0:
    os.kill(os.getppid(), signal.SIGTERM)
time.sleep(600)
"""
    assert launch(code, grace_s=600, failure_grace_s=0.3) == 128 + signal.SIGTERM
    assert "killed, not having stopped in time: ranks 0\n" in capfd.readouterr().err


def test_no_ranks_are_refused(tmp_path):
    with refused("num-ranks-below-one", "num_ranks=0"):
        launch_local(["-c", ""], 0, tmp_path)


@pytest.mark.parametrize(
    ("device", "num_gpus", "num_cores", "expected"),
    [("auto", 4, 2, 4), ("auto", 0, 64, 2), ("auto", 0, 1, 1), ("cpu", 4, 2, 2), ("cuda", 3, 1, 3)],
)
def test_default_num_ranks(monkeypatch, device, num_gpus, num_cores, expected):
    FakeDevice("cuda", num_gpus).install(monkeypatch)
    monkeypatch.setattr(local, "num_cores", lambda: num_cores)
    assert default_num_ranks(device) == expected


def test_cuda_without_gpus_is_refused(monkeypatch):
    FakeDevice("cuda", num_devices=0).install(monkeypatch)
    with refused("no-gpu", "run.device=cuda"):
        default_num_ranks("cuda")
