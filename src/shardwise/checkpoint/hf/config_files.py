"""Makes the files beside the weights, config.json and generation_config.json, from a description of the model.

The result is the same from a live model and from a checkpoint's manifest, which keeps the description.

>>> import json
>>> from shardwise.models import Decoder, DecoderConfig
>>> config = DecoderConfig(vocab_size=64, num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=2,
...                        head_dim=4, ffn_size=48, max_seq_len=32)
>>> described = describe(Decoder(config))
>>> described["class"], described["config"]["num_kv_heads"]
('Decoder', 2)
>>> files = config_files(described, "BF16")
>>> [(name, json.loads(text)["model_type"]) for name, text in files.items()]
[('config.json', 'llama')]
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from importlib.util import find_spec
from typing import Any, Final

from torch import nn

from shardwise.checkpoint.hf.families import TORCH_NAMES, converted_names, decoder_names, hf_config_of
from shardwise.checkpoint.hf.importer import CONFIG_NAME
from shardwise.checkpoint.hf.key_map import NameMap
from shardwise.checkpoint.manifest import CheckpointError, number_kind
from shardwise.checkpoint.match import WantedState
from shardwise.config.errors import ConfigError
from shardwise.config.model_files import check_model_config
from shardwise.config.untrusted_files import UntrustedFileError
from shardwise.layout.slicing import Shape
from shardwise.models import Decoder, DecoderConfig, pretrained
from shardwise.models.presets import EXPERT_FIELDS
from shardwise.runtime.torch_private import persistent_buffers

log = logging.getLogger("shardwise")

GENERATION_NAME: Final = "generation_config.json"
_DECODER: Final = Decoder.__name__
_DTYPE_KEYS: Final = ("dtype", "torch_dtype")


def describe(model: nn.Module) -> dict[str, Any]:
    """Return a model's class, and its config where that is Hugging Face's or a dataclass and JSON can hold it."""
    described: dict[str, Any] = {"class": type(model).__name__}
    config = getattr(model, "config", None)
    try:
        if callable(getattr(config, "to_json_string", None)):
            described["config"] = _values_of(config)
            generation = getattr(model, "generation_config", None)
            if callable(getattr(generation, "to_json_string", None)):
                described["generation_config"] = _values_of(generation)
        elif isinstance(config, DecoderConfig):
            described["config"] = config.values()
        elif is_dataclass(config) and not isinstance(config, type):
            described["config"] = json.loads(json.dumps(asdict(config), default=str))
    except (TypeError, ValueError) as error:  # the save goes on without the config
        log.warning("the model's config is left out: %s", error)
    return described


def folder_names(model: nn.Module, shapes: Mapping[str, Shape]) -> NameMap:
    """Return the rules for the names of a model's tensors in a folder; the arguments are those of `converted_names`."""
    return converted_names(model, shapes) if decoder_config(describe(model)) is None else decoder_names()


def described_names(described: Mapping[str, Any], shapes: Mapping[str, Shape], name: str) -> NameMap:
    """Return the `folder_names` of a model that `describe` described; none where its class is not known.

    Args:
        name: what the description is of, for messages.

    Raises:
        CheckpointError: as in `converted_names`; or transformers is missing, or does not build the model.
    """
    if decoder_config(described) is not None:
        return decoder_names()
    values = described.get("config", {})
    if "model_type" not in values:
        return NameMap()
    if find_spec("transformers") is None:
        text = f"transformers knows the names of {name} in a folder; pip install 'shardwise[hf]'"
        raise CheckpointError("extra-missing", text)
    try:
        check_model_config(values, name)
        model = pretrained.skeleton(str(described.get("class")), values, name)
    except (ConfigError, UntrustedFileError) as error:
        raise CheckpointError(error.code, str(error)) from None
    return NameMap() if model is None else converted_names(model, shapes)


def wanted_of(model: nn.Module) -> list[WantedState]:
    """Return a model's parameters and persistent buffers, which may be on meta: a folder should have these."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(persistent_buffers(model))}
    named: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        named.setdefault(id(tensor), []).append(name)
    return [
        WantedState(first, tuple(aliases), tuple(tensor.shape), number_kind(str(tensor.dtype).removeprefix("torch.")))
        for first, *aliases in named.values()
        for tensor in [tensors[first]]
    ]


def config_files(described: Mapping[str, Any], dtype: str) -> dict[str, bytes]:
    """Return, by name, the files of a folder for a model that `describe` described; none where its config is not known.

    Args:
        dtype: safetensors' name of the weights' dtype.
    """
    decoder, values = decoder_config(described), described.get("config", {})
    if decoder is not None:
        if decoder.attention.kind != "dense":
            log.warning(
                "config.json is that of a model whose attention is dense; here it is %s", decoder.attention.kind
            )
        return {CONFIG_NAME: _text(hf_config_of(decoder, dtype))}
    if "model_type" not in values:
        return {}
    values = {**_without_dtype(values), "architectures": [described["class"]], "torch_dtype": TORCH_NAMES[dtype]}
    files = {CONFIG_NAME: _text(values)}
    if "generation_config" in described:
        files[GENERATION_NAME] = _text(described["generation_config"])
    return files


def decoder_config(described: Mapping[str, Any]) -> DecoderConfig | None:
    """Return the config of our decoder, if that is the described model; else None."""
    values = described.get("config", {})
    names = {field.name for field in fields(DecoderConfig)}
    if described.get("class") != _DECODER or values.keys() | {"attention", *EXPERT_FIELDS} != names:
        return None
    try:
        return DecoderConfig.from_values(values)
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            "decoder-config-malformed", f"the model's config is none of our decoder's: {error}; use another checkpoint"
        ) from None


def _values_of(config: Any) -> Any:
    """Return what transformers would write into the file of a config, without what only concerns the process."""
    values = json.loads(config.to_json_string())
    return {key: value for key, value in values.items() if not key.startswith("_")}


def _without_dtype(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values without the dtypes in which parts of a model were once loaded, at any depth."""
    return {
        key: _without_dtype(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if key not in _DTYPE_KEYS
    }


def _text(values: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(values, indent=2, sort_keys=True)}\n".encode()
