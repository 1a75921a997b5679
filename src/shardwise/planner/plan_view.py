"""Show a plan to people and programs: the winner first, then why, then what it was chosen from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shardwise.planner.compact_layout import CompactLayout
from shardwise.planner.compute_time import ComputeTimeModel
from shardwise.planner.cost import cost_per_step, run_cost, run_words, usd_per_million_tokens
from shardwise.planner.explain import PART_WORDS, DefaultChoice, Reasons
from shardwise.planner.fit import Fit
from shardwise.planner.format import layout_words, money_words
from shardwise.planner.hardware import GIB, Cluster, cluster_words
from shardwise.planner.job import PlanJob
from shardwise.planner.memory_limit import USUAL_MARGIN, missing_memory
from shardwise.planner.pricer import Pricer
from shardwise.planner.render import (
    bare_table,
    blocks,
    facts,
    job_rows,
    price_rows,
    price_table,
    stage_table,
    time_rows,
)
from shardwise.planner.results import Estimate
from shardwise.planner.search import SearchResult
from shardwise.planner.shape import ModelShape
from shardwise.planner.suggestions import CHUNK_TOKENS
from shardwise.runtime.format import format_bytes, format_count, format_s

_FEW_SHOWN: Final = 3
_MANY_SHOWN: Final = 5
# Share of a step from which on a part is mentioned.
_LARGE_SHARE: Final = 0.15
_FIXES: Final[Mapping[str, str]] = {
    "tensor": "try a smaller mesh.tp, or tensor.overlap_chunks",
    "context": "try a smaller mesh.cp, or another context.transport",
    "experts": "keep the ranks of an expert group in one node",
    "bubble": "try more micro-batches, more virtual stages, or a zero-bubble schedule",
    "data": "try a smaller mesh.dp_shard with replicas, a lower zero.stage, or more micro-batches",
    "offload": "try to keep a state on the device, or more tokens a step",
    "recompute": "try recompute.mode=selective, or a larger recompute.every",
}


def plan_view(
    plan: SearchResult,
    reasons: Reasons,
    *,
    width: int,
    is_coloured: bool,
    num_shown: int | None = None,
    is_whole: bool = False,
    yours: Estimate | None = None,
    notes: Sequence[str] = (),
) -> RenderableType:
    """Show the answer on a screen: which layout, how fast, whether it fits, why; or all of it.

    Args:
        plan: what the search found.
        reasons: the explanations of it.
        width: of the terminal, in characters.
        is_coloured: whether the terminal shows colours.
        num_shown: how many of the winner and the best of each other mesh and schedule; None shows a few.
        is_whole: whether sentences are whole, with where the time goes and what was searched.
        yours: the user's own strategy, to be shown beside them; None where there is none.
        notes: on how the question was read.
    """
    winner, plain = plan.winner, reasons.plain
    num_shown = num_shown or (_MANY_SHOWN if is_whole else _FEW_SHOWN)
    parts: list[RenderableType] = [facts(job_rows(plan.job, notes))]
    if winner is None:
        parts += _no_winner(plan, reasons, is_coloured, is_whole)
    else:
        rows = price_rows(winner, is_coloured=is_coloured)
        rows += time_rows(winner, is_coloured=is_coloured) if is_whole else []
        parts.append(facts([*rows, ("why", reasons.wins), *_proof_rows(plan)]))
        beside = {} if yours is None else {"yours": yours}
        losers = [(f"{number}", words) for number, words in enumerate(reasons.runners_up[: num_shown - 1], 2)]
        losers = losers if is_whole else losers[1:]  # how the second does is why the first is first
        losers += [] if yours is None else [("yours", reasons.yours)]
        if plain is not None and plain.price is not None and plain.price.time.step_s > winner.time.step_s:
            beside["plain"] = plain.price
            losers.append(("plain", f"{plain.name}, {plain.sentence}"))
        shown = (winner, *plan.runners_up)[:num_shown]
        parts.append(price_table(shown, width=width, is_coloured=is_coloured, beside=beside))
        parts += [_titled("why the others lose", losers)] if losers else []
    if reasons.defaults:
        sentences = [(each.name, each.sentence if is_whole else default_words(each)) for each in reasons.defaults]
        parts.append(_titled("what many would start with", sentences))
    if is_whole:
        parts.append(Text(_counts(plan), style="dim"))
    return blocks(*parts)


def default_words(default: DefaultChoice) -> str:
    """Say in a few words how a popular strategy does, and what would make it fit."""
    if default.price is None:
        return default.sentence
    words, _, fix = default.sentence.rpartition("; ") if default.missing is not None else (default.sentence, "", "")
    return f"{words.partition(':')[0]}; {fix}" if fix else words.partition(":")[0]


def _no_winner(plan: SearchResult, reasons: Reasons, is_coloured: bool, is_whole: bool) -> Iterator[RenderableType]:
    yield Text("nothing fits", style="bold red")
    if plan.nearest is not None:
        rows = price_rows(plan.nearest[0], is_coloured=is_coloured, label="nearest")
        rows.append(("misses", reasons.misses))
        fixes = reasons.suggestions if is_whole else reasons.suggestions[:1]
        yield facts([*rows, *(("fix", words) for words in fixes)])
    if proof := list(_proof_rows(plan)):
        yield facts(proof)
    if reasons.yours:
        yield facts([("yours", reasons.yours)])


def _proof_rows(plan: SearchResult) -> Iterator[tuple[str, str]]:
    """Yield what was not looked at, and how much faster that may be."""
    if plan.is_proven:
        return
    left = f"{plan.rejected.get('not looked at', 0):,} of {plan.num_candidates:,} candidates were not looked at"
    may = f"and may be up to {100 * plan.gap_share:.1f} % faster" if plan.best else "and may fit"
    yield "unproven", f"{left} {may}: pin a dimension, such as mesh.tp=8, to look closer"


def _titled(title: str, rows: Sequence[tuple[str, str]]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(overflow="fold")
    for name, words in rows:
        grid.add_row(f"  {name}", Text(words))
    return Group(Text(title, style="dim"), grid)


def _counts(plan: SearchResult) -> str:
    reasons = sorted(plan.rejected.items(), key=lambda each: -each[1])
    proof = " No layout is faster, by this model." if plan.is_proven and plan.best else ""
    return (
        f"{plan.num_candidates:,} candidates, {plan.num_priced:,} estimates in {plan.elapsed_s:.1f} s; left out: "
        f"{', '.join(f'{count:,} {reason}' for reason, count in reasons if count)}.{proof} "
        f"{100 * plan.limits.margin_share:.0f} % of a device's memory is kept free (--margin)."
    )


def cost_view(
    plan: SearchResult,
    num_tokens: float | None = None,
    budget_usd: float | None = None,
    sizes: Sequence[SearchResult] = (),
) -> RenderableType:
    """Show what a run takes, and what tokens cost on other numbers of GPUs.

    Args:
        plan: whose winner runs.
        num_tokens, budget_usd: of the run, as in `run_cost`.
        sizes: of `by_num_gpus`.
    """
    parts: list[RenderableType] = []
    if plan.winner is not None and (words := run_words(plan.winner, num_tokens, budget_usd)):
        parts.append(facts([("run", words)]))
    if sizes:
        table = bare_table("GPUs", "step", "tok/s/GPU", "$/M tokens", "days", "layout", texts=("layout",))
        for price in (each.winner for each in sizes):
            if price is not None:
                usd, run = usd_per_million_tokens(price), run_cost(price, num_tokens, budget_usd)
                table.add_row(
                    f"{price.job.cluster.num_gpus:,}",
                    format_s(price.time.step_s),
                    f"{price.tokens_per_s_per_gpu:,.0f}",
                    "-" if usd is None else money_words(usd),
                    "-" if run is None else f"{run.days:,.1f}",
                    Text(layout_words(price.strategy)),
                )
        parts.append(table)
    return blocks(*parts)


def cost_dict(
    plan: SearchResult,
    num_tokens: float | None = None,
    budget_usd: float | None = None,
    sizes: Sequence[SearchResult] = (),
) -> dict[str, Any]:
    """Return what `cost_view` shows as JSON takes it; the arguments are those of `cost_view`."""
    run = None if plan.winner is None else run_cost(plan.winner, num_tokens, budget_usd)
    prices = [each.winner for each in sizes if each.winner is not None]
    return {
        "run": None if run is None else asdict(run),
        "sizes": [{"num_gpus": each.job.cluster.num_gpus, **price_dict(each)} for each in prices],
    }


def explain_view(
    price: Estimate,
    pricer: Pricer,
    *,
    is_coloured: bool,
    margin_share: float = USUAL_MARGIN,
    notes: Sequence[str] = (),
    suggestions: Sequence[str] = (),
) -> RenderableType:
    """Show one strategy in detail: memory of each pipeline rank, parts of the time, what is sent, what to look at.

    Args:
        price: of the strategy.
        pricer: what made the price.
        is_coloured: whether the terminal shows colours.
        margin_share: share of a device's memory that should stay free.
        notes: on how the config was read.
        suggestions: where it does not fit: what would make it fit.
    """
    rows = price_rows(price, is_coloured=is_coloured, label="layout")
    rows += time_rows(price, is_coloured=is_coloured)
    if sent := _sent_words(price, pricer.time.compact):
        rows.append(("sent", sent))
    rows += [("look at", Text(line, style="yellow")) for line in cautions(price, pricer.time.compute, margin_share)]
    rows += [("fix", line) for line in suggestions]
    stages = [stage_table(price, is_coloured=is_coloured)] if price.strategy.pp > 1 else []
    return blocks(facts(job_rows(price.job, notes)), facts(rows), *stages)


def _sent_words(price: Estimate, compact: CompactLayout) -> str:
    """Say what the layout gathers and reduces in a step, on the fullest rank."""
    rank = price.memory.worst.pipeline_rank
    sent = compact.on_wire(price.strategy, rank)
    parts = [f"{format_bytes(size)} by {op.replace('_', '-')}" for op, size in sent.items() if size]
    return f"{', '.join(parts)} of parameters and gradients, a rank and step" if parts else ""


def fit_view(fits: Sequence[Fit], cluster: Cluster, seq_len: int, shape: ModelShape | None = None) -> RenderableType:
    """Show the largest that a cluster holds, by setup.

    Args:
        fits: what each setup holds.
        cluster: the machine.
        seq_len: tokens of a sequence of the largest model.
        shape: the model whose micro-batch and sequence were also found; None where there is none.
    """
    texts = ("over all ranks" if cluster.gpu.is_cpu else "over all GPUs", f"largest at {seq_len:,} tokens")
    table = bare_table(*texts, *(() if shape is None else ("micro-batch", "sequence")), texts=texts)
    for each in fits:
        model = "-" if each.shape is None else f"{format_count(each.shape.num_params):>7} ({each.shape.name})"
        numbers = () if shape is None else (each.micro_size, each.seq_len)
        table.add_row(each.setup.name, model, *("-" if number is None else f"{number:,}" for number in numbers))
    words = "the largest model is of the Llama family, one sequence a micro-batch"
    if shape is not None:
        words += f"; micro-batch at {seq_len:,} tokens and longest sequence are of {shape.name}"
    added = "add to ZeRO-3 with full recomputation" if cluster.num_gpus > 1 else "recompute all"
    words += f". Lines with ... {added}; chunks are of {CHUNK_TOKENS:,} tokens, of MLPs, head and loss."
    return blocks(facts([("cluster", cluster_words(cluster))]), table, Text(words, style="dim"))


def fit_dict(fits: Sequence[Fit], cluster: Cluster, seq_len: int, shape: ModelShape | None = None) -> dict[str, Any]:
    """Return the largest that a cluster holds, by setup, as JSON takes it; the arguments are those of `fit_view`."""
    return {
        "gpu": cluster.gpu.name,
        "num_gpus": cluster.num_gpus,
        "seq_len": seq_len,
        "model": None if shape is None else asdict(shape),
        "fits": [
            {
                "setup": each.setup.name,
                "strategy": asdict(each.setup.strategy),
                "largest_model": None if each.shape is None else asdict(each.shape),
                "num_params": None if each.shape is None else each.shape.num_params,
                "micro_size": each.micro_size,
                "seq_len": each.seq_len,
            }
            for each in fits
        ],
    }


def plan_dict(plan: SearchResult, reasons: Reasons, yours: Estimate | None = None) -> dict[str, Any]:
    """Return all of a plan as JSON takes it; the arguments are those of `plan_view`."""
    return {
        "job": job_dict(plan.job),
        "best": [price_dict(price) for price in plan.best],
        "runners_up": [price_dict(price) for price in plan.runners_up],
        "yours": None if yours is None else price_dict(yours),
        "plain": None if reasons.plain is None or reasons.plain.price is None else price_dict(reasons.plain.price),
        "nearest": None if plan.nearest is None else price_dict(plan.nearest[0]),
        "why": reasons.wins,
        "why_not": list(reasons.runners_up),
        "defaults": {each.name: each.sentence for each in reasons.defaults},
        "misses": reasons.misses,
        # `cures` (what would make it fit) and `num_outlines` (the number of candidates) stay, since programs read them.
        "cures": list(reasons.suggestions),
        "why_yours": reasons.yours,
        "rejected": dict(plan.rejected),
        "num_outlines": plan.num_candidates,
        "num_priced": plan.num_priced,
        "is_proven": plan.is_proven,
        "gap_share": plan.gap_share,
        "elapsed_s": plan.elapsed_s,
    }


def job_dict(job: PlanJob) -> dict[str, Any]:
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


def price_dict(price: Estimate) -> dict[str, Any]:
    """Return one strategy with its price as JSON takes it."""
    time, worst = price.time, price.memory.worst
    return {
        "layout": layout_words(price.strategy),
        "strategy": asdict(price.strategy),
        "step_s": time.step_s,
        "low_s": time.low_s,
        "high_s": time.high_s,
        "parts_s": dict(time.parts),
        "bubble_rate": time.bubble_rate,
        "tokens_per_s_per_gpu": price.tokens_per_s_per_gpu,
        "mfu": price.mfu(),
        "mfu_convention": "model FLOPs with all keys of attention, nothing that is computed twice",
        "cost_per_step": cost_per_step(price),
        "usd_per_million_tokens": usd_per_million_tokens(price),
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


def page_dict(price: Estimate, pricer: Pricer) -> dict[str, Any]:
    """Return what `shardwise report` shows of a strategy beside its price: times of a micro-batch, and bytes sent."""
    rank = price.memory.worst.pipeline_rank
    return {
        "micro_batch_s": asdict(pricer.time.op_times(price.strategy)),
        "sent_bytes": pricer.time.compact.on_wire(price.strategy, rank),
    }


def cautions(price: Estimate, compute: ComputeTimeModel, margin_share: float) -> Iterator[str]:
    """Yield what may go wrong or is slow with a strategy of this `price`, one line each.

    `compute` has the times of its job; `margin_share` is what should stay free of a device's memory.
    """
    job, strategy = price.job, price.strategy
    missing = missing_memory(price.memory, job.cluster, margin_share)
    if missing is not None and missing.tier == "device" and price.margin_bytes >= 0:
        share = price.margin_bytes / job.cluster.gpu.memory_bytes
        yield f"only {format_bytes(price.margin_bytes)} ({100 * share:.1f} %) of device memory are left; try less"
    elif missing is not None:
        where = f" on pipeline rank {missing.pipeline_rank}" if strategy.pp > 1 else ""
        free = f"{100 * margin_share:.0f} % is to stay free"
        yield f"{missing.tier} memory lacks {format_bytes(missing.missing_bytes)}{where}, where {free}"
    if strategy.tp > max(job.cluster.gpus_per_node, job.cluster.gpu.link_domain):
        yield f"mesh.tp={strategy.tp} reaches beyond a node of {job.cluster.gpus_per_node}, over the network"
    if compute.waits_for_launches(strategy):
        fix = "fewer GPUs or larger micro-batches take as long; try compile.enabled=true"
        yield f"kernels are shorter than the host takes to launch them, so {fix}"
    for part, fix in _FIXES.items():
        share = price.time.parts.get(part, 0.0) / price.time.step_s
        if share >= _LARGE_SHARE:
            yield f"{100 * share:.0f} % of a step is {PART_WORDS[part]}; {fix}"
