"""Show a plan to people and programs: the winner first, then why, then what it was chosen from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, Final

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.config.resolve import ResolvedConfig, Tier
from shardwise.models.shape import ModelShape
from shardwise.planner.explain import Reasons, lacks
from shardwise.planner.fit import Fit, Verdict
from shardwise.planner.hardware import GIB, Cluster, cluster_words, usual_host
from shardwise.planner.job import PlanJob, product_dtype
from shardwise.planner.request import CHUNK_TOKENS, SPLITS
from shardwise.planner.results import (
    MEMORY_PARTS,
    TIME_PARTS,
    Estimate,
    Marks,
    RankMemory,
    held_on_node,
    money_words,
)
from shardwise.planner.search import Pricer, SearchResult
from shardwise.planner.step_time import WITHOUT_EVIDENCE
from shardwise.runtime.format import format_bytes, format_count, format_s, format_span_s, three_digits

# Of docs/planner-accuracy.md, where `tests/unit/planner/test_planner_page.py` looks for them.
VALIDATION: Final = (
    "10.6 % off on average of 300 published runs that nothing is fitted to; "
    "its first choice in 10 comparisons of layouts was 1.5 % slower than the best"
)
_BAR_WIDTH: Final = 60
_DAY_S: Final = 86_400.0
_FEW_SHOWN, _MANY_SHOWN, _MOST_STAGES = 3, 5, 8
# Shares of a step from which on a part is named, and from which on there is a hint.
_LEAST_SHARE, _LARGE_SHARE = 0.01, 0.15
_FIXES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "tensor": "try a smaller mesh.tp, or tensor.overlap_chunks",
        "context": "try a smaller mesh.cp, or another context.transport",
        "experts": "keep the ranks of an expert group in one node",
        "bubble": "try more micro-batches, more virtual stages, or a zero-bubble schedule",
        "data": "try a smaller mesh.dp_shard with replicas, a lower zero.stage, or more micro-batches",
        "offload": "try to keep a state on the device, or more tokens a step",
        "recompute": "try recompute.mode=selective, or a larger recompute.every",
    }
)
Row = tuple[str, RenderableType]
Rows = Sequence[Row]


def facts(rows: Rows) -> Table:
    """Show labels and what they are about in two columns."""
    return _two_columns(rows, style="dim", width=9)


def _two_columns(rows: Rows, **of_first: Any) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(**of_first)
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(label, Text(value) if isinstance(value, str) else value)
    return grid


def bare_table(*columns: str, texts: Sequence[str] = ()) -> Table:
    """Return a table without lines: columns of texts are on the left and fold, those of numbers on the right."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="dim")
    for name in columns:
        is_text = name in texts
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    return table


def blocks(*parts: RenderableType) -> RenderableType:
    """Put an empty line between parts."""
    return Group(*(Padding(block, (1, 1, 0, 1), expand=False) for block in parts))


def job_rows(job: PlanJob, notes: Sequence[str] = ()) -> list[Row]:
    """Describe the model, the batch and the cluster."""
    shape = job.shape
    text = f"{shape.name}, {format_count(shape.num_params)} parameters, "
    text += f"{shape.num_layers} layers of {shape.hidden_size:,}"
    if shape.experts is not None:
        text += f", {shape.experts.num_chosen} of {shape.experts.num_experts} experts"
    if job.base.lora.rank:
        text += f", LoRA of rank {job.base.lora.rank}{' over nf4' if job.base.lora.base == 'nf4' else ''}"
    batch = f"{job.global_batch:,} sequences of {job.seq_len:,} tokens a step, {format_count(job.tokens)} tokens"
    rows: list[Row] = [("model", Text(text, style="bold")), ("batch", batch), ("cluster", cluster_words(job.cluster))]
    return rows + [("note", Text(note, style="yellow")) for note in notes]


def price_rows(price: Estimate, label: str = "best") -> list[Row]:
    """Describe one candidate, whose layout is labelled: its speed, memory on the worst rank, and cost."""
    worst, gpu = price.memory.worst, price.job.cluster.gpu
    rows: list[Row] = [
        (label, Text(price.layout, style="bold green" if price.margin_bytes >= 0 else "bold red")),
        ("step", speed_words(price)),
        *([] if gpu.is_cpu else [("checked", VALIDATION)]),
        ("limit", limit_words(price)),
        ("memory", memory_words(price)),
        ("", _MemoryBar(worst, gpu.memory_bytes)),
    ]
    if price.usd_per_million_tokens is not None:
        hourly = gpu.price_per_hour
        day, tokens = money_words(24 * hourly * price.job.cluster.num_gpus), money_words(price.usd_per_million_tokens)
        rows.append(("cost", f"{tokens} for a million tokens, {day} a day, at ${hourly:.2f} an hour and GPU"))
    return rows


