"""Training split over a tp axis, and the same in one plain process: the two sides of tests/parity/test_tensor.py.

Models drop, and all sides draw keyed numbers; so what a sample meets depends on its number in the step, not on the rank
that computes it. Lengths of sequences divide by every tp, the vocabulary by none.

>>> [first_sample(micro_batch, data_rank, 2) for micro_batch in range(2) for data_rank in range(2)]
[0, 2, 4, 6]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.huggingface import FAMILIES, PAD, VOCAB_SIZE, build_model
from harness.models import IGNORED, ModelCase
from harness.reference import Trace, train_reference
from harness.training import Overrides, make_config, make_optimizer
from shardwise import Engine, initialize
from shardwise.comm.loss import LossFn
from shardwise.config.resolve import AttentionConfig
from shardwise.dropout import KeyedDraws, key_dropouts
from shardwise.models import Decoder, lm_loss
from shardwise.models.apply_attention import apply_attention
from shardwise.models.presets import DecoderConfig
from shardwise.runtime.float64 import float64_throughout

NUM_STEPS: Final = 3
NUM_MICRO_BATCHES: Final = 2  # of a data rank
MICRO_SIZE: Final = 2
CLIP_NORM: Final = 0.05
SEED: Final = 5
LENGTH_MULTIPLE: Final = 4
DROPOUT: Final = 0.2

_DROPS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "llama": ("attention_dropout",),
        "mistral": ("attention_dropout",),
        "qwen2": ("attention_dropout",),
        "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
        "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
        "t5": ("dropout_rate",),
    }
)
MODELS: Final = ("decoder", *_DROPS)
DEEP_MODELS: Final = ("deep", "deep-tied")  # decoders of 8 blocks, for pipelines
# Where a pipeline has two ranks, 4 blocks are enough for all its schedules.
_DEPTHS: Final[Mapping[str, int]] = MappingProxyType({"deep": 8, "deep-tied": 8, "shallow": 4, "shallow-tied": 4})
SPARSE_MODELS: Final[Mapping[str, AttentionConfig]] = MappingProxyType(
    {
        "sparse-fixed": AttentionConfig(kind="fixed", block=2, num_local_blocks=2),
        "sparse-bigbird": AttentionConfig(kind="bigbird", block=2, different_layout_per_head=True),
    }
)
GIVEN: Final = "given-"  # before a name of `MODELS`: that of transformers with this attention
GIVEN_ATTENTION: Final = AttentionConfig(kind="bigbird", block=2, different_layout_per_head=True)


def make_case(name: str, num_layers: int = 3) -> ModelCase:
    """A model of `MODELS`: tiny, with 4 heads over 2 KV heads where it groups them, dropping where it can.

    num_layers: of the decoder; the others have theirs.
    """
    if name.startswith(GIVEN):
        case = make_case(name.removeprefix(GIVEN))
        return replace(case, make=partial(_given, case))
    if name == "decoder":
        return ModelCase(name, partial(_decoder, num_layers), _decoder_batch, _decoder_loss)
    if name in _DEPTHS:
        return ModelCase(name, partial(_decoder, _DEPTHS[name], name.endswith("-tied")), _decoder_batch, _decoder_loss)
    if name in SPARSE_MODELS:
        return ModelCase(name, partial(_decoder, attention=SPARSE_MODELS[name]), _decoder_batch, _decoder_loss)
    options = dict.fromkeys(_DROPS[name], DROPOUT)
    family = FAMILIES[name]

    def batch(seed: int, num_samples: int, dtype: torch.dtype) -> dict[str, Tensor]:
        return lengthened(family.batch(seed, num_samples, dtype))

    return ModelCase(name, lambda: build_model(name, **options), batch, None)


def mixture(**options: Any) -> ModelCase:
    """Mixtral, whose router's logits give the loss nothing unless `options` say so."""
    options = {"output_router_logits": False, **options}

    def batch(seed: int, num_samples: int, dtype: torch.dtype) -> dict[str, Tensor]:
        return lengthened(FAMILIES["mixtral"].batch(seed, num_samples, dtype))

    return ModelCase("mixtral", lambda: build_model("mixtral", **options), batch, None)


def first_sample(micro_batch: int, data_rank: int, num_data_ranks: int) -> int:
    """The number, in its step, of the first sample of a data rank's micro-batch, as `train.dataset` orders them.

    The first micro-batches of all data ranks come first. So the same samples make a micro-batch, and have the same
    numbers, however many data ranks share a step.
    """
    return (micro_batch * num_data_ranks + data_rank) * MICRO_SIZE


def step_batches(
    case: ModelCase, step: int, num_data_ranks: int, num_micro_batches: int = NUM_MICRO_BATCHES
) -> list[Any]:
    """The micro-batches of a step over all data ranks, in the order of `first_sample`."""
    num = num_micro_batches * num_data_ranks
    return [case.batch(step * num + number, MICRO_SIZE, torch.float64) for number in range(num)]


