"""Build a model whose parameters hold recipes instead of values, so that no rank holds it whole.

Inside `init()` every module is built as usual, but a parameter's memory is freed as soon as it is registered. From
then on the ops on it are recorded on a tape (`shardwise.deferred_init.op_replay`), and the tape is replayed where code
reads the parameter. At the end the parameters move to the meta device; buffers and other tensors stay real.
`ParamInitializer` runs a recipe when the engine asks for one parameter's values.

A parameter does not move to meta at once, since much code, part of `torch.nn.init` too, does nothing to tensors there.

>>> with init(seed=7):
...     model = torch.nn.Linear(2, 3)
>>> model.weight.is_meta, is_deferred(model.weight)
(True, True)
>>> ParamInitializer(model, seed=0).read("weight").shape
torch.Size([3, 2])
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from shardwise.config.resolve import ConfigError
from shardwise.deferred_init.op_replay import (
    OpHistory,
    RandomDraw,
    RecordedView,
    default_generator,
    forget,
    is_recorded,
    is_released,
    name_draws,
    ops_after,
    record,
    replay,
    run_drawing,
    tensors_in,
)
from shardwise.runtime.keyed_rng import draw_module, find_reset
from shardwise.runtime.module_hooks import watch_registrations
from shardwise.runtime.torch_private import (
    OpMode,
    OpOverload,
    pytree,
    returned,
    set_data,
    set_unsharded_storage,
    version,
    written_tensors,
)

_RECIPE: Final = "_shardwise_recipe"
_BLANK: Final = "_shardwise_blank"


@contextmanager
def init(seed: int | None = None) -> Iterator[None]:
    """Build models without holding their parameters: each keeps a recipe of its values, which the engine runs later.

    Initialise inside as well: values written to the parameters after the block are lost, which raises where it shows.
    Inside another `init()` it does nothing. Modules built by other threads, and tensors made before, are left alone.

    Args:
        seed: None draws as plain construction would: the values are bit for bit those that torch's generator gives
            now, and the generator ends where it would. Construction takes its time, and the memory of one parameter.
            With a seed nothing is drawn yet: values are keyed by it and by the parameters' names, a rank draws those
            that it holds a part of, and torch's generator keeps its state.
    """
    if is_recorded(torch.empty(0)):
        yield
        return
    recorder = _OpRecorder(seed)
    with watch_registrations(recorder.on_parameter, recorder.on_buffer), recorder, _HostReads(recorder):
        try:
            yield
        finally:
            recorder.finish()


@dataclass(frozen=True)
class _Recipe:
    """Says how a parameter's values are made.

    Attributes:
        view: its place on the tape.
        is_keyed: whether the numbers come from a seed and keys, not from torch's generator.
        version: how often the parameter had been written when the tape was complete.
    """

    view: RecordedView
    is_keyed: bool
    version: int


class _OpRecorder(OpMode):
    """Sees every op of its thread; frees parameters' memory and records what makes their values."""

    def __init__(self, seed: int | None) -> None:
        super().__init__()
        self._seed = seed
        self._thread = threading.get_ident()
        self._parameters: list[weakref.ref[nn.Parameter]] = []
        self._released: list[tuple[weakref.ref[torch.UntypedStorage], RecordedView]] = []
        # Keys of numbers that are needed before their parameter has a name.
        self._keys = (("construction", number) for number in count())
        self._scratch = torch.UntypedStorage(0)
        self._is_recording = True

    def on_parameter(self, parameter: nn.Parameter) -> None:
        """Free the memory of a newly registered parameter; its values, if any, are on the tape."""
        if threading.get_ident() != self._thread:
            return
        if is_lazy(parameter):
            self._parameters.append(weakref.ref(parameter))  # it may get its shape before the context ends
        elif OpHistory.find(parameter, self) is not None:
            self._watch(parameter)
            self._release(parameter)

    def on_buffer(self, buffer: Tensor) -> Tensor:
        """Return a buffer with its values in memory: buffers are real, also those that are made from parameters."""
        if not isinstance(buffer, Tensor) or threading.get_ident() != self._thread or not is_released(buffer):
            return buffer
        return self.value(buffer)

    def value(self, tensor: Tensor) -> Tensor:
        """Return the values of a released tensor."""
        return self._replay(RecordedView.of(tensor, self))

    def finish(self) -> None:
        """Move the parameters to meta, each with its recipe; every other released tensor gets its memory back."""
        self._is_recording = False
        parameters = {id(parameter): parameter for each in self._parameters if (parameter := each()) is not None}
        for parameter in parameters.values():
            if is_lazy(parameter):
                continue
            drop_recipe(parameter)
            if OpHistory.find(parameter, self) is not None:
                self._move_to_meta(parameter)
        for storage_reference, view in self._released:
            storage = storage_reference()
            if storage is not None and storage.nbytes() < view.history.num_bytes:
                self._fill(storage, view)
        self._parameters.clear()
        self._released.clear()
        self._scratch = torch.UntypedStorage(0)

    def copy(self, reference: weakref.ref[nn.Parameter], memo: dict[int, Any]) -> nn.Parameter:
        """Return a deep copy of a parameter; its values are the same and are on the tape."""
        original = reference()
        assert original is not None, "this is an attribute of it"
        recipe = _find_recipe(original)
        if id(original) in memo or (recipe is None and not is_released(original)):
            return nn.Parameter.__deepcopy__(original, memo)
        copied = type(original)(original.detach().to(original.dtype, copy=True), original.requires_grad)
        if recipe is None:
            self._watch(copied)
        else:
            self._give_recipe(copied, recipe.view, is_intact=version(original) == recipe.version)
        memo[id(original)] = copied
        return copied

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._is_recording:
            return func(*args, **kwargs)
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # a subclass that unwraps itself; its parameters stay as they are
        released = [each for each in tensors_in(args, kwargs) if is_released(each)]
        if func.is_view or torch.Tag.inplace_view in func.tags:
            with self._memory(released):  # torch checks that a view is within its storage
                return func(*args, **kwargs)
        written = written_tensors(func, args, kwargs)
        if written and all(is_released(each) for each in written):
            return self._write_later(func, args, kwargs, written)
        if func is torch.ops.aten._to_copy.default and released and kwargs.get("device") in (None, args[0].device):
            copied = torch.empty_like(args[0], dtype=kwargs.get("dtype"))
            record(func, args, kwargs, [copied], session=self)
            self._release(copied)
            return copied
        return self._run(func, args, kwargs, released)

    def _run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], released: list[Tensor]) -> Any:
        """Run an op and record it."""
        devices = [each.device for each in tensors_in(args, kwargs)]
        device = kwargs.get("device") or (devices[0] if devices else torch.device("cpu"))
        draw = self._draw(func, kwargs, device)
        is_keyed = draw is not None and draw.is_unnamed
        if draw is not None and is_keyed:
            draw.key = next(self._keys)
        if _reads_shape_only(func) and args[0].layout is torch.strided:
            outputs = run_drawing(func, args, kwargs, draw if is_keyed else None, device)
            args, kwargs = (_shape_of(args[0]), *args[1:]), {**kwargs, "device": device}
        else:
            with self._memory(released, is_filled=True):
                outputs = run_drawing(func, args, kwargs, draw if is_keyed else None, device)
        record(func, args, kwargs, pytree.tree_leaves(outputs), draw=draw, session=self)
        return outputs

    def _write_later(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[Tensor]
    ) -> Any:
        """Record an op on parameters; a random one runs on scratch memory, which advances the generator."""
        others = [each for each in tensors_in(args, kwargs) if all(each is not w for w in written)]
        draw = self._draw(func, kwargs, written[0].device)
        if draw is None and others:  # raise now where shapes do not fit
            own_args, own_kwargs = pytree.tree_map_only(Tensor, _shape_of, (args, kwargs))
            func(*own_args, **own_kwargs)
        elif draw is not None and not draw.is_unnamed:
            released = [each for each in others if is_released(each)]
            places = {id(each): self._on_scratch(each) for each in written}
            own_args, own_kwargs = pytree.tree_map_only(
                Tensor, lambda each: places.get(id(each), each), (args, dict(kwargs))
            )
            with self._memory(released, is_filled=True):
                func(*own_args, **own_kwargs)
        record(func, args, kwargs, [], draw=draw, session=self)
        return returned(func, written)

    def _draw(self, func: OpOverload, kwargs: dict[str, Any], device: torch.device) -> RandomDraw | None:
        """Return where a random op's numbers start, in its generator or at a key given later; None if it draws none."""
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return None
        generator = kwargs.get("generator")
        if generator is None and self._seed is not None:
            return RandomDraw(seed=self._seed)
        return RandomDraw(state=(generator or default_generator(device)).get_state())

    @contextmanager
    def _memory(self, released: Iterable[Tensor], is_filled: bool = False) -> Iterator[None]:
        """Give released tensors memory inside the context, with their values if `is_filled`."""
        views = {each.untyped_storage(): RecordedView.of(each, self) for each in released}
        for storage, view in views.items():
            if is_filled:
                self._fill(storage, view)
            else:
                set_unsharded_storage(storage, view.history.num_bytes)
        try:
            yield
        finally:
            for storage in views:
                set_unsharded_storage(storage, 0)

    def _on_scratch(self, tensor: Tensor) -> Tensor:
        """Return a tensor like a released one on scratch memory, whose content is not used.

        The memory is kept from one op to the next. If it were allocated and freed for each, between the small objects
        of modules that stay, it would come from new pages each time, until the process holds as many as the model has.
        """
        view = RecordedView.of(tensor, self)
        if self._scratch.device != view.history.device or self._scratch.nbytes() < view.history.num_bytes:
            self._scratch = torch.UntypedStorage(0)
            self._scratch = torch.UntypedStorage(view.history.num_bytes, device=view.history.device)
        return view.on(self._scratch)

    def _fill(self, storage: torch.UntypedStorage, view: RecordedView) -> None:
        values = self._replay(view).untyped_storage()
        set_unsharded_storage(storage, view.history.num_bytes)
        storage.copy_(values)

    def _replay(self, view: RecordedView) -> Tensor:
        name_draws(view, self._keys)
        was_recording, self._is_recording = self._is_recording, False
        try:
            return replay(view)
        finally:
            self._is_recording = was_recording

    def _release(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._released.append((weakref.ref(storage), RecordedView.of(tensor, self)))
        set_unsharded_storage(storage, 0)

    def _watch(self, parameter: nn.Parameter) -> None:
        self._parameters.append(weakref.ref(parameter))
        # `copy.deepcopy` asks the object before its class, whose copy would be real here and without recipe later.
        setattr(parameter, "__deepcopy__", partial(self.copy, weakref.ref(parameter)))  # noqa: B010

    def _move_to_meta(self, parameter: nn.Parameter) -> None:
        view = RecordedView.of(parameter, self)
        self._release(parameter)
        set_data(parameter, torch.empty_strided(view.size, view.stride, dtype=view.dtype, device="meta"))
        self._give_recipe(parameter, view)

    def _give_recipe(self, parameter: nn.Parameter, view: RecordedView, is_intact: bool = True) -> None:
        setattr(parameter, _RECIPE, _Recipe(view, self._seed is not None, version(parameter) if is_intact else -1))
        setattr(parameter, "__deepcopy__", partial(self.copy, weakref.ref(parameter)))  # noqa: B010


class _HostReads(TorchFunctionMode):
    """Watches the functions that give access to a tensor's memory without an op."""

    def __init__(self, recorder: _OpRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _HOST_READS:
            return func(*args, **kwargs)
        if not is_released(args[0]):
            forget(args[0])  # it may be written unseen from now on: as a parameter it stays real
            return func(*args, **kwargs)
        result = func(self._recorder.value(args[0]), *args[1:], **kwargs)
        if isinstance(result, np.ndarray):
            result.flags.writeable = False  # what is written to it would be lost
        return result


_HOST_READS: Final = frozenset({Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__})


def is_deferred(tensor: Tensor) -> bool:
    """Return whether a parameter is on meta and has a recipe of its values."""
    return tensor.is_meta and hasattr(tensor, _RECIPE)


class ParamInitializer:
    """Reads the initial values of a model's parameters, one at a time.

    They come from the parameter itself where it is real, from its recipe where it is deferred, and else (a model built
    on the meta device) from its module's `reset_parameters`, keyed by the seed and the module's name.

    Args:
        model: its parameters may be of all three kinds; buffers must be real.
        seed: of the run.

    Raises:
        ConfigError: a parameter has none of the three, was written after its `init()` block, or a buffer is on meta.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model = model
        self._seed = seed
        self._parameters = dict(model.named_parameters())
        self._given: dict[str, Tensor] = {}
        self._drawn_module = ""
        self._drawn: dict[str, Tensor] = {}
        for name, buffer in model.named_buffers():
            if buffer.is_meta:
                raise ConfigError(
                    "buffer-on-meta",
                    f"buffer {name} is on meta and its values are not known; build the model inside "
                    "`with shardwise.init():`, which keeps buffers real",
                )
        self._blank = {name for name, parameter in self._parameters.items() if hasattr(parameter, _BLANK)}
        for name, parameter in self._parameters.items():
            recipe = _find_recipe(parameter)
            if name in self._blank:
                continue
            if recipe is not None:
                self._prepare(name, parameter, recipe)
            elif parameter.is_meta:
                find_reset(model.get_submodule(name.rpartition(".")[0]), name)

    def is_blank(self, name: str) -> bool:
        """Return whether a parameter's values come later, from another source, so that none are needed now."""
        return name in self._blank

    def is_same_everywhere(self, name: str) -> bool:
        """Return whether every rank reads the same values of a parameter, so that none needs to send them.

        This holds where they are keyed, unless they depend on a generator or a tensor that the model's code brought in.
        """
        parameter = self._parameters[name]
        recipe = _find_recipe(parameter)
        if recipe is None:
            return parameter.is_meta
        return recipe.is_keyed and not any(op.is_from_elsewhere for op in ops_after(recipe.view))

    def give(self, name: str, values: Tensor) -> None:
        """Use another rank's values for a parameter at its next read; only that one, so that not all are held twice."""
        self._given[name] = values

    def read(self, name: str) -> Tensor:
        """Return the values of one parameter, of its shape and dtype. Do not write them: they may be its own."""
        parameter = self._parameters[name]
        if name in self._given:
            return self._given.pop(name)
        if not parameter.is_meta:
            return parameter.detach()
        recipe = _find_recipe(parameter)
        if recipe is not None:
            return replay(recipe.view).to(parameter.dtype)
        module_name, _, own_name = name.rpartition(".")
        if module_name != self._drawn_module or not self._drawn:
            self._drawn.clear()
            owner = self._model.get_submodule(module_name)
            self._drawn = draw_module(owner, module_name, self._seed, name)
            self._drawn_module = module_name
        return self._drawn[own_name].to(parameter.dtype)

    def close(self) -> None:
        """Forget the recipes after the parameters have their values."""
        self._drawn.clear()
        self._given.clear()
        for parameter in self._parameters.values():
            drop_recipe(parameter)

    def _prepare(self, name: str, parameter: nn.Parameter, recipe: _Recipe) -> None:
        if version(parameter) != recipe.version:
            raise ConfigError(
                "written-after-init",
                f"{name} was written after the `with shardwise.init():` block that built it, where nothing records "
                "what is written; write it inside the block",
            )
        name_draws(recipe.view, ((name, index) for index in count()))


@contextmanager
def skip_init(model: nn.Module) -> Iterator[None]:
    """Make an engine of the model neither draw nor copy values for its parameters: another source gives them.

    >>> model = torch.nn.Linear(2, 3, device="meta")
    >>> with skip_init(model):
    ...     ParamInitializer(model, seed=0).is_blank("weight")
    True
    """
    for parameter in model.parameters():
        setattr(parameter, _BLANK, True)
    try:
        yield
    finally:
        for parameter in model.parameters():
            parameter.__dict__.pop(_BLANK, None)


def drop_recipe(parameter: nn.Parameter) -> None:
    """Make a parameter a plain one."""
    for attribute in (_RECIPE, "__deepcopy__"):
        parameter.__dict__.pop(attribute, None)


def _find_recipe(parameter: nn.Parameter) -> _Recipe | None:
    return getattr(parameter, _RECIPE, None) if parameter.is_meta else None


def _reads_shape_only(func: OpOverload) -> bool:
    name = func.name().partition(".")[0]
    return name.startswith("aten::") and (name.endswith("_like") or name.startswith("aten::new_"))


def _shape_of(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
