"""Scores of predictions against published runs: errors of time and memory, out-of-memory, order of layouts."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner_eval.cases import Case
from planner_eval.prices import Prediction, convention_of, flops_per_token, memory_kind_of
from shardwise.planner.job import param_of, product_dtype

Row = Mapping[str, Any]
MIN_SWEEP = 4


@dataclass(frozen=True)
class Scored:
    """A row, what was read of it, and what was predicted.

    Attributes:
        problem: why nothing was, in one line; None where something was.
    """

    row: Row
    case: Case
    prediction: Prediction
    problem: str | None = None

    @property
    def outputs(self) -> Row:
        """What was measured; empty where nothing is given."""
        return self.row.get("outputs") or {}

    @property
    def measured_tokens_per_s(self) -> float | None:
        """Of one GPU, from whichever figure the row has."""
        return measured_tokens_per_s(self.outputs, self.case)

    @property
    def time_ratio(self) -> float | None:
        """Predicted by measured time of a step; None where a side is missing, or not of whole steps."""
        measured, price = self.measured_tokens_per_s, self.prediction.price
        if self.case.quantity != "end_to_end" or measured is None or price is None:
            return None
        time_s = self.prediction.iteration_time_s
        tokens = price.job.tokens * self.case.tokens_scale
        return time_s * measured * price.job.cluster.num_gpus / tokens if time_s else None

    @property
    def memory_kind(self) -> str:
        """Of the row's figure."""
        return memory_kind_of(self.outputs.get("memory_kind"))

    @property
    def memory_ratio(self) -> float | None:
        """Predicted by measured memory."""
        measured, predicted = self.outputs.get("memory_gib_per_gpu"), self.prediction.memory_gib_per_gpu
        return predicted / measured if measured and predicted else None


def measured_tokens_per_s(outputs: Row, case: Case) -> float | None:
    """Tokens a second of one GPU: as given, or from time, samples, FLOPs or MFU, in this order."""
    if case.job is None or case.config is None:
        return None
    job, num_gpus = case.job, case.job.cluster.num_gpus
    if outputs.get("iteration_time_s") and "global_batch" not in case.guesses:
        return job.tokens * case.tokens_scale / outputs["iteration_time_s"] / num_gpus
    for key, factor in (
        ("tokens_per_s_per_gpu", 1.0),
        ("samples_per_s_per_gpu", job.seq_len),
        ("tokens_per_s_total", 1 / num_gpus),
        ("samples_per_s_total", job.seq_len / num_gpus),
    ):
        if outputs.get(key):
            return outputs[key] * factor
    dtype = "fp16" if param_of(case.config) == "fp16" else "bf16"
    peak = job.cluster.gpu.peak_flops_per_s.get(dtype, 0.0)
    flops_per_s = (outputs.get("tflops_per_gpu") or 0.0) * 1e12 or (outputs.get("mfu") or 0.0) * peak
    convention = convention_of(outputs.get("flops_convention") or "model", case)
    if not flops_per_s and outputs.get("hfu"):  # which counts what runs again
        flops_per_s, convention = outputs["hfu"] * peak, "hardware"
    each = flops_per_token(job, case.config, convention) * case.trained_share
    return flops_per_s / each if flops_per_s else None


def errors(ratios: Iterable[float | None]) -> dict[str, float]:
    """Mean, median and 90th percentile of the absolute error, and the median ratio."""
    found = [each for each in ratios if each is not None]
    apes = sorted(abs(each - 1) for each in found)
    if not apes:
        return {"n": 0}
    return {
        "n": len(apes),
        "mean": statistics.fmean(apes),
        "median": statistics.median(apes),
        "p90": apes[min(len(apes) - 1, math.ceil(0.9 * len(apes)) - 1)],
        "bias": statistics.median(found) - 1,
    }


def out_of_memory(rows: Iterable[Scored]) -> dict[str, float]:
    """Return how well runs that do not fit are recognised; out of memory is what is looked for."""
    pairs = [
        (not each.outputs["feasible"], not each.prediction.feasible)
        for each in rows
        if isinstance(each.outputs.get("feasible"), bool) and each.prediction.feasible is not None
    ]
    hits = sum(was and is_said for was, is_said in pairs)
    missed = sum(was and not is_said for was, is_said in pairs)
    false = sum(is_said and not was for was, is_said in pairs)
    if not pairs:
        return {"n": 0}
    return {
        "n": len(pairs),
        "hits": hits,
        "missed": missed,
        "false": false,
        "accuracy": 1 - (missed + false) / len(pairs),
        "precision": hits / (hits + false) if hits + false else 1.0,
        "recall": hits / (hits + missed) if hits + missed else 1.0,
    }


