"""Units run in whatever order a model calls them; what crosses a cut is refused in one line, whose fix works."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.emulated_pipeline import pipeline_error
from harness.refusals import refused
from shardwise.pipeline.skipped_units import CutError

WIDTH = 6
TOLERANCE = 1e-9


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Chain(nn.Module):
    """Registered in another order than it runs in, with parameters of its own that code beside the blocks uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.head_norm = nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.embed_norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)

    def begin(self, x: Tensor) -> Tensor:
        return self.head_norm(self.first(x)) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for block in self.blocks:
            x = block(x)
        return self.embed_norm(x) * self.scale


class RunsAUnitTwice(Chain):
    def begin(self, x: Tensor) -> Tensor:
        return super().begin(self.blocks[0](super().begin(x)))


class RoutesBesideItsBlocks(Chain):
    """Code beside the blocks decides on values: of the inputs' projection, or of a block."""

    def __init__(self, of_block: bool = False) -> None:
        super().__init__()
        self.of_block = of_block
        self.gate = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for index, block in enumerate(self.blocks):
            if index == self.of_block:
                chosen = (self.gate(x)[:, 0] > 0).nonzero()[:, 0]
                x = x.index_add(0, chosen, torch.ones_like(x[chosen]))
            x = block(x)
        return x


class Pair(nn.Module):
    """Returns two, as its values say."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear(x)
        return x, x.mean() if x.sum().item() > 0 else x.sum()


class TakesAPairApart(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.first = Pair()

    def begin(self, x: Tensor) -> Tensor:
        x, bias = self.first(x)
        return x + bias


class CodeAfterItsBlocks(Chain):
    """Catches what it can, writes into what its blocks have returned, and reads values of the last one's output."""

    class Block(Block):
        def forward(self, state: list[Tensor]) -> list[Tensor]:  # type: ignore[override]
            return [super().forward(state[0]), *state[1:]]

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))
        self.mean = 0.0

    def forward(self, x: Tensor) -> Tensor:
        try:
            state = [self.begin(x)]
            for block in self.blocks:
                state = block(state)
                state.append(state[0].square())
        except BaseException:
            return torch.zeros(1)
        x = self.embed_norm(sum(state))
        self.mean = float(x.detach().mean())
        return x / (1 + self.mean)


