"""How ranks meet and leave: who is missing, what an earlier attempt left, and an end without an abort."""

import dataclasses
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from harness.refusals import refused
from harness.waiting import PATIENCE_S, wait_until
from shardwise.launch import process_group as group
from shardwise.launch.environment import RankEnv
from shardwise.launch.local import launch_local
from shardwise.launch.process_group import LaunchError, gpu_index, meet, start_process_group, warn_of_few_queues

RANK_SCRIPT = """
import atexit, contextlib, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from shardwise.launch.environment import detect, lone_rank
from shardwise.launch.process_group import leave, start_process_group, stop_process_group

torch.set_num_threads(1)
folder = Path(sys.argv[1])
env = detect(os.environ)
start_process_group(env, "cpu", timeout_s=60.0)
total = torch.tensor([env.rank + 1.0])
"""


def rank_env(rank: int, world_size: int = 3, **changes) -> RankEnv:
    env = RankEnv(rank, rank, world_size, world_size, "127.0.0.1", 29500, attempt=0, launcher="torchrun")
    return dataclasses.replace(env, **changes)


def meet_all(store: dist.Store, envs: list[RankEnv], timeout_s: float = PATIENCE_S) -> list:
    """What `meet` returns or raises on each of the ranks, which are threads here."""

    def one(env: RankEnv):
        try:
            return meet(env, store, timeout_s)
        except LaunchError as error:
            return error

    with ThreadPoolExecutor(len(envs)) as pool:
        return list(pool.map(one, envs))


def test_a_store_that_accepts_and_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the process of rank 0 is stopped: torch's own time-out does not hold then."""
    monkeypatch.setattr(group, "_VERDICT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        env = rank_env(1, 2, master_port=silent.getsockname()[1], launcher="slurm")
        with refused("rank-zero-unreachable", "rank 1", f"127.0.0.1:{env.master_port}", "0.5 s"):
            start_process_group(env, "cpu", timeout_s=0.5)


def test_a_store_that_falls_silent_while_torch_connects_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "_VERDICT_S", 0.1)
    monkeypatch.setattr(group, "_open_store", lambda env, timeout_s: dist.HashStore())
    monkeypatch.setattr(group, "meet", lambda env, store, timeout_s: store)
    may_end = threading.Event()
    monkeypatch.setattr(group.dist, "init_process_group", lambda *args, **kwargs: may_end.wait(PATIENCE_S))
    with refused("store-silent", "rank 1", "127.0.0.1:29500"):
        start_process_group(rank_env(1, 2, launcher="slurm"), "cpu", timeout_s=0.2)
    may_end.set()


def end_once_come(monkeypatch: pytest.MonkeyPatch, store: dist.Store, rank: int) -> None:
    """The next meeting's time is over when the rank has come and been answered, however long that takes."""
    hello = store.get(f"hello/{rank}") if store.check([f"hello/{rank}"]) else b""

    def has_come() -> bool:
        if not store.check([f"hello/{rank}"]) or (number := store.get(f"hello/{rank}")) == hello:
            return False
        answer = f"answer/{number.decode()}"
        return store.check([answer]) and store.check([f"{store.get(answer).decode()}/arrived/{rank}"])

    monkeypatch.setattr("shardwise.launch.process_group._VERDICT_S", PATIENCE_S)
    monkeypatch.setattr("shardwise.launch.process_group.time.monotonic", lambda: 1.0 if has_come() else 0.0)


def test_all_ranks_share_a_part_of_the_store_that_is_new_in_each_attempt():
    store = dist.HashStore()
    first = meet_all(store, [rank_env(rank) for rank in range(3)])
    first[0].set("address", "of the first attempt")
    assert [part.get("address") for part in first] == [b"of the first attempt"] * 3
    # A restart that only one machine counts: rank 1's launcher says attempt 1, the others' still attempt 0.
    second = meet_all(store, [rank_env(rank, attempt=int(rank == 1)) for rank in range(3)])
    assert not any(part.check(["address"]) for part in second)
    second[0].set("address", "of the second")
    assert second[2].get("address") == b"of the second"


def test_missing_ranks_are_named_to_all_that_came(monkeypatch):
    store = dist.HashStore()
    end_once_come(monkeypatch, store, 2)
    errors = meet_all(store, [rank_env(0, 4), rank_env(2, 4)], timeout_s=0.3)
    assert len({str(error) for error in errors}) == 1
    assert errors[0].code == "ranks-missing"
    for value in (
        "ranks 1, 3 of 4",
        "127.0.0.1:29500",
        "0.3 s",
        f"0 on {socket.gethostname()} (process {os.getpid()})",
    ):
        assert value in str(errors[0])


def test_a_list_of_very_many_missing_ranks_is_cut():
    (error,) = meet_all(dist.HashStore(), [rank_env(0, 100)], timeout_s=0.05)
    assert "ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16 and 83 more of 100" in str(error)


def test_ranks_that_came_in_vain_do_not_count_in_the_next_attempt():
    store = dist.HashStore()
    with pytest.MonkeyPatch.context() as patch:
        end_once_come(patch, store, 2)
        meet_all(store, [rank_env(0), rank_env(2)], timeout_s=0.1)
        end_once_come(patch, store, 1)
        errors = meet_all(store, [rank_env(0), rank_env(1)], timeout_s=0.3)
    assert errors[0].code == "ranks-missing"
    assert "ranks 2 of 3" in str(errors[0])
    assert all(isinstance(part, dist.Store) for part in meet_all(store, [rank_env(rank) for rank in range(3)]))


