"""Models that compute tokens from others beside attention are refused under `cp` before a number is wrong."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.pool import WorkerPool
from harness.refusals import refused
from harness.zoo_cells import Cell, case_of, run_cells
from shardwise.attention.cp_hook import DenseVisibility
from shardwise.attention.huggingface import use_sparse_attention
from shardwise.context import length_proof
from shardwise.context.apply import find_limits, find_window, prove_huggingface, prove_own
from shardwise.context.huggingface import check_length
from shardwise.runtime.float64 import float64_throughout

WIDTH, VOCAB_SIZE, LENGTH = 8, 50, 12


class Own(nn.Module):
    """A model of the user's, whose attention is called through `attend`; tokens are shifted, summed or normed."""

    def __init__(self, mixes: str = "") -> None:
        super().__init__()
        self.mixes = mixes
        self.num_heads = self.num_kv_heads = 2
        self.embed = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.mixer = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        nn.init.zeros_(self.mixer.weight)  # as gates begin: in the first step it would not show
        self.norm = nn.BatchNorm1d(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCAB_SIZE)
        self.attend: Any = None

    def mix(self, x: Tensor) -> Tensor:  # [B, S, D]
        if self.mixes == "shift":
            return x + F.pad(x[:, :-1], (0, 0, 1, 0))
        if self.mixes == "sum":
            return x + x.cumsum(1)
        if self.mixes == "mean":
            return x - x.mean(1, keepdim=True)
        if self.mixes == "convolution":
            return x + self.mixer(x.transpose(1, 2)).transpose(1, 2)
        return self.norm(x.transpose(1, 2)).transpose(1, 2) if self.mixes == "norm" else x

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.mix(self.embed(tokens) + torch.sin(positions)[:, None])
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return self.out(self.attend(q, k, v, 0, positions=positions).transpose(1, 2).flatten(2))


def own_model(mixes: str) -> nn.Module:
    model = Own(mixes)
    model.attend = lambda q, k, v, first_head, positions=None: v
    return model


def prove(model: nn.Module) -> None:
    proof = prove_own(model)
    assert proof is not None
    proof({"tokens": torch.arange(LENGTH)[None].repeat(2, 1), "positions": torch.arange(LENGTH)})


@pytest.mark.parametrize("mixes", ["shift", "sum", "mean", "convolution", "norm"])
def test_a_model_of_ones_own_that_mixes_tokens_is_refused(mixes: str) -> None:
    with refused("cp-tokens-apart", "mesh.dp_shard", "zero.stage=3"):
        prove(own_model(mixes))


def test_a_model_of_ones_own_whose_tokens_meet_in_attention_is_taken() -> None:
    prove(own_model(""))


SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
MOBILE = {"embedding_size": 8, "intra_bottleneck_size": 8, "true_hidden_size": 8}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 4}


def make_model(family: str, model: str, **options: Any) -> Any:
    pytest.importorskip("transformers")
    module = importlib.import_module(f"transformers.models.{family}")
    torch.manual_seed(0)
    return getattr(module, model)(getattr(module, model.partition("For")[0] + "Config")(**{**SIZES, **options}))


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 1e4, **more}


