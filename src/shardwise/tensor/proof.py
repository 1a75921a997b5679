"""Proof of a plan in numbers: the ranks as threads of one process, their loss and gradients held against the whole's.

The model is small, or a small copy of another; it computes in float64, with weights moved off zero so that nothing is
hidden by one. What is compared is what a rank would get: the surgery is the engine's own.

>>> from shardwise.layout.splits import Part
>>> from shardwise.layout.tensor_plan import LayerSplit
>>> model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
>>> layers = (LayerSplit("0", "column", (Part(32),)), LayerSplit("2", "row", (Part(32),)))
>>> refute(model, TensorPlan(layers), torch.ones(2, 8), degree=2)
''
>>> refute(model, TensorPlan(layers, partial=("2.bias",)), torch.ones(2, 8), degree=2)
'the gradient of 2.bias is off by 1e+00 of its size'
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from shardwise._torch_private import is_fake, pytree, unseen_by_op_modes
from shardwise.comm import Comm, Pending
from shardwise.config import Config, ConfigError, TensorConfig
from shardwise.layout.layout import Layout
from shardwise.layout.mesh_shape import MeshShape
from shardwise.layout.splits import ParamSplit, Rect
from shardwise.layout.tensor_plan import TensorPlan, param_splits
from shardwise.models.shrink import Scale, shrink_huggingface
from shardwise.tensor.layout import plan_layout
from shardwise.tensor.plans import find_plan
from shardwise.tensor.plans.table import Table
from shardwise.tensor.surgery import split_model
from shardwise.tensor.trace import call_model, plain_output

MAX_ELEMENTS: Final = 2**21  # of a model that is proved: a second or so
_SEQ_LEN: Final = 8
_TIMEOUT_S: Final = 60.0
_TOLERANCE: Final = 1e-4  # models that compute norms in fp32 whatever their dtype come to 1e-6


def refute(model: nn.Module, plan: TensorPlan, batch: Any, degree: int) -> str:
    """Run a model whole and split, forward and backward.

    Args:
        model: small, with values; it is copied.
        plan: for it.
        batch: what the model is called with.
        degree: ranks.

    Returns:
        what differs; empty where nothing does, or where the whole model does not run on this batch, whose values need
        not be such as it knows, or gives nothing finite.

    Raises:
        Exception: what the split model's code raises.
    """
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), _quiet():
        torch.manual_seed(0)
        whole = copy.deepcopy(model).cpu().double().eval()
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        batch = pytree.tree_map(_widened, batch)
        splits = param_splits(whole, plan, degree, sequence_parallel=False)
        world = _World(degree)
        ranks = [_part_of(whole, splits, rank) for rank in range(degree)]
        try:
            expected = _run(whole, batch)
        except Exception:  # values of an example, as of `torch.empty`, may be no tokens
            expected = math.nan
        if not math.isfinite(expected):
            return ""
        with ThreadPoolExecutor(degree) as pool:
            found = list(pool.map(lambda rank: world.run(rank, ranks[rank], plan, splits, batch), range(degree)))
    wrong = max(abs(each - expected) for each in found) / (abs(expected) + 1e-12)
    if not wrong < _TOLERANCE:
        return f"the outputs are off by {wrong:.0e} of their size"
    return _wrong_gradient(whole, ranks, splits)


def proved_layout(model: nn.Module, config: Config, plan: Table | TensorPlan | None, *, rank: int) -> Layout:
    """Return what `plan_layout` does, for the same arguments, after `check_small_copy`."""
    layout = plan_layout(model, config, plan, rank=rank)
    check_small_copy(model, plan, config.mesh.tp)
    return layout


def check_small_copy(model: nn.Module, given: Table | TensorPlan | None, degree: int) -> None:
    """Refuse the plan that a Hugging Face model brings, or a table for it, where a tiny copy of the model refutes it.

    The copy has the model's config with small sizes. Where it cannot be made, or a table speaks of sizes that it has
    not, nothing is proved, and nothing refused.

    Args:
        model: as it is given to `initialize`; others than Hugging Face's are let pass.
        given: the user's table; None for the model's own plan. A `TensorPlan` has the model's sizes, and is let pass.
        degree: ranks of the tensor-parallel group.

    Raises:
        ConfigError: outputs or gradients of the split copy are not those of the whole.
    """
    config: Any = getattr(model, "config", None)
    is_theirs = hasattr(model, "base_model_prefix") and hasattr(config, "to_dict")
    if degree == 1 or isinstance(given, TensorPlan) or not is_theirs:
        return
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), unseen_by_op_modes(is_real=True):
            values = shrink_huggingface(config.to_dict(), Scale(MeshShape(tp=degree), MeshShape(tp=2)), _SEQ_LEN)
            small: nn.Module = type(model)(type(config).from_dict(values | {"use_cache": False}))
            tokens = torch.randint(4, values["vocab_size"], (2, _SEQ_LEN), generator=torch.Generator().manual_seed(0))
            takes = inspect.signature(small.forward).parameters
            batch = {name: tokens for name in ("input_ids", "labels") if name in takes}
            wrong = refute(small, find_plan(small, 2, given, sequence_parallel=False), batch, 2)
    except Exception:  # of code that nobody knows, at sizes that it was not made for
        return
    if wrong:
        raise ConfigError(
            f"the tensor-parallel plan of {type(model).__name__} is refuted by a tiny copy, in float64 over tp=2: "
            f"{wrong}; let shardwise.propose_plan(model, batch, tp={degree}) make one"
        )


def is_provable(model: nn.Module, batch: Any) -> bool:
    """Return whether a model is small and, as its batch, has values."""
    tensors = [*model.parameters(), *model.buffers()]
    given = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    is_real = not any(each.is_meta or is_fake(each) for each in (*tensors, *given))
    return is_real and sum(each.numel() for each in tensors) <= MAX_ELEMENTS


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside the context the copies' advice, such as of logits that are read, is not told: it is not the user's run."""
    log = logging.getLogger("shardwise")
    before, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = before


