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

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch
from torch import Tensor, nn

from shardwise.config.resolve import ConfigError


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

    A module's own `reset_parameters` draws its direct parameters, in fp32 on the CPU, keyed by the seed and
    the module's name: world size, order of construction, device and dtype do not change the values. One
    module's values are alive at a time. A tied parameter is drawn once, under the first of its names.

    Args:
        module: the whole model; the names of its modules are the keys.
        seed: the seed of the run.
        names: the parameters wanted, None for all; a module with none of them draws nothing.

    Yields:
        (fully qualified name, fp32 values of the parameter's shape), in the order of `named_parameters()`.

    Raises:
        ConfigError: a wanted parameter belongs to a module without `reset_parameters`.
    """
    seen: set[nn.Parameter] = set()
    for module_name, owner in module.named_modules():
        prefix = f"{module_name}." if module_name else ""
        new = {name: p for name, p in owner.named_parameters(recurse=False) if p not in seen}
        seen.update(new.values())
        wanted = [name for name in new if names is None or prefix + name in names]
        if wanted:
            drawn = draw_module(owner, module_name, seed, prefix + wanted[0])
            yield from ((prefix + name, drawn[name]) for name in wanted)


def init_parameters(module: nn.Module, seed: int) -> None:
    """Overwrite every parameter with its `initial_values`, rounded to the parameter's dtype.

    Raises:
        ConfigError: a parameter is on the meta device, or belongs to a module without `reset_parameters`.
    """
    for name, values in initial_values(module, seed):
        parameter = module.get_parameter(name)
        if parameter.is_meta:
            raise ConfigError(
                "parameter-on-meta", f"{name} is on meta and holds no values; call to_empty(device=...) first"
            )
        with torch.no_grad():
            parameter.copy_(values)


def find_reset(owner: nn.Module, example: str) -> Callable[[], None]:
    """Return the function that draws a module's own parameters, one of which is `example`.

    Raises:
        ConfigError: it has no `reset_parameters`.
    """
    reset: Callable[[], None] | None = getattr(owner, "reset_parameters", None)
    if reset is None:
        raise ConfigError(
            "no-reset-parameters",
            f"{example} has no initial value: {type(owner).__name__} has no reset_parameters(); "
            "build the model inside `with shardwise.init():`, or write one that fills the module's own parameters",
        )
    return reset


@torch.no_grad()
def draw_module(owner: nn.Module, module_name: str, seed: int, example: str) -> dict[str, Tensor]:
    """Draw the `initial_values` of one module's direct parameters, by their names in it.

    Args:
        owner: the module.
        module_name: fully qualified; the key.
        seed: the seed of the run.
        example: the fully qualified name of one of its parameters, for the error.

    Raises:
        ConfigError: it has no `reset_parameters`, or one that leaves a parameter unset.
    """
    reset = find_reset(owner, example)
    with _stand_ins(owner) as names, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(seed, module_name))
        reset()
        drawn = {name: getattr(owner, name).detach() for name in names}
    for name, values in drawn.items():
        if values.isnan().any():
            raise ConfigError(
                "reset-leaves-nan",
                f"{type(owner).__name__}.reset_parameters() left NaN in its {name}; "
                "it must fill every parameter of its own",
            )
    return drawn


@contextmanager
def _stand_ins(owner: nn.Module) -> Iterator[list[str]]:
    """Replace the direct parameters of `owner`, inside the context, by fp32 ones on the CPU, full of NaN."""
    real = dict(owner.named_parameters(recurse=False, remove_duplicate=False))
    try:
        for name, parameter in real.items():
            dtype = torch.complex64 if parameter.is_complex() else torch.float32
            unset = torch.full(parameter.shape, torch.nan, dtype=dtype, device="cpu")
            setattr(owner, name, nn.Parameter(unset))
        yield list(real)
    finally:
        for name, parameter in real.items():
            setattr(owner, name, parameter)
