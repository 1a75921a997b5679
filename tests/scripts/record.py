"""Run a public script as it is, and write down the loss of each backward pass.

    torchrun --nproc_per_node 2 record.py --to FOLDER [options] SCRIPT [its arguments]

Each rank appends one number a line to `FOLDER/losses-RANK`. The script's text is not touched. What a machine without
GPUs and without network lacks is put beside it: names of `torch.cuda` that do nothing, an image data set, and with
`--plain` a `deepspeed` that is plain PyTorch on one process.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts import standins


class Recorder:
    """Writes the losses that pass through the outermost of the calls it has wrapped."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.depth = 0

    def around(self, call: Callable[..., Any], *, takes_loss: int | None) -> Callable[..., Any]:
        """Return `call` with its loss written down.

        Args:
            call: a backward pass, or a whole step.
            takes_loss: which argument the loss is; None for what the call returns.
        """

        @functools.wraps(call)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if self.depth == 0 and takes_loss is not None:
                self.write(args[takes_loss] if len(args) > takes_loss else kwargs["loss"])
            self.depth += 1
            try:
                result = call(*args, **kwargs)
            finally:
                self.depth -= 1
            if self.depth == 0 and takes_loss is None:
                self.write(result)
            return result

        return recorded

    def write(self, loss: Tensor) -> None:
        with self.path.open("a") as file:
            file.write(f"{loss.detach().double().item()!r}\n")

    def wrap_deepspeed(self, deepspeed: Any) -> None:
        """Record what engines of `deepspeed.initialize` are given, or in a pipeline what they return."""
        initialize = deepspeed.initialize

        def initialize_recorded(*args: Any, **kwargs: Any) -> Any:
            engine, *others = initialize(*args, **kwargs)
            if hasattr(engine, "train_batch"):
                engine.train_batch = self.around(engine.train_batch, takes_loss=None)
            else:
                engine.backward = self.around(engine.backward, takes_loss=0)
            return engine, *others

        deepspeed.initialize = initialize_recorded


def sample_by_row() -> None:
    """Key the noise of sampling by a sample's place in the global batch: ranks draw what one process draws."""
    import transformers

    place = {"generation": 0, "token": 0}
    generate = transformers.GenerationMixin.generate

    def generate_counted(*args: Any, **kwargs: Any) -> Any:
        place.update(generation=place["generation"] + 1, token=0)
        return generate(*args, **kwargs)

    def multinomial(probabilities: Tensor, num_samples: int, *args: Any, **kwargs: Any) -> Tensor:
        first = int(os.environ.get("RANK", "0")) * len(probabilities)
        keys = [f"{place['generation']},{place['token']},{first + row}" for row in range(len(probabilities))]
        place["token"] += 1
        draws = [int.from_bytes(hashlib.sha256(key.encode()).digest()[:6]) / 2**48 for key in keys]
        sums = probabilities.double().cumsum(-1)  # [B, V]
        return torch.searchsorted(sums, torch.tensor(draws, dtype=torch.float64)[:, None] * sums[:, -1:])

    transformers.GenerationMixin.generate = generate_counted
    torch.multinomial = multinomial


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--plain", action="store_true", help="deepspeed is plain PyTorch on one process")
    parser.add_argument("--accelerate", action="store_true", help="the script makes an Accelerator itself")
    parser.add_argument("--deepspeed", action="store_true", help="the script calls deepspeed itself")
    parser.add_argument("--sample-by-row", action="store_true", help="sampling does not depend on the ranks")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)  # some scripts leave their weights to chance
    standins.install_modules(Path(given.script).read_text())
    recorder = Recorder(given.to / f"losses-{os.environ.get('RANK', '0')}")
    Tensor.backward = recorder.around(Tensor.backward, takes_loss=0)  # type: ignore[method-assign]
    if given.plain and given.deepspeed:
        standins.install_plain_deepspeed()
    if given.deepspeed:
        import deepspeed

        recorder.wrap_deepspeed(deepspeed)
    else:
        import accelerate

        accelerate.Accelerator.backward = recorder.around(accelerate.Accelerator.backward, takes_loss=1)
        if given.accelerate:
            # Unasked, Accelerate shuffles by a seed of its own on ranks, and by torch's on one process.
            seeded = functools.partial(accelerate.DataLoaderConfiguration, use_seedable_sampler=True, data_seed=7)
            accelerate.accelerator.DataLoaderConfiguration = seeded
        if given.accelerate and not given.plain:
            # Without this, Accelerate finds no back end on a machine without GPUs and takes each rank for the only one.
            accelerate.PartialState(cpu=True)
        elif given.accelerate:
            from accelerate.utils import deepspeed as names

            # Accelerate leaves these out where there is no DeepSpeed, and scripts import them all the same.
            accelerate.utils.DummyOptim, accelerate.utils.DummyScheduler = names.DummyOptim, names.DummyScheduler
    if given.sample_by_row:
        sample_by_row()
    sys.argv = [given.script, *given.arguments]
    sys.path[0] = str(Path(given.script).parent)
    runpy.run_path(given.script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
