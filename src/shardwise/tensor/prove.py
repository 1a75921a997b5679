"""Prove a plan in numbers: compare loss and gradients of ranks, run as threads of one process, to the whole model's.

The model is small, or a small copy of another. It computes in float64, with weights moved off zero so that no zero
hides an error. Ranks are split by the engine's own code, `split_model`. The model runs in evaluation, and again in
training mode with all chance taken out: code that runs in training alone may read tokens that other ranks have.

>>> from shardwise.layout.tp_sharding import FusedPart
>>> from shardwise.layout.tensor_plan import LayerSplit
>>> model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
>>> layers = (LayerSplit("0", "column", (FusedPart(32),)), LayerSplit("2", "row", (FusedPart(32),)))
>>> refute(model, TensorPlan(layers), torch.ones(2, 8), degree=2)
''
>>> refute(model, TensorPlan(layers, partial=("2.bias",)), torch.ones(2, 8), degree=2)
'the gradient of 2.bias is off by 1e+00 of its size'
"""

from __future__ import annotations

import copy
import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shardwise.comm.collectives import AsyncWork, Comm
from shardwise.config.resolve import Config, TensorConfig
from shardwise.construction.scan import scan_model
from shardwise.dropout.still import StillFunctions
from shardwise.layout.tensor_plan import SplitDropout, TensorPlan, param_splits
from shardwise.layout.tp_sharding import ParamSplit, Rect
from shardwise.runtime.forward_state import STREAMS
from shardwise.runtime.module_calls import watch_calls
from shardwise.runtime.torch_private import pytree, unseen_by_op_modes
from shardwise.runtime.user_hooks import without_user_hooks
from shardwise.tensor.apply import split_model

_TIMEOUT_S: Final = 60.0
_TOLERANCE: Final = 1e-4  # models that compute norms in fp32 whatever their dtype come to 1e-6


class NotProvedError(Exception):
    """Numbers can neither prove nor refute a plan; the message says why."""


def refute(model: nn.Module, plan: TensorPlan, batch: Any, degree: int, sequence_parallel: bool = False) -> str:
    """Run a model whole and split, forward and backward.

    Args:
        model: small, with values; it is copied.
        sequence_parallel: whether the plan's stacks are split along the sequence.

    Returns:
        which output or gradient differs; empty where none does.

    Raises:
        NotProvedError: the whole model does not run on this batch, whose values may be ones that it does not accept, or
            returns nothing finite, or layers of the plan do not run; or it draws, in training mode, numbers of other
            streams than torch's.
        Exception: the split model's code raises.
    """
    with proving():
        source, batch = in_float64(model, batch)
        wrong = WholeRun(source, batch).compare(plan, degree, sequence_parallel).wrong
        if wrong:
            return wrong
        source.train()
        _check_repeats([copy.deepcopy(source) for _ in range(2)], batch)
        with StillFunctions():  # the ranks' threads enter their own
            wrong = WholeRun(source, batch).compare(plan, degree, sequence_parallel).wrong
    return wrong and f"in training mode {wrong}"


@contextmanager
def proving() -> Iterator[None]:
    """Compute on the CPU with gradients, whatever modes and default device the caller has, and leave its random numbers
    alone.
    """
    real = unseen_by_op_modes(is_real=True)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), real, torch.enable_grad(), _quiet():
        torch.manual_seed(0)
        yield


