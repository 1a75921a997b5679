"""Give each value of a published run's row the type that its key has, or null, since people write values in many ways.

>>> row = {"id": 7, "model": {"layers": "32", "ffn": "unknown"}, "parallel": {"precision": ["bf16"], "tp": -1}}
>>> tidy = tidied(row)
>>> tidy["model"]["layers"], tidy["model"]["ffn"], tidy["parallel"]["precision"], tidy["parallel"]["tp"]
(32, None, 'bf16', None)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from planner_eval.forms import usual_form

_COUNTS: Final = frozenset(
    {
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "head_dim",
        "ffn",
        "vocab",
        "seq",
        "longest",
        "params",
        "num_gpus",
        "gpus_per_node",
        "nvlink_domain",
        "tp",
        "pp",
        "vpp",
        "dp",
        "cp",
        "ep",
        "zero_stage",
        "micro_batch",
        "global_batch",
        "num_microbatches",
        "grad_accum",
    }
)
_WORDS: Final = frozenset(
    {
        "name",
        "ffn_type",
        "attention",
        "gpu",
        "interconnect",
        "offload",
        "recompute",
        "schedule",
        "precision",
        "attention_kernel",
        "cp_impl",
        "training",
        "flops_convention",
        "memory_kind",
    }
)
_FLAGS: Final = frozenset(
    {
        "tied_embeddings",
        "first_last_stage_one_layer_less",
        "sequence_parallel",
        "hybrid_shard",
        "compile",
        "liger",
        "cuda_graphs",
        "async_tp",
        "fp32_grad_accum",
        "fp32_grad_accum_unsharded",
        "fp32_grad_reduce",
        "fp32_master",
        "gathers_logits",
        "narrow_loss",
        "whole_embedding",
    }
)
_FIGURES: Final = frozenset(
    {
        "iteration_time_s",
        "tflops_per_gpu",
        "mfu",
        "hfu",
        "tokens_per_s_per_gpu",
        "tokens_per_s_total",
        "samples_per_s_per_gpu",
        "samples_per_s_total",
        "memory_gib_per_gpu",
        "bubble_rate",
    }
)
_MAX_COUNT: Final = 10**15
_MAX_ZERO_STAGE: Final = 3
_FACTORS: Final[Mapping[str, float]] = MappingProxyType({"": 1, "k": 1024, "m": 1e6, "b": 1e9, "t": 1e12})


def tidied(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with counts as whole numbers of 0 or more, words as strings, flags as such, and sections as
    mappings.
    """
    row = usual_form(row)
    found = dict(row)
    for section in ("model", "hardware", "parallel", "outputs"):
        written = row.get(section)
        items = written.items() if isinstance(written, Mapping) else ()
        found[section] = {key: _value(key, value) for key, value in items}
    for key in ("flops_convention", "memory_kind", "quantity"):
        if key in row:
            found[key] = _word(row[key])
    return found


def _value(key: str, value: Any) -> Any:
    if value is None:
        return None
    if key in _COUNTS:
        found = _count(value)
        return None if key == "zero_stage" and (found or 0) > _MAX_ZERO_STAGE else found
    if key in _FLAGS:
        return flag(value)
    if key in _WORDS:
        return _word(value)
    if key in _FIGURES:
        return number(value)
    if key == "moe":
        return {name: _count(each) for name, each in value.items()} if isinstance(value, Mapping) else None
    if key == "op_times_ms":
        times = {name: number(each) for name, each in value.items()} if isinstance(value, Mapping) else {}
        return {name: each for name, each in times.items() if each is not None}
    if key == "layers_per_stage":
        counts = [_count(each) for each in value] if isinstance(value, list | tuple) else [None]
        return None if None in counts else counts
    return value


def number(value: Any) -> float | None:
    """Read a number of 0 or more, also in words such as `1,024` and `7B`; None for a range.

    >>> number("1,024"), number("3 (hybrid)"), number("7B"), number("64-128"), number(True)
    (1024.0, 3.0, 7000000000.0, None, None)
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value if math.isfinite(value) and value >= 0 else None
    match = re.fullmatch(r"\s*(\d[\d,]*(?:\.\d+)?(?:e\d+)?)\s*([kmbt]?)(\s*\(.*\))?\s*", str(value).lower())
    return float(match.group(1).replace(",", "")) * _FACTORS[match.group(2)] if match else None


def flag(value: Any) -> bool | None:
    """Say whether something is so; None for words that do not say.

    >>> flag("no"), flag("off (default)"), flag("inductor"), flag(1), flag("n/a")
    (False, False, True, True, None)
    """
    if not isinstance(value, str):
        return bool(value)
    word = re.split(r"[^a-z0-9/]", value.lower().strip(), maxsplit=1)[0]
    if word in ("", "unknown", "n/a", "na", "null"):
        return None
    return word not in ("false", "no", "off", "none", "never", "disabled", "0", "f", "n")


def _count(value: Any) -> int | None:
    found = number(value)
    return None if found is None or found > _MAX_COUNT else int(found)


def _word(value: Any) -> str | None:
    if value is None:
        return None
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
