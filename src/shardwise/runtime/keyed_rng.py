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
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.config.resolve import ConfigError
from shardwise.runtime.torch_private import version


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


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Start torch's generators, of the CPU and of `device`, from `seed` inside the context; restore them at its end."""
    is_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if is_cuda else []):
        torch.default_generator.manual_seed(seed)
        if is_cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def initial_values(module: nn.Module, seed: int, names: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Draw the initial value of each parameter without touching it: its memory may be on meta or released.

    A module's own `reset_parameters` draws its direct parameters, and then `_init_weights` of the module around, if it
    has one, as transformers applies it; in fp32 on the CPU, keyed by the seed and the module's name: world size, order
    of construction, device and dtype do not change the values. One module's values are alive at a time. A tied
    parameter is drawn once, under the first of its names.

    Args:
        module: the whole model; the names of its modules are the keys.
        seed: the seed of the run.
        names: the parameters wanted, None for all; a module with none of them draws nothing.

    Yields:
        (fully qualified name, fp32 values of the parameter's shape), in the order of `named_parameters()`.

    Raises:
        ConfigError: a wanted parameter belongs to a module with neither.
    """
    seen: set[nn.Parameter] = set()
    for module_name, owner in module.named_modules():
        prefix = f"{module_name}." if module_name else ""
        new = {name: p for name, p in owner.named_parameters(recurse=False) if p not in seen}
        seen.update(new.values())
        wanted = [name for name in new if names is None or prefix + name in names]
        if wanted:
            drawn = draw_module(module, module_name, seed, prefix + wanted[0])
            yield from ((prefix + name, drawn[name]) for name in wanted)


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


def check_initializers(model: nn.Module, module_name: str, example: str) -> None:
    """Raise if nothing draws a module's own parameters, one of which is `example`.

    Args:
        model: the whole model.
        module_name: of the module in it.
        example: the fully qualified name of one of its parameters, for the error.

    Raises:
        ConfigError: it has no `reset_parameters`, nor any module around it an `_init_weights`.
    """
    owner = model.get_submodule(module_name)
    if not hasattr(owner, "reset_parameters") and not _Passes.over(model, module_name).calls:
        raise ConfigError(
            "no-reset-parameters",
            f"{example} has no initial value: {type(owner).__name__} has no reset_parameters(); "
            "build the model inside `with shardwise.init():`, or write one that fills the module's own parameters",
        )


@torch.no_grad()
def draw_module(model: nn.Module, module_name: str, seed: int, example: str) -> dict[str, Tensor]:
    """Draw the `initial_values` of one module's direct parameters, by their names in it.

    Args:
        model: the whole model.
        module_name: fully qualified; the key.
        seed: the seed of the run.
        example: the fully qualified name of one of its parameters, for the error.

    Raises:
        ConfigError: nothing draws them, or leaves a parameter unset.
    """
    check_initializers(model, module_name, example)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, module_name))
        drawn = {name: values for name, (values, _) in _draw(model, module_name, "cpu").items()}
    for name, values in drawn.items():
        if _has_nan(values):
            owner = model.get_submodule(module_name)
            raise ConfigError(
                "reset-leaves-nan",
                f"{type(owner).__name__}.reset_parameters() left NaN in its {name}; "
                "it must fill every parameter of its own",
            )
    return drawn


@torch.no_grad()
def count_draws(model: nn.Module, module_name: str) -> dict[str, tuple[int, int]]:
    """Return how often `draw_module` writes each of a module's direct parameters: by `reset_parameters`, and after it.

    Args:
        model: the whole model.
        module_name: fully qualified.
    """
    with torch.random.fork_rng(devices=[]):
        drawn = _draw(model, module_name, "meta")
    return {name: (num_reset, version(values) - num_reset) for name, (values, num_reset) in drawn.items()}


@dataclass(frozen=True)
class _Passes:
    """Lists what draws a module's parameters beside its `reset_parameters`, in its order.

    Attributes:
        around: the outermost module whose parameters may be written.
        calls: `_reset_parameters`, as torch's attention and `nn.Transformer` have it, of the module and those around;
            then the nearest `_init_weights(module)`, for the module and those around, as transformers applies it.
    """

    around: nn.Module
    calls: list[Callable[[], object]]

    @classmethod
    def over(cls, model: nn.Module, module_name: str) -> _Passes:
        names = module_name.split(".") if module_name else []
        chain = [model.get_submodule(".".join(names[:length])) for length in range(len(names), -1, -1)]
        around = chain[0]
        calls: list[Callable[[], object]] = []
        for module in chain:
            if hasattr(module, "_reset_parameters"):
                around = module
                calls.append(getattr(module, "_reset_parameters"))  # noqa: B009
        for index, module in enumerate(chain):
            init_weights: Any = getattr(module, "_init_weights", None)
            if _takes_module(init_weights):
                outermost = max(chain.index(around), index)
                return cls(chain[outermost], [*calls, *(partial(init_weights, each) for each in chain[: index + 1])])
        return cls(around, calls)


def _draw(model: nn.Module, module_name: str, device: str) -> dict[str, tuple[Tensor, int]]:
    """Return a module's direct parameters as they are drawn, and how often `reset_parameters` has written each."""
    owner, passes = model.get_submodule(module_name), _Passes.over(model, module_name)
    with _stand_ins(owner, passes.around, device) as names:
        reset: Callable[[], object] = getattr(owner, "reset_parameters", lambda: None)
        reset()
        num_reset = {name: version(getattr(owner, name)) for name in names}
        for call in passes.calls:
            call()
        return {name: (getattr(owner, name).detach(), num_reset[name]) for name in names}


def _takes_module(function: Callable[..., object] | None) -> bool:
    try:
        return function is not None and inspect.signature(function).bind(None) is not None
    except TypeError:
        return False


def _has_nan(values: Tensor) -> bool:
    numbers = torch.view_as_real(values) if values.is_complex() else values
    return numbers.numel() > 0 and bool(numbers.amin().isnan())  # `isnan` of all would need memory for each


@contextmanager
def _stand_ins(owner: nn.Module, around: nn.Module, device: str) -> Iterator[list[str]]:
    """Replace the parameters of `around` inside the context: those of `owner` by fp32 ones full of NaN on `device`.

    All others are on meta, where nothing is written: they may be an engine's by now.
    """
    real = [
        (module, name, parameter)
        for module in around.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]
    try:
        for module, name, parameter in real:
            dtype = torch.complex64 if parameter.is_complex() else torch.float32
            where = device if module is owner else "meta"
            setattr(module, name, nn.Parameter(torch.full(parameter.shape, torch.nan, dtype=dtype, device=where)))
        yield [name for module, name, _ in real if module is owner]
    finally:
        for module, name, parameter in real:
            setattr(module, name, parameter)
