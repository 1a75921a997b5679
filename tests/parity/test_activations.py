"""What a layer keeps for its backward: the formula against published ones, and against bytes counted by watching."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from harness.live_bytes import LiveBytes, settled_bytes, storage_bytes
from harness.pool import WorkerPool
from harness.scanned import scanned
from harness.split_model import cut, make_comm
from shardwise.config.resolve import AttentionConfig, Config, TensorConfig
from shardwise.context.apply import apply_context_parallel
from shardwise.layout.activation_bytes import LayerShape, activation_bytes_per_layer
from shardwise.layout.tensor_plan import param_splits
from shardwise.models.decoder import Decoder, DecoderBlock, rope_tables
from shardwise.models.presets import DecoderConfig
from shardwise.runtime.buffer_pool import BufferPool
from shardwise.runtime.recompute import run_forward
from shardwise.tensor.apply import split_model

MICRO_SIZE = 2
HEAD_DIM = 64
DTYPES = [torch.bfloat16, torch.float32]
SIZES = [(8, 8, 256), (8, 2, 256), (8, 2, 512), (6, 3, 256)]  # query heads, KV heads, sequence


SPARSE = AttentionConfig(kind="bigbird", different_layout_per_head=True)


def make_block(
    num_heads: int, num_kv_heads: int, dtype: torch.dtype, attention: AttentionConfig | None = None
) -> tuple[DecoderBlock, LayerShape]:
    """A block whose hidden size is not num_heads * head_dim, so that no two terms of the formula are equal."""
    sizes = {
        "hidden_size": 448,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": HEAD_DIM,
        "ffn_size": 688,
    }
    attention = attention or AttentionConfig()
    config = DecoderConfig(vocab_size=64, num_layers=1, max_seq_len=512, attention=attention, **sizes)
    return DecoderBlock(config, dtype=dtype), LayerShape(**sizes)


def kept_bytes(
    block: nn.Module,
    run: Callable[..., Tensor],
    x: Tensor,
    rope: Tensor,
    read: Callable[[LiveBytes], int] = LiveBytes.live_bytes,
    made: Sequence[Tensor] = (),
) -> int:
    """What `run(x, rope)` leaves alive for its backward, `x` included; parameters, tables, output, `made` are not."""
    gc.collect()
    with LiveBytes() as live:
        live.mark([*block.parameters(), *block.buffers(), rope, *made])
        before = live.live_bytes()
        live.mark([x])
        output = run(x, rope)  # [B, S / tp or S, E]
        kept = read(live) - before - storage_bytes([output])
        output.sum().backward()
        assert block.get_parameter("attention.out.weight").grad is not None
    return kept


def saved_bytes(block: nn.Module, x: Tensor, rope: Tensor) -> int:
    """The storages under the tensors that autograd saves, each once, but those of parameters and tables."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, rope)
    known = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), rope)}
    return storage_bytes(tensor for tensor in saved if tensor.untyped_storage().data_ptr() not in known)


def inputs(block_dtype: torch.dtype, hidden_size: int, seq_len: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(MICRO_SIZE, seq_len, hidden_size, dtype=block_dtype, requires_grad=True)  # [B, S, E]
    return x, rope_tables(seq_len, HEAD_DIM, 10_000.0, x.detach())


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "seq_len"), SIZES)
def test_a_block_keeps_what_the_table_says(num_heads: int, num_kv_heads: int, seq_len: int, dtype: torch.dtype) -> None:
    """The table as it is published for bf16, without the scales of norms: within 5 %, in fact within 0.1 %."""
    block, shape = make_block(num_heads, num_kv_heads, dtype)
    x, rope = inputs(dtype, shape.hidden_size, seq_len)
    h, d, f = shape.hidden_size, HEAD_DIM, shape.ffn_size
    wide = dtype.itemsize // 2  # the table's bytes are of bf16, but for the log-sum-exp
    a_token = wide * ((2 * h + 2 * h) + 2 * num_heads * d + 4 * num_kv_heads * d + 2 * num_heads * d)
    a_token += 4 * num_heads + wide * ((2 * h + 2 * h) + 8 * f)
    tracker = seq_len * MICRO_SIZE * a_token
    assert saved_bytes(block, x, rope) == pytest.approx(tracker, rel=1e-3)
    assert kept_bytes(block, block, x, rope) == pytest.approx(tracker, rel=1e-3)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "seq_len"), SIZES[1:3])
