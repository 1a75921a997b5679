"""Deferred construction gives what plain construction gives, bit for bit, and nothing of it stays."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.live_bytes import LiveBytes
from harness.refusals import refused
from shardwise import init
from shardwise.deferred_init.parameters import ParamInitializer, is_deferred
from shardwise.models.decoder import Decoder, DecoderConfig
from shardwise.runtime.keyed_rng import initial_values

SEED = 3
SHAPE = DecoderConfig(
    vocab_size=37,
    num_layers=2,
    hidden_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    ffn_size=40,
    max_seq_len=16,
    tie_embeddings=True,
)


class Written(nn.Module):
    """Values that are there before the parameter is, or that are computed from another parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Parameter(torch.randn(3, 40) * 0.1)
        self.eye = nn.Parameter(torch.eye(4), requires_grad=False)
        self.numbers = nn.Parameter(torch.log(torch.arange(1, 6).float()).repeat(2, 1))
        self.derived = nn.Parameter(self.scaled.detach()[:2] * 2 + 1)
        flat = torch.empty(10)
        self.front, self.back = nn.Parameter(flat[:4]), nn.Parameter(flat[4:].view(2, 3))
        flat.normal_()
        self.register_buffer("noise_buffer", torch.rand(5))
        self.register_buffer("norm_buffer", self.scaled.detach().norm())
        self.register_buffer("half_buffer", self.scaled.detach().half())
        self.note = self.eye.detach()[1]
        self.mean = self.scaled.mean().item()
        self.list = self.numbers.tolist()
        self.array = self.scaled.detach().numpy().sum()


class Initialised(nn.Module):
    """Every function of `torch.nn.init`, and writes to parts."""

    def __init__(self) -> None:
        super().__init__()
        square = ("uniform_", "normal_", "trunc_normal_", "ones_", "zeros_", "eye_", "xavier_uniform_")
        names = (*square, "xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "orthogonal_")
        for name in names:
            setattr(self, name, nn.Parameter(torch.empty(7, 5)))
            getattr(nn.init, name)(getattr(self, name))
        self.sparse = nn.Parameter(torch.empty(7, 5))
        nn.init.sparse_(self.sparse, 0.3)
        self.dirac = nn.Parameter(torch.empty(4, 4, 3))
        nn.init.dirac_(self.dirac)
        self.parts = nn.Parameter(torch.zeros(6, 5))
        with torch.no_grad():
            self.parts[2].fill_(3.0)
            self.parts[:, 1:3] = torch.rand(6, 2)
            self.parts[self.parts > 2.5] = -1.0
            self.parts.t()[0].add_(1)
            self.parts.data.mul_(self.eye_.data[:6].sum())
            torch._foreach_mul_([self.parts, self.uniform_], 2)
            torch.mul(self.normal_, 3, out=self.normal_)
        self.normal_.data = self.normal_.data * 2
        self.own = nn.Parameter(torch.empty(9))
        nn.init.normal_(self.own, generator=torch.Generator().manual_seed(1))


class Passed(nn.Module):
    """A pass over the finished model, as in much published code; heads are tied before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=1)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.apply(self.draw)

    @staticmethod
    def draw(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.bias is not None:
                module.bias.data.zero_()


def transformer_encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(5, 7),
    "embedding": lambda: nn.Embedding(9, 4, padding_idx=2),
    "conv": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "encoder": transformer_encoder,
    "batch-norm": lambda: nn.BatchNorm1d(4),
    "weight-norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
    "spectral-norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
    "written": Written,
    "initialised": Initialised,
    "passed": Passed,
    "decoder": lambda: Decoder(SHAPE),
    "double": lambda: Initialised().double(),
    "in-bf16": lambda: Decoder(SHAPE, dtype=torch.bfloat16),
}


def read_all(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    source = ParamInitializer(model, seed)
    return {name: source.read(name) for name, _ in model.named_parameters()}


def build_both(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """The plain and the deferred model of one seed; torch's generator ends in the same state."""
    torch.manual_seed(SEED)
    plain = make()
    expected = torch.get_rng_state()
    torch.manual_seed(SEED)
    with init():
        deferred = make()
    assert torch.equal(torch.get_rng_state(), expected)
    return plain, deferred


def check_equal(deferred: nn.Module, plain: nn.Module) -> None:
    before = torch.get_rng_state()
    values = read_all(deferred)
    assert torch.equal(torch.get_rng_state(), before)
    assert list(values) == [name for name, _ in plain.named_parameters()]
    for name, parameter in plain.named_parameters():
        other = deferred.get_parameter(name)
        assert type(other) is nn.Parameter
        assert (other.shape, other.dtype, other.requires_grad) == (
            parameter.shape,
            parameter.dtype,
            parameter.requires_grad,
        )
        assert values[name].dtype == parameter.dtype
        assert torch.equal(values[name], parameter), name
    buffers = dict(deferred.named_buffers())
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffers[name], buffer), name


