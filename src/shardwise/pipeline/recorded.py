"""What a Hugging Face model records of its blocks beside what they return, such as the logits of routers.

While such a model runs, hooks of transformers append it to lists, and the model's loss may read these at the end. So it
travels beside the output of a stage's last unit: the next stage's lists begin with it. transformers is not imported:
where nobody has, no model records.

>>> with_recorded(7)  # no model runs
7
"""

from __future__ import annotations

import sys
from typing import Any, Final, NamedTuple

_MODULE: Final = "transformers.utils.output_capturing"


class Recorded(NamedTuple):
    """A boundary value, and what was recorded until there."""

    output: Any
    lists: dict[str, list[Any]]


def with_recorded(output: Any) -> Any:
    """What travels, where `output` is the boundary value and the model has recorded something."""
    lists = {key: list(items) for key, items in _active().items() if isinstance(items, list) and items}
    return Recorded(output, lists) if lists else output


def without_recorded(value: Any) -> Any:
    """The boundary value of what has travelled."""
    return value.output if isinstance(value, Recorded) else value


def put_recorded(value: Any) -> None:
    """Let the lists of the model that runs begin with what has travelled; to be called where the sender's ended."""
    active = _active()
    for key, items in value.lists.items() if isinstance(value, Recorded) else ():
        if isinstance(active.get(key), list):
            active[key][:] = items


def _active() -> dict[str, Any]:
    """The lists of the model that runs, by what they hold."""
    collector = getattr(sys.modules.get(_MODULE), "_active_collector", None)
    return (collector.get() if collector is not None else None) or {}
