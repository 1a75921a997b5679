"""The facts of a model: all that a layout needs to know of it, as values.

`shardwise.construction.scan` reads them from the modules, once; whatever is decided after that is decided by them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from shardwise.config.resolve import Dtype


@dataclass(frozen=True)
class FusedDim:
    """Say that a parameter is several matrices of these sizes side by side along a dim, such as of q, k and v."""

    dim: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class ExpertDim:
    """Say that a parameter has equal parts of several experts, one after the other along a dim.

    Attributes:
        num_repeats: equal runs along `dim`, each of which has a part of every expert.
    """

    num_experts: int
    dim: int = 0
    num_repeats: int = 1


@dataclass(frozen=True)
class ParamEntry:
    """Describe a parameter.

    Attributes:
        name: the first of its fully qualified names.
        aliases: the others, where it is tied.
        unit: the one block that holds all its names, or the root.
        shape: of the whole parameter; of its bytes, where it is opaque.
        is_wide: whether it stays in fp32 although `precision.param` is narrower.
        is_opaque: whether it is bytes, which are never cast.
        is_matrix: whether a matrix optimizer steps it: as the weight of a linear layer inside a block.
        fused: the matrices that it is made of, where it is several.
        wide_in: the narrow dtypes of `precision.param` in which it stays in fp32.
        dtype: torch's name of the one that it has in the model.
        layer_names: those of its names under which a linear layer or an embedding has it.
        experts: how it is made of experts that `mesh.ep` may divide; None for a parameter of no experts.
        is_in_experts: whether experts use it, each for its own tokens; also one that they share, such as a norm.
    """

    name: str
    aliases: tuple[str, ...]
    unit: str
    shape: tuple[int, ...]
    requires_grad: bool
    is_wide: bool = False
    is_opaque: bool = False
    is_matrix: bool = False
    fused: FusedDim | None = None
    wide_in: tuple[Dtype, ...] = ()
    dtype: str = "float32"
    layer_names: tuple[str, ...] = ()
    experts: ExpertDim | None = None
    is_in_experts: bool = False


@dataclass(frozen=True)
class StageUnit:
    """Hold modules that are always in one pipeline stage.

    Attributes:
        modules: fully qualified names, one for each name that a module has; a module without parameters (rotary
            tables, a dropout beside the blocks) may be in no unit: all stages run it.
        params: every parameter that its modules use, tied ones too, under the first name that each has in the model.
        is_cut_allowed_before: whether a stage may begin with it.
        flops: of its matrix products in a forward, for each token.
    """

    name: str
    modules: tuple[str, ...]
    params: tuple[ParamEntry, ...]
    is_cut_allowed_before: bool
    flops: float = 0.0


@dataclass(frozen=True)
class ModelFacts:
    """Hold what a layout needs to know of a model.

    Attributes:
        units: names of the blocks, in module order.
        params: each parameter once, in module order.
        stage_units: between which a pipeline may be cut, in the order in which they run; none without a pipeline.
        shifts_labels: whether the model's own loss, a mean of cross-entropies, leaves out the first label; None for any
            other loss.
    """

    kind: str = "Module"
    units: tuple[str, ...] = ()
    params: tuple[ParamEntry, ...] = ()
    stage_units: tuple[StageUnit, ...] = ()
    shifts_labels: bool | None = None

    def with_trained(self, names: Collection[str]) -> ModelFacts:
        """Return the facts of the model of which these parameters are trained, and no others."""
        return replace(self, params=tuple(replace(param, requires_grad=param.name in names) for param in self.params))

    def with_fused(self, fused: Mapping[str, FusedDim]) -> ModelFacts:
        """Return the facts with the matrices of which some parameters are made, by name."""
        params = (replace(param, fused=fused.get(param.name, param.fused)) for param in self.params)
        return replace(self, params=tuple(params))
