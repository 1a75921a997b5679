"""One row for each optimizer that a config can name: its states, how it steps elements, and what makes and calls it.

`Layout`, the step of what is stored off the device or encoded, codecs, the Triton kernel, the measure of what codecs
round off, and the planner read these rows, and nothing else says what they say. A row names its class, and its kernel
imports torch when it steps: what only counts states needs no torch.

All but Muon are element-wise, since they see 1-D pieces of parameters. Of optimizers that a user gives, a trial says
what they need (`shardwise.runtime.optimizer_probe`).

>>> import torch
>>> rule = rule_of(torch.optim.SGD([torch.zeros(1)], momentum=0.5))
>>> rule.first_values({"momentum": 0.5}), rule.has_counter
({'momentum_buffer': 0.0}, False)
>>> [state.name for state in named_rule("adamw").states if not state.is_signed]
['exp_avg_sq', 'max_exp_avg_sq']
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import OptimizerConfig, shown_value

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.optim import Optimizer

    from shardwise.optim.elementwise import Options, StepTensors

    Kernel = Callable[[Options, StepTensors], None]

# Of what Muon steps: the option of a param group that says so, and the state of a matrix.
IS_MATRIX: Final = "is_matrix"
MOMENTUM: Final = "momentum_buffer"
NUM_ITERATIONS: Final = 5
"""Newton-Schulz iterations of Muon, as Keller Jordan's and torch's."""


@dataclass(frozen=True)
class StateRule:
    """Describes one tensor that an optimizer keeps of a parameter, of the parameter's shape.

    Attributes:
        first: its value before any step, or the option that says it.
        is_signed: whether it may be negative; sums and means of squares are not.
        needs: the option that must be true, or above 0, for it to exist; "" for none.
    """

    name: str
    first: float | str = 0.0
    is_signed: bool = True
    needs: str = ""


@dataclass(frozen=True)
class OptimizerRule:
    """Describes one optimizer.

    Attributes:
        made_by: the class, or the path of its module and its name there.
        states: those that are as long as the parameter.
        has_counter: whether a 0-d fp32 `step` is kept for each parameter.
        kernel: steps lists of tensors by torch's own kernels, to rounding as the class does. Without one the optimizer
            is refused where states are encoded or on NVMe.
        gpu_kernel: the case of `shardwise.zero.triton_step` that steps int8 states; "" for none.
        matrix_states: those of parameters that are stepped as whole matrices, in place of `states`.
        divides_by_scale: torch's fused kernel divides gradients by the attribute `grad_scale`.
    """

    name: str
    made_by: type[Optimizer] | str
    states: tuple[StateRule, ...]
    has_counter: bool = True
    kernel: Kernel | None = None
    gpu_kernel: str = ""
    matrix_states: tuple[StateRule, ...] = ()
    divides_by_scale: bool = False

    @property
    def kind(self) -> type[Optimizer]:
        """Return the class; a subclass may step otherwise, so it has no row."""
        return _class_of(self.made_by) if isinstance(self.made_by, str) else self.made_by

    def first_values(self, options: Options) -> dict[str, float]:
        """Return the states that these options ask for, with their values before the first step.

        Raises:
            ConfigError: the row reads an option that the optimizer lacks.
        """
        with self._explained(options):
            kept = [state for state in self.states if not state.needs or options[state.needs]]
            return {state.name: options[state.first] if isinstance(state.first, str) else state.first for state in kept}

    def update(self, options: Options, tensors: StepTensors) -> None:
        """Take one step in place, on the CPU.

        Raises:
            ConfigError: the kernel reads an option or a state that the optimizer lacks.
        """
        assert self.kernel is not None, "the optimizer was refused"
        with self._explained(options, tensors.states):
            self.kernel(_on_host(options), tensors)

    @contextmanager
    def _explained(self, options: Options, states: Sequence[Mapping[str, Tensor]] = ()) -> Iterator[None]:
        """Say of a name that a row asks for in vain whose it is; the row of another optimizer may be copied here."""
        try:
            yield
        except KeyError as error:
            kept = ", ".join(sorted({*options, *(name for state in states for name in state)} - {"params"}))
            raise ConfigError(
                "rule-of-other-optimizer",
                f"the rule of {self.kind.__name__} asks for {error}, which is no option and no state of it ({kept}); "
                "give it states and a kernel of its own in optim/rules.py",
            ) from error


@cache
def _class_of(path: str) -> type[Optimizer]:
    return cast("type[Optimizer]", resolve_name(path))


def _on_host(options: Options) -> dict[str, Any]:
    """Return the options with their tensors, such as a learning rate, on the CPU."""

    from torch import Tensor

    def moved(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(moved(each) for each in value)
        return value.cpu() if isinstance(value, Tensor) else value

    return {name: moved(value) for name, value in options.items() if name != "params"}


def _fused(options: Options) -> dict[str, Any]:
    """Return the choice of torch's fused kernels, the fastest on a CPU, with the learning rate as they take it."""
    return {"fused": True, "foreach": False, "lr": float(options["lr"])}


