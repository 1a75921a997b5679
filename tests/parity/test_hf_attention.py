"""Hugging Face models, unchanged, with block-sparse attention, against their own with the layout as a mask."""

from __future__ import annotations

import copy
import functools
import io
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.huggingface import FAMILIES, VOCAB_SIZE, build_model
from harness.models import ModelCase
from harness.pool import WorkerPool
from harness.reference import Trace, check_parity, train_reference
from harness.refusals import refused
from harness.training import make_config, make_optimizer, merge_ranks, reference_of, train_case
from harness.zoo_cells import case_of
from shardwise import initialize
from shardwise.attention.backends import BackendPlan
from shardwise.attention.block_layout import BlockLayout, pack
from shardwise.attention.cpu import CpuBackend
from shardwise.attention.structures import LocalSlidingWindowSparsityConfig
from shardwise.runtime.float64 import float64_throughout

pytest.importorskip("transformers")
from transformers import AttentionInterface, AttentionMaskInterface

from shardwise.attention.huggingface import NAME, use_sparse_attention

CAUSAL = ("llama", "gpt2", "mistral", "qwen2")
LENGTH = 13


@dataclass(frozen=True)
class Windows:
    """Each head sees one block more to the left than the head before; the same at all lengths."""

    block: int = 4
    num_heads: int = 4
    causal: bool = False

    def layout(self, seq_len: int) -> BlockLayout:
        index = torch.arange(-(-seq_len // self.block))
        distance = index[:, None] - index  # [num_blocks, num_blocks]
        heads = [(distance <= head) & (distance >= -1) for head in range(self.num_heads)]
        return BlockLayout.from_blocks(torch.stack(heads), self.block, causal=self.causal, num_tokens=seq_len)

    def layout_of_documents(self, lengths: Any) -> BlockLayout:
        return pack([self.layout(length) for length in lengths])


class Dense(Windows):
    def layout(self, seq_len: int) -> BlockLayout:
        num_blocks = -(-seq_len // self.block)
        return BlockLayout.from_blocks(torch.ones(num_blocks, num_blocks), self.block, num_tokens=seq_len)


def make_model(family: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    if family == "roberta":
        from transformers import RobertaConfig, RobertaForMaskedLM

        sizes = {key: value for key, value in FAMILIES["bert"].options.items() if key != "pad_token_id"}
        model = RobertaForMaskedLM(RobertaConfig(**{**sizes, "pad_token_id": 1, **options}))
    else:
        model = build_model(family, **options)
    return model.double().eval()


def make_batch(family: str, num_samples: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, VOCAB_SIZE, (num_samples, LENGTH), generator=generator)
    lengths = torch.tensor([LENGTH, 6, 9, 1][:num_samples])
    return {"input_ids": tokens, "attention_mask": (torch.arange(LENGTH) < lengths[:, None]).long()}


def as_mask(structure: Windows, batch: dict[str, Tensor], is_causal: bool) -> Tensor:
    """What a sparse model's tokens see, additive [B, H, N, N], for the model's own attention."""
    allowed = structure.layout(LENGTH).allowed() & batch["attention_mask"].bool()[:, None, None, :]
    if is_causal:
        allowed = allowed & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, torch.finfo(torch.float64).min)


def run(model: nn.Module, batch: dict[str, Any], real: Tensor | None = None) -> dict[str, Tensor]:
    """Outputs of real tokens and the gradients of their sum of squares."""
    model.zero_grad()
    with float64_throughout():
        logits = model(**batch).logits  # [B, N, V]
    real = batch["attention_mask"].bool() if real is None else real
    logits[real].square().mean().backward()
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {"logits": logits[real].detach(), **found}


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    most = max(float(each.abs().max()) for each in expected.values())
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-10 * most, msg=name)


@pytest.mark.parametrize("family", [*CAUSAL, "bert", "roberta"])
def test_sparse_equals_the_models_own_attention_with_the_layout_as_a_mask(family: str) -> None:
    model, batch = make_model(family, attn_implementation="eager"), make_batch(family)
    # Rows of padding see nothing, where softmax over nothing differs; they are not compared, nor seen.
    own = run(model, {**batch, "attention_mask": as_mask(Windows(), batch, family in CAUSAL)}, real_of(batch))
    plain = run(model, batch)
    with use_sparse_attention(model, Windows()):
        found = run(model, batch)
    check_equal(found, own)
    assert not torch.allclose(found["logits"], plain["logits"])


def real_of(batch: dict[str, Tensor]) -> Tensor:
    return batch["attention_mask"].bool()


@pytest.mark.parametrize("own", ["eager", "sdpa"])
@pytest.mark.parametrize("family", [*CAUSAL, "bert", "roberta"])
def test_a_dense_layout_equals_the_models_own_attention(family: str, own: str) -> None:
    model, batch = make_model(family, attn_implementation=own), make_batch(family)
    expected = run(model, batch)
    with use_sparse_attention(model, Dense()):
        assert model.config._attn_implementation == NAME
        found = run(model, batch)
    check_equal(found, expected)
    assert model.config._attn_implementation == own
    check_equal(run(model, batch), expected)


@pytest.mark.parametrize("family", [*CAUSAL, "bert"])
def test_padded_and_unpadded_batches_agree(family: str) -> None:
    model, batch = make_model(family), make_batch(family)
    with use_sparse_attention(model, Windows()), float64_throughout(), torch.no_grad():
        padded = model(**batch).logits
        for row, mask in enumerate(batch["attention_mask"].bool()):
            alone = model(input_ids=batch["input_ids"][row : row + 1, mask]).logits
            torch.testing.assert_close(padded[row : row + 1, mask], alone)


@pytest.mark.parametrize("family", [*CAUSAL, "bert"])
def test_padding_on_the_left_is_not_seen_either(family: str) -> None:
    """With a dense layout, as blocks count from the row's first token: padding there moves them."""
    model, batch = make_model(family), make_batch(family)
    tokens, mask = batch["input_ids"], batch["attention_mask"].flip(1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # [B, N]
    with use_sparse_attention(model, Dense()), float64_throughout(), torch.no_grad():
        padded = model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits
        for row, real in enumerate(mask.bool()):
            alone = model(input_ids=tokens[row : row + 1, real]).logits
            torch.testing.assert_close(padded[row : row + 1, real], alone)


@pytest.mark.parametrize("family", CAUSAL)
def test_causal_models_never_leak(family: str) -> None:
    """Under a structure that looks both ways too."""
    model, tokens = make_model(family), make_batch(family, 1)["input_ids"]
    others = tokens.clone()
    others[:, 6:] = (others[:, 6:] + 1) % VOCAB_SIZE
    with use_sparse_attention(model, Windows()), torch.no_grad():
        before, after = (model(input_ids=each).logits for each in (tokens, others))
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before[:, 6:], after[:, 6:])


def test_encoder_decoder_models_keep_cross_attention_dense() -> None:
    model = make_model("t5")
    batch = FAMILIES["t5"].batch(1, 2, torch.float64)
    with float64_throughout():
        expected = model(**batch).loss
        with use_sparse_attention(model, Dense()):
            torch.testing.assert_close(model(**batch).loss, expected)
        with use_sparse_attention(model, Windows(block=1)):
            assert not torch.allclose(model(**batch).loss, expected)


def test_both_registries_know_the_name() -> None:
    with use_sparse_attention(make_model("bert"), Windows(), name="of_a_test"):
        assert "of_a_test" in AttentionInterface()
        assert "of_a_test" in AttentionMaskInterface()


def test_models_with_different_structures_live_side_by_side() -> None:
    batch = make_batch("bert")
    first, second = make_model("bert"), make_model("bert")
    alone = []
    for structure in (Windows(), Windows(block=2)):
        with use_sparse_attention(first, structure):
            alone.append(run(first, batch))
    with use_sparse_attention(first, Windows()), use_sparse_attention(second, Windows(block=2)):
        check_equal(run(second, batch), alone[1])
        check_equal(run(first, batch), alone[0])
    assert not torch.allclose(alone[0]["logits"], alone[1]["logits"])


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_keeps_the_structure_when_the_model_gives_it_back(how: str) -> None:
    model, batch = make_model("gpt2"), make_batch("gpt2")
    used = use_sparse_attention(model, Windows())
    expected = run(model, batch)
    if how == "deepcopy":
        copied = copy.deepcopy(model)
    else:
        torch.save(model, buffer := io.BytesIO())
        buffer.seek(0)
        copied = torch.load(buffer, weights_only=False)
    used.undo()
    used.undo()
    check_equal(run(copied, batch), expected)
    assert not torch.allclose(run(model, batch)["logits"], expected["logits"])


def test_a_saved_model_is_a_plain_one(tmp_path: Path) -> None:
    model, batch = make_model("llama"), make_batch("llama")
    expected = run(model, batch)
    with use_sparse_attention(model, Windows()):
        model.save_pretrained(tmp_path)
    assert "shardwise" not in (tmp_path / "config.json").read_text()
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert loaded.config._attn_implementation != NAME
    check_equal(run(loaded, batch), expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_generation_with_a_cache_equals_that_without(family: str, cache: str) -> None:
    model, batch = make_model(family), make_batch(family)
    flipped = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"].flip(1)}  # padding is left
    options = {"max_new_tokens": 9, "do_sample": False, "min_new_tokens": 9, "output_logits": True}
    with use_sparse_attention(model, Windows()), float64_throughout():
        made = [
            model.generate(**flipped, **options, **each, return_dict_in_generate=True)
            for each in ({"use_cache": False}, {"cache_implementation": cache})
        ]
    assert torch.equal(made[0].sequences, made[1].sequences)
    for without, cached in zip(made[0].logits, made[1].logits, strict=True):
        torch.testing.assert_close(cached, without)


def test_generation_plans_once_a_length_and_keeps_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many layers there are, and whether or not the structure keeps its layouts."""
    plans: list[weakref.ref[Tensor]] = []
    plain = CpuBackend.plan

    def plan(backend: CpuBackend, layout: BlockLayout, q: Tensor, k: Tensor) -> BackendPlan:
        made = plain(backend, layout, q, k)
        plans.append(weakref.ref(made.tensors[0]))
        return made

    monkeypatch.setattr(CpuBackend, "plan", plan)
    model, tokens = make_model("llama", max_position_embeddings=256), make_batch("llama")["input_ids"]
    assert len(model.model.layers) > 1
    structures = (Windows(block=64), 200), (LocalSlidingWindowSparsityConfig(4, 64, 3, "unidirectional"), 20)
    for structure, length in structures:
        plans.clear()
        with use_sparse_attention(model, structure):
            model.generate(input_ids=tokens[:1], max_new_tokens=length, min_new_tokens=length, do_sample=False)
            assert len(plans) == length
            assert sum(plan() is not None for plan in plans) <= 8


@pytest.mark.parametrize("given_by", ["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_packed_documents_equal_documents_alone(family: str, given_by: str) -> None:
    model, rows = make_model(family), [[6, 7], [13]] if given_by == "position_ids" else [[5, 8]]
    tokens = make_batch(family)["input_ids"][: len(rows)]
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])  # [B, N]
    options: dict[str, Any] = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
    if given_by == "cu_seq_lens":
        ends = torch.tensor([0, 5, 13], dtype=torch.int32)
        options |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 8, "max_length_k": 8}
    with use_sparse_attention(model, Windows()), float64_throughout(), torch.no_grad():
        packed = model(**options).logits
        for row, lengths in enumerate(rows):
            parts = zip(tokens[row].split(lengths), packed[row].split(lengths), strict=True)
            for document, logits in parts:
                torch.testing.assert_close(model(input_ids=document[None]).logits[0], logits)


def test_dropout_acts_in_training_alone() -> None:
    model, batch = make_model("llama", attention_dropout=0.5), make_batch("llama")
    with use_sparse_attention(model, Windows()), float64_throughout(), torch.no_grad():
        evaluated = model(**batch).logits
        assert torch.equal(model(**batch).logits, evaluated)
        model.train()
        torch.manual_seed(3)
        dropped = model(**batch).logits
        torch.manual_seed(3)
        assert torch.equal(model(**batch).logits, dropped)
        assert not torch.allclose(dropped, evaluated)


def test_a_layout_of_its_own_length_serves_shorter_sequences() -> None:
    model, batch = make_model("bert"), make_batch("bert")
    with use_sparse_attention(model, Windows()):
        expected = run(model, batch)
    with use_sparse_attention(model, Windows().layout(29)):
        check_equal(run(model, batch), expected)
    with use_sparse_attention(model, Windows().layout(12)), refused("layout-length", "(12,)"):
        run(model, batch)


REFUSED: dict[str, tuple[str, dict[str, Any], Windows, Callable[[dict[str, Tensor]], dict[str, Any]], list[str]]] = {
    "a causal structure in BERT": ("bert", {}, Windows(causal=True), lambda batch: batch, ["structure-looks-back"]),
    "a window": (
        "mistral",
        {"sliding_window": 5},
        Windows(),
        lambda batch: batch,
        ["sliding-window", "sliding_window=5"],
    ),
    "a 4-D mask": (
        "llama",
        {},
        Windows(),
        lambda batch: {**batch, "attention_mask": as_mask(Windows(), batch, True)},
        ["mask-dims"],
    ),
    "other heads": ("llama", {}, Windows(num_heads=3), lambda batch: batch, ["layout-heads", "3 heads"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused(case: str) -> None:
    family, options, structure, change, refusal = REFUSED[case]
    model, batch = make_model(family, **options), make_batch(family)
    with use_sparse_attention(model, structure), refused(*refusal):
        run(model, change(batch), real_of(batch))


# Models that build a window into their mask and tell their attention nothing of it.
IN_MASK: dict[str, tuple[str, dict[str, Any]]] = {
    "in every layer": ("phimoe", {}),
    "in one layer": ("qwen2_moe", {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}),
}


def zoo_model(name: str, options: dict[str, Any]) -> nn.Module:
    return case_of(name, options).build(torch.float64).eval()


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("case", IN_MASK)
def test_a_window_in_the_models_mask_alone_is_refused_where_it_hides_keys(case: str, is_padded: bool) -> None:
    name, options = IN_MASK[case]
    batch = make_batch("llama")
    given = batch if is_padded else {"input_ids": batch["input_ids"]}
    for window in (LENGTH - 1, 5):
        model = zoo_model(name, {**options, "sliding_window": window})
        with use_sparse_attention(model, Dense()), refused("sliding-window", f"{window} tokens", "13 keys"):
            run(model, given, real_of(batch))
    model = zoo_model(name, {**options, "sliding_window": LENGTH})
    expected = run(model, given, real_of(batch))
    with use_sparse_attention(model, Dense()):
        check_equal(run(model, given, real_of(batch)), expected)


@pytest.mark.parametrize("lengths", [(5, 8), (4, 9)])
def test_a_window_in_the_mask_hides_keys_of_the_own_document_only(lengths: tuple[int, int]) -> None:
    model = zoo_model("phimoe", {"sliding_window": 8})
    tokens = make_batch("llama", 1)["input_ids"]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    batch = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
    real = torch.ones_like(tokens, dtype=torch.bool)
    expected = run(model, batch, real)
    with use_sparse_attention(model, Dense()):
        if max(lengths) > 8:
            with refused("sliding-window", "8 tokens"):
                run(model, batch, real)
        else:
            check_equal(run(model, batch, real), expected)


def test_a_mask_with_a_window_that_no_layer_uses_is_served() -> None:
    model, batch = zoo_model("qwen2_moe", {}), make_batch("llama")
    model.config.sliding_window = 5
    expected = run(model, batch)
    with use_sparse_attention(model, Dense()):
        check_equal(run(model, batch), expected)


def test_attention_weights_are_refused() -> None:
    model, batch = make_model("bert"), make_batch("bert")
    with use_sparse_attention(model, Windows()), refused("attention-option", "output_attentions"):
        model(**batch, output_attentions=True)


@pytest.mark.parametrize(
    ("model", "code"),
    [(nn.Linear(2, 2), "not-transformers"), (functools.partial(build_model, "mamba"), "attention-interface")],
)
def test_a_model_without_the_registry_is_refused(model: Any, code: str) -> None:
    with refused(code):
        use_sparse_attention(model if isinstance(model, nn.Module) else model(), Windows())


def test_what_is_no_structure_is_refused_and_leaves_the_model_alone() -> None:
    model = make_model("bert")
    before = model.config._attn_implementation
    with refused("structure-type", "str"):
        use_sparse_attention(model, "fixed")  # type: ignore[arg-type]
    assert model.config._attn_implementation == before


def make_case(family: str) -> ModelCase:
    def build() -> nn.Module:
        model = build_model(family)
        use_sparse_attention(model, Windows(block=2))
        return model

    def batch(seed: int, num_samples: int, dtype: torch.dtype) -> dict[str, Tensor]:
        made = FAMILIES[family].batch(seed, num_samples, dtype)
        return {key: nn.functional.pad(tensor, (0, 12 - tensor.shape[1]), value=0) for key, tensor in made.items()}

    return ModelCase(family, build, batch, None)


def train(rank: int, world_size: int, family: str, overrides: dict[str, dict[str, Any]]) -> Trace:
    with float64_throughout():
        return train_case(rank, world_size, make_case(family), 2, 2, overrides)


@pytest.mark.parametrize(("family", "recompute"), [("llama", "full"), ("bert", "selective")])
def test_training_in_zero_3_equals_one_process(ranks: WorkerPool, family: str, recompute: str) -> None:
    overrides = {"zero": {"stage": 3}, "recompute": {"mode": recompute}}
    traces = ranks(2).run(train, family, overrides)
    with float64_throughout():
        reference = reference_of(make_case(family), 2, 2, 2, None)
    check_parity(merge_ranks(traces), reference)


def train_split(rank: int, world_size: int, family: str) -> tuple[list[float], dict[str, Tensor]]:
    case = make_case(family)
    model = case.build(torch.float64, seed=rank)
    config = make_config(1, {"mesh": {"tp": world_size}, "zero": {"stage": 1}})
    with float64_throughout(), initialize(model, config, loss_fn=case.loss) as engine:
        losses = [engine.train_step([case.batch(step, 2, torch.float64)]).loss for step in range(2)]
        return losses, {name: engine.read(name) for name, _ in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "bert", "gpt2"])
def test_tensor_parallel_ranks_take_their_own_heads(ranks: WorkerPool, family: str) -> None:
    case = make_case(family)
    with float64_throughout():
        batches = [[case.batch(step, 2, torch.float64)] for step in range(2)]
        reference = train_reference(case.build(torch.float64), batches, case.loss, make_optimizer, None)
    for losses, parameters in ranks(2).run(train_split, family):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(reference.losses), rtol=1e-9, atol=0)
        for name, expected in reference.parameters.items():
            torch.testing.assert_close(parameters[name], expected, rtol=1e-8, atol=1e-9)
