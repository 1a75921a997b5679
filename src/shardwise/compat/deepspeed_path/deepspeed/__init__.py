"""Answers `import deepspeed` with `shardwise.compat.deepspeed`: each module is the same object under both names.

The folder above this one goes on PYTHONPATH, as `shardwise as-deepspeed` prints it; nothing is patched.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from shardwise import __version__
from shardwise.launch.as_deepspeed import announce


class _Names(MetaPathFinder, Loader):
    """Finds `deepspeed.x` where `shardwise.compat.deepspeed.x` is."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("deepspeed.") or importlib.util.find_spec(f"shardwise.compat.{fullname}") is None:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        # What stands here when this returns is what the import system hands out; `module` is dropped.
        sys.modules[module.__name__] = importlib.import_module(f"shardwise.compat.{module.__name__}")


# First: the path of the package would find the file of each module once more, as a second module.
sys.meta_path.insert(0, _Names())
announce(__version__)
sys.modules[__name__] = importlib.import_module("shardwise.compat.deepspeed")
