"""The decoder against its formulas and against what rotary, grouped and causal attention must satisfy."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from harness.refusals import refused
from harness.small_decoder import SMALL_DECODER
from shardwise.models.decoder import Decoder, RMSNorm, lm_loss, rope_tables, rotate
from shardwise.models.presets import preset
from shardwise.models.shape import flops_per_token, num_params
from shardwise.runtime.keyed_rng import init_parameters
from shardwise.runtime.memory_tracker import MemoryTracker
from shardwise.runtime.torch_private import fake_tensors

SMALL = SMALL_DECODER


def small_decoder(dtype: torch.dtype = torch.float32, **changes: object) -> Decoder:
    model = Decoder(dataclasses.replace(SMALL, **changes), dtype=dtype)
    init_parameters(model, seed=1)
    return model


def some_tokens(batch: int = 2, seq_len: int = 12) -> torch.Tensor:
    return torch.randint(SMALL.vocab_size, (batch, seq_len), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"num_kv_heads": 3}, ("kv-heads-divide-heads", "num_kv_heads=3", "nearest legal: 2, 4")),
        ({"num_layers": 0}, ("shape-not-positive", "num_layers=0")),
        ({"norm_eps": float("nan")}, ("shape-not-positive", "norm_eps=nan")),
        ({"head_dim": 7}, ("head-dim-odd", "head_dim=7", "nearest legal: 6, 8")),
        ({"head_dim": 1}, ("head-dim-odd", "head_dim=1", "nearest legal: 2")),
    ],
)
def test_illegal_shapes_are_refused(changes: dict[str, float], refusal: tuple[str, ...]) -> None:
    with refused(*refusal):
        dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize("tied", [False, True])
def test_num_params_equals_the_built_model(tied: bool) -> None:
    config = dataclasses.replace(SMALL, tie_embeddings=tied, num_kv_heads=1, head_dim=10)
    model = Decoder(config, device="meta")
    assert num_params(config) == sum(p.numel() for p in model.parameters())


def test_meta_construction_of_the_largest_touches_no_storage() -> None:
    model = Decoder(preset("llama-405b"), device="meta", dtype=torch.bfloat16)
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == 405_853_388_800
    assert not list(model.buffers())


def test_forward_on_meta_gives_the_shape_of_the_logits() -> None:
    with torch.device("meta"):
        logits = Decoder(SMALL)(torch.zeros(2, 5, dtype=torch.long))
    assert logits.shape == (2, 5, SMALL.vocab_size)
    assert logits.is_meta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_trains_close_to_float64(dtype: torch.dtype) -> None:
    tokens = some_tokens()
    exact = small_decoder(torch.float64)
    model = small_decoder(dtype)
    losses = []
    for each in (exact, model):
        loss_sum, count = lm_loss(each(tokens[:, :-1]), tokens[:, 1:])
        (loss_sum / count).backward()
        losses.append(loss_sum / count)
    assert losses[0].dtype == torch.float64
    assert losses[1].dtype == torch.float32
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(losses[1].double(), losses[0], rtol=tolerance, atol=0)
    for parameter, expected in zip(model.parameters(), exact.parameters(), strict=True):
        assert parameter.grad is not None
        assert parameter.grad.dtype == dtype
        error = (parameter.grad.double() - expected.grad).norm() / expected.grad.norm()
        assert error < 4 * tolerance


def test_gradients_of_the_loss_in_float64() -> None:
    config = dataclasses.replace(
        SMALL, vocab_size=7, num_layers=1, hidden_size=4, num_heads=2, num_kv_heads=1, head_dim=2, ffn_size=3
    )
    model = Decoder(config, dtype=torch.float64)
    init_parameters(model, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20.0)  # away from 0, where attention and gates hardly move the loss
    names = [name for name, _ in model.named_parameters()]
    tokens = torch.tensor([[1, 5, 0, 2], [3, 3, 6, 4]])  # [B, S]
    targets = torch.tensor([[5, 0, 2, -100], [3, -100, 4, 1]])  # [B, S]

    def loss(*values: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(model, dict(zip(names, values, strict=True)), tokens)
        return lm_loss(logits, targets)[0]

    values = tuple(p.detach().clone().requires_grad_() for p in model.parameters())
    assert torch.autograd.gradcheck(loss, values)


def test_a_token_does_not_change_logits_before_it() -> None:
    model = small_decoder(torch.float64)
    tokens = some_tokens()
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % SMALL.vocab_size
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=0)
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


def test_shared_key_heads_equal_repeated_ones() -> None:
    grouped = small_decoder(torch.float64)
    full = Decoder(dataclasses.replace(SMALL, num_kv_heads=4), dtype=torch.float64)
    state = grouped.state_dict()
    for name in list(state):
        if name.endswith(("attention.key.weight", "attention.value.weight")):
            heads = state[name].unflatten(0, (SMALL.num_kv_heads, SMALL.head_dim))  # [K, D, E]
            state[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)  # [H * D, E]
    full.load_state_dict(state)
    with torch.no_grad():
        torch.testing.assert_close(grouped(some_tokens()), full(some_tokens()), rtol=1e-12, atol=1e-12)


def test_rotation_keeps_lengths_and_makes_scores_relative() -> None:
    q, k = torch.randn(2, 8, dtype=torch.float64)
    rope = rope_tables(50, 8, 10_000.0, q)
    turned_q, turned_k = (rotate(x.expand(1, 50, 1, 8), rope)[0, :, 0] for x in (q, k))  # [S, D]
    scores = turned_q @ turned_k.T  # [S, S]
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(50))
    for offset in (-30, -3, 0, 1, 17):
        diagonal = scores.diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert (scores[0, 1:9] - scores[0, 0]).abs().min() > 1e-6


def test_rotation_is_the_complex_product_of_the_paper() -> None:
    x = torch.randn(1, 5, 2, 6, dtype=torch.float64)  # [B, S, H, D]
    pairs = torch.complex(x[..., :3], x[..., 3:])
    positions = torch.arange(5, dtype=torch.float64)[:, None, None]
    angle = positions * 100.0 ** (-torch.arange(3) / 3.0)  # [S, 1, D/2]
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(rotate(x, rope_tables(5, 6, 100.0, x)), expected)


def test_rotation_tables_are_never_narrower_than_float32() -> None:
    assert rope_tables(4, 8, 1e4, torch.empty(1, dtype=torch.bfloat16)).dtype == torch.float32
    far = rope_tables(200_001, 4, 1.5, torch.empty(1))[0, -1, 0, 1]
    assert far.item() == pytest.approx(math.cos(200_000 / 1.5**0.5), abs=1e-7)


def test_rms_norm_saves_no_wide_copy_and_equals_torchs() -> None:
    x = torch.randn(3, 5, 64, dtype=torch.bfloat16, requires_grad=True)  # [B, S, E]
    norm = RMSNorm(64, 1e-5, dtype=torch.bfloat16)
    wide: list[int] = []

    def pack(saved: torch.Tensor) -> torch.Tensor:
        if saved.dtype == torch.float32:
            wide.append(saved.numel())
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        y = norm(x)
    assert max(wide) == 3 * 5
    expected = F.rms_norm(x.double(), (64,), norm.weight.double(), 1e-5)
    torch.testing.assert_close(y.double(), expected, rtol=torch.finfo(torch.bfloat16).eps, atol=0)


def test_rms_norm_of_zeros_has_finite_gradients() -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    RMSNorm(8, 1e-5)(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full((2, 8), 1e-5**-0.5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [11, 2**17])  # one chunk of rows, and several with a remainder
def test_lm_loss_equals_cross_entropy(dtype: torch.dtype, vocab_size: int) -> None:
    logits = (4 * torch.randn(1, 5, vocab_size)).to(dtype).requires_grad_()  # [B, S, V]
    targets = torch.randint(vocab_size, (1, 5))
    targets[0, 3] = -100
    loss_sum, count = lm_loss(logits, targets)
    (3 * loss_sum).backward()
    exact = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(exact[0], targets[0], reduction="sum")
    (3 * expected).backward()
    assert count.item() == 4
    assert loss_sum.dtype == torch.promote_types(dtype, torch.float32)
    tolerance = 100 * torch.finfo(loss_sum.dtype).eps  # of exponentials of sums about 20
    torch.testing.assert_close(loss_sum.double(), expected, rtol=tolerance, atol=0)
    assert logits.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=torch.finfo(dtype).eps, atol=tolerance)


def test_lm_loss_without_targets_that_count_is_zero() -> None:
    logits = torch.full((1, 3, 5), torch.inf, requires_grad=True)  # [B, S, V]
    loss_sum, count = lm_loss(logits, torch.full((1, 3), -100))
    assert (loss_sum.item(), count.item()) == (0.0, 0)


def test_tied_embeddings_are_one_parameter() -> None:
    tied, untied = small_decoder(tie_embeddings=True), small_decoder()
    assert tied.head.weight is tied.embed.weight
    assert untied.head.weight is not untied.embed.weight
    meta = Decoder(dataclasses.replace(SMALL, tie_embeddings=True), device="meta")
    assert meta.head.weight is meta.embed.weight


def test_residual_projections_are_drawn_smaller() -> None:
    config = dataclasses.replace(preset("tiny"), num_layers=2, vocab_size=64)
    model = Decoder(config)
    init_parameters(model, seed=0)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
        else:
            expected = 0.01 if name.endswith(("out.weight", "down.weight")) else 0.02  # 2 layers: 1 / sqrt(4)
            assert parameter.std().item() == pytest.approx(expected, rel=0.03), name


def test_too_long_a_sequence_is_refused() -> None:
    with refused("sequence-too-long", "17", "max_seq_len=16"):
        small_decoder()(some_tokens(seq_len=17))


def test_flops_per_token_count_matrix_products() -> None:
    """torch's counter sees the products of a forward, attention in full; a backward costs twice as much."""
    config = dataclasses.replace(SMALL, num_kv_heads=4)
    model = Decoder(config, dtype=torch.float64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(some_tokens(batch=1, seq_len=16))
    assert counter.get_total_flops() * 3 == 16 * flops_per_token(config, 16)


class CountedOps(TorchDispatchMode):
    """Counts the ops inside."""

    num_ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_ops += 1
        return func(*args, **kwargs or {})


def test_a_fake_loss_takes_the_peak_of_a_real_one_by_a_few_ops() -> None:
    def peak_and_ops() -> tuple[int, int]:
        logits = torch.zeros(1, 41, 2**17, requires_grad=True)  # 21 parts, of which the last is shorter
        targets = torch.zeros(1, 41, dtype=torch.int64)
        memory = MemoryTracker("cpu")
        with memory.meter(), CountedOps() as counted:
            lm_loss(logits, targets)[0].backward()
        return memory.snapshot().peak_bytes, counted.num_ops

    peak_bytes, num_ops = peak_and_ops()
    with fake_tensors():
        fake_peak_bytes, num_fake_ops = peak_and_ops()
    assert fake_peak_bytes == peak_bytes > 0
    assert num_fake_ops < num_ops
