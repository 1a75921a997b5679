"""Predict published runs with the planner, in the quantities and conventions in which they were reported.

>>> from planner_eval.cases import read_case
>>> row = {"model": {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "seq": 4096},
...        "hardware": {"gpu": "H100-SXM5-80GB", "num_gpus": 16},
...        "parallel": {"tp": 2, "zero_stage": 1, "micro_batch": 1, "global_batch": 64, "recompute": "none"}}
>>> predict(read_case(row), convention="all-keys").feasible
True
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from planner_eval.bubbles import bubble_rate, deferred_share
from planner_eval.cases import Case, KnownStates
from planner_eval.models import PublishedPricer, PublishedTimeModel
from planner_eval.rows import tidied
from planner_eval.traits import PublishedJob, is_after_h100, published_traits
from shardwise.config.resolve import ResolvedConfig
from shardwise.construction.model_states import estimate_model_states
from shardwise.planner.candidates import RECOMPUTES
from shardwise.planner.hardware import GIB
from shardwise.planner.job import PlanJob, changed, param_of
from shardwise.planner.results import Estimate, RankMemory
from shardwise.schedule.simulate import PipelineSimulator

Convention = Literal["all-keys", "causal", "hardware"]
"""How FLOPs are counted: all keys, half of them, or with what is computed twice."""

MemoryKind = Literal["states", "activations", "states+activations", "allocated", "reserved", "device"]
"""What a figure of memory counts: stored states, activations or both, tensors of the peak, what the allocator holds
for them, or all that the device has given out."""

NARROW_STATES: Final = 1 / 3
"""Share of 12 bytes a parameter that two moments in bf16 take, without a master."""

PARTS_OF_A_STEP: Final = ("single_layer_time", "activation_memory_ratio")
"""Quantities that do not describe a whole run."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction of a published run; fields are None where its inputs do not allow one.

    Attributes:
        tflops_per_gpu: by the requested convention.
        memory_gib_per_gpu: on the worst rank, of the requested kind.
        price: the estimate that the other fields are taken from.
    """

    iteration_time_s: float | None = None
    tflops_per_gpu: float | None = None
    memory_gib_per_gpu: float | None = None
    feasible: bool | None = None
    bubble_rate: float | None = None
    price: Estimate | None = None

    def as_row(self) -> dict[str, float | bool | None]:
        """Return all fields but the price."""
        names = ("iteration_time_s", "tflops_per_gpu", "memory_gib_per_gpu", "feasible", "bubble_rate")
        return {name: getattr(self, name) for name in names}


def convention_of(written: str | None, case: Case) -> Convention:
    """Return how a row's FLOPs are counted, by its own words, or as was usual for such runs.

    Full recomputation in fp16 was reported with what is computed twice; on devices that came after Hopper keys are
    mostly halved.

    >>> convention_of("model FLOPs with causal attention halved", Case(id="", group="", tier="", quantity=""))
    'causal'
    """
    text = (written or "").lower()
    if not text:
        if case.config is not None and case.config.recompute.mode == "full" and param_of(case.config) == "fp16":
            return "hardware"
        is_late = case.job is not None and is_after_h100(case.job.cluster.gpu)
        return "causal" if is_late else "all-keys"
    if "causal" in text and "non-causal" not in text:
        return "causal"
    is_hardware = "hardware" in text or "96bslh" in text or "counts recompute" in text
    return "hardware" if is_hardware and not text.startswith("model") else "all-keys"


def memory_kind_of(written: str | None) -> MemoryKind:
    """Return what a row's memory counts, by its own words; the tensors of the peak where it has none."""
    text = (written or "").lower()
    if "state" in text or "params+grads" in text:
        return "states+activations" if "activation" in text else "states"
    if "activation" in text:
        return "activations"
    if "reserved" in text:
        return "reserved"
    is_of_allocator = not text or any(mark in text for mark in ("alloc", "peak", "torch"))
    return "allocated" if is_of_allocator else "device"


def is_of_first_rank(written: str | None) -> bool:
    """Say whether a row's memory is what one process logged; that is the first, which most codes log.

    >>> is_of_first_rank("max_memory_allocated as logged"), is_of_first_rank("peak as printed, worst rank")
    (True, False)
    """
    text = (written or "").lower()
    is_worst = any(mark in text for mark in ("worst", "over ranks", "all ranks"))
    return not is_worst and any(mark in text for mark in ("as logged", "as printed", "rank 0", "first rank"))


