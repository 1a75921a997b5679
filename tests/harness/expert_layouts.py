"""Layouts of mixtures of experts on four ranks, as options of a test, and what a config says of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

EXPERT_FACTORS: Mapping[str, list[Any]] = MappingProxyType(
    {
        "ep": [1, 2, 4],
        "stage": [0, 1, 2, 3],
        "tp": [1, 2],
        "cp": [1, 2],
        "pp": [1, 2],
        "sequence_parallel": [False, True],
        "accumulation": [1, 2],
        "recompute": ["none", "full", "selective"],
    }
)


def fits_ranks(options: Mapping[str, Any]) -> bool:
    """Experts have a mesh of their own, and no split of the sequence without ranks that share it."""
    num_ranks = options.get("num_ranks", 4) // options["pp"]
    is_legal = options["tp"] * options["cp"] <= num_ranks and num_ranks % options["ep"] == 0
    return is_legal and (options["tp"] > 1 or not options["sequence_parallel"])


def sections_of(options: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The sections of a config for options, and `more`."""
    recompute = {"recompute": {"mode": options["recompute"]}} if "recompute" in options else {}
    return {
        "mesh": {axis: options[axis] for axis in ("ep", "tp", "cp", "pp")},
        "zero": {"stage": options["stage"]},
        "tensor": {"sequence_parallel": options["sequence_parallel"]},
        **recompute,
        "pipeline": {"schedule": "1f1b"},
        **more,
    }


def num_data_ranks(options: Mapping[str, Any]) -> int:
    """How many ranks have batches of their own."""
    return int(options.get("num_ranks", 4)) // math.prod(options[axis] for axis in ("tp", "cp", "pp"))
