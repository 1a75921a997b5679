"""Describes what a run trains: our decoder by a preset, or a causal model of transformers in a folder.

`DecoderModel` and `HuggingFaceModel` have the same members. They are made from the config alone, so every process makes
its own. None of several ranks ever holds the whole model of a folder: each keeps its slices while it is read.

>>> model = job_model(Config.from_dict({"model": {"preset": "25m"}}))
>>> model.name, model.vocab_size, model.words
('25m', 8192, '25m, 24.6 M parameters, 6 layers of 512')
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from shardwise.checkpoint.hf.config_files import wanted_of
from shardwise.checkpoint.hf.importer import check_numbers
from shardwise.checkpoint.manifest import CheckpointError, agreed
from shardwise.config.errors import ConfigError, system_code
from shardwise.config.near_paths import near
from shardwise.config.resolve import Config
from shardwise.construction.context import init
from shardwise.engine.engine import Engine
from shardwise.engine.initialize import initialize
from shardwise.models import (
    Decoder,
    DecoderConfig,
    decoder_config,
    flops_per_token,
    generate,
    lm_loss,
    num_params,
    pretrained,
)
from shardwise.models.decoder import IGNORED_TARGET
from shardwise.runtime.device import current_device, forked_rng, is_there, kind_of, wanted_kind
from shardwise.runtime.format import format_count
from shardwise.runtime.keyed_rng import keyed_generator
from shardwise.runtime.precision import TORCH_DTYPES
from shardwise.schedule.formulas import training_flops_per_token
from shardwise.train.tokenizer import Tokenizer

TEMPERATURE, TOP_K = 0.8, 40
_BLOCK_NUMEL: Final = 64  # elements that share a scale of 8 bits, in a layer that bitsandbytes packs


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
        """Return the prompt, int64 [1, S], and what a model with whole parameters adds, on every rank the same.

        Args:
            num_tokens: so many are added, or fewer where the text ends.
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

    def save_tokenizer(self, folder: Path, own: Tokenizer) -> None:
        """Write the tokenizer, of which the data have their `own` form, as a folder that `AutoTokenizer` loads."""
        own.save(folder)

    def export(self, engine: Engine, folder: Path) -> Path | None:
        """Write a folder for other tools, with the tokenizer; all ranks call it. A preset's run writes none (None)."""
        return None


