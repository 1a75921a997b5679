"""Let the routers of a model choose the experts that they are given; the model's own code does everything else.

A router scores the experts for each token and takes the best by `topk`. That call is answered by another choice: the
scores of the experts that are given, and their indices. So the weights are what the model's code makes of these scores,
and their gradient reaches the router. A choice is given by a batch, or by the first pass of a forward that is computed
again, whose rows would otherwise not fit those that were sent.

>>> with Choice(3, given=torch.tensor([[[2, 0]]])):
...     torch.tensor([[0.5, 0.3, 0.2]]).topk(2)
torch.return_types.topk(
values=tensor([[0.2000, 0.5000]]),
indices=tensor([[2, 0]]))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.config.errors import ConfigError, EngineError
from shardwise.construction.experts import is_experts, num_experts_of, wrappers_of
from shardwise.runtime.class_swap import set_attribute, subclass_module
from shardwise.runtime.forward_state import is_repeatable, same_again
from shardwise.runtime.torch_private import is_fake

# N tokens of this rank, B sequences of S, L layers of experts, k experts of each token

ROUTED_EXPERTS: Final = "routed_experts"  # of a batch, as vLLM and SGLang name what they return
_ROUTER: Final = "_shardwise_router"


class Choice(TorchFunctionMode):
    """Answers each `topk` among experts, or groups of them, in the forward of a module that has a router.

    In a second pass the answers are those of the first.

    Args:
        given: the experts of each token [B, S, k]; None for the router's own choice.
        part: the number of this rank and of all among which sequences may be split.

    Attributes:
        index: what `topk` has chosen among all experts, [N, k]; None before.
        is_given: whether that is what was given.
    """

    def __init__(self, num_experts: int, given: Tensor | None, part: tuple[int, int] = (0, 1)) -> None:
        super().__init__()
        self._num_experts, self._given, self._part = num_experts, given, part
        self.index: Tensor | None = None
        self.is_given = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._topk if func in (torch.topk, Tensor.topk) else func)(*args, **(kwargs or {}))

    def _topk(
        self,
        input: Tensor,  # noqa: A002
        k: int,
        dim: int = -1,
        largest: bool = True,
        sorted: bool = True,  # noqa: A002
    ) -> Any:
        # Attention may choose keys in the same forward, mostly more of them than there are experts.
        if k > self._num_experts or dim % input.dim() != input.dim() - 1 or not largest:
            return torch.topk(input, k, dim, largest, sorted)
        index = same_again("choice of experts", lambda: self._choose(input.detach(), k, sorted)).long()
        if input.shape[-1] >= self._num_experts:
            self.index = index.flatten(0, -2)
        return torch.return_types.topk((input.gather(-1, index), index))

    def _choose(self, scores: Tensor, k: int, is_sorted: bool) -> Tensor:
        width, rows = scores.shape[-1], self._rows(scores.numel() // scores.shape[-1])
        if rows is not None and width < self._num_experts and scores.dim() == 2:
            # [Note: Groups of experts]
            # Some routers choose groups first, and mask the scores of the others. So the groups of the given experts
            # come before all others.
            scores = scores.scatter(-1, rows.long() * width // self._num_experts, torch.inf)
        if rows is not None and width >= self._num_experts and k == rows.shape[-1]:
            self.is_given, index = True, rows.view(*scores.shape[:-1], k)
        else:
            index = torch.topk(scores, k, sorted=is_sorted)[1]
        return index.to(torch.int16 if width < 2**15 else torch.int32)

    def _rows(self, num_rows: int) -> Tensor | None:
        """Return what is given for so many tokens of this rank; None where it is for others."""
        given, (rank, num_ranks) = self._given, self._part
        if given is not None and num_rows * num_ranks == given.shape[0] * given.shape[1] and num_ranks > 1:
            given = given.chunk(num_ranks, 1)[rank]
        return None if given is None or given.shape[:2].numel() != num_rows else given.flatten(0, 1)


class LayerRouter:
    """Makes one layer of experts choose what is given, in each call."""

    def __init__(self, name: str, num_experts: int, given: Callable[[], Tensor | None], part: tuple[int, int]) -> None:
        self._name, self._num_experts, self._given, self._part = name, num_experts, given, part
        self._choice: Choice | None = None
        self._is_proved = False

    @property
    def is_answered(self) -> bool:
        """Return whether, in the call that runs, `topk` chose the experts: a second pass chooses them again."""
        return self._choice is not None and self._choice.index is not None

    @contextmanager
    def choosing(self) -> Iterator[None]:
        """Give the choice, inside a call of the module around the experts."""
        given = self._given()
        if given is None and not is_repeatable():
            yield
            return
        with Choice(self._num_experts, given, self._part) as self._choice:
            try:
                yield
            finally:
                self._choice = None

    def check(self, index: Tensor) -> None:
        """Check that the experts of a layer are called with those that are given, if any; it is once read from there.

        Raises:
            EngineError: they are not.
        """
        given, choice = self._given(), self._choice
        if given is None or (self._is_proved and choice is not None and choice.is_given):
            return
        if choice is None or choice.index is None:
            pass
        elif not choice.is_given:
            raise EngineError(
                "routing-shape",
                f"{self._name}: {ROUTED_EXPERTS} has {given.shape[-1]} experts of each of {given.shape[:2].numel()} "
                f"tokens, and the router chooses {choice.index.shape[1]} of each of {len(choice.index)}; give as many",
            )
        elif is_fake(index) or torch.equal(index.sort(-1)[0], choice.index.sort(-1)[0]):
            self._is_proved = True
            return
        raise EngineError(
            "router-not-replayable",
            f"{self._name}: its router does not send tokens where its topk says, or has none, so it cannot follow "
            f"{ROUTED_EXPERTS}; set experts.replay=false, and leave it out of the batch",
        )


class Routers:
    """Makes the routers of a model's layers of experts choose what is given; `close` puts their own forwards back.

    Args:
        part: the number of this rank and of all among which sequences may be split between layers.
    """

    def __init__(self, model: nn.Module, part: tuple[int, int] = (0, 1)) -> None:
        self._undo: list[Callable[[], None]] = []
        self._routing: Tensor | None = None
        modules = dict(model.named_modules(remove_duplicate=False))
        layers = {id(module): (name, module) for name, module in modules.items() if is_experts(module)}
        self._num_experts = [num_experts_of(module) for _, module in layers.values()]
        self._blocks = [_block_of(name, modules) for name, _ in layers.values()]
        for number, (name, module) in enumerate(layers.values()):
            router = LayerRouter(name, self._num_experts[number], partial(self._given, number), part)
            outermost = [name, *wrappers_of(name, modules)][-1]
            parent = modules[outermost.rpartition(".")[0]]
            # Of two layers in one module the second has no choice, as no `topk` is known to be its own.
            for altered, kind in ((module, _IsChecked), *([] if hasattr(parent, _ROUTER) else [(parent, _Chooses)])):
                self._undo += [subclass_module(altered, kind), set_attribute(altered, _ROUTER, router)]

    @contextmanager
    def following(self, routing: Tensor | None) -> Iterator[None]:
        """Send the tokens of forwards inside to the experts that `checked` has returned; None for the routers' own."""
        self._routing = routing
        try:
            yield
        finally:
            self._routing = None

    def checked(self, routing: Any, tokens: torch.Size) -> Tensor:
        """Return the experts [B, S, L, k] of a batch of tokens [B, S].

        Args:
            routing: of the layers of experts, or of all blocks of the model.

        Raises:
            ConfigError: it does not fit the tokens or the model, or names no expert.
        """
        num_layers, is_tensor = len(self._blocks), isinstance(routing, Tensor) and routing.dim() == 4
        num_blocks = self._blocks[0][1] if len({num for _, num in self._blocks}) == 1 else num_layers
        if not is_tensor or routing.shape[:2] != tokens or routing.shape[2] not in (num_layers, num_blocks):
            found = tuple(routing.shape) if isinstance(routing, Tensor) else type(routing).__name__
            sizes = f"{num_layers} layers of experts" + f" or {num_blocks} blocks" * (num_blocks != num_layers)
            raise ConfigError(
                "routing-shape",
                f"{ROUTED_EXPERTS} is {found}, and must be a tensor [B, S, L, k] of the batch's {tuple(tokens)} "
                f"tokens [B, S] and the model's {sizes}; pad it as the tokens are",
            )
        if routing.shape[2] != num_layers:
            routing = routing[:, :, [block for block, _ in self._blocks]]
        limits = torch.tensor(self._num_experts, device=routing.device)[:, None]
        if routing.is_floating_point() or not (is_fake(routing) or ((routing >= 0) & (routing < limits)).all()):
            raise ConfigError(
                "routing-range",
                f"{ROUTED_EXPERTS} must be integers that name experts, from 0 to {max(self._num_experts) - 1}, for "
                "each token; give tokens of padding any, such as 0, and recorded ones those of the same model",
            )
        return routing

    def close(self) -> None:
        """Give the modules their own forwards again."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _given(self, number: int) -> Tensor | None:
        return None if self._routing is None else self._routing[:, :, number]


def _block_of(name: str, modules: Mapping[str, nn.Module]) -> tuple[int, int]:
    """Return the number of the block that a module is in, and how many blocks its list has."""
    parts = name.split(".")
    for depth, part in enumerate(parts):
        blocks = modules[".".join(parts[:depth])]
        if part.isdigit() and isinstance(blocks, nn.ModuleList):
            return int(part), len(blocks)
    return 0, 1


def chose_by_topk(experts: nn.Module) -> bool:
    """Say whether a second pass of the call that runs is certain to call a layer's experts with the same index."""
    router: LayerRouter | None = getattr(experts, _ROUTER, None)
    return router is not None and router.is_answered


class _Chooses(nn.Module):
    """Is joined with the class of the module around experts, which calls their router."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        router: LayerRouter = getattr(self, _ROUTER)
        with router.choosing():
            return super().forward(*args, **kwargs)


class _IsChecked(nn.Module):
    """Is joined with the class of a module of experts."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        router: LayerRouter = getattr(self, _ROUTER)
        router.check(top_k_index)
        return super().forward(hidden_states, top_k_index, top_k_weights)
