"""A model of one process is built plainly; with a seed its values are drawn later, by what its modules say."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.live_bytes import LiveBytes
from harness.refusals import refused
from harness.small_decoder import SMALL_DECODER
from shardwise import gathered, init
from shardwise.construction.values import ParamInitializer
from shardwise.models.decoder import Decoder
from shardwise.models.presets import DecoderConfig
from shardwise.runtime.keyed_rng import initial_values

SHAPE = replace(SMALL_DECODER, tie_embeddings=True)


def read_all(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    source = ParamInitializer(model, seed)
    return {name: source.read(name) for name, _ in model.named_parameters()}


def make_layers() -> nn.Module:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)
    return nn.Sequential(nn.Linear(5, 7), nn.Embedding(9, 4, padding_idx=2), nn.Conv2d(4, 6, 3), encoder)


def test_one_process_builds_plainly() -> None:
    torch.manual_seed(3)
    plain = make_layers()
    torch.manual_seed(3)
    with init():
        built = make_layers()
    for name, parameter in plain.named_parameters():
        assert type(built.get_parameter(name)) is nn.Parameter
        assert torch.equal(built.get_parameter(name), parameter)


class Block(nn.Module):
    """Draws its own parameter, and is drawn again by the model's pass."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.up = nn.Linear(6, 6)
        self.down = nn.Linear(6, 6, bias=False)


class Model(nn.Module):
    """As transformers' models: a pass that draws a module, and one of its children once more."""

    def __init__(self, is_passed: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        if is_passed:
            self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Block):
            nn.init.constant_(module.scale, 0.5)
            nn.init.normal_(module.down.weight, std=50.0)


def keyed(seed: int, make: Callable[[], nn.Module] = make_layers) -> nn.Module:
    with init(seed):
        return make()


def test_a_seed_gives_the_same_values_whatever_else_is_drawn() -> None:
    def build(seed: int, state: int) -> dict[str, Tensor]:
        torch.manual_seed(state)
        model = keyed(seed)
        values = read_all(model)
        assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(state).get_state())
        assert all(parameter.is_meta for parameter in model.parameters())
        assert all(ParamInitializer(model, 0).is_same_everywhere(name) for name in values)
        return values

    first, again, other = build(7, 1), build(7, 2), build(8, 1)
    assert all(torch.equal(values, again[name]) for name, values in first.items())
    drawn = ("0.weight", "1.weight", "3.layers.0.linear1.weight")
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    assert first["0.weight"].abs().max() <= 5**-0.5
    assert (first["1.weight"][2] == 0).all()
    assert not torch.equal(first["3.layers.0.linear1.weight"], first["3.layers.2.linear1.weight"])