@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_plain_construction(name: str) -> None:
    plain, deferred = build_both(MODELS[name])
    assert all(is_deferred(parameter) for parameter in deferred.parameters())
    check_equal(deferred, plain)


@pytest.mark.parametrize("name", ["Llama", "GPT2", "T5", "Bert", "Mixtral", "Mamba"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hugging_face_models_are_those_of_plain_construction(name: str, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    kind, options = {
        "Llama": ("ForCausalLM", {**sizes, "intermediate_size": 64, "tie_word_embeddings": True}),
        "GPT2": ("LMHeadModel", sizes),
        "T5": ("ForConditionalGeneration", {**sizes, "d_kv": 8, "d_ff": 64}),
        "Bert": ("ForMaskedLM", {**sizes, "intermediate_size": 64}),
        "Mixtral": ("ForCausalLM", {**sizes, "num_key_value_heads": 2, "num_local_experts": 4}),
        "Mamba": ("ForCausalLM", {**sizes, "state_size": 4}),
    }[name]
    config = getattr(transformers, f"{name}Config")(**options)
    model_class = getattr(transformers, name + kind)
    plain, deferred = build_both(lambda: model_class._from_config(config, dtype=dtype))
    assert all(is_deferred(parameter) for parameter in deferred.parameters())
    check_equal(deferred, plain)


def test_what_is_no_parameter_stays_real() -> None:
    plain, deferred = build_both(Written)
    assert isinstance(plain, Written)
    assert isinstance(deferred, Written)
    for name in ("mean", "list", "array"):
        assert getattr(deferred, name) == getattr(plain, name)
    assert deferred.eye.is_meta


def test_a_view_of_a_parameter_keeps_its_values() -> None:
    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, 2))
            self.row = self.weight[1]
            nn.init.normal_(self.weight)

    plain, deferred = build_both(Viewed)
    assert torch.equal(deferred.row, plain.get_parameter("weight")[1])
    check_equal(deferred, plain)


def test_a_key_gives_the_same_values_whatever_else_is_drawn() -> None:
    def build(seed: int, state: int) -> dict[str, Tensor]:
        torch.manual_seed(state)
        with init(seed=seed):
            model = nn.Sequential(nn.Linear(5, 7), Initialised(), transformer_encoder())
        assert torch.initial_seed() == state
        assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(state).get_state())
        source = ParamInitializer(model, seed=0)
        own = "1.own"  # of a generator that the model brings
        assert all(source.is_same_everywhere(name) == (name != own) for name, _ in model.named_parameters())
        return {name: source.read(name) for name, _ in model.named_parameters()}

    first, again, other = build(7, 1), build(7, 2), build(8, 1)
    assert all(torch.equal(values, again[name]) for name, values in first.items())
    drawn = ("0.weight", "1.trunc_normal_", "2.layers.0.linear1.weight")
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    assert torch.equal(first["2.layers.0.linear1.weight"], first["2.layers.2.linear1.weight"])
    assert first["0.weight"].abs().max() <= 5**-0.5
    assert torch.allclose(first["1.orthogonal_"].T @ first["1.orthogonal_"], torch.eye(5), atol=1e-5)


def test_keyed_values_depend_on_the_parameters_name() -> None:
    with init(seed=7):
        two = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    with init(seed=7):
        one = nn.Sequential(nn.LayerNorm(5), nn.Linear(7, 3))
    assert torch.equal(read_all(two)["1.weight"], read_all(one)["1.weight"])
    assert not torch.equal(read_all(two)["0.bias"], read_all(two)["1.bias"][:1].expand(7))


def test_unkeyed_values_may_differ_between_ranks() -> None:
    with init():
        deferred = nn.Linear(2, 2)
    source = ParamInitializer(deferred, seed=0)
    assert not source.is_same_everywhere("weight")
    assert not ParamInitializer(nn.Linear(2, 2), seed=0).is_same_everywhere("weight")
    assert ParamInitializer(nn.Linear(2, 2, device="meta"), seed=0).is_same_everywhere("weight")


@pytest.mark.parametrize("cast", [nn.Module.double, nn.Module.bfloat16])
def test_a_cast_after_construction_rounds_the_same_values(cast: Callable[[nn.Module], nn.Module]) -> None:
    plain, deferred = build_both(transformer_encoder)
    check_equal(cast(deferred), cast(plain))


def test_a_deep_copy_after_construction_has_the_same_values() -> None:
    plain, deferred = build_both(MODELS["passed"])
    copied = copy.deepcopy(deferred)
    assert copied.get_parameter("head.weight") is copied.get_parameter("embed.weight")
    assert copied.get_parameter("head.weight") is not deferred.get_parameter("head.weight")
    check_equal(copy.deepcopy(copied), plain)


def test_a_copy_inside_may_be_written_apart() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 2)
            self.second = copy.deepcopy(self.first)
            nn.init.constant_(self.second.weight[1], 5.0)
            nn.init.normal_(self.first.weight)

    check_equal(*reversed(build_both(Pair)))


