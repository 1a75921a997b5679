"""This module has the methods that read and write weights as folders of Hugging Face; `Engine` has the attributes.

See `shardwise.checkpoint.hf`.
"""

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
from shardwise.checkpoint.manifest import CheckpointError, DamagedError, Manifest
from shardwise.checkpoint.match import match
from shardwise.checkpoint.safetensors_io import dtype_name
from shardwise.config.resolve import Dtype
from shardwise.engine.checkpoint_api import CheckpointApi
from shardwise.runtime.precision import TORCH_DTYPES
from shardwise.runtime.state_shards import StateShard
from shardwise.runtime.torch_private import persistent_buffers
from shardwise.zero import checkpoint_state as held

# What a user may say of names: the model's pattern -> the folder's; see `NameMap.of`.
Names = NameMap | Mapping[str, Any]


class HfApi(CheckpointApi):
    """Provides the methods that read and write Hugging Face folders; `Engine` has the attributes and makes them."""

    def import_weights(self, folder: str | Path, *, names: Names | None = None, strict: bool = True) -> LoadReport:
        """Read a Hugging Face folder straight into the shards: only its parameters and persistent buffers.

        Each rank reads only its slices. Masters get the folder's values, parameters get these rounded. Optimizer
        states, schedule and number of steps stay; gradients are dropped. All ranks call it.

        Args:
            folder: with `model.safetensors`, or the index and files of a sharded one.
            names: names of tensors in the folder where they differ from the model's: the model's pattern -> the
                folder's, such as `{"lm.**": "model.**"}`; see `shardwise.checkpoint.hf.key_map`. Differences of the
                model's family, and the base model's prefix, are found without it.
            strict: everything must fit; otherwise what fits is loaded, and the report says what was skipped. Adapters
                added to a base model are missing in its folder.

        Raises:
            CheckpointError: it does not fit the model, and nothing has been changed; or its weights are a pickle, or
                quantized.
            DamagedError: a file is missing or cut off; if that showed only midway, the engine needs another load.
        """
        self._refuse_if_away()
        self._refuse_if_simulated()
        self._saver.wait()
        self.zero_grad()
        rules = self._name_rules(names)

        def describe_folder(path: Path) -> Manifest:
            stored = open_folder(path, {each.name: each.aliases for each in self._weights()}, rules)
            return Manifest(self.num_steps, stored, {}, "weights")

        damaged: list[DamagedError] = []
        report = self._load_one(Path(folder), describe_folder, damaged, strict=strict, weights_only=True)
        if report is None:
            raise damaged[0]
        return report

    def export_weights(
        self,
        folder: str | Path,
        *,
        dtype: Dtype | None = None,
        names: Names | None = None,
        files: Iterable[str | Path] = (),
        tokenizer: Any = None,
    ) -> Path:
        """Write the weights as a Hugging Face folder, which `from_pretrained` loads; every rank writes its own slices.

        Every layout writes the same bytes. Nothing is gathered, and training can go on afterwards. The folder appears
        whole or not at all, and an existing one is not overwritten. All ranks call it.

        Args:
            folder: shared by all ranks; it does not exist yet, or is empty.
            dtype: of the parameters; None for the one in which each is computed. Buffers keep theirs.
            names: as in `import_weights`.
            files: files of rank 0 to copy next to the weights, such as a tokenizer's. One with the name of a file
                that the engine writes, such as config.json, replaces it.
            tokenizer: of transformers, so that `AutoTokenizer` loads the folder too; None for none.

        Returns:
            The folder.

        Raises:
            CheckpointError: it cannot be written, with the same message on every rank; nothing is left of it. Or the
                model has PEFT's adapters, which have another kind of folder.
        """
        self._check_usable()
        self._refuse_if_simulated()
        if hasattr(self.model, "peft_config"):
            raise CheckpointError(
                "export-adapters",
                "export_weights writes whole models, and this one has PEFT's adapters, under names that "
                "from_pretrained does not know; in `with engine.gathered() as model:` call "
                "model.save_pretrained(folder) on rank 0",
            )
        stored_dtype = dtype_name(TORCH_DTYPES[_checked(dtype or self.layout.precision.param)])
        kept = {name for name, _ in persistent_buffers(self.model)} | {
            *(self.layout.wide_names if dtype is None else ())
        }
        described = describe(self.model)
        others: dict[str, bytes | Path] = dict(config_files(described, stored_dtype))
        others |= _tokenizer_files(tokenizer) | {Path(file).name: Path(file) for file in files}
        request = ExportRequest(Path(folder), self._weights(), stored_dtype, kept, others, self._name_rules(names))
        rounds = self._new_rounds(f"the export to {request.folder}")
        return export_jointly(request, rounds, self.comm.rank, self.config.run.timeout_s)

    def _weights(self) -> tuple[StateShard, ...]:
        """Return the state shards of parameters and persistent buffers."""
        return (*held.held_parameters(self._states()), *(each.state_shard for each in self._buffers()))

    def _name_rules(self, names: Names | None) -> NameMap:
        return _rules(self.model, names)


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
