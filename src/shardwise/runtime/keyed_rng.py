"""Keyed randomness names every draw, so that every layout draws the numbers one process draws.

It does not replace torch's generators: it says which seed each of them gets. A key is the run's seed and a
name (of a module, of a data order, of a step), never the rank or the number of draws made before.

>>> derive_seed(0, "blocks.0"), derive_seed(0, "blocks.1")
(2213620356751918991, 6588329855389061331)
>>> first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4, dtype=torch.bfloat16)
>>> init_parameters(first, seed=0), init_parameters(second, seed=0)
(None, None)
>>> torch.equal(first.weight.bfloat16(), second.weight)
True
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.config.errors import ConfigError
from shardwise.runtime.torch_private import pytree

# What draws parameters; and that of transformers, which pads biases, but changes no values.
_REPEATED: Final = ("reset_parameters", "_reset_parameters", "_init_weights", "tie_weights")


def derive_seed(seed: int, *keys: int | str) -> int:
    """Hash a seed and the keys of a draw into a seed of 63 bits, the same in every process of every machine.

    Raises:
        TypeError: a key is neither an int nor a str, whose text alone is stable.
    """
    for key in (seed, *keys):
        if type(key) not in (int, str):
            raise TypeError(f"{key!r} is a {type(key).__name__}, keys of a seed are int or str; convert it")
    digest = blake2b(repr((seed, *keys)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def keyed_generator(seed: int, *keys: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """Make a generator on `device` at the start of the stream that `derive_seed(seed, *keys)` names."""
    return torch.Generator(device).manual_seed(derive_seed(seed, *keys))


def initial_values(module: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Draw the initial value of each parameter without touching it: its memory may be on meta or released.

    A module's own `reset_parameters` draws its direct parameters, and then `_init_weights` of the module around, if it
    has one, as transformers applies it; in fp32 on the CPU, keyed by the seed and the module's name: world size, order
    of construction, device and dtype do not change the values. One module's values are alive at a time. A tied
    parameter is drawn once, under the first of its names.

    Args:
        module: the whole model; the names of its modules are the keys.

    Yields:
        (fully qualified name, fp32 values of the parameter's shape), in the order of `named_parameters()`.

    Raises:
        ConfigError: a parameter belongs to a module with neither.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for module_name, owner in module.named_modules():
        new = {own: names.pop(id(p)) for own, p in owner.named_parameters(recurse=False) if id(p) in names}
        if new:
            check_initializers(module, next(iter(new.values())))
            drawn = draw_module(module, module_name, seed)
            yield from ((name, drawn[own]) for own, name in new.items())


def init_parameters(module: nn.Module, seed: int) -> None:
    """Overwrite every parameter with its `initial_values`, rounded to the parameter's dtype.

    Raises:
        ConfigError: a parameter is on the meta device, or belongs to a module with nothing that draws it.
    """
    for name, values in initial_values(module, seed):
        parameter = module.get_parameter(name)
        if parameter.is_meta:
            raise ConfigError(
                "parameter-on-meta", f"{name} is on meta and holds no values; call to_empty(device=...) first"
            )
        with torch.no_grad():
            parameter.copy_(values)


def check_initializers(model: nn.Module, name: str, used_at: str = "") -> None:
    """Raise if nothing draws a parameter, or other code has used it since.

    Args:
        used_at: where other code has used it; empty where none has.

    Raises:
        ConfigError: its module has no `reset_parameters`, nor any module around it an `_init_weights`; or other use.
    """
    if used_at:
        raise ConfigError(
            "used-before-drawn",
            f"{name} is used at {used_at}, which a seed does not repeat: reset_parameters() of its module and "
            "_init_weights() of the model draw it later; leave out the seed: `with shardwise.init():`",
        )
    module_name = name.rpartition(".")[0]
    owner = model.get_submodule(module_name)
    if not hasattr(owner, "reset_parameters") and not _passes(model, module_name):
        raise ConfigError(
            "no-reset-parameters",
            f"{name} has no initial value: {type(owner).__name__} has no reset_parameters(); "
            "build the model inside `with shardwise.init():`, or write one that fills the module's own parameters",
        )


@torch.no_grad()
def draw_module(model: nn.Module, module_name: str, seed: int) -> dict[str, Tensor]:
    """Draw the `initial_values` of one module's direct parameters, by their names in it.

    Raises:
        ConfigError: a parameter is left unset.
    """
    owner = model.get_submodule(module_name)
    real = dict(owner.named_parameters(recurse=False, remove_duplicate=False))
    try:
        for name, parameter in real.items():
            setattr(owner, name, _stand_in(parameter, "cpu"))
        with torch.random.fork_rng(devices=[]), _OthersAbsent(owner):
            torch.default_generator.manual_seed(derive_seed(seed, module_name))
            for call in (getattr(owner, "reset_parameters", lambda: None), *_passes(model, module_name)):
                call()
        drawn = {name: getattr(owner, name).detach() for name in real}
    finally:
        for name, parameter in real.items():
            setattr(owner, name, parameter)
    for name, values in drawn.items():
        if _has_nan(values):
            raise ConfigError(
                "reset-leaves-nan",
                f"{type(owner).__name__}.reset_parameters() left NaN in its {name}; "
                "it must fill every parameter of its own",
            )
    return drawn


def other_use(parameter: nn.Parameter) -> str:
    """Return where code now uses a parameter, `file:line`, if `draw_module` will not run that; by functions' names."""
    frames = [frame for frame, _ in traceback.walk_stack(None)]  # the innermost first
    drawing = next((frame for frame in frames if frame.f_code.co_name in _REPEATED), None)
    if drawing is not None:
        name, owner = drawing.f_code.co_name, drawing.f_locals.get("self")
        if name == "reset_parameters":
            is_repeated = isinstance(owner, nn.Module) and any(parameter is own for own in owner.parameters(False))
        else:
            is_repeated = name != "_init_weights" or _takes_module(getattr(owner, name, None))
        if is_repeated:
            return ""
    users = (frame for frame in frames if frame.f_globals["__name__"].partition(".")[0] not in ("torch", "shardwise"))
    user = next(users, frames[-1])
    return f"{user.f_code.co_filename}:{user.f_lineno}"


