"""Compares two checkpoints: tensors, states, values, config and trajectory, under any layouts that wrote them.

Values of both are read in chunks, so that the memory needed does not depend on the checkpoints.

>>> changed_keys({"zero": {"stage": 2}, "run": {"seed": 0}}, {"zero": {"stage": 3}, "run": {"seed": 0}})
(ChangedState(key='zero.stage', a=2, b=3),)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.commit import read_manifest
from shardwise.checkpoint.manifest import ITEM_BYTES, Manifest, StoredState, StoredTensor
from shardwise.checkpoint.offline import ByteMeter, Progress, read_chunks
from shardwise.checkpoint.reader import ChunkReader
from shardwise.layout.slicing import Rect
from shardwise.runtime.pinned_memory import bits_of
from shardwise.runtime.state_shards import PARAM


@dataclass(frozen=True)
class ChangedState:
    """Names a key, with dots between its levels, whose values in the two checkpoints differ.

    Attributes:
        a: its value in the first; None where that has no such key.
        b: its value in the second; None where that has no such key.
    """

    key: str
    a: Any
    b: Any


@dataclass(frozen=True)
class ChangedValues:
    """Describes a state of a tensor whose elements differ.

    Attributes:
        num_different: how many differ in their bits; where the dtypes differ, in their values.
        max_abs: the largest |a - b| of these; nan if an element is nan in one checkpoint.
    """

    name: str
    state: str
    numel: int
    num_different: int
    max_abs: float


@dataclass(frozen=True)
class StateDifference:
    """Lists how checkpoints A and B differ.

    Attributes:
        tensors: tensors and states that one of them lacks; changed shapes, dtypes, numbers, aliases and such.
        run: other changes: step, contents, trajectory, the user's extra.
        num_states: how many states both have in one shape; the values of these were compared.
    """

    tensors: tuple[ChangedState, ...] = ()
    values: tuple[ChangedValues, ...] = ()
    config: tuple[ChangedState, ...] = ()
    run: tuple[ChangedState, ...] = ()
    num_states: int = 0

    def __bool__(self) -> bool:
        return bool(self.tensors or self.values or self.config or self.run)


def compare(a: Path, b: Path, weights_only: bool = False, progress: Progress | None = None) -> StateDifference:
    """Compare two checkpoints.

    Args:
        weights_only: compare only the values of parameters and buffers, nothing of the optimizer, config or run.
        progress: called with how many bytes of how many have been read; None for no calls.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    first, second = (_weights(read_manifest(each)) if weights_only else read_manifest(each) for each in (a, b))
    others = {tensor.name: tensor for tensor in second.tensors}
    pairs = [
        (tensor, others[tensor.name], state)
        for tensor in first.tensors
        if tensor.name in others and others[tensor.name].shape == tensor.shape
        for state, stored in tensor.states.items()
        if stored.value is None and state in others[tensor.name].states
        if others[tensor.name].states[state].value is None
    ]
    total_bytes = sum(
        ITEM_BYTES[tensor.states[state].dtype] * math.prod(tensor.shape) for *both, state in pairs for tensor in both
    )
    meter, values = ByteMeter(total_bytes, progress), []
    with ChunkReader(a) as reader_a, ChunkReader(b) as reader_b:
        for tensor, other, state in pairs:
            num_different, max_abs, whole = 0, 0.0, Rect.whole(tensor.shape)
            chunks = zip(
                read_chunks(reader_a, tensor, state, whole), read_chunks(reader_b, other, state, whole), strict=True
            )
            for chunk_a, chunk_b in chunks:
                num, largest = compare_values(chunk_a, chunk_b)
                num_different += num
                max_abs = largest if math.isnan(largest) else max(max_abs, largest)
                meter.advance(chunk_a.nbytes + chunk_b.nbytes)
            if num_different:
                values.append(ChangedValues(tensor.name, state, whole.numel, num_different, max_abs))
    return StateDifference(
        tensors=tuple(_changed_tensors(first, second)),
        values=tuple(values),
        config=changed_keys(first.config, second.config),
        run=changed_keys(_run(first), _run(second)),
        num_states=len(pairs),
    )


def changed_keys(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> tuple[ChangedState, ...]:
    """Return the keys, at any depth, whose values differ; lists are compared as wholes.

    Args:
        a: a table of tables or values.
        prefix: put before every key that is returned.
    """
    changed: list[ChangedState] = []
    for key in [*a, *(key for key in b if key not in a)]:
        left, right = a.get(key), b.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            changed += changed_keys(left, right, f"{prefix}{key}.")
        elif left != right:
            changed.append(ChangedState(f"{prefix}{key}", left, right))
    return tuple(changed)


def _weights(manifest: Manifest) -> Manifest:
    """Return a manifest of the parameters and buffers alone."""
    tensors = (tensor for tensor in manifest.tensors if tensor.kind != "rank" and PARAM in tensor.states)
    return Manifest(0, tuple(replace(each, states={PARAM: each.states[PARAM]}) for each in tensors), manifest.files)


def _changed_tensors(a: Manifest, b: Manifest) -> Iterator[ChangedState]:
    """Yield what the manifests say of tensors and states; one that is missing is one change."""
    facts_a, facts_b = ({tensor.name: _facts(tensor) for tensor in each.tensors} for each in (a, b))
    for name in [*facts_a, *(name for name in facts_b if name not in facts_a)]:
        if name in facts_a and name in facts_b:
            yield from changed_keys(facts_a[name], facts_b[name], f"{name} ")
        else:
            yield ChangedState(name, *("there" if name in facts else None for facts in (facts_a, facts_b)))


def _facts(tensor: StoredTensor) -> dict[str, Any]:
    facts = {name: getattr(tensor, name) for name in ("shape", "aliases", "kind", "trainable")}
    return facts | {name: _kind(state) for name, state in tensor.states.items()}


def _kind(state: StoredState) -> str:
    return state.dtype if state.value is None else f"{state.value} ({state.dtype})"


def _run(manifest: Manifest) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in ("step", "contents", "trajectory", "model", "extra")}


def compare_values(a: Tensor, b: Tensor) -> tuple[int, float]:
    """Return how many elements differ, and the largest |a - b| of these.

    Args:
        b: 1-D, as long as `a`; if it has the dtype of `a`, bits are compared, else values, and nan equals nan.

    >>> compare_values(torch.tensor([1.0, 2.0, math.nan, 0.0]), torch.tensor([1.0, 2.5, math.nan, -0.0]))
    (2, 0.5)
    """
    if a.dtype == b.dtype:
        different = bits_of(a) != bits_of(b)
    else:
        wide_a, wide_b = _wide(a), _wide(b)
        different = (wide_a != wide_b) & ~(wide_a.isnan() & wide_b.isnan())
    num_different = int(different.sum())
    if not num_different:
        return 0, 0.0
    return num_different, float((_wide(a[different]) - _wide(b[different])).abs().max())


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)
