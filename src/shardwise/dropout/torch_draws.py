"""Replaces torch's draws, other than dropout, in the forwards of an engine: each draws the numbers of one process.

A draw from a generator that code names stays that generator's. Where ranks have parts of a tensor, each draws all of it
and takes its own. What cannot be divided, as a permutation of all tokens, is refused by name. `keyed_attention` is
attention whose stored probabilities a site drops: no kernel takes the mask of a keyed dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from shardwise.config.errors import ConfigError
from shardwise.dropout.numbers import MANTISSA_BITS, TensorPlace
from shardwise.runtime.device import number_dtype
from shardwise.runtime.forward_state import note_generator
from shardwise.runtime.torch_private import PRIVATE_DRAWS

Values = Callable[[str, torch.dtype], Tensor]


class Drawing(Protocol):
    """Is where a draw comes from: a module's site."""

    def numbers(self, kind: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Draw numbers for a tensor; the arguments are those of `KeyedDraws.numbers`."""

    def place(self, shape: Sequence[int]) -> TensorPlace:
        """Return where a tensor of this shape is in the unsplit one."""

    def reseeded(self) -> Any:
        """Return a context in which torch's own generators have the numbers of this call."""


def keyed_draw(site: Drawing, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function of `DRAWS` with keyed numbers."""
    generator = kwargs.get("generator")
    if generator is not None:
        note_generator(generator)
        return _from_own(site, func, args, kwargs)
    kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
    return DRAWS[func](site, func, *args, **kwargs)


def seeded_draw(site: Drawing, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function that draws after its code has set torch's seed; the arguments are those of `keyed_draw`."""
    if func in DRAWS:
        return _from_own(site, func, args, kwargs)
    first = args[0] if args and isinstance(args[0], Tensor) else None
    if first is not None and func not in _RECURRENT:
        _check_whole(site, func, first.shape)
    return func(*args, **kwargs)


def seeded_mask(site: Drawing, like: Tensor, p: float) -> Tensor:
    """Draw what a dropout of rate p at `site` keeps of a tensor `like` this, after code has set torch's seed."""
    drawn: Tensor = _from_own(
        site, torch.rand, (tuple(like.shape),), {"dtype": number_dtype(like.device), "device": like.device}
    )
    return drawn >= p


def is_opaque(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Say whether a call of `func` with `args` and `kwargs` draws in a way that only torch's generators reach."""
    if func in _RECURRENT:  # of all arguments the rate alone is a float, and whether the module trains comes next
        rate_index = next((index for index, arg in enumerate(args) if isinstance(arg, float)), None)
        return rate_index is not None and bool(args[rate_index] and args[rate_index + 1])
    return func in _OPAQUE and kwargs.get("generator") is None


def opaque_draw(site: Drawing, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function for which `is_opaque` holds from a key of its own; the arguments are those of `keyed_draw`.

    Raises:
        ConfigError: its tensor is split along the tokens.
    """
    first = args[0] if args and isinstance(args[0], Tensor) else None
    if first is not None and func not in _RECURRENT:
        _check_whole(site, func, first.shape)
    with site.reseeded():
        return func(*args, **kwargs)


def _check_whole(site: Drawing, func: Any, shape: Sequence[int]) -> None:
    if site.place(shape).token_dim is not None:
        raise ConfigError(
            "draw-over-tokens",
            f"torch's {func.__name__} draws for a tensor of shape {tuple(shape)}, of whose tokens this rank has a "
            "part, and no part of it can be drawn alone; draw it from uniform numbers (torch.rand), or set mesh.cp=1 "
            "and tensor.sequence_parallel=false",
        )


def _from_own(site: Drawing, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Draw from a generator of the caller's: all of a tensor of which this rank has some tokens, and take those."""
    shape = _shape_of(func, args, kwargs)
    layout = None if shape is None else site.place(shape)
    if shape is None or layout is None or layout.token_dim is None:
        return func(*args, **kwargs)
    dim, is_factory = layout.token_dim, func in _FACTORIES
    spans = layout.spans[dim]
    if dim == 0:  # the numbers of samples are this forward's own
        first = spans[0][0] - spans[0][0] % layout.sizes[0] if spans else 0
        spans = tuple((start - first, stop - first) for start, stop in spans)
    full_shape = list(shape)
    full_shape[dim] = layout.sizes[dim]
    indices = torch.cat([torch.arange(start, stop) for start, stop in spans])
    if is_factory:
        sizes = {"size": tuple(full_shape)}
        numbers = args[: 0 if func in (torch.rand, torch.randn) else _num_bounds(args)]
        drawn = func(*numbers, **{**kwargs, **sizes})
        return drawn.index_select(dim, indices.to(drawn.device))
    if func in _LIKE:
        drawn = func(args[0].new_empty(full_shape), *args[1:], **kwargs)
        return drawn.index_select(dim, indices.to(drawn.device))
    if func in _IN_PLACE and isinstance(args[0], Tensor) and not any(isinstance(arg, Tensor) for arg in args[1:]):
        target = args[0]
        drawn = func(target.new_empty(full_shape), *args[1:], **kwargs).index_select(dim, indices.to(target.device))
        with torch.no_grad():
            return target.copy_(drawn)
    _check_whole(site, func, shape)
    return func(*args, **kwargs)


def _num_bounds(args: Sequence[Any]) -> int:
    """Return how many of the arguments of `torch.randint` come before the size."""
    return next((index for index, arg in enumerate(args) if not isinstance(arg, int)), len(args))


def _shape_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...] | None:
    if func in (torch.rand, torch.randn):
        return _sizes(args, kwargs)
    if func is torch.randint:
        return tuple(kwargs["size"] if "size" in kwargs else args[_num_bounds(args)])
    if func is torch.randperm:
        return None
    first = args[0] if args else None
    return tuple(first.shape) if isinstance(first, Tensor) else None


def _sizes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    if "size" in kwargs:
        return tuple(kwargs["size"])
    if len(args) == 1 and not isinstance(args[0], int):
        return tuple(args[0])
    return tuple(args)


def _factory(site: Drawing, kind: str, shape: Sequence[int], **options: Any) -> Tensor:
    """Draw a new tensor with the options of `torch.empty`."""
    requires_grad, out = options.pop("requires_grad", False), options.pop("out", None)
    target = torch.empty(tuple(shape), **options) if out is None else out.resize_(tuple(shape))
    return _fill(site, kind, target).requires_grad_(requires_grad)


def _fill(site: Drawing, kind: str, target: Tensor) -> Tensor:
    if target.is_complex():
        parts = torch.view_as_real(target)
        scale = 1.0 if kind == "uniform" else math.sqrt(0.5)
        return torch.view_as_complex(parts.copy_(_numbers(site, kind, parts).mul_(scale)))
    return target.copy_(_numbers(site, kind, target))


def _numbers(site: Drawing, kind: str, like: Tensor) -> Tensor:
    dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
    return site.numbers(kind, like.shape, dtype, like.device)


def _rand(site: Drawing, func: Any, *size: Any, **options: Any) -> Tensor:
    shape = _sizes(size, options)
    options.pop("size", None)
    return _factory(site, "uniform" if func is torch.rand else "normal", shape, **options)


def _rand_like(site: Drawing, func: Any, input: Tensor, **options: Any) -> Tensor:  # noqa: A002
    requires_grad = options.pop("requires_grad", False)
    distribution = "uniform" if func is torch.rand_like else "normal"
    return _fill(site, distribution, torch.empty_like(input, **options)).requires_grad_(requires_grad)


def _integers(site: Drawing, target: Tensor, low: int, high: int) -> Tensor:
    bits = site.numbers("bits", target.shape, torch.int64, target.device)
    return target.copy_(bits.remainder_(max(1, high - low)).add_(low))


def _bounds(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, int]:
    bounds = [*args, *(kwargs.pop(name) for name in ("low", "high") if name in kwargs)]
    return (0, int(bounds[0])) if len(bounds) == 1 else (int(bounds[0]), int(bounds[1]))


def _randint(site: Drawing, func: Any, *args: Any, **options: Any) -> Tensor:
    num = _num_bounds(args)
    size = options.pop("size") if "size" in options else args[num]
    low, high = _bounds(args[:num], options)
    requires_grad, out = options.pop("requires_grad", False), options.pop("out", None)
    options.setdefault("dtype", torch.int64)
    target = torch.empty(tuple(size), **options) if out is None else out.resize_(tuple(size))
    return _integers(site, target, low, high).requires_grad_(requires_grad)


def _randint_like(site: Drawing, func: Any, input: Tensor, *args: Any, **options: Any) -> Tensor:  # noqa: A002
    low, high = _bounds(args, options)
    return _integers(site, torch.empty_like(input, **options), low, high)


def _randperm(site: Drawing, func: Any, n: int, **options: Any) -> Tensor:
    _check_whole(site, func, (n,))
    options.pop("requires_grad", None)
    options.setdefault("dtype", torch.int64)
    out = options.pop("out", None)
    target = torch.empty(n, **options) if out is None else out.resize_(n)
    return target.copy_(site.numbers("bits", (n,), torch.int64, target.device).argsort())


def _normal(site: Drawing, func: Any, mean: Any = 0.0, std: Any = 1.0, size: Any = None, **options: Any) -> Tensor:
    if size is not None:
        return _factory(site, "normal", size, **options).mul_(std).add_(mean)
    mean, std = (value.detach() if isinstance(value, Tensor) else value for value in (mean, std))
    tensors = [value for value in (mean, std) if isinstance(value, Tensor)]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    drawn = _fill(site, "normal", tensors[0].new_empty(shape)) * std + mean
    out = options.get("out")
    return drawn if out is None else out.resize_(shape).copy_(drawn)


def _bernoulli(site: Drawing, func: Any, input: Tensor, p: Any = None, **options: Any) -> Tensor:  # noqa: A002
    made = torch.empty_like(input) if options.get("out") is None else options["out"].resize_(input.shape)
    return _bernoulli_(site, func, made, input if p is None else p)


def _bernoulli_(site: Drawing, func: Any, target: Tensor, p: Any = 0.5) -> Tensor:
    dtype = p.dtype if isinstance(p, Tensor) and p.is_floating_point() else torch.float64
    drawn = site.numbers("uniform", target.shape, torch.float32 if dtype.itemsize < 4 else dtype, target.device)
    return target.copy_(drawn < p)


def _uniform_(site: Drawing, func: Any, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    low, high = _two(args, kwargs, ("from", "to"), (0.0, 1.0))
    return target.copy_(_numbers(site, "uniform", target).mul_(high - low).add_(low))


def _normal_(site: Drawing, func: Any, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    mean, std = _two(args, kwargs, ("mean", "std"), (0.0, 1.0))
    return _fill(site, "normal", target).mul_(std).add_(mean)


def _log_normal_(site: Drawing, func: Any, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    mean, std = _two(args, kwargs, ("mean", "std"), (1.0, 2.0))
    return target.copy_(_numbers(site, "normal", target).mul_(std).add_(mean).exp_())


def _cauchy_(site: Drawing, func: Any, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    median, sigma = _two(args, kwargs, ("median", "sigma"), (0.0, 1.0))
    return target.copy_(_numbers(site, "uniform", target).sub_(0.5).mul_(math.pi).tan_().mul_(sigma).add_(median))


def _exponential_(site: Drawing, func: Any, target: Tensor, lambd: float = 1.0) -> Tensor:
    return target.copy_(_numbers(site, "exponential", target).div_(lambd))


def _geometric_(site: Drawing, func: Any, target: Tensor, p: float) -> Tensor:
    dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
    drawn = site.numbers("exponential", target.shape, dtype, target.device)
    return target.copy_(drawn.div_(-math.log1p(-p)).ceil_().clamp_min_(1.0))


def _random_(site: Drawing, func: Any, target: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    bounds = [*args, *(kwargs[name] for name in ("from", "to") if name in kwargs)]
    if not bounds or bounds[-1] is None:
        is_float = target.is_floating_point()
        top = 2 ** MANTISSA_BITS[target.dtype] + 1 if is_float else 2 if target.dtype == torch.bool else None
        top = min(torch.iinfo(target.dtype).max, 2**63 - 2) + 1 if top is None else top
        bounds = [*bounds[:1], top]
    low, high = (0, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
    return _integers(site, target, int(low or 0), int(high))


def _two(args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str], usual: Sequence[Any]) -> tuple[Any, Any]:
    first, second = (
        args[index] if index < len(args) else kwargs.get(name, usual[index]) for index, name in enumerate(names)
    )
    return first, second


def _multinomial(
    site: Drawing,
    func: Any,
    input: Tensor,  # noqa: A002
    num_samples: int,
    replacement: bool = False,
    **options: Any,
) -> Tensor:
    """Draw indices: without replacement by a race of exponentials (Efraimidis and Spirakis 2006)."""
    layout = site.place(input.shape)
    if layout.token_dim is not None and layout.token_dim == input.dim() - 1:
        _check_whole(site, func, input.shape)
    wide = input.to(number_dtype(input.device))
    if num_samples == 1 or not replacement:
        drawn = site.numbers("exponential", input.shape, wide.dtype, input.device)
        indices = (wide / drawn).topk(num_samples, dim=-1).indices
    else:
        sums = wide.cumsum(-1)
        drawn = site.numbers("uniform", (*input.shape[:-1], num_samples), wide.dtype, input.device)
        indices = torch.searchsorted(sums, drawn * sums[..., -1:], right=True).clamp_max_(input.shape[-1] - 1)
    out = options.get("out")
    return indices if out is None else out.resize_(indices.shape).copy_(indices)


def keyed_rrelu(site: Drawing, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Compute `torch.rrelu`, which draws a slope for each element; the arguments are those of `keyed_draw`."""
    names = ("input", "lower", "upper", "training")
    values = {"lower": 1.0 / 8, "upper": 1.0 / 3, "training": False, **dict(zip(names, args, strict=False)), **kwargs}
    x = values["input"]
    if not values["training"]:
        plain: Tensor = func(*args, **kwargs)
        return plain
    slopes = _numbers(site, "uniform", x).mul_(values["upper"] - values["lower"]).add_(values["lower"])
    slopes = torch.where(x.detach() > 0, torch.ones_like(slopes), slopes)
    return x.mul_(slopes) if func is torch.rrelu_ else x * slopes


def keyed_special_dropout(site: Drawing, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Compute the dropouts of whole channels, and those that keep the mean and deviation of SELU's outputs.

    The arguments are those of `keyed_draw`.
    """
    values = {**dict(zip(("input", "p", "train"), args, strict=False)), **kwargs}
    x, p = values["input"], values["p"]
    if not values["train"] or p == 0 or not x.numel():
        plain: Tensor = func(*args, **kwargs)
        return plain
    name = func.__name__
    shape = x.shape if not name.startswith("feature") else (*x.shape[:2], *[1] * (x.dim() - 2))
    mask = (site.numbers("uniform", shape, number_dtype(x.device), x.device) >= p).to(x.dtype)
    if "alpha" not in name:
        scale = mask if p == 1 else mask.div_(1 - p)
        return x.mul_(scale) if name.endswith("_") else x * scale
    alpha = 1.7580993408473766
    a = 0.0 if p == 1 else ((alpha**2 * p + 1) * (1 - p)) ** -0.5
    shift, scale = (mask - 1) * (alpha * a) + alpha * a * p, mask * a
    return x.mul_(scale).add_(shift) if name.endswith("_") else x * scale + shift


def with_own_body(func: Any) -> Callable[..., Any] | None:
    """Return a function of torch written in Python in which code draws, without its own look at modes; else None.

    Torch shows such a function to a mode as a whole, and runs it with the mode off. Without that look its draws are
    shown one by one.
    """
    if not isinstance(func, FunctionType) or (func.__module__ != "torch.nn.init" and func not in _IN_PYTHON):
        return None
    no = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _never)
    made = FunctionType(func.__code__, {**func.__globals__, **no}, func.__name__, func.__defaults__, func.__closure__)
    made.__kwdefaults__ = func.__kwdefaults__
    return made


def _never(*args: Any) -> bool:
    return False


_FACTORIES: Final = frozenset({torch.rand, torch.randn, torch.randint})
_LIKE: Final = frozenset({torch.rand_like, torch.randn_like, torch.randint_like})
_IN_PLACE: Final = frozenset(
    {
        Tensor.uniform_,
        Tensor.normal_,
        Tensor.log_normal_,
        Tensor.cauchy_,
        Tensor.exponential_,
        Tensor.geometric_,
        Tensor.random_,
        Tensor.bernoulli_,
    }
)
DRAWS: Final[Mapping[Any, Callable[..., Tensor]]] = {
    torch.rand: _rand,
    torch.randn: _rand,
    torch.rand_like: _rand_like,
    torch.randn_like: _rand_like,
    torch.randint: _randint,
    torch.randint_like: _randint_like,
    torch.randperm: _randperm,
    torch.normal: _normal,
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_,
    Tensor.uniform_: _uniform_,
    Tensor.normal_: _normal_,
    Tensor.log_normal_: _log_normal_,
    Tensor.cauchy_: _cauchy_,
    Tensor.exponential_: _exponential_,
    Tensor.geometric_: _geometric_,
    Tensor.random_: _random_,
    torch.multinomial: _multinomial,
    Tensor.multinomial: _multinomial,
}
SPECIAL: Final[Mapping[Any, Callable[..., Tensor]]] = {
    torch.rrelu: keyed_rrelu,
    torch.rrelu_: keyed_rrelu,
    **dict.fromkeys((torch.feature_dropout, torch.feature_dropout_), keyed_special_dropout),
    **dict.fromkeys((torch.alpha_dropout, torch.alpha_dropout_), keyed_special_dropout),
    **dict.fromkeys((torch.feature_alpha_dropout, torch.feature_alpha_dropout_), keyed_special_dropout),
}
# Forwards are recomputed inside them.
BACKWARDS: Final = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
_IN_PYTHON: Final = frozenset(
    {
        F.gumbel_softmax,
        F.rrelu,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.multi_head_attention_forward,
        *BACKWARDS,
    }
)
_RECURRENT: Final = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
_OPAQUE: Final = frozenset(
    {
        torch.poisson,
        torch.binomial,
        *PRIVATE_DRAWS,
        F.fractional_max_pool2d,
        F.fractional_max_pool3d,
        F.fractional_max_pool2d_with_indices,
        F.fractional_max_pool3d_with_indices,
    }
)


class Dropping(Protocol):
    """Is what drops: a module's site."""

    def drop(self, values: Tensor, p: float, inplace: bool = False) -> Tensor:
        """Apply torch's dropout of rate p to values, in place if `inplace`."""


def keyed_attention(
    site: Dropping,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    **kwargs: Any,
) -> Tensor:
    """Compute `F.scaled_dot_product_attention` with stored probabilities that a site drops.

    Args:
        site: of the module whose forward runs.
        query: [..., H, L, E]; the key is [..., H or a divisor of it, S, E], and the value the same but for V.
        attn_mask: broadcasts to [..., H, L, S]; of bools, True to attend, or added to the scores; None for no mask.
        is_causal: position i attends to the first i + 1.
    """
    if has_torch_function((None,)):  # an outer mode that replaces torch's attention may not need probabilities
        found: Tensor = handle_torch_function(
            keyed_attention, (), site, query, key, value, attn_mask, dropout_p, is_causal, **kwargs
        )
        return found
    if kwargs.get("enable_gqa"):
        num_sharers = query.shape[-3] // key.shape[-3]
        key, value = (each.repeat_interleave(num_sharers, dim=-3) for each in (key, value))
    scale = kwargs.get("scale")
    scaled = query * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scaled @ key.transpose(-2, -1)  # [..., H, L, S]
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()  # [L, S]
    return site.drop(_softmax(scores, attn_mask), dropout_p) @ value


def _softmax(scores: Tensor, attn_mask: Tensor | None) -> Tensor:
    """Compute softmax over the last dim of [..., L, S]; rows that are all masked give 0, as in torch's attention."""
    if attn_mask is None:
        return scores.softmax(-1)
    if attn_mask.dtype == torch.bool:
        blocked = ~attn_mask
    else:
        scores, blocked = scores + attn_mask, attn_mask == -math.inf
    finite = scores.masked_fill(blocked, torch.finfo(scores.dtype).min)
    return finite.softmax(-1).masked_fill(blocked, 0.0)
