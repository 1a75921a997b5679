"""Hugging Face models over the `cp` axis: what each rank is given, and that the ranks' losses and gradients sum to one
process's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from harness.huggingface import FAMILIES, VOCAB_SIZE, build_model
from harness.pool import WorkerPool
from harness.refusals import refused
from harness.zoo_cells import case_of
from shardwise.attention.api import block_sparse_attention
from shardwise.attention.block_layout import BlockLayout
from shardwise.attention.cp_hook import DenseVisibility, is_sequence_mask, read_sequence_mask
from shardwise.attention.structures import BigBirdSparsityConfig, FixedSparsityConfig
from shardwise.config.resolve import AttentionConfig
from shardwise.context.huggingface import RankInputs, check_model, is_huggingface, split_inputs
from shardwise.layout.token_ranges import TokenSplit, contiguous, zigzag
from shardwise.models.apply_attention import apply_attention
from shardwise.runtime.float64 import float64_throughout

pytest.importorskip("transformers")
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    MptConfig,
    MptForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from shardwise.attention.huggingface import structure_given, use_sparse_attention, whole_layout

CAUSAL = ("llama", "qwen2", "mistral", "gpt2")
LENGTH = 16
IGNORED = -100


def make_model(family: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    if family in ("roberta", "opt"):
        sizes = {key: value for key, value in FAMILIES["bert"].options.items() if key != "pad_token_id"}
        if family == "roberta":
            return RobertaForMaskedLM(RobertaConfig(**{**sizes, "pad_token_id": 1, **options})).double()
        del sizes["intermediate_size"]
        sizes |= {"ffn_dim": 24, "dropout": 0.0, "word_embed_proj_dim": 16}
        return OPTForCausalLM(OPTConfig(**{**sizes, **options})).double()
    return build_model(family, **options).double()


def make_batch(kind: str) -> dict[str, Any]:
    """Two rows of 16 tokens.

    Args:
        kind: plain, right (padded there), left, few (targets: a contiguous rank has none), positions or ends (packed
            documents of 5 and 11 tokens).
    """
    tokens = torch.randint(4, VOCAB_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    batch: dict[str, Any] = {"input_ids": tokens, "labels": tokens.clone()}
    if kind in ("right", "left"):
        real = torch.arange(LENGTH) < torch.tensor([[LENGTH], [7]])  # [B, S]
        real = real if kind == "right" else real.flip(1)
        batch["attention_mask"] = real.long()
        batch["labels"][~real] = IGNORED
        batch["input_ids"] = tokens.masked_fill(~real, 0)
    if kind == "few":
        batch["labels"][:, 3:] = IGNORED
    if kind in ("positions", "ends"):
        batch |= {"position_ids": torch.cat([torch.arange(5), torch.arange(11)])[None], "use_cache": False}
    if kind == "ends":
        ends = torch.tensor([0, 5, 16, 21, 32], dtype=torch.int32)
        batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 11, "max_length_k": 11}
    return batch


def split_of(lengths: tuple[int, ...]) -> TokenSplit:
    return zigzag(sum(lengths), 2)


def halves_of(lengths: tuple[int, ...]) -> TokenSplit:
    return contiguous(sum(lengths), 2)


def of_all(parts: list[RankInputs], name: str) -> Tensor:
    """An input of both ranks, its tokens where they are in the sequence."""
    places = torch.cat([torch.arange(start, stop) for part in parts for start, stop in part.tokens])
    return torch.cat([part.inputs[name] for part in parts], 1)[:, places.argsort()]


def split_all(model: nn.Module, batch: dict[str, Any], split: Callable[..., TokenSplit] = split_of) -> list[RankInputs]:
    return [split_inputs(model, batch, split, rank) for rank in range(2)]


@given(
    length=st.integers(1, 5).map(lambda each: 4 * each),
    num_samples=st.integers(1, 3),
    is_padded=st.booleans(),
    seed=st.integers(0, 1000),
    split=st.sampled_from([split_of, halves_of]),
)
@settings(deadline=None, max_examples=40)
def test_the_parts_of_all_ranks_are_the_whole(
    length: int, num_samples: int, is_padded: bool, seed: int, split: Callable[..., TokenSplit]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, VOCAB_SIZE, (num_samples, length), generator=generator)
    labels = tokens.masked_fill(torch.rand(tokens.shape, generator=generator) < 0.3, IGNORED)
    labels[0, -1] = 7
    batch = {"input_ids": tokens, "labels": labels, "token_type_ids": tokens % 2, "extra": tokens[..., None].float()}
    if is_padded:
        batch["attention_mask"] = (torch.rand(tokens.shape, generator=generator) < 0.7).long()
    parts = split_all(MODEL, batch, split)
    for name in ("input_ids", "token_type_ids", "extra"):
        assert torch.equal(of_all(parts, name), batch[name])
    assert torch.equal(of_all(parts, "position_ids"), torch.arange(length)[None])
    shifted = of_all(parts, "shift_labels")
    expected = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    has_some = [bool((part.loss_weight or 0) > 0) for part in parts]
    if all(has_some):
        assert torch.equal(shifted, expected)
        assert sum(float(part.loss_weight) for part in parts) == pytest.approx(1.0)
    for part in parts:
        whole = read_sequence_mask(part.inputs["attention_mask"])
        assert whole.lengths == (length,)
        real = torch.ones_like(tokens) if whole.real is None else whole.real.long()
        assert torch.equal(real, batch.get("attention_mask", torch.ones_like(tokens)))


MODEL = build_model("llama")


def test_a_rank_without_targets_has_a_finite_loss_that_weighs_nothing() -> None:
    parts = split_all(MODEL, make_batch("few"), halves_of)
    assert [float(part.loss_weight) for part in parts] == [1.0, 0.0]
    assert (parts[1].inputs["labels"] != IGNORED).sum() == 1


def test_an_encoders_labels_are_not_shifted() -> None:
    batch = make_batch("plain")
    parts = split_all(build_model("bert"), batch)
    assert torch.equal(of_all(parts, "labels"), batch["labels"])
    assert "shift_labels" not in parts[0].inputs


@pytest.mark.parametrize("kind", ["positions", "ends"])
def test_packed_documents_become_numbers_in_the_mask(kind: str) -> None:
    for part in split_all(MODEL, make_batch(kind)):
        mask = part.inputs["attention_mask"]
        assert is_sequence_mask(mask)
        assert mask[:, 0, 0].tolist() == [[1] * 5 + [2] * 11] * 2
        assert read_sequence_mask(mask).lengths == (5, 11)
        assert not any(name.startswith(("cu_seq", "max_length")) for name in part.inputs)


def test_a_model_that_caches_takes_no_positions_for_packing_as_in_one_process() -> None:
    batch = {**make_batch("positions"), "use_cache": True}
    assert read_sequence_mask(split_inputs(MODEL, batch, split_of, 0).inputs["attention_mask"]).lengths == (LENGTH,)


BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "rows packed differently": (
        {"position_ids": torch.stack([torch.arange(16), torch.arange(16) % 8]), "use_cache": False},
        ["cp-packed-rows"],
    ),
    "a mask of pairs": ({"attention_mask": torch.ones(2, 1, 16, 16)}, ["cp-input-by-token", "attention_mask"]),
    "masks by kind of layer": (
        {"attention_mask": {"full_attention": None}},
        ["cp-input-by-token", "attention_mask", "dict"],
    ),
    "labels by sample": ({"labels": torch.ones(2)}, ["cp-input-by-token", "labels"]),
    "positions of three kinds": ({"position_ids": torch.ones(3, 2, 16)}, ["cp-input-by-token", "position_ids"]),
    "a count of items": ({"num_items_in_batch": 3}, ["cp-whole-input", "num_items_in_batch"]),
    "a cache": ({"past_key_values": object()}, ["cp-whole-input", "past_key_values"]),
    "a length that does not divide": (
        {"input_ids": torch.ones(2, 15).long(), "labels": None},
        ["cp-divides-tokens", "15"],
    ),
    "no tokens": ({"input_ids": None}, ["cp-no-input"]),
    "ends of other lengths": ({"cu_seq_lens_q": torch.tensor([0, 16])}, ["cu-seq-lens", "16", "32 tokens"]),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_split_is_refused(name: str) -> None:
    changes, refusal = BAD[name]
    with refused(*refusal):
        split_inputs(MODEL, {**make_batch("plain"), **changes}, split_of, 0)


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = MODEL

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> Any:
        return self.inner(input_ids, position_ids=position_ids)


def test_a_wrapper_that_does_not_pass_the_mask_on_is_refused_by_name() -> None:
    with refused("cp-wrapper-arguments", "Wrapper.forward does not take attention_mask,"):
        split_inputs(Wrapper(), {"input_ids": make_batch("plain")["input_ids"]}, split_of, 0)


def with_convolution() -> nn.Module:
    model = build_model("llama")
    model.model.layers[0].mixer = nn.Conv1d(16, 16, 3)
    return model


SIZES = FAMILIES["bert"].options
REFUSED: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "an encoder with a decoder": (lambda: build_model("t5"), ["cp-encoder-decoder"]),
    "a router's loss": (lambda: build_model("mixtral"), ["cp-router-loss", "output_router_logits=False"]),
    "a state space": (lambda: build_model("mamba"), ["cp-layer-types", "linear_attention"]),
    "a convolution": (lambda: with_convolution(), ["cp-token-mixer", "Conv1d"]),
    "a pooled encoder": (lambda: BertModel(BertConfig(**SIZES)), ["cp-pooler", "add_pooling_layer=False"]),
    "a head of sequences": (
        lambda: LlamaForSequenceClassification(LlamaConfig(**FAMILIES["llama"].options)),
        ["cp-head-of-tokens"],
    ),
    "images": (lambda: build_model("vit"), ["cp-token-mixer", "Conv2d"]),
    "biases by distance, and a config of its attention": (
        lambda: MptForCausalLM(MptConfig(d_model=32, n_heads=4, n_layers=1, vocab_size=64)),
        ["cp-no-positions", "position_ids"],
    ),
    "towers": (lambda: case_of("llava", {}).build(torch.float32), ["cp-nested-models"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_mix_tokens_otherwise_are_refused(name: str) -> None:
    make, refusal = REFUSED[name]
    with refused(*refusal):
        check_model(make())


@pytest.mark.parametrize("family", [*CAUSAL, "bert", "albert", "roberta", "opt"])
def test_models_whose_tokens_meet_in_attention_alone_are_taken(family: str) -> None:
    model = make_model(family)
    assert is_huggingface(nn.Sequential(model))
    check_model(nn.Sequential(model))
    assert not is_huggingface(nn.Linear(1, 1))


class Gathered(torch.autograd.Function):
    """A tensor's tokens from all ranks; gradients are summed over them."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, places: Tensor) -> Tensor:
        ctx.places = places
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.contiguous())
        whole = torch.cat(parts, 2)
        return torch.empty_like(whole).index_copy(2, places, whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        grad = grad.contiguous()
        dist.all_reduce(grad)
        share = len(ctx.places) // dist.get_world_size()
        first = dist.get_rank() * share
        return grad[:, :, ctx.places[first : first + share]], None


@dataclass
class GatherAll:
    """Attention over ranks, each computing all of it: no transport, but the arguments that one would get."""

    split_of: Callable[..., TokenSplit]
    num_calls: int = 0

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, *, lengths: tuple[int, ...], **options: Any
    ) -> Tensor:
        self.num_calls += 1
        runs = self.split_of(lengths).shares
        places = torch.cat([torch.arange(start, stop) for share in runs for start, stop in share])
        whole = [Gathered.apply(each, places) for each in (q, k, v)]
        out = block_sparse_attention(*whole, layout, **options)
        share = q.shape[2]
        return out[:, :, places[dist.get_rank() * share :][:share]]


