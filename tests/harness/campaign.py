"""A campaign of mutations: some seeds of each kind here, or as many as wanted in a process of its own with figures.

python -m harness.campaign --seeds 0-2000              all kinds, in turn, from the folder `tests`
python -m harness.campaign --seeds 0-100 --kind check_hub
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Timer
from types import MappingProxyType
from typing import Any, Final

from harness import mutations
from harness.campaign_kinds import (
    check_cache,
    check_chats,
    check_checkpoint,
    check_deepspeed,
    check_hub,
    check_megatron,
    check_model,
    check_plan,
    check_run,
    make,
)
from harness.campaign_more import MORE, make_more
from harness.make_deepspeed import FOLDER
from harness.mutations import LimitError
from harness.paths import SOURCE
from shardwise.config.resolve import Config
from shardwise.train.job_model import job_model, open_tokenizer

LIMIT_S, LIMIT_BYTES = 10.0, 2**30
_FIRST = (
    (check_checkpoint, "step-00000100"),
    (check_hub, "hub"),
    (check_model, "hub"),
    (check_deepspeed, str(FOLDER)),
    (check_cache, "cache"),
    (check_plan, "plan"),
    (check_run, "run"),
    (check_megatron, "megatron"),
    (check_chats, "chats"),
)
KINDS: Final[Mapping[str, Any]] = MappingProxyType(
    {check.__name__: (check, source) for check, source in (*_FIRST, *MORE)}
)
# A child that says nothing for so long hangs where no signal of Python's reaches.
_SILENCE_S: Final = 90.0


@dataclass(frozen=True)
class Outcome:
    """What came of one seed of a kind.

    Attributes:
        kind: its name.
        seed: the number that it was drawn by.
        verdict: "read", "refused", "silent" (read as something else, or said wrongly), "traceback" or "limit".
        wall_s: of all that read it.
        cpu_s: of the processor.
        num_bytes: the most memory that a reader took, of this process.
        said: the refusal, or what went wrong.
    """

    kind: str
    seed: int
    verdict: str
    wall_s: float = 0.0
    cpu_s: float = 0.0
    num_bytes: int = 0
    said: str = ""

    @property
    def is_bad(self) -> bool:
        is_beyond = self.cpu_s > LIMIT_S or self.num_bytes > LIMIT_BYTES
        return is_beyond or self.verdict not in ("read", "refused")


def run_here(kind: str, seeds: Iterable[int], folder: Path) -> Iterator[Outcome]:
    """Make the files of all kinds in a folder that is not there yet, and try seeds of one kind, or of all in turn."""
    whole, place = folder / "whole", folder / "place"
    if not whole.exists():
        make(whole)
        (whole / "empty").mkdir()
        make_more(whole)
        (place / "none").mkdir(parents=True)
        config = Config.from_dict({"model": {"path": str(whole / "hub")}})
        job_model(config).skeleton()  # what is imported takes time and memory only once
        open_tokenizer(config, whole / "hub")
    for seed in seeds:
        yield _tried(kind, seed, whole, place)


def _tried(kind: str, seed: int, whole: Path, place: Path) -> Outcome:
    check, source = KINDS[kind]
    mutations.measured.clear()
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    verdict, said = "read", ""
    try:
        check(whole / source, place, random.Random(f"{kind} {seed}"))
        said = next((each.said for each in mutations.measured if each.said), "")
        verdict = "refused" if said else "read"
    except LimitError as error:
        verdict, said = "limit", str(error)
    except AssertionError as error:
        verdict, said = "silent", str(error)
    except Exception as error:
        verdict, said = "traceback", f"{type(error).__name__}: {error}"
    most = max((each.num_bytes for each in mutations.measured), default=0)
    seconds, cpu_s = time.monotonic() - start_s, time.process_time() - start_cpu_s
    return Outcome(kind, seed, verdict, seconds, cpu_s, most, said[:1000])


def run_apart(kinds: Sequence[str], first: int, last: int, folder: Path, *, shows: bool = False) -> list[Outcome]:
    """Try the seeds from `first` to before `last` of each kind in one process of its own, which may hang or die."""
    command = [sys.executable, "-m", "harness.campaign", "--child", ",".join(kinds), f"{first}-{last}", str(folder)]
    outcomes: list[Outcome] = []
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert child.stdout is not None
        heard = _heard(child)
        for line in heard:
            outcomes.append(Outcome(**json.loads(line)))
            if shows and outcomes[-1].is_bad:
                print(outcomes[-1], flush=True)
        child.wait()
        errors.seek(0)
        if child.returncode:
            said = f"the process ended with {child.returncode}: {errors.read()[-600:]}"
            outcomes.append(Outcome(outcomes[-1].kind if outcomes else kinds[0], last, "limit", said=said))
    return outcomes


def _heard(child: subprocess.Popen[str]) -> Iterator[str]:
    """The lines of a child, which is killed where it says nothing for long."""
    assert child.stdout is not None
    while True:
        timer = Timer(_SILENCE_S, child.kill)
        timer.start()
        line = child.stdout.readline()
        timer.cancel()
        if not line:
            return
        if line.startswith("{"):
            yield line


def table(outcomes: Iterable[Outcome]) -> str:
    """Figures of each kind."""
    lines = [f"{'kind':18} seeds  read refused silent traceback limit >10s >1GiB  most CPU s  most wall s  most MiB"]
    found = list(outcomes)
    for kind in [*dict.fromkeys(each.kind for each in found), ""]:
        of_kind = [each for each in found if each.kind == kind or not kind]
        counts = [sum(each.verdict == verdict for each in of_kind) for verdict in ("read", "refused", "silent")]
        counts += [sum(each.verdict == verdict for each in of_kind) for verdict in ("traceback", "limit")]
        late = sum(each.cpu_s > LIMIT_S for each in of_kind)
        large = sum(each.num_bytes > LIMIT_BYTES for each in of_kind)
        most = max((each.num_bytes for each in of_kind), default=0) / 2**20
        lines.append(
            f"{(kind or 'all').removeprefix('check_'):18} {len(of_kind):5} {counts[0]:5} {counts[1]:7} {counts[2]:6} "
            f"{counts[3]:9} {counts[4]:5} {late:4} {large:5} {max((each.cpu_s for each in of_kind), default=0):11.1f} "
            f"{max((each.wall_s for each in of_kind), default=0):12.1f} {most:9.0f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the command line of the module's docstring, or be its child."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--child", nargs=3)
    parser.add_argument("--seeds", default="0-100", help="FIRST-LAST, of each kind")
    parser.add_argument("--kind", action="append", choices=KINDS)
    given = parser.parse_args()
    if given.child:
        kinds, seeds, folder = given.child
        for kind in kinds.split(","):
            for outcome in run_here(kind, range(*map(int, seeds.split("-"))), Path(folder)):
                print(json.dumps(asdict(outcome)), flush=True)
        return
    first, last = map(int, given.seeds.split("-"))
    with tempfile.TemporaryDirectory() as name:
        print(table(run_apart(given.kind or list(KINDS), first, last, Path(name) / "made", shows=True)))


if __name__ == "__main__":
    sys.path.insert(0, str(SOURCE.parent))
    main()
