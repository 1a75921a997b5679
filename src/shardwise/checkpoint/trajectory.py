"""What a run needs to go on besides tensors, as JSON: the optimizer's options, the schedule, the state of generators.

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

import json
import logging
import random
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shardwise.checkpoint.manifest import CheckpointError

# How a step is computed, not what: the machine that goes on decides.
_HINTS: Final = frozenset({"params", "fused", "foreach", "capturable", "differentiable"})

log = logging.getLogger("shardwise")


def optimizer_options(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's class and its groups' options, as JSON takes them."""
    groups = [
        {key: _plain(value, f"option {key} of the optimizer") for key, value in group.items() if key not in _HINTS}
        for group in optimizer.param_groups
    ]
    return {"kind": type(optimizer).__name__, "groups": groups}


def restore_options(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Give the groups the options that `optimizer_options` returned.

    Raises:
        CheckpointError: there are not as many groups.
    """
    if len(saved["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"the checkpoint has {len(saved['groups'])} parameter groups, the optimizer {len(optimizer.param_groups)}; "
            "give the groups it was saved with, or load with weights_only=True"
        )
    for group, options in zip(optimizer.param_groups, saved["groups"], strict=True):
        for key, value in options.items():
            current = group.get(key)
            if isinstance(current, Tensor):
                current.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) and isinstance(current, tuple) else value


def scheduler_state(scheduler: Any) -> dict[str, Any] | None:
    """The schedule's class and state; None of one without `state_dict`, which a resumed run starts anew."""
    if not hasattr(scheduler, "state_dict"):
        log.warning("%s has no state_dict(), so a resumed run starts it anew", type(scheduler).__name__)
        return None
    name = type(scheduler).__name__
    state = scheduler.state_dict()
    # Functions are made anew by whoever makes the scheduler.
    plain = {key: _plain(value, f"{key} of {name}") for key, value in state.items() if key != "lr_lambdas"}
    return {"kind": name, "state": plain}


def restore_scheduler(scheduler: Any, saved: Mapping[str, Any] | None) -> None:
    """Give the schedule the state that `scheduler_state` returned.

    Raises:
        CheckpointError: it is of another class.
    """
    if saved is None:
        return
    _check_scheduler(scheduler, saved)
    state = dict(saved["state"])
    if isinstance(scheduler, LambdaLR):
        state["lr_lambdas"] = [None] * len(scheduler.lr_lambdas)
    scheduler.load_state_dict(state)


def advance_schedule(scheduler: LambdaLR, saved: Mapping[str, Any]) -> None:
    """Put a schedule that the config names at the saved step, and set the rates that it gives there.

    So a resumed run whose config has another rate, or another length, follows its own config.

    Raises:
        CheckpointError: the saved one is of another class.
    """
    _check_scheduler(scheduler, saved)
    last_epoch = int(saved["state"]["last_epoch"])
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


def generator_states(device: torch.device) -> dict[str, Tensor]:
    """The states of the generators that user code may draw from, as 1-D uint8 tensors by name."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    numpy_state = [kind, np.asarray(keys).tolist(), position, has_gauss, cached]
    states = {
        "torch": torch.get_rng_state(),
        "python": _text_tensor(json.dumps(random.getstate())),
        "numpy": _text_tensor(json.dumps(numpy_state)),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Let the generators go on where `generator_states` found them."""
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    if "python" in states:
        version, internal, gauss = json.loads(_text(states["python"]))
        random.setstate((version, tuple(internal), gauss))
    if "numpy" in states:
        kind, keys, position, has_gauss, cached = json.loads(_text(states["numpy"]))
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))


def _check_scheduler(scheduler: Any, saved: Mapping[str, Any]) -> None:
    if saved["kind"] != type(scheduler).__name__:
        raise CheckpointError(
            f"the checkpoint has a {saved['kind']}, the engine a {type(scheduler).__name__}; give that scheduler, or "
            "load with weights_only=True"
        )


def _plain(value: Any, what: str) -> Any:
    """A value as JSON gives it back, tuples as lists."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): _plain(each, what) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, what) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(
        f"{what} is a {type(value).__name__}, but a checkpoint keeps numbers, text, lists and dicts of them; keep it "
        "out of the state, or save it by yourself"
    )


def _text_tensor(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _text(tensor: Tensor) -> str:
    return bytes(tensor.tolist()).decode()
