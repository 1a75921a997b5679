"""Reports on parameters and buffers that scripts read, write, average, share or leave unused."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardwise
from reports.checkpoints import causal, shared_folder
from reports.kit import (
    ADAMW,
    Block,
    DiffersError,
    Layout,
    Net,
    Trained,
    adamw,
    check,
    config_of,
    cross_entropy,
    engine_of,
    fill,
    llama,
    near,
    net,
    ours,
    own,
    plain,
    report,
    same_on_all_ranks,
    shifted,
    squares,
    tokens,
    vectors,
)


@report("NCAR/miles-credit#416", "averages", "0 1 2 3 host3 pp")
def average_of_the_script(layout: Layout) -> None:
    """NCAR/miles-credit#416: an average of the weights, kept by the script, saw each rank's shard alone."""
    model, steps = net(), vectors(4)

    def averaged(source: nn.Module) -> AveragedModel:
        return AveragedModel(copy.deepcopy(source), multi_avg_fn=get_ema_multi_avg_fn(0.5))

    slow, expected = averaged(model), averaged(model)
    if layout.name == "pp":
        names = [name for name, _ in model.named_parameters()]

        def update(engine: Any, _: int) -> None:
            whole = copy.deepcopy(model)
            whole.load_state_dict({name: engine.read(name) for name in names})
            slow.update_parameters(whole)

        ours(model, steps, layout, squares, after=update)
    else:

        def update_gathered(engine: Any, _: int) -> None:
            with engine.gathered() as whole:
                slow.update_parameters(whole)

        ours(model, steps, layout, squares, after=update_gathered)
    plain(model, steps, squares, after=lambda made, _: expected.update_parameters(made))
    for name, value in expected.module.state_dict().items():
        near(name, slow.module.state_dict()[name], value)


@report("lightly-ai/lightly#1844", "averages", "0 1 2 3 host3")
def average_without_gathering(layout: Layout) -> None:
    """lightly-ai/lightly#1844: a teacher follows the student's parameters after each step, read where they are."""
    model, steps = net(), vectors(4)
    slow, expected = copy.deepcopy(model), copy.deepcopy(model)

    def follow(teacher: nn.Module, student: nn.Module) -> None:
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                mine.lerp_(theirs.detach(), 0.3)

    ours(model, steps, layout, squares, after=lambda engine, _: follow(slow, engine.model))
    plain(model, steps, squares, after=lambda made, _: follow(expected, made))
    for name, value in expected.state_dict().items():
        near(name, slow.state_dict()[name], value)


class Experts(nn.Module):
    """A block with a list of experts, of which each row uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(Block() for _ in range(4))
        self.register_buffer("load", torch.zeros(4))
        self.register_buffer("bias", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        best = (scores + self.bias).argmax(-1)
        if self.training:
            self.load.add_(torch.bincount(best, minlength=4))
        out = x
        for number, expert in enumerate(self.experts):
            rows = (best == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * scores[rows, number, None])
        return out


@report("THUDM/slime#1010", "experts", "0 1 2 3 host full pp")
def idle_experts(layout: Layout) -> None:
    """THUDM/slime#1010: experts that no row of a rank uses take no part in its collectives, and the job hangs."""
    model, steps = net(lambda: Net(Experts, 2)), vectors(4, rows=2)
    check(ours(model, steps, layout, squares, optimizer=ADAMW), plain(model, steps, squares, adamw))


