"""Models in plain torch as people write them: no attribute or name is there for the library's sake.

>>> len(PLAIN)
14
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.models import ModelCase

VOCAB_SIZE: Final = 33
SEQ_LEN: Final = 8
WIDTH: Final = 16

# B samples, S positions, D = WIDTH features, C channels


class ResidualNet(nn.Module):
    """Normed residual layers over vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class TorchEncoder(nn.Module):
    """torch's own encoder, its layers as they come."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB_SIZE)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens)))


class TorchPair(nn.Module):
    """torch's own encoder and decoder, with attention from one to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.inner = nn.Transformer(WIDTH, 4, 2, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB_SIZE)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
        return self.head(self.inner(x.flip(1), x, tgt_mask=mask, tgt_is_causal=True))


class FusedAttention(nn.Module):
    """Causal; query, key and value in one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.n_head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), 4

    def forward(self, x: Tensor) -> Tensor:
        B, S, D = x.size()
        q, k, v = self.c_attn(x).split(D, dim=2)
        q, k, v = (each.view(B, S, self.n_head, D // self.n_head).transpose(1, 2) for each in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        scores = scores.masked_fill(torch.ones(S, S).tril() == 0, -torch.inf)
        return self.c_proj((scores.softmax(-1) @ v).transpose(1, 2).contiguous().view(B, S, D))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x)))


class Residual(nn.Module):
    """A block: both normed first."""

    def __init__(self, mixer: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), mixer
        self.ln_2, self.mlp = nn.LayerNorm(WIDTH), feed_forward

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """Learned positions, one weight for embedding and head."""

    def __init__(self, make_mlp: Callable[[], nn.Module] = FeedForward) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCAB_SIZE, WIDTH),
                "wpe": nn.Embedding(SEQ_LEN, WIDTH),
                "h": nn.ModuleList(Residual(FusedAttention(), make_mlp()) for _ in range(2)),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCAB_SIZE, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.transformer.wte(tokens) + self.transformer.wpe(torch.arange(tokens.shape[1]))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


class Experts(nn.Module):
    """Two of four experts for each token, as its values say."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(FeedForward() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            out = out.index_add(0, token, expert(flat[token]) * weights[token, place, None])
        return out.view_as(x)


