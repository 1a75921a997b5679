"""What is said about a rank that died, and which of several is named."""

import signal

import pytest

from shardwise.launch import exit_report
from shardwise.launch.exit_report import RankExit, describe_exit, exit_code, first_cause, report, tail

TRACEBACK = ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "    main()"]
LOST = [*TRACEBACK, "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9"]
IN_COMM = [*TRACEBACK, "CommError: rank 0 failed in all_gather #5 of a over dp_shard: rank 1 has not started"]
OWN = [*TRACEBACK, "ValueError: no such data"]
THREAD = ["Exception in thread shardwise-saver:", *TRACEBACK, "OSError: a socket"]
LOGGED = "2026-03-01 10:00:00,123 INFO shardwise: "


@pytest.fixture
def ended(tmp_path):
    def make(rank, returncode, log=(), sent=()) -> RankExit:
        path = tmp_path / f"rank-{rank}.log"
        path.write_text("\n".join(log))
        return RankExit(rank, returncode, path, tuple(sent))

    return make


@pytest.mark.parametrize(
    ("returncode", "log", "expected"),
    [
        (-9, OWN, "killed by SIGKILL: out of memory, or kill -9"),
        (-11, [], "killed by SIGSEGV: segmentation fault"),
        (-15, [], "killed by SIGTERM"),
        (-63, [], "killed by signal 63"),
        (1, OWN, "exited with code 1: ValueError: no such data"),
        (1, [f"[rank1]: {line}" for line in OWN], "exited with code 1: ValueError: no such data"),
        (1, [*LOST, "During handling of it, another:", *OWN, "warning: 3 leaked semaphores"], "exited with code 1: "
         "ValueError: no such data"),
        (2, ["step 1", "error: lr=-1 is not positive"], "exited with code 2: error: lr=-1 is not positive"),
        (3, [], "exited with code 3"),
        (1, TRACEBACK, "exited with code 1"),  # cut off
        (1, [*THREAD, "the disk is full [disk-full]"], "exited with code 1: the disk is full [disk-full]"),
        (1, [*THREAD, *OWN], "exited with code 1: ValueError: no such data"),
        (1, [*OWN, *THREAD], "exited with code 1: ValueError: no such data"),
        (1, [*OWN, f"{LOGGED}step 7", "no disk [disk-full]"], "exited with code 1: no disk [disk-full]"),
        (1, [*OWN, f"{LOGGED}the loss is not finite"], "exited with code 1: the loss is not finite"),
        (1, [*OWN, "rank 1 failed: TypeError: no"], "exited with code 1: rank 1 failed: TypeError: no"),
        (1, [*OWN, "more of it [rank-absent]", "UserWarning: leaked"], "exited with code 1: more of it [rank-absent]"),
        (1, [*OWN, "which torch says in two lines"], "exited with code 1: ValueError: no such data"),
        (1, THREAD, "exited with code 1: OSError: a socket"),
    ],
)  # fmt: skip
def test_describe_exit(returncode, log, expected):
    assert describe_exit(returncode, log) == expected


TERM, KILL = signal.SIGTERM, signal.SIGKILL


@pytest.mark.parametrize(
    ("exits", "cause"),
    [
        ([(0, 0, []), (1, 0, [])], None),
        ([(0, 1, OWN), (1, -9, [])], 0),  # the first
        ([(0, 1, LOST), (1, -9, [])], 1),  # not the one that lost its peer
        ([(0, 1, LOST), (1, 1, OWN, [TERM])], 1),
        ([(0, 1, IN_COMM), (1, 1, OWN, [TERM])], 1),
        ([(0, 1, LOST), (1, 1, LOST)], 0),  # no better one
        ([(0, -15, [], [TERM]), (1, 143, [], [TERM])], None),  # as asked
        ([(0, -9, [], [TERM, KILL])], None),
        ([(0, -9, [], [TERM])], 0),  # not by the launcher
        ([(0, -15, [])], 0),
        ([(0, -15, [], [TERM]), (1, 1, LOST, [TERM])], None),  # stopped while the ranks were meeting
        ([(0, 1, OWN, [TERM])], 0),
    ],
)
def test_first_cause(ended, exits, cause):
    found = first_cause([ended(*exit_) for exit_ in exits])
    assert (found and found.rank) == cause


def test_a_report_has_rank_reason_path_and_the_last_lines(ended):
    rank_exit = ended(3, 1, [*(f"step {number}" for number in range(40)), "x" * 1000, *OWN])
    lines = report(rank_exit).splitlines()
    assert lines[0] == "shardwise: rank 3 exited with code 1: ValueError: no such data"
    assert str(rank_exit.log_path) in lines[1]
    assert lines[2] == "  | step 30"
    assert lines[-1] == "  | ValueError: no such data"
    assert len(lines) == 17
    assert max(map(len, lines[2:])) < 320


def test_a_report_on_a_full_disk_says_that_the_log_may_be_cut(ended, monkeypatch):
    monkeypatch.setattr(exit_report, "is_full", lambda folder: True)
    assert report(ended(0, 1, OWN)).endswith("ValueError: no such data\nits disk is full, so the log may lack its end")


def test_the_tail_of_no_log_an_empty_one_and_a_long_one(tmp_path):
    assert tail(tmp_path / "none.log") == []
    (tmp_path / "long.log").write_bytes(b"\xff line\r\n" * 100_000 + "größer\n\n".encode())
    lines = tail(tmp_path / "long.log")
    assert lines[-1] == "größer"
    assert 1000 < len(lines) < 20_000


def test_a_report_on_a_refused_config_is_the_line_alone(ended):
    rank_exit = ended(0, 2, [f"{LOGGED}begins", "lr=-1 is not positive [value-range]"])
    assert report(rank_exit) == "shardwise: lr=-1 is not positive [value-range]"


def test_a_report_on_an_empty_log_says_so(ended):
    assert report(ended(0, -9)).endswith("| (empty: it ended while it started, before it had anything to say)")


def test_exit_codes_are_the_shells():
    assert [exit_code(returncode) for returncode in (0, 3, -9)] == [0, 3, 137]
