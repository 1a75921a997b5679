"""The bytes of live tensors on CPU, counted by watching storages: the memory tracker is compared with it.

Not the library's own book: nothing here is imported from it. A dispatch mode adds the storage of every op's
output once and takes it off when the storage dies; `resize_` of a storage is followed. What existed before is
marked with `mark`.

Not seen: tensors that come from no op until one touches them (`from_numpy`, memory maps: mark them), ops in
other threads (CPU backward runs in the calling one), memory without a tensor (gloo's own buffers, a kernel's
scratch).

>>> import torch
>>> with LiveBytes() as live:
...     x = torch.ones(6)
...     y = x.view(2, 3) * 2
...     del x
>>> live.live_bytes(), live.peak_bytes()
(24, 48)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.waiting import settled

# Kernels of these are C++ and call no Python; an op of any other may run further ops that a mode must see.
_CLOSED_NAMESPACES = frozenset({"aten", "prims", "c10d"})


def call_op(mode: TorchDispatchMode, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call `func` from within `mode`; the ops that a custom op calls in its turn reach the mode too."""
    if func.namespace in _CLOSED_NAMESPACES:
        return func(*args, **kwargs)
    with mode:
        return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)


def dispatches_itself(types: Iterable[type]) -> bool:
    """Whether a tensor subclass must unwrap itself first (DTensor); its inner ops then come to the mode."""
    return any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in an op's arguments or outputs, which nest in lists and tuples only."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of the storages under `tensors`, each storage once.

    >>> base = torch.zeros(10)
    >>> storage_bytes([base, base[2:], torch.zeros(3)])
    52
    """
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({id(storage): storage.nbytes() for storage in storages}.values())


def settled_bytes(live: LiveBytes) -> int:
    """Live bytes once they stand still."""
    return settled(live.live_bytes)


@dataclass
class _Entry:
    reference: weakref.ref[torch.UntypedStorage]
    origin: str
    num_bytes: int


class LiveBytes(TorchDispatchMode):
    """Counts while entered; storages seen then are followed to their death, also after the mode is left."""

    def __init__(self) -> None:
        super().__init__()
        # By id: a storage's Python object lives as long as its memory, so no id is reused while listed.
        self._entries: dict[int, _Entry] = {}
        self._live_bytes = 0
        self._peak_bytes = 0
        self._depth = 0
        self._unpatch: Callable[[], None] | None = None

    def live_bytes(self) -> int:
        """Bytes of all storages that are alive now."""
        return self._live_bytes

    def peak_bytes(self) -> int:
        """The most `live_bytes` has been since the start or `reset_peak`."""
        return self._peak_bytes

    def reset_peak(self) -> None:
        self._peak_bytes = self._live_bytes

    def mark(self, tensors: Iterable[Tensor], origin: str = "marked") -> None:
        """Count the storages of tensors that were made outside the mode."""
        for tensor in tensors:
            self._measure(tensor, origin)

    def live_storages(self) -> list[torch.UntypedStorage]:
        """All that are alive now."""
        found = [entry.reference() for entry in list(self._entries.values())]
        return [storage for storage in found if storage is not None]

    def largest(self, num_storages: int = 10) -> list[tuple[int, str]]:
        """(bytes, op that made it) of the largest live storages: what to print when a count is off."""
        found = [(entry.num_bytes, entry.origin) for entry in self._entries.values()]
        return sorted(found, reverse=True)[:num_storages]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **(kwargs or {}))
        if dispatches_itself(types):
            return NotImplemented
        outputs = call_op(self, func, args, kwargs or {})
        for tensor in tensors_in(outputs):
            self._measure(tensor, func.name())
        return outputs

    def __enter__(self) -> Self:
        if self._depth == 0:
            self._unpatch = self._patch_resize()
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._depth -= 1
        if self._depth == 0 and self._unpatch is not None:
            self._unpatch()

    def _measure(self, tensor: Tensor, origin: str) -> None:
        if isinstance(tensor, FakeTensor):  # it has no memory
            return
        if tensor.device.type == "cpu" and tensor.layout == torch.strided:
            self._measure_storage(tensor.untyped_storage(), origin)

    def _measure_storage(self, storage: torch.UntypedStorage, origin: str) -> None:
        key = id(storage)
        entry = self._entries.get(key)
        if entry is None:
            entry = _Entry(weakref.ref(storage, lambda _: self._forget(key)), origin, 0)
            self._entries[key] = entry
        self._live_bytes += storage.nbytes() - entry.num_bytes
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)
        entry.num_bytes = storage.nbytes()

    def _forget(self, key: int) -> None:
        self._live_bytes -= self._entries.pop(key).num_bytes

    def _patch_resize(self) -> Callable[[], None]:
        """Follow `UntypedStorage.resize_`, which is no op; returns what takes the patch off."""
        storage_class: Any = torch.UntypedStorage
        previous = storage_class.__dict__.get("resize_")
        original = storage_class.resize_

        def resize_(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
            result = original(storage, num_bytes)
            self._measure_storage(storage, "resize_")
            return result

        def unpatch() -> None:
            if previous is None:
                del storage_class.resize_
            else:
                storage_class.resize_ = previous

        storage_class.resize_ = resize_
        return unpatch
