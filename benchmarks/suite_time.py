"""Print what a run of the tests spent its time on, by file and by package, or how that differs from another run.

    make test ARGS="--durations=0 --durations-min=0.02" > before.txt
    python benchmarks/suite_time.py before.txt
    python benchmarks/suite_time.py before.txt after.txt --files 40

The seconds of all processes are summed; they hold what a test waits for, so compare runs of one machine that is quiet.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

LINE = re.compile(r"([\d.]+)s (?:call|setup|teardown) +([^\s:]+)")


def seconds_by_file(lines: Iterable[str]) -> Counter[str]:
    """Return the summed seconds of each file of which pytest's output names durations."""
    found: Counter[str] = Counter()
    for match in filter(None, map(LINE.match, lines)):
        found[match[2]] += float(match[1])
    return found


def by_package(files: Counter[str]) -> Counter[str]:
    """Return the summed seconds of the folders that hold the files."""
    found: Counter[str] = Counter()
    for file, seconds in files.items():
        found[str(Path(file).parent)] += seconds
    return found


def table(before: Counter[str], after: Counter[str] | None, num_rows: int) -> list[str]:
    """Return a line for each of those that take longest; of two runs, of those that differ most."""
    if after is None:
        return [f"{seconds:9.1f} s  {name}" for name, seconds in before.most_common(num_rows)]
    names = sorted(before.keys() | after.keys(), key=lambda name: (-abs(after[name] - before[name]), name))
    return [
        f"{before[name]:9.1f} s  {after[name]:9.1f} s  {after[name] - before[name]:+9.1f} s  {name}"
        for name in names[:num_rows]
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the sum, the packages and the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("before", type=Path, help="what pytest printed with --durations=0")
    parser.add_argument("after", type=Path, nargs="?", help="of another run, to compare")
    parser.add_argument("--files", type=int, default=30, help="how many files to show")
    given = parser.parse_args(arguments)
    before, after = (
        None if path is None else seconds_by_file(path.read_text(encoding="utf-8").splitlines())
        for path in (given.before, given.after)
    )
    assert before is not None
    runs = [before] if after is None else [before, after]
    print("in all", *(f"{sum(run.values()):.0f} s" for run in runs))
    print(*table(by_package(before), None if after is None else by_package(after), 100), sep="\n", end="\n\n")
    print(*table(before, after, given.files), sep="\n")


if __name__ == "__main__":
    main()
