"""Describes what a run trains: our decoder by a preset, or a Hugging Face model in a folder.

`JobModel` is what the rest of `train/` needs of either. It is made from the config alone, so every process makes its
own.

>>> model = job_model(Config.from_dict({"model": {"preset": "25m"}}))
>>> model.name, model.vocab_size, model.words
('25m', 8192, '25m, 24.6 M parameters, 6 layers of 512')
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from shardwise.config.resolve import Config, ConfigError
from shardwise.engine.engine import Engine
from shardwise.engine.initialize import initialize
from shardwise.models import Decoder, DecoderConfig, decoder_config, flops_per_token, generate, lm_loss, num_params
from shardwise.runtime.format import format_count
from shardwise.runtime.keyed_rng import keyed_generator

TEMPERATURE, TOP_K = 0.8, 40


class JobModel(Protocol):
    """What a run needs to know of its model, and to do with it."""

    @property
    def name(self) -> str:
        """Return a name for the run's folder."""

    @property
    def words(self) -> str:
        """Return name and sizes in a few words."""

    @property
    def vocab_size(self) -> int:
        """Return how many tokens the embedding has."""

    @property
    def num_params(self) -> int:
        """Return the number of parameters, frozen ones included."""

    @property
    def longest(self) -> int | None:
        """Return the most tokens of a sequence that it is made for; None where any are."""

    @property
    def num_heads(self) -> int:
        """Return the query heads of each attention."""

    def for_tokens(self, vocab_size: int) -> JobModel:
        """Return the model for a tokenizer of so many tokens; refuse more than the embedding can have."""

    def skeleton(self) -> nn.Module:
        """Return the model on meta, adapters included."""

    def initialize(self, config: Config) -> Engine:
        """Build the model, and shard it; all ranks call it."""

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of forward and backward, a token."""

    def batch(self, columns: Sequence[Tensor]) -> Any:
        """Return what `Engine.train_step` takes of tokens, targets and, for packed samples, positions [B, S]."""

    @property
    def loss_fn(self) -> Callable[[Any, Any], Any] | None:
        """Return what computes the sum and the count of a micro-batch's loss; None where the model itself does."""

    def generate(self, model: nn.Module, prompt: Tensor, num_tokens: int, config: Config) -> Tensor:
        """Return the prompt and what the model adds, on every rank the same.

        Args:
            model: with whole parameters.
            prompt: int64 [1, S].
            num_tokens: so many are added, or fewer where the text ends.
            config: whose seed the sample has.
        """

    def export(self, engine: Engine, folder: Path) -> Path | None:
        """Write a folder for other tools, with the tokenizer; all ranks call it. A preset's run writes none (None)."""


def job_model(config: Config) -> JobModel:
    """Return the model that a config names.

    Raises:
        ConfigError: there is none, or transformers is needed and missing.
    """
    if config.model.path is not None:
        from shardwise.train.huggingface_model import HuggingFaceModel

        return HuggingFaceModel.open(config)
    if config.lora.rank:
        raise ConfigError(
            "lora-without-model",
            f"lora.rank={config.lora.rank} adapts a Hugging Face model; give it as model.path, or leave lora.rank out",
        )
    return DecoderModel(config, decoder_config(config.model, config.data.seq_len, attention=config.attention))


def model_name(config: Config) -> str:
    """Return the name of a config's model, for folders and messages; nothing is opened."""
    path = config.model.path
    return config.model.preset if path is None else Path(path).expanduser().absolute().name


@dataclass(frozen=True)
class DecoderModel:
    """Is our decoder; `shape` has the preset's vocabulary where the config gives none."""

    config: Config
    shape: DecoderConfig

    @property
    def name(self) -> str:
        return self.config.model.preset

    @property
    def words(self) -> str:
        sizes = f"{self.shape.num_layers} layers of {self.shape.hidden_size}"
        return f"{self.name}, {format_count(self.num_params)} parameters, {sizes}"

    @property
    def vocab_size(self) -> int:
        return self.shape.vocab_size

    @property
    def num_params(self) -> int:
        return num_params(self.shape)

    @property
    def longest(self) -> int | None:
        return None

    @property
    def num_heads(self) -> int:
        return self.shape.num_heads

    def for_tokens(self, vocab_size: int) -> DecoderModel:
        config = self.config
        shape = decoder_config(config.model, config.data.seq_len, vocab_size, config.attention)
        return DecoderModel(config, shape)

    def skeleton(self) -> nn.Module:
        return Decoder(self.shape, device="meta")

    def initialize(self, config: Config) -> Engine:
        return initialize(self.skeleton(), config, loss_fn=self.loss_fn)  # which draws the weights, each rank its own

    def flops_per_token(self, seq_len: int) -> float:
        return flops_per_token(self.shape, seq_len)

    def batch(self, columns: Sequence[Tensor]) -> Any:
        tokens, targets = columns
        return tokens, targets

    @property
    def loss_fn(self) -> Callable[[Any, Any], Any]:
        return lambda logits, batch: lm_loss(logits, batch[1])

    def generate(self, model: nn.Module, prompt: Tensor, num_tokens: int, config: Config) -> Tensor:
        """Return the prompt and what is sampled, as `JobModel.generate`; `model`, `num_tokens`, `config` as there."""
        return generate(
            model,
            prompt,
            num_tokens,
            max_seq_len=config.data.seq_len,
            temperature=TEMPERATURE,
            top_k=TOP_K,
            generator=keyed_generator(config.run.seed, "sample", device=prompt.device),
        )

    def export(self, engine: Engine, folder: Path) -> Path | None:
        return None
