"""Offers other libraries' names over this one's engine."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any


def submodules(package: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package whose modules are imported when they are first used."""

    def get(name: str) -> Any:
        if name.startswith("_") or find_spec(f"{package}.{name}") is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(f"{package}.{name}")

    return get