@dataclass(frozen=True)
class HuggingFaceModel:
    """Is a causal model of transformers in a `folder` of this machine, whose config is `theirs`."""

    config: Config
    folder: Path
    theirs: Any

    @classmethod
    def open(cls, config: Config) -> HuggingFaceModel:
        """Read the folder's config, downloading what `model.path` names on the Hub.

        Raises:
            ConfigError: transformers or peft is missing, or there is no such model.
        """
        path = config.model.path or ""
        for package, is_needed in (("transformers", True), ("peft", config.lora.rank > 0)):
            if is_needed and find_spec(package) is None:
                why = f"model.path={path}" if package == "transformers" else f"lora.rank={config.lora.rank}"
                raise ConfigError("extra-missing", f"{why} needs {package}; pip install 'shardwise[hf]'")
        check_packing(config)
        folder = model_folder(path)
        theirs = pretrained.open_config(folder, f"model.path={path}", trusts_code=config.model.trust_remote_code)
        source = cls(config, folder, theirs)
        for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"):
            if not isinstance(getattr(source.text_config, key, None), int):
                raise ConfigError(
                    "model-size-unknown", f"{folder / 'config.json'} gives no {key} of a text model; take one that does"
                )
        return source

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def words(self) -> str:
        text = self.text_config
        sizes = f"{text.num_hidden_layers} layers of {text.hidden_size}"
        summary = f"{self.name} ({type(self._base).__name__}), {format_count(self.num_params)} parameters, {sizes}"
        if not self.config.lora.rank:
            return summary
        trained = sum(parameter.numel() for parameter in self.skeleton().parameters() if parameter.requires_grad)
        return f"{summary}, LoRA of rank {self.config.lora.rank}: {format_count(trained)} train"

    @property
    def vocab_size(self) -> int:
        return int(self.text_config.vocab_size)

    @cached_property
    def num_params(self) -> int:
        return sum(parameter.numel() for parameter in self._base.parameters())

    @property
    def longest(self) -> int | None:
        """Return the most tokens of a sequence that it is made for; None where it does not say."""
        return getattr(self.text_config, "max_position_embeddings", None)

    @property
    def num_heads(self) -> int:
        return int(self.text_config.num_attention_heads)

    def for_tokens(self, vocab_size: int) -> HuggingFaceModel:
        """Return the model, whose embedding stays as it is; refuse a tokenizer that has more tokens."""
        if vocab_size > self.vocab_size:
            raise ConfigError(
                "tokenizer-exceeds-model",
                f"the tokenizer has {vocab_size:,} tokens and the embedding of {self.name} {self.vocab_size:,}; give "
                "the model's own tokenizer, or resize its embedding first",
            )
        return self

    def skeleton(self) -> nn.Module:
        """Return the model on meta, adapters included."""
        with torch.device("meta"):
            base = self._on_meta()
            return self._adapted(pack_on_meta(base) if self.config.lora.base == "nf4" else base, low_cpu_mem_usage=True)

    def initialize(self, config: Config) -> Engine:
        """Read the weights, each rank its slices, and shard the model; all ranks call it."""
        if getattr(self.theirs, "quantization_config", None) is None:
            check_numbers(self.folder, wanted_of(self._base))
        with init():
            how = packing(config) or unpacking(self.theirs)
            model: Any = pretrained.load_model(
                self.folder, self.theirs, f"model.path={config.model.path}", trusts_code=self._trusts_code, **how
            )
        # With a cache transformers does not see where packed samples begin, and lets them attend to each other.
        model.config.use_cache = False
        return initialize(self._adapted(model), config)

    def flops_per_token(self, seq_len: int) -> float:
        """Return the model FLOPs of forward and backward for one token, with causal attention."""
        text = self.text_config
        num_looked_up = 0 if getattr(text, "tie_word_embeddings", False) else self.vocab_size * text.hidden_size
        num_params, width = self.num_params - num_looked_up, text.num_hidden_layers * text.hidden_size
        return training_flops_per_token(num_params, width, seq_len / 2, trains=not self.config.lora.rank)

    @property
    def loss_fn(self) -> None:
        """Return None: the model computes its loss."""
        return None

    def batch(self, columns: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return keyword arguments of the model, which itself compares each label with the position before it."""
        tokens, targets, *positions = columns
        labels = torch.full_like(targets, IGNORED_TARGET)
        labels[:, 1:] = targets[:, :-1]
        batch = {"input_ids": tokens, "labels": labels}
        return batch | ({"position_ids": positions[0]} if positions else {})

    def generate(self, model: nn.Module, prompt: Tensor, num_tokens: int, config: Config) -> Tensor:
        """Return the prompt and what transformers' own sampling adds; the arguments are those of `DecoderModel`."""
        device = prompt.device
        with forked_rng(device):
            torch.manual_seed(config.run.seed)
            tokens: Tensor = model.generate(  # type: ignore[operator]
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=num_tokens,
                do_sample=True,
                temperature=TEMPERATURE,
                top_k=TOP_K,
                use_cache=True,
            )
        return tokens

    def save_tokenizer(self, folder: Path, own: Tokenizer) -> None:
        open_tokenizer(self.config, self.folder).save_pretrained(folder)

    def export(self, engine: Engine, folder: Path) -> Path:
        """Write the weights, or with LoRA the adapter, and the tokenizer; all ranks call it.

        Raises:
            CheckpointError: they cannot be written.
        """
        tokenizer = open_tokenizer(self.config, self.folder)
        model: Any = engine.model
        model.config.use_cache = True
        if not self.config.lora.rank:
            return engine.export_weights(folder, tokenizer=tokenizer)
        adapter = dict(engine.weights(None, adapters="only", to_rank=0))

        def write() -> str:
            if engine.comm.rank == 0:
                try:
                    model.save_pretrained(folder, state_dict=adapter)
                    tokenizer.save_pretrained(folder)
                except OSError as error:
                    raise CheckpointError(
                        system_code(error, "folder-refused"),
                        f"cannot write {folder}: {error.strerror or error}; free some space there, or set run.dir",
                    ) from error
            return ""

        agreed(engine.parts.agreement.run("export", write, subject=f"the export to {folder}"))
        return folder

    @cached_property
    def _base(self) -> nn.Module:
        return self._on_meta()

    def _on_meta(self) -> nn.Module:
        """Return a new model on meta, without adapters, which PEFT would put into the model that it is given."""
        with torch.device("meta"):
            name = f"model.path={self.config.model.path}"
            return pretrained.build_model(self.theirs, name, trusts_code=self._trusts_code)

    @property
    def _trusts_code(self) -> bool:
        return self.config.model.trust_remote_code

    @property
    def text_config(self) -> Any:
        """Return the part of the model's own config that describes its text."""
        return self.theirs.get_text_config()

    def _adapted(self, model: nn.Module, **how: Any) -> nn.Module:
        lora = self.config.lora
        if not lora.rank:
            return model
        from peft import LoraConfig, get_peft_model

        settings = LoraConfig(
            r=lora.rank,
            lora_alpha=2 * lora.rank if lora.alpha is None else lora.alpha,
            lora_dropout=lora.dropout,
            target_modules="all-linear" if lora.targets == ("all-linear",) else [*lora.targets],
            task_type="CAUSAL_LM",
        )
        try:
            return get_peft_model(model, settings, **how)
        except ValueError as error:
            line = str(error).partition("\n")[0]
            raise ConfigError(
                "lora-targets", f"lora.targets={list(lora.targets)} do not fit {self.name}: {line}"
            ) from None


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


def model_folder(path: str) -> Path:
    """Return the folder of a model, which is downloaded where `path` is a name on the Hub and no folder.

    Raises:
        ConfigError: there is no such folder, and no such name can be had.
    """
    folder = Path(path).expanduser().absolute()
    if folder.is_dir():
        return folder
    if path.count("/") == 1 and not path.startswith((".", "/", "~")):
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(path, ignore_patterns=["*.bin", "*.pth", "original/*"]))
        except Exception as error:  # of the network, of the Hub, of its cache: each has a class of its own
            line = str(error).strip().partition("\n")[0]
            raise ConfigError(
                "model-not-on-hub",
                f"model.path={path} is no folder here, and the Hub does not give it: {line}{near(path)}",
            ) from None
    fix = near(path) or "; give the folder that has its config.json"
    raise ConfigError("model-missing", f"model.path={path} is no folder here{fix}")


