"""The flag that stop signals set, in this process; the end with the launcher is tested in `test_launcher`."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from harness.waiting import PATIENCE_S, wait_until
from shardwise.launch import signals as rank
from shardwise.launch.environment import LAUNCHER_FD, LAUNCHER_PATIENCE_S
from shardwise.launch.signals import StopFlag, exit_with_parent, install_stop_signal

pytestmark = pytest.mark.usefixtures("warm_python")


@pytest.fixture(autouse=True)
def _handlers_back():
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_flag_and_nothing_else(signum):
    stop = install_stop_signal()
    assert not stop
    assert stop.signal_name is None
    with stop.armed():
        os.kill(os.getpid(), signum)
    assert stop
    assert stop.signal_name == signum.name


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_kills_before_and_after_the_steps(signum):
    stop = install_stop_signal()
    found = [signal.getsignal(signum)]
    with suppress(ZeroDivisionError), stop.armed():
        found.append(signal.getsignal(signum))
        raise ZeroDivisionError
    found.append(signal.getsignal(signum))
    assert [handler is signal.SIG_DFL for handler in found] == [True, False, True]


def test_the_first_signal_is_the_one_named():
    stop = install_stop_signal()
    with stop.armed():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)  # at once: the same request by another way
    assert stop.signal_name == "SIGTERM"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_later_signal_interrupts(monkeypatch, signum):
    now_s = 100.0
    monkeypatch.setattr(rank.time, "monotonic", lambda: now_s)
    stop = StopFlag()
    stop.request(signal.SIGINT)
    now_s = 101.0
    stop.request(signal.SIGTERM)  # the same request by another way
    now_s = 110.0
    with pytest.raises(KeyboardInterrupt):
        stop.request(signum)


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop = install_stop_signal()
    os.kill(os.getpid(), signal.SIGINT)
    assert not stop


@pytest.mark.parametrize("descriptor", [None, "", "abc", "-3", "0", "9" * 30, "9999", "a file", "a closed pipe"])
def test_without_the_local_launcher_no_process_is_watched(descriptor, tmp_path):
    read_fd, write_fd = os.pipe()
    os.close(write_fd)
    os.close(read_fd)
    with (tmp_path / "file").open("w") as file:
        found = {"a file": str(file.fileno()), "a closed pipe": str(write_fd)}.get(descriptor, descriptor)
        exit_with_parent({"RANK": "0"} if found is None else {LAUNCHER_FD: found, LAUNCHER_PATIENCE_S: "soon"})
    assert "exit-with-parent" not in [thread.name for thread in threading.enumerate()]


# Waits in native code, where Python runs no handler. Argument: seconds for a step.
STUCK = """
import signal, sys
from datetime import timedelta
import torch.distributed as dist
from shardwise.launch.signals import install_stop_signal

for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, signal.SIG_DFL)
stop = install_stop_signal()
with stop.armed(float(sys.argv[1])):
    print("ready", flush=True)
    dist.HashStore().wait(["never"], timedelta(seconds=600))
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_a_second_signal_ends_a_rank_that_waits_in_native_code(signum):
    with subprocess.Popen([sys.executable, "-c", STUCK, "600"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as rank:
        try:
            rank.stdout.readline()
            rank.send_signal(signum)
            time.sleep(2.5)  # sooner, it were the same request by another way
            assert rank.poll() is None, "a step is let come to its end"
            rank.send_signal(signum)
            assert rank.wait(PATIENCE_S) == 128 + signum
        finally:
            rank.kill()
        assert "ends at once: it was asked to stop once more" in rank.stderr.read().decode()


def test_a_step_that_does_not_end_is_waited_for_as_long_as_ranks_wait_for_each_other():
    with subprocess.Popen([sys.executable, "-c", STUCK, "0.5"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as rank:
        try:
            rank.stdout.readline()
            rank.send_signal(signal.SIGTERM)
            assert rank.wait(PATIENCE_S) == 128 + signal.SIGTERM
        finally:
            rank.kill()
        assert "its step did not end within run.timeout_s=0.5" in rank.stderr.read().decode()


def test_a_save_is_let_come_to_its_end(monkeypatch):
    ends = []
    monkeypatch.setattr(rank, "_end", lambda signum, why: ends.append(signum))
    monkeypatch.setattr(rank, "_LOOK_S", 0.05)
    stop = install_stop_signal()
    with stop.armed(timeout_s=0.2):
        with stop.saving():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1.0)
            assert ends == []
        assert wait_until(lambda: ends != [])
