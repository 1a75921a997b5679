"""Let the experts of a model compute their tokens on the ranks that hold them; the model's own code stays.

What computes a module of experts is called with what its own forward is: tokens, the experts of each, weights.
Where ranks of tp have the same tokens, each dispatches an equal part of them, and the results are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function

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
from shardwise.runtime.torch_private import unseen_by_op_modes


@dataclass(frozen=True)
class ExpertLayer:
    """Computes one layer's experts; `same_tokens` are the ranks that have the same ones, if there are several."""

    name: str
    dispatch: ExpertDispatch
    same_tokens: Comm | None

    def __call__(
        self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor, is_same_again: bool
    ) -> Tensor:
        """Return what the experts make of the tokens, as the module's own forward does."""
        num_tokens, comm = len(hidden), self.same_tokens
        if comm is not None:
            hidden, index, weights = (_own_rows(rows, comm) for rows in (hidden, index, weights))
        computed = self.dispatch.forward(experts, hidden, index, weights, self.name, is_same_again)
        return computed if comm is None else all_rows(computed, comm, num_tokens)


class ExpertLayers:
    """Alters the modules of a model's experts, and those around them; `close` puts them back.

    Args:
        tensor: the ranks of tp, which have the same tokens where no sequence is split.
        tokens: the ranks that hold different experts; None where each rank has all.
    """

    def __init__(
        self, model: nn.Module, layout: Layout, tensor: Comm, tokens: Comm | None, section: ExpertsConfig
    ) -> None:
        self._follows = section.replay
        with ExitStack() as undo:
            layers = {}
            if tokens is not None:
                dispatch = ExpertDispatch(tokens, section.skew)
                undo.callback(dispatch.close)
                layers = dict(_divide(experts, layout, dispatch, tensor, undo) for experts in experts_of(model))
            if tokens is not None or section.replay:
                self._routers = Routers(model, (tensor.rank, tensor.world_size), layers)
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
    experts: FoundExperts, layout: Layout, dispatch: ExpertDispatch, tensor: Comm, undo: ExitStack
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
    has_same = tensor.world_size > 1 and not has_part_of_sequence(layout, name)
    return name, ExpertLayer(name, dispatch, tensor if has_same else None)


def has_part_of_sequence(layout: Layout, name: str) -> bool:
    """Say whether a module is called with a part of the sequence on each rank of tp."""
    tensor = layout.tensor
    return (
        tensor is not None
        and tensor.sequence_parallel
        and any(is_within(name, stack.modules) for stack in tensor.plan.stacks)
    )


def _own_rows(rows: Tensor, comm: Comm) -> Tensor:
    """Return this rank's part of rows that all ranks have; its gradient is that of all rows."""
    part: Tensor = _Rows.apply(rows, comm, len(rows), True)
    return part


def all_rows(own: Tensor, comm: Comm, num_rows: int) -> Tensor:
    """Return the rows of which each rank has a part."""
    rows: Tensor = _Rows.apply(own, comm, num_rows, False)
    return rows


class _Rows(Function):
    """Cuts this rank's part out of all rows, or gathers all; each is the other's backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, comm: Comm, num_rows: int, cuts: bool) -> Tensor:
        ctx.given = comm, num_rows, not cuts
        size = -(-num_rows // comm.world_size)  # of the last ranks' parts an end is padding
        return rows[comm.rank * size : (comm.rank + 1) * size] if cuts else _gathered(rows, comm, num_rows, size)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Rows.apply(gradients[0], *ctx.given), None, None, None


def _gathered(own: Tensor, comm: Comm, num_rows: int, size: int) -> Tensor:
    full = own.new_zeros((comm.world_size * size, *own.shape[1:]))
    full[comm.rank * size :][: len(own)] = own
    # Selective recomputation keeps what ops of collectives return, which is not what this one fills: it is run again.
    with unseen_by_op_modes():
        comm.all_gather(full.view(-1), "rows of experts").wait()
    return full[:num_rows]