def flops_per_token(job: PlanJob, config: ResolvedConfig, convention: Convention) -> float:
    """Return the FLOPs of forward and backward for one token by a convention.

    As `hardware`, a full recomputation adds the forward of all blocks, a selective one that of the attention's scores
    (Narayanan et al. 2021, arXiv 2104.04473, equation 3; Korthikanti et al. 2022, arXiv 2205.05198, appendix A).

    Args:
        job: the model and its sequence length.
        config: its recomputation counts under `hardware`.
        convention: `all-keys`, `causal` or `hardware`.
    """
    shape = job.shape
    total = shape.flops_per_token(job.seq_len, is_causal_halved=convention == "causal")
    if convention != "hardware" or config.recompute.mode == "none":
        return total
    head = 6.0 * shape.vocab_size * shape.hidden_size
    scores = total - 6.0 * shape.num_matmul_params
    again = (total - head) / 3 if config.recompute.mode == "full" else scores / 3
    return total + again / config.recompute.every


def memory_gib(rank: RankMemory, kind: MemoryKind, cached_logits_share: float = 0.0) -> float:
    """Return the GiB of one rank that a kind of figure counts.

    Args:
        rank: of a price.
        kind: of the figure.
        cached_logits_share: as `PublishedTraits` has it.
    """
    states = ("params", "grads", "optimizer")
    if kind == "states":
        return sum(rank.at_rest.values()) / GIB
    if kind in ("activations", "states+activations"):
        return rank.bytes_of("activations", *(states if kind == "states+activations" else ())) / GIB
    left_out = {"allocated": ("overhead", "rounding"), "reserved": ("overhead",), "device": ()}[kind]
    cached = 0.0 if kind == "allocated" else cached_logits_share * rank.peak.get("logits", 0.0)
    return (rank.peak_bytes - rank.bytes_of(*left_out) + cached) / GIB


def settled(case: Case, pipelines: PipelineSimulator | None = None) -> Estimate | None:
    """Return the price of a case's run; what the row leaves out is chosen to recompute least and fit.

    Of several micro-batch sizes the fastest counts, as those who ran it will have looked for that. Where nothing fits,
    it is the price of what takes least memory.

    Args:
        case: the run.
        pipelines: times of schedules that many cases share; None starts with none.
    """
    if case.job is None or case.config is None:
        return None
    prices: list[Estimate] = []
    for job in _readings(case, case.job):
        pricer = PublishedPricer(job)
        if pipelines is not None:
            pricer.time.pipelines = pipelines
        for configs in _candidates(case, case.config):
            prices = [pricer.price(each) for each in configs]
            fitting = [each for each in prices if each.margin_bytes >= 0]
            if fitting:
                return min(fitting, key=lambda each: each.time.step_s)
    return min(prices, key=lambda each: each.memory.worst.peak_bytes)


def _readings(case: Case, job: PlanJob) -> Iterator[PlanJob]:
    """Yield the job, then what else its code may have run where the row leaves its loss or its states open."""
    yield job
    if not isinstance(job, PublishedJob):
        return
    traits = job.traits
    fused: dict[str, Any] = {"logits_bytes": 0.0, "logs_entropy": False}
    narrow: dict[str, Any] = {"optimizer_share": NARROW_STATES}
    open_loss, open_states = "loss" in case.guesses, "states" in case.guesses
    for changes in (open_loss and fused, open_states and narrow, open_loss and open_states and fused | narrow):
        if changes:
            yield dataclasses.replace(job, traits=dataclasses.replace(traits, **changes))


