"""Defines a Llama-style decoder in plain PyTorch, its loss, and how it is sampled from.

It has no sharding code: no collectives, no groups, no tiers. Its state is its parameters alone; rotary tables are
recomputed in each forward, so a model built on meta needs only its parameters filled.

Shapes: B batch, S sequence, E hidden, H query heads, K key and value heads, D head, V vocabulary.

>>> from shardwise.models.shape import num_params
>>> config = DecoderConfig(vocab_size=64, num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=2,
...                        head_dim=4, ffn_size=48, max_seq_len=32)
>>> model = Decoder(config)
>>> tokens = torch.arange(16).view(2, 8)  # [B, S]
>>> logits = model(tokens)
>>> logits.shape
torch.Size([2, 8, 64])
>>> loss_sum, count = lm_loss(logits, tokens)
>>> count.item(), num_params(config)
(16, 8272)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shardwise.config.errors import ConfigError, EngineError
from shardwise.layout.activation_bytes import CPU_LOGITS, KERNEL_LOGITS
from shardwise.layout.tensor_plan import LayerSplit, SequenceStack, SharedInput, TensorPlan
from shardwise.layout.tp_sharding import FusedPart, check_divides
from shardwise.models.decoder_attention import Attend, attend_of
from shardwise.models.decoder_experts import INIT_STD, DrawnExperts, MixtureOfExperts, Router, draw_normal
from shardwise.models.presets import DecoderConfig
from shardwise.runtime.device import number_dtype
from shardwise.runtime.torch_private import is_fake

IGNORED_TARGET = -100


class DecoderLinear(nn.Linear):
    """Is a linear layer without bias, drawn from normal(0, init_std).

    Args:
        init_std: standard deviation of the initial weight.
        factory: device and dtype, as in `nn.Linear`.
    """

    def __init__(self, num_in: int, num_out: int, init_std: float = INIT_STD, **factory: Any) -> None:
        self.init_std = init_std  # before the constructor of nn.Linear, which calls reset_parameters
        super().__init__(num_in, num_out, bias=False, **factory)

    def reset_parameters(self) -> None:
        draw_normal(self.weight, self.init_std)


class DecoderEmbedding(nn.Embedding):
    """Is an embedding drawn from normal(0, 0.02): small enough to serve as the head too."""

    def reset_parameters(self) -> None:
        draw_normal(self.weight, INIT_STD)


class RMSNorm(nn.Module):
    """Computes x / rms(x) * weight over the last dim, in fp32 or wider (Zhang and Sennrich 2019, eq. 4).

    Args:
        eps: added to the mean square, under the root.
        factory: device and dtype of the weight.
    """

    def __init__(self, size: int, eps: float, **factory: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type not in ("cpu", "meta"):
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # On the CPU F.rms_norm is not fused: it takes 2-3 times as long, and saves two to three times the bytes.
        return _RMSNormProduct.apply(x, self.weight, self.eps)


class _RMSNormProduct(torch.autograd.Function):
    """Saves its input, which the residual keeps anyway, and a number for each position; recomputes the normed x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:  # [..., E], [E]
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # [..., 1]
        scale = torch.rsqrt(norm.square() / x.shape[-1] + eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        # All are in fp32 or wider; they are cast first, since kernels of two dtypes are slow.
        grad, wide_weight = grad.to(scale.dtype), weight.to(scale.dtype)
        normed = x.to(scale.dtype) * scale  # [..., E]
        product = (grad * normed).flatten(0, -2)  # [N, E]
        # The gradient along x itself is 0, since the norm is divided out.
        along = (product @ wide_weight / x.shape[-1]).view_as(scale)  # [..., 1]
        grad_x = (grad * wide_weight).addcmul_(normed, along, value=-1).mul_(scale)
        return grad_x.to(x.dtype), product.sum(0).to(weight.dtype), None


class DecoderAttention(nn.Module):
    """Computes causal self-attention with rotary positions; H / K query heads share each key and value head.

    Attributes:
        num_heads: of the whole model; so is `num_kv_heads`.
        first_head: number of this rank's first query head.

    Args:
        factory: device and dtype of the parameters.
    """

    def __init__(self, config: DecoderConfig, attend: Attend, **factory: Any) -> None:
        super().__init__()
        self.attend, self.first_head = attend, 0  # tensor parallelism sets each rank's first head
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        hidden, self.head_dim = config.hidden_size, config.head_dim
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.query = DecoderLinear(hidden, query_size, **factory)
        self.key = DecoderLinear(hidden, kv_size, **factory)
        self.value = DecoderLinear(hidden, kv_size, **factory)
        self.out = DecoderLinear(query_size, hidden, _residual_std(config), **factory)

    def forward(self, x: Tensor, rope: Tensor, positions: Tensor | None = None) -> Tensor:
        """Attend from each token of x [B, S, E], normalised, to those up to it, with the `rope` of `rope_tables`.

        Args:
            positions: [S], int64, as in `Decoder.forward`; None where this rank has the whole sequence.
        """
        heads = (*x.shape[:2], -1, self.head_dim)
        q = rotate(self.query(x).view(heads), rope).transpose(1, 2)  # [B, H, S, D]
        k = rotate(self.key(x).view(heads), rope).transpose(1, 2)  # [B, K, S, D]
        v = self.value(x).view(heads).transpose(1, 2)  # [B, K, S, D]
        mixed = self.attend(q, k, v, self.first_head, positions)
        return self.out(mixed.transpose(1, 2).flatten(2))  # [B, H, S, D] -> [B, S, E]


class FeedForward(nn.Module):
    """Computes SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020), `ffn_size` features wide."""

    def __init__(self, config: DecoderConfig, ffn_size: int, **factory: Any) -> None:
        super().__init__()
        self.gate = DecoderLinear(config.hidden_size, ffn_size, **factory)
        self.up = DecoderLinear(config.hidden_size, ffn_size, **factory)
        self.down = DecoderLinear(ffn_size, config.hidden_size, _residual_std(config), **factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class DecoderBlock(nn.Module):
    """Runs one layer: attention, then feed-forward, each normalised before and added to the residual stream.

    Args:
        attend: computes attention, shared by all layers; None makes it from the config.
        factory: device and dtype of the parameters.
    """

    def __init__(self, config: DecoderConfig, attend: Attend | None = None, **factory: Any) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, **factory)
        attend = attend or attend_of(config.attention, config.num_heads)
        self.attention = DecoderAttention(config, attend, **factory)
        self.ffn_norm = RMSNorm(config.hidden_size, config.norm_eps, **factory)
        self.ffn = _feed_forward(config, **factory)

    def forward(self, x: Tensor, rope: Tensor, positions: Tensor | None = None) -> Tensor:
        """Run the layer on the residual stream x [B, S, E], with the `rope` of `rope_tables`.

        Args:
            positions: [S], int64, as in `Decoder.forward`; None where this rank has the whole sequence.
        """
        x = x + self.attention(self.attention_norm(x), rope, positions)  # [B, S, E]
        return x + self.ffn(self.ffn_norm(x))


class Decoder(nn.Module):
    """Runs embedding, blocks, norm and head; `head.weight` is `embed.weight` where embeddings are tied.

    Args:
        device: of the parameters; "meta" allocates none; None for torch's default.
        dtype: of all parameters; None for torch's default.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.config = config
        self.embed = DecoderEmbedding(config.vocab_size, config.hidden_size, **factory)
        attend = attend_of(config.attention, config.num_heads)
        self.blocks = nn.ModuleList(DecoderBlock(config, attend, **factory) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, **factory)
        self.head = DecoderLinear(config.hidden_size, config.vocab_size, **factory)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    def tensor_plan(self, degree: int) -> TensorPlan:
        """Return the plan by which tensor parallelism splits this model over `degree` ranks; see `decoder_plan`."""
        return decoder_plan(self.config, degree)

    def check_length(self, seq_len: int) -> None:
        """Raise `ConfigError` if a sequence of `seq_len` tokens is longer than `max_seq_len`."""
        if seq_len > self.config.max_seq_len:
            raise ConfigError(
                "sequence-too-long",
                f"sequence of {seq_len} tokens is longer than max_seq_len={self.config.max_seq_len}; "
                "cut it or raise max_seq_len",
            )

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map tokens, int64 [B, S], to the logits of the token after each, [B, S, V].

        Args:
            tokens: of the sequence, or those of it that this rank computes.
            positions: [S], int64, positions in the sequence of this rank's tokens; None where it has all of them.

        Raises:
            ConfigError: the sequence is longer than `max_seq_len`.
        """
        seq_len = tokens.shape[1]
        self.check_length(seq_len)
        x = self.embed(tokens)  # [B, S, E]
        rope = rope_tables(seq_len, self.config.head_dim, self.config.rope_theta, x, positions)
        for block in self.blocks:
            x = block(x, rope, positions)
        return self.head(self.norm(x))


def rope_tables(seq_len: int, head_dim: int, theta: float, like: Tensor, positions: Tensor | None = None) -> Tensor:
    """Compute cosines and signed sines of every position's angles (Su et al. 2021, eq. 34), for `rotate`.

    Angles are computed in fp64, where the device has it: fp32 loses hundredths of a radian at positions beyond 100,000.

    Args:
        like: a tensor of the dtype and on the device of the tensors to rotate.
        positions: [S], int64; None for 0, 1, ...

    Returns:
        [2, S, 1, D] on the device of `like`, in its dtype or fp32, whichever is wider.
    """
    wide = number_dtype(like.device)
    exponent = torch.arange(0, head_dim, 2, dtype=wide, device=like.device) / head_dim
    if positions is None:
        positions = torch.arange(seq_len, device=like.device)
    angle = torch.outer(positions.to(wide), theta**-exponent)  # [S, D/2]
    cos, sin = angle.cos(), angle.sin()
    tables = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))  # [2, S, D]
    return tables.unsqueeze(2).to(torch.promote_types(like.dtype, torch.float32))


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turn the pairs (i, i + D/2) of each head of x, [B, S, heads, D], by their position's angles."""
    cos, sin = rope
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


