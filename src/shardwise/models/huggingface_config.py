"""Read the shape of a model from Hugging Face's `config.json`.

Where transformers is installed it completes the file with what its architecture leaves out; else, and for architectures
that it does not know, the fields' usual names are read.

>>> source_of({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
...           "n_positions": 1024}, "config.json").shape.num_params
124439808
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from shardwise.config.errors import ConfigError
from shardwise.config.model_files import CHOICE_NAMES, EXPERT_NAMES, check_model_config
from shardwise.config.untrusted_files import as_config_error
from shardwise.config.untrusted_files import read_json as read_foreign_json
from shardwise.models.shape import ExpertsShape, ModelShape, ModelSource

# The usual name of each size, and others that files have.
_NAMES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "hidden_size": ("n_embd", "d_model", "n_embed", "dim"),
        "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
        "num_attention_heads": ("n_head", "n_heads", "num_heads"),
        "num_key_value_heads": ("num_kv_heads", "n_kv_heads"),
        "intermediate_size": ("ffn_dim", "n_inner", "ffn_hidden_size", "ffn_size"),
        "max_position_embeddings": ("n_positions", "max_seq_len", "max_sequence_length", "seq_length"),
        "num_experts": EXPERT_NAMES[1:],
        "num_experts_per_tok": CHOICE_NAMES[1:],
        "moe_intermediate_size": ("intermediate_size",),
    }
)
# What no file says: which architectures have biases and norms with them, a feed-forward of two matrices, a table of
# positions (and its additional rows); and, where transformers is missing, whose head is tied.
_WITH_BIASES: Final = frozenset(
    {"gpt2", "gpt_bigcode", "gpt_neo", "gptj", "gpt_neox", "opt", "bloom", "starcoder2", "phi"}
)
_PLAIN: Final = _WITH_BIASES | {"falcon", "mpt"}
_LEARNED: Final[Mapping[str, int]] = MappingProxyType({"gpt2": 0, "gpt_bigcode": 0, "gpt_neo": 0, "opt": 2})
_UNTIED: Final = frozenset({"gptj", "gpt_neox", "phi"})
_GATED: Final = frozenset({"silu", "swish", "swiglu", "geglu"})
_MIXED_WINDOWS: Final = ("gemma2", "gemma3", "cohere2", "gpt_oss")
_PARTS: Final = ("text_config", "vision_config", "audio_config")
# What the files of these architectures state beside the names in `_STATED`. Where all of it is there, transformers has
# nothing to add; its import takes torch's too, some three seconds.
_STATED: Final = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("max_position_embeddings", "vocab_size", "tie_word_embeddings", "hidden_act"),
)
_STATED_TOO: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "llama": (),
        "qwen2": (),
        "qwen3": ("head_dim",),
        "qwen3_moe": ("head_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size"),
    }
)
# What no model has.
_TOO_MANY: Final = 10**12
_MAX_SHOWN, _MAX_KEYS = 60, 1000


def read_huggingface(path: str | Path) -> ModelSource:
    """Read the shape in a `config.json`, and the longest sequence it was made for.

    Raises:
        ConfigError: the file cannot be read, is not JSON, or misses a size.
    """
    return source_of(read_json(path), Path(path).name)


def cached_config(name: str) -> Path | None:
    """Return the config.json of a model of the hub that is on this machine already; None where there is none."""
    if find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except ValueError:  # no name of the hub
        return None
    return Path(cached) if isinstance(cached, str) else None


def source_of(values: Mapping[str, Any], source: str) -> ModelSource:
    """Return the shape and the longest sequence of a parsed `config.json`.

    Args:
        values: of the file; of a model with several parts, that of text is taken.

    Raises:
        ConfigError: a size is missing or is none.
    """
    with as_config_error("import-integer"):
        check_model_config(values, source)
    text, is_known = _completed(values)
    notes = []
    if any(isinstance(values.get(part), Mapping) and values[part] for part in _PARTS):
        notes.append("of a model with several parts, that of text alone is planned")
    if text.get("kv_lora_rank"):
        notes.append("latent attention is priced as attention with one head of keys and values")
    if not is_known:
        model_type = text.get("model_type", "none")
        notes.append(f"model_type {model_type} is read by its fields' names: check the number of parameters")
    longest = _size(text, "max_position_embeddings", source, default=0, least=0)
    path = str(values.get("_name_or_path") or "").rstrip("/")
    shape = _shape(text, source, longest, path.rpartition("/")[2])
    return ModelSource(shape=shape, longest=longest or None, notes=tuple(notes))


def is_huggingface(values: Mapping[str, Any]) -> bool:
    """Say whether a parsed JSON file gives the sizes of a model.

    >>> is_huggingface({"n_embd": 768}), is_huggingface({"zero_optimization": {"stage": 3}})
    (True, False)
    """
    text_config = values.get("text_config")
    return any(name in (text_config or values) for name in ("hidden_size", *_NAMES["hidden_size"]))


def is_deepspeed(values: Mapping[str, Any]) -> bool:
    """Say whether a parsed JSON file looks like DeepSpeed's and not like a model's.

    >>> is_deepspeed({"zero_optimization": {"stage": 2}}), is_deepspeed({"hidden_size": 64})
    (True, False)
    """
    return any(key in values for key in ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu"))


def read_json(path: str | Path) -> Mapping[str, Any]:
    """Parse a JSON file that holds one object.

    Raises:
        ConfigError: the file cannot be read, or is no such.
    """
    with as_config_error():
        values = read_foreign_json(path, "give the path of a JSON file")
    if not isinstance(values, dict):
        raise ConfigError("json-not-object", f"{path} holds no JSON object; give a file of keys and values")
    return values


def _shape(text: Mapping[str, Any], source: str, longest: int, name: str) -> ModelShape:
    model_type = str(text.get("model_type", ""))
    hidden, num_heads = _size(text, "hidden_size", source), _size(text, "num_attention_heads", source)
    factor = 4 if model_type in _PLAIN else _size(text, "expansion_ratio", source, default=0, least=0)
    is_tied = model_type in _PLAIN - _UNTIED or model_type.startswith(("gemma", "cohere"))
    return ModelShape(
        num_layers=_size(text, "num_hidden_layers", source),
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(text, num_heads, source),
        head_dim=_head_dim(text, hidden, num_heads, source),
        ffn_size=_size(text, "intermediate_size_mlp", source, default=0, least=0)
        or _size(text, "intermediate_size", source, default=factor * hidden or None),
        vocab_size=_size(text, "vocab_size", source),
        ffn="gated" if _is_gated(text, model_type) else "plain",
        is_tied=bool(text.get("tie_word_embeddings", is_tied)),
        has_biases=model_type in _WITH_BIASES,
        num_positions=longest + _LEARNED[model_type] if longest and model_type in _LEARNED else 0,
        window=_window(text),
        experts=_experts(text, source),
        name=name or model_type or "model",
    )


def _completed(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """Return the text model's values with the defaults of its architecture, and whether that is known."""
    text_config = values.get("text_config")
    plain = values
    if isinstance(text_config, Mapping) and text_config:
        plain = {**{key: values[key] for key in ("tie_word_embeddings", "model_type") if key in values}, **text_config}
    model_type = str(plain.get("model_type", ""))
    if _is_complete(plain, model_type):
        return {"use_sliding_window": not model_type.startswith("qwen"), **plain}, True
    if not model_type or find_spec("transformers") is None:
        return plain, model_type in _PLAIN or model_type.startswith(
            ("llama", "mistral", "mixtral", "qwen", "gemma", "deepseek")
        )
    from transformers import CONFIG_MAPPING, AutoConfig

    if model_type not in CONFIG_MAPPING:
        return plain, False
    try:
        config = AutoConfig.for_model(**plain).get_text_config()
        completed = config.to_dict()
    except Exception:  # it checks types in its own words; ours name the file
        return plain, True
    named = {name: getattr(config, name) for name in _NAMES if getattr(config, name, None) is not None}
    return {**plain, **completed, **named}, True


