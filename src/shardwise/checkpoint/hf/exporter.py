"""Writes a standard Hugging Face folder from all ranks: each writes the rectangles that it is given, in place.

A plan says at which offset of which file each tensor is stored. It depends only on names, shapes and dtypes, so that
every rank makes the same one and the bytes are the same under every layout. One rank begins, all write, one finishes:

    plan = plan_export(tensors, names)                  # every rank
    begin_export(plan, folder, {"config.json": ...})    # one rank; then a barrier
    write_export(plan, folder, blocks)                  # every rank; then a barrier
    finish_export(folder)                               # one rank

The blocks of an engine are those of `WeightSource.blocks`; `stored_blocks` yields those of a checkpoint's states.

Until it is finished the folder has another name, and a folder that has anything in it is never written to. Where a rank
fails, `discard_export` removes what was begun.

>>> plan = plan_export([ExportTensor("up.weight", (), (4, 2), "BF16"), ExportTensor("up.bias", (), (4,), "BF16")])
>>> [(each.name, each.file) for each in plan.tensors], plan.num_tensor_bytes
([('up.bias', 'model.safetensors'), ('up.weight', 'model.safetensors')], 24)
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from shardwise.checkpoint.commit import await_folder, check_free_space, named_errors, sync_folder
from shardwise.checkpoint.file_ranges import written_parts
from shardwise.checkpoint.hf.importer import INDEX_NAME, WEIGHTS_NAME
from shardwise.checkpoint.hf.key_map import NameMap, WeightPart
from shardwise.checkpoint.manifest import ITEM_BYTES, CheckpointError, agreed
from shardwise.checkpoint.safetensors_io import TensorHeader, encode_header, named_dtype
from shardwise.comm.agreement import Agreement, odd_ranks
from shardwise.config.untrusted_files import open_regular
from shardwise.layout.slicing import Rect, Shape, flat_range_to_rects, rect_to_flat_ranges
from shardwise.runtime.pinned_memory import memory_of
from shardwise.runtime.state_shards import PARAM, StateShard

# A rectangle of a tensor of the folder, and its values, of any dtype and on any device.
Block = tuple[str, Rect, Tensor]
Each = TypeVar("Each")
# The most that is cast, copied from a device and written at once.
_CHUNK_BYTES: Final = 4 * 2**20
MAX_FILE_BYTES: Final = 5 * 10**9


@dataclass(frozen=True)
class ExportTensor:
    """Describes a tensor of the model's state dict, as it is to be exported.

    Attributes:
        name: the first of its names in the model.
        copies: of its aliases, the ones that the folder has too; what it leaves out, a reader of the folder ties again.
        dtype: safetensors' name of the dtype to write.
    """

    name: str
    aliases: tuple[str, ...]
    shape: Shape
    dtype: str
    copies: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlacedTensor:
    """Places a tensor in the folder; `offset` is in bytes from the start of its file."""

    name: str
    dtype: str
    shape: Shape
    file: str
    offset: int


@dataclass(frozen=True)
class ExportPlan:
    """Lists the content of every file of the folder.

    Attributes:
        tensors: of the folder by name, numbers by value: in an order that no layout changes.
        parts: by name of a model's tensor, those that tensors of the folder are.
        headers: the first bytes of each file, by its name.
        num_file_bytes: of each file, by its name.
        index: the text of `model.safetensors.index.json`; empty where there is one file only.
    """

    tensors: tuple[PlacedTensor, ...]
    parts: Mapping[str, tuple[WeightPart, ...]]
    headers: Mapping[str, bytes]
    num_file_bytes: Mapping[str, int]
    index: str

    @property
    def digest(self) -> str:
        """Return a SHA-256 of all that files have but values."""
        parts = [self.index, *map(repr, self.headers.items())]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def num_tensor_bytes(self) -> int:
        """Return the bytes of all tensors: the sum of what `write_export` returns on all ranks."""
        return sum(map(_num_bytes, self.tensors))


def plan_export(
    tensors: Sequence[ExportTensor],
    names: NameMap | Mapping[str, Any] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> ExportPlan:
    """Assign a model's tensors to the files of a folder, by name.

    Args:
        names: rules for names that differ; see `NameMap.of`.
        max_file_bytes: the most bytes of tensors in a file; a tensor larger than that has a file of its own.

    Raises:
        CheckpointError: two tensors have one name in the folder, or a rule does not fit a shape.
    """
    parts = folder_parts(tensors, NameMap.of(names))
    by_name = {
        stored.stored: PlacedTensor(stored.stored, tensor.dtype, stored.stored_shape, "", 0)
        for tensor in tensors
        for stored in parts[tensor.name]
    }
    unplaced = sorted(by_name.values(), key=lambda tensor: numbered(tensor.name))
    groups = list(filled(unplaced, _num_bytes, max_file_bytes))
    files = [WEIGHTS_NAME] if len(groups) == 1 else [_file_name(i, len(groups)) for i in range(len(groups))]
    headers, placed = {}, dict[str, PlacedTensor]()
    for file, group in zip(files, groups, strict=True):
        headers[file], in_file = _place(file, group)
        placed.update((tensor.name, tensor) for tensor in in_file)
    ordered = tuple(placed[tensor.name] for tensor in unplaced)
    num_file_bytes = {file: len(header) for file, header in headers.items()}
    for tensor in ordered:
        num_file_bytes[tensor.file] += _num_bytes(tensor)
    return ExportPlan(
        tensors=ordered,
        parts=parts,
        headers=headers,
        num_file_bytes=num_file_bytes,
        index=_index(ordered) if len(groups) > 1 else "",
    )


def folder_parts(tensors: Iterable[ExportTensor], rules: NameMap) -> dict[str, tuple[WeightPart, ...]]:
    """Return the parts of each of a model's tensors that a folder has, by the tensor's name.

    Raises:
        CheckpointError: two tensors have one name in the folder, one has the name of another's alias, or a rule does
            not fit a shape.
    """
    parts, owners = dict[str, tuple[WeightPart, ...]](), dict[str, str]()
    for tensor in tensors:
        names = (tensor.name, *tensor.copies)
        parts[tensor.name] = tuple(chain.from_iterable(rules.split(name, tensor.shape) for name in names))
        stored = (weight_part.stored for weight_part in parts[tensor.name] if weight_part.num_rows is None)
        for name in chain(stored, *map(rules.stored_names, tensor.aliases)):
            if owners.setdefault(name, tensor.name) != tensor.name:
                raise CheckpointError(
                    "export-names-clash",
                    f"{owners[name]} and {tensor.name} are both {name} in the folder; correct the name rules",
                )
    return parts


def numbered(name: str) -> list[tuple[int, int, str]]:
    """Return the key by which names are sorted, numbers by value.

    >>> sorted(("h.10.up", "h.9.up", "h.9.down"), key=numbered)
    ['h.9.down', 'h.9.up', 'h.10.up']
    """
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]


def temporary_folder(folder: Path) -> Path:
    """Return the path that the folder has until it is finished."""
    return folder.with_name(f".{folder.name}.unfinished")


def begin_export(plan: ExportPlan, folder: Path, others: Mapping[str, bytes | Path] | None = None) -> None:
    """Make the temporary folder with all its files, on one rank; what a dead export has left there is removed.

    Args:
        folder: the final folder; it must not exist, or be empty.
        others: the files beside the weights by name, as bytes or as the path of a file to copy: `config.json`,
            `generation_config.json`, those of the tokenizer.

    Raises:
        CheckpointError: there is such a folder, too little space, or the system refuses.
    """
    refuse_taken(folder)
    temporary = temporary_folder(folder)
    with named_errors("export to", temporary):
        if temporary.exists():
            shutil.rmtree(temporary)
        check_free_space(temporary, sum(plan.num_file_bytes.values()))
        temporary.mkdir(parents=True)
        for file, header in plan.headers.items():
            with (temporary / file).open("xb") as stream:
                stream.write(header)
                stream.truncate(plan.num_file_bytes[file])
        weights = {*plan.headers, WEIGHTS_NAME, INDEX_NAME}
        if plan.index:
            (temporary / INDEX_NAME).write_text(plan.index, encoding="utf-8")
        for name, content in (others or {}).items():
            if name in weights or Path(name).name != name:
                raise CheckpointError(
                    "export-file-name",
                    f"{name} cannot stand beside the weights of {folder}; give another plain file name",
                )
            if isinstance(content, Path):
                with (
                    named_errors("copy", content),
                    open(open_regular(content), "rb") as source,
                    (temporary / name).open("xb") as stream,
                ):
                    shutil.copyfileobj(source, stream)
            else:
                (temporary / name).write_bytes(content)


def write_export(
    plan: ExportPlan, folder: Path, blocks: Iterable[Block], progress: Callable[[int], None] = lambda _: None
) -> int:
    """Write this rank's blocks of tensors of the plan; return when they are on disk.

    It uses at most a few MiB beside the blocks.

    Args:
        folder: as given to `begin_export`, which has been called.
        progress: called with the bytes of each write.

    Returns:
        The bytes written. If their sum over all ranks is not `plan.num_tensor_bytes`, something was not written.

    Raises:
        CheckpointError: the system refuses.
    """
    temporary, num_bytes = temporary_folder(folder), 0
    placed = {tensor.name: tensor for tensor in plan.tensors}
    with named_errors("export to", temporary), ExitStack() as stack:
        files: dict[str, FileIO] = {}
        for name, rect, values in blocks:
            tensor = placed[name]
            if tensor.file not in files:
                files[tensor.file] = stack.enter_context(FileIO(temporary / tensor.file, "r+"))
            for written in _write_block(files[tensor.file].fileno(), values, rect, tensor):
                num_bytes += written
                progress(written)
        for file in files.values():
            os.fsync(file.fileno())
    return num_bytes


def finish_export(folder: Path) -> None:
    """Sync everything to the disk and give the folder its name; on one rank, after all have written.

    Raises:
        CheckpointError: a folder of this name has appeared since `begin_export`, or the system refuses.
    """
    temporary = temporary_folder(folder)
    refuse_taken(folder)
    with named_errors("finish", folder):
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(temporary)
        # The system replaces an empty folder by a rename, and no other.
        temporary.rename(folder)
        sync_folder(folder.parent)


def discard_export(folder: Path) -> None:
    """Remove what was begun, as far as that works: it is called after something else has failed."""
    shutil.rmtree(temporary_folder(folder), ignore_errors=True)


def refuse_taken(folder: Path) -> None:
    """Refuse to write to a folder that has anything in it, or to a file.

    Raises:
        CheckpointError: it has, or the system refuses.
    """
    with named_errors("export to", folder):
        if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
            raise CheckpointError(
                "export-exists", f"{folder} is there already, and is not overwritten; give another, or remove it"
            )


def _num_bytes(tensor: PlacedTensor) -> int:
    return math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def filled(values: Iterable[Each], size_of: Callable[[Each], int], max_bytes: int) -> Iterator[list[Each]]:
    """Yield values in their order, as many as fit into `max_bytes`, at least one; an empty list where there are none.

    >>> list(filled("abcde", lambda value: 9 if value == "b" else 2, 5))
    [['a'], ['b'], ['c', 'd'], ['e']]
    """
    group, num_bytes = list[Each](), 0
    for value in values:
        if group and num_bytes + size_of(value) > max_bytes:
            yield group
            group, num_bytes = [], 0
        group.append(value)
        num_bytes += size_of(value)
    yield group


def _file_name(index: int, count: int) -> str:
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _place(file: str, group: Sequence[PlacedTensor]) -> tuple[bytes, list[PlacedTensor]]:
    """Return the header of a file, and its tensors with their offsets."""
    header, offsets = encode_header([TensorHeader(each.name, each.dtype, each.shape) for each in group])
    return header, [replace(each, file=file, offset=offset) for each, offset in zip(group, offsets, strict=True)]


def _index(tensors: Sequence[PlacedTensor]) -> str:
    values = {
        "metadata": {"total_size": sum(map(_num_bytes, tensors))},
        "weight_map": {tensor.name: tensor.file for tensor in tensors},
    }
    return f"{json.dumps(values, indent=2)}\n"


def stored_blocks(plan: ExportPlan, state_shards: Iterable[StateShard]) -> Iterator[Block]:
    """Yield what this rank writes of the states of parameters and buffers in the plan, as views.

    It uses some 40 MiB where the states are stored in files.
    """
    for state_shard in state_shards:
        if state_shard.state != PARAM or state_shard.name not in plan.parts:
            continue
        for window in written_parts(state_shard):
            for piece in window.written:
                values = window.flat.read(piece.local_offset, piece.local_stop).view(piece.rect.shape)
                yield from in_folder(plan.parts[window.name], piece.rect, values)


def in_folder(parts: Iterable[WeightPart], rect: Rect, values: Tensor) -> Iterator[Block]:
    """Yield a rectangle of a model's tensor, which has these parts, as rectangles of tensors of a folder, as views."""
    for weight_part in parts:
        common = weight_part.rect.intersect(rect)
        if common is None:
            continue
        block, inside = values[common.slices_in(rect)].detach(), common.slices_in(weight_part.rect)
        start, stop = tuple(index.start for index in inside), tuple(index.stop for index in inside)
        if weight_part.is_stacked:
            block, start, stop = block[0], start[1:], stop[1:]
        if weight_part.is_transposed:
            block, start, stop = block.T, start[::-1], stop[::-1]
        if weight_part.num_rows is not None:
            start, stop = ((corner[0] + weight_part.first_row, *corner[1:]) for corner in (start, stop))
        yield weight_part.stored, Rect(start, stop), block


