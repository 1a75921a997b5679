"""The flag that stop signals set, in this process; the end with the launcher is tested in `test_local`."""

import os
import signal
from contextlib import suppress

import pytest

from shardwise.launch import rank
from shardwise.launch.rank import StopFlag, exit_with_parent, install_stop_signal


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


def test_a_later_ctrl_c_interrupts(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(rank.time, "monotonic", lambda: now_s)
    stop = StopFlag()
    stop.request(signal.SIGINT)
    now_s = 110.0
    stop.request(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        stop.request(signal.SIGINT)


def test_an_ignored_signal_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop = install_stop_signal()
    os.kill(os.getpid(), signal.SIGINT)
    assert not stop


def test_without_the_local_launcher_nobody_is_watched():
    exit_with_parent({"RANK": "0"})
