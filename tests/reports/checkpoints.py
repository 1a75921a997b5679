"""Reports on resuming: what was lost, doubled or rounded between a save and the next step."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from reports.kit import (
    ADAMW,
    BLOCK_PLAN,
    LAYOUTS,
    DiffersError,
    Layout,
    LossFn,
    Net,
    Steps,
    Trained,
    adamw,
    check,
    engine_of,
    fill,
    llama,
    near,
    net,
    own,
    plain,
    report,
    squares,
    tokens,
    vectors,
)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Give all ranks one empty folder, which is removed after its use."""
    names: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    try:
        yield Path(names[0])
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(names[0], ignore_errors=True)


def resumed(
    make: Callable[[], nn.Module],
    steps: Steps,
    layout: Layout,
    loss_fn: LossFn | None,
    second: Layout | None = None,
    contents: str = "all",
    **options: Any,
) -> Trained:
    """Train half of the steps, save, load into a new engine, maybe of another layout, and train the other half."""
    result, half = Trained(), len(steps) // 2
    with shared_folder() as folder:
        for part, each in ((steps[:half], layout), (steps[half:], second or layout)):
            number = len(part[0]) // each.num_data_ranks
            with engine_of(make(), each, number, loss_fn, **options) as engine:
                if part is not steps[:half] and result.losses:
                    torch.manual_seed(77)
                    engine.load(folder)
                for batches in part:
                    taken = engine.train_step(own(engine, batches, each))
                    result.losses.append(taken.loss)
                    result.norms.append(taken.grad_norm)
                    result.lrs.append(taken.lr)
                if len(result.losses) == half:
                    engine.save(folder, contents=contents)
                fill(result, engine)
    return result


@report("KempnerInstitute/KempnerForge#115", "resuming", "0 1 2 3 host host3 tp pp cp")
def momentum_after_resume(layout: Layout) -> None:
    """KempnerInstitute/KempnerForge#115: Adam's moments were zero again after each resume."""
    steps = tokens(4)
    found = resumed(llama, steps, layout, None, optimizer=ADAMW)
    check(found, plain(llama(), steps, make=adamw), 1e-5)


@report("KempnerInstitute/KempnerForge#115", "resuming", "0 3 tp pp cp host3")
def momentum_in_another_layout(layout: Layout) -> None:
    """KempnerInstitute/KempnerForge#115: the same, where the second part of the run has another layout."""
    steps, other = tokens(4), {"0": "3", "3": "pp", "tp": "cp", "pp": "tp", "cp": "3", "host3": "0"}[layout.name]
    found = resumed(llama, steps, layout, None, LAYOUTS[other], optimizer=ADAMW)
    check(found, plain(llama(), steps, make=adamw), 1e-5)


