"""The manifest of a checkpoint: what it holds, where each piece lies, and what it must sum to. Pure values and JSON.

A checkpoint of step 100 is a folder:

    step-00000100/
      manifest.json                       this
      rank-00000-of-00002.safetensors     what rank 0 wrote: pieces of tensors, each a rectangle, row-major
      rank-00001-of-00002.safetensors

Names are those of the unmodified model: a flat buffer, a padding, a part of a tensor-parallel rank have no name here. A
piece says which rectangle of which tensor lies at which offset of which file, and has a CRC-32 for each block of
`BLOCK_BYTES`, so that whoever needs a part of it reads and checks these blocks alone. The manifest has its own CRC.

>>> weight = StoredState("F32", (StoredPiece(Rect((0, 0), (2, 3)), "a.safetensors", 80, (123,)),))
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
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Literal, Self

from shardwise.foreign import OneLineError
from shardwise.holdings import PARAM, Kind
from shardwise.layout.pieces import Rect, Shape

FORMAT: Final = "shardwise-checkpoint"
VERSION: Final = 1
MANIFEST_NAME: Final = "manifest.json"
BLOCK_BYTES: Final = 2**20

# What a checkpoint is of: everything a run needs to go on; the trainable parameters with theirs; parameters alone.
Contents = Literal["all", "trainable", "weights"]

# Bytes an element, by safetensors' names.
ITEM_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {
        "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8,
        "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
    }
)  # fmt: skip


class CheckpointError(OneLineError):
    """A checkpoint cannot be saved, or loaded into this engine; the message says what, where, and what would help."""


class DamagedError(CheckpointError):
    """A checkpoint is not what was written: a file is missing, torn or changed. Another one may be whole."""


@dataclass(frozen=True)
class StoredPiece:
    """One rectangle of a tensor in a file.

    Attributes:
        rect: of the tensor.
        file: its name in the folder.
        offset: of its first byte, from the start of the file; its elements follow one another row-major.
        crcs: the CRC-32 of each `BLOCK_BYTES` of its bytes, the last block being what is left; none where nothing is
            known of them, as in files of others.
        is_transposed: the file has the transposed rectangle, of a 2-D tensor.
    """

    rect: Rect
    file: str
    offset: int
    crcs: tuple[int, ...] = ()
    is_transposed: bool = False


@dataclass(frozen=True)
class StoredState:
    """One state of a tensor: pieces that cover it once, or one number.

    Attributes:
        dtype: safetensors' name of it, such as BF16; of a number also `int` or `float`.
        pieces: in no particular order.
        value: of a state that is one number.
        codec: how the elements are encoded.
    """

    dtype: str
    pieces: tuple[StoredPiece, ...] = ()
    value: float | None = None
    codec: str = "identity"


@dataclass(frozen=True)
class StoredTensor:
    """A parameter with its states, or a buffer.

    Attributes:
        name: the first of its fully qualified names in the unmodified model.
        aliases: its other names.
        shape: of the whole tensor.
        states: by name; `param` is its values.
        kind: as in `Holding`.
        trainable: whether it had gradients.
    """

    name: str
    aliases: tuple[str, ...]
    shape: Shape
    states: Mapping[str, StoredState]
    kind: Kind = "parameter"
    trainable: bool = True


@dataclass(frozen=True)
class Manifest:
    """A whole checkpoint; see the module's example.

    Attributes:
        step: optimizer steps taken.
        tensors: parameters, buffers and what is some rank's alone.
        files: bytes of each file, by name.
        contents: what it is of.
        config: the resolved config of the run.
        layout: how the states lay over the ranks that wrote it, for the reader's eyes; nothing depends on it.
        trajectory: what else a run needs to go on: optimizer options, scheduler, loss scale, world size.
        extra: the user's.
        model: what a Hugging Face folder's config.json says, where the model has that; and the model's class.
        saved_at: time of day, UTC, ISO 8601.
        library: the version that wrote it.
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
        """The JSON of `manifest.json`, its checksum first."""
        with _without_collection():
            body = json.dumps(_to_json(self), separators=(",", ":"))
        return f"{_PREFIX}{_crc_text(body)}{_MIDDLE}{body}{_SUFFIX}"

    @classmethod
    def from_text(cls, text: str, where: str) -> Self:
        """Read what `to_text` wrote.

        Args:
            text: of the file.
            where: its path, for messages.

        Raises:
            DamagedError: it is not what was written.
            CheckpointError: a newer version has written it.
        """
        cure = "use an older checkpoint"
        head = len(_PREFIX) + 8 + len(_MIDDLE)
        body = text[head : len(text) - len(_SUFFIX)]
        if text[:head] != f"{_PREFIX}{_crc_text(body)}{_MIDDLE}" or not text.endswith(_SUFFIX):
            raise DamagedError(f"{where} does not match its checksum; {cure}")
        try:
            with _without_collection():
                values = json.loads(body)
            written_by = values["format"], int(values["version"])
        except (ValueError, KeyError, TypeError):
            raise DamagedError(f"{where} is no manifest of a {FORMAT}; {cure}") from None
        if written_by[0] != FORMAT or written_by[1] > VERSION:
            raise CheckpointError(
                f"{where} is of {written_by[0]} version {written_by[1]}, this library reads {FORMAT} up to {VERSION}; "
                "install a newer shardwise"
            )
        try:
            return _manifest_from_json(cls, values)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(
                f"{where} lacks what version {VERSION} has: {type(error).__name__} {error}; {cure}"
            ) from None


