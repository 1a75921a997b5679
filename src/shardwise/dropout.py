"""Keyed dropout: every layout draws the numbers that one process draws for the whole model and batch.

A bit of a mask is a hash of (run seed, step, site, number of the call) and (global sample, index in the unsplit
tensor), in integers only, so that ranks, devices and dtypes agree. A site is a module: each `nn.Dropout`, and each
module whose code drops by function, in attention too. They draw so inside `KeyedDraws.at` and in the recomputations of
such a forward; elsewhere, as when a user calls the model, they drop as torch does. So do compiled blocks, into which
the host's part of the key cannot be traced, `nn.MultiheadAttention`, fused attention kernels from outside of torch,
and dropouts of channels; inside `KeyedDraws.at` torch's own generators stand at the same state on all ranks that share
a micro-batch, so that these agree there wherever the tensor is not split.

Half of a tensor, as a second rank holds it, draws as that half of the whole does:

>>> from torch import nn
>>> whole, half, ones = nn.Dropout(0.5), nn.Dropout(0.5), torch.ones(2, 8)
>>> draws = KeyedDraws(seed=0)
>>> undo = [*key_dropouts(whole, draws), *key_dropouts(half, draws, {"": Zone(dim=1, index=1, degree=2)})]
>>> with draws.at(step=0, micro_batch=0, first_sample=0, num_samples=2):
...     expected = whole(ones)
>>> draws.forget()
>>> with draws.at(step=0, micro_batch=0, first_sample=0, num_samples=2):
...     torch.equal(half(ones[:, 4:]), expected[:, 4:])
True
"""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shardwise._torch_private import NO_VALUE_ERRORS
from shardwise.hooks import swap_class
from shardwise.rng import derive_seed, seeded

Undo = Callable[[], None]


@dataclass(frozen=True)
class Zone:
    """Where a rank's part of a split tensor lies.

    Attributes:
        dim: along which the tensor is split; it may be negative.
        index: of this rank's part.
        degree: number of parts, of equal sizes.
    """

    dim: int
    index: int
    degree: int


@dataclass
class _Forward:
    """One forward of the engine, known until the step ends, since its recomputations draw the same.

    Attributes:
        seed: of the run.
        step: in which it runs.
        first_sample: of the step's samples over all ranks and micro-batches, the first that it computes.
        num_samples: that it computes.
        numbers: of the calls of each site, by (site, what torch's generator gave at the call).
        num_calls: of each site.
        grids: the hashes of samples and indices, which all sites share, by (shape, zone, device).
    """

    seed: int
    step: int
    first_sample: int
    num_samples: int
    numbers: dict[tuple[str, int], int] = field(default_factory=dict)
    num_calls: dict[str, int] = field(default_factory=dict)
    grids: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def key(self, site: str) -> tuple[int, int]:
        """Two numbers of 63 bits that name this call of a site, in the forward and in its recomputation alike."""
        # A checkpoint puts the CPU generator back, so a recomputation gets the forward's number here.
        mark = (site, int(torch.randint(2**62, (), device="cpu").item()))
        if mark not in self.numbers:
            self.numbers[mark] = self.num_calls.get(site, 0)
            self.num_calls[site] = self.numbers[mark] + 1
        names = ("dropout", self.step, site, self.numbers[mark])
        return derive_seed(self.seed, *names, "offset"), derive_seed(self.seed, *names, "factor") | 1


class KeyedDraws:
    """The keyed numbers of one run.

    Args:
        seed: of the run.
        device: of the model; its generator is seeded together with the CPU's.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self._seed = seed
        self._device = torch.device(device)
        self._forwards: dict[int, _Forward] = {}

    @contextmanager
    def at(self, step: int, micro_batch: int, first_sample: int, num_samples: int) -> Iterator[None]:
        """Inside the context a forward draws keyed numbers; torch's generators are as before when it ends.

        Args:
            step: whose gradients the forward belongs to.
            micro_batch: the number of the forward in its step; it moves no keyed draw.
            first_sample: the number of its first sample among the step's, over data ranks and micro-batches.
            num_samples: of this forward. Where a tensor's first dim is a multiple of it, each sample has as many rows.
        """
        seed = derive_seed(self._seed, "forward", step, micro_batch, first_sample, num_samples)
        self._forwards.setdefault(seed, _Forward(self._seed, step, first_sample, num_samples))
        with seeded(seed, self._device):
            yield

    def forget(self) -> None:
        """The step has ended: no forward since the last call will be recomputed again."""
        self._forwards.clear()

    @property
    def current(self) -> _Forward | None:
        """The forward that runs or is recomputed; torch's generator knows: each checkpoint saves and restores it."""
        return self._forwards.get(torch.initial_seed()) if self._forwards else None


