"""The one way out for weights: a source that yields whole tensors under the names of a folder, as often as asked.

A walk gathers a bucket at a time. Before each group, and at the end, the ranks agree: where one has stopped, since what
it sends to has failed, all others raise, and none is left in a collective.

    rank 0   agree   gather   send h.0   agree   gather   send h.1: fails, stop
    rank 1   agree   gather              agree   gather              agree: rank 0 has stopped, raise

>>> from torch import nn
>>> import shardwise
>>> engine = shardwise.initialize(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), {"run": {"device": "cpu"}})
>>> source = engine.weights()
>>> [(name, list(shape)) for name, dtype, shape in source.metadata()][:2]
[('0.weight', [3, 2]), ('0.bias', [3])]
>>> [name for name, tensor in source] == [info.name for info in source.metadata()]
True
>>> source.groups()
[['0.weight', '0.bias'], ['1.weight', '1.bias']]
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from operator import attrgetter
from typing import Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from shardwise.checkpoint.deltas import digest_of
from shardwise.checkpoint.hf.exporter import Block, filled, in_folder
from shardwise.comm.agreement import odd_ranks
from shardwise.config.errors import ConfigError, EngineError
from shardwise.config.resolve import Dtype
from shardwise.engine.parts import EngineParts, EngineStatus
from shardwise.engine.weight_items import Adapters, Names, WeightInfo, WeightItem, layerwise, weight_items
from shardwise.layout.layout import Layout
from shardwise.layout.slicing import Rect
from shardwise.runtime.torch_private import persistent_buffers
from shardwise.zero.weight_gather import WeightReader

BUCKET_BYTES: Final = 2**30
_ROUND: Final = "weights"
_ALIGNMENT_BYTES: Final = 16
_SUBJECT: Final = "the hand-over of weights"

Pair = tuple[str, Tensor | None]
Yielded = TypeVar("Yielded")


class FlatTensor(NamedTuple):
    """Places a tensor in a bucket, in SGLang's words: `start_idx`, `end_idx` and `numel` count bytes."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


