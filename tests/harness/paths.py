"""Folders of the repository that tests read from."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
SOURCE: Final = ROOT / "src" / "shardwise"
DATA: Final = ROOT / "tests" / "data"
BENCHMARKS: Final = ROOT / "benchmarks"
DOCS: Final = ROOT / "docs"
