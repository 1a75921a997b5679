"""Parameters of block-sparse structures at random, and what DeepSpeed's own classes make of them."""

from __future__ import annotations

import hashlib
import importlib.util
import random
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

WAYS = st.sampled_from(["unidirectional", "bidirectional"])
STRICT_WAYS = st.sampled_from(["unidirectional", "bidirectional", "bidirectional", "sideways"])


def deepspeed_structures() -> ModuleType | None:
    """DeepSpeed's module of structures, loaded without the rest of it; None where it is not installed or has none."""
    package = importlib.util.find_spec("deepspeed")
    if package is None or not package.submodule_search_locations:
        return None
    path = Path(package.submodule_search_locations[0]) / "ops" / "sparse_attention" / "sparsity_config.py"
    if not path.exists():  # removed after 0.19.6
        return None
    spec = importlib.util.spec_from_file_location("deepspeed_sparsity_config", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outcome(module: Any, case: Mapping[str, Any], **options: Any) -> Tensor | tuple[str, str]:
    """The layout that a module's class makes, under a seed of Python's generator, or type and message of its error."""
    random.seed(case["random_seed"])
    try:
        return getattr(module, case["cls"])(**case["params"], **options).make_layout(case["seq_len"])
    except Exception as error:
        return type(error).__name__, str(error)


def digest(layout: Tensor) -> str:
    return hashlib.sha256(layout.to(torch.uint8).numpy().tobytes()).hexdigest()


@st.composite
def cases(draw: st.DrawFn, *, are_legal: bool) -> dict[str, Any]:
    """A structure's class, parameters and length: what a user may ask for, or anything near it."""
    name = draw(st.sampled_from(sorted(OPTIONS)))
    params: dict[str, Any] = {"num_heads": draw(st.integers(1, 5))}
    block = draw(st.sampled_from([1, 4, 16]))
    params |= draw(st.fixed_dictionaries({}, optional=OPTIONS[name]))
    if "attention" not in OPTIONS[name]:
        params.pop("attention", None)
    elif are_legal:
        params["attention"] = draw(WAYS)
    if name == "FixedSparsityConfig" and are_legal:
        params |= draw(legal_fixed())
    if "global_block_end_indices" in params and are_legal:
        starts = params["global_block_indices"] = draw(st.lists(st.integers(0, 12), max_size=3))
        params["global_block_end_indices"] = [start + draw(st.integers(1, 4)) for start in starts]
    if params.get("attention") == "unidirectional" and are_legal:
        params.pop("horizontal_global_attention", None)
    seq_len = draw(st.integers(1, 14)) * block
    if are_legal:
        seq_len -= draw(st.integers(0, block - 1))
    elif draw(st.integers(0, 15)) == 0:
        seq_len += 1
    return {
        "cls": name,
        "params": params | {"block": block},
        "seq_len": seq_len,
        "random_seed": draw(st.integers(0, 99)),
    }


@st.composite
def legal_fixed(draw: st.DrawFn) -> dict[str, Any]:
    num_global, times = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    num_patterns = draw(st.integers(1, times))
    return {
        "num_local_blocks": num_global * times,
        "num_global_blocks": num_global,
        "num_different_global_patterns": num_patterns,
        "different_layout_per_head": num_patterns > 1 or draw(st.booleans()),
    }


_INDICES = st.lists(st.integers(0, 15), max_size=3)
OPTIONS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "DenseSparsityConfig": {"different_layout_per_head": st.booleans()},
    "FixedSparsityConfig": {
        "different_layout_per_head": st.booleans(),
        "num_local_blocks": st.integers(1, 6),
        "num_global_blocks": st.integers(1, 3),
        "attention": STRICT_WAYS,
        "horizontal_global_attention": st.booleans(),
        "num_different_global_patterns": st.integers(1, 4),
    },
    "VariableSparsityConfig": {
        "different_layout_per_head": st.booleans(),
        "num_random_blocks": st.integers(0, 4),
        "local_window_blocks": st.lists(st.integers(1, 5), min_size=1, max_size=3),
        "global_block_indices": _INDICES,
        "global_block_end_indices": _INDICES,
        "attention": STRICT_WAYS,
        "horizontal_global_attention": st.booleans(),
    },
    "BigBirdSparsityConfig": {
        "different_layout_per_head": st.booleans(),
        "num_random_blocks": st.integers(0, 3),
        "num_sliding_window_blocks": st.integers(1, 7),
        "num_global_blocks": st.integers(0, 3),
        "attention": STRICT_WAYS,
    },
    "BSLongformerSparsityConfig": {
        "different_layout_per_head": st.booleans(),
        "num_sliding_window_blocks": st.integers(1, 7),
        "global_block_indices": _INDICES,
        "global_block_end_indices": _INDICES,
        "attention": STRICT_WAYS,
    },
    "LocalSlidingWindowSparsityConfig": {"num_sliding_window_blocks": st.integers(1, 7), "attention": STRICT_WAYS},
}
