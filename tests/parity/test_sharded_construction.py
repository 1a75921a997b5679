"""Models built as shards, before there is an engine, have the values of plain construction, and no rank holds them."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.live_bytes import LiveBytes
from harness.pool import WorkerPool
from harness.refusals import refused
from harness.small_decoder import SMALL_DECODER
from harness.training import make_config
from shardwise import gathered, init, initialize
from shardwise.construction.shards import ShardedParameter
from shardwise.models.decoder import Decoder

SEED = 3
SHAPE = replace(SMALL_DECODER, tie_embeddings=True)


class Written(nn.Module):
    """Values that are there before the parameter is, or that are computed from another parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(40, 2)
        self.scaled = nn.Parameter(torch.randn(3, 40) * 0.1)
        self.eye = nn.Parameter(torch.eye(4), requires_grad=False)
        self.numbers = nn.Parameter(torch.log(torch.arange(1, 6).float()).repeat(2, 1))
        self.derived = nn.Parameter(self.scaled.detach()[:2] * 2 + self.inner.weight.detach())
        flat = torch.empty(10)
        self.front, self.back = nn.Parameter(flat[:4]), nn.Parameter(flat[4:].view(2, 3))
        flat.normal_()
        self.turned = nn.Parameter(torch.randn(3, 2).t())
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.register_buffer("noise_buffer", torch.rand(5))
        self.register_buffer("norm_buffer", self.inner.weight.detach().norm())
        self.mean = self.scaled.mean().item()
        self.list = self.inner.bias.tolist()
        self.array = self.inner.weight.detach().numpy().sum()


class Initialised(nn.Module):
    """Functions of `torch.nn.init` on a module's own and on a finished child's parameters, and writes to parts."""

    def __init__(self) -> None:
        super().__init__()
        square = ("uniform_", "normal_", "trunc_normal_", "ones_", "zeros_", "eye_", "xavier_uniform_")
        names = (*square, "xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "orthogonal_")
        self.rows = nn.ModuleDict({name: nn.Linear(5, 7) for name in names})
        for name, row in self.rows.items():
            getattr(nn.init, name)(row.weight)
        self.parts = nn.Parameter(torch.zeros(6, 5))
        self.others = nn.Linear(3, 3)
        with torch.no_grad():
            self.parts[2].fill_(3.0)
            self.parts[:, 1:3] = torch.rand(6, 2)
            self.parts[self.parts > 2.5] = -1.0
            self.parts.t()[0].add_(1)
            self.parts.data.mul_(self.rows["eye_"].weight.data[:6].sum())
            torch._foreach_mul_([self.parts, self.rows["uniform_"].weight], 2)
            torch.mul(self.rows["normal_"].bias, 3, out=self.rows["normal_"].bias)
        self.rows["normal_"].weight.data = self.rows["normal_"].weight.data * 2
        nn.init.normal_(self.others.weight, generator=torch.Generator().manual_seed(1))


class Passed(nn.Module):
    """A pass over the finished model, as in much published code; heads are tied before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=1)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.apply(self.draw)
        for name, parameter in self.named_parameters():
            if name.startswith("layers.1"):
                nn.init.normal_(parameter, std=0.5)

    @staticmethod
    def draw(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.bias is not None:
                module.bias.data.zero_()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.second = copy.deepcopy(self.first)
        nn.init.constant_(self.second.weight[1], 5.0)
        nn.init.normal_(self.first.weight)


class Mixed(nn.Module):
    """An operation on a parameter that is whole and on one that is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.scale = nn.Parameter(torch.randn(2, 3))
        self.product = nn.Parameter(torch.mul(self.scale, self.inner.weight).detach())


def transformer_encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(5, 7),
    "embedding": lambda: nn.Embedding(9, 4, padding_idx=2),
    "conv": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "encoder": transformer_encoder,
    "weight-norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
    "spectral-norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
    "written": Written,
    "initialised": Initialised,
    "passed": Passed,
    "pair": Pair,
    "mixed": Mixed,
    "decoder": lambda: Decoder(SHAPE),
    "double-inside": lambda: Initialised().double(),
    "moved-inside": lambda: Initialised().to("cpu"),  # as PEFT moves adapters to their layer's device
    "in-bf16": lambda: Decoder(SHAPE, dtype=torch.bfloat16),
}
CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "double": nn.Module.double,
    "bf16": nn.Module.bfloat16,
    "copy": copy.deepcopy,
    "moved": lambda module: module.to(device="cpu", dtype=torch.float64),
}


