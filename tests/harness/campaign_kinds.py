"""Kinds of what comes from elsewhere: each changes a file of its kind, and reads it as the library does."""

from __future__ import annotations

import hashlib
import io
import json
import random
import shutil
import struct
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from harness.checkpoints import save, values_of
from harness.hf_folders import TEMPLATE, make_tokenizer, read_weights
from harness.mutations import (
    forge,
    fresh,
    mutate_header,
    mutate_pickle,
    mutate_text,
    mutated,
    printed,
    records_of,
    replace_file,
    spared,
    tensors_of,
)
from harness.run_folders import write_run
from shardwise.checkpoint.commit import candidates, read_manifest
from shardwise.checkpoint.compare import compare
from shardwise.checkpoint.deepspeed import read_run_state
from shardwise.checkpoint.manifest import MANIFEST_NAME
from shardwise.checkpoint.offline import Damage, verify
from shardwise.checkpoint.show import MAX_SHOWN, render_checkpoint, render_tensors, render_verification
from shardwise.cli.checkpoint import _print
from shardwise.cli.main import main
from shardwise.cli.timeline import _read_recorded
from shardwise.cli.verify import read_model as read_verified
from shardwise.config.errors import ConfigError, OneLineError
from shardwise.config.resolve import Config, DataConfig
from shardwise.models.shrink import read_huggingface
from shardwise.planner.request import read_model
from shardwise.report import timeline_text
from shardwise.report.chrome_trace import chrome_trace
from shardwise.report.page import MAX_BYTES
from shardwise.report.panel import TerminalPanel
from shardwise.schedule import Action, ScheduleError, TimedAction
from shardwise.schedule.simulate import mean_times
from shardwise.train.chat import ChatEncoder
from shardwise.train.corpus import CorpusCounts, open_corpus, read_pieces
from shardwise.train.imported_plan import read_deepspeed
from shardwise.train.job_model import job_model, open_tokenizer
from shardwise.train.prepare import open_data, prepare_data
from shardwise.train.tokenizer import END_OF_TEXT, NUM_BYTE_TOKENS, byte_tokenizer

ERRORS = (OneLineError, ConfigError, ScheduleError)
SHAPES = {"a.weight": (40, 3), "a.bias": (5,), "scale": ()}
LAYOUT = {
    "mesh": {"tp": 2},
    "stage": 2,
    "pipeline": {"schedule": "1f1b", "starts": ["a"]},
    "precision": {"param": "fp32"},
}
TRAJECTORY = {"world_size": 2, "optimizer": {"kind": "AdamW", "groups": [{"lr": 0.1}]}, "scheduler": None}
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 16, "hidden_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 32,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "rope_scaling": None, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSPEED = {
    "train_batch_size": 64, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "bf16": {"enabled": True}, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}  # fmt: skip
SCRIPT = "TP=8\nN=$((TP*2))\nrun.py --tensor-model-parallel-size ${TP} --num-layers 4 --hidden-size 64 --bf16 \\\n"
SCRIPT += " --num-attention-heads ${HEADS:-8} --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1\n"
YAML = "model:\n  num_layers: 4\n  hidden_size: 64 # wide\n  num_attention_heads: 8\n  seq_length: 128\n  bf16: true\n"
TOML = '[zero]\nstage = 3\n[batch]\nglobal_size = 8\n[model]\npreset = "tiny"\n[optimizer]\nbetas = [0.9, 0.95]\n'
TEXT = "".join(f"line {number} of a text that is tokenized, byte by byte\n" for number in range(1800))  # of 3 chunks


def data_config(root: Path) -> Config:
    data = {"path": str(root / "text.txt"), "tokenizer": "bytes", "seq_len": 16, "val_fraction": 0.1}
    return Config.from_dict({"data": data})