class Rows(torch.utils.data.Dataset[Tensor]):
    """Twenty numbered rows."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((8,), float(index), dtype=torch.float64)


def outputs(output: Tensor, _: Any) -> tuple[Tensor, int]:
    """Return the sum of squared outputs, and how many there are."""
    return output.square().sum(), len(output)


@report("KempnerInstitute/KempnerForge#57", "data position", "0 3 tp pp")
def second_resume_in_an_epoch(layout: Layout) -> None:
    """KempnerInstitute/KempnerForge#57: the second resume within an epoch reads rows again."""
    seen: list[list[float]] = [[]]
    for stops in ([5], [1, 2, 2]):
        with shared_folder() as folder:
            for number, stop in enumerate(stops):
                options = {"batch": {"micro_size": 4 // layout.num_data_ranks, "accumulation": 1}}
                with engine_of(net(), layout, 1, outputs, plan=BLOCK_PLAN, **options) as engine:
                    loader = shardwise.data_loader(engine, Rows())
                    if number:
                        loader.load_state_dict(engine.load(folder).extra)
                    for _, batches in zip(range(stop), loader, strict=False):
                        seen[-1] += [float(row[0]) for batch in batches for row in batch]
                        engine.train_step(batches)
                    engine.save(folder, extra=loader.state_dict())
        seen.append([])
    near("rows", torch.tensor(seen[1]), torch.tensor(seen[0]))


class Noisy(Net):
    """Adds noise and drops."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x + 0.1 * torch.randn_like(x)
        return super().forward(nn.functional.dropout(x, 0.3, self.training))


@report("vllm-project/speculators#1027", "resuming", "0 1 2 3 host full pp")
def draws_after_resume(layout: Layout) -> None:
    """vllm-project/speculators#1027: noise and dropout go on with other numbers after a resume."""
    steps, whole = vectors(4, 2), Trained()
    with engine_of(net(Noisy), layout, 2 // layout.num_data_ranks, squares) as engine:
        torch.manual_seed(11 + dist.get_rank())
        for batches in steps:
            whole.losses.append(engine.train_step(own(engine, batches, layout)).loss)
        fill(whole, engine)
    torch.manual_seed(11 + dist.get_rank())
    found = resumed_from(net(Noisy), steps, layout)
    found.norms = []
    check(found, whole)


def resumed_from(model: nn.Module, steps: Steps, layout: Layout) -> Trained:
    """Train in two engines whose generators are not set in between, but by the checkpoint."""
    result = Trained()
    with shared_folder() as folder:
        for part in (steps[:2], steps[2:]):
            with engine_of(model, layout, 2 // layout.num_data_ranks, squares) as engine:
                torch.manual_seed((77 if result.losses else 11) + dist.get_rank())
                if result.losses:
                    engine.load(folder)
                for batches in part:
                    result.losses.append(engine.train_step(own(engine, batches, layout)).loss)
                engine.save(folder)
                fill(result, engine)
    return result


@report("NVIDIA/Model-Optimizer#2322", "masters", "bf16-0 bf16-1 bf16-2 bf16-3")
def masters_after_resume(layout: Layout) -> None:
    """NVIDIA/Model-Optimizer#2322: the fp32 masters were rounded to bf16 by a resume."""
    steps = [[(x.float(), y.float()) for x, y in batches] for batches in vectors(6, 2)]
    small = {**ADAMW, "lr": 1e-4}
    whole = Trained()
    with engine_of(net().float(), layout, 1, squares, optimizer=small) as engine:
        for batches in steps:
            whole.losses.append(engine.train_step(own(engine, batches, layout)).loss)
        fill(whole, engine)
    found = resumed(lambda: net().float(), steps, layout, squares, optimizer=small)
    found.norms = []
    check(found, whole, 1e-12)


class Averaged(Net):
    """Keeps an average of its output, whose decay depends on the number of updates."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))
        self.updates = 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.training:
            self.updates += 1
            decay = min(0.9, self.updates / (self.updates + 1))
            self.mean = decay * self.mean + (1 - decay) * y.detach().mean(0)
        return y + 0.1 * self.mean

    def get_extra_state(self) -> int:
        return self.updates

    def set_extra_state(self, state: int) -> None:
        self.updates = state


@report("lightly-ai/lightly-train#892", "resuming", "0 3 pp")
def counter_of_an_average(layout: Layout) -> None:
    """lightly-ai/lightly-train#892: the plain number of updates of an average begins at zero after a resume."""
    batch = vectors(4, 1)
    steps = [[each[0]] * 2 for each in batch]
    found = resumed(lambda: net(Averaged), steps, layout, squares)
    once = [[each[0]] for each in batch] if layout.num_data_ranks == 2 else steps
    expected = plain(net(Averaged), once, squares)
    check(found, expected)


class Smoothed(Net):
    """Keeps averages of its weights as buffers, which the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slow", torch.zeros(1, 8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            decay = 1 - 1 / float(self.count + 1)
            self.slow.mul_(decay).add_(self.head.weight.detach(), alpha=1 - decay)
        return super().forward(x) + x @ self.slow.T


@report("m2lines/Samudra#282", "resuming", "0 1 2 3 pp")
def average_after_resume(layout: Layout) -> None:
    """m2lines/Samudra#282: the decay of averaged weights was reset by a resume."""
    batch = vectors(4, 1)
    steps = [[each[0]] * 2 for each in batch]
    once = [[each[0]] for each in batch] if layout.num_data_ranks == 2 else steps
    found = resumed(lambda: net(Smoothed), steps, layout, squares)
    check(found, plain(net(Smoothed), once, squares))


class Tiny(nn.Module):
    """A block whose parameters have fewer elements than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(1))
        self.none = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale + self.shift) + self.none.sum()


@report("databricks/flashoptim#6", "shapes", "0 1 2 3 int8-3 host3 pp")
def fewer_elements_than_ranks(layout: Layout) -> None:
    """databricks/flashoptim#6: parameters that the ranks do not divide could not be saved."""

    def make() -> nn.Module:
        return net(lambda: Net(Tiny))

    other = LAYOUTS["3" if layout.name in ("0", "pp") else "0"]
    found = resumed(make, vectors(4), layout, squares, other, optimizer=ADAMW)
    check(found, plain(make(), vectors(4), squares, adamw), 1e-5)


@report("bitsandbytes-foundation/bitsandbytes#1732", "resuming", "int8-0 int8-1 int8-2 int8-3")
def eight_bit_states(layout: Layout) -> None:
    """bitsandbytes-foundation/bitsandbytes#1732: states of 8 bits under a bf16 model could not be saved."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 640), nn.Tanh(), nn.Linear(640, 8), nn.Linear(8, 1)).bfloat16()

    steps = [[(x.bfloat16(), y.bfloat16()) for x, y in batches] for batches in vectors(6, 2)]
    whole = Trained()
    loss = lambda output, batch: squares(output.float(), batch)  # noqa: E731
    with engine_of(make(), layout, 1, loss, optimizer=ADAMW) as engine:
        for batches in steps:
            whole.losses.append(engine.train_step(own(engine, batches, layout)).loss)
        fill(whole, engine)
    found = resumed(make, steps, layout, loss, optimizer=ADAMW)
    found.norms = []
    check(found, whole, 1e-12)


@report("bghira/SimpleTuner#1880", "adapters", "0 2 3 tp pp cp")
def adapters_saved_alone(layout: Layout) -> None:
    """bghira/SimpleTuner#1880: adapters could not be saved and loaded where the base is sharded."""
    import peft

    def make() -> nn.Module:
        base = llama()
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        return peft.get_peft_model(base, config).double()

    steps = tokens(4)
    found = resumed(make, steps, layout, None, contents="trainable")
    check(found, causal(make(), steps))


def causal(model: nn.Module, steps: Steps) -> Trained:
    """Train a wrapped causal model plainly on its own loss, weighted by targets."""

    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, **batch: Tensor) -> Any:
            return self.inner(**batch)

    def loss(output: Any, batch: Any) -> tuple[Tensor, int]:
        count = int(batch["labels"][:, 1:].ne(-100).sum())
        return output.loss * count, count

    result = plain(Causal(), steps, loss)
    result.parameters = {name.removeprefix("inner."): value for name, value in result.parameters.items()}
    return result


@report("mlcommons/training#844", "draws", "0 3")
def masks_of_the_second_step(layout: Layout) -> None:
    """mlcommons/training#844: ranks that shard a model drew the same noise for other samples."""
    seen: list[Tensor] = []
    with engine_of(net(Noisy), layout, 2, squares) as engine:
        torch.manual_seed(5 + dist.get_rank())
        engine.model.blocks[0].register_forward_pre_hook(lambda _, x: seen.append(x[0].detach().clone()))
        x = torch.ones(3, 8, dtype=torch.float64)
        for _ in range(2):
            engine.train_step([(x, x[:, :1])] * 2)
    both = [torch.empty(4, 3, 8, dtype=torch.float64) for _ in range(2)]
    dist.all_gather(both, torch.stack(seen[:4]))
    equal = [(i, j) for i in range(8) for j in range(i) if torch.equal(torch.cat(both)[i], torch.cat(both)[j])]
    if equal:
        raise DiffersError(f"forwards {equal} draw the same numbers")
