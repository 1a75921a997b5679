"""Block-sparse attention on a GPU: kernels beside dense attention in float64, and what only a GPU can get wrong.

Races show as bits that differ from launch to launch, wrong tiles as errors of one head size, and what is of size N x N
in the allocator's peak.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.attention import reference_attention
from shardwise.attention.api import attention_backend, block_sparse_attention, block_sparse_attention_with_lse
from shardwise.attention.backends import Draw
from shardwise.attention.block_layout import BlockLayout, pack

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = torch.device("cuda", 0)
# By which share of its norm, and twice that of its largest number, a tensor may differ; fp32 may compute in TF32.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 2e-3}
FACTORS: dict[str, list[Any]] = {
    "dtype": list(TOLERANCES),
    "head_dim": [32, 64, 80, 128, 256],
    "block": [16, 32, 64, 128],
    "heads": [(4, 4), (6, 2), (8, 1)],
    "kind": ["whole", "ragged", "causal", "per head", "packed", "cached"],
    "padding": [False, True],
    "bias": [None, "shared", "per head", "per sample"],
    "dropout": [0.0, 0.2],
}


@dataclass(frozen=True)
class Case:
    """What is computed: a choice of each of `FACTORS`."""

    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 64
    block: int = 64
    heads: tuple[int, int] = (4, 4)
    kind: str = "causal"
    padding: bool = False
    bias: str | None = None
    dropout: float = 0.0

    def __str__(self) -> str:
        return "-".join(str(each).removeprefix("torch.") for each in vars(self).values() if each)


def some_cases(num: int) -> list[Case]:
    """Factors by chance, so that by this number every pair has most likely occurred."""
    draws = random.Random(0)
    return [Case(**{name: draws.choice(values) for name, values in FACTORS.items()}) for _ in range(num)]


def random_layout(block: int, num_tokens: int, heads: int = 1, *, causal: bool = True) -> BlockLayout:
    """Four in ten blocks; the second row of blocks of the first head sees nothing."""
    num_blocks = -(-num_tokens // block)
    blocks = torch.rand(heads, num_blocks, num_blocks, generator=torch.Generator().manual_seed(0)) < 0.4
    blocks[0, 1 % num_blocks] = False
    return BlockLayout.from_blocks(blocks, block, causal=causal, num_tokens=num_tokens)


def layout_of(case: Case) -> BlockLayout:
    if case.kind == "packed":
        return pack([random_layout(case.block, each) for each in (200, 64, 1, 300)])
    if case.kind == "cached":
        return random_layout(case.block, 500).queries_from(333)
    heads = case.heads[0] if case.kind == "per head" else 1
    num_tokens = 512 if case.kind == "whole" else 500
    return random_layout(case.block, num_tokens, heads, causal=case.kind in ("causal", "per head"))


@dataclass(frozen=True, eq=False)
class Given:
    """Tensors of a case, which require gradients where they can, and the gradients of both results."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    options: dict[str, Any]
    grads: tuple[Tensor, Tensor]

    def inputs(self) -> list[Tensor]:
        return [each for each in (self.q, self.k, self.v, self.bias) if each is not None]


def given_for(case: Case, layout: BlockLayout, num_samples: int = 2) -> Given:
    """Random tensors; of key padding, the last sample has nothing else."""
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = case.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype)

    num_queries, num_keys = layout.num_queries, layout.num_keys
    (num_heads, num_kv_heads) = case.heads
    q = normal(num_samples, num_queries, num_heads, case.head_dim).transpose(1, 2)
    k, v = (normal(num_samples, num_keys, num_kv_heads, case.head_dim).transpose(1, 2) for _ in range(2))
    sizes = {None: None, "shared": (1, 1), "per head": (1, num_heads), "per sample": (num_samples, 1)}[case.bias]
    bias = None if sizes is None else normal(*sizes, num_queries, num_keys)
    options: dict[str, Any] = {"scale": 1.1 * case.head_dim**-0.5}
    if case.padding:
        options["key_padding"] = torch.rand(num_samples, num_keys, generator=generator, device=DEVICE) < 0.8
        options["key_padding"][-1] = False
    if case.dropout:
        size = (num_samples, num_heads, num_queries)
        numbers = [
            torch.randint(-(2**31), 2**31, shape, generator=generator, device=DEVICE, dtype=torch.int32)
            for shape in (size, size, (num_keys,))
        ]
        options["dropout"] = Draw(numbers[0] | 1, numbers[1], numbers[2], case.dropout)
    for each in (q, k, v, bias):
        if each is not None:
            each.requires_grad_()
    shape = (num_samples, num_heads, num_queries)
    return Given(q, k, v, bias, options, (normal(*shape, case.head_dim), normal(*shape, dtype=torch.float32)))