def _step_adam(options: Options, tensors: StepTensors) -> None:
    from torch.optim.adam import adam

    beta1, beta2 = options["betas"]
    adam(
        list(tensors.params),
        list(tensors.grads),
        tensors.all("exp_avg"),
        tensors.all("exp_avg_sq"),
        tensors.all("max_exp_avg_sq") if options.get("amsgrad") else [],
        tensors.counters(),
        **_fused(options),
        decoupled_weight_decay=options["decoupled_weight_decay"],
        amsgrad=options["amsgrad"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=options["weight_decay"],
        eps=options["eps"],
        maximize=options["maximize"],
    )


def _step_sgd(options: Options, tensors: StepTensors) -> None:
    from torch.optim.sgd import sgd

    has_momentum = options["momentum"] != 0
    kept = tensors.all("momentum_buffer") if has_momentum and not tensors.is_first else []
    buffers: list[Tensor | None] = [*kept] if kept else [None] * len(tensors.params)
    names = ("weight_decay", "momentum", "dampening", "nesterov", "maximize")
    chosen = {name: options[name] for name in names}
    sgd(list(tensors.params), list(tensors.grads), buffers, **_fused(options), **chosen)
    if has_momentum and tensors.is_first:
        for kept_buffer, first in zip(tensors.all("momentum_buffer"), buffers, strict=True):
            if first is not None:  # for typing: torch fills the list
                kept_buffer.copy_(first)


def _step_adagrad(options: Options, tensors: StepTensors) -> None:
    from torch.optim.adagrad import adagrad

    names = ("weight_decay", "lr_decay", "eps", "maximize")
    chosen = {name: options[name] for name in names}
    sums, counters = tensors.all("sum"), tensors.counters()
    adagrad(list(tensors.params), list(tensors.grads), sums, counters, **_fused(options), **chosen)


def _refuse_pieces(options: Options, tensors: StepTensors) -> NoReturn:
    raise AssertionError("a matrix is stepped whole, by its owner")


_MEAN: Final = StateRule("exp_avg")
_SQUARES: Final = StateRule("exp_avg_sq", is_signed=False)
_SQUARE_AVG: Final = StateRule("square_avg", is_signed=False)
_MOMENTUM: Final = StateRule("momentum_buffer", needs="momentum")
_ADAM_STATES: Final = (_MEAN, _SQUARES, StateRule("max_exp_avg_sq", is_signed=False, needs="amsgrad"))


def _torch_only(name: str, *states: StateRule) -> OptimizerRule:
    """Return the row of an optimizer that torch alone steps, on the device or on the host as a whole."""
    return OptimizerRule(name.lower(), f"torch.optim:{name}", states)


def _own(name: str, *states: StateRule, has_counter: bool = True, gpu_kernel: str = "") -> OptimizerRule:
    path = f"shardwise.optim.elementwise:{name}"

    def step(options: Options, tensors: StepTensors) -> None:
        resolve_name(path).kernel(options, tensors)

    return OptimizerRule(name.lower(), path, states, has_counter, step, gpu_kernel)


RULES: Final[tuple[OptimizerRule, ...]] = (
    OptimizerRule(
        "adamw", "torch.optim:AdamW", _ADAM_STATES, kernel=_step_adam, gpu_kernel="adam", divides_by_scale=True
    ),
    OptimizerRule(
        "adam", "torch.optim:Adam", _ADAM_STATES, kernel=_step_adam, gpu_kernel="adam", divides_by_scale=True
    ),
    OptimizerRule("sgd", "torch.optim:SGD", (_MOMENTUM,), False, _step_sgd, "sgd", divides_by_scale=True),
    OptimizerRule(
        "adagrad",
        "torch.optim:Adagrad",
        (StateRule("sum", "initial_accumulator_value", is_signed=False),),
        kernel=_step_adagrad,
        gpu_kernel="adagrad",
    ),
    OptimizerRule(
        "muon",
        "shardwise.optim.muon:MuonWithAdamW",
        _ADAM_STATES,
        kernel=_step_adam,
        gpu_kernel="adam",
        matrix_states=(StateRule(MOMENTUM),),
    ),
    _own("Lion", _MEAN, has_counter=False, gpu_kernel="lion"),
    _own("AdEMAMix", _MEAN, StateRule("exp_avg_slow"), _SQUARES),
    _torch_only("NAdam", _MEAN, _SQUARES),
    _torch_only("RAdam", _MEAN, _SQUARES),
    _torch_only("Adamax", _MEAN, StateRule("exp_inf", is_signed=False)),
    _torch_only("Adadelta", _SQUARE_AVG, StateRule("acc_delta", is_signed=False)),
    _torch_only("ASGD", StateRule("ax")),
    _torch_only("Rprop", StateRule("prev"), StateRule("step_size")),
    _torch_only("RMSprop", _SQUARE_AVG, _MOMENTUM),
)
_BY_NAME: Final[Mapping[str, OptimizerRule]] = MappingProxyType({rule.name: rule for rule in RULES})
STORED_STATES: Final = tuple(
    {state.name: state for rule in RULES if rule.kernel for state in (*rule.states, *rule.matrix_states)}.values()
)
"""Each state that the library may store itself, once: a name means the same in all rows."""


def rules_by_name() -> Mapping[str, OptimizerRule]:
    """Return all rows by `optimizer.name`."""
    return _BY_NAME


def named_rule(name: str) -> OptimizerRule | None:
    """Return the row of a name in upper or lower case; None for an unknown one."""
    return _BY_NAME.get(name.lower())


def rule_of_kind(kind: type[Optimizer]) -> OptimizerRule | None:
    """Return the row of a class that has a kernel; None for any other, a subclass included."""
    return next((rule for rule in _BY_NAME.values() if rule.kernel is not None and rule.kind is kind), None)


def rule_of(optimizer: Optimizer, *, is_matrix: bool = False) -> OptimizerRule:
    """Return the row by which an optimizer steps what the library stores.

    Args:
        is_matrix: whether it steps whole matrices: then the row says the states alone.

    Raises:
        ConfigError: there is none, or none with a kernel.
    """
    rule = rule_of_kind(type(optimizer))
    if rule is None:
        refuse_without_rule(type(optimizer))
    return _of_matrices(rule) if is_matrix else rule


def _of_matrices(rule: OptimizerRule) -> OptimizerRule:
    return OptimizerRule(rule.name, rule.made_by, rule.matrix_states, False, _refuse_pieces)


def refuse_without_rule(kind: type[Optimizer], *, is_element_wise: bool = True) -> NoReturn:
    """Raise for an optimizer whose states can be neither encoded nor on NVMe.

    Raises:
        ConfigError: always.
    """
    why = "" if is_element_wise else ", whose step needs whole tensors"
    known = [rule.kind.__name__ for rule in RULES if rule.kernel is not None and not rule.matrix_states]
    raise ConfigError(
        "host-step-optimizer",
        f"a step of states on NVMe or of encoded ones is one of Muon, {', '.join(known[:-1])} and {known[-1]}; got "
        f"{kind.__name__}{why}; use one of these, or tiers.optimizer=device or host and precision.states=master",
    )


def needed_states(optimizer: Optimizer, options: Options) -> frozenset[str] | None:
    """Return the states that the optimizer reads of a parameter that it has stepped under these options.

    They are `step`, a number, and tensors as long as the parameter. None where `rule_of` does not know the optimizer.
    """
    rule = rule_of_kind(type(optimizer))
    if rule is not None and options.get(IS_MATRIX):
        rule = _of_matrices(rule)
    return None if rule is None else frozenset([*rule.first_values(options), *(["step"] if rule.has_counter else [])])


def state_names(config: OptimizerConfig) -> tuple[str, ...]:
    """Return the tensors that the config's optimizer keeps for each parameter beside the master; () for an unknown one.

    Parameters that it steps as whole matrices have those of `matrix_state_names` in their place.
    """
    rule, is_on = named_rule(config.name), {"momentum": config.kept_momentum > 0}
    states = () if rule is None else rule.states
    return tuple(state.name for state in states if not state.needs or is_on.get(state.needs, False))


def matrix_state_names(name: str) -> tuple[str, ...]:
    """Return the states of what an optimizer steps as whole matrices; () for one that does not."""
    rule = named_rule(name)
    return () if rule is None else tuple(state.name for state in rule.matrix_states)


def num_states(name: str) -> tuple[int, int]:
    """Return how many states an optimizer keeps of an element: the fewest, and the most of the usual ones.

    >>> num_states("adamw"), num_states("sgd"), num_states("muon"), num_states("unknown")
    ((2, 2), (0, 1), (1, 2), (0, 0))
    """
    rule = named_rule(name)
    if rule is None:
        return 0, 0
    always = sum(not state.needs for state in rule.states)
    least = min(always, len(rule.matrix_states)) if rule.matrix_states else always
    return least, sum(state.needs in ("", "momentum") for state in rule.states)


# These classes of torch's work on a whole matrix, or need a closure: they have no name in a config.
_NOT_ELEMENT_WISE: Final = frozenset({"lbfgs", "adafactor", "muon", "sparseadam"})

ParamGroups = Sequence[dict[str, Any]]


def wanted_rule(name: str) -> OptimizerRule:
    """Return the row of a name, in upper or lower case.

    Raises:
        ConfigError: no optimizer that is right on pieces has that name.
    """
    rule = named_rule(name)
    if rule is None:
        shown, names = f"optimizer.name={shown_value(name)}", f"choose one of {', '.join(sorted(rules_by_name()))}"
        if name.lower() in _NOT_ELEMENT_WISE:
            raise ConfigError("optimizer-element-wise", f"{shown} is not element-wise; {names}")
        raise ConfigError("unknown-optimizer", f"{shown} is unknown; {names}")
    return rule


def optimizer_kind(name: str) -> type[Optimizer]:
    """Return the class of a name's row.

    Raises:
        ConfigError: as `wanted_rule`.
    """
    return wanted_rule(name).kind


def build_optimizer(config: OptimizerConfig, groups: ParamGroups) -> Optimizer:
    """Construct the optimizer that `config.name` names over parameter groups, fused where torch has a fused kernel.

    Raises:
        ConfigError: no optimizer that is right on pieces has that name.
    """
    kind = optimizer_kind(config.name)
    accepted = inspect.signature(kind).parameters
    wanted: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "momentum": config.kept_momentum,
        "weight_decay": config.weight_decay,
        "fused": True,
    }
    return kind(groups, **{key: value for key, value in wanted.items() if key in accepted})


