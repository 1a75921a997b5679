"""Opens configs, models and tokenizers of transformers in folders that others made; all such calls are here.

A folder may have Python files of its own, which transformers runs where that is allowed. It is not asked on a terminal:
it is allowed by the config, as `model.trust_remote_code`, or refused. What transformers raises becomes one line.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from shardwise.config.errors import CodedError, ConfigError
from shardwise.config.model_files import check_model_config, runs_own_code
from shardwise.config.untrusted_files import (
    MAX_TOKENIZER_BYTES,
    UntrustedFileError,
    as_config_error,
    open_regular,
    read_json,
)

CONFIG_NAME: Final = "config.json"
_MAX_CONFIG_BYTES: Final = 16 * 2**20
_TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_TRUST: Final = "model.trust_remote_code = true"
# Small files beside the weights that transformers opens by itself.
_SMALL: Final = ("generation_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
_LARGE: Final = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt")

log = logging.getLogger("shardwise")


def open_config(folder: Path, name: str, *, trusts_code: bool = False) -> Any:
    """Return the config of a model of transformers.

    Args:
        name: what the user gave, such as `model.path=folder`, for messages.
        trusts_code: whether Python files of the folder may run.

    Raises:
        ConfigError: there is none, a value of it cannot be, or it needs code of the folder that is not trusted.
    """
    from transformers import AutoConfig

    values = _read_config(folder, "give its folder")
    _check_files(folder)
    with _one_line("not-a-model-folder", f"{name} is no model of transformers", "give its folder", values, trusts_code):
        return AutoConfig.from_pretrained(folder, trust_remote_code=trusts_code)


def build_model(config: Any, name: str, *, trusts_code: bool = False) -> nn.Module:
    """Return the causal model of a config, on the device of the caller's context.

    Args:
        name: as in `open_config`, and so is `trusts_code`.
        trusts_code: whether Python files of the folder may run.

    Raises:
        ConfigError: transformers cannot build it.
    """
    from transformers import AutoModelForCausalLM

    values = config.to_dict()
    _refuse_unless_causal(config, name, values)
    with _one_line("model-not-buildable", f"{name} is no causal model that can be built", _FIX, values, trusts_code):
        model: nn.Module = AutoModelForCausalLM.from_config(config, trust_remote_code=trusts_code)
        return model


def skeleton(architecture: str, values: Mapping[str, Any], name: str) -> nn.Module | None:
    """Return a model on meta of one of transformers' own classes, by its config; None where it has no such class.

    Raises:
        ConfigError: transformers cannot build it.
    """
    import transformers

    model_class: Any = getattr(transformers, architecture, None)
    if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
        return None
    what = f"{name} has a config of which transformers builds no {architecture}"
    with _one_line("model-not-buildable", what, _FIX, values, trusts_code=False), torch.device("meta"):
        config: Any = model_class.config_class
        model: nn.Module = model_class(config.from_dict(dict(values)))
        return model


def load_model(folder: Path, config: Any, name: str, *, trusts_code: bool = False, **how: Any) -> nn.Module:
    """Return the causal model of a folder with its weights.

    Args:
        config: as `open_config` returned it; `how` goes to `from_pretrained`.
        trusts_code: whether Python files of the folder may run.

    Raises:
        ConfigError: transformers cannot load it.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as their_logging

    their_logging.disable_progress_bar()
    values = config.to_dict()
    _refuse_unless_causal(config, name, values)
    with _one_line("model-not-loadable", f"{name} cannot be loaded", "get the folder again", values, trusts_code):
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", config=config, trust_remote_code=trusts_code, **how
        )
        return model


def open_tokenizer(source: str | Path, *, trusts_code: bool = False) -> Any:
    """Return the tokenizer of a folder, or of a name on the Hub.

    Raises:
        ConfigError: there is none that transformers loads, or it needs code of the folder that is not trusted.
    """
    from transformers import AutoTokenizer

    folder = Path(source).expanduser()
    values: dict[str, Any] = {}
    if folder.is_dir():
        _check_files(folder)
        for file_name, read in ((CONFIG_NAME, _read_config), (_TOKENIZER_CONFIG, _read_tokenizer_config)):
            if os.path.lexists(folder / file_name):
                values |= read(folder, _FIX_TOKENIZER)
    with _one_line(
        "model-without-tokenizer",
        f"{source} has no tokenizer that transformers loads",
        _FIX_TOKENIZER,
        values,
        trusts_code,
    ):
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trusts_code)


_FIX: Final = "take the config.json of the model"
_FIX_TOKENIZER: Final = "give one as data.tokenizer"


@contextmanager
def _one_line(code: str, what: str, fix: str, values: Mapping[str, Any], trusts_code: bool) -> Iterator[None]:
    """Turn what transformers raises into one line, which names code of the folder where that was refused."""
    try:
        yield
    except (CodedError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # by the values of a file, any of them
        if runs_own_code(values) and not trusts_code:
            raise ConfigError(
                "custom-code",
                f"{what} without running Python code of its own (auto_map), which is not run unasked; read that code, "
                f"then set {_TRUST}",
            ) from None
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise ConfigError(code, f"{what}: {' '.join(lines[:2])}; {fix}") from error


def _refuse_unless_causal(config: Any, name: str, values: Mapping[str, Any]) -> None:
    """Refuse a kind of model of which transformers has no causal one; its own error lists all the others."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not runs_own_code(values):
        what = "an encoder-decoder" if values.get("is_encoder_decoder") else "no causal model"
        raise ConfigError(
            "model-not-buildable",
            f"{name} is {what} (model_type {config.model_type}), and only causal models are taken here; give one, or "
            "train this one by a script of yours: docs/moving-in.md",
        )


def _check_files(folder: Path) -> None:
    """Refuse what transformers would wait for or never end to read: pipes, devices, files of any size or depth."""
    try:
        for name in (*_SMALL, *_LARGE, _TOKENIZER_CONFIG):
            if not os.path.lexists(folder / name):
                continue
            if name.endswith(".json") and name not in _LARGE:
                _read(folder / name, "get the folder again")
                continue
            descriptor = open_regular(folder / name)
            num_bytes = os.fstat(descriptor).st_size
            os.close(descriptor)
            if num_bytes > MAX_TOKENIZER_BYTES:
                raise ConfigError(
                    "file-unreadable",
                    f"{folder / name} has {num_bytes:,} bytes, more than the {MAX_TOKENIZER_BYTES:,} of any tokenizer; "
                    "get the folder again",
                )
    except UntrustedFileError as error:
        raise ConfigError(error.code, str(error)) from None
    except OSError as error:
        raise ConfigError(
            "file-unreadable", f"cannot read {error.filename}: {error.strerror or error}; get the folder again"
        ) from None


def _read_config(folder: Path, fix: str) -> dict[str, Any]:
    values = _read(folder / CONFIG_NAME, fix)
    with as_config_error():
        check_model_config(values, str(folder / CONFIG_NAME))
    return values


def _read_tokenizer_config(folder: Path, fix: str) -> dict[str, Any]:
    return _read(folder / _TOKENIZER_CONFIG, fix)


def _read(path: Path, fix: str) -> dict[str, Any]:
    with as_config_error():
        values = read_json(path, fix, max_bytes=_MAX_CONFIG_BYTES)
    if not isinstance(values, dict):
        raise ConfigError("hf-json-malformed", f"{path} has no table of values; {fix}")
    return values
