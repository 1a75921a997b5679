"""Runs a stage's forward: its units one after the other, or the model's own forward without units of other stages.

An `nn.Sequential` says by its class that each entry gets the output of the one before, and no more. So where the units
are its entries, a stage calls its own. The code of any other model may do more between its units: then its forward
runs, in which units of other stages are skipped.

On a rank whose stage begins with unit k, the stage's own units run. Unit k - 1 returns what the stage before has sent,
which is the output of unit k - 1 there. All other units return placeholders: tensors with a shape and no values. The
order in which the model calls them does not matter. The output of the stage's last unit is sent to the next stage, and
the model goes on with placeholders on torch's meta device, where ops cost little. All other code of the model, such as
for masks and positions, runs on every stage. Where it passes a placeholder, or what it computed from one, to a unit
that does run, a value crosses the cut that is not sent: an error names it. What code after the stage's last unit
returns or raises does not count: the later stages run it too.

The forward of the second of two stages, cut before block 2:

    embed         block 0       block 1             block 2       block 3       head
    placeholder   placeholder   what was received   runs          runs          runs

And of the first:

    runs          runs          runs                placeholder   placeholder   placeholder
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.comm.agreement import Agreement
from shardwise.comm.loss import LossSum
from shardwise.config.errors import EngineError
from shardwise.pipeline.carried_calls import CarriedCalls, HookCarrier, without_recorded
from shardwise.pipeline.pytree_codec import named_tuples_of, tensors_in
from shardwise.pipeline.root_state import NO_PIPELINE, RootState
from shardwise.pipeline.skipped_units import CutError, SkippedUnits
from shardwise.runtime.class_swap import Call, intercept_forward
from shardwise.runtime.forward_state import is_remembered
from shardwise.runtime.module_calls import replace_forward
from shardwise.runtime.placeholders import PlaceholderTensors
from shardwise.runtime.torch_private import (
    NO_VALUE_ERRORS,
    pytree,
    replaced_checkpoints,
)
from shardwise.runtime.user_hooks import is_in_function, without_user_hooks

_UNUSED: Final = "appears to not have been used in the graph"  # as torch says it of a derivative
_FIX: Final = f"name the modules that compute it from the inputs alone in pipeline.replicate, or {NO_PIPELINE}"


class _Writable(torch.autograd.Function):
    """Returns a tensor over the same memory that is no leaf."""

    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


def _writable(received: Tensor) -> Tensor:
    """Return what a stage's first unit may write into, as an activation in place does; torch refuses that of a leaf."""
    return _Writable.apply(received) if received.requires_grad else received