@dataclass(frozen=True)
class RankPart:
    """What one rank has written: its file and the tensors in it; the parts of all ranks make the manifest.

    Attributes:
        file: its name; empty where the rank wrote none.
        num_bytes: of the file.
        tensors: those of which it has pieces or numbers.
    """

    file: str
    num_bytes: int
    tensors: tuple[StoredTensor, ...]

    def to_text(self) -> str:
        """As JSON."""
        with _without_collection():
            tensors = [tensor_to_json(tensor, _state_to_json) for tensor in self.tensors]
            return json.dumps([self.file, self.num_bytes, tensors])

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read what `to_text` wrote."""
        with _without_collection():
            file, num_bytes, tensors = json.loads(text)
            return cls(file, num_bytes, tuple(map(_tensor_from_json, tensors)))


def entry_key(name: str, shape: Shape, state: str, rect: Rect) -> str:
    """The name of an entry of a file: of the tensor, the state unless that is `param`, the rectangle unless it is all.

    >>> entry_key("up.weight", (4, 3), "param", Rect((0, 0), (4, 3)))
    'up.weight'
    >>> entry_key("up.weight", (4, 3), "exp_avg", Rect((0, 0), (2, 3)))
    'up.weight/exp_avg[0:2, 0:3]'
    """
    of_state = name if state == PARAM else f"{name}/{state}"
    return of_state if rect == Rect.whole(shape) else f"{of_state}{rect}"


def merge_parts(parts: Iterable[RankPart]) -> tuple[tuple[StoredTensor, ...], dict[str, int]]:
    """Tensors, in the order in which they come up first, and bytes by file, of all ranks together."""
    first: dict[str, StoredTensor] = {}
    states: dict[str, dict[str, StoredState]] = {}
    pieces: dict[tuple[str, str], list[StoredPiece]] = {}
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
    """Let Python not look for garbage inside: it would go through a million new values again and again, and find none.

    Manifests of hundreds of ranks are read, made and merged in a quarter of the time. Threads may do so at once, and
    beside training: only who found it enabled enables it again.
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
    with _without_collection():
        tensors = tuple(map(_tensor_from_json, values["tensors"]))
    return cls(tensors=tensors, **{key: values[key] for key in keys})


def tensor_to_json(tensor: StoredTensor, state_to_json: Callable[[StoredState], dict[str, Any]]) -> dict[str, Any]:
    """A tensor as JSON, its states as `state_to_json` says."""
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
        StoredPiece(
            rect=Rect(tuple(each["start"]), tuple(each["stop"])),
            file=each["file"],
            offset=each["offset"],
            crcs=tuple(int(each["crc32"][at : at + 8], 16) for at in range(0, len(each["crc32"]), 8)),
        )
        for each in values["pieces"]
    )
    return StoredState(values["dtype"], pieces, codec=values["codec"])
