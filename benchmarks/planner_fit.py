"""Fits the three constants of each family of devices to published runs, and tells how they hold for sources left out.

Only `FittedConstants` is fitted: the share of the best matrix product, of the memory's and of the network's bandwidth
that training reaches. Devices of one family share theirs. A source counts by the root of its rows, so that none is the
fit.

    python benchmarks/planner_fit.py CASES --fresh FRESH                  # prints the constants
    python benchmarks/planner_fit.py CASES --fresh FRESH --write          # into catalogue.toml
    python benchmarks/planner_fit.py CASES --fresh FRESH --write --nearby # a small step from those in it
    python benchmarks/planner_fit.py CASES --leave-out out.json

CASES is tests/data/planner_cases.json, of which core rows count; FRESH is tests/data/planner_cases_2026_fitted.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from planner_accuracy import read_rows, scored_rows
from planner_eval.models import PublishedLayout, PublishedTimeModel
from planner_scores import Scored, errors
from shardwise.planner.folded_layout import FoldedLayouts
from shardwise.planner.hardware import FittedConstants
from shardwise.schedule.simulate import PipelineSimulator

CATALOGUE = Path(__file__).parents[1] / "src/shardwise/planner/catalogue.toml"
FAMILIES: Mapping[str, str] = {
    "h100-96": r"h100-96",
    "hopper": r"h100|h200|h800|h20|gh200",
    "blackwell": r"b200|b300|gb200|gb300",
    "ampere": r"a100|a800|a30",
    "volta": r"v100",
    "rtx": r"rtx-(4090|5090|5060-ti|6000-ada|pro-6000)",
    "l40s": r"l40s",
}
RANGES = {"matmul_share": (0.5, 1.0), "memory_share": (0.3, 0.95), "network_share": (0.2, 1.0)}
PULL = 0.02
"""Of a constant towards its default, so that what the rows do not tell is not fitted."""
CAP = 0.5
"""Of an error's logarithm: beyond it a row is one that no constant explains."""
MIN_ROWS = 3


@dataclass(frozen=True)
class Sample:
    """A row to be fitted to: its time at the fit's constants must be `measured_s`."""

    scored: Scored
    measured_s: float
    weight: float
    layouts: FoldedLayouts
    pipelines: PipelineSimulator

    def ratio(self, fitted: FittedConstants) -> float:
        """Predicted by measured time."""
        price, case = self.scored.prediction.price, self.scored.case
        if price is None:
            raise ValueError(f"{case.id} has no price")
        gpu = dataclasses.replace(price.job.cluster.gpu, fitted=fitted)
        job = dataclasses.replace(price.job, cluster=dataclasses.replace(price.job.cluster, gpu=gpu))
        model = PublishedTimeModel(job, self.layouts)
        model.pipelines = self.pipelines
        return model.estimate(price.config).step_s / self.measured_s


def family_of(name: str) -> str:
    """The family of a device of the catalogue; its own name where it has none."""
    return next((family for family, pattern in FAMILIES.items() if re.match(rf"({pattern})(-|$)", name)), name)


def samples(rows: Sequence[Scored]) -> dict[str, list[Sample]]:
    """Of each family, its rows."""
    usable = [each for each in rows if each.time_ratio is not None]
    counts = Counter(each.case.group for each in usable)
    found: dict[str, list[Sample]] = {}
    pipelines = PipelineSimulator()
    for each in usable:
        if each.case.job is None or each.prediction.price is None:
            continue
        measured_s = each.prediction.price.time.step_s / (each.time_ratio or 1.0)
        family = family_of(each.case.job.cluster.gpu.name)
        sample = Sample(each, measured_s, counts[each.case.group] ** -0.5, PublishedLayout(each.case.job), pipelines)
        found.setdefault(family, []).append(sample)
    return found


