"""A plan proposed for a model that has none splits what can be split, leaves the other layers whole, and is proved.

That a proposed plan trains as one process does is shown in `tests/parity/test_unknown_models.py` and `test_zoo.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.refusals import refused
from shardwise.layout.tensor_plan import SharedInput, SplitDropout, TensorPlan
from shardwise.layout.tp_sharding import FusedPart
from shardwise.models import Decoder, DecoderConfig
from shardwise.tensor import propose
from shardwise.tensor.propose import propose_plan
from shardwise.tensor.prove import refute

E, HEADS, SEQ = 16, 4, 6


class Gpt(nn.Module):
    """In the manner of nanoGPT, with a fused projection; `sizes` says where its views take their sizes from."""

    def __init__(self, sizes: str, bias: bool = True) -> None:
        super().__init__()
        self.sizes, self.n_head, self.n_embd = sizes, HEADS, E
        self.head_dim = E // HEADS
        self.norm = nn.LayerNorm(E)
        self.c_attn = nn.Linear(E, 3 * E, bias=bias)
        self.c_proj = nn.Linear(E, E, bias=bias)
        self.attn_dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.c_attn(self.norm(x))
        if self.sizes == "interleaved":
            q, k, v = qkv.view(batch, length, -1, 3 * self.head_dim).chunk(3, -1)
            q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        else:
            split = width if self.sizes == "input" else self.n_embd
            head_dim = width // self.n_head if self.sizes == "input" else self.head_dim
            q, k, v = (
                each.view(batch, length, self.n_head, head_dim).transpose(1, 2) for each in qkv.split(split, dim=2)
            )
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])  # [B, H, S, S]
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        mixed = self.attn_dropout(scores.masked_fill(~mask, -1e9).softmax(-1)) @ v
        mixed = mixed.transpose(1, 2).contiguous()
        return x + self.c_proj(mixed.view(batch, length, width) if self.sizes == "input" else mixed.flatten(2))


class Grouped(nn.Module):
    """Grouped keys and values, repeated; norms over the head; constant numbers of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv, self.repeats = HEADS, 2, 2
        self.q = nn.Linear(E, E)
        self.kv = nn.Linear(E, E)
        self.q_norm = nn.LayerNorm(E // HEADS)
        self.o = nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_norm(self.q(x).view(*x.shape[:2], self.num_heads, -1)).transpose(1, 2)
        k, v = self.kv(x).view(*x.shape[:2], 2, self.num_kv, -1).unbind(2)
        k, v = (each.repeat_interleave(self.repeats, 2).transpose(1, 2) for each in (k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """A gated network; `inside` goes between."""

    def __init__(self, inside: nn.Module | None = None, adds_input: bool = False) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(E, 24), nn.Linear(E, 24), nn.Linear(24, E)
        self.inside = inside or nn.Identity()
        self.adds_input = adds_input

    def forward(self, x: Tensor) -> Tensor:
        out = self.down(self.inside(F.silu(self.gate(x)) * self.up(x)))
        return x + out if self.adds_input else out


class Scale(nn.Module):
    """Products with a parameter of every feature."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(24))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Mixing(nn.Module):
    """Multiplies split features with something computed whole, whose gradient every rank would have a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(E), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        hidden = self.mlp.gate(y) * self.mlp.up(y) * y.mean(-1, keepdim=True)
        return self.mlp.down(hidden)


class Adapted(nn.Module):
    """A layer with an adapter, whose second matrix is whole after a row layer, in no region that the engine takes."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.first, self.second = base, nn.Linear(24, 2), nn.Linear(2, E)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.second(self.first(x))


class Deciding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else x


def styles(plan: TensorPlan) -> dict[str, str]:
    return {layer.module: layer.style for layer in plan.layers}


def inputs() -> Tensor:
    return torch.randn(2, SEQ, E)


class Parallel(nn.Module):
    """Attention and a network that read one tensor in one module, under names that say nothing; 6 heads of 3."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(E, 18), nn.Linear(E, 18), nn.Linear(E, 18), nn.Linear(E, 40)
        self.query, self.gate = nn.Linear(18, E), nn.Linear(40, E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 3)).transpose(1, 2) for each in (self.c, self.a, self.b))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.query(mixed.transpose(1, 2).flatten(2)) + self.gate(F.gelu(self.d(x)))


class Convolved(nn.Module):
    """Mixes positions by a convolution of each feature, whose weight is whole, as Mamba does."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(E, 32), nn.Linear(32, E)
        self.conv = nn.Conv1d(32, 32, 3, padding=1, groups=32)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.conv(self.into(x).transpose(1, 2)).transpose(1, 2)))


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, str], set[str]]] = {
    "fused": (lambda: Gpt("attributes"), {"c_attn": "column", "c_proj": "row"}, {"n_head", "n_embd"}),
    "interleaved": (lambda: Gpt("interleaved"), {"c_attn": "column", "c_proj": "row"}, set()),
    "grouped": (Grouped, {"q": "column", "kv": "column", "o": "row"}, {"num_heads", "num_kv"}),
    "gated": (Mlp, {"gate": "column", "up": "column", "down": "row"}, set()),
    "residual inside": (lambda: Mlp(adds_input=True), {"gate": "column", "up": "column", "down": "row"}, set()),
    "parallel": (
        Parallel,
        {**dict.fromkeys("abcd", "column"), "query": "row", "gate": "row"},
        set(),
    ),
    "deep": (
        lambda: nn.Sequential(*(nn.Linear(E, E) if i % 2 == 0 else nn.GELU() for i in range(9))),
        {"0": "column", "2": "row", "4": "column", "6": "row"},
        set(),
    ),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(E, HEADS, 32, batch_first=True),
        {"linear1": "column", "linear2": "row"},
        set(),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_can_be_split_is_split_and_proved(case: str) -> None:
    make, expected, attributes = CASES[case]
    plan = propose_plan(make(), inputs(), tp=2)
    assert styles(plan) == expected
    assert {attribute for _, attribute, _ in plan.attributes} == attributes
    assert "proved in float64 over tp=2" in plan.notes


@pytest.mark.parametrize("case", CASES)
def test_a_proposal_that_is_changed_by_hand_is_refuted(case: str) -> None:
    model, batch = CASES[case][0](), inputs()
    plan = propose_plan(model, batch, tp=2)
    assert refute(model, plan, batch, 2) == ""
    changed = [
        replace(plan, layers=plan.layers[:place] + plan.layers[place + 1 :]) for place in range(len(plan.layers))
    ]
    changed += [replace(plan, attributes=plan.attributes[1:])] if plan.attributes else []
    changed += [replace(plan, partial=plan.partial[1:])] if plan.partial else []
    for place, layer in enumerate(plan.layers):
        if case in ("fused", "interleaved"):  # other parts are other features on a rank
            size = sum(part.size for part in layer.parts)
            parts = (FusedPart(size),) if len(layer.parts) > 1 else (FusedPart(size // 2),) * 2
            layers = (*plan.layers[:place], replace(layer, parts=parts), *plan.layers[place + 1 :])
            changed.append(replace(plan, layers=layers))
    for wrong in changed:
        try:
            assert refute(model, wrong, batch, 2), wrong
        except (RuntimeError, ValueError, TypeError):  # shapes do not fit
            continue


def test_the_proof_of_the_whole_model_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(propose, "refute", lambda *_: "it differs")
    with refused("tp-nothing-to-split", "it differs"):
        propose_plan(Mlp(), inputs(), tp=2)


def test_dropouts_on_heads_are_found_and_others_are_not() -> None:
    plan = propose_plan(nn.Sequential(Gpt("attributes"), nn.Dropout(0.1), Mlp(nn.Dropout(0.1))), inputs(), tp=2)
    assert plan.dropouts == (SplitDropout("0.attn_dropout", 1), SplitDropout("2.inside", 2))


def test_meta_models_give_the_same_plan() -> None:
    plan = propose_plan(Grouped(), inputs(), tp=2)
    with torch.device("meta"):
        assert propose_plan(Grouped(), torch.empty(2, SEQ, E), tp=2) == plan


def test_regions_are_modules_whose_argument_columns_alone_read() -> None:
    assert propose_plan(nn.Sequential(Mlp()), inputs(), tp=2).regions == (SharedInput("0", ("x",)),)
    assert propose_plan(nn.Sequential(Mlp(adds_input=True)), inputs(), tp=2).regions == ()
    adapted = Mlp()
    adapted.down = Adapted(adapted.down)
    assert propose_plan(nn.Sequential(adapted), inputs(), tp=2).regions == ()
    returns_input = type("Returning", (Mlp,), {"forward": lambda self, x: (Mlp.forward(self, x), x)})
    assert propose_plan(nn.Sequential(nn.Linear(E, E), returns_input()), inputs(), tp=2).regions == ()


@pytest.mark.parametrize(
    ("make", "code", "why"),
    [
        (lambda: Mlp(nn.LayerNorm(24)), "tp-nothing-to-split", "normalized_shape"),
        (lambda: Mlp(Scale()), "tp-nothing-to-split", "must match the size"),
        (lambda: Mlp(nn.Softmax(-1)), "tp-nothing-to-split", "the outputs are off by"),
        (lambda: Gpt("input"), "tp-nothing-to-split", "is invalid for input"),
        (lambda: nn.Sequential(nn.Linear(E, E)), "tp-nothing-to-split", "0 whole"),
        (lambda: nn.Sequential(nn.Conv1d(SEQ, 3, 1), nn.ReLU()), "tp-nothing-to-split", "no linear layers"),
        (Convolved, "tp-nothing-to-split", "into whole"),
        (Mixing, "tp-nothing-to-split", "the gradient of"),
        (Deciding, "tp-value-decisions", "in "),
    ],
)
def test_what_cannot_be_split_is_refused(make: Callable[[], nn.Module], code: str, why: str) -> None:
    with refused(code, why):
        propose_plan(make(), inputs(), tp=2)


def test_degrees_that_do_not_divide_leave_layers_whole() -> None:
    plan = propose_plan(nn.Sequential(Grouped(), Mlp(adds_input=True)), inputs(), tp=4)
    assert styles(plan) == {"1.gate": "column", "1.up": "column", "1.down": "row"}
    assert any(note.startswith("*.q whole: ") for note in plan.notes)
    plan = propose_plan(Parallel(), inputs(), tp=3)
    assert styles(plan) == {**dict.fromkeys("abc", "column"), "query": "row"}
    assert "d whole: tp=3 does not divide it" in plan.notes


def test_parameters_used_on_heads_and_elsewhere_leave_them_whole() -> None:
    assert set(propose_plan(Grouped(), inputs(), tp=2).partial) == {"q_norm.bias", "q_norm.weight"}
    plain = Grouped.forward
    shared = type("Shared", (Grouped,), {"forward": lambda self, x: plain(self, x) * self.q_norm.weight.sum()})()
    with refused("tp-nothing-to-split", "q whole"):
        propose_plan(shared, inputs(), tp=2)


def test_a_search_ends_at_its_bound_and_keeps_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(propose, "MAX_TRIES", 2)
    plan = propose_plan(nn.Sequential(Mlp(adds_input=True), Gpt("attributes")), inputs(), tp=2)
    assert styles(plan) == {"0.gate": "column", "0.up": "column", "0.down": "row"}


def decoder(tie: bool) -> Decoder:
    return Decoder(
        DecoderConfig(
            vocab_size=65, num_layers=2, hidden_size=E, num_heads=4, num_kv_heads=2, head_dim=4, ffn_size=24,
            max_seq_len=32, tie_embeddings=tie,
        )
    )  # fmt: skip


@pytest.mark.parametrize("tie", [False, True])
def test_our_decoder(tie: bool) -> None:
    plan = propose_plan(decoder(tie), torch.randint(0, 65, (2, SEQ)), tp=2)
    assert str(plan).splitlines() == [
        "blocks.*.attention: query, key, value by 16 features -> out",
        "blocks.*.ffn: gate, up by 24 features -> down",
        "embed: vocab by 65 tokens",
        "head: head by 65 tokens",
        "proved in float64 over tp=2",
    ]
    assert plan.regions == tuple(
        region
        for i in range(2)
        for region in (SharedInput(f"blocks.{i}.attention", ("x",)), SharedInput(f"blocks.{i}.ffn", ("x",)))
    )
    assert (plan.partial, plan.attributes, plan.dropouts) == ((), (), ())


def hugging_face(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": E, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 24}
    if name == "GPT2LMHeadModel":
        small = {"n_embd": E, "n_layer": 2, "n_head": HEADS, "bos_token_id": 1, "eos_token_id": 1}
    if name == "Qwen3ForCausalLM":
        small |= {"num_key_value_heads": 2, "head_dim": 4}
    kind = getattr(transformers, name)
    return kind(kind.config_class(vocab_size=64, **small))


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "LlamaForCausalLM",
            [
                "model.layers.*.self_attn: q_proj, k_proj, v_proj by 16 features -> o_proj",
                "model.layers.*.mlp: gate_proj, up_proj by 24 features -> down_proj",
                "model.embed_tokens: vocab by 64 tokens",
                "lm_head: head by 64 tokens",
            ],
        ),
        (
            "GPT2LMHeadModel",
            [
                "transformer.h.*.attn: c_attn by 16 features -> c_proj",
                "transformer.h.*.mlp: c_fc by 64 features -> c_proj",
                "transformer.wte: vocab by 64 tokens",
                "lm_head: head by 64 tokens",
                "transformer.h.*.attn.split_size = 8",
                "transformer.h.*.attn: dropout drawn as of the whole tensor",
            ],
        ),
        (
            "BertForMaskedLM",
            [
                "bert.encoder.layer.*.attention: self.query, self.key, self.value by 16 features -> output.dense",
                "bert.encoder.layer.*: intermediate.dense by 24 features -> output.dense",
                "bert.embeddings.word_embeddings: vocab by 64 tokens",
                "cls.predictions.decoder: head by 64 tokens",
                "bert.encoder.layer.*.attention.self: dropout drawn as of the whole tensor",
                "cls.predictions.transform.dense whole: no other layers fit",
            ],
        ),
        (
            "Qwen3ForCausalLM",
            [
                "model.layers.*.self_attn: q_proj, k_proj, v_proj by 16 features -> o_proj",
                "model.layers.*.mlp: gate_proj, up_proj by 24 features -> down_proj",
                "model.embed_tokens: vocab by 64 tokens",
                "lm_head: head by 64 tokens",
                "model.layers.*.self_attn.k_norm.weight: gradients summed over the ranks",
                "model.layers.*.self_attn.q_norm.weight: gradients summed over the ranks",
            ],
        ),
    ],
)
def test_hugging_face_models_as_if_unknown(name: str, lines: list[str]) -> None:
    torch.manual_seed(0)
    model, batch = hugging_face(name), {"input_ids": torch.randint(0, 64, (2, SEQ))}
    plan = propose_plan(model, batch, tp=2)
    assert str(plan).splitlines() == [*lines, "proved in float64 over tp=2"]
