"""Versions of weights in a folder: the first whole, each later one with what has changed since the one before it.

A step changes few of the bits of weights in bf16: most updates are too small to be seen there. Of each tensor that has
changed, a version has the values that have, with a bit for each element, or with their positions where they are few:

    version-00000000/  model-00001.safetensors   model.safetensors.index.json   version.json
    version-00000001/  delta-00001.safetensors   version.json

`version.json` has the SHA-256 of the bytes of each tensor, and that of the version before it: a version is taken only
after the right one, all of it or nothing. It is written last, in a folder that gets its name when all is written.

>>> import tempfile
>>> root = tempfile.mkdtemp()
>>> weights, versions = {"w": torch.zeros(4096, dtype=torch.bfloat16)}, VersionWriter(root)
>>> first = versions.write(weights.items())
>>> weights["w"][7] = 1
>>> second = versions.write(weights.items())
>>> second.num_bytes, second.num_whole_bytes
(6, 8192)
>>> version, found = read_weights(root)
>>> version.number, torch.equal(found["w"], weights["w"])
(1, True)
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardwise.checkpoint.commit import named_errors, sync_folder, write_text
from shardwise.checkpoint.hf.exporter import filled
from shardwise.checkpoint.hf.importer import INDEX_NAME
from shardwise.checkpoint.manifest import CheckpointError, DamagedError
from shardwise.checkpoint.safetensors_io import TensorHeader, dtype_name, encode_header
from shardwise.config.untrusted_files import UntrustedFileError, read_json
from shardwise.runtime.pinned_memory import bits_of, memory_of

_FOLDER: Final = "version-{:08d}"
_NAME: Final = "version.json"
_FILE_BYTES: Final = 2**30
_MASK, _POSITIONS = "::mask", "::positions"


@dataclass(frozen=True)
class Version:
    """Describes a version of weights.

    Attributes:
        chain: a SHA-256 over this version's tensors and the chain of the one before.
        num_bytes: of the tensors in its files; `num_whole_bytes` are those of all tensors, whole.
    """

    number: int
    chain: str
    num_bytes: int
    num_whole_bytes: int


class VersionWriter:
    """Writes versions of weights into a folder, and keeps a copy of the last one in host memory to compare.

    A version that follows a failure, or is the first of this writer, is whole.

    Args:
        root: the folder of the versions; made if missing. Versions that are there are kept.
        file_bytes: the most bytes of tensors in a file, unless one is larger.
    """

    def __init__(self, root: str | Path, file_bytes: int = _FILE_BYTES) -> None:
        self._root = Path(root)
        self._file_bytes = file_bytes
        self._copies: dict[str, Tensor] = {}
        self._last: Version | None = None

    def write(self, weights: Iterable[tuple[str, Tensor | None]]) -> Version | None:
        """Write a version, and return it; None where there are no tensors, as on ranks that a walk gives none.

        Args:
            weights: all of them, such as `Engine.weights` yields them; they are taken one at a time.

        Raises:
            CheckpointError: it cannot be written; nothing is left of it.
        """
        number = max(_numbers(self._root), default=-1) + 1
        folder = self._root / f".{_FOLDER.format(number)}.unfinished"
        shutil.rmtree(folder, ignore_errors=True)  # what a dead writer has left there
        last, self._last = self._last, None
        digests: dict[str, str] = {}
        try:
            # Closed at once where a file cannot be written: the other ranks wait for this one's walk.
            with closing(self._changes(weights, digests, last is None)) as changes:
                files, num_bytes = _written(folder, "model" if last is None else "delta", changes, self._file_bytes)
            if not digests:
                return None
            chain = _chained("" if last is None else last.chain, digests)
            version = Version(number, chain, num_bytes, sum(self._copies[name].nbytes for name in digests))
            described: dict[str, Any] = {"version": number, "base": last and last.chain, "chain": chain}
            texts = {_NAME: {**described, "digests": digests, "files": files}}
            if last is None:
                texts[INDEX_NAME] = {"metadata": {"total_size": num_bytes}, "weight_map": files}
            with named_errors("write", folder):
                folder.mkdir(parents=True, exist_ok=True)
                for name, values in texts.items():
                    write_text(folder / name, json.dumps(values, indent=2))
                sync_folder(folder)
                folder.rename(self._root / _FOLDER.format(number))
                sync_folder(self._root)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._last = version
        return version

    def _changes(
        self, weights: Iterable[tuple[str, Tensor | None]], digests: dict[str, str], is_whole: bool
    ) -> Generator[tuple[str, Tensor]]:
        """Yield what a version has of each tensor; keep the tensor, and its digest."""
        for name, tensor in weights:
            if tensor is not None:
                values = tensor.detach().cpu().contiguous()
                digests[name] = digest_of(values)
                yield from _changed(name, values, None if is_whole else self._copies.get(name)).items()
                _keep(self._copies, name, values)


class HeldChanges:
    """Finds what has changed in those parts of tensors that a rank holds, and keeps copies of these in host memory.

    >>> changes, held = HeldChanges(), torch.zeros(2, 3)
    >>> part = ("w", held, (slice(1, 3), slice(0, 3)))  # rows 1 and 2 of four
    >>> [positions.tolist() for _, positions, _ in changes.take([("w", torch.float32, (4, 3))], [part])]
    [[3, 4, 5, 6, 7, 8]]
    >>> held[1, 0] = 1.0
    >>> list(changes.take([("w", torch.float32, (4, 3))], [part]))
    [(('w', torch.float32, (4, 3)), tensor([6]), tensor([1.]))]
    """

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}

    def take(
        self,
        tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
        shards: Iterable[tuple[str, Tensor, tuple[slice, ...]]],
    ) -> Iterator[tuple[tuple[str, torch.dtype, tuple[int, ...]], Tensor, Tensor]]:
        """Yield with each tensor the places in it, as if it were flat, of what has changed since, and the values there.

        The first time all has changed.

        Args:
            tensors: name, dtype and shape of all, also of those of which the rank holds nothing.
            shards: what it holds, such as `WeightSource.shards` yields it.
        """
        pieces = dict[str, list[tuple[Tensor, tuple[slice, ...]]]]()
        for name, values, index in shards:
            pieces.setdefault(name, []).append((values, index))
        for tensor in tensors:
            name, dtype, shape = tensor
            positions, changes = [torch.empty(0, dtype=torch.int64)], [torch.empty(0, dtype=dtype)]
            for number, (values, index) in enumerate(pieces.pop(name, ())):
                flat = values.detach().cpu().reshape(-1)
                before = self._copies.get(f"{name}/{number}")
                is_changed = torch.ones(flat.shape, dtype=torch.bool)
                if before is not None:
                    is_changed = bits_of(flat) != bits_of(before)
                inside = is_changed.nonzero().view(-1)
                changes.append(flat[inside])
                position = torch.zeros_like(inside)
                for step, span, size in zip(torch.unravel_index(inside, values.shape), index, shape, strict=True):
                    position = position * size + span.start + step
                positions.append(position)
                _keep(self._copies, f"{name}/{number}", flat)
            yield tensor, torch.cat(positions), torch.cat(changes)


def _written(
    folder: Path, kind: str, tensors: Iterable[tuple[str, Tensor]], file_bytes: int
) -> tuple[dict[str, str], int]:
    """Write tensors into files as they come; return the file of each, and the bytes of all."""
    files, num_bytes = dict[str, str](), 0
    for number, group in enumerate(filter(None, filled(tensors, lambda pair: pair[1].nbytes, file_bytes)), 1):
        group.sort(key=lambda pair: -pair[1].element_size())  # as a header orders them
        entries = [TensorHeader(key, dtype_name(tensor.dtype), tuple(tensor.shape)) for key, tensor in group]
        name = f"{kind}-{number:05d}.safetensors"
        with named_errors("write", folder):
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / name).open("xb") as file:
                file.write(encode_header(entries)[0])
                for key, tensor in group:
                    file.write(memory_of(tensor))
                    files[key], num_bytes = name, num_bytes + tensor.nbytes
                file.flush()
                os.fsync(file.fileno())
    return files, num_bytes


def read_weights(
    root: str | Path, since: Version | None = None, weights: Mapping[str, Tensor] | None = None
) -> tuple[Version, dict[str, Tensor]]:
    """Return the newest version in a folder and its weights, in host memory.

    Args:
        since: the version of the given `weights`, to which what has changed later is added; None for none.

    Raises:
        DamagedError: a version is not what was written, or does not follow the one before it.
        CheckpointError: there is none.
    """
    root, version, current = Path(root), since, dict(weights or {})
    described = {number: _described(root / _FOLDER.format(number)) for number in _numbers(root)}
    complete = [number for number, values in described.items() if values["base"] is None]
    start = max(complete, default=0) if since is None else since.number + 1
    for number in [number for number in described if number >= start]:
        folder, values = root / _FOLDER.format(number), described[number]
        base = "" if version is None or values["base"] is None else version.chain
        if (values["base"] or "") != base or values["chain"] != _chained(base, values["digests"]):
            raise DamagedError(
                "version-chain", f"{folder} does not follow the version before it; read from a whole one"
            )
        current = _taken(folder, values, current if base else {})
        version = Version(number, values["chain"], 0, sum(tensor.nbytes for tensor in current.values()))
    if version is None:
        raise CheckpointError("no-version", f"{root} has no version of weights; write one by VersionWriter(root).write")
    return version, current


def digest_of(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes.

    >>> digest_of(torch.zeros(2))[:8], digest_of(torch.zeros(2)) == digest_of(torch.zeros(2).bfloat16())
    ('af5570f5', False)
    """
    return hashlib.sha256(memory_of(tensor.detach().cpu().contiguous())).hexdigest()


