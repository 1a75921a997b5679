"""Simulate a config's pipeline schedule, with times that are given, measured, or noted in the file of a plan.

>>> note = PlanNote("h100:512", 8, 128, OpTimes(0.03, 0.03, 0.025, 0.001))
>>> PlanNote.of(f"[mesh]\\n{note.line}\\n") == note
True
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Final, Self

from shardwise.config.resolve import Config, ConfigError, resolve_batch
from shardwise.config.validate import wrong_schedule_size
from shardwise.report.panel import TerminalPanel
from shardwise.schedule import ScheduleError, bubble_s, insert_transfers, pipeline_step, placement_of, simulate
from shardwise.schedule.simulate import OpTimes

MAX_CELLS: Final = 70_000
"""The most forwards of a schedule that is drawn: a larger one takes minutes to simulate."""
HERE: Final = "here"
"""The cluster of a plan for the machine on which it was made."""
_NOTE: Final = re.compile(r"^# planned for (\S+): (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class PlanNote:
    """Hold what a planned config's file says in a comment: its cluster, and the planner's times of a micro-batch.

    Attributes:
        cluster: as `--cluster` takes it, or `HERE`.
        num_ranks: of the pipeline.
        num_micro_batches: of a step.
        times: of a micro-batch on a rank, a mean over the ranks.
    """

    cluster: str
    num_ranks: int
    num_micro_batches: int
    times: OpTimes

    @property
    def line(self) -> str:
        """Return the comment."""
        times = " ".join(f"{name}={seconds:.6g}" for name, seconds in asdict(self.times).items())
        counts = f"pp={self.num_ranks} num_micro_batches={self.num_micro_batches}"
        return f"# planned for {self.cluster}: {counts} {times}"

    @classmethod
    def of(cls, text: str) -> Self | None:
        """Read the comment of a file's text; None where it has none."""
        found = _NOTE.search(text)
        try:
            numbers = dict(each.split("=") for each in found[2].split()) if found else {}
            num_ranks, num_micro_batches = int(numbers.pop("pp")), int(numbers.pop("num_micro_batches"))
            times = OpTimes(**{name: float(seconds) for name, seconds in numbers.items()})
        except (KeyError, TypeError, ValueError):
            return None
        return None if found is None else cls(found[1], num_ranks, num_micro_batches, times)

    def times_of(self, config: Config) -> OpTimes | None:
        """Return the times where they are those of a config; None where its pipeline was changed since."""
        try:
            is_same = (config.mesh.pp, num_micro_batches_of(config)) == (self.num_ranks, self.num_micro_batches)
        except ConfigError:
            return None
        return self.times if is_same else None


def planned(config: Config, op_times: OpTimes, max_cells: int = MAX_CELLS) -> TerminalPanel:
    """Simulate the schedule of a config with given times; return it with the bubble that its formula gives.

    Args:
        config: gives the schedule and its sizes.
        op_times: of a micro-batch on each rank.
        max_cells: the most forwards that are simulated.

    Raises:
        ConfigError: the number of micro-batches does not follow from the config alone, or there are more forwards.
        ScheduleError: the schedule cannot take these ranks, stages or micro-batches.
    """
    recipe, num_ranks, num_micro_batches = config.pipeline.schedule, config.mesh.pp, num_micro_batches_of(config)
    for code, message in wrong_schedule_size(num_micro_batches, config.pipeline, config.mesh, max_cells):
        raise ConfigError(code, message)
    schedule = pipeline_step(recipe, num_ranks, num_micro_batches, config.pipeline.virtual_stages)
    num_stages = placement_of(recipe, num_ranks, config.pipeline.virtual_stages).stages_per_rank
    actions = simulate(insert_transfers(schedule), op_times.cost(num_stages))
    ranks = f"{num_ranks} rank{'s' * (num_ranks > 1)}" + (f" x {num_stages} stages" if num_stages > 1 else "")
    title = f"{recipe}, planned: {ranks}, {num_micro_batches} micro-batch{'es' * (num_micro_batches > 1)}"
    times_s = (op_times.forward_s, op_times.backward_input_s, op_times.backward_weight_s)
    try:
        formula_s = bubble_s(recipe, num_ranks, num_micro_batches, num_stages, *times_s)
    except ScheduleError:  # says that there is none for such numbers
        formula_s = None
    return TerminalPanel(title, actions, formula_s if op_times.transfer_s == 0.0 else None)


def num_micro_batches_of(config: Config) -> int:
    """Return the micro-batches a step.

    Raises:
        ConfigError: they follow from the number of data-parallel ranks, which the config does not give.
    """
    batch, mesh = config.batch, config.mesh
    if batch.accumulation is not None:
        return batch.accumulation
    if batch.global_size is None or batch.micro_size is None:
        return 1
    if mesh.dp_shard is None:
        raise ConfigError(
            "micro-batches-unknown",
            "batch.accumulation follows from the number of data-parallel ranks, which is known only in a run; add "
            "mesh.dp_shard=N or batch.accumulation=N",
        )
    accumulation = resolve_batch(batch, mesh.dp_shard * (mesh.dp_replicate or 1)).accumulation
    return accumulation or 1
