"""Shard single parameters before there is an engine, and gather them for a while.

A sharded parameter is on meta, so it has its shape and dtype and no memory. Beside it is where its values are: in a
`ParamShard`, this rank's slice of the flattened values, as long on every rank; or in a seed, from which they are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NoReturn, cast

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import Comm
from shardwise.comm.consistency import have_same_bits
from shardwise.config.errors import ConfigError
from shardwise.runtime.keyed_rng import other_use
from shardwise.runtime.param_guard import READABLE, ReleasedParameterError
from shardwise.runtime.torch_private import (
    HAS_COMPATIBLE_TYPE,
    plain_torch_functions,
    pytree,
    set_data,
    set_parameter_class,
)

_VALUES: Final = "_shardwise_values"
# Makes sharded parameters whole that the model's constructor uses; None outside of `shardwise.init()`.
USE_INSIDE_INIT: Final[ContextVar[Callable[[Sequence[nn.Parameter]], None] | None]] = ContextVar("init", default=None)


@dataclass(frozen=True)
class KeyedValues:
    """Says that a parameter's values are drawn later, keyed by a seed, unless other code has used it there since."""

    seed: int
    used_at: str = ""


@dataclass(frozen=True)
class ParamShard:
    """Holds this rank's slice of a parameter, 1-D, as long as that of each rank of `comm`; the last may be padded."""

    comm: Comm
    local: Tensor

    @classmethod
    def of(cls, comm: Comm, whole: Tensor, source: int | None) -> ParamShard:
        """Cut this rank's slice out of the whole values, into memory of its own.

        Args:
            comm: the ranks that share the values.
            source: the rank whose values are everybody's, so all ranks call it; None where all have the same.
        """
        sent = whole.reshape(-1) if source is None else whole.to(comm.device).contiguous().view(-1)
        if source is not None:
            comm.broadcast(sent, "values of a parameter", source)
        size = -(-sent.numel() // comm.world_size)
        own = sent[comm.rank * size : (comm.rank + 1) * size]
        return cls(comm, nn.functional.pad(own, (0, size - own.numel())).to(whole.device))

    def gather(self, shape: torch.Size) -> Tensor:
        """Return the whole values, where the slice is; all ranks call it."""
        full = self.local.to(self.comm.device).repeat(self.comm.world_size)
        self.comm.all_gather(full, "values of a parameter", stream=None).wait()
        return full[: shape.numel()].view(shape).to(self.local.device)


class ShardedParameter(nn.Parameter):
    """Is a parameter on meta whose values are elsewhere. Inside `shardwise.init()` a use of it makes it whole first."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _SET_DATA and isinstance(args[0], ShardedParameter):
            return _replace_data(args[0], args[1])
        if func is Tensor.detach and USE_INSIDE_INIT.get() is None and isinstance(values_of(args[0]), ParamShard):
            return args[0]  # for `state_dict()`, of which loaders want names and shapes; its values are still refused
        if func in _WHERE and isinstance(values := values_of(args[0]), ParamShard):
            args = (values.local,)  # much code leaves tensors alone that are on meta, or moves others there
        elif func is Tensor.to and isinstance(values_of(args[0]), ParamShard):
            args, kwargs = _on_meta(args, kwargs or {})
        elif func not in READABLE and func not in _ON_META:
            _prepare(pytree.tree_leaves((args, kwargs)))
        with plain_torch_functions():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        with plain_torch_functions():
            copied = memo[id(self)] = nn.Parameter(torch.empty_like(self), self.requires_grad)
        values = values_of(self)
        mark(copied, ParamShard(values.comm, values.local.clone()) if isinstance(values, ParamShard) else values)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse([self])


def values_of(parameter: Tensor) -> ParamShard | KeyedValues | None:
    """Return where the values of a parameter are that was built inside `shardwise.init()`; None for any other."""
    return cast("ParamShard | KeyedValues | None", getattr(parameter, _VALUES, None))


def shard_of(parameter: Tensor) -> ParamShard | None:
    """Return this rank's slice of a parameter, which is not whole at present."""
    values = values_of(parameter) if isinstance(parameter, ShardedParameter) else None
    return values if isinstance(values, ParamShard) else None


def mark(parameter: nn.Parameter, values: ParamShard | KeyedValues | None) -> None:
    """Make a parameter a sharded one, which is on meta and whose values are there."""
    if not isinstance(parameter, ShardedParameter):
        set_data(parameter, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
    setattr(parameter, _VALUES, values)
    set_parameter_class(parameter, ShardedParameter)


def make_plain(parameter: nn.Parameter) -> None:
    """Forget where a parameter's values are: what holds it now has them, or none are needed."""
    if isinstance(parameter, ShardedParameter):
        set_parameter_class(parameter, nn.Parameter)
    parameter.__dict__.pop(_VALUES, None)


def unshard(parameter: nn.Parameter) -> None:
    """Make a sharded parameter a plain one with all of its values; all ranks call it."""
    if (shard := shard_of(parameter)) is None:
        refuse([parameter])
    whole = shard.gather(parameter.shape)
    set_parameter_class(parameter, nn.Parameter)
    set_data(parameter, whole)


@contextmanager
def gathered_shards(parameters: Sequence[nn.Parameter], source: int | None) -> Iterator[None]:
    """Make slices whole inside the context, and keep what the rank `source` writes there; None for all ranks."""
    shared = dict.fromkeys(parameter for parameter in parameters if isinstance(values_of(parameter), ParamShard))
    sharded = dict.fromkeys(each for each in shared if isinstance(each, ShardedParameter))
    for parameter in sharded:
        unshard(parameter)
    is_kept = False
    try:
        yield
        if source is None:
            _refuse_other_writes(list(sharded))
        is_kept = True
    finally:
        for each in shared:
            values = values_of(each)
            if not isinstance(values, ParamShard) or isinstance(each, ShardedParameter):
                continue  # an engine has taken it over, or a block inside has sharded it
            if each in sharded or (is_kept and source is not None):
                mark(each, ParamShard.of(values.comm, each.detach(), source) if is_kept else values)
                if each not in sharded:
                    unshard(each)  # a block around has gathered it


def _refuse_other_writes(parameters: Sequence[nn.Parameter]) -> None:
    """Raise on all ranks where they have written different values into parameters of which each keeps its slice."""
    by_comm: dict[Comm, list[Tensor]] = {}
    for parameter in parameters:
        values = values_of(parameter)
        if isinstance(values, ParamShard) and not isinstance(parameter, ShardedParameter):
            by_comm.setdefault(values.comm, []).append(parameter.detach().contiguous().view(-1))
    if not all(have_same_bits(comm, flats, "what ranks have written") for comm, flats in by_comm.items()):
        raise other_writes([])


def other_writes(names: Sequence[str]) -> ConfigError:
    """Return the error that says that ranks have written different values and no rank was named."""
    where = f" ({names[0]}{' and others' if len(names) > 1 else ''})" if names else ""
    return ConfigError(
        "gathered-writes-differ",
        f"ranks have written different values into gathered parameters{where}, and modifier_rank is None; write the "
        "same on every rank, or say which rank's values count: modifier_rank=0",
    )


def refuse(parameters: Sequence[nn.Parameter]) -> NoReturn:
    """Raise an error that says why the first of the parameters cannot be used."""
    raise ReleasedParameterError(
        "parameter-sharded",
        f"of this parameter of shape {tuple(parameters[0].shape)} each rank holds a slice; "
        "use it in `with shardwise.gathered(parameters):`, or give its model to shardwise.initialize",
    )


def _prepare(used: Sequence[Any]) -> None:
    """Let a function use parameters: make slices whole inside `init()`, and note the use of those to be drawn."""
    slices = [each for each in used if isinstance(each, ShardedParameter) and shard_of(each) is not None]
    for each in used:
        if isinstance(each, ShardedParameter) and isinstance(values := values_of(each), KeyedValues):
            mark(each, KeyedValues(values.seed, other_use(each)))
    if slices:
        (USE_INSIDE_INIT.get() or refuse)([*slices, *(each for each in used if type(each) is nn.Parameter)])


def _on_meta(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of `Tensor.to` without a device: dtypes alone count until an engine takes the slices."""

    def stay(value: Any) -> Any:
        return torch.device("meta") if isinstance(value, torch.device | str) else value

    return [args[0], *map(stay, args[1:])], {name: stay(value) for name, value in kwargs.items()}


def _replace_data(parameter: ShardedParameter, data: Tensor) -> None:
    """Give a parameter other data: what a cast makes of one on meta is a cast of its slice."""
    if data is parameter:
        return  # a cast that changes nothing
    _prepare([data])
    values = values_of(parameter)
    if data.is_meta and isinstance(values, ParamShard):
        mark(parameter, ParamShard(values.comm, values.local.to(data.dtype)))
    elif isinstance(values, ParamShard) and USE_INSIDE_INIT.get():
        _prepare([parameter])
    elif not data.is_meta:
        make_plain(parameter)
    with plain_torch_functions():
        set_data(parameter, data)


_SET_DATA: Final = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_WHERE: Final = frozenset(getattr(torch.Tensor, name).__get__ for name in ("device", "is_meta", "is_cpu", "is_cuda"))
# What `Module.to`, `Module.half` and the like, and `Module.to_empty`, do to a parameter: done to its slice as well.
_ON_META: Final = frozenset(
    {*(Tensor.to, Tensor.double, Tensor.float, Tensor.half, Tensor.bfloat16), torch.empty_like, HAS_COMPATIBLE_TYPE}
)