def test_a_rank_restarted_while_the_others_meet_is_answered_again():
    """Under torchrun's static rendezvous each machine restarts its own ranks, whatever the others wait for."""
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        rank_0 = pool.submit(meet, rank_env(0), store, PATIENCE_S)
        dead = pool.submit(meet, rank_env(1), store, PATIENCE_S)
        hello = store.get("hello/1")
        store.wait([f"{store.get(f'answer/{hello.decode()}').decode()}/arrived/1"])
        time.sleep(0.1)  # several polls: rank 0 knows that rank 1 has come
        restarted = pool.submit(meet, rank_env(1), store, PATIENCE_S)
        assert wait_until(lambda: store.get("hello/1") != hello)
        second = store.get("hello/1").decode()
        store.wait([f"answer/{second}"], timedelta(seconds=PATIENCE_S))
        meet(rank_env(2), store, PATIENCE_S).set("address", "of the second")
        assert {part.result().get("address") for part in (rank_0, dead, restarted)} == {b"of the second"}


def test_without_rank_0_the_others_say_so(monkeypatch):
    monkeypatch.setattr("shardwise.launch.process_group._VERDICT_S", 0.0)
    (error,) = meet_all(dist.HashStore(), [rank_env(1)], timeout_s=0.2)
    assert error.code == "rank-zero-absent"
    assert "127.0.0.1:29500" in str(error)
    assert "0.2 s" in str(error)


def test_a_taken_port_is_a_users_mistake_and_a_closed_one_names_rank_0():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with refused("port-taken", f"127.0.0.1:{port}", "MASTER_PORT"):
            start_process_group(rank_env(0, master_port=port), "cpu", timeout_s=1.0)
    with refused("rank-zero-unreachable", "rank 1", f"127.0.0.1:{port}", "0.5 s"):
        start_process_group(rank_env(1, master_port=port), "cpu", timeout_s=0.5)


@pytest.mark.parametrize(
    ("launcher", "local_rank", "num_gpus", "expected"),
    [("torchrun", 2, 4, 2), ("slurm", 2, 4, 2), ("slurm", 2, 1, 0), ("local", 0, 1, 0)],
)
def test_gpu_of_a_rank(launcher, local_rank, num_gpus, expected):
    assert gpu_index(rank_env(local_rank, launcher=launcher), num_gpus) == expected


@pytest.mark.parametrize(("launcher", "num_gpus"), [("torchrun", 1), ("slurm", 2), ("slurm", 0)])
def test_a_rank_without_a_gpu_is_refused(launcher, num_gpus):
    with refused("rank-without-gpu", "local rank 2", f"{num_gpus} GPUs"):
        gpu_index(rank_env(2, launcher=launcher), num_gpus)


LISTENING = """
own = {os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}
rows = [line.split() for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
addresses = [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
(folder / f"listening-{env.rank}").write_text(" ".join(addresses))
leave(0)
"""


@pytest.mark.usefixtures("warm_python")
def test_ranks_of_one_machine_listen_on_loopback_alone(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RANK_SCRIPT + LISTENING)
    environ = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}
    assert launch_local([str(script), str(tmp_path)], 2, tmp_path / "logs", environ=environ) == 0
    found = [(tmp_path / f"listening-{rank}").read_text().split() for rank in range(2)]
    assert all(found)
    assert {address[-8:] for addresses in found for address in addresses} == {"0100007F"}  # 127.0.0.1, in hexadecimal


def test_real_ranks_meet_reduce_wait_for_each_other_and_leave(tmp_path, capfd):
    script = tmp_path / "script.py"
    script.write_text(
        RANK_SCRIPT
        + """
dist.all_reduce(total)
if env.rank == 0:
    (folder / "pid").write_text(str(os.getpid()))
if env.rank == 1:
    time.sleep(0.3)
    (folder / "came").touch()
stop_process_group()
waited = (folder / "came").exists()
start_process_group(lone_rank(), "cpu", timeout_s=60.0)
atexit.register(print, "the interpreter's own end")
print(total.item(), waited, dist.get_world_size(), end="")  # neither newline nor flush
if env.rank == 0:
    leave(0)
with contextlib.suppress(ProcessLookupError):  # rank 0 is fetched first, and does not fail
    while True:
        os.kill(int((folder / "pid").read_text()), 0)
        time.sleep(0.01)
leave(7)
"""
    )
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    assert launch_local([str(script), str(tmp_path)], 2, tmp_path / "logs", environ=buffered) == 7
    out, err = capfd.readouterr()
    assert out == "3.0 True 1"
    assert "rank 1 exited with code 7: 3.0 True 1" in err
    assert (tmp_path / "logs" / "rank-0.log").read_text() == ""


@pytest.mark.parametrize(
    ("device", "num_stages", "number", "warns"),
    [
        *(("cuda", 2, number, True) for number in (None, "8", "")),
        ("cuda", 2, "32", False),
        ("cuda", 1, None, False),
        ("cpu", 2, None, False),
    ],
)
def test_a_pipeline_with_few_queues_is_warned_of(monkeypatch, caplog, device, num_stages, number, warns):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if number is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", number)
    warn_of_few_queues(device, num_stages)
    assert any("CUDA_DEVICE_MAX_CONNECTIONS=32" in message for message in caplog.messages) == warns
