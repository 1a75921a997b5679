"""Builds the model and the data that both sides of a verification train: the engine's ranks and one plain process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from shardwise.config.errors import ConfigError
from shardwise.config.model_files import CHOICE_NAMES
from shardwise.construction.experts import experts_of
from shardwise.models import Decoder, DecoderConfig, lm_loss
from shardwise.runtime.keyed_rng import derive_seed, init_parameters, keyed_generator

IGNORED: Final = -100
_FIRST_TOKEN: Final = 4  # the first after the special ones


@dataclass(frozen=True)
class ModelSpec:
    """Describes a model by the values of a `DecoderConfig` or of a Hugging Face `config.json`."""

    kind: Literal["decoder", "huggingface"]
    values: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        """Return the size of the model's vocabulary."""
        size: int = self.values["vocab_size"]
        return size


def build_skeleton(spec: ModelSpec) -> nn.Module:
    """Build the model on meta."""
    if spec.kind == "decoder":
        return Decoder(DecoderConfig.from_values(spec.values), device="meta")
    with torch.device("meta"):
        return _build_huggingface(spec.values)


def build_for_engine(spec: ModelSpec, seed: int) -> nn.Module:
    """Build the model as a run does: a decoder on meta, whose weights the engine draws; others with their weights."""
    return build_skeleton(spec) if spec.kind == "decoder" else build_whole(spec, seed)


def build_whole(spec: ModelSpec, seed: int) -> nn.Module:
    """Build the model with its weights in float64, the same in every process."""
    if spec.kind == "decoder":
        decoder = Decoder(DecoderConfig.from_values(spec.values), dtype=torch.float64)
        init_parameters(decoder, seed)
        return decoder
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "verify", "weights"))
        return _build_huggingface(spec.values).to(torch.float64).train()


def loss_of(spec: ModelSpec) -> Callable[[Any, Any], tuple[Tensor, Tensor]] | None:
    """Return what `initialize` takes as `loss_fn`; None where the model's output has the loss."""
    return _decoder_loss if spec.kind == "decoder" else None


def make_batch(spec: ModelSpec, seed: int, step: int, number: int, shape: tuple[int, int]) -> Any:
    """Return one micro-batch of random tokens; how many of them count differs between micro-batches.

    Args:
        number: the micro-batch's place among those of all data ranks in a step, which counts from 0.

    Returns:
        Tokens and targets, each [B, S] int64, for a decoder; keyword arguments for any other model.
    """
    generator = keyed_generator(seed, "verify", step, number)
    tokens = torch.randint(_FIRST_TOKEN, spec.vocab_size, shape, generator=generator)  # [B, S]
    num_ignored = int(torch.randint(0, shape[1] // 2, (), generator=generator))
    if spec.kind == "decoder":
        targets = tokens.roll(-1, 1)  # [B, S]
        targets[:, shape[1] - 1 - num_ignored :] = IGNORED
        return tokens, targets
    mask = torch.ones_like(tokens)
    mask[-1, shape[1] - num_ignored :] = 0
    return {
        "input_ids": tokens.masked_fill(mask == 0, 0),
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, IGNORED),
    }


@dataclass(frozen=True)
class ExpertSizes:
    """Holds how many layers of experts a model has, how many experts each, and how many of them a token goes to."""

    num_layers: int
    num_experts: int
    num_chosen: int


def expert_sizes(model: Any) -> ExpertSizes | None:
    """Return the sizes of a model's experts; None where it has none, or their routers have no known size."""
    nums = [experts.num_experts for experts in experts_of(model)]
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    chosen = [getattr(config, name) for name in CHOICE_NAMES if isinstance(getattr(config, name, None), int)]
    return ExpertSizes(len(nums), min(nums), chosen[0]) if nums and chosen else None


def skewed_routing(sizes: ExpertSizes, shape: tuple[int, int], skew: float, generator: torch.Generator) -> Tensor:
    """Return experts [B, S, L, k] for tokens [B, S]: in each layer the first has `skew` times the mean of all."""
    num_tokens, num_layers = shape[0] * shape[1], sizes.num_layers
    scores = torch.rand(num_tokens, num_layers, sizes.num_experts, generator=generator)
    places = torch.rand(num_tokens, num_layers, generator=generator).argsort(0).argsort(0)
    num_first = round(skew * num_tokens * sizes.num_chosen / sizes.num_experts)
    scores[..., 0] = torch.where(places < num_first, 2.0, -1.0)
    return scores.topk(sizes.num_chosen)[1].view(*shape, num_layers, sizes.num_chosen)


def _decoder_loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return lm_loss(logits, batch[1])


def _build_huggingface(values: Mapping[str, Any]) -> nn.Module:
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            "transformers-absent", "a Hugging Face model needs the package transformers; pip install transformers"
        ) from None
    options = copy.deepcopy(dict(values))
    model_type = options.pop("model_type", None)
    if model_type is None:
        raise ConfigError(
            "model-type-absent", "the Hugging Face config has no model_type; give the config.json of a model"
        )
    options |= {"use_cache": False, "dtype": None, "torch_dtype": None}
    try:
        config = transformers.AutoConfig.for_model(model_type, **options)
        named = [getattr(transformers, name, None) for name in options.get("architectures") or ()]
        classes = [model_class for model_class in named if model_class is not None]
        theirs = transformers.AutoModelForCausalLM
        model: nn.Module = classes[0](config) if classes else theirs.from_config(config, trust_remote_code=False)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(
            "model-not-buildable", f"transformers cannot build the model {model_type}: {reason}; try its config there"
        ) from error
    choose_experts = getattr(model, "set_experts_implementation", None)
    if choose_experts is not None and any("expert" in key for key in options):
        choose_experts("eager")  # the default knows no float64
    return model
