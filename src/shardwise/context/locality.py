"""Prove by a run that a model computes its tokens apart from each other, but for attention: `cp` is wrong otherwise.

A copy of the model runs on the CPU. Its parameters are replaced by numbers that need little memory, and its attention
by a function of one token alone. It runs once with all tokens of a short sequence, and once with each half of them, as
ranks would have them. Where a half's outputs are not those of the whole, another operation reads several tokens, such
as a convolution, a shift, a sum, or a frequency that follows from the longest position. The module that does so is
found by its inputs and outputs. In training mode it runs once more, because code that runs in training alone may read
other tokens too, such as noise that is scaled by their number; what it draws is keyed by the tokens' places.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from shardwise.config.errors import ConfigError, EngineError
from shardwise.context.batch import main_input
from shardwise.dropout import KeyedDraws, key_dropouts
from shardwise.runtime.float64 import float64_throughout
from shardwise.runtime.forward_state import ForwardState, kept_generators, put_attributes, registered_buffers
from shardwise.runtime.forward_values import CONSTANTS, ValueBefore
from shardwise.runtime.module_calls import watch_calls
from shardwise.runtime.torch_private import pytree
from shardwise.runtime.user_hooks import followed, hooks_put_back

_LOG: Final = logging.getLogger("shardwise")
_TOLERANCE: Final = 1e-8  # of the largest

NO_CONTEXT: Final = "use mesh.dp_shard with zero.stage=3 in place of mesh.cp"

Inputs = Mapping[str, Any]
_Record = tuple[str, list[Tensor], list[Tensor]]
_Written = tuple[dict[str, Any], str, ValueBefore]  # what holds an attribute, its name, what it was


@dataclass(frozen=True)
class SplitRule:
    """Says by which rule of a config ranks have parts of a sequence, and what is said where a model does not keep it.

    Attributes:
        exception: where tokens of a sequence may meet.
        fix: what to do in place of the split.
        apart_code: of the error that tokens are computed from others.
        length_code: of the error that this is not known for a length.
    """

    key: str
    exception: str
    fix: str
    apart_code: str
    length_code: str


CONTEXT_RULE: Final = SplitRule("mesh.cp", "beside attention", NO_CONTEXT, "cp-tokens-apart", "cp-length-unproved")


class Splitting(Protocol):
    """Is how a copy of a model computes all of a sequence, or one of `degree` parts of it, in a proof."""

    rule: SplitRule
    degree: int

    def all_runs(self, copied: nn.Module, is_training: bool) -> AbstractContextManager[Any]:
        """Give the runs of a proof with values, in one mode of the copy, the numbers that the model draws."""

    def one_run(self, inputs: Inputs, part: int) -> AbstractContextManager[Any]:
        """Let the copy compute all tokens inside the context, part 0, or those of a rank, from 1 on."""

    def wrong_place(self) -> str:
        """Return the first code whose tokens in a part were others than in the whole, in words; empty for none."""


class ContextSplitting:
    """Splits all of a model, by its inputs; draws are keyed by the tokens' places."""

    rule = CONTEXT_RULE

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self._draws: KeyedDraws | None = None

    @contextmanager
    def all_runs(self, copied: nn.Module, is_training: bool) -> Iterator[None]:
        if not is_training:
            yield
            return
        self._draws = KeyedDraws(0, cp=self.degree)
        undo = key_dropouts(copied, self._draws, shares=self.rule.key)
        try:
            yield
        finally:
            self._draws = None
            for put_back in reversed(undo):
                put_back()

    def one_run(self, inputs: Inputs, part: int) -> AbstractContextManager[None]:
        if self._draws is None:
            return nullcontext()
        num_samples, num = main_input(inputs).shape[:2]
        held = None if part == 0 else (((part - 1) * num, part * num),)
        return self._draws.at(0, 0, 0, num_samples, held, num)

    def wrong_place(self) -> str:
        return ""


