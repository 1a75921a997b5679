"""Read the initial values of a model's parameters, one at a time, wherever they are.

>>> import torch
>>> model = torch.nn.Linear(2, 3, device="meta")
>>> ParamInitializer(model, seed=0).read("weight").shape
torch.Size([3, 2])
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch.distributed as dist
from torch import Tensor, nn

from shardwise.comm.collectives import Comm
from shardwise.config.resolve import ConfigError
from shardwise.construction.shards import (
    KeyedValues,
    ParamShard,
    ShardedParameter,
    make_plain,
    mark,
    num_writes,
    values_of,
)
from shardwise.runtime.keyed_rng import check_initializers, count_draws, draw_module

_BLANK: Final = "_shardwise_blank"


class ParamInitializer:
    """Reads the initial values of a model's parameters, one at a time, and forgets them once they are taken over.

    They come from the parameter itself where it is real; from all ranks where each has a slice; else the parameter is
    on meta, and its module draws it, keyed by the seed and the module's name.

    Args:
        model: its parameters may be of all three kinds; buffers must be real.
        seed: of the run; `shardwise.init(seed)` has its own.

    Raises:
        ConfigError: a parameter has no values, or other ones than its module draws, or a buffer is on meta.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model = model
        self._seed = seed
        self._parameters = dict(model.named_parameters())
        self._aliases = _find_aliases(model, self._parameters)
        self._given: dict[str, Tensor] = {}
        shards = {name: held for name in self._parameters if (held := self._shard_of(name)) is not None}
        num_ranks = dist.get_world_size() if shards else 0
        self._same = {name for name, held in shards.items() if held.comm.world_size == num_ranks}
        self._drawn_module = ""
        self._drawn: dict[str, Tensor] = {}
        for name, buffer in model.named_buffers():
            if buffer.is_meta:
                raise ConfigError(
                    "buffer-on-meta",
                    f"buffer {name} is on meta and its values are not known; build the model inside "
                    "`with shardwise.init():`, which keeps buffers real",
                )
        self._blank = {name for name, parameter in self._parameters.items() if hasattr(parameter, _BLANK)}
        for name, parameter in self._parameters.items():
            if parameter.is_meta and name not in shards and name not in self._blank:
                self._check(name, parameter)

    def is_blank(self, name: str) -> bool:
        """Return whether a parameter's values come later, from another source, so that none are needed now."""
        return name in self._blank

    def is_sharded(self, name: str) -> bool:
        """Return whether all ranks that hold slices of a parameter must read it together."""
        return self._shard_of(name) is not None

    def is_same_everywhere(self, name: str) -> bool:
        """Return whether every rank reads the same values of a parameter, so that none needs to send them."""
        return name in self._same or (not self.is_sharded(name) and self._parameters[name].is_meta)

    def give(self, name: str, values: Tensor) -> None:
        """Use another rank's values for a parameter at its next read; only that one, so that not all are held twice."""
        self._given[name] = values

    def move(self, name: str, comm: Comm | None) -> None:
        """Share a parameter among other ranks, before it is read. All ranks that have slices now call it.

        Args:
            name: of the parameter.
            comm: all that share it afterwards; None where this rank needs none of it.

        Raises:
            ConfigError: only some ranks of the world share it now, whose values may be others than those of the rest.
        """
        if name not in self._same:
            raise ConfigError(
                "shards-of-some-ranks",
                f"{name} was built inside shardwise.init(group=...) over a part of the ranks, but a pipeline takes "
                "each stage's from all of them; leave out the group",
            )
        parameter, held = self._parameters[name], self._shard_of(name)
        assert held is not None, "the caller has asked is_sharded"
        whole = held.gather(parameter.shape)
        make_plain(parameter)
        if comm is not None:
            mark(parameter, ParamShard.of(comm, whole))

    def read(self, name: str) -> Tensor:
        """Return the values of one parameter, of its shape and dtype. Do not write them: they may be its own."""
        parameter = self._parameters[name]
        if name in self._given:
            return self._given.pop(name)
        held = self._shard_of(name)
        if held is not None:
            return held.gather(parameter.shape).to(parameter.dtype)
        if not parameter.is_meta:
            return parameter.detach()
        module_name, _, own_name = name.rpartition(".")
        if module_name != self._drawn_module or not self._drawn:
            self._drawn.clear()
            self._drawn = draw_module(self._model, module_name, self._seed_of(parameter), name)
            self._drawn_module = module_name
        return self._drawn[own_name].to(parameter.dtype)

    def forget(self, name: str) -> None:
        """Free this rank's slice of a parameter, which has been read for the last time, and make it a plain one."""
        make_plain(self._parameters[name])

    def close(self) -> None:
        """Forget all parameters after they have their values."""
        self._drawn.clear()
        self._given.clear()
        for name in self._parameters:
            self.forget(name)

    def _shard_of(self, name: str) -> ParamShard | None:
        parameter = self._parameters[name]
        values = values_of(parameter) if isinstance(parameter, ShardedParameter) else None
        return values if isinstance(values, ParamShard) else None

    def _seed_of(self, parameter: nn.Parameter) -> int:
        values = values_of(parameter)
        return values.seed if isinstance(values, KeyedValues) else self._seed

    def _check(self, name: str, parameter: nn.Parameter) -> None:
        """Raise if a parameter's module does not draw it, or if other code has written what no drawing repeats."""
        module_name, _, own_name = name.rpartition(".")
        check_initializers(self._model, module_name, name)
        values = values_of(parameter)
        if not isinstance(values, KeyedValues):
            return
        num_now = num_writes(parameter)
        if values.num_inside not in (None, num_now):
            raise ConfigError(
                "written-after-init",
                f"{name} was written after the `with shardwise.init(seed):` block that built it, and has no values "
                "yet; write it in `with engine.gathered(write=True):`, or leave out the seed and write it in the block",
            )
        num_built = num_now if values.num_built is None else values.num_built
        num_reset, num_passes = count_draws(self._model, module_name)[own_name]
        for module_name, _, own_name in (alias.rpartition(".") for alias in self._aliases.get(name, ())):
            num_passes += count_draws(self._model, module_name)[own_name][1]
        if num_now - num_built > num_passes or (num_passes == 0 and num_built > num_reset):
            raise ConfigError(
                "written-by-constructor",
                f"{name} is written by code other than reset_parameters() of its module and _init_weights() of the "
                "model, which a seed does not repeat; leave out the seed: `with shardwise.init():`",
            )


def _find_aliases(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> dict[str, list[str]]:
    """Return the further names of tied parameters, by the first."""
    names = {parameter: name for name, parameter in parameters.items()}
    aliases: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if names[parameter] != name:
            aliases.setdefault(names[parameter], []).append(name)
    return aliases


@contextmanager
def skip_init(model: nn.Module) -> Iterator[None]:
    """Make an engine of the model neither draw nor copy values for its parameters: another source gives them.

    >>> model = nn.Linear(2, 3, device="meta")
    >>> with skip_init(model):
    ...     ParamInitializer(model, seed=0).is_blank("weight")
    True
    """
    for parameter in model.parameters():
        setattr(parameter, _BLANK, True)
    try:
        yield
    finally:
        for parameter in model.parameters():
            parameter.__dict__.pop(_BLANK, None)
