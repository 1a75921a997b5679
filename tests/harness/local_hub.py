"""A folder with what public scripts otherwise download: small models with random weights, a tokenizer, and data.

Nothing is fetched. Everything is drawn from one seed, so that two folders hold the same.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

NUM_TRAIN: Final = 192
NUM_TEST: Final = 16
MAX_POSITIONS: Final = 128
SPECIAL: Final = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
SUBJECTS: Final = ("the cat", "a heron", "my neighbour", "the engine", "this shard", "every rank", "an old clock")
VERBS: Final = ("reads", "gathers", "counts", "forgets", "paints", "reduces", "carries", "measures")
OBJECTS: Final = ("the river", "seven stones", "a long road", "its own shadow", "the gradient", "two buckets", "rain")
ENDS: Final = ("at dawn", "without a word", "again and again", "before the others", "in the garden", "once more")


def make_hub(folder: Path) -> Path:
    """Write models to `llama/` and `gpt2/`, and data sets to `text/`, `pairs/`, `prompts/` and `tasks/`."""
    tokenizer = train_tokenizer()
    for name, model in make_models(len(tokenizer)):
        # Values that bfloat16 has: under stage 3 a model is loaded in the dtype of DeepSpeed's JSON.
        model.bfloat16().float().save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    draw = random.Random(0)
    for name, row in (("text", text_row), ("pairs", pair_row), ("prompts", prompt_row), ("tasks", task_row)):
        (folder / name).mkdir(parents=True)
        for split, num_rows in (("train", NUM_TRAIN), ("test", NUM_TEST)):
            rows = [json.dumps(row(draw)) for _ in range(num_rows)]
            # Some scripts take a file that ends with json, and data sets are found by either.
            (folder / name / f"{split}.json").write_text("\n".join(rows) + "\n")
    return folder


def train_tokenizer() -> Any:
    """Return a byte-pair tokenizer that has read sentences like those of the data."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    draw = random.Random(1)
    plain.train_from_iterator((sentence(draw) for _ in range(200)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=plain, model_max_length=MAX_POSITIONS, **SPECIAL)


def make_models(vocab_size: int) -> Iterator[tuple[str, Any]]:
    """Yield a Llama with its own head and a GPT-2 whose head is its embedding, neither with dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    yield (
        "llama",
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocab_size,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=MAX_POSITIONS,
                initializer_range=0.1,
                **special,
            )
        ),
    )
    yield (
        "gpt2",
        GPT2LMHeadModel(
            GPT2Config(
                vocab_size=vocab_size,
                n_embd=32,
                n_layer=2,
                n_head=4,
                n_positions=MAX_POSITIONS,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
                initializer_range=0.1,
                **special,
            )
        ),
    )


def sentence(draw: random.Random) -> str:
    parts = [draw.choice(words) for words in (SUBJECTS, VERBS, OBJECTS, ENDS)]
    return " ".join(parts[: draw.randint(2, 4)]) + "."


def text_row(draw: random.Random) -> Mapping[str, str]:
    text = " ".join(sentence(draw) for _ in range(draw.randint(1, 4)))
    return {"text": text, "content": text}


def pair_row(draw: random.Random) -> Mapping[str, str]:
    return {"prompt": sentence(draw), "chosen": " " + sentence(draw), "rejected": " " + sentence(draw)}


def prompt_row(draw: random.Random) -> Mapping[str, str]:
    return {"prompt": sentence(draw)}


def task_row(draw: random.Random) -> Mapping[str, str]:
    return {
        "instruction": sentence(draw),
        "input": sentence(draw) if draw.random() < 0.5 else "",
        "output": sentence(draw),
    }
