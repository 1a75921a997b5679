"""Fixtures and options of all tests: the pool of ranks, `--full`, fixed seeds, one thread."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import TypeVar
from zlib import crc32

import hypothesis
import numpy as np
import pytest
import torch

from harness.faults import NUM_RANKS, Whole, run_to_end, stored
from harness.pool import WorkerPool
from harness.snapshots import Snapshots
from harness.warm_python import WarmPython

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # last: tests have folders of the same names
torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported, here and in worker processes
# The same examples in every run: a suite that fails once in ten runs is a suite that is not trusted.
hypothesis.settings.register_profile("shardwise", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("shardwise")

Variant = TypeVar("Variant")
PARITY = Path(__file__).parent / "parity"
# To import them is to have a virtual GPU: they are for processes of their own.
collect_ignore = ["device/plugin.py", "device/process.py", "device/site"]
# How many times as long as a unit test one takes that starts ranks, about.
WEIGHTS = MappingProxyType({"parity": 10, "faults": 4})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`: all combinations")
    parser.addoption("--update-snapshots", action="store_true", help="write tests/data/snapshots again")


def pytest_configure() -> None:
    """What wakes shall not take the core from what runs, here and in all that tests start.

    A rank that sends wakes the receiver, which would run in its place; the answer then comes while the sender has the
    lock of the connection, and gloo's thread asks for that lock again and again: up to a fifth of all CPU time.
    """
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # a container may forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> list[pytest.Item] | None:
    """Of what `--full` alone runs the variants are not made: there are thousands, and each process would make them."""
    is_full = isinstance(obj, FunctionType) and any(mark.name == "full" for mark in getattr(obj, "pytestmark", ()))
    return [] if is_full and not collector.config.getoption("--full") else None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Where no example is written none is looked for: there are twenty thousand texts, and each process reads them."""
    found = yield
    if file_path.suffix == ".py" and ">>>" not in file_path.read_text():
        return [each for each in found if isinstance(each, pytest.Module)]
    return found


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Variants that do not run are left out of what their module has, so that pytest does not go through them."""
    report = yield
    if not collector.config.getoption("--full") and isinstance(collector, pytest.Module | pytest.Class):
        report.result = list(those_that_run(report.result or []))
    return report


def those_that_run(collected: Sequence[pytest.Item | pytest.Collector]) -> Iterator[pytest.Item | pytest.Collector]:
    for name, variants in groupby(collected, lambda each: getattr(each, "originalname", None)):
        kept = [each for each in variants if each.get_closest_marker("full") is None]
        mark = kept[0].get_closest_marker("quick") if kept else None
        if name is not None and (mark is not None or (kept and PARITY in kept[0].path.parents)):
            kept = some_of(kept, name, 1 if mark is None else mark.args[0])
        yield from kept


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        put_long_files_first(items)


def some_of(variants: list[Variant], name: str, num: int) -> list[Variant]:
    """Of a test marked `quick(n)`, or of a parity test without the mark (n = 1), the n variants that run.

    They lie evenly over all, the first and the last one among them. A single one is chosen by the test's name, so that
    over the suite all stages and ranks are met.
    """
    last = len(variants) - 1
    if last < num:
        return variants
    kept = {round(i * last / (num - 1)) for i in range(num)} if num > 1 else {crc32(name.encode()) % len(variants)}
    return [variants[i] for i in sorted(kept)]


def put_long_files_first(items: list[pytest.Item]) -> None:
    """Where processes share the files, none shall be left with a long one while the others have nothing more to do."""
    weights: Counter[Path] = Counter()
    for item in items:
        weights[item.path] += WEIGHTS.get(item.path.parent.name, 1)
    items.sort(key=lambda item: (item.get_closest_marker("begin") is None, -weights[item.path], str(item.path)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays: to look for garbage in it again and again takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Tests that collect garbage shall not look through half a million objects of modules and items each time."""
    gc.collect()
    gc.freeze()
    # A test that parses all sources makes a million objects that stay, which would be looked through every 700.
    gc.set_threshold(50_000, 20, 20)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries of C++ report what is still alive when the interpreter ends


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _as_talkative_as_before() -> Iterator[None]:
    """A rank of `shardwise train` in the tests' own process makes the library say more, for all tests after it."""
    log = logging.getLogger("shardwise")
    level = log.level
    yield
    log.setLevel(level)


@pytest.fixture(scope="session")
def snapshots(pytestconfig: pytest.Config) -> Snapshots:
    """What commands print, compared with the files of `tests/data/snapshots`, or written there."""
    return Snapshots(Path(__file__).parent / "data" / "snapshots", pytestconfig.getoption("--update-snapshots"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[WorkerPool]:
    """The pool of gloo workers: `ranks(n).run(fn, *args)` gives the results of fn on ranks 0..n-1."""
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def warm_programs() -> Iterator[WarmPython]:
    """What programs begin in, for fixtures of a module; tests take `warm_python`."""
    warm = WarmPython()
    yield warm
    warm.close()


@pytest.fixture
def warm_python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of Python that the test starts have imported torch and the library, unless the test is marked `cold`."""
    if request.node.get_closest_marker("cold") is None:
        warm: WarmPython = request.getfixturevalue("warm_programs")
        monkeypatch.setattr(subprocess, "Popen", warm.popen())


@pytest.fixture(scope="session")
def whole_run(ranks: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A run to which nothing happens, for the campaigns of faults to compare with."""
    root = tmp_path_factory.mktemp("whole") / "checkpoints"
    return Whole(ranks(NUM_RANKS).run(run_to_end, root, False)[0], stored(root))
