"""Reports on split layers and split sequences: heads, vocabularies, masks, positions, and losses on tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from reports.kit import (
    ADAMW,
    Layout,
    adamw,
    check,
    cross_entropy,
    llama,
    ours,
    plain,
    report,
    shifted,
    tokens,
)


class WithFeatures(nn.Module):
    """Gives the logits and the hidden states of a causal model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        output = self.inner(input_ids=input_ids, output_hidden_states=True)
        return output.logits, *output.hidden_states


def features(output: Any, batch: Any) -> tuple[Tensor, Any]:
    """Add squares of the hidden states to the cross entropy."""
    logits = output.logits if hasattr(output, "logits") else output[0]
    hidden = output.hidden_states if hasattr(output, "hidden_states") else output[1:]
    total, count = cross_entropy(logits, batch)
    valid = batch[1].ne(-100)[..., None]
    return total + sum((each.tanh().square() * valid).sum() for each in hidden), count


@report("ServiceNow/Fast-LLM#388", "outputs", "0 3 full tp sp pp cp")
def distillation_of_features(layout: Layout) -> None:
    """ServiceNow/Fast-LLM#388: a loss on hidden states had other gradients with two tensor-parallel ranks."""
    model, steps = llama(output_hidden_states=True), shifted(tokens())
    check(ours(model, steps, layout, features), plain(model, steps, features))


@report("huggingface/transformers#48307", "heads", "tp sp tp-full cp ulysses")
def one_key_value_head(layout: Layout) -> None:
    """huggingface/transformers#48307: fewer key-value heads than tensor-parallel ranks failed in the forward."""
    model, steps = llama(num_key_value_heads=1), tokens()
    check(ours(model, steps, layout), plain(model, steps))


@report("nvidia-cosmos/cosmos-rl#11", "shapes", "3 tp pp cp ulysses")
def odd_sizes(layout: Layout) -> None:
    """nvidia-cosmos/cosmos-rl#11: sizes that the ranks do not divide, of layers and of the sequence."""
    model = llama(
        hidden_size=15, num_attention_heads=3, num_key_value_heads=3, intermediate_size=21, head_dim=6, vocab_size=23
    )
    steps = tokens(length=7, vocab=23)
    check(ours(model, steps, layout), plain(model, steps))


@report("karpathy/nanochat#364", "shapes", "0 1 2 3 tp sp tp-chunk cp pp")
def odd_vocabulary(layout: Layout) -> None:
    """karpathy/nanochat#364: a vocabulary that the ranks do not divide ended the optimizer with an obscure error."""
    model, steps = llama(vocab_size=17), tokens(vocab=17)
    check(ours(model, steps, layout, optimizer=ADAMW), plain(model, steps, make=adamw), 1e-4)


def packed(steps: Any, lengths: tuple[int, ...]) -> Any:
    """Add position ids that begin again with each document."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    return [[{**batch, "position_ids": positions.expand_as(batch["input_ids"])} for batch in each] for each in steps]


@report("huggingface/nanoVLM#204", "packing", "0 3 full tp sp pp cp ulysses")
def packed_documents(layout: Layout) -> None:
    """huggingface/nanoVLM#204: positions of packed documents go on, and their tokens see each other."""
    model, steps = llama(), packed(tokens(rows=1, length=12), (5, 4, 3))
    check(ours(model, steps, layout), plain(model, steps))


@report("huggingface/transformers#46634", "packing", "0 3 tp pp cp")
def packed_documents_with_a_mask(layout: Layout) -> None:
    """huggingface/transformers#46634: a mask of ones beside the positions turned the packing off."""
    model, steps = llama(), packed(tokens(rows=1, length=12), (5, 4, 3))
    steps = [[{**batch, "attention_mask": torch.ones_like(batch["input_ids"])} for batch in each] for each in steps]
    check(ours(model, steps, layout), plain(model, steps))


@report("AI-Hypercomputer/maxtext#4476", "packing", "0 3 tp sp pp cp ulysses")
def document_mask(layout: Layout) -> None:
    """AI-Hypercomputer/maxtext#4476: one back end of attention left out the mask between packed documents."""
    model, steps = llama(), packed(tokens(rows=1, length=12), (5, 4, 3))
    document = torch.tensor([0] * 5 + [1] * 4 + [2] * 3)
    seen = (document[:, None] == document) & torch.ones(12, 12).tril().bool()
    steps = [[{**batch, "attention_mask": seen[None, None]} for batch in each] for each in steps]
    check(ours(model, steps, layout), plain(model, steps))


def ranked(steps: Any) -> list[list[dict[str, Tensor]]]:
    """Turn batches into padded ones with a class each."""

    def turn(batch: dict[str, Tensor], number: int) -> dict[str, Tensor]:
        ids = batch["input_ids"].clone()
        ids[1, 4 + number :] = 0
        return {"input_ids": ids, "attention_mask": ids.ne(0).long(), "labels": torch.tensor([0, 1])}

    return [[turn(batch, number) for number, batch in enumerate(each)] for each in steps]


