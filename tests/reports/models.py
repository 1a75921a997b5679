"""Reports on models whose forward does more than a chain of layers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
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
    """Takes its input out of a list that its caller hands over, so that no other keeps it."""

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


class Summed(nn.Module):
    """Reads a list of all earlier results."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, results: list[Tensor]) -> Tensor:
        return self.inner(torch.tanh(sum(results)))


class Growing(Net):
    """Hands each block the list of all results, which grows."""

    def __init__(self) -> None:
        super().__init__(Summed)

    def forward(self, x: Tensor) -> Tensor:
        results = [self.stem(x)]
        for block in self.blocks:
            results.append(block(results))
        return self.head(results[-1])


@report("PriorLabs/TabPFN#1138", "recomputation", "0 3 host3 full selective")
def growing_list(layout: Layout) -> None:
    """PriorLabs/TabPFN#1138: a sibling: the list that a block reads has grown before it is recomputed."""
    check(ours(net(Growing), vectors(), layout, squares), plain(net(Growing), vectors(), squares))


class Stateful(nn.Module):
    """Changes a state in a dict, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        state["x"] = self.inner(state["x"])
        return state


class Carrying(Net):
    """Carries a state in a dict through the blocks."""

    def __init__(self) -> None:
        super().__init__(Stateful)

    def forward(self, x: Tensor) -> Tensor:
        state = {"x": self.stem(x)}
        for block in self.blocks:
            state = block(state)
        return self.head(state["x"])


@report("PriorLabs/TabPFN#1138", "recomputation", "0 3 host3 full selective pp pp-full")
def state_in_a_dict(layout: Layout) -> None:
    """PriorLabs/TabPFN#1138: a sibling: blocks write their results into a dict that they are given."""
    check(ours(net(Carrying), vectors(), layout, squares), plain(net(Carrying), vectors(), squares))


class Levelled(nn.Module):
    """Reads a level that its caller sets."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.level = Block(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.level)


class Twice(Net):
    """Runs its blocks twice, each time with another level."""

    def __init__(self) -> None:
        super().__init__(Levelled)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for level in (1.0, 0.5):
            for block in self.blocks:
                block.level = level
                x = block(x)
        return self.head(x)


@report("PriorLabs/TabPFN#1138", "recomputation", "0 3 host3 full selective")
def attribute_set_by_the_caller(layout: Layout) -> None:
    """PriorLabs/TabPFN#1138: a sibling: an attribute that the caller sets is another one at the recomputation."""
    check(ours(net(Twice), vectors(), layout, squares), plain(net(Twice), vectors(), squares))


class Counting(nn.Module):
    """Counts its forwards in a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = Block(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) / self.calls**0.5


@report("allenai/OLMo-core#720", "recomputation", "0 3 full selective pp pp-full")
def plain_counter(layout: Layout) -> None:
    """allenai/OLMo-core#720: what a forward counts beside its result is counted again by the recomputation."""
    model, batch = net(lambda: Net(Counting)), [each[0] for each in vectors(3, 1)]
    steps = [[each] * layout.num_data_ranks for each in batch]  # the same on both ranks
    check(ours(model, steps, layout, squares), plain(model, [[each] for each in batch], squares))


class Dropping(nn.Module):
    """Scales its result by draws of Python, NumPy and torch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        kept = random.random() + np.random.rand()
        return self.inner(nn.functional.dropout(x, 0.2, self.training)) * kept


def seed_all(seed: int) -> None:
    """Seed the three generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@report("allenai/OLMo-core#828", "draws", "full selective")
def draws_under_recomputation(layout: Layout) -> None:
    """allenai/OLMo-core#828: recomputation drew other masks than the forward whose loss was taken."""
    model, batch = net(lambda: Net(Dropping)), [each[0] for each in vectors(3, 1)]
    found = []
    for sections in ({}, {"recompute": layout.sections["recompute"]}):
        each = Layout(layout.name, {"zero": {"stage": 3}, **sections})
        seed_all(5 + dist.get_rank())
        found.append(ours(model, [[one] * 2 for one in batch], each, squares))
    check(found[1], found[0])


@report("facebookresearch/tuna-2#15", "draws", "tp")
def ranks_seeded_apart(layout: Layout) -> None:
    """facebookresearch/tuna-2#15: a seed for each rank, as data ranks need it, where ranks share a sample."""

    class Drawn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.tanh(self.up(x))) * random.random()

    model, steps, found = net(lambda: Net(Drawn)), vectors(3, 2), []
    for apart in (0, 1):
        seed_all(5 + apart * dist.get_rank())
        found.append(ours(model, steps, layout, squares, plan=BLOCK_PLAN).losses)
    same_on_all_ranks("losses", torch.tensor(found[1]))
    near("losses", torch.tensor(found[1]), torch.tensor(found[0]))


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