def loss(fitted: FittedConstants, rows: Sequence[Sample]) -> float:
    """Mean of what is off, in logarithms, and of how far the constants are from their defaults."""
    off = sum(each.weight * min(CAP, abs(math.log(each.ratio(fitted)))) for each in rows)
    pull = sum(abs(math.log(getattr(fitted, name) / getattr(FittedConstants(), name))) for name in RANGES)
    return off / sum(each.weight for each in rows) + PULL * pull


def fit(rows: Sequence[Sample], start: FittedConstants, *, rounds: Sequence[int] = (0, 1)) -> FittedConstants:
    """The constants of least loss: one after another, on grids of which each is a third of the one before."""
    best, least = start, loss(start, rows)
    for index in rounds:
        step = 0.16 / 3**index
        for name, (low, high) in RANGES.items():
            middle = getattr(best, name)
            for k in (-2, -1, 1, 2):
                value = min(high, max(low, middle + k * step))
                trial = dataclasses.replace(best, **{name: round(value, 3)})
                found = loss(trial, rows)
                if found < least:
                    best, least = trial, found
    return best


def leave_one_out(
    rows: Sequence[Scored], fits: Mapping[str, FittedConstants]
) -> dict[str, dict[str, dict[str, float]]]:
    """Errors of each source by constants that were fitted to all, and to all but it."""
    by_family = samples(rows)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for source in sorted({each.case.group for each in rows}):
        inside, outside = [], []
        for family, all_rows in by_family.items():
            own = [each for each in all_rows if each.scored.case.group == source]
            others = [each for each in all_rows if each.scored.case.group != source]
            if not own:
                continue
            refit = (
                fit(others, fits.get(family, FittedConstants()), rounds=(0,))
                if len(others) >= MIN_ROWS
                else FittedConstants()
            )
            inside += [each.ratio(fits.get(family, FittedConstants())) for each in own]
            outside += [each.ratio(refit) for each in own]
        if inside:
            found[source] = {"all": errors(inside), "left_out": errors(outside)}
    return found


def write(fits: Mapping[str, FittedConstants]) -> None:
    """Put the constants into the catalogue, after each device's number of cores."""
    lines, family = [], ""
    for line in CATALOGUE.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"\[(.+)\]", line):
            family = family_of(match.group(1))
        if line.startswith("fitted ="):
            continue
        lines.append(line)
        if line.startswith("num_cores") and family in fits:
            each = ", ".join(f"{name} = {getattr(fits[family], name)}" for name in RANGES)
            lines.append(f"fitted = {{ {each} }}")
    CATALOGUE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Fit, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--fresh", type=Path, help="rows for families of whose devices no core row is")
    parser.add_argument("--write", action="store_true", help="put the constants into catalogue.toml")
    parser.add_argument("--nearby", action="store_true", help="look around the present constants, by small steps")
    parser.add_argument("--leave-out", type=Path, help="also fit without each source in turn; where to write errors")
    options = parser.parse_args()
    rows = [each for each in scored_rows(read_rows(options.cases)) if each.case.tier == "core"]
    families = samples(rows)
    if options.fresh:
        fresh = samples(scored_rows(read_rows(options.fresh)))
        families = {family: some for family, some in fresh.items() if family in FAMILIES} | families
    fits = {}
    for family, some in families.items():
        if len(some) < MIN_ROWS:
            continue
        present = next(each.scored.case.job.cluster.gpu.fitted for each in some if each.scored.case.job is not None)
        fits[family] = fit(some, present, rounds=(2,)) if options.nearby else fit(some, FittedConstants())
        before, after = (errors(each.ratio(f) for each in some) for f in (FittedConstants(), fits[family]))
        print(f"{family:<10} n {len(some):>3}  {before['mean']:.1%} -> {after['mean']:.1%}  {fits[family]}")
    if options.write:
        write(fits)
    if options.leave_out:
        found = leave_one_out(rows, fits)
        options.leave_out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        for source, each in found.items():
            all_in, out = each["all"], each["left_out"]
            print(f"{source:<32} n {all_in['n']:>3.0f}  {all_in['mean']:6.1%}  left out {out['mean']:6.1%}")


if __name__ == "__main__":
    main()
