"""Sums over ranks that send what they add in 8 or 4 bits; the sums themselves run in fp32.

Each rank encodes its buffer as one row for each rank, its own row too, so that all ranks' parts are rounded. Rows are
exchanged as bytes, decoded, and summed in the order of the ranks. Where nodes are known, it takes two steps: the ranks
of a node sum among themselves, encode these sums again, and exchange them with the ranks at the same place of the other
nodes. So 1/k of the bytes cross nodes of k ranks (qgZ of ZeRO++, Wang et al. 2023, arXiv 2306.10209).

With feedback a rank keeps what encoding rounds off, and adds it to what it encodes next (Seide et al. 2014, "1-Bit
Stochastic Gradient Descent").
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from sys import maxsize

import torch
from torch import Tensor

from shardwise.comm.backends import sum_chunks
from shardwise.comm.collectives import AsyncWork, Comm
from shardwise.layout.precision import BLOCK_NUMEL
from shardwise.layout.wire_codec import WireCodec
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.kernels import has_kernels
from shardwise.runtime.torch_private import is_fake


class KernelCodec(WireCodec):
    """Encodes and decodes by Triton kernels, in one pass each, to the bits of `WireCodec`."""

    def at_once(self, device: torch.device) -> int:
        """Return that it takes any number at a time, since it takes no memory."""
        return maxsize

    def encode(
        self, values: Tensor, out: Tensor | None = None, start: int = 0, residual: Tensor | None = None
    ) -> Tensor:
        from shardwise.comm import triton_codec  # it needs Triton

        out = self.empty(values) if out is None else out
        if not is_fake(values):
            triton_codec.encode_launch(self, values, out, start, residual).run()
        return out

    def decode(self, sent: Tensor, out: Tensor, start: int = 0) -> Tensor:
        from shardwise.comm import triton_codec

        if not is_fake(out):
            triton_codec.decode_launch(self, sent, out, start).run()
        return out

    def sum_rows(self, rows: Tensor, out: Tensor, accumulate: bool) -> None:
        """Decode rows and sum them, as the function `sum_rows` does."""
        from shardwise.comm import triton_codec

        if not is_fake(out):
            triton_codec.sum_launch(self, rows, out, accumulate).run()


def codec_on(device: torch.device, codec: WireCodec) -> WireCodec:
    """Return a codec that works by kernels, where they know its codes and may run on a device; else the codec."""
    return KernelCodec(codec.name) if codec.rule.gpu_kernel and has_kernels(device) else codec


class EncodedSum:
    """Sums buffers over a communicator's ranks; it takes the place of a `Comm` that sends values as they are.

    Args:
        pool: has buffers for what is sent and received.
        node_size: ranks of a node, neighbours in the group, by which the sum is taken in two steps; 1 for one step.
        residuals: where what is rounded off is kept, with zeros at the start: of the whole buffer [n * s], and of a
            node's sums, one slice a node; None where it is dropped.
    """

    def __init__(
        self,
        comm: Comm,
        codec: WireCodec,
        pool: BufferPool,
        node_size: int = 1,
        residuals: Sequence[Tensor | None] = (None, None),
    ) -> None:
        self.world_size = comm.world_size
        self._first, self._second = residuals
        self._comm = comm
        self._codec = codec_on(comm.device, codec)
        self._pool = pool
        self._node_size = node_size if 1 < node_size < comm.world_size else comm.world_size

    def reduce_scatter(self, source: Tensor, out: Tensor, *, accumulate: bool, name: str) -> AsyncWork:
        """Sum `source` [n * s] over the ranks and leave this rank's slice in `out` [s].

        Args:
            source: of any floating dtype; s is a multiple of 256.
            out: in the dtype of the accumulator; may be this rank's slice of `source`'s storage.
        """
        numel, num_nodes = out.numel(), self.world_size // self._node_size
        node, place = divmod(self._comm.rank, self._node_size)
        row_bytes = self._codec.num_bytes(numel)
        values, rounded = self._by_place(source, numel), self._by_place(self._first, numel)
        assert values is not None
        peers = range(node * self._node_size, (node + 1) * self._node_size)
        read = partial(sum_rows, self._codec, out=out, accumulate=accumulate)

        def write(rows: Tensor) -> None:
            encode_rows(self._codec, values, rows.view(self._node_size, num_nodes, row_bytes), rounded)

        if num_nodes == 1:
            return self._comm.swap_rows(peers, row_bytes, write, read, name)
        middle: list[Tensor] = []  # this node's sums, once they are there

        def read_node(rows: Tensor) -> None:
            middle.append(self._pool.acquire(num_nodes * numel, torch.float32))
            of_nodes = rows.view(self._node_size, num_nodes, row_bytes)
            for index in range(1 if is_fake(rows) else num_nodes):
                total = middle[0][index * numel : (index + 1) * numel]
                sum_rows(self._codec, of_nodes[:, index], total, accumulate=False)

        def write_node(rows: Tensor) -> None:
            second = None if self._second is None else self._second.view(num_nodes, numel)
            encode_rows(self._codec, middle[0].view(num_nodes, numel), rows, second)
            self._pool.release(middle.pop())

        def across() -> AsyncWork:
            peers = range(place, self.world_size, self._node_size)
            return self._comm.swap_rows(peers, row_bytes, write_node, read, name)

        # The second exchange sends this node's sums. On gloo the host has them when it has waited for the first, so it
        # starts the second then. On NCCL both are in the order of the stream "reduce", so the second is enqueued at
        # once.
        within = self._comm.swap_rows(peers, num_nodes * row_bytes, write, read_node, name)
        return AsyncWork(within.wait, across) if self._comm.waits_on_host else across()

    def all_reduce(self, buffer: Tensor, wire_dtype: torch.dtype, name: str, wire: Tensor | None = None) -> AsyncWork:
        """Sum `buffer` [n * s] over the ranks in place; the sums are sent to all ranks as `wire_dtype`, not encoded.

        Args:
            wire_dtype: in which the sums are sent.
            wire: of the pool, with what this rank adds, if that is not in `buffer`; it is released.
        """
        source = buffer if wire is None else wire
        summed = self.reduce_scatter(source, self._comm.own_slice(buffer), accumulate=False, name=name)

        def gather() -> AsyncWork:
            if buffer.dtype == wire_dtype:
                return self._comm.all_gather(buffer, name)
            sent = self._pool.acquire(buffer.numel(), wire_dtype) if wire is None else wire
            return self._comm.gather_sum(buffer, sent, name)

        return AsyncWork(summed.wait, gather)

    def _by_place(self, flat: Tensor | None, numel: int) -> Tensor | None:
        """View a buffer as [place in the node, node, s]."""
        return None if flat is None else flat.view(-1, self._node_size, numel).transpose(0, 1)


def encode_rows(codec: WireCodec, values: Tensor, sent: Tensor, residual: Tensor | None) -> None:
    """Encode rows, some columns at a time.

    Args:
        values: [..., s] of any floating dtype.
        sent: uint8 [..., num_bytes(s)], contiguous, to write into.
        residual: [..., s], added before, and replaced by what is rounded off; 0 where that is not finite, as an
            overflow is never part of a step. None for none.
    """
    for start, stop in _columns(values, codec.at_once(values.device)):
        rounded = None if residual is None else residual[..., start:stop]
        codec.encode(values[..., start:stop], sent, start, rounded)


def sum_rows(codec: WireCodec, rows: Tensor, out: Tensor, accumulate: bool) -> None:
    """Decode rows and sum them as `sum_chunks` does, some columns at a time.

    Args:
        accumulate: whether `out` holds a sum already, to which this one is added.
    """
    if isinstance(codec, KernelCodec):
        codec.sum_rows(rows, out, accumulate)
        return
    num_rows = rows.shape[0]
    for start, stop in _columns(out.expand(num_rows, -1), codec.at_once(out.device)):
        decoded = torch.empty(num_rows, stop - start, dtype=torch.float32, device=out.device)
        sum_chunks(out[start:stop], codec.decode(rows, decoded, start), accumulate)


def _columns(rows: Tensor, at_once: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of the last dim of [..., s], whole blocks, of so many elements at a time."""
    numel = rows.shape[-1]
    step = max(1, at_once * numel // max(1, rows.numel()) // BLOCK_NUMEL) * BLOCK_NUMEL
    for start in range(0, numel, step):
        yield start, min(start + step, numel)
        if is_fake(rows):  # what it allocates counts; thousands of ranges would be slow
            return
