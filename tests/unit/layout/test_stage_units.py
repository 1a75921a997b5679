"""Between which modules a model may be cut, and whose every parameter is."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.huggingface import FAMILIES, build_model
from harness.refusals import refused
from harness.scanned import stage_units_of
from shardwise.layout.facts import StageUnit
from shardwise.models import Decoder, DecoderConfig
from shardwise.runtime.torch_private import pytree


def decoder(*, tie_embeddings: bool = False) -> Decoder:
    config = DecoderConfig(
        vocab_size=32,
        num_layers=3,
        hidden_size=8,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        ffn_size=16,
        max_seq_len=8,
        tie_embeddings=tie_embeddings,
    )
    return Decoder(config, device="meta")


def on_meta(family: str, **options: object) -> nn.Module:
    with torch.device("meta"):
        return build_model(family, **options)


def shown(units: tuple[StageUnit, ...]) -> str:
    """Units by name, their further modules after a plus; a bar where a cut is allowed."""
    parts = [
        ("| " if unit.is_cut_allowed_before and index else "") + "+".join(unit.modules)
        for index, unit in enumerate(units)
    ]
    return " ".join(parts)


class Block(nn.Module):
    """A layer whose children are no list."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 2)


class Stack(nn.Module):
    """Blocks, and modules before and after them under the names given."""

    def __init__(self, before: dict[str, nn.Module], after: dict[str, nn.Module], num_blocks: int = 2) -> None:
        super().__init__()
        for name, module in before.items():
            self.add_module(name, module)
        self.rotary = nn.Identity()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        for name, module in after.items():
            self.add_module(name, module)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", "model.embed_tokens | model.layers.0 | model.layers.1 | model.layers.2 | model.norm | lm_head"),
        ("qwen2", "model.embed_tokens | model.layers.0 | model.layers.1 | model.layers.2 | model.norm | lm_head"),
        ("mixtral", "model.embed_tokens | model.layers.0 | model.layers.1 | model.layers.2 | model.norm | lm_head"),
        (
            "gpt2",
            "transformer.wte+transformer.wpe transformer.h.0 | transformer.h.1 | transformer.h.2 "
            "| transformer.ln_f | lm_head",
        ),
        ("bert", "bert.embeddings | bert.encoder.layer.0 | bert.encoder.layer.1 | bert.encoder.layer.2 | cls"),
        (
            "t5",
            "shared+encoder.embed_tokens | encoder.block.0 | encoder.block.1 | encoder.block.2 "
            "| encoder.final_layer_norm | decoder lm_head",
        ),
        (
            "whisper",
            "model.encoder.conv1+model.encoder.conv2+model.encoder.embed_positions model.encoder.layers.0 "
            "| model.encoder.layers.1 | model.encoder.layer_norm | model.decoder proj_out",
        ),
        ("mamba", "backbone.embeddings | backbone.layers.0 | backbone.layers.1 | backbone.norm_f | lm_head"),
    ],
)
def test_units_of_hugging_face_models(family: str, expected: str) -> None:
    assert shown(stage_units_of(on_meta(family))) == expected


# ALBERT runs one block many times.
RUN_ONCE = [name for name in FAMILIES if name != "albert"]


