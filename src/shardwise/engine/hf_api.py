"""This module reads and writes the weights of an engine as Hugging Face folders. See `shardwise.checkpoint.hf`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from shardwise.checkpoint.hf import (
    ExportRequest,
    NameMap,
    config_files,
    describe,
    export_jointly,
    names_of,
    open_folder,
    wanted_of,
)
from shardwise.checkpoint.load import LoadReport
from shardwise.checkpoint.manifest import CheckpointError, Manifest
from shardwise.checkpoint.match import match
from shardwise.checkpoint.safetensors_io import dtype_name
from shardwise.config.resolve import Dtype
from shardwise.engine.checkpoint_api import Checkpoints
from shardwise.engine.step_context import StepContext
from shardwise.runtime.precision import TORCH_DTYPES
from shardwise.runtime.state_shards import StateShard
from shardwise.runtime.torch_private import persistent_buffers
from shardwise.zero import checkpoint_state as held

# What a user may say of names: the model's pattern -> the folder's; see `NameMap.of`.
Names = NameMap | Mapping[str, Any]


class HuggingFaceFolders:
    """Reads and writes the weights of one engine as folders of Hugging Face.

    Args:
        context: of the engine.
        checkpoints: of the engine.
    """

    def __init__(self, context: StepContext, checkpoints: Checkpoints) -> None:
        self._context = context
        self._checkpoints = checkpoints

    def import_weights(self, folder: str | Path, names: Names | None, strict: bool) -> LoadReport:
        """Read a folder into the shards; the arguments are those of `Engine.import_weights`."""
        self._checkpoints.begin_load()
        self._context.zero_grad()
        rules = _rules(self._context.model, names)

        def describe_folder(path: Path) -> Manifest:
            stored = open_folder(path, {each.name: each.aliases for each in self._weights()}, rules)
            return Manifest(self._context.num_steps, stored, {}, "weights")

        return self._checkpoints.load_folder(Path(folder), describe_folder, strict, weights_only=True)

    def export_weights(
        self,
        folder: str | Path,
        dtype: Dtype | None,
        names: Names | None,
        files: Iterable[str | Path],
        tokenizer: Any,
    ) -> Path:
        """Write a folder; the arguments are those of `Engine.export_weights`."""
        model, layout, ranks = self._context.model, self._context.layout, self._checkpoints.ranks
        self._context.status.check()
        self._context.refuse_if_simulated()
        if hasattr(model, "peft_config"):
            raise CheckpointError(
                "export-adapters",
                "export_weights writes whole models, and this one has PEFT's adapters, under names that "
                "from_pretrained does not know; in `with engine.gathered() as model:` call "
                "model.save_pretrained(folder) on rank 0",
            )
        stored_dtype = dtype_name(TORCH_DTYPES[_checked(dtype or layout.precision.param)])
        kept = {name for name, _ in persistent_buffers(model)} | {*(layout.wide_names if dtype is None else ())}
        others: dict[str, bytes | Path] = dict(config_files(describe(model), stored_dtype))
        others |= _tokenizer_files(tokenizer) | {Path(file).name: Path(file) for file in files}
        request = ExportRequest(Path(folder), self._weights(), stored_dtype, kept, others, _rules(model, names))
        barrier = ranks.new_barrier(f"the export to {request.folder}")
        return export_jointly(request, barrier, self._context.comm.rank, self._context.config.run.timeout_s)

    def _weights(self) -> tuple[StateShard, ...]:
        """Return the state shards of parameters and persistent buffers."""
        buffers = self._checkpoints.buffers()
        return (*held.held_parameters(self._context.states()), *(each.state_shard for each in buffers))


def check_folder(model: nn.Module, folder: Path, names: Names | None) -> None:
    """Check by names and shapes that a folder has exactly what a model has, before anything is done to the model.

    Args:
        model: whose parameters and persistent buffers the folder must have.
        folder: of Hugging Face.
        names: as in `import_weights`.

    Raises:
        CheckpointError: as in `import_weights`.
    """
    wanted = wanted_of(model)
    stored = open_folder(folder, {each.name: each.aliases for each in wanted}, _rules(model, names))
    match(stored, wanted).check(str(folder))


def _tokenizer_files(tokenizer: Any) -> dict[str, bytes | Path]:
    """Return the files that `save_pretrained` of a tokenizer writes, by name."""
    if tokenizer is None:
        return {}
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def _rules(model: nn.Module, names: Names | None) -> NameMap:
    return NameMap.of(names).then(names_of(describe(model)))


def _checked(dtype: str) -> str:
    if dtype not in TORCH_DTYPES:
        raise CheckpointError("export-dtype", f"dtype={dtype!r} is none of {', '.join(TORCH_DTYPES)}; give one of them")
    return dtype
