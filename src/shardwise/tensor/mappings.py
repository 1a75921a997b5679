"""Pair each collective of one tensor-parallel group with its conjugate in the backward.

| forward | backward | |
|---|---|---|
| `copy_to_tp`: identity | all-reduce | before a column layer |
| `reduce_from_tp`: all-reduce | identity | after a row layer |
| `gather_sequence`: all-gather along dim 1 | reduce-scatter | `copy_to_tp` under sequence parallelism |
| `scatter_sequence`: reduce-scatter along dim 1 | all-gather | `reduce_from_tp` under sequence parallelism |
| `split`: slice | all-gather | into the sequence-parallel stack |
| `gather`: all-gather | slice | out of it |

Each is the other's backward, so gradients can be differentiated again. They are built on out-of-place ops registered
with torch, so that selective recomputation and `torch.compile` see them; each engine registers its own, whose kernels
know its `Comm`, and removes them. A row layer's product and its sum are one op: selective recomputation saves only the
sum. Whole sequences are not saved: `gather_sequence` runs again.

**Collectives of a layer** (attention and MLP, each a region with one row layer; f forward, b backward):

| recomputation | all-reduces | with sequence parallelism |
|---|---|---|
| none | 2 f + 2 b | 2 all-gathers + 2 reduce-scatters f, 4 all-gathers + 2 reduce-scatters b |
| selective | 2 f + 2 b | the same |
| full | 2 f + 4 b | 2 all-gathers + 2 reduce-scatters f, 4 all-gathers + 4 reduce-scatters b |

Under sequence parallelism a column layer keeps the slice of its input, not the whole (Korthikanti et al. 2022, section
4.2.2). The first of the layers that share an input gathers it again while it computes the gradient of its input; it is
freed when the last of them is done. Where the backward runs the forward again, the sequence that this gathered is used.
In compiled code the compiler decides what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from shardwise.comm.collectives import AsyncWork, Comm
from shardwise.layout.tp_sharding import check_length
from shardwise.runtime.device import StreamName
from shardwise.runtime.op_registry import OpRegistry
from shardwise.runtime.torch_private import in_backward, on_backward_end, version
from shardwise.runtime.weight_grad_queue import WeightGradSink, parameter_of_weight, weight_sink
from shardwise.tensor import collectives

# Attributes of tensors: the objects that they hold live as long as the tensor.
_COPIED: Final = "_shardwise_copied"
_GATHERED: Final = "_shardwise_gathered"

Op = Callable[..., Tensor]


class TpMappings:
    """Holds the collectives of one tensor-parallel group for use in graphs; `close` removes the registered ops.

    Args:
        overlap_chunks: parts in which a row layer multiplies; each part's sum runs while the next is multiplied.
        may_keep_whole: whether an evaluation may leave a sequence whole whose length does not divide.
        cp: ranks that split sequences before this split.

    Attributes:
        num_local_tokens: of a sequence that was last split; None before the first.
    """

    def __init__(self, comm: Comm, overlap_chunks: int = 1, *, may_keep_whole: bool = True, cp: int = 1) -> None:
        self.comm = comm
        self._may_keep_whole = may_keep_whole
        self._cp = cp
        self._keeps_whole = False
        self.num_local_tokens: int | None = None
        register = self._registry = OpRegistry(comm.is_simulated)
        n = comm.world_size

        def row_product(x: Tensor, weight: Tensor, bias: Tensor | None, is_sequence: bool, name: str) -> Tensor:
            if is_sequence:
                out = _scattered_product(comm, x, weight, overlap_chunks, name)
            else:
                out = x.new_empty((*x.shape[:-1], weight.shape[0]))
                _sum_product(comm, rows_of(x), weight, rows_of(out), overlap_chunks, name)
            return out if bias is None else out.add_(bias)

        all_reduce = register(
            "all_reduce(Tensor x, str name) -> Tensor",
            lambda x, name: collectives.all_reduce(comm, x, name),
            lambda x, name: x.new_empty(x.shape),
        )
        all_gather = register(
            "all_gather(Tensor x, int dim, str name) -> Tensor",
            lambda x, dim, name: collectives.all_gather(comm, x, dim, name),
            lambda x, dim, name: x.new_empty(_scaled(x, dim, n)),
        )
        gather_sequence = register(
            "gather_sequence(Tensor x, str name) -> Tensor",
            lambda x, name: collectives.all_gather(comm, x, 1, name),
            lambda x, name: x.new_empty(_scaled(x, 1, n)),
        )
        scatter_sequence = register(
            "scatter_sequence(Tensor x, str name) -> Tensor",
            lambda x, name: collectives.reduce_scatter(comm, x, 1, name),
            lambda x, name: x.new_empty(_scaled(x, 1, 1, n)),
        )
        product = register(
            "row_product(Tensor x, Tensor weight, Tensor? bias, bool is_sequence, str name) -> Tensor",
            row_product,
            lambda x, weight, bias, is_sequence, name: x.new_empty(
                (*_scaled(x, 1, 1, n if is_sequence else 1)[:-1], weight.shape[0])
            ),
        )
        self._recomputed = _Recomputed()
        self._copy_to_tp, self.reduce_from_tp = _sum_pair(all_reduce)
        self._gather_sequence, self.scatter_sequence = _sequence_pair(gather_sequence, scatter_sequence)
        self._split, self._gather = _slice_pair(all_gather, comm)
        self._row = row_function(product, self._copy_to_tp, self._gather_sequence)
        self._column = _column_function(self._gather_sequence)

    def copy_to_tp(self, x: Tensor, name: str) -> Tensor:
        """Return the same values; the gradient is summed over the ranks, once for all calls with the same tensor."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        # No attribute on a leaf: its graph holds the leaf, which would then hold the graph.
        if x.is_leaf or torch.compiler.is_compiling():
            return self._copy_to_tp(x, name)
        found = x.__dict__.get(_COPIED)
        if found is None or found.ops is not self or found.version != version(x):
            found = x.__dict__[_COPIED] = _Copied(self, self._copy_to_tp(x, name), version(x))
        return found.copy

    def gather_sequence(self, x: Tensor, name: str) -> Tensor:
        """Return the whole sequence [b, s, ...] of slices [b, s / tp, ...]; gradients are summed and scattered."""
        if self.keeps_whole():
            return x
        if x.dim() == 2:  # tokens in one dim, as shared experts get them; their order is that of the ranks
            return self.gather_sequence(x.unsqueeze(0), name).squeeze(0)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return self._gather_sequence(x, name, None)
        regather = _Regather(self.comm, self._recomputed, name)
        whole = self._gather_sequence(x, name, regather)
        whole.__dict__[_GATHERED] = _Gathered(self, x, regather, version(whole))
        return whole

    def split_sequence(self, x: Tensor, name: str) -> Tensor:
        """Return this rank's slice [b, s / tp, ...] of a whole sequence, until `join_sequence`.

        Where no backward follows, sequences whose length does not divide (a prompt that grows) stay whole on every
        rank, unless the stack ends on another rank, as in a pipeline.

        Raises:
            ConfigError: the length does not divide, and a backward follows or the stack continues on another rank.
        """
        if torch.is_grad_enabled() or not self._may_keep_whole:
            fix = "pad the batch or set tensor.sequence_parallel=false"
            check_length(self._cp * x.shape[1], self.comm.world_size, "sequence length ", fix, self._cp)
        else:
            self._keeps_whole = x.shape[1] % self.comm.world_size != 0
        if self.keeps_whole():
            return x
        self.num_local_tokens = x.shape[1] // self.comm.world_size
        return self._split(x, 1, name)

    def join_sequence(self, x: Tensor, name: str) -> Tensor:
        """Return the whole sequence of the stack's outputs for `split_sequence`'s slices."""
        return x if self.keeps_whole() else self._gather(x, 1, name)

    def keeps_whole(self) -> bool:
        """Say whether the evaluation that runs has left its sequence whole."""
        # A recomputation has gradients enabled, so evaluations since its forward do not affect it.
        return self._keeps_whole and not torch.is_grad_enabled()

    def split(self, x: Tensor, dim: int, name: str) -> Tensor:
        """Return this rank's slice of `x` along `dim`, which must divide; the gradient is gathered as `name`."""
        return self._split(x, dim, name)

    def gather(self, x: Tensor, dim: int, name: str) -> Tensor:
        """Return the ranks' `x`, concatenated along `dim` as `name`; the gradient, equal on all ranks, is sliced."""
        return self._gather(x, dim, name)

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None, is_sequence: bool, name: str) -> Tensor:
        """Return the sum over the ranks of `x @ weight.T`, plus the bias once.

        Args:
            x: [..., in / tp], whole sequences; the weight is [out, in / tp], the bias [out] or None.
            is_sequence: whether each rank gets only its slice along dim 1.
        """
        is_sequence = is_sequence and not self.keeps_whole()
        if is_sequence and x.dim() == 2:
            return self.row(x.unsqueeze(0), weight, bias, is_sequence, name).squeeze(0)
        later = DeferredWeightGrad.of(x, weight)
        return self._row(x, weight if later is None else None, bias, is_sequence, name, later)

    def column(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return `x @ weight.T + bias`; for a gathered sequence only the slice is kept for the backward.

        Args:
            x: [..., in], from `copy_to_tp` or `gather_sequence`; the weight is [out / tp, in], the bias [out / tp] or
                None.
        """
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and weight.requires_grad:
            gathered = x.__dict__.get(_GATHERED)
            if gathered is not None and gathered.ops is self and gathered.version == version(x):
                if in_backward():
                    self._recomputed.keep(gathered.x_local, x)
                return self._column(x, weight, bias, gathered)
        return F.linear(x, weight, bias)

    def close(self) -> None:
        """Remove the registered ops; graphs through them raise from now on."""
        self._registry.close()


def _scaled(x: Tensor, dim: int, factor: int, divisor: int = 1) -> list[Any]:
    shape: list[Any] = list(x.shape)
    shape[dim] = shape[dim] * factor // divisor
    return shape


def _sum_pair(all_reduce: Op) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    class CopyToTp(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
            ctx.name = name
            return x.detach()  # not a view to autograd: it would hold its base

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return ReduceFromTp.apply(grad, ctx.name), None

    class ReduceFromTp(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
            ctx.name = name
            return all_reduce(x, name)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return CopyToTp.apply(grad, ctx.name), None

    return CopyToTp.apply, ReduceFromTp.apply


def _sequence_pair(gather: Op, scatter: Op) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    class GatherSequence(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, name: str, regather: _Regather | None) -> Tensor:
            ctx.name, ctx.regather = name, regather
            return gather(x, name)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            if ctx.regather is not None:
                ctx.regather.drop()  # all column layers that share the input have their gradients
            return ScatterSequence.apply(grad, ctx.name), None, None

    class ScatterSequence(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
            ctx.name = name
            return scatter(x, name)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return GatherSequence.apply(grad, ctx.name, None), None

    return GatherSequence.apply, ScatterSequence.apply


def _slice_pair(all_gather: Op, comm: Comm) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    rank, n = comm.rank, comm.world_size

    class Split(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, dim: int, name: str) -> Tensor:
            ctx.dim, ctx.name = dim, name
            size = x.shape[dim] // n
            # A copy: a slice would keep the whole alive.
            return x.narrow(dim, rank * size, size).clone(memory_format=torch.contiguous_format)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return Gather.apply(grad, ctx.dim, ctx.name), None, None

    class Gather(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, dim: int, name: str) -> Tensor:
            ctx.dim, ctx.name = dim, name
            return all_gather(x, dim, name)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return Split.apply(grad, ctx.dim, ctx.name), None, None

    return Split.apply, Gather.apply


def _column_function(gather_sequence: Callable[..., Tensor]) -> Callable[..., Tensor]:
    class Column(Function):
        """Computes a column layer on a gathered sequence."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gathered: _Gathered) -> Tensor:
            """Multiply `x` by `weight` and add `bias`; `ctx` keeps the slice that `gathered` holds."""
            ctx.save_for_backward(gathered.x_local, weight if ctx.needs_input_grad[0] else None)
            ctx.regather = gathered.regather
            return F.linear(x, weight, bias).detach()  # not a view, which could not be changed in place

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x_local, weight = ctx.saved_tensors
            is_differentiated, needs_weight = torch.is_grad_enabled(), ctx.needs_input_grad[1]
            if needs_weight and not is_differentiated:
                ctx.regather.start(x_local)
            grad_x = grad.matmul(weight) if ctx.needs_input_grad[0] else None
            grad_bias = rows_of(grad).sum(0) if ctx.needs_input_grad[2] else None
            if not needs_weight:
                return grad_x, None, grad_bias, None
            whole = gather_sequence(x_local, ctx.regather.name, None) if is_differentiated else ctx.regather.wait()
            return grad_x, weight_gradient(grad, whole), grad_bias, None

    return Column.apply


def _stream_of(chunks: int) -> StreamName | None:
    """Return the side stream for sums that overlap the products of further chunks; None where there is one chunk."""
    return "tensor" if chunks > 1 else None


def _sum_product(comm: Comm, x: Tensor, weight: Tensor, out: Tensor, chunks: int, name: str) -> None:
    """Write to `out` [tokens, out] the sum over the ranks of `x` [tokens, in / tp] times `weight` [out, in / tp]."""
    pending: list[AsyncWork] = []
    stream = _stream_of(chunks)
    for rows, out_rows in zip(x.chunk(chunks), out.chunk(chunks), strict=True):
        torch.mm(rows, weight.t(), out=out_rows)
        flat = out_rows.view(-1)
        pending.append(comm.start_sum(flat, flat, name, stream))
    for each in pending:
        each.wait()


def _scattered_product(comm: Comm, x: Tensor, weight: Tensor, chunks: int, name: str) -> Tensor:
    """Return this rank's slice along dim 1 of that sum; chunk i holds the i-th part of every rank's slice."""
    if chunks == 1:
        return collectives.reduce_scatter(comm, F.linear(x, weight), 1, name)
    slices = x.unflatten(1, (comm.world_size, -1))  # [b, tp, s / tp, in / tp]
    outs: list[Tensor] = []
    pending: list[tuple[AsyncWork, Tensor]] = []  # with the source, which must live until then
    for part in slices.chunk(chunks, dim=2):
        source = F.linear(part, weight).movedim(1, 0).contiguous()  # [tp, b, part, out]
        out = torch.empty_like(source[0])
        collective = comm.scatter_sum(source.view(-1), out.view(-1), name, _stream_of(chunks))
        outs.append(out)
        pending.append((collective, source))
    for collective, _ in pending:
        collective.wait()
    return torch.cat(outs, dim=1)


class _Recomputed:
    """Holds whole sequences that a recomputation has gathered, until the backward that asked for it takes them."""

    def __init__(self) -> None:
        self._held: dict[Hashable, tuple[Tensor, Tensor]] = {}

    def keep(self, x_local: Tensor, whole: Tensor) -> None:
        """Remember `whole`; call it within a backward."""
        if not self._held:
            on_backward_end(self._held.clear)
        # The slice is held as well, so that no other storage gets its id.
        self._held[self._key(x_local)] = (x_local.detach(), whole.detach())

    def take(self, x_local: Tensor) -> Tensor | None:
        """Return what was gathered of this slice, or of another tensor with the same memory; else None."""
        return self._held.pop(self._key(x_local), (None, None))[1]

    @staticmethod
    def _key(x: Tensor) -> Hashable:
        return id(x.untyped_storage()), x.storage_offset(), x.shape


class _Regather:
    """Gathers the whole sequence once in the backward for the column layers that share one input.

    Args:
        recomputed: where the sequence may be already.
    """

    def __init__(self, comm: Comm, recomputed: _Recomputed, name: str) -> None:
        self.name = name
        self._comm = comm
        self._recomputed = recomputed
        self._finish: Callable[[], Tensor] | None = None
        self._whole: Tensor | None = None

    def start(self, x_local: Tensor) -> None:
        """Start to gather, unless another layer has."""
        if self._finish is not None or self._whole is not None:
            return
        on_backward_end(self.drop)  # where the input itself needs no gradient
        self._whole = self._recomputed.take(x_local)
        if self._whole is None:
            self._finish = collectives.start_all_gather(self._comm, x_local, 1, self.name)

    def wait(self) -> Tensor:
        """Return the whole sequence; `start` must have been called."""
        if self._whole is None:
            if self._finish is None:
                raise RuntimeError(f"{self.name}: the gather was not started")
            self._whole, self._finish = self._finish(), None
        return self._whole

    def drop(self) -> None:
        """Free the sequence."""
        if self._finish is not None:
            self._finish()
        self._finish = self._whole = None


@dataclass(frozen=True, eq=False)
class _Copied:
    """Holds the result of `copy_to_tp` for this version of a tensor."""

    ops: TpMappings
    copy: Tensor
    version: int


@dataclass(frozen=True, eq=False)
class _Gathered:
    """Holds the slice that this version of a whole sequence was gathered from."""

    ops: TpMappings
    x_local: Tensor
    regather: _Regather
    version: int


Run = Callable[..., Tensor]


@dataclass(frozen=True, eq=False)
class DeferredWeightGrad:
    """Defers a row layer's gradient of its weight to a sink; the weight is this parameter, or its transpose."""

    weight: Tensor
    sink: WeightGradSink
    parameter: Tensor
    is_transposed: bool

    @classmethod
    def of(cls, x: Tensor, weight: Tensor) -> Self | None:
        """Return None where the gradient is computed at once, or not at all."""
        sink = weight_sink(x) if x.requires_grad else None
        found = None if sink is None else parameter_of_weight(weight)
        return None if sink is None or found is None else cls(weight, sink, *found)

    def defer(self, grad: Tensor, x: Tensor) -> None:
        """Queue the gradient: `grad` is that of the whole sum, [..., out], `x` the input, [..., in / tp]."""

        def compute() -> list[Tensor]:
            gradient = weight_gradient(grad, x)
            return [gradient.t() if self.is_transposed else gradient]

        self.sink.defer((self.parameter,), compute, (x, grad))


def row_function(product: Run, copy_to_tp: Run, gather_sequence: Run) -> Run:
    """Make the autograd function of `TpMappings.row`.

    Args:
        copy_to_tp: the identity whose gradient is summed.
        gather_sequence: the gather of a sequence, for a sum that was scattered.

    Returns:
        a function that takes `TpMappings.row`'s arguments and a `DeferredWeightGrad` or None. With a
        `DeferredWeightGrad` its weight must be None, since the weight then has no gradient here.
    """

    class Row(Function):
        @staticmethod
        def forward(
            ctx: Any,
            x: Tensor,
            weight: Tensor | None,
            bias: Tensor | None,
            is_sequence: bool,
            name: str,
            later: DeferredWeightGrad | None,
        ) -> Tensor:
            needs_x, needs_weight = ctx.needs_input_grad[:2]
            ctx.needs_weight = needs_weight
            if later is not None:
                weight, ctx.needs_weight = later.weight, True
            ctx.save_for_backward(x if ctx.needs_weight else None, weight if needs_x else None)
            ctx.is_sequence, ctx.name, ctx.later = is_sequence, name, later
            return product(x, weight, bias, is_sequence, name)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            grad_bias = rows_of(grad).sum(0) if ctx.needs_input_grad[2] else None
            if ctx.needs_input_grad[0] or ctx.needs_weight:
                grad = gather_sequence(grad, ctx.name, None) if ctx.is_sequence else copy_to_tp(grad, ctx.name)
            grad_x = grad.matmul(weight) if ctx.needs_input_grad[0] else None
            grad_weight = None
            if ctx.later is not None:
                ctx.later.defer(grad, x)
            elif ctx.needs_weight:
                grad_weight = weight_gradient(grad, x)
            return grad_x, grad_weight, grad_bias, None, None, None

    return Row.apply


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return the weight's gradient [out, in] from the output's gradient [..., out] and the input [..., in]."""
    return rows_of(grad).t().mm(rows_of(x))


def rows_of(x: Tensor) -> Tensor:
    """Reshape [..., k] to [N, k]."""
    return x.reshape(-1, x.shape[-1])