def test_keyed_values_depend_on_the_parameters_name() -> None:
    two = keyed(7, lambda: nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    one = keyed(7, lambda: nn.Sequential(nn.LayerNorm(5), nn.Linear(7, 3)))
    assert torch.equal(read_all(two)["1.weight"], read_all(one)["1.weight"])


def test_a_pass_over_the_model_is_repeated() -> None:
    values = read_all(keyed(7, Model))
    assert (values["blocks.1.scale"] == 0.5).all()
    assert 0.01 < values["blocks.1.up.weight"].std() < 0.03
    assert 25 < values["blocks.1.down.weight"].std() < 75
    assert 0.5 < values["embed.weight"].std() < 1.5
    meta = Model(is_passed=False).to("meta")
    assert all(torch.equal(drawn, values[name]) for name, drawn in read_all(meta, seed=7).items())


@pytest.mark.parametrize("name", ["Llama", "GPT2", "T5", "Bert", "Mixtral", "Mamba"])
def test_hugging_face_models_are_drawn_as_they_say(name: str) -> None:
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
    torch.manual_seed(0)
    plain = getattr(transformers, name + kind)._from_config(config)
    values = read_all(keyed(7, lambda: getattr(transformers, name + kind)._from_config(config)))
    for parameter_name, parameter in plain.named_parameters():
        drawn = values[parameter_name]
        if parameter.numel() > 1:
            spread, mean = parameter.std().item(), parameter.mean().item()
            assert drawn.std().item() == pytest.approx(spread, rel=0.5, abs=1e-6), parameter_name
            assert drawn.mean().item() == pytest.approx(mean, rel=1e-3, abs=spread / 2), parameter_name


def test_copies_and_casts_keep_the_seed() -> None:
    model = keyed(7, Model)
    values = read_all(model)
    copied = copy.deepcopy(model).double()
    assert copied.embed.weight is not model.embed.weight
    assert all(torch.equal(drawn, values[name].double()) for name, drawn in read_all(copied).items())


def test_reading_holds_one_modules_parameters() -> None:
    sizes = {"num_layers": 6, "hidden_size": 64, "head_dim": 16, "num_kv_heads": 4, "ffn_size": 256}
    config = DecoderConfig(vocab_size=64, num_heads=4, max_seq_len=8, **sizes)
    largest_bytes, states_bytes = 4 * 64 * 256, 4 * torch.get_rng_state().numel()
    with LiveBytes() as live:
        model = keyed(7, lambda: Decoder(config))
        assert live.live_bytes() <= 4096  # buffers
        source = ParamInitializer(model, seed=0)
        for name, _ in model.named_parameters():
            source.read(name)
    assert live.peak_bytes() <= 2 * largest_bytes + states_bytes
    with LiveBytes() as live:
        Decoder(config)
    assert live.peak_bytes() >= 10 * largest_bytes


class Scale(nn.Module):
    def __init__(self, device: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, device=device))


class Zeroed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        nn.init.zeros_(self.weight)


class Resets(nn.Sequential):
    """Resets its child's parameters, which drawing the child's does not repeat."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self[0].weight)


class Styled(nn.Sequential):
    """Has an `_init_weights` that takes no module, so that none knows when to call it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self._init_weights()

    def _init_weights(self) -> None:
        nn.init.ones_(self[0].weight)


def wrap(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), *layers)


def zero(model: nn.Module, use: Callable[[Tensor], object] = nn.init.zeros_) -> nn.Module:
    use(model.get_parameter("1.weight"))
    return model


