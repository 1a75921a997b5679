"""This module saves and restores what modules return from `get_extra_state`, as torch's `state_dict` does.

A state is stored as text beside the tensors, under the module's name, by the first rank that runs the module. Every
rank of every layout reads it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from shardwise.checkpoint.data_position import read_json
from shardwise.checkpoint.load import own_tensors, rank_name
from shardwise.checkpoint.manifest import CheckpointError, Manifest
from shardwise.checkpoint.tagged_json import NoWordError, from_json, to_json
from shardwise.checkpoint.training_state import Role, whole
from shardwise.runtime.state_shards import StateShard

_NAME: Final = "extra_state."

log = logging.getLogger("shardwise")


def saved_extra_states(model: nn.Module, role_of: Callable[[str], Role]) -> Iterator[StateShard]:
    """Yield the extra states that this rank writes; a warning names one that JSON has no word for.

    Args:
        model: the whole model.
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


def read_extra_states(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """Return a checkpoint's extra states by the names of their modules.

    Raises:
        CheckpointError: one cannot be read here, such as an object of a class that is not imported.
    """
    found = {}
    for key, stored in own_tensors(manifest, 0).items():
        if key.startswith(_NAME):
            name = key.removeprefix(_NAME)
            where = f"the extra state of {name or 'the model'}"
            try:
                found[name] = from_json(read_json(folder, stored, where), where)
            except CheckpointError:
                raise
            except ValueError as error:
                raise CheckpointError("extra-state-unread", f"{folder}: {error}; import its class first") from None
    return found


def set_extra_states(model: nn.Module, states: dict[str, Any]) -> None:
    """Give each module its extra state; one that the checkpoint has no state of keeps its own."""
    for name, module in _modules(model):
        if name in states:
            module.set_extra_state(states[name])
        else:
            log.warning("the checkpoint has no extra state of %s, which keeps its own", name or "the model")


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that both give and take an extra state."""
    for name, module in model.named_modules():
        kind = type(module)
        gives = kind.get_extra_state is not nn.Module.get_extra_state
        if gives and kind.set_extra_state is not nn.Module.set_extra_state:
            yield name, module
