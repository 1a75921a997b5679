"""Defines the manifest of a checkpoint: what it holds, where each piece is stored, and checksums; pure values and JSON.

A checkpoint of step 100 is a folder:

    step-00000100/
      manifest.json                       the manifest
      rank-00000-of-00002.safetensors     what rank 0 wrote: pieces of tensors, each a rectangle, row-major
      rank-00001-of-00002.safetensors

Names are those of the unmodified model: flat buffers, padding and the shards of tensor-parallel ranks have no names
here. A piece says which rectangle of which tensor is stored at which offset of which file, and has a CRC-32 for each
block of `BLOCK_BYTES`, so that a reader of a part of it reads and checks these blocks alone. The manifest has its own
CRC.

>>> weight = StoredState("F32", (StoredChunk(Rect((0, 0), (2, 3)), "a.safetensors", 80, (123,)),))
>>> tensor = StoredTensor("up.weight", (), (2, 3), {"param": weight, "step": StoredState("F32", value=3.0)})
>>> manifest = Manifest(step=3, tensors=(tensor,), files={"a.safetensors": 104})
>>> read_back = Manifest.from_text(manifest.to_text(), "manifest.json")
>>> read_back == manifest
True
>>> Manifest.from_text(manifest.to_text().replace("80", "88"), "manifest.json")
Traceback (most recent call last):
    ...
shardwise.checkpoint.manifest.DamagedError: manifest.json does not match its checksum; use an older checkpoint
"""

from __future__ import annotations

import gc
import json
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from operator import gt
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from shardwise.config.errors import OneLineError
from shardwise.config.untrusted_files import UntrustedFileError, mismatch, parse_json
from shardwise.layout.mesh_shape import AXES
from shardwise.layout.slicing import Rect, Shape
from shardwise.runtime.state_shards import PARAM, Kind

if TYPE_CHECKING:  # a folder is listed without torch
    from shardwise.comm.agreement import Verdict

FORMAT: Final = "shardwise-checkpoint"
VERSION: Final = 1
MANIFEST_NAME: Final = "manifest.json"
BLOCK_BYTES: Final = 2**20
# No state is cut along more dims: a convolution has at most five.
_MAX_CUT_DIMS: Final = 6
# A reader of a mesh counts its ranks.
_MOST_RANKS: Final = 2**20

# What a checkpoint contains: everything that a resumed run needs; the trainable parameters with their states; weights.
Contents = Literal["all", "trainable", "weights"]

# Bytes an element, by safetensors' names.
ITEM_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8,
        "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
    }
)  # fmt: skip


class CheckpointError(OneLineError):
    """Says that a checkpoint cannot be saved or loaded; the message says what, where, and what would help."""


class AbsentRankError(CheckpointError):
    """Says that a save fails since another rank or the store does not answer: a retry would not help."""


class DamagedError(CheckpointError):
    """Says that a checkpoint is not what was written: a file is missing, torn or changed. Another may be whole."""


def agreed(verdict: Verdict, is_plain: bool = False) -> str:
    """Return the text of a verdict.

    Args:
        is_plain: whether a failure of all ranks is said without their names, as that of one process.

    Raises:
        AbsentRankError: a rank shows no progress, or the store is gone.
        DamagedError: each rank that has failed has met damage. One that has not counts more: another checkpoint would
            not help it.
        CheckpointError: a rank has failed otherwise.
    """
    if not verdict.failures:
        return verdict.text
    first = min(verdict.failures, key=lambda failure: failure.kind == DamagedError.__name__)
    if verdict.is_without_store:
        why = "the store does not answer; the process that holds it, mostly rank 0's or the launcher's, has died or is"
        raise AbsentRankError(first.code, f"{verdict.subject} failed: {why} stopped ({first.text})") from verdict.error
    others = verdict.ranks_beside(first)
    where = "" if is_plain else f"{verdict.subject} failed on rank {first.rank}: "
    also = f" (and on {others})" if len(verdict.failures) > 1 and not is_plain else ""
    kind = DamagedError if first.kind == DamagedError.__name__ else CheckpointError
    if verdict.num_absent:
        kind = AbsentRankError
    raise kind(first.code, f"{where}{first.text}{also}") from verdict.error


