"""Runs of `tests/scripts/trainer.py`: Trainer on one plain process, or through the `deepspeed` shim on ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from harness.paths import ROOT
from scripts.catalogue import trainer_config, write_config
from scripts.run import as_deepspeed, environment, torchrun

SCRIPT: Final = ROOT / "tests" / "scripts" / "trainer.py"
GLOBAL_BATCH: Final = 4
PATIENCE_S: Final = 240


class Run:
    """A run under way."""

    def __init__(self, folder: Path, model: Path, num_ranks: int, zero: str | None, **arguments: Any) -> None:
        """Start it.

        Args:
            folder: where it writes its checkpoints.
            model: a folder of the hub.
            num_ranks: how many processes share a batch of `GLOBAL_BATCH`.
            zero: a name of `scripts.catalogue.ZERO`; None for one process without DeepSpeed.
            arguments: of `TrainingArguments` and of the script; `sections` are put into DeepSpeed's config.
        """
        folder.mkdir(parents=True, exist_ok=True)
        sections = arguments.pop("sections", {})
        self.folder = folder
        given = {
            "output_dir": str(folder),
            "per_device_train_batch_size": GLOBAL_BATCH // num_ranks,
            "learning_rate": 5e-3,
            "lr_scheduler_type": "constant",
            **arguments,
        }
        if zero:
            given["deepspeed"] = write_config(folder, trainer_config(zero) | sections)
        (folder / "arguments.json").write_text(json.dumps(given))
        command = [str(SCRIPT), str(folder / "arguments.json"), str(model)]
        command = as_deepspeed([*torchrun(num_ranks), *command]) if zero else [sys.executable, *command]
        self.log = (folder / "log").open("w+")
        # Freed blocks go back to the system at once where memory is measured.
        more = {"MALLOC_MMAP_THRESHOLD_": "65536"} if "measure" in arguments else {}
        self.process = subprocess.Popen(command, env=environment(**more), stdout=self.log, stderr=self.log)

    def wait(self, *, fails: bool = False) -> Run:
        """Wait for the end, and say what went wrong where it is not the one expected."""
        status = self.process.wait(PATIENCE_S)
        self.log.close()
        assert (status != 0) == fails, (self.folder / "log").read_text()[-4000:]
        return self

    def history(self) -> list[Mapping[str, float]]:
        """Return loss, norm and rate of each step, those before a resumption too."""
        rows = json.loads((self.folder / "trainer_state.json").read_text())["log_history"]
        return [{key: row[key] for key in ("loss", "grad_norm", "learning_rate")} for row in rows if "loss" in row]


def assert_same_history(run: Run, other: Run, *, tolerance: float = 1e-6) -> None:
    """Compare what two runs logged at each step."""
    these, those = run.history(), other.history()
    assert len(these) == len(those) > 0
    for this, that in zip(these, those, strict=True):
        assert all(abs(this[key] - that[key]) <= tolerance * max(1.0, abs(that[key])) for key in this), (this, that)


def whole_checkpoints(folder: Path) -> Sequence[str]:
    """Return the checkpoints that Trainer can go on from, by name."""
    return sorted(path.parent.name for path in folder.glob("checkpoint-*/global_step*"))