class WeightSource:
    """Yields the weights of an engine; the arguments are those of `Engine.weights`, which makes it.

    Its methods are those by which vLLM asks a trainer for weights. All ranks walk together; a walk ends before the next
    one begins, and before anything else is done with the engine.
    """

    def __init__(
        self,
        parts: EngineParts,
        names: Names,
        dtype: Dtype | None,
        adapters: Adapters = "merge",
        to_rank: int | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        num_ranks = parts.comm.world_size
        if to_rank is not None and not 0 <= to_rank < num_ranks:
            raise ConfigError(
                "weights-rank", f"to_rank={to_rank} is none of {num_ranks} ranks; give one, or None for all"
            )
        if bucket_bytes < 1:
            raise ConfigError("bucket-bytes", f"bucket_bytes={bucket_bytes} holds nothing; give at least 1")
        self._parts, self._dtype, self._bucket_bytes = parts, dtype, bucket_bytes
        self._to_ranks = range(num_ranks) if to_rank is None else (to_rank,)
        self._items = partial(weight_items, parts, names, dtype, adapters)
        self._known: tuple[Layout, list[list[WeightItem]]] | None = None

    def metadata(self) -> list[WeightInfo]:
        """Return name, dtype and shape of all tensors, in the order in which a walk yields them."""
        return [info for group in self._groups() for item in group for info in item.outputs]

    def held_names(self) -> list[str] | None:
        """Return the names of the tensors that a walk gives this rank; None for all."""
        return None if self._parts.comm.rank in self._to_ranks else []

    def groups(self) -> list[list[str]]:
        """Return the names of the tensors that are gathered together, in order: those of a block are a group."""
        return [[info.name for item in group for info in item.outputs] for group in self._groups()]

    def __iter__(self) -> Iterator[Pair]:
        """Walk over all tensors; on a rank that gets none, each is None.

        Raises:
            CommError: another rank has stopped its walk, does not walk, or asks for other tensors.
            EngineError: another use of the engine has ended the walk, such as a step.
        """
        return _Walk(self._parts.status, lambda: _pairs(self._walk()))

    def iter_groups(self) -> Iterator[tuple[list[str], list[Tensor | None]]]:
        """Walk over the groups: the names of each, and its tensors, which are there together. See `__iter__`."""
        return _Walk(self._parts.status, lambda: _groups(self.groups(), self._walk()))

    def shards(self, *, once: bool = False) -> Iterator[tuple[str, Tensor, tuple[slice, ...]]]:
        """Yield what this rank holds of each tensor, without a gather: name, values, and where in the tensor these are.

        Values are views of what is stored where their dtype is right and they are in memory. All ranks take all of it:
        merged weights are gathered, and where parameters are stored whole, a gather of the last step may be under way.

        Args:
            once: leave out what another rank yields too, so that all ranks together yield each element once.
        """
        dtypes = {info.name: info.dtype for info in self.metadata()}
        return (
            (name, values.to(dtypes[name]), tuple(map(slice, rect.start, rect.stop)))
            for name, rect, values in self.blocks(once=once)
        )

    def blocks(self, *, once: bool = True) -> Iterator[Block]:
        """Yield the same as an export writes it: rectangles, and values in the dtype in which they are stored.

        Merged weights are gathered, one layer at a time, and one rank has them, in turns; then the ranks agree as in a
        walk.
        """
        self._reader()  # refuses at once what a walk would, so that an export begins nothing
        return _Walk(self._parts.status, lambda: self._held(self._reader(), once))

    def _held(self, reader: WeightReader, once: bool) -> Iterator[Block]:
        items = [item for group in self._groups() for item in group]
        stored = [item for item in items if item.change is None]
        merged = [[item] for item in items if item.change is not None]
        receivers = cycle(range(self._parts.comm.world_size))

        def take(group: list[WeightItem]) -> Iterator[Block]:
            for item in group:
                if item.change is None:
                    for member in item.members:
                        for rect, values in reader.held(member, once=once):
                            yield from in_folder(item.parts[member.name], rect, values)
                elif (gathered := reader.gather(item.members, [next(receivers)])) is not None:
                    for (name, _, shape), tensor in zip(item.outputs, item.tensors(gathered), strict=True):
                        yield name, Rect.whole(shape), tensor

        return self._together(take, [stored, *merged], "shards") if merged else take(stored)

    def buckets(self) -> Iterator[tuple[Tensor | None, list[FlatTensor]]]:
        """Walk as SGLang takes weights: the bytes of a bucket's tensors as one, and a table of them. See `__iter__`."""
        return _Walk(self._parts.status, lambda: map(_flattened, self._walk()))

    def deliver(
        self,
        send: Callable[[list[str], list[Tensor]], object],
        begin: Callable[[], object] | None = None,
        end: Callable[[], object] | None = None,
    ) -> None:
        """Call `send` with each group, on the ranks that get tensors; all ranks raise what it raises on one.

        Args:
            begin: called before the first group, on these ranks; and so is `end`, after the last.

        Raises:
            CommError: one of them has failed, on some rank; or as `__iter__`.
        """

        def agree(act: Callable[[], object] | None, begins: bool = False) -> None:
            def work() -> str:
                if act is not None and self.held_names() is None:
                    act()
                return ""

            self._parts.agreement.run(_ROUND, work, subject=_SUBJECT, begins=begins).checked()

        self._reader()  # ends an earlier walk, which one rank may still hold, and refuses what a walk would
        agree(begin, begins=True)
        for names, tensors in self.iter_groups():
            agree(partial(send, names, [tensor for tensor in tensors if tensor is not None]))
        agree(end)

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of the bytes of each tensor, by name, on the ranks that get tensors; all ranks call it."""
        return {name: digest_of(tensor) for name, tensor in self if tensor is not None}

    def _groups(self) -> list[list[WeightItem]]:
        layout = self._parts.layout
        if self._known is None or self._known[0] is not layout:
            self._known = layout, layerwise(self._items(), lambda item: item.outputs[0].name)
        return self._known[1]

    def _reader(self) -> WeightReader:
        parts = self._parts
        parts.status.check(params_suffice=self._dtype is None and parts.layout.precision.gather == "param")
        parts.refuse_if_simulated()
        return WeightReader(parts.states(), parts.layout, dict(persistent_buffers(parts.model)))

    def _walk(self) -> Iterator[list[Pair]]:
        """Return the buckets of all groups."""
        return self._together(partial(self._buckets, self._reader()), self._groups(), f"to {self._to_ranks}")

    def _buckets(self, reader: WeightReader, group: list[WeightItem]) -> Iterator[list[Pair]]:
        for bucket in filled(group, attrgetter("num_bytes"), self._bucket_bytes):
            with self._parts.failures_explained():
                gathered = reader.gather([member for item in bucket for member in item.members], self._to_ranks)
            pairs = [pair for item in bucket for pair in _named(item, gathered)]
            del gathered  # or it would be there while the next one is gathered, and so would the pairs
            yield pairs
            del pairs

    def _together(
        self,
        walk: Callable[[list[WeightItem]], Iterator[Yielded]],
        groups: Sequence[list[WeightItem]],
        destination: str,
    ) -> Iterator[Yielded]:
        """Walk over groups for which all ranks gather. Before each, and at the end, the ranks agree."""
        note = hashlib.sha256(repr((self.metadata(), destination)).encode()).hexdigest()
        agreement, is_known, number = self._parts.agreement, True, 0

        def judge(notes: Mapping[int, str]) -> str:
            if odd := odd_ranks(notes):
                text = f"{odd} would hand over other tensors than rank 0; give all the same arguments"
                raise EngineError("walks-differ", text)
            return ""

        try:
            for number in range(len(groups) + 1):
                is_known = True  # to the others, whether this rank goes on
                agreement.run(_ROUND, lambda: note, judge, _SUBJECT, begins=number == 0).checked()
                is_known = False
                if number < len(groups):
                    yield from walk(groups[number])
            is_known = True
        except BaseException:
            if not is_known:
                text = f"its walk was stopped in group {number} of {len(groups)}, mostly since the receiver has failed"
                agreement.leave(_ROUND, EngineError("walk-stopped", text), _SUBJECT)
            raise


class _Walk(Iterator[Yielded]):
    """Is one pass of a source. It ends when it is dropped, and when the engine is used for something else."""

    def __init__(self, status: EngineStatus, begin: Callable[[], Iterator[Yielded]]) -> None:
        self._status = status
        self._begin = begin
        self._values: Iterator[Yielded] | None = None
        self._is_cut_off = self._is_over = False

    def __next__(self) -> Yielded:
        if self._is_cut_off:
            raise EngineError("walk-ended", "another use of the engine has ended this walk; begin another one")
        if self._values is None:
            self._values = self._begin()
            self._status.begin_walk(self)
        self._is_over = True
        value = next(self._values)
        self._is_over = False
        return value

    def end(self) -> None:
        """Stop on this rank, if there is more to come; the other ranks raise."""
        self._is_cut_off = not self._is_over
        self._values = iter(())


def _pairs(buckets: Iterator[list[Pair]]) -> Iterator[Pair]:
    for bucket in buckets:
        bucket.reverse()
        while bucket:
            yield bucket.pop()  # none is kept here


def _groups(groups: list[list[str]], buckets: Iterator[list[Pair]]) -> Iterator[tuple[list[str], list[Tensor | None]]]:
    for names in groups:
        tensors: list[Tensor | None] = []
        while len(tensors) < len(names):
            tensors += [tensor for _, tensor in next(buckets)]
        yield names, tensors
        del tensors
    next(buckets, None)


def _flattened(pairs: list[Pair]) -> tuple[Tensor | None, list[FlatTensor]]:
    table, end, parts = list[FlatTensor](), 0, list[Tensor]()
    for name, tensor in pairs:
        if tensor is not None:
            start = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            end = start + tensor.nbytes
            table.append(FlatTensor(name, tensor.shape, tensor.dtype, start, end, end - start))
            parts.append(tensor.reshape(-1).view(torch.uint8))
    if not parts:
        return None, table
    flat = torch.empty(end, dtype=torch.uint8, device=parts[0].device)
    for tensor_bytes, entry in zip(parts, table, strict=True):
        flat[entry.start_idx : entry.end_idx] = tensor_bytes
    return flat, table


def _named(item: WeightItem, gathered: Mapping[str, Tensor] | None) -> Iterator[Pair]:
    tensors = [None] * len(item.outputs) if gathered is None else item.tensors(gathered)
    for info, tensor in zip(item.outputs, tensors, strict=True):
        yield info.name, tensor