STRUCTURES: dict[str, Callable[[bool], Any]] = {
    "dense": DenseVisibility,
    "fixed": lambda is_causal: FixedSparsityConfig(
        4, 2, num_local_blocks=2, attention="unidirectional" if is_causal else "bidirectional"
    ),
    "bigbird": lambda is_causal: BigBirdSparsityConfig(
        4, 2, different_layout_per_head=True, attention="unidirectional" if is_causal else "bidirectional"
    ),
}
Found = tuple[float, dict[str, Tensor]]


def run(model: nn.Module, inputs: dict[str, Any], weight: Tensor | None = None) -> Found:
    model.zero_grad()
    loss = model(**inputs).loss
    loss = loss if weight is None else loss * weight.to(loss.dtype)
    loss.backward()
    return loss.item(), {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def train(
    rank: int, world_size: int, family: str, kinds: list[tuple[str, str]], options: dict[str, Any]
) -> list[Found]:
    found = []
    model = make_model(family, **options)
    with float64_throughout():
        for kind, structure in kinds:
            split = halves_of if kind == "few" else split_of
            spread = GatherAll(split)
            given = split_inputs(model, make_batch(kind), split, rank)
            with use_sparse_attention(model, STRUCTURES[structure](family in (*CAUSAL, "opt")), spread=spread):
                found.append(run(model, given.inputs, given.loss_weight))
            assert spread.num_calls >= model.config.num_hidden_layers
    return found


def expect(family: str, kind: str, structure: str, options: dict[str, Any]) -> Found:
    """One process's, of its own attention where it is dense."""
    model, batch = make_model(family, **options), make_batch(kind)
    with float64_throughout():
        if structure == "dense" and kind != "ends":  # which the model's own attention leaves out
            return run(model, batch)
        with use_sparse_attention(model, STRUCTURES[structure](family in (*CAUSAL, "opt"))):
            return run(model, batch)


def check(ranks: WorkerPool, family: str, kinds: list[tuple[str, str]], options: dict[str, Any] | None = None) -> None:
    options = options or {}
    traces = ranks(2).run(train, family, kinds, options)
    for (kind, structure), (loss, gradients), (other_loss, other_gradients) in zip(kinds, *traces, strict=True):
        expected_loss, expected = expect(family, kind, structure, options)
        assert loss + other_loss == pytest.approx(expected_loss, rel=1e-11), (kind, structure)
        assert gradients.keys() == expected.keys()
        most = max(float(each.abs().max()) for each in expected.values())
        for name, each in expected.items():
            found = gradients[name] + other_gradients[name]
            torch.testing.assert_close(found, each, rtol=1e-9, atol=1e-10 * most, msg=f"{kind} {structure} {name}")


@pytest.mark.quick(2)
@pytest.mark.parametrize("family", [*CAUSAL, "bert", "opt", "roberta"])
def test_losses_and_gradients_sum_to_one_process(ranks: WorkerPool, family: str) -> None:
    kinds = [(kind, "dense") for kind in ("plain", "right", "left", "few", "positions")]
    kinds += [("right", "fixed"), ("plain", "bigbird"), ("ends", "dense")]
    check(ranks, family, kinds)


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_the_models_own_checkpointing_keeps_the_mask(ranks: WorkerPool, checkpointing: str) -> None:
    check(ranks, "llama", [("right", "dense"), ("positions", "fixed")], {"checkpointing": checkpointing})


@dataclass
class Recorded:
    """Attention that keeps its arguments, and has all tokens here."""

    options: list[dict[str, Any]]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, **options: Any) -> Tensor:
        self.options.append({"layout": layout, **options})
        return block_sparse_attention(q, k, v, layout)


