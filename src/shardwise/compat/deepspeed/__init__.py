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
import sys
from typing import Final

from shardwise.compat.deepspeed.finder import Finder, answers

__version__: Final = "0.19.8+shardwise"
version: Final = __version__
__version_major__, __version_minor__, __version_patch__ = 0, 19, 8
__git_hash__, __git_branch__ = "", ""  # of a source that a release is built from

# Each name is imported when it is first used, so that `import deepspeed` costs next to nothing.
__getattr__ = answers(__name__)
sys.meta_path.append(Finder())


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config` to a script's arguments."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="use DeepSpeed, which Shardwise answers for")
    group.add_argument("--deepspeed_config", default=None, type=str, help="path of DeepSpeed's JSON")
    return parser