def _is_complete(values: Mapping[str, Any], model_type: str) -> bool:
    """Say whether the values state all that their architecture would complete, each under its usual name alone."""
    if model_type not in _STATED_TOO or any(part in values for part in _PARTS):
        return False
    if model_type.startswith("qwen") and values.get("use_sliding_window"):  # which layers have the window follows
        return False
    names = (*_STATED, *_STATED_TOO[model_type])
    others = {other for name in names for other in _NAMES.get(name, ())} - set(names)
    return all(values.get(name) is not None for name in names) and not others & values.keys()


def _size(values: Mapping[str, Any], name: str, source: str, default: int | None = None, *, least: int = 1) -> int:
    """Return a size under any of its names.

    Args:
        default: where it is not there; None to refuse that.

    Raises:
        ConfigError: it is not there, or it is no integer, or less than that.
    """
    names = (name, *_NAMES.get(name, ()))
    used = next((name for name in names if values.get(name) is not None), None)
    if used is None:
        if default is not None:
            return default
        keys = [key for key, value in values.items() if value is not None][:_MAX_KEYS]
        close = [key for like in names for key in difflib.get_close_matches(like, keys, n=1, cutoff=0.75)]
        others = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
        fix = f"did you mean it by {close[0]}?" if close else f"add {name}{others}"
        raise ConfigError("import-key-missing", f"{source} misses {name}; {fix}")
    value = values[used]
    if isinstance(value, list) and len(value) > 1 and all(size == value[0] for size in value):  # one for each layer
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _TOO_MANY:
        raise ConfigError(
            "import-integer",
            f"{source}: {used}={repr(value)[:_MAX_SHOWN]} must be an integer >= {least} and below {_TOO_MANY:,}; "
            "correct it there",
        )
    return value


