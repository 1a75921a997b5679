"""Describes a checkpoint that DeepSpeed has written as if it were ours; nothing that a file of it contains is executed.

Files of `torch.save` have the bytes of each storage in one piece. So only their pickles are read here, by torch's
weights-only loader, with stand-ins for the few classes of DeepSpeed that they name. The manifest that comes out says
which piece of which parameter is where in which file, and every rank reads its own pieces as it does from our files.

    ZeRO 1 and 2   a group's parameters follow one another in one vector; each rank has a part of it
    ZeRO 3         each rank has a vector: of each parameter a slice of ceil(elements / ranks), one after the other
    universal      each state of each parameter has a file
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from shardwise.checkpoint.manifest import (
    CheckpointError,
    DamagedError,
    Manifest,
    StoredChunk,
    StoredState,
    StoredTensor,
)
from shardwise.checkpoint.safetensors_io import dtype_name
from shardwise.checkpoint.tagged_json import NoWordError, to_json
from shardwise.checkpoint.torch_files import read_torch_file
from shardwise.config.errors import CodedError
from shardwise.config.untrusted_files import open_regular
from shardwise.layout.mesh_shape import AXES
from shardwise.layout.slicing import Rect, Shape, flat_range_to_rects
from shardwise.runtime.state_shards import PARAM, Kind
from shardwise.runtime.torch_private import file_offset

log = logging.getLogger("shardwise")

_MODEL: Final = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt", re.ASCII)
_OPTIMIZER: Final = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt", re.ASCII)
# Files of pipeline and expert parallelism have only a part of the model each.
_OF_PARTS: Final = re.compile(r"(layer_|expp_rank_).*\.pt")
_UNIVERSAL: Final = "zero"
# Keys of the masters: of ZeRO 1 and 2, of ZeRO 3.
_PARTITIONED, _SLICED = "single_partition_of_fp32_groups", "fp32_flat_groups"
_FIX: Final = "use an older checkpoint, or get the folder again"
# What DeepSpeed itself puts beside the user's `client_state`.
_OWN_KEYS: Final = frozenset(
    (
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
        *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps"),
        *("global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version", "sparse_tensor_module_names"),
        *("checkpoint_parallel_dimensions", "universal_checkpoint_info"),
    )
)
_PRECISIONS: Final[Mapping[Any, str]] = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class _StandIn:
    """Stands for an object of a class of DeepSpeed: it has the attributes, and no methods."""


# All that a checkpoint of DeepSpeed names besides tensors and plain values; a stage is a number.
_STAND_INS: Final[tuple[Any, ...]] = (
    (_StandIn, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_StandIn, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_StandIn, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
)


@dataclass(frozen=True)
class RunState:
    """Holds what a checkpoint of DeepSpeed says of its run: the user's `client_state`, the schedule's state, counters.

    Steps are counted with those that an overflow has skipped.
    """

    client_state: dict[str, Any]
    lr_scheduler: dict[str, Any] | None
    global_steps: int
    global_samples: int
    skipped_steps: int

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> RunState:
        """Return it from the content of a file of the model."""
        client_state = {key: value for key, value in model.items() if key not in _OWN_KEYS}
        numbers = [int(model.get(key) or 0) for key in ("global_steps", "global_samples", "skipped_steps")]
        return cls(client_state, model.get("lr_scheduler"), *numbers)


def read_run_state(folder: Path) -> RunState:
    """Return what the checkpoint in a step's folder says of its run; tensors in it have their values.

    Raises:
        CheckpointError: a file wants to run code, which was refused.
        DamagedError: the folder is not what DeepSpeed writes.
    """
    with _named_errors(folder):
        return RunState.of(_load(folder, _Files.of(folder).models[0], with_values=True))


def describe(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint of ZeRO 1, 2 or 3, or a universal one, in a folder such as `global_step100`.

    Its names are the model's, its `extra` is the user's `client_state`, as far as that is JSON.

    Raises:
        CheckpointError: a file wants to run code, which was refused; or the checkpoint is of stage 0, or of tensor,
            pipeline or expert parallelism.
        DamagedError: the folder is not what DeepSpeed writes, or a file is missing.
    """
    with _named_errors(folder):
        files = _Files.of(folder)
        models = [_load(folder, name) for name in files.models]
        model, run = models[0], RunState.of(models[0])
        read = _read_universal if files.is_universal else _read_partitions
        trained, optimizer, num_ranks = read(folder, files, model)
        others = _read_others(models, files.models, {each.name for each in trained})
        tied = (model.get("shared_params") or {}).items()
        aliases = {each.name: tuple(name for name, owner in tied if owner == each.name) for each in (*trained, *others)}
        params = [each for name, each in model["module"].items() if name not in model["buffer_names"]]
        dtypes = [param.dtype for param in params if isinstance(param, Tensor)]
        return Manifest(
            step=run.global_steps,
            tensors=tuple(replace(each, aliases=aliases[each.name]) for each in (*trained, *others)),
            files={name: (folder / name).stat().st_size for name in files.listed},
            layout={
                "mesh": {**dict.fromkeys(AXES, 1), "dp_shard": num_ranks},
                "stage": int(optimizer.get("zero_stage", 0)),
                "precision": {"param": next((_PRECISIONS[dtype] for dtype in dtypes if dtype in _PRECISIONS), "fp32")},
            },
            trajectory={
                "world_size": num_ranks,
                "normaliser": 0.0,
                "scaler": _loss_scale(optimizer.get("loss_scaler")),
                "optimizer": {"kind": "", "groups": _options(optimizer)},
                "scheduler": _schedule(run.lr_scheduler),
            },
            extra=_typed(run.client_state),
            library=f"DeepSpeed {model.get('ds_version', '')}".strip(),
        )