@dataclass(frozen=True)
class LateFactor:
    """Is what a step multiplies gradients by, where the device alone knows it yet.

    Attributes:
        divisor: what the kernel divides gradients by, one over the factor, fp32 and 0-d.
        is_refused: fp32 and 0-d, 1 where the step must change nothing, such as for gradients that are not finite.
    """

    divisor: Tensor
    is_refused: Tensor


def may_scale_in_step(optimizer: Optimizer, gradients: Collection[Tensor]) -> bool:
    """Say whether a step by these gradients, in the masters' dtypes, may multiply them by a factor itself."""
    import torch

    rule, is_fused = rule_of_kind(type(optimizer)), all(group.get("fused") for group in optimizer.param_groups)
    is_wide = {gradient.dtype for gradient in gradients} == {torch.float32}
    return is_wide and is_fused and rule is not None and rule.divides_by_scale


@contextmanager
def scaled_in_step(optimizer: Optimizer, factor: float | LateFactor, gradients: Collection[Tensor]) -> Iterator[bool]:
    """Let a fused step inside multiply its fp32 gradients by `factor` itself; say whether it will.

    It spares a pass over the gradients. The kernels divide by an attribute `grad_scale`, and do nothing where
    `found_inf` is 1: the protocol between `torch.amp.GradScaler` and torch's optimizers.

    Args:
        gradients: what it steps by; none where they must be multiplied before.
    """
    import torch

    if not may_scale_in_step(optimizer, gradients):
        yield False
        return
    names = ["grad_scale"]
    if isinstance(factor, LateFactor):
        names.append("found_inf")
        values = [factor.divisor, factor.is_refused]
    else:
        scale = fused_grad_scale(type(optimizer), factor, {torch.float32})
        if scale is None:
            yield False
            return
        device = next(iter(gradients)).device
        values = [torch.full((), scale, dtype=torch.float32, device=device)]  # a copy of it would hold up the host
    for name, value in zip(names, values, strict=True):
        setattr(optimizer, name, value)
    try:
        yield True
    finally:
        for name in names:
            delattr(optimizer, name)