class Replay:
    """Modules that return what they returned before, or nothing but NaN in its place."""

    def __init__(self, model: nn.Module, units: tuple[StageUnit, ...]) -> None:
        self.called: list[str] = []
        self.returned: dict[str, Any] = {}
        self.skipped: set[str] = set()
        self.received = ""
        for name in (name for unit in units for name in unit.modules):
            module = model.get_submodule(name)
            module.forward = partial(self._run, name, module.forward)  # type: ignore[method-assign]

    def _run(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.called.append(name)
        if name == self.received:
            return self.returned[name]
        if name in self.skipped:
            return pytree.tree_map(
                lambda each: each * math.nan if isinstance(each, Tensor) else each, self.returned[name]
            )
        self.returned[name] = forward(*args, **kwargs)
        return self.returned[name]


@pytest.mark.parametrize("family", RUN_ONCE)
def test_units_run_once_a_forward_in_their_order(family: str) -> None:
    model = build_model(family).eval()
    units = stage_units_of(model)
    replay = Replay(model, units)
    with torch.no_grad():
        model(**FAMILIES[family].batch(0, 2, torch.float32))
    # `shared` has T5's embedding too, but is not run itself.
    assert replay.called == [name for unit in units for name in unit.modules if name != "shared"]


# Of Switch, the routers' outputs are collected from all blocks for the loss.
@pytest.mark.parametrize("family", [name for name in RUN_ONCE if name != "switch"])
def test_the_last_unit_before_a_cut_returns_all_that_is_needed(family: str) -> None:
    model = build_model(family, **({"output_router_logits": False} if family == "mixtral" else {})).eval()
    units = stage_units_of(model)
    replay = Replay(model, units)
    batch = FAMILIES[family].batch(0, 2, torch.float32)
    with torch.no_grad():
        whole = model(**batch)
        for cut, unit in enumerate(units):
            if cut > 0 and unit.is_cut_allowed_before:
                replay.skipped = {name for each in units[:cut] for name in each.modules}
                replay.received = units[cut - 1].modules[-1]
                assert torch.equal(model(**batch).loss, whole.loss), unit.name


def test_units_of_the_decoder() -> None:
    units = stage_units_of(decoder())
    assert shown(units) == "embed | blocks.0 | blocks.1 | blocks.2 | norm | head"
    assert [entry.name for unit in units for entry in unit.params] == [name for name, _ in decoder().named_parameters()]
    assert units[0].params[0].shape == (32, 8)
    assert [entry.unit for entry in units[1].params] == ["blocks.0"] * 9


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_parameter_is_in_every_unit_that_uses_it(tied: bool) -> None:
    *_, head = stage_units_of(decoder(tie_embeddings=tied))
    assert [(entry.name, entry.aliases) for entry in head.params] == [
        ("embed.weight", ("head.weight",)) if tied else ("head.weight", ())
    ]
    embedding, *_, head = stage_units_of(on_meta("llama", tie_word_embeddings=tied))
    assert (embedding.params[0].name == head.params[0].name) is tied


def test_every_parameter_is_in_a_unit() -> None:
    for family in FAMILIES:
        model = on_meta(family)
        names = {name for unit in stage_units_of(model) for each in unit.params for name in (each.name, *each.aliases)}
        assert names == {name for name, _ in model.named_parameters(remove_duplicate=False)}, family


def test_a_pooler_and_a_head_are_not_parted() -> None:
    from transformers.models.bert import BertConfig, BertForPreTraining

    with torch.device("meta"):
        model = BertForPreTraining(BertConfig(**FAMILIES["bert"].options))
    assert shown(stage_units_of(model)).endswith("| bert.encoder.layer.2 | bert.pooler cls")


def test_every_entry_of_a_sequential_is_a_unit() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    units = stage_units_of(model)
    assert shown(units) == "0 | 1 | 2"
    assert [len(unit.params) for unit in units] == [2, 0, 4]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Stack({"embed": nn.Linear(1, 1)}, {"head": nn.Linear(1, 1)}), "embed | blocks.0 | blocks.1 | head"),
        (Stack({}, {}), "blocks.0 | blocks.1"),
        (
            Stack({"tokens": nn.Linear(1, 1), "places": nn.Linear(1, 1)}, {}),
            "tokens+places blocks.0 | blocks.1",
        ),
        (Stack({"mixed": nn.Linear(1, 1), "drop": nn.Dropout()}, {}), "mixed | blocks.0 | blocks.1"),
        # OPT registers what it runs last before its blocks.
        (
            Stack({"embed": nn.Linear(1, 1), "final_layer_norm": nn.LayerNorm(1)}, {"lm_head": nn.Linear(1, 1)}),
            "embed | blocks.0 | blocks.1 | final_layer_norm | lm_head",
        ),
        # BART registers a norm of its embeddings after them.
        (
            Stack({"embed": nn.Linear(1, 1)}, {"layernorm_embedding": nn.LayerNorm(1), "unembed": nn.Linear(1, 1)}),
            "embed+layernorm_embedding blocks.0 | blocks.1 | unembed",
        ),
        (Stack({"embed": nn.Linear(1, 1)}, {"embed_out": nn.Linear(1, 1)}), "embed | blocks.0 | blocks.1 | embed_out"),
        (Stack({}, {"one": nn.Linear(1, 1), "two": nn.Linear(1, 1)}), "blocks.0 | blocks.1 | one two"),
        # The longest list is of the blocks, and a list inside a block is none.
        (
            Stack({}, {"heads": nn.ModuleList([nn.Linear(1, 1), nn.LayerNorm(1), nn.Linear(1, 1)])}),
            "blocks.0 | blocks.1 | heads",
        ),
        (
            Stack({"towers": nn.ModuleList(nn.Linear(1, 1) for _ in range(4))}, {}),
            "towers.0 | towers.1 | towers.2 | towers.3 | blocks",
        ),
        (
            nn.ModuleDict({"list": nn.ModuleList([nn.Sequential(*(nn.Linear(1, 1) for _ in range(4)))])}),
            "list.0",
        ),
    ],
)
def test_units_of_other_models(model: nn.Module, expected: str) -> None:
    assert shown(stage_units_of(model)) == expected