class Overwritten(nn.Module):
    """Writes in its constructor, and once more in its pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Zeroed()
        nn.init.zeros_(self.layer.bias)
        self.layer.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)
            module.bias.data.fill_(2.0)


OTHER_USES: dict[str, Callable[[], nn.Module]] = {
    "constructor": lambda: wrap(Zeroed()),
    "later": lambda: zero(wrap(nn.Linear(3, 3))),
    "unseen": lambda: zero(wrap(nn.Linear(3, 3)), lambda weight: weight.data.zero_()),
    "copy": lambda: copy.deepcopy(zero(wrap(nn.Linear(3, 3)))),
    "of a copy": lambda: zero(copy.deepcopy(wrap(nn.Linear(3, 3)))),
    "parent": lambda: wrap(nn.Linear(3, 3), Resets(nn.Linear(3, 3))),
    "no module": lambda: wrap(nn.Linear(3, 3), Styled(nn.Linear(3, 3))),
}


@pytest.mark.parametrize("name", OTHER_USES)
def test_what_a_seed_cannot_repeat_is_refused_with_its_place(name: str) -> None:
    parameter = {"parent": "2.0.weight", "no module": "2.0.weight"}.get(name, "1.weight")
    model = keyed(7, OTHER_USES[name])
    with refused("used-before-drawn", parameter, f"{Path(__file__).name}:"):
        ParamInitializer(model, seed=0)


def test_what_is_overwritten_by_code_that_is_repeated_is_drawn() -> None:
    values = read_all(keyed(7, Overwritten))
    assert (values["layer.weight"] == 1).all()
    assert (values["layer.bias"] == 2).all()


def test_what_is_written_after_the_block_is_refused_by_name() -> None:
    model = keyed(7, wrap)
    with init():
        nn.init.zeros_(model[0].weight)
    for each in (model, copy.deepcopy(model)):
        with refused("used-before-drawn", "0.weight"):
            ParamInitializer(each, seed=0)


def test_models_on_meta_without_values_are_refused_by_name() -> None:
    with refused("no-reset-parameters", "0.weight"):
        ParamInitializer(nn.Sequential(Scale("meta")), seed=0)
    with refused("no-reset-parameters", "0.weight"):
        ParamInitializer(keyed(7, lambda: nn.Sequential(Scale())), seed=0)
    with refused("buffer-on-meta", "1.running_mean"):
        ParamInitializer(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(3, device="meta")), seed=0)


def test_given_parameters_keep_their_values() -> None:
    outside = nn.Linear(3, 2)
    with init(seed=5):
        tied = nn.Linear(3, 2)
        tied.weight = outside.weight
        tied.bias = nn.Parameter(torch.full((2,), 4.0))
    assert tied.weight is outside.weight
    assert read_all(tied)["bias"].tolist() == [4.0, 4.0]


def test_nothing_is_left() -> None:
    with init(seed=5), init(seed=6), init():  # the outer one counts
        inner = nn.Linear(3, 2)
    with init(seed=5):
        assert torch.equal(read_all(inner)["weight"], read_all(nn.Linear(3, 2))["weight"])
    failed: list[nn.Module] = []
    with pytest.raises(ZeroDivisionError), init(seed=5):  # noqa: PT012
        failed.append(nn.Linear(3, 2))
        raise ZeroDivisionError
    assert failed[0].get_parameter("weight").is_meta
    later = nn.Linear(3, 2)
    assert not later.weight.is_meta
    assert not later.weight.__dict__


def test_other_threads_build_as_ever() -> None:
    built: list[nn.Linear] = []
    with init(seed=1):
        thread = threading.Thread(target=lambda: built.append(nn.Linear(3, 2)))
        thread.start()
        thread.join()
        own = nn.Linear(3, 2)
    assert not built[0].weight.is_meta
    assert own.weight.is_meta


def test_a_closed_source_leaves_plain_parameters() -> None:
    model = keyed(5, lambda: nn.Linear(3, 2))
    weight = model.weight
    ParamInitializer(model, seed=0).close()
    assert model.weight is weight
    assert type(weight) is nn.Parameter
    assert not weight.__dict__


def test_a_plain_meta_model_is_drawn_by_reset_parameters() -> None:
    meta = Decoder(SHAPE, device="meta", dtype=torch.bfloat16)
    values = read_all(meta, seed=9)
    for name, expected in initial_values(Decoder(SHAPE), seed=9):
        assert torch.equal(values[name], expected.bfloat16())


def test_drawing_writes_no_other_parameter() -> None:
    """An engine takes parameters over one after the other, while the model's pass writes those of whole blocks."""
    model = keyed(7, Model)
    source = ParamInitializer(model, seed=0)
    model.blocks[0].down.weight = nn.Parameter(torch.full((6, 6), 3.0))
    source.read("blocks.0.up.weight")
    source.read("blocks.0.scale")
    assert (model.blocks[0].down.weight == 3.0).all()


def test_parameters_that_were_made_real_are_read_as_they_are() -> None:
    model = keyed(5, lambda: nn.Linear(3, 2))
    model.to_empty(device="cpu")
    nn.init.ones_(model.weight)
    assert (read_all(model)["weight"] == 1).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert copy.deepcopy(model).weight.sum() == 6


def test_gathered_writes_what_is_whole_in_place() -> None:
    weight = nn.Parameter(torch.ones(3))
    with gathered(weight, modifier_rank=0), torch.no_grad():
        weight.zero_()
    assert weight.sum() == 0
    with refused("modifier-rank"), gathered([weight], modifier_rank=1):
        pass
