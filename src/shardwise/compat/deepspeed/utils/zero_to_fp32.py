"""Offers `deepspeed.utils.zero_to_fp32`: the fp32 weights of a checkpoint, ours or DeepSpeed's, without an engine.

`write_zero_to_fp32` puts a script of that name beside our checkpoints, with the command line of DeepSpeed's.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwise.checkpoint.find import newest_whole
from shardwise.checkpoint.hf.exporter import ExportTensor, plan_export
from shardwise.checkpoint.manifest import StoredTensor
from shardwise.checkpoint.reader import ChunkReader
from shardwise.checkpoint.safetensors_io import dtype_name, named_dtype
from shardwise.compat.deepspeed.finder import answers
from shardwise.config.errors import ConfigError, OneLineError, printable_lines, with_code
from shardwise.config.written_files import write_whole
from shardwise.layout.slicing import LocalTensor
from shardwise.runtime.state_shards import PARAM

__getattr__ = answers(__name__)

SCRIPT_NAME: Final = "zero_to_fp32.py"
_SCRIPT: Final = '''#!/usr/bin/env python
"""Write the fp32 weights of a checkpoint in this folder: python zero_to_fp32.py . OUTPUT_DIR [--safe_serialization]"""

from shardwise.compat.deepspeed.utils.zero_to_fp32 import main

if __name__ == "__main__":
    main()
'''
_UNITS: Final = MappingProxyType(
    {"": 1}
    | {f"{unit}B": 1000**power for power, unit in enumerate("KMGT", 1)}
    | {f"{unit}IB": 1024**power for power, unit in enumerate("KMGT", 1)}
)


def write_zero_to_fp32(folder: str | Path) -> None:
    """Write the script into a folder of checkpoints, as DeepSpeed's `save_checkpoint` does."""
    path = Path(folder, SCRIPT_NAME)
    write_whole(path, _SCRIPT)
    path.chmod(0o755)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """Return the weights and buffers of a checkpoint in host memory; the arguments are those of DeepSpeed."""
    folder, tensors = _stored(checkpoint_dir, tag, exclude_frozen_parameters)
    with ChunkReader(folder) as reader:
        return {name: value for tensor in tensors for name, value in _read(reader, tensor).items()}


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Load a checkpoint's weights into a model that no engine has; the arguments are those of DeepSpeed."""
    model = model.cpu()
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights for `from_pretrained`, with one file's in memory; the arguments are those of DeepSpeed."""
    folder, tensors = _stored(checkpoint_dir, tag, exclude_frozen_parameters)
    listed = [ExportTensor(tensor.name, tensor.aliases, tensor.shape, dtype_name(_dtype(tensor))) for tensor in tensors]
    plan = plan_export(listed, max_file_bytes=_num_bytes(max_shard_size))
    stored, target, weight_map = {tensor.name: tensor for tensor in tensors}, Path(output_dir), dict[str, str]()
    target.mkdir(parents=True, exist_ok=True)
    with ChunkReader(folder) as reader:
        for file, shard in groupby(plan.tensors, attrgetter("file")):
            values: dict[str, Tensor] = {}
            for exported in shard:
                of_names = _read(reader, stored[exported.name])
                values |= {exported.name: of_names[exported.name]} if safe_serialization else of_names
            if not safe_serialization:
                file = f"pytorch_{Path(file).stem}.bin"
                torch.save(values, target / file)
            else:
                save_file(values, target / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(values, file)
    if plan.index:
        index = {"metadata": {"total_size": plan.num_tensor_bytes}, "weight_map": weight_map}
        name = "model.safetensors.index.json" if safe_serialization else "pytorch_model.bin.index.json"
        write_whole(target / name, json.dumps(index, indent=2, sort_keys=True))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line of DeepSpeed's script."""
    parser = _Parser(prog=SCRIPT_NAME, description="Write the fp32 weights of a checkpoint.")
    parser.add_argument("checkpoint_dir", help="the folder with `latest`, or one checkpoint")
    parser.add_argument("output_dir", help="the folder of the weights; it is made where it is missing")
    parser.add_argument("--max_shard_size", default="5GB", help="of a file; %(default)s by default")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="of the checkpoint, such as global_step1; the newest by default")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what was not trained")
    parser.add_argument("-d", "--debug", action="store_true", help="has no effect")
    try:
        options: dict[str, Any] = vars(parser.parse_args(arguments))
        del options["debug"]
        convert_zero_checkpoint_to_fp32_state_dict(**options)
    except OneLineError as error:
        parser.exit(2, f"{SCRIPT_NAME}: {printable_lines(with_code(error))}\n")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say in a line what is wrong with the options, as every other refusal."""
        raise ConfigError("options-not-read", f"{message}; see {self.prog} --help")


def _stored(
    checkpoint_dir: str | Path, tag: str | None, exclude_frozen_parameters: bool
) -> tuple[Path, list[StoredTensor]]:
    folder, manifest = newest_whole(Path(checkpoint_dir, tag or ""))
    kinds = ("buffer",) if exclude_frozen_parameters else ("buffer", "parameter")
    return folder, [
        tensor
        for tensor in manifest.tensors
        if PARAM in tensor.states and (tensor.kind in kinds or (tensor.kind == "parameter" and tensor.trainable))
    ]


def _dtype(tensor: StoredTensor) -> torch.dtype:
    dtype = named_dtype(tensor.states[PARAM].dtype)
    return torch.float32 if dtype.is_floating_point else dtype


def _read(reader: ChunkReader, tensor: StoredTensor) -> dict[str, Tensor]:
    """Return the value of a tensor under each of its names."""
    value = torch.empty(math.prod(tensor.shape), dtype=_dtype(tensor))
    reader.read(tensor, PARAM, LocalTensor.whole(tensor.shape).pieces, value)
    return dict.fromkeys((tensor.name, *tensor.aliases), value.view(tensor.shape))


def _num_bytes(size: str | int | None) -> int:
    match = re.fullmatch(r"([0-9]+)([KMGT]I?B|)", str(size).upper())
    if match is None and size is not None:
        raise ConfigError("shard-size", f"max_shard_size={size!r} is no size; give a number and a unit, such as 5GB")
    return int(match[1]) * _UNITS[match[2]] if match is not None else sys.maxsize