def _candidates(case: Case, config: ResolvedConfig) -> Iterator[list[ResolvedConfig]]:
    """Yield, for each way to save memory, the mildest first, a candidate for every micro-batch size the run may have
    had.
    """
    each = config.batch.micro_size * config.batch.accumulation
    sizes = [config.batch.micro_size]
    if "micro_batch" in case.guesses and "global_batch" not in case.guesses:
        least = 2 * config.mesh.pp if config.mesh.pp > 1 else 1  # micro-batches, that the pipeline is not mostly empty
        sizes = [size for size in (4, 2) if each % size == 0 and each // size >= least] + [1]
    # As few blocks as fit, where the row does not say; frameworks say how many.
    modes = RECOMPUTES if "recompute" in case.guesses else ((config.recompute.mode, config.recompute.every),)
    stages = [config.zero.stage]
    if "zero_stage" in case.guesses:
        stages.append(3)
    tiers = [(config.tiers.activations, config.tiers.optimizer)]
    if "offload" in case.guesses:
        tiers += [("host", config.tiers.optimizer), ("host", "host")]
    for (kept, states), stage, (mode, every) in itertools.product(tiers, stages, modes):
        sparing = changed(
            config,
            {
                "tiers.activations": kept,
                "tiers.optimizer": states,
                "zero.stage": stage,
                "recompute.mode": mode,
                "recompute.every": every,
            },
        )
        yield [changed(sparing, {"batch.micro_size": size, "batch.accumulation": each // size}) for size in sizes]


def predict(
    case: Case,
    *,
    convention: Convention | None = None,
    memory_kind: MemoryKind | None = None,
    of_first_rank: bool = False,
    pipelines: PipelineSimulator | None = None,
) -> Prediction:
    """Predict a case's run; only the model's states, or only the bubble, where no more is known.

    Args:
        case: the run.
        convention: of the FLOPs; None for the usual one.
        memory_kind: what the memory counts; None for the tensors of the peak.
        of_first_rank: whether memory is that of the pipeline's first rank, not of the fullest.
        pipelines: times of schedules that many cases share; None starts with none.
    """
    if case.quantity in PARTS_OF_A_STEP:
        return Prediction()
    price = settled(case, pipelines)
    if price is None:
        return Prediction() if case.states is None else _of_states(case.states)
    if case.longest and price.job.seq_len != case.longest:
        full = PublishedPricer(dataclasses.replace(price.job, seq_len=case.longest)).price(price.config)
        price = dataclasses.replace(price, memory=full.memory)
    ranks = price.memory.ranks[:1] if of_first_rank else price.memory.ranks
    cached_share = published_traits(price.job).cached_logits_share
    memory = [memory_gib(rank, memory_kind or "allocated", cached_share) for rank in ranks]
    time_s = price.time.step_s * case.tokens_scale * case.num_sharers
    flops = flops_per_token(price.job, price.config, convention or convention_of(None, case)) * case.trained_share
    tokens = price.job.tokens * case.tokens_scale
    return Prediction(
        iteration_time_s=time_s,
        tflops_per_gpu=flops * tokens / time_s / price.job.cluster.num_gpus / 1e12,
        memory_gib_per_gpu=max(memory),
        feasible=price.margin_bytes >= 0,
        bubble_rate=_bubble_rate(case, price),
        price=price,
    )


def _of_states(states: KnownStates) -> Prediction:
    """Predict by the states alone: what they need, and that they must fit."""
    config = {"precision": {"accumulate": "param"}, "tiers": dict(states.tiers)}
    found = estimate_model_states(
        states.num_params, num_gpus=states.num_gpus, stages=(states.zero_stage,), config=config
    )[0]
    fits = None if states.gpu is None else found.device_bytes <= states.gpu.memory_bytes
    return Prediction(memory_gib_per_gpu=found.device_bytes / GIB or None, feasible=fits)


def _bubble_rate(case: Case, price: Estimate) -> float | None:
    """Return the bubble rate by the measured times where there are any, else by the priced ones."""
    if case.op_times is None and case.quantity != "schedule_bubble":
        return price.time.bubble_rate
    shape, config = price.job.shape, price.config
    return bubble_rate(
        case.searched_schedule or config.pipeline.schedule,
        config.mesh.pp,
        config.batch.accumulation,
        config.pipeline.virtual_stages,
        case.op_times or PublishedTimeModel(price.job).op_times(config),
        deferred_share=deferred_share(shape.hidden_size, shape.num_heads, price.job.seq_len),
    )


def predict_row(row: Mapping[str, Any], case: Case, pipelines: PipelineSimulator | None = None) -> Prediction:
    """Predict a case's run in the conventions that its row names, beside its inputs or among its outputs.

    Args:
        row: of the file of cases.
        case: the same row, as `read_case` returns it.
        pipelines: times of schedules that many cases share; None starts with none.
    """
    row = tidied(row)
    places = (row, row["parallel"], row["outputs"])
    written = {
        key: next((place[key] for place in places if place.get(key)), None)
        for key in ("flops_convention", "memory_kind")
    }
    kind = memory_kind_of(written["memory_kind"])
    convention = convention_of(written["flops_convention"], case)
    of_first_rank = is_of_first_rank(written["memory_kind"])
    return predict(case, convention=convention, memory_kind=kind, of_first_rank=of_first_rank, pipelines=pipelines)
