"""Step parameters on the CPU by an optimizer's row, for states that are stored outside torch's optimizer.

The work is cut into blocks that fit the cache, and shared between threads. What is encoded is decoded, stepped and
encoded again a block at a time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from threading import Barrier
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwise.layout.codec import Encoded
from shardwise.layout.precision import BLOCK_NUMEL as CODEC_BLOCK
from shardwise.optim.elementwise import StepTensors
from shardwise.optim.rules import OptimizerRule, fused_grad_scale

# Elements that one call of a kernel steps: few enough for a core's cache, many enough for the cost of a call to vanish.
BLOCK_NUMEL: Final = 768 * 1024
# Where states are decoded, their values in fp32 are to fit the cache, too.
ENCODED_NUMEL: Final = 256 * 1024
# A device has no such cache, and each call costs its host some microseconds.
DEVICE_NUMEL: Final = 8 * 1024 * 1024


@dataclass(frozen=True)
class StepPiece:
    """Holds a parameter's part of what is stepped; all tensors are 1-D, on the CPU and of one length.

    Attributes:
        options: of its parameter group; pieces with the same object are stepped together.
        grad: of any floating dtype; it stays as it is.
        states: by name, in the master's dtype, or encoded; at their first values before the first step.
        step: how many steps it has taken before.
        is_first: whether it has no state yet.
        param: the low-precision parameter, which follows the master; None where the master is the parameter.
    """

    options: Mapping[str, Any]
    master: Tensor
    grad: Tensor
    states: Mapping[str, Tensor | Encoded]
    step: float
    is_first: bool
    param: Tensor | None

    @property
    def has_codes(self) -> bool:
        """Say whether a state is encoded, so that parts begin at block borders."""
        return any(isinstance(state, Encoded) for state in self.states.values())

    def part(self, start: int, stop: int) -> StepPiece:
        """Return the elements from `start` to `stop`."""
        if start == 0 and stop == self.master.numel():
            return self
        return StepPiece(
            options=self.options,
            master=self.master[start:stop],
            grad=self.grad[start:stop],
            states={
                name: state.part(start, stop) if isinstance(state, Encoded) else state[start:stop]
                for name, state in self.states.items()
            },
            step=self.step,
            is_first=self.is_first,
            param=self.param[start:stop] if self.param is not None else None,
        )


def step_pieces(
    rule: OptimizerRule, pieces: Sequence[StepPiece], factor: float, threads: StepThreads | None = None
) -> None:
    """Step each piece with `factor` times its gradient, as the optimizer steps the whole parameter, to rounding.

    Args:
        pieces: of one or several parameters, in any order.
        factor: turns accumulated sums into the gradient; applied in the master's dtype.
        threads: share the blocks between them; None lets torch's own threads share each operation.
    """
    num_takers = threads.num_threads if threads else 1
    for together in _by_kernel_call(pieces):
        most = ENCODED_NUMEL if together[0].has_codes else BLOCK_NUMEL
        if not together[0].master.is_cpu:
            most = DEVICE_NUMEL
        capacity = _round_up(min(most, -(-sum(piece.master.numel() for piece in together) // num_takers)))
        # The iterator of a list may be shared by threads; that of a function may not.
        work = partial(_work_off, iter(list(_blocks(together, capacity))), rule, capacity, factor)
        if threads:
            threads.run(work)
        else:
            work()


def _by_kernel_call(pieces: Sequence[StepPiece]) -> list[list[StepPiece]]:
    """Group the pieces that one call of a kernel can step."""
    found: dict[tuple[Any, ...], list[StepPiece]] = {}
    for piece in pieces:
        if piece.master.numel():
            key = (id(piece.options), piece.step, piece.is_first, piece.master.dtype, piece.has_codes)
            found.setdefault(key, []).append(piece)
    return list(found.values())


def _blocks(pieces: Sequence[StepPiece], capacity: int) -> Iterator[list[StepPiece]]:
    """Yield parts of the pieces, in order, as many at a time as fit into `capacity` elements."""
    block: list[StepPiece] = []
    free = capacity
    for piece in pieces:
        start, length = 0, piece.master.numel()
        while start < length:
            if piece.has_codes and free < length - start:
                free = free // CODEC_BLOCK * CODEC_BLOCK
            stop = min(length, start + free)
            block.append(piece.part(start, stop))
            free -= stop - start
            start = stop
            if free == 0:
                yield block
                block, free = [], capacity
    if block:
        yield block


@torch.no_grad()
def _work_off(blocks: Iterator[Sequence[StepPiece]], rule: OptimizerRule, capacity: int, factor: float) -> None:
    scratch = None
    for block in blocks:
        if scratch is None:
            scratch = torch.empty(capacity, dtype=block[0].master.dtype, device=block[0].master.device)
        _step_block(rule, block, scratch, factor)


def _step_block(rule: OptimizerRule, block: Sequence[StepPiece], scratch: Tensor, factor: float) -> None:
    grads, start = [], 0
    for part in block:
        grads.append(_scaled(part.grad, scratch[start : start + part.grad.numel()], factor, rule.kind))
        start += part.grad.numel()
    first = block[0]
    masters, states = [part.master for part in block], [_decoded(part) for part in block]
    rule.update(first.options, StepTensors(masters, grads, states, first.step, first.is_first))
    for part, values in zip(block, states, strict=True):
        for name, state in part.states.items():
            if isinstance(state, Encoded):
                state.encode(values[name])
    # While the block is in the cache: a pass of its own over the masters would read them from memory again.
    for part in block:
        if part.param is not None:
            part.param.copy_(part.master)


def _decoded(part: StepPiece) -> dict[str, Tensor]:
    """Return the states in the master's dtype."""
    return {
        name: state.decode().to(part.master.dtype) if isinstance(state, Encoded) else state
        for name, state in part.states.items()
    }


