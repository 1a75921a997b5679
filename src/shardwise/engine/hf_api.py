"""This module reads and writes the weights of an engine as Hugging Face folders. See `shardwise.checkpoint.hf`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from torch import nn

from shardwise.checkpoint.hf.config_files import config_files, describe, wanted_of
from shardwise.checkpoint.hf.exporter import ExportTensor, export_jointly
from shardwise.checkpoint.hf.importer import open_folder
from shardwise.checkpoint.hf.key_map import NameMap
from shardwise.checkpoint.load import LoadReport
from shardwise.checkpoint.manifest import Manifest, StoredTensor
from shardwise.checkpoint.match import WantedState, match
from shardwise.checkpoint.safetensors_io import dtype_name
from shardwise.config.resolve import Dtype
from shardwise.engine.adapters import AdaptedModel
from shardwise.engine.checkpoint_api import Checkpoints, saved_buffers
from shardwise.engine.parts import EngineParts
from shardwise.engine.step import zero_grad
from shardwise.engine.weight_items import Names, hub_rules
from shardwise.engine.weights import WeightSource
from shardwise.runtime.precision import torch_dtype
from shardwise.runtime.state_shards import StateShard
from shardwise.zero import checkpoint_state


class Tokenizer(Protocol):
    """Is what `AutoTokenizer` of transformers returns, or anything that saves itself like it."""

    def save_pretrained(self, save_directory: str, /) -> Any:
        """Write its files into a folder."""


def import_weights(
    parts: EngineParts, checkpoints: Checkpoints, folder: Path, names: Names | None, strict: bool
) -> LoadReport:
    """Read a folder into the shards; the other arguments are those of `Engine.import_weights`.

    Args:
        parts: of the engine, and so are the `checkpoints`.
    """
    checkpoints.begin_load()
    zero_grad(parts)
    rules = _rules(parts.model, names, _weights(parts))

    def describe_folder(path: Path) -> Manifest:
        return Manifest(parts.state.num_steps, _opened(parts.model, path, _weights(parts), rules), {}, "weights")

    return checkpoints.load_folder(folder, describe_folder, strict, weights_only=True)


def export_weights(
    parts: EngineParts,
    folder: Path,
    dtype: Dtype | None,
    names: Names | None,
    files: Iterable[str | Path],
    tokenizer: Tokenizer | None,
) -> Path:
    """Write a folder; the other arguments are those of `Engine.export_weights`."""
    parts.refuse_if_simulated()
    stored_dtype = dtype_name(torch_dtype(dtype or parts.layout.precision.param))
    source = WeightSource(parts, names or "hf", dtype)
    tensors = [ExportTensor(name, (), shape, dtype_name(stored)) for name, stored, shape in source.metadata()]
    others: dict[str, bytes | Path] = dict(config_files(describe(AdaptedModel(parts.model, {}).base), stored_dtype))
    others |= _tokenizer_files(tokenizer) | {Path(file).name: Path(file) for file in files}
    return export_jointly(folder, tensors, source.blocks(), others, parts.agreement)


def _weights(parts: EngineParts) -> tuple[StateShard, ...]:
    """Return the state shards of parameters and persistent buffers."""
    return (*checkpoint_state.held_parameters(parts.states()), *(buffer.state_shard for buffer in saved_buffers(parts)))


def check_folder(model: nn.Module, folder: Path, names: Names | None) -> None:
    """Check by names and shapes that a folder has exactly what a model has, before anything is done to the model.

    Args:
        model: whose parameters and persistent buffers the folder must have.

    Raises:
        CheckpointError: as in `import_weights`.
    """
    wanted = wanted_of(model)
    match(_opened(model, folder, wanted, _rules(model, names, wanted)), wanted).check(str(folder))


def _opened(
    model: nn.Module, folder: Path, weights: Iterable[StateShard | WantedState], rules: NameMap
) -> tuple[StoredTensor, ...]:
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()  # as transformers loads a folder
    return open_folder(folder, {weight.name: weight.aliases for weight in weights}, rules, ignored)


def _tokenizer_files(tokenizer: Tokenizer | None) -> dict[str, bytes | Path]:
    """Return the files that `save_pretrained` of a tokenizer writes, by name."""
    if tokenizer is None:
        return {}
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def _rules(model: nn.Module, names: Names | None, weights: Iterable[StateShard | WantedState]) -> NameMap:
    shapes = {
        name: weight.shape if isinstance(weight, WantedState) else weight.global_shape
        for weight in weights
        for name in (weight.name, *weight.aliases)
    }
    return hub_rules(model, names or "hf", shapes)
