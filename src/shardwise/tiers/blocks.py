"""The optimizer step on the host, in blocks that stay in the cache: widen, scale, step, narrow.

What a pass over a whole gradient writes is gone from the cache before the next pass reads it. In a block, the gradient
that was widened is still there for the step, and so is the parameter that was stepped, to be narrowed.

>>> from shardwise.tiers.rules import rule_of
>>> rule = rule_of(torch.optim.SGD([torch.zeros(1)]))
>>> options = torch.optim.SGD([torch.zeros(1)], lr=0.5).param_groups[0]
>>> master, param = torch.ones(3), torch.ones(3, dtype=torch.bfloat16)
>>> grad = torch.full((3,), 4.0, dtype=torch.bfloat16)
>>> step_pieces(rule, [StepPiece(options, master, grad, {}, 0, True, param)], factor=0.25)
>>> param.tolist()
[0.5, 0.5, 0.5]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.tiers.rules import StepRule
from shardwise.tiers.threads import StepThreads

# Torch's kernels round an element by whether it lies in a vector or in the rest behind the last, so a cut must fall
# between vectors; no vector is longer than this.
CUT_NUMEL: Final = 64
BLOCK_NUMEL: Final = 768 * 1024


@dataclass(frozen=True)
class StepPiece:
    """A parameter's part of what is stepped; all tensors are 1-D, on the CPU and of one length.

    Attributes:
        options: of its parameter group; pieces with the same object are stepped together.
        master: fp32 or fp64.
        grad: of any floating dtype; it stays as it is.
        states: by name, in the master's dtype; at their first values before the first step.
        step: how many steps it has taken before.
        is_first: whether it has no state yet.
        param: the low-precision parameter, which is to follow the master; None where the master is the parameter.
    """

    options: Mapping[str, Any]
    master: Tensor
    grad: Tensor
    states: Mapping[str, Tensor]
    step: float
    is_first: bool
    param: Tensor | None

    def part(self, start: int, stop: int) -> StepPiece:
        """The elements from `start` to `stop`."""
        if start == 0 and stop == self.master.numel():
            return self
        return StepPiece(
            options=self.options,
            master=self.master[start:stop],
            grad=self.grad[start:stop],
            states={name: state[start:stop] for name, state in self.states.items()},
            step=self.step,
            is_first=self.is_first,
            param=self.param[start:stop] if self.param is not None else None,
        )


def step_pieces(rule: StepRule, pieces: Sequence[StepPiece], factor: float, threads: StepThreads | None = None) -> None:
    """Step each piece with `factor` times its gradient, as the optimizer would step it whole, to the last bit.

    That holds for a piece that is itself a part of a parameter too, where it starts and stops at multiples of
    `CUT_NUMEL` elements from the parameter's first, or at its end.

    Args:
        rule: of the optimizer.
        pieces: of one or several parameters, in any order.
        factor: what turns accumulated sums into the gradient; applied in the master's dtype.
        threads: that take the blocks between them; without any, torch's own share each operation.
    """
    num_takers = threads.num_threads if threads else 1
    for alike in _alike(pieces):
        num_padded = sum(_padded(piece.master.numel()) for piece in alike)
        room = min(BLOCK_NUMEL, _padded(-(-num_padded // num_takers)))
        # The iterator of a list may be shared by threads; that of a function may not.
        work = partial(_work_off, iter(list(_blocks(alike, room))), rule, room, factor)
        if threads:
            threads.run(work)
        else:
            work()


def _alike(pieces: Sequence[StepPiece]) -> list[list[StepPiece]]:
    """The pieces by what one call of a kernel has in common."""
    found: dict[tuple[Any, ...], list[StepPiece]] = {}
    for piece in pieces:
        if piece.master.numel():
            key = (id(piece.options), piece.step, piece.is_first, piece.master.dtype)
            found.setdefault(key, []).append(piece)
    return list(found.values())


def _blocks(pieces: Sequence[StepPiece], room: int) -> Iterator[list[StepPiece]]:
    """Parts of the pieces, in order, as many at a time as there is room for."""
    block: list[StepPiece] = []
    free = room
    for piece in pieces:
        start, length = 0, piece.master.numel()
        while start < length:
            stop = min(length, start + free)
            block.append(piece.part(start, stop))
            free -= _padded(stop - start)
            start = stop
            if free == 0:
                yield block
                block, free = [], room
    if block:
        yield block


@torch.no_grad()
def _work_off(rest: Iterator[Sequence[StepPiece]], rule: StepRule, room: int, factor: float) -> None:
    scratch = None
    for block in rest:
        if scratch is None:
            scratch = torch.empty(room, dtype=block[0].master.dtype)
        _step_block(rule, block, scratch, factor)


def _step_block(rule: StepRule, block: Sequence[StepPiece], scratch: Tensor, factor: float) -> None:
    grads, start = [], 0
    for part in block:
        grads.append(_scaled(part.grad, scratch[start : start + part.grad.numel()], factor))
        start += _padded(part.grad.numel())
    first = block[0]
    masters, states = [part.master for part in block], [part.states for part in block]
    rule.update(first.options, masters, grads, states, first.step, first.is_first)
    for part in block:
        if part.param is not None:
            part.param.copy_(part.master)


def _scaled(grad: Tensor, target: Tensor, factor: float) -> Tensor:
    if grad.dtype == target.dtype:
        return torch.mul(grad, factor, out=target)
    target.copy_(grad)
    return target.mul_(factor) if factor != 1.0 else target


def _padded(numel: int) -> int:
    return -(-numel // CUT_NUMEL) * CUT_NUMEL