def lm_loss(
    logits: Tensor, targets: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Sum the cross entropy over the targets that count, in fp32 or wider for any dtype of the logits.

    Logits that are not computed yet compute the sum by their own method `cross_entropy_sum` of the same arguments.

    Args:
        logits: [B, S, V] (any leading dims), floating.
        targets: [B, S] int64, -100 where a position does not count.
        label_smoothing: the share of the target's probability that is spread over the whole vocabulary.
        z_loss: weight of the squared log-sum-exp of the logits (PaLM, arXiv 2204.02311, section 5).

    Returns:
        The sum (fp32, or fp64 for fp64 logits) and the int64 number of targets that count, both of no dims.

    Raises:
        EngineError: there are not as many targets as logits have tokens, or they are no integers.
    """
    if targets.numel() != math.prod(logits.shape[:-1]) or targets.dtype not in (torch.int64, torch.int32):
        dtype = str(targets.dtype).removeprefix("torch.")
        raise EngineError(
            "batch-misfit",
            f"the loss got targets {list(targets.shape)} {dtype} for logits {list(logits.shape)}; give one of "
            f"int64 for each token, -100 where none counts: {list(logits.shape[:-1])}",
        )
    count = (targets != IGNORED_TARGET).sum()
    deferred_sum = getattr(logits, "cross_entropy_sum", None)
    if deferred_sum is not None:
        return deferred_sum(targets, label_smoothing, z_loss), count
    return _CrossEntropySum.apply(logits.flatten(0, -2), targets.flatten(), label_smoothing, z_loss), count


class _CrossEntropySum(torch.autograd.Function):
    """Sums a few rows at a time: only the logits and their gradient are of the logits' size."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, smoothing: float, z_loss: float) -> Tensor:  # [N, V], [N]
        wide = torch.promote_types(logits.dtype, torch.float32)
        log_total = logits.new_empty(logits.shape[0], dtype=wide)  # [N]
        for rows, out in _parts(logits, log_total):
            torch.logsumexp(rows.to(wide), -1, out=out)
        counts = targets != IGNORED_TARGET
        index = targets.where(counts, 0).unsqueeze(-1)  # [N, 1]
        ctx.save_for_backward(logits, index, counts, log_total)
        ctx.terms = smoothing, z_loss
        picked = logits.gather(-1, index).squeeze(-1).to(wide)
        if smoothing:
            picked = torch.lerp(picked, logits.mean(-1, dtype=wide), smoothing)
        losses = log_total - picked
        if z_loss:
            losses = losses + z_loss * log_total.square()
        return losses.where(counts, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_sum: Tensor) -> tuple[Tensor, None, None, None]:
        logits, index, counts, log_total = ctx.saved_tensors
        smoothing, z_loss = ctx.terms
        grad = torch.empty_like(logits)  # [N, V]
        factor = (grad_sum * counts).unsqueeze(-1)  # [N, 1]
        parts = _parts(logits, log_total.unsqueeze(-1), index, factor, grad)
        for rows, log_total_rows, index_rows, factor_rows, grad_rows in parts:
            probability = (rows - log_total_rows).exp_()
            if z_loss:
                probability.mul_(1 + 2 * z_loss * log_total_rows)
            if smoothing:
                probability.sub_(smoothing / logits.shape[-1])
            target = probability.new_full((1, 1), smoothing - 1).expand_as(index_rows)
            probability.scatter_add_(-1, index_rows, target)
            torch.mul(probability, factor_rows, out=grad_rows)
        return grad, None, None, None


def _feed_forward(config: DecoderConfig, **factory: Any) -> nn.Module:
    if not config.num_experts:
        return FeedForward(config, config.ffn_size, **factory)
    shared = FeedForward(config, config.shared_size, **factory) if config.shared_size else None
    experts = DrawnExperts(config, _residual_std(config), **factory)
    return MixtureOfExperts(Router(config, **factory), experts, shared)


def _residual_std(config: DecoderConfig) -> float:
    """Return the standard deviation for the 2 L projections that add to the residual stream.

    It is smaller so that the variance of the stream does not grow with L.
    """
    return INIT_STD / math.sqrt(2 * config.num_layers)


def _parts(logits: Tensor, *others: Tensor) -> list[tuple[Tensor, ...]]:
    """Return the rows to compute at a time.

    Of fake tensors two whole parts and the last stand for all, of which there are thousands in a large vocabulary: a
    part is freed when the next one is there.
    """
    num_logits = CPU_LOGITS if logits.device.type == "cpu" else KERNEL_LOGITS
    num_rows = max(1, num_logits // logits.shape[-1])
    starts: Sequence[int] = range(0, logits.shape[0], num_rows)
    if is_fake(logits):
        starts = (*starts[:2], *starts[2:][-1:])
    return [tuple(tensor[start : start + num_rows] for tensor in (logits, *others)) for start in starts]


def decoder_plan(config: DecoderConfig, degree: int) -> TensorPlan:
    """Return the plan of a decoder, split by heads in attention, by features in feed-forwards, by tokens at both ends.

    Args:
        degree: ranks of the tensor-parallel group; where there are fewer KV heads, neighbouring ranks share one.

    Raises:
        ConfigError: heads, KV heads, or the features that every token passes do not divide by `degree`.
    """
    query = FusedPart(config.num_heads * config.head_dim, config.num_heads)
    kv = FusedPart(config.num_kv_heads * config.head_dim, config.num_kv_heads)
    # Experts are whole; those that are shared are split as a dense feed-forward is.
    name, size = ("ffn.shared", config.shared_size) if config.num_experts else ("ffn", config.ffn_size)
    ffn, regions = FusedPart(size), ("attention", *([name] if size else []))
    vocab = FusedPart(config.vocab_size, is_padded=True)
    check_divides(degree, config.num_heads, "num_heads")
    kv.check(degree, "num_kv_heads")
    check_divides(degree, size, "num_shared_experts * expert_size" if config.num_experts else "ffn_size")

    blocks = [f"blocks.{index}" for index in range(config.num_layers)]
    layers = [LayerSplit("embed", "vocab", (vocab,)), LayerSplit("head", "head", (vocab,))]
    for block in blocks:
        layers += [LayerSplit(f"{block}.attention.query", "column", (query,))]
        layers += [LayerSplit(f"{block}.attention.{name}", "column", (kv,)) for name in ("key", "value")]
        layers += [LayerSplit(f"{block}.attention.out", "row", (query,))]
        if size:
            layers += [LayerSplit(f"{block}.{name}.{part}", "column", (ffn,)) for part in ("gate", "up")]
            layers += [LayerSplit(f"{block}.{name}.down", "row", (ffn,))]
    return TensorPlan(
        layers=tuple(layers),
        regions=tuple(SharedInput(f"{block}.{name}", ("x",)) for block in blocks for name in regions),
        stacks=(SequenceStack(blocks[0], "x", "norm", (*blocks, "norm")),),
        attributes=tuple((f"{block}.attention", "first_head", FusedPart(config.num_heads)) for block in blocks),
    )


@torch.no_grad()
def generate(
    model: Callable[[Tensor], Tensor],
    tokens: Tensor,
    num_tokens: int,
    *,
    max_seq_len: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Append `num_tokens` sampled tokens to each sequence; not for serving, as no keys and values are kept.

    >>> def successor(tokens):  # favours, after each token, the next one of 10
    ...     return 50.0 * torch.nn.functional.one_hot((tokens + 1) % 10, 10).float()
    >>> generate(successor, torch.tensor([[3]]), 4, max_seq_len=8)
    tensor([[3, 4, 5, 6, 7]])

    Args:
        model: maps int64 [B, S] to logits [B, S, V]: a `Decoder`, or an engine around one.
        tokens: int64 [B, S], the prompts, S at least 1.
        max_seq_len: the longest input the model takes; earlier tokens are cut off.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: sample among the k likeliest tokens only; None for all.
        generator: on the device of the logits, for reproducible samples; None for torch's default.

    Returns:
        int64 [B, S + num_tokens].

    Raises:
        ConfigError: an empty prompt, a negative temperature, or a top_k below 1.
    """
    if tokens.shape[1] == 0:
        raise ConfigError(
            "prompt-empty", "the prompt has 0 tokens, but a sample needs one before it; begin with any token"
        )
    if temperature < 0:
        raise ConfigError(
            "temperature-negative", f"temperature={temperature} is negative; give 0 for the likeliest token, or more"
        )
    if top_k is not None and top_k < 1:
        raise ConfigError("top-k-empty", f"top_k={top_k} keeps no token; give at least 1, or leave it out")
    for _ in range(num_tokens):
        logits = model(tokens[:, -max_seq_len:])[:, -1].float()  # [B, V]
        tokens = torch.cat((tokens, _sample(logits, temperature, top_k, generator)), dim=1)
    return tokens


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)  # [B, 1]
    if top_k is not None and top_k < logits.shape[-1]:
        smallest_kept = logits.topk(top_k).values[:, -1:]  # [B, 1]
        logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)  # [B, 1]
