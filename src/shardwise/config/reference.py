"""Explain the keys of the config: what each means, which values it takes, and its default, from the schema itself.

Only the command `shardwise config` needs it; a run that reads its config does not load it.

>>> describe_key("batch.micro_size")
'Samples of one forward on a rank.'
>>> describe_values("zero.stage")
'integer from 0 to 3'
"""

from __future__ import annotations

import inspect
import json
from typing import Any

from shardwise.config.resolve import Config

_HEAD = """# Config keys

Made from the schema by `shardwise config --markdown`. A file has one TOML table for each section; on the command line
a key is `section.key=value`, in a script `{"section": {"key": value}}`. Defaults are those of the library;
`shardwise config` prints what `shardwise train` uses on your machine, which differs in places (bf16 on GPUs, sizes of
the tiny preset)."""


def describe_key(key: str) -> str:
    """Return what `section.key` means, in one or two sentences."""
    return str(_schema(key)["description"]).replace("\n", " ")


def describe_values(key: str) -> str:
    """Return which values `section.key` takes, in words."""
    schema = _schema(key)
    return " or ".join(_values(option) for option in schema.get("anyOf", [schema]) if option.get("type") != "null")


def reference_page() -> str:
    """Return the reference of all keys as Markdown: a table for each section."""
    parts = [_HEAD]
    for name, field in Config.model_fields.items():
        section: Any = field.annotation
        parts.append(f"## {name}\n\n{inspect.getdoc(section)}\n")
        parts.append("| key | values | default | meaning |\n|---|---|---|---|")
        parts[-1] += "".join(f"\n{_row(f'{name}.{leaf}')}" for leaf in section.model_fields)
    return "\n\n".join(section.strip("\n") for section in parts)


def _row(key: str) -> str:
    default = _schema(key).get("default")
    shown = "" if default is None else f"`{json.dumps(default)}`"
    meaning = describe_key(key).replace("|", "\\|")
    return f"| `{key.partition('.')[2]}` | {describe_values(key)} | {shown} | {meaning} |"


def _schema(key: str) -> dict[str, Any]:
    section, _, leaf = key.partition(".")
    model: Any = Config.model_fields[section].annotation
    schema: dict[str, Any] = model.model_json_schema()["properties"][leaf]
    return schema


def _values(schema: dict[str, Any]) -> str:
    """Return the values of one alternative of a schema, in words."""
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        items = schema.get("items") or schema["prefixItems"][0]
        return f"list of {_values(items)}"
    if schema.get("type") == "object":
        return f"table of {_values(schema['additionalProperties'])}"
    text = {"integer": "integer", "number": "number", "string": "text", "boolean": "`true`, `false`"}[schema["type"]]
    low, high = schema.get("minimum"), schema.get("maximum")
    if high is not None and high > 10**5:
        high = None  # a bound that only keeps absurd numbers out
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    text += "" if above is None else f" above {above:g}"
    if low is not None:
        text += f" from {low:g}" + (f" to {high:g}" if high is not None else "")
    return text + ("" if below is None else f" below {below:g}")