def layout_runs(rows: Iterable[Scored]) -> dict[str, list[Scored]]:
    """Runs of one model on one cluster that differ in their layout, of each group at least `MIN_SWEEP`."""
    found: dict[str, list[Scored]] = defaultdict(list)
    for each in rows:
        if each.time_ratio is None or each.case.job is None:
            continue
        job = each.case.job
        key = (each.case.group, job.shape.name, f"{job.seq_len} tokens", f"{job.cluster.num_gpus} GPUs")
        if each.case.config is not None and each.case.config.precision.linears == "keep":
            found[", ".join(key)].append(each)
    return {name: runs for name, runs in found.items() if len(runs) >= MIN_SWEEP and _layouts(runs) >= MIN_SWEEP}


def _layouts(runs: Sequence[Scored]) -> int:
    return len({each.case.config for each in runs})


def order(runs: Sequence[Scored]) -> dict[str, float]:
    """Kendall's tau-b of measured against predicted speed, and what the planner's choice loses to the best."""
    measured = [each.measured_tokens_per_s or 0.0 for each in runs]
    predicted = [speed / (each.time_ratio or 1.0) for speed, each in zip(measured, runs, strict=True)]
    best = max(range(len(runs)), key=lambda index: predicted[index])
    return {"n": len(runs), "tau": kendall_tau(measured, predicted), "regret": max(measured) / measured[best] - 1}


def kendall_tau(left: Sequence[float], right: Sequence[float]) -> float:
    """Tau-b (Kendall 1945): 1 for the same order, -1 for the opposite one; ties count for neither.

    >>> kendall_tau([1, 2, 3], [1, 2, 3]), kendall_tau([1, 2, 3], [3, 2, 1])
    (1.0, -1.0)
    """
    agree = ties_left = ties_right = total = 0
    for i in range(len(left)):
        for j in range(i):
            a, b = _sign(left[i] - left[j]), _sign(right[i] - right[j])
            total += 1
            agree += a * b
            ties_left += a == 0
            ties_right += b == 0
    spread = math.sqrt((total - ties_left) * (total - ties_right))
    return agree / spread if spread else 0.0


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def constant_efficiency(rows: Sequence[Scored]) -> list[float]:
    """Ratios of the simplest planner: the median FLOPs of runs on that device, in that dtype, recomputing as much."""
    groups: dict[Hashable, list[float]] = defaultdict(list)
    for each in rows:
        if each.time_ratio is not None:
            groups[_kind(each)].append(_model_flops_per_s(each))
    medians = {kind: statistics.median(speeds) for kind, speeds in groups.items()}
    return [_model_flops_per_s(each) / medians[_kind(each)] for each in rows if each.time_ratio is not None]


def _kind(each: Scored) -> Hashable:
    config, job = each.case.config, each.case.job
    if config is None or job is None:
        return None
    return job.cluster.gpu.name, product_dtype(config), config.recompute.mode


def _model_flops_per_s(each: Scored) -> float:
    if each.case.job is None:
        return 0.0
    return (each.measured_tokens_per_s or 0.0) * each.case.job.shape.flops_per_token(each.case.job.seq_len)


def bubble_errors(rows: Iterable[Scored]) -> list[float]:
    """Absolute differences of bubble rates, in points, where a row has one."""
    return [
        100 * abs(each.prediction.bubble_rate - each.outputs["bubble_rate"])
        for each in rows
        if each.prediction.bubble_rate is not None and each.outputs.get("bubble_rate") is not None
    ]


def scores(rows: Sequence[Scored]) -> dict[str, Any]:
    """All of them, of the rows that have what each needs."""
    order_of = {name: order(runs) for name, runs in layout_runs(rows).items()}
    kinds = sorted({each.memory_kind for each in rows if each.memory_ratio is not None})
    bubbles = bubble_errors(rows)
    return {
        "rows": len(rows),
        "time": errors(each.time_ratio for each in rows),
        "constant_efficiency": errors(constant_efficiency(rows)),
        "memory": errors(each.memory_ratio for each in rows),
        "memory_by_kind": {kind: errors(e.memory_ratio for e in rows if e.memory_kind == kind) for kind in kinds},
        "out_of_memory": out_of_memory(rows),
        "sweeps": order_of,
        "tau": statistics.fmean(each["tau"] for each in order_of.values()) if order_of else None,
        "regret": statistics.fmean(each["regret"] for each in order_of.values()) if order_of else None,
        "bubble_points": {"n": len(bubbles), "max": max(bubbles, default=0.0), "mean": _mean(bubbles)},
    }


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def by(rows: Iterable[Scored], key: Callable[[Scored], str]) -> dict[str, list[Scored]]:
    """The rows of each value of a key, the most first."""
    found: dict[str, list[Scored]] = defaultdict(list)
    for each in rows:
        found[key(each)].append(each)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))
