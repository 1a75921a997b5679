"""The schedules that a layout's pipeline runs: the recipe that the config names, lowered by what rests where.

>>> from torch import nn
>>> from shardwise.layout.cut import cut_model
>>> from shardwise.layout.layout import build_layout
>>> model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
>>> config = Config.from_dict({"mesh": {"pp": 2}, "batch": {"accumulation": 2}, "pipeline": {"schedule": "gpipe"}})
>>> config = config.resolve(world_size=2)
>>> print(step_schedule(config, build_layout(model, config, pipeline=cut_model(model, config))))
rank 0: 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1 0REDUCE 0STEP
rank 1: 1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1REDUCE 1STEP
"""

from __future__ import annotations

from shardwise.config import Config
from shardwise.layout.layout import Layout
from shardwise.layout.pipeline import PipelineLayout
from shardwise.schedule.actions import Schedule
from shardwise.schedule.passes import lower
from shardwise.schedule.pipelines import pipeline_evaluation
from shardwise.schedule.recipes import pipeline_step


def step_schedule(config: Config, layout: Layout) -> Schedule:
    """One optimizer step of all ranks of the pipeline, verified.

    Args:
        config: resolved.
        layout: with a pipeline.

    Raises:
        ConfigError: there is no such schedule, or it has no such number of stages.
        ScheduleError: it cannot run.
    """
    pipeline, stage, tiers = pipeline_of(layout), layout.stage, config.tiers
    section = config.pipeline
    computations = pipeline_step(
        section.schedule, layout.mesh.pp, config.batch.accumulation or 1, section.virtual_stages
    )
    return lower(
        computations,
        unshard_for_use=stage.unshard_for_use,
        reduce_each_backward=stage.reduce_each_backward and not pipeline.gathers_once,
        unshard_after_step=stage.unshard_after_step,
        gather=section.gather,
        fetched=(None,) if tiers.params != "device" else (),
        evicted=(None,) if tiers.grads != "device" else (),
        stepped=(None,) if tiers.optimizer != "device" else (),
    )


def evaluation_schedule(config: Config, layout: Layout, num_batches: int) -> Schedule:
    """The forwards of some batches, verified; arguments as above."""
    computations = pipeline_evaluation(pipeline_of(layout).placement, num_batches)
    return lower(
        computations,
        unshard_for_use=layout.stage.unshard_for_use,
        gather=config.pipeline.gather,
        fetched=(None,) if config.tiers.params != "device" else (),
    )


def pipeline_of(layout: Layout) -> PipelineLayout:
    """The pipeline of a layout that has one.

    Raises:
        ValueError: it has none.
    """
    if layout.pipeline is None:
        raise ValueError("a layout without a pipeline has no schedule; set mesh.pp to more than 1")
    return layout.pipeline
