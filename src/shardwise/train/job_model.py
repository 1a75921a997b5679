"""Describes what a run trains: our decoder by a preset, or a Hugging Face model in a folder.

`DecoderModel` and `HuggingFaceModel` have the same members. They are made from the config alone, so every process makes
its own.

>>> model = job_model(Config.from_dict({"model": {"preset": "25m"}}))
>>> model.name, model.vocab_size, model.words
('25m', 8192, '25m, 24.6 M parameters, 6 layers of 512')
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor, nn

from shardwise.config.resolve import Config, ConfigError
from shardwise.engine.engine import Engine
from shardwise.engine.initialize import initialize
from shardwise.models import Decoder, DecoderConfig, decoder_config, flops_per_token, generate, lm_loss, num_params
from shardwise.runtime.format import format_count
from shardwise.runtime.keyed_rng import keyed_generator
from shardwise.train.huggingface_model import TEMPERATURE, TOP_K, HuggingFaceModel


@dataclass(frozen=True)
class DecoderModel:
    """Is our decoder; `shape` has the preset's vocabulary where the config gives none."""

    config: Config
    shape: DecoderConfig

    @property
    def name(self) -> str:
        """Return a name for the run's folder."""
        return self.config.model.preset

    @property
    def words(self) -> str:
        """Return name and sizes in a few words."""
        sizes = f"{self.shape.num_layers} layers of {self.shape.hidden_size}"
        return f"{self.name}, {format_count(self.num_params)} parameters, {sizes}"

    @property
    def vocab_size(self) -> int:
        """Return how many tokens the embedding has."""
        return self.shape.vocab_size

    @property
    def num_params(self) -> int:
        """Return the number of parameters, frozen ones included."""
        return num_params(self.shape)

    @property
    def longest(self) -> int | None:
        """Return the most tokens of a sequence that it is made for; None where any are."""
        return None

    @property
    def num_heads(self) -> int:
        """Return the query heads of each attention."""
        return self.shape.num_heads

    def for_tokens(self, vocab_size: int) -> DecoderModel:
        """Return the model for a tokenizer of so many tokens; refuse more than the embedding can have."""
        config = self.config
        shape = decoder_config(config.model, config.data.seq_len, vocab_size, config.attention)
        return DecoderModel(config, shape)

    def skeleton(self) -> nn.Module:
        """Return the model on meta, adapters included."""
        return Decoder(self.shape, device="meta")

    def initialize(self, config: Config) -> Engine:
        """Build the model, and shard it; all ranks call it, and each draws its own weights."""
        return initialize(self.skeleton(), config, loss_fn=self.loss_fn)

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of forward and backward, a token."""
        return flops_per_token(self.shape, seq_len)

    def batch(self, columns: Sequence[Tensor]) -> Any:
        """Return what `Engine.train_step` takes of tokens, targets and, for packed samples, positions [B, S]."""
        tokens, targets = columns
        return tokens, targets

    @property
    def loss_fn(self) -> Callable[[Any, Any], Any]:
        """Return what computes the sum and the count of a micro-batch's loss; None where the model itself does."""
        return lambda logits, batch: lm_loss(logits, batch[1])

    def generate(self, model: nn.Module, prompt: Tensor, num_tokens: int, config: Config) -> Tensor:
        """Return the prompt and what the model adds, on every rank the same.

        Args:
            model: with whole parameters.
            prompt: int64 [1, S].
            num_tokens: so many are added, or fewer where the text ends.
            config: whose seed the sample has.
        """
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
        """Write a folder for other tools, with the tokenizer; all ranks call it. A preset's run writes none (None)."""
        return None


JobModel: TypeAlias = DecoderModel | HuggingFaceModel


def job_model(config: Config) -> JobModel:
    """Return the model that a config names.

    Raises:
        ConfigError: there is none, or transformers is needed and missing.
    """
    if config.model.path is not None:
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
