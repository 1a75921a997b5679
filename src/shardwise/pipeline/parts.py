"""A stage's forward: the model's own, with what other stages compute left out.

The units between which a model is cut run one after another in every forward. On a rank whose stage begins with unit k,
units before it are not run: unit k - 1 returns what the stage before has sent, the output of its own k - 1, and earlier
ones return ghosts, tensors of a shape without values. Behind the stage's last unit the forward ends, and its output is
what the next stage gets. All other code of the model, such as for masks and positions, runs on every stage. Where it
hands a ghost, or what it has computed from one, to a unit that does run, a value crosses the cut that is not sent: that
is refused by name.

The forward of the second of two stages, cut before block 2:

    embed    block 0   block 1             block 2   block 3   head
    ghost    ghost     what was received   runs      runs      runs
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise._torch_private import Ghosts, pytree
from shardwise.config import ConfigError
from shardwise.hooks import replace_forward
from shardwise.pipeline.left_on import Traces
from shardwise.pipeline.packing import named_tuples_of
from shardwise.pipeline.recorded import put_recorded, with_recorded, without_recorded
from shardwise.wearing import Call, answer_calls


class CutError(ConfigError):
    """A model cannot be cut there: a value crosses the cut that is not the output of the unit before it."""


class _StageDone(BaseException):
    """Ends the model's forward behind the stage's last unit; no `except Exception` of a model may stop it."""

    def __init__(self, output: Any) -> None:
        self.output = output


class StageForward:
    """Has a model's forward compute one stage at a time, between `begin` and `end`; otherwise it is the model's own.

    Made before modules are split or parameters moved, since it copies what it needs of the model's shapes; `install`
    is called behind that.

    Args:
        model: of which this rank computes some stages.
        units: names of the units' modules, in the order in which they run, by stage.
        held: the stages of this rank.
        device: of its tensors.
        is_simulated: nothing has values, so ghosts cannot be told from what is received.
        dtypes: in which parameters will be computed with, by their identities.

    Attributes:
        types: of containers in boundary values, which torch's pytree has not registered.
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
        self._position: dict[int, int] = {}  # of the first call in a forward
        self._stages_of: dict[int, set[int]] = {}
        for index, module in enumerate(self._modules):
            self._position.setdefault(id(module), index)
            stage = next(stage for stage, end in enumerate(ends) if index < end)
            self._stages_of.setdefault(id(module), set()).add(stage)
        self._stage = 0
        self.types = named_tuples_of(model)
        self._kinds = [type(module) for module in self._modules]
        self._is_simulated = is_simulated
        self._ghosts = Ghosts(device, is_simulated, dtypes)
        self._ghostly = self._make_ghostly(held)
        num_skipped = max((self._range_of[stage][0] for stage in held), default=0)
        self._traces = Traces(self._modules[: 0 if is_simulated else num_skipped], self._ghosts)
        self._answers: dict[Hashable, Any] = {}
        self._answer_of_kind: dict[type, Any] = {}
        self._start, self._stop = 0, len(self._names)
        self._next = 0
        self._received: Any = None
        self._is_on = False

    def install(self) -> list[Callable[[], None]]:
        """Let the units' calls and the model's forward follow the stage; returns what undoes it, in reverse order."""
        undo = [replace_forward(self._model, self._ended(self._model.forward))]
        undo += [answer_calls(module, self._answer) for module in {id(each): each for each in self._modules}.values()]
        return undo

    def begin(self, stage: int, received: Any) -> None:
        """Let the next forward be that of `stage`; `received` is what the stage before has sent."""
        self._stage, (self._start, self._stop) = stage, self._range_of[stage]
        self._received, self._next, self._is_on = received, 0, True

    def end(self) -> None:
        """Let forwards be the model's own again."""
        self._received, self._is_on = None, False
        self._traces.remove()

    def check_real(self, output: Any) -> None:
        """Raise where the model's output, or its loss, is computed from what another stage has and does not send.

        Raises:
            CutError: it is.
        """
        if any(self._ghosts.is_one(leaf) for leaf in pytree.tree_leaves(output)):
            raise self._not_sent("the output of the last stage, or its loss,")

    def _ended(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def staged(*args: Any, **kwargs: Any) -> Any:
            if not self._is_on and not self._is_simulated:
                raise RuntimeError(
                    "the model cannot run alone under mesh.pp, where each rank has some of the layers, also inside "
                    "engine.gathered(); call engine.train_step(batches) or engine.eval_step(batches), or, to generate, "
                    "engine.export_weights(folder) and load it without mesh.pp"
                )
            try:
                output = forward(*args, **kwargs)
            except _StageDone as done:
                return done.output
            if self._is_on and self._next < self._stop:
                raise CutError(
                    f"the forward ended without {self._names[self._stop - 1]}, with which its stage ends; cut between "
                    "units that run in every forward (pipeline.cut)"
                )
            return output

        return staged

    def _answer(self, module: nn.Module, own: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = self._position.get(id(module)) if self._is_on else None
        if index is None:  # nothing is staged, or this is a copy of the module
            return own(*args, **kwargs)
        if index < self._next and self._stage in self._stages_of[id(module)]:
            return own(*args, **kwargs)  # once more, within its stage
        self._pass(index)
        if index < self._start:
            self._traces.leave(module, self._kinds[index], args, kwargs)
            if index < self._start - 1:
                return self._ghost_of(index, args, kwargs)
            put_recorded(self._received)
            return without_recorded(self._received)
        if self._start > 0:
            self._check_arguments(index, args, kwargs)
        output = own(*args, **kwargs)
        if self._start > 0:
            self._check_output(index, output)
        if index == self._stop - 1 and self._stop < len(self._names):
            raise _StageDone(with_recorded(output))
        return output

    def _pass(self, index: int) -> None:
        """Note that a unit's turn has come."""
        name = self._names[index]
        if index < self._next:
            raise CutError(
                f"{name} runs behind {self._names[self._next - 1]} or once more in one forward, so the model is no "
                "chain of units there; keep such units on one stage (pipeline.cut)"
            )
        if self._next < self._start <= index:
            raise CutError(
                f"{name} runs though {self._names[self._start - 1]}, behind which its stage begins, has not; cut "
                "between units that run in every forward (pipeline.cut)"
            )
        if index >= self._stop:
            raise CutError(
                f"{name} runs though {self._names[self._stop - 1]}, behind which the stage before ends, has not; cut "
                "between units that run in every forward (pipeline.cut)"
            )
        self._next = index + 1

    def _check_arguments(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not any(self._ghosts.is_one(leaf) for leaf in pytree.tree_leaves((args, kwargs))):
            return
        given = inspect.signature(self._modules[index].forward).bind(*args, **kwargs).arguments
        name = next(
            key for key, value in given.items() if any(self._ghosts.is_one(leaf) for leaf in pytree.tree_leaves(value))
        )
        raise self._not_sent(f"argument {name} of {self._names[index]}")

    def _check_output(self, index: int, output: Any) -> None:
        if any(self._ghosts.is_one(leaf) for leaf in pytree.tree_leaves(output)):
            raise self._not_sent(f"the output of {self._names[index]}")

    def _not_sent(self, what: str) -> CutError:
        return CutError(
            f"{what} is computed from a value of an earlier stage, which is not the output of "
            f"{self._names[self._start - 1]} and so is not sent; return it from there, or move pipeline.cut"
        )

    def _ghost_of(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a skipped unit would have returned, without values."""
        ghostly = self._ghostly.get((index, self._start))
        example = without_recorded(self._received) if ghostly is None else (args, kwargs)
        leaves, structure = pytree.tree_flatten(example)
        key = (index if ghostly is not None else -1, structure, tuple(map(_fingerprint, leaves)))
        if key not in self._answers:
            self._answers[key] = self._make_answer(self._kinds[index], ghostly, args, kwargs)
        return self._answers[key]

    def _make_answer(self, kind: type, ghostly: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def like(leaf: Any) -> Any:
            return self._ghosts.like(leaf) if isinstance(leaf, Tensor) else leaf

        if ghostly is not None:
            own_args, own_kwargs = pytree.tree_map(like, (args, kwargs))
            try:
                with torch.no_grad(), self._ghosts.only():
                    self._answer_of_kind[kind] = ghostly(*own_args, **own_kwargs)
                return self._answer_of_kind[kind]
            except Exception:  # what it does depends on values, as where experts share tokens out
                if kind in self._answer_of_kind:
                    return self._answer_of_kind[kind]
        return pytree.tree_map(like, without_recorded(self._received))

    def _make_ghostly(self, held: Sequence[int]) -> dict[tuple[int, int], nn.Module]:
        """Copies without values of the units that a stage skips, for the shapes that the model's code asks for.

        A unit of the same class as the one whose output was received returns what is like that.
        """
        made: dict[tuple[int, int], nn.Module] = {}
        copies: dict[int, nn.Module] = {}
        for start, _ in (self._range_of[stage] for stage in held):
            for index in range(start - 1):
                module = self._modules[index]
                if type(module) is not type(self._modules[start - 1]):
                    if index not in copies:
                        tensors = [*module.parameters(), *module.buffers()]
                        copies[index] = copy.deepcopy(module, {id(each): self._ghosts.like(each) for each in tensors})
                    made[index, start] = copies[index]
        return made


def _fingerprint(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    return leaf if isinstance(leaf, int | float | str | bool) else type(leaf).__name__