@dataclass(frozen=True)
class _Site:
    """What a module draws by. It belongs to one module: a copy of that has the attribute too, and draws as torch does.

    Attributes:
        module: whose it is.
        name: of the module, fully qualified.
        draws: of the run.
        zone: of its tensors, None where they are whole.
        rates: names that may be of its rates, on it or on its config, if it drops by function.
    """

    module: weakref.ref[nn.Module]
    name: str
    draws: KeyedDraws
    zone: Zone | None
    rates: tuple[str, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    @classmethod
    def open_for(cls, module: nn.Module) -> _Site | None:
        """A module's site, None where it is to drop as torch does."""
        site = module.__dict__.get(_SITE)
        if site is None or site.module() is not module or site.draws.current is None:
            return None
        return site

    @property
    def is_idle(self) -> bool:
        """Whether all the rates that are known are 0, as in most decoders: its functions need not be watched."""
        module = self.module()
        owners = (module, getattr(module, "config", None))
        found = [getattr(owner, name, None) for owner in owners for name in self.rates]
        known = [each.p if isinstance(each, _DROPOUT_MODULES) else each for each in found]
        numbers = [each for each in known if isinstance(each, int | float)]
        return bool(numbers) and not any(numbers)

    def mask(self, like: Tensor, p: float) -> Tensor | None:
        """What stays of a tensor, as bools of its shape; None where nothing is known of the forward."""
        forward = self.draws.current
        if forward is None:
            return None
        try:
            key = forward.key(self.name)
        except NO_VALUE_ERRORS:  # fake tensors
            return None
        place = (tuple(like.shape), self.zone, like.device)
        if place not in forward.grids:
            forward.grids[place] = _grid(like.shape, self.zone, forward, like.device)
        with torch.no_grad():
            return _hashed_mask(forward.grids[place], key, p).view(like.shape)

    def drop(self, values: Tensor, p: float, inplace: bool = False) -> Tensor:
        """Dropout as torch's, with keyed numbers."""
        mask = self.mask(values, p) if 0.0 < p < 1.0 and values.numel() > 0 else None
        if mask is None:
            return F.dropout(values, p, True, inplace)
        scale = 1.0 / (1.0 - p)
        if inplace:
            return values.mul_(mask.to(values.dtype).mul_(scale))
        dropped: Tensor = _Masked.apply(values, mask, scale)
        return dropped


_SITE: Final = "_shardwise_dropout_site"
_DROPOUT_MODULES: Final = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


class _Masked(torch.autograd.Function):
    """values * mask * scale, which keeps nothing but the mask: one byte an element."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        masked: Tensor = torch.ops.aten.native_dropout_backward(values, mask, scale)
        return masked

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return _Masked.apply(gradients[0], mask, ctx.scale), None, None


def key_dropouts(model: nn.Module, draws: KeyedDraws, zones: Mapping[str, Zone] | None = None) -> list[Undo]:
    """Have a model's dropouts draw keyed numbers.

    To be called before forwards are wrapped for recomputation or compilation, so that these contain what is done here.

    Args:
        model: its modules' names are the names of the sites, so they must be those of the unsplit model.
        draws: of the run.
        zones: by name: a dropout module on split tensors, or a module that drops split tensors by function.

    Returns:
        what takes it back; to be called in reverse order.
    """
    zones = zones or {}
    undo: list[Undo] = []
    kinds: dict[tuple[type[nn.Module], bool], type[nn.Module]] = {}  # shared, as blocks of one class share their code
    for name, module in model.named_modules():
        own = type(module)
        is_plain = own.forward is nn.Dropout.forward
        if not is_plain and name not in zones and not drops_by_function(module):
            continue
        if (own, is_plain) not in kinds:
            kinds[own, is_plain] = _keyed_module(own) if is_plain else _keyed_functions(own)
        rates = () if is_plain else _rate_names(own)
        module.__dict__[_SITE] = _Site(weakref.ref(module), name, draws, zones.get(name), rates)
        undo.append(functools.partial(module.__dict__.pop, _SITE, None))
        undo.append(swap_class(module, kinds[own, is_plain]))
    return undo


def drops_by_function(module: nn.Module) -> bool:
    """Whether a module's own code calls a dropout, or attention with dropout, that is no module of its own.

    It does if its forward, or what that calls of its class and its file, speaks of something with "dropout" or
    "scaled_dot_product_attention" in its name that is not one of its own dropout modules, or passes on an argument of
    such a name. One named too many costs about a microsecond for each call of torch in it. One that calls a dropout
    under another name is not seen, and drops as torch does.
    """
    own = {name for name, child in module.named_children() if isinstance(child, _DROPOUT_MODULES)}
    return any(_speaks_of_dropout(code, own) for code in _reachable(type(module)))


def _speaks_of_dropout(code: CodeType, own: set[str]) -> bool:
    # The names of the arguments of a call are a constant of its code.
    tuples = [constant for constant in code.co_consts if isinstance(constant, tuple)]
    arguments = [each for constant in tuples for each in constant if isinstance(each, str)]
    is_function = "functional" in code.co_names or "F" in code.co_names
    names = [name for name in code.co_names if is_function or name not in own]
    return any("dropout" in name or "scaled_dot_product_attention" in name for name in names + arguments)


def _rate_names(kind: type[nn.Module]) -> tuple[str, ...]:
    names = {name for code in _reachable(kind) for name in code.co_names}
    return tuple(
        sorted(each for each in names if each == "p" or any(part in each for part in ("drop", "prob", "rate")))
    )


def _reachable(kind: type[nn.Module]) -> Iterator[CodeType]:
    """The code of a class's forward and of what it calls of its class and its file; none of torch's."""
    owners = [each for each in kind.__mro__ if not each.__module__.startswith("torch.") and each is not object]
    pending: list[Any] = [vars(owner).get("forward") for owner in owners]
    seen: set[CodeType] = set()
    while pending:
        found = inspect.unwrap(getattr(each, "__func__", each)) if (each := pending.pop()) is not None else None
        if not isinstance(found, FunctionType) or found.__code__ in seen:
            continue
        parts = [found.__code__]
        while parts:  # with the functions inside it
            code = parts.pop()
            seen.add(code)
            yield code
            parts += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
            for name in code.co_names:
                pending += [vars(owner).get(name) for owner in owners]
                called = found.__globals__.get(name)
                if isinstance(called, FunctionType) and called.__module__ == found.__module__:
                    pending.append(called)


def _keyed_module(own: type[nn.Module]) -> type[nn.Module]:
    """A dropout module's class, but drawing by its site."""

    @functools.wraps(own.forward)
    def forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002
        if torch.compiler.is_compiling() or not self.training or (site := _Site.open_for(self)) is None:
            result: Tensor = own.forward(self, input)
            return result
        return site.drop(input, self.p, self.inplace)

    return _subclass(own, forward)


def _keyed_functions(own: type[nn.Module]) -> type[nn.Module]:
    """A module's class, but the dropouts that its forward calls by function draw by its site."""

    @functools.wraps(own.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self.training or (site := _Site.open_for(self)) is None:
            return own.forward(self, *args, **kwargs)
        if site.is_idle:
            return own.forward(self, *args, **kwargs)
        with _KeyedFunctions(site):
            return own.forward(self, *args, **kwargs)

    return _subclass(own, forward)


def _subclass(own: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    names = {"forward": forward, "__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    return type(own.__name__, (own,), names)


class _KeyedFunctions(TorchFunctionMode):
    """Replaces the dropouts among the functions of torch that are called inside it."""

    def __init__(self, site: _Site) -> None:
        super().__init__()
        self._site = site

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _REPLACED:
            return _REPLACED[func](self._site, func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _drop(
    site: _Site,
    func: Any,
    input: Tensor,  # noqa: A002
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    **kwargs: Any,
) -> Tensor:
    """`F.dropout`; `torch.dropout` and `torch.dropout_`, whose third argument is `train`, too."""
    is_training = kwargs.get("train", training)
    return site.drop(input, p, inplace or func is torch.dropout_) if is_training else input


def _attend(
    site: _Site,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Tensor:
    """`F.scaled_dot_product_attention`; with dropout its probabilities are written out, since the kernels' own differ.

    Args:
        site: draws the mask of the probabilities.
        func: torch's function.
        query: [..., H, L, E].
        key: [..., H or its divisor, S, E].
        value: [..., as key, S, V].
        attn_mask: broadcasts to [..., H, L, S]; bool (True: attend) or added to the scores.
        dropout_p: of each probability.
        is_causal: position i attends to the first i + 1.
        kwargs: scale, enable_gqa.

    Returns:
        [..., H, L, V].
    """
    is_refused = is_causal and attn_mask is not None  # by torch, which says so
    if dropout_p == 0.0 or is_refused or query.is_nested:
        return func(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
    if kwargs.get("enable_gqa"):
        num_queries = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(num_queries, dim=-3) for each in (key, value))
    scale = kwargs.get("scale")
    scores = (query @ key.transpose(-2, -1)) * (query.shape[-1] ** -0.5 if scale is None else scale)  # [..., H, L, S]
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()  # [L, S]
    probabilities = _softmax(scores, attn_mask)
    return site.drop(probabilities, dropout_p) @ value


def _softmax(scores: Tensor, attn_mask: Tensor | None) -> Tensor:
    """Softmax in fp32 or more over the last dim; a row in which all is masked gives zeros, as torch's attention does.

    Args:
        scores: [..., L, S].
        attn_mask: broadcasts to it.
    """
    exact = torch.promote_types(scores.dtype, torch.float32)
    if attn_mask is None:
        return scores.softmax(-1, dtype=exact).to(scores.dtype)
    if attn_mask.dtype == torch.bool:
        blocked = ~attn_mask
    else:
        scores, blocked = scores + attn_mask, attn_mask == -math.inf
    finite = scores.masked_fill(blocked, torch.finfo(scores.dtype).min)
    return finite.softmax(-1, dtype=exact).to(scores.dtype).masked_fill(blocked, 0.0)


_REPLACED: Final[Mapping[Any, Callable[..., Tensor]]] = {
    F.dropout: _drop,
    torch.dropout: _drop,
    torch.dropout_: _drop,
    F.scaled_dot_product_attention: _attend,
}

_CHUNK_ELEMENTS: Final = 1 << 16  # on the CPU: 256 KiB of int32, which stay in the cache of a core
_DEVICE_CHUNK_ELEMENTS: Final = 1 << 26  # elsewhere: bounds the memory that a mask takes while it is drawn
# Odd constants of splitmix64 (Steele et al. 2014), as signed numbers.
_GOLDEN: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND: Final = 0x94D049BB133111EB - (1 << 64)


def _mix(numbers: Tensor) -> Tensor:
    """The finaliser of splitmix64 (Steele et al. 2014, figure 17), in place; int64, arithmetic modulo 2^64."""
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        numbers ^= (numbers >> shift) & ((1 << (64 - shift)) - 1)
        numbers *= factor
    numbers ^= (numbers >> 31) & ((1 << 33) - 1)
    return numbers


def _grid(shape: Sequence[int], zone: Zone | None, forward: _Forward, device: torch.device) -> tuple[Tensor, Tensor]:
    """Hashes of the places in a tensor, by their indices in the unsplit one.

    Returns:
        of all indices but the last, flat [rows], int64; of the last, [columns], int32.
    """
    sizes = list(shape) + [1] * max(0, 2 - len(shape))
    starts = [0] * len(sizes)
    num_rows = sizes[0]
    if zone is not None:
        dim = zone.dim % max(1, len(shape))
        starts[dim] = zone.index * sizes[dim]
        num_rows *= zone.degree if dim == 0 else 1
    is_per_sample = num_rows % forward.num_samples == 0
    starts[0] += forward.first_sample * (num_rows // forward.num_samples if is_per_sample else 1)
    spans = [
        torch.arange(start, start + size, device=device) for start, size in zip(starts, sizes, strict=True)
    ]  # int64
    rows = _mix(spans[0].add_(1).mul_(_GOLDEN))
    for span in spans[1:-1]:
        rows = _mix(rows[:, None] + span.add_(1).mul_(_GOLDEN)).reshape(-1)  # [rows so far, size], then flat
    columns = _mix(spans[-1].add_(1).mul_(_GOLDEN)).view(torch.int32)[1::2].contiguous()
    return rows, columns


def _hashed_mask(grid: tuple[Tensor, Tensor], key: tuple[int, int], p: float) -> Tensor:
    """Bools, True with probability 1 - p, one for each place of a grid; [rows, columns].

    A row's 64-bit hash gives an odd factor a and an offset b; an element with the hash e has x = a * e + b and the
    number x (2 x + 1), a permutation of the 32-bit numbers whose upper bits depend on all bits of x (that of RC6).
    """
    rows, columns = grid
    offset, factor = key
    mixed = (rows ^ offset).mul_(factor)
    halves = mixed.view(torch.int32).view(-1, 2)  # [rows, 2]: the lower and the upper bits
    halves[:, 0] ^= halves[:, 1]
    mixed *= _FIRST
    halves[:, 0] ^= halves[:, 1]
    factors, offsets = halves[:, 1:] | 1, halves[:, :1]  # [rows, 1] each
    threshold = min(round((1.0 - p) * 2.0**32) - 2**31, 2**31 - 1)
    mask = torch.empty(len(rows), len(columns), dtype=torch.bool, device=rows.device)  # [rows, columns]
    elements = _CHUNK_ELEMENTS if rows.device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS
    num_rows = max(1, min(len(rows), elements // len(columns)))
    space = torch.empty(num_rows, len(columns), dtype=torch.int32, device=rows.device)  # [rows of a chunk, columns]
    for first in range(0, len(rows), num_rows):
        here = slice(first, first + num_rows)
        numbers = space[: len(factors[here])]  # [rows of this chunk, columns]
        torch.mul(columns, factors[here], out=numbers)
        numbers.add_(offsets[here]).addcmul_(numbers, numbers, value=2)
        torch.lt(numbers, threshold, out=mask[here])
    return mask
