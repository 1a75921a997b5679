"""Let the experts of a model compute their tokens on the ranks that hold them; the model's own code stays.

What computes a module of experts is called with what its own forward is: tokens, the experts of each, weights.
Where ranks of tp have the same tokens, each dispatches an equal part of them, and the results are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Final, Protocol

from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.comm.collectives import Comm
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import ExpertsConfig
from shardwise.construction.experts import FoundExperts, experts_of, packed_stack, part_of_packed, stack_names
from shardwise.context.batch import main_input
from shardwise.experts.dispatch import ExpertDispatch
from shardwise.experts.routers import ROUTED_EXPERTS, Routers
from shardwise.layout.layout import Layout
from shardwise.layout.tensor_plan import is_within
from shardwise.runtime.class_swap import set_attribute

_ROWS: Final = "rows of experts"


class SameTokens(Protocol):
    """Cuts and gathers what the ranks of tp have in common; each is the other's backward."""

    comm: Comm

    def keeps_whole(self) -> bool:
        """Say whether the evaluation that runs has not split its sequence."""

    def split(self, x: Tensor, dim: int, name: str) -> Tensor:
        """Return this rank's equal part of `x` along `dim`."""

    def gather(self, x: Tensor, dim: int, name: str) -> Tensor:
        """Return the ranks' parts, concatenated along `dim`."""


@dataclass(frozen=True)
class ExpertLayer:
    """Computes one layer's experts; `same_tokens` has the ranks with the same ones, if there are several."""

    name: str
    dispatch: ExpertDispatch
    same_tokens: SameTokens | None

    def __call__(
        self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor, is_same_again: bool
    ) -> Tensor:
        """Return what the experts make of the tokens, as the module's own forward does."""
        if self.same_tokens is None:
            return self.dispatch.forward(experts, hidden, index, weights, self.name, is_same_again)
        num_rows, comm = len(hidden), self.same_tokens.comm
        size = -(-num_rows // comm.world_size)  # of the last ranks' parts an end is padding
        num_own = min(max(num_rows - comm.rank * size, 0), size)
        hidden, index, weights = (
            self.same_tokens.split(_padded(rows, size * comm.world_size), 0, _ROWS)[:num_own]
            for rows in (hidden, index, weights)
        )
        computed = self.dispatch.forward(experts, hidden, index, weights, self.name, is_same_again)
        return self.same_tokens.gather(_padded(computed, size), 0, _ROWS)[:num_rows]


def _padded(rows: Tensor, num_rows: int) -> Tensor:
    return rows if len(rows) == num_rows else F.pad(rows, (0, 0, 0, num_rows - len(rows)))


class ExpertLayers:
    """Alters the modules of a model's experts, and those around them; `close` puts them back.

    Args:
        same_tokens: of the ranks of tp, which have the same tokens where no sequence is split; None for one rank.
        tokens: the ranks that hold different experts; None where each rank has all.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        same_tokens: SameTokens | None,
        tokens: Comm | None,
        section: ExpertsConfig,
    ) -> None:
        self._follows = section.replay
        with ExitStack() as undo:
            layers = {}
            if tokens is not None:
                dispatch = ExpertDispatch(tokens, section.skew)
                undo.callback(dispatch.close)
                layers = dict(_divide(experts, layout, dispatch, same_tokens, undo) for experts in experts_of(model))
            if tokens is not None or section.replay:
                ranks = (0, 1) if same_tokens is None else (same_tokens.comm.rank, same_tokens.comm.world_size)
                self._routers = Routers(model, ranks, layers)
                undo.callback(self._routers.close)
            self.close = undo.pop_all().close

    def take_routing(self, inputs: Any) -> tuple[Any, Tensor | None]:
        """Take from a model's inputs the experts that its tokens are to be sent to, where they name them.

        Raises:
            ConfigError: they do, and the config says nothing of it, or they do not fit.
        """
        if not isinstance(inputs, Mapping) or ROUTED_EXPERTS not in inputs:
            return inputs, None
        if not self._follows:
            raise ConfigError(
                "routing-not-followed",
                f"the batch names experts in {ROUTED_EXPERTS}, and experts.replay=false lets routers choose; set "
                "experts.replay=true, or leave them out of the batch",
            )
        others = {name: value for name, value in inputs.items() if name != ROUTED_EXPERTS}
        return others, self._routers.checked(inputs[ROUTED_EXPERTS], main_input(others).shape[:2])

    def following(self, routing: Tensor) -> AbstractContextManager[None]:
        """Send the tokens of forwards inside to the experts that `take_routing` has returned."""
        return self._routers.following(routing)


def _divide(
    experts: FoundExperts, layout: Layout, dispatch: ExpertDispatch, same_tokens: SameTokens | None, undo: ExitStack
) -> tuple[str, ExpertLayer]:
    """Make a module one of this rank's experts; return its name and what computes it."""
    name, module, tokens = experts.name, experts.module, dispatch.comm
    for stack in stack_names(module) if tokens.world_size > 1 else ():
        unpacking = packed_stack(module, stack)
        if unpacking is not None:
            state = part_of_packed(unpacking.quant_state, f"{name}.{stack}", tokens.world_size, tokens.rank)
            undo.callback(set_attribute(unpacking, "quant_state", state))
    for wrapper in experts.wrappers.values():  # they make the change of this rank's experts
        undo.callback(set_attribute(wrapper, "num_experts", experts.num_experts // layout.mesh.ep))
    return name, ExpertLayer(name, dispatch, None if has_part_of_sequence(layout, name) else same_tokens)


def has_part_of_sequence(layout: Layout, name: str) -> bool:
    """Say whether a module is called with a part of the sequence on each rank of tp."""
    tensor = layout.tensor
    return (
        tensor is not None
        and tensor.sequence_parallel
        and any(is_within(name, stack.modules) for stack in tensor.plan.stacks)
    )
