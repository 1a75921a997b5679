"""Saves and restores what a run needs besides tensors, as JSON: optimizer options, schedule, states of generators,
and what modules return from `get_extra_state`, as torch's `state_dict` does. The first rank that runs a module writes
its extra state, under the module's name; every rank of every layout reads it.

>>> parameter = torch.nn.Parameter(torch.zeros(1))
>>> optimizer = torch.optim.AdamW([parameter], lr=0.5)
>>> saved = json.loads(json.dumps(optimizer_options(optimizer)))
>>> saved["kind"], saved["groups"][0]["lr"]
('AdamW', 0.5)
>>> optimizer.param_groups[0]["lr"] = 0.1
>>> restore_options(optimizer, saved)
>>> optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]
(0.5, (0.9, 0.999))
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import logging
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shardwise.checkpoint.load import own_tensors, rank_name
from shardwise.checkpoint.manifest import CheckpointError, Manifest
from shardwise.checkpoint.reader import read_json
from shardwise.checkpoint.tagged_json import NoWordError, from_json, to_json
from shardwise.config.untrusted_files import parse_json
from shardwise.layout.slicing import LocalTensor
from shardwise.runtime.device import rng_state, set_rng_state
from shardwise.runtime.pinned_memory import memory_of
from shardwise.runtime.state_shards import PARAM, Kind, StateShard, TensorFlatState
from shardwise.runtime.torch_private import persistent_buffers

# Options for how a step is computed, not for what: the resumed run decides them.
_HINTS: Final = frozenset({"params", "fused", "foreach", "capturable", "differentiable"})
# JSON has only text as keys: a dict with other keys is stored as its items.
_ITEMS: Final = "__items__"
# Words of the Mersenne Twister's state.
_NUMPY_KEYS: Final = 624
_SCALER: Final = MappingProxyType({"scale": 1.0, "num_good_steps": 0})
# What torch takes beside a tensor of 32 bits.
_LARGEST: Final = torch.finfo(torch.float32).max
_FIX: Final = "weights_only=True, which takes no optimizer and no schedule"

log = logging.getLogger("shardwise")


def optimizer_options(optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's class and its groups' options, as values that JSON can hold."""
    groups = [
        {key: _plain(value, f"option {key} of the optimizer") for key, value in group.items() if key not in _HINTS}
        for group in optimizer.param_groups
    ]
    return {"kind": type(optimizer).__name__, "groups": groups}