def open_tokenizer(config: Config, folder: Path) -> Any:
    """Return the tokenizer of `data.tokenizer` where that is given, else of the model's folder.

    Raises:
        ConfigError: there is none that transformers loads.
    """
    return pretrained.open_tokenizer(config.data.tokenizer or folder, trusts_code=config.model.trust_remote_code)


def check_packing(config: Config) -> None:
    """Refuse `lora.base = "nf4"` without adapters, or without bitsandbytes.

    Raises:
        ConfigError: one of these.
    """
    if config.lora.base == "keep":
        return
    if not config.lora.rank:
        raise ConfigError("packed-base-trains", "lora.base=nf4 freezes the weights; set lora.rank=16 (--lora) to train")
    if find_spec("bitsandbytes") is None:
        raise ConfigError("extra-missing", "lora.base=nf4 needs bitsandbytes; pip install 'shardwise[hf,qlora]'")


def packing(config: Config) -> dict[str, Any]:
    """Return the arguments with which `from_pretrained` packs a model on this rank's device; none to keep it."""
    if config.lora.base == "keep":
        return {}
    from transformers import BitsAndBytesConfig

    compute = TORCH_DTYPES[config.precision.param or "fp32"]
    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
    )
    row = wanted_kind(config.run.device)
    return {
        "quantization_config": how,
        "device_map": {"": current_device(row if is_there(row) else kind_of("cpu"))},
    }


def unpacking(theirs: Any) -> dict[str, Any]:
    """Return the arguments with which `from_pretrained` unpacks a folder, by its config; none for one that is plain.

    Raises:
        ConfigError: compressed-tensors is missing.
    """
    packed = getattr(theirs, "quantization_config", None)
    if not isinstance(packed, dict) or packed.get("quant_method") != "compressed-tensors":
        return {}
    if find_spec("compressed_tensors") is None:
        raise ConfigError(
            "extra-missing",
            "model.path has packed weights, which compressed-tensors unpacks; pip install 'shardwise[hf,packed]'",
        )
    from transformers import CompressedTensorsConfig

    return {"quantization_config": CompressedTensorsConfig(dequantize=True)}


def pack_on_meta(model: nn.Module) -> nn.Module:
    """Replace the linear layers of a model on meta by stand-ins, but for the head, which stays as it is."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and module is not head:
            model.set_submodule(name, PackedOnMeta(module))
    return model


class PackedOnMeta(nn.Linear):
    """Has the shapes and bytes of a layer that is packed, and no values."""

    def __init__(self, whole: nn.Linear) -> None:
        super().__init__(whole.in_features, whole.out_features, whole.bias is not None, dtype=whole.weight.dtype)
        numel = whole.weight.numel()
        self.weight = nn.Parameter(torch.empty((numel + 1) // 2, 1, dtype=torch.uint8), requires_grad=False)
        self.register_buffer("scales", torch.empty(-(-numel // _BLOCK_NUMEL), dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        """Compute with a weight as it would be unpacked."""
        product = _Product.apply(x, self.out_features)
        return product if self.bias is None else product + self.bias


class _Product(torch.autograd.Function):
    """Unpacks a weight in the forward and again in the backward, so that none is kept in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_features: int) -> Tensor:
        ctx.shape = num_features, x.shape[-1]
        return nn.functional.linear(x, x.new_empty(ctx.shape))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] @ grads[0].new_empty(ctx.shape), None
