"""Uses that scripts make of Hugging Face's libraries and of Lightning give the numbers of one plain process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from harness.local_hub import make_hub
from harness.paths import ROOT
from scripts.catalogue import trainer_config, write_config
from scripts.features import CASES, NUM_RANKS
from scripts.run import as_deepspeed, environment, torchrun

NEEDS = {"adapters": "peft", "generate": "trl", "references": "trl"}
NEEDS |= dict.fromkeys(("lightning2", "lightning3"), "lightning")
PATIENCE_S = 240


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Path:
    return make_hub(tmp_path_factory.mktemp("hub"))


def run(case: str, model: Path, folder: Path, zero: str | None = None, num_ranks: int = 1) -> list[Any]:
    """Run a case of `tests/scripts/features.py`, and return what each rank has found."""
    folder.mkdir()
    command = [str(ROOT / "tests" / "scripts" / "features.py"), case, str(model), str(folder)]
    command = [*(torchrun(num_ranks) if num_ranks > 1 else [sys.executable]), *command]
    if zero:
        command = as_deepspeed([*command, write_config(folder, trainer_config(zero))])
    ended = subprocess.run(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE_S, check=False
    )
    assert ended.returncode == 0, ended.stdout.decode(errors="replace")[-4000:]
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(num_ranks)]


def assert_close(found: Any, plain: Any) -> None:
    if isinstance(plain, list):
        assert len(found) == len(plain) > 0
        for this, that in zip(found, plain, strict=True):
            assert_close(this, that)
    else:
        assert found == pytest.approx(plain, rel=1e-6, abs=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "zero", "num_ranks"),
    [
        *((case, "zero3", NUM_RANKS) for case in CASES if case != "train"),
        ("train", "zero3", 1),  # without a launcher
        ("references", "zero2", NUM_RANKS),
        ("train_twice", "zero2", NUM_RANKS),
        ("generate", "zero3+offload", NUM_RANKS),
        ("access", "zero3+offload", NUM_RANKS),
        ("predict", "zero3+offload", NUM_RANKS),
    ],
)
def test_a_use_has_the_numbers_of_a_plain_process(hub, tmp_path, case, zero, num_ranks) -> None:
    if case in NEEDS:
        pytest.importorskip(NEEDS[case])
    (plain,) = run(case, hub / "llama", tmp_path / "plain")
    for found in run(case, hub / "llama", tmp_path / "ranks", zero, num_ranks):
        assert_close(found, plain)