def attend_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Replace attention by a function of each token's own query, key and value.

    Args:
        q: [B, H, n, D]; k and v are [B, K, n, D].
    """
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    place = torch.linspace(-1.0, 1.0, q.shape[-1], dtype=q.dtype)  # turning both by one angle would not show in q k
    return v * (1.5 + torch.sin((q * k + q * place + k * place.square()).sum(-1, keepdim=True)))


Shapes = Mapping[str, tuple[int, ...]]


def copy_for_proof(
    model: nn.Module, rule: SplitRule = CONTEXT_RULE, shapes: Shapes = MappingProxyType({})
) -> nn.Module | None:
    """Return a copy without the model's values, in fp64 on the CPU; batch norms train. None if it cannot be copied.

    Args:
        shapes: of whole parameters, by name, where a rank has parts of them.
    """
    replaced: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        shape = shapes.get(name, tuple(parameter.shape))
        replaced[id(parameter)] = nn.Parameter(_numbers(shape), requires_grad=False)
    for buffer in model.buffers():
        is_missing = buffer.is_meta or type(buffer) is not Tensor
        own = _numbers(tuple(buffer.shape)) if is_missing else buffer.detach().to("cpu", copy=True)
        replaced[id(buffer)] = own.double() if buffer.is_floating_point() else own.to(buffer.dtype)
    try:
        copied = copy.deepcopy(model, replaced).eval()
    except Exception as error:
        warn_unproved(model, error, rule)
        return None
    for module in copied.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.train()
        elif type(module).forward is nn.Linear.forward:
            module.forward = _Mixed(module)
    return copied


def copy_again(copied: nn.Module) -> nn.Module:
    """Return a copy of a copy for a proof, because a run may leave something in a model, such as tables that grow."""
    return copy.deepcopy(copied, {id(parameter): parameter for parameter in copied.parameters()})


def check_tokens_apart(
    copied: nn.Module,
    splitting: Splitting,
    attempts: Sequence[Sequence[Inputs]],
    loss_weights: Sequence[Tensor | None] = (),
    is_watched: bool = True,
) -> None:
    """Check that a model's outputs for each part of a sequence are those for all of it, in training too.

    Args:
        copied: by `copy_for_proof`, with `attend_alone` for its attention.
        attempts: arguments for all tokens, and for each part of them; the first attempt that runs counts.
        loss_weights: of the loss that the model itself returns for all tokens and for each part.
        is_watched: whether to keep each module's inputs and outputs, so that an error can name the one that differs.

    Raises:
        ConfigError: the outputs differ.
    """
    with hooks_put_back(copied):
        for is_training, when in ((False, ""), (True, " in training")):
            if runs := _runs(copied, splitting, attempts, is_training, loss_weights, is_watched):
                _compare(copied, splitting, runs, when)
                _compare_kept(copied, splitting, runs, when)
        if is_watched:  # a long sequence would take much memory, and shows no more of this than a short one
            _check_backward(copied, splitting, attempts)


def _check_backward(copied: nn.Module, splitting: Splitting, attempts: Sequence[Sequence[Inputs]]) -> None:
    """Check the same of gradients, where hooks or functions of users run in the backward.

    Raises:
        ConfigError: a token's gradient is computed from those of others.
    """
    runs: list[list[Tensor]] = []
    with _mode_of(copied, is_training=True), splitting.all_runs(copied, True):
        for inputs in attempts:
            with suppress(Exception), float64_throughout():  # what does not run has been warned of
                if of_all := _gradients(copied, splitting, inputs[0], 0):
                    parts = enumerate(inputs[1:], start=1)
                    runs = [of_all, *(_gradients(copied, splitting, arguments, part) for part, arguments in parts)]
                break
    if runs and not all(map(is_like, *runs)):
        rule = splitting.rule
        raise ConfigError(
            rule.apart_code,
            f"{rule.key} splits sequences, and the backward of {type(copied).__name__} computes gradients of tokens "
            f"from those of others of their sequence, in a hook or a torch.autograd.Function; {rule.fix}",
        )


def _gradients(model: nn.Module, splitting: Splitting, inputs: Inputs, part: int) -> list[Tensor]:
    """Return the gradients of what a model's first modules return; none where no code of users computes them."""
    shape = tuple(main_input(inputs).shape[:2])
    with (
        splitting.one_run(inputs, part),
        kept_generators(),
        followed(model, shape) as forward,
        ForwardState(model).first() as record,
    ):
        output = model(**inputs)
        outputs = [leaf for leaf in _without_loss(output) if leaf.requires_grad]
        gradients = forward.gradients(outputs) if part or forward.has_code else []
    _put_back([*record.written()])
    return gradients


def _put_back(written: Sequence[_Written]) -> None:
    """Give a model the state back that a run has begun with, since all runs are to begin with the same."""
    made: dict[int, Any] = {}
    for attributes, name, before in written:
        if isinstance(attributes.get(name), bool):  # it may say that hooks are there, which stay
            continue
        with suppress(EngineError):  # of a large tensor there is no copy
            put_attributes(attributes, {name: before.remake(made)})


