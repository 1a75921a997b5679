"""Reports on losses and gradients over micro-batches: how they are weighed, left out, skipped, and by whom."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from reports.kit import (
    DiffersError,
    Layout,
    Net,
    Trained,
    check,
    cross_entropy,
    engine_of,
    fading,
    fill,
    llama,
    near,
    net,
    ours,
    own,
    plain,
    report,
    same_on_all_ranks,
    sgd,
    shifted,
    squares,
    tokens,
    vectors,
)


@report("verl-project/verl#5625", "accumulation", "0 1 2 3 host full tp pp zb cp")
def token_mean(layout: Layout) -> None:
    """verl-project/verl#5625: micro-batches were weighed by samples though the loss is a mean over tokens."""
    steps = tokens()
    check(ours(llama(), steps, layout), plain(llama(), steps))


@report("radixark/miles#3231", "accumulation", "0 1 2 3 host")
def token_sums_without_sync(layout: Layout) -> None:
    """radixark/miles#3231: sums over tokens were not divided by their number over all ranks and micro-batches."""
    steps, model, result = shifted(tokens()), llama(), Trained()
    with engine_of(model, layout, 2, cross_entropy) as engine:
        for batches in steps:
            first, last = own(engine, batches, layout)
            with engine.no_sync():
                engine.backward(engine(first))
            engine.backward(engine(last))
            taken = engine.step()
            result.losses.append(taken.loss)
            result.norms.append(taken.grad_norm)
        fill(result, engine)
    check(result, plain(model, steps, cross_entropy))


@report("radixark/miles#2796", "accumulation", "0 1 2 3 full tp tp-chunk pp zb cp")
def masked_micro_batch(layout: Layout) -> None:
    """radixark/miles#2796: a sample whose mask is all zero still counted one token in the normaliser."""
    steps = shifted(tokens())
    for batches in steps:
        batches[1][1].fill_(-100)
    check(ours(llama(), steps, layout, cross_entropy), plain(llama(), steps, cross_entropy))


@report("allenai/OLMo-core#657", "accumulation", "0 1 2 3 tp pp cp")
def rank_without_labels(layout: Layout) -> None:
    """allenai/OLMo-core#657: all labels of one rank are left out, and the mean over none spread as nan."""
    steps = tokens()
    for batches in steps:
        for batch in batches[2:]:
            batch["labels"].fill_(-100)
    check(ours(llama(), steps, layout), plain(llama(), steps))


@report("verl-project/verl#6176", "ranks that differ", "0 2 3 auto")
def uneven_numbers_of_micro_batches(layout: Layout) -> None:
    """verl-project/verl#6176: ranks have different numbers of micro-batches, and the others wait without an end."""
    steps = vectors()
    with engine_of(net(), layout, 2, squares) as engine:
        for batches in steps:
            mine = list(own(engine, batches, layout))
            engine.train_step(mine[: 2 if dist.get_rank() == 0 else 1])
    raise DiffersError("a step of three micro-batches of four was taken")


@report("THUDM/slime#1860", "shapes", "0 1 2 3 full selective pp zb")
def empty_micro_batch(layout: Layout) -> None:
    """THUDM/slime#1860: a rank's last micro-batch is empty, since ranks agree on the largest number of them."""
    steps = vectors()
    for batches in steps:
        batches[3] = tuple(each[:0] for each in batches[3])
    check(ours(net(), steps, layout, squares), plain(net(), steps, squares))


@report("allenai/open-instruct#1161", "accumulation", "0 1 2 3 host full")
def scaled_by_the_script(layout: Layout) -> None:
    """allenai/open-instruct#1161: the script itself divides by all ranks' tokens and multiplies by the ranks."""
    steps, model, result = shifted(tokens()), llama(), Trained()
    with engine_of(model, layout, 2, clip=None) as engine:
        for batches in steps:
            mine = own(engine, batches, layout)
            count = torch.tensor(float(sum(batch[1].ne(-100).sum() for batch in mine)))
            dist.all_reduce(count)
            for batch in mine:
                total, _ = cross_entropy(engine.forward(**batch[0]), batch)
                engine.backward(total * dist.get_world_size() / count)
            engine.step()
        fill(result, engine)
    expected = plain(model, steps, cross_entropy, clip=float("inf"))
    expected.losses = []
    check(result, expected)


@report("tracel-ai/burn#5695", "schedules", "0 1 2 3")
def last_window(layout: Layout) -> None:
    """tracel-ai/burn#5695: the last, shorter window of an epoch was dropped, and the rate moved each micro-batch."""
    batches, model, result = vectors(1, 10)[0], net(), Trained()
    windows = [[0, 1, 5, 6], [2, 3, 7, 8], [4, 9]]
    with engine_of(model, layout, 2, squares, optimizer=sgd, schedule=fading) as engine:
        for _ in range(2):
            mine = batches[5 * dist.get_rank() : 5 * dist.get_rank() + 5]
            for first in (0, 2, 4):
                for batch in mine[first : first + 2]:
                    engine.backward(engine(batch))
                taken = engine.step(partial=first == 4)
                result.losses.append(taken.loss)
                result.lrs.append(taken.lr)
        fill(result, engine)
    steps = [[batches[index] for index in window] for _ in range(2) for window in windows]
    check(result, plain(model, steps, squares, schedule=fading))


