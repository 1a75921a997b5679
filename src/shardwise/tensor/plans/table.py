"""A user's plan: a table from patterns of module names to what is to be done with them, in words.

>>> model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
>>> plan = table_plan(model, {"0": "column units=4", "2": "row units=4"}, degree=2)
>>> [(layer.module, layer.style, layer.parts[0].num_units) for layer in plan.layers]
[('0', 'column', 4), ('2', 'row', 4)]

An entry is a word and what it needs, or a list of such; `docs/tensor-parallel.md` lists them.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shardwise.config import ConfigError
from shardwise.layout.splits import Part, check_divides
from shardwise.layout.tensor_plan import Region, SequenceStack, SplitDropout, TensorPlan
from shardwise.tensor.plans.check import unknown_name
from shardwise.tensor.plans.draft import Draft, equal_parts, split_size
from shardwise.tensor.plans.words import HUGGING_FACE_WORDS, OUR_WORDS

Table = Mapping[str, str | Sequence[str]]


def table_plan(model: nn.Module, table: Table, degree: int) -> TensorPlan:
    """The plan that a table describes.

    Args:
        model: whose module names are matched.
        table: pattern of module names (`*` stands for anything) to an entry or several; of styles, the last that
            matches a module counts.
        degree: ranks of the tensor-parallel group.

    Raises:
        ConfigError: a pattern matches nothing, or an entry is not understood.
    """
    draft = Draft(model, degree)
    for pattern, entries in table.items():
        names = [name for name in draft.modules if name and fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise unknown_name(pattern, draft.modules, "module")
        for text in entries if isinstance(entries, list | tuple) else [entries]:
            entry = _parse(pattern, text)
            act = _ACTIONS.get(entry.word, _split)
            act(draft, names, entry)
    return draft.plan()


@dataclass(frozen=True)
class _Entry:
    """`word argument ... key=value ...`, and where it stands."""

    place: str
    word: str
    arguments: tuple[str, ...]
    options: Mapping[str, str]

    def number(self, key: str) -> int | None:
        """An option that is a whole number."""
        text = self.options.get(key)
        try:
            return None if text is None else int(text)
        except ValueError:
            raise ConfigError(f"{self.place}: {key}={text} is not a whole number") from None

    def names(self, key: str) -> tuple[str, ...]:
        """An option that is a list with commas."""
        return tuple(name for name in self.options.get(key, "").split(",") if name)


def _parse(pattern: str, text: Any) -> _Entry:
    place = f"tensor-parallel table, {pattern!r}: {text!r}"
    if not isinstance(text, str):
        raise ConfigError(f"{place} is no text; write a style such as 'column', or a list of entries")
    word, *rest = text.split() or [""]
    known = (*OUR_WORDS, *_ACTIONS, *HUGGING_FACE_WORDS)
    if word not in known:
        close = difflib.get_close_matches(word, known, n=2)
        cure = f"did you mean {' or '.join(close)}?" if close else f"words are {', '.join((*OUR_WORDS, *_ACTIONS))}"
        raise ConfigError(f"{place}: {word!r} is no style; {cure}")
    options = dict(each.split("=", 1) for each in rest if "=" in each)
    legal = _OPTIONS.get(word, ("units", "parts"))
    for key in options:
        if key not in legal:
            raise ConfigError(f"{place}: {key!r} is no option of {word!r}; it takes {', '.join(legal) or 'none'}")
    return _Entry(place, word, tuple(each for each in rest if "=" not in each), options)


def _split(draft: Draft, names: list[str], entry: _Entry) -> None:
    style = OUR_WORDS.get(entry.word) or HUGGING_FACE_WORDS[entry.word]
    if entry.arguments:
        raise ConfigError(f"{entry.place}: {entry.arguments[0]!r} is not understood; options are units= and parts=")
    for name in names:
        draft.layer(name, style)
        if entry.options and name in draft.layers:
            size = split_size(draft.modules[name], name, style.kind)
            draft.layers[name] = replace(draft.layers[name], parts=_parts(name, size, entry))


def _parts(name: str, size: int, entry: _Entry) -> tuple[Part, ...]:
    """`parts=2` are equal ones; `parts=512:8+128:2` have 512 and 128 features in 8 and 2 units."""
    text, units = entry.options.get("parts", "1"), entry.number("units")
    if ":" not in text and "+" not in text:
        parts = equal_parts(name, size, entry.number("parts") or 1)
        return tuple(Part(part.size, units) for part in parts)
    try:
        pairs = [part.partition(":") for part in text.split("+")]
        return tuple(Part(int(size), int(units) if units else None) for size, _, units in pairs)
    except ValueError:
        raise ConfigError(f"{entry.place}: parts={text} is not understood; write such as 512:8+128:2") from None


def _region(draft: Draft, names: list[str], entry: _Entry) -> None:
    whole = entry.names("whole")
    if not entry.arguments and not whole:
        raise ConfigError(f"{entry.place}: which arguments enter? write such as 'region x'")
    draft.regions += [Region(name, entry.arguments, whole) for name in names]


def _stack(draft: Draft, names: list[str], entry: _Entry) -> None:
    if len(entry.arguments) != 1:
        raise ConfigError(f"{entry.place}: which argument is split? write such as 'stack x last=norm'")
    # The children of a matching block match too where the pattern ends in `*`.
    blocks = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    last = entry.names("last")
    draft.stacks.append(SequenceStack(blocks[0], entry.arguments[0], (*blocks, *last)[-1], (*blocks, *last)))


def _local(draft: Draft, names: list[str], entry: _Entry) -> None:
    for name in names:
        for attribute in entry.arguments:
            value = getattr(draft.modules[name], attribute, None)
            if not isinstance(value, int):
                raise ConfigError(f"{entry.place}: {name} has no attribute {attribute!r} that is a whole number")
            check_divides(draft.degree, value, f"{name}.{attribute}")
            draft.attributes.append((name, attribute, value // draft.degree))


def _dropout(draft: Draft, names: list[str], entry: _Entry) -> None:
    dim = entry.number("dim")
    if dim is None:
        raise ConfigError(f"{entry.place}: along which dim is the tensor split? write such as '{entry.word} dim=1'")
    draft.dropouts += [SplitDropout(name, dim, entry.word == "functional-dropout") for name in names]


_ACTIONS: Mapping[str, Callable[[Draft, list[str], _Entry], None]] = {
    "region": _region,
    "stack": _stack,
    "local": _local,
    "dropout": _dropout,
    "functional-dropout": _dropout,
}
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "region": ("whole",),
    "stack": ("last",),
    "local": (),
    "dropout": ("dim",),
    "functional-dropout": ("dim",),
    "replicate": (),
    "partial": (),
}
