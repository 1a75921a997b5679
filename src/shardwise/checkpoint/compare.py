"""Compares two checkpoints: tensors, states, values, config and trajectory, under any layouts that wrote them.

Values of both are read in chunks, so that the memory needed does not depend on the checkpoints.

>>> changed_keys({"zero": {"stage": 2}, "run": {"seed": 0}}, {"zero": {"stage": 3}, "run": {"seed": 0}})
(ChangedState(key='zero.stage', a=2, b=3),)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.checkpoint.commit import read_manifest
from shardwise.checkpoint.manifest import ITEM_BYTES, Manifest, StoredState, StoredTensor
from shardwise.checkpoint.offline import Progress, read_chunks
from shardwise.checkpoint.reader import ChunkReader
from shardwise.layout.slicing import Rect
from shardwise.runtime.state_shards import PARAM

# The integer dtype that compares the bits of an element, by its bytes.
_BITS: Final[Mapping[int, torch.dtype]] = MappingProxyType(
    {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
)


@dataclass(frozen=True)
class ChangedState:
    """Names a key whose values in the two checkpoints differ.

    Attributes:
        key: with dots between its levels.
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
        name: of the tensor.
        state: which of its states.
        numel: how many elements it has.
        num_different: how many differ in their bits; where the dtypes differ, in their values.
        max_abs: the largest |a - b| of these; nan if an element is nan in one checkpoint.
    """

    name: str
    state: str
    numel: int
    num_different: int
    max_abs: float


@dataclass(frozen=True)
class Pair:
    """Holds a state that both checkpoints have, in one shape."""

    a: StoredTensor
    b: StoredTensor
    state: str

    @property
    def num_bytes(self) -> int:
        """Return the bytes of both."""
        items = (ITEM_BYTES[tensor.states[self.state].dtype] for tensor in (self.a, self.b))
        return sum(items) * Rect.whole(self.a.shape).numel

    def chunks(self, reader_a: ChunkReader, reader_b: ChunkReader) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the same elements of both, as pairs of 1-D tensors."""
        whole = Rect.whole(self.a.shape)
        chunks_a = read_chunks(reader_a, self.a, self.state, whole)
        return zip(chunks_a, read_chunks(reader_b, self.b, self.state, whole), strict=True)


@dataclass(frozen=True)
class StateDifference:
    """Lists how checkpoints A and B differ.

    Attributes:
        only_a: tensors, or states as `name/state`, that B does not have.
        only_b: tensors or states that A does not have.
        kinds: changed shapes, dtypes, numbers, aliases and such of what both have.
        values: states whose elements differ.
        config: changed keys of the config.
        run: other changes: step, contents, trajectory, the user's extra.
        num_states: how many states both have in one shape; the values of these were compared.
    """

    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    kinds: tuple[ChangedState, ...] = ()
    values: tuple[ChangedValues, ...] = ()
    config: tuple[ChangedState, ...] = ()
    run: tuple[ChangedState, ...] = ()
    num_states: int = 0

    def __bool__(self) -> bool:
        return bool(self.only_a or self.only_b or self.kinds or self.values or self.config or self.run)


