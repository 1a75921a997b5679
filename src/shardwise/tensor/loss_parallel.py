"""Defer logits: they are computed only when an op other than a cross entropy reads them.

A head that is split by rows over the ranks, or that takes some tokens at a time, returns `LazyLogits`. It has the shape
and dtype of the logits, but holds the hidden states and the head's weight. Reshaping and indexing tokens, and widening,
are applied to the hidden states; `F.cross_entropy` calls `shardwise.tensor.cross_entropy`. Every other op computes the
logits and gathers them, which is a collective: all ranks must run the same ops.

Logits are those of the weights that they were made with. Without a graph, what is still referenced when the engine's
call ends is settled: this rank's rows are computed, which needs no other rank. Logits of a forward in training stay
deferred, since a script's `outputs` mostly live until after the step; read later, they are refused.

>>> hidden, weight, targets = torch.randn(2, 6, 8), torch.randn(16, 8), torch.zeros(2, 5, dtype=torch.int64)
>>> logits = LazyLogits(hidden, weight, None, LazyLogitsHead(VocabSplit(16)))
>>> shifted = logits[:, :-1].float().reshape(-1, 16)
>>> shifted.is_deferred, shifted.shape
(True, torch.Size([10, 16]))
>>> torch.allclose(F.cross_entropy(shifted, targets.view(-1)), F.cross_entropy((hidden @ weight.T)[:, :-1].mT, targets))
True
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwise.comm.collectives import Comm
from shardwise.config.errors import EngineError
from shardwise.models.decoder import lm_loss
from shardwise.runtime.torch_private import plain_torch_functions, pytree, version, wrapper_like
from shardwise.tensor import collectives
from shardwise.tensor.cross_entropy import TokenLossTerms, VocabSplit, cross_entropy, cross_entropy_sum

_LOG: Final = logging.getLogger("shardwise")
# The attribute of a head's module that is its `LazyLogitsHead`, or has it as `head`.
HEAD_STATE: Final = "_shardwise_head"


class LazyLogitsHead:
    """Holds what all logits of one head share: how its rows are split, and which update its weights have had.

    Args:
        vocab: how the rows are split over the ranks.
        name: of the head's module, for the message.

    Attributes:
        num_updates: how often the weights have changed.
    """

    def __init__(self, vocab: VocabSplit, name: str = "head") -> None:
        self.vocab = vocab
        self.name = name
        self.num_updates = 0
        self._has_warned = False
        self._unsettled: list[weakref.ref[LazyLogits]] = []

    def await_end(self, logits: LazyLogits) -> None:
        """Remember logits without a graph until `settle`."""
        self._unsettled.append(weakref.ref(logits))

    def note_update(self) -> None:
        """Note that the weights are about to change."""
        self.num_updates += 1
        self._unsettled.clear()

    def settle(self) -> None:
        """Compute this rank's rows of the logits without a graph that are still referenced."""
        unsettled, self._unsettled = self._unsettled, []
        for reference in unsettled:
            logits = reference()
            if logits is not None:
                logits.settle()

    def warn(self, operation: str, shape: Sequence[int]) -> None:
        """Warn once, on the group's first rank, that `operation` makes the logits be computed and gathered."""
        is_first = self.vocab.comm is None or self.vocab.comm.rank == 0
        if is_first and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "%s reads the logits of %s, so from now on full logits (here %s) are %s; take the loss from "
                "F.cross_entropy, and read logits under torch.no_grad()",
                *(operation, self.name, " x ".join(map(str, shape))),
                "computed" if self.vocab.comm is None else "computed and gathered on every rank",
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> LazyLogitsHead:
        """Return the object itself: a copied model's head uses the same ranks."""
        return self


