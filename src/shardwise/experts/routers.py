"""Let the routers of a model choose the experts that are wanted; the model's own code does everything else.

A router scores the experts for each token and takes the best by `topk`. That call is answered by another choice: the
scores of the wanted experts, and their indices. So the weights are what the model's code makes of these scores, and
their gradient reaches the router. A choice comes from a batch, or from the first pass of a forward that is computed
again, whose rows would otherwise not fit those that were sent.

>>> router = RouterReplay("layer", 3, lambda: torch.tensor([[[2, 0]]]))
>>> with router.choosing():
...     torch.tensor([[0.5, 0.3, 0.2]]).topk(2)
torch.return_types.topk(
values=tensor([[0.2000, 0.5000]]),
indices=tensor([[2, 0]]))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.config.errors import ConfigError, EngineError
from shardwise.construction.experts import experts_of, router_of
from shardwise.context.batch import main_input
from shardwise.runtime.class_swap import Call, answer_calls, set_attribute, subclass_module
from shardwise.runtime.forward_state import is_repeatable, same_again
from shardwise.runtime.torch_private import is_fake

# N tokens of this rank, B sequences of S, L layers of experts, k experts of each token

ROUTED_EXPERTS: Final = "routed_experts"  # of a batch, as vLLM and SGLang name what they return
_ROUTER: Final = "_shardwise_router"
# Does what a module of experts does, with the module, tokens, index and weights; it is given as `is_same_again` whether
# a second pass of the call that runs is certain to bring the same index.
Compute = Callable[..., Tensor]


class RouterReplay(TorchFunctionMode):
    """Answers each `topk` among a layer's experts, or groups of them, inside `choosing`; a second pass repeats it.

    Args:
        wanted: returns the experts of each token, [B, S, k]; None for the router's own choice.
        part: the number of this rank and of all among which sequences may be split.
        compute: in place of the layer's own forward; None for that.
        follows_call: leave each `topk` before `note_call` as it is: attention in the same module may choose keys.

    Attributes:
        index: what `topk` has chosen among all experts in the call that runs, [N, k]; None where it has not.
    """

    def __init__(
        self,
        name: str,
        num_experts: int,
        wanted: Callable[[], Tensor | None],
        part: tuple[int, int] = (0, 1),
        compute: Compute | None = None,
        follows_call: bool = False,
    ) -> None:
        super().__init__()
        self.compute = compute
        self._follows_call, self._is_called = follows_call, False
        self._name, self._num_experts, self._wanted, self._part = name, num_experts, wanted, part
        self.index: Tensor | None = None
        self._follows = self._is_proved = False

    @contextmanager
    def choosing(self) -> Iterator[None]:
        """Answer, in a call of the module around the experts, where a choice is wanted or may be repeated."""
        self._follows = self._is_called = False
        with nullcontext() if self._wanted() is None and not is_repeatable() else self:
            try:
                yield
            finally:
                self.index = None

    def note_call(self, module: nn.Module, own: Call, args: Any, kwargs: Any) -> Any:
        """Call the module that scores the experts."""
        self._is_called = True
        return own(*args, **kwargs)

    def check(self, index: Tensor) -> None:
        """Check that the layer is called with the experts that are wanted, if any; the first time by their values.

        Raises:
            EngineError: it is not.
        """
        wanted, chosen = self._wanted(), self.index
        if wanted is None or (self._follows and self._is_proved):
            return
        if chosen is not None and not self._follows:
            raise EngineError(
                "routing-shape",
                f"{self._name}: {ROUTED_EXPERTS} has {wanted.shape[-1]} experts of each of {wanted.shape[:2].numel()} "
                f"tokens, and the router chooses {chosen.shape[1]} of each of {len(chosen)}; give as many",
            )
        if chosen is None or not (is_fake(index) or torch.equal(index.sort(-1)[0], chosen.sort(-1)[0])):
            raise EngineError(
                "router-not-replayable",
                f"{self._name}: its router does not send tokens where its topk says, or has none, so it cannot follow "
                f"{ROUTED_EXPERTS}; set experts.replay=false, and leave it out of the batch",
            )
        self._is_proved = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._topk if func in (torch.topk, Tensor.topk) else func)(*args, **(kwargs or {}))

    def _topk(self, input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:  # noqa: A002
        # Where no module is known to score the experts, attention mostly chooses more keys than there are experts.
        is_other = k > self._num_experts or (self._follows_call and not self._is_called)
        if is_other or dim % input.dim() != input.dim() - 1 or not largest:
            return torch.topk(input, k, dim, largest, sorted)
        index = same_again("choice of experts", lambda: self._choose(input.detach(), k, sorted)).long()
        if input.shape[-1] >= self._num_experts:
            self.index = index.flatten(0, -2)
        return torch.return_types.topk((input.gather(-1, index), index))

    def _choose(self, scores: Tensor, k: int, is_sorted: bool) -> Tensor:
        width = scores.shape[-1]
        rows = self._rows(scores.numel() // width)
        if rows is not None and width < self._num_experts and scores.dim() == 2:
            # [Note: Groups of experts]
            # Some routers choose groups first, and mask the scores of the others. So the groups of the wanted experts
            # come before all others.
            scores = scores.scatter(-1, rows.long() * width // self._num_experts, torch.inf)
        if rows is not None and width >= self._num_experts and k == rows.shape[1]:
            self._follows, index = True, rows.view(*scores.shape[:-1], k)
        else:
            index = torch.topk(scores, k, sorted=is_sorted)[1]
        return index.to(torch.int16 if width < 2**15 else torch.int32)

    def _rows(self, num_rows: int) -> Tensor | None:
        """Return what is wanted for the tokens of so many rows, all or this rank's part; None for other rows."""
        wanted, (rank, num_ranks) = self._wanted(), self._part
        if wanted is not None and wanted.shape[:2].numel() == num_rows * num_ranks:
            wanted = wanted.chunk(num_ranks, 1)[rank]
        return None if wanted is None or wanted.shape[:2].numel() != num_rows else wanted.flatten(0, 1)


