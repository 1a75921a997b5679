"""Find the best layouts of a job from Python: `shardwise.plan`.

>>> found = plan("llama-7b", "h100:8", global_batch=64, settings=["mesh.tp=1", "mesh.cp=1", "recompute.mode=full"])
>>> found.best.config().mesh.tp, len(found.choices)
(1, 10)
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from rich.console import Console

from shardwise.config.arguments import checked
from shardwise.config.errors import ConfigError, printable_lines
from shardwise.config.resolve import Config
from shardwise.config.sections import Positive
from shardwise.planner.explain import Reasons, reasons_of
from shardwise.planner.hardware import Cluster, parse_cluster
from shardwise.planner.render import plan_view
from shardwise.planner.request import PlanRequest, Question, model_of, written
from shardwise.planner.results import Estimate, simplest
from shardwise.planner.search import Limits, SearchResult, search
from shardwise.runtime.format import format_bytes, format_s

_WIDTH: Final = 100
_LOGITS_SHARE: Final = 0.25


@dataclass(frozen=True, repr=False)
class PlanChoice:
    """Hold one layout: its price, and the config that runs it.

    Attributes:
        price: memory of each pipeline rank, and time of a step by part.
    """

    price: Estimate

    def config(self) -> Config:
        """Return the config by which `shardwise train` and `initialize` run it.

        Raises:
            ConfigError: our decoder cannot have the model's shape.
        """
        return written(self.price.job, self.price.config)

    def __repr__(self) -> str:
        peak = format_bytes(self.price.memory.worst.peak_bytes)
        return f"{self.price.layout}: {format_s(self.price.time.step_s)} a step, {peak}"


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """Hold the layouts found for a job; it is printed as `shardwise plan` prints it.

    Attributes:
        choices: the layouts that fit: the best, then the others in order of their time.
        result: what was priced and what was left out, what fits nearly where nothing does, whether none is faster.
        reasons: why the best wins and others lose.
        asked: the job, and how the question was read.
    """

    choices: tuple[PlanChoice, ...]
    result: SearchResult
    reasons: Reasons
    asked: PlanRequest

    @property
    def best(self) -> PlanChoice:
        """Return the simplest of those that fit and are as fast as the fastest.

        Raises:
            ConfigError: nothing fits; the message names what would.
        """
        if not self.choices:
            fix = next(iter(self.reasons.suggestions), "give a larger cluster")
            raise ConfigError("nothing-fits", f"nothing fits on {self.asked.job.cluster.num_gpus} GPUs; {fix}")
        return self.choices[0]

    def __repr__(self) -> str:
        console = Console(file=io.StringIO(), width=_WIDTH, color_system=None, markup=False, emoji=False)
        with console.capture() as captured:
            notes = self.asked.notes
            console.print(plan_view(self.result, self.reasons, notes=notes))
        return "\n".join(line.rstrip() for line in printable_lines(captured.get().rstrip("\n")).split("\n"))


def find(question: Question, look: Callable[[PlanRequest], SearchResult]) -> tuple[PlanRequest, SearchResult]:
    """Answer a question; where nothing fits, with the loss in chunks, and then for shorter sequences than the longest.

    The loss is also tried in chunks where logits fill much of a device; what is then faster, or simpler, is the answer.

    Args:
        look: searches the layouts of what was asked.

    Returns:
        What was answered, with notes that say where it is easier than the question, and the answer.

    Raises:
        ConfigError: as `ask` and the search.
    """
    asked = question.ask()
    result = look(asked)
    best = result.winner
    if best is not None and best.memory.worst.bytes_of("logits") < _LOGITS_SHARE * best.memory.worst.peak_bytes:
        return asked, result
    for easier in question.easier(asked):
        further = easier.ask()
        if best is not None and further.job.seq_len != asked.job.seq_len:
            break
        try:
            found = look(further)
        except ConfigError:  # what is pinned does not go with chunks, as schedules that split the backward
            continue
        if found.winner is not None and (best is None or simplest([best, found.winner]) is found.winner):
            return replace(further, notes=(*further.notes, *question.differences(easier))), found
    return asked, result


@checked
def plan(
    model: object,
    cluster: str | Cluster,
    *,
    global_batch: Positive | None = None,
    seq_len: Positive | None = None,
    settings: Sequence[str] = (),
    limits: Limits | None = None,
) -> Plan:
    """Search the layouts of a job on a cluster for the best that fits. Nothing is started, and no GPU is needed.

    Args:
        model: what `--model` takes; or a `ModelShape`, a `DecoderConfig`, a config of Hugging Face's or the dictionary
            of one, or a module that has one of them as its `config`, on meta or anywhere.
        cluster: what `--cluster` takes, such as h100:512; or a `Cluster`.
        global_batch: sequences of an optimizer step; when left out the model's file's, or as many as usual.
        seq_len: tokens of a sequence; the model's longest when left out.
        settings: `section.key=value`, which pin what the planner would choose, or go into the config.
        limits: how many are wanted, how much memory is to stay free, when the search ends.

    Raises:
        ConfigError: the model, the cluster or a setting is none, or there is no layout at all.
    """
    target = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    question = Question(model_of(model), target, seq_len, global_batch, tuple(settings))
    asked, result = find(question, lambda asked: search(asked.job, asked.space, limits))
    choices = tuple(PlanChoice(price) for price in result.best)
    return Plan(choices=choices, result=result, reasons=reasons_of(result), asked=asked)
