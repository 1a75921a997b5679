"""Say what tokens cost on a rented cluster, how many a budget buys, and on how many of its GPUs they cost least.

>>> from shardwise.models.presets import preset
>>> from shardwise.config.resolve import Config
>>> from shardwise.planner.hardware import parse_cluster
>>> from shardwise.planner.pricer import Pricer
>>> from shardwise.planner.job import ModelShape
>>> shape = ModelShape.of_decoder(preset("llama-3-8b"))
>>> job = PlanJob(shape=shape, seq_len=8192, global_batch=64, cluster=parse_cluster("h100:8"))
>>> config = Config.from_dict({"zero": {"stage": 3}, "batch": {"accumulation": 8}, "precision": {"param": "bf16"}})
>>> price = Pricer(job).price(config.resolve(world_size=8))
>>> print(cost_words(price))
$0.09 for a million tokens, $574 a day, at $2.99 an hour and GPU
>>> print(run_words(price, num_tokens=100e9))
100 B tokens: $9.01 k, 15.7 days (12.2 to 19.1)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from shardwise.config.errors import ConfigError
from shardwise.planner.candidates import SearchSpace
from shardwise.planner.job import PlanJob
from shardwise.planner.results import Estimate, money_words
from shardwise.planner.search import Limits, SearchResult, search
from shardwise.runtime.format import format_count, three_digits

_DAY_S: Final = 86_400.0
_MILLION: Final = 1e6
# The cluster, a half of it, and so on.
_MOST_SIZES: Final = 5


@dataclass(frozen=True)
class RunCost:
    """Hold what a run takes; `usd` is None where the devices' price is not known."""

    num_tokens: float
    days: float
    usd: float | None


def cost_per_step(price: Estimate) -> float | None:
    """Return the dollars of all devices for one step; None where their price is not known."""
    cluster = price.job.cluster
    if not cluster.gpu.price_per_hour:
        return None
    return cluster.gpu.price_per_hour * cluster.num_gpus * price.time.step_s / 3600


def usd_per_million_tokens(price: Estimate) -> float | None:
    """Return the dollars of all devices for a million tokens; None where their price is not known."""
    step = cost_per_step(price)
    return None if step is None else step / price.job.tokens * _MILLION


def run_cost(price: Estimate, num_tokens: float | None = None, budget_usd: float | None = None) -> RunCost | None:
    """Return what a run takes of so many tokens, else of as many as the budget buys; None where neither is known.

    Args:
        budget_usd: the dollars that there are; without a price of the devices they buy nothing that is known.
    """
    step_usd, tokens = cost_per_step(price), price.job.tokens
    if num_tokens is None and budget_usd is not None and step_usd is not None:
        num_tokens = budget_usd / step_usd * tokens
    if num_tokens is None:
        return None
    num_steps = num_tokens / tokens
    usd = None if step_usd is None else num_steps * step_usd
    return RunCost(num_tokens, num_steps * price.time.step_s / _DAY_S, usd)


def cost_words(price: Estimate) -> str:
    """Write what tokens and a day cost; return "" where no price is known."""
    per_million, cluster = usd_per_million_tokens(price), price.job.cluster
    if per_million is None:
        return ""
    hourly = cluster.gpu.price_per_hour
    day = money_words(24 * hourly * cluster.num_gpus)
    return f"{money_words(per_million)} for a million tokens, {day} a day, at ${hourly:.2f} an hour and GPU"


def run_words(price: Estimate, num_tokens: float | None = None, budget_usd: float | None = None) -> str:
    """Write what a run takes; return "" where neither its tokens nor what a budget buys is known.

    The arguments are those of `run_cost`.
    """
    run, time = run_cost(price, num_tokens, budget_usd), price.time
    if run is None:
        return ""
    low, high = (run.days * edge_s / time.step_s for edge_s in (time.low_s, time.high_s))
    sentence = f"{format_count(run.num_tokens)} tokens: {'' if run.usd is None else money_words(run.usd) + ', '}"
    sentence += f"{_days(run.days)} days ({_days(low)} to {_days(high)})"
    if run.usd is not None and num_tokens is not None and budget_usd is not None:
        left, bought = budget_usd - run.usd, num_tokens * budget_usd / run.usd
        more = "left of the budget" if left >= 0 else f"over the budget, which buys {format_count(bought)} tokens"
        sentence += f"; {money_words(abs(left))} {more}"
    return sentence


def by_num_gpus(
    job: PlanJob, space: SearchSpace | None = None, limits: Limits | None = None
) -> tuple[SearchResult, ...]:
    """Search with all GPUs of a cluster, a half, a quarter and so on; return what fits, the cheapest token first.

    With fewer GPUs a step takes longer, and less of it is lost to links and bubbles.

    Args:
        job: on all GPUs of its cluster; the batch stays.
        space: what may be chosen; numbers of GPUs with which its pins do not go are left out.

    Raises:
        ConfigError: no number of GPUs has a candidate.
    """
    plans, num_gpus, problem = [], job.cluster.num_gpus, None
    for _ in range(_MOST_SIZES):
        cluster = replace(job.cluster, num_gpus=num_gpus, gpus_per_node=min(num_gpus, job.cluster.gpus_per_node))
        smaller = replace(job, cluster=cluster)
        try:
            plans.append(search(smaller, space, limits))
        except ConfigError as error:
            problem = problem or error
        if num_gpus % 2:
            break
        num_gpus //= 2
    if problem is not None and not plans:
        raise problem
    fitting = [plan for plan in plans if plan.winner is not None] or plans[:1]
    return tuple(sorted(fitting, key=gpu_s_per_token))


def gpu_s_per_token(plan: SearchResult) -> float:
    """Return the seconds of a GPU that a token takes under the winner; 0 where nothing fits."""
    return 0.0 if plan.winner is None else 1 / plan.winner.tokens_per_s_per_gpu


def _days(days: float) -> str:
    return three_digits(days) if days >= 1 else f"{days:.2g}"
