"""Tiny Hugging Face folders with a tokenizer and a chat template, and chats to train them on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.checkpoint.hf.importer import open_folder
from shardwise.checkpoint.offline import read_chunks
from shardwise.checkpoint.reader import ChunkReader
from shardwise.layout.slicing import Rect

FAMILIES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma3": ("Gemma3TextConfig", {"sliding_window": 32}),
}
MIXTURES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
SPECIAL: Final = ["<pad>", "<s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(template: str | None = TEMPLATE) -> Any:
    """A byte-level tokenizer of transformers, with tokens that begin and end messages."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["what is it, said the user to the assistant"], trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>", pad_token="<pad>"
    )
    tokenizer.chat_template = template
    return tokenizer


def make_folder(family: str, folder: Path, template: str | None = TEMPLATE, seed: int = 0) -> Path:
    """A model of two layers with random weights, and its tokenizer."""
    import transformers

    kind, more = {**FAMILIES, **MIXTURES}[family]
    tokenizer = make_tokenizer(template)
    config = getattr(transformers, kind)(
        vocab_size=288,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=tokenizer.eos_token_id,
        **more,
    )
    torch.manual_seed(seed)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_chats(path: Path, num_chats: int = 40) -> Path:
    """Chats of one or two rounds."""
    lines = []
    for number in range(num_chats):
        messages = []
        for turn in range(1 + number % 2):
            messages.append({"role": "user", "content": f"what is {number + turn}"})
            messages.append({"role": "assistant", "content": f"it is {number * 7 % 10}"})
        lines.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(lines) + "\n")
    return path


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, 1-D, under its names, as a load reads them."""
    with ChunkReader(folder) as reader:
        return {
            tensor.name: torch.cat([torch.empty(0), *read_chunks(reader, tensor, "param", Rect.whole(tensor.shape))])
            for tensor in open_folder(folder, {})
        }