@dataclass(frozen=True)
class _Run:
    """Holds what a forward has returned, the weighted loss apart, what its modules were given and returned, and the
    numbers in the attributes that it has written.
    """

    outputs: list[Tensor]
    loss: list[Tensor]
    records: list[_Record]
    kept: dict[str, list[Any]]


def _runs(
    copied: nn.Module,
    splitting: Splitting,
    attempts: Sequence[Sequence[Inputs]],
    is_training: bool,
    loss_weights: Sequence[Tensor | None],
    is_watched: bool,
) -> list[_Run]:
    """Return what a model computes of all tokens and of each part; nothing where it does not run."""
    rule = splitting.rule
    with _mode_of(copied, is_training), splitting.all_runs(copied, is_training):
        for attempt, inputs in enumerate(attempts):
            runs: list[_Run] = []
            try:
                with torch.no_grad(), float64_throughout():
                    for part, (arguments, weight) in enumerate(zip_longest(inputs, loss_weights)):
                        runs.append(_run(copied, arguments, splitting.one_run(arguments, part), weight, is_watched))
                    return runs
            except ConfigError as error:
                raise ConfigError(
                    error.code, f"{rule.key} is not for {type(copied).__name__}: {error}; or {rule.fix}"
                ) from error
            except Exception as error:
                if attempt == len(attempts) - 1 and runs and isinstance(error, RuntimeError | IndexError | ValueError):
                    raise ConfigError(
                        rule.apart_code,
                        f"{rule.key} splits sequences, and {type(copied).__name__} runs on all tokens but fails on a "
                        f"rank's part of them: {error}; {rule.fix}",
                    ) from error
                if attempt == len(attempts) - 1:
                    warn_unproved(copied, error, rule)
    return []


@contextmanager
def _mode_of(copied: nn.Module, is_training: bool) -> Iterator[None]:
    """Let a copy train inside the context, or run as it is."""
    before = [(module, module.training) for module in copied.modules()]
    if is_training:
        copied.train()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def _compare(copied: nn.Module, splitting: Splitting, runs: Sequence[_Run], when: str) -> None:
    losses = [torch.stack(list(losses)).sum(0) for losses in zip(*(run.loss for run in runs[1:]), strict=False)]
    has_loss = all(map(is_close, runs[0].loss, losses))
    wrong_place = splitting.wrong_place()
    if has_loss and not wrong_place and all(map(is_like, *(run.outputs for run in runs))):
        return
    culprits = (
        name
        for (name, given, found), *others in zip(*(run.records for run in runs), strict=False)
        if all(map(is_like, given, *(other[1] for other in others)))
        and not all(map(is_like, found, *(other[2] for other in others)))
    )
    rule, name = splitting.rule, next(filter(None, culprits), "") or wrong_place or "the forward"
    raise ConfigError(
        rule.apart_code,
        f"{rule.key} splits sequences, and {name} of {type(copied).__name__} computes tokens{when} from others of "
        f"their sequence {rule.exception}, or from their number; {rule.fix}",
    )


def _compare_kept(copied: nn.Module, splitting: Splitting, runs: Sequence[_Run], when: str) -> None:
    of_all, *of_parts = (run.kept for run in runs)
    rule = splitting.rule
    for name, numbers in of_all.items():
        if not all(_is_same(numbers, part[name]) for part in of_parts if name in part):
            raise ConfigError(
                rule.apart_code,
                f"{rule.key} splits sequences, and {type(copied).__name__} keeps {name}, which its forward computes"
                f"{when} from all tokens, or from their number, and of which a rank has a part; {rule.fix}",
            )


def warn_unproved(model: nn.Module, error: Exception, rule: SplitRule = CONTEXT_RULE) -> None:
    """Warn that a model could not be run to prove that its sequences may be split."""
    _LOG.warning(
        "it could not be proved that %s computes its tokens apart from each other, as %s needs: %s: %s",
        *(type(model).__name__, rule.key, type(error).__name__, error),
    )