@report("huggingface/transformers#39241", "evaluation", "0 3 tp tp-chunk pp cp")
def evaluation_by_tokens(layout: Layout) -> None:
    """huggingface/transformers#39241: the loss of an evaluation depends on the size of its batches."""
    steps, model = shifted(tokens(1, 4) + tokens(1, 2, rows=5, seed=8)), llama()
    expected = [plain(model, [batches], cross_entropy).losses[0] for batches in steps]
    with engine_of(model, layout, 1, cross_entropy) as engine:
        for batches, loss in zip(steps, expected, strict=True):
            near("loss", torch.tensor(engine.eval_step(own(engine, batches, layout)).loss), torch.tensor(loss), 1e-6)


@report("Haian-Jin/LVSM#19", "skipped steps", "0 1 2 3 host full")
def step_skipped_by_the_script(layout: Layout) -> None:
    """Haian-Jin/LVSM#19: a script leaves out a step after its backward, and the next step fails."""
    steps, model, result = vectors(4), net(), Trained()
    with engine_of(model, layout, 2, squares) as engine:
        for number, batches in enumerate(steps):
            for batch in own(engine, batches, layout):
                engine.backward(engine(batch))
            if number in (0, 2):
                engine.zero_grad()
                continue
            taken = engine.step()
            result.losses.append(taken.loss)
            result.norms.append(taken.grad_norm)
        fill(result, engine)
    check(result, plain(model, [steps[1], steps[3]], squares))


@report("ecmwf/WeatherGenerator#2718", "skipped steps", "0 1 2 3 host tp pp cp")
def nan_on_one_rank(layout: Layout) -> None:
    """ecmwf/WeatherGenerator#2718: only rank 0 looked for nan before a step was skipped, others' spread."""
    model, steps = llama(), shifted(tokens(3))
    batches = [
        [({"inputs_embeds": model.model.embed_tokens(b[0]["input_ids"]).detach()}, b[1]) for b in s] for s in steps
    ]
    batches[1][3][0]["inputs_embeds"][0, 2, 1] = float("nan")
    result = ours(model, batches, layout, cross_entropy, run={"on_nonfinite": "skip"})
    expected = plain(model, [batches[0], batches[2]], cross_entropy)
    result.losses, result.norms = [result.losses[0], result.losses[2]], [result.norms[0], result.norms[2]]
    check(result, expected)


class Encoder(Net):
    """Gives embeddings of unit length."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(super().forward(x), dim=-1)


def contrast(embeddings: Tensor) -> Tensor:
    """Compare each embedding with its neighbour."""
    scores = embeddings[0::2] @ embeddings[1::2].T / 0.1
    return nn.functional.cross_entropy(scores, torch.arange(len(scores)))


@report("illuin-tech/colpali#416", "accumulation", "0 1 2 3 host full")
def cached_gradients(layout: Layout) -> None:
    """illuin-tech/colpali#416: embeddings without a graph, then one more forward and backward for each chunk."""
    model, steps, result = net(Encoder), vectors(2, 2, rows=8), Trained()
    with engine_of(model, layout, 4, clip=None) as engine:
        for batches in steps:
            x = own(engine, batches, layout)[0][0]
            with torch.no_grad():
                cached = torch.cat([engine.forward(chunk) for chunk in x.split(2)])
            everyone = [torch.empty_like(cached) for _ in range(2)]
            dist.all_gather(everyone, cached)
            everyone[dist.get_rank()] = cached.requires_grad_()
            contrast(torch.cat(everyone)).backward()
            for chunk, gradient in zip(x.split(2), cached.grad.split(2), strict=True):
                engine.backward((engine.forward(chunk) * gradient).sum() * 2)
            engine.step()
        fill(result, engine)
    whole = [[(torch.cat([b[0] for b in batches]), None)] for batches in steps]
    expected = plain(model, whole, lambda output, _: contrast(output), clip=float("inf"))
    expected.losses = []
    check(result, expected)


@report("EleutherAI/bergson#227", "shapes", "0 2 3 full tp pp zb cp chunk")
def lengths_differ(layout: Layout) -> None:
    """EleutherAI/bergson#227: ranks have batches of other numbers of rows and tokens, and the job hangs."""
    pieces = [tokens(2, 1, rows, length, seed=rows) for rows, length in ((1, 12), (4, 4), (2, 6), (3, 10))]
    steps = [[each[step][0] for each in pieces] for step in range(2)]
    check(ours(llama(), steps, layout), plain(llama(), steps))


@report("Robbyant/lingbot-vla-v2#41", "draws", "0 1 2 3 full")
def draws_of_data_ranks(layout: Layout) -> None:
    """Robbyant/lingbot-vla-v2#41: all ranks have one seed and draw the same numbers for other samples."""

    class Dropped(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(nn.functional.dropout(x, 0.5, self.training))

    torch.manual_seed(0)
    seen: list[Tensor] = []
    x = torch.ones(4, 8, dtype=torch.float64)
    with engine_of(net(Dropped), layout, 1, lambda out, batch: (out.sum(), 4)) as engine:
        engine.model.stem.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().clone()))
        engine.train_step([(x, None)])
    both = [torch.empty_like(seen[0]) for _ in range(2)]
    dist.all_gather(both, seen[0])
    if torch.equal(*both):
        raise DiffersError("both data ranks drop the same elements")
    same_on_all_ranks("number of draws", float(len(seen)))
