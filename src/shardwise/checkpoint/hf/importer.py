"""Finds a model's tensors in a Hugging Face folder by the headers of its files; each rank reads its slices later.

Names are matched without knowing the family. The base model's prefix may be there or not on either side (`wte.weight`,
`transformer.wte.weight`), and a tied weight may be left out or be there twice. Masks and frequencies, which old
versions saved beside weights, are skipped. All other tensors of a folder are returned under their own names, so that
the caller can report them as left over.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor
from typing_extensions import TypedDict

from shardwise.checkpoint.hf.key_map import NameMap, WeightPart
from shardwise.checkpoint.manifest import (
    ITEM_BYTES,
    CheckpointError,
    DamagedError,
    StoredChunk,
    StoredState,
    StoredTensor,
    number_kind,
)
from shardwise.checkpoint.match import WantedState
from shardwise.checkpoint.offline import read_chunks
from shardwise.checkpoint.reader import ChunkReader
from shardwise.checkpoint.safetensors_io import FileTensor, read_header
from shardwise.config.model_files import check_model_config
from shardwise.config.untrusted_files import UntrustedFileError, mismatch, read_json
from shardwise.layout.slicing import Rect, Shape
from shardwise.runtime.state_shards import PARAM

WEIGHTS_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"
CONFIG_NAME: Final = "config.json"
_PICKLES: Final = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_MAX_INDEX_BYTES: Final = 16 * 2**20
# The most dotted parts that the prefix of a base model may have.
_MAX_PREFIX: Final = 16


def open_folder(
    folder: Path,
    model_names: Mapping[str, Sequence[str]],
    names: NameMap | Mapping[str, Any] | None = None,
    ignored: Iterable[str] = (),
) -> tuple[StoredTensor, ...]:
    """Find a model's tensors in a Hugging Face folder; it reads headers, and of values only samples of tied weights.

    Args:
        folder: with `model.safetensors`, or with the index and files of a sharded model.
        model_names: the aliases of each tensor of the model's state dict, by its first name.
        names: rules for names that differ; see `NameMap.of`.
        ignored: patterns of the folder's names that the model can do without, such as layers that predict more tokens.

    Returns:
        The model's tensors that the folder has, in the model's order, with the folder's shapes; then those left over,
        under the folder's names. The pieces have no checksums. A head in the folder that a base model lacks is not
        among those left over.

    Raises:
        DamagedError: a file is missing or torn.
        CheckpointError: the folder has no safetensors; its weights are quantized; the model ties tensors that differ.
    """
    quantization = read_config(folder).get("quantization_config")
    if quantization:
        method = quantization.get("quant_method")
        raise CheckpointError(
            "weights-quantized",
            f"{folder} has weights quantized by {method}, which cannot be trained; give one without",
        )
    rules = NameMap.of(names)
    wanted = {
        kind
        for name, aliases in model_names.items()
        for each in (name, *aliases)
        for kind in map(_kind, (each, *rules.stored_names(each)))
    }
    entries = {name: entry for name, entry in _entries(folder) if _kind(name) in wanted or not _is_junk(name, entry)}
    renamed, is_head = _meet(wanted, entries)
    found = {renamed(name): entry for name, entry in entries.items()}
    shapes = {name: entry.shape for name, entry in found.items()}

    tensors, used = [], set[str]()
    for name, aliases in model_names.items():
        # A folder may have the names of the model too, as what has not come from the family's hub does.
        attempts = (form.join(alias, shapes) for alias in (name, *aliases) for form in (rules, NameMap()))
        joined = [attempt for attempt in attempts if attempt is not None]
        if not joined:
            continue
        shape, parts = joined[0]
        for _, others in joined:
            used.update(other.stored for other in others)
            _check_tied(folder, name, [found[part.stored] for part in parts], [found[other.stored] for other in others])
        tensors.append(_tensor(name, tuple(aliases), shape, [(part, found[part.stored]) for part in parts]))
    for name, entry in entries.items():
        is_ignored = is_head(name) or any(re.search(pattern, name) for pattern in ignored)
        if renamed(name) not in used and not is_ignored:
            part = WeightPart(name, Rect.whole(entry.shape))
            tensors.append(_tensor(name, (), entry.shape, [(part, entry)]))
    return tuple(tensors)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of the folder's config.json; empty where it has none.

    Raises:
        DamagedError: it is no JSON, or has a size that no model has.
    """
    path = folder / CONFIG_NAME
    if not os.path.lexists(path):
        return {}
    values = _typed(_ConfigJson, _read_json(path), path)
    try:
        check_model_config(values, str(path))
    except UntrustedFileError as error:
        raise DamagedError(error.code, str(error)) from None
    return values


