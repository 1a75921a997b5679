"""Bars of memory by category and of time by part: colours on a terminal, letters elsewhere.

>>> rank = RankMemory(pipeline_rank=0, at_rest={}, peak={"params": 20.0, "activations": 40.0})
>>> print(memory_bar(rank, capacity_bytes=80.0, width=16).plain)
ppppaaaaaaaa····
>>> rank = RankMemory(pipeline_rank=0, at_rest={}, peak={"params": 60.0, "activations": 40.0})
>>> print(memory_bar(rank, capacity_bytes=80.0, width=16).plain)
pppppppppaaa|aaa
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Final

from rich.text import Text

from shardwise.planner.results import MEMORY_CATEGORIES, TIME_PARTS, RankMemory

# A letter for each, and a colour that the eight of every terminal have, or near to one.
MEMORY_MARKS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "params": ("p", "blue"),
        "grads": ("g", "green"),
        "optimizer": ("o", "magenta"),
        "gathered": ("u", "bright_blue"),
        "buckets": ("b", "bright_green"),
        "activations": ("a", "yellow"),
        "logits": ("l", "red"),
        "workspace": ("w", "cyan"),
        "overhead": ("c", "white"),
        "rounding": ("r", "bright_black"),
    }
)
TIME_MARKS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "compute": ("c", "blue"),
        "recompute": ("r", "bright_blue"),
        "tensor": ("t", "magenta"),
        "context": ("x", "bright_magenta"),
        "experts": ("e", "bright_cyan"),
        "bubble": ("b", "white"),
        "data": ("d", "yellow"),
        "offload": ("o", "red"),
        "step": ("s", "green"),
        "other": ("·", "bright_black"),
    }
)
_FREE: Final = "·"
_EDGE: Final = "|"
_BLOCK: Final = "█"


def memory_bar(rank: RankMemory, capacity_bytes: float, width: int, *, is_coloured: bool = False) -> Text:
    """What one rank holds at its peak; what is beyond the device's memory stands behind a bar.

    Args:
        rank: by category.
        capacity_bytes: of the device.
        width: in characters, all of it.
        is_coloured: whether categories differ by colour and not by letter.
    """
    peak = rank.peak_bytes
    bar = _bar([(name, rank.peak.get(name, 0.0)) for name in MEMORY_CATEGORIES], MEMORY_MARKS, is_coloured)
    if peak <= capacity_bytes:
        filled = _filled(bar, width * peak / capacity_bytes)
        return filled.append(_FREE * (width - len(filled)), style="dim")
    filled = _filled(bar, width - 1)
    edge = round((width - 1) * capacity_bytes / peak)
    return Text.assemble(filled[:edge], (_EDGE, "bold red"), filled[edge:])


def time_bar(parts: Mapping[str, float], width: int, *, is_coloured: bool = False) -> Text:
    """A step by its parts, in all as long as `width`."""
    return _filled(_bar([(name, parts.get(name, 0.0)) for name in TIME_PARTS], TIME_MARKS, is_coloured), width)


def legend(
    sizes: Mapping[str, float], marks: Mapping[str, tuple[str, str]], *, is_coloured: bool, digits: int = 1
) -> list[Text]:
    """The parts of a bar that are not nothing, by name and size.

    >>> sizes = {"params": 20.04, "activations": 40.0, "logits": 0.001}
    >>> [each.plain for each in legend(sizes, MEMORY_MARKS, is_coloured=False)]
    ['p params 20.0', 'a activations 40.0']
    """
    items = []
    for name, (letter, colour) in marks.items():
        size = sizes.get(name, 0.0)
        if round(size, digits) > 0:
            sign = ("■", colour) if is_coloured else (letter, "bold")
            items.append(Text.assemble(sign, f" {name} {size:,.{digits}f}"))
    return items


Segments = Sequence[tuple[str, str, float]]
"""Of each part its character, its style and its size."""


def _bar(sizes: Sequence[tuple[str, float]], marks: Mapping[str, tuple[str, str]], is_coloured: bool) -> Segments:
    return [
        (_BLOCK if is_coloured else marks[name][0], marks[name][1] if is_coloured else "", size) for name, size in sizes
    ]


def _filled(segments: Segments, width: float) -> Text:
    """Parts in proportion, with rounded ends, so that all together are as wide as they are to be."""
    total = sum(size for _, _, size in segments) or 1.0
    ends = [round(width * end / total) for end in accumulate(size for _, _, size in segments)]
    text = Text()
    for (character, style, _), start, end in zip(segments, [0, *ends], ends, strict=False):
        text.append(character * (end - start), style=style)
    return text