def test_the_formula_is_exact_in_each_recompute_mode(
    num_heads: int, num_kv_heads: int, seq_len: int, dtype: torch.dtype, recompute: Any
) -> None:
    block, shape = make_block(num_heads, num_kv_heads, dtype)
    x, rope = inputs(dtype, shape.hidden_size, seq_len)
    kept = kept_bytes(block, lambda *args: run_forward(block.forward, recompute, args, {}), x, rope)
    assert kept == activation_bytes_per_layer(
        shape, seq_len=seq_len, micro_size=MICRO_SIZE, element_bytes=dtype.itemsize, recompute=recompute
    )


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_block_sparse_attention_keeps_what_dense_attention_does(dtype: torch.dtype, recompute: Any) -> None:
    """Not a byte for scores or for what is planned on the layout, which is made once and not of a layer."""
    block, shape = make_block(8, 2, dtype, SPARSE)
    x, rope = inputs(dtype, shape.hidden_size, 256)
    block(x, rope)
    (layout,) = block.attention.attend._layouts.values()
    planned = [each for each in tree_leaves(list(layout._made.values())) if isinstance(each, Tensor)]
    kept = kept_bytes(block, lambda *args: run_forward(block.forward, recompute, args, {}), x, rope, made=planned)
    assert kept == activation_bytes_per_layer(
        shape, seq_len=256, micro_size=MICRO_SIZE, element_bytes=dtype.itemsize, recompute=recompute
    )


SPLIT_SIZES = {"hidden_size": 448, "num_heads": 8, "num_kv_heads": 2, "head_dim": HEAD_DIM, "ffn_size": 688}
SPLIT_LENGTH = 256
MODES = list(itertools.product(DTYPES, ["none", "selective", "full"]))


def kept_by_a_split_block(rank: int, world_size: int, is_sequence: bool) -> list[int]:
    """What a middle block keeps on a rank, in each of `MODES`; the collectives' own buffers are taken out."""
    return [kept_in_mode(rank, world_size, is_sequence, dtype, mode) for dtype, mode in MODES]