@report("OpenRLHF/OpenRLHF#1168", "outputs", "0 3 full tp sp pp cp ulysses")
def reward_of_the_last_token(layout: Layout) -> None:
    """OpenRLHF/OpenRLHF#1168: a reward model, which reads each row's last token, failed over a split sequence."""
    model, steps = llama("classifier", num_labels=2), ranked(tokens())
    check(ours(model, steps, layout), plain(model, steps))


class Critic(nn.Module):
    """Gives a value for each token, from the hidden states of a model of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.value = llama(), nn.Linear(16, 1).double()

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        output = self.inner(input_ids=input_ids, output_hidden_states=True)
        return output.logits, self.value(output.hidden_states[-1])[..., 0]


def policy_and_value(output: Any, batch: Any) -> tuple[Tensor, Any]:
    """Add the squared error of the values to the cross entropy."""
    total, count = cross_entropy(output[0], batch)
    return total + ((output[1] - 0.3).square() * batch[1].ne(-100)).sum(), count


@report("OpenRLHF/OpenRLHF#1168", "outputs", "0 3 tp tp-chunk sp pp cp")
def value_of_each_token(layout: Layout) -> None:
    """OpenRLHF/OpenRLHF#1168: a sibling: a critic around the model, which reads its hidden states."""
    torch.manual_seed(0)
    model, steps = Critic(), shifted(tokens())
    check(ours(model, steps, layout, policy_and_value), plain(model, steps, policy_and_value))


@report("hiyouga/EasyR1#11012", "masks", "0 3 tp tp-chunk sp pp cp ulysses")
def rows_of_padding(layout: Layout) -> None:
    """hiyouga/EasyR1#11012: rows whose mask is all zero fill up a rank's micro-batches."""
    model, steps = llama(), tokens()
    for batches in steps:
        for batch in batches:
            batch["attention_mask"] = torch.ones_like(batch["input_ids"])
            batch["attention_mask"][1] = 0
            batch["labels"][1] = -100
    check(ours(model, steps, layout), plain(model, steps))


def tempered(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Divide each token's logits by a temperature of its own."""
    logits = output.logits / (1.0 + batch[2][..., None].to(output.logits.dtype))
    return cross_entropy(logits, batch)


@report("verl-project/verl#5957", "losses on tokens", "0 3 tp tp-chunk chunk pp cp ulysses")
def temperature_of_each_token(layout: Layout) -> None:
    """verl-project/verl#5957: temperatures of tokens had the whole length, and the logits a rank's."""
    steps = [[(*batch, torch.arange(16).reshape(2, 8) / 8) for batch in each] for each in shifted(tokens())]
    check(ours(llama(), steps, layout, tempered), plain(llama(), steps, tempered))


def weighted(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Weigh each token's loss, which the function of torch leaves unreduced."""
    logits, targets = output.logits, batch[1]
    losses = nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=-100, reduction="none"
    )
    weights = batch[2].reshape(-1)
    return (losses * weights).sum(), (targets.reshape(-1).ne(-100) * weights).sum()


@report("linkedin/Liger-Kernel#1298", "losses on tokens", "0 3 tp tp-chunk sp chunk pp cp ulysses")
def weights_of_each_token(layout: Layout) -> None:
    """linkedin/Liger-Kernel#1298: unreduced losses, weighted, had every token's gradient times the first's weight."""
    weights = torch.linspace(0.1, 2.0, 16, dtype=torch.float64).reshape(2, 8)
    steps = [[(*batch, weights) for batch in each] for each in shifted(tokens())]
    check(ours(llama(), steps, layout, weighted), plain(llama(), steps, weighted))


class Convolved(nn.Module):
    """A causal convolution over the tokens, before attention."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mix = nn.Conv1d(8, 8, 3, groups=8), nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        past = nn.functional.pad(x.transpose(1, 2), (2, 0))
        x = x + self.conv(past).transpose(1, 2)
        q, k, v = self.mix(x).chunk(3, -1)
        heads = [each.unflatten(-1, (2, 4)).transpose(1, 2) for each in (q, k, v)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return x + mixed.transpose(1, 2).flatten(2)


class Hybrid(nn.Module):
    """A decoder of convolutions and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 8)
        self.blocks = nn.ModuleList(Convolved() for _ in range(2))
        self.head = nn.Linear(8, 24)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@report("fla-org/flash-linear-attention#955", "mixing of tokens", "0 3 full pp cp ulysses")
def convolution_over_tokens(layout: Layout) -> None:
    """fla-org/flash-linear-attention#955: a causal convolution over a split sequence had a wrong weight gradient."""
    torch.manual_seed(0)
    model, steps = Hybrid().double(), shifted(tokens())
    check(ours(model, steps, layout, cross_entropy), plain(model, steps, cross_entropy))