def alone(lengths: tuple[int, ...]) -> TokenSplit:
    return contiguous(sum(lengths), 1)


def test_dropout_scale_and_layout_are_handed_on() -> None:
    model, recorded = make_model("llama", attention_dropout=0.25).train(), Recorded([])
    with use_sparse_attention(model, STRUCTURES["bigbird"](True), spread=recorded):
        model(**split_inputs(model, make_batch("right"), alone, 0).inputs)
        whole = whole_layout(model, (LENGTH,))
    assert len(recorded.options) == model.config.num_hidden_layers
    for options in recorded.options:
        assert options["dropout"] == 0.25
        assert options["scale"] == pytest.approx(0.5)
        assert options["lengths"] == (LENGTH,)
        assert options["key_padding"].sum(1).tolist() == [LENGTH, 7]
        assert torch.equal(options["layout"].allowed(), whole.allowed())
    assert len({id(options["layout"]) for options in recorded.options}) == 1


def test_a_dense_section_keeps_a_structure_that_the_model_was_given() -> None:
    model, recorded, section = make_model("llama"), Recorded([]), AttentionConfig()
    structure = STRUCTURES["fixed"](True)
    with use_sparse_attention(model, structure):
        undo = apply_attention(model, section, recorded)
        assert structure_given(model) is structure
        model(**split_inputs(model, make_batch("plain"), alone, 0).inputs)
        assert recorded.options
        undo.pop()()
        assert structure_given(model) is structure
    for undo_one in apply_attention(model, section, recorded):
        assert structure_given(model) == DenseVisibility(is_causal=True)
        undo_one()
    assert structure_given(model) is None


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_generation_of_whole_sequences_is_the_models_own(family: str) -> None:
    model, recorded = make_model(family).eval(), Recorded([])
    batch = {name: make_batch("left")[name] for name in ("input_ids", "attention_mask")}
    with float64_throughout():
        expected = model.generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        apply_attention(model, AttentionConfig(), recorded)
        assert torch.equal(model.generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=False), expected)
    assert not recorded.options


def test_a_window_of_the_models_own_is_refused() -> None:
    model = make_model("mistral", sliding_window=8)
    inputs = split_inputs(model, make_batch("plain"), alone, 0).inputs
    with (
        use_sparse_attention(model, DenseVisibility(is_causal=True), spread=Recorded([])),
        refused("sliding-window", "16 keys"),
    ):
        model(**inputs)


def test_copies_compute_the_same_and_pickles_forget_the_ranks() -> None:
    model, recorded = make_model("llama"), Recorded([])
    inputs = split_inputs(model, make_batch("plain"), alone, 0).inputs
    with use_sparse_attention(model, DenseVisibility(is_causal=True), spread=recorded):
        copy.deepcopy(model)(**inputs)
        assert recorded.options
        unpickled = pickle.loads(pickle.dumps(model))
    with refused("mask-dims"):
        unpickled(**inputs)
