"""Shardwise trains PyTorch models too large for the machines at hand.

The public names are here; each is imported when it is first used, so that `import shardwise` costs next to nothing.

>>> import shardwise
>>> shardwise.Config.from_dict({"zero": {"stage": 3}}).zero.stage
3
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from shardwise.attention.functional import block_sparse_attention
    from shardwise.attention.interception import sparse_sdpa, sparse_sdpa_module
    from shardwise.checkpoint.loading import LoadReport
    from shardwise.checkpoint.manifest import CheckpointError, DamagedError
    from shardwise.comm import CommError
    from shardwise.config import Config, ConfigError
    from shardwise.deferred import init
    from shardwise.engine import Engine
    from shardwise.joint_backward import backward
    from shardwise.launch.group import LaunchError
    from shardwise.layout.layout import Layout, build_layout
    from shardwise.loss import NonFiniteLossError
    from shardwise.models.layer_list import LayerList, LayerSpec
    from shardwise.pipeline.measure import measure_units
    from shardwise.planner.estimators import estimate_model_states
    from shardwise.planner.plan import Plan, plan
    from shardwise.recording import save_timeline
    from shardwise.results import EvalResult, StepResult
    from shardwise.simulation import Simulation, simulate
    from shardwise.start import initialize
    from shardwise.tensor.layout import plan_layout
    from shardwise.tensor.propose import propose_plan
    from shardwise.tensor.prove import prove_plan
    from shardwise.wearing import ReleasedParameterError

__version__: Final = "0.1.0"

__all__ = [
    "CheckpointError",
    "CommError",
    "Config",
    "ConfigError",
    "DamagedError",
    "Engine",
    "EvalResult",
    "LaunchError",
    "LayerList",
    "LayerSpec",
    "Layout",
    "LoadReport",
    "NonFiniteLossError",
    "Plan",
    "ReleasedParameterError",
    "Simulation",
    "StepResult",
    "backward",
    "block_sparse_attention",
    "build_layout",
    "estimate_model_states",
    "init",
    "initialize",
    "measure_units",
    "plan",
    "plan_layout",
    "propose_plan",
    "prove_plan",
    "save_timeline",
    "simulate",
    "sparse_sdpa",
    "sparse_sdpa_module",
]

_MODULES: Final[Mapping[str, str]] = {
    "CheckpointError": "checkpoint.manifest",
    "CommError": "comm",
    "Config": "config",
    "ConfigError": "config",
    "DamagedError": "checkpoint.manifest",
    "Engine": "engine",
    "EvalResult": "results",
    "LaunchError": "launch.group",
    "LayerList": "models.layer_list",
    "LayerSpec": "models.layer_list",
    "Layout": "layout.layout",
    "LoadReport": "checkpoint.loading",
    "NonFiniteLossError": "loss",
    "Plan": "planner.plan",
    "ReleasedParameterError": "wearing",
    "Simulation": "simulation",
    "StepResult": "results",
    "backward": "joint_backward",
    "block_sparse_attention": "attention.functional",
    "build_layout": "layout.layout",
    "estimate_model_states": "planner.estimators",
    "init": "deferred",
    "initialize": "start",
    "measure_units": "pipeline.measure",
    "plan": "planner.plan",
    "plan_layout": "tensor.layout",
    "propose_plan": "tensor.propose",
    "prove_plan": "tensor.prove",
    "save_timeline": "recording",
    "simulate": "simulation",
    "sparse_sdpa": "attention.interception",
    "sparse_sdpa_module": "attention.interception",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"shardwise.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