@dataclass(frozen=True)
class _Files:
    """Names the files of a folder: those of the model and of the optimizer, by rank, and all that have tensors."""

    models: tuple[str, ...]
    optimizers: tuple[str, ...]
    listed: tuple[str, ...]
    is_universal: bool

    @classmethod
    def of(cls, folder: Path) -> _Files:
        names = sorted(path.name for path in folder.iterdir())
        is_universal = (folder / _UNIVERSAL).is_dir()
        found = [[each for each in map(kind.fullmatch, names) if each] for kind in (_MODEL, _OPTIMIZER)]
        of_parts = [each[0] for kind in found for each in kind if int(each[2])]
        of_parts += filter(_OF_PARTS.fullmatch, names)
        if of_parts and not is_universal:
            raise CheckpointError(
                "deepspeed-model-parallel",
                f"{folder / of_parts[0]} is of tensor, pipeline or expert parallelism; convert the checkpoint by "
                "DeepSpeed's ds_to_universal, and load what that writes",
            )
        by_rank = [{int(each[1] or 0): each[0] for each in kind if not int(each[2])} for kind in found]
        models, optimizers = (tuple(kind[rank] for rank in sorted(kind)) for kind in by_rank)
        if not models:
            raise DamagedError("file-missing", f"{folder} has no file of the model's states; {_FIX}")
        parts = sorted(_universal_files(folder)) if is_universal else []
        return cls(models, optimizers, (*models, *(parts if is_universal else optimizers)), is_universal)


def _universal_files(folder: Path) -> Iterator[str]:
    """Yield the files of a universal checkpoint, each by its path in the folder; a link may not lead out of that."""
    home, universal = Path(os.path.realpath(folder)), folder / _UNIVERSAL
    for path in (universal, *universal.iterdir()):
        real = Path(os.path.realpath(path))
        if not real.is_relative_to(home):
            raise DamagedError("link-leads-out", f"{path} is a link to {real}, out of the checkpoint; {_FIX}")
        if path.is_dir() and path != universal:
            yield from (str(each.relative_to(folder)) for each in path.rglob("*.pt"))
        elif path.suffix == ".pt":
            yield str(path.relative_to(folder))


@dataclass(frozen=True)
class _Flat:
    """Says where the elements of a tensor are, row-major: in which file, from which byte on."""

    file: str
    offset: int
    numel: int
    dtype: torch.dtype

    @classmethod
    def of(cls, file: str, tensor: Tensor) -> _Flat:
        if not tensor.is_contiguous():
            raise CheckpointError(
                "deepspeed-not-contiguous",
                f"{file} has a tensor of strides {tensor.stride()}, whose elements are not in order; make it "
                "contiguous() before DeepSpeed saves it",
            )
        return cls(file, file_offset(tensor), tensor.numel(), tensor.dtype)


