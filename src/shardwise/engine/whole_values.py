"""Shows a loss whole values of a split model: its parameters, its output, and what its modules keep of a forward.

Code of a forward sees whole parameters too, where it reads those of another module.

All ranks of a tensor-parallel group compute the loss, so what enters it must be whole, or each would add another term.
"""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.comm.collectives import Comm
from shardwise.config.errors import ConfigError, EngineError
from shardwise.dropout import KeyedDraws
from shardwise.engine.placements import WHOLE, PlanPlacements, gathered, refused
from shardwise.layout.tensor_plan import TensorLayout, is_within
from shardwise.layout.tp_sharding import ParamSplit
from shardwise.runtime.forward_state import around_second_passes
from shardwise.runtime.module_hooks import uncompiled
from shardwise.runtime.param_guard import part_type, used_by_owner
from shardwise.runtime.torch_private import pytree, version
from shardwise.tensor.layers import ColumnEmbedding, LayerState, VocabEmbedding, VocabParallelHead
from shardwise.zero.sharding_state import ShardingState

Known = tuple[str, ParamSplit]


class WholeReads:
    """Lets code read whole parameters where this rank has a part of them, or of their gradients.

    Args:
        draws: of the model. Code that sees whole tensors draws for whole ones.
        are_blocks_compiled: what they read is checked when they are compiled.
    """

    def __init__(
        self,
        model: nn.Module,
        tensor: TensorLayout,
        comm: Comm,
        draws: KeyedDraws,
        sharding: ShardingState,
        are_blocks_compiled: bool,
    ) -> None:
        self._comm, self._draws = comm, draws
        self._sharding = weakref.ref(sharding)
        plan, splits = tensor.plan, tensor.splits
        self._known: dict[int, Known] = {
            id(parameter): (name, splits[name])
            for name, parameter in model.named_parameters()
            if name in splits and (splits[name].is_partial or not splits[name].is_whole)
        }
        self._is_hidden = False
        # What one rank computes inside of them is a part of a sum.
        parts = [*tensor.sequence_modules, *(region.module for region in plan.regions)]
        self._in_forward = reads = _ForwardReads(model, self._known, comm, parts)
        made: dict[type[nn.Parameter], type[nn.Parameter]] = {}
        sharding.parts.follow(
            lambda own_type: made.get(own_type) or made.setdefault(own_type, part_type(reads.answer, own_type)),
            are_blocks_compiled,
        )

    @contextmanager
    def shown_in_forward(self) -> Iterator[None]:
        """Give whole parameters to code of a forward other than that of their own modules.

        Raises:
            EngineError: one of them is written.
        """
        try:
            with self._in_forward.begun(), around_second_passes(self._shown_again):
                yield
                self._in_forward.check_unwritten()
        finally:
            self._show(False)  # where the forward has raised

    def _show(self, is_on: bool) -> None:
        sharding = self._sharding()
        if sharding is not None:
            sharding.parts.show(sharding.groups, is_on)

    @contextmanager
    def _shown_again(self) -> Iterator[None]:
        """Do so for a second pass; where no first one has read any, it does not either."""
        if not self._in_forward.has_read:
            yield
            return
        with self._in_forward.begun():
            self._show(True)
            try:
                yield
            finally:
                self._show(False)
            self._in_forward.check_unwritten()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Give torch functions that are called inside whole parameters.

        Raises:
            EngineError: one of them is written.
        """
        was, self._is_hidden = self._is_hidden, False
        reads = _Reads(self._known, self._comm, lambda: self._is_hidden)
        try:
            with _ReadsMode(reads), self._draws.for_tensors(are_whole=True):
                yield
        finally:
            self._is_hidden = was
        reads.check_unwritten()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Leave this rank's parts to what is called inside, such as the forward of a module."""
        was, self._is_hidden = self._is_hidden, True
        try:
            with self._draws.for_tensors(are_whole=False):
                yield
        finally:
            self._is_hidden = was


