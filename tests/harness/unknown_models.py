"""Language models in the ways that people write them, for which there is no plan of tensor parallelism.

>>> [case.name for case in CASES]
['nano', 'grouped', 'gated', 'crossed', 'routed', 'scaled']
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.models import ModelCase

VOCAB_SIZE: Final = 33  # no tp divides it
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, SEQ_LEN = 16, 4, 2, 4, 8


class FusedAttention(nn.Module):
    """Query, key and value in one matrix; the number of heads is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = HEADS
        self.n_embd = HIDDEN
        self.c_attn = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.c_proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:  # [B, S, E] -> [B, S, E]
        batch, length = x.shape[:2]
        query, key, value = self.c_attn(x).split(self.n_embd, dim=2)
        heads = (each.view(batch, length, self.n_head, -1).transpose(1, 2) for each in (query, key, value))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(batch, length, self.n_embd))


class NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attn = FusedAttention()
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GroupedAttention(nn.Module):
    """Fewer key heads than query heads, repeated, with a norm of each head; sizes are taken from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.key = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.value = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.query_norm = nn.LayerNorm(HEAD_DIM)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        key, value = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (key, value))
        mixed = F.scaled_dot_product_attention(self.query_norm(query), key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class GroupedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.attention = GroupedAttention()
        self.up, self.down = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.relu(self.up(self.norms[1](x))))


class GatedBlock(nn.Module):
    """Gate and up in one matrix, and no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.gate_up = nn.Linear(HIDDEN, 2 * 24)
        self.down = nn.Linear(24, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class ScaledEmbedding(nn.Embedding):
    """An embedding whose rows are scaled, as Gemma's."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * torch.tensor(HIDDEN**0.5).to(self.weight.dtype)


class Product(nn.Linear):
    """A linear layer that multiplies by itself, as Falcon's."""

    def forward(self, x: Tensor) -> Tensor:
        product = x @ self.weight.T
        return product if self.bias is None else product + self.bias


class Adapted(nn.Module):
    """A frozen linear layer and a trained update of rank 2 in layers of their own, as peft adds it."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(num_in, num_out), nn.Linear(num_in, 2), nn.Linear(2, num_out)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Decomposed(Adapted):
    """A frozen weight and its update, whose rows are brought to trained lengths, as DoRA does it."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(num_in, num_out)
        self.magnitude = nn.Parameter(self.base.weight.detach().norm(dim=1))

    def forward(self, x: Tensor) -> Tensor:
        lengths = (self.base.weight + self.up.weight @ self.down.weight).norm(dim=1)
        return (F.linear(x, self.base.weight) + self.up(self.down(x))) * (self.magnitude / lengths) + self.base.bias


class ScaledBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.attention = GroupedAttention()
        self.up, self.down = Decomposed(HIDDEN, 24), Decomposed(24, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.silu(self.up(self.norms[1](x))))


class CrossAttention(nn.Module):
    """Queries of one stream, keys and values of another; pairs of features are turned, and stacked again."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (Product(HIDDEN, HIDDEN) for _ in range(3))
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        query, key, value = self.heads(self.query(x)), self.heads(self.key(memory)), self.heads(self.value(memory))
        turned = torch.stack((-query[..., 1::2], query[..., ::2]), dim=-1).flatten(-2)
        return self.out(F.scaled_dot_product_attention(turned, key, value).transpose(1, 2).flatten(2))


class CrossBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.memory_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.cross = CrossAttention()
        self.gate, self.up, self.down = Product(HIDDEN, 24, bias=False), nn.Linear(HIDDEN, 24), Adapted(24, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.cross(self.norm(x), self.memory_norm(x.flip(1)))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Each token goes to the expert that its values choose."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 3)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            places = (chosen == number).nonzero(as_tuple=True)
            out = out.index_put(places, expert(x[places]) * weights[places].unsqueeze(-1))
        return out


class RoutedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.attention, self.experts = GroupedAttention(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.experts(self.norms[1](x))


class LanguageModel(nn.Module):
    """Embeddings, blocks, a norm and a head.

    Args:
        block: of the class, without arguments.
        vocab_size: of tokens.
        is_tied: the head's weight is the embedding's.
        scale: of the logits; with one that is not 1, what the head gives is not what the model returns.
    """

    def __init__(
        self, block: type[nn.Module], vocab_size: int = VOCAB_SIZE, is_tied: bool = False, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, HIDDEN)
        self.positions = nn.Embedding(SEQ_LEN, HIDDEN)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, vocab_size, bias=False)
        self.scale = scale
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:  # [B, S] -> [B, S, V]
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits if self.scale == 1.0 else logits * self.scale


def nano() -> LanguageModel:
    return LanguageModel(NanoBlock, is_tied=True)


def grouped() -> LanguageModel:
    return LanguageModel(GroupedBlock)


def gated() -> LanguageModel:
    """Its scaled logits are gathered; tp divides its vocabulary."""
    return LanguageModel(GatedBlock, vocab_size=36, scale=0.5)


def crossed() -> LanguageModel:
    """Its modules are subclasses of torch's with forwards of their own, or hold such as adapters add."""
    model = LanguageModel(CrossBlock)
    model.embed = ScaledEmbedding(VOCAB_SIZE, HIDDEN)
    return model


def routed() -> LanguageModel:
    return LanguageModel(RoutedBlock)


def scaled() -> LanguageModel:
    return LanguageModel(ScaledBlock)


def make_batch(seed: int, num_samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tokens and targets, both [B, S]."""
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, VOCAB_SIZE, (2, num_samples, SEQ_LEN), generator=generator).unbind()
    return tokens, targets


def make_loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    targets = batch[1].flatten()
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets, reduction="sum"), targets.numel()


CASES: Final = tuple(
    ModelCase(make.__name__, make, make_batch, make_loss) for make in (nano, grouped, gated, crossed, routed, scaled)
)