def _numbers(root: Path) -> list[int]:
    return sorted(int(path.name.rpartition("-")[2]) for path in root.glob("version-[0-9]*")) if root.is_dir() else []


def _described(folder: Path) -> dict[str, Any]:
    try:
        values = read_json(folder / _NAME, "read another version")
    except UntrustedFileError as error:
        raise DamagedError(error.code, str(error)) from None
    if not isinstance(values, dict) or {"base", "chain", "digests", "files"} - values.keys():
        raise DamagedError("version-json", f"{folder / _NAME} does not describe a version; read another one")
    return values


def _chained(before: str, digests: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps([before, sorted(digests.items())]).encode()).hexdigest()


def _changed(name: str, values: Tensor, before: Tensor | None) -> dict[str, Tensor]:
    """Return what a version has of a tensor, in the form of the fewest bytes; nothing where it is as before."""
    if before is None or before.dtype != values.dtype or before.shape != values.shape:
        return {name: values}
    is_changed = bits_of(values.view(-1)) != bits_of(before.view(-1))
    positions = is_changed.nonzero().view(-1)
    if not positions.numel():
        return {}
    changed = values.view(-1)[positions]
    narrow = positions.to(torch.int32 if values.numel() < 2**31 else torch.int64)
    mask_bytes = -(-values.numel() // 8)
    if changed.nbytes + min(narrow.nbytes, mask_bytes) >= values.nbytes:
        return {name: values}
    if narrow.nbytes < mask_bytes:
        return {name: changed, f"{name}{_POSITIONS}": narrow}
    return {name: changed, f"{name}{_MASK}": torch.from_numpy(np.packbits(is_changed.numpy()))}


def _keep(copies: dict[str, Tensor], name: str, values: Tensor) -> None:
    """Keep a copy of a tensor, in the memory of the one before it."""
    before = copies.get(name)
    if before is not None and before.dtype == values.dtype and before.shape == values.shape:
        before.copy_(values)
    else:
        copies[name] = values.clone()


def _taken(folder: Path, described: Mapping[str, Any], before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a version, all checked; those before it stay as they are."""
    stored, weights = dict[str, Tensor](), dict[str, Tensor]()
    try:
        for file in sorted(set(described["files"].values())):
            with safe_open(folder / Path(file).name, "pt") as opened:
                stored |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, it is no mapping
        for name, digest in described["digests"].items():
            weights[name] = _restored(name, stored, before.get(name))
            if digest_of(weights[name]) != digest:
                raise DamagedError("weight-digest", f"{name} of {folder} is not what was written; read another version")
    except (OSError, SafetensorError, KeyError, RuntimeError, IndexError, TypeError) as error:
        raise DamagedError("version-torn", f"{folder} cannot be read: {error}; read another version") from error
    return weights


def _restored(name: str, stored: Mapping[str, Tensor], before: Tensor | None) -> Tensor:
    mask, positions = (stored.get(f"{name}{ending}") for ending in (_MASK, _POSITIONS))
    if name in stored and mask is None and positions is None:
        return stored[name]
    if before is None:
        raise KeyError(name)
    if name not in stored:
        return before
    values = before.clone()
    if positions is not None:
        where = positions.long()
    else:
        where = torch.from_numpy(np.unpackbits(stored[f"{name}{_MASK}"].numpy(), count=values.numel())).bool()
    values.view(-1)[where] = stored[name]
    return values
