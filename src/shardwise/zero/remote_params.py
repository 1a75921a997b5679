"""Puts parameters on meta that only other ranks of the pipeline hold; using them raises an error.

They are apart from `shardwise.zero.sharding_state`, which only handles parameters that are on this rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from shardwise.config.resolve import ConfigError
from shardwise.layout.layout import Layout
from shardwise.layout.param_groups import GroupSpec
from shardwise.runtime.param_guard import ReleasedParameterError, released_type, set_parameter_class
from shardwise.runtime.precision import torch_dtype
from shardwise.runtime.torch_private import parameter_class, plain_torch_functions, set_data


class RemoteParams:
    """Holds a model's parameters that are not on this rank.

    Args:
        layout: a layout; `elsewhere` has the groups of these parameters.
        held_stages: the stages of this rank, for messages.
    """

    def __init__(self, model: nn.Module, layout: Layout, held_stages: Sequence[int]) -> None:
        specs = layout.elsewhere
        self._specs = {id(model.get_parameter(place.name)): (spec, place) for spec in specs for place in spec.params}
        self._parameters = [model.get_parameter(place.name) for spec in specs for place in spec.params]
        self._kinds = [parameter_class(parameter) for parameter in self._parameters]
        here = ", ".join(map(str, sorted(held_stages)))
        places = self._specs

        def refuse(parameter: nn.Parameter) -> torch.Tensor:
            spec, place = places[id(parameter)]
            stages = ", ".join(map(str, spec.stages))
            raise ReleasedParameterError(
                "parameter-used-off-stage",
                f"parameter {place.name} is of pipeline stage {stages}, but used on a rank with stage {here}; "
                "use it in a module of its own stage, tie it to a parameter of a module that runs here, or name its "
                "module in pipeline.replicate",
            )

        for parameter, kind in zip(self._parameters, self._kinds, strict=True):
            spec, place = places[id(parameter)]
            shape, dtype = place.shape, torch_dtype(layout.precision_of(spec).param)  # models build masks in their own
            if spec.is_opaque:
                shape, dtype = tuple(parameter.shape), parameter.dtype
            parameter.grad = None
            set_data(parameter, torch.empty(shape, dtype=dtype, device="meta"))
            set_parameter_class(parameter, released_type(refuse, kind))

    @property
    def names(self) -> dict[int, str]:
        """Return the parameters' names by their identities."""
        return {key: place.name for key, (_, place) in self._specs.items()}

    def trains(self) -> Iterator[tuple[GroupSpec, bool]]:
        """Return for each parameter its group and its current `requires_grad`."""
        return ((self._specs[id(parameter)][0], parameter.requires_grad) for parameter in self._parameters)

    def follow(self, specs: Sequence[GroupSpec]) -> None:
        """Take over new groups of the same parameters."""
        by_name = {place.name: (spec, place) for spec in specs for place in spec.params}
        for parameter in self._parameters:
            _, place = self._specs[id(parameter)]
            self._specs[id(parameter)] = by_name[place.name]

    def close(self) -> None:
        """Make the parameters plain ones, without values, on meta."""
        for parameter, kind in zip(self._parameters, self._kinds, strict=True):
            set_parameter_class(parameter, kind)
        self._parameters.clear()
        self._specs.clear()


def check_members(model: nn.Module, known: Mapping[int, str]) -> None:
    """Raise if a model's parameters are not those that an engine knows, by their identities.

    Raises:
        ConfigError: names the parameter.
    """
    with plain_torch_functions():
        there = {id(parameter): name for name, parameter in model.named_parameters()}
    if there.keys() == known.keys():
        return
    fix = "call engine.close(), change the model, then initialize again"
    added = [name for key, name in there.items() if key not in known]
    if added:
        raise ConfigError(
            "model-parameters-changed",
            f"parameter {added[0]} was added or replaced after initialize, so no engine trains it; {fix}",
        )
    removed = [name for key, name in known.items() if key not in there]
    raise ConfigError(
        "model-parameters-changed", f"parameter {removed[0]} was removed from the model after initialize; {fix}"
    )
