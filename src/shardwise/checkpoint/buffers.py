"""The buffers of a model in a checkpoint: one rank writes each, and each other rank those in which it differs.

The writer is rank 0; in a pipeline, the first rank of the stage that runs the buffer's module, and what ranks of other
stages have of it does not count: nothing there has changed it. A rank differs where buffers are statistics of the
batches that it has seen. Persistent buffers only, as in `state_dict`; a buffer that is tied is one, by its first name.

>>> first, second = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
>>> _ = second(torch.eye(2))
>>> there = digests(held_buffers(first, lambda name: "writes"))
>>> [held.holding.name for held in differing(held_buffers(second, lambda name: "runs"), there)]
['running_mean', 'running_var', 'num_batches_tracked']
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from shardwise._torch_private import persistent_buffers
from shardwise.flats import MemoryFlat
from shardwise.holdings import PARAM, Holding, Kind
from shardwise.host_memory import memory_of
from shardwise.layout.pieces import LocalTensor

# What a rank does with a buffer: it runs its module, and writes it too; or only other ranks do.
Role = Literal["writes", "runs", "keeps"]


@dataclass(frozen=True)
class HeldBuffer:
    """A buffer and its holding, whose values are the buffer's own memory where that is contiguous, else a copy."""

    holding: Holding
    buffer: Tensor
    role: Role

    @property
    def values(self) -> Tensor:
        """What the holding has, 1-D, its own memory."""
        return self.holding.flat.read(0, self.holding.flat.numel)

    @torch.no_grad()
    def settle(self) -> None:
        """Let the buffer have what was read into its holding."""
        values = self.values.view(self.buffer.shape)
        if any(not step and size > 1 for step, size in zip(self.buffer.stride(), self.buffer.shape, strict=True)):
            self.buffer.data = values.clone()  # elements of an expanded one share memory: torch writes into none
        elif self.buffer.data_ptr() != values.data_ptr():
            self.buffer.copy_(values)


def held_buffers(model: nn.Module, role_of: Callable[[str], Role]) -> list[HeldBuffer]:
    """The persistent buffers of a model.

    Args:
        model: all of it.
        role_of: this rank's, by the buffer's first name.
    """
    names: dict[int, list[str]] = {}
    buffers: dict[int, Tensor] = {}
    for name, buffer in persistent_buffers(model):
        names.setdefault(id(buffer), []).append(name)
        buffers[id(buffer)] = buffer
    found = []
    for key, (first, *others) in names.items():
        role, buffer = role_of(first), buffers[key]
        holding = whole(first, buffer, tuple(others), kind="buffer", is_written=role == "writes")
        found.append(HeldBuffer(holding, buffer, role))
    return found


def digests(held: Sequence[HeldBuffer]) -> dict[str, str]:
    """By name, what stands for the values of each buffer that this rank writes."""
    return {each.holding.name: _digest(each) for each in held if each.role == "writes"}


def differing(held: Sequence[HeldBuffer], others: Mapping[str, str]) -> list[HeldBuffer]:
    """The buffers that this rank runs too, and that are not as they were where `digests` returned `others`."""
    return [each for each in held if each.role == "runs" and _digest(each) != others.get(each.holding.name)]


def whole(name: str, tensor: Tensor, aliases: tuple[str, ...] = (), *, kind: Kind, is_written: bool) -> Holding:
    """The holding of a tensor that this rank has all of."""
    shape = tuple(tensor.shape)
    pieces = LocalTensor.whole(shape).pieces
    flat = MemoryFlat(tensor.detach().contiguous().view(-1))
    return Holding(name, aliases, PARAM, shape, flat, pieces, pieces if is_written else (), kind, trainable=False)


def _digest(held: HeldBuffer) -> str:
    return hashlib.blake2b(memory_of(held.values.cpu()), digest_size=16).hexdigest()
