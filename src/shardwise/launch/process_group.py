"""This module joins the process group and leaves it. It creates no other groups (`shardwise.comm.mesh` does) and runs
no collectives.

Ranks meet in two steps. First each says through the store that it has come, and rank 0 waits for all: so a missing rank
is named, and no rank takes keys of an earlier attempt for those of this one. Then torch connects them.

    start_process_group(detect(os.environ) or lone_rank(), "cpu", timeout_s=300.0)
    exit_code = train(config)
    leave(exit_code)
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from shardwise.comm.store import PatientStore, StoreSilentError, ask_in_time
from shardwise.config.errors import CodedError, ConfigError
from shardwise.config.sections import DeviceName
from shardwise.launch.environment import NUM_QUEUES, QUEUES_NAME, RankEnv, detect, lone_rank
from shardwise.runtime.device import KINDS, backends_of, current_device, num_devices, use_device
from shardwise.runtime.memory_tracker import first_line

log = logging.getLogger(__name__)

_POLL_S = 0.01
# Rank 0 finds out who is missing; the others wait this much longer for its answer.
_VERDICT_S = 5.0
_COMPLETE = "complete"
_NUM_NAMED = 16


class LaunchError(CodedError, RuntimeError):
    """The ranks did not meet; the message says who is missing, or where to look."""


def ensure_process_group(device: DeviceName, timeout_s: float) -> int:
    """Return the world size; join a process group first where there is none, and make the rank's GPU the current one.

    The ranks are those of the launcher that the environment names; without one, this process alone. A process group
    that the caller has started is used as it is.

    Raises:
        ConfigError: the environment is incomplete, this rank has no GPU, or the port is taken.
        LaunchError: the ranks did not meet within `timeout_s`.
    """
    if not dist.is_initialized():
        start_process_group(detect(os.environ) or lone_rank(), device, timeout_s)
    elif num_devices(KINDS[device]) and dist.is_torchelastic_launched():
        use_device(torch.device(device, dist.get_node_local_rank(fallback_rank=0)))
    return dist.get_world_size()


def join_named(init_method: str | None, rank: int, world_size: int, device: DeviceName, timeout_s: float) -> int:
    """Return the world size as `ensure_process_group` does, for a caller that says itself which rank this is.

    Where the environment says the same, the ranks meet as it says. The caller chooses its GPU.

    Args:
        init_method: torch's URL of where ranks meet; None for MASTER_ADDR and MASTER_PORT.
        rank: of this process; below 0 where the URL or the environment says it, and so is `world_size`.

    Raises:
        LaunchError: the ranks could not meet so.
    """
    try:
        env = detect(os.environ)
    except ConfigError:  # of an environment that is not complete, as the caller says the rest
        env = None
    is_same = env is not None and (rank < 0 or (env.rank, env.world_size) == (rank, world_size))
    if dist.is_initialized() or is_same:
        return ensure_process_group(device, timeout_s)
    backend = backends_of(KINDS[device])
    rendezvous: dict[str, Any] = {"init_method": init_method, "rank": rank, "world_size": world_size}
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **rendezvous)
    except (RuntimeError, ValueError) as error:
        raise LaunchError(
            "ranks-not-connected",
            f"rank={rank} of world_size={world_size} could not meet the others by init_method={init_method}: "
            f"{first_line(error)}; give all ranks the same init_method, each its rank, and all the same world_size",
        ) from error
    return dist.get_world_size()


def join_launched(device: DeviceName, timeout_s: float) -> int:
    """Return the world size as `ensure_process_group` does, but leave a process without a launcher alone."""
    if not dist.is_initialized() and detect(os.environ) is None:
        return 1
    return ensure_process_group(device, timeout_s)


def start_process_group(env: RankEnv, device: DeviceName, timeout_s: float) -> None:
    """Join the default process group: gloo, with another for tensors on GPUs; make the rank's GPU the current one.

    Args:
        env: this rank's place; a world of one needs no port, and without a launcher it keeps the GPU that is current.
        timeout_s: seconds for the ranks to meet, and later for each collective.

    Raises:
        ConfigError: this rank has no GPU, or the port is taken.
        LaunchError: the ranks did not meet within `timeout_s`.
    """
    row = KINDS[device]
    num_gpus = num_devices(row)
    if num_gpus and env.launcher != "none":
        use_device(torch.device(device, gpu_index(env, num_gpus)))
    store = dist.HashStore() if env.world_size == 1 else meet(env, _open_store(env, timeout_s), timeout_s)
    backend = backends_of(row)
    places: dict[str, Any] = {"store": store, "rank": env.rank, "world_size": env.world_size}
    rank_device = current_device(row)

    def connect() -> None:
        use_device(rank_device)
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **places)

    try:
        ask_in_time(connect, timeout_s + _VERDICT_S)
    except StoreSilentError as error:
        raise LaunchError(
            "store-silent",
            f"rank {env.rank} met the others but waits since for {timeout_s:g} s to be connected to them: what holds "
            f"the store at {env.master_addr}:{env.master_port}, rank 0 or the launcher, does not answer; see its log",
        ) from error
    except RuntimeError as error:
        raise LaunchError(
            "ranks-not-connected",
            f"rank {env.rank} met the others but could not connect to them: {first_line(error)}; if the machine has "
            f"several networks, name the right one in GLOO_SOCKET_IFNAME (on GPUs also NCCL_SOCKET_IFNAME)",
        ) from error


def warn_of_few_queues(device: DeviceName, num_stages: int) -> None:
    """Warn of a pipeline on CUDA whose streams may wait for each other, as the environment allows too few queues."""
    if num_stages > 1 and KINDS[device].queues == "streams" and torch.version.cuda is not None:
        number = os.environ.get(QUEUES_NAME, "8")
        if not number.isdecimal() or int(number) < NUM_QUEUES:
            log.warning(
                "%s=%s: a pipeline's streams share a GPU's queues then, and messages may wait for each other; set "
                "%s=%d before the program starts",
                *(QUEUES_NAME, number, QUEUES_NAME, NUM_QUEUES),
            )


def stop_process_group(timeout_s: float = 60.0) -> None:
    """Leave the process group once all ranks have come here, or after `timeout_s`; without a group, do nothing."""
    if dist.is_initialized():
        _wait_for_all(timeout_s)
        dist.destroy_process_group()


def leave(exit_code: int, timeout_s: float = 60.0) -> NoReturn:
    """End this process with `exit_code` at once, without the interpreter's own end, in which gloo may abort.

    With exit code 0 the ranks first wait for each other. stdout, stderr and logging are flushed; nothing else is: files
    must be closed and threads joined before.
    """
    if exit_code == 0 and dist.is_initialized():
        _wait_for_all(timeout_s)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


def gpu_index(env: RankEnv, num_gpus: int) -> int:
    """Return the GPU of a rank: its local rank; the only one, where Slurm shows each task its own.

    >>> gpu_index(RankEnv(3, 3, 4, 4, "n1", 10000, attempt=0, launcher="slurm"), num_gpus=1)
    0
    """
    if env.launcher == "slurm" and num_gpus == 1:
        return 0
    if env.local_rank >= num_gpus:
        raise ConfigError(
            "rank-without-gpu",
            f"local rank {env.local_rank} has no GPU: {env.local_world_size} ranks were started on this machine and "
            f"torch sees {num_gpus} GPUs; start at most one rank a GPU",
        )
    return env.local_rank


def meet(env: RankEnv, store: dist.Store, timeout_s: float) -> dist.Store:
    """Wait until all ranks have come, and return a part of `store` that no earlier attempt has written to.

    A launcher's count of restarts is its own machine's, and its store may live on from attempt to attempt. So each
    rank shows a number drawn at random, and rank 0 answers that number with the name of the attempt.

    Raises:
        LaunchError: not all came within `timeout_s`.
    """
    asked = PatientStore(store, max(timeout_s, _VERDICT_S))  # that ranks are late does not make the store silent
    if env.rank == 0:
        attempt = f"attempt-{env.attempt}-{uuid.uuid4().hex}"
        missing = _await_ranks(env, asked, attempt, timeout_s)
        verdict = _missing_text(env, asked, attempt, missing, timeout_s) if missing else _COMPLETE
        asked.set(f"{attempt}/verdict", verdict)
    else:
        attempt, verdict = _ask_to_join(env, asked, timeout_s + _VERDICT_S)
    if verdict != _COMPLETE:
        raise LaunchError("ranks-missing", verdict)
    return dist.PrefixStore(attempt, store)


def _open_store(env: RankEnv, timeout_s: float) -> dist.Store:
    hosts = env.rank == 0 and not env.agent_store
    try:
        patience: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "wait_for_workers": False}
        # torch's own time-out does not work where the store's host accepts the connection and then is silent.
        return ask_in_time(
            partial(dist.TCPStore, env.master_addr, env.master_port, is_master=hosts, **patience),
            timeout_s + _VERDICT_S,
        )
    except RuntimeError as error:
        address = f"{env.master_addr}:{env.master_port}"
        if hosts:
            raise ConfigError(
                "port-taken", f"rank 0 cannot listen on {address}: {first_line(error)}; choose a free MASTER_PORT"
            ) from error
        raise LaunchError(
            "rank-zero-unreachable",
            f"rank {env.rank} on {socket.gethostname()} could not reach rank 0 at {address} within {timeout_s:g} s: "
            f"see rank 0's log, and check that MASTER_ADDR and MASTER_PORT can be reached from here",
        ) from error


def _await_ranks(env: RankEnv, store: dist.Store, attempt: str, timeout_s: float) -> list[int]:
    """Answer, on rank 0, the ranks that come, for at most `timeout_s`; return those that are missing."""
    deadline_s = time.monotonic() + timeout_s
    missing = list(range(1, env.world_size))
    answered: set[str] = set()
    store.set(f"{attempt}/arrived/0", _own_name())
    is_over = False
    while missing and not is_over:
        # Before the look: a rank that came while this process slept, or the machine did, has come in time.
        is_over = time.monotonic() >= deadline_s
        # A rank that has come may have been restarted since, where each machine restarts by itself. The hello of an
        # earlier attempt may still be there; to answer it does no harm, its asker is gone.
        for rank in range(1, env.world_size):
            if store.check([f"hello/{rank}"]) and (hello := store.get(f"hello/{rank}").decode()) not in answered:
                store.set(f"answer/{hello}", attempt)
                answered.add(hello)
        missing = [rank for rank in missing if not store.check([f"{attempt}/arrived/{rank}"])]
        time.sleep(_POLL_S)
    return missing


def _ask_to_join(env: RankEnv, store: dist.Store, timeout_s: float) -> tuple[str, str]:
    """Return, on the other ranks, the name of the attempt and rank 0's verdict on it."""
    hello = uuid.uuid4().hex
    timeout = timedelta(seconds=timeout_s)
    try:
        store.set(f"hello/{env.rank}", hello)
        store.wait([f"answer/{hello}"], timeout)
        attempt = store.get(f"answer/{hello}").decode()
        store.set(f"{attempt}/arrived/{env.rank}", _own_name())
        store.wait([f"{attempt}/verdict"], timeout)
        return attempt, store.get(f"{attempt}/verdict").decode()
    except RuntimeError as error:
        raise LaunchError(
            "rank-zero-absent",
            f"rank {env.rank} on {_own_name()} waited for rank 0 at {env.master_addr}:{env.master_port}, which did not "
            f"come within {timeout_s:g} s or went away: see rank 0's log ({first_line(error)})",
        ) from error


