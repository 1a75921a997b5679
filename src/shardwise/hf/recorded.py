"""What a Hugging Face model that runs has recorded of its modules' outputs, for its own output and loss."""

from __future__ import annotations

import sys
from typing import Any, Final

_MODULE: Final = "transformers.utils.output_capturing"


def recorded_lists() -> dict[str, list[Any]]:
    """Return the running model's lists of recorded outputs, by what they hold."""
    collector = getattr(sys.modules.get(_MODULE), "_active_collector", None)
    active = (collector.get() if collector is not None else None) or {}
    return {key: items for key, items in active.items() if isinstance(items, list)}
