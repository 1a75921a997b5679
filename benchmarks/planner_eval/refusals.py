"""Say why a row of a file of cases cannot be priced: its value, the rule, and the fix, in one line.

>>> row = {"model": {"layers": 32, "hidden": 4096, "seq": 4096}, "hardware": {"gpu": "abacus", "num_gpus": 8}}
>>> refusal(row).split(";")[0]
'hardware.gpu: abacus is no device that the planner knows'
>>> refusal({"model": {"layers": 32, "seq": 4096}})
'model.hidden=None is no whole number from 1 to 1000000; write the hidden size of the model'
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from planner_eval.words import find_written_gpu
from shardwise.config.errors import ConfigError

NEEDED: Final = (
    ("model", "layers", 2048, "the number of its layers"),
    ("model", "hidden", 1_000_000, "the hidden size of the model"),
    ("model", "seq", 1_000_000_000, "the tokens of a sequence"),
    ("hardware", "num_gpus", 10_000_000, "how many devices ran it"),
)
"""Section and key, the largest value that is accepted, and what it is."""
MAX_STAGES: Final = 1024
"""The most stages of a pipeline; a schedule of more takes too long to simulate, and no run has so many."""


def refusal(row: Mapping[str, Any]) -> str | None:
    """Return the first rule that a tidy row breaks; None where it breaks none.

    Args:
        row: as `rows.tidied` returns it.
    """
    for section, key, most, words in NEEDED:
        value = _get(row, section, key)
        if not value or value > most:
            return f"{section}.{key}={value} is no whole number from 1 to {most}; write {words}"
    gpu = _get(row, "hardware", "gpu")
    if not gpu:
        return f"hardware.gpu={gpu} names no device; write one, such as H100-SXM5-80GB"
    try:
        find_written_gpu(gpu)
    except ConfigError as error:
        return f"hardware.gpu: {error}"
    split = {key: _get(row, "parallel", key) or 1 for key in ("tp", "pp", "cp")}
    num_ranks, num_gpus = split["tp"] * split["pp"] * split["cp"], _get(row, "hardware", "num_gpus")
    if num_ranks > num_gpus:
        written = " x ".join(f"{key}={value}" for key, value in split.items())
        return f"parallel: {written} are more ranks than hardware.num_gpus={num_gpus}; lower one, or write more devices"
    return None


def stages_refusal(num_stages: int, num_layers: int) -> str | None:
    """Say why a pipeline cannot have so many stages, virtual ones counted; None where it can. The ends may hold no
    block.
    """
    most = min(num_layers + 2, MAX_STAGES)
    if num_stages <= most:
        return None
    return f"parallel: pp x vpp = {num_stages} stages are more than the {most} of {num_layers} layers; lower pp or vpp"


def _get(row: Mapping[str, Any], section: str, key: str) -> Any:
    return (row.get(section) or {}).get(key)
