"""Shard single parameters before there is an engine, and gather them for a while.

A sharded parameter is on meta, so it has its shape and dtype and no memory. Beside it is a `ParamShard`: this rank's slice
of the flattened values, as long on every rank. Rank 0's values are everybody's.

>>> weight = torch.nn.Parameter(torch.ones(2, 3))
>>> with gathered([weight], modifier_rank=0):  # does nothing to a parameter that is whole
...     torch.nn.init.zeros_(weight)
Parameter containing:
tensor([[0., 0., 0.],
        [0., 0., 0.]], requires_grad=True)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn, cast

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import Comm
from shardwise.config.resolve import ConfigError
from shardwise.runtime.param_guard import READABLE, ReleasedParameterError, set_parameter_class
from shardwise.runtime.torch_private import HAS_COMPATIBLE_TYPE, plain_torch_functions, pytree, set_data, version

_VALUES: Final = "_shardwise_values"
# Makes sharded parameters whole that the model's constructor uses; None outside of `shardwise.init()`.
USE_INSIDE_INIT: Final[ContextVar[Callable[[Sequence[nn.Parameter]], None] | None]] = ContextVar("init", default=None)


@dataclass(frozen=True)
class ParamShard:
    """Holds this rank's slice of a parameter.

    Attributes:
        comm: the ranks that hold the slices.
        local: 1-D, as long on every rank; the last ranks' may be padded.
    """

    comm: Comm
    local: Tensor

    @classmethod
    def of(cls, comm: Comm, whole: Tensor) -> ParamShard:
        """Cut this rank's slice out of the whole values, into memory of its own."""
        flat = whole.reshape(-1)
        size = -(-flat.numel() // comm.world_size)
        local = torch.zeros(size, dtype=flat.dtype, device=flat.device)
        own = flat[comm.rank * size : (comm.rank + 1) * size]
        local[: own.numel()].copy_(own)
        return cls(comm, local)

    def gather(self, shape: torch.Size) -> Tensor:
        """Return the whole values, where the slice is; all ranks call it."""
        size, device = self.local.numel(), self.comm.device
        full = torch.empty(size * self.comm.world_size, dtype=self.local.dtype, device=device)
        full[self.comm.rank * size : (self.comm.rank + 1) * size].copy_(self.local)
        self.comm.all_gather(full, "values of a parameter", stream=None).wait()
        return full[: shape.numel()].view(shape).to(self.local.device)


@dataclass
class KeyedValues:
    """Says that a parameter's values are drawn later, keyed by a seed and its name, and counts who has written it.

    Attributes:
        seed: of the `shardwise.init(seed)` that built the parameter.
        num_more: writes that the tensor itself does not count; taking `data` is taken for one.
        num_built: writes by the constructor of its module; None while that runs.
        num_inside: writes inside the block; None while it runs.
    """

    seed: int
    num_more: int = 0
    num_built: int | None = None
    num_inside: int | None = None


class ShardedParameter(nn.Parameter):
    """Is a parameter on meta whose values are elsewhere. Inside `shardwise.init()` a use of it makes it whole first."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == _SET_DATA and isinstance(args[0], ShardedParameter):
            return _replace_data(args[0], args[1])
        if (
            func in _WHERE
            and USE_INSIDE_INIT.get() is not None
            and isinstance(values := values_of(args[0]), ParamShard)
        ):
            with plain_torch_functions():
                return func(values.local)  # much code leaves tensors alone that are on meta
        if func not in READABLE and func not in _ON_META:
            leaves = pytree.tree_leaves((args, kwargs))
            _prepare([leaf for leaf in leaves if isinstance(leaf, ShardedParameter)], func)
        with plain_torch_functions():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        with plain_torch_functions():
            copied = nn.Parameter(torch.empty_like(self), self.requires_grad)
        values = values_of(self)
        if isinstance(values, ParamShard):
            values = ParamShard(values.comm, values.local.clone())
        elif isinstance(values, KeyedValues):
            values = replace(values, num_more=num_writes(self))
        mark(copied, values)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse(self)


def values_of(parameter: Tensor) -> ParamShard | KeyedValues | None:
    """Return where the values of a parameter are that was built inside `shardwise.init()`; None for any other."""
    return cast("ParamShard | KeyedValues | None", parameter.__dict__.get(_VALUES))


def defer(parameter: nn.Parameter, seed: int) -> None:
    """Move a parameter to meta; its values are drawn later."""
    set_data(parameter, _on_meta(parameter))
    mark(parameter, KeyedValues(seed))


def shard(parameter: nn.Parameter, comm: Comm, takes_first: bool) -> None:
    """Keep this rank's slice of a whole parameter.

    Args:
        parameter: a plain one, with values.
        comm: the ranks that share it.
        takes_first: rank 0's values are everybody's, so all ranks call it; else each rank takes its own.
    """
    whole = parameter.detach()
    if takes_first:
        sent = whole.to(comm.device).contiguous()
        comm.broadcast(sent.view(-1), "values of a parameter")
        whole = sent.to(whole.device)
    values = ParamShard.of(comm, whole)
    del whole
    set_data(parameter, _on_meta(parameter))
    mark(parameter, values)


def unshard(parameter: nn.Parameter) -> None:
    """Make a sharded parameter a plain one with all of its values; all ranks call it."""
    values = values_of(parameter)
    assert isinstance(values, ParamShard), "only such a parameter is unsharded"
    whole = values.gather(parameter.shape)
    set_parameter_class(parameter, nn.Parameter)
    set_data(parameter, whole)


def mark(parameter: nn.Parameter, values: ParamShard | KeyedValues | None) -> None:
    """Make a parameter on meta a sharded one, whose values are there."""
    setattr(parameter, _VALUES, values)
    set_parameter_class(parameter, ShardedParameter)


def make_plain(parameter: nn.Parameter) -> None:
    """Forget where a parameter's values are: what holds it now has them, or none are needed."""
    if isinstance(parameter, ShardedParameter):
        set_parameter_class(parameter, nn.Parameter)
    parameter.__dict__.pop(_VALUES, None)


@contextmanager
def gathered(parameters: Iterable[nn.Parameter] | nn.Parameter, modifier_rank: int | None = None) -> Iterator[None]:
    """Make parameters whole inside the context that were built as shards inside `shardwise.init()`.

    All ranks enter it with the same parameters, and leave it. It may be nested. What is written is kept at its end;
    after an exception the parameters are as before, if this context has gathered them. An engine's parameters are
    whole in `engine.gathered()`.

    Args:
        parameters: one, or any number of them; those that are whole already stay so.
        modifier_rank: 0 if rank 0 alone writes: its values are everybody's. None if all ranks write the same.

    Raises:
        ConfigError: `modifier_rank` is another rank.
    """
    if modifier_rank not in (None, 0):
        raise ConfigError("modifier-rank", f"modifier_rank={modifier_rank} cannot write for all; write on rank 0")
    given = [parameters] if isinstance(parameters, nn.Parameter) else parameters
    shared = {id(each): each for each in given if isinstance(values_of(each), ParamShard)}.values()
    sharded = [each for each in shared if isinstance(each, ShardedParameter)]
    for parameter in sharded:
        unshard(parameter)
    try:
        yield
    except BaseException:
        for parameter in sharded:
            set_data(parameter, _on_meta(parameter))
            mark(parameter, values_of(parameter))
        raise
    for each in shared:
        values = values_of(each)
        if not isinstance(values, ParamShard) or isinstance(each, ShardedParameter):
            continue  # an engine has taken it over, or a block inside has sharded it
        if any(each is own for own in sharded):
            shard(each, values.comm, takes_first=modifier_rank is not None)
        elif modifier_rank is not None:
            values.comm.broadcast(each.detach().view(-1), "values of a parameter")


def num_writes(parameter: nn.Parameter) -> int:
    """Return how often a parameter with keyed values was written."""
    values = values_of(parameter)
    return version(parameter) + (values.num_more if isinstance(values, KeyedValues) else 0)


def _on_meta(parameter: nn.Parameter) -> Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")


def _prepare(parameters: list[ShardedParameter], func: Any) -> None:
    """Let a function have the values of sharded parameters; keyed ones have none, and count what may write them."""
    shards: list[nn.Parameter] = []
    for parameter in parameters:
        values = values_of(parameter)
        if isinstance(values, KeyedValues):
            values.num_more += func == _GET_DATA
        else:
            shards.append(parameter)
    make_whole = USE_INSIDE_INIT.get()
    if shards and make_whole is None:
        _refuse(shards[0])
    if shards and make_whole is not None:
        make_whole(shards)


def _replace_data(parameter: ShardedParameter, data: Tensor) -> None:
    """Give a parameter other data: what a cast makes of one on meta is a cast of its slice."""
    values = values_of(parameter)
    if data is parameter:
        return  # a cast that changes nothing
    if not isinstance(data, ShardedParameter) and data.is_meta and isinstance(values, ParamShard):
        mark(parameter, ParamShard(values.comm, values.local.to(data.dtype)))
    elif isinstance(data, ShardedParameter) or (USE_INSIDE_INIT.get() is not None and isinstance(values, ParamShard)):
        _prepare([each for each in (parameter, data) if isinstance(each, ShardedParameter)], _SET_DATA)
    elif not data.is_meta:
        make_plain(parameter)
    with plain_torch_functions():
        set_data(parameter, data)


def _refuse(parameter: nn.Parameter) -> NoReturn:
    raise ReleasedParameterError(
        "parameter-sharded",
        f"of this parameter of shape {tuple(parameter.shape)} each rank holds a slice; "
        "use it in `with shardwise.gathered(parameters):`, or give its model to shardwise.initialize",
    )


_GET_DATA: Final = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA: Final = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_WHERE: Final = frozenset(getattr(torch.Tensor, name).__get__ for name in ("device", "is_meta", "is_cpu", "is_cuda"))
# What `Module.to`, `Module.half` and the like, and `Module.to_empty`, do to a parameter: done to its slice as well.
_ON_META: Final = frozenset(
    {
        *(Tensor.to, Tensor.double, Tensor.float, Tensor.half, Tensor.bfloat16),
        *(torch.empty_like, HAS_COMPATIBLE_TYPE),
    }
)
