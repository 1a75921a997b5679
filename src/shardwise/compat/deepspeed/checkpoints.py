"""Find a checkpoint by its tag, and what a script has saved beside the states."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.checkpoint.load import LoadReport


def latest_tag(folder: Path) -> str | None:
    """Return the tag that `folder/latest` names; None where there is none."""
    try:
        return (folder / "latest").read_text().strip() or None
    except OSError:
        return None


def read_client_state(report: LoadReport) -> tuple[dict[str, Any], Mapping[str, int]]:
    """Return what a script has saved by `client_state`, and the engine's counters."""
    extra = report.extra if isinstance(report.extra, dict) else {}
    return dict(extra.get("client_state", {})), extra.get("deepspeed", {})


def write_zero_to_fp32(folder: Path) -> None:
    """Write the script that makes one fp32 state dict of a checkpoint."""