def restore_options(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Give the groups, as many as there were, the options that `optimizer_options` returned."""
    for group, options in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in ((key, value) for key, value in options.items() if key not in _HINTS):
            current = group.get(key)
            if isinstance(current, Tensor):  # in place: a recorded graph reads this tensor
                current.fill_(value)
            else:
                group[key] = _like(current, value)


def scheduler_state(scheduler: Any) -> dict[str, Any] | None:
    """Return the schedule's class and state; None without a state, or a `state_dict`: a resumed run starts it again."""
    if not hasattr(scheduler, "state_dict"):
        log.warning("%s has no state_dict(), so a resumed run starts it again", type(scheduler).__name__)
        return None
    name = type(scheduler).__name__
    if not (state := scheduler.state_dict()):
        return None
    return {"kind": name, "state": {key: _plain(value, f"{key} of {name}") for key, value in state.items()}}


def restore_scheduler(scheduler: Any, saved: Mapping[str, Any] | None) -> None:
    """Give the schedule, of the same class, the state that `scheduler_state` returned."""
    if saved is not None and scheduler is not None:
        scheduler.load_state_dict(_like(scheduler.state_dict(), saved["state"]))


def restore_scheduler_alone(optimizer: Optimizer, scheduler: Any, saved: Mapping[str, Any]) -> None:
    """Give the schedule the state that a saved trajectory has of it, where only weights are loaded.

    Raises:
        CheckpointError: it does not fit.
    """
    check_whole(saved)
    if reason := misfits(saved, optimizer, scheduler, takes_options=True).get("scheduler"):
        raise CheckpointError(
            "scheduler-misfit", f"the checkpoint has {reason}; load with load_lr_scheduler_states=False to keep yours"
        )
    restore_scheduler(scheduler, saved["scheduler"])


def advance_schedule(scheduler: LambdaLR, saved: Mapping[str, Any] | None, step: int) -> None:
    """Move a schedule that the config names to the saved step, and set the rates that it gives there.

    So a resumed run whose config has another rate, or another length, follows its own config.

    Args:
        saved: what `scheduler_state` returned, for any schedule; skipped steps do not count in it.
        step: used where `saved` has no step.
    """
    last_epoch = int((saved or {}).get("state", {}).get("last_epoch", step))
    scheduler.load_state_dict({"last_epoch": last_epoch, "_step_count": last_epoch + 1, "lr_lambdas": [None]})
    rates = []
    for group, base, factor in zip(
        scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        rates.append(base * factor(last_epoch))
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rates[-1])
        else:
            group["lr"] = rates[-1]
    scheduler.load_state_dict({"_last_lr": rates, "lr_lambdas": [None]})


def misfits(saved: Mapping[str, Any], optimizer: Optimizer, scheduler: Any, takes_options: bool) -> dict[str, str]:
    """Return the parts of a saved trajectory that do not fit: `states`, `options`, `scheduler`, each with the reason.

    Args:
        saved: the trajectory, with what `optimizer_options` and `scheduler_state` returned.
        scheduler: of the resumed run; None where it has none.
        takes_options: whether options and schedule come from the checkpoint, and not from a config.
    """
    found: dict[str, str] = {}
    kind, saved_optimizer = type(optimizer).__name__, saved["optimizer"]
    if saved_optimizer.get("kind", kind) not in (kind, ""):  # "" where another library has not written it
        found["states"] = f"states of {saved_optimizer['kind']}, but the optimizer is {kind}"
    if not takes_options:
        return found
    groups = saved_optimizer["groups"]
    if len(groups) != len(optimizer.param_groups):
        there = len(optimizer.param_groups)
        found["options"] = f"options of {len(groups)} parameter groups, but the optimizer has {there}"
    elif wrong := [each for pair in zip(optimizer.param_groups, groups, strict=True) for each in _strange(*pair)]:
        found["options"] = f"the optimizer's {wrong[0]}"
    elif refusal := next(filter(None, map(partial(_refusal, optimizer), groups)), ""):
        found["options"] = f"options that {kind} refuses: {refusal}"
    kind, saved_scheduler = type(scheduler).__name__, saved["scheduler"]
    if saved_scheduler is None or (scheduler is None and not saved_scheduler["kind"]):
        return found
    if hasattr(scheduler, "state_dict") and not scheduler.state_dict():  # there is nothing to resume
        return found
    saved_kind = saved_scheduler["kind"]
    if not saved_kind and hasattr(scheduler, "state_dict"):  # then its keys say what class it may be of
        saved_kind = kind if scheduler.state_dict().keys() <= saved_scheduler["state"].keys() else "schedule of another"
    if saved_kind != kind or not hasattr(scheduler, "load_state_dict"):
        found["scheduler"] = f"a {saved_kind}, but the scheduler is {kind}"
    elif len(groups) != len(optimizer.param_groups):
        found["scheduler"] = f"a {kind} of {len(groups)} parameter groups"
    elif wrong := _strange(scheduler.state_dict(), saved_scheduler["state"]):
        found["scheduler"] = f"{kind}'s {wrong[0]}"
    return found


def _refusal(optimizer: Optimizer, options: Mapping[str, Any]) -> str:
    """Return what the class of an optimizer, torch's or ours, has against a group's options; "" for nothing.

    >>> _refusal(torch.optim.AdamW([torch.zeros(1)]), {"lr": 0.1, "betas": [0.9, 1.0]})
    'Invalid beta parameter at index 1: 1.0'
    """
    optimizer_class = type(optimizer)
    # A script's may do anything when it is made.
    if not optimizer_class.__module__.startswith(("torch.optim.", "shardwise.")):
        return ""
    arguments = inspect.signature(optimizer_class).parameters
    values = {
        key: _like(optimizer.defaults.get(key), value)
        for key, value in options.items()
        if key in arguments and key not in _HINTS
    }
    try:
        optimizer_class([torch.zeros(1, 1)], **values)  # of the shape that Muon needs
    except ValueError as error:
        return str(error)
    return ""


def check_whole(saved: Mapping[str, Any]) -> None:
    """Check that a trajectory has what a load reads, and that its numbers are numbers.

    Raises:
        CheckpointError: something is missing or is no number.
    """
    last_epoch = (saved.get("scheduler") or {}).get("state", {}).get("last_epoch", 0)
    wrong = [f"no {key}" for key in ("normaliser", "scaler", "optimizer", "scheduler") if key not in saved]
    wrong += [f"no {key} of the optimizer" for key in ("kind", "groups") if key not in saved.get("optimizer", {})]
    wrong += [f"no {key} of the scheduler" for key in ("kind", "state") if key not in (saved.get("scheduler") or {key})]
    wrong += [] if _fits(0, last_epoch) else [f"last_epoch={last_epoch!r:.50}"]
    scaler = saved.get("scaler") or _SCALER  # empty where the scale is not dynamic
    wrong += [f"no {key} of the loss" for key in _SCALER if key not in scaler]
    wrong += _strange({"normaliser": 0.0}, saved) + _strange({**_SCALER, "num_overflows_left": 1}, scaler)
    if wrong:
        raise CheckpointError(
            "run-state-incomplete", f"the state of the run is not whole: {wrong[0]}; use an older checkpoint, or {_FIX}"
        )


def _strange(current: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Return a text for each saved value that cannot replace the current value of its name."""
    values = {key: value for key, value in saved.items() if key in current and key not in _HINTS}
    return [
        f"{key} is {value!r:.50}, which cannot stand for {current[key]!r:.50}"
        for key, value in values.items()
        if not _fits(current[key], value)
    ]


def _fits(current: Any, plain: Any) -> bool:
    """Say whether `_like` turns the value from JSON into one that can replace the current value.

    >>> _fits(0.1, 0.5), _fits(0.1, "x"), _fits(0.1, float("nan")), _fits((0.9, 0.5), [0.9]), _fits({"a": 1}, {"b": 2})
    (True, False, False, False, True)
    """
    if isinstance(current, bool):
        return isinstance(plain, int)
    if isinstance(current, int | float | Tensor):
        is_number = isinstance(plain, int | float) and not isinstance(plain, bool)
        is_bounded = not isinstance(current, float) or math.isfinite(current)
        return is_number and (abs(plain) <= _LARGEST or not is_bounded)
    if isinstance(current, list | tuple):
        is_same_kind = isinstance(plain, list) and (isinstance(current, list) or len(plain) == len(current))
        return is_same_kind and all(map(_fits, current, plain))
    if isinstance(current, Mapping):
        return isinstance(plain, dict) and (plain.keys() == {_ITEMS} or not _strange(current, plain))
    return not isinstance(current, str) or isinstance(plain, str)


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the generators that user code may draw from, as 1-D uint8 tensors by name."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    numpy_state = [kind, np.asarray(keys).tolist(), position, has_gauss, cached]
    states = {
        "torch": torch.get_rng_state(),
        "python": _text_tensor(json.dumps(random.getstate())),
        "numpy": _text_tensor(json.dumps(numpy_state)),
    }
    of_device = rng_state(device)
    return states if of_device is None else {**states, device.type: of_device}


def restore_generators(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Set the generators back to the states that `generator_states` returned.

    Raises:
        CheckpointError: what is stored is no state of a generator.
    """
    try:
        _restore_generators(states, device)
    except (RuntimeError, ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(
            "generator-state-malformed",
            f"the state of a generator is none: {error}; use an older checkpoint, or {_FIX}",
        ) from None


def _restore_generators(states: Mapping[str, Tensor], device: torch.device) -> None:
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if device.type in states:
        set_rng_state(device, states[device.type])
    if "python" in states:
        version, internal, gauss = parse_json(_text(states["python"]), "the state of a generator", _FIX)
        random.setstate((version, tuple(internal), gauss))
    if "numpy" in states:
        kind, keys, position, has_gauss, cached = parse_json(_text(states["numpy"]), "the state of a generator", _FIX)
        if len(keys) != _NUMPY_KEYS or not 0 <= position <= _NUMPY_KEYS:  # NumPy would read beyond them
            raise ValueError(f"NumPy's has {len(keys)} words and stands at {position}")
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


def _plain(value: Any, what: str) -> Any:
    """Return a value as JSON would return it, tuples as lists; `_like` turns it back into what it was."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            return {_ITEMS: [[_plain(key, what), _plain(each, what)] for key, each in value.items()]}
        return {key: _plain(each, what) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, what) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(
        "value-not-plain",
        f"{what} is a {type(value).__name__}, but a checkpoint keeps numbers, text, lists and dicts of them; keep it "
        "out of the state, or save it by yourself",
    )


def _like(current: Any, plain: Any) -> Any:
    """Return a value that `_plain` returned in the types of the current value.

    >>> _like({"betas": (0.9, 0.5), "at": {3: 1}}, {"betas": [0.9, 0.99], "at": {"__items__": [[5, 1]]}})
    {'betas': (0.9, 0.99), 'at': {5: 1}}
    """
    if isinstance(plain, dict):
        pairs = dict(plain[_ITEMS]) if plain.keys() == {_ITEMS} else plain
        known = current if isinstance(current, Mapping) else {}
        values = {key: _like(known.get(key), value) for key, value in pairs.items()}
        if not isinstance(current, dict) or type(current) is dict:
            return values
        same = copy.copy(current)  # such as the Counter of a MultiStepLR
        same.clear()
        same.update(values)
        return same
    if isinstance(plain, list):
        is_same_kind = isinstance(current, list | tuple) and len(current) == len(plain)
        members = [_like(current[at] if is_same_kind else None, value) for at, value in enumerate(plain)]
        return tuple(members) if isinstance(current, tuple) else members
    if isinstance(current, float) and isinstance(plain, int):
        return float(plain)
    if isinstance(current, Tensor) and isinstance(plain, int | float):
        return torch.full_like(current, plain)
    return plain


def _text_tensor(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _text(tensor: Tensor) -> str:
    return bytes(tensor.tolist()).decode()


# What a rank does with a buffer: it runs its module and writes the buffer; it runs the module; or only other ranks do.
Role = Literal["writes", "runs", "keeps"]


@dataclass(frozen=True)
class SavedBuffer:
    """Holds a buffer and its state shard, whose values are the buffer's own memory where contiguous, else a copy."""

    state_shard: StateShard
    buffer: Tensor
    role: Role

    @property
    def values(self) -> Tensor:
        """Return the state shard's values, 1-D, in its own memory."""
        return self.state_shard.flat.read(0, self.state_shard.flat.numel)

    @torch.no_grad()
    def restore(self) -> None:
        """Give the buffer the values that were read into its state shard."""
        values = self.values.view(self.buffer.shape)
        if any(not step and size > 1 for step, size in zip(self.buffer.stride(), self.buffer.shape, strict=True)):
            self.buffer.data = values.clone()  # elements of an expanded buffer share memory: torch refuses to write
        elif self.buffer.data_ptr() != values.data_ptr():
            self.buffer.copy_(values)


def held_buffers(model: nn.Module, role_of: Callable[[str], Role]) -> list[SavedBuffer]:
    """Return the persistent buffers of a model.

    Args:
        role_of: returns this rank's role for a buffer, by the buffer's first name.
    """
    names: dict[int, list[str]] = {}
    buffers: dict[int, Tensor] = {}
    for name, buffer in persistent_buffers(model):
        names.setdefault(id(buffer), []).append(name)
        buffers[id(buffer)] = buffer
    found = []
    for key, (first, *others) in names.items():
        role, buffer = role_of(first), buffers[key]
        state_shard = whole(first, buffer, tuple(others), kind="buffer", is_written=role == "writes")
        found.append(SavedBuffer(state_shard, buffer, role))
    return found


def digests(held: Sequence[SavedBuffer], role: Role) -> dict[str, str]:
    """Return, by name, a hash of the values of each buffer for which this rank has a role."""
    return {
        each.state_shard.name: hashlib.blake2b(memory_of(each.values.cpu()), digest_size=16).hexdigest()
        for each in held
        if each.role == role
    }


def whole(name: str, tensor: Tensor, aliases: tuple[str, ...] = (), *, kind: Kind, is_written: bool) -> StateShard:
    """Return the state shard of a tensor that this rank holds whole.

    Args:
        is_written: whether this rank writes it in a save.
    """
    shape = tuple(tensor.shape)
    pieces = LocalTensor.whole(shape).pieces
    flat = TensorFlatState(tensor.detach().contiguous().view(-1))
    return StateShard(name, aliases, PARAM, shape, flat, pieces, pieces if is_written else (), kind, trainable=False)


_NAME: Final = "extra_state."

log = logging.getLogger("shardwise")


def saved_extra_states(model: nn.Module, role_of: Callable[[str], Role]) -> Iterator[StateShard]:
    """Yield the extra states that this rank writes; a warning names one that JSON has no word for.

    Args:
        role_of: returns this rank's role for what has a name within a module.
    """
    for name, module in _modules(model):
        role = role_of(name)
        if role == "keeps":
            continue
        value = module.get_extra_state()  # on all that run it: it may read parameters that all ranks gather
        if role != "writes":
            continue
        try:
            text = json.dumps(to_json(value, f"the extra state of {name or 'the model'}"))
        except NoWordError as error:
            log.warning("%s, so it is not in the checkpoint; give it to save(extra=...) in another form", error)
            continue
        values = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        yield whole(rank_name(0, _NAME + name), values, kind="rank", is_written=True)


def read_extra_states(model: nn.Module, folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Return a checkpoint's extra states of a model by the names of their modules.

    A warning names a module that the checkpoint has no state of: it keeps its own.

    Raises:
        CheckpointError: one cannot be read here, such as an object of a class that is not imported.
    """
    stored = own_tensors(manifest, 0)
    found = {}
    for name, _ in _modules(model) if manifest.contents != "trainable" else ():
        where = f"the extra state of {name or 'the model'}"
        if (text := stored.get(_NAME + name)) is None:
            log.warning("%s has no %s, which keeps its own", folder, where.removeprefix("the "))
            continue
        try:
            found[name] = from_json(read_json(folder, text, where), where)
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError("extra-state-unread", f"{folder}: {error}; import its class first") from None
    return found


def set_extra_states(model: nn.Module, states: Mapping[str, Any]) -> None:
    """Give the modules that `states` names their extra states."""
    for name, state in states.items():
        model.get_submodule(name).set_extra_state(state)


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that both give and take an extra state."""
    for name, module in model.named_modules():
        kind = type(module)
        gives = kind.get_extra_state is not nn.Module.get_extra_state
        if gives and kind.set_extra_state is not nn.Module.set_extra_state:
            yield name, module
