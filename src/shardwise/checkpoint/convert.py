"""Converts checkpoints to Hugging Face folders without an engine, file by file, in the memory of a few blocks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from shardwise.checkpoint.commit import read_manifest
from shardwise.checkpoint.hf.config_files import config_files, decoder_config, described_names
from shardwise.checkpoint.hf.exporter import (
    ExportPlan,
    ExportTensor,
    begin_export,
    discard_export,
    exported_dtype,
    finish_export,
    plan_export,
    refuse_taken,
    stored_blocks,
    write_export,
)
from shardwise.checkpoint.hf.packer import Weights, pack_folder
from shardwise.checkpoint.manifest import CheckpointError, Manifest, StoredTensor
from shardwise.checkpoint.offline import ByteMeter, Progress, stored_shards
from shardwise.checkpoint.reader import ChunkReader
from shardwise.checkpoint.safetensors_io import dtype_name
from shardwise.config.model_files import check_model_config
from shardwise.config.resolve import Dtype
from shardwise.config.untrusted_files import MAX_TOKENIZER_BYTES, UntrustedFileError, read_bytes, read_json
from shardwise.layout.slicing import Rect
from shardwise.runtime.precision import torch_dtype
from shardwise.runtime.state_shards import PARAM

# The files that transformers saves of a tokenizer.
_TOKENIZER_NAMES: Final = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "merges.txt", "vocab.txt"),
)


@dataclass(frozen=True)
class Exported:
    """Describes a written folder: its path, the weights' dtype by safetensors' name, and their count and bytes."""

    folder: Path
    dtype: str
    num_tensors: int
    num_bytes: int


def export_checkpoint(
    source: Path,
    folder: Path,
    *,
    dtype: Dtype | None = None,
    hf_config: Path | None = None,
    tokenizer: Path | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write the weights of a checkpoint as a Hugging Face folder, with the bytes that its engine would have exported.

    Args:
        source: the step folder, saved under any layout.
        folder: the folder to write; it must not exist, or be empty.
        dtype: of the weights, buffers excepted; None for that of the parameters of the run.
        hf_config: the config.json to put there, its dtype set; None to make it from the checkpoint.
        tokenizer: a folder whose tokenizer is copied there; None for no tokenizer.
        progress: called with how many bytes of how many are done; None for no calls.

    Raises:
        CheckpointError: the checkpoint lacks weights or a description of its model, a file of the tokenizer cannot be
            read, or the folder cannot be written.
        DamagedError: the source is damaged.
    """
    manifest = read_manifest(source)
    if manifest.contents == "trainable":
        raise CheckpointError(
            "trainable-weights-only",
            f"{source} has the trainable parameters alone; load it beside its base, and use engine.export_weights",
        )
    tensors = [tensor for tensor in manifest.tensors if tensor.kind != "rank" and PARAM in tensor.states]
    wanted = dtype or manifest.layout.get("precision", {}).get("param")
    kept = {tensor.name for tensor in tensors if tensor.kind == "buffer"}
    kept.update(manifest.layout.get("wide", ()) if dtype is None else ())
    exported = [
        ExportTensor(
            *(tensor.name, tensor.aliases, tensor.shape),
            dtype=exported_dtype(stored, _named(wanted) or stored, tensor.name in kept),
            copies=tensor.aliases if tensor.kind == "buffer" else (),
        )
        for tensor in tensors
        for stored in [tensor.states[PARAM].dtype]
    ]
    main_dtype = _named(wanted) or (exported[0].dtype if exported else "F32")
    shapes = {name: tensor.shape for tensor in tensors for name in (tensor.name, *tensor.aliases)}
    others, described = _described(manifest, source, main_dtype, hf_config)
    plan = plan_export(exported, described_names(described, shapes, str(source)))
    begin_export(plan, folder, {**others, **_tokenizer_files(tokenizer)})
    try:
        _write(plan, folder, source, tensors, progress)
        finish_export(folder)
    except BaseException:
        discard_export(folder)
        raise
    return Exported(folder, main_dtype, len(plan.tensors), plan.num_tensor_bytes)


