"""Says what selective recomputation saves of a block: what costs most to compute for its size.

A saved result that something writes into is not what the second pass must find there. Such a result is computed again.
Torch's own checkpoint raises an error without a code where the write has left a new version, and computes with the
wrong values where it has not, as inside of `torch.gru`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from shardwise.runtime.torch_private import COMPUTED_AGAIN, pytree, storage_key, version, written_tensors

# A part of a block is recomputed alone: saved products of all parts would be what the parts must not keep.
IN_PART: Final[ContextVar[bool]] = ContextVar("shardwise_in_part", default=False)


def selective_contexts() -> Any:
    """Return the contexts of a block's first pass and of its recomputations, as torch's checkpoint takes them."""
    if torch.compiler.is_compiling():  # the compiler takes no other contexts, and shows them no writes
        return create_selective_checkpoint_contexts(_save_products)
    policy = _Policy()
    first, again = create_selective_checkpoint_contexts(policy)
    policy.storage = again.storage
    return first, _OnceSaved(again)


class _Policy:
    """Saves products, until something writes into them.

    Attributes:
        storage: what is saved, by op and number of its call.
    """

    storage: Any

    def __init__(self) -> None:
        self._num_calls: defaultdict[Any, int] = defaultdict(int)
        self._saved: dict[int, list[tuple[Any, int]]] = {}  # the calls whose results have this storage

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        number = self._num_calls[op]
        self._num_calls[op] += 1
        for tensor in written_tensors(op, args, kwargs) if self._saved and hasattr(op, "_schema") else ():
            for saved_op, saved_number in self._saved.pop(storage_key(tensor), ()):
                self.storage[saved_op][saved_number] = COMPUTED_AGAIN
        policy = _save_products(context, op, *args, **kwargs)
        if policy is CheckpointPolicy.MUST_SAVE:
            for leaf in pytree.tree_leaves(context.op_output):
                if isinstance(leaf, Tensor):
                    self._saved.setdefault(storage_key(leaf), []).append((op, number))
        return policy


class _OnceSaved(AbstractContextManager[None]):
    """The context of the recomputations of a block: the first takes what was saved, later ones compute all again.

    A forward that takes derivatives in itself recomputes twice, as a second backward of one graph does.
    """

    def __init__(self, saved: Any) -> None:
        self._saved: Any = saved
        self._entered: list[AbstractContextManager[Any] | None] = []

    def __enter__(self) -> None:
        entered, self._saved = self._saved, None
        self._entered.append(entered)
        if entered is not None:
            _forget_written(entered.storage)
            entered.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        entered = self._entered.pop()
        return None if entered is None else entered.__exit__(*error)


def _forget_written(storage: Mapping[Any, dict[int, Any]]) -> None:
    """Forget what code after the block has written into, such as a sum into the block's output."""
    for results in storage.values():
        for number, result in results.items():
            held = [each for each in pytree.tree_leaves(result) if isinstance(getattr(each, "val", None), Tensor)]
            if any(version(each.val) != each.version for each in held):
                results[number] = COMPUTED_AGAIN


def _save_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save matrix products and attention (Korthikanti et al. 2022, section 5)."""
    name = op.name() if hasattr(op, "name") else ""
    is_product = name in _SAVED_PRODUCTS or "scaled_dot_product" in name or name.startswith(_SAVED_PREFIXES)
    is_product = is_product and not name.startswith(_RECOMPUTED_PREFIX) and not IN_PART.get()
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


# Results of collectives are saved, which sum products; gathered sequences are not: sequence parallelism avoids them.
_SAVED_PREFIXES: Final = ("c10d", "_c10d", "shardwise::")
_RECOMPUTED_PREFIX: Final = "shardwise::gather_sequence"
_SAVED_PRODUCTS: Final = frozenset(
    {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::convolution"}
)