def _run(
    model: nn.Module,
    inputs: Inputs,
    around: AbstractContextManager[Any],
    loss_weight: Tensor | None,
    is_watched: bool,
) -> _Run:
    """Return what a model returns, and the inputs and outputs of each module, in the order in which forwards end.

    Args:
        around: what `Splitting.one_run` gives, entered while the model runs.
    """
    records: list[_Record] = []
    under_way: list[tuple[str, list[Tensor]]] = []
    watching = watch_calls(
        model,
        lambda name, _, args, kwargs: under_way.append((name, _floats((args, kwargs)))),
        lambda output: records.append((*under_way.pop(), _floats(output))),
    )
    with around, kept_generators():
        with watching if is_watched else nullcontext(), ForwardState(model).first() as record:
            output = model(**inputs)
        written = [*record.written()]
        kept = _numbers_in(model, written)
        if any(map(_counts, kept.values())):
            model(**inputs)  # a number that counts is another now; one that is made for a length is not
            again = _numbers_in(model, written)
            kept = {name: each for name, each in kept.items() if not (_counts(each) and _is_same(each, again[name]))}
    _put_back(written)
    loss = getattr(output, "loss", None)
    weighted = [] if loss_weight is None or loss is None else [loss.detach() * loss_weight.cpu()]
    return _Run(_floats(output), weighted, records, kept)


def _numbers_in(model: nn.Module, written: Sequence[_Written]) -> dict[str, list[Any]]:
    """Return the numbers and tensors in attributes of a model that a forward has written, by full name."""
    prefixes = {
        id(attributes): f"{name}." if name else ""
        for name, module in model.named_modules()
        for attributes in (vars(module), registered_buffers(module))
    }
    found = {}
    for attributes, name, _ in written:
        value = attributes.get(name)
        is_object = hasattr(value, "__dict__") and not isinstance(value, (Tensor, *CONSTANTS))
        leaves = [value] if isinstance(value, Tensor) else pytree.tree_leaves(vars(value) if is_object else value)
        numbers = [leaf for leaf in leaves if isinstance(leaf, Tensor | int | float) and not isinstance(leaf, bool)]
        if numbers and id(attributes) in prefixes:
            found[prefixes[id(attributes)] + name] = [_copied(number) for number in numbers]
    return found


def _copied(number: Any) -> Any:
    return number.detach().clone() if isinstance(number, Tensor) else number


def _counts(numbers: Sequence[Any]) -> bool:
    """Say whether all numbers are integers."""
    return all(not each.is_floating_point() if isinstance(each, Tensor) else isinstance(each, int) for each in numbers)


def _is_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Say whether numbers are equal, where there are as many and their shapes are equal: others are of tokens."""
    if len(one) != len(other):
        return True
    pairs = [[torch.as_tensor(each).double() for each in pair] for pair in zip(one, other, strict=True)]
    return all(first.shape != second.shape or is_close(first, second) for first, second in pairs)


def _floats(value: Any) -> list[Tensor]:
    return [leaf.detach().clone() for leaf in _without_loss(value)]


def _without_loss(value: Any) -> list[Tensor]:
    if hasattr(value, "to_tuple"):  # an output of transformers; its loss is of all tokens
        value = [each for name, each in value.items() if name != "loss"]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def is_like(whole: Tensor, *parts: Tensor) -> bool:
    """Return whether the parts make up the whole along some dim, or each of them is the whole."""
    if all(part.shape == whole.shape for part in parts):
        return all(is_close(whole, part) for part in parts)
    for dim in range(whole.dim()):
        sizes = [part.shape[:dim] + part.shape[dim + 1 :] for part in (whole, *parts)]
        if len(set(sizes)) == 1 and sum(part.shape[dim] for part in parts) == whole.shape[dim]:
            return is_close(whole, torch.cat(parts, dim))
    return False


def is_close(one: Tensor, other: Tensor) -> bool:
    largest = one.nan_to_num(0.0, 0.0, 0.0).abs().max() if one.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=float(largest) * _TOLERANCE, equal_nan=True)


class _Mixed:
    """Returns a linear layer's output of the right size without the product, which depends on one token anyway."""

    def __init__(self, layer: Any) -> None:
        self._source = torch.arange(layer.out_features) % layer.in_features
        self._factors = _numbers((layer.out_features,))

    def __call__(self, x: Tensor) -> Tensor:  # [..., in] -> [..., out]
        return x[..., self._source] * self._factors.to(x.dtype)


def _numbers(shape: tuple[int, ...]) -> Tensor:
    """Return numbers that differ along every dim, in the memory of their edges; around 1 for a vector."""
    generator = torch.Generator().manual_seed(sum(shape))
    drawn = torch.rand(max(sum(shape) - len(shape) + 1, 1), generator=generator, dtype=torch.float64, device="cpu")
    drawn = drawn + 0.5 if len(shape) < 2 else (2.0 * drawn - 1.0) / max(shape[-1], 1) ** 0.5
    return drawn.as_strided(shape, [1] * len(shape))
