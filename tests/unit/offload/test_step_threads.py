"""Threads of one core each leave torch's threads elsewhere as they are, and hide no failure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from shardwise.offload.cpu_optimizer import StepThreads


@pytest.fixture
def threads() -> Iterator[StepThreads]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    made = StepThreads(2)
    yield made
    made.close()
    torch.set_num_threads(before)


def test_all_run_at_once_on_one_core_each(threads: StepThreads) -> None:
    both, seen = Barrier(2), []

    def look() -> None:
        both.wait(10)
        torch.randn(100_000).exp()
        seen.append(torch.get_num_threads())

    threads.run(look)
    threads.run(look)
    assert seen == [1] * 4


def test_other_threads_keep_theirs(threads: StepThreads) -> None:
    assert torch.get_num_threads() == 3
    with ThreadPoolExecutor(1) as fresh:
        assert fresh.submit(torch.get_num_threads).result() == 3


def test_by_default_they_are_as_many_as_torchs(threads: StepThreads) -> None:
    made = StepThreads()
    assert made.num_threads == 3
    made.close()
    made.close()


def test_a_failure_is_raised_when_all_have_ended(threads: StepThreads) -> None:
    items = iter([0, 1, 2, 3])

    def fail_at_one() -> None:
        for item in items:
            if item == 1:
                raise ZeroDivisionError(str(item))

    with pytest.raises(ZeroDivisionError, match="1"):
        threads.run(fail_at_one)
    assert list(items) == []


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no threads")
def test_they_keep_to_the_cores_that_are_named() -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    made, seen = StepThreads(2, (core,)), []
    made.run(lambda: seen.append(os.sched_getaffinity(0)))
    made.close()
    assert seen == [{core}] * 2
    assert os.sched_getaffinity(0) == before