def export_packed(
    source: Path,
    folder: Path,
    weights: Weights,
    *,
    dtype: Dtype | None = None,
    hf_config: Path | None = None,
    tokenizer: Path | None = None,
    progress: Progress | None = None,
) -> Exported:
    """Write the weights of a checkpoint as a Hugging Face folder whose linear layers are packed.

    The plain folder is beside it, under another name, until the packed one is finished.

    Args:
        source: as for `export_checkpoint`, and so are the others.
        folder: the folder to write; it must not exist, or be empty.
        dtype: of what is not packed, and of the scales.
        tokenizer: a folder whose tokenizer is copied there.
        progress: called while the plain folder is written.

    Raises:
        CheckpointError: as for `export_checkpoint` and `pack_folder`.
    """
    refuse_taken(folder)
    plain = folder.with_name(f".{folder.name}.plain")
    shutil.rmtree(plain, ignore_errors=True)
    try:
        exported = export_checkpoint(
            source, plain, dtype=dtype, hf_config=hf_config, tokenizer=tokenizer, progress=progress
        )
        num_bytes = pack_folder(plain, folder, weights)
    finally:
        shutil.rmtree(plain, ignore_errors=True)
    return replace(exported, folder=folder, dtype=f"{exported.dtype} and {weights}", num_bytes=num_bytes)


def _described(
    manifest: Manifest, source: Path, dtype: str, hf_config: Path | None
) -> tuple[dict[str, bytes], Mapping[str, Any]]:
    """Return the files beside the weights, and the description of the model by which it has names."""
    described = manifest.model
    if hf_config is not None:
        values = _read_config_file(hf_config)
        architecture, *_ = values.get("architectures") or [described.get("class", "")]
        described = {"class": architecture, "config": values}
    others = config_files(described, dtype)
    if not others:
        raise CheckpointError(
            "model-class-unknown",
            f"{source} is of {described.get('class', 'a model')}, and does not say how transformers would "
            "build it; give the config.json of that model: --hf-config",
        )
    return others, described if decoder_config(manifest.model) is None else manifest.model


def _tokenizer_files(folder: Path | None) -> dict[str, bytes]:
    if folder is None:
        return {}
    try:
        files = {
            name: read_bytes(folder / name, MAX_TOKENIZER_BYTES, folder)
            for name in _TOKENIZER_NAMES
            if os.path.lexists(folder / name)
        }
    except OSError as error:
        raise CheckpointError(
            "file-unreadable",
            f"cannot read {error.filename}: {error.strerror or error}; give a folder that AutoTokenizer loads",
        ) from None
    if not files:
        raise CheckpointError("no-tokenizer", f"{folder} has no tokenizer.json; give a folder that AutoTokenizer loads")
    return files


def _read_config_file(path: Path) -> dict[str, Any]:
    try:
        values = read_json(path, "give a config.json of transformers")
        if isinstance(values, dict):
            check_model_config(values, str(path))
    except UntrustedFileError as error:
        raise CheckpointError(error.code, str(error)) from None
    if not isinstance(values, dict) or "model_type" not in values:
        raise CheckpointError("no-model-type", f"{path} has no model_type; give a config.json of transformers")
    return values


def _write(
    plan: ExportPlan, folder: Path, source: Path, tensors: list[StoredTensor], progress: Progress | None
) -> None:
    meter = ByteMeter(plan.num_tensor_bytes, progress)
    with ChunkReader(source) as reader, torch.no_grad():
        parts = stored_shards([(tensor, Rect.whole(tensor.shape)) for tensor in tensors], reader)
        num_bytes = write_export(plan, folder, stored_blocks(plan, parts), meter.advance)
    if num_bytes != plan.num_tensor_bytes:
        raise CheckpointError(
            "weights-incomplete", f"{source} has {num_bytes} bytes of {plan.num_tensor_bytes}; use another checkpoint"
        )


def _named(dtype: Dtype | None) -> str:
    """Return safetensors' name of a config's dtype; "" for None."""
    return "" if dtype is None else dtype_name(torch_dtype(dtype))