def fused_grad_scale(kind: type[Optimizer], factor: float, dtypes: Collection[torch.dtype]) -> float | None:
    """Return the fp32 number by which a fused step divides to multiply by `factor`; None where it cannot.

    Args:
        factor: turns accumulated sums into the gradient.
    """
    import torch

    rule = rule_of_kind(kind)
    if rule is None or not rule.divides_by_scale or any(dtype != torch.float32 for dtype in dtypes):
        return None
    if not 1e-30 < abs(factor) < 1e30:
        return None
    return torch.tensor(1.0 / factor, dtype=torch.float32).item()


def lacks_some_momentum(optimizer: Optimizer, stepped: Sequence[Tensor]) -> bool:
    """Say whether torch's fused SGD would meet parameters with and without momentum, which its kernel cannot step.

    Args:
        stepped: what it is about to step.
    """
    from torch.optim import SGD

    if not isinstance(optimizer, SGD) or not any(group.get("fused") for group in optimizer.param_groups):
        return False
    if not any(group["momentum"] for group in optimizer.param_groups):
        return False
    have = [optimizer.state.get(param, {}).get("momentum_buffer") is not None for param in stepped]
    return any(have) and not all(have)


@contextmanager
def stepped_unfused(optimizer: Optimizer) -> Iterator[None]:
    """Let the optimizer step without its fused kernel."""
    fused = [group.get("fused") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["fused"] = False
    try:
        yield
    finally:
        for group, before in zip(optimizer.param_groups, fused, strict=True):
            group["fused"] = before
