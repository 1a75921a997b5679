"""Plans of tensor parallelism: what they say of each family, that they are right, and how bad ones are refused."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from harness.emulated_ranks import emulate, slices
from harness.refusals import refused
from harness.scanned import scanned
from harness.unknown_models import ScaledEmbedding
from shardwise.layout.tensor_plan import LayerSplit, SequenceStack, SharedInput, SplitDropout, TensorPlan, param_splits
from shardwise.layout.tp_sharding import FusedPart
from shardwise.models.decoder import Decoder, lm_loss
from shardwise.models.presets import DecoderConfig
from shardwise.runtime.float64 import float64_throughout
from shardwise.tensor.hf_plans import find_plan

SIZES: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 41,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
)
GQA: Final[Mapping[str, Any]] = MappingProxyType({**SIZES, "num_key_value_heads": 2})
WIDE: Final[Mapping[str, Any]] = MappingProxyType({**GQA, "head_dim": 8})
GPT2: Final[Mapping[str, Any]] = MappingProxyType(
    {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 41, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 1}
)
T5: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "d_model": 16,
        "d_kv": 4,
        "num_heads": 4,
        "d_ff": 24,
        "num_layers": 2,
        "vocab_size": 41,
        "decoder_start_token_id": 0,
    }
)
OPT: Final[Mapping[str, Any]] = MappingProxyType(
    {**{k: v for k, v in SIZES.items() if k != "intermediate_size"}, "ffn_dim": 24, "word_embed_proj_dim": 8}
)

# module and class prefix, class suffix, config
FAMILIES: Final[Mapping[str, tuple[str, str, str, Mapping[str, Any]]]] = MappingProxyType(
    {
        "llama": ("llama", "Llama", "ForCausalLM", GQA),
        "llama-tied": ("llama", "Llama", "ForCausalLM", {**GQA, "tie_word_embeddings": True, "attention_bias": True}),
        "qwen2": ("qwen2", "Qwen2", "ForCausalLM", GQA),
        "mistral": ("mistral", "Mistral", "ForCausalLM", GQA),
        "qwen3": ("qwen3", "Qwen3", "ForCausalLM", WIDE),
        "gemma2": ("gemma2", "Gemma2", "ForCausalLM", WIDE),
        "phi3": ("phi3", "Phi3", "ForCausalLM", GQA),
        "gpt-neox": ("gpt_neox", "GPTNeoX", "ForCausalLM", SIZES),
        "apertus": ("apertus", "Apertus", "ForCausalLM", WIDE),
        "gpt2": ("gpt2", "GPT2", "LMHeadModel", GPT2),
        "bert": ("bert", "Bert", "ForMaskedLM", SIZES),
        "t5": ("t5", "T5", "ForConditionalGeneration", T5),
        "t5-gated": (
            "t5",
            "T5",
            "ForConditionalGeneration",
            {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        ),
        "opt": ("opt", "OPT", "ForCausalLM", OPT),
    }
)
# Modules with matrices that stay whole on purpose.
WHOLE: Final = (
    "position_embeddings",
    "token_type_embeddings",
    "transform.dense",
    "transformer.wpe",
    "embed_positions",
    "project_in",
    "project_out",
)


def build(family: str, **options: Any) -> nn.Module:
    module, prefix, suffix, config = FAMILIES[family]
    place = importlib.import_module(f"transformers.models.{module}")
    made = getattr(place, f"{prefix}Config")(**{**config, **options})
    made.use_cache = False
    return getattr(place, f"{prefix}{suffix}")(made)


def skeleton(family: str, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return build(family, **options)


def decoder(**options: Any) -> Decoder:
    shape = {
        "vocab_size": 41,
        "num_layers": 2,
        "hidden_size": 16,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "ffn_size": 24,
        "max_seq_len": 16,
    }
    device = options.pop("device", "meta")
    return Decoder(DecoderConfig(**{**shape, **options}), device=device)


def find(model: nn.Module, degree: int = 2, given: Any = None, sequence_parallel: bool = False) -> TensorPlan:
    return find_plan(model, degree, given, sequence_parallel)


def styles(plan: TensorPlan, prefix: str) -> dict[str, str]:
    return {each.module.removeprefix(prefix): each.style for each in plan.layers if each.module.startswith(prefix)}


# What plans say


def test_decoder() -> None:
    plan = find(decoder(), 4)
    query, kv, ffn, vocab = FusedPart(16, 4), FusedPart(8, 2), FusedPart(24), FusedPart(41, is_padded=True)
    assert plan.layers[:2] == (LayerSplit("embed", "vocab", (vocab,)), LayerSplit("head", "head", (vocab,)))
    assert [(each.module, each.style, each.parts[0]) for each in plan.layers[2:9]] == [
        ("blocks.0.attention.query", "column", query),
        ("blocks.0.attention.key", "column", kv),
        ("blocks.0.attention.value", "column", kv),
        ("blocks.0.attention.out", "row", query),
        ("blocks.0.ffn.gate", "column", ffn),
        ("blocks.0.ffn.up", "column", ffn),
        ("blocks.0.ffn.down", "row", ffn),
    ]
    assert plan.regions[:2] == (SharedInput("blocks.0.attention", ("x",)), SharedInput("blocks.0.ffn", ("x",)))
    assert plan.stacks == (SequenceStack("blocks.0", "x", "norm", ("blocks.0", "blocks.1", "norm")),)


@pytest.mark.parametrize(("degree", "first_heads"), [(2, [0, 2]), (4, [0, 1, 2, 3])])
def test_decoder_knows_each_ranks_first_head(degree: int, first_heads: list[int]) -> None:
    plan = find(decoder(), degree)
    assert [plan.attributes_of(rank, degree) for rank in range(degree)] == [
        [(f"blocks.{block}.attention", "first_head", first) for block in (0, 1)] for first in first_heads
    ]
    assert "blocks.*.attention.first_head = the first of a rank's part of 4" in str(plan)


def test_llama() -> None:
    plan = find(skeleton("llama"), 4)
    block = "model.layers.1."
    assert styles(plan, block) == {
        "self_attn.q_proj": "column",
        "self_attn.k_proj": "column",
        "self_attn.v_proj": "column",
        "self_attn.o_proj": "row",
        "mlp.gate_proj": "column",
        "mlp.up_proj": "column",
        "mlp.down_proj": "row",
    }
    assert {each.module: each.parts for each in plan.layers}[f"{block}self_attn.k_proj"] == (FusedPart(8, 2),)
    assert styles(plan, "model.e") == {"mbed_tokens": "vocab"}
    assert styles(plan, "lm") == {"_head": "head"}
    assert plan.regions[2:] == (
        SharedInput(f"{block}self_attn", ("hidden_states",)),
        SharedInput(f"{block}mlp", ("x",)),
    )
    modules = ("model.layers.0", "model.layers.1", "model.norm")
    assert plan.stacks == (SequenceStack("model.layers.0", "hidden_states", "model.norm", modules),)
    assert plan.attributes[1] == (f"{block}self_attn", "num_key_value_groups", 1)
    assert plan.dropouts[1] == SplitDropout(f"{block}self_attn", dim=1, is_functional=True)
    assert not plan.notes


def test_norms_of_heads_have_partial_gradients() -> None:
    plan = find(skeleton("qwen3"))
    assert plan.partial[:2] == ("model.layers.0.self_attn.q_norm.weight", "model.layers.0.self_attn.k_norm.weight")


def test_gathered_attention_and_chunked_gates() -> None:
    plan = find(skeleton("phi3"))
    layers = {each.module.removeprefix("model.layers.0."): each for each in plan.layers}
    assert layers["self_attn.qkv_proj"].gathers_output
    assert layers["self_attn.o_proj"].splits_input
    assert layers["mlp.gate_up_proj"].parts == (FusedPart(24), FusedPart(24))
    assert not layers["mlp.gate_up_proj"].gathers_output
    assert not layers["mlp.down_proj"].splits_input
    assert len(plan.notes) == 1
    assert plan.notes[0].startswith("model.layers.*.self_attn: ")
    assert not plan.dropouts


def test_gpt2() -> None:
    plan = find(skeleton("gpt2", add_cross_attention=True), 2)
    layers = {each.module.removeprefix("transformer.h.0."): each for each in plan.layers}
    head = FusedPart(16, 4)
    assert layers["attn.c_attn"] == LayerSplit(
        "transformer.h.0.attn.c_attn", "column", (head, head, head), is_transposed=True
    )
    assert layers["crossattention.c_attn"].parts == (head, head)
    assert layers["crossattention.q_attn"].parts == (head,)
    assert layers["mlp.c_proj"].style == "row"
    attention = "transformer.h.0.attn"
    assert (attention, "num_heads", 2) in plan.attributes
    assert (attention, "split_size", 8) in plan.attributes
    assert SplitDropout(f"{attention}.attn_dropout", dim=1) in plan.dropouts
    cross = SharedInput("transformer.h.0.crossattention", ("hidden_states",), ("encoder_hidden_states",))
    assert cross in plan.regions


def test_bert() -> None:
    model = skeleton("bert")
    plan = find(model)
    assert styles(plan, "bert.encoder.layer.1.") == {
        "attention.self.query": "column",
        "attention.self.key": "column",
        "attention.self.value": "column",
        "attention.output.dense": "row",
        "intermediate.dense": "column",
        "output.dense": "row",
    }
    assert styles(plan, "cls") == {".predictions.decoder": "head"}
    assert plan.stacks[0].last == "bert.encoder.layer.1"
    splits = param_splits(scanned(model).params, plan, 2, sequence_parallel=False)
    assert splits["cls.predictions.bias"] == splits["cls.predictions.decoder.bias"]
    assert splits["cls.predictions.bias"].local_shape == (21,)


def test_t5() -> None:
    plan = find(skeleton("t5"), 4)
    vocab = [each.module for each in plan.layers if each.style in ("vocab", "head")]
    assert vocab == ["shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"]
    bias = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"
    assert LayerSplit(bias, "column-embedding", (FusedPart(4),)) in plan.layers
    cross = "decoder.block.1.layer.1.EncDecAttention"
    assert SharedInput(cross, ("hidden_states",), ("key_value_states",)) in plan.regions
    assert (cross, "n_heads", 1) in plan.attributes
    assert (cross, "inner_dim", 4) in plan.attributes
    assert SplitDropout("encoder.block.0.layer.1.DenseReluDense.dropout", dim=-1) in plan.dropouts
    assert [each.last for each in plan.stacks] == ["encoder.final_layer_norm", "decoder.final_layer_norm"]


def test_models_inside_of_others() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = skeleton("llama"), decoder()

    plan = find(Pair())
    assert [each.module for each in plan.layers if each.style == "vocab"] == [
        "first.model.embed_tokens",
        "second.embed",
    ]
    assert [each.last for each in plan.stacks] == ["first.model.norm", "second.norm"]
    assert plan.attributes[-1][0] == "second.blocks.1.attention"


# Plans cover a model, and are right


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_shared_heads_add_up(num_kv_heads: int, degree: int) -> None:
    for model in (decoder(num_kv_heads=num_kv_heads), skeleton("llama", num_key_value_heads=num_kv_heads)):
        assert_owned(model, degree)


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_is_split_or_known_to_be_whole(family: str, degree: int) -> None:
    model = skeleton(family)
    split = {each.module for each in find(model, degree).layers}
    for name, module in model.named_modules():
        if getattr(getattr(module, "weight", None), "ndim", 0) == 2:
            assert (name in split) != name.endswith(WHOLE), name
    assert_owned(model, degree)


def assert_owned(model: nn.Module, degree: int) -> None:
    """Every element of every parameter is held by as many ranks as its share says."""
    for name, split in param_splits(
        scanned(model).params, find(model, degree), degree, sequence_parallel=False
    ).items():
        held, said = torch.zeros(2, *split.global_shape)
        for rank in range(degree):
            for share in split.shares(rank):
                held[slices(share.source)] += 1
                said[slices(share.source)] = share.num_sharers
        assert held.min() > 0, name
        assert torch.equal(held, said), name


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(
    ("family", "sequence_parallel"),
    [(family, False) for family in ("decoder", *FAMILIES)]
    + [(family, True) for family in ("decoder", *FAMILIES) if family != "opt"],
)
def test_plan_is_right(family: str, degree: int, sequence_parallel: bool) -> None:
    torch.manual_seed(1)
    model = decoder(device="cpu") if family == "decoder" else build(family)
    tokens = torch.randint(3, 41, (2, 8))  # [B, S]
    loss_of = our_loss(tokens) if family == "decoder" else their_loss(tokens)
    assert_right(model.double().eval(), degree, sequence_parallel, loss_of)


def test_table_that_a_model_brings() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.gate_up, self.down = nn.LayerNorm(8), nn.Linear(8, 48), nn.Linear(24, 8)

        def forward(self, x: Tensor) -> Tensor:
            gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
            return x + self.down(F.silu(gate) * up)

    class Model(nn.Module):
        tensor_plan = MappingProxyType(
            {
                "embed": "vocab",
                "blocks.*.gate_up": "column parts=2",
                "blocks.*.down": "rowwise",
                "blocks.?": "stack x last=norm",
                "head": "column-gather",
            }
        )

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm, self.head = nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 12)
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    torch.manual_seed(1)
    tokens = torch.randint(12, (2, 8))  # [B, S]
    for sequence_parallel in (False, True):
        assert_right(Model().double(), 4, sequence_parallel, our_loss(tokens))


def our_loss(tokens: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda model: lm_loss(model(tokens), tokens)[0]


def their_loss(tokens: Tensor) -> Callable[[nn.Module], Tensor]:
    return lambda model: model(input_ids=tokens, labels=tokens).loss


def assert_right(
    model: nn.Module, degree: int, sequence_parallel: bool, loss_of: Callable[[nn.Module], Tensor]
) -> None:
    for param in model.parameters():
        nn.init.normal_(param, std=0.3)
    plan = find(model, degree, sequence_parallel=sequence_parallel)
    splits = param_splits(scanned(model).params, plan, degree, sequence_parallel)
    with float64_throughout():
        losses, grads = emulate(model, plan, splits, loss_of, sequence_parallel)
        loss = loss_of(model)
        loss.backward()
    for each in losses:
        assert each == pytest.approx(loss.item(), rel=1e-12)
    wanted = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    largest = max(grad.abs().max().item() for grad in wanted.values())
    for name, grad in wanted.items():
        assert (grads[name] - grad).abs().max().item() <= 1e-9 * largest, name


# Errors


@pytest.mark.parametrize(
    ("model", "degree", "refusal"),
    [
        (lambda: decoder(), 3, ["tp-divides-units", "tp=3", "num_heads=4", "2, 4"]),
        (lambda: decoder(), 8, ["tp-divides-units", "tp=8", "num_heads=4", "legal: 4"]),
        (
            lambda: decoder(num_heads=12, num_kv_heads=3, hidden_size=48),
            4,
            ["tp-divides-units", "tp=4", "num_kv_heads=3", "legal: 3"],
        ),
        (lambda: decoder(ffn_size=18), 4, ["tp-divides-units", "tp=4", "ffn_size=18", "3, 6"]),
        (lambda: skeleton("llama"), 3, ["tp-divides-units", "tp=3", "num_attention_heads=4", "2, 4"]),
        (lambda: skeleton("llama", intermediate_size=18), 4, ["tp-divides-units", "tp=4", "intermediate_size=18"]),
        (
            lambda: skeleton("llama", num_attention_heads=12, num_key_value_heads=3, hidden_size=48),
            4,
            ["tp-divides-units", "tp=4", "num_key_value_heads=3", "legal: 3"],
        ),
        (lambda: skeleton("gpt2", n_inner=18), 4, ["tp-divides-units", "tp=4", "n_inner=18", "3, 6"]),
        (lambda: skeleton("bert"), 3, ["tp-divides-units", "tp=3", "num_attention_heads=4", "2, 4"]),
        (lambda: skeleton("t5"), 8, ["tp-divides-units", "tp=8", "num_heads=4", "legal: 4"]),
        (lambda: skeleton("opt", layerdrop=0.1), 2, ["tp-layerdrop", "layerdrop=0.1"]),
        (
            lambda: nn.Linear(2, 2),
            2,
            ["tp-no-plan", "Linear", "propose_plan(model, batch, tp=2)", "plan={module pattern: style}"],
        ),
    ],
)
def test_what_does_not_divide_or_has_no_plan(model: Callable[[], nn.Module], degree: int, refusal: list[str]) -> None:
    with refused(*refusal):
        find(model(), degree)


class Looking(nn.Embedding):
    """Looks up by itself, so nothing can be put beneath it."""

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight) * 2.0


class Doubling(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * super().forward(x)


class Adding(nn.Linear):
    """What low-rank adapters begin as: the product of a linear layer, until their own weights have changed."""

    def __init__(self, size: int) -> None:
        super().__init__(size, size)
        self.added = nn.Parameter(torch.zeros(size, size))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.added


@pytest.mark.parametrize(
    ("layer", "style", "reason"),
    [
        (nn.Embedding(8, 8, max_norm=1.0), "vocab", "max_norm=1.0"),
        (nn.Embedding(8, 8, sparse=True), "vocab", "sparse=True"),
        (nn.Embedding(8, 8, scale_grad_by_freq=True), "column-embedding", "scale_grad_by_freq=True"),
        (Looking(8, 8), "vocab", "Looking"),
        (ScaledEmbedding(8, 8), "column-embedding", "ScaledEmbedding"),
        (nn.Linear(8, 8), "vocab", "Linear"),
        (Doubling(8, 8), "column", "Doubling"),
        (Adding(8), "row", "Adding"),
        (parametrizations.weight_norm(nn.Linear(8, 8)), "row", "nn.Linear's"),
        (nn.Embedding(8, 8), "head", "Embedding"),
    ],
)
def test_layers_with_forwards_of_their_own_are_refused(layer: nn.Module, style: str, reason: str) -> None:
    with refused("tp-layer-style", "layer 0", f"'{style}'", reason):
        find(nn.Sequential(layer), given={"0": style})


def test_embeddings_that_cannot_be_split_stay_whole_with_their_heads() -> None:
    model: Any = skeleton("llama-tied")
    model.model.embed_tokens.__class__ = Looking
    plan = find(model)
    assert not {"model.embed_tokens", "lm_head"} & {layer.module for layer in plan.layers}
    assert "model.embed_tokens, lm_head whole: the forward of Looking is not nn.Embedding's" in plan.notes


def test_norms_of_gathered_heads_lie_in_no_region() -> None:
    place = importlib.import_module("transformers.models.olmo2")
    with torch.device("meta"):
        model = place.Olmo2ForCausalLM(place.Olmo2Config(**GQA))
    plan = find(model)
    assert not any("self_attn" in name for name in (*plan.partial, *(region.module for region in plan.regions)))
    assert {layer.style for layer in plan.layers if "self_attn" in layer.module} == {"column", "row"}
    with refused("tp-no-stack", "may read other positions"):
        find(model, sequence_parallel=True)


def test_norms_that_no_plan_speaks_of_are_refused() -> None:
    place = importlib.import_module("transformers.models.cohere")
    with torch.device("meta"):
        model = place.CohereForCausalLM(place.CohereConfig(**GQA, use_qk_norm=True))
    with refused("tp-plan-unnamed", "model.layers.0.self_attn.q_norm.weight"):
        find(model)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (
            {"mlp.up": "colwise_gather_output", "mlp.down": "rowwise_split_input"},
            ["tp-plan-unnamed", "mlp.gate.weight"],
        ),
        ({"mlp.up": "colwise", "mlp.down": "rowwise"}, ["tp-plan-unnamed", "mlp.gate.weight"]),
        ({"mlp.down": "rowwise"}, ["tp-plan-columns", "mlp.down"]),
        ({"mlp.up": "grouped_gemm"}, ["tp-plan-style", "'mlp.up'", "'grouped_gemm'"]),
        ({"encoder.*.up": "colwise"}, ["tp-no-plan", "Model"]),
    ],
)
def test_plans_with_gaps_are_refused(words: Mapping[str, str], refusal: list[str]) -> None:
    class Model(nn.Module):
        base_model_prefix = "model"
        _tp_plan = words

        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.ModuleDict({name: nn.Linear(8, 8) for name in ("up", "gate", "down")})

    with refused(*refusal):
        find(Model())


def test_sequence_parallelism_needs_a_stack() -> None:
    with refused("tp-no-stack", "OPT"):
        find(skeleton("opt"), sequence_parallel=True)
    with refused("tp-no-stack", "names no blocks"):
        find(decoder(), given={"blocks.*.up": "column", "blocks.*.down": "row"}, sequence_parallel=True)


@pytest.mark.parametrize(
    ("table", "refusal"),
    [
        ({}, ["tp-plan-empty"]),
        ({"block.*.upp": "column"}, ["tp-plan-name", "'block.*.upp'", "did you mean blocks"]),
        ({"embed": "colum"}, ["tp-plan-style", "'embed': 'colum'", "did you mean column"]),
        ({"embed": "xyz"}, ["tp-plan-style", "'xyz'", "column, row, column-gather"]),
        ({"norm": "column"}, ["tp-plan-weight", "norm is a RMSNorm", "'column'"]),
        ({"embed": "vocab unit=2"}, ["tp-plan-option", "'unit'", "'vocab'", "units, parts"]),
        ({"embed": "vocab 2"}, ["tp-plan-words", "'2'"]),
        ({"*.up": "column units=x"}, ["tp-plan-number", "units=x"]),
        ({"*.up": "column parts=7"}, ["parts-fill-dim", "7", "24 features"]),
        ({"*.up": "column parts=8:2+x"}, ["tp-plan-parts", "parts=8:2+x"]),
        ({"*.up": "column parts=8:2+8:2"}, ["parts-fill-dim", "16 features", "24"]),
        ({"*.up": "column units=5"}, ["tp-units-divide", "24 features", "5 units"]),
        ({"*.up": "column units=3"}, ["tp-divides-units", "tp=2", "blocks.0.ffn.up=3", "1, 3"]),
        ({"*.down": "row units=1"}, ["tp-divides-units", "tp=2", "blocks.0.ffn.down=1", "legal: 1"]),
        ({"*.up": "column", "*.ffn": "region"}, ["tp-region-arguments", "'region'"]),
        ({"*.up": "column", "*.ffn": "region y"}, ["tp-plan-argument", "blocks.0.ffn", "'y'", "takes x"]),
        (
            {"*.up": "column", "*.ffn": "region x", "blocks.?": "region x"},
            ["tp-nested-regions", "blocks.0.ffn", "blocks.0,"],
        ),
        ({"*.up": "column", "blocks.*": "stack"}, ["tp-stack-argument", "'stack'"]),
        ({"*.up": "column", "blocks.*": "stack x last=nrm"}, ["tp-plan-name", "'nrm'", "did you mean norm"]),
        ({"*.up": "column", "*.attention": "local heads"}, ["tp-local-attribute", "'heads'"]),
        ({"*.up": "column", "*.ffn": "dropout"}, ["tp-dropout-dim", "'dropout'"]),
    ],
)
def test_bad_tables(table: Mapping[str, str], refusal: list[str]) -> None:
    with refused(*refusal):
        find(decoder(), given=table)


def test_table() -> None:
    table = {
        "*.query": "column units=4",
        "*.key": "colwise",
        "*.value": "colwise",
        "*.out": "row units=4",
        "*.up": "column",
        "*.down": "row",
        "blocks.1.*.up": "replicate",
        "*.attention": ["region x whole=rope", "local head_dim", "functional-dropout dim=1"],
        "norm": "partial",
    }
    plan = find(decoder(), given=table)
    assert [each.module for each in plan.layers if each.module.endswith("up")] == ["blocks.0.ffn.up"]
    assert plan.layers[0].parts == (FusedPart(16, 4),)
    assert plan.regions[0] == SharedInput("blocks.0.attention", ("x",), ("rope",))
    assert plan.attributes[0] == ("blocks.0.attention", "head_dim", 2)
    assert plan.dropouts[0] == SplitDropout("blocks.0.attention", 1, is_functional=True)
    assert plan.partial == ("norm.weight",)


def test_a_given_plan_is_checked() -> None:
    plan = TensorPlan(layers=(LayerSplit("blocks.0.ffn.upp", "column", (FusedPart(24),)),))
    with refused("tp-plan-name", "'blocks.0.ffn.upp'", "did you mean blocks.0.ffn.up"):
        find(decoder(), given=plan)
    right = TensorPlan(layers=(LayerSplit("blocks.0.ffn.up", "column", (FusedPart(24),)),))
    assert find(decoder(), given=right) is right
