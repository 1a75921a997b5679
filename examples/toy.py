"""Write what the other examples take with --toy: a folder with a tiny Llama, its tokenizer, and texts to learn.

    python examples/toy.py runs/toy

Nothing is downloaded. The tokenizer has one token for each byte, and the texts are small sums: `12 + 7 = 19`.
"""

import json
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import torch


def make_toy(folder: str | Path = "runs/toy", num_layers: int = 2) -> Path:
    """Make the folder where it does not exist; several processes may call it at once."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = Path(folder)
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(dir=folder.parent))
    vocabulary = {each: i for i, each in enumerate(["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    raw = Tokenizer(models.BPE(vocabulary, merges=[]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>").save_pretrained(new)

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": num_layers, "vocab_size": 264}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = LlamaConfig(**sizes, **ends, num_attention_heads=4, num_key_value_heads=2)
    LlamaForCausalLM(config).save_pretrained(new)

    texts = [f"{a} + {b} = {a + b}" for a in range(16) for b in range(16)]
    (new / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts) + "\n")
    with suppress(OSError):  # another process was faster; its folder is the same
        new.rename(folder)
    shutil.rmtree(new, ignore_errors=True)
    return folder


if __name__ == "__main__":
    print(make_toy(*sys.argv[1:2]))
