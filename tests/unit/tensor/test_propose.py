"""A plan proposed for a model that has none is right, or leaves layers whole and says why.

Right means: ranks with the local parameters and attributes that the plan says, in threads that sum what rows give and
gather what heads give, compute what one process computes, and their parameters get the same gradients.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.refusals import refused
from shardwise.layout.tensor_plan import LayerSplit, SharedInput, TensorPlan
from shardwise.layout.tp_sharding import ParamSplit
from shardwise.models import Decoder, DecoderConfig
from shardwise.tensor.autoplan import propose
from shardwise.tensor.autoplan.propose import propose_plan

E, HEADS, SEQ = 16, 4, 6


class Ranks:
    """Threads that meet, in forward and in backward."""

    def __init__(self, degree: int) -> None:
        self.barrier = threading.Barrier(degree, timeout=100)
        self.slots: list[Tensor] = [torch.zeros(0)] * degree

    def all(self, rank: int, value: Tensor) -> list[Tensor]:
        self.slots[rank] = value
        self.barrier.wait()
        values = list(self.slots)
        self.barrier.wait()
        return values


class Enter(torch.autograd.Function):
    """The identity, whose backward sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, rank: int) -> Tensor:
        ctx.place = (ranks, rank)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ranks, rank = ctx.place
        return sum(ranks.all(rank, grad)), None, None