def in_float64(model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """Return a copy of a model in evaluation, with weights moved off zero, and its batch, both in float64."""
    whole = without_user_hooks(copy.deepcopy(model)).cpu().double().eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return whole, pytree.tree_map(_widened, batch)


class SeenDropout(NamedTuple):
    """Is what a dropout, or attention with dropout, got in a module; `is_functional` if this is no dropout itself."""

    module: str
    is_functional: bool
    x: Tensor


@dataclass(frozen=True)
class Difference:
    """Says how ranks differ from the whole model.

    Attributes:
        wrong: which output or gradient differs; empty where none does.
        summed: parameters that all ranks hold whole, where the sum of the ranks' gradients is right and theirs are not;
            none where anything else differs too.
        dropped: by rank, what dropouts got in training mode, where nothing differs.
    """

    wrong: str
    summed: tuple[str, ...] = ()
    dropped: Sequence[Sequence[SeenDropout]] = ()


class WholeRun:
    """Holds the loss and gradients of a whole model, with which those of ranks are compared.

    Args:
        source: in float64, in the mode that it runs in; it never runs itself, as a forward may leave in a module what
            cannot be copied.

    Raises:
        NotProvedError: as `refute` says.
    """

    def __init__(self, source: nn.Module, batch: Any) -> None:
        self.source, self.batch = source, batch
        self.model = copy.deepcopy(source)
        self._ranks: list[nn.Module] = []
        self._params = scan_model(source, Config()).params
        try:
            self._loss, self.dropped = _run(self.model, batch)
        except Exception as error:  # values of an example, as of `torch.empty`, may be no tokens
            how = " in training mode" if source.training else ""
            raise NotProvedError(f"the whole model does not run{how} on the batch ({in_short(error)})") from error
        if not math.isfinite(self._loss):
            raise NotProvedError("the whole model returns nothing finite that has a gradient")

    def compare(self, plan: TensorPlan, degree: int, sequence_parallel: bool = False) -> Difference:
        """Return how ranks that are split by a plan differ; raises as `refute` does.

        Args:
            degree: the same in each call, of which the next takes the ranks' models as the last one has left them.
        """
        config = TensorConfig(sequence_parallel=sequence_parallel)
        splits = param_splits(self._params, plan, degree, sequence_parallel)
        ranks = self._ranks = self._ranks or [copy.deepcopy(self.source) for _ in range(degree)]
        for rank, each in enumerate(ranks):
            _give_part(self.source, each, splits, rank)
        world = _ThreadGroup(degree, config)
        with ThreadPoolExecutor(degree) as pool:
            calls = [pool.submit(world.run, rank, each, plan, splits, self.batch) for rank, each in enumerate(ranks)]
        found = [call.result() for call in sorted(calls, key=_is_of_another_rank)]
        errors = [abs(loss - self._loss) / (abs(self._loss) + 1e-12) for loss, _ in found]
        if not all(error < _TOLERANCE for error in errors):
            return Difference(f"the outputs are off by {max(errors):.0e} of their size")
        difference = _compare_gradients(self.model, ranks, splits)
        weights = {each.module: self.model.get_parameter(f"{each.module}.weight") for each in plan.layers}
        idle = [name for name, each in weights.items() if each.requires_grad and each.grad is None]
        if idle and not difference.wrong:
            raise NotProvedError(f"{idle[0]} takes no part in what the model returns")
        return difference if difference.wrong else Difference("", dropped=[dropped for _, dropped in found])


def _is_of_another_rank(call: Future[Any]) -> bool:
    """Return whether a rank ended only because another had, whose error says more."""
    return isinstance(call.exception(), threading.BrokenBarrierError)


class BlockCall(nn.Module):
    """Is a block of a model in float64, under its name there, with the arguments of one of its calls.

    Those that have gradients are parameters of random numbers, so that their gradients are compared too.

    Args:
        arguments: positional ones and those by name.
        has_gradient: of each leaf of the arguments.
        is_used: of each leaf of the output, whether the model uses it.
    """

    def __init__(
        self, name: str, block: nn.Module, arguments: Any, has_gradient: Sequence[bool], is_used: Sequence[bool]
    ) -> None:
        super().__init__()
        self.call_inputs = nn.ParameterList()
        self._name, self._is_used = name, is_used
        *path, own = name.split(".")
        holder: nn.Module = self
        for each in path:
            holder.add_module(each, nn.Module())
            holder = holder.get_submodule(each)
        holder.add_module(own, block)
        leaves, self._tree = pytree.tree_flatten(arguments)
        self._leaves: list[Any] = []
        places: dict[int, _Place] = {}
        for leaf, is_input in zip(leaves, has_gradient, strict=True):
            if is_input and id(leaf) not in places:
                places[id(leaf)] = _Place(len(self.call_inputs))
                self.call_inputs.append(nn.Parameter(torch.randn_like(leaf)))
            self._leaves.append(places[id(leaf)] if is_input else leaf)

    def forward(self) -> Any:
        inputs = [each.clone() for each in self.call_inputs]  # code may write to it
        others = copy.deepcopy(self._leaves)  # such as a cache, which is written
        leaves = [inputs[leaf.index] if isinstance(leaf, _Place) else leaf for leaf in others]
        args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        output = self.get_submodule(self._name)(*args, **kwargs)
        found = pytree.tree_leaves(plain_output(output))
        return [leaf for leaf, is_used in zip(found, self._is_used, strict=True) if is_used]


@dataclass(frozen=True)
class _Place:
    """Stands for an argument that is a parameter."""

    index: int


class _Dropouts(TorchFunctionMode):
    """Keeps what the dropouts of a model get inside the context."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.dropped: list[SeenDropout] = []
        self._stack: list[tuple[str, bool]] = []
        self._calls = watch_calls(model, self._before, self._after) if model.training else nullcontext()

    def __enter__(self) -> Self:
        self._calls.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._calls.__exit__(*raised)

    def _before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._stack.append((name, not isinstance(module, nn.Dropout)))

    def _after(self, output: Any) -> None:
        self._stack.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        names = _DROPOUT_ARGUMENTS.get(func)
        if names is not None:
            given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            is_attention = func is F.scaled_dot_product_attention
            rate = given.get("dropout_p", 0.0) if is_attention else given.get("p", 0.5)
            if rate and given.get("training", True):
                x = given["query"] if is_attention else given["input"]
                self.dropped.append(SeenDropout(*self._stack[-1], x.detach().clone()))
        return func(*args, **(kwargs or {}))


_DROPOUT_ARGUMENTS: Final[Mapping[Any, tuple[str, ...]]] = {
    F.dropout: ("input", "p", "training"),
    torch.dropout: ("input", "p", "training"),
    F.scaled_dot_product_attention: ("query", "key", "value", "attn_mask", "dropout_p"),
}


def split_dropouts(whole: Sequence[SeenDropout], ranks: Sequence[Sequence[SeenDropout]]) -> tuple[SplitDropout, ...]:
    """Return the dropouts that get a part on each rank, in order, of what they get in the whole model.

    Raises:
        NotProvedError: one gets something else.
    """
    found: dict[SplitDropout, None] = {}
    for each, *others in zip(whole, *ranks, strict=True):
        parts = [other.x for other in others]
        if all(_is_close(part, each.x) for part in parts):
            continue
        dims = [dim for dim in range(each.x.dim()) if all(map(_is_close, parts, each.x.chunk(len(parts), dim)))]
        if not dims:
            raise NotProvedError(f"the dropout in {each.module} draws over more than one split dim")
        found[SplitDropout(each.module, dims[0], each.is_functional)] = None
    return tuple(found)


def _is_close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=_TOLERANCE)


def _check_repeats(copies: Sequence[nn.Module], batch: Any) -> None:
    """Check that copies of a model in training mode compute the same.

    Raises:
        NotProvedError: it draws numbers that are not replaced, as from Python's stream, or in a recomputation.
    """
    before = [stream.get() for stream in STREAMS]
    found = []
    try:
        for seed, each in enumerate(copies):
            torch.manual_seed(seed)
            with StillFunctions():
                found.append(_run(each, batch)[0])
    except Exception as error:
        raise NotProvedError(
            f"the whole model does not run in training mode on the batch ({in_short(error)})"
        ) from error
    finally:
        has_drawn = any(
            stream.contents(stream.get()) != stream.contents(state)
            for stream, state in zip(STREAMS, before, strict=True)
        )
        for stream, state in zip(STREAMS, before, strict=True):
            stream.put(state)  # the caller's script goes on with them
    grads = [[parameter.grad for parameter in each.parameters()] for each in copies]
    is_same = found[0] == found[1] and all(
        (one is None and other is None) or (one is not None and other is not None and torch.allclose(one, other))
        for one, other in zip(*grads, strict=True)
    )
    if not is_same or has_drawn:
        raise NotProvedError("in training mode the model draws numbers that the proof cannot give to all ranks")


def in_short(error: BaseException) -> str:
    """Return the first line of an error, with its kind."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the copies' warnings and logs, such as of logits that are read: this is not the user's run."""
    log = logging.getLogger("shardwise")
    before, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = before


class _ThreadGroup:
    """Lets ranks meet at a barrier."""

    def __init__(self, degree: int, config: TensorConfig) -> None:
        self.config = config
        self.slots: list[Tensor] = [torch.empty(0)] * degree
        self.barrier = threading.Barrier(degree, timeout=_TIMEOUT_S)

    def run(
        self, rank: int, model: nn.Module, plan: TensorPlan, splits: Mapping[str, ParamSplit], batch: Any
    ) -> tuple[float, list[SeenDropout]]:
        """Return the loss of one rank and what its dropouts got, with its gradients left in its parameters.

        Args:
            model: with this rank's part of the parameters.
        """
        undo: list[Callable[[], None]] = []
        try:
            undo = split_model(model, plan, cast(Comm, _ThreadComm(self, rank)), self.config, splits)
            with torch.enable_grad(), StillFunctions() if model.training else nullcontext():
                return _run(model, batch)
        except BaseException:
            self.barrier.abort()  # the others must not wait for this one
            raise
        finally:
            for each in reversed(undo):
                each()


class _ThreadComm:
    """Connects one rank to the others, in place of a process group."""

    is_simulated = False

    def __init__(self, world: _ThreadGroup, rank: int) -> None:
        self.world, self.rank, self.world_size = world, rank, len(world.slots)

    def _exchange(self, x: Tensor) -> list[Tensor]:
        world = self.world
        world.slots[self.rank] = x.detach().clone()
        world.barrier.wait()
        found = list(world.slots)
        world.barrier.wait()
        return found

    def start_sum(self, source: Tensor, out: Tensor, name: str, stream: Any) -> AsyncWork:
        out.copy_(torch.stack(self._exchange(source)).sum(0))
        return AsyncWork(None)

    def all_gather(self, full: Tensor, name: str, stream: Any = None) -> AsyncWork:
        full.copy_(torch.cat(self._exchange(full.chunk(self.world_size)[self.rank])))
        return AsyncWork(None)

    def scatter_sum(self, source: Tensor, out: Tensor, name: str, stream: Any) -> AsyncWork:
        out.copy_(torch.stack(self._exchange(source)).sum(0).chunk(self.world_size)[self.rank])
        return AsyncWork(None)

    def max_in_place(self, buffer: Tensor, name: str) -> None:
        buffer.copy_(torch.stack(self._exchange(buffer)).amax(0))


def call_model(model: nn.Module, batch: Any) -> Any:
    """Run a model on its arguments: a dict of named ones, a tuple or list of them, or the only one."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def plain_output(output: Any) -> Any:
    """Return an output whose fields pytrees see: fields of a dataclass that torch does not know are not leaves."""
    if isinstance(output, Mapping):
        return dict(output)
    return vars(output) if hasattr(output, "__dict__") and not isinstance(output, Tensor) else output


def _run(model: nn.Module, batch: Any) -> tuple[float, list[SeenDropout]]:
    """Return a number that depends on everything that the model returns, after its backward, and what dropouts got."""
    with _Dropouts(model) as seen:
        output = call_model(model, batch)
    leaves = pytree.tree_leaves(plain_output(output))
    total = sum((_weighed(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad), start=0.0)
    if not isinstance(total, Tensor):
        return math.nan, []
    total.backward()
    return float(total), seen.dropped


def _weighed(output: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 1.5, math.prod(output.shape), dtype=torch.float64)
    return (output.reshape(-1).double() * weights).sum()


def _widened(leaf: Any) -> Any:
    is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.detach().cpu().double() if is_float else leaf.cpu() if isinstance(leaf, Tensor) else leaf


def _give_part(whole: nn.Module, rank_model: nn.Module, splits: Mapping[str, ParamSplit], rank: int) -> None:
    """Give a copy of a model a rank's part of each parameter; tied ones stay tied."""
    values = dict(whole.named_parameters())
    for name, parameter in rank_model.named_parameters():
        local = values[name].new_zeros(splits[name].local_shape)
        for share in splits[name].shares(rank):
            local[_slices(share.target)] = values[name].detach()[_slices(share.source)]
        parameter.grad = None
        parameter.data = local


def _compare_gradients(whole: nn.Module, ranks: list[nn.Module], splits: Mapping[str, ParamSplit]) -> Difference:
    largest = max((float(each.grad.abs().max()) for each in whole.parameters() if each.grad is not None), default=0.0)
    wrong, summed = "", []
    for name, parameter in whole.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        size = max(float(expected.abs().max()), 1e-3 * largest, 1e-12) if expected.numel() else 1.0
        found = list(_whole_gradients(name, ranks, splits[name]))
        errors = [_error(each, expected) / size for each in found]
        if all(error < _TOLERANCE for error in errors):
            continue
        wrong = wrong or f"the gradient of {name} is off by {max(errors):.0e} of its size"
        if len(found) < 2 or not _error(torch.stack(found).sum(0), expected) / size < _TOLERANCE:
            return Difference(wrong)
        summed.append(name)
    return Difference(wrong, tuple(summed))


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max()) if expected.numel() else 0.0


def _whole_gradients(name: str, ranks: list[nn.Module], split: ParamSplit) -> Iterator[Tensor]:
    """Yield the gradient as the engine assembles it; of a parameter that is whole on all ranks, each rank's."""
    local = [rank.get_parameter(name) for rank in ranks]
    grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in local]
    shares = [[(share, rank) for share in split.shares(rank)] for rank in range(len(ranks))]
    if split.dim is None and not any(share.is_summed for share, _ in shares[0]):
        yield from grads
        return
    whole = local[0].new_zeros(split.global_shape)
    for share, rank in (each for own in shares for each in own):
        source, mine = _slices(share.source), grads[rank][_slices(share.target)]
        whole[source] = whole[source] + mine if share.is_summed else mine
    yield whole


def _slices(rect: Rect) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in zip(rect.start, rect.stop, strict=True))
