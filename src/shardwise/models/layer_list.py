"""Builds a model from the list of its layers, each of which takes the result of the one before it.

Such a model can be cut into pipeline stages anywhere. A language model whose head is its embedding:

>>> model = LayerList([
...     LayerSpec(nn.Embedding, 16, 4, tied="embedding"),
...     *(LayerSpec(nn.Linear, 4, 4) for _ in range(2)),
...     torch.tanh,
...     LayerSpec(nn.Linear, 4, 16, bias=False, tied="embedding"),
... ])
>>> model(torch.zeros(2, 3, dtype=torch.int64)).shape  # [B, S] -> [B, S, V]
torch.Size([2, 3, 16])
>>> [name for name, _ in model.named_parameters()]
['0.weight', '1.weight', '1.bias', '2.weight', '2.bias']
>>> model[4].weight is model[0].weight
True
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import torch
from torch import nn

from shardwise.config.arguments import OWN_RULE, checked
from shardwise.config.errors import ConfigError


class LayerSpec:
    """Describes a layer: `factory(*args, **kwargs)` is called when the list is built.

    Args:
        factory: a module's class, or a function that returns a module.
        name: of the entry in the list; None for its index.
        tied: a key; entries of one key share the parameters of the first of them that have the same names; None for
            a layer that is not tied.
        forward_fn: `forward_fn(layer, *inputs)` runs in place of the layer's own forward, for a layer that computes
            something else with shared parameters. Parameters are then named `INDEX.layer.NAME`. None for its own.
    """

    @checked
    def __init__(
        self,
        factory: Callable[..., nn.Module],
        *args: Any,
        name: str | None = None,
        tied: str | None = None,
        forward_fn: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(factory, nn.Module):
            raise ConfigError(
                "factory-is-module",
                f"LayerSpec: factory is a {type(factory).__name__} and made already; put it into the LayerList itself",
            )
        self.factory = factory
        self.args = args
        self.name = name
        self.tied = tied
        self.forward_fn = forward_fn
        self.kwargs = kwargs

    def build(self) -> nn.Module:
        """Make a new layer.

        Raises:
            ConfigError: the factory returns something else.
        """
        try:
            inspect.signature(self.factory).bind(*self.args, **self.kwargs)
        except TypeError as error:
            raise ConfigError("factory-arguments", f"{self}: {error}; give what the factory takes") from None
        except ValueError:  # a function in C has no signature
            pass
        layer = self.factory(*self.args, **self.kwargs)
        if not isinstance(layer, nn.Module):
            raise ConfigError(
                "factory-returns-no-module",
                f"{self} built a {type(layer).__name__}; a factory must return an nn.Module",
            )
        return layer

    def __repr__(self) -> str:
        arguments = [*map(repr, self.args), *(f"{key}={value!r}" for key, value in self.kwargs.items())]
        return f"LayerSpec({', '.join([getattr(self.factory, '__name__', repr(self.factory)), *arguments])})"


class LayerList(nn.Sequential):
    """Runs layers in order; a tuple that one returns becomes the positional arguments of the next.

    The entries' names are their indices, so parameters are called `0.weight`, `1.bias` and so on. The loss is the
    `loss_fn` of `shardwise.initialize`, as with every model.

    Args:
        specs: `LayerSpec`s, modules, and functions without parameters.

    Raises:
        ConfigError: there are none, an entry is none of these, a name is taken, or tied entries have no parameter in
            common or one in two shapes.
    """

    @checked
    def __init__(self, specs: Iterable[Annotated[LayerSpec | nn.Module | Callable[..., Any], OWN_RULE]]) -> None:
        super().__init__()
        owners: dict[str, nn.Module] = {}
        for index, entry in enumerate(specs):
            name = str(index)
            if isinstance(entry, LayerSpec):
                name = entry.name or name
                layer = entry.build()
                if entry.tied is not None:
                    _tie(layer, owners.setdefault(entry.tied, layer), f"entry {name}, tied={entry.tied!r}")
                if entry.forward_fn is not None:
                    layer = _CustomForward(layer, entry.forward_fn)
            elif isinstance(entry, nn.Module):
                layer = entry
            else:
                layer = _Function(_checked(entry, index))
            if "." in name or not name:
                raise ConfigError(
                    "layer-name-dotted", f"entry {index} of the LayerList is named {name!r}; give a name without dots"
                )
            if name in dict(self.named_children()):
                raise ConfigError(
                    "layer-name-twice",
                    f"entry {index} of the LayerList is named {name}, as one before it; rename one of them",
                )
            self.add_module(name, layer)
        if not len(self):
            raise ConfigError("no-layers", "a LayerList of 0 layers computes nothing; give it at least 1")

    def forward(self, *inputs: Any) -> Any:
        """Run all layers; one input that is a tuple counts as several."""
        value = inputs[0] if len(inputs) == 1 else inputs
        for layer in self:
            value = layer(*value) if isinstance(value, tuple) else layer(value)
        return value


class _Function(nn.Module):
    """Wraps a function without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)

    def extra_repr(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))


class _CustomForward(nn.Module):
    """A layer with another forward; it is a module, so that hooks on the entry see it run."""

    def __init__(self, layer: nn.Module, forward_fn: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = layer
        self.forward_fn = forward_fn

    def forward(self, *inputs: Any) -> Any:
        return self.forward_fn(self.layer, *inputs)


def _checked(entry: Any, index: int) -> Callable[..., Any]:
    if isinstance(entry, type):
        raise ConfigError(
            "layer-is-class",
            f"entry {index} of the LayerList is the class {entry.__name__}; write LayerSpec(...) of it",
        )
    if not callable(entry):
        raise ConfigError(
            "layer-not-callable",
            f"entry {index} of the LayerList is a {type(entry).__name__}; give a LayerSpec, a module or a function",
        )
    return entry


def _tie(layer: nn.Module, owner: nn.Module, what: str) -> None:
    """Give the layer the owner's parameters of the same names."""
    if layer is owner:
        return
    shared = dict(owner.named_parameters(remove_duplicate=False))
    of_layer = dict(layer.named_parameters(remove_duplicate=False))
    if not shared.keys() & of_layer.keys():
        raise ConfigError(
            "tied-names-differ",
            f"{what}: it has {', '.join(of_layer) or 'no parameters'}, but the first of that key has "
            f"{', '.join(shared) or 'none'}; tied layers share parameters of one name",
        )
    for name in of_layer.keys() & shared.keys():
        if of_layer[name].shape != shared[name].shape:
            raise ConfigError(
                "tied-shapes-differ",
                f"{what}: {name} is {_shown(of_layer[name])}, but {_shown(shared[name])} in the first of that key; "
                "tied parameters have one shape, and forward_fn may use them otherwise",
            )
        parent, _, leaf = name.rpartition(".")
        layer.get_submodule(parent).register_parameter(leaf, shared[name])


def _shown(parameter: torch.Tensor) -> str:
    return str(list(parameter.shape))