class _OthersAbsent(TorchFunctionMode):
    """Makes torch see all parameters but those of one module as on meta, so that none of the others changes."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__()
        self._owner = owner

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        own = {id(parameter) for parameter in self._owner.parameters(recurse=False)}

        def seen(leaf: Any) -> Any:
            return _stand_in(leaf, "meta") if isinstance(leaf, nn.Parameter) and id(leaf) not in own else leaf

        args, kwargs = pytree.tree_map(seen, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


def _stand_in(parameter: nn.Parameter, device: str) -> nn.Parameter:
    """Return a parameter of that shape, in fp32 and full of NaN."""
    dtype = torch.complex64 if parameter.is_complex() else torch.float32
    return nn.Parameter(torch.full(parameter.shape, torch.nan, dtype=dtype, device=device))


def _passes(model: nn.Module, module_name: str) -> list[Callable[[], object]]:
    """List what draws a module's parameters beside its `reset_parameters`, in its order.

    First `_reset_parameters`, as torch's attention and `nn.Transformer` have it, of the module and those around; then
    the nearest `_init_weights(module)`, for the module and those around, as transformers applies it.
    """
    names = module_name.split(".") if module_name else []
    chain = [model.get_submodule(".".join(names[:length])) for length in range(len(names), -1, -1)]
    calls = [getattr(module, "_reset_parameters") for module in chain if hasattr(module, "_reset_parameters")]  # noqa: B009
    for index, module in enumerate(chain):
        init_weights: Any = getattr(module, "_init_weights", None)
        if _takes_module(init_weights):
            return [*calls, *(partial(init_weights, each) for each in chain[: index + 1])]
    return calls


def _takes_module(function: Callable[..., object] | None) -> bool:
    try:
        return function is not None and inspect.signature(function).bind(None) is not None
    except TypeError:
        return False


def _has_nan(values: Tensor) -> bool:
    numbers = torch.view_as_real(values) if values.is_complex() else values
    return numbers.numel() > 0 and bool(numbers.amin().isnan())  # `isnan` of all would need memory for each
