"""Store the inputs of recomputed blocks in host memory: they go there in the forward and return for the backward.

A checkpointed block keeps its inputs and nothing else. `ActivationStore` takes them by autograd's hooks on saved
tensors, and only them: what else a block saves, as under selective recomputation, stays on the device.

- What a block saves leaves when the next such block begins, unless that block gets it as an input too. So the last
  block's inputs, which are needed first, stay; so does what every block reads, such as a mask, positions or the output
  of an encoder. Each piece of memory leaves once, however many blocks save it, and in any views.
- When a block's backward asks for its inputs, the copies of the inputs of the block before it start, so that they
  arrive while this one recomputes.
- Parameters, buffers and all that the memory tracker does not count as activations stay: under ZeRO-3 their storage is
  freed and allocated again.

Copies run on the offload and reload streams. Device memory is allocated and freed in the order of the current stream,
which waits for the copies for that purpose; the host waits for none.

>>> from shardwise.offload.staging_buffers import StagingBuffers
>>> from shardwise.offload.counters import TransferCounters
>>> from torch.utils.checkpoint import checkpoint
>>> traffic = TransferCounters()
>>> store = ActivationStore(Streams(torch.device("cpu")), StagingBuffers(), traffic, MemoryTracker())
>>> first = x = torch.ones(64, 64, requires_grad=True)
>>> for _ in range(3):
...     with store.saving([x]):
...         x = checkpoint(torch.tanh, x, use_reentrant=False)
>>> traffic.moved_bytes
{('device', 'host'): 32768}
>>> x.sum().backward()
>>> traffic.moved_bytes["host", "device"], bool(torch.isfinite(first.grad).all())
(32768, True)
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardwise.config.errors import EngineError
from shardwise.config.resolve import ResolvedConfig
from shardwise.offload.counters import TransferCounters
from shardwise.offload.staging_buffers import StagingBuffers
from shardwise.runtime.device import Event, Streams
from shardwise.runtime.memory_tracker import Category, MemoryTracker
from shardwise.runtime.torch_private import in_backward, is_plain, on_backward_end, unseen_by_op_modes, version

# A copy to a GPU takes microseconds whatever its size, and small tensors are not what fills its memory.
MIN_BYTES: Final = 1024


@dataclass(eq=False)
class _HostCopy:
    """Holds leased host memory, and the end of the last copy from or to it."""

    memory: Tensor
    last_use: Event


class _SavedInput:
    """Holds a piece of device memory that blocks save, where it is now: `source`, then `copy`, then `back` as well.

    Args:
        source: all of it: flat where it is dense, a tensor with gaps otherwise.
    """

    def __init__(self, source: Tensor, storage: torch.UntypedStorage) -> None:
        self.source: Tensor | None = source
        self.storage = weakref.ref(storage)
        self.version = version(source)
        self.size, self.stride, self.dtype, self.device = source.size(), source.stride(), source.dtype, source.device
        self.copy: _HostCopy | None = None
        self.back: Tensor | None = None
        self.arrived = Event(None)
        self.num_expected = 0  # tensors made of it that no backward has asked for yet
        self.written: int | None = None  # the version it had when it was to leave, where that is another one

    @property
    def is_away(self) -> bool:
        """Say whether it is in host memory only."""
        return self.source is None and self.back is None and self.copy is not None


class _ActivationBlock:
    """Lists what one call of a block has saved."""

    def __init__(self, previous: weakref.ref[_ActivationBlock] | None) -> None:
        self.previous = previous
        self.saved: list[_SavedInput] = []


@dataclass(eq=False)
class StoredActivation:
    """Stands for a saved tensor: the block's call, the memory, and the place in it; or for the tensor if it stayed.

    Autograd holds it as long as the backward may ask for the tensor. The copy in host memory is freed with the last one
    of a piece of memory.
    """

    size: torch.Size
    stride: tuple[int, ...]
    version: int
    block: _ActivationBlock | None = None
    saved: _SavedInput | None = None
    stayed: Tensor | None = None
    was_asked_for: bool = False


class ActivationStore:
    """Keeps the inputs of recomputed blocks in host memory; for one thread at a time.

    Args:
        streams: the streams of the engine's device.
        tracker: the device's memory tracker; it says which memory holds states.
    """

    def __init__(
        self,
        streams: Streams,
        buffers: StagingBuffers,
        traffic: TransferCounters,
        tracker: MemoryTracker,
        min_bytes: int = MIN_BYTES,
    ) -> None:
        self._streams = streams
        self._buffers = buffers
        self._traffic = traffic
        self._tracker = tracker
        self._min_bytes = min_bytes
        self._known: weakref.WeakValueDictionary[Hashable, _SavedInput] = weakref.WeakValueDictionary()
        self._staying: list[weakref.ref[_SavedInput]] = []  # on the device until a block begins that is not given it
        self._block: _ActivationBlock | None = None  # whose forward runs
        self._inputs: dict[int, torch.UntypedStorage] = {}  # of its inputs, those that may leave
        self._last: weakref.ref[_ActivationBlock] | None = None  # that has saved something
        # Device memory that a copy still uses. Whether its content is still needed does not matter.
        self._leaving: list[tuple[Event, Tensor, weakref.ref[_SavedInput]]] = []
        self._arriving: list[tuple[Event, Tensor]] = []
        # Graphs die at any bytecode of any thread: their host memory queues up here.
        self._given_up: deque[_HostCopy] = deque()
        self._most_bytes = 0  # of one input so far
        self._awaits_end = False  # of a backward

    @contextmanager
    def saving(self, inputs: Sequence[object]) -> Iterator[None]:
        """Store what autograd saves of a block's inputs inside the context; put it around the block's checkpoint.

        Inside a backward, in the recomputation of an outer checkpoint, nothing leaves: it is needed at once.

        Args:
            inputs: all inputs of the block; those that are no tensors are skipped.
        """
        outer = self._block, self._inputs
        self._block, self._inputs = _ActivationBlock(self._last), {}
        self._settle()
        if not in_backward():
            self._awaits_end = False  # where an exception has ended one
            self._inputs = self._movable(inputs)
            self._send_away()
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                yield
        finally:
            self._block, self._inputs = outer
            # [Note: Memory of inputs that leave]
            # What leaves is copied while this block computes. Its memory may be given out again once the compute stream
            # has waited for the copies. Before the block it would wait for them with nothing to do; later, the inputs
            # of one more block would take memory.
            for sent, _, _ in self._leaving:
                sent.wait()
            self._forget_sources(is_waited_for=True)

    def pack(self, tensor: Tensor) -> StoredActivation:
        """Take a tensor that autograd saves; it may leave the device later."""
        storage = tensor.untyped_storage()
        source = _whole(tensor) if self._is_given(storage) else None
        if source is None or self._block is None or source.numel() * source.element_size() < self._min_bytes:
            return StoredActivation(tensor.size(), tensor.stride(), version(tensor), stayed=tensor.detach())
        place = (source.storage_offset(), source.size(), source.stride(), source.dtype, version(source))
        saved = self._known.get((id(storage), place))
        if saved is None or saved.storage() is not storage:  # its id may be that of one which is gone
            saved = self._known[id(storage), place] = _SavedInput(source, storage)
            self._staying.append(weakref.ref(saved))
        if saved not in self._block.saved:
            self._block.saved.append(saved)
        self._last = weakref.ref(self._block)
        saved.num_expected += 1
        return StoredActivation(tensor.size(), tensor.stride(), saved.version, self._block, saved)

    def unpack(self, handle: StoredActivation) -> Tensor:
        """Return the tensor that a handle stands for, on the device; the inputs of the block before start to come back.

        Raises:
            RuntimeError: it was written in place after it had been saved.
        """
        if handle.stayed is not None:
            _check(handle, version(handle.stayed))
            return handle.stayed
        if handle.saved is None or handle.block is None:
            raise RuntimeError("a handle of an ActivationStore stands for no tensor; only the store may make handles")
        self._settle()
        if in_backward() and not self._awaits_end:
            self._awaits_end = True
            on_backward_end(self._end_backward)
        saved = handle.saved
        tensor = self._on_device(saved, handle)
        if not handle.was_asked_for:
            handle.was_asked_for = True
            saved.num_expected -= 1
        if saved.num_expected == 0:
            saved.back = None  # a later use copies it again
        previous = handle.block.previous() if handle.block.previous is not None else None
        for other in previous.saved if previous is not None else ():
            if other.is_away:
                self._fetch(other)
        return tensor.as_strided(handle.size, handle.stride, tensor.storage_offset())

    def _movable(self, inputs: Sequence[object]) -> dict[int, torch.UntypedStorage]:
        """Return the storages that may leave, by id."""
        found: dict[int, torch.UntypedStorage] = {}
        for each in inputs:
            if isinstance(each, Tensor) and is_plain(each) and each.device == self._streams.device:
                storage = each.untyped_storage()
                if self._tracker.category_of(storage) in (None, Category.ACTIVATIONS):
                    found[id(storage)] = storage
        return found

    def _is_given(self, storage: torch.UntypedStorage) -> bool:
        return self._inputs.get(id(storage)) is storage

    def _send_away(self) -> None:
        """Start to move what is not an input of the block that begins."""
        staying, self._staying = self._staying, []
        for reference in staying:
            saved = reference()
            if saved is None or saved.source is None:
                continue
            if self._is_given(saved.source.untyped_storage()):
                self._staying.append(reference)
            elif version(saved.source) != saved.version:
                saved.written, saved.source = version(saved.source), None
            else:
                self._send(saved, saved.source)

    def _send(self, saved: _SavedInput, source: Tensor) -> None:
        num_bytes = source.numel() * source.element_size()
        self._most_bytes = max(self._most_bytes, num_bytes)
        # Shorter sequences share the buffers of the longest: for buffers of their own, pages would be pinned each time.
        capacity_bytes = self._most_bytes if 2 * num_bytes >= self._most_bytes else 0
        with unseen_by_op_modes(), torch.no_grad(), self._streams.side_stream("offload"):
            memory = self._buffers.acquire(num_bytes, capacity_bytes)
            memory.view(source.dtype).view(source.size()).copy_(source, non_blocking=True)
            sent = Event.record(self._streams.device)
        self._traffic.add("device", "host", num_bytes)
        saved.copy = _HostCopy(memory, sent)
        # Not released here: the last graph may die on a thread of autograd, while a copy reads the buffer. `_settle`
        # releases it once the last copy is over.
        weakref.finalize(saved, self._given_up.append, saved.copy).atexit = False
        self._leaving.append((sent, source, weakref.ref(saved)))
        self._forget_sources()

    def _forget_sources(self, is_waited_for: bool = False) -> None:
        """Free the device memory of what has left, as far as the current stream may use it again."""
        leaving, self._leaving = self._leaving, []
        for sent, source, reference in leaving:
            if not is_waited_for and not sent.is_reached():
                self._leaving.append((sent, source, reference))
            elif (saved := reference()) is not None:
                if version(source) != saved.version:  # while the copy ran, which may have seen the new values
                    saved.written = version(source)
                saved.source = None

    def _on_device(self, saved: _SavedInput, handle: StoredActivation) -> Tensor:
        if saved.source is not None:
            _check(handle, version(saved.source))
            return saved.source
        if saved.written is not None:
            _check(handle, saved.written)
        if saved.back is None:
            self._fetch(saved)
        saved.arrived.wait()
        tensor = saved.back
        if tensor is None:
            raise RuntimeError("an input of a recomputed block is neither on the device nor in host memory")
        self._arriving = [each for each in self._arriving if each[1] is not tensor]
        return tensor

    def _fetch(self, saved: _SavedInput) -> None:
        """Start to copy something back."""
        if saved.copy is None:
            return
        # [Note: Memory for what comes back]
        # It is made in the order of the compute stream, in which it is freed as well. The reload stream begins after
        # what the compute stream holds now, as that may still use the memory for something else; it has waited for the
        # copy to the host before the source was let go of. `_arriving` holds the tensor until the copy is over: its
        # graph may die before.
        # Seen by a meter, unlike the copy, which also reads memory that is not the device's.
        tensor = torch.empty_strided(saved.size, saved.stride, dtype=saved.dtype, device=saved.device)
        with unseen_by_op_modes(), torch.no_grad(), self._streams.side_stream("reload"):
            tensor.copy_(saved.copy.memory.view(saved.dtype).view(saved.size), non_blocking=True)
            saved.arrived = saved.copy.last_use = Event.record(self._streams.device)
        self._traffic.add("host", "device", tensor.numel() * tensor.element_size())
        saved.back = tensor
        self._arriving.append((saved.arrived, tensor))

    def _end_backward(self) -> None:
        self._awaits_end = False
        self._settle()

    def _settle(self) -> None:
        """Free the memory of copies that are over."""
        self._forget_sources()
        self._arriving = [each for each in self._arriving if not each[0].is_reached()]
        for _ in range(len(self._given_up)):
            copy = self._given_up.popleft()
            if copy.last_use.is_reached():
                self._buffers.release(copy.memory)
            else:
                self._given_up.append(copy)


def build_store(
    config: ResolvedConfig, streams: Streams, buffers: StagingBuffers, traffic: TransferCounters, tracker: MemoryTracker
) -> ActivationStore | None:
    """Return the store that `tiers.activations` asks for; None where inputs stay on the device.

    Args:
        streams: as for `ActivationStore`, and so are `buffers`, `traffic` and `tracker`.
    """
    return ActivationStore(streams, buffers, traffic, tracker) if config.tiers.activations == "host" else None


def _whole(tensor: Tensor) -> Tensor | None:
    """Return all the memory of a tensor: flat where it is dense, otherwise with its gaps; None if elements overlap.

    >>> x = torch.zeros(6, 4)
    >>> [_whole(each).shape for each in (x.t(), x[2:4], x[:, :2], x[:1].expand(6, 4))]
    [torch.Size([24]), torch.Size([8]), torch.Size([6, 2]), torch.Size([4])]
    >>> _whole(x.view(-1).unfold(0, 4, 1)) is None
    True
    """
    plain = tensor.detach()
    for dim, stride in enumerate(plain.stride()):
        if stride == 0 and plain.size(dim) > 1:
            plain = plain.narrow(dim, 0, 1)
    extent, is_dense = 1, True
    for stride, size in sorted((stride, size) for stride, size in zip(plain.stride(), plain.shape, strict=True)):
        if size == 1:
            continue
        if stride < extent:
            return None
        is_dense = is_dense and stride == extent
        extent = stride * size
    return plain.as_strided((plain.numel(),), (1,)) if is_dense else plain


def _check(handle: StoredActivation, current: int) -> None:
    if current != handle.version:
        raise EngineError(
            "recompute-input-written",
            f"an input of a recomputed block, shape {tuple(handle.size)}, was written in place after the block had "
            f"read it (version {current}, not {handle.version}), so the block cannot be recomputed; make the writer "
            "write into a new tensor, as x = x + y does where x += y does not",
        )