class Routers:
    """Makes the routers of a model choose what is wanted; `close` gives the modules their own forwards again.

    Args:
        part: the number of this rank and of all among which sequences may be split between layers.
        computes: what computes experts in place of their own forwards, by the layer's name.
        follows: otherwise batches that name experts are refused.
    """

    def __init__(
        self,
        model: nn.Module,
        part: tuple[int, int] = (0, 1),
        computes: Mapping[str, Compute] = MappingProxyType({}),
        follows: bool = True,
    ) -> None:
        undo = ExitStack()
        self.close, self._follows = undo.close, follows
        self._routing: Tensor | None = None
        layers = experts_of(model) if computes or follows else []
        self._nums_experts = [experts.num_experts for experts in layers]
        self._blocks = [_block_of(experts.name, model) for experts in layers]
        for number, experts in enumerate(layers):
            compute = computes.get(experts.name)
            scorer, wanted = router_of(experts.parent, experts.module), partial(self._of_layer, number)
            has_scorer = scorer is not None and scorer is not experts.parent
            router = RouterReplay(experts.name, experts.num_experts, wanted, part, compute, has_scorer)
            if scorer is not None and has_scorer:
                undo.callback(answer_calls(scorer, router.note_call))
            # Of two layers in one module the second has no choice, as no `topk` is known to be its own.
            around = [] if hasattr(experts.parent, _ROUTER) else [(experts.parent, _Chooses)]
            for altered, joined in ((experts.module, _Follows), *around):
                undo.callback(subclass_module(altered, joined))
                undo.callback(set_attribute(altered, _ROUTER, router))

    def take(self, inputs: Any) -> tuple[Any, Tensor | None]:
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
        return others, self.checked(inputs[ROUTED_EXPERTS], main_input(others).shape[:2])

    @contextmanager
    def following(self, routing: Tensor) -> Iterator[None]:
        """Send the tokens of forwards inside to the experts that `checked` has returned."""
        self._routing = routing
        try:
            yield
        finally:
            self._routing = None

    def checked(self, routing: Any, tokens: torch.Size) -> Tensor:
        """Return the experts of a batch of tokens [B, S] for each layer of experts, [B, S, L, k].

        Args:
            routing: the same, or for all blocks of the model.

        Raises:
            ConfigError: it does not fit the tokens or the model, or names no expert.
        """
        num_layers, shape = len(self._blocks), tuple(routing.shape) if isinstance(routing, Tensor) else ()
        num_blocks = self._blocks[0][1] if len({num for _, num in self._blocks}) == 1 else num_layers
        if len(shape) != 4 or shape[:2] != tokens or shape[2] not in (num_layers, num_blocks):
            raise ConfigError(
                "routing-shape",
                f"{ROUTED_EXPERTS} of shape {shape} must be a tensor [B, S, L, k] of the {tuple(tokens)} tokens of the "
                f"batch and of {num_layers} layers of experts, or {num_blocks} blocks; pad it as the tokens are",
            )
        chosen = routing if shape[2] == num_layers else routing[:, :, [block for block, _ in self._blocks]]
        limits = torch.tensor(self._nums_experts, device=chosen.device)[:, None]
        if chosen.is_floating_point() or not (is_fake(chosen) or ((chosen >= 0) & (chosen < limits)).all()):
            raise ConfigError(
                "routing-range",
                f"{ROUTED_EXPERTS} must be integers from 0 to {max(self._nums_experts) - 1}, which name experts; give "
                "tokens of padding any of them, and take the others from the same model",
            )
        return chosen

    def _of_layer(self, number: int) -> Tensor | None:
        return None if self._routing is None else self._routing[:, :, number]


def _block_of(name: str, model: nn.Module) -> tuple[int, int]:
    """Return the number of the block that a module is in, and how many blocks its list has."""
    keys = name.split(".")
    for depth, key in enumerate(keys):
        blocks = model.get_submodule(".".join(keys[:depth]))
        if isinstance(blocks, nn.ModuleList):
            return int(key), len(blocks)
    return 0, 1


class _Chooses(nn.Module):
    """Is joined with the class of the module around experts, which calls their router."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        router: RouterReplay = getattr(self, _ROUTER)
        with router.choosing():
            return super().forward(*args, **kwargs)


class _Follows(nn.Module):
    """Is joined with the class of a module of experts."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        router: RouterReplay = getattr(self, _ROUTER)
        router.check(top_k_index)
        tensors = hidden_states, top_k_index, top_k_weights
        if router.compute is None:
            return super().forward(*tensors)
        return router.compute(self, *tensors, is_same_again=router.index is not None)