# Equally long states of some elements, the masters as `param`, and numbers that belong to all of them.
_Part = Mapping[str, _Flat | StoredState]


class _Slice(NamedTuple):
    """Says that `numel` elements of a parameter from `first` on are those of a part from `start` on."""

    part: _Part
    first: int
    start: int
    numel: int


def _cut(parts: Iterable[_Part], first: int, start: int, numel: int) -> Iterator[_Slice]:
    """Yield the slices of elements of parts that follow one another; they are a parameter's from `first` on."""
    at = 0
    for part in parts:
        low, high = max(start, at), min(start + numel, at + _numel(part))
        if low < high:
            yield _Slice(part, first + low - start, low - at, high - low)
        at += _numel(part)


def _part(folder: Path, states: Mapping[str, tuple[str, Any]]) -> _Part:
    """Return a part of the file and the value of each of its states; the optimizer's may be padded."""
    numel = states[PARAM][1].numel()
    part: dict[str, _Flat | StoredState] = {}
    for state, (file, value) in states.items():
        if isinstance(value, Tensor) and value.dim() and value.numel() >= numel:
            part[state] = replace(_Flat.of(file, value), numel=numel)
        elif isinstance(value, int | float) or (isinstance(value, Tensor) and not value.dim()):
            part[state] = _number(folder, file, state, value)
        elif value is not None:
            raise CheckpointError(
                "deepspeed-state-shape",
                f"{folder / file} has a state {state} that is neither a number nor as long as its parameters; load the "
                "weights alone, which zero_to_fp32.py writes",
            )
    return part


def _number(folder: Path, file: str, state: str, value: Tensor | float) -> StoredState:
    """Return a state that is one number; of a tensor it reads the value."""
    dtype = "float" if isinstance(value, float) else "int"
    if isinstance(value, Tensor):
        dtype = dtype_name(value.dtype)
        with open(open_regular(folder / file, folder), "rb") as opened:
            opened.seek(file_offset(value))
            value = torch.frombuffer(bytearray(opened.read(value.itemsize)), dtype=value.dtype).item()
    # Optimizers of torch count in a tensor.
    return StoredState("F32", value=float(value)) if state == "step" else StoredState(dtype, value=value)


def _numel(part: _Part) -> int:
    masters = part[PARAM]
    return masters.numel if isinstance(masters, _Flat) else 0


def _read_partitions(
    folder: Path, files: _Files, model: Mapping[str, Any]
) -> tuple[list[StoredTensor], Mapping[str, Any], int]:
    """Return the trained parameters of ZeRO 1, 2 or 3, other state of the optimizer, and the number of ranks."""
    groups = model.get("param_shapes")
    if not files.optimizers or groups is None:
        raise CheckpointError(
            "deepspeed-stage-0", f"{folder} has no states of ZeRO; save it under stage 1, 2 or 3 of DeepSpeed"
        )
    saved = [_load(folder, name)["optimizer_state_dict"] for name in files.optimizers]
    counts = saved[0]["partition_count"]
    if ({counts} if isinstance(counts, int) else set(counts)) != {len(saved)}:
        raise DamagedError("file-missing", f"{folder} has {len(saved)} of {counts} files of optimizer states; {_FIX}")
    parts = [_parts(folder, name, each) for name, each in zip(files.optimizers, saved, strict=True)]
    if _SLICED in saved[0]:
        shapes = {name: shape for group in groups for name, shape in group.items()}
        return _sliced(parts, shapes, trainable=True), saved[0], len(saved)
    tensors = []
    paddings = saved[0].get("param_alignment_paddings") or [[0] * len(group) for group in groups]
    for at, (group, padding) in enumerate(zip(groups, paddings, strict=True)):
        vector, start = [each[at] for each in parts], 0
        for (name, shape), num_padding in zip(group.items(), padding, strict=True):
            tensors.append(_tensor(name, shape, _cut(vector, 0, start, math.prod(shape))))
            start += math.prod(shape) + num_padding
    return tensors, saved[0], len(saved)