@dataclass(frozen=True)
class StoredChunk:
    """Describes one rectangle of a tensor in a file of the folder.

    Attributes:
        offset: of its first byte, from the start of the file; its elements follow one another row-major.
        crcs: the CRC-32 of each `BLOCK_BYTES` of its bytes, the last block being what is left; empty where they are
            unknown, as in files that another library has written.
        is_transposed: True where the file has the transposed rectangle, of a 2-D tensor.
    """

    rect: Rect
    file: str
    offset: int
    crcs: tuple[int, ...] = ()
    is_transposed: bool = False


@dataclass(frozen=True)
class StoredState:
    """Describes one state of a tensor: pieces that cover it once, in any order, or one number.

    Attributes:
        dtype: safetensors' name of it, such as BF16; for a number also `int` or `float`.
        value: of a state that is one number; None for a tensor.
        codec: how the elements are encoded; `identity` is the only one yet.
    """

    dtype: str
    pieces: tuple[StoredChunk, ...] = ()
    value: float | None = None
    codec: str = "identity"


@dataclass(frozen=True)
class StoredTensor:
    """Describes a parameter with its states, or a buffer.

    Attributes:
        name: the first of its fully qualified names in the unmodified model.
        states: by name; `param` has its values.
    """

    name: str
    aliases: tuple[str, ...]
    shape: Shape
    states: Mapping[str, StoredState]
    kind: Kind = "parameter"
    trainable: bool = True


@dataclass(frozen=True)
class Manifest:
    """Lists all that a whole checkpoint has, and where; see the module's example.

    Attributes:
        step: optimizer steps taken when it was saved.
        tensors: parameters, buffers, and tensors that belong to one rank alone.
        files: bytes of each file, by name.
        config: the resolved config of the run.
        layout: how the states were sharded over the ranks that wrote it, for people; no load depends on it.
        trajectory: other state of the run: optimizer options, scheduler, loss scale, world size.
        extra: what the user gave to `save`.
        model: the model's class, and the content of a Hugging Face config.json where the model has one.
        saved_at: date and time of day, UTC, ISO 8601.
        library: the version of this library that wrote it.
    """

    step: int
    tensors: tuple[StoredTensor, ...]
    files: Mapping[str, int]
    contents: Contents = "all"
    config: Mapping[str, Any] = field(default_factory=dict)
    layout: Mapping[str, Any] = field(default_factory=dict)
    trajectory: Mapping[str, Any] = field(default_factory=dict)
    extra: Any = None
    model: Mapping[str, Any] = field(default_factory=dict)
    saved_at: str = ""
    library: str = ""

    def to_text(self) -> str:
        """Return the JSON of `manifest.json`, its checksum first."""
        with _without_collection():
            body = json.dumps(_to_json(self), separators=(",", ":"))
        return f"{_PREFIX}{_crc_text(body)}{_MIDDLE}{body}{_SUFFIX}"

    @classmethod
    def from_text(cls, text: str | bytes, where: str) -> Self:
        """Read what `to_text` wrote, and check that it describes a valid checkpoint: callers rely on that.

        Raises:
            DamagedError: it is not what was written; or not what this version would write: a value of another type, a
                file of another folder, pieces that do not cover their tensor once.
            CheckpointError: a newer version has written it.
        """
        data = text.encode() if isinstance(text, str) else text
        fix = "use an older checkpoint"
        head = len(_PREFIX) + 8 + len(_MIDDLE)
        body = memoryview(data)[head : len(data) - len(_SUFFIX)]
        if data[:head] != f"{_PREFIX}{zlib.crc32(body):08x}{_MIDDLE}".encode() or not data.endswith(_SUFFIX.encode()):
            raise DamagedError("manifest-torn", f"{where} does not match its checksum; {fix}")
        try:
            with _without_collection():
                values = parse_json(str(body, "utf-8"), where, fix)
            written_by = values["format"], int(values["version"])
        except UntrustedFileError as error:
            raise DamagedError(error.code, str(error)) from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise DamagedError("not-a-manifest", f"{where} is no manifest of a {FORMAT}; {fix}") from None
        if written_by[0] != FORMAT:
            raise DamagedError("not-a-manifest", f"{where} is no manifest of a {FORMAT}; {fix}")
        if written_by[1] > VERSION:
            raise CheckpointError(
                "newer-version",
                f"{where} is of {FORMAT} version {written_by[1]}, this library reads up to {VERSION}; "
                "install a newer shardwise",
            )
        try:
            with _without_collection():
                _MANIFEST.validate_python(values, strict=True)
                manifest = _manifest_from_json(cls, values)
                _check(manifest)
        except ValidationError as error:
            what = mismatch(error)
        except ValueError as error:
            what = str(error)
        else:
            return manifest
        raise DamagedError("manifest-malformed", f"{where} is not what version {VERSION} writes: {what}; {fix}")


