"""Reports on models whose forward does more than a chain of layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from reports.kit import (
    BLOCK_PLAN,
    Block,
    Layout,
    Net,
    Trained,
    check,
    engine_of,
    fill,
    near,
    net,
    ours,
    own,
    plain,
    report,
    same_on_all_ranks,
    squares,
    vectors,
)


class Popping(nn.Module):
    """Takes its input out of a list that its caller hands over, so that nobody else keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, held: list[Tensor]) -> Tensor:
        return self.inner(held.pop(0))


class Handing(Net):
    """Hands each block its input in a list."""

    def __init__(self) -> None:
        super().__init__(Popping)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block([x])
        return self.head(x)


@report("PriorLabs/TabPFN#1138", "recomputation", "0 1 2 3 host3 full selective pp")
def input_taken_from_a_list(layout: Layout) -> None:
    """PriorLabs/TabPFN#1138: a block takes its input out of a list; recomputed, it lost its gradients or failed."""
    check(ours(net(Handing), vectors(), layout, squares), plain(net(Handing), vectors(), squares))


class Forces(Net):
    """Gives the gradient of its energy by its input."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            energy = super().forward(x).square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return force.sum(-1, keepdim=True)


@report("soran-ghaderi/torchebm#244", "second derivatives", "0 1 2 3 host3 full selective tp pp")
def score_matching(layout: Layout) -> None:
    """soran-ghaderi/torchebm#244: a loss on the input's gradient used storage that was freed after a backward."""
    found = ours(net(Forces), vectors(), layout, squares, plan=BLOCK_PLAN)
    check(found, plain(net(Forces), vectors(), squares))


class Distilled(Net):
    """Has a frozen teacher inside, which the script puts into eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.teacher(x)
        return super().forward(x), wanted


def imitate(output: tuple[Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
    """Compare with the teacher."""
    return (output[0] - output[1]).square().sum(), len(batch[0])


@report("lightly-ai/lightly-train#434", "modes", "0 1 2 3 full pp")
def teacher_in_eval_mode(layout: Layout) -> None:
    """lightly-ai/lightly-train#434: a teacher inside the model is frozen and in eval mode while the rest trains."""
    model, steps = net(Distilled), vectors()
    found, expected = Trained(), Trained()
    with engine_of(model, layout, 4 // layout.num_data_ranks, imitate) as engine:
        engine.model.teacher.eval()
        for batches in steps:
            taken = engine.train_step(own(engine, batches, layout))
            found.losses.append(taken.loss)
            found.norms.append(taken.grad_norm)
            engine.eval_step(own(engine, batches, layout))
        fill(found, engine)

    class Still(Distilled):
        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.teacher.eval()
            return self

    still = net(Still)
    expected = plain(still, steps, imitate)
    check(found, expected)


@report("LibreYOLO/libreyolo#531", "batch norm", "0 1 2 3 host3 full pp")
def batch_norm_of_small_batches(layout: Layout) -> None:
    """LibreYOLO/libreyolo#531: each rank's batch norm saw its own rows alone, and rank 0's was evaluated and saved."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.inner = nn.BatchNorm1d(8), Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.norm(x))

    model, steps = net(lambda: Net(Normed, 2)), vectors(rows=6)
    found, loss = Trained(), 0.0
    with engine_of(model, layout, 4 // layout.num_data_ranks, squares) as engine:
        for batches in steps:
            taken = engine.train_step(own(engine, batches, layout))
            found.losses.append(taken.loss)
            found.norms.append(taken.grad_norm)
        loss = engine.eval_step(own(engine, steps[0], layout)).loss
        fill(found, engine)
    same_on_all_ranks("evaluation", loss)
    check(found, plain(model, steps, squares))
    tracked = found.buffers.get("blocks.0.norm.num_batches_tracked", torch.tensor(0))
    dist.all_reduce(tracked, dist.ReduceOp.MAX)  # of a pipeline's ranks, one has this block
    near("batches seen", tracked, torch.tensor(len(steps) * 4 // layout.num_data_ranks))
