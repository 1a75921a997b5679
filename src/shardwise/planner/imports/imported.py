"""Hold what is read from another tool's files, in the planner's words and the config's keys.

>>> ImportedJob(settings={"zero.stage": 3, "precision.param": "bf16"}).assignments
['zero.stage=3', 'precision.param="bf16"']
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from shardwise.config.resolve import ConfigError
from shardwise.planner.shape import ModelShape

# What no model and no job has.
_TOO_MANY: Final = 10**12
_MAX_SHOWN: Final = 60
MAX_KEYS: Final = 1000


@dataclass(frozen=True, kw_only=True)
class ImportedJob:
    """Describe a job as another tool's file does; what that leaves open is None or missing.

    Attributes:
        shape: of the model.
        settings: of the strategy, by dotted key of our config.
        seq_len: tokens of a sequence.
        global_batch: sequences of an optimizer step.
        num_gpus: of the job.
        ep: ranks over which experts are split.
        notes: what was read differently than it was written, or left out, for people.
    """

    shape: ModelShape | None = None
    settings: Mapping[str, object] = field(default_factory=dict)
    seq_len: int | None = None
    global_batch: int | None = None
    num_gpus: int | None = None
    ep: int = 1
    notes: tuple[str, ...] = ()

    @property
    def assignments(self) -> list[str]:
        """Return the settings as `Config.override` takes them."""
        return [f"{key}={json.dumps(value)}" for key, value in self.settings.items()]


def whole_number(
    values: Mapping[str, object], names: Iterable[str], source: str, default: int | None = None, *, least: int = 1
) -> int:
    """Return the first of some fields that is there, as an integer.

    Args:
        values: of the file.
        names: under which the field is known, the usual one first.
        source: the file's name, for messages.
        default: where none is there; None to refuse that.
        least: that it may be.

    Raises:
        ConfigError: none is there, or it is no integer, or less than that.

    >>> whole_number({"n_embd": 768}, ("hidden_size", "n_embd"), "config.json")
    768
    >>> whole_number({"hiden_size": 768}, ("hidden_size", "n_embd"), "config.json")
    Traceback (most recent call last):
        ...
    shardwise.config.resolve.ConfigError: config.json misses hidden_size; did you mean it by hiden_size?
    """
    names = tuple(names)
    for name in names:
        value = values.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(
                "import-integer", f"{source}: {name}={short(value)} must be an integer >= {least}; correct it there"
            )
        if value >= _TOO_MANY:
            raise ConfigError(
                "import-too-large", f"{source}: {name}={short(value)} must be less than {_TOO_MANY:,}; correct it there"
            )
        return value
    if default is not None:
        return default
    raise ConfigError("import-key-missing", f"{source} misses {names[0]}; {_fix(values, names)}")


def short(value: object) -> str:
    """Write a value of a file as a message shows it."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _fix(values: Mapping[str, object], names: tuple[str, ...]) -> str:
    known = list(values)[:MAX_KEYS]
    close = [each for name in names for each in difflib.get_close_matches(name, known, n=1, cutoff=0.75)]
    others = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
    return f"did you mean it by {close[0]}?" if close else f"add {names[0]}{others}"