@dataclass(frozen=True)
class RankManifest:
    """Describes one rank's part of a manifest: its file and the tensors in it; `merge_parts` merges those of all ranks.

    Attributes:
        file: its name; empty where the rank wrote none.
        tensors: those of which the rank has written pieces or numbers.
    """

    file: str
    num_bytes: int
    tensors: tuple[StoredTensor, ...]

    def to_text(self) -> str:
        """Return it as JSON."""
        with _without_collection():
            tensors = [tensor_to_json(tensor, _state_to_json) for tensor in self.tensors]
            return json.dumps([self.file, self.num_bytes, tensors])

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read what `to_text` wrote."""
        with _without_collection():
            file, num_bytes, tensors = json.loads(text)
            return cls(file, num_bytes, tuple(map(_tensor_from_json, tensors)))


def number_kind(dtype: str) -> str:
    """Return whether a dtype, by its name in safetensors or torch, is of floating, complex or integer numbers.

    >>> number_kind("BF16"), number_kind("float32"), number_kind("C64"), number_kind("BOOL"), number_kind("U8")
    ('floating', 'floating', 'complex', 'integer', 'integer')
    """
    first = dtype.lower()
    return "floating" if first.startswith(("f", "bf")) else "complex" if first.startswith("c") else "integer"


def entry_key(name: str, shape: Shape, state: str, rect: Rect) -> str:
    """Return the name of an entry of a file: tensor, state unless that is `param`, rectangle unless it is the whole.

    >>> entry_key("up.weight", (4, 3), "param", Rect((0, 0), (4, 3)))
    'up.weight'
    >>> entry_key("up.weight", (4, 3), "exp_avg", Rect((0, 0), (2, 3)))
    'up.weight/exp_avg[0:2, 0:3]'
    """
    of_state = name if state == PARAM else f"{name}/{state}"
    return of_state if rect == Rect.whole(shape) else f"{of_state}{rect}"


def merge_parts(parts: Iterable[RankManifest]) -> tuple[tuple[StoredTensor, ...], dict[str, int]]:
    """Merge the parts of all ranks: return the tensors, in the order of first mention, and the bytes by file."""
    first: dict[str, StoredTensor] = {}
    states: dict[str, dict[str, StoredState]] = {}
    pieces: dict[tuple[str, str], list[StoredChunk]] = {}
    files: dict[str, int] = {}
    with _without_collection():
        for part in parts:
            if part.file:
                files[part.file] = part.num_bytes
            for tensor in part.tensors:
                first.setdefault(tensor.name, tensor)
                states.setdefault(tensor.name, {}).update(tensor.states)
                for name, state in tensor.states.items():
                    pieces.setdefault((tensor.name, name), []).extend(state.pieces)
        merged = [
            replace(
                tensor,
                states={
                    name: replace(state, pieces=tuple(pieces[tensor.name, name]))
                    for name, state in states[tensor.name].items()
                },
            )
            for tensor in first.values()
        ]
    return tuple(merged), files


@contextmanager
def _without_collection() -> Iterator[None]:
    """Turn off Python's garbage collection inside: it would scan a million new values repeatedly, and find no garbage.

    Manifests of hundreds of ranks are read, made and merged in a quarter of the time. Several threads may enter at
    once, and during training: only a caller that found collection enabled enables it again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_PREFIX: Final = '{"crc32":"'
_MIDDLE: Final = '","manifest":\n'
_SUFFIX: Final = "}\n"


def _crc_text(body: str) -> str:
    return f"{zlib.crc32(body.encode()):08x}"


def _to_json(manifest: Manifest) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "library": manifest.library,
        "saved_at": manifest.saved_at,
        "step": manifest.step,
        "contents": manifest.contents,
        "checksum": {"algorithm": "crc32", "block_bytes": BLOCK_BYTES},
        "files": dict(manifest.files),
        "model": dict(manifest.model),
        "config": dict(manifest.config),
        "layout": dict(manifest.layout),
        "trajectory": dict(manifest.trajectory),
        "extra": manifest.extra,
        "tensors": [tensor_to_json(tensor, _state_to_json) for tensor in manifest.tensors],
    }


