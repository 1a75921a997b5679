"""Step parameters on the CPU as torch's optimizers do, for states that are stored outside the optimizer.

A rule knows which states an optimizer keeps, and updates lists of 1-D CPU tensors by torch's own kernels, so that the
result is that of a step of the optimizer itself, to rounding.

>>> rule = rule_of(torch.optim.SGD([torch.zeros(1)], momentum=0.5))
>>> rule.tensor_states({"momentum": 0.5}), rule.has_counter
({'momentum_buffer': 0.0}, False)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Barrier
from types import MappingProxyType
from typing import Any, Final, NoReturn

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from shardwise.config.resolve import ConfigError
from shardwise.layout.codec import BLOCK_NUMEL as CODEC_BLOCK
from shardwise.layout.codec import Encoded
from shardwise.runtime.codec_errors import CodecErrors
from shardwise.runtime.muon import IS_MATRIX, MOMENTUM, MuonWithAdamW
from shardwise.runtime.optimizers import Lion, fused_grad_scale, lion

Options = Mapping[str, Any]
States = Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class PieceTensors:
    """Holds what one call of a kernel updates: tensors that share their options and the number of steps taken.

    Attributes:
        params: 1-D, fp32 or fp64.
        grads: of the same lengths and dtypes; they may be overwritten.
        states: for each of `params` by name, of its length and dtype; before the first step at their first values.
        step: how many steps they have taken before.
        is_first: no step has been taken, so that SGD's momentum starts as the gradient itself.
    """

    params: list[Tensor]
    grads: list[Tensor]
    states: States
    step: float
    is_first: bool

    def all(self, name: str) -> list[Tensor]:
        """Return one state of all tensors."""
        return [states[name] for states in self.states]

    def counters(self) -> list[Tensor]:
        """Return a counter for each tensor; torch's functions increment it before they use it."""
        return [torch.tensor(float(self.step), device=param.device) for param in self.params]


@dataclass(frozen=True)
class CpuOptimizer:
    """Steps tensors as one class of optimizer does; the functions take a parameter group's options.

    Attributes:
        kind: the class.
        tensor_states: the names of the states that are as long as the parameter, with their values before any step.
        has_counter: whether a 0-d fp32 `step` is kept for each parameter.
        kernel: updates in place.
    """

    kind: type[Optimizer]
    tensor_states: Callable[[Options], Mapping[str, float]]
    has_counter: bool
    kernel: Callable[[Options, PieceTensors], None]

    def first_values(self, options: Options) -> Mapping[str, float]:
        """Return `tensor_states`.

        Raises:
            ConfigError: the rule reads an option that the optimizer lacks.
        """
        with self._explained(options):
            return self.tensor_states(options)

    @contextmanager
    def _explained(self, options: Options, states: States = ()) -> Iterator[None]:
        """Say of a name that a rule asks for in vain whose it is; the rule of another optimizer may be copied here."""
        try:
            yield
        except KeyError as error:
            kept = ", ".join(sorted({*options, *(name for each in states for name in each)} - {"params"}))
            raise ConfigError(
                "rule-of-other-optimizer",
                f"the rule of {self.kind.__name__} asks for {error}, which is no option and no state of it ({kept}); "
                "give it a tensor_states and a kernel of its own in offload/cpu_optimizer.py",
            ) from error

    def update(
        self,
        options: Options,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: States,
        step: float,
        is_first: bool,
    ) -> None:
        """Take one step in place.

        Args:
            options: of the tensors' parameter group.
            params: 1-D, fp32 or fp64, on the CPU.
            grads: of the same lengths and dtypes; they may be overwritten.
            states: by name, for each of `params`; before the first step at the values of `tensor_states`.
            step: how many steps they have taken before.
            is_first: whether they have no state yet.
        """
        with self._explained(options, states):
            self.kernel(_on_host(options), PieceTensors(list(params), list(grads), states, step, is_first))


def rule_of(optimizer: Optimizer, *, is_matrix: bool = False) -> CpuOptimizer:
    """Return the rule by which an optimizer steps.

    Args:
        optimizer: of torch.
        is_matrix: whether it steps whole matrices: then the rule knows the states alone.

    Raises:
        ConfigError: it is of another class, a subclass included, since that may step otherwise.
    """
    if is_matrix:
        return _MATRIX_RULE
    if not has_rule(type(optimizer)):
        refuse_without_rule(type(optimizer))
    return _RULES[type(optimizer)]


