"""What the tests take, from the durations that pytest printed: by file, by package, and beside another run."""

from __future__ import annotations

from pathlib import Path

import pytest

from suite_time import by_package, main, seconds_by_file

BEFORE = """
============================= slowest durations ==============================
1.50s call     tests/a/test_b.py::test_c[d::e f]
0.25s setup    tests/a/test_b.py::test_c[d::e f]
2.00s call     tests/a/test_g.py::test_h
4.00s call     src/i/j.py::i.j.k
(29 durations < 0.02s hidden.)
"""
AFTER = BEFORE.replace("1.50s", "0.50s").replace("4.00s", "4.50s")


def test_seconds_are_summed_by_file_and_package() -> None:
    files = seconds_by_file(BEFORE.splitlines())
    assert files == {"tests/a/test_b.py": 1.75, "tests/a/test_g.py": 2.0, "src/i/j.py": 4.0}
    assert by_package(files) == {"tests/a": 3.75, "src/i": 4.0}


def test_two_runs_are_compared_by_what_differs_most(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / "before", tmp_path / "after"]
    for path, text in zip(paths, (BEFORE, AFTER), strict=True):
        path.write_text(text)
    main([*map(str, paths), "--files=2"])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "in all 8 s 7 s"
    assert lines[-2:] == [
        "      1.8 s        0.8 s       -1.0 s  tests/a/test_b.py",
        "      4.0 s        4.5 s       +0.5 s  src/i/j.py",
    ]
