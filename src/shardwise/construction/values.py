"""Read the initial values of a model's parameters, one at a time, wherever they are.

>>> model = nn.Linear(2, 3, device="meta")
>>> ParamInitializer(model, seed=0).read("weight").shape
torch.Size([3, 2])
"""

from __future__ import annotations

from torch import Tensor, nn

from shardwise.comm.collectives import Comm
from shardwise.config.errors import ConfigError
from shardwise.construction.shards import KeyedValues, ParamShard, make_plain, mark, shard_of, values_of
from shardwise.runtime.keyed_rng import check_initializers, draw_module


class ParamInitializer:
    """Reads the initial values of a model's parameters, one at a time.

    They come from the parameter itself where it is real; from all ranks where each has a slice; else the parameter is
    on meta, and its module draws it, keyed by the seed and the module's name.

    Args:
        model: its parameters may be of all three kinds; buffers must be real.
        seed: of the run; `shardwise.init(seed)` has its own.
        has_values: False where another source gives them later, so that none are needed now.

    Raises:
        ConfigError: nothing draws a parameter that is on meta, other code has used it, or a buffer is there.
    """

    def __init__(self, model: nn.Module, seed: int, has_values: bool = True) -> None:
        self._model, self._seed, self.has_values = model, seed, has_values
        self._parameters = dict(model.named_parameters())
        self._drawn: tuple[str | None, dict[str, Tensor]] = None, {}  # the last module's
        for name, buffer in model.named_buffers():
            if buffer.is_meta:
                raise ConfigError(
                    "buffer-on-meta",
                    f"buffer {name} is on meta and its values are not known; build the model inside "
                    "`with shardwise.init():`, which keeps buffers real",
                )
        for name, parameter in self._parameters.items() if has_values else ():
            if self.is_same_everywhere(name) and not self.is_sharded(name):
                values = values_of(parameter)
                check_initializers(model, name, values.used_at if isinstance(values, KeyedValues) else "")

    def is_sharded(self, name: str) -> bool:
        """Return whether each rank holds a slice of a parameter, so that all must read it together."""
        return shard_of(self._parameters[name]) is not None

    def is_same_everywhere(self, name: str) -> bool:
        """Return whether every rank reads the same values of a parameter, so that none needs to send them."""
        return self.is_sharded(name) or self._parameters[name].is_meta

    def move(self, name: str, comm: Comm | None) -> None:
        """Share slices of a parameter, which all ranks hold, among those of `comm`; None where this is none of them."""
        parameter, whole = self._parameters[name], self.read(name)
        make_plain(parameter)
        if comm is not None:
            mark(parameter, ParamShard.of(comm, whole, source=None))

    def read(self, name: str) -> Tensor:
        """Return the values of one parameter, of its shape and dtype. Do not write them: they may be its own."""
        parameter = self._parameters[name]
        values, shard = values_of(parameter), shard_of(parameter)
        if shard is not None:
            return shard.gather(parameter.shape).to(parameter.dtype)
        if not parameter.is_meta:
            return parameter.detach()
        module_name, _, own_name = name.rpartition(".")
        if module_name != self._drawn[0]:
            self._drawn = None, {}  # before others are drawn
            seed = values.seed if isinstance(values, KeyedValues) else self._seed
            self._drawn = module_name, draw_module(self._model, module_name, seed)
        return self._drawn[1][own_name].to(parameter.dtype)

    def close(self) -> None:
        """Forget what was drawn, and make parameters plain, which have their values from now on."""
        self._drawn, self.has_values = (None, {}), True
        for parameter in self._parameters.values():
            make_plain(parameter)
