"""Offers `deepspeed.utils.zero_to_fp32`: the fp32 weights of a checkpoint, ours or DeepSpeed's, without an engine.

`write_zero_to_fp32` puts a script of that name beside our checkpoints, with the command line of DeepSpeed's.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwise.checkpoint.find import newest_whole
from shardwise.checkpoint.manifest import StoredTensor
from shardwise.checkpoint.reader import ChunkReader
from shardwise.checkpoint.safetensors_io import named_dtype
from shardwise.config.resolve import ConfigError
from shardwise.layout.slicing import LocalTensor
from shardwise.runtime.state_shards import PARAM

SCRIPT_NAME: Final = "zero_to_fp32.py"
_SCRIPT: Final = '''#!/usr/bin/env python
"""Write the fp32 weights of a checkpoint in this folder: python zero_to_fp32.py . OUTPUT_DIR [--safe_serialization]"""

from shardwise.compat.deepspeed.utils.zero_to_fp32 import main

if __name__ == "__main__":
    main()
'''
_UNITS: Final = MappingProxyType(
    {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
)


def write_zero_to_fp32(folder: str | Path) -> None:
    """Write the script into a folder of checkpoints, as DeepSpeed's `save_checkpoint` does."""
    path = Path(folder, SCRIPT_NAME)
    path.write_text(_SCRIPT)
    path.chmod(0o755)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Return the weights and buffers of a checkpoint in host memory, floating ones in fp32.

    Args:
        checkpoint_dir: the folder with `latest`, or one checkpoint.
        tag: of the checkpoint; None for the newest.
        exclude_frozen_parameters: leave out what was not trained.
        lazy_mode: has no effect: DeepSpeed returns values that are read later, by their `contiguous()`.
    """
    folder, tensors = _stored(checkpoint_dir, tag, exclude_frozen_parameters)
    with ChunkReader(folder) as reader:
        return {
            name: value for each in tensors for value in [_read(reader, each)] for name in (each.name, *each.aliases)
        }


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Load the fp32 weights of a checkpoint into a model that no engine has; return it, on the CPU.

    Args:
        model: of the checkpoint.
        checkpoint_dir: as in `get_fp32_state_dict_from_zero_checkpoint`.
        tag: as there.
    """
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the fp32 weights of a checkpoint as files that `from_pretrained` reads, one in memory at a time.

    Args:
        checkpoint_dir: as in `get_fp32_state_dict_from_zero_checkpoint`.
        output_dir: the folder of the files; it is made where it is missing.
        max_shard_size: bytes of a file, such as "5GB".
        safe_serialization: write safetensors; otherwise files of `torch.save`.
        tag: as in `get_fp32_state_dict_from_zero_checkpoint`.
        exclude_frozen_parameters: as there.
    """
    folder, tensors = _stored(checkpoint_dir, tag, exclude_frozen_parameters)
    stem, ending = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    shards = list(_shards(tensors, _num_bytes(max_shard_size)))
    target, weight_map = Path(output_dir), dict[str, str]()
    target.mkdir(parents=True, exist_ok=True)
    with ChunkReader(folder) as reader:
        for number, shard in enumerate(shards, 1):
            file = f"{stem}-{number:05d}-of-{len(shards):05d}.{ending}" if len(shards) > 1 else f"{stem}.{ending}"
            values: dict[str, Tensor] = {}
            for each in shard:
                names = [each.name] if safe_serialization else [each.name, *each.aliases]
                values |= dict.fromkeys(names, _read(reader, each))
            if safe_serialization:
                save_file(values, target / file, metadata={"format": "pt"})
            else:
                torch.save(values, target / file)
            weight_map |= dict.fromkeys(values, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(map(_fp32_bytes, tensors))}, "weight_map": weight_map}
        (target / f"{stem}.{ending}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line of DeepSpeed's script."""
    parser = argparse.ArgumentParser(prog=SCRIPT_NAME, description="Write the fp32 weights of a checkpoint.")
    parser.add_argument("checkpoint_dir", help="the folder with `latest`, or one checkpoint")
    parser.add_argument("output_dir", help="the folder of the weights")
    parser.add_argument("--max_shard_size", default="5GB", help="of a file; %(default)s by default")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="of the checkpoint, such as global_step1; the newest by default")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what was not trained")
    parser.add_argument("-d", "--debug", action="store_true", help="has no effect")
    given: dict[str, Any] = vars(parser.parse_args(arguments))
    del given["debug"]
    convert_zero_checkpoint_to_fp32_state_dict(**given)


def _stored(
    checkpoint_dir: str | Path, tag: str | None, exclude_frozen_parameters: bool
) -> tuple[Path, list[StoredTensor]]:
    folder, manifest = newest_whole(Path(checkpoint_dir, tag or ""))
    kinds = ("buffer",) if exclude_frozen_parameters else ("buffer", "parameter")
    return folder, [
        each
        for each in manifest.tensors
        if PARAM in each.states and (each.kind in kinds or (each.kind == "parameter" and each.trainable))
    ]


def _dtype(tensor: StoredTensor) -> torch.dtype:
    dtype = named_dtype(tensor.states[PARAM].dtype)
    return torch.float32 if dtype.is_floating_point else dtype


def _fp32_bytes(tensor: StoredTensor) -> int:
    return math.prod(tensor.shape) * _dtype(tensor).itemsize


def _read(reader: ChunkReader, tensor: StoredTensor) -> Tensor:
    value = torch.empty(math.prod(tensor.shape), dtype=_dtype(tensor))
    reader.read(tensor, PARAM, LocalTensor.whole(tensor.shape).pieces, value)
    return value.view(tensor.shape)


def _shards(tensors: list[StoredTensor], max_bytes: int) -> Iterator[list[StoredTensor]]:
    """Yield what goes into each file: in order, as much as fits, and at least one tensor."""
    shard: list[StoredTensor] = []
    num_bytes = 0
    for tensor in tensors:
        num_bytes += _fp32_bytes(tensor)
        if shard and num_bytes > max_bytes:
            yield shard
            shard, num_bytes = [], _fp32_bytes(tensor)
        shard.append(tensor)
    yield shard


def _num_bytes(size: str | int) -> int:
    found = re.fullmatch(r"([0-9]+)([KMG]I?B|)", str(size).upper())
    if found is None:
        raise ConfigError("shard-size", f"max_shard_size={size!r} is no size; give a number and a unit, such as 5GB")
    return int(found[1]) * _UNITS[found[2]]