def kept_in_mode(rank: int, world_size: int, is_sequence: bool, dtype: torch.dtype, mode: str) -> int:
    model = Decoder(DecoderConfig(vocab_size=64, num_layers=3, max_seq_len=512, **SPLIT_SIZES), dtype=dtype)
    plan = model.tensor_plan(world_size)
    splits = param_splits(scanned(model).params, plan, world_size, is_sequence)
    pool = BufferPool()
    split_model(model, plan, make_comm(pool), TensorConfig(sequence_parallel=is_sequence), splits)
    cut(model, splits, rank)
    block = model.blocks[1]

    def run(x: Tensor, rope: Tensor) -> Tensor:  # [B, S / tp or S, E]
        output = run_forward(block.forward, mode, (x, rope), {})
        pool.trim()
        return output

    _, rope = inputs(dtype, 1, SPLIT_LENGTH)
    x, _ = inputs(dtype, SPLIT_SIZES["hidden_size"], SPLIT_LENGTH // (world_size if is_sequence else 1))
    return kept_bytes(block, run, x, rope, settled_bytes)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("is_sequence", [False, True])
def test_the_formula_is_exact_for_split_blocks(ranks: WorkerPool, num_ranks: int, is_sequence: bool) -> None:
    """Four ranks share two KV heads."""
    expected = [
        activation_bytes_per_layer(
            LayerShape(**SPLIT_SIZES),
            seq_len=SPLIT_LENGTH,
            micro_size=MICRO_SIZE,
            tp=num_ranks,
            sequence_parallel=is_sequence,
            element_bytes=dtype.itemsize,
            recompute=mode,  # type: ignore[arg-type]
        )
        for dtype, mode in MODES
    ]
    assert ranks(num_ranks).run(kept_by_a_split_block, is_sequence) == [expected] * num_ranks


def korthikanti(s: int, b: int, h: int, t: int, sequence_parallel: bool) -> float:
    """Their table 2 without attention's scores, and without the masks of dropout, 2sbh, split with the sequence."""
    return s * b * h * (32 / t if sequence_parallel else 8 + 24 / t)


@pytest.mark.parametrize(("tp", "sequence_parallel"), list(itertools.product([1, 2, 8], [False, True])))
def test_the_formula_is_korthikantis_where_layers_are_equal(tp: int, sequence_parallel: bool) -> None:
    """A SwiGLU of 2h features keeps what a GELU of 4h does; what they do not count is taken off."""
    s, b, h, a = 2048, 4, 6144, 64
    shape = LayerShape(hidden_size=h, num_heads=a, num_kv_heads=a, head_dim=h // a, ffn_size=2 * h)
    layout = {"seq_len": s, "micro_size": b, "tp": tp, "sequence_parallel": sequence_parallel}
    not_theirs = s * b * (4 * a / tp + 8 / (tp if sequence_parallel else 1))
    expected = korthikanti(s, b, h, tp, sequence_parallel)
    assert activation_bytes_per_layer(shape, **layout) - not_theirs == expected
    full = activation_bytes_per_layer(shape, **layout, recompute="full")
    assert full == 2 * s * b * h / (tp if sequence_parallel else 1)


def test_shared_kv_heads_are_whole_on_every_rank() -> None:
    shape = LayerShape(hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, ffn_size=128)
    layout = {"seq_len": 3, "micro_size": 1, "sequence_parallel": True}
    alone = activation_bytes_per_layer(shape, **layout)
    kv_bytes = 3 * 2 * 2 * 8  # of one head: keys and values of 3 tokens
    assert activation_bytes_per_layer(shape, **layout, tp=8) == (alone - 2 * kv_bytes) / 8 + kv_bytes
    assert activation_bytes_per_layer(shape, **layout, tp=2) == alone / 2


def kept_by_a_split_sequence(rank: int, world_size: int, mode: str) -> int:
    """What a middle block keeps on a rank of the cp axis."""
    shape = DecoderConfig(vocab_size=64, num_layers=3, max_seq_len=512, **SPLIT_SIZES)
    model = Decoder(shape, dtype=torch.float32)
    sequences, undone = apply_context_parallel(
        model, Config.from_dict({"mesh": {"cp": world_size}}).resolve(world_size), make_comm()
    )
    share = sequences.share(torch.zeros(MICRO_SIZE, SPLIT_LENGTH, dtype=torch.int64), has_more=False)
    positions = share.inputs["positions"]  # [S / cp]

    def run(x: Tensor, rope: Tensor) -> Tensor:  # [B, S / cp, E]
        return run_forward(model.blocks[1].forward, mode, (x, rope, positions), {})

    x, rope = inputs(torch.float32, SPLIT_SIZES["hidden_size"], SPLIT_LENGTH // world_size)
    run(x, rope)  # what is planned is kept
    kept = kept_bytes(model.blocks[1], run, x, rope, settled_bytes, made=[positions])
    for undo in reversed(undone):
        undo()
    return kept


@pytest.mark.parametrize("mode", ["none", "full"])
def test_the_formula_is_exact_for_split_sequences(ranks: WorkerPool, mode: str) -> None:
    expected = activation_bytes_per_layer(
        LayerShape(**SPLIT_SIZES),
        seq_len=SPLIT_LENGTH,
        micro_size=MICRO_SIZE,
        cp=2,
        element_bytes=4,
        recompute=mode,  # type: ignore[arg-type]
    )
    assert ranks(2).run(kept_by_a_split_sequence, mode) == [expected] * 2
