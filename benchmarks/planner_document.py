"""Writes the document about the planner's accuracy: the scores, and the words that say how they were made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from planner_outliers import explanation
from planner_scores import Scored, by, errors, out_of_memory
from planner_spread import spread_lines, within_interval
from shardwise.planner import step_time
from shardwise.planner.hardware import GPUS, FittedConstants

FAR_OFF = 0.20
FITTED = ("matmul_share", "memory_share", "network_share")

HEAD = """# How right the planner is

This file is written by

    python benchmarks/planner_accuracy.py tests/data/planner_cases.json --markdown docs/planner-accuracy.md \\
        --leave-out tests/data/planner_leave_one_out.json --unseen tests/data/planner_cases_unseen.json \\
        --fresh tests/data/planner_cases_2026_fitted.json tests/data/planner_cases_2026_held_out.json \\
        --priced-once tests/data/planner_cases_fresh2.json

and the errors of sources that are left out of the fit, which take two minutes, by

    python benchmarks/planner_fit.py tests/data/planner_cases.json --leave-out tests/data/planner_leave_one_out.json

Constants of devices without core rows come from `--fresh tests/data/planner_cases_2026_fitted.json` of the same script.

## Method

`shardwise plan` is checked against {rows} rows of published training runs, from papers, repositories and logs.
{core} of them ("core") were read with care, and the constants are fitted to these; those of RTX cards and L40S, of
which none is core, to the fitted rows of 2025 and 2026. A row is predicted from its model, hardware and layout; where
it names no code, its group, its source or its notes may. Of its results, only the way in which they count FLOPs and
memory is read. What a row does not say about its run is guessed by one rule for all rows: as little recomputation as
fits, the fastest micro-batch that fits, and interleaved stages where sequences are split and no number of stages is
given.

An error is |predicted / measured - 1| of the step's time, or of tokens, samples or FLOPs a second, as published.
Memory is compared in the kind that the row names: states, tensors ("allocated"), what the allocator holds for them
("reserved"), or all that the device has given out ("device"). It is the memory of the fullest rank. Where the figure
comes from a run's log, it is that of the first rank, since the first process writes the log in most codes.
"""

FITS = """## What is fitted

Three constants are fitted for each family of devices, and none for a source: the shares that training reaches of the
best matrix product, of the memory's bandwidth and of the network's bandwidth. A family with too few rows keeps the
defaults.
"""

BAND = """## Memory beside the engine's own

