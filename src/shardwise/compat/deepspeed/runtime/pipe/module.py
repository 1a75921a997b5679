"""Offer `PipelineModule`: a chain of layers, each of which takes the result of the one before it.

>>> layers = [TiedLayerSpec("words", nn.Embedding, 8, 4), LayerSpec(nn.Linear, 4, 4), torch.tanh]
>>> layers += [TiedLayerSpec("words", nn.Embedding, 8, 4, forward_fn=lambda layer, x: x @ layer.weight.T)]
>>> model = PipelineModule(layers, num_stages=2)
>>> model(torch.zeros(2, 3, dtype=torch.int64)).shape, model[3].layer.weight is model[0].weight
(torch.Size([2, 3, 8]), True)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from shardwise.compat.deepspeed.finder import answers
from shardwise.compat.deepspeed.runtime.pipe.topology import PipeDataParallelTopology, ProcessTopology
from shardwise.config.errors import ConfigError
from shardwise.construction.context import init
from shardwise.models import layer_list

__getattr__ = answers(__name__)

HELD: Final = "_deepspeed_held"  # of a module that an engine has, the names of the parameters on this rank


class LayerSpec:
    """Describes a layer, which is built as `typename(*module_args, **module_kwargs)`."""

    def __init__(self, typename: Callable[..., nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Return a new layer; `log` is not used."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """Describes a layer that shares the parameters of the first one with its key; arguments are those of DeepSpeed."""

    def __init__(
        self,
        key: str,
        typename: Callable[..., nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn, self.tied_weight_attr = key, forward_fn, tied_weight_attr


class PipelineModule(nn.Sequential):
    """Runs layers in order, each with what the one before returns, a tuple too, and says how they are cut into stages.

    Layers of specs are built so that no rank holds all of them; after that `deepspeed.zero.GatheredParameters` has
    their values. The arguments are those of DeepSpeed: by `partition_method` "parameters" times and memory that are
    estimated from them decide, and any `activation_checkpoint_interval` but 0 recomputes each layer. The other
    `options` have no effect: the engine recomputes, and shapes may differ from micro-batch to micro-batch.
    """

    def __init__(  # noqa: PLR0913  DeepSpeed's arguments
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        if topology is None and num_stages is None:
            raise ConfigError("pipeline-stages", "PipelineModule needs num_stages or topology; pass one")
        if topology is not None and topology.get_dim("model") > 1:
            fix = 'give whole layers, and "shardwise": {"mesh": {"tp": N}} in the JSON splits them'
            raise ConfigError("pipeline-layers-split", f"topology has model={topology.get_dim('model')}; {fix}")
        if topology is not None:
            _check_order(topology)
        self.num_stages = topology.get_dim("pipe") if topology is not None else int(num_stages or 1)
        self._topology, self._method = topology, partition_method.lower()
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.__dict__["loss_fn"] = loss_fn  # a module among the children would be one more layer
        seed = (seed_fn or torch.manual_seed) if seed_layers else None
        listed = list(layers)
        with init() if any(isinstance(entry, LayerSpec) for entry in listed) else nullcontext():
            built = layer_list.LayerList(_entry(entry, seed, base_seed + index) for index, entry in enumerate(listed))
        for name, layer in built.named_children():
            self.add_module(name, layer)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters of this rank's stages, once `initialize` has cut the layers; before that all of them."""
        mine = self.__dict__.get(HELD)
        return (parameter for name, parameter in self.named_parameters(recurse=recurse) if mine is None or name in mine)

    def topology(self) -> ProcessTopology | None:
        """Return the topology that was given, or the one of the ranks there are."""
        if self._topology is None and torch.distributed.is_initialized():
            num_data_ranks = torch.distributed.get_world_size() // self.num_stages
            return PipeDataParallelTopology(self.num_stages, num_data_ranks)
        return self._topology

    def num_pipeline_stages(self) -> int:
        """Return the ranks along the pipeline."""
        return self.num_stages

    def train_batch_plan(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a config of Shardwise with what this module says of the pipeline."""
        plan = {name: dict(section) for name, section in config.items()}
        plan.setdefault("mesh", {})["pp"] = self.num_stages
        if self.activation_checkpoint_interval:
            plan["recompute"] = {"mode": "full", **plan.get("recompute", {})}
        cut = self._cut()
        if cut and self.num_stages > 1:
            plan["pipeline"] = {"cut": cut, **plan.get("pipeline", {})}
        return plan

    def _cut(self) -> list[str] | None:
        """Return the layers with which stages begin; None where costs decide."""
        names = [name for name, _ in self.named_children()]
        if self._method == "parameters":
            return None
        if self._method.startswith("type:"):
            pattern = re.compile(self._method.removeprefix("type:"), re.IGNORECASE)
            counted = [name for name, layer in self.named_children() if pattern.search(_class_name(layer))]
        elif self._method == "uniform":
            counted = names
        else:
            methods = "parameters, uniform and type:REGEX"
            raise ConfigError("pipeline-method", f"partition_method={self._method} is not there; take one of {methods}")
        if len(counted) < self.num_stages:
            few = f"counts {len(counted)} layers for {self.num_stages} stages; count more"
            raise ConfigError("pipeline-method", f"partition_method={self._method} {few}")
        return [counted[-(-stage * len(counted) // self.num_stages)] for stage in range(1, self.num_stages)]


def _check_order(topology: ProcessTopology) -> None:
    """Refuse a numbering of ranks that is not the engine's, since scripts read data by it."""
    axes = [axis for axis in topology.get_axis_names() if topology.get_dim(axis) > 1]
    if axes not in ([], ["pipe"], ["data"], ["pipe", "data"]):
        fix = "the ranks of a stage are beside each other here: give PipeDataParallelTopology(num_pp, num_dp)"
        raise ConfigError("pipeline-topology", f"topology has the axes {', '.join(axes)}, the slowest first; {fix}")


def _class_name(layer: nn.Module) -> str:
    return type(getattr(layer, "layer", layer)).__name__


def _entry(layer: Any, seed: Callable[[int], Any] | None, number: int) -> Any:
    """Return what a `LayerList` takes for a layer."""
    if not isinstance(layer, LayerSpec):
        return layer
    factory = partial(_build, layer, seed, number)
    if isinstance(layer, TiedLayerSpec):
        return layer_list.LayerSpec(factory, tied=layer.key, forward_fn=layer.forward_fn)
    return layer_list.LayerSpec(factory)


def _build(spec: LayerSpec, seed: Callable[[int], Any] | None, number: int) -> nn.Module:
    if seed is not None:
        seed(number)
    return spec.build()