def build_both(make: Callable[[], nn.Module], rank: int) -> tuple[nn.Module, nn.Module]:
    """The plain model of rank 0's seed, and the sharded one; each rank's generator ends as in plain construction."""
    torch.manual_seed(SEED + rank)
    make()
    expected = torch.get_rng_state()
    torch.manual_seed(SEED)
    plain = make()
    torch.manual_seed(SEED + rank)
    with init():
        sharded = make()
    assert torch.equal(torch.get_rng_state(), expected)
    return plain, sharded


def check_equal(sharded: nn.Module, plain: nn.Module, rank: int) -> None:
    assert [name for name, _ in sharded.named_parameters()] == [name for name, _ in plain.named_parameters()]
    for name, parameter in plain.named_parameters():
        other = sharded.get_parameter(name)
        for attribute in ("shape", "dtype", "requires_grad"):
            assert getattr(other, attribute) == getattr(parameter, attribute), name
        assert type(other) is ShardedParameter, name
        with gathered(other):
            assert type(other) is nn.Parameter
            assert torch.equal(other, parameter), name
    buffers = dict(sharded.named_buffers())
    for name, buffer in plain.named_buffers():
        assert rank > 0 or torch.equal(buffers[name], buffer), name


def compare(rank: int, world_size: int, name: str, cast: str | None) -> None:
    plain, sharded = build_both(MODELS[name], rank)
    if cast is not None:
        plain, sharded = CASTS[cast](plain), CASTS[cast](sharded)
    check_equal(sharded, plain, rank)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", MODELS)
def test_values_are_those_of_plain_construction_on_rank_0(ranks: WorkerPool, name: str) -> None:
    ranks(2).run(compare, name, None)


@pytest.mark.parametrize("cast", CASTS)
def test_casts_and_copies_have_the_same_values(ranks: WorkerPool, cast: str) -> None:
    ranks(3).run(compare, "passed", cast)


def hugging_face(name: str) -> Callable[[], nn.Module]:
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
    return lambda: getattr(transformers, name + kind)._from_config(config)


def compare_hugging_face(rank: int, world_size: int, name: str) -> None:
    plain, sharded = build_both(hugging_face(name), rank)
    check_equal(sharded, plain, rank)


FAMILIES = ("Llama", "GPT2", "T5", "Bert", "Mixtral", "Mamba")


@pytest.mark.parametrize("name", FAMILIES)
def test_hugging_face_models_are_those_of_plain_construction(ranks: WorkerPool, name: str) -> None:
    ranks(2).run(compare_hugging_face, name)


# Memory.


class Wide(nn.Module):
    """A stack whose pass over all modules comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(12)))
        self.apply(Passed.draw)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


LAYER_BYTES = 4 * 128 * 128


def settled_bytes(live: LiveBytes) -> int:
    """The bytes that stay: a thread of gloo's lets go of what it has sent a moment after the work is done."""
    found = []
    for _ in range(20):
        found.append(live.live_bytes())
        time.sleep(0.01)
    return min(found)


def measure(rank: int, world_size: int) -> list[float]:
    """Layers' worth of memory: after construction and at its peak, after `initialize` and at its peak."""
    torch.manual_seed(rank)
    with LiveBytes() as live:
        with init():
            model = Wide()
        found = [settled_bytes(live), live.peak_bytes()]
        live.reset_peak()
        config = make_config(1, {"zero": {"stage": 3}, "optimizer": {"name": "sgd", "momentum": 0.0}})
        engine = initialize(model, config, loss_fn=lambda output, batch: output.sum())
        found += [settled_bytes(live), live.peak_bytes()]
    engine.close(keep_values=False)
    return [each / LAYER_BYTES for each in found]


def test_no_rank_holds_more_than_its_shards_and_a_module(ranks: WorkerPool) -> None:
    for built, built_peak, held, peak in ranks(4).run(measure):
        assert built <= 12 / 4 + 0.1
        assert built_peak <= built + 3  # one that is sent, one that is constructed, and what it computes
        assert held <= 2 * 12 / 4 + 0.1  # with the gradients' accumulators
        assert peak <= held + 3.5 < 12  # the slices of one that go away, and one that is read


