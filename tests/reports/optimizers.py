"""Reports on norms, clipping, masters, schedules and optimizers that scripts bring."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from reports.kit import (
    ADAMW,
    Block,
    DiffersError,
    Layout,
    Net,
    Trained,
    adamw,
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
    sgd,
    shifted,
    squares,
    tokens,
    vectors,
)


@report("ROCm/TransformerEngine#715", "norms", "tp sp pp cp")
def norm_with_replicated_weights(layout: Layout) -> None:
    """ROCm/TransformerEngine#715: weights that every tensor-parallel rank holds counted once a rank in the norm."""
    model, steps = llama("qwen3"), tokens()
    check(ours(model, steps, layout), plain(model, steps))


@report("mindspore-ai/hyper-parallel#526", "norms", "keep 0 1 2 3 host3")
def norm_with_whole_parameters(layout: Layout) -> None:
    """mindspore-ai/hyper-parallel#526: parameters that are not sharded counted once a rank in the norm."""
    check(ours(net(), vectors(), layout, squares), plain(net(), vectors(), squares))


@report("huggingface/transformers#46113", "norms", "0 3 host host3 tp pp cp")
def small_clip(layout: Layout) -> None:
    """huggingface/transformers#46113: the norm was reported, and no gradient was scaled down to it."""
    model, steps = llama(), tokens()
    check(ours(model, steps, layout, clip=0.01), plain(model, steps, clip=0.01))


@report("baidu-baige/LoongForge#152", "norms", "0 1 2 3 host")
def clipped_by_the_script(layout: Layout) -> None:
    """baidu-baige/LoongForge#152: the script clips by torch's own function between backward and step.

    The engine has the gradients, so it says so and names `optimizer.clip_norm`.
    """
    model, steps, result = net(), vectors(), Trained()
    with engine_of(model, layout, 2, squares, clip=None) as engine:
        for batches in steps:
            for batch in own(engine, batches, layout):
                engine.backward(engine(batch))
            nn.utils.clip_grad_norm_(engine.model.parameters(), 0.05)
            result.losses.append(engine.step().loss)
        fill(result, engine)
    check(result, plain(model, steps, squares, clip=0.05))


@report("baidu-baige/LoongForge#152", "norms", "0 1 2 3 host")
def scaled_in_a_hook(layout: Layout) -> None:
    """baidu-baige/LoongForge#152: a sibling: a hook of the optimizer scales the gradients before its step."""
    model, steps = net(), vectors()

    def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)

    def make(made: nn.Module) -> torch.optim.Optimizer:
        optimizer = sgd(made)
        optimizer.register_step_pre_hook(halve)
        return optimizer

    check(ours(model, steps, layout, squares, optimizer=make), plain(model, steps, squares, make))


@report("Haian-Jin/LVSM#19", "skipped steps", "0 1 2 3 host")
def gradients_cleared_by_the_model(layout: Layout) -> None:
    """Haian-Jin/LVSM#19: a sibling: the script clears the gradients of a step that it leaves out by the model."""
    model, steps, result = net(), vectors(4), Trained()
    with engine_of(model, layout, 2, squares) as engine:
        for number, batches in enumerate(steps):
            for batch in own(engine, batches, layout):
                engine.backward(engine(batch))
            if number % 2 == 0:
                engine.model.zero_grad()
            else:
                result.losses.append(engine.step(partial=True).loss)
        fill(result, engine)
    check(result, plain(model, [steps[1], steps[3]], squares))


class Scaled(nn.Module):
    """Norm, linear layer, norm: the norms' weights begin at one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.last = nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.up(self.norm(x)))


@report("vllm-project/speculators#765", "masters", "bf16-0 bf16-1 bf16-2 bf16-3")
def small_steps_in_bf16(layout: Layout) -> None:
    """vllm-project/speculators#765: in bf16 without masters, steps too small for weights near one were lost."""
    torch.manual_seed(0)
    model, steps = Scaled(), [[(x.float(), y.float()) for x, y in batches] for batches in vectors(12, 2)]
    small = {**ADAMW, "lr": 1e-4}
    found = ours(model, steps, layout, squares, optimizer=small)
    moved = float((found.parameters["last.weight"].float() - 1.0).abs().max())
    with engine_of(model, layout, 1, squares, optimizer=small) as engine:
        for batches in steps:
            engine.train_step(own(engine, batches, layout))
        master = engine.read("last.weight", "master")
    if master is None or float((master - 1.0).abs().max()) < 5e-4:
        raise DiffersError(f"the master moved by {master}, the parameter by {moved}")


class Routed(nn.Module):
    """A block of three stacked experts, of which each row uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.up = nn.Parameter(torch.randn(3, 8, 7) * 0.3)
        self.down = nn.Parameter(torch.randn(3, 7, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        best = weights.argmax(-1)
        mixed = torch.tanh(torch.einsum("bi,bio->bo", x, self.up[best]))
        mixed = torch.einsum("bi,bio->bo", mixed, self.down[best])
        return x + mixed * weights.gather(1, best[:, None])


@report("marin-community/marin#6335", "shapes", "0 1 2 3 host host3 full pp")
def three_experts_on_two_ranks(layout: Layout) -> None:
    """marin-community/marin#6335: experts that the ranks do not divide ended the first optimizer step."""
    model = net(lambda: Net(Routed))
    steps = vectors()
    found = ours(model, steps, layout, squares, optimizer=ADAMW)
    check(found, plain(model, steps, squares, adamw))