def make(root: Path) -> Path:
    """One of each: a checkpoint, a folder of Hugging Face's, a cache of tokens, files for the planner, a trace."""
    extra = {"config": {"zero": {"stage": 2}}, "layout": LAYOUT, "trajectory": TRAJECTORY, "model": {"class": "A"}}
    save(root, values_of(SHAPES), extra=[1], **extra)
    hub = root / "hub"
    hub.mkdir()
    layer = {f"self_attn.{each}_proj": (8, 8) for each in "qkvo"}
    layer |= {"mlp.gate_proj": (16, 8), "mlp.up_proj": (16, 8), "mlp.down_proj": (8, 16)}
    layer |= {"input_layernorm": (8,), "post_attention_layernorm": (8,)}
    shapes = {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (16, 8), "model.norm.weight": (8,), "lm_head.weight": (16, 8)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    names = ["model-1.safetensors", "model-2.safetensors"]
    weight_map = {name: names[place % 2] for place, name in enumerate(tensors)}
    for file in names:
        save_file({name: each for name, each in tensors.items() if weight_map[name] == file}, hub / file)
    (hub / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (hub / "config.json").write_text(json.dumps(LLAMA))
    write_run(root / "run", 60)
    write_tokens(root / "megatron")
    (root / "chats").mkdir()
    (root / "chats" / "chats.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in CHATS))
    (root / "text.txt").write_text(TEXT)
    prepare_data(data_config(root), root / "cache")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT, "model_max_length": 32}
    byte_tokenizer().save(hub)
    (hub / "tokenizer_config.json").write_text(json.dumps(settings))
    plan = root / "plan"
    plan.mkdir()
    actions = [TimedAction(Action.parse("1F0"), rank, 0.5, 0.75, "compute") for rank in range(3)]
    for name, text in {
        "ds.json": json.dumps(DEEPSPEED), "config.json": json.dumps(LLAMA), "a.sh": SCRIPT, "a.yaml": YAML,
        "a.toml": TOML,
        "trace.json": json.dumps(chrome_trace(actions)),
    }.items():  # fmt: skip
        (plan / name).write_text(text)
        READERS[name](plan / name)  # what is imported at its first use counts for none of them
    return root


def write_tokens(folder: Path) -> None:
    """Data of Megatron-LM's: documents of one to three sequences of two-byte tokens."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    lengths = draw.integers(1, 40, 60).astype(np.int32)
    bounds = np.concatenate([[0], np.sort(draw.choice(np.arange(1, 60), 29, replace=False)), [60]]).astype(np.int64)
    pointers = np.cumsum(np.concatenate([[0], 2 * lengths[:-1]])).astype(np.int64)
    draw.integers(0, 257, int(lengths.sum())).astype(np.uint16).tofile(folder / "corpus.bin")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(lengths), len(bounds))
    (folder / "corpus.idx").write_bytes(head + lengths.tobytes() + pointers.tobytes() + bounds.tobytes())


def read_trace(path: Path) -> None:
    actions = _read_recorded(path)
    panel = TerminalPanel("recorded", actions)
    mean_times(actions)
    timeline_text.draw([panel], 80)


PART = {"type": "text", "text": "ho"}
CHATS = (
    {
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "text", "text": "ho"}]},
        ]
    },
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
    {"prompt": "hi", "completion": "ho"},
    {"text": "no chat"},
)

READERS: dict[str, Callable[[Path], object]] = {
    "ds.json": read_deepspeed,
    "config.json": lambda path: read_model(str(path)),
    "a.sh": lambda path: read_model(str(path)),
    "a.yaml": lambda path: read_model(str(path)),
    "a.toml": Config.from_toml,
    "trace.json": read_trace,
}


DEEPSPEED_KINDS = ("zero1-fp32", "zero2-fp16", "zero3-bf16", "universal-of-zero2-bf16", "universal-of-zero3-bf16")


def without_spaces(*lines: str) -> str:
    return "".join("".join(lines).split())


def check_checkpoint(whole: Path, place: Path, draw: random.Random) -> None:
    folder = fresh(whole, place / whole.name)
    may_be_whole = draw.random() < 0.6
    if may_be_whole:
        values = json.loads((folder / MANIFEST_NAME).read_text())["manifest"]
        new = mutated(values, draw)
        forge(folder, lambda old: (old.clear(), old.update(new)))
    else:
        path = draw.choice(sorted(folder.iterdir()))
        changes = [mutate_text, replace_file, *([mutate_header] if path.suffix == ".safetensors" else [])]
        draw.choice(changes)(path, draw)
        may_be_whole = path.suffix == ".safetensors" and tensors_of(path) == tensors_of(whole / path.name)

    def read() -> None:
        found = compare(whole, folder)
        kinds = {change.key for change in found.tensors}
        assert not [each for each in found.values if f"{each.name} {each.state}" not in kinds]

    def show() -> None:
        manifest = read_manifest(folder)
        printed(lambda: _print(render_checkpoint(folder, manifest), render_tensors(manifest.tensors)))

    def check() -> None:
        found = verify(folder)
        damages.extend(found.damages)
        shown = without_spaces(*printed(lambda: _print(render_verification(folder, found, 1.0))))
        for damage in map(str, damages[:MAX_SHOWN]):
            assert damage.isprintable()
            assert without_spaces(damage) in shown

    damages: list[Damage] = []
    said = spared(place, read, ERRORS)
    spared(place, show, ERRORS)
    is_refused = bool(spared(place, check, ERRORS) or damages)
    assert is_refused or (may_be_whole and not said)


def check_hub(whole: Path, place: Path, draw: random.Random) -> None:
    folder = fresh(whole, place / "hub")
    path = draw.choice(sorted(folder.iterdir()))
    if path.suffix == ".json" and draw.random() < 0.7:
        path.write_text(json.dumps(mutated(json.loads(path.read_text()), draw)))
    elif path.suffix == ".safetensors" and draw.random() < 0.5:
        mutate_header(path, draw)
    else:
        draw.choice([mutate_text, replace_file])(path, draw)
    # Folders of others have no checksums: of the values of tensors themselves nothing says what they were.
    is_data = path.suffix == ".safetensors" and tensors_of(path)[1] != tensors_of(whole / path.name)[1]
    read_hub(folder, whole, place, is_checked=not is_data)


def read_hub(folder: Path, whole: Path, place: Path, is_checked: bool) -> None:
    """Read a folder's weights: they are equal to those of the whole one, where something says what these are."""
    read: dict[str, Tensor] = {}
    said = spared(place, lambda: read.update(read_weights(folder)), ERRORS)
    if not said and is_checked:
        expected = read_weights(whole)
        assert all(torch.equal(read[name], expected[name]) for name in read.keys() & expected.keys())


def check_model(whole: Path, place: Path, draw: random.Random) -> None:
    """As a training, a plan and a proof read what a model is."""
    folder = fresh(whole, place / "hub")
    path = folder / draw.choice(["config.json"] * 4 + ["tokenizer_config.json"])
    if draw.random() < 0.8:
        path.write_text(json.dumps(mutated(json.loads(path.read_text()), draw)))
    else:
        draw.choice([mutate_text, replace_file])(path, draw)
    if path.is_symlink():  # the files of a model may be links of the user's own
        path.unlink()
        path.symlink_to("/dev/null")
    config = Config.from_dict({"model": {"path": str(folder)}})

    def build() -> None:
        model: Any = job_model(config)
        assert model.words
        assert model.skeleton()

    for read in (
        build,
        lambda: open_tokenizer(config, folder),
        lambda: read_huggingface(read_verified(folder)),
        lambda: read_model(str(folder)),
    ):
        spared(place, read, ERRORS, cpu_s=10.0, more_bytes=2**29)


def check_deepspeed(whole: Path, place: Path, draw: random.Random) -> None:
    """A checkpoint of DeepSpeed's, of which a file, or the pickle in it, is another."""
    whole = candidates(whole / draw.choice(DEEPSPEED_KINDS))[0]
    folder = fresh(whole, place / whole.name)
    path = draw.choice(sorted(folder.rglob("*.pt")))
    action = draw.random()
    is_data = False
    if action < 0.6:
        mutate_pickle(path, draw)
    elif action < 0.8:
        before = records_of(path)
        mutate_text(path, draw)
        is_data = records_of(path) != before
    else:
        replace_file(path, draw)

    def read() -> None:
        manifest = read_manifest(folder)
        printed(lambda: _print(render_checkpoint(folder, manifest), render_tensors(manifest.tensors)))
        read_run_state(folder)
        # A pickle that says other things with a checksum of its own is another checkpoint; a tensor is one of its file.
        found = compare(whole, folder)
        if action >= 0.6 and not is_data:
            assert not found.values, found.values

    spared(place, read, ERRORS, cpu_s=10.0, more_bytes=2**27)


def check_cache(whole: Path, place: Path, draw: random.Random) -> None:
    """As the launcher does, which builds again what is damaged; or as a rank does, which only opens it."""
    cache = fresh(whole, place / "cache")
    (folder,) = cache.iterdir()
    path = draw.choice(sorted(folder.iterdir()))
    if path.name == "index.json" and draw.random() < 0.7:
        fields = mutated({key: each for key, each in json.loads(path.read_text()).items() if key != "index_hash"}, draw)
        own_hash = hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()
        path.write_text(json.dumps(fields | {"index_hash": own_hash}))
    else:
        draw.choice([mutate_text, replace_file])(path, draw)
    config = data_config(whole.parent)
    is_launcher = draw.random() < 0.5

    def read() -> None:
        data = prepare_data(config, cache) if is_launcher else open_data(folder, config)
        tokens = np.concatenate([each.tokens for each in (data.train, data.val)])
        assert data.tokenizer.decode(tokens.tolist()) == TEXT + END_OF_TEXT
        assert (data.index.vocab_size, data.tokenizer.eot_id, data.index.num_tokens) == (
            NUM_BYTE_TOKENS,
            256,
            len(TEXT) + 1,
        )

    spared(place, read, ERRORS)


def check_run(whole: Path, place: Path, draw: random.Random) -> None:
    """A page of what is there is written, in which what was changed is a gap, or is named; or it is no run's folder."""
    folder = fresh(whole, place / "run")
    path = draw.choice(sorted(folder.iterdir()))
    if draw.random() < 0.7:
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        number = draw.randrange(len(lines))
        lines[number] = json.dumps(mutated(json.loads(lines[number]), draw))
        path.write_text("\n".join(lines) + "\n")
    else:
        draw.choice([mutate_text, replace_file])(path, draw)
    trace = folder / "timeline.json"  # a file that is named itself is meant, be it a link
    commands = [["report", str(folder)], *([] if trace.is_symlink() else [["timeline", "--recorded", str(trace)]])]
    for words in commands:
        shown = io.StringIO()

        def run_command(words: list[str] = words, shown: io.StringIO = shown) -> None:
            with redirect_stdout(shown), redirect_stderr(shown):
                code = main(words)
            assert code in (0, 2)
            assert code == 0 or "[" in shown.getvalue()

        spared(place, run_command, ())
        assert all(line.isprintable() for line in shown.getvalue().split("\n"))
    page = folder / "report.html"
    assert not page.exists() or page.stat().st_size < MAX_BYTES


def harm_named(path: Path, draw: random.Random) -> None:
    """Harm a file that a user names: where it is a link, what that leads to is meant."""
    draw.choice([mutate_text, replace_file])(path, draw)
    if path.is_symlink():
        path.unlink()


def check_megatron(whole: Path, place: Path, draw: random.Random) -> None:
    """Where documents end is what the index says; that every token is there once, it cannot say otherwise."""
    folder = fresh(whole, place / "megatron")
    path = folder / "corpus.idx"
    if draw.random() < 0.6:
        data = bytearray(path.read_bytes())
        at = draw.choice([9, 17, 18, 26, *range(34, len(data) - 8, 4)])
        value = draw.choice([0, 1, -1, 7, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63), draw.randrange(2**40)])
        data[at : at + 8] = struct.pack("<q", value)
        path.write_bytes(data)
    else:
        harm_named(path if draw.random() < 0.8 else folder / "corpus.bin", draw)
    values = {"path": str(folder / "corpus"), "tokenizer": "bytes", "seq_len": 16, "cache_dir": str(place / "none")}
    written = np.fromfile(whole / "corpus.bin", np.uint16)
    is_index = path.is_file() and (folder / "corpus.bin").is_file()
    is_index = is_index and (folder / "corpus.bin").read_bytes() == written.tobytes()

    def read() -> None:
        data = prepare_data(Config.from_dict({"data": values}), place / "none")
        tokens = np.concatenate([each.tokens for each in (data.train, data.val)])
        assert not is_index or sorted(tokens.tolist()) == sorted(written.tolist())

    spared(place, read, ERRORS)
    shutil.rmtree(place / "none")
    (place / "none").mkdir()


def check_chats(whole: Path, place: Path, draw: random.Random) -> None:
    folder = fresh(whole, place / "chats")
    path = folder / "chats.jsonl"
    if draw.random() < 0.7:
        lines = path.read_text().splitlines()
        number = draw.randrange(len(lines))
        lines[number] = json.dumps(mutated(json.loads(lines[number]), draw))
        path.write_text("\n".join(lines))
    else:
        harm_named(path, draw)
    chats = ChatEncoder(make_tokenizer(TEMPLATE), draw.choice(["completions", "all"]), "it")

    def read() -> None:
        corpus = open_corpus(DataConfig(path=str(path)), takes_chats=True)
        for piece in read_pieces(corpus, CorpusCounts()):
            if piece.chat is not None:
                ids, counts = chats.encode(piece.chat, piece.where)
                assert len(ids) == len(counts)

    spared(place, read, ERRORS)


def check_plan(whole: Path, place: Path, draw: random.Random) -> None:
    folder = fresh(whole, place / "plan")
    path = folder / draw.choice(sorted(READERS))
    if path.suffix == ".json" and draw.random() < 0.6:
        path.write_text(json.dumps(mutated(json.loads(path.read_text()), draw)))
    else:
        mutate_text(path, draw)
    spared(place, lambda: READERS[path.name](path), ERRORS)