@dataclass(frozen=True)
class _MemoryBar:
    """Draw what one rank holds at its peak, and name its parts below, in colours where the console shows them."""

    rank: RankMemory
    capacity_bytes: float

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        is_coloured = console.color_system is not None and not console.no_color
        yield bar_of(self.rank.peak, MEMORY_PARTS, self.capacity_bytes, _BAR_WIDTH, is_coloured=is_coloured)
        items = []
        for name, large_bytes in _large_parts(self.rank).items():
            sign, colour, _ = MEMORY_PARTS[name]
            items.append(Text.assemble(("■", colour) if is_coloured else (sign, "bold"), f" {name} {large_bytes}"))
        yield Columns(items, padding=(0, 2))  # lines break between parts only


def _large_parts(rank: RankMemory) -> dict[str, str]:
    """Return in words the size of each part of a rank's peak that is 1 % of it or more."""
    least = _LEAST_SHARE * rank.peak_bytes
    return {name: format_bytes(rank.peak[name]) for name in MEMORY_PARTS if rank.peak.get(name, 0.0) >= least > 0}


def limit_words(price: Estimate) -> str:
    """Say what limits a step most: computing, links, what memory costs in time, or the pipeline's bubble."""
    shares = {entry.limit: 0.0 for entry in TIME_PARTS.values() if entry.limit}
    for name, seconds in price.time.parts.items():
        if limit := TIME_PARTS[name].limit:
            shares[limit] += seconds / price.time.step_s
    first, *others = sorted(shares, key=lambda name: -shares[name])
    texts = [f"{name} {100 * shares[name]:.0f} %" for name in others if shares[name] >= _LEAST_SHARE]
    return f"{first}, {100 * shares[first]:.0f} % of a step{'; ' if texts else ''}{', '.join(texts)}"


def speed_words(price: Estimate) -> str:
    """Write the time of a step with its interval, and what follows from it."""
    time = price.time
    text = f"{format_s(time.step_s)} ({format_span_s(time.low_s, time.high_s)})"
    text += f", {price.tokens_per_s_per_gpu:,.0f} tokens/s a {_device_word(price.job)}"
    mfu, halved = price.mfu(), price.mfu(is_causal_halved=True)
    if mfu is None or halved is None:
        return text
    half = "" if halved == mfu else f" with all keys of attention, {100 * halved:.1f} % with the causal half"
    return f"{text}, MFU {100 * mfu:.1f} % of {product_dtype(price.config)}{half}"


def memory_words(price: Estimate) -> str:
    """Write the worst rank's peak against the device's memory, and what is stored elsewhere."""
    worst, config, cluster = price.memory.worst, price.config, price.job.cluster
    where = f" on pipeline rank {worst.pipeline_rank} of {config.mesh.pp}" if config.mesh.pp > 1 else ""
    margin = price.margin_bytes
    fits = f"{format_bytes(margin)} left" if margin >= 0 else f"out of memory by {format_bytes(-margin)}"
    about = "" if worst.is_simulated else "about "
    text = f"{about}{format_bytes(worst.peak_bytes)} of {format_bytes(cluster.gpu.memory_bytes)}{where}: {fits}"
    away = []
    memories: tuple[tuple[Tier, float], ...] = (("host", cluster.host.memory_bytes), ("nvme", cluster.host.nvme_bytes))
    for tier, node_bytes in memories:
        if worst.elsewhere.get(tier, 0.0) > 0:
            is_assumed = cluster.host == usual_host(cluster.gpu, cluster.gpus_per_node) and tier == "host"
            size = f"{'an assumed ' if is_assumed else ''}{format_bytes(node_bytes)} on {tier}"
            ranks = ", all ranks of a node" if cluster.gpus_per_node > 1 else ""
            key = " (host_memory_gib in a cluster's file)" if is_assumed else ""
            away.append(f"{format_bytes(held_on_node(price.memory, cluster, tier))} of {size}{ranks}{key}")
    return f"{text}; {' and '.join(away)}" if away else text


