"""Read flags from a shell script, a command line or a YAML file of Megatron's arguments.

>>> flags_in('TP=8\\ntorchrun pretrain.py --tensor-model-parallel-size ${TP} --swiglu \\\\\\n  --bf16')
{'tensor-model-parallel-size': '8', 'swiglu': True, 'bf16': True}
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from itertools import pairwise
from typing import Final

from shardwise.config.resolve import ConfigError

Flags = Mapping[str, "str | bool"]

_ASSIGNMENT: Final = re.compile(
    r"^\s*(?:export\s+|local\s+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s(;]*)\s*+;?\s*+(?:#.*)?$"
)
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?::?-((?:[^}$]|\$(?!\{))*+))?\}|\$(\w+)")
# A script of flags: what its variables come to in all, and its flags.
_MAX_EXPANDED: Final = 2**18
_MAX_FLAGS: Final = 1000
_MAX_EXPRESSION: Final = 200
_YAML_LINE: Final = re.compile(r"^\s*(?:-\s*)?['\"]?(?:--)?([A-Za-z][\w-]*)['\"]?\s*:([^#]*+)(?:#.*)?$")
_ARITHMETIC: Final = re.compile(r"\$\(\(([\d\s+*/()-]+)\)\)")


def flags_in(text: str) -> dict[str, str | bool]:
    """Read the flags in a script or a command line; of a flag given twice, the last counts.

    Variables are replaced where the script itself says what they are.

    Raises:
        ConfigError: there is too much of it.
    """
    script = _substituted(re.sub(r"\\\r?\n", " ", text))
    flags: dict[str, str | bool] = {}
    for line in script.splitlines():
        words = [word.strip("()\"'") for word in _words(line)]
        for word, after in pairwise([*words, ""]):
            if not word.startswith("--") or len(word) == 2:
                continue
            name, has_value, value = word[2:].partition("=")
            if has_value:
                flags[_name(name)] = value
            elif after and not after.startswith("--"):
                flags[_name(name)] = after
            else:
                flags[_name(name)] = True
    return _bounded(flags)


def yaml_flags(text: str) -> dict[str, str | bool]:
    """Read the arguments in a YAML file of keys and values; nested sections are read too.

    >>> yaml_flags("model_parallel:\\n  tensor_model_parallel_size: 8\\n  sequence_parallel: true\\n  bf16: null")
    {'tensor-model-parallel-size': '8', 'sequence-parallel': True}
    """
    flags: dict[str, str | bool] = {}
    for line in text.splitlines():
        if (found := _YAML_LINE.match(line)) is None:
            continue
        name, value = found[1], found[2].strip().strip("'\"")
        if value.lower() == "true":
            flags[_name(name)] = True
        elif value and value.lower() not in ("null", "none", "false", "~"):
            flags[_name(name)] = value
    return _bounded(flags)


def _bounded(flags: dict[str, str | bool]) -> dict[str, str | bool]:
    if len(flags) > _MAX_FLAGS:
        raise ConfigError(
            "megatron-too-many-flags", f"{len(flags):,} flags are more than Megatron has; give those of the job"
        )
    return flags


def _name(flag: str) -> str:
    return flag.replace("_", "-")


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        # A quote that spans lines, as where a script collects its flags in one string.
        return re.sub(r"(^|\s)#.*", "", line).replace('"', " ").replace("'", " ").split()


def _substituted(script: str) -> str:
    values: dict[str, str] = {}
    lines = []
    num_expanded = 0

    def value(found: re.Match[str]) -> str:
        nonlocal num_expanded
        text = _value(found, values)
        num_expanded += len(text)
        if num_expanded > _MAX_EXPANDED:
            raise ConfigError(
                "megatron-script-expands",
                f"the script's variables come to over {_MAX_EXPANDED:,} signs; give the flags themselves",
            )
        return text

    for line in script.splitlines():
        line = _calculated(_VARIABLE.sub(value, line))
        if (found := _ASSIGNMENT.match(line)) is not None:
            values[found[1]] = found[2].strip("\"'")
        lines.append(line)
    return "\n".join(lines)


def _value(found: re.Match[str], values: Mapping[str, str]) -> str:
    name = found[1] or found[3]
    return values.get(name, found[2] if found[2] is not None else found[0])


def _calculated(line: str) -> str:
    return _ARITHMETIC.sub(lambda found: _result(found[1], found[0]), line)


def _result(expression: str, written: str) -> str:
    """Compute products and quotients of whole numbers from left to right; anything else stays as it was written."""
    words = re.findall(r"\d+|\S", expression)
    if not words or not words[0].isdigit() or len(expression) > _MAX_EXPRESSION:
        return written
    total = int(words[0])
    for operator, operand in zip(words[1::2], words[2::2], strict=False):
        if not operand.isdigit() or operator not in "*/" or (operator == "/" and operand == "0"):
            return written
        total = total * int(operand) if operator == "*" else total // int(operand)
    return str(total)


def refuse_unset(flag: str, value: str | bool) -> None:
    """Refuse a value that is still a variable.

    Raises:
        ConfigError: it is.
    """
    if isinstance(value, str) and "$" in value:
        raise ConfigError(
            "megatron-variable-unset",
            f"--{flag} {value} is a variable that the file does not set; write its value there",
        )