def _parts(folder: Path, file: str, saved: Mapping[str, Any]) -> list[_Part]:
    """Return what a rank has of each group; in ZeRO 3 of each group of slices."""
    masters, key = (_SLICED, "optimizer_state_dict") if _SLICED in saved else (_PARTITIONED, "base_optimizer_state")
    states = saved[key]["state"] if isinstance(saved[key], Mapping) else dict(enumerate(saved[key]))
    named = [{**states.get(at, {}), PARAM: master} for at, master in enumerate(saved[masters])]
    return [_part(folder, {state: (file, value) for state, value in each.items()}) for each in named]


def _sliced(vectors: Sequence[Sequence[_Part]], shapes: Mapping[str, Shape], *, trainable: bool) -> list[StoredTensor]:
    """Return the parameters of which each rank's vector has a slice, one after the other."""
    tensors, start = [], 0
    for name, shape in shapes.items():
        whole = math.prod(shape)
        numel = -(-whole // len(vectors))
        firsts = [min(rank * numel, whole) for rank in range(len(vectors))]
        pairs = zip(vectors, firsts, strict=True)
        slices = [each for vector, first in pairs for each in _cut(vector, first, start, min(numel, whole - first))]
        tensors.append(_tensor(name, shape, slices, trainable=trainable))
        start += numel
    return tensors


def _read_universal(
    folder: Path, files: _Files, model: Mapping[str, Any]
) -> tuple[list[StoredTensor], Mapping[str, Any], int]:
    """Return the trained parameters of a universal checkpoint, other state of the optimizer, the number of ranks."""
    found: dict[str, dict[str, tuple[str, Any]]] = {}
    optimizer: Mapping[str, Any] = {}
    steps: dict[str, tuple[str, Any]] = {}  # of ZeRO 3 they have no files of their own
    for path in map(Path, files.listed[len(files.models) :]):
        content = _load(folder, str(path))
        if path.parent.name == _UNIVERSAL:
            optimizer = content
            inner = content.get("optimizer_state_dict", {}).get("state", {}).values()
            steps = next(({"step": (str(path), each["step"])} for each in inner if "step" in each), {})
            continue
        value = content[PARAM] if isinstance(content, Mapping) else content
        found.setdefault(path.parent.name, {})[PARAM if path.stem == "fp32" else path.stem] = str(path), value
    tensors = []
    others = {*model["buffer_names"], *(model.get("shared_params") or {})}
    shapes: dict[str, tuple[int, ...]] = {
        name: shape for group in model.get("param_shapes") or () for name, shape in group.items()
    }
    for name, states in ((name, states) for name, states in found.items() if name not in others):
        master, trainable = states[PARAM][1], len(states) > 1
        # Of ZeRO 3 they are flat. Of tensor parallelism the model's shape is that of a part.
        shape = shapes.get(name, ())
        shape = shape if math.prod(shape) == master.numel() else tuple(master.shape)
        flat = {each: (file, value.reshape(-1)) for each, (file, value) in states.items() if each != "step"}
        part = _part(folder, {**(steps if trainable else {}), **states, **flat})
        tensors.append(_tensor(name, shape, [_Slice(part, 0, 0, math.prod(shape))], trainable=trainable))
    return tensors, optimizer, int(model.get("dp_world_size") or 1)


def _read_others(models: Sequence[Mapping[str, Any]], files: Sequence[str], known: set[str]) -> list[StoredTensor]:
    """Return the buffers and the parameters that are not trained, from the content of the model's files."""
    model, tensors = models[0], []
    shapes: Mapping[str, Shape] = (model.get("frozen_param_shapes") or {}) if files[0].startswith("zero") else {}
    if shapes:
        pairs = [(file, each["frozen_param_fragments"]) for file, each in zip(files, models, strict=True)]
        vectors = [[{PARAM: _Flat.of(file, each[name])} for name in shapes] for file, each in pairs]
        tensors = _sliced(vectors, shapes, trainable=False)
    known = {*known, *shapes, *(model.get("shared_params") or {})}
    for name, value in model["module"].items():
        if name not in known and isinstance(value, Tensor):
            slices = [_Slice({PARAM: _Flat.of(files[0], value)}, 0, 0, value.numel())]
            kind: Kind = "buffer" if name in model["buffer_names"] else "parameter"
            tensors.append(_tensor(name, value.shape, slices, kind, trainable=False))
    return tensors


def _tensor(
    name: str, shape: Shape, slices: Iterable[_Slice], kind: Kind = "parameter", *, trainable: bool = True
) -> StoredTensor:
    """Return a tensor whose elements are in these slices, which cover it in order."""
    whole = Rect.whole(tuple(shape))
    states, pieces = {PARAM: StoredState("F32")}, defaultdict[str, list[StoredChunk]](list)
    for part, first, start, numel in slices:
        rects = flat_range_to_rects(whole, first, first + numel)
        for state, flat in part.items():
            if isinstance(flat, StoredState):
                states[state] = flat
                continue
            starts = [flat.offset + (start + rect.local_offset) * flat.dtype.itemsize for rect in rects]
            pieces[state] += [StoredChunk(rect.rect, flat.file, at) for rect, at in zip(rects, starts, strict=True)]
            states[state] = StoredState(dtype_name(flat.dtype))
    for state in (state for state, each in states.items() if each.value is None):
        if (numel := sum(piece.rect.numel for piece in pieces[state])) != whole.numel:
            raise DamagedError(
                "elements-missing", f"of {name} {state} there are {numel} elements of {whole.numel}; {_FIX}"
            )
        states[state] = replace(states[state], pieces=tuple(pieces[state]))
    return StoredTensor(str(name), (), whole.shape, states, kind, trainable)


def _loss_scale(scaler: Any) -> dict[str, float]:
    """Return the state of a dynamic loss scale: here the first good step is number 0."""
    if not getattr(scaler, "dynamic", False):
        return {}
    num_good = int(scaler.cur_iter) - int(scaler.last_overflow_iter) - 1
    return {
        "scale": float(scaler.cur_scale),
        "num_good_steps": (num_good - 1) % int(scaler.scale_window) if num_good else -1,
        "num_overflows_left": int(getattr(scaler, "cur_hysteresis", 1)),
    }


def _options(optimizer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the options of the optimizer's groups."""
    keys = ("base_optimizer_state", "optimizer_state_dict")
    inner = next((optimizer[key] for key in keys if isinstance(optimizer.get(key), Mapping)), optimizer)
    groups: Sequence[Mapping[str, Any]] = inner.get("param_groups", ())
    return [_plain({key: value for key, value in group.items() if key != "params"}) for group in groups]


def _schedule(state: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the state of a schedule; DeepSpeed's own count from -1, torch's from 0."""
    if state is None:
        return None
    found = _plain(state)
    if "last_batch_iteration" in found:
        found["last_epoch"] = found["last_batch_iteration"] + 1
    return {"kind": "", "state": found}


def _typed(client_state: Mapping[str, Any]) -> Any:
    """Return the user's values as a manifest has them, without those that it has no word for."""
    found = {}
    for key, value in client_state.items():
        try:
            to_json(value, key)
        except NoWordError as error:
            log.warning("of DeepSpeed's checkpoint client_state is shown without %s", error)
        else:
            found[key] = value
    return to_json(found, "client_state")


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that JSON can hold, as it would return them."""
    found = {}
    for key, value in values.items():
        try:
            found[str(key)] = json.loads(json.dumps(value))
        except (TypeError, ValueError, RecursionError):
            log.warning("%s of DeepSpeed's checkpoint is a %s, which JSON cannot hold", key, type(value).__name__)
    return found


def _load(folder: Path, name: str, *, with_values: bool = False) -> Any:
    return read_torch_file(folder / name, folder, _STAND_INS, with_values=with_values)


@contextmanager
def _named_errors(folder: Path) -> Iterator[None]:
    """Turn what a malformed folder raises into a `DamagedError` that names it."""
    try:
        yield
    except CodedError:
        raise
    except OSError as error:
        raise DamagedError(
            "file-unreadable", f"cannot read {error.filename or folder}: {error.strerror}; {_FIX}"
        ) from error
    except Exception as error:  # a value that is missing, or of another type or length
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise DamagedError("deepspeed-malformed", f"{folder} is not what DeepSpeed writes: {what}; {_FIX}") from error