def _manifest_from_json(cls: type[Manifest], values: Mapping[str, Any]) -> Any:
    keys = ("step", "contents", "files", "model", "config", "layout", "trajectory", "extra", "saved_at", "library")
    return cls(tensors=tuple(map(_tensor_from_json, values["tensors"])), **{key: values[key] for key in keys})


_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Table = dict[str, Any]


class _PieceJson(TypedDict):
    start: list[_Count]
    stop: list[_Count]
    file: str
    offset: _Count
    crc32: Annotated[str, Field(pattern="^([0-9a-f]{8})*$")]


class _PiecesJson(TypedDict):
    dtype: Literal[*ITEM_BYTES]  # type: ignore[valid-type]
    codec: str
    pieces: list[_PieceJson]


class _NumberJson(TypedDict):
    dtype: Literal[*ITEM_BYTES, "int", "float"]  # type: ignore[valid-type]
    value: float | bool


class _TensorJson(TypedDict):
    name: str
    aliases: list[str]
    kind: Kind
    trainable: bool
    shape: Annotated[list[_Count], Field(max_length=64)]
    states: dict[str, _PiecesJson | _NumberJson]


# The parts of a run's description that the library itself reads.
_ModelJson = TypedDict("_ModelJson", {"class": str, "config": _Table, "generation_config": _Table}, total=False)


class _PipelineJson(TypedDict):
    schedule: str
    starts: list[str]


class _LayoutJson(TypedDict, total=False):
    mesh: dict[Literal[*AXES], Annotated[int, Field(ge=1)]] | None  # type: ignore[valid-type]
    pipeline: _PipelineJson | None
    precision: dict[str, str] | None
    tiers: dict[str, str] | None


class _OptimizerJson(TypedDict, total=False):
    kind: str
    groups: list[_Table]


class _SchedulerJson(TypedDict, total=False):
    kind: str
    state: _Table


class _TrajectoryJson(TypedDict, total=False):
    world_size: _Count
    normaliser: float | None
    scaler: dict[str, float]
    optimizer: _OptimizerJson
    scheduler: _SchedulerJson | None


class _ManifestJson(TypedDict):
    step: _Count
    contents: Contents
    files: dict[str, _Count]
    model: _ModelJson
    config: dict[str, _Table]
    layout: _LayoutJson
    trajectory: _TrajectoryJson
    extra: Any
    saved_at: str
    library: str
    tensors: list[_TensorJson]


_MANIFEST: Final = TypeAdapter(_ManifestJson)


def _check(manifest: Manifest) -> None:
    """Raise a ValueError where a manifest contradicts itself, or names a file outside its folder."""
    for file in manifest.files:
        if not file or file in (".", "..") or "/" in file or "\\" in file or not file.isprintable():
            raise ValueError(f"{file!r} is not the name of a file in its folder")
    names = [name for tensor in manifest.tensors for name in (tensor.name, *tensor.aliases)]
    if len(set(names)) < len(names):
        raise ValueError(f"{Counter(names).most_common(1)[0][0]} stands there twice")
    if math.prod((manifest.layout.get("mesh") or {}).values()) > _MOST_RANKS:
        raise ValueError(f"its mesh has more than {_MOST_RANKS:,} ranks")
    extents: dict[str, list[tuple[int, int]]] = {file: [] for file in manifest.files}
    kinds: dict[str, tuple[str, str]] = {}
    for tensor in manifest.tensors:
        for name, state in tensor.states.items():
            if name != PARAM and state.value is None and tensor.kind == "parameter":
                kind, first = kinds.setdefault(name, (number_kind(state.dtype), tensor.name))
                if kind != number_kind(state.dtype):
                    raise ValueError(f"{tensor.name}/{name} is of {state.dtype}, and {first}/{name} of {kind} numbers")
            if isinstance(state.value, int) and not -(2**63) <= state.value < 2**63:
                raise ValueError(f"{tensor.name}/{name}: its number does not fit into 64 bits")
            if state.value is None and (wrong := _wrong_pieces(tensor.shape, state, extents)):
                raise ValueError(f"{entry_key(tensor.name, (), name, Rect((), ()))}: {wrong}")
    for file, found in extents.items():
        found.sort()
        stops = [0, *(stop for _, stop in found)]
        if stops[-1] > manifest.files[file] or any(start < end for end, (start, _) in zip(stops, found, strict=False)):
            raise ValueError(f"its pieces overlap, or pass the end of {file}")


