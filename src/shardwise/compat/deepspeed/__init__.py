"""Offer DeepSpeed's names at DeepSpeed's paths, over the engine of Shardwise.

A script gets it by `import shardwise.compat.deepspeed as deepspeed`, or unchanged by `shardwise run --as-deepspeed`.

>>> import torch
>>> import shardwise.compat.deepspeed as deepspeed
>>> model = torch.nn.Linear(2, 1)
>>> settings = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
>>> engine, optimizer, _, _ = deepspeed.initialize(model=model, config=settings)
>>> loss = engine.backward(engine(torch.ones(2, 2)).sum())
>>> engine.step()
>>> engine.global_steps
1
"""

from __future__ import annotations

import argparse
import importlib
from types import MappingProxyType
from typing import Any, Final

from shardwise.compat import submodules

__version__: Final = "0.19.8+shardwise"
version: Final = __version__

# Each name is imported when it is first used, so that `import deepspeed` costs next to nothing.
_NAMES: Final = MappingProxyType(
    {
        "initialize": "start",
        "init_distributed": "comm",
        "DeepSpeedEngine": "runtime.engine",
        "DeepSpeedDataLoader": "runtime.dataloader",
        "DeepSpeedOptimizer": "runtime.engine",
        "PipelineModule": "pipe",
        "PipelineEngine": "runtime.pipe.engine",
        "log_dist": "utils",
        "logger": "utils",
        "get_accelerator": "accelerator",
    }
)


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    return importlib.import_module(f"{__name__}.runtime.zero") if name == "zero" else submodules(__name__)(name)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config` to a script's arguments."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="use DeepSpeed, which Shardwise answers for")
    group.add_argument("--deepspeed_config", default=None, type=str, help="path of DeepSpeed's JSON")
    return parser


def tp_model_init(model: Any, tp_size: int, dtype: Any, config: Any = None, **options: Any) -> Any:
    """Return the model as it is: the JSON splits it in `initialize`; the arguments are those of DeepSpeed."""
    return model


def init_inference(*args: Any, **options: Any) -> Any:
    """Refuse DeepSpeed's inference engine."""
    raise NotImplementedError("init_inference is of DeepSpeed alone; serve exported weights by an inference library")
