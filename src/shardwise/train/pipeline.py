"""What a run says of its pipeline: how the model is cut and what the schedule promises, and in the end what it kept.

>>> config = Config.from_dict({"mesh": {"pp": 4}, "batch": {"accumulation": 8}, "pipeline": {"schedule": "zb-h1"}})
>>> schedule_line(config)
"zb-h1 over 4 ranks, 8 micro-batches: bubble 11.1 % of a rank's step, were F = B = W and transfers free"
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.config import Config
from shardwise.layout.cut import find_cut
from shardwise.models import Decoder
from shardwise.recording import gather_timeline
from shardwise.schedule import ScheduleError, TimedAction, bubble_s, placement_of, rank_bubble_s, rank_span_s
from shardwise.schedule.op_times import OpTimes, mean_times
from shardwise.train.loop import Trainer


def plan_note(trainer: Trainer) -> str:
    """The table of the cut and the schedule's promise; empty without a pipeline."""
    config = trainer.config
    if config.mesh.pp == 1:
        return ""
    model = Decoder(trainer.decoder.config, device="meta")
    return f"{find_cut(model, config).describe()}\n{schedule_line(config)}"


def schedule_line(config: Config) -> str:
    """The schedule of a config, with the bubble that its formula gives."""
    num_micro_batches, num_stages = config.batch.accumulation or 1, _stages_per_rank(config)
    stages = f" x {num_stages} stages" if num_stages > 1 else ""
    micro_batches = "1 micro-batch" if num_micro_batches == 1 else f"{num_micro_batches} micro-batches"
    what = f"{config.pipeline.schedule} over {config.mesh.pp} ranks{stages}, {micro_batches}"
    share = _formula_share(config, OpTimes())
    if share is None:
        return f"{what}: its bubble has no formula for such numbers; shardwise timeline simulates it"
    return f"{what}: bubble {share:.1%} of a rank's step, were F = B = W and transfers free".replace("%", " %")


def measured_note(trainer: Trainer) -> str:
    """The bubble of the last step beside that of the formula for the times measured; all ranks call it.

    Empty without a pipeline, and where this run has taken no step.
    """
    engine = trainer.engine
    if engine.layout.pipeline is None or engine.num_steps == trainer.first_step:
        return ""
    actions = gather_timeline(engine)
    formula = _formula_share(engine.config, mean_times(actions))
    said = "no formula for these times" if formula is None else f"{formula:.1%} by formula for the times measured"
    return f"bubble of the last step: {measured_share(actions):.1%} of the longest rank's, {said}".replace("%", " %")


def measured_share(actions: Sequence[TimedAction]) -> float:
    """The share of its span in which the rank with the longest one stands still.

    Args:
        actions: of all ranks of a pipeline.
    """
    spans_s = {each.rank: rank_span_s(actions, each.rank) for each in actions}
    longest = max(spans_s, key=spans_s.__getitem__)
    return rank_bubble_s(actions, longest) / spans_s[longest] if spans_s[longest] > 0 else 0.0


def _formula_share(config: Config, times: OpTimes) -> float | None:
    """The bubble as a share of a rank's span; None where there is no formula."""
    costs_s = times.forward_s, times.backward_input_s, times.backward_weight_s
    num_micro_batches = config.batch.accumulation or 1
    try:
        bubble = bubble_s(
            config.pipeline.schedule, config.mesh.pp, num_micro_batches, _stages_per_rank(config), *costs_s
        )
    except ScheduleError:
        return None
    whole_s = bubble + num_micro_batches * sum(costs_s)
    return bubble / whole_s if whole_s > 0 else None


def _stages_per_rank(config: Config) -> int:
    return placement_of(config.pipeline.schedule, config.mesh.pp, config.pipeline.virtual_stages).stages_per_rank
