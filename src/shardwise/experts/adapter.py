"""Let the experts of a model compute their tokens on the ranks that hold them; the model's own code stays.

A module of experts gets another forward, which is called with what its own is: tokens, the experts of each, weights.
Where ranks of tp have the same tokens, each dispatches an equal part of them, and the results are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn
from torch.autograd import Function

from shardwise.comm.collectives import Comm
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import ExpertsConfig
from shardwise.construction.experts import experts_of, packed_stack, part_of_packed, stack_names
from shardwise.context.batch import main_input
from shardwise.experts.dispatch import ExpertDispatch
from shardwise.experts.routers import ROUTED_EXPERTS, Routers, chose_by_topk
from shardwise.layout.layout import Layout
from shardwise.layout.tensor_plan import is_within
from shardwise.runtime.class_swap import set_attribute, subclass_module
from shardwise.runtime.torch_private import unseen_by_op_modes

_LAYER: Final = "_shardwise_experts"


@dataclass(frozen=True)
class ExpertLayer:
    """Computes one layer's experts; `same_tokens` are the ranks that have the same ones, if there are several."""

    name: str
    dispatch: ExpertDispatch
    same_tokens: Comm | None

    def __call__(self, experts: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return what the experts make of the tokens, as the module's own forward does."""
        num_tokens, comm = len(hidden), self.same_tokens
        if comm is not None:
            hidden, index, weights = (_own_rows(rows, comm) for rows in (hidden, index, weights))
        computed = self.dispatch.forward(experts, hidden, index, weights, self.name, chose_by_topk(experts))
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
        self._undo: list[Callable[[], None]] = []
        self._follows = section.replay
        if tokens is not None:
            self._dispatch_to(tokens, model, layout, tensor, section.skew)
        if tokens is not None or section.replay:
            self._routers = Routers(model, (tensor.rank, tensor.world_size))
            self._undo.append(self._routers.close)

    def _dispatch_to(self, tokens: Comm, model: nn.Module, layout: Layout, tensor: Comm, skew: float) -> None:
        dispatch = ExpertDispatch(tokens, skew)
        self._undo.append(dispatch.close)
        for experts in experts_of(model):
            name, module = experts.name, experts.module
            has_part = has_part_of_sequence(layout, name)
            same_tokens = None if has_part or tensor.world_size == 1 else tensor
            layer = ExpertLayer(name, dispatch, same_tokens)
            self._undo += [subclass_module(module, _DispatchedExperts), set_attribute(module, _LAYER, layer)]
            for stack in stack_names(module) if tokens.world_size > 1 else ():
                unpacking = packed_stack(module, stack)
                if unpacking is not None:
                    state = part_of_packed(unpacking.quant_state, f"{name}.{stack}", tokens.world_size, tokens.rank)
                    self._undo.append(set_attribute(unpacking, "quant_state", state))
            for wrapper in experts.wrappers.values():  # they make the change of this rank's experts
                self._undo.append(set_attribute(wrapper, "num_experts", experts.num_experts // layout.mesh.ep))

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

    def close(self) -> None:
        """Give the modules their own forwards again."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()


class _DispatchedExperts(nn.Module):
    """Is joined with the class of a module of experts."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        layer: ExpertLayer = getattr(self, _LAYER)
        return layer(self, hidden_states, top_k_index, top_k_weights)


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
    part: Tensor = _OwnRows.apply(rows, comm) if rows.is_floating_point() else _cut(rows, comm)
    return part


def all_rows(own: Tensor, comm: Comm, num_rows: int) -> Tensor:
    """Return the rows of which each rank has a part."""
    rows: Tensor = _AllRows.apply(own, comm, num_rows)
    return rows


class _OwnRows(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, comm: Comm) -> Tensor:
        ctx.given = comm, len(rows)
        return _cut(rows, comm)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return all_rows(gradients[0], *ctx.given), None


class _AllRows(Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, comm: Comm, num_rows: int) -> Tensor:
        ctx.comm = comm
        return _gathered(own, comm, num_rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _own_rows(gradients[0], ctx.comm), None, None


def _cut(rows: Tensor, comm: Comm) -> Tensor:
    size = -(-len(rows) // comm.world_size)
    return rows[comm.rank * size : (comm.rank + 1) * size]


def _gathered(own: Tensor, comm: Comm, num_rows: int) -> Tensor:
    size = -(-num_rows // comm.world_size)  # of the last ranks' parts an end is padding
    full = own.new_zeros((comm.world_size * size, *own.shape[1:]))
    full[comm.rank * size :][: len(own)] = own
    # Selective recomputation keeps what ops of collectives return, which is not what this one fills: it is run again.
    with unseen_by_op_modes():
        comm.all_gather(full.view(-1), "rows of experts").wait()
    return full[:num_rows]