class _World:
    """Ranks that meet at a barrier."""

    def __init__(self, degree: int) -> None:
        self.slots: list[Tensor] = [torch.empty(0)] * degree
        self.barrier = threading.Barrier(degree, timeout=_TIMEOUT_S)

    def run(self, rank: int, model: nn.Module, plan: TensorPlan, splits: Mapping[str, ParamSplit], batch: Any) -> float:
        """The loss of one rank, with its gradients left in its parameters."""
        undo: list[Callable[[], None]] = []
        try:
            undo = split_model(model, plan, cast(Comm, _ThreadComm(self, rank)), TensorConfig(), splits)
            with torch.enable_grad():
                return _run(model, batch)
        except BaseException:
            self.barrier.abort()  # the others must not wait for this one
            raise
        finally:
            for each in reversed(undo):
                each()


class _ThreadComm:
    """One rank's way to the others, in place of a process group's."""

    is_simulated = False

    def __init__(self, world: _World, rank: int) -> None:
        self.world, self.rank, self.world_size = world, rank, len(world.slots)

    def _exchange(self, x: Tensor) -> list[Tensor]:
        world = self.world
        world.slots[self.rank] = x.detach().clone()
        world.barrier.wait()
        found = list(world.slots)
        world.barrier.wait()
        return found

    def start_sum(self, source: Tensor, out: Tensor, name: str, lane: Any) -> Pending:
        out.copy_(torch.stack(self._exchange(source)).sum(0))
        return Pending(None)

    def all_gather(self, full: Tensor, name: str, lane: Any = None) -> Pending:
        full.copy_(torch.cat(self._exchange(full.chunk(self.world_size)[self.rank])))
        return Pending(None)

    def scatter_sum(self, source: Tensor, out: Tensor, name: str, lane: Any) -> Pending:
        out.copy_(torch.stack(self._exchange(source)).sum(0).chunk(self.world_size)[self.rank])
        return Pending(None)

    def max_in_place(self, buffer: Tensor, name: str) -> None:
        buffer.copy_(torch.stack(self._exchange(buffer)).amax(0))


def _run(model: nn.Module, batch: Any) -> float:
    """A number that depends on all that the model returns, after its backward."""
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
    """A copy that holds a rank's part of each parameter; tied ones stay tied."""
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
    """The gradient as the engine puts it together; of what ranks hold alike, as each of them has it."""
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