class StageForward:
    """Makes a model's forward compute one stage, between `begin` and `end`; otherwise the forward is the model's own.

    Make it before modules are split or parameters moved, since it copies the shapes that it needs of the model; call
    `install` after that.

    Args:
        model: the model of which this rank computes some stages.
        units: names of the units' modules by stage; where one module has several names, in the order of its calls.
        is_simulated: True where no tensor has values, so that placeholders look like received tensors.
        dtypes: the dtype in which each parameter will be computed with, by the parameter's `id`; None keeps its own.

    Attributes:
        types: container types in boundary values that torch's pytree has not registered.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Sequence[str]],
        held: Sequence[int],
        device: torch.device,
        is_simulated: bool = False,
        dtypes: Mapping[int, torch.dtype] | None = None,
    ) -> None:
        self._model = model
        self._names = [name for names in units for name in names]
        ends = [sum(len(names) for names in units[: stage + 1]) for stage in range(len(units))]
        self._range_of = [(end - len(names), end) for end, names in zip(ends, units, strict=True)]
        self._modules = [model.get_submodule(name) for name in self._names]
        self._positions: dict[int, list[int]] = {}  # by id of a module, the indices of its calls in a forward
        for index, module in enumerate(self._modules):
            self._positions.setdefault(id(module), []).append(index)
        self.types = CarriedCalls, *named_tuples_of(model)
        self._kinds = [_kind_of(module) for module in self._modules]
        self._is_simulated = is_simulated
        entries = [name for name, _ in model.named_children()]
        self._is_chain = type(model).forward is nn.Sequential.forward and self._names == entries
        self._placeholders = PlaceholderTensors(device, is_simulated, dtypes)
        self._placeholder_modules = {} if self._is_chain else self._make_placeholder(held)
        self._skipped = (
            None if is_simulated else SkippedUnits(model, self._names, self._range_of, held, self._placeholders)
        )
        self._answers: dict[Hashable, Any] = {}
        self._answer_of_class: dict[type, Any] = {}
        self._start, self._stop = 0, len(self._names)
        self._num_calls: dict[int, int] = {}
        self._guessed: str | None = None
        self._received: Any = None
        self._like_known: Any = None  # what units of the class at the boundary return
        self._passes = _Passes()
        self._sent: list[Any] = []  # the output of the stage's last unit, once it has run
        self._is_on = False
        places = [] if is_simulated else [*zip(self._names, self._modules, strict=True)]
        self._hooks = HookCarrier(model, places, holds_loss=len(units) - 1 in held)
        is_watched = not (is_simulated or self._is_chain)
        self._root = RootState(model, self._modules, held, len(units)) if is_watched else None

    def install(self, carried: Mapping[str, list[Any]] | None = None) -> list[Callable[[], None]]:
        """Make the units' calls and the model's forward follow the stage; return what undoes it, in reverse order.

        Args:
            carried: lists that units add to; each stage begins with what those before it have added.
        """
        self._hooks.lists.update(carried or {})
        undo = [replace_forward(self._model, self._ended(self._model.forward))]
        if self._is_chain:
            return undo
        undo += [
            intercept_forward(module, self._answer) for module in {id(inner): inner for inner in self._modules}.values()
        ]
        return undo

    def begin_step(self) -> None:
        """Take note of the hooks that users have on modules."""
        self._hooks.begin_step()

    def begin(self, stage: int, received: Any) -> None:
        """Make the next forward that of `stage`; `received` is what the stage before has sent."""
        self._start, self._stop = self._range_of[stage]
        value = self._hooks.begin(self._own, self._stop == len(self._names), received)
        self._received, self._like_known, self._is_on = value, None, True
        self._passes.begin(torch.is_grad_enabled())
        self._num_calls.clear()
        self._sent.clear()
        self._guessed = None
        self._placeholders.begin()
        if self._root is not None:
            self._root.begin(stage, lambda: sum(self._num_calls.values()))
        if self._skipped is not None:
            self._skipped.begin(stage)

    def end_step(self, agreement: Agreement | None = None) -> None:
        """End a step, or an evaluation: the model has the state that its own forwards would have left.

        Args:
            agreement: of the ranks of the pipeline, where a training step ends.

        Raises:
            ConfigError: a stage has read state that only a later one can write.
        """
        if self._root is not None and agreement is not None:
            self._root.agree(agreement)
        self.compare_left(agreement)
        if self._root is not None:
            self._root.end_step()

    def compare_left(self, agreement: Agreement | None) -> None:
        """Compare what the stages' units have left with what other stages read of them; also after an evaluation.

        Raises:
            ConfigError: a stage has read what a unit of another one has left.
        """
        if self._skipped is not None and agreement is not None:
            self._skipped.agree(agreement)

    def end(self) -> None:
        """Make forwards the model's own again."""
        if self._skipped is not None:
            self._skipped.end()
        if self._root is not None:
            self._root.end()
        self._received, self._like_known, self._is_on = None, None, False
        self._hooks.end()
        self._sent.clear()

    @property
    def _own(self) -> range:
        """Return the indices of the stage's units."""
        return range(self._start, self._stop)

    def read_loss(self, compute: Callable[[], LossSum]) -> LossSum:
        """Compute the loss of the model's output, which may have placeholders in it.

        Raises:
            CutError: the loss is computed from a value that another stage has and does not send.
        """
        try:
            total = compute()
        except NO_VALUE_ERRORS as error:
            raise self._not_sent("the loss") from error
        except AttributeError as error:
            if self._skipped is not None and (left := self._skipped.explain(error)):
                raise left from error
            raise
        if any(self._placeholders.is_one(leaf) for leaf in (total.total, total.count)):
            raise self._not_sent("the loss")
        return total

    def _ended(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def staged(*args: Any, **kwargs: Any) -> Any:
            if not self._is_on and not self._is_simulated:
                raise EngineError(
                    "pipeline-rank-alone",
                    "the model cannot run alone under mesh.pp, where each rank has some of the layers, also inside "
                    "engine.gathered(); call engine.train_step(batches) or engine.eval_step(batches), or, to generate, "
                    "engine.export_weights(folder) and load it without mesh.pp",
                )
            if self._is_on and self._is_chain:
                return self._run_chain(*args, **kwargs)
            tracks = self._is_on and self._passes.tracks
            watching = replaced_checkpoints(self._first_pass, self._is_tracked) if tracks else nullcontext()
            try:
                with watching:
                    output = forward(*args, **kwargs)
            except CutError:
                raise
            except Exception as error:
                if not self._sent:
                    if self._is_on and self._skipped is not None and (left := self._skipped.explain(error)):
                        raise left from error
                    if self._is_on and self._start and _UNUSED in str(error):
                        raise self._derives(error) from error
                    if self._is_on and (self._guessed or isinstance(error, NO_VALUE_ERRORS)):
                        raise self._reads_values(error) from error
                    raise
            if self._sent:
                return self._sent.pop()
            if self._is_on:
                self._check_ended()
            return output

        self._passes = _Passes(top=staged.__code__)
        return functools.wraps(forward)(staged)

    def _run_chain(self, input: Any) -> Any:  # noqa: A002 (the name that `nn.Sequential.forward` has)
        """Run the stage's units of an `nn.Sequential`."""
        self._hooks.put_recorded(self._received)
        received = without_recorded(self._received)
        value = pytree.tree_map_only(Tensor, _writable, received) if self._start else input
        if self._stop == len(self._names):
            self._hooks.show(self._start)
        for index in self._own:
            module = self._modules[index]
            value = module(value) if self._skipped is None else self._skipped.run(index, module, (value,), {})
        if self._stop < len(self._names):
            value = self._hooks.pack(self._own, value)
        return value

    def _check_ended(self) -> None:
        """Check that the forward, which has returned, has run all units of the stage."""
        missing = None
        if self._stop < len(self._names):
            missing = f"{self._names[self._stop - 1]}, with which its stage ends"
        elif self._start and id(self._modules[self._start - 1]) not in self._num_calls:
            missing = f"{self._names[self._start - 1]}, after which its stage begins"
        if missing:
            raise CutError(
                "cut-unit-not-run",
                f"the forward ended without {missing}; cut between units that run in every forward (pipeline.cut), or "
                f"{NO_PIPELINE}",
            )

    def _derives(self, error: Exception) -> CutError:
        return CutError(
            "cut-derivative",
            f"the forward of {type(self._model).__name__} takes a derivative through layers of another stage, whose "
            f"graph is not here ({type(error).__name__}: {next(iter(str(error).splitlines()), '')}); {NO_PIPELINE}",
        )

    def _reads_values(self, error: Exception) -> CutError:
        named = f" such as what {self._guessed} returns" if self._guessed else ""
        return CutError(
            "cut-reads-values",
            f"the code of {type(self._model).__name__} between its units needs values that another stage has{named} "
            f"({type(error).__name__}: {next(iter(str(error).splitlines()), '')}); {_FIX}",
        )

    def _answer(self, module: nn.Module, own: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._passes.repeated is not None and id(module) in self._positions:
            noted = next(self._passes.repeated)
            output = own(*args, **kwargs) if noted.is_run else None
            return noted.value if noted.has_value else output
        if not self._is_on or id(module) not in self._positions:  # or this is a copy of the module
            return own(*args, **kwargs)
        positions, num_calls = self._positions[id(module)], self._num_calls.get(id(module), 0)
        index = positions[min(num_calls, len(positions) - 1)]
        if self._root is not None and not self._num_calls:
            self._root.begin_units()
        self._num_calls[id(module)] = num_calls + 1
        is_run = not self._sent and self._start <= index < self._stop
        if is_run:
            self._check_function(index)
            output = self._run(index, own, args, kwargs)
        else:
            output = self._skip(index, module, num_calls, args, kwargs)
        answer = _Answer(is_run, not is_run or bool(self._sent), output if not is_run or self._sent else None)
        for noted_answers in self._passes.noted:
            noted_answers.append(answer)
        return output

    def _skip(
        self, index: int, module: nn.Module, num_calls: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return what was received for a unit of another stage, or a placeholder."""
        if self._sent:
            if self._is_simulated:  # where other placeholders would count as memory
                return self._like_known
            return self._without_device(self._placeholder_of(index, args, kwargs))
        if self._skipped is not None:
            self._skipped.skip(module, self._kinds[index][0], args, kwargs)
        if index != self._start - 1:
            return self._placeholder_of(index, args, kwargs)
        if num_calls >= len(self._positions[id(module)]):
            raise CutError(
                "cut-unit-repeats",
                f"{self._names[index]} runs more than once in one forward, so no stage can end with it; move "
                f"pipeline.cut, or name a module that holds it and the loop in pipeline.units, or {NO_PIPELINE}",
            )
        self._check_function(index)
        # Here, since the unit before the cut returns here: what the model records from now on comes after what the
        # earlier stages have recorded, as in one process.
        self._hooks.put_recorded(self._received)
        if self._stop == len(self._names):
            self._hooks.show(self._start)
        return _in_own_containers(without_recorded(self._received))

    @contextmanager
    def _first_pass(
        self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[Callable[..., Any]]:
        """Note what units return in the first pass of a function that code checkpoints: the second is to get the same.

        The second pass runs in the backward, where the model's forward is its own again.
        """
        if is_remembered(function):
            yield function
            return
        noted: list[_Answer] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            if any(each is noted for each in self._passes.noted):
                return function(*args, **kwargs)
            with self._passes.repeating(noted):
                return function(*args, **kwargs)

        self._passes.noted.append(noted)
        try:
            yield call
        finally:
            self._passes.noted.pop()

    def _is_tracked(self, args: Sequence[Any]) -> bool:
        """Say whether autograd tracks a reentrant checkpoint with these arguments: one of them requires gradients."""
        tensors = tensors_in(args)
        is_known = not any(map(self._placeholders.is_one, tensors))
        given = tensors if is_known else tensors_in(without_recorded(self._received))
        return any(tensor.requires_grad for tensor in given)

    def _check_function(self, index: int) -> None:
        """Check that autograd sees a unit at a cut, which the forward of a function of its own hides.

        Raises:
            CutError: it does not.
        """
        is_cut = index == self._start - 1 or index == self._stop - 1 < len(self._names) - 1
        if is_cut and self._passes.tracks and self._passes.is_in_function(inspect.currentframe()):
            raise CutError(
                "cut-inside-function",
                f"{self._names[index]}, with which a stage ends, runs inside the forward of a torch.autograd.Function, "
                "which hides it from the stage's backward; use torch.utils.checkpoint.checkpoint or recompute.mode in "
                f"its place, move pipeline.cut, or {NO_PIPELINE}",
            )

    def _run(self, index: int, own: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit of the stage; after the last one the model goes on with placeholders."""
        self._check_arguments(index, args, kwargs)
        output = own(*args, **kwargs) if self._skipped is None else self._skipped.run(index, own, args, kwargs)
        if self._has_placeholders(output):
            raise self._not_sent(f"the output of {self._names[index]}")
        if index == self._stop - 1 and self._stop < len(self._names):
            self._sent.append(self._hooks.pack(self._own, _in_own_containers(output)))
            # From here on nothing of the forward counts for this stage, but the model's code must reach its end. On
            # meta that takes no memory and no kernels.
            self._like_known = self._without_device(output)
            if self._root is not None:
                self._root.end_units()
            if self._skipped is not None:
                self._skipped.end_units()
            return self._like_known
        return output

    def _check_arguments(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._has_placeholders((args, kwargs)):
            return
        given = inspect.signature(self._modules[index].forward).bind(*args, **kwargs).arguments
        name = next(key for key, value in given.items() if self._has_placeholders(value))
        raise self._not_sent(f"argument {name} of {self._names[index]}")

    def _has_placeholders(self, value: Any) -> bool:
        return any(map(self._placeholders.is_one, tensors_in(value)))

    def _not_sent(self, what: str) -> CutError:
        sent = (
            f"not the output of {self._names[self._start - 1]} and so is not sent" if self._start else "not there yet"
        )
        hint = "" if self._skipped is None else self._skipped.hint
        return CutError(
            "cut-value-not-sent",
            f"{what} is computed from a value of another stage{hint}, which is {sent}; return it from there, move "
            f"pipeline.cut, {_FIX}",
        )

    def _placeholder_of(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return placeholders of what a skipped unit would have returned."""
        kind = self._kinds[index]
        last = (self._stop if self._sent else self._start) - 1
        if last >= 0 and kind[0] is self._kinds[last][0]:
            if self._like_known is None:
                self._like_known = self._like(without_recorded(self._received))
            return self._like_known
        key = _key_of(kind, args, kwargs)
        if key in self._answers:
            return self._answers[key]
        given = self._like((args, kwargs))
        with suppress(Exception), torch.no_grad(), self._placeholders.only():
            self._answers[key] = self._answer_of_class[kind[0]] = self._placeholder_modules[kind](*given[0], **given[1])
            return self._answers[key]
        with suppress(Exception), torch.no_grad():  # values of the batch may say how large it is
            return self._placeholder_modules[kind](*args, **kwargs)
        self._guessed = self._names[index]  # it depends on values of parameters, as where tokens are routed to experts
        return self._answer_of_class.get(kind[0], self._like(without_recorded(self._received)))

    def _like(self, tree: Any) -> Any:
        """Return a value with placeholders in place of its tensors."""
        return self._replaced(tree, self._placeholders.like)

    def _without_device(self, tree: Any) -> Any:
        """Return a value with tensors on the meta device in place of its tensors."""
        return self._replaced(tree, _on_meta)

    def _replaced(self, tree: Any, replace: Callable[[Tensor], Tensor]) -> Any:
        """Return a value with other tensors in place of its own; one of the same shape serves a lone tensor again."""
        if not isinstance(tree, Tensor):
            return pytree.tree_map_only(Tensor, replace, tree)
        key = replace, tree.shape, tree.stride(), tree.dtype
        if key not in self._answers:
            self._answers[key] = replace(tree)
        return self._answers[key]

    def _make_placeholder(self, held: Sequence[int]) -> dict[Hashable, nn.Module]:
        """Copy the units that a stage skips, without values, for the shapes that the model's code asks for.

        There is one copy for each class and shapes. A unit of the same class as the one whose output was received needs
        no copy: it returns placeholders in the shape of that output.
        """
        made: dict[Hashable, nn.Module] = {}
        for start, stop in (self._range_of[stage] for stage in held):
            for index, (module, kind) in enumerate(zip(self._modules, self._kinds, strict=True)):
                is_run = start - 1 <= index < stop
                if not is_run and kind not in made and (not start or kind[0] is not self._kinds[start - 1][0]):
                    tensors = [*module.parameters(), *module.buffers()]
                    with suppress(Exception):  # the shapes of a unit that cannot be copied are guessed
                        memo = {id(tensor): self._placeholders.like(tensor) for tensor in tensors}
                        made[kind] = without_user_hooks(copy.deepcopy(module, memo))
        return made


class _Answer(NamedTuple):
    """Says what a unit's call has returned.

    Attributes:
        is_run: the unit is of the stage, and has run.
        has_value: the call has returned `value`; otherwise what the unit returns.
    """

    is_run: bool
    has_value: bool
    value: Any


@dataclass
class _Passes:
    """Holds what units return in functions that code checkpoints.

    Attributes:
        tracks: the stage's forward has a backward.
        noted: what they returned in the first passes that are under way.
        repeated: what a second pass returns of it, in the same order.
        top: code that calls the model's own forward.
        plain: code around units that is no forward of an autograd function.
    """

    tracks: bool = False
    noted: list[list[_Answer]] = field(default_factory=list)
    repeated: Iterator[_Answer] | None = None
    top: CodeType | None = None
    plain: set[CodeType] = field(default_factory=set)

    def begin(self, tracks: bool) -> None:
        """Begin a forward."""
        self.tracks, self.noted = tracks, []

    def is_in_function(self, frame: FrameType | None) -> bool:
        """Say whether a frame of the forward is inside that of a function of autograd's."""
        return is_in_function(frame, self.top, self.plain)

    @contextmanager
    def repeating(self, noted: list[_Answer]) -> Iterator[None]:
        """Let units return inside the context what they returned in a first pass."""
        outer, self.repeated = self.repeated, iter(noted)
        try:
            yield
        finally:
            self.repeated = outer


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _in_own_containers(value: Any) -> Any:
    """Copy a boundary value's lists and dicts, which the model may write into, and not its tensors."""
    return pytree.tree_map(lambda leaf: leaf, value)


def _kind_of(module: nn.Module) -> tuple[type, Hashable]:
    """Return a module's class and its parameters' shapes: modules that have both in common return equal shapes."""
    return type(module), tuple(tuple(parameter.shape) for parameter in module.parameters())


def _key_of(kind: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Return what decides on the shapes that a unit returns: its kind, and the shapes of what it is given."""
    if not kwargs and all(isinstance(value, Tensor) for value in args):  # as mostly; a pytree takes longer
        return kind, tuple(map(_fingerprint, args))
    leaves, structure = pytree.tree_flatten((args, kwargs))
    return kind, structure, tuple(map(_fingerprint, leaves))


def _fingerprint(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    return leaf if isinstance(leaf, int | float | str | bool) else type(leaf).__name__
