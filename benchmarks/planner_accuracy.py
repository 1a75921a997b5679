"""How right the planner is: predicts published runs from their inputs alone, and scores those whose outputs are given.

A file of cases is JSON, `{"cases": [...]}` or a list; each row has `model`, `hardware`, `parallel`, and perhaps
`outputs`, whose figures no prediction sees; only how they count FLOPs and memory is read of them. Any key may be
missing or odd: a row that cannot be priced is answered by nulls, and a line on stderr says why.

    python benchmarks/planner_accuracy.py tests/data/planner_cases.json --json predictions.json
    python benchmarks/planner_accuracy.py CASES.json --json OUT --tier core --by source --worst 20
    python benchmarks/planner_accuracy.py tests/data/planner_cases.json --markdown docs/planner-accuracy.md \\
        --leave-out tests/data/planner_leave_one_out.json --unseen tests/data/planner_cases_unseen.json \\
        --fresh tests/data/planner_cases_2026_fitted.json tests/data/planner_cases_2026_held_out.json \\
        --priced-once tests/data/planner_cases_fresh2.json
    python benchmarks/planner_accuracy.py tests/data/planner_cases_2026_fitted.json --by kind
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from planner_document import document
from planner_eval.cases import Case, read_case
from planner_eval.prices import PARTS_OF_A_STEP, Prediction, predict_row
from planner_eval.rows import tidied
from planner_fresh import fresh_section, kinds_of, priced_once_section
from planner_fresh import table as kinds_table
from planner_scores import Scored, by, scores
from planner_spread import spread_lines
from planner_unseen import unseen_section
from shardwise.config.errors import ConfigError
from shardwise.planner.job import num_data_ranks, product_dtype
from shardwise.planner.results import TIME_PARTS
from shardwise.schedule.simulate import PipelineSimulator


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of cases.

    Raises:
        ConfigError: it is no such file.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "file-unreadable", f"{path} cannot be read: {' '.join(str(error).split())}; name a JSON file of cases"
        ) from None
    rows = found.get("cases") if isinstance(found, dict) else found
    if not isinstance(rows, list) or (rows and not any(isinstance(row, dict) for row in rows)):
        raise ConfigError(
            "cases-not-a-list", f'{path} holds no list of rows; write {{"cases": [...]}} or [...], each row an object'
        )
    return [row if isinstance(row, dict) else {"id": f"row {number}"} for number, row in enumerate(rows, 1)]


def read_first_priced(path: Path) -> dict[str, Any]:
    """The figures of a file's rows when they were priced for the first time, which it may hold beside them."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return dict(found.get("first_priced") or {}) if isinstance(found, dict) else {}


def read_left_out(path: Path | None) -> dict[str, Any]:
    """Errors by source that were written by `planner_fit.py --leave-out`.

    Raises:
        ConfigError: it cannot be read.
    """
    if path is None:
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "file-unreadable", f"{path} cannot be read: {' '.join(str(error).split())}; make it by planner_fit.py"
        ) from None


def scored_rows(rows: Sequence[dict[str, Any]]) -> list[Scored]:
    """Each row with its case and prediction, or why it has none."""
    pipelines = PipelineSimulator()
    return [_scored(row, pipelines) for row in named(map(tidied, rows))]