def _missing_text(env: RankEnv, store: dist.Store, attempt: str, missing: list[int], timeout_s: float) -> str:
    arrived = [rank for rank in range(env.world_size) if rank not in missing]
    names = [f"{rank} on {store.get(f'{attempt}/arrived/{rank}').decode()}" for rank in arrived[:_NUM_NAMED]]
    return (
        f"ranks {_listed(missing)} of {env.world_size} did not come to {env.master_addr}:{env.master_port} within "
        f"{timeout_s:g} s (there are: {_listed(names, len(arrived))}); see the logs of the missing ranks, or allow "
        f"them more time with run.timeout_s"
    )


def _listed(items: Iterable[object], num_items: int | None = None) -> str:
    """Format the first few items, and how many more there are."""
    shown = [str(item) for item in items]
    num_more = (num_items or len(shown)) - _NUM_NAMED
    return ", ".join(shown[:_NUM_NAMED]) + (f" and {num_more} more" if num_more > 0 else "")


def _wait_for_all(timeout_s: float) -> None:
    """Return when every rank is here; rank 0, which may hold the store, last. Ignore a time-out: the work is done."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    others = range(1, world_size)
    group = dist.group.WORLD
    if world_size == 1 or group is None:
        return
    store, timeout = PatientStore(group.get_group_store(), _VERDICT_S), timedelta(seconds=timeout_s)
    with contextlib.suppress(RuntimeError):
        if rank == 0:
            store.wait([f"leaving/{other}" for other in others], timeout)
            store.set("leaving/0", "")
            store.wait([f"left/{other}" for other in others], timeout)
        else:
            store.set(f"leaving/{rank}", "")
            store.wait(["leaving/0"], timeout)
            store.set(f"left/{rank}", "")


def _own_name() -> str:
    return f"{socket.gethostname()} (process {os.getpid()})"