def results_of(attend: Callable[..., tuple[Tensor, Tensor]], given: Given, *more: Any) -> list[Tensor]:
    """Output, log-sum-exp, and the gradients of all inputs; those of the lse of empty rows are not asked for."""
    out, lse = attend(given.q, given.k, given.v, *more, bias=given.bias, **given.options)
    grad_out, grad_lse = (grad.to(like.dtype) for grad, like in zip(given.grads, (out, lse), strict=True))
    total = (out * grad_out).sum() + torch.where(lse == -torch.inf, 0, lse * grad_lse).nan_to_num().sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(total, given.inputs())]


def reference_of(given: Given, layout: BlockLayout) -> list[Tensor]:
    """The same in float64, of the same rounded inputs."""
    wide = [each.detach().double().requires_grad_() for each in given.inputs()]
    options = dict(given.options)
    draw = options.pop("dropout", None)
    bias = wide[3] if len(wide) > 3 else None
    widened = replace(given, q=wide[0], k=wide[1], v=wide[2], bias=bias, options={**options, "draw": draw})
    return results_of(reference_attention, widened, layout.allowed().to(DEVICE))


def check(actual: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    for name, mine, reference in zip(("out", "lse", "q", "k", "v", "bias"), actual, expected, strict=False):
        assert not mine.isnan().any(), name
        empty = reference == -torch.inf
        assert torch.equal(mine == -torch.inf, empty), name
        difference = (mine.double() - reference).masked_fill(empty, 0)
        reference = reference.masked_fill(empty, 0)
        tolerance = TOLERANCES[dtype]
        assert difference.norm() <= tolerance * reference.norm(), name
        assert difference.abs().max() <= 2 * tolerance * reference.abs().max(), name


@contextmanager
def forced(backend: str) -> Iterator[None]:
    torch.compiler.reset()  # what FlexAttention compiled for other cases counts to a limit
    with attention_backend(backend):
        yield


@pytest.mark.parametrize("case", some_cases(64), ids=str)
def test_kernels_equal_the_reference(case: Case) -> None:
    layout = layout_of(case)
    given = given_for(case, layout)
    with forced("triton"):
        actual = results_of(block_sparse_attention_with_lse, given, layout)
    check(actual, reference_of(given, layout), case.dtype)


FLEX_CASES = [
    Case(),
    Case(kind="whole", block=128, head_dim=128),
    Case(kind="causal", block=128, head_dim=128, dtype=torch.float16),
    Case(kind="ragged", block=16, heads=(6, 2), padding=True),
    Case(kind="per head", heads=(6, 2), head_dim=80, dtype=torch.float32),
    Case(kind="packed", block=32, heads=(8, 1), bias="shared"),
    Case(kind="cached", heads=(6, 2)),
    Case(kind="per head", bias="per head", padding=True, dtype=torch.float32),
]


@pytest.mark.parametrize("case", FLEX_CASES, ids=str)
def test_flex_equals_the_reference(case: Case) -> None:
    layout = layout_of(case)
    given = given_for(case, layout)
    with forced("flex"):
        actual = results_of(block_sparse_attention_with_lse, given, layout)
    check(actual, reference_of(given, layout), case.dtype)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block", [64, 128])
def test_every_launch_gives_the_same_bits(block: int, head_dim: int) -> None:
    """Enough programs that many run at once; global rows and columns, so that long ones are split."""
    num_blocks = 4096 // block
    blocks = torch.rand(num_blocks, num_blocks, generator=torch.Generator().manual_seed(0)) < 0.2
    blocks[0] = blocks[:, 0] = True
    layout = BlockLayout.from_blocks(blocks, block)
    case = Case(head_dim=head_dim, block=block, heads=(8, 2), dropout=0.1)
    given = given_for(case, layout, num_samples=1)
    with forced("triton"):
        first = results_of(block_sparse_attention_with_lse, given, layout)
        check(first, reference_of(given, layout), case.dtype)
        for launch in range(100):
            again = results_of(block_sparse_attention_with_lse, given, layout)
            assert all(torch.equal(*pair) for pair in zip(first, again, strict=True)), launch


@pytest.mark.parametrize("backend", ["triton", "flex"])
def test_rows_that_see_nothing_give_zero(backend: str) -> None:
    """An empty row of blocks, an empty head, and a sample that is all padding."""
    layout = random_layout(64, 500, 4)
    layout.patterns[0].blocks[3] = False
    case = Case(kind="per head", padding=True)
    given = given_for(case, layout)
    with forced(backend):
        out, lse, grad_q, grad_k, grad_v = results_of(block_sparse_attention_with_lse, given, layout)
    sees = (layout.allowed().to(DEVICE) & given.options["key_padding"][:, None, None]).any(-1)  # [B, H, Nq]
    assert torch.equal(lse == -torch.inf, ~sees)
    for each in (out, grad_q):
        assert not each.masked_fill(sees[..., None], 0).any()
    for each in (grad_k, grad_v):
        assert not each[-1].any()
        assert not each[:, 3].any()
        assert each.isfinite().all()


@pytest.mark.parametrize("block", [16, 64, 128])
def test_the_future_changes_no_bit_of_the_past(block: int) -> None:
    layout = random_layout(block, 500)
    given = given_for(Case(block=block), layout)
    changed = 317
    with forced("triton"), torch.no_grad():
        before = block_sparse_attention(given.q, given.k, given.v, layout)
        for each in (given.q, given.k, given.v):
            each[:, :, changed:] = 1e3
        after = block_sparse_attention(given.q, given.k, given.v, layout)
    assert torch.equal(before[:, :, :changed], after[:, :, :changed])
    assert not torch.equal(before, after)


@pytest.mark.parametrize("backend", ["triton", "flex"])
def test_memory_grows_with_the_length_alone(backend: str) -> None:
    """From 16k to 64k, with a window and a global block; one bit a score would be 512 MiB."""
    peaks = []
    for num_tokens in (16_384, 65_536):
        index = torch.arange(num_tokens // 128)
        blocks = ((index[:, None] - index).abs() < 8) | (index == 0)
        layout = BlockLayout.from_blocks(blocks, 128, causal=True)
        given = given_for(Case(heads=(1, 1), block=128), layout, num_samples=1)
        with forced(backend):
            for _ in range(2):  # the first one plans and compiles
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                out = block_sparse_attention(given.q, given.k, given.v, layout)
                torch.autograd.grad(out, given.inputs(), given.grads[0])
                del out
                torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 4.5 * peaks[0] + 2**22
    assert peaks[1] < 256 * 2**20


def test_compiled_code_holds_the_attention_whole() -> None:
    layout = random_layout(64, 500)
    given = given_for(Case(dtype=torch.float32), layout)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_sparse_attention(q * 2, k, v, layout).sin()

    with forced("triton"):
        results = []
        for function in (attend, torch.compile(attend, fullgraph=True)):
            out = function(given.q, given.k, given.v)
            results.append([out.detach(), *torch.autograd.grad(out, given.inputs(), given.grads[0])])
    for plain, compiled in zip(*results, strict=True):
        torch.testing.assert_close(plain, compiled, rtol=2e-3, atol=2e-3)


def test_a_hugging_face_llama_takes_a_step() -> None:
    """Where every block is seen, a padded batch's loss and gradients are those of SDPA."""
    transformers = pytest.importorskip("transformers")
    from shardwise.attention.huggingface import use_sparse_attention

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config).to(DEVICE)
    tokens = torch.randint(64, (2, 300), device=DEVICE)
    mask = torch.ones_like(tokens)
    mask[1, 200:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
    dense = model(**batch).loss
    expected = torch.autograd.grad(dense, [*model.parameters()])
    with use_sparse_attention(model, BlockLayout.from_blocks(torch.ones(5, 5), 64, causal=True, num_tokens=300)):
        loss = model(**batch).loss
        loss.backward()
    torch.testing.assert_close(loss, dense, rtol=1e-3, atol=1e-3)
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert (parameter.grad - grad).norm() <= 1e-2 * grad.norm()
    torch.optim.AdamW(model.parameters()).step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