def _entries(folder: Path, follows_index: bool = True) -> Iterator[tuple[str, FileTensor]]:
    """Yield the tensors of all files, by name, in their order.

    Args:
        follows_index: a tensor in two files counts where the index has it; else both must be equal.
    """
    if (folder / WEIGHTS_NAME).is_file():
        yield from ((tensor.name, tensor) for tensor in read_header(folder / WEIGHTS_NAME))
        return
    if not (folder / INDEX_NAME).is_file():
        raise _no_weights(folder)
    weight_map = _typed(_IndexJson, _read_json(folder / INDEX_NAME), folder / INDEX_NAME)["weight_map"]
    listed, found = set(weight_map), dict[str, FileTensor]()
    for file, num_known in Counter(weight_map.values()).items():
        if Path(file).name != file or file == ".." or len(file.encode(errors="replace")) > 255:
            raise CheckpointError(
                "index-names-foreign-file",
                f"{folder / INDEX_NAME} names the file {file!r} of another folder; put all into one",
            )
        if not (folder / file).is_file():
            raise DamagedError(
                "index-names-absent-file", f"{folder / file} is missing, {INDEX_NAME} names it; fetch the folder again"
            )
        for tensor in read_header(folder / file, num_known):
            if follows_index and weight_map.get(tensor.name, file) != file:
                continue
            if tensor.name in found:
                _check_equal(folder, found[tensor.name], tensor)
            if weight_map.get(tensor.name) == file:
                listed.discard(tensor.name)
            found.setdefault(tensor.name, tensor)
    yield from found.items()
    for name in sorted(listed):
        raise DamagedError(
            "index-names-absent-tensor",
            f"{folder / weight_map[name]} lacks {name}, which {INDEX_NAME} has there; fetch it again",
        )