def price_table(prices: Sequence[Estimate], beside: Mapping[str, Estimate] = MappingProxyType({})) -> Table:
    """Show the best few candidates, one below the other, and `beside` them others by name, such as the user's own."""
    is_large = any(price.memory.worst.peak_bytes >= GIB for price in prices)
    unit, unit_name, digits = (GIB, "GiB", 1) if is_large else (2**20, "MiB", 0)
    table = bare_table("#")
    table.add_column("layout", overflow="fold", min_width=24)
    for name in ("step", f"tok/s/{_device_word(prices[0].job)}", "MFU %", unit_name):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [(f"{number}", price) for number, price in enumerate(prices, 1)]
    for label, price in (*rows, *beside.items()):
        mfu, worst = price.mfu(), price.memory.worst
        cells: list[RenderableType] = [label, Text(price.layout), format_s(price.time.step_s)]
        cells += [f"{price.tokens_per_s_per_gpu:,.0f}", "-" if mfu is None else f"{100 * mfu:.1f}"]
        about = "" if worst.is_simulated else "~"
        table.add_row(*cells, f"{about}{worst.peak_bytes / unit:,.{digits}f}")
    return table


def stage_rows(price: Estimate) -> list[Row]:
    """Describe the memory of each pipeline rank; of a long pipeline only of some ranks, the worst among them."""
    ranks, worst = list(price.memory.ranks), price.memory.worst
    if len(ranks) > _MOST_STAGES:
        shown = {0, 1, len(ranks) // 2, len(ranks) - 1, ranks.index(worst)}
        ranks = [ranks[index] for index in sorted(shown)]
    rows: list[Row] = []
    for rank in ranks:
        parts = ", ".join(f"{name} {text}" for name, text in _large_parts(rank).items())
        most = ", the most" if rank is worst else ""
        rows.append((f"rank {rank.pipeline_rank}", f"{format_bytes(rank.peak_bytes)}{most}: {parts}"))
    return rows


def time_rows(price: Estimate) -> list[Row]:
    """Say where a step's time goes."""
    time = price.time
    parts = [(name, time.parts.get(name, 0.0)) for name in TIME_PARTS]
    named = [f"{name} {format_s(seconds)}" for name, seconds in parts if seconds >= time.step_s / 1000]
    rows: list[Row] = [("time", ", ".join(named))]
    if time.bubble_rate is not None and price.config.mesh.pp > 1:
        rows.append(("bubble", f"{100 * time.bubble_rate:.1f} % of a rank's time in the pipeline"))
    return rows


def bar_of(sizes: Mapping[str, float], marks: Marks, capacity: float, width: int, *, is_coloured: bool = False) -> Text:
    """Draw parts in a container, in the order of their marks; what exceeds it comes after a `|`.

    Args:
        marks: sign and colour of each part, by name; they differ by colour where `is_coloured`.
        capacity: of the container, in the unit of the sizes.
        width: of the whole bar, in characters.
    """
    total = sum(sizes.values())
    filled_width = width * total / capacity if total <= capacity else width - 1
    ends = accumulate(sizes.get(name, 0.0) for name in marks)
    ends_at = [0, *(round(filled_width * end / (total or 1.0)) for end in ends)]
    bar = Text()
    for (sign, colour, _), (start, end) in zip(marks.values(), pairwise(ends_at), strict=True):
        bar.append(("█" if is_coloured else sign) * (end - start), style=colour if is_coloured else "")
    if total <= capacity:
        return bar.append("·" * (width - len(bar)), style="dim")
    edge = round((width - 1) * capacity / total)
    return Text.assemble(bar[:edge], ("|", "bold red"), bar[edge:])


def _device_word(job: PlanJob) -> str:
    return "rank" if job.cluster.gpu.is_cpu else "GPU"


def plan_view(
    plan: SearchResult,
    reasons: Reasons,
    *,
    num_shown: int | None = None,
    is_whole: bool = False,
    notes: Sequence[str] = (),
    verdict: Verdict | None = None,
    num_tokens: float | None = None,
) -> RenderableType:
    """Show the answer on a screen: which layout, how fast, whether it fits, why; or all of it.

    Args:
        num_shown: how many of the best there are in the table; None shows a few.
        is_whole: whether to say where the time goes, all fixes and what was searched.
        notes: on how the question was read.
        verdict: of a fine-tuning job, which comes first; None for other jobs.
        num_tokens: of the run, whose cost and days are to be shown; None shows none.
    """
    winner = plan.winner
    num_shown = num_shown or (_MANY_SHOWN if is_whole else _FEW_SHOWN)
    parts: list[RenderableType] = []
    if verdict is not None:
        fits = Text(verdict.fits, style="bold green" if verdict.does_fit else "bold red")
        more = "also" if verdict.does_fit else "to fit"
        parts.append(facts([("fits", fits), ("takes", verdict.takes), (more, verdict.more)]))
    parts.append(facts(job_rows(plan.job, notes)))
    if winner is None:
        parts += _no_winner(plan, reasons, is_whole)
    else:
        rows = price_rows(winner) + ([] if num_tokens is None else [("run", run_words(winner, num_tokens))])
        rows += time_rows(winner) if is_whole else []
        chosen = [("" if number else "chosen", clause) for number, clause in enumerate(reasons.chosen)]
        parts.append(facts([*rows, ("why", reasons.wins), *chosen, *_proof_rows(plan)]))
        beside = {} if reasons.yours is None else {"yours": reasons.yours[0]}
        losers = [(f"{number}", reason) for number, reason in enumerate(reasons.runners_up[: num_shown - 1], 2)]
        losers = losers if is_whole else losers[1:]  # how the second does is why the first is first
        losers += [] if reasons.yours is None else [("yours", reasons.yours[1])]
        parts.append(price_table((winner, *plan.runners_up)[:num_shown], beside))
        parts += [_titled("why the others lose", losers)] if losers else []
    if reasons.defaults:
        defaults = [(default.name, default.sentence) for default in reasons.defaults]
        parts.append(_titled("what many would start with", defaults))
    if is_whole:
        parts.append(Text(_counts(plan), style="dim"))
    return blocks(*parts)


def _no_winner(plan: SearchResult, reasons: Reasons, is_whole: bool) -> Iterator[RenderableType]:
    yield Text("nothing fits", style="bold red")
    if reasons.misses:
        rows = [] if plan.nearest is None else price_rows(plan.nearest[0], "nearest")
        rows.append(("misses", reasons.misses))
        fixes = reasons.suggestions if is_whole else reasons.suggestions[:2]
        yield facts([*rows, *(("fix", fix) for fix in fixes)])
    if proof := list(_proof_rows(plan)):
        yield facts(proof)
    if reasons.yours is not None:
        yield facts([("yours", reasons.yours[1])])


def _proof_rows(plan: SearchResult) -> Iterator[tuple[str, str]]:
    """Yield what was not looked at, and how much faster that may be."""
    if plan.is_proven:
        return
    num_left = plan.rejected.get("not looked at", 0)
    left = f"{num_left:,} of {plan.num_candidates:,} candidates were not looked at"
    left = left if num_left else "some ways to store the states of those that fit were not looked at"
    may = f"and may be up to {100 * plan.gap_share:.1f} % faster" if plan.best else "and may fit"
    yield "unproven", f"{left} {may}: pin a dimension, such as mesh.tp=8, to look closer"


def _titled(title: str, rows: Sequence[tuple[str, str]]) -> RenderableType:
    return Group(Text(title, style="dim"), _two_columns([(f"  {name}", text) for name, text in rows]))


def _counts(plan: SearchResult) -> str:
    reasons = sorted(plan.rejected.items(), key=lambda each: -each[1])
    proof = " No layout is faster, by this model." if plan.is_proven and plan.best else ""
    return (
        f"{plan.num_candidates:,} candidates in {plan.num_priced:,} estimates and {plan.elapsed_s:.1f} s: "
        f"{plan.num_fitting:,} priced and fit, "
        f"{', '.join(f'{count:,} {reason}' for reason, count in reasons if count)}.{proof} "
        f"{100 * plan.limits.margin_share:.0f} % of a device's memory is kept free (--margin)."
    )


def run_words(price: Estimate, num_tokens: float) -> str:
    """Write what a run of so many tokens takes."""
    time, num_steps = price.time, num_tokens / price.job.tokens
    usd = "" if price.usd_per_step is None else f"{money_words(num_steps * price.usd_per_step)}, "
    exact = [num_steps * seconds / _DAY_S for seconds in (time.step_s, time.low_s, time.high_s)]
    days, low, high = (three_digits(number) if number >= 1 else f"{number:.2g}" for number in exact)
    return f"{format_count(num_tokens)} tokens: {usd}{days} days ({low} to {high})"


def run_dict(price: Estimate, num_tokens: float) -> dict[str, float | None]:
    """Return what a run of so many tokens takes as JSON takes it."""
    num_steps, step_usd = num_tokens / price.job.tokens, price.usd_per_step
    usd = None if step_usd is None else num_steps * step_usd
    return {"num_tokens": num_tokens, "days": num_steps * price.time.step_s / _DAY_S, "usd": usd}


def explain_view(
    price: Estimate, pricer: Pricer, *, notes: Sequence[str] = (), suggestions: Sequence[str] = ()
) -> RenderableType:
    """Show one candidate in detail: memory of each pipeline rank, parts of the time, what to look at, what helps."""
    rows = price_rows(price, "layout") + time_rows(price)
    rows += [("look at", Text(line, style="yellow")) for line in cautions(price, pricer)]
    rows += [("fix", line) for line in suggestions]
    stages = [facts(stage_rows(price))] if price.config.mesh.pp > 1 else []
    return blocks(facts(job_rows(price.job, notes)), facts(rows), *stages)


def fit_view(fits: Sequence[Fit], cluster: Cluster, seq_len: int, shape: ModelShape | None = None) -> RenderableType:
    """Show the largest that a cluster holds, by setup.

    Args:
        seq_len: tokens of a sequence of the largest model.
        shape: the model whose micro-batch and sequence were also found; None where there is none.
    """
    texts = ("over all ranks" if cluster.gpu.is_cpu else "over all GPUs", f"largest at {seq_len:,} tokens")
    table = bare_table(*texts, *(() if shape is None else ("micro-batch", "sequence")), texts=texts)
    for fitting in fits:
        model = "-" if fitting.shape is None else f"{format_count(fitting.shape.num_params):>7} ({fitting.shape.name})"
        numbers = () if shape is None else (fitting.micro_size, fitting.seq_len)
        table.add_row(fitting.name, model, *("-" if number is None else f"{number:,}" for number in numbers))
    text = "the largest model is of the Llama family, one sequence a micro-batch"
    if shape is not None:
        text += f"; micro-batch at {seq_len:,} tokens and longest sequence are of {shape.name}"
    added = "add to ZeRO-3 with full recomputation" if cluster.num_gpus > 1 else "recompute all"
    text += f". Lines with ... {added}; chunks are of {CHUNK_TOKENS:,} tokens, of MLPs, head and loss."
    return blocks(facts([("cluster", cluster_words(cluster))]), table, Text(text, style="dim"))


def fit_dict(fits: Sequence[Fit], cluster: Cluster, seq_len: int, shape: ModelShape | None = None) -> dict[str, Any]:
    """Return the largest that a cluster holds, by setup, as JSON takes it; the arguments are those of `fit_view`."""
    return {
        "gpu": cluster.gpu.name,
        "num_gpus": cluster.num_gpus,
        "seq_len": seq_len,
        "model": None if shape is None else asdict(shape),
        "fits": [
            {
                "setup": fitting.name,
                "config": config_dict(fitting.config),
                "largest_model": None if fitting.shape is None else asdict(fitting.shape),
                "num_params": None if fitting.shape is None else fitting.shape.num_params,
                "micro_size": fitting.micro_size,
                "seq_len": fitting.seq_len,
            }
            for fitting in fits
        ],
    }


def plan_dict(
    plan: SearchResult,
    reasons: Reasons,
    pricer: Pricer,
    *,
    verdict: Verdict | None = None,
    num_tokens: float | None = None,
) -> dict[str, Any]:
    """Return all of a plan as JSON takes it; the arguments are those of `plan_view`."""
    best = [price_dict(price) for price in plan.best]
    further: dict[str, Any] = {} if verdict is None else {"fine_tuning": verdict.values}
    if plan.winner is not None:
        best[0] |= _page_dict(plan.winner, pricer)
        further["run"] = None if num_tokens is None else run_dict(plan.winner, num_tokens)
    return {
        "job": _job_dict(plan.job),
        "best": best,
        "runners_up": [price_dict(price) for price in plan.runners_up],
        "yours": None if reasons.yours is None else price_dict(reasons.yours[0]),
        "nearest": None if plan.nearest is None else price_dict(plan.nearest[0]),
        "why": reasons.wins,
        "why_chosen": list(reasons.chosen),
        "why_not": list(reasons.runners_up),
        "defaults": {default.name: default.sentence for default in reasons.defaults},
        "misses": reasons.misses,
        # `cures` (what would make it fit) and `num_outlines` (the number of candidates) stay, since programs read them.
        "cures": list(reasons.suggestions),
        "why_yours": "" if reasons.yours is None else reasons.yours[1],
        "rejected": dict(plan.rejected),
        "num_fitting": plan.num_fitting,
        "num_outlines": plan.num_candidates,
        "num_priced": plan.num_priced,
        "is_proven": plan.is_proven,
        "gap_share": plan.gap_share,
        "elapsed_s": plan.elapsed_s,
        **further,
    }


def explain_dict(price: Estimate, pricer: Pricer, suggestions: Sequence[str] = ()) -> dict[str, Any]:
    """Return one candidate in detail as JSON takes it; the arguments are those of `explain_view`."""
    in_detail = {"job": _job_dict(price.job), **price_dict(price), **_page_dict(price, pricer)}
    return {**in_detail, "cures": list(suggestions)}  # programs read it by this name


def _job_dict(job: PlanJob) -> dict[str, Any]:
    """Return a job's shape, batch and cluster as JSON takes them."""
    return {
        "model": asdict(job.shape),
        "num_params": job.shape.num_params,
        "seq_len": job.seq_len,
        "global_batch": job.global_batch,
        "gpu": job.cluster.gpu.name,
        "num_gpus": job.cluster.num_gpus,
        "gpus_per_node": job.cluster.gpus_per_node,
    }


def config_dict(config: ResolvedConfig) -> dict[str, Any]:
    """Return the sections of a candidate that say how it is split, as JSON takes them."""
    return config.model_dump(mode="json", include=set(SPLITS))


def price_dict(price: Estimate) -> dict[str, Any]:
    """Return one candidate with its price as JSON takes it."""
    time, worst = price.time, price.memory.worst
    return {
        "layout": price.layout,
        "config": config_dict(price.config),
        "step_s": time.step_s,
        "low_s": time.low_s,
        "high_s": time.high_s,
        "parts_s": dict(time.parts),
        "bubble_rate": time.bubble_rate,
        "tokens_per_s_per_gpu": price.tokens_per_s_per_gpu,
        "mfu": price.mfu(),
        "mfu_convention": "model FLOPs with all keys of attention, nothing that is computed twice",
        "cost_per_step": price.usd_per_step,
        "usd_per_million_tokens": price.usd_per_million_tokens,
        "peak_gib": worst.peak_bytes / GIB,
        "is_memory_simulated": worst.is_simulated,
        "margin_gib": price.margin_bytes / GIB,
        "ranks": [
            {
                "pipeline_rank": rank.pipeline_rank,
                "at_rest_bytes": dict(rank.at_rest),
                "peak_bytes": dict(rank.peak),
                "elsewhere_bytes": dict(rank.elsewhere),
            }
            for rank in price.memory.ranks
        ],
    }


def _page_dict(price: Estimate, pricer: Pricer) -> dict[str, Any]:
    """Return what `shardwise report` shows of a candidate beside its price: times of a micro-batch, and bytes sent."""
    rank = price.memory.worst.pipeline_rank
    return {
        "micro_batch_s": asdict(pricer.time.op_times(price.config)),
        "sent_bytes": pricer.time.layouts.on_wire(price.config, rank),
    }


def cautions(price: Estimate, pricer: Pricer) -> Iterator[str]:
    """Yield what may go wrong or is slow with a candidate, one line each."""
    job, config, missing = price.job, price.config, pricer.missing(price.memory)
    if missing is not None and missing.tier == "device" and price.margin_bytes >= 0:
        share = price.margin_bytes / job.cluster.gpu.memory_bytes
        yield f"only {format_bytes(price.margin_bytes)} ({100 * share:.1f} %) of device memory are left; try less"
    elif missing is not None:
        yield lacks(price, missing)
    if config.mesh.tp > max(job.cluster.gpus_per_node, job.cluster.gpu.link_domain):
        yield f"mesh.tp={config.mesh.tp} reaches beyond a node of {job.cluster.gpus_per_node}, over the network"
    if pricer.time.compute.waits_for_launches(config):
        fix = "fewer GPUs or larger micro-batches take as long; try compile.enabled=true"
        yield f"kernels are shorter than the host takes to launch them, so {fix}"
    if price.time.kind in WITHOUT_EVIDENCE:
        yield f"only {WITHOUT_EVIDENCE[price.time.kind]}, so measure a step before you rely on its time"
    for name, fix in _FIXES.items():
        share = price.time.parts.get(name, 0.0) / price.time.step_s
        if share >= _LARGE_SHARE:
            yield f"{100 * share:.0f} % of a step is {TIME_PARTS[name].label}; {fix}"
