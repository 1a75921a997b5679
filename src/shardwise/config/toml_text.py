"""Write a config as TOML.

>>> print(to_toml(Config.from_dict({"zero": {"stage": 3}})))
[zero]
stage = 3
<BLANKLINE>
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config


def to_toml(config: Config, always: Collection[str] = ()) -> str:
    """Write what differs from the defaults in a config as TOML, and the dotted keys of `always`.

    Raises:
        ConfigError: a value is None where the default is none, which TOML cannot say.
    """
    defaults = Config().model_dump()
    lines: list[str] = []
    for section, leaves in config.model_dump().items():
        written: list[str] = []
        for leaf, value in leaves.items():
            key = f"{section}.{leaf}"
            if value == defaults[section][leaf] and (key not in always or value is None):
                continue
            if value is None:
                raise ConfigError(
                    "none-in-toml", f"{key} is none, which TOML cannot say; give {key}=none beside the file"
                )
            written.append(f"{leaf} = {_toml_value(value)}")
        if written:
            lines += [f"[{section}]", *written, ""]
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml_value(key)} = {_toml_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return repr(value)