def _check_equal(folder: Path, tensor: FileTensor, other: FileTensor) -> None:
    """Refuse two files that have one tensor with different values: which of them is meant, nothing says."""
    are_equal = (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
    with ChunkReader(folder) as reader:
        pairs = zip(_chunks(reader, tensor), _chunks(reader, other), strict=True) if are_equal else ()
        if are_equal and all(torch.equal(first.view(torch.uint8), second.view(torch.uint8)) for first, second in pairs):
            return
    raise CheckpointError(
        "tensor-in-two-files",
        f"{folder / tensor.file} and {folder / other.file} both have {tensor.name}, with different values; fetch the "
        "folder again, or remove one of them",
    )


def check_numbers(folder: Path, wanted: Sequence[WantedState]) -> None:
    """Check the tensors of a folder that another library will read into a model.

    Args:
        folder: of Hugging Face; one without safetensors is not looked at.
        wanted: parameters and buffers of the model.

    Raises:
        CheckpointError: a tensor is of integers and the model's of floating numbers, or the reverse; or it is in two
            files with different values; or the index names a file elsewhere.
        DamagedError: a file is missing or torn.
    """
    if not any((folder / name).is_file() for name in (WEIGHTS_NAME, INDEX_NAME)):
        return
    kinds = {name: each.kind for each in wanted for name in (each.name, *each.aliases)}
    for name, tensor in _entries(folder, follows_index=False):
        if kinds.get(name, number_kind(tensor.dtype)) != number_kind(tensor.dtype):
            raise CheckpointError(
                "numbers-of-another-kind",
                f"{folder / tensor.file} has {name} as {tensor.dtype}, and the model has {kinds[name]} numbers there; "
                "fetch the folder again",
            )


def _no_weights(folder: Path) -> CheckpointError:
    if not folder.is_dir():
        return CheckpointError("not-a-folder", f"{folder} is no folder; give one with {WEIGHTS_NAME} or {INDEX_NAME}")
    pickles = [name for name in _PICKLES if (folder / name).is_file()]
    if pickles:
        return CheckpointError(
            "weights-pickled",
            f"{folder} has its weights as a pickle alone ({pickles[0]}), which may run any code when read; convert it "
            "where you trust it: AutoModel.from_pretrained(folder).save_pretrained(new_folder) of transformers",
        )
    return CheckpointError(
        "no-safetensors",
        f"{folder} has neither {WEIGHTS_NAME} nor {INDEX_NAME}; give a folder that save_pretrained has written",
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = read_json(path, "fetch the file again", max_bytes=_MAX_INDEX_BYTES, folder=path.parent)
    except UntrustedFileError as error:
        raise DamagedError(error.code, str(error)) from error.__cause__
    if not isinstance(values, dict):
        raise DamagedError("hf-json-malformed", f"{path} has no table of values; fetch the file again")
    return values


class _ConfigJson(TypedDict, total=False):
    architectures: list[str] | None
    model_type: str
    quantization_config: dict[str, Any] | None


class _IndexJson(TypedDict):
    weight_map: Annotated[dict[str, str], Field(min_length=1)]


def _typed(schema: type[Any], values: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the values after a check of their types."""
    try:
        TypeAdapter(schema).validate_python(values, strict=True)
    except ValidationError as error:
        raise DamagedError(
            "hf-json-malformed", f"{path} is not what transformers writes: {mismatch(error)}; fetch the file again"
        ) from None
    return values


def _kind(name: str) -> str:
    """Return the name with all numbers between dots made equal, so that a model has few kinds of names."""
    return re.sub(r"(?<![^.])(\d+|#)(?![^.])", "0", name)


def _is_junk(name: str, entry: FileTensor) -> bool:
    """Say whether a tensor is a mask, frequencies or positions, as old versions saved; an attention bias is 1-D."""
    shape, leaf = entry.shape, name.rpartition(".")[2]
    is_of_attention = re.search(r"\.attn\.|\.attention\.", name) is not None
    return (
        (leaf == "inv_freq" and "rotary_emb" in name)
        or (leaf == "bias" and is_of_attention and len(shape) == 4)
        or (leaf == "masked_bias" and is_of_attention and not shape)
        or (leaf == "position_ids" and entry.dtype == "I64")
    )


def _meet(wanted: set[str], entries: Mapping[str, FileTensor]) -> tuple[Callable[[str], str], Callable[[str], bool]]:
    """Return two functions of a folder's name: the wanted name for it, and whether it is of a head the model lacks.

    A prefix is put before names, or taken off, only where most names need that.
    """
    stored = {_kind(name) for name in entries}
    fitting, missing, spare = wanted & stored, wanted - stored, stored - wanted

    def prefix(longer: set[str], shorter: set[str], num_all: int) -> str | None:
        count = Counter(head for name in longer for head, tail in _cuts(name) if tail in shorter)
        for head, num in count.most_common(1):
            if 2 * num > num_all:
                return f"{head}."
        return None

    lacked = prefix(missing, spare, len(stored))
    if lacked is not None:
        return lambda name: f"{lacked}{name}" if _kind(f"{lacked}{name}") in missing else name, lambda name: False
    extra = prefix(spare, missing, len(wanted))
    if extra is None:
        return lambda name: name, lambda name: False

    def without(name: str) -> str:
        return name.removeprefix(extra) if _kind(name.removeprefix(extra)) in missing else name

    return without, lambda name: not fitting and not name.startswith(extra)


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """Yield the name cut in two at each of its first dots."""
    for dot in islice(re.finditer(r"\.", name), _MAX_PREFIX):
        yield name[: dot.start()], name[dot.end() :]


def _tensor(
    name: str, aliases: tuple[str, ...], shape: Shape, parts: list[tuple[WeightPart, FileTensor]]
) -> StoredTensor:
    dtypes = {entry.dtype for _, entry in parts}
    if len(dtypes) > 1:
        found = ", ".join(f"{part.stored} {entry.dtype}" for part, entry in parts[:4])
        raise CheckpointError(
            "mixed-dtypes", f"{name} is made of tensors of different dtypes ({found}); convert them to one"
        )
    pieces = tuple(
        StoredChunk(
            part.rect,
            entry.file,
            entry.start + _num_bytes_before(part.first_row, entry),
            is_transposed=part.is_transposed,
        )
        for part, entry in parts
    )
    return StoredTensor(name, aliases, shape, {PARAM: StoredState(dtypes.pop(), pieces)})


def _num_bytes_before(first_row: int, entry: FileTensor) -> int:
    """Return the bytes of the rows of a tensor of a folder before one."""
    return first_row * math.prod(entry.shape[1:]) * ITEM_BYTES[entry.dtype] if first_row else 0


def _check_tied(folder: Path, name: str, entries: list[FileTensor], others: list[FileTensor]) -> None:
    """Compare samples of tensors that the model ties and the folder has twice: if trained apart, any sample differs."""
    with ChunkReader(folder) as reader:
        for entry, other in zip(entries, others, strict=False):
            if entry.name == other.name or entry.dtype != other.dtype:
                continue
            if entry.shape == other.shape and torch.equal(_sample(reader, entry), _sample(reader, other)):
                continue
            raise CheckpointError(
                "tied-weights-differ",
                f"{folder / other.file} has {other.name} other than {entry.name}, but the model has them "
                f"as one tensor, {name}; build the model untied (tie_word_embeddings=False)",
            )


def _sample(reader: ChunkReader, entry: FileTensor) -> Tensor:
    """Return the bytes of a tensor's first elements."""
    return next(_chunks(reader, entry), torch.empty(0)).view(torch.uint8)


def _chunks(reader: ChunkReader, entry: FileTensor) -> Iterator[Tensor]:
    whole = Rect.whole(entry.shape)
    stored = _tensor(entry.name, (), entry.shape, [(WeightPart(entry.name, whole), entry)])
    return read_chunks(reader, stored, PARAM, whole)
