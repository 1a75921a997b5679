"""Let the experts of a model compute their tokens on the ranks that hold them; the model's own code stays.

What computes a module of experts is called with what its own forward is: tokens, the experts of each, weights.
Where ranks of tp have the same tokens, each dispatches an equal part of them, and the results are gathered.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Final, Protocol

from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.comm.collectives import Comm
from shardwise.config.resolve import ExpertsConfig
from shardwise.construction.experts import FoundExperts, experts_of, packed_stack, part_of_packed, stack_names
from shardwise.experts.dispatch import ExpertDispatch
from shardwise.experts.routers import Compute, Routers
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


def divide_experts(
    model: nn.Module,
    layout: Layout,
    same_tokens: SameTokens | None,
    tokens: Comm | None,
    section: ExpertsConfig,
    undo: ExitStack,
) -> Routers:
    """Alter the modules of a model's experts, and those around them; `undo` puts them back.

    Args:
        same_tokens: of the ranks of tp, which have the same tokens where no sequence is split; None for one rank.
        tokens: the ranks that hold different experts; None where each rank has all.
    """
    computes: dict[str, Compute] = {}
    if tokens is not None:
        dispatch = ExpertDispatch(tokens, section.skew)
        undo.callback(dispatch.close)
        for experts in experts_of(model):
            _hold_part(experts, layout.mesh.ep, tokens, undo)
            compute = computes[experts.name] = partial(dispatch.forward, name=experts.name)
            if same_tokens is not None and not has_part_of_sequence(layout, experts.name):
                computes[experts.name] = partial(_compute_part, same_tokens, compute)
    part = (0, 1) if same_tokens is None else (same_tokens.comm.rank, same_tokens.comm.world_size)
    routers = Routers(model, part, computes, section.replay)
    undo.callback(routers.close)
    return routers


def _hold_part(experts: FoundExperts, ep: int, tokens: Comm, undo: ExitStack) -> None:
    """Let what is around the weights of experts know that they are those of one rank."""
    for stack in stack_names(experts.module) if tokens.world_size > 1 else ():
        unpacking = packed_stack(experts.module, stack)
        if unpacking is not None:
            state = part_of_packed(unpacking.quant_state, f"{experts.name}.{stack}", tokens.world_size, tokens.rank)
            undo.callback(set_attribute(unpacking, "quant_state", state))
    for wrapper in experts.wrappers.values():  # they make the change of this rank's experts
        undo.callback(set_attribute(wrapper, "num_experts", experts.num_experts // ep))


def _compute_part(
    same_tokens: SameTokens, compute: Compute, experts: nn.Module, *tensors: Tensor, is_same_again: bool
) -> Tensor:
    """Compute this rank's equal part of the tokens, and gather the results."""
    num_rows, comm = len(tensors[0]), same_tokens.comm
    size = -(-num_rows // comm.world_size)  # of the last ranks' parts an end is padding
    num_own = min(max(num_rows - comm.rank * size, 0), size)
    own_rows = (same_tokens.split(_padded(rows, size * comm.world_size), 0, _ROWS)[:num_own] for rows in tensors)
    computed = compute(experts, *own_rows, is_same_again=is_same_again)
    return same_tokens.gather(_padded(computed, size), 0, _ROWS)[:num_rows]


def _padded(rows: Tensor, num_rows: int) -> Tensor:
    return rows if len(rows) == num_rows else F.pad(rows, (0, 0, 0, num_rows - len(rows)))


def has_part_of_sequence(layout: Layout, name: str) -> bool:
    """Say whether a module is called with a part of the sequence on each rank of tp."""
    return layout.tensor is not None and is_within(name, layout.tensor.sequence_modules)