@report("Lightricks/LTX-Video-Trainer#67", "schedules", "0 1 2 3 host pp")
def schedule_of_the_script(layout: Layout) -> None:
    """Lightricks/LTX-Video-Trainer#67: the schedule moved once for each rank, and so ended too early."""
    model, steps = net(), vectors(5)
    found = ours(model, steps, layout, squares, optimizer=sgd, schedule=fading)
    check(found, plain(model, steps, squares, schedule=fading))


@report("idiap/coqui-ai-Trainer#23", "schedules", "0 2 3")
def schedule_after_overflow(layout: Layout) -> None:
    """idiap/coqui-ai-Trainer#23: with a loss scale the schedule never moved."""
    model, steps = net().float(), [[(x.float(), y.float()) for x, y in batches] for batches in vectors(8, 2)]
    precision = {"param": "fp16", "initial_loss_scale": 2.0**19}
    found = ours(model, steps, layout, lambda o, b: squares(o.float(), b), precision=precision, scheduler=linear(8))
    near("last rate", torch.tensor(found.lrs[-1]), torch.tensor(rate_of(linear(8), found)), 1e-3)


def linear(total: int) -> dict[str, Any]:
    """Return a schedule of the config."""
    return {"name": "linear", "warmup_steps": 0, "total_steps": total, "final_ratio": 0.0}


def rate_of(schedule: dict[str, Any], found: Trained) -> float:
    """Return the rate of the last step, by the steps that were taken or by all; either is a schedule's."""
    skipped = sum(norm != norm or norm == float("inf") for norm in found.norms)
    total = schedule["total_steps"]
    both = [0.05 * (1 - (total - 1 - each) / total) for each in (0, skipped)]
    return min(both, key=lambda each: abs(each - found.lrs[-1]))


class ClampedLamb(torch.optim.Optimizer):
    """Scales each tensor's update by its norm over the update's, which is clamped."""

    def __init__(self, parameters: Iterable[Any], lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    ratio = parameter.norm() / parameter.grad.norm().clamp_(min=1e-6)
                    parameter.sub_(parameter.grad * ratio * group["lr"])


@report("huggingface/pytorch-image-models#2668", "optimizers", "0 1 2 3")
def optimizer_with_norms(layout: Layout) -> None:
    """huggingface/pytorch-image-models#2668: an optimizer that clamps the norm of each tensor failed when sharded."""
    model, steps = net(), vectors()

    def make(made: nn.Module) -> torch.optim.Optimizer:
        return ClampedLamb(made.parameters())

    check(ours(model, steps, layout, squares, optimizer=make), plain(model, steps, squares, make))


class Codebook(nn.Module):
    """Quantises by a codebook that it trains itself, inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(5, 8))
        self.own: torch.optim.Optimizer | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.own = self.own or torch.optim.SGD([self.codes], lr=0.1)
        nearest = torch.cdist(x.detach(), self.codes.detach()).argmin(-1)
        if self.training:
            with torch.enable_grad():
                loss = (x.detach() - self.codes[nearest]).square().mean()
                (self.codes.grad,) = torch.autograd.grad(loss, [self.codes])
            self.own.step()
            self.codes.grad = None
        return x + (self.codes[nearest].detach() - x).detach()


@report("lucidrains/vector-quantize-pytorch#222", "writes in forward", "0 1 2 3 pp")
def codebook_with_its_own_optimizer(layout: Layout) -> None:
    """lucidrains/vector-quantize-pytorch#222: a codebook is stepped inside the forward, by gradients of one rank."""
    model = net(lambda: Net(Codebook, 2))
    batch = vectors(3, 1)
    steps = [[each[0]] * 2 for each in batch]  # the same on both ranks: what one process computes, too

    def trained(made: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for n, p in made.named_parameters() if "codes" not in n], lr=0.05, momentum=0.9)

    found = ours(model, steps, layout, squares, optimizer=trained, clip=None)
    expected = plain(model, [[each[0]] for each in steps], squares, trained, clip=float("inf"))
    if layout.num_data_ranks == 1:
        expected = plain(model, steps, squares, trained, clip=float("inf"))
    found.norms = []
    check(found, expected)


@report("PrimeIntellect-ai/prime-rl#1959", "ranks that differ", "0 1 2 auto host")
def module_of_some_ranks(layout: Layout) -> None:
    """PrimeIntellect-ai/prime-rl#1959: one rank has images and runs another encoder than the others, which wait."""

    class Sided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Net(Block, 1), Net(Block, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) if x.shape[0] == 3 else self.second(x)

    pairs = [(vectors(3, 1, rows=3), vectors(3, 1, rows=5, seed=9))]
    steps = [[a[step][0], a[step][0]] if step == 0 else [a[step][0], b[step][0]] for step in range(3) for a, b in pairs]
    model = net(Sided)
    found = ours(model, steps, layout, squares, optimizer=ADAMW)
    check(found, plain(model, steps, squares, adamw))


@report("verl-project/verl#6431", "norms", "sp tp-full")
def sequence_parallel_norms(layout: Layout) -> None:
    """verl-project/verl#6431: the norm of gradients is nan in the first step with sequence parallelism."""
    model, steps = llama("qwen3", tie_word_embeddings=True), shifted(tokens(3))
    check(ours(model, steps, layout, cross_entropy), plain(model, steps, cross_entropy))


@report("uw-syfi/piper#13", "tied weights", "pp zb tp sp cp 3")
def tied_over_stages(layout: Layout) -> None:
    """uw-syfi/piper#13: the gradients of a tied embedding were not summed over first and last stage."""
    model, steps = llama(tie_word_embeddings=True), tokens()
    check(ours(model, steps, layout), plain(model, steps))
