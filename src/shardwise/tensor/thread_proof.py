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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from shardwise.comm.collectives import AsyncWork, Comm
from shardwise.config.resolve import Config, TensorConfig
from shardwise.construction.scan import scan_model
from shardwise.dropout.still import StillFunctions
from shardwise.layout.tensor_plan import TensorPlan, param_splits
from shardwise.layout.tp_sharding import ParamSplit, Rect
from shardwise.runtime.forward_state import STREAMS
from shardwise.runtime.torch_private import pytree, unseen_by_op_modes
from shardwise.runtime.user_hooks import without_user_hooks
from shardwise.tensor.apply import split_model
from shardwise.tensor.autoplan.trace import call_model, plain_output

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
    real = unseen_by_op_modes(is_real=True)  # nor does a default device of the caller's count
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), real, torch.enable_grad(), _quiet():
        torch.manual_seed(0)
        whole = without_user_hooks(copy.deepcopy(model)).cpu().double().eval()
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        batch = pytree.tree_map(_widened, batch)
        unused = [copy.deepcopy(whole) for _ in range(2)]  # a forward may leave in a module what cannot be copied
        splits = param_splits(scan_model(whole, Config()).params, plan, degree, sequence_parallel)
        config = TensorConfig(sequence_parallel=sequence_parallel)
        ranks = [_part_of(whole, splits, rank) for rank in range(degree)]
        wrong = _Comparison(whole, ranks, plan, splits, batch, config).wrong()
        if wrong:
            return wrong
        for each in (whole, *ranks, *unused):
            each.zero_grad()
            each.train()
        _check_repeats(unused, batch)
        with StillFunctions():  # the ranks' threads enter their own
            wrong = _Comparison(whole, ranks, plan, splits, batch, config).wrong()
    return wrong and f"in training mode {wrong}"


@dataclass(frozen=True)
class _Comparison:
    """Compares the whole model with the ranks that compute it together; the fields are those of `refute`."""

    whole: nn.Module
    ranks: list[nn.Module]
    plan: TensorPlan
    splits: Mapping[str, ParamSplit]
    batch: Any
    config: TensorConfig

    def wrong(self) -> str:
        """Return which output or gradient differs; raises as `refute` does."""
        whole, ranks, plan, splits, batch = self.whole, self.ranks, self.plan, self.splits, self.batch
        world = _ThreadGroup(len(ranks), self.config)
        try:
            expected = _run(whole, batch)
        except Exception as error:  # values of an example, as of `torch.empty`, may be no tokens
            how = " in training mode" if whole.training else ""
            raise NotProvedError(f"the whole model does not run{how} on the batch ({in_short(error)})") from error
        if not math.isfinite(expected):
            raise NotProvedError("the whole model returns nothing finite that has a gradient")
        with ThreadPoolExecutor(len(ranks)) as pool:
            found = list(pool.map(lambda rank: world.run(rank, ranks[rank], plan, splits, batch), range(len(ranks))))
        wrong = max(abs(each - expected) for each in found) / (abs(expected) + 1e-12)
        if not wrong < _TOLERANCE:
            return f"the outputs are off by {wrong:.0e} of their size"
        wrong_gradient = _wrong_gradient(whole, ranks, splits)
        weights = {each.module: whole.get_parameter(f"{each.module}.weight") for each in plan.layers}
        idle = [name for name, each in weights.items() if each.requires_grad and each.grad is None]
        if idle and not wrong_gradient:
            raise NotProvedError(f"{idle[0]} takes no part in what the model returns")
        return wrong_gradient


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
                found.append(_run(each, batch))
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

    def run(self, rank: int, model: nn.Module, plan: TensorPlan, splits: Mapping[str, ParamSplit], batch: Any) -> float:
        """Return the loss of one rank, with its gradients left in its parameters.

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


def _run(model: nn.Module, batch: Any) -> float:
    """Return a number that depends on everything that the model returns, after its backward."""
    leaves = pytree.tree_leaves(plain_output(call_model(model, batch)))
    total = sum((_weighed(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad), start=0.0)
    if not isinstance(total, Tensor):
        return math.nan
    total.backward()
    return float(total)


def _weighed(output: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 1.5, math.prod(output.shape), dtype=torch.float64)
    return (output.reshape(-1).double() * weights).sum()


def _widened(leaf: Any) -> Any:
    is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return leaf.detach().cpu().double() if is_float else leaf.cpu() if isinstance(leaf, Tensor) else leaf


def _part_of(whole: nn.Module, splits: Mapping[str, ParamSplit], rank: int) -> nn.Module:
    """Return a copy that holds a rank's part of each parameter; tied ones stay tied."""
    part = copy.deepcopy(whole)
    for name, parameter in part.named_parameters():
        local = parameter.new_zeros(splits[name].local_shape)
        for share in splits[name].shares(rank):
            local[_slices(share.target)] = parameter.detach()[_slices(share.source)]
        parameter.data = local
    return part


def _wrong_gradient(whole: nn.Module, ranks: list[nn.Module], splits: Mapping[str, ParamSplit]) -> str:
    largest = max((float(each.grad.abs().max()) for each in whole.parameters() if each.grad is not None), default=0.0)
    for name, parameter in whole.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        size = max(float(expected.abs().max()), 1e-3 * largest, 1e-12) if expected.numel() else 1.0
        for found in _whole_gradients(name, ranks, splits[name]):
            wrong = float((found - expected).abs().max()) / size if expected.numel() else 0.0
            if not wrong < _TOLERANCE:
                return f"the gradient of {name} is off by {wrong:.0e} of its size"
    return ""


def _whole_gradients(name: str, ranks: list[nn.Module], split: ParamSplit) -> Iterator[Tensor]:
    """Yield the gradient as the engine assembles it; of a parameter that is whole on all ranks, each rank's."""
    local = [each.get_parameter(name) for each in ranks]
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