@dataclass(frozen=True)
class _LogitsSource:
    """Holds the inputs of logits, the dim that is the vocabulary, and whether the logits have a graph."""

    hidden: Tensor  # [..., E]
    weight: Tensor  # [v, E]
    bias: Tensor | None  # [v]
    head: LazyLogitsHead
    dtype: torch.dtype
    vocab_dim: int
    is_recorded: bool
    made_of: tuple[int, ...]  # the state of the weights

    @property
    def is_stale(self) -> bool:
        """Say whether the weights have changed since the logits were made."""
        return self.made_of != weights_state(self.weight, self.bias, self.head)

    @property
    def shape(self) -> list[int]:
        shape = list(self.hidden.shape[:-1])
        shape.insert(self.vocab_dim, self.head.vocab.size)
        return shape

    @property
    def has_vocab_last(self) -> bool:
        return self.vocab_dim == self.hidden.dim() - 1

    @property
    def keeps_graph(self) -> bool:
        """Return whether a result computed from the logits now has a graph."""
        return self.is_recorded and torch.is_grad_enabled()

    def derive(self, **changed: Any) -> LazyLogits:
        """Return logits whose source differs in these fields."""
        return LazyLogits._standing_for(replace(self, is_recorded=self.keeps_graph, **changed))

    def losses(self, target: Tensor, terms: TokenLossTerms, is_summed: bool) -> tuple[Tensor, Tensor | None]:
        """Return the loss of all tokens and None; or that of each, flat, and its entropy."""
        self._check()
        hidden, targets = self.hidden.reshape(-1, self.hidden.shape[-1]), target.flatten()  # [N, E], [N]
        with torch.set_grad_enabled(self.keeps_graph):
            common = (hidden, self.weight, self.bias, targets, self.head.vocab, terms, self.dtype)
            return (cross_entropy_sum(*common), None) if is_summed else cross_entropy(*common)

    def own_rows(self) -> Tensor:
        """Return the logits of this rank's rows, [..., v]."""
        self._check()
        return F.linear(self.hidden, self.weight, self.bias)

    def gather(self, own: Tensor) -> Tensor:
        """Return all logits, of all ranks' rows."""
        vocab = self.head.vocab
        logits = own if vocab.comm is None else _GatherVocab.apply(own, vocab, vocab.comm)  # [..., V]
        return logits.movedim(-1, self.vocab_dim).to(self.dtype)

    def _check(self) -> None:
        if self.is_stale:
            raise EngineError(
                "logits-stale",
                f"logits of {self.head.name} are read after its weights have changed (a step, load or write), and were "
                "not computed before; keep logits.detach(), or what is read of them, in place of the logits",
            )


def deferring_heads(model: nn.Module) -> tuple[LazyLogitsHead, ...]:
    """Return what the heads of a model share with the logits that they defer."""
    states = [vars(module).get(HEAD_STATE) for module in model.modules()]
    found = [state if isinstance(state, LazyLogitsHead) else getattr(state, "head", None) for state in states]
    return tuple(dict.fromkeys(head for head in found if head is not None))


def settle_all(heads: Sequence[LazyLogitsHead]) -> None:
    """Settle the logits of heads."""
    for head in heads:
        head.settle()


def weights_state(weight: Tensor, bias: Tensor | None, head: LazyLogitsHead) -> tuple[int, ...]:
    """Return numbers that differ once the engine, or other code in place, has written a head's `weight` or `bias`."""
    with plain_torch_functions():  # a parameter that is released reports its uses
        return head.num_updates, version(weight), 0 if bias is None else version(bias)