class Leave(torch.autograd.Function):
    """The sum over the ranks, whose backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, rank: int) -> Tensor:
        return sum(ranks.all(rank, x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None


def split_of(layer: LayerSplit, key: str, shape: torch.Size, degree: int) -> ParamSplit:
    is_output = layer.style in ("column", "head", "vocab")
    if key == "bias" and not is_output:
        return ParamSplit(tuple(shape), degree)
    dim = 0 if key == "bias" or is_output != layer.is_transposed else 1
    return ParamSplit(tuple(shape), degree, dim, layer.parts)


def pick(split: ParamSplit, whole: Tensor, rank: int) -> Tensor:
    local = torch.zeros(split.local_shape, dtype=whole.dtype)
    for share in split.shares(rank):
        target = tuple(slice(*pair) for pair in zip(share.target.start, share.target.stop, strict=True))
        source = tuple(slice(*pair) for pair in zip(share.source.start, share.source.stop, strict=True))
        local[target] = whole[source]
    return local


def wrap(module: nn.Module, layer: LayerSplit, ranks: Ranks, rank: int, num_values: int) -> None:
    """Let one layer of a rank's copy do its part; gradients stay the rank's own and are summed by the test."""
    inner = module.forward

    def product(x: Tensor) -> Tensor:
        return x @ module.weight if layer.is_transposed else F.linear(x, module.weight)

    def forward(x: Tensor) -> Tensor:
        bias = 0 if getattr(module, "bias", None) is None else module.bias
        if layer.style == "row":
            return Leave.apply(product(x), ranks, rank) + bias
        size = -(-num_values // len(ranks.slots))
        if layer.style == "vocab":
            mine = (x >= rank * size) & (x < (rank + 1) * size)  # [B, S]
            return Leave.apply(inner((x - rank * size).where(mine, 0)) * mine.unsqueeze(-1), ranks, rank)
        out = product(Enter.apply(x, ranks, rank)) + bias
        if layer.style == "column":
            return out
        parts = [F.pad(out, (index * size, (len(ranks.slots) - 1 - index) * size)) for index in [rank]]
        return Leave.apply(parts[0], ranks, rank)[..., :num_values]

    module.forward = forward


def run_split(model: nn.Module, plan: TensorPlan, batch: Any, degree: int) -> tuple[list[Tensor], list[nn.Module]]:
    """Run forward and backward on all ranks, in threads."""
    ranks = Ranks(degree)
    copies = []
    for rank in range(degree):
        local = copy.deepcopy(model)
        local.zero_grad()
        made: dict[Tensor, nn.Parameter] = {}  # ties stay
        for layer in plan.layers:
            module, whole = local.get_submodule(layer.module), model.get_submodule(layer.module)
            for key, value in whole.named_parameters(recurse=False):
                split = split_of(layer, key, value.shape, degree)
                if value not in made:
                    made[value] = nn.Parameter(pick(split, value.detach(), rank))
                setattr(module, key, made[value])
            wrap(module, layer, ranks, rank, sum(part.size for part in layer.parts))
        for name, attribute, number in plan.attributes:
            setattr(local.get_submodule(name), attribute, number)
        copies.append(local)

    def work(rank: int) -> Tensor:
        try:
            output = call(copies[rank], batch)
            output.square().sum().backward()
            return output.detach()
        except BaseException:
            ranks.barrier.abort()
            raise

    with ThreadPoolExecutor(degree) as pool:
        return list(pool.map(work, range(degree))), copies


def call(model: nn.Module, batch: Any) -> Tensor:
    output = model(**batch) if isinstance(batch, dict) else model(batch)
    return output if isinstance(output, Tensor) else output.logits


def assert_right(model: nn.Module, plan: TensorPlan, batch: Any, degree: int) -> None:
    """Outputs and gradients of every rank are one process's, or the share of them that the plan says."""
    model = model.double().eval()
    if isinstance(batch, Tensor) and batch.is_floating_point():
        batch = batch.double()
    expected = call(model, batch)
    expected.square().sum().backward()
    outputs, copies = run_split(model, plan, batch, degree)
    for output in outputs:
        torch.testing.assert_close(output, expected.detach())
    layers = {layer.module: layer for layer in plan.layers}
    tied = {each for name in layers for each in model.get_submodule(name).parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, key = name.rpartition(".")
        if parameter.grad is None or (parameter in tied and owner not in layers):
            continue  # not used, or another name of what a split layer has
        grads = [each.get_parameter(name).grad for each in copies]
        if name in plan.partial:
            grads = [sum(grads)]
        for rank, grad in enumerate(grads):
            share = parameter.grad
            if owner in layers:
                share = pick(split_of(layers[owner], key, parameter.shape, degree), share, rank)
            torch.testing.assert_close(grad, share, msg=lambda text, name=name: f"{name}: {text}")


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


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, str], set[str]]] = {
    "fused": (lambda: Gpt("attributes"), {"c_attn": "column", "c_proj": "row"}, {"n_head", "n_embd"}),
    "interleaved": (lambda: Gpt("interleaved"), {"c_attn": "column", "c_proj": "row"}, set()),
    "grouped": (
        Grouped,
        {"q": "column", "kv": "column", "o": "row"},
        {"num_heads", "num_kv"},
    ),
    "gated": (Mlp, {"gate": "column", "up": "column", "down": "row"}, set()),
    "residual inside": (lambda: Mlp(adds_input=True), {"gate": "column", "up": "column", "down": "row"}, set()),
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
def test_ranks_compute_what_one_process_computes(case: str) -> None:
    torch.manual_seed(0)
    make, expected, attributes = CASES[case]
    model, batch = make(), inputs()
    plan = propose_plan(model, batch, tp=2)
    assert styles(plan) == expected
    assert {attribute for _, attribute, _ in plan.attributes} == attributes
    assert_right(model, plan, batch, 2)


def test_meta_models_give_the_same_plan() -> None:
    plan = propose_plan(Mlp(), inputs(), tp=2)
    with torch.device("meta"):
        assert propose_plan(Mlp(), torch.empty(2, SEQ, E), tp=2) == replace(plan, notes=plan.notes[:-1])


def test_regions_are_modules_whose_argument_columns_alone_read() -> None:
    assert propose_plan(nn.Sequential(Mlp()), inputs(), tp=2).regions == (SharedInput("0", ("x",)),)
    assert propose_plan(nn.Sequential(Mlp(adds_input=True)), inputs(), tp=2).regions == ()
    returns_input = type("Returning", (Mlp,), {"forward": lambda self, x: (Mlp.forward(self, x), x)})
    assert propose_plan(nn.Sequential(returns_input()), inputs(), tp=2).regions == ()


@pytest.mark.parametrize(
    ("make", "code", "why"),
    [
        (lambda: Mlp(nn.LayerNorm(24)), "tp-nothing-to-split", "mixed with all others"),
        (lambda: Mlp(Scale()), "tp-nothing-to-split", "mixed with all others"),
        (lambda: Mlp(nn.Softmax(-1)), "tp-nothing-to-split", "mixed with all others"),
        (lambda: Gpt("input"), "tp-nothing-to-split", "on a rank's share"),
        (lambda: nn.Sequential(nn.Linear(E, E)), "tp-nothing-to-split", "the model returns"),
        (lambda: nn.Sequential(nn.Conv1d(SEQ, 3, 1), nn.ReLU()), "tp-nothing-to-split", "no linear layers"),
        (Mixing, "tp-nothing-to-split", "joins it with"),
        (Deciding, "tp-value-decisions", "in "),
    ],
)
def test_what_cannot_be_split_is_refused(make: Callable[[], nn.Module], code: str, why: str) -> None:
    with refused(code, why):
        propose_plan(make(), inputs(), tp=2)


def test_degrees_that_do_not_divide_leave_layers_whole() -> None:
    model = nn.Sequential(Grouped(), Mlp(adds_input=True))
    plan = propose_plan(model, inputs(), tp=4)
    assert styles(plan) == {"1.gate": "column", "1.up": "column", "1.down": "row"}
    assert "*.q whole: tp=4 does not divide its 2 units" in plan.notes


def test_parameters_used_on_heads_and_elsewhere_leave_them_whole() -> None:
    model = Grouped()
    assert propose_plan(model, inputs(), tp=2).partial == ("q_norm.bias", "q_norm.weight")
    plain = Grouped.forward
    shared = type("Shared", (Grouped,), {"forward": lambda self, x: plain(self, x) * self.q_norm.weight.sum()})()
    with refused("tp-nothing-to-split", "used elsewhere"):
        propose_plan(shared, inputs(), tp=2)


@pytest.mark.parametrize("limit", [0, 20])
def test_a_search_for_attributes_ends_at_its_bound_and_says_so(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(propose, "MAX_FAILED_OPS", limit)
    with refused("tp-nothing-to-split", "rank's share, ", "the time to look for attributes") as caught:
        propose_plan(Gpt("attributes"), inputs(), tp=2)
    assert ", ," not in str(caught.value)
    assert styles(propose_plan(Mlp(), inputs(), tp=2)) == {"gate": "column", "up": "column", "down": "row"}


def test_what_was_found_before_the_bound_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(Mlp(adds_input=True), Gpt("attributes"))
    monkeypatch.setattr(propose, "MAX_FAILED_OPS", 50)
    plan = propose_plan(model, inputs(), tp=2)
    assert styles(plan) == {"0.gate": "column", "0.up": "column", "0.down": "row"}
    (note,) = (each for each in plan.notes if "the time to look for attributes" in each)
    assert note.startswith("*.c_attn whole")


def decoder(tie: bool) -> Decoder:
    return Decoder(
        DecoderConfig(
            vocab_size=65, num_layers=2, hidden_size=E, num_heads=4, num_kv_heads=2, head_dim=4, ffn_size=24,
            max_seq_len=32, tie_embeddings=tie,
        )
    )  # fmt: skip


@pytest.mark.parametrize("tie", [False, True])
def test_our_decoder(tie: bool) -> None:
    torch.manual_seed(0)
    model, tokens = decoder(tie), torch.randint(0, 65, (2, SEQ))
    plan = propose_plan(model, tokens, tp=2)
    assert str(plan).splitlines() == [
        "blocks.*.attention: query, key, value by 2 heads -> out",
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
    assert_right(model, plan, tokens, 2)


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
                "model.layers.*.self_attn: q_proj, k_proj, v_proj by 4 heads -> o_proj",
                "model.layers.*.mlp: gate_proj, up_proj by 24 features -> down_proj",
                "model.embed_tokens: vocab by 64 tokens",
                "lm_head: head by 64 tokens",
            ],
        ),
        (
            "GPT2LMHeadModel",
            [
                "transformer.h.*.attn: c_attn by 4 heads -> c_proj",
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
                "bert.encoder.layer.*.attention: self.query, self.key, self.value by 4 heads -> output.dense",
                "bert.encoder.layer.*: intermediate.dense by 24 features -> output.dense",
                "bert.embeddings.word_embeddings: vocab by 64 tokens",
                "cls.predictions.decoder: head by 64 tokens",
                "bert.encoder.layer.*.attention.self: dropout drawn as of the whole tensor",
                "cls.predictions.transform.dense whole: cls.predictions.decoder reads it whole",
            ],
        ),
        (
            "Qwen3ForCausalLM",
            [
                "model.layers.*.self_attn: q_proj, k_proj, v_proj by 2 heads -> o_proj",
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
    assert_right(model, plan, batch, 2)
