"""Converts checkpoints to Hugging Face folders and back without an engine, file by file, in the memory of a few blocks.

>>> import tempfile, torch
>>> from safetensors.torch import load_file, save_file
>>> with tempfile.TemporaryDirectory() as name:
...     place = Path(name)
...     (place / "hf").mkdir()
...     save_file({"up.weight": torch.arange(6.0).view(2, 3)}, place / "hf" / "model.safetensors")
...     step_folder, _ = import_folder(place / "hf", place / "run", num_files=1)
...     _ = (place / "config.json").write_text('{"model_type": "llama"}')
...     exported = export_checkpoint(step_folder, place / "out", dtype="bf16", hf_config=place / "config.json")
...     step_folder.name, load_file(exported.folder / "model.safetensors")["up.weight"].tolist()
('step-00000000', [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch

from shardwise.checkpoint.async_saver import library_version
from shardwise.checkpoint.commit import read_manifest
from shardwise.checkpoint.hf.config_files import GENERATION_NAME, config_files, describe_decoder, names_of, wanted_of
from shardwise.checkpoint.hf.exporter import (
    ExportPlan,
    ExportTensor,
    begin_export,
    discard_export,
    exported_dtype,
    finish_export,
    in_order,
    plan_export,
    refuse_taken,
    write_export,
)
from shardwise.checkpoint.hf.families import decoder_config_of, decoder_names, family_names
from shardwise.checkpoint.hf.importer import open_folder, read_config
from shardwise.checkpoint.hf.key_map import NameMap
from shardwise.checkpoint.hf.packer import Weights, pack_folder
from shardwise.checkpoint.manifest import CheckpointError, Manifest, StoredTensor
from shardwise.checkpoint.match import match
from shardwise.checkpoint.offline import ByteMeter, Progress, reshard, stored_shards
from shardwise.checkpoint.reader import ChunkReader
from shardwise.checkpoint.safetensors_io import dtype_name
from shardwise.config.model_files import check_model_config
from shardwise.config.resolve import Dtype
from shardwise.config.untrusted_files import MAX_TOKENIZER_BYTES, UntrustedFileError, read_bytes, read_json
from shardwise.layout.slicing import Rect
from shardwise.models import Decoder
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
            *(each.name, each.aliases, each.shape),
            dtype=exported_dtype(stored, _named(wanted) or stored, each.name in kept),
            copies=each.aliases if each.kind == "buffer" else (),
        )
        for each in tensors
        for stored in [each.states[PARAM].dtype]
    ]
    main_dtype = _named(wanted) or (exported[0].dtype if exported else "F32")
    others, names = _described(manifest, source, main_dtype, hf_config)
    plan = plan_export(in_order(exported), names)
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


def import_folder(
    folder: Path, root: Path, num_files: int, *, is_decoder: bool = False, progress: Progress | None = None
) -> tuple[Path, Mapping[str, int]]:
    """Write a Hugging Face folder as a checkpoint of weights alone, of step 0, in the dtypes that the folder has.

    Args:
        folder: with `model.safetensors`, or with the index and files of a sharded model.
        root: where the step folder is committed, whole or not at all.
        num_files: how many files share the tensors.
        is_decoder: name tensors as our decoder does, which `shardwise train` trains; otherwise as transformers does.
        progress: called with how many bytes of how many are done; None for no calls.

    Returns:
        The step folder, and the bytes of each of its files.

    Raises:
        CheckpointError: the folder has no weights that can be read, or not our decoder's; or the root has step 0.
        DamagedError: a file is missing or torn.
    """
    stored, described = _decoder_tensors(folder) if is_decoder else _family_tensors(folder)
    manifest = Manifest(
        step=0,
        tensors=stored,
        files={},
        contents="weights",
        model=described,
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        library=library_version(),
    )
    return reshard(folder, root, num_files, progress, manifest)


def _described(
    manifest: Manifest, source: Path, dtype: str, hf_config: Path | None
) -> tuple[Mapping[str, bytes | Path], NameMap]:
    """Return the files beside the weights, and the rules for names."""
    names = names_of(manifest.model)
    if hf_config is None:
        others = config_files(manifest.model, dtype)
        if not others:
            raise CheckpointError(
                "model-class-unknown",
                f"{source} is of {manifest.model.get('class', 'a model')}, and does not say how transformers would "
                "build it; give the config.json of that model: --hf-config",
            )
        return dict(others), names
    values = _read_config_file(hf_config)
    architecture, *_ = values.get("architectures") or [manifest.model.get("class", "")]
    return dict(config_files({"class": architecture, "config": values}, dtype)), names.then(family_names(values))


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
        num_bytes = write_export(plan, folder, parts, meter.advance)
    if num_bytes != plan.num_tensor_bytes:
        raise CheckpointError(
            "weights-incomplete", f"{source} has {num_bytes} bytes of {plan.num_tensor_bytes}; use another checkpoint"
        )


def _family_tensors(folder: Path) -> tuple[tuple[StoredTensor, ...], dict[str, Any]]:
    """Return a folder's tensors under the names of the transformers model that its config describes, and the config."""
    config = read_config(folder)
    rules = family_names(config)
    names = {rules.model_name(tensor.name): () for tensor in open_folder(folder, {})}
    architecture, *_ = config.get("architectures") or [str(config.get("model_type", "unknown"))]
    described = {"class": architecture, "config": config}
    if generation := read_config(folder, GENERATION_NAME):
        described["generation_config"] = generation
    return open_folder(folder, names), described


def _decoder_tensors(folder: Path) -> tuple[tuple[StoredTensor, ...], dict[str, Any]]:
    """Return a folder's tensors under our decoder's names, all of which it must have, and the decoder's description."""
    config = decoder_config_of(read_config(folder), str(folder / "config.json"))
    if config.num_layers > (num_tensors := len(open_folder(folder, {}))):
        raise CheckpointError(
            "too-few-tensors",
            f"{folder} has {num_tensors} tensors, too few for num_hidden_layers={config.num_layers}; fetch it again",
        )
    try:
        wanted = wanted_of(Decoder(config, device="meta"))
    except (RuntimeError, OverflowError) as error:
        raise CheckpointError(
            "impossible-model", f"{folder / 'config.json'} is of no model that can be: {error}; fetch it again"
        ) from None
    stored = open_folder(folder, {each.name: each.aliases for each in wanted}, decoder_names())
    match(stored, wanted).check(str(folder))
    return stored, describe_decoder(config)


def _named(dtype: Dtype | None) -> str:
    """Return safetensors' name of a config's dtype; "" for None."""
    return "" if dtype is None else dtype_name(torch_dtype(dtype))