def _write_block(file: int, block: Tensor, rect: Rect, placed: PlacedTensor) -> Iterator[int]:
    """Cast a block and write it to its place in a file, in the order of its elements; yield the bytes of each write."""
    item_bytes, whole = ITEM_BYTES[placed.dtype], Rect.whole(placed.shape)
    step = max(1, _CHUNK_BYTES // max(item_bytes, block.element_size()))
    for first in range(0, rect.numel, step):
        for chunk in flat_range_to_rects(rect, first, min(first + step, rect.numel)):
            values = torch.empty(chunk.rect.shape, dtype=named_dtype(placed.dtype))
            data = memory_of(values.copy_(block[chunk.rect.slices_in(rect)]))
            for start, stop in rect_to_flat_ranges(chunk.rect, whole):
                offset, end = placed.offset + start * item_bytes, placed.offset + stop * item_bytes
                while offset < end:
                    num_bytes = os.pwrite(file, data[: end - offset], offset)
                    data, offset = data[num_bytes:], offset + num_bytes
            yield values.nbytes


_FLOATS: Final = ("F64", "F32", "F16", "BF16")


def exported_dtype(dtype: str, wanted: str, is_kept: bool) -> str:
    """Return the dtype in which a tensor is written: the wanted one, unless it is kept or not floating-point.

    Args:
        dtype: safetensors' name of its own dtype.
        wanted: safetensors' name of the dtype of the export.
        is_kept: whether the tensor keeps its own dtype.

    >>> exported_dtype("F32", "BF16", is_kept=False), exported_dtype("I64", "BF16", is_kept=False)
    ('BF16', 'I64')
    """
    return wanted if dtype in _FLOATS and not is_kept else dtype


def export_jointly(
    folder: Path,
    tensors: Sequence[ExportTensor],
    blocks: Iterator[Block],
    others: Mapping[str, bytes | Path],
    agreement: Agreement,
) -> Path:
    """Export on all ranks, each of which calls this; return the finished folder.

    Args:
        folder: the same on all ranks; its path may differ.
        tensors: of the folder, the same on all ranks.
        blocks: this rank's; all ranks together have each element once.
        others: the files beside the weights; only rank 0's are written.
        agreement: of all ranks; a folder that rank 0 has made may take half its time-out to appear on other ranks.

    Raises:
        CheckpointError: it failed on some rank; the message is the same on all, and nothing is left of the export.
    """
    plans: list[ExportPlan] = []

    def plan() -> str:
        plans.append(plan_export(tensors))
        return plans[0].digest

    def begin(said: Mapping[int, str]) -> str:
        if odd := odd_ranks(said):
            text = f"{odd} would export other tensors than rank 0; call it with the same dtype and names on all"
            raise CheckpointError("exports-differ", text)
        begin_export(plans[0], folder, others)
        return ""

    def write() -> str:
        try:
            await_folder(temporary_folder(folder), agreement.timeout_s / 2)
            return str(write_export(plans[0], folder, blocks, lambda _: agreement.show_progress()))
        except Exception:
            for _ in blocks:  # for some of them all ranks gather: the others must not wait for this one
                agreement.show_progress()
            raise

    def finish(said: Mapping[int, str]) -> str:
        written, planned = sum(map(int, said.values())), plans[0].num_tensor_bytes
        if written != planned:
            text = f"the ranks have written {written} bytes of {planned}; this is a defect of shardwise"
            raise CheckpointError("export-incomplete", text)
        finish_export(folder)
        return ""

    subject = f"the export to {folder}"
    try:
        agreed(agreement.run("export", plan, begin, subject))
        agreed(agreement.run("export", write, finish, subject))
    except CheckpointError:
        if agreement.rank == 0:
            discard_export(folder)
        raise
    return folder