def test_patterns_name_the_units() -> None:
    model = Stack({"embed": nn.Linear(1, 1), "project": nn.Linear(1, 1)}, {"norm": nn.Linear(1, 1)})
    assert shown(stage_units_of(model, ["project", "Block"])) == "embed | project | blocks.0 | blocks.1 | norm"
    assert shown(stage_units_of(model, ["blocks"])) == "embed+project blocks | norm"


def test_what_is_put_among_the_embedding_is_not_parted_from_it() -> None:
    """As images' features are: the plan is of the language model, and the whole has more before it."""

    class Config:
        base_model_pp_plan = {"embed": None, "blocks": None}  # noqa: RUF012

    language = Stack({"embed": nn.Linear(1, 1)}, {})
    language.config = Config()
    assert shown(stage_units_of(language)) == "embed | blocks.0 | blocks.1"
    whole = nn.ModuleDict({"vision": nn.Linear(1, 1), "language": language, "head": nn.Linear(1, 1)})
    assert shown(stage_units_of(whole)) == "vision language.embed language.blocks.0 | language.blocks.1 | head"


class Loose(Stack):
    """A parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__({}, {})
        self.places = nn.Parameter(torch.zeros(1))


class Between(nn.Module):
    """Two lists with a module between them."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.ModuleList([Block()])
        self.bridge = nn.Linear(1, 1)
        self.high = nn.ModuleList([Block()])


@pytest.mark.parametrize(
    ("model", "patterns", "refusal"),
    [
        (
            Between(),
            ["Block"],
            ("module-between-units", "module bridge", "pipeline.replicate"),
        ),
        (
            Block(),
            None,
            ("no-block-list", "Block", "pipeline.units"),
        ),
        (Between(), [], ("no-units-named", "pipeline.units=[]")),
        (
            Between(),
            ["block"],
            ("no-module-matches", "pipeline.units='block'", "Between, Block, Linear, ModuleList"),
        ),
        (
            nn.Sequential(*[nn.Linear(1, 1)] * 2),
            None,
            ("unit-repeated", "0 and 1"),
        ),
    ],
)
def test_models_that_cannot_be_cut_are_refused(
    model: nn.Module, patterns: list[str] | None, refusal: tuple[str, ...]
) -> None:
    with refused(*refusal):
        stage_units_of(model, patterns)


def test_what_no_unit_has_is_in_all_stages() -> None:
    units = stage_units_of(Loose())
    assert all("places" in {entry.name for entry in unit.params} for unit in units)
    units = stage_units_of(Between(), ["Block"], ["bridge"])
    assert [unit.name for unit in units] == ["low.0", "high.0"]
    assert all("bridge.weight" in {entry.name for entry in unit.params} for unit in units)
    with refused("replicate-in-units", "low.0"):
        stage_units_of(Between(), ["Block", "bridge"], ["low.0"])


def test_a_function_twice_is_no_repeat() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(1, 1), relu, nn.Linear(1, 1), relu)
    assert shown(stage_units_of(model)) == "0 | 1 | 2 | 3"


def test_storage_is_not_needed() -> None:
    with torch.device("meta"):
        model = Stack({"embed": nn.Linear(1, 1)}, {})
    assert isinstance(model.embed, nn.Module)
    assert all(isinstance(each, Tensor) and each.is_meta for each in model.parameters())
    assert shown(stage_units_of(model)) == "embed | blocks.0 | blocks.1"