class _Reads:
    """Puts the whole of a parameter in its place among the arguments of torch functions; it is gathered once."""

    def __init__(self, known: Mapping[int, Known], comm: Comm, is_hidden: Callable[[], bool]) -> None:
        self._known = known
        self._comm = comm
        self._is_hidden = is_hidden
        self._whole: dict[tuple[int, bool], tuple[Tensor, int]] = {}

    def answer(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], call: Callable[..., Any]) -> Any:
        """Return what a torch function returns of whole parameters; `call` calls a function."""
        if func in _OF_OBJECT or self._is_hidden():
            return call(func, *args, **kwargs)
        first: Any = args[0] if args else None
        if id(first) in self._known and not self._is_at_work(first):
            if func in _OF_SHAPE:
                if self._has_own_shape(first):
                    return call(func, *args, **kwargs)
                return func(torch.empty(self._known[id(first)][1].global_shape, device="meta"), *args[1:], **kwargs)
            if func == _GET_DATA:
                return self._whole_of(first).detach()  # which counts writes, as data does not
            if func == _SET_DATA:
                raise self._written(*self._known[id(first)])
        return call(func, *map(self._shown, args), **{name: self._shown(value) for name, value in kwargs.items()})

    def _has_own_shape(self, parameter: nn.Parameter) -> bool:
        """Say whether code sees the shape of this rank's part."""
        return False

    def check_unwritten(self) -> None:
        """Raise where a whole parameter was written.

        Raises:
            EngineError: it was; the parameter is as before.
        """
        for (key, _), (whole, was) in self._whole.items():
            if version(whole) != was:
                raise self._written(*self._known[key])

    def _shown(self, value: Any) -> Any:
        if id(value) in self._known:
            return value if self._is_at_work(value) else self._whole_of(value)
        return type(value)(map(self._shown, value)) if type(value) in (list, tuple) else value

    def _is_at_work(self, parameter: nn.Parameter) -> bool:
        """Say whether the library uses a parameter, or the forward of its own module: a loss may call the model."""
        frame = inspect.currentframe()
        while frame is not None and (
            frame.f_code.co_qualname.endswith(_PASSED_ON) or frame.f_globals.get("__name__") in _OWN_FRAMES
        ):
            frame = frame.f_back
        if frame is not None and frame.f_globals.get("__name__", "").startswith("shardwise."):
            return True
        is_whole = self._known[id(parameter)][1].is_whole
        while frame is not None and frame.f_code is not _SHOWN:
            owner = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
            owned = owner.__dict__["_parameters"].values() if isinstance(owner, nn.Module) else ()
            if any(one is parameter for one in owned):
                return is_whole or any(isinstance(value, LayerState) for value in vars(owner).values())
            frame = frame.f_back
        return False

    def _whole_of(self, parameter: nn.Parameter) -> Tensor:
        key = id(parameter), torch.is_grad_enabled()
        if key not in self._whole:
            name, split = self._known[key[0]]
            with used_by_owner(parameter):
                whole = gathered(parameter, split, self._comm, f"values of {name}")
            self._whole[key] = whole, version(whole)
        return self._whole[key][0]

    def _written(self, name: str, split: ParamSplit) -> EngineError:
        return EngineError(
            "split-parameter-written",
            f"a hook, a loss or a forward writes parameter {name}, of which each of {split.degree} ranks has a part, "
            "so it is lost; write it between steps, by engine.write or inside `with engine.gathered(write=True):`",
        )


