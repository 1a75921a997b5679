"""This module is what a program needs to find Shardwise under the name deepspeed.

It is apart from the rest of `launch/` so that `import deepspeed` loads next to nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

DEEPSPEED_VERSION: Final = "0.19.8"
_FOLDER: Final = Path(__file__).parents[1] / "compat" / "deepspeed_path"


def deepspeed_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables under which Python finds this library as `deepspeed`, and a shell the program `deepspeed`.

    Children inherit them; an installed DeepSpeed is hidden. This interpreter's programs come next on the PATH, since
    `python` and `torchrun` must see this library.
    """
    programs = (_FOLDER / "bin", Path(sys.executable).parent)
    return {
        "PYTHONPATH": _prepended((_FOLDER,), environ.get("PYTHONPATH")),
        "PATH": _prepended(programs, environ.get("PATH", os.defpath)),
    }


def _prepended(folders: tuple[Path, ...], before: str | None) -> str:
    first = [str(folder) for folder in folders]
    return os.pathsep.join(
        first + [entry for entry in (before or "").split(os.pathsep) if entry and entry not in first]
    )


def announce(version: str) -> None:
    """Say on rank 0 that this version of Shardwise answers to `import deepspeed`."""
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        print(f"deepspeed is Shardwise {version}, as DeepSpeed {DEEPSPEED_VERSION}", file=sys.stderr)
