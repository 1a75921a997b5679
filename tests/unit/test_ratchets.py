"""What `benchmarks/house.py` counts of the sources gets better, never worse."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from harness.paths import DATA, ROOT
from harness.pool import WorkerPool
from house import COUNTS, Sources, measure_all
from journeys import trace_config

pytestmark = pytest.mark.begin

RATCHETS = DATA / "ratchets.toml"
RISING = frozenset(("comment_permille",))


def files_of_a_step(_rank: int, _num_ranks: int, folder: Path) -> int:
    """How many files of the library a plain step of ZeRO-3 enters, on one of two ranks."""
    found, _ = trace_config("zero.stage=3", str(folder))
    return len(found["train_step"].files)


@pytest.fixture(scope="module")
def measured(ranks: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    files = ranks(2).run(files_of_a_step, tmp_path_factory.mktemp("journeys"))
    return measure_all(Sources(ROOT)) | {"files_of_a_step": max(files)}


def test_no_ratchet_went_back(measured: dict[str, int], pytestconfig: pytest.Config) -> None:
    limits = tomllib.loads(RATCHETS.read_text())
    if pytestconfig.getoption("--update-snapshots"):
        best = {name: (max if name in RISING else min)(limits.get(name, new), new) for name, new in measured.items()}
        header = re.match(r"(#.*\n)*", RATCHETS.read_text())
        RATCHETS.write_text((header[0] if header else "") + "".join(f"{name} = {n}\n" for name, n in best.items()))
        limits = best
    worse = {
        name: f"{new} instead of {limits[name]}; see benchmarks/house.py --where {name}, benchmarks/journeys.py"
        for name, new in measured.items()
        if (new < limits[name] if name in RISING else new > limits[name])
    }
    assert not worse


def test_a_better_number_is_written_down(measured: dict[str, int]) -> None:
    """Otherwise the next change may lose again what this one won. Lines and comments may have some air."""
    limits = tomllib.loads(RATCHETS.read_text())
    better = {name: new for name, new in measured.items() if new < limits[name]}
    assert set(better) <= {"lines"} | RISING, "run pytest tests/unit/test_ratchets.py --update-snapshots"


WORSE = '''
import threading
from shardwise.zero import group as old_name

STATE = threading.local()

class Large:
    """Holds much.

    Attributes:
        a0: of the engine.
    """

    is_a: bool
    is_b: bool
    is_c: bool
    is_d: bool

    def __init__(self, other: object, {arguments}) -> None:
        {assignments}
        other.field = 1
        for each in (1, 2):
            print(each)
'''


def test_each_measure_counts(tmp_path: Path) -> None:
    """A module with one thing of each kind that is counted."""
    folder = tmp_path / "src" / "shardwise" / "zero"
    folder.mkdir(parents=True)
    (folder / "group.py").write_text("# Autograd runs first what was recorded last.\n")
    names = [f"a{i}" for i in range(17)]
    (folder / "large.py").write_text(
        WORSE.format(arguments=", ".join(names), assignments="; ".join(f"self.{name} = {name}" for name in names))
    )
    sources = Sources(tmp_path)
    counted = {name: len(count(sources)) for name, count in COUNTS.items() if name != "lines"}
    assert counted == dict.fromkeys(counted, 1)
    assert measure_all(sources)["comment_permille"] == 1000 // measure_all(sources)["lines"]
