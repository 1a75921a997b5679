"""Print the ways that calls take through the library: how many functions, how many files, how often back up.

Two ranks over gloo train the tiny decoder while rank 0 notes each call of a function of the library. The decoder stands
for the user's model, so functions of `models/` do not count.

- A *chain* is the calls from the place where the library is entered last (a hook, a method of the engine) to
  torch.distributed. Each distinct chain is a row; `--where` prints its functions.
- A *journey* is all that happens within one function: optimizer step, save, load, `initialize`, a whole step. Its row
  has the files that it enters, their lines, the depth, and its climbs: pairs of functions where one calls into a file
  that waits further down the stack, with another file between them.

    python benchmarks/journeys.py
    PYTHONPATH=OTHER/src python benchmarks/journeys.py    # of other sources
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import shardwise
from shardwise.models import Decoder, lm_loss, preset

SOURCE: Final = f"{Path(shardwise.__file__).parent}/"
MODELS: Final = f"{SOURCE}models/"
NUM_RANKS: Final = 2
CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "zero.stage=3": {"zero": {"stage": 3}},
    "mesh.pp=2": {"mesh": {"pp": 2}, "zero": {"stage": 1}},
}
C10D: Final = ("torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py")
# The function that is the optimizer step, from the last gradient on.
STEP: Final = ("engine/step.py", "update")
Function = tuple[str, str]  # file below src/shardwise, and name


@dataclass
class Journey:
    """Collects what happens while a function runs."""

    files: set[str] = field(default_factory=set)
    climbs: set[tuple[Function, Function]] = field(default_factory=set)
    num_calls: int = 0
    depth: int = 0

    def add(self, stack: list[Function]) -> None:
        """Note the call that the top of the stack is."""
        self.files.add(stack[-1][0])
        self.num_calls += 1
        self.depth = max(self.depth, len(stack))
        if len(stack) > 2 and stack[-2][0] != stack[-1][0] and stack[-1][0] in {file for file, _ in stack[:-2]}:
            self.climbs.add((stack[-2], stack[-1]))


class Trace:
    """Follows the calls of this thread while it is on."""

    def __init__(self) -> None:
        self.chains: dict[tuple[Function, ...], int] = {}
        self._stack: list[Function | None] = []  # None: a function of another library
        self._journey: Journey | None = None
        self.step = Journey()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            name = frame.f_code.co_filename
            is_ours = name.startswith(SOURCE) and not (name.startswith(MODELS) or frame.f_code.co_name.startswith("<"))
            self._stack.append((name.removeprefix(SOURCE), frame.f_code.co_qualname) if is_ours else None)
            ours = [function for function in self._stack if function is not None]
            if is_ours and self._journey is not None:
                self._journey.add(ours)
                if STEP in ours:
                    self.step.add(ours[ours.index(STEP) :])
            if name.endswith(C10D) and len(self._stack) > 1 and self._stack[-2] is not None:
                chain = self._last_of_ours()
                self.chains[chain] = self.chains.get(chain, 0) + 1
        elif event == "return" and self._stack:
            self._stack.pop()

    def _last_of_ours(self) -> tuple[Function, ...]:
        chain: list[Function] = []
        for function in reversed(self._stack[:-1]):
            if function is None:
                break
            chain.insert(0, function)
        return tuple(chain)

    @contextmanager
    def of(self, journey: Journey) -> Iterator[None]:
        self._journey, self._stack = journey, []
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)


def batch(rank: int) -> Any:
    return torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(rank))  # [B, S]


def trace_config(name: str, folder: str) -> tuple[dict[str, Journey], Trace]:
    """Take each journey once under one of `CONFIGS`, the steps after two others, when all is warm."""
    journeys: dict[str, Journey] = {}
    trace = Trace()
    torch.manual_seed(0)
    model = Decoder(replace(preset("tiny"), vocab_size=64))
    sections = {**CONFIGS[name], "run": {"device": "cpu"}, "precision": {"param": "fp32"}}
    with trace.of(journeys.setdefault("initialize", Journey())):
        engine = shardwise.initialize(model, sections, loss_fn=lm_loss)
    trace.chains.clear()
    trace.step = Journey()
    micro_batches = [batch(0 if "pp" in name else dist.get_rank())]
    for _ in range(2):
        engine.train_step(micro_batches)
    with trace.of(journeys.setdefault("train_step", Journey())):
        engine.train_step(micro_batches)
    journeys["  its optimizer step"] = trace.step
    with trace.of(journeys.setdefault("save", Journey())):
        engine.save(folder)
    with trace.of(journeys.setdefault("load", Journey())):
        engine.load(folder)
    engine.close()
    return journeys, trace


def run_rank(rank: int, store: str, folder: str, shows_where: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_RANKS)
    trace_config(next(iter(CONFIGS)), f"{folder}/warm")  # all is imported
    for name in CONFIGS:
        journeys, trace = trace_config(name, f"{folder}/{name}")
        if rank == 0:
            show(name, journeys, trace, shows_where)
    dist.destroy_process_group()


def show(name: str, journeys: Mapping[str, Journey], trace: Trace, shows_where: bool) -> None:
    print(f"\n{name:24} {'files':>6} {'lines':>6} {'depth':>6} {'calls':>7} {'climbs':>7}")
    for title, journey in journeys.items():
        lines = sum(Path(SOURCE, file).read_text().count("\n") for file in journey.files)
        figures = (len(journey.files), lines, journey.depth, journey.num_calls, len(journey.climbs))
        print(f"  {title:22} {figures[0]:6} {figures[1]:6} {figures[2]:6} {figures[3]:7} {figures[4]:7}")
        if shows_where:
            print(*(f"      {file}" for file in sorted(journey.files)), sep="\n")
            for caller, called in sorted(journey.climbs):
                print(f"      {' '.join(caller)} climbs to {' '.join(called)}")
    print(f"  {'chain':44} {'times':>5} {'calls':>6} {'files':>6}")
    for chain, times in trace.chains.items():
        title = f"{chain[0][1]} .. {chain[-1][1]}"
        print(f"  {title:44} {times:5} {len(chain):6} {len({file for file, _ in chain}):6}")
        if shows_where:
            print(*(f"      {file} {function}" for file, function in chain), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--where", action="store_true", help="print the files and climbs of each journey, the functions of each chain"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run_rank, (f"{folder}/store", folder, options.where), nprocs=NUM_RANKS)


if __name__ == "__main__":
    main()