class RotaryAttention(nn.Module):
    """Fewer heads of keys than of queries, rotated by tables that are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, 8, bias=False), nn.Linear(WIDTH, 8, bias=False)
        angles = torch.outer(torch.arange(SEQ_LEN), 1 / 100 ** (torch.arange(2) / 2)).repeat(1, 2)  # [S, 4]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:  # [B, heads, S, 4]
        one, other = x.chunk(2, dim=-1)
        length = x.shape[2]
        return x * self.cos[:length] + torch.cat((-other, one), dim=-1) * self.sin[:length]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (-1, 4)).transpose(1, 2) for each in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        out = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RotaryDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.layers = nn.ModuleList(Residual(RotaryAttention(), Gated()) for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB_SIZE, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class CrossBlock(nn.Module):
    """Reads a memory through keys and values of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mlp = FeedForward()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = self.q(self.norm(x)), self.k(memory), self.v(memory)
        q, k, v = (each.view(*each.shape[:2], 4, 4).transpose(1, 2) for each in (q, k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class CrossDecoder(nn.Module):
    """Queries that are learned read the tokens, as perceivers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.queries = nn.Parameter(torch.randn(SEQ_LEN, WIDTH))
        self.blocks = nn.ModuleList(CrossBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB_SIZE)

    def forward(self, tokens: Tensor) -> Tensor:
        memory = self.embed(tokens)
        x = self.queries.expand(len(tokens), -1, -1)
        for block in self.blocks:
            x = block(x, memory)
        return self.head(x)


class ConvNet(nn.Module):
    """Convolutions with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(c, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for c in (3, 8, 8))
        )
        self.head = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:  # [B, C, 8, 8]
        return self.head(self.blocks(x).mean((2, 3)))


class UNet(nn.Module):
    """What is left of the way down joins the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.inc, self.down = self.step(3, 8), self.step(8, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.merge, self.head = self.step(16, 8), nn.Conv2d(8, 3, 1)

    @staticmethod
    def step(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(2, after), nn.SiLU())

    def forward(self, x: Tensor) -> Tensor:  # [B, C, 8, 8]
        top = self.inc(x)
        deep = self.down(F.avg_pool2d(top, 2))
        return self.head(self.merge(torch.cat([top, self.up(deep)], dim=1)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB_SIZE)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


class Adversaries(nn.Module):
    """A generator, and a judge whose weights its loss leaves alone; the judge sees what was made, detached."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 6))
        self.judge = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        made = self.generator(x.flip(-1))
        frozen = [parameter.detach() for parameter in self.judge.parameters()]
        hidden = F.leaky_relu(F.linear(made, frozen[0], frozen[1]), 0.2)
        return F.linear(hidden, frozen[2], frozen[3]), self.judge(x), self.judge(made.detach())


class Patches(nn.Module):
    """A token for the class in front of an image's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(0.1 * torch.randn(1, 5, WIDTH))
        self.blocks = nn.ModuleList(CrossBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:  # [B, C, 8, 8]
        patches = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), patches], dim=1) + self.positions
        for block in self.blocks:
            x = block(x, x)
        return self.head(x[:, 0])


class LowRank(nn.Module):
    """A frozen layer and a small update that trains."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A, self.lora_B = (
            nn.Linear(base.in_features, 2, bias=False),
            nn.Linear(2, base.out_features, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.lora_B(self.lora_A(x))


def adapted() -> nn.Module:
    model = RotaryDecoder().requires_grad_(False)
    for layer in model.layers:
        layer.attn.q_proj, layer.attn.v_proj = LowRank(layer.attn.q_proj), LowRank(layer.attn.v_proj)
        layer.mlp.down_proj = LowRank(layer.mlp.down_proj)
    return model


def token_loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten(), reduction="sum"), batch[1].numel()


def square_loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return (output - batch[1]).square().sum(), output.numel()


def adversaries_loss(output: tuple[Tensor, Tensor, Tensor], batch: Any) -> tuple[Tensor, int]:
    fooled, real, made = output
    return F.softplus(-fooled).sum() + F.softplus(-real).sum() + F.softplus(made).sum(), len(real)


def tokens(seed: int, num_samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    both = torch.randint(VOCAB_SIZE, (num_samples, SEQ_LEN + 1), generator=torch.Generator().manual_seed(seed))
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


@dataclass(frozen=True)
class Numbers:
    """Inputs and targets of these shapes."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]

    def __call__(self, seed: int, num_samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(num_samples, *self.inputs, generator=generator)
        return x.to(dtype), torch.randn(num_samples, *self.targets, generator=generator).to(dtype)


IMAGES: Final = (3, 8, 8)
_CASES: Final = (
    ModelCase("residual net", ResidualNet, Numbers((6,), (3,)), square_loss),
    ModelCase("torch encoder", lambda: TorchEncoder(False), tokens, token_loss),
    ModelCase("torch encoder, norm first", lambda: TorchEncoder(True), tokens, token_loss),
    ModelCase("torch pair", TorchPair, tokens, token_loss),
    ModelCase("nano gpt", NanoGPT, tokens, token_loss),
    ModelCase("experts", lambda: NanoGPT(Experts), tokens, token_loss),
    ModelCase("rotary decoder", RotaryDecoder, tokens, token_loss),
    ModelCase("cross decoder", CrossDecoder, tokens, token_loss),
    ModelCase("conv net", ConvNet, Numbers(IMAGES, (3,)), square_loss),
    ModelCase("unet", UNet, Numbers(IMAGES, IMAGES), square_loss),
    ModelCase("lstm", Recurrent, tokens, token_loss),
    ModelCase("adversaries", Adversaries, Numbers((6,), (1,)), adversaries_loss),
    ModelCase("patches", Patches, Numbers(IMAGES, (3,)), square_loss),
    ModelCase("adapters", adapted, tokens, token_loss),
)
PLAIN: Final[Mapping[str, ModelCase]] = MappingProxyType({case.name: case for case in _CASES})
