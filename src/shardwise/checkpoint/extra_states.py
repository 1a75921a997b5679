"""Save and restore what modules return from `get_extra_state`, as torch's `state_dict` does.

A state is stored as text beside the tensors, under the module's name, by the first rank that runs the module. Every
rank of every layout reads it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from shardwise.checkpoint.load import own_tensors, rank_name
from shardwise.checkpoint.manifest import CheckpointError, Manifest
from shardwise.checkpoint.reader import read_json
from shardwise.checkpoint.tagged_json import NoWordError, from_json, to_json
from shardwise.checkpoint.training_state import Role, whole
from shardwise.runtime.state_shards import StateShard

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
