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
    from shardwise.attention.api import block_sparse_attention
    from shardwise.attention.sdpa_patch import sparse_sdpa, sparse_sdpa_module
    from shardwise.checkpoint.load import LoadReport
    from shardwise.checkpoint.manifest import CheckpointError, DamagedError
    from shardwise.comm.collectives import CommError
    from shardwise.comm.loss import NonFiniteLossError
    from shardwise.config.errors import ConfigError
    from shardwise.config.resolve import Config
    from shardwise.construction.context import init
    from shardwise.construction.model_states import estimate_model_states
    from shardwise.construction.scan import build_layout
    from shardwise.engine.engine import Engine, backward
    from shardwise.engine.initialize import initialize
    from shardwise.engine.state_api import gathered
    from shardwise.engine.types import EvalResult, StepResult
    from shardwise.launch.process_group import LaunchError
    from shardwise.layout.layout import Layout
    from shardwise.models.layer_list import LayerList, LayerSpec
    from shardwise.pipeline.profile_units import measure_units
    from shardwise.planner.plan import Plan, plan
    from shardwise.runtime.param_guard import ReleasedParameterError
    from shardwise.tensor.plan_layout import plan_layout, prove_plan
    from shardwise.tensor.propose import propose_plan
    from shardwise.tensor.token_log_probs import TokenLogProbs, token_log_probs
    from shardwise.train.loaders import data_loader, stream_loader
    from shardwise.train.metrics import token_mult_prob_error
    from shardwise.train.recorder import progress
    from shardwise.train.recording import save_timeline
    from shardwise.verify.simulate import Simulation, simulate

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
    "TokenLogProbs",
    "backward",
    "block_sparse_attention",
    "build_layout",
    "data_loader",
    "estimate_model_states",
    "gathered",
    "init",
    "initialize",
    "measure_units",
    "plan",
    "plan_layout",
    "progress",
    "propose_plan",
    "prove_plan",
    "save_timeline",
    "simulate",
    "sparse_sdpa",
    "sparse_sdpa_module",
    "stream_loader",
    "token_log_probs",
    "token_mult_prob_error",
]

_MODULES: Final[Mapping[str, str]] = {
    "CheckpointError": "checkpoint.manifest",
    "CommError": "comm.collectives",
    "Config": "config.resolve",
    "ConfigError": "config.errors",
    "DamagedError": "checkpoint.manifest",
    "Engine": "engine.engine",
    "EvalResult": "engine.types",
    "LaunchError": "launch.process_group",
    "LayerList": "models.layer_list",
    "LayerSpec": "models.layer_list",
    "Layout": "layout.layout",
    "LoadReport": "checkpoint.load",
    "NonFiniteLossError": "comm.loss",
    "Plan": "planner.plan",
    "ReleasedParameterError": "runtime.param_guard",
    "Simulation": "verify.simulate",
    "StepResult": "engine.types",
    "TokenLogProbs": "tensor.token_log_probs",
    "backward": "engine.engine",
    "block_sparse_attention": "attention.api",
    "build_layout": "construction.scan",
    "data_loader": "train.loaders",
    "estimate_model_states": "construction.model_states",
    "gathered": "engine.state_api",
    "init": "construction.context",
    "initialize": "engine.initialize",
    "measure_units": "pipeline.profile_units",
    "plan": "planner.plan",
    "plan_layout": "tensor.plan_layout",
    "progress": "train.recorder",
    "propose_plan": "tensor.propose",
    "prove_plan": "tensor.plan_layout",
    "save_timeline": "train.recording",
    "simulate": "verify.simulate",
    "sparse_sdpa": "attention.sdpa_patch",
    "sparse_sdpa_module": "attention.sdpa_patch",
    "stream_loader": "train.loaders",
    "token_log_probs": "tensor.token_log_probs",
    "token_mult_prob_error": "train.metrics",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"shardwise.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