class LazyLogits(Tensor):
    """Stands for `hidden @ weight.T + bias` with all ranks' rows, [..., V]; see the module's example.

    Args:
        hidden: [..., E], the same on all ranks; its gradient here is this rank's part, so it must be the output of an
            identity whose backward sums over the ranks.
        weight: [v, E], this rank's rows, padding included.
        bias: [v], of the same rows; None for none.
    """

    _source: _LogitsSource | None
    _own: Tensor | None  # settled: the logits of this rank's rows
    _full: Tensor | None
    _seen: int

    @staticmethod
    def __new__(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: LazyLogitsHead) -> Self:
        needs_graph = any(each is not None and each.requires_grad for each in (hidden, weight, bias))
        is_recorded = torch.is_grad_enabled() and needs_graph
        source = _LogitsSource(
            *(hidden, weight, bias, head, hidden.dtype),
            vocab_dim=hidden.dim() - 1,
            is_recorded=is_recorded,
            made_of=weights_state(weight, bias, head),
        )
        return cls._standing_for(source)

    @classmethod
    def _standing_for(cls, source: _LogitsSource) -> Self:
        with torch.set_grad_enabled(source.is_recorded):
            logits: Self = _LogitsPlaceholder.apply(cls, source, source.hidden, source.weight, source.bias)
        logits._source, logits._own, logits._full, logits._seen = source, None, None, 0
        if not torch.is_grad_enabled():
            source.head.await_end(logits)
        return logits

    @property
    def is_deferred(self) -> bool:
        """Return whether a cross entropy works without the logits; false once they were changed in place or hooked."""
        source, full = self._source, self._full
        if source is None or self._own is not None:
            return False
        if full is not None and (version(full) != self._seen or source.is_stale):  # written through a view of them
            self._source = None
        return self._source is not None

    @property
    def deferred_from(self) -> tuple[Tensor, ...]:
        """Return the tensors that are read when the logits are; the first has the logits' graph."""
        source = self._source
        if self._own is not None and self._full is None:
            return (self._own,)
        return (self.compute(),) if source is None else (source.hidden, source.weight)

    def cross_entropy_sum(self, targets: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
        """Return the sum that `shardwise.models.decoder.lm_loss` returns; that function calls this method.

        Args:
            targets: int64, of the logits' shape without the vocabulary.
        """
        source = self._source if self.is_deferred else None
        if source is None or not source.has_vocab_last:
            return lm_loss(self.compute(), targets, label_smoothing=label_smoothing, z_loss=z_loss)[0]
        terms = TokenLossTerms(label_smoothing=label_smoothing, z_loss=z_loss)
        return source.losses(targets, terms, is_summed=True)[0]

    def token_losses(self, targets: Tensor, terms: TokenLossTerms) -> tuple[Tensor, Tensor]:
        """Return the loss and the entropy of each token, flat, as `cross_entropy` does; the vocabulary is in dim -1."""
        source = self._source if self.is_deferred else None
        if source is not None and source.has_vocab_last:
            losses, entropies = source.losses(targets, terms, is_summed=False)
            return losses, cast(Tensor, entropies)
        logits = self.compute().flatten(0, -2)
        return cross_entropy(logits, None, None, targets.flatten(), VocabSplit(logits.shape[-1]), terms)

    def compute(self, for_good: bool = False) -> Tensor:
        """Return the logits as a plain tensor; it is kept for the next call unless it is read without its graph.

        Args:
            for_good: whether every op uses that tensor from now on, cross entropy included, and nothing else is held.
        """
        source, full = self._source, self._full
        if full is None and source is not None:
            is_recorded = source.is_recorded and (for_good or torch.is_grad_enabled())
            with torch.set_grad_enabled(is_recorded):
                full = source.gather(source.own_rows() if self._own is None else self._own)
            self._full, self._seen = (full if is_recorded == source.is_recorded else None), version(full)
            for_good |= full.is_inference()  # torch does not count the writes to such a tensor
        if for_good:
            self._source = self._own = None
        return cast(Tensor, full)  # without a source the full logits exist

    def settle(self) -> None:
        """Compute this rank's rows: from now on other values of the weights change nothing."""
        source = self._source
        if source is not None and self._full is None and self._own is None and not source.is_stale:
            with torch.no_grad():
                self._own = source.own_rows()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _READABLE:
            with plain_torch_functions():
                return func(*args, **kwargs)
        if not args and "input" in kwargs:
            args = (kwargs.pop("input"),)
        name = _name(func)
        is_lazy = args and isinstance(args[0], LazyLogits) and args[0].is_deferred
        source = args[0]._source if is_lazy else None
        if source is not None:
            answer = _deferred(func, name, args[0], source, args[1:], kwargs)
            if answer is not NotImplemented:
                return answer
        args, kwargs = pytree.tree_map(lambda leaf: _computed(leaf, name), (tuple(args), kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares an attribute
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch.no_grad():  # below autograd: what is computed here has no graph
            args, kwargs = pytree.tree_map(lambda leaf: _computed(leaf, str(func)), (tuple(args), dict(kwargs or {})))
            return func(*args, **kwargs)


class _LogitsPlaceholder(torch.autograd.Function):
    """Shows deferred logits to autograd; their graph is that of `hidden`, so a gradient that arrives here raises."""

    @staticmethod
    def forward(ctx: Any, kind: type[LazyLogits], source: _LogitsSource, *read: Tensor | None) -> Tensor:
        return wrapper_like(kind, source.shape, source.dtype, source.hidden.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise EngineError(
            "head-logits-unseen",
            "the head's logits went through code that torch functions do not see (a torch.autograd.Function, vmap, a "
            "checkpoint), which cannot give them gradients; give it logits.compute(), all of them on every rank",
        )


class _GatherVocab(torch.autograd.Function):
    """Gathers all ranks' logits, without padding; the backward is its conjugate, this rank's slice."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, vocab: VocabSplit, comm: Comm) -> Tensor:
        ctx.vocab = vocab
        gathered = collectives.all_gather(comm, own, -1, "gather logits")  # [..., ranks * v]
        return gathered[..., : vocab.size].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        vocab = ctx.vocab
        own = gradient.narrow(-1, vocab.start, vocab.num_own)
        return F.pad(own, (0, vocab.num_rows - vocab.num_own)), None, None


def _computed(leaf: Any, operation: str) -> Any:
    """Return a leaf of an operation's arguments; deferred logits are computed."""
    if not isinstance(leaf, LazyLogits):
        return leaf
    source = leaf._source
    if source is not None and source.is_recorded and torch.is_grad_enabled():
        source.head.warn(operation, leaf.shape)
    is_in_place = operation.endswith("_") and not operation.endswith("__")
    return leaf.compute(for_good=is_in_place or operation in _FOR_GOOD)


def _deferred(
    func: Any, name: str, logits: LazyLogits, source: _LogitsSource, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Return an operation's result without computing the logits, or NotImplemented."""
    if func is F.cross_entropy:
        return _cross_entropy(source, *args, **kwargs)
    if func in _GRAD:
        return None
    if func in _REQUIRES_GRAD:
        return source.is_recorded
    if name == "is_leaf":
        return not source.is_recorded
    if name == "grad_fn":
        return source.hidden.grad_fn if source.is_recorded else None
    if name in ("float", "double", "to"):
        dtype = wide_dtype(name, source.dtype, logits.device, args, kwargs)
        if dtype is None:
            return NotImplemented
        return logits if dtype == source.dtype else source.derive(dtype=dtype)
    order = permutation(name, logits.dim(), args, kwargs)
    if order is not None:
        return _permuted(source, order)
    hidden = follow(name, source.hidden, source.head.vocab.size, args, kwargs) if source.has_vocab_last else None
    if hidden is None:
        return NotImplemented
    if hidden is source.hidden and name == "contiguous":
        return logits
    if isinstance(hidden, Tensor):
        return source.derive(hidden=hidden, vocab_dim=hidden.dim() - 1)
    return tuple(source.derive(hidden=each, vocab_dim=each.dim() - 1) for each in hidden)


def _permuted(source: _LogitsSource, order: list[int]) -> LazyLogits:
    tokens = [dim for dim in range(len(order)) if dim != source.vocab_dim]
    moved = [tokens.index(dim) for dim in order if dim != source.vocab_dim]
    hidden = source.hidden.permute(*moved, len(moved))
    return source.derive(hidden=hidden, vocab_dim=order.index(source.vocab_dim))


def _cross_entropy(
    source: _LogitsSource,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    is_plain = weight is None and size_average is None and reduce is None and target.dtype == torch.int64
    fits = source.vocab_dim == min(1, source.hidden.dim() - 1) and target.shape == source.hidden.shape[:-1]
    if not (is_plain and fits and reduction in ("mean", "sum", "none")):
        return NotImplemented
    terms = TokenLossTerms(ignore_index, label_smoothing)
    loss, _ = source.losses(target, terms, is_summed=reduction != "none")
    if reduction == "none":
        loss = loss.view(target.shape)
    if reduction == "mean":
        num_targets = (target != ignore_index).sum()
        # As in torch, over no targets the mean is NaN and its gradients are 0.
        loss = (loss / num_targets.clamp(min=1)).where(num_targets > 0, torch.nan)
    return loss.to(source.dtype)


def _name(func: Any) -> str:
    """Return a function's name: `view` for `Tensor.view`, `mT` for the property `Tensor.mT`."""
    name = getattr(func, "__name__", str(func))
    return getattr(func.__self__, "__name__", name) if name in ("__get__", "__set__") else name


# These need no source: the wrapper answers them.
_READABLE: Final = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
        *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized")),
        *(
            getattr(Tensor, name)
            for name in ("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride")
        ),
        *(getattr(Tensor, name) for name in ("is_floating_point", "is_complex", "get_device", "__len__", "__hash__")),
        *(torch.is_floating_point, torch.is_complex, torch.numel),
    }
)
# Getters: the setters have the same names.
_GRAD: Final = frozenset({getattr(Tensor, "grad").__get__})  # noqa: B009  # to mypy it is no property
_REQUIRES_GRAD: Final = frozenset({getattr(Tensor, "requires_grad").__get__})  # noqa: B009
# After these, and after names with a trailing underscore, a cross entropy must use the changed logits.
_FOR_GOOD: Final = frozenset(
    {
        *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "requires_grad", "data"),
        *("register_hook", "retain_grad"),
    }
)

Args = Sequence[Any]
Kwargs = Mapping[str, Any]


def follow(name: str, hidden: Tensor, num_vocab: int, args: Args, kwargs: Kwargs) -> Tensor | tuple[Tensor, ...] | None:
    """Return the hidden states [..., E] of an operation's result on the logits; None if it changes the vocabulary dim.

    Args:
        name: of a function of torch, or method of a tensor.
        args: of the call, without the logits.
    """
    if name in _DIM_POSITION:
        return _along_dim(name, hidden, args, dict(kwargs))
    operation = _OPERATIONS.get(name)
    return None if operation is None else operation(hidden, num_vocab, args, kwargs)


def permutation(name: str, num_dims: int, args: Args, kwargs: Kwargs) -> list[int] | None:
    """Return the order of dims that `transpose`, `permute` or `mT` makes, or None where it is none of them.

    Args:
        name: of a function of torch, or method of a tensor.
        args: of the call, without the tensor.
    """
    order = list(range(num_dims))
    if name == "mT" and num_dims >= 2:
        return [*order[:-2], order[-1], order[-2]]
    if name == "permute":
        dims = kwargs.get("dims", args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
        return [dim % num_dims for dim in dims]
    if name in ("transpose", "swapaxes") and len(args) == 2 and all(isinstance(each, int) for each in args):
        first, second = args
        order[first], order[second] = order[second], order[first]
        return order
    return None


def wide_dtype(name: str, dtype: torch.dtype, device: torch.device, args: Args, kwargs: Kwargs) -> torch.dtype | None:
    """Return the dtype that `float`, `double` or `to` asks for: `dtype` as it is, fp32 or fp64; None for any other
    request.

    Args:
        device: of the tensor; another one in the call gives None.
        args: of the call, without the tensor.
    """
    wanted = {"float": torch.float32, "double": torch.float64}.get(name, dtype if name == "to" else None)
    for each in (*args, *kwargs.values()):
        if isinstance(each, Tensor):
            wanted, each = each.dtype, each.device
        if isinstance(each, torch.dtype):
            wanted = each
        elif isinstance(each, str | torch.device):
            if torch.device(each) not in (device, torch.device(device.type)):
                return None
        elif not isinstance(each, bool | torch.memory_format | None):
            return None
    return wanted if wanted in (dtype, torch.float32, torch.float64) else None


def _reshape(hidden: Tensor, num_vocab: int, args: Args, kwargs: Kwargs) -> Tensor | None:
    given = kwargs.get("shape", kwargs.get("size", args[0] if len(args) == 1 else args))
    shape = [given] if isinstance(given, int) else given
    if not isinstance(shape, Sequence) or not shape or not all(isinstance(size, int) for size in shape):
        return None
    *tokens, last = shape
    if last != num_vocab and not (last == -1 and math.prod(tokens) == math.prod(hidden.shape[:-1])):
        return None
    return hidden.reshape(*tokens, hidden.shape[-1])


def _flatten(hidden: Tensor, num_vocab: int, args: Args, kwargs: Kwargs) -> Tensor | None:
    dims = dict(zip(("start_dim", "end_dim"), args, strict=False)) | dict(kwargs)
    end = dims.get("end_dim", -1) % hidden.dim()
    return hidden.flatten(dims.get("start_dim", 0), end) if end < hidden.dim() - 1 else None


def _index(hidden: Tensor, num_vocab: int, args: Args, kwargs: Kwargs) -> Tensor | None:
    index = args[0] if isinstance(args[0], tuple) else (args[0],)
    is_dots = [each is Ellipsis for each in index]
    counts = [_num_indexed(each) for each in index]
    if sum(is_dots) > 1 or None in counts:
        return None
    num_indexed = sum(count or 0 for count in counts)
    has_last = num_indexed == hidden.dim() or (any(is_dots) and not is_dots[-1])
    if not has_last:
        return hidden[index]
    last = index[-1]
    if not isinstance(last, slice) or last.indices(num_vocab) != (0, num_vocab, 1):
        return None
    return hidden[(*index[:-1], slice(None))]


def _num_indexed(index: Any) -> int | None:
    """Return the number of dims that one part of an index covers; None for a part that is left to torch."""
    if index is None or index is Ellipsis:
        return 0
    if isinstance(index, bool):
        return None
    if isinstance(index, int | slice):
        return 1
    if isinstance(index, Tensor):
        return index.dim() if index.dtype in (torch.bool, torch.uint8) else 1
    return None


def _along_dim(name: str, hidden: Tensor, args: Args, kwargs: dict[str, Any]) -> Any:
    position, default = _DIM_POSITION[name]
    dim = kwargs.pop("dim", args[position] if len(args) > position else default)
    if not isinstance(dim, int):
        return None
    num_dims = hidden.dim() + (name == "unsqueeze")
    if dim % num_dims >= num_dims - 1:
        return None
    given = (*args[:position], *args[position + 1 :]) if len(args) > position else args
    return getattr(hidden, name)(*given[:position], dim % num_dims, *given[position:], **kwargs)


def _same(hidden: Tensor, num_vocab: int, args: Args, kwargs: Kwargs) -> Tensor:
    return hidden


# The position of `dim` among the arguments after the tensor, and its default.
_DIM_POSITION: Final[Mapping[str, tuple[int, int | None]]] = {
    "narrow": (0, None),
    "select": (0, None),
    "index_select": (0, None),
    "squeeze": (0, None),
    "unsqueeze": (0, None),
    "unbind": (0, 0),
    "split": (1, 0),
    "chunk": (1, 0),
}
_OPERATIONS: Final[Mapping[str, Callable[[Tensor, int, Args, Kwargs], Tensor | None]]] = {
    "view": _reshape,
    "reshape": _reshape,
    "flatten": _flatten,
    "__getitem__": _index,
    "contiguous": _same,
    "clone": _same,
}
