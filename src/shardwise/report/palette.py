"""Choose the colours of actions, equal in all drawings: a hue for each kind, a lighter shade for each later stage.

>>> fill(ActionKind.FORWARD), fill(ActionKind.FORWARD, chunk=1, num_chunks=2)
('#2f6fb7', '#97b7db')
>>> ink(fill(ActionKind.FORWARD)), ink(fill(ActionKind.FORWARD, chunk=1, num_chunks=2))
('#ffffff', '#14181f')
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from shardwise.schedule import ActionKind

DARK_INK = "#14181f"
LIGHT_INK = "#ffffff"

_HUES: Mapping[ActionKind, str] = MappingProxyType(
    {
        ActionKind.FORWARD: "#2f6fb7",
        ActionKind.RECOMPUTE: "#8a6fc8",
        ActionKind.BACKWARD: "#2b8a5a",
        ActionKind.BACKWARD_INPUT: "#1f9aa0",
        ActionKind.BACKWARD_WEIGHT: "#d99a1c",
        ActionKind.SEND: "#c2557f",
        ActionKind.RECEIVE: "#e59ab8",
        ActionKind.UNSHARD: "#7d8794",
        ActionKind.RESHARD: "#b4bcc6",
        ActionKind.REDUCE: "#5a4a42",
        ActionKind.FETCH: "#6fae3d",
        ActionKind.EVICT: "#a8772f",
        ActionKind.STEP: "#c8452e",
    }
)
_LIGHTEST = 0.75
_MID_LUMINANCE = 150


def fill(kind: ActionKind, chunk: int = 0, num_chunks: int = 1) -> str:
    """Return the colour of an action as `#rrggbb`.

    Args:
        kind: kind of the action.
        chunk: which of its rank's stages it belongs to, from 0.
        num_chunks: the most stages that a rank has.
    """
    whiteness = chunk / num_chunks if num_chunks <= 2 else _LIGHTEST * chunk / (num_chunks - 1)
    return _blend(_HUES[kind], LIGHT_INK, whiteness)


def ink(colour: str) -> str:
    """Return a colour for text that can be read on `colour`."""
    red, green, blue = _channels(colour)
    return DARK_INK if 0.299 * red + 0.587 * green + 0.114 * blue > _MID_LUMINANCE else LIGHT_INK


def _blend(colour: str, other: str, share: float) -> str:
    """Mix `share` of `other` into `colour`, channel by channel."""
    pairs = zip(_channels(colour), _channels(other), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