def _wrong_pieces(shape: Shape, state: StoredState, extents: Mapping[str, list[tuple[int, int]]]) -> str:
    """Say what is wrong with the pieces of a state, "" if they cover the tensor once; add their bytes to `extents`.

    They cover it once if and only if the signed counts of their corners (plus at an even number of `stop`, else minus)
    add up to the corners of the whole. That takes one pass for any arrangement of the pieces.
    """
    if state.codec != "identity":
        return f"its codec {state.codec!r} is none that this version knows"
    for piece in state.pieces:
        if len(piece.rect.start) != len(shape) or any(map(gt, piece.rect.stop, shape)):
            return f"its piece {piece.rect} is not within shape {shape}"
        num_bytes = piece.rect.numel * ITEM_BYTES[state.dtype]
        if piece.file not in extents:
            return f"it is in {piece.file!r}, and no such file is listed"
        if piece.crcs and len(piece.crcs) != -(-num_bytes // BLOCK_BYTES):
            return f"its piece {piece.rect} has {len(piece.crcs)} checksums for {num_bytes} bytes"
        if num_bytes:
            extents[piece.file].append((piece.offset, piece.offset + num_bytes))
    numel, whole_numel = sum(piece.rect.numel for piece in state.pieces), math.prod(shape)
    if numel != whole_numel or math.prod(max(size, 1) for size in shape) >= 2**60:
        return f"its pieces have {numel} of {whole_numel} elements"
    if not numel:
        return ""
    rects = [piece.rect for piece in state.pieces]
    dims = [dim for dim, size in enumerate(shape) if any(rect.shape[dim] < size for rect in rects)]
    if len(dims) > _MAX_CUT_DIMS:
        return f"its pieces are cut along {len(dims)} dims, more than {_MAX_CUT_DIMS}"
    corners: Counter[Shape] = Counter()
    signs = [math.prod(each) for each in product((1, -1), repeat=len(dims))]
    for rect, of_whole in [*((rect, 1) for rect in rects), (Rect.whole(shape), -1)]:
        for sign, corner in zip(signs, product(*((rect.start[dim], rect.stop[dim]) for dim in dims)), strict=True):
            corners[corner] += of_whole * sign
    return "its pieces overlap, and leave out as many elements" if any(corners.values()) else ""


def tensor_to_json(tensor: StoredTensor, state_to_json: Callable[[StoredState], dict[str, Any]]) -> dict[str, Any]:
    """Return a tensor as JSON, with its states as `state_to_json` makes them."""
    return {
        "name": tensor.name,
        "aliases": list(tensor.aliases),
        "kind": tensor.kind,
        "trainable": tensor.trainable,
        "shape": list(tensor.shape),
        "states": {name: state_to_json(state) for name, state in tensor.states.items()},
    }


def _tensor_from_json(values: Mapping[str, Any]) -> StoredTensor:
    states = {name: _state_from_json(state) for name, state in values["states"].items()}
    shape, aliases = tuple(values["shape"]), tuple(values["aliases"])
    return StoredTensor(values["name"], aliases, shape, states, values["kind"], values["trainable"])


def _state_to_json(state: StoredState) -> dict[str, Any]:
    if state.value is not None:
        return {"dtype": state.dtype, "value": state.value}
    pieces = [
        {
            "start": list(piece.rect.start),
            "stop": list(piece.rect.stop),
            "file": piece.file,
            "offset": piece.offset,
            "crc32": "".join(f"{crc:08x}" for crc in piece.crcs),
        }
        for piece in state.pieces
    ]
    return {"dtype": state.dtype, "codec": state.codec, "pieces": pieces}


def _state_from_json(values: Mapping[str, Any]) -> StoredState:
    if "value" in values:
        return StoredState(values["dtype"], value=values["value"])
    pieces = tuple(
        StoredChunk(
            rect=Rect(tuple(piece["start"]), tuple(piece["stop"])),
            file=piece["file"],
            offset=piece["offset"],
            crcs=tuple(int(piece["crc32"][at : at + 8], 16) for at in range(0, len(piece["crc32"]), 8)),
        )
        for piece in values["pieces"]
    )
    return StoredState(values["dtype"], pieces, codec=values["codec"])