@report("inclusionAI/AReno#540", "buffers", "0 3 full selective pp pp-full")
def expert_load_under_recomputation(layout: Layout) -> None:
    """inclusionAI/AReno#540: recomputation counts the rows of each expert twice."""
    model, steps = net(lambda: Net(Experts, 2)), vectors()
    with engine_of(model, layout, 4 // layout.num_data_ranks, squares) as engine:
        for batches in steps:
            engine.train_step(own(engine, batches, layout))
        loads = {n: b.clone() for n, b in engine.model.named_buffers() if n.endswith("load") and not b.is_meta}
    expected = plain(model, steps, squares).buffers
    for name, load in loads.items():
        total = load.clone()  # a stage's buffers count on its own rank alone, so the largest is that rank's
        dist.all_reduce(total, dist.ReduceOp.SUM if layout.num_data_ranks == 2 else dist.ReduceOp.MAX)
        near(name, total, expected[name])


@report("KempnerInstitute/KempnerForge#9", "buffers", "0 1 2 3 host3 pp")
def bias_written_between_steps(layout: Layout) -> None:
    """KempnerInstitute/KempnerForge#9: the script moves the routers' biases after each step, by the load of all."""
    model, steps = net(lambda: Net(Experts, 2)), vectors(5)

    def balance(made: nn.Module, summed: bool) -> None:
        for block in made.blocks:
            if not block.load.is_meta:
                total = block.load.clone()
                if summed:
                    dist.all_reduce(total)
                block.bias.add_(torch.sign(total.mean() - total), alpha=0.3)
                block.load.zero_()

    summed = layout.num_data_ranks == 2
    found = ours(model, steps, layout, squares, optimizer=ADAMW, after=lambda engine, _: balance(engine.model, summed))
    check(found, plain(model, steps, squares, adamw, after=lambda made, _: balance(made, False)))


def adapted(**options: Any) -> nn.Module:
    """Make a causal model with adapters that are not zero."""
    import peft

    base = llama(**options)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(base, config).double()


@report("axolotl-ai-cloud/axolotl#3294", "adapters", "0 1 2 3 host3")
def merge_and_unmerge(layout: Layout) -> None:
    """axolotl-ai-cloud/axolotl#3294: adapters cannot be merged where the base is sharded."""
    model, steps = adapted(), tokens(4)

    def merge(engine: Any, number: int) -> None:
        if number == 1:
            with engine.gathered(write=True) as whole:
                whole.merge_adapter()
            merged = engine.eval_step(own(engine, steps[0], layout)).loss
            with engine.gathered(write=True) as whole:
                whole.unmerge_adapter()
            near("merged", torch.tensor(merged), torch.tensor(engine.eval_step(own(engine, steps[0], layout)).loss))

    check(ours(model, steps, layout, after=merge), causal(model, steps))


@report("unslothai/unsloth#2736", "adapters", "0 1 2 3 full host3")
def reference_without_adapters(layout: Layout) -> None:
    """unslothai/unsloth#2736: the reference's log probabilities come from the model with its adapters off."""
    model, steps, result = adapted(), shifted(tokens(3)), Trained()

    def loss(logits: Tensor, reference: Tensor, batch: Any) -> Tensor:
        total, count = cross_entropy(logits, batch)
        return total / count + (logits.log_softmax(-1) - reference.log_softmax(-1)).square().mean()

    with engine_of(model, layout, 2, clip=None) as engine:
        for batches in steps:
            for batch in own(engine, batches, layout):
                with torch.no_grad(), engine.model.disable_adapter():
                    reference = engine.forward(**batch[0]).logits.clone()
                engine.backward(loss(engine.forward(**batch[0]).logits, reference, batch) / 2)
            engine.step()
        fill(result, engine)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, **batch: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad(), self.inner.disable_adapter():
                reference = self.inner(**batch).logits
            return self.inner(**batch).logits, reference

    expected = plain(Both(), steps, lambda output, batch: loss(*output, batch), clip=float("inf"))
    expected.parameters = {n.removeprefix("inner."): p for n, p in expected.parameters.items()}
    expected.losses = []
    check(result, expected)


class Tempered(Net):
    """Has a scale, which scripts keep in bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.exp()


@report("openai/CLIP#530", "writes between steps", "0 1 2 3 bf16-3")
def clamp_after_the_step(layout: Layout) -> None:
    """openai/CLIP#530: the script keeps a learned scale in bounds, by a write after each step."""
    model, steps = net(Tempered), vectors(4)

    def clamp(made: nn.Module) -> None:
        with torch.no_grad():
            made.scale.clamp_(0.9, 1.1)

    found = ours(model, steps, layout, squares, after=lambda engine, _: clamp(engine.model))
    check(found, plain(model, steps, squares, after=lambda made, _: clamp(made)), 1e-1 if layout.is_rounded else 1e-6)


@report("openai/CLIP#530", "writes between steps", "0 1 2 3 host3 bf16-3")
def clamp_in_gathered(layout: Layout) -> None:
    """openai/CLIP#530: the same write, inside `gathered(write=True)`."""
    model, steps = net(Tempered), vectors(4)

    def clamp(engine: Any, _: int) -> None:
        with engine.gathered(write=True) as whole, torch.no_grad():
            whole.scale.clamp_(0.9, 1.1)

    def plain_clamp(made: nn.Module, _: int) -> None:
        with torch.no_grad():
            made.scale.clamp_(0.9, 1.1)

    found = ours(model, steps, layout, squares, after=clamp)
    check(found, plain(model, steps, squares, after=plain_clamp), 1e-1 if layout.is_rounded else 1e-6)


class Codes(nn.Module):
    """Quantises by averages over the rows of all ranks, which are summed inside the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)
        self.register_buffer("codes", torch.randn(4, 8))
        self.register_buffer("size", torch.ones(4))
        self.register_buffer("total", self.codes.clone())

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.mix(x))
        best = torch.cdist(x.detach(), self.codes).argmin(-1)
        used = self.codes[best]
        if self.training:
            chosen = nn.functional.one_hot(best, 4).to(x.dtype)
            size, total = chosen.sum(0), chosen.T @ x.detach()
            if dist.is_initialized() and self.of_all:
                dist.all_reduce(size)
                dist.all_reduce(total)
            self.size.mul_(0.8).add_(size, alpha=0.2)
            self.total.mul_(0.8).add_(total, alpha=0.2)
            self.codes.copy_(self.total / (self.size[:, None] + 1e-5))
        return x + used * 0.5

    of_all = False


@report("espnet/espnet#6284", "buffers", "0 1 2 3 full selective")
def codebook_of_all_ranks(layout: Layout) -> None:
    """espnet/espnet#6284: a codebook averaged in the forward needs the rows of all ranks, and each of them once."""
    model, batches = net(lambda: Net(Codes, 2)), vectors(4, 2)
    Codes.of_all = True
    try:
        found = ours(model, batches, layout, squares)
    finally:
        Codes.of_all = False
    whole = [[tuple(torch.cat([a[i], b[i]]) for i in range(2))] for a, b in batches]
    check(found, plain(model, whole, squares), buffers=True)


@report("NovaSky-AI/SkyRL#1709", "buffers", "bf16-0 bf16-3")
def frequencies_after_meta(layout: Layout) -> None:
    """NovaSky-AI/SkyRL#1709: a model made on meta had rotary frequencies of garbage on all ranks but the first."""
    with shardwise.init(seed=0):
        model = llama().float()
    engine = shardwise.initialize(model, config_of(layout, 1), loss_fn=cross_entropy)
    try:
        found = dict(engine.model.named_buffers())["model.rotary_emb.inv_freq"]
        near("frequencies", found, dict(llama().float().named_buffers())["model.rotary_emb.inv_freq"], 1e-7)
        same_on_all_ranks("frequencies", found.clone())
        if found.dtype != torch.float32:
            raise DiffersError(f"the frequencies are in {found.dtype}")
        engine.train_step([shifted(tokens(1, 1))[0][0]])
    finally:
        engine.close()


@report("verl-project/verl#7834", "tied weights", "0 3 tp pp")
def tied_after_meta(layout: Layout) -> None:
    """verl-project/verl#7834: a tied head was a parameter of its own after the model was made real from meta."""
    source, steps = llama(tie_word_embeddings=True).float(), tokens(3)
    with shared_folder() as folder:
        if dist.get_rank() == 0:
            source.save_pretrained(folder)
        dist.barrier()
        with shardwise.init():
            model = llama(tie_word_embeddings=True).float()
        engine = shardwise.initialize(model, config_of(layout, 4 // layout.num_data_ranks), weights=folder)
        result = Trained()
        try:
            for batches in steps:
                result.losses.append(engine.train_step(own(engine, batches, layout)).loss)
            fill(result, engine)
        finally:
            engine.close()
    check(result, plain(source, steps), 1e-4)


@report("NVIDIA/Model-Optimizer#2059", "several models", "0 1 2 3")
def tied_teacher_and_student(layout: Layout) -> None:
    """NVIDIA/Model-Optimizer#2059: student and teacher, both with tied embeddings, could not be sharded together."""
    student, teacher = llama(tie_word_embeddings=True), llama(seed=4, tie_word_embeddings=True)
    teacher.requires_grad_(False)
    steps, result = shifted(tokens(3)), Trained()

    def loss(logits: Tensor, wanted: Tensor) -> Tensor:
        return (logits.log_softmax(-1) - wanted.log_softmax(-1)).square().mean()

    with engine_of(student, layout, 2, clip=None) as engine, engine_of(teacher, layout, 2, clip=None) as other:
        for batches in steps:
            for batch in own(engine, batches, layout):
                with torch.no_grad():
                    wanted = other.forward(**batch[0]).logits
                engine.backward(loss(engine.forward(**batch[0]).logits, wanted) / 2)
            engine.step()
        fill(result, engine)
    teacher.eval()

    def distil(output: Any, batch: Any) -> Tensor:
        return loss(output.logits, teacher(**batch[0]).logits)

    expected = plain(student, steps, distil, clip=float("inf"))
    expected.losses = []
    check(result, expected)


@report("unslothai/unsloth-zoo#923", "shapes", "3 tp sp pp cp")
def resized_vocabulary(layout: Layout) -> None:
    """unslothai/unsloth-zoo#923: new tokens made the embedding smaller, or of a number that nothing divides."""
    model = llama(tie_word_embeddings=True)
    model.resize_token_embeddings(27, mean_resizing=False)
    model = model.double()
    steps = tokens(vocab=27)
    check(ours(model, steps, layout), plain(model, steps))
