"""Weights from and to folders of Hugging Face: the methods; `Engine` has the attributes.

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
from shardwise.checkpoint.load import LoadReport, match
from shardwise.checkpoint.manifest import CheckpointError, DamagedError, Manifest
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
    """The methods; `Engine` has the attributes, and makes them."""

    def import_weights(self, folder: str | Path, *, names: Names | None = None, strict: bool = True) -> LoadReport:
        """Read a Hugging Face folder straight into the shards: parameters and persistent buffers, and no more.

        Each rank reads its slices alone. Masters get the folder's values, parameters these rounded. Optimizer states,
        schedule and number of steps stay; gradients are dropped. All ranks call it alike.

        Args:
            folder: with `model.safetensors`, or the index and files of a sharded one.
            names: what tensors are called in the folder, where not as in the model: the model's pattern -> the
                folder's, such as `{"lm.**": "model.**"}`; see `shardwise.checkpoint.hf.key_map`. What
                differs by the family, and the base model's prefix, is found without.
            strict: everything must fit; otherwise what fits is taken, and the report says what was skipped. Adapters
                beside an imported base are missing in its folder.

        Raises:
            CheckpointError: it does not fit the model, and nothing has been changed; or its weights are a pickle, or
                quantized.
            DamagedError: a file is missing or torn; if that showed only midway, the engine needs another load.
        """
        self._refuse_if_away()
        self._refuse_if_simulated()
        self._saver.wait()
        self.zero_grad()
        rules = self._name_rules(names)

        def describe_folder(path: Path) -> Manifest:
            stored = open_folder(path, {each.name: each.aliases for each in self._weights()}, rules)
            return Manifest(self.num_steps, stored, {}, "weights")

        damaged: list[str] = []
        report = self._load_one(Path(folder), describe_folder, damaged, strict=strict, weights_only=True)
        if report is None:
            raise DamagedError(damaged[0])
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
        """Write the weights as a Hugging Face folder, which `from_pretrained` loads: every rank its own in place.

        The same bytes come of every layout. Nothing is gathered, and training goes on as if nothing had happened. The
        folder appears whole or not at all, and none is written over. All ranks call it alike.

        Args:
            folder: that all ranks share; not there yet, or empty.
            dtype: of the parameters; None for that in which each is computed with. Buffers keep theirs.
            names: as in `import_weights`.
            files: to be copied beside the weights, such as a tokenizer's; rank 0's. Those called as one that the
                engine writes, such as config.json, take its place.
            tokenizer: of transformers, so that `AutoTokenizer` loads the folder too.

        Returns:
            The folder.

        Raises:
            CheckpointError: it cannot be written, with the same words on every rank; nothing is left of it. Or the
                model has PEFT's adapters, whose folders are others.
        """
        self._check_usable()
        self._refuse_if_simulated()
        if hasattr(self.model, "peft_config"):
            raise CheckpointError(
                "export_weights writes whole models, and this one has PEFT's adapters, under names that "
                "from_pretrained does not know; in `with engine.gathered() as model:` call "
                "model.save_pretrained(folder) on rank 0"
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
        """Parameters and persistent buffers."""
        return (*held.held_parameters(self._states()), *(each.state_shard for each in self._buffers()))

    def _name_rules(self, names: Names | None) -> NameMap:
        return _rules(self.model, names)


def check_folder(model: nn.Module, folder: Path, names: Names | None) -> None:
    """Raise unless a folder has just what a model has; by names and shapes, before anything is done to the model.

    Raises:
        CheckpointError: as in `import_weights`.
    """
    wanted = wanted_of(model)
    stored = open_folder(folder, {each.name: each.aliases for each in wanted}, _rules(model, names))
    match(stored, wanted).check(str(folder))


def _tokenizer_files(tokenizer: Any) -> dict[str, bytes | Path]:
    """What `save_pretrained` of a tokenizer writes, by name."""
    if tokenizer is None:
        return {}
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def _rules(model: nn.Module, names: Names | None) -> NameMap:
    return NameMap.of(names).then(names_of(describe(model)))


def _checked(dtype: str) -> str:
    if dtype not in TORCH_DTYPES:
        raise CheckpointError(f"dtype={dtype!r} is none of {', '.join(TORCH_DTYPES)}; give one of them")
    return dtype