def _round_up(numel: int) -> int:
    """Return a capacity that holds whole blocks of codes."""
    return -(-numel // CODEC_BLOCK) * CODEC_BLOCK


def _scaled(grad: Tensor, target: Tensor, factor: float, kind: type[Optimizer]) -> Tensor:
    """Scale a gradient as the fused step on the device does, so that races between tiers show in the last bit."""
    scale = fused_grad_scale(kind, factor, {target.dtype})
    if scale is not None:
        return torch.div(grad, scale, out=target) if grad.dtype == target.dtype else target.copy_(grad).div_(scale)
    if grad.dtype == target.dtype:
        return torch.mul(grad, factor, out=target)
    target.copy_(grad)
    return target.mul_(factor) if factor != 1.0 else target


class StepThreads:
    """Runs functions in threads whose torch operations use no further threads, until `close`.

    Make it when no other thread begins to use torch, such as at start: for a moment, a thread that is new to torch gets
    one thread for its operations.

    Args:
        num_threads: how many; None for as many as torch uses for an operation here.
        cores: the cores to which they are bound; None for those of the calling thread.
    """

    def __init__(self, num_threads: int | None = None, cores: tuple[int, ...] | None = None) -> None:
        before = torch.get_num_threads()
        self.num_threads = num_threads or before
        self._executor = ThreadPoolExecutor(self.num_threads, "shardwise-step")
        all_are_there = Barrier(self.num_threads)
        wait([self._executor.submit(_use_one_core, all_are_there, cores) for _ in range(self.num_threads)])
        torch.set_num_threads(before)

    def run(self, function: Callable[[], object]) -> None:
        """Call a function once in each thread, at the same time, and wait for all.

        Raises:
            Exception: what a call raised.
        """
        futures = [self._executor.submit(function) for _ in range(self.num_threads)]
        wait(futures)
        for future in futures:
            future.result()

    def close(self) -> None:
        """End the threads; may be called twice."""
        self._executor.shutdown()


def _use_one_core(all_are_there: Barrier, cores: tuple[int, ...] | None) -> None:
    keep_to(cores)
    torch.get_num_threads()  # the first use of torch in a thread sets its number, which would undo what follows
    torch.set_num_threads(1)
    all_are_there.wait()


def bind_this_thread(cores: tuple[int, ...] | None) -> None:
    """Bind the calling thread, and those that OpenMP starts for it, to `cores`; call it before its first kernel.

    Args:
        cores: that this process may use, each with a thread; None for those of the process, and as many threads as it
            has. Where the system binds no threads, only their number counts.
    """
    if cores is None:
        return  # a new thread has the process's number and its starter's cores
    keep_to(cores)
    num_process_threads = torch.get_num_threads()
    torch.set_num_threads(len(cores))
    # What is set last is also what threads yet to come start with, as those of autograd; this thread keeps its own.
    restorer = threading.Thread(target=torch.set_num_threads, args=(num_process_threads,))
    restorer.start()
    restorer.join()


def keep_to(cores: tuple[int, ...] | None) -> None:
    """Bind the calling thread to `cores`, where the system can bind threads; None changes nothing."""
    if cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)  # 0 is the calling thread, not the process
