"""The stages of a model under a config: its units, what they cost, and where the cut falls.

>>> from shardwise.models import Decoder, DecoderConfig
>>> shape = DecoderConfig(vocab_size=64, num_layers=4, hidden_size=16, num_heads=2, num_kv_heads=2, head_dim=8,
...                       ffn_size=32, max_seq_len=16, tie_embeddings=True)
>>> config = Config.from_dict({"mesh": {"pp": 2}, "batch": {"accumulation": 4}}).resolve(world_size=2)
>>> pipeline = cut_model(Decoder(shape, device="meta"), config)
>>> pipeline.units[0]
('embed', 'blocks.0', 'blocks.1')
>>> pipeline.stages_of["embed.weight"], pipeline.stages_of["blocks.2.ffn.up.weight"]
((0, 1), (1,))
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from torch import nn

from shardwise.config import Config
from shardwise.layout.layout import optimizer_states
from shardwise.layout.mesh_shape import SHARD_AXES, MeshShape
from shardwise.layout.pipeline import PipelineLayout
from shardwise.layout.precision import DTYPE_BYTES, precision_policy
from shardwise.layout.skeleton import ParamEntry, wide_parameters
from shardwise.layout.stage_costs import estimate_costs
from shardwise.layout.stage_cut import StageCut, cut_stages
from shardwise.layout.stage_units import find_stage_units
from shardwise.layout.stages import Placement, effective_stage
from shardwise.schedule.recipes import placement_of

_LOG: Final = logging.getLogger("shardwise")


def cut_model(model: nn.Module, config: Config, rank: int = 0) -> PipelineLayout:
    """Cut a model into the stages of a config.

    Args:
        model: any module; its storage is not read.
        config: resolved, with `mesh.pp` more than 1.
        rank: of the world, whose place in the pipeline the layout is to have.

    Raises:
        ConfigError: the model has no units, or fewer than there are stages; the schedule has no such number of virtual
            stages; or `pipeline.cut` or `pipeline.units` does not fit the model.
    """
    cut = find_cut(model, config)
    _LOG.info("%d stages over pp=%d:\n%s", cut.num_stages, config.mesh.pp, cut.describe())
    units = tuple(tuple(name for unit in stage for name in unit.modules) for stage in cut.stages)
    names = {entry.name for unit in cut.units for entry in unit.params}
    section = config.pipeline
    return PipelineLayout(
        placement_of(section.schedule, config.mesh.pp, section.virtual_stages),
        units,
        {name: cut.stage_of(name) for name in names},
        gathers_once=section.gather == "batch" or config.zero.stage < 3,
        index=MeshShape.from_config(config.mesh).coordinate(rank).pp,
    )


def find_cut(model: nn.Module, config: Config) -> StageCut:
    """The stages with their costs; arguments and errors as for `cut_model`."""
    section = config.pipeline
    placement = placement_of(section.schedule, config.mesh.pp, section.virtual_stages)
    units = find_stage_units(model, section.units, section.replicate or ())
    return cut_stages(
        units,
        estimate_costs(model, units, _bytes_per_element(model, config), section.unit_seconds),
        placement.num_stages,
        balance=section.balance,
        placement=[placement.rank_of(stage) for stage in range(placement.num_stages)],
        pinned=section.cut,
    )


def _bytes_per_element(model: nn.Module, config: Config) -> Callable[[ParamEntry], float]:
    """What each element of a parameter takes at rest on one rank (Rajbhandari et al. 2020, figure 1)."""
    num_shards = MeshShape.from_config(config.mesh).size_along(SHARD_AXES)
    stage = effective_stage(config.zero.stage, num_shards, config.tiers, is_scheduled=True)
    narrow, wide = precision_policy(config.precision), wide_parameters(model, config.precision)

    def num_bytes(entry: ParamEntry) -> float:
        policy = narrow if wide.isdisjoint((entry.name, *entry.aliases)) else narrow.widened
        num_states = len(optimizer_states(config.optimizer)) + policy.keeps_master
        sizes = (
            (stage.params, DTYPE_BYTES[policy.param]),
            (stage.grads, DTYPE_BYTES[policy.accumulate] * entry.requires_grad),
            (stage.optimizer, DTYPE_BYTES[policy.master] * num_states * entry.requires_grad),
        )
        return sum(size / num_shards if place is Placement.SHARD else size for place, size in sizes)

    return num_bytes