def named(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows, each by an id of its own: one that is missing or was there before gets its number.

    >>> [row["id"] for row in named([{"id": "x"}, {}, {"id": "x"}])]
    ['x', 'row 2', 'x (row 3)']
    """
    seen: set[str] = set()
    for number, row in enumerate(rows, 1):
        name = f"row {number}" if row.get("id") in (None, "") else str(row["id"])
        name = f"{name} (row {number})" if name in seen else name
        seen.add(name)
        yield row | {"id": name}


def _scored(row: dict[str, Any], pipelines: PipelineSimulator) -> Scored:
    case = Case(id=row["id"], group=str(row.get("group", "")), tier=str(row.get("tier", "")), quantity="end_to_end")
    try:
        case = read_case(row)
        prediction = predict_row(row, case, pipelines)
    except Exception as error:  # whatever is wrong with one row, the others are to be answered
        return Scored(row, case, Prediction(), f"{type(error).__name__}: {' '.join(str(error).split())}")
    is_empty = all(value is None for value in prediction.as_row().values())
    return Scored(row, case, prediction, _problem(case) if is_empty else None)


def _problem(case: Case) -> str:
    if case.quantity in PARTS_OF_A_STEP:
        return f"quantity={case.quantity} is of a part of a step; only whole steps are predicted: leave it out for one"
    return case.refusal or "nothing of it can be predicted; write the layers and the hidden size of its model"


def table(rows: Sequence[Scored]) -> str:
    """Scores as lines of text."""
    found = scores(rows)
    lines = [f"rows {found['rows']}"]
    for name in ("time", "constant_efficiency", "memory"):
        lines.append(f"{name:<22} {_errors(found[name])}")
    for kind, each in found["memory_by_kind"].items():
        lines.append(f"  memory, {kind:<12} {_errors(each)}")
    oom = found["out_of_memory"]
    if oom["n"]:
        counts = f"{oom['hits']} found, {oom['missed']} missed, {oom['false']} false"
        lines.append(f"out of memory          n {oom['n']:>4}  accuracy {oom['accuracy']:.1%}  ({counts})")
    for name, each in found["sweeps"].items():
        lines.append(f"  {name:<64} n {each['n']:>3}  tau {each['tau']:+.2f}  regret {each['regret']:.1%}")
    if found["tau"] is not None:
        lines.append(f"sweeps, mean           tau {found['tau']:+.3f}  regret {found['regret']:.1%}")
    bubble = found["bubble_points"]
    lines.append(
        f"bubbles                n {bubble['n']:>4}  mean {bubble['mean']:.2f}  max {bubble['max']:.2f} points"
    )
    return "\n".join(lines)


def figures(rows: Sequence[Scored]) -> dict[str, float | None]:
    """What a change must not worsen: errors, to be small, and shares, to be large; None where no row tells."""
    found = scores(rows)
    return {
        "time mean error": found["time"].get("mean"),
        "time median error": found["time"].get("median"),
        "time p90 error": found["time"].get("p90"),
        "memory mean error": found["memory"].get("mean"),
        "out of memory accuracy": found["out_of_memory"].get("accuracy"),
        "Kendall's tau": found["tau"],
        "top-1 regret error": found["regret"],
        "bubble error in points": found["bubble_points"]["max"],
    }


def _errors(found: dict[str, float]) -> str:
    if not found["n"]:
        return "n    0"
    shares = "  ".join(f"{name} {found[name]:6.1%}" for name in ("mean", "median", "p90"))
    return f"n {found['n']:>4.0f}  {shares}  bias {found['bias']:+.1%}"


def residual_lines(rows: Sequence[Scored]) -> list[str]:
    """Each row that is scored: predicted by measured, the step's parts in ms, memory; the most wrong first."""
    found = []
    for each in rows:
        price = each.prediction.price
        if price is None or (each.time_ratio is None and each.memory_ratio is None):
            continue
        parts = " ".join(
            f"{part}={1e3 * price.time.parts[part]:.0f}" for part in TIME_PARTS if price.time.parts.get(part, 0.0) > 0
        )
        worst = price.memory.worst
        held = " ".join(f"{name}={size / 2**30:.1f}" for name, size in worst.peak.items() if size > 2**26)
        s = price.config
        mesh, pipeline, batch = s.mesh, s.pipeline, s.batch
        layout = f"tp{mesh.tp} pp{mesh.pp}v{pipeline.virtual_stages} dp{num_data_ranks(s)} cp{mesh.cp} ep{mesh.ep} "
        layout += f"z{s.zero.stage} mb{batch.micro_size}x{batch.accumulation} {s.recompute.mode} {product_dtype(s)} "
        layout += pipeline.schedule
        ratio = "    -" if each.time_ratio is None else f"{each.time_ratio:5.2f}"
        memory = "    -" if each.memory_ratio is None else f"{each.memory_ratio:5.2f}"
        gpu = f"{price.job.cluster.num_gpus}x{price.job.cluster.gpu.name}"
        line = f"{ratio} {memory} {each.case.tier:<4} {each.case.id:<44} {gpu:<14} {price.job.shape.name:<18} {layout}"
        found.append((abs((each.time_ratio or 1.0) - 1), f"{line} | ms: {parts} | GiB: {held}"))
    return [line for _, line in sorted(found, key=lambda item: -item[0])]


def main(arguments: Sequence[str]) -> None:
    """Predict, write, score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--json", type=Path, help="where to write the predictions of all rows, by id")
    parser.add_argument("--tier", help="score rows of this tier alone, such as core")
    parser.add_argument("--by", choices=("source", "gpu", "kind"), help="score by it, too")
    parser.add_argument("--worst", type=int, default=0, help="print so many rows, the most wrong first")
    parser.add_argument("--residuals", type=Path, help="where to write all of those lines")
    parser.add_argument(
        "--record", type=Path, help="where to write the figures that tests hold, of core or --tier rows"
    )
    parser.add_argument("--spread", action="store_true", help="print how far four of five runs are off, by kind")
    parser.add_argument("--markdown", type=Path, help="where to write the document about all of this")
    parser.add_argument("--leave-out", type=Path, help="what planner_fit.py --leave-out wrote, for the document")
    parser.add_argument("--unseen", type=Path, help="rows of sources that no constant or rule was made by, for it")
    parser.add_argument("--fresh", type=Path, nargs=2, help="rows that were studied and rows that were not, for it")
    parser.add_argument("--priced-once", type=Path, help="rows that were priced before any was studied, for it")
    options = parser.parse_args(arguments)
    start = time.perf_counter()
    try:
        rows = scored_rows(read_rows(options.cases))
        left_out = read_left_out(options.leave_out)
        unseen = scored_rows(read_rows(options.unseen)) if options.unseen else []
        fresh = [scored_rows(read_rows(path)) for path in options.fresh or ()]
        once = scored_rows(read_rows(options.priced_once)) if options.priced_once else []
        unfitted = [*unseen, *(fresh[1] if fresh else ()), *once]
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    took_s = time.perf_counter() - start
    for each in rows:
        if each.problem:
            print(f"{each.case.id}: {each.problem}", file=sys.stderr)
    if options.json:
        predictions = {each.case.id: each.prediction.as_row() for each in rows}
        options.json.write_text(json.dumps(predictions, indent=1) + "\n", encoding="utf-8")
    if options.record:
        held = figures([each for each in rows if each.case.tier == (options.tier or "core")])
        options.record.write_text(json.dumps(held, indent=1) + "\n", encoding="utf-8")
    chosen = [each for each in rows if options.tier in (None, each.case.tier)]
    print(table(chosen))
    if options.by == "kind":
        print("\n" + kinds_table(list(kinds_of(chosen))))
    elif options.by:
        for name, some in by(chosen, _key(options.by)).items():
            print(f"\n{name}\n{table(some)}")
    if options.spread:
        print("\n".join(spread_lines(unfitted or chosen)))
    if options.markdown:
        section = _sections(options, unseen, fresh, once)
        options.markdown.write_text(document(rows, table, left_out, section, unfitted), encoding="utf-8")
    lines = residual_lines(chosen)
    if options.residuals:
        options.residuals.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines[: options.worst]))
    print(f"{len(rows)} rows in {took_s:.1f} s")


def _sections(
    options: argparse.Namespace, unseen: Sequence[Scored], fresh: Sequence[Sequence[Scored]], once: Sequence[Scored]
) -> str:
    """The document's sections about rows that nothing was fitted to."""
    section = unseen_section(unseen, read_first_priced(options.unseen), figures(unseen)) if options.unseen else ""
    if fresh:
        halves = ("fitted", "held_out")
        before = {half: read_first_priced(path) for half, path in zip(halves, options.fresh, strict=True)}
        section += "\n" + fresh_section(dict(zip(halves, fresh, strict=True)), before)
    if once:
        section += "\n" + priced_once_section(once, read_first_priced(options.priced_once))
    return section


def _key(name: str) -> Any:
    if name == "source":
        return lambda each: each.case.group
    return lambda each: each.case.job.cluster.gpu.name if each.case.job else "unknown"


if __name__ == "__main__":
    main(sys.argv[1:])