class Skips(nn.Module):
    """Each block on the way up gets what the block on the way down has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Block() for _ in range(3))
        self.up = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
        for block in self.up:
            x = block(x + kept.pop())
        return x


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def error_of(make: Callable[[], nn.Module], **section: Any) -> float:
    torch.manual_seed(0)
    return pipeline_error(make().double(), {"x": torch.randn(5, WIDTH).double()}, mean_square, **section)


def test_the_order_of_registration_does_not_matter() -> None:
    assert error_of(Chain) <= TOLERANCE


def test_code_after_a_stages_units_ends_as_in_the_model() -> None:
    assert error_of(CodeAfterItsBlocks) <= TOLERANCE


def test_a_unit_may_run_twice_where_no_stage_ends_with_it() -> None:
    with refused("cut-unit-repeats", "blocks.0", "pipeline.cut"):
        error_of(RunsAUnitTwice)
    assert error_of(RunsAUnitTwice, cut=["blocks.2"]) <= TOLERANCE


REFUSED: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "values of what runs first": (RoutesBesideItsBlocks, ["first", "head_norm", "gate"]),
    "a pair that its values decide on": (TakesAPairApart, ["first"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_reads_values_is_refused_and_mended_by_replicas(name: str) -> None:
    make, replicate = REFUSED[name]
    with refused("cut-reads-values", "pipeline.replicate") as caught:
        error_of(make)
    assert "\n" not in str(caught.value)
    assert error_of(make, replicate=replicate) <= TOLERANCE


@pytest.mark.parametrize("make", [Skips, lambda: RoutesBesideItsBlocks(of_block=True)])
def test_what_no_cut_serves_says_what_to_use_instead(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(CutError) as caught:
        error_of(make)
    assert caught.value.code in ("cut-value-not-sent", "cut-reads-values")


TEXT = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DECODER = {**TEXT, "num_key_value_heads": 2}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}
IMAGE, START = 3, 60


def make_model(family: str, model: str, **options: Any) -> nn.Module:
    module = importlib.import_module(f"transformers.models.{family}")
    torch.manual_seed(0)
    made: nn.Module = getattr(module, model)(getattr(module, re.split("For|Model", model)[0] + "Config")(**options))
    if hasattr(made, "set_experts_implementation"):
        made.set_experts_implementation("eager")
    return made


def llava() -> nn.Module:
    vision = {"model_type": "clip_vision_model", **VISION}
    text = {"model_type": "llama", **DECODER}
    options = {"vision_config": vision, "text_config": text, "image_token_index": IMAGE, "vision_feature_layer": -1}
    return make_model("llava", "LlavaForConditionalGeneration", **options)


def qwen_vl() -> nn.Module:
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": 16, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}
    options = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": START + 1}
    text = {**DECODER, "rope_parameters": rope}
    model = "Qwen2VLForConditionalGeneration"
    return make_model("qwen2_vl", model, vision_config={**vision, "in_channels": 3}, text_config=text, **options)


def clip() -> nn.Module:
    text = {**TEXT, "bos_token_id": 1, "eos_token_id": 2}
    return make_model("clip", "CLIPModel", text_config=text, vision_config=VISION)


def text_batch() -> dict[str, Tensor]:
    tokens = torch.randint(5, START, (2, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def image_batch() -> dict[str, Tensor]:
    batch = text_batch()
    batch["input_ids"][:, 1:5] = IMAGE
    return {**batch, "pixel_values": torch.rand(2, 3, 8, 8).double()}


def patch_batch() -> dict[str, Tensor]:
    tokens = text_batch()["input_ids"][:1]
    tokens[:, 0], tokens[:, 1:5] = START, IMAGE
    pixels = torch.rand(16, 3 * 2 * 4 * 4).double()
    kinds = (tokens == IMAGE).long()
    grid = torch.tensor([[1, 4, 4]])
    return {
        "input_ids": tokens,
        "labels": tokens,
        "pixel_values": pixels,
        "image_grid_thw": grid,
        "mm_token_type_ids": kinds,
    }


DEBERTA = {**TEXT, **QUIET, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "norm_rel_ebd": "layer_norm"}
LFM = {**DECODER, "layer_types": ["full_attention", "conv"] * 2, "block_auto_adjust_ff_dim": False}
JAMBA = {
    **DECODER,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "use_mamba_kernels": False,
    "mamba_d_state": 4,
    "mamba_dt_rank": 4,
}
RELATIVE = ["deberta.encoder.LayerNorm", "deberta.encoder.rel_embeddings"]
Case = tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]], dict[str, Any]]
FAMILIES: dict[str, Case] = {
    "a vision tower": (llava, image_batch, {}),
    "a vision tower that reads its grid": (qwen_vl, patch_batch, {}),
    "two towers": (clip, lambda: {**image_batch(), "labels": None, "return_loss": True}, {}),
    "a norm named an embedding": (lambda: make_model("lfm2", "Lfm2ForCausalLM", **LFM), text_batch, {}),
    "blocks of two classes": (lambda: make_model("jamba", "JambaForCausalLM", **JAMBA), text_batch, {}),
    "a table that all blocks get": (
        lambda: make_model("deberta_v2", "DebertaV2ForMaskedLM", **DEBERTA),
        text_batch,
        {"replicate": RELATIVE},
    ),
    "a pair that its values decide on": (
        lambda: make_model("ibert", "IBertForMaskedLM", **TEXT, **QUIET),
        text_batch,
        {"replicate": ["ibert.embeddings"]},
    ),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_that_run_out_of_order_equal_one_process(name: str) -> None:
    pytest.importorskip("transformers")
    make, make_batch, section = FAMILIES[name]
    batch = {key: value for key, value in make_batch().items() if value is not None}
    assert pipeline_error(make().double(), batch, lambda output: output.loss, **section) <= TOLERANCE