The planner's model of memory ranks candidates. On 97 small jobs, drawn at random over all axes, schedules, tiers and
dtypes, its peak was compared with that of the engine itself on fake tensors (`shardwise.simulate`), with a GPU's
collectives. States agree to the byte. The peak of the fullest rank is off by 4 % in the median, by less than 11 % in
nine of ten, and by 51 % at most. Of all pairs of jobs whose peaks differ by more than a tenth, 99 % are in the right
order. `tests/unit/planner/test_planner_engine_sample.py` draws them. Jobs this small show what a model of the
largest tensors leaves out; `shardwise plan --dry-run` gives the exact number of any rank.
"""

GLOBALS = """\
The rest is physics, or a constant for all devices whose reason is beside it in the code: latencies of collectives
and the cost of overlap in `collectives.py` and `comm_time.py`, the shape of a kernel's efficiency in
`compute_time.py`, stragglers ({straggling:.1%} of the step's time, times sqrt(2 ln nodes)) in `step_time.py`.

Some rules that read a row (`cases.py` and `traits.py` in `benchmarks/planner_eval/`) were chosen while looking at these
rows, and other sources may not confirm them: which loss was computed where a row does not say it, whether a code that
names its attention kernel computes the loss of all logits, that a bare "flash" is the first FlashAttention, what a bare
"InfiniBand" is before H100, and which early codes overlap nothing. These rules make "fits" look better for held-out
rows and for sources like them.
"""


def document(
    rows: Sequence[Scored],
    table: Callable[[Sequence[Scored]], str],
    left_out: Mapping[str, Any],
    unseen: str = "",
    unfitted: Sequence[Scored] = (),
) -> str:
    """Return the whole document.

    Args:
        rows: the scored rows.
        table: writes the scores of some rows as lines of text.
        left_out: each source's errors with and without it in the fit; empty where that was not run.
        unseen: the section about sources that were never seen; empty where they were not priced.
        unfitted: rows of sources that nothing is fitted to, which say how wide an interval must be.
    """
    core = [each for each in rows if each.case.tier == "core"]
    bulk = [each for each in rows if each.case.tier != "core"]
    straggling = step_time.STRAGGLING
    sections = [
        HEAD.format(rows=len(rows), core=len(core)),
        f"{FITS}\n{_fits()}\n",
        GLOBALS.format(straggling=straggling),
        BAND,
        "## Core rows, by source\n\n"
        "For `left out`, the constants were fitted to all core rows except the source's own.\n\n"
        + sources_table(core, left_out)
        + "\n",
        _fenced(
            "## Core rows: all, and each sweep of layouts",
            "`constant_efficiency` is the simplest planner: the median FLOPs of the same runs by device, dtype and\n"
            "recomputation. These medians are of the very runs that it predicts. Our planner knows those runs only by\n"
            "three constants of each device family, which were fitted to them. For a\n"
            "sweep, tau is Kendall's tau of the order of layouts, and regret is how much slower the layout that was\n"
            "ranked first is than the best. Bubbles are compared where a source gives a pipeline's rate.",
            table(core),
        ),
        "## Out of memory\n\n" + _matrix({"core": core, "held out": bulk, "all": rows}) + "\n",
        _fenced(
            "## The interval",
            "`low_s` and `high_s` are meant to contain four of five runs of an unknown source: the predicted time\n"
            "over and times 1 + a share. That is the conformal quantile over sources that nothing is fitted to, each\n"
            "of equal weight whatever the number of its rows (`SHARES` in `planner/step_time.py`): of the runs that\n"
            "were never seen, those of 2025 and 2026 that are held out, and those that were priced once. `by other\n"
            "sources alone` is the mean share of a source's rows within the width that the other sources give.",
            "\n".join([*spread_lines(unfitted), *_held({"core": core, "held out": bulk})]),
        ),
        _fenced(
            "## Rows that were held out",
            "Nothing was fitted to these rows, though the authors of the models have seen them. Many say less about\n"
            "their run, so more of it is guessed.",
            table(bulk),
        ),
        "### By source\n\n" + sources_table(bulk, {}) + "\n",
        *([unseen] if unseen else []),
        f"## What is far off, and why\n\nCore rows whose time is off by more than {FAR_OFF:.0%}. Where the "
        "explanation says hypothesis, it is not checked.\n\n" + far_off_table(core, "time") + "\n",
        f"Core rows whose memory is off by more than {FAR_OFF:.0%}.\n\n" + far_off_table(core, "memory"),
    ]
    return "\n".join(sections).rstrip() + "\n"


def _fits() -> str:
    lines = ["| devices | matrix products | memory | network |", "|---|---|---|---|"]
    names: dict[FittedConstants, list[str]] = {}
    for name, gpu in GPUS.items():
        names.setdefault(gpu.fitted, []).append(name)
    for fitted, some in sorted(names.items(), key=lambda item: item[0] == FittedConstants()):
        words = "all others (defaults)" if fitted == FittedConstants() else ", ".join(some)
        lines.append(f"| {words} | " + " | ".join(f"{getattr(fitted, name):.3f}" for name in FITTED) + " |")
    return "\n".join(lines)


def sources_table(rows: Sequence[Scored], left_out: Mapping[str, Any]) -> str:
    """Return a table of the errors of each source, and of all."""
    lines = [
        "| source | rows | step time: mean | median | p90 | left out | memory: rows | mean | fits: rows | right |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    groups = by(rows, lambda each: each.case.group)
    for name, some in [*groups.items(), ("all", list(rows))]:
        time, memory, oom = (
            errors(each.time_ratio for each in some),
            errors(each.memory_ratio for each in some),
            out_of_memory(some),
        )
        outside = left_out.get(name, {}).get("left_out", {})
        cells = [name, str(time["n"]), *(_share(time, key) for key in ("mean", "median", "p90"))]
        cells += [_share(outside, "mean"), str(memory["n"]), _share(memory, "mean")]
        cells += [str(oom["n"]), _share(oom, "accuracy") if oom["n"] else "–"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _share(found: Mapping[str, float], key: str) -> str:
    return f"{found[key]:.1%}" if key in found else "–"


def _matrix(groups: Mapping[str, Sequence[Scored]]) -> str:
    lines = [
        "| rows | n | ran out, found | ran out, missed | ran, said to run out | ran, found | right |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rows in groups.items():
        found = {"hits": 0, "missed": 0, "false": 0, **out_of_memory(rows)}
        right = found["n"] - found["hits"] - found["missed"] - found["false"]
        counts = (found["n"], found["hits"], found["missed"], found["false"], right)
        accuracy = f"{found['accuracy']:.1%}" if found["n"] else "–"
        lines.append(f"| {name} | " + " | ".join(str(each) for each in counts) + f" | {accuracy} |")
    return "\n".join(lines)


def _fenced(title: str, words: str, text: str) -> str:
    return f"{title}\n\n{words}\n\n```\n{text}\n```\n"


def _held(groups: Mapping[str, Sequence[Scored]]) -> list[str]:
    return [f"of the older rows, {name}: {within_interval(rows):.1%}" for name, rows in groups.items()]


def far_off_table(rows: Sequence[Scored], of: Literal["time", "memory"]) -> str:
    """Return a table of the rows that are off by more than `FAR_OFF`, and why."""
    ratios = [(each.time_ratio if of == "time" else each.memory_ratio, each) for each in rows]
    far = [(ratio, each) for ratio, each in ratios if ratio and abs(ratio - 1) > FAR_OFF]
    lines = ["| row | predicted / measured | explanation |", "|---|---|---|"]
    for ratio, each in sorted(far, key=lambda item: (-abs(item[0] - 1), item[1].case.id)):
        lines.append(f"| {each.case.group}, {each.case.id} | {ratio:.2f} | {explanation(each, of)} |")
    return "\n".join(lines)
