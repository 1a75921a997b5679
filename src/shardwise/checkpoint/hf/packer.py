"""Writes a Hugging Face folder again, with the weights of its linear layers in 8 or 4 bits, file by file.

The format is compressed-tensors' "pack-quantized", which transformers, vLLM and others read: codes packed into int32,
and a scale for each row ("int8") or group of a row's elements ("int4"). Values are rounded to the nearest code.

>>> import torch
>>> codes, scales, shape = pack_weight(torch.tensor([[127.5, -51.0, 0.0, 1.2]]), Packing(8, None))
>>> codes.view(torch.uint8).tolist(), scales.tolist(), shape.tolist()
([[255, 77, 128, 129]], [[1.0]], [1, 4])
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from shardwise.checkpoint.commit import check_free_space, named_errors
from shardwise.checkpoint.hf.config_files import CONFIG_NAME
from shardwise.checkpoint.hf.exporter import discard_export, finish_export, refuse_taken, temporary_folder
from shardwise.checkpoint.hf.importer import INDEX_NAME, read_config
from shardwise.checkpoint.manifest import CheckpointError
from shardwise.config.errors import ConfigError
from shardwise.models import pretrained

Weights = Literal["int8", "int4"]
_WORD_BITS: Final = 32
_SUFFIX: Final = ".safetensors"
_WEIGHT: Final = ".weight"
# The groups that the kernels of servers know, the largest that divides all rows first.
_GROUP_NUMELS: Final = (128, 64, 32)


@dataclass(frozen=True)
class Packing:
    """Says how weights are packed: the bits of a code, and how many elements of a row share a scale, None for all."""

    num_bits: int
    group_numel: int | None

    def described(self, ignored: list[str]) -> dict[str, Any]:
        """Return the `quantization_config` of a folder whose linear layers are packed, but for those that are named."""
        group = {"strategy": "group", "group_size": self.group_numel} if self.group_numel else {"strategy": "channel"}
        weights = {"num_bits": self.num_bits, "type": "int", "symmetric": True, **group}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ignored,
        }


def pack_folder(source: Path, folder: Path, weights: Weights) -> int:
    """Write a folder again with packed weights, in the memory of one of its files; return the bytes of the tensors.

    Embeddings, the head, and layers whose rows 32 does not divide stay as they are.

    Args:
        source: a folder of a causal model in safetensors.
        folder: the folder to write; it must not exist, or be empty.

    Raises:
        CheckpointError: transformers is missing or does not know the model, there is no such layer, or the system
            refuses.
    """
    refuse_taken(folder)
    packed, others = _linear_layers(source)
    group = next(each for each in _GROUP_NUMELS if not any(size % each for size in packed.values()))
    packing = Packing(8, None) if weights == "int8" else Packing(4, group)
    described = {**read_config(source), "quantization_config": packing.described(sorted(others))}
    temporary = temporary_folder(folder)
    try:
        with named_errors("export to", temporary):
            shutil.rmtree(temporary, ignore_errors=True)
            check_free_space(temporary, sum(path.stat().st_size for path in source.iterdir()))
            shutil.copytree(source, temporary, ignore=shutil.ignore_patterns(f"*{_SUFFIX}", CONFIG_NAME, INDEX_NAME))
            (temporary / CONFIG_NAME).write_text(_text(described), "utf-8")
            written = {file: _pack_file(file, temporary / file.name, set(packed), packing) for file in _files(source)}
            num_bytes = sum(sum(sizes.values()) for sizes in written.values())
            if len(written) > 1:
                places = {name: file.name for file, sizes in written.items() for name in sizes}
                index = {"metadata": {"total_size": num_bytes}, "weight_map": places}
                (temporary / INDEX_NAME).write_text(_text(index), "utf-8")
        finish_export(folder)
    except BaseException:
        discard_export(folder)
        raise
    return num_bytes


def pack_weight(weight: Tensor, packing: Packing) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes of a weight [out, in], packed along its rows, its scales [out, groups], and its shape."""
    num_rows, row_numel = weight.shape
    groups = weight.float().view(num_rows, -1, packing.group_numel or row_numel)
    most = 2 ** (packing.num_bits - 1)
    scales = (groups.abs().amax(-1) / (most - 0.5)).clamp(min=torch.finfo(weight.dtype).tiny).to(weight.dtype)
    codes = (groups / scales.float().unsqueeze(-1)).round().clamp(-most, most - 1).long() + most
    shifts = torch.arange(0, _WORD_BITS, packing.num_bits)
    words = (codes.view(num_rows, -1, len(shifts)) << shifts).sum(-1)
    return words.to(torch.int32), scales, torch.tensor(weight.shape)


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{_SUFFIX}"))


def _text(values: Mapping[str, Any]) -> str:
    return f"{json.dumps(values, indent=2, sort_keys=True)}\n"


def _pack_file(source: Path, target: Path, packed: set[str], packing: Packing) -> Mapping[str, int]:
    """Write a file again; return the bytes of each tensor in the new one, by name."""
    tensors: dict[str, Tensor] = {}
    with safe_open(source, "pt") as file:
        for name in file.keys():  # noqa: SIM118, it is no mapping
            tensor = file.get_tensor(name)
            if name.removesuffix(_WEIGHT) not in packed:
                tensors[name] = tensor
                continue
            codes, scales, shape = pack_weight(tensor, packing)
            tensors |= {f"{name}_packed": codes, f"{name}_scale": scales, f"{name}_shape": shape}
    save_file(tensors, target, metadata={"format": "pt"})
    shutil.copymode(source, target)  # safetensors would keep it from other users
    return {name: each.nbytes for name, each in tensors.items()}


def _linear_layers(source: Path) -> tuple[dict[str, int], set[str]]:
    """Return the elements of a row of each layer to pack, by name, and names and patterns of the others."""
    if find_spec("transformers") is None:
        raise CheckpointError(
            "extra-missing", "--weights asks transformers for the layers of the model; pip install 'shardwise[hf]'"
        )
    try:
        with torch.device("meta"):
            model: Any = pretrained.build_model(pretrained.open_config(source, str(source)), str(source))
    except ConfigError as error:
        raise CheckpointError("not-a-causal-model", f"{error}; or leave --weights out") from None
    head, stored = model.get_output_embeddings(), dict[str, list[int]]()
    for path in _files(source):
        with safe_open(path, "pt") as file:
            stored |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118, it is no mapping
    packed, others, modules = dict[str, int](), set[str](), dict(model.named_modules())
    for name, module in modules.items():
        if type(module) is not nn.Linear:
            continue
        if module is head or module.in_features % _GROUP_NUMELS[-1] or f"{name}{_WEIGHT}" not in stored:
            others.add(name)
        else:
            packed[name] = module.in_features
    # Servers have a linear layer for each expert and router of the files, where the model has stacks.
    matrices = {name.removesuffix(_WEIGHT) for name, shape in stored.items() if len(shape) == 2}
    others |= {_like_numbers(name) for name in matrices - modules.keys()}
    others |= {name for name in matrices & modules.keys() - packed.keys() if type(modules[name]) is not nn.Embedding}
    if not packed:
        raise CheckpointError(
            "nothing-to-pack",
            f"{source} has no linear layer beside the head with rows of a multiple of {_GROUP_NUMELS[-1]}; leave "
            "--weights out",
        )
    return packed, others


def _like_numbers(name: str) -> str:
    """Return the pattern of the names that differ from this one in their numbers alone."""
    return "re:" + re.sub(r"(?<=\.)\d+(?=\\\.)", r"\\d+", re.escape(name)) + "$"
