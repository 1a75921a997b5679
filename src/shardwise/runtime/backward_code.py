"""Finds code of users that runs in the backward of a forward, and what gradients come of it.

Such code is a hook on a tensor or on a module, or the backward of a `torch.autograd.Function` of its own. A forward
alone does not show what it does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from shardwise.runtime.torch_private import function_of, hook_dicts, pytree
from shardwise.runtime.user_hooks import is_users


@dataclass
class FollowedForward:
    """Holds the tensors of a forward from which autograd follows it.

    Attributes:
        sources: what modules return of no tensor that is followed, such as embeddings of tokens.
        has_hooks: a hook was put on a tensor, or is on the backward of a module.
    """

    sources: list[Tensor] = field(default_factory=list)
    has_hooks: bool = False

    def runs_code(self, outputs: list[Tensor]) -> bool:
        """Say whether the backward of the forward's outputs runs code of users."""
        left, seen = [each.grad_fn for each in outputs if each.grad_fn is not None], set[Any]()
        while left and not self.has_hooks:
            node = left.pop()
            kind = function_of(node)
            if kind is not None and not kind.__module__.startswith(("torch.", "shardwise.")):
                return True
            new = {each for each, _ in node.next_functions if each is not None} - seen
            seen |= new
            left += new
        return self.has_hooks

    def gradients(self, outputs: list[Tensor]) -> list[Tensor]:
        """Return the gradients of the sources, of a loss that each number of the outputs adds to apart from others."""
        loss = sum((each.sin().sum() for each in outputs if each.requires_grad), torch.zeros(()))
        if not loss.requires_grad:
            return []
        return [*torch.autograd.grad(loss, self.sources, allow_unused=True, materialize_grads=True)]


@contextmanager
def followed(model: nn.Module, shape: tuple[int, ...]) -> Iterator[FollowedForward]:
    """Let autograd follow a forward inside the context, of a model none of whose parameters requires gradients.

    Args:
        shape: the first dims of tensors that it is followed from.
    """
    forward = FollowedForward()
    forward.has_hooks = any(
        is_users(hook) for module in model.modules() for hooks in hook_dicts(module)[2:] for hook in hooks.values()
    )

    def follow(leaf: Any) -> Any:
        is_one = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.shape[: len(shape)] == shape
        if not is_one or leaf.requires_grad:
            return leaf
        forward.sources.append(leaf.detach().requires_grad_())
        return forward.sources[-1].clone()  # which code may write into

    register = Tensor.register_hook

    def note(tensor: Tensor, hook: Any) -> Any:
        forward.has_hooks = True
        return register(tensor, hook)

    with ExitStack() as stack:
        for module in model.modules():
            handle = module.register_forward_hook(lambda _, args, output: pytree.tree_map(follow, output))
            stack.callback(handle.remove)
        stack.enter_context(patch.object(Tensor, "register_hook", note))
        stack.enter_context(torch.enable_grad())
        yield forward
