"""Checkpoints made by hand, for what needs no engine."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from shardwise.checkpoint.commit import begin, commit, read_manifest
from shardwise.checkpoint.manifest import Manifest, entry_key, merge_parts
from shardwise.checkpoint.writer import write_state_shards
from shardwise.layout.slicing import LocalTensor, Rect, flat_range_to_rects
from shardwise.runtime.state_shards import ScalarState, StateShard, TensorFlatState

STATES = ("param", "exp_avg")
SHAPES = {"embed.weight": (40, 16), "up.weight": (600, 1000), "up.bias": (7,), "scale": ()}


def values_of(shapes=None, seed=0) -> dict[tuple[str, str], torch.Tensor]:
    """Values of every state, those of a buffer and of two ranks among them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = SHAPES if shapes is None else shapes
    values = {
        (name, state): torch.randn(shape, generator=generator) for name, shape in shapes.items() for state in STATES
    }
    values["positions", "param"] = torch.arange(30)
    for rank in (0, 1):
        values[f"rng of rank {rank}", "param"] = torch.randint(0, 255, (50,), dtype=torch.uint8, generator=generator)
    return values


def save(root: Path, values, num_ranks: int = 2, step: int = 100, **attributes) -> Path:
    """Write a checkpoint as ranks would that hold flat ranges of every tensor."""
    temporary, parts = begin(root, step), []
    for rank in range(num_ranks):
        state_shards, numbers = [], []
        for (name, state), tensor in values.items():
            local = LocalTensor.whole(tuple(tensor.shape))
            bounds = [local.numel * each // num_ranks for each in (rank, rank + 1)]
            kind = "buffer" if name == "positions" else "rank" if name.startswith("rng") else "parameter"
            if kind != "parameter":
                mine = rank == (num_ranks - 1 if name.endswith("1") else 0)
                bounds = [0, local.numel] if mine else [0, 0]
            pieces = flat_range_to_rects(Rect.whole(tuple(tensor.shape)), *bounds)
            aliases = ("head.weight",) if name == "embed.weight" else ()
            flat = tensor.reshape(-1)[slice(*bounds)].clone()
            state_shards.append(
                StateShard(name, aliases, state, tuple(tensor.shape), TensorFlatState(flat), pieces, pieces, kind)
            )
            if pieces and kind == "parameter" and state == "param":
                numbers.append(ScalarState(name, "step", float(step), "float32"))
        parts.append(
            write_state_shards(temporary, f"rank-{rank:05d}-of-{num_ranks:05d}.safetensors", state_shards, numbers)
        )
    tensors, files = merge_parts(parts)
    return commit(temporary, root, Manifest(step=step, tensors=tensors, files=files, **attributes))


def load(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Whole tensors, read by the public library alone."""
    files, whole = {}, {}
    for tensor in read_manifest(folder).tensors:
        for name, state in tensor.states.items():
            for piece in state.pieces:
                if piece.file not in files:
                    files[piece.file] = load_file(folder / piece.file)
                part = files[piece.file][entry_key(tensor.name, tensor.shape, name, piece.rect)]
                target = whole.setdefault((tensor.name, name), torch.zeros(tensor.shape, dtype=part.dtype))
                target[piece.rect.slices_in(Rect.whole(tensor.shape))] = part
    return whole


def assert_equal(got, expected) -> None:
    assert got.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(got[key], tensor), key


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)
