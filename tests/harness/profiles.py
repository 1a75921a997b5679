"""What was measured on a machine that is not there: a CPU with blocks of two shapes and two lengths."""

from __future__ import annotations

from itertools import product

from shardwise.planner.profile import AttentionTime, BlockTime, HeadTime, MatmulTime, Profile

SHAPES = ((256, 768, 4), (512, 1536, 8))
SEQ_LENS = (128, 512)


def block_time(hidden: int, ffn: int, heads: int, seq_len: int, seconds: float, dtype: str = "fp32") -> BlockTime:
    return BlockTime(
        dtype=dtype,
        seq_len=seq_len,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=64,
        ffn_size=ffn,
        forward_s=seconds,
        backward_s=2.5 * seconds,
    )


BLOCKS = tuple(
    block_time(*shape, seq_len, 1e-9 * shape[0] ** 2 * seq_len * (1 + index))
    for index, (shape, seq_len) in enumerate(product(SHAPES, SEQ_LENS))
)
PROFILE = Profile(
    device="cpu",
    num_ranks=2,
    num_threads=1,
    memory_bytes=8e9,
    matmuls=(
        MatmulTime(dtype="fp32", m=512, n=512, k=512, seconds=0.004),
        MatmulTime(dtype="fp32", m=128, n=256, k=256, seconds=0.001),
    ),
    attentions=(
        AttentionTime(dtype="fp32", num_heads=4, head_dim=64, seq_len=128, forward_s=0.001, backward_s=0.003),
        AttentionTime(dtype="bf16", num_heads=4, head_dim=64, seq_len=128, forward_s=0.1, backward_s=0.3),
    ),
    blocks=BLOCKS,
    heads=(HeadTime(dtype="fp32", num_tokens=128, hidden_size=256, vocab_size=4096, forward_s=0.02, backward_s=0.05),),
    stream_bytes_per_s=2e9,
    step_bytes_per_s=5e9,
    call_s=1e-5,
)