def train_split(
    rank: int,
    world_size: int,
    name: str,
    overrides: Overrides,
    num_micro_batches: int = NUM_MICRO_BATCHES,
    num_steps: int = NUM_STEPS,
) -> Trace:
    """Train on one rank of a mesh; see `train_on_mesh`."""
    case = make_case(name)
    return train_on_mesh(rank, case, overrides, case.loss, num_micro_batches, num_steps)


def train_on_mesh(
    rank: int,
    case: ModelCase,
    overrides: Overrides,
    loss_fn: LossFn | None,
    num_micro_batches: int,
    num_steps: int,
    inside: Callable[[], AbstractContextManager[None]] = float64_throughout,
    plan: Any = None,
) -> Trace:
    """Train on one rank of a mesh, whose ranks along pp, cp and tp get the same micro-batches.

    The trace has no gradients, since the engine's are slices; their norms are in it. What is compiled cannot be trained
    `inside` the default, which replaces casts of torch's.
    """
    settings = {"optimizer": {"clip_norm": CLIP_NORM}, "run": {"seed": SEED}, **overrides}
    model = case.build(torch.float64, seed=rank)  # rank 0's weights are everybody's
    losses, norms = [], []
    with inside(), initialize(model, make_config(num_micro_batches, settings), loss_fn=loss_fn, plan=plan) as engine:
        for step in range(num_steps):
            result = engine.train_step(batches_of(engine, case, step, num_micro_batches))
            losses.append(result.loss)
            norms.append(result.grad_norm)
        parameters = {name: engine.read(name) for name, _ in model.named_parameters()}
    return Trace(losses, norms, {}, parameters)


def batches_of(engine: Engine, case: ModelCase, step: int, num_micro_batches: int = NUM_MICRO_BATCHES) -> list[Any]:
    """This data rank's micro-batches of a step."""
    mesh = engine.layout.mesh
    batches = step_batches(case, step, mesh.num_data_ranks, num_micro_batches)
    return batches[mesh.data_index(engine.comm.rank) :: mesh.num_data_ranks]


def train_whole(
    name: str,
    num_data_ranks: int,
    num_micro_batches: int = NUM_MICRO_BATCHES,
    num_steps: int = NUM_STEPS,
    clip_norm: float | None = CLIP_NORM,
) -> Trace:
    """The same by one plain process; see `train_plainly`."""
    return train_plainly(make_case(name), num_data_ranks, num_micro_batches, num_steps, clip_norm)


def train_plainly(
    case: ModelCase,
    num_data_ranks: int,
    num_micro_batches: int,
    num_steps: int,
    clip_norm: float | None = CLIP_NORM,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = make_optimizer,
) -> Trace:
    """What `train_on_mesh` does, by one plain process, with the library's dropouts on whole tensors."""
    model = case.build(torch.float64)
    prepare(model)
    draws = KeyedDraws(SEED)
    key_dropouts(model, draws, zones={})

    def around(step: int, number: int) -> AbstractContextManager[None]:
        micro_batch, data_rank = divmod(number, num_data_ranks)
        first = first_sample(micro_batch, data_rank, num_data_ranks)
        return draws.at(step=step, micro_batch=micro_batch, first_sample=first, num_samples=MICRO_SIZE)

    batches = [step_batches(case, step, num_data_ranks, num_micro_batches) for step in range(num_steps)]
    with float64_throughout():
        trace = train_reference(model, batches, case.loss, optimizer_of, clip_norm, around)
    return replace(trace, gradients={})


def expert_decoder(**options: Any) -> ModelCase:
    """Our decoder with experts, whose routers' biases change choices; `options` are of its config."""
    options = {"num_experts": 4, "expert_size": 12, "router_bias": True, **options}

    def make() -> nn.Module:
        model = _decoder(**options)
        for name, buffer in model.named_buffers():
            assert name.endswith("e_score_correction_bias")
            buffer.copy_(torch.linspace(-0.01, 0.01, len(buffer)))
        return model

    return ModelCase("experts", make, _decoder_batch, _decoder_loss)


def _decoder(
    num_layers: int = 3, tie_embeddings: bool = False, attention: AttentionConfig | None = None, **options: Any
) -> Decoder:
    config = DecoderConfig(
        vocab_size=VOCAB_SIZE,
        num_layers=num_layers,
        hidden_size=16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        ffn_size=24,
        max_seq_len=32,
        tie_embeddings=tie_embeddings,
        attention=attention or AttentionConfig(),
        **options,
    )
    return Decoder(config)


def _given(case: ModelCase) -> nn.Module:
    model = case.make()
    apply_attention(model, GIVEN_ATTENTION)
    return model


def _decoder_batch(seed: int, num_samples: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tokens and the next ones, both [B, S]."""
    batch = lengthened(FAMILIES["llama"].batch(seed, num_samples, dtype))
    return batch["input_ids"], F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)


def _decoder_loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return lm_loss(logits, batch[1])


def lengthened(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch with its sequences padded to a length that tp divides; lengths still differ between batches."""
    values = {"labels": IGNORED, "attention_mask": 0, "input_ids": PAD}
    return {
        key: F.pad(tensor, (0, -tensor.shape[1] % LENGTH_MULTIPLE), value=values[key]) for key, tensor in batch.items()
    }
