"""Keeps where a data loader is: the state of any loader that has `state_dict` and `load_state_dict`, as text.

A loader whose state counts the samples of all ranks goes on with any number of them; that of any other is of its rank.

>>> decoded(json.loads(json.dumps(encoded({"at": (1, 2), 3: torch.tensor([4])}))))
{'at': (1, 2), 3: tensor([4])}
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint.load import own_tensors
from shardwise.checkpoint.manifest import CheckpointError, Manifest
from shardwise.checkpoint.reader import read_json
from shardwise.checkpoint.shared_values import TooDeepError, TooManyValuesError, ValueCounter
from shardwise.config.untrusted_files import MAX_DEPTH, UntrustedFileError, check_nesting
from shardwise.layout.mesh_shape import DATA_AXES, MeshShape

NAME: Final = "data"
"""Names the tensor that holds a rank's text."""

# A state with one of these counts the samples of all ranks: the second is of MosaicML's streams.
_OF_ALL_RANKS: Final = ("num_samples", "sample_in_epoch")
_MANY_VALUES: Final = 1 << 22
_TUPLE, _ITEMS, _BYTES, _TENSOR, _ARRAY = "__tuple__", "__items__", "__bytes__", "__tensor__", "__array__"


class DataLoaderState(Protocol):
    """Is a loader that can say where it is, such as torchdata's StatefulDataLoader or a stream of Hugging Face's."""

    def state_dict(self) -> dict[str, Any]:
        """Return where it is."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Go on there."""


@dataclass(frozen=True)
class PositionKind:
    """Says whose position a checkpoint has: that of all data ranks together, or one of each of so many."""

    loader: str
    is_global: bool
    num_data_ranks: int


def read_state(loader: DataLoaderState, mesh: MeshShape) -> tuple[Tensor, dict[str, Any]]:
    """Return the text of a loader's state as a 1-D uint8 tensor, and the kind of its position for the manifest.

    Raises:
        CheckpointError: the loader has a state that text cannot keep.
    """
    state = loader.state_dict()
    try:
        ValueCounter(_parts, _MANY_VALUES, MAX_DEPTH).count(state)
        text = json.dumps(encoded(state))
        check_nesting(text, "the state", "")  # as when it is read again
    except (TooManyValuesError, TooDeepError, UntrustedFileError):
        raise CheckpointError(
            "loader-state-too-large",
            f"the state of {type(loader).__name__} has more than {_MANY_VALUES:,} values, those that occur repeatedly "
            "counted each time, or is nested too deeply; leave what it can compute out of state_dict",
        ) from None
    is_global = isinstance(state, Mapping) and any(key in state for key in _OF_ALL_RANKS)
    kind = PositionKind(type(loader).__name__, is_global, mesh.num_data_ranks)
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8), asdict(kind)


def restore(loader: DataLoaderState | None, folder: Path, manifest: Manifest, mesh: MeshShape, rank: int) -> None:
    """Let a loader go on where a checkpoint says.

    Args:
        loader: of this rank; None where the user gave none.

    Raises:
        CheckpointError: the checkpoint has no position, or one of each of another number of data ranks.
    """
    if loader is None:
        return
    try:
        kind = PositionKind(**manifest.trajectory["data"])
    except (KeyError, TypeError):
        raise CheckpointError(
            "no-data-position", f"{folder} has no position of a loader; save with data=..., or load without it"
        ) from None
    if not kind.is_global and kind.num_data_ranks != mesh.num_data_ranks:
        raise CheckpointError(
            "data-position-ranks",
            f"the position of {kind.loader} is one of each of {kind.num_data_ranks} data ranks, and this run has "
            f"{mesh.num_data_ranks}; run on {kind.num_data_ranks}, or use shardwise.stream_loader or "
            "shardwise.data_loader, which count the samples of all ranks",
        )
    saved = MeshShape(**(manifest.layout.get("mesh") or {}))
    source = 0 if kind.is_global else saved.ranks_along(DATA_AXES, 0)[mesh.data_index(rank)]
    stored = own_tensors(manifest, source).get(NAME)
    if stored is None:
        raise CheckpointError("no-data-position", f"{folder} lacks the position of rank {source}; use an older one")
    values = read_json(folder, stored, "the position of the data")
    try:
        state = decoded(values)
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged one makes of base64's, torch's and NumPy's functions
        raise CheckpointError(
            "data-position-malformed",
            f"{folder}: the position of the data cannot be read ({type(error).__name__}: {error}); use an older "
            "checkpoint, or load without data=",
        ) from None
    loader.load_state_dict(state)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def encoded(value: Any, where: str = "state") -> Any:
    """Return a value as JSON keeps it; `decoded` makes it what it was.

    Raises:
        CheckpointError: it holds something else than numbers, text, bytes, arrays and tensors.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        pairs = [[encoded(key), encoded(each, f"{where}[{key!r}]")] for key, each in value.items()]
        is_plain = all(isinstance(key, str) and not key.startswith("__") for key in value)
        return dict(pairs) if is_plain else {_ITEMS: pairs}
    if isinstance(value, list | tuple):
        items = [encoded(each, f"{where}[{index}]") for index, each in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return encoded(value.item(), where)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {_ARRAY: encoded(torch.from_numpy(np.ascontiguousarray(value)))}
    if isinstance(value, Tensor):
        data = value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), list(value.shape), encoded(data)]}
    raise CheckpointError(
        "loader-state-not-plain",
        f"{where} of the loader is a {type(value).__name__}, but a checkpoint keeps numbers, text, bytes, arrays and "
        "tensors; leave it out of state_dict",
    )


def decoded(value: Any) -> Any:
    """Return the value that `encoded` was given."""
    if isinstance(value, list):
        return [decoded(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_ITEMS}:
        return {decoded(key): decoded(each) for key, each in value[_ITEMS]}
    if value.keys() == {_TUPLE}:
        return tuple(decoded(each) for each in value[_TUPLE])
    if value.keys() == {_BYTES}:
        return base64.b64decode(value[_BYTES])
    if value.keys() == {_ARRAY}:
        return decoded(value[_ARRAY]).numpy()
    if value.keys() == {_TENSOR}:
        name, shape, data = value[_TENSOR]
        dtype = getattr(torch, str(name), None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError("loader-state-dtype", f"{name} is no dtype; use an older checkpoint")
        content = bytearray(decoded(data))
        return (torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)).reshape(shape)
    return {key: decoded(each) for key, each in value.items()}
