"""Runs the public bug reports that `tests/reports` rebuilds, and prints what this tree does with each.

    python benchmarks/public_reports.py --json after.json
    PYTHONPATH=/path/to/other/src python benchmarks/public_reports.py --json before.json
    python benchmarks/public_reports.py --from after.json --before before.json --markdown docs/public-reports.md

A case runs on two ranks of gloo, once in each of its layouts, in a process group of its own and with a time limit. Its
verdict is the worst over the layouts: `right` (as one plain process), `refused CODE` (an error that says why), `wrong`
(other values) or `crash` (a traceback without a code, a hang, a fault). Of the library it knows only the public names.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from harness.pool import RankError, WorkerPool  # noqa: E402
from reports.kit import Report, run_case  # noqa: E402

TIMEOUT_S: Final = 60.0
ORDER: Final = ("right", "refused", "crash", "wrong")  # from best to worst
HANGS: Final = ("collective-failed", "rank-missing", "collective-timeout", "collective-late")
BEGIN: Final = "<!-- table -->"
END: Final = "<!-- end of the table -->"
Results = dict[str, dict[str, Any]]


def cases() -> Iterator[tuple[str, str, Report, str]]:
    """Yield each case's module, name, report and one-line description."""
    for path in sorted((ROOT / "tests" / "reports").glob("[a-z]*.py")):
        module = importlib.import_module(f"reports.{path.stem}")
        for name, function in vars(module).items():
            if isinstance(getattr(function, "report", None), Report):
                text = " ".join((function.__doc__ or "").split())
                yield module.__name__, name, function.report, text


def verdict_of(pool: WorkerPool, module: str, name: str, layout: str) -> tuple[str, str]:
    """Run one case in one layout; return the verdict and the line that explains it."""
    try:
        pool(2).run(run_case, module, name, layout, timeout_s=TIMEOUT_S)
    except RankError as error:
        said = [line for line in str(error).splitlines() if re.search(r"rank \d of 2 ", line)]
        codes = [code for line in said for code in re.findall(r"raised RefusedError: \[([\w-]+)\]", line)]
        codes = [code for code in codes if code not in HANGS]
        failures = [re.sub(r"^.*?rank (\d) of 2 (raised )?", r"rank \1: ", line) for line in said]
        uncoded = [each for each in failures if not re.search(r": (RefusedError|DiffersError): |was stopped$", each)]
        if any(": DiffersError: " in each for each in failures):
            return "wrong", next(each for each in failures if ": DiffersError: " in each)[:300]
        if uncoded or not codes:
            return "crash", (uncoded or failures)[0][:300]
        return f"refused {codes[0]}", next(each for each in failures if codes[0] in each)[:300]
    return "right", ""


def rank_of(verdict: str) -> int:
    """Order verdicts from best to worst."""
    return ORDER.index(verdict.split()[0])


def run(only: Sequence[str], only_layouts: Sequence[str], kept: Path | None) -> Results:
    """Run the cases whose name or source has one of these parts, all by default; keep the results after each.

    Where only some cases run, the others' results stay in the file.
    """
    pool = WorkerPool()
    results: Results = json.loads(kept.read_text()) if only and kept and kept.exists() else {}
    try:
        for module, name, report, text in cases():
            if only and not any(part in f"{module}.{name} {report.source}" for part in only):
                continue
            begin, layouts = time.monotonic(), {}
            for layout in report.layouts:
                if not only_layouts or layout in only_layouts:
                    layouts[layout] = verdict_of(pool, module, name, layout)
                    if only:
                        print(f"    {layout}: {': '.join(layouts[layout])}", flush=True)
            results[name] = {"source": report.source, "kind": report.kind, "text": text, "layouts": layouts}
            if kept:
                kept.write_text(json.dumps(results, indent=1))
            print(f"{name}: {summary(layouts)} ({time.monotonic() - begin:.1f} s)", flush=True)
    finally:
        pool.close()
    return results


def summary(layouts: Mapping[str, Sequence[str]]) -> str:
    """Return the worst verdict over the layouts, and which they are; other verdicts but `right` follow."""
    found: dict[str, list[str]] = {}
    for layout, (verdict, _) in layouts.items():
        found.setdefault(verdict, []).append(layout)
    ordered = sorted(found, key=rank_of, reverse=True)
    if ordered in (["right"], []):
        return "".join(ordered) or "–"
    return "; ".join(f"{each} ({', '.join(found[each])})" for each in ordered if each != "right")


def table(results: Results, before: Results) -> str:
    """Return the table in markdown; with a column of another tree's verdicts where there are some."""
    columns = ["report", "what was reported", "kind", *(["before"] if before else []), "after" if before else "verdict"]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for name, result in results.items():
        cells = [link(result["source"]), result["text"].split(": ", 1)[-1], result["kind"]]
        if before:
            cells.append(summary(before[name]["layouts"]) if name in before else "–")
        lines.append(f"| {' | '.join([*cells, summary(result['layouts'])])} |")
    return "\n".join(lines)


def link(source: str) -> str:
    """Turn `owner/name#1` into a link that leads to the thread."""
    repository, number = source.split("#")
    return f"[{repository.split('/')[1]}#{number}](https://github.com/{repository}/issues/{number})"


def counts(results: Results) -> str:
    """Say how many cases have which worst verdict."""
    worst = [
        max((v.split()[0] for v, _ in r["layouts"].values()), key=rank_of) for r in results.values() if r["layouts"]
    ]
    return ", ".join(f"{worst.count(each)} {each}" for each in ORDER)


def main() -> None:
    """Run or read results, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="parts of names or sources of the cases to run")
    parser.add_argument("--layouts", default="", help="names of layouts between commas; all by default")
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--from", dest="read", type=Path, help="results to read in place of a run")
    parser.add_argument("--before", type=Path, help="results of another tree, for a column beside these")
    parser.add_argument("--markdown", type=Path, help="a page whose table is replaced, or a file to make")
    options = parser.parse_args()
    if options.read:
        results = json.loads(options.read.read_text())
    else:
        results = run(options.only, [name for name in options.layouts.split(",") if name], options.json)
    before = json.loads(options.before.read_text()) if options.before else {}
    text = table(results, before)
    print(f"\n{text}\n\n{len(results)} reports: {counts(results)}")
    if options.markdown:
        page = options.markdown.read_text() if options.markdown.exists() else f"{BEGIN}\n{END}\n"
        head, tail = page.split(BEGIN)
        options.markdown.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail.split(END)[1]}")


if __name__ == "__main__":
    main()