# Gathered access.


def access(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    with init():
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    first, second = model[0].weight, model[1].weight
    with refused("parameter-sharded", "(5, 3)"):
        first + 1
    assert first.device == torch.device("cpu")  # where adapters go that are added to the layer
    with gathered(model.parameters(), modifier_rank=0), torch.no_grad():
        before = second.clone()
        first.fill_(float(rank))
        with gathered([first, second], modifier_rank=0):
            if rank == 0:
                second.fill_(7.0)
        assert (second == 7).all()  # already here
        with gathered(second):
            second[0] = before[0]
    assert type(first) is type(second) is ShardedParameter
    with gathered([first]):
        assert type(second) is ShardedParameter
        assert (first == 0).all()  # rank 0's
        with torch.no_grad():
            first.copy_(torch.arange(15.0).view(5, 3))
    with pytest.raises(ZeroDivisionError), gathered((first, second), 0), torch.no_grad():  # noqa: PT012
        first.zero_()
        raise ZeroDivisionError
    with gathered([first, first, second]):
        assert torch.equal(first, torch.arange(15.0).view(5, 3))
        assert torch.equal(second[0], before[0])
        assert (second[1:] == 7).all()


def test_parameters_are_gathered_for_a_while_and_written_back(ranks: WorkerPool) -> None:
    ranks(2).run(access)


def access_engine(rank: int, world_size: int, sections: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, outside = Wide(), nn.Parameter(torch.ones(3))
    plain = copy.deepcopy(model)
    first, second = model.layers[0].weight, model.layers[7].weight
    with initialize(model, make_config(1, sections), loss_fn=lambda output, batch: output.square().sum()) as engine:
        with gathered(each for each in (outside, first, outside)):
            assert torch.equal(first, plain.layers[0].weight)
            with gathered(second, modifier_rank=0), torch.no_grad():
                if rank == 0:
                    second.fill_(3.0)
            engine.eval_step(torch.ones(1, 128))
            assert torch.equal(first, plain.layers[0].weight)
            torch.save(first, io.BytesIO())
        assert torch.allclose(first.float() + 1, plain.layers[0].weight.float() + 1, atol=0.01)
        assert (engine.read("layers.7.weight", "master") == 3).all()
        with gathered(model.parameters()), gathered([first, first]), torch.no_grad():
            first.mul_(2)
        assert torch.equal(engine.read("layers.0.weight", "master"), 2 * plain.layers[0].weight)
        with pytest.raises(ZeroDivisionError), gathered(first, 0):
            raise ZeroDivisionError
        engine.train_step([torch.ones(1, 128)])
    with gathered([first, second]):  # the engine is closed
        assert type(first) is nn.Parameter


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_parameters_of_an_engine_are_gathered_for_a_while_and_written_back(ranks: WorkerPool, stage: int) -> None:
    ranks(2).run(access_engine, {"zero": {"stage": stage}})


def write_from_rank_1(rank: int, world_size: int) -> None:
    with init():
        layer = nn.Linear(3, 5)
    with gathered(layer.weight, modifier_rank=1), torch.no_grad():
        layer.weight.fill_(float(rank))
    for stage in range(4):
        model = Wide()
        with initialize(model, make_config(1, {"zero": {"stage": stage}}), loss_fn=lambda out, _: out.sum()) as engine:
            weight = model.layers[7].weight
            with gathered([layer.weight, weight], modifier_rank=1), torch.no_grad():
                assert (layer.weight == 1).all()
                weight.fill_(float(rank) + stage)
            assert (engine.read("layers.7.weight", "master") == 1 + stage).all()
    split = {"mesh": {"pp": 2}, "batch": {"accumulation": 2}}
    engine = initialize(model := Wide(), make_config(1, split), loss_fn=lambda out, _: out.sum())
    with engine, refused("modifier-rank", "mesh.pp=2"), gathered(model.parameters(), modifier_rank=1):
        pass
    with refused("modifier-rank", "2 ranks"), gathered(layer.weight, modifier_rank=2):
        pass


def test_any_rank_may_write_for_all(ranks: WorkerPool) -> None:
    ranks(2).run(write_from_rank_1)


def write_apart(rank: int, world_size: int) -> None:
    with init():
        layer = nn.Linear(3, 5)
    before = [each.clone() for each in whole(layer)]
    with refused("gathered-writes-differ", "modifier_rank=0"), gathered(layer.parameters()), torch.no_grad():
        layer.weight.data.fill_(float(rank))
    assert all(map(torch.equal, whole(layer), before))
    with gathered(layer.parameters()), torch.no_grad():
        layer.weight.fill_(3.0)
    for stage in range(4):
        model = Wide()
        with initialize(model, make_config(1, {"zero": {"stage": stage}}), loss_fn=lambda out, _: out.sum()) as engine:
            weight = model.layers[7].weight
            with gathered([layer.weight, weight]), torch.no_grad():
                assert (layer.weight == 3).all()
                weight.fill_(stage)
            assert (engine.read("layers.7.weight", "master") == stage).all()
            with refused("gathered-writes-differ", "layers.7.weight"), gathered([weight]), torch.no_grad():
                weight.fill_(float(rank) + stage)


def whole(layer: nn.Module) -> list[Tensor]:
    with gathered(layer.parameters()):
        return [each.detach().clone() for each in layer.parameters()]


def test_ranks_that_write_other_values_name_whose_count(ranks: WorkerPool) -> None:
    ranks(2).run(write_apart)


def access_stages(rank: int, world_size: int) -> None:
    model = Wide()
    sections = {"zero": {"stage": 1}, "mesh": {"pp": 2}, "batch": {"accumulation": 2}}
    last = model.layers[11].weight
    with initialize(model, make_config(1, sections), loss_fn=lambda output, batch: output.sum()) as engine:
        for modifier_rank in (None, 0):
            with gathered(last, modifier_rank), torch.no_grad():
                if rank == 1:
                    last.add_(1)
        written = engine.read("layers.11.weight", "master")
        with gathered(model.parameters()):
            assert rank == 0 or torch.equal(last, written)


def test_parameters_of_another_stage_are_left_to_it(ranks: WorkerPool) -> None:
    ranks(2).run(access_stages)


# Hand-over.


def hand_over(rank: int, world_size: int, sections: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = Wide()
    torch.manual_seed(rank)
    with init():
        model = Wide()
    assert all(type(parameter) is ShardedParameter for parameter in model.parameters())
    with initialize(model, make_config(1, sections), loss_fn=lambda output, batch: output.square().sum()) as engine:
        for name, parameter in plain.named_parameters():
            assert torch.equal(engine.read(name, "master"), parameter), name
        engine.train_step([torch.ones(1, 128)] * engine.config.batch.accumulation)
    assert not any(vars(parameter) for parameter in model.parameters())


HAND_OVERS: dict[str, dict[str, Any]] = {
    "stage 0": {"zero": {"stage": 0}},
    "stage 1": {"zero": {"stage": 1}},
    "stage 3": {"zero": {"stage": 3}},
    "stage 3, bf16": {"zero": {"stage": 3}, "precision": {"param": "bf16"}},
    "hybrid": {"zero": {"stage": 3}, "mesh": {"dp_shard": 2}},
    "pipeline": {"zero": {"stage": 1}, "mesh": {"pp": 2}, "batch": {"accumulation": 2}},
}


@pytest.mark.parametrize("name", HAND_OVERS)
def test_an_engine_takes_shards_over(ranks: WorkerPool, name: str) -> None:
    ranks(4).run(hand_over, HAND_OVERS[name])


def load_folder(rank: int, world_size: int, folder: Path, stage: int) -> None:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(folder)
    with init():
        model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model) is type(plain)
    check_equal(model, plain, rank=1)
    with initialize(model, make_config(1, {"zero": {"stage": stage}})) as engine:
        for name, parameter in plain.named_parameters():
            assert torch.equal(engine.read(name), parameter), name


@pytest.mark.parametrize("name", ["Llama", "GPT2", "Mixtral"])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_folder_is_loaded_as_slices(ranks: WorkerPool, name: str, stage: int, tmp_path: Path) -> None:
    hugging_face(name)().save_pretrained(tmp_path)
    ranks(2).run(load_folder, tmp_path, stage)