LONG = {"short_factor": [1.0, 1.0], "long_factor": [2.0, 3.0], "original_max_position_embeddings": 16}
REFUSED: dict[str, tuple[tuple[str, str], dict[str, Any], list[str]]] = {
    "trigrams": (
        ("mobilebert", "MobileBertForMaskedLM"),
        MOBILE,
        ["cp-tokens-apart", "mobilebert.embeddings of MobileBertForMaskedLM"],
    ),
    "sinks": (
        ("gpt_oss", "GptOssForCausalLM"),
        {"num_local_experts": 4, "head_dim": 4},
        ["attention-option", "s_aux of GptOssAttention"],
    ),
    "soft caps": (("gemma2", "Gemma2ForCausalLM"), {"head_dim": 4}, ["attention-option", "softcap of Gemma2Attention"]),
    "attention of its own": (("megatron_bert", "MegatronBertForMaskedLM"), {}, ["attention-interface", "MegatronBert"]),
}
GROWING: dict[str, tuple[tuple[str, str], dict[str, Any], int]] = {
    "frequencies by length": (
        ("phi3", "Phi3ForCausalLM"),
        {"rope_parameters": rope("longrope", **LONG), "original_max_position_embeddings": 16},
        16,
    ),
    "frequencies that grow": (("llama", "LlamaForCausalLM"), {"rope_parameters": rope("dynamic", factor=2.0)}, 32),
}
SLIDING = {"use_sliding_window": True, "sliding_window": 7}
TAKEN: dict[str, tuple[tuple[str, str], dict[str, Any]]] = {
    "no trigrams": (("mobilebert", "MobileBertForMaskedLM"), {**MOBILE, "trigram_input": False}),
    "a table of positions": (("bert", "BertForMaskedLM"), {}),
    "experts": (("mixtral", "MixtralForCausalLM"), {"num_local_experts": 4}),
    "latent attention": (("deepseek_v3", "DeepseekV3ForCausalLM"), {**EXPERTS, **LATENT}),
    "a window": (("mistral", "MistralForCausalLM"), {"sliding_window": 8}),
}
# What a model builds into its mask alone, and the shortest such window.
WINDOWS: dict[str, tuple[str, dict[str, Any], int | None]] = {
    "in every layer": ("phimoe", {"sliding_window": 9}, 9),
    "longer than any table": ("phimoe", {"sliding_window": 5000}, 5000),
    "none": ("phimoe", {"sliding_window": None}, None),
    "in one layer": ("qwen2_moe", {**SLIDING, "layer_types": ["full_attention", "sliding_attention"]}, 7),
    "in no layer": ("qwen2_moe", {**SLIDING, "layer_types": ["full_attention"] * 2}, None),
    "given to the attention": ("mistral", {"sliding_window": 9}, None),
    "of a bidirectional model": ("bert", {}, None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_mixes_tokens_is_refused_at_the_start(name: str) -> None:
    place, options, refusal = REFUSED[name]
    with refused(*refusal) as caught:
        prove_huggingface(make_model(*place, **options))
    assert str(caught.value).endswith("use mesh.dp_shard with zero.stage=3 in place of mesh.cp")


@pytest.mark.parametrize("name", GROWING)
def test_frequencies_that_follow_from_the_longest_position_are_taken_up_to_where_they_change(name: str) -> None:
    place, options, num_positions = GROWING[name]
    model = make_model(*place, **options)
    assert prove_huggingface(model) == num_positions
    tokens = torch.ones(1, num_positions, dtype=torch.long)
    check_length(model, {"input_ids": tokens}, num_positions)
    with refused("cp-rope-length", f"at most {num_positions} tokens"):
        check_length(model, {"input_ids": tokens, "position_ids": torch.tensor([[num_positions]])}, num_positions)
    with refused("cp-rope-length", "mesh.dp_shard", "zero.stage=3"):
        check_length(model, {"input_ids": tokens.repeat(1, 2)}, num_positions)


def test_a_run_within_that_length_equals_one_process_and_a_longer_one_is_refused(
    ranks: WorkerPool, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    growing = {"rope_parameters": rope("dynamic", factor=2.0)}
    cells = [Cell("context", options=growing | {"max_position_embeddings": most}) for most in (12, 10)]
    for outcomes in ranks(2).run(run_cells, "llama", cells, tmp_path):
        assert [each.kind for each in outcomes] == ["equal", "refused"], outcomes
        assert "at most 10 tokens" in outcomes[1].text


@pytest.mark.parametrize("name", TAKEN)
def test_a_family_whose_tokens_meet_in_attention_is_taken(name: str, caplog: pytest.LogCaptureFixture) -> None:
    place, options = TAKEN[name]
    assert prove_huggingface(make_model(*place, **options)) is None
    assert not caplog.records


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_in_the_models_mask_alone_is_found(name: str, caplog: pytest.LogCaptureFixture) -> None:
    family, options, expected = WINDOWS[name]
    found = find_window(case_of(family, options).build(torch.float32))
    assert (found and found.num_tokens) == expected
    assert not caplog.records


def test_a_mask_that_is_not_the_attentions_is_refused() -> None:
    hiding, looking = (case_of("bert", {}).build(torch.float32) for _ in range(2))
    hiding.config.is_decoder = True  # the model's masks follow it
    for module in looking.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = True
    for model, code in ((hiding, "mask-hides-ahead"), (looking, "mask-looks-ahead")):
        with refused(code, "mesh.dp_shard", "zero.stage=3") as caught:
            find_window(model)
        assert "\n" not in str(caught.value)


def test_a_run_within_the_window_equals_one_process_and_a_longer_one_is_refused(
    ranks: WorkerPool, tmp_path: Path
) -> None:
    cells = [Cell("context", options={"sliding_window": window}) for window in (12, 11)]
    for outcomes in ranks(2).run(run_cells, "phimoe", cells, tmp_path):
        assert [each.kind for each in outcomes] == ["equal", "refused"], outcomes
        assert all(text in outcomes[1].text for text in ("PhimoeAttention", "11 tokens", "12 keys", "mesh.cp=1"))


By = Callable[[Tensor, bool], Tensor]
# What code that knows the number of tokens makes of hidden states, which agrees with one process for short sequences.
LONG_ONLY: dict[str, By] = {
    "a factor": lambda x, _: x * (2 if x.size(1) > 60 else 1),
    "in training": lambda x, training: x * (2 if training and x.shape[1] > 60 else 1),
    "of all elements": lambda x, _: x * (2 if x.numel() > 2 * 60 * 16 else 1),
    "one length": lambda x, _: x * (2 if len(x[0]) == 80 else 1),
    "a capacity": lambda x, _: torch.cat([x[:, : min(x.shape[1], 50)], 2 * x[:, 50:]], 1),
    "a scale": lambda x, _: x * max(1.0, math.log(x.shape[1], 60)),
    "a mean": lambda x, _: x - x.mean(1, keepdim=True) if x.shape[1] > 60 else x,
    "a table": lambda x, _: x * torch.arange(max(x.shape[1] - 40, 0) + 1)[-1],
    "a loop": lambda x, _: torch.stack([x[:, i] * (1 + i // 60) for i in range(x.shape[1])], 1),
}
BY_LENGTH_BUT_EQUAL: dict[str, By] = {
    "padding": lambda x, _: F.pad(x, (0, 0, 0, -x.shape[1] % 64))[:, : x.shape[1]] * 2,
    "chunks": lambda x, _: torch.cat([2 * each for each in x.split(16, 1)], 1) if x.shape[1] > 60 else 2 * x,
    "a loop": lambda x, _: torch.stack([2 * x[:, i] for i in range(x.shape[1])], 1),
}


def prove_by(by: By, length: int, num_samples: int = 2, **options: Any) -> None:
    model = make_model("llama", "LlamaForCausalLM", num_hidden_layers=1, **options).train()
    model.model.embed_tokens.register_forward_hook(lambda module, _, out: by(out, module.training))
    tokens = torch.arange(length)[None].repeat(num_samples, 1) % VOCAB_SIZE
    proof = find_limits(model, 2).prove
    assert proof is not None
    proof({"input_ids": tokens[:, :16]})
    proof({"input_ids": tokens, "labels": tokens})


@pytest.mark.parametrize("name", LONG_ONLY)
def test_what_decides_by_the_number_of_tokens_is_refused_when_a_batch_is_long(name: str) -> None:
    with refused("cp-tokens-apart", "model.embed_tokens", "mesh.dp_shard"):
        prove_by(LONG_ONLY[name], 80)


@pytest.mark.parametrize("name", BY_LENGTH_BUT_EQUAL)
def test_what_computes_the_same_by_another_way_is_taken(name: str, caplog: pytest.LogCaptureFixture) -> None:
    prove_by(BY_LENGTH_BUT_EQUAL[name], 80)
    assert not caplog.records


def test_long_sequences_are_proved_by_what_the_code_decides(caplog: pytest.LogCaptureFixture) -> None:
    length = 2**22
    prove_by(lambda x, _: 2 * x if x.shape[1] > 2 else x, length, 1)
    with refused("cp-length-unproved", "tokens > 1000", f"{length:,}", "mesh.dp_shard"):
        prove_by(lambda x, _: 2 * x if x.shape[1] > 1000 else x, length, 1)
    assert "could not be proved" not in caplog.text
    prove_by(lambda x, _: 2 * x if x.detach().isfinite().all() else x, length, 1)
    assert "could not be proved" in caplog.text


class Wrapped(nn.Module):
    """A model of transformers in a module that decides by the number of tokens of one of its inputs or outputs."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads = reads
        self.inner = make_model("llama", "LlamaForCausalLM", num_hidden_layers=1)

    def forward(self, **inputs: Any) -> Any:
        output = self.inner(**inputs)
        is_long = (inputs | output)[self.reads].shape[1] > 60 if self.reads else False
        output.logits, output.loss = (each * (2 if is_long else 1) for each in (output.logits, output.loss))
        return output


@pytest.mark.parametrize("reads", ["", "input_ids", "attention_mask", "labels", "logits"])
def test_code_around_a_model_of_transformers_is_proved_too(reads: str) -> None:
    tokens = torch.arange(80)[None].repeat(2, 1) % VOCAB_SIZE
    labels = tokens.where(torch.arange(80) > 50, -100)
    proof = find_limits(Wrapped(reads), 4).prove
    assert proof is not None
    with refused("cp-tokens-apart", "the forward of Wrapped") if reads else nullcontext():
        proof({"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)})


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("by", ["tokens", "positions", "extra"])
def test_a_model_of_ones_own_that_decides_by_the_number_of_tokens_is_refused(by: str, cp: int) -> None:
    class Deciding(Own):
        def forward(self, tokens: Tensor, positions: Tensor, extra: Tensor | None = None) -> Tensor:
            given = {"tokens": tokens[0], "positions": positions, "extra": tokens[0] if extra is None else extra[0]}
            return super().forward(tokens, positions) * (2 if len(given[by]) > 150 else 1)

    model = Deciding()
    model.attend = lambda q, k, v, first_head, positions=None: v
    proof = prove_own(model, cp)
    assert proof is not None
    for length in (96, 148, 140 * cp, 160 * cp):
        tokens = torch.arange(length)[None].repeat(2, 1) % VOCAB_SIZE
        with refused("cp-tokens-apart") if length == 140 * cp else nullcontext():
            proof({"tokens": tokens, "extra": tokens, "positions": torch.arange(length)})


def test_lengths_that_change_are_proved_by_values_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    proof = prove_own(own_model(""))
    assert proof is not None
    check = length_proof.check_tokens_apart
    monkeypatch.setattr(
        length_proof,
        "check_tokens_apart",
        lambda copied, splitting, attempts, *more: (
            lengths.append(attempts[0][0]["tokens"].shape[1]),
            check(copied, splitting, attempts),
        ),
    )
    for length in [*range(20, 80, 2)] * 2:
        proof({"tokens": torch.zeros(1, length, dtype=torch.long), "positions": torch.arange(length)})
    assert lengths == [*range(20, 20 + 2 * len(lengths), 2)]
    assert len(lengths) < 12


def test_the_number_of_samples_is_a_size_too() -> None:
    class Deciding(Own):
        def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
            return super().forward(tokens, positions) * (len(positions) if len(tokens) > 2 else 1)

    model = Deciding()
    model.attend = lambda q, k, v, first_head, positions=None: v
    proof = prove_own(model)
    assert proof is not None
    for num_samples in (1, 2, 3):
        tokens = torch.arange(LENGTH)[None].repeat(num_samples, 1)
        with refused("cp-tokens-apart") if num_samples == 3 else nullcontext():
            proof({"tokens": tokens, "positions": torch.arange(LENGTH)})
    of_many = lambda x, _: x * x.shape[1] if x.shape[0] > 2 else x  # noqa: E731
    prove_by(of_many, 2**21, 2)
    with refused("cp-tokens-apart", "model.embed_tokens"):  # by a short sequence of as many samples
        prove_by(of_many, 2**21, 4)


def test_values_of_another_size_than_keys_are_attended_to() -> None:
    """DeepSeek's latent attention, in which keys have places and values have not."""
    model = make_model("deepseek_v3", "DeepseekV3ForCausalLM", **EXPERTS, **LATENT).double().eval()
    model.set_experts_implementation("eager")
    tokens = torch.randint(VOCAB_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with float64_throughout(), torch.no_grad():
        expected = model(tokens).logits
        with use_sparse_attention(model, DenseVisibility(is_causal=True)):
            torch.testing.assert_close(model(tokens).logits, expected, rtol=0.0, atol=1e-12)


class CentresGradients(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient - gradient.mean(1, keepdim=True)


class ScalesGradients(CentresGradients):
    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm(dim=-1, keepdim=True)


class InBackward(Own):
    """Has code in the backward alone: a hook on a tensor or on a module, or a function of autograd's kind."""

    def __init__(self, how: str, scales: bool) -> None:
        super().__init__()
        self.how, self.kind = how, ScalesGradients if scales else CentresGradients
        self.attend = lambda q, k, v, first_head, positions=None: v
        if how == "module":
            backward = self.kind.backward
            self.qkv.register_full_backward_pre_hook(lambda module, gradients: (backward(None, gradients[0]),))

    def mix(self, x: Tensor) -> Tensor:
        if self.how == "tensor" and x.requires_grad:
            x.register_hook(lambda gradient: self.kind.backward(None, gradient))
        return self.kind.apply(x) if self.how == "function" else x


class Keeps(Own):
    """Writes something in its forward, of all tokens or not, which it may read in the next one."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.attend = lambda q, k, v, first_head, positions=None: v
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.number, self.history, self.longest = 0.0, list[float](), 0
        self.table = self.last = torch.zeros(0)

    def mix(self, x: Tensor) -> Tensor:
        if self.what == "average in training" and self.training:
            self.average.lerp_(x.detach().mean((0, 1)), 0.1)
        if self.what == "number":
            self.number = x.detach().square().mean().item()
        if self.what == "history":
            self.history.append(x.detach().mean().item())
        self.count += x.shape[1] if self.what == "count of tokens" else 1
        self.last = x.detach()
        if self.what == "forwards":
            self.number += 1.0
            return x * (1 + self.count / 10 + self.number)
        if self.what == "table" and x.shape[1] > self.longest:
            self.longest = x.shape[1]
            self.table = torch.linspace(0, 1, WIDTH, dtype=x.dtype)
        return x * self.table if self.what == "table" else x


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("what", "name"),
    [("average in training", "average"), ("number", "number"), ("history", "history"), ("count of tokens", "count")],
)
def test_what_a_forward_keeps_of_all_tokens_is_refused(what: str, name: str) -> None:
    with refused("cp-tokens-apart", f"keeps {name},"):
        prove(Keeps(what))


@pytest.mark.quick(2)
@pytest.mark.parametrize("what", ["forwards", "table"])
def test_what_a_forward_keeps_of_no_token_is_taken(what: str, caplog: pytest.LogCaptureFixture) -> None:
    prove(Keeps(what))
    assert not caplog.records


BACKWARD = ("tensor", "module", "function")


@pytest.mark.quick(3)
@pytest.mark.parametrize("how", BACKWARD)
def test_code_in_the_backward_that_mixes_tokens_is_refused(how: str) -> None:
    with refused("cp-tokens-apart", "InBackward"):
        prove(InBackward(how, scales=False))


@pytest.mark.quick(3)
@pytest.mark.parametrize("how", BACKWARD)
def test_code_in_the_backward_that_sees_tokens_apart_is_taken(how: str, caplog: pytest.LogCaptureFixture) -> None:
    prove(InBackward(how, scales=True))
    assert not caplog.records