def has_rule(kind: type[Optimizer]) -> bool:
    """Say whether `rule_of` knows a class of optimizers; of a subclass it does not, since that may step otherwise."""
    return kind in _RULES


def refuse_without_rule(kind: type[Optimizer], *, is_element_wise: bool = True) -> NoReturn:
    """Raise for an optimizer whose states can be neither encoded nor on NVMe.

    Raises:
        ConfigError: always.
    """
    why = "" if is_element_wise else ", whose step needs whole tensors"
    raise ConfigError(
        "host-step-optimizer",
        "a step of states on NVMe or of encoded ones is one of Muon, Adam, AdamW, SGD, Adagrad and Lion; got "
        f"{kind.__name__}{why}; use one of these, or tiers.optimizer=device or host and precision.states=master",
    )


def needed_states(optimizer: Optimizer, options: Options) -> frozenset[str] | None:
    """Return the states that the optimizer reads of a parameter that it has stepped under these options.

    They are `step`, a number, and tensors as long as the parameter. None where `rule_of` does not know the optimizer.
    """
    rule = _MATRIX_RULE if options.get(IS_MATRIX) else _RULES.get(type(optimizer))
    return None if rule is None else frozenset([*rule.first_values(options), *(["step"] if rule.has_counter else [])])


def _on_host(options: Options) -> dict[str, Any]:
    """Return the options with their tensors, such as a learning rate, on the CPU."""

    def moved(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(moved(each) for each in value)
        return value.cpu() if isinstance(value, Tensor) else value

    return {name: moved(value) for name, value in options.items() if name != "params"}


def _fused(options: Options) -> dict[str, Any]:
    """Return the choice of torch's fused kernels, the fastest on a CPU, with the learning rate as they take it."""
    return {"fused": True, "foreach": False, "lr": float(options["lr"])}


def _step_adam(options: Options, parts: PieceTensors) -> None:
    beta1, beta2 = options["betas"]
    adam(
        parts.params,
        parts.grads,
        parts.all("exp_avg"),
        parts.all("exp_avg_sq"),
        parts.all("max_exp_avg_sq") if options.get("amsgrad") else [],
        parts.counters(),
        **_fused(options),
        decoupled_weight_decay=options["decoupled_weight_decay"],
        amsgrad=options["amsgrad"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        maximize=options["maximize"],
    )


def _step_sgd(options: Options, parts: PieceTensors) -> None:
    has_momentum = options["momentum"] != 0
    kept = parts.all("momentum_buffer") if has_momentum and not parts.is_first else []
    buffers: list[Tensor | None] = [*kept] if kept else [None] * len(parts.params)
    names = ("weight_decay", "momentum", "dampening", "nesterov", "maximize")
    sgd(parts.params, parts.grads, buffers, **_fused(options), **{name: options[name] for name in names})
    if has_momentum and parts.is_first:
        for kept_buffer, first in zip(parts.all("momentum_buffer"), buffers, strict=True):
            if first is not None:  # for typing: torch fills the list
                kept_buffer.copy_(first)


def _step_adagrad(options: Options, parts: PieceTensors) -> None:
    names = ("weight_decay", "lr_decay", "eps", "maximize")
    chosen = {name: options[name] for name in names}
    adagrad(parts.params, parts.grads, parts.all("sum"), parts.counters(), **_fused(options), **chosen)


def _step_lion(options: Options, parts: PieceTensors) -> None:
    names = ("lr", "betas", "weight_decay", "maximize")
    lion(parts.params, parts.grads, parts.all("exp_avg"), **{name: options[name] for name in names})


def _adam_states(options: Options) -> dict[str, float]:
    return dict.fromkeys(("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if options.get("amsgrad") else [])), 0.0)


_RULES: Mapping[type[Optimizer], CpuOptimizer] = MappingProxyType(
    {
        Adam: CpuOptimizer(Adam, _adam_states, True, _step_adam),
        AdamW: CpuOptimizer(AdamW, _adam_states, True, _step_adam),
        SGD: CpuOptimizer(
            SGD, lambda options: {"momentum_buffer": 0.0} if options["momentum"] else {}, False, _step_sgd
        ),
        Adagrad: CpuOptimizer(
            Adagrad, lambda options: {"sum": options["initial_accumulator_value"]}, True, _step_adagrad
        ),
        MuonWithAdamW: CpuOptimizer(MuonWithAdamW, _adam_states, True, _step_adam),
        Lion: CpuOptimizer(Lion, lambda options: {"exp_avg": 0.0}, False, _step_lion),
    }
)


def _refuse_pieces(options: Options, parts: PieceTensors) -> None:
    raise AssertionError("a matrix is stepped whole, by its owner")


_MATRIX_RULE: Final = CpuOptimizer(MuonWithAdamW, lambda options: {MOMENTUM: 0.0}, False, _refuse_pieces)

# Elements that one call of a kernel steps: few enough for a core's cache, many enough for the cost of a call to vanish.
BLOCK_NUMEL: Final = 768 * 1024
# Where states are decoded, their values in fp32 are to fit the cache, too.
ENCODED_NUMEL: Final = 256 * 1024


@dataclass(frozen=True)
class StepPiece:
    """Holds a parameter's part of what is stepped; all tensors are 1-D, on the CPU and of one length.

    Attributes:
        options: of its parameter group; pieces with the same object are stepped together.
        master: fp32 or fp64.
        grad: of any floating dtype; it stays as it is.
        states: by name, in the master's dtype, or encoded; at their first values before the first step.
        step: how many steps it has taken before.
        is_first: whether it has no state yet.
        param: the low-precision parameter, which follows the master; None where the master is the parameter.
    """

    options: Mapping[str, Any]
    master: Tensor
    grad: Tensor
    states: Mapping[str, Tensor | Encoded]
    step: float
    is_first: bool
    param: Tensor | None

    @property
    def has_codes(self) -> bool:
        """Say whether a state is encoded, so that parts begin at block borders."""
        return any(isinstance(state, Encoded) for state in self.states.values())

    def part(self, start: int, stop: int) -> StepPiece:
        """Return the elements from `start` to `stop`."""
        if start == 0 and stop == self.master.numel():
            return self
        return StepPiece(
            options=self.options,
            master=self.master[start:stop],
            grad=self.grad[start:stop],
            states={
                name: state.part(start, stop) if isinstance(state, Encoded) else state[start:stop]
                for name, state in self.states.items()
            },
            step=self.step,
            is_first=self.is_first,
            param=self.param[start:stop] if self.param is not None else None,
        )


def step_pieces(
    rule: CpuOptimizer,
    pieces: Sequence[StepPiece],
    factor: float,
    threads: StepThreads | None = None,
    errors: CodecErrors | None = None,
) -> None:
    """Step each piece with `factor` times its gradient, as the optimizer steps the whole parameter, to rounding.

    Args:
        rule: steps as the optimizer does.
        pieces: of one or several parameters, in any order.
        factor: turns accumulated sums into the gradient; applied in the master's dtype.
        threads: share the blocks between them; None lets torch's own threads share each operation.
        errors: measures what encoding rounds off; None for no measure.
    """
    num_takers = threads.num_threads if threads else 1
    for together in _by_kernel_call(pieces):
        most = ENCODED_NUMEL if together[0].has_codes else BLOCK_NUMEL
        capacity = _round_up(min(most, -(-sum(piece.master.numel() for piece in together) // num_takers)))
        # The iterator of a list may be shared by threads; that of a function may not.
        work = partial(_work_off, iter(list(_blocks(together, capacity))), rule, capacity, factor, errors)
        if threads:
            threads.run(work)
        else:
            work()


def _by_kernel_call(pieces: Sequence[StepPiece]) -> list[list[StepPiece]]:
    """Group the pieces that one call of a kernel can step."""
    found: dict[tuple[Any, ...], list[StepPiece]] = {}
    for piece in pieces:
        if piece.master.numel():
            key = (id(piece.options), piece.step, piece.is_first, piece.master.dtype, piece.has_codes)
            found.setdefault(key, []).append(piece)
    return list(found.values())


def _blocks(pieces: Sequence[StepPiece], capacity: int) -> Iterator[list[StepPiece]]:
    """Yield parts of the pieces, in order, as many at a time as fit into `capacity` elements."""
    block: list[StepPiece] = []
    free = capacity
    for piece in pieces:
        start, length = 0, piece.master.numel()
        while start < length:
            if piece.has_codes and free < length - start:
                free = free // CODEC_BLOCK * CODEC_BLOCK
            stop = min(length, start + free)
            block.append(piece.part(start, stop))
            free -= stop - start
            start = stop
            if free == 0:
                yield block
                block, free = [], capacity
    if block:
        yield block


@torch.no_grad()
def _work_off(
    blocks: Iterator[Sequence[StepPiece]], rule: CpuOptimizer, capacity: int, factor: float, errors: CodecErrors | None
) -> None:
    scratch = None
    for block in blocks:
        if scratch is None:
            scratch = torch.empty(capacity, dtype=block[0].master.dtype, device=block[0].master.device)
        _step_block(rule, block, scratch, factor, errors)


def _step_block(
    rule: CpuOptimizer, block: Sequence[StepPiece], scratch: Tensor, factor: float, errors: CodecErrors | None
) -> None:
    grads, start = [], 0
    for part in block:
        grads.append(_scaled(part.grad, scratch[start : start + part.grad.numel()], factor, rule.kind))
        start += part.grad.numel()
    first = block[0]
    masters, states = [part.master for part in block], [_decoded(part) for part in block]
    rule.update(first.options, masters, grads, states, first.step, first.is_first)
    for part, values in zip(block, states, strict=True):
        for name, state in part.states.items():
            if isinstance(state, Encoded):
                exact = values[name].clone() if errors is not None and errors.is_on else None
                state.encode(values[name])
                if exact is not None and errors is not None:
                    errors.add(name, exact, state.decode())
    for part in block:
        if part.param is not None:
            part.param.copy_(part.master)


def _decoded(part: StepPiece) -> dict[str, Tensor]:
    """Return the states in the master's dtype."""
    return {
        name: state.decode().to(part.master.dtype) if isinstance(state, Encoded) else state
        for name, state in part.states.items()
    }


def _round_up(numel: int) -> int:
    """Return a capacity that holds whole blocks of codes."""
    return -(-numel // CODEC_BLOCK) * CODEC_BLOCK


def _scaled(grad: Tensor, target: Tensor, factor: float, kind: type[Optimizer]) -> Tensor:
    """Scale a gradient as the fused step on the device does, so that races between tiers show in the last bit."""
    scale = fused_grad_scale(kind, factor, {target.dtype})
    if scale is not None:
        return torch.div(grad, scale, out=target) if grad.dtype == target.dtype else target.copy_(grad).div_(scale)
    if grad.dtype == target.dtype:
        return torch.mul(grad, factor, out=target)
    target.copy_(grad)
    return target.mul_(factor) if factor != 1.0 else target


class StepThreads:
    """Runs functions in threads whose torch operations use no further threads, until `close`.

    Make it when no other thread begins to use torch, such as at start: for a moment, a thread that is new to torch gets
    one thread for its operations.

    Args:
        num_threads: how many; None for as many as torch uses for an operation here.
        cores: the cores to which they are bound; None for those of the calling thread.
    """

    def __init__(self, num_threads: int | None = None, cores: tuple[int, ...] | None = None) -> None:
        before = torch.get_num_threads()
        self.num_threads = num_threads or before
        self._executor = ThreadPoolExecutor(self.num_threads, "shardwise-step")
        all_are_there = Barrier(self.num_threads)
        wait([self._executor.submit(_use_one_core, all_are_there, cores) for _ in range(self.num_threads)])
        torch.set_num_threads(before)

    def run(self, function: Callable[[], object]) -> None:
        """Call a function once in each thread, at the same time, and wait for all.

        Raises:
            Exception: what a call raised.
        """
        futures = [self._executor.submit(function) for _ in range(self.num_threads)]
        wait(futures)
        for future in futures:
            future.result()

    def close(self) -> None:
        """End the threads; may be called twice."""
        self._executor.shutdown()


def _use_one_core(all_are_there: Barrier, cores: tuple[int, ...] | None) -> None:
    keep_to(cores)
    torch.get_num_threads()  # the first use of torch in a thread sets its number, which would undo what follows
    torch.set_num_threads(1)
    all_are_there.wait()


def bind_this_thread(cores: tuple[int, ...] | None) -> None:
    """Bind the calling thread, and those that OpenMP starts for it, to `cores`; call it before its first kernel.

    Args:
        cores: that this process may use, each with a thread; None for those of the process, and as many threads as it
            has. Where the system binds no threads, only their number counts.
    """
    if cores is None:
        return  # a new thread has the process's number and its starter's cores
    keep_to(cores)
    num_process_threads = torch.get_num_threads()
    torch.set_num_threads(len(cores))
    # What is set last is also what threads yet to come start with, as those of autograd; this thread keeps its own.
    restorer = threading.Thread(target=torch.set_num_threads, args=(num_process_threads,))
    restorer.start()
    restorer.join()


def keep_to(cores: tuple[int, ...] | None) -> None:
    """Bind the calling thread to `cores`, where the system can bind threads; None changes nothing."""
    if cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)  # 0 is the calling thread, not the process
