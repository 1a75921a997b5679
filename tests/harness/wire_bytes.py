"""The bytes that collectives carry, counted by watching c10d ops: `comm`'s counters are compared with it.

Not what gloo puts on the wire (its reduce-scatter moves an all-reduce's bytes): `ring_equivalent_bytes` is
what ring algorithms would send, which is the unit of the stage table. Nothing here is imported from the
library.

    with WireBytes() as wire:
        engine.train_step(batches)
    assert ring_equivalent_bytes(wire.calls) == Fraction(n - 1, n) * 3 * model_bytes

Blocking, async and coalesced calls are seen, in forward, in backward and inside custom ops; those of other
threads not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from harness.live_bytes import call_op, dispatches_itself, tensors_in


@dataclass(frozen=True)
class Call:
    """One c10d op: its name, the size of its group, the bytes of the tensor that the ring rules speak of; its ranks."""

    name: str
    group_size: int
    tensor_bytes: int
    ranks: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class _Rule:
    argument: int  # position of the full tensor, the one that holds all ranks' parts
    sent: Callable[[int], Fraction]  # group size -> share of it that a rank sends


def _ring(num_ranks: int) -> Fraction:
    return Fraction(num_ranks - 1, num_ranks)


def _two_rings(num_ranks: int) -> Fraction:
    return 2 * _ring(num_ranks)


def _all(num_ranks: int) -> Fraction:
    return Fraction(1)


def _nothing(num_ranks: int) -> Fraction:
    return Fraction(0)


_RULES = {
    "allreduce_": _Rule(0, _two_rings),
    "allreduce_coalesced_": _Rule(0, _two_rings),
    "_allgather_base_": _Rule(0, _ring),
    "allgather_": _Rule(0, _ring),
    "allgather_into_tensor_coalesced_": _Rule(0, _ring),
    "_reduce_scatter_base_": _Rule(1, _ring),
    "reduce_scatter_": _Rule(1, _ring),
    "reduce_scatter_tensor_coalesced_": _Rule(1, _ring),
    "alltoall_base_": _Rule(1, _ring),
    "alltoall_": _Rule(1, _ring),
    "broadcast_": _Rule(0, _ring),
    "reduce_": _Rule(0, _ring),
    "send": _Rule(0, _all),
    "recv_": _Rule(0, _nothing),
    "recv_any_source_": _Rule(0, _nothing),
    "barrier": _Rule(0, _nothing),
    "monitored_barrier_": _Rule(0, _nothing),
}


class WireBytes(TorchDispatchMode):
    """Records every c10d op of this thread while entered."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if dispatches_itself(types):
            return NotImplemented
        if func.namespace == "c10d":
            self.calls.append(_call(func.name().removeprefix("c10d::"), args))
        return call_op(self, func, args, kwargs or {})


def ring_equivalent_bytes(calls: Iterable[Call]) -> Fraction:
    """Bytes this rank sends if every call runs as a ring: exact, so that it can be compared with ==.

    For n ranks: all-reduce 2(n-1)/n of the tensor, reduce-scatter (n-1)/n of the full input, all-gather
    (n-1)/n of the full output, all-to-all (n-1)/n of the input (equal parts), broadcast and reduce (n-1)/n of
    the tensor, send all of it.

    >>> ring_equivalent_bytes([Call("allreduce_", 4, 400), Call("send", 4, 7), Call("recv_", 4, 9)])
    Fraction(607, 1)
    """
    return sum((_RULES[call.name].sent(call.group_size) * call.tensor_bytes for call in calls), Fraction(0))


def _call(name: str, args: tuple[Any, ...]) -> Call:
    if name not in _RULES:
        raise NotImplementedError(f"c10d::{name} has no rule here; add which share of it a rank sends")
    group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
    tensor_bytes = sum(tensor.nbytes for tensor in tensors_in(args[_RULES[name].argument]))
    ranks = tuple(dist.get_process_group_ranks(group))
    if name == "alltoall_base_" and args[4]:  # unequal parts, of which this rank keeps its own
        sizes = args[4]
        sent_bytes = tensor_bytes // max(1, sum(sizes)) * (sum(sizes) - sizes[group.rank()])
        return Call("send", group.size(), sent_bytes, ranks)
    return Call(name, group.size(), tensor_bytes, ranks)
