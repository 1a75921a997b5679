"""Prove, at the lengths that a run has, that blocks compute tokens apart from each other where ranks split sequences.

Inside a stack of Megatron's sequence parallelism a rank has a slice of the tokens, but in the regions of the plan, and
between column and row layers, it has all of them. `shardwise.tensor.prove` proves a plan for a short sequence
only. So when the first batch of some sizes comes, a copy of the model without its values runs with whole sequences, and
as each rank would: where a stack begins and where a row layer ends, it takes that rank's slice. Where the model's code
needs all tokens again, the slice must be that of the whole sequence, and the copy goes on with the whole.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config
from shardwise.context.apply import copy_alone
from shardwise.context.batch import by_name, for_proof
from shardwise.context.huggingface import describe_mask, is_huggingface
from shardwise.context.length_proof import (
    LengthProofs,
    ProofInputs,
    Signature,
    numbers_of_a_token,
    signature_of,
    sizes_of,
)
from shardwise.context.locality import Inputs, Shapes, SplitRule, attend_alone, copy_for_proof, is_close
from shardwise.dropout.still import StillFunctions
from shardwise.layout.tensor_plan import TensorLayout, TensorPlan, is_within
from shardwise.runtime.module_calls import call_before_forward, change_inputs, change_outputs
from shardwise.runtime.torch_private import is_fake, pytree
from shardwise.runtime.user_hooks import without_user_hooks
from shardwise.tensor.layers import place_of, with_first_tensor

_SHORT: Final = 16  # tokens of a rank in a proof that is done before that of a long sequence

SEQUENCE_RULE: Final = SplitRule(
    "tensor.sequence_parallel",
    "outside of the plan's regions",
    "make the module a region of the plan, or set tensor.sequence_parallel=false",
    "tp-tokens-apart",
    "tp-length-unproved",
)


def prove_sequences(model: nn.Module, tensor: TensorLayout, config: Config, shapes: Shapes) -> list[Callable[[], None]]:
    """Prove each new length before the first forward of a model that has it; call this before its modules change.

    Args:
        tensor: by which the model is split.
        shapes: of whole parameters, by name, where this rank has parts of them.

    Returns:
        functions that end this.
    """
    if not (config.tensor.sequence_parallel and tensor.degree > 1 and tensor.plan.stacks):
        return []
    is_cut = config.mesh.cp > 1
    is_plain = is_huggingface(model) and not is_cut  # its own attention takes its own masks
    copied = (copy_for_proof if is_plain else copy_alone)(model, SEQUENCE_RULE, shapes)
    if copied is None:
        return []
    without_user_hooks(copied)  # which see whole sequences in a run
    for module in copied.modules():  # nor would a loss of routers be given the logits of all tokens, as it is in a run
        if hasattr(getattr(module, "config", None), "output_router_logits"):
            setattr(module.config, "output_router_logits", False)  # noqa: B010
    if is_cut and is_huggingface(copied):
        for module in copied.modules():
            if hasattr(module, "base_model_prefix") and module.base_model is module:
                change_inputs(module, describe_mask)
    proof = _SequenceProof(copied, tensor.plan, tensor.degree, list(inspect.signature(model.forward).parameters))
    return [call_before_forward(model, proof).remove]


class _SequenceProof:
    """Proves the sizes of the inputs of each forward, once."""

    def __init__(self, copied: nn.Module, plan: TensorPlan, degree: int, names: list[str]) -> None:
        self._names, self._degree = names, degree
        crossings = _open_sequences(copied, plan, degree)
        per_token = numbers_of_a_token(copied)
        rows = [layer for layer in plan.layers if layer.style == "row"]
        num_heads = sum(max(part.num_units or 0 for part in layer.parts) for layer in rows)
        self._proofs = LengthProofs(copied, crossings, lambda length: per_token + num_heads * length, cuts_inputs=False)

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Prove the sizes of a forward's arguments.

        Raises:
            ConfigError: a block computes tokens from others.
        """
        try:
            inputs = {**by_name(list(args), self._names), **kwargs}
            sizes = sizes_of(inputs)
        except ConfigError:  # nothing has tokens
            return
        leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
        if sizes["tokens"] % self._degree or any(map(is_fake, leaves)):
            return  # an evaluation leaves such sequences whole
        others = {leaf.shape[1] for leaf in leaves if leaf.dim() > 1 and leaf.shape[0] == sizes["samples"]}
        for number, size in enumerate(sorted(others - {sizes["tokens"], 1}), 2):
            sizes[f"tokens_{number}"] = size
        signature = signature_of(inputs, sizes)
        if self._proofs.is_known(signature, sizes):
            return
        with ThreadPoolExecutor(1) as pool:  # a thread of its own has no mode of the forward that is about to run
            pool.submit(self._prove, inputs, signature, sizes).result()

    def _prove(self, inputs: Inputs, signature: Signature, sizes: dict[str, int]) -> None:
        length = sizes["tokens"]
        short = min(length, _SHORT * self._degree)
        for number in sorted({short, length}) if self._proofs.is_costly(sizes) else [length]:
            make = functools.partial(self._inputs, inputs, length, number)
            self._proofs.prove(signature, {**sizes, "tokens": number}, make)

    def _inputs(self, inputs: Inputs, length: int, number: int) -> ProofInputs:
        """Return the first tokens of the inputs for each run."""

        def cut(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf if isinstance(leaf, _VALUES) else copy.deepcopy(leaf)  # such as a cache, which is written
            is_of_pairs = leaf.dim() > 2 and leaf.shape[-2:] == (length, length)
            dims = {min(leaf.dim(), 2) - 1, *((leaf.dim() - 2, leaf.dim() - 1) if is_of_pairs else ())}
            for dim in dims - {-1}:
                leaf = leaf.narrow(dim, 0, number) if leaf.shape[dim] == length else leaf
            return for_proof(leaf)

        return ProofInputs([[pytree.tree_map(cut, dict(inputs)) for _ in range(1 + self._degree)]])


_VALUES: Final = (int, float, str, type(None), torch.dtype, torch.device)


@dataclass
class _Crossings:
    """Splits sequences inside of stacks; see `shardwise.context.locality.Splitting`.

    Attributes:
        wholes: what the run with all tokens had where code needs all of them, and the module that does.
    """

    degree: int
    rule: SplitRule = SEQUENCE_RULE
    wholes: list[tuple[str, Tensor]] = field(default_factory=list)
    _part: int = field(default=0, init=False)
    _num_crossed: int = field(default=0, init=False)
    _wrong_place: str = field(default="", init=False)
    _keeps_whole: bool = field(default=False, init=False)
    _num_samples: int = field(default=1, init=False)

    @contextmanager
    def all_runs(self, copied: nn.Module, is_training: bool) -> Iterator[None]:
        self._wrong_place = ""
        try:
            with StillFunctions() if is_training else nullcontext():
                yield
        finally:
            self.wholes.clear()

    @contextmanager
    def one_run(self, inputs: Inputs, part: int) -> Iterator[None]:
        self._part, self._num_crossed, self._keeps_whole = part, 0, False
        if part == 0:
            self.wholes.clear()
        with _AttentionAlone():
            yield
        if self._num_crossed < len(self.wholes):  # a part needs others less often
            self._note(self.wholes[self._num_crossed][0])

    def wrong_place(self) -> str:
        return self._wrong_place

    def enter(self, x: Tensor) -> Tensor:
        """Return a rank's slice of a whole sequence, where a stack begins."""
        self._keeps_whole, self._num_samples = x.shape[1] % self.degree != 0, x.shape[0]
        return self.split(x)

    def split(self, x: Tensor) -> Tensor:
        """Return a rank's slice of a whole sequence."""
        if self._part == 0 or self._keeps_whole:
            return x
        if x.dim() == 2:  # tokens in one dim, as shared experts get them
            return self.split(x.unflatten(0, (self._num_samples, -1))).flatten(0, 1)
        size = x.shape[1] // self.degree
        return x.narrow(1, (self._part - 1) * size, size)

    def gather(self, x: Tensor, name: str) -> Tensor:
        """Return the whole sequence of a slice, for a module of a name."""
        if self._keeps_whole:
            return x
        if x.dim() == 2:
            return self.gather(x.unflatten(0, (self._num_samples, -1)), name).flatten(0, 1)
        number, self._num_crossed = self._num_crossed, self._num_crossed + 1
        if self._part == 0:
            self.wholes.append((name, x.clone()))  # code may write to it
            return x
        if is_fake(x):
            return x.new_empty(x.shape[0], x.shape[1] * self.degree, *x.shape[2:])
        known_name, whole = self.wholes[number] if number < len(self.wholes) else ("", x)
        slice_ = whole.narrow(1, (self._part - 1) * x.shape[1], x.shape[1]) if known_name == name else x
        if known_name != name or slice_.shape != x.shape or not is_close(slice_, x):
            self._note(name)
        return whole.clone()

    def _note(self, name: str) -> None:
        self._wrong_place = self._wrong_place or f"the code before {name}"


class _AttentionAlone(TorchFunctionMode):
    """Puts a function of one token in the place of torch's attention, of which a rank sees all tokens anyway."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is F.scaled_dot_product_attention and len(args) > 2:
            q, k, v = args[:3]
            if q.dim() == 4 and q.shape[2] == k.shape[2] and q.shape[1] % k.shape[1] == 0:
                return attend_alone(q, k, v)
        return func(*args, **(kwargs or {}))


def _open_sequences(copied: nn.Module, plan: TensorPlan, degree: int) -> _Crossings:
    """Make a copy take a rank's slice of the tokens wherever a split model does."""
    crossings = _Crossings(degree)
    inside = [name for stack in plan.stacks for name in stack.modules]
    regions = [region.module for region in plan.regions]
    for stack in plan.stacks:
        first = copied.get_submodule(stack.first)
        _change_argument(first, stack.first, stack.argument, crossings.enter)
    for region in plan.regions:
        if is_within(region.module, inside):
            for name in region.inputs:
                gather = _gathering(crossings, region.module)
                _change_argument(copied.get_submodule(region.module), region.module, name, gather)
    for layer in plan.layers:
        module = copied.get_submodule(layer.module)
        if layer.style == "column" and is_within(layer.module, inside) and not is_within(layer.module, regions):
            gather = _gathering(crossings, layer.module)
            change_inputs(module, _first_changed(gather))
        elif layer.style == "row" and is_within(layer.module, inside):
            change_outputs(module, crossings.split)
    for stack in plan.stacks:
        gather = _gathering(crossings, stack.last)
        change_outputs(copied.get_submodule(stack.last), _tensor_changed(gather, stack.last))
    return crossings


def _gathering(crossings: _Crossings, name: str) -> Callable[[Tensor], Tensor]:
    return lambda x: crossings.gather(x, name)


def _change_argument(module: nn.Module, name: str, argument: str, change: Callable[[Tensor], Tensor]) -> None:
    position = place_of(module, name, argument)
    change_inputs(module, lambda called, args, kwargs: position.change(args, kwargs, change))


def _first_changed(change: Callable[[Tensor], Tensor]) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    def changed(called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {name: change(value) for name, value in kwargs.items()}

    return changed


def _tensor_changed(change: Callable[[Tensor], Tensor], name: str) -> Callable[[Any], Any]:
    return lambda output: with_first_tensor(output, change, name)