class _ReadsMode(TorchFunctionMode):
    """Answers all torch functions inside the context."""

    def __init__(self, reads: _Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._reads.answer(func, args, kwargs or {}, _call)


def _call(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)


class _ForwardReads(_Reads):
    """Shows whole parameters to the code of forwards.

    Args:
        parts: names of modules inside of which a rank computes a part of the tokens, or of a sum.

    Attributes:
        has_read: whether code of a forward has read a parameter of another module.
    """

    def __init__(self, model: nn.Module, known: Mapping[int, Known], comm: Comm, parts: Sequence[str]) -> None:
        super().__init__(known, comm, lambda: False)
        self.has_read = False
        self._names = {id(module): name for name, module in model.named_modules()}
        self._parts = parts
        self._tables = {
            id(parameter)
            for module in model.modules()
            if isinstance(module, VocabEmbedding | ColumnEmbedding | VocabParallelHead)
            for parameter in module.parameters(recurse=False)
        }

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Keep what is gathered inside for a forward, or a second pass, alone."""
        before, self._whole = self._whole, {}
        try:
            yield
        finally:
            self._whole = before

    def _has_own_shape(self, parameter: nn.Parameter) -> bool:
        return id(parameter) not in self._tables  # by the shapes of others code finds out its number of heads

    def _whole_of(self, parameter: nn.Parameter) -> Tensor:
        frame = inspect.currentframe()
        while frame is not None:
            reader = self._names.get(id(frame.f_locals.get("self")))
            if reader is not None and is_within(reader, self._parts):
                name, split = self._known[id(parameter)]
                raise EngineError(
                    "split-parameter-read",
                    f"the forward of {reader} reads parameter {name}, of which each of {split.degree} ranks has a "
                    f"part, and inside {reader} each rank computes a part of the tokens or of a sum; read it in a "
                    "module around, in the loss, or leave its module out of the plan",
                )
            frame = frame.f_back
        self.has_read = True
        return super()._whole_of(parameter)


def check_of_graphs(model: nn.Module, tensor: TensorLayout, units: Collection[str]) -> Callable[[Any], None]:
    """Return what checks the graph of a compiled block: only the code of a module may read its parameters in parts.

    Args:
        units: names of the blocks that are compiled.

    Raises:
        EngineError: when it is called, and code of another module reads one.
    """
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        split = tensor.splits.get(name)
        if split is not None and (split.is_partial or not split.is_whole):
            names[id(parameter)] = name
    of_blocks = {id(parameter) for unit in units for parameter in model.get_submodule(unit).parameters(recurse=False)}

    def check(graph: Any) -> None:
        inputs = {node: node.meta.get("grapharg") for node in graph.graph.nodes if node.op == "placeholder"}
        watched: dict[Any, _Watched] = {}
        for node, argument in inputs.items():
            key = id(getattr(argument, "example", None))
            if key in names:
                watched[node] = names[key], _steps(argument.source), key in of_blocks
        _check_readers(graph, watched)

    return check


_Watched = tuple[str, list[str], bool]
"""The name of a parameter, the way to it from what is compiled, and whether it is the block's own."""


def _check_readers(graph: Any, watched: Mapping[Any, _Watched]) -> None:
    for node in graph.graph.nodes:
        inner = [source for source in node.all_input_nodes if source.op == "get_attr"]
        code: Any = getattr(graph, inner[0].target, None) if inner else None
        if hasattr(code, "graph"):  # such as that of a checkpoint, whose inputs follow
            sources = [source for source in node.args if source is not inner[0]]
            placeholders = [inside for inside in code.graph.nodes if inside.op == "placeholder"]
            pairs = [*zip(placeholders, sources, strict=False)]
            _check_readers(code, {inside: watched[source] for inside, source in pairs if source in watched})
            continue
        for name, steps, is_own in [watched[source] for source in node.all_input_nodes if source in watched]:
            stack = [*(node.meta.get("nn_module_stack") or {}).values()]
            if (_steps(stack[-1][0]) != steps[:-1]) if stack else not is_own:
                raise EngineError(
                    "split-parameter-read",
                    f"a compiled block reads parameter {name}, of which each rank has a part, outside of its module's "
                    "forward; read it in a module around, in the loss, set compile.enabled=false, or leave its "
                    "module out of the plan",
                )


def _steps(source: Any) -> list[str]:
    """Return the names on the way to a module or a parameter, as torch's compiler writes it."""
    name = getattr(source, "name", source)
    steps = re.findall(r"\w+", name() if callable(name) else str(name))
    return [step for step in steps if step not in ("_modules", "_parameters", "getattr")]


class WholeResults:
    """Makes whole what a split model has computed: its output, and what its modules keep as attributes.

    Args:
        keeps_whole: says whether an evaluation leaves a sequence whole.
    """

    def __init__(self, model: nn.Module, placements: PlanPlacements, keeps_whole: Callable[[], bool]) -> None:
        self._model = model
        self._placements = placements
        self._keeps_whole = keeps_whole
        self._keeping: list[tuple[str, nn.Module, str]] | None = None  # modules and attributes, as of the first forward

    def take(self, output: Any) -> Any:
        """Return the whole of the model's output, after a forward; what cannot be made whole gets no gradient."""
        if self._keeps_whole():
            return output
        if torch.is_grad_enabled():
            if self._keeping is None:
                self._keeping = list(_kept(self._model))
            for name, module, attribute in self._keeping:
                value = getattr(module, attribute, None)
                whole = self._whole(value, name, attribute, f"{name}.{attribute}")
                if whole is not value:
                    setattr(module, attribute, whole)
        return self._whole(output, "", "", "the model's output")

    def _whole(self, tree: Any, name: str, key: str, what: str) -> Any:
        leaves, structure = pytree.tree_flatten(tree)
        is_changed = False
        for index, leaf in enumerate(leaves):
            if type(leaf) is not Tensor or not leaf.is_floating_point():
                continue
            if leaf.grad_fn is None if key else leaf.dim() == 0:  # what is kept for the next forward; the model's loss
                continue
            try:
                placement = self._placements.of_tensor(leaf, name, (key, structure, index), what)
            except ConfigError as error:  # the loss may do without it
                placement = WHOLE
                if leaf.grad_fn is not None:
                    leaves[index], is_changed = refused(leaf, error), True
            if placement != WHOLE:
                split = self._placements.split_of(leaf, placement, what)
                leaves[index] = gathered(leaf, split, self._placements.comm, f"{what} for the loss")
                is_changed = True
        if is_changed and type(tree) is list:
            tree[:] = pytree.tree_unflatten(leaves, structure)  # which other objects may have too
            return tree
        return pytree.tree_unflatten(leaves, structure) if is_changed else tree


def _kept(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the attributes of modules that hold results of the forward that has just run."""
    for name, module in model.named_modules():
        for attribute, value in [*vars(module).items()]:
            if attribute.startswith(("_shardwise", "_parameters", "_buffers", "_modules")) or value is None:
                continue
            if any(type(leaf) is Tensor and leaf.grad_fn is not None for leaf in pytree.tree_leaves(value)):
                yield name, module, attribute


_PASSED_ON: Final = ("__torch_function__", f"{uncompiled.__qualname__}.<locals>.call")
_OWN_FRAMES: Final = (__name__, part_type.__module__, version.__module__)
_SHOWN: Final = inspect.unwrap(WholeReads.shown).__code__
_GET_DATA: Final = getattr(Tensor, "data").__get__  # noqa: B009  # to mypy it is no property
_SET_DATA: Final = getattr(Tensor, "data").__set__  # noqa: B009
# Of the parameter itself, whatever its values are.
_OF_OBJECT: Final = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("grad", "requires_grad", "is_leaf", "grad_fn", "dtype", "device")),
        *(
            getattr(Tensor, name).__get__
            for name in ("is_cuda", "is_cpu", "is_meta", "is_sparse", "layout", "itemsize")
        ),
        *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad")),
        *(getattr(Tensor, name) for name in ("requires_grad_", "register_hook", "register_post_accumulate_grad_hook")),
        *(getattr(Tensor, name) for name in ("__hash__", "is_floating_point", "is_complex", "element_size")),
    }
)
_OF_SHAPE: Final = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in ("shape", "ndim")),
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.__len__, torch.numel),
    }
)