def _is_gated(text: Mapping[str, Any], kind: str) -> bool:
    """Say whether the feed-forward has three matrices; of unknown architectures by an activation that gates use."""
    names = ("hidden_act", "hidden_activation", "activation_function")
    activation = next((str(text[name]) for name in names if text.get(name)), "silu")
    return kind.startswith("gemma") or (kind not in _PLAIN and activation.lower() in _GATED)


def _num_kv_heads(text: Mapping[str, Any], num_heads: int, source: str) -> int:
    is_single = text.get("multi_query") is True and not text.get("new_decoder_architecture")
    if text.get("kv_lora_rank") or is_single:
        return 1
    attention = text.get("attn_config")
    inner = attention if isinstance(attention, Mapping) else {}
    return _size({**inner, **text}, "num_key_value_heads", source, default=num_heads)


def _head_dim(text: Mapping[str, Any], hidden: int, num_heads: int, source: str) -> int:
    if text.get("kv_lora_rank"):
        return _size(text, "v_head_dim", source)
    if text.get("head_dim") is None and hidden % num_heads:
        raise ConfigError(
            "heads-divide-hidden", f"{source}: {num_heads} heads do not divide the hidden size {hidden}; add head_dim"
        )
    return _size(text, "head_dim", source, default=hidden // num_heads)


def _window(text: Mapping[str, Any]) -> int | None:
    """Return the window where every layer has one; where only some do, the others decide the time, so return None."""
    window, layers = text.get("sliding_window"), text.get("layer_types") or ()
    is_mixed = str(text.get("model_type", "")).startswith(_MIXED_WINDOWS) or "sliding_window_pattern" in text
    is_used = text.get("use_sliding_window", True) and not is_mixed and not set(layers) - {"sliding_attention"}
    return window if isinstance(window, int) and window > 0 and is_used else None


def _experts(text: Mapping[str, Any], source: str) -> ExpertsShape | None:
    num_experts = _size(text, "num_experts", source, default=1, least=0)
    if num_experts <= 1:
        return None
    ffn_size = _size(text, "moe_intermediate_size", source)
    shared = _size(text, "n_shared_experts", source, default=0, least=0)
    if not shared:
        shared_size = _size(text, "shared_expert_intermediate_size", source, default=0, least=0)
        shared = max(1, round(shared_size / ffn_size)) if shared_size else 0
        shared = shared or int(str(text.get("model_type", "")).startswith("llama4"))  # which no field says
    dense_layers = text.get("mlp_only_layers") or ()
    if not isinstance(dense_layers, list | tuple):
        raise ConfigError(
            "mlp-only-layers", f"{source}: mlp_only_layers={dense_layers!r} must be a list of layers; correct it there"
        )
    num_layers = _size(text, "num_hidden_layers", source)
    interleaved = num_layers - num_layers // _size(text, "interleave_moe_layer_step", source, default=1)
    return ExpertsShape(
        num_experts=num_experts,
        num_chosen=_size(text, "num_experts_per_tok", source),
        ffn_size=ffn_size,
        num_shared=shared,
        num_dense_layers=_size(text, "first_k_dense_replace", source, default=0, least=0)
        or len(dense_layers)
        or interleaved,
    )
