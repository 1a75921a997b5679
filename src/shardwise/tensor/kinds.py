"""Decide which modules can be split: those that compute what a linear layer does, and those that look rows up.

For a subclass of torch's class the code and the result decide, not the name.
"""

from __future__ import annotations

import copy
import dis
import inspect

import torch
from torch import nn
from torch.nn import functional as F

from shardwise.runtime.torch_private import unseen_by_op_modes


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer: torch's, Hugging Face's Conv1D, or a subclass that computes the same.

    It must have a weight of two dims, at most a bias beside it, and no forward that was replaced on the object.
    """
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or "forward" in vars(module):
        return False
    if is_transposed(module) or type(module).forward is nn.Linear.forward:
        return True
    return isinstance(module, nn.Linear) and _multiplies(module)


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module is Hugging Face's Conv1D, whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf") and hasattr(module, "nx")


def is_lookup(module: nn.Module) -> bool:
    """Return whether a module is an embedding whose forward, its own or torch's, leaves the weight to torch's lookup.

    A forward of its own may change the indices and the rows found, as Gemma's scale does: these rows are whole.
    """
    if not isinstance(module, nn.Embedding) or "forward" in vars(module) or "weight" not in module._parameters:
        return False
    kinds = type(module).__mro__
    return all(_leaves_lookup(kind) for kind in kinds[: kinds.index(nn.Embedding)])


def _leaves_lookup(kind: type) -> bool:
    forward = vars(kind).get("forward")
    if forward is None:
        return True
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is None or not {"super", "forward"} <= set(code.co_names):
        return False
    names = [instruction.argval for instruction in dis.get_instructions(code)]
    after = [names[place + 1] for place, name in enumerate(names[:-1]) if name == "weight"]
    return set(after) <= {"dtype", "device"}


def _multiplies(module: nn.Linear) -> bool:
    """Return whether a subclass of torch's linear layer computes its product, tested on small numbers."""
    others = [*module.children(), *module.buffers(), *(set(module._parameters) - {"weight", "bias"})]
    if others or not module.weight.is_floating_point():
        return False
    probe = copy.copy(module)
    with unseen_by_op_modes(is_real=True), torch.device("cpu"), torch.no_grad():
        numbers = torch.Generator().manual_seed(0)
        x, weight, bias = (torch.randn(shape, generator=numbers).double() for shape in ((2, 3), (5, 3), (5,)))
        given = None if module.bias is None else nn.Parameter(bias)
        probe._parameters = {"weight": nn.Parameter(weight), "bias": given}
        probe.in_features, probe.out_features = 3, 5
        try:
            found = type(module).forward(probe, x)
        except Exception:  # whatever its code needs beyond a weight and a bias
            return False
        expected = F.linear(x, weight, given)
        return isinstance(found, torch.Tensor) and found.shape == expected.shape and torch.allclose(found, expected)
