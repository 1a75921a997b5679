"""Two processes of one group, outside of the pool, of which one is killed: what the other is refused with."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from harness.refusals import refusal_of
from harness.waiting import PATIENCE_S

Act = Callable[[int], Callable[[], Any]]


def refusal_after_a_kill(prepare: Act, silent_s: float) -> tuple[str, str]:
    """The refusal of rank 0.

    Args:
        prepare: is called with the rank, and returns what rank 0 is refused in; on rank 1 either kills the process.
        silent_s: how long the one that lives waits for an answer of the other.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    processes = [context.Process(target=_run, args=(prepare, rank, store.port, theirs, silent_s)) for rank in range(2)]
    for process in processes:
        process.start()
    assert ours.poll(PATIENCE_S)
    found: tuple[str, str] = ours.recv()
    for process in processes:
        process.join(PATIENCE_S)
    return found


def _run(prepare: Act, rank: int, port: int, answers: Any, silent_s: float) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=PATIENCE_S))
    run = prepare(rank)
    with mock.patch("shardwise.comm.watchdog._ANSWER_S", silent_s):
        answers.send(refusal_of(run))
    os._exit(0)