def test_given_tensors_stay_as_they_are() -> None:
    outside = nn.Linear(3, 2)
    with init():
        tied, loaded = nn.Linear(3, 2), nn.Linear(3, 2)
        tied.weight = outside.weight
        loaded.weight = nn.Parameter(torch.from_numpy(np.ones((2, 3), dtype=np.float32)))
        loaded.bias.data.copy_(outside.bias.data)
    assert tied.weight is outside.weight
    assert not outside.weight.is_meta
    assert (read_all(loaded)["weight"] == 1).all()
    outside.bias.data.zero_()
    assert read_all(loaded)["bias"].abs().min() > 0


def test_memory_that_is_handed_out_is_not_lost() -> None:
    with init():
        layer = nn.Linear(3, 2)
        with pytest.raises(ValueError, match="read-only"):
            layer.weight.data.numpy()[:] = 1.0
        empty = torch.empty(3)
        empty.numpy()[:] = 2.0
        layer.bias = nn.Parameter(empty)
    assert layer.weight.is_meta
    assert layer.bias.tolist() == [2.0, 2.0, 2.0]


def test_shapes_that_do_not_fit_are_an_error_at_once() -> None:
    with init():
        layer = nn.Linear(3, 2)
        with pytest.raises(RuntimeError, match="must match the size"), torch.no_grad():
            layer.weight.copy_(torch.ones(4, 5))
    assert is_deferred(layer.weight)


def test_nothing_is_left() -> None:
    with init(), init(seed=5):  # the outer one counts
        inner = nn.Linear(3, 2)
    assert not ParamInitializer(inner, seed=0).is_same_everywhere("weight")
    failed: list[nn.Module] = []
    with pytest.raises(ZeroDivisionError), init():  # noqa: PT012
        failed.append(nn.Linear(3, 2))
        raise ZeroDivisionError
    assert is_deferred(failed[0].get_parameter("weight"))
    later = nn.Linear(3, 2)
    assert not later.weight.is_meta
    assert not hasattr(later.weight.untyped_storage(), "_shardwise_history")
    assert copy.deepcopy(later).weight.equal(later.weight)


def test_other_threads_build_as_ever() -> None:
    built: list[nn.Linear] = []
    with init():
        thread = threading.Thread(target=lambda: built.append(nn.Linear(3, 2)))
        thread.start()
        thread.join()
        own = nn.Linear(3, 2)
    assert not built[0].weight.is_meta
    assert own.weight.is_meta


def test_construction_and_reading_hold_one_parameter_at_a_time() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)), nn.Linear(256, 512, bias=False))

    largest_bytes = 4 * 256 * 512
    states_bytes = 9 * torch.get_rng_state().numel() + 2**12
    for seed in (None, 0):
        with LiveBytes() as live, init(seed=seed):
            model = build()
        assert live.live_bytes() <= states_bytes
        # New memory, which is never touched, beside that into which numbers are drawn.
        assert live.peak_bytes() <= 2 * largest_bytes + states_bytes
        with LiveBytes() as live:
            source = ParamInitializer(model, seed=0)
            for name, _ in model.named_parameters():
                source.read(name)
        assert live.peak_bytes() <= largest_bytes + states_bytes
    with LiveBytes() as live:
        build()
    assert live.peak_bytes() >= 5 * largest_bytes


def test_a_closed_source_leaves_plain_parameters() -> None:
    with init():
        model = nn.Linear(3, 2)
    weight = model.weight
    ParamInitializer(model, seed=0).close()
    assert model.weight is weight
    assert not weight.__dict__


def test_a_plain_meta_model_is_drawn_by_reset_parameters() -> None:
    meta = Decoder(SHAPE, device="meta", dtype=torch.bfloat16)
    values = read_all(meta, seed=9)
    for name, expected in initial_values(Decoder(SHAPE), seed=9):
        assert torch.equal(values[name], expected.bfloat16())


class Scale(nn.Module):
    def __init__(self, device: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, device=device))


def test_values_that_are_not_known_are_refused_by_name() -> None:
    with refused("no-reset-parameters", "0.weight"):
        ParamInitializer(nn.Sequential(Scale("meta")), seed=0)
    with refused("buffer-on-meta", "1.running_mean"):
        ParamInitializer(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(3, device="meta")), seed=0)
    with init():
        model = nn.Sequential(Scale(None))
    nn.init.zeros_(model[0].weight)
    with refused("written-after-init", "0.weight"):
        ParamInitializer(model, seed=0)
    with refused("written-after-init"):
        ParamInitializer(copy.deepcopy(model), seed=0)


def test_parameters_that_were_made_real_are_read_as_they_are() -> None:
    with init():
        model = nn.Linear(3, 2)
    model.to_empty(device="cpu")
    nn.init.ones_(model.weight)
    assert (read_all(model)["weight"] == 1).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert copy.deepcopy(model).weight.sum() == 6