def compare(a: Path, b: Path, weights_only: bool = False, progress: Progress | None = None) -> StateDifference:
    """Compare two checkpoints.

    Args:
        a: a step folder.
        b: another step folder.
        weights_only: compare only the values of parameters and buffers, nothing of the optimizer, config or run.
        progress: called with how many bytes of how many have been read; None for no calls.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    manifests = read_manifest(a), read_manifest(b)
    found, pairs = compare_manifests(*manifests, weights_only)
    with ChunkReader(a) as reader_a, ChunkReader(b) as reader_b:
        values = tuple(_compare_pairs(pairs, reader_a, reader_b, progress))
    return replace(found, values=values, num_states=len(pairs))


def compare_manifests(a: Manifest, b: Manifest, weights_only: bool = False) -> tuple[StateDifference, list[Pair]]:
    """Compare two manifests.

    Args:
        a: of the first checkpoint.
        b: of the second.
        weights_only: as in `compare`.

    Returns:
        The differences that the manifests show, and the states whose values are still to be compared.
    """
    tensors_a, tensors_b = _tensors(a, weights_only), _tensors(b, weights_only)
    shared = [name for name in tensors_a if name in tensors_b]
    only_a = [name for name in tensors_a if name not in tensors_b]
    only_b = [name for name in tensors_b if name not in tensors_a]
    kinds: list[ChangedState] = []
    pairs: list[Pair] = []
    for name in shared:
        tensor_a, tensor_b = tensors_a[name], tensors_b[name]
        kinds += _changed_attributes(tensor_a, tensor_b)
        only_a += [f"{name}/{state}" for state in tensor_a.states if state not in tensor_b.states]
        only_b += [f"{name}/{state}" for state in tensor_b.states if state not in tensor_a.states]
        for state in [state for state in tensor_a.states if state in tensor_b.states]:
            state_a, state_b = tensor_a.states[state], tensor_b.states[state]
            label = name if state == PARAM else f"{name}/{state}"
            if (state_a.dtype, state_a.value) != (state_b.dtype, state_b.value):
                kinds.append(ChangedState(label, _kind(state_a), _kind(state_b)))
            if state_a.value is None and state_b.value is None and tensor_a.shape == tensor_b.shape:
                pairs.append(Pair(tensor_a, tensor_b, state))
    config, run = ((), ()) if weights_only else (changed_keys(a.config, b.config), changed_keys(_run(a), _run(b)))
    return StateDifference(tuple(only_a), tuple(only_b), tuple(kinds), (), config, run), pairs


def changed_keys(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> tuple[ChangedState, ...]:
    """Return the keys, at any depth, whose values differ; lists are compared as wholes.

    Args:
        a: a table of tables or values.
        b: another one.
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


def _tensors(manifest: Manifest, weights_only: bool) -> dict[str, StoredTensor]:
    if not weights_only:
        return {tensor.name: tensor for tensor in manifest.tensors}
    return {
        tensor.name: replace(tensor, states={PARAM: tensor.states[PARAM]})
        for tensor in manifest.tensors
        if tensor.kind != "rank" and PARAM in tensor.states
    }


def _changed_attributes(a: StoredTensor, b: StoredTensor) -> tuple[ChangedState, ...]:
    names = ("shape", "aliases", "kind", "trainable")
    of_a, of_b = ({f"{a.name} {name}": getattr(tensor, name) for name in names} for tensor in (a, b))
    return changed_keys(of_a, of_b)


def _kind(state: StoredState) -> str:
    return state.dtype if state.value is None else f"{state.value} ({state.dtype})"


def _run(manifest: Manifest) -> dict[str, Any]:
    return {
        "step": manifest.step,
        "contents": manifest.contents,
        "trajectory": manifest.trajectory,
        "model": manifest.model,
        "extra": manifest.extra,
    }


def _compare_pairs(
    pairs: Sequence[Pair], reader_a: ChunkReader, reader_b: ChunkReader, progress: Progress | None
) -> Iterator[ChangedValues]:
    total_bytes, done_bytes = sum(pair.num_bytes for pair in pairs), 0
    for pair in pairs:
        num_different, max_abs = 0, 0.0
        for chunk_a, chunk_b in pair.chunks(reader_a, reader_b):
            num, largest = compare_values(chunk_a, chunk_b)
            num_different += num
            max_abs = largest if math.isnan(largest) else max(max_abs, largest)
            done_bytes += chunk_a.nbytes + chunk_b.nbytes
            if progress is not None:
                progress(done_bytes, total_bytes)
        if num_different:
            yield ChangedValues(pair.a.name, pair.state, Rect.whole(pair.a.shape).numel, num_different, max_abs)


def compare_values(a: Tensor, b: Tensor) -> tuple[int, float]:
    """Return how many elements differ, and the largest |a - b| of these.

    Args:
        a: 1-D.
        b: 1-D, as long as `a`; if it has the dtype of `a`, bits are compared, else values, and nan equals nan.

    >>> compare_values(torch.tensor([1.0, 2.0, math.nan, 0.0]), torch.tensor([1.0, 2.5, math.nan, -0.0]))
    (2, 0.5)
    """
    if a.dtype == b.dtype:
        bits = _BITS[a.element_size()]
        if torch.equal(a.view(bits), b.view(bits)):
            return 0, 0.0
        different = a.view(bits) != b.view(bits)
    else:
        wide_a, wide_b = _wide(a), _wide(b)
        different = (wide_a != wide_b) & ~(wide_a.isnan() & wide_b.isnan())
    num_different = int(different.sum())
    if not num_different:
        return 0, 0.0
    return num_different, float((_wide(a[different]) - _wide(b[different])).abs().max())


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.complex128 if values.is_complex() else torch.float64)
