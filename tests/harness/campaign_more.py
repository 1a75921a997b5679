"""More kinds of what comes from elsewhere: indexes, headers, tokenizers, lists of hosts, tables of others, runs."""

from __future__ import annotations

import io
import json
import random
import re
import shutil
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from harness.campaign_kinds import DEEPSPEED, ERRORS, harm_named, read_hub
from harness.checkpoints import save, values_of
from harness.launch_texts import HOSTILE, TARGETS, Machine, check, seeded
from harness.mutations import fresh, mutate_header, mutate_text, mutated, replace_file, spared, tensors_of
from harness.profiles import PROFILE
from harness.run_folders import write_run
from shardwise.cli.main import main
from shardwise.compat.deepspeed.config import read_config, translate
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config, DataConfig
from shardwise.config.untrusted_files import read_text
from shardwise.launch import checks
from shardwise.launch.deepspeed import read_env_file
from shardwise.launch.hosts import read_hostfile
from shardwise.planner.hardware import cluster_of, parse_cluster
from shardwise.planner.profile import find_profile, profile_path
from shardwise.train.checkpoints import Resumed, how_to_go_on, resumed_job, take_over_metrics
from shardwise.train.corpus import CorpusCounts, open_corpus, read_pieces
from shardwise.train.job_model import job_model, open_tokenizer
from shardwise.train.tokenizer import load_tokenizer

HJSON = "{\n  // small\n  train_batch_size: 8,\n  # of others\n"
HJSON += "  zero_optimization: {stage: 2,},\n  fp16: {enabled: true},\n}\n"
ACCELERATE = (
    "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n"
    "  gradient_accumulation_steps: 2\nmixed_precision: bf16\nnum_processes: 2\n"
)
CLUSTER = 'gpu = "h100"\nnum_gpus = 16\ngpus_per_node = 8\nmemory_gib = 80\nnic_gbps = 400\nhost_memory_gib = 512\n'
HOSTFILE = "# two machines\nn1 slots=4\nme@n2 slots=2 max_slots=4\n\n10.0.0.7 slots=8\n"
ENV_FILE = "# for the network\nNCCL_DEBUG=INFO\nexport HF_HOME=/data/hf\nA=b=c d\n"
BESIDE: dict[str, Any] = {
    "generation_config.json": {"eos_token_id": [2, 7], "temperature": 0.6, "do_sample": True, "max_new_tokens": 16},
    "adapter_config.json": {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], "base_model_name_or_path": "x"},
    "special_tokens_map.json": {"eos_token": "<|endoftext|>", "pad_token": {"content": "<pad>", "lstrip": False}},
    "added_tokens.json": {"<extra>": 300},
}
RECORDS = "".join(
    json.dumps({"text": f"a line {number} of text", "meta": {"n": number}}) + "\n" for number in range(40)
)


def make_more(root: Path) -> None:
    """Add to `root` the files of the kinds below."""
    tables = root / "tables"
    tables.mkdir()
    for name, text in {"ds.json": json.dumps(DEEPSPEED), "ds.hjson": HJSON, "accelerate.yaml": ACCELERATE}.items():
        (tables / name).write_text(text)
    (root / "machine").mkdir()
    (root / "machine" / "cluster.toml").write_text(CLUSTER)
    path = profile_path(root / "machine", "cpu", 2)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PROFILE.to_json())
    (root / "hosts").mkdir()
    (root / "hosts" / "hostfile").write_text(HOSTFILE)
    (root / "hosts" / ".deepspeed_env").write_text(ENV_FILE)
    records = root / "records"
    records.mkdir()
    (records / "a.jsonl").write_text(RECORDS)
    (records / "b.ndjson").write_text(RECORDS)
    (records / "c.txt").write_text("a text of its own\n" * 100)
    (records / "dataset_info.json").write_text(json.dumps({"features": {"text": {"dtype": "string"}}, "splits": {}}))
    if find_spec("pyarrow"):
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.table({"text": [f"row {number} of a table" for number in range(200)], "n": list(range(200))})
        parquet.write_table(table, records / "d.parquet", row_group_size=50)
        with pyarrow.OSFile(str(records / "e.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as file:
            file.write_table(table)
    run = root / "runs" / "20260101-000000-tiny"
    write_run(run, 30, "checkpoint.every=10")
    extra = {"tokens_hash": "x", "batch": {}}
    values = json.loads((run / "config.json").read_text())
    (run / "checkpoints").mkdir()
    save(run / "checkpoints", values_of({"a.weight": (4, 3)}), extra=extra, config=values, step=20)
    single = root / "single"
    single.mkdir()
    (single / "config.json").write_text((root / "hub" / "config.json").read_text())
    tensors = {}
    for each in sorted((root / "hub").glob("*.safetensors")):
        tensors |= load_file(each)
    tensors["count"] = torch.arange(4)
    save_file(tensors, single / "model.safetensors")
    answers = root / "answers"
    answers.mkdir()
    quiet(["plan", "--model", "tiny", "--cluster", "h100:8", "--seq", "512", "--json", str(answers / "plan.json"),
           "--write", str(answers / "plan.toml")])  # fmt: skip


def quiet(words: list[str]) -> tuple[int, str]:
    """Run a command; its exit code, and all that it prints."""
    with io.StringIO() as shown, redirect_stdout(shown), redirect_stderr(shown):
        code = main(words)
        return code, shown.getvalue()


def run_commands(place: Path, commands: list[list[str]], **limits: Any) -> None:
    """Run commands: each ends well, or by a line with a code; nothing that they print steers a terminal."""
    for words in commands:
        shown: list[tuple[int, str]] = []
        spared(place, lambda words=words, shown=shown: shown.append(quiet(words)), (), **limits)
        ((code, text),) = shown
        assert all(line.isprintable() for line in text.split("\n"))
        assert code == 0 or re.search(r"shardwise: .* \[[a-z0-9-]+\]\n\Z", text), (code, text[-600:])


def harm(path: Path, draw: random.Random, share: float = 0.6) -> None:
    """Change a value of a JSON file, or the bytes or the kind of any file."""
    if path.suffix == ".json" and draw.random() < share:
        path.write_text(json.dumps(mutated(json.loads(path.read_text()), draw)))
    else:
        draw.choice([mutate_text, mutate_text, replace_file])(path, draw)


def check_index(whole: Path, place: Path, draw: random.Random) -> None:
    folder = fresh(whole, place / "hub")
    harm(folder / "model.safetensors.index.json", draw, 0.8)
    read_hub(folder, whole, place, is_checked=True)


def check_header(whole: Path, place: Path, draw: random.Random) -> None:
    folder = fresh(whole, place / "single")
    path = folder / "model.safetensors"
    if draw.random() < 0.7:
        mutate_header(path, draw)
    else:  # its length
        data = bytearray(path.read_bytes())
        data[draw.randrange(8)] ^= 1 << draw.randrange(8)
        path.write_bytes(bytes(data))
    is_data = tensors_of(path)[1] != tensors_of(whole / path.name)[1]
    read_hub(folder, whole, place, is_checked=not is_data)


def check_tokenizer(whole: Path, place: Path, draw: random.Random) -> None:
    """A changed tokenizer may be another one; it encodes and decodes, or is refused."""
    folder = fresh(whole, place / "hub")
    path = folder / "tokenizer.json"
    harm(path, draw, 0.75)
    if path.is_symlink():
        path.unlink()
        path.symlink_to("/dev/null")
    config = Config.from_dict({"model": {"path": str(folder)}})

    def use(tokenizer: Any) -> None:
        tokenizer.decode(list(tokenizer.encode("a text, of bytes \u00e4")))

    limits = {"cpu_s": 10.0, "more_bytes": 2**29}
    spared(place, lambda: use(load_tokenizer(folder)), ERRORS, **limits)
    spared(place, lambda: use(open_tokenizer(config, folder)), ERRORS, **limits)


def check_beside(whole: Path, place: Path, draw: random.Random) -> None:
    """The small files beside the weights."""
    folder = fresh(whole, place / "hub")
    for name, values in BESIDE.items():
        (folder / name).write_text(json.dumps(values))
    path = folder / draw.choice(sorted(BESIDE))
    harm(path, draw)
    if path.is_symlink():
        path.unlink()
        path.symlink_to("/dev/null")
    config = Config.from_dict({"model": {"path": str(folder)}})
    limits = {"cpu_s": 10.0, "more_bytes": 2**29}
    spared(place, lambda: job_model(config).skeleton(), ERRORS, **limits)
    spared(place, lambda: open_tokenizer(config, folder), ERRORS, **limits)
    read_hub(folder, whole, place, is_checked=True)


def check_tables(whole: Path, place: Path, draw: random.Random) -> None:
    """Configs of DeepSpeed and accelerate."""
    folder = fresh(whole, place / "tables")
    path = folder / draw.choice(sorted(each.name for each in whole.iterdir()))
    harm(path, draw, 0.8)
    if path.is_symlink():
        path.unlink()
    spared(place, lambda: translate(read_config(str(path)), 2), ERRORS)
    explain = ["plan", "--model", "tiny", "--explain", str(path), "--cluster", "h100:2"]
    run_commands(place, [["convert", str(path)], explain], cpu_s=10.0, more_bytes=2**28)


def check_machine(whole: Path, place: Path, draw: random.Random) -> None:
    """What a machine was measured to be, and what a user says of a cluster."""
    folder = fresh(whole, place / "machine")
    path = draw.choice(sorted(each for each in folder.rglob("*") if each.is_file()))
    harm(path, draw, 0.8)
    if path.is_symlink():
        path.unlink()

    def read() -> None:
        profile = find_profile(folder, "cpu", 2)
        if profile is not None:
            cluster_of(profile, 2)

    spared(place, read, ERRORS)
    spared(place, lambda: parse_cluster(str(folder / "cluster.toml")), ERRORS)


def check_hosts(whole: Path, place: Path, draw: random.Random) -> None:
    folder = fresh(whole, place / "hosts")
    path = draw.choice(sorted(folder.iterdir()))
    lines = path.read_text().splitlines()
    if draw.random() < 0.6:
        number = draw.randrange(len(lines))
        lines[number] += draw.choice(HOSTILE)
        path.write_bytes("\n".join(lines).encode())
    else:
        harm_named(path, draw)

    def read() -> None:
        for host, slots in read_hostfile(read_lines(folder / "hostfile")).items():
            checks.host(host, "it")
            assert 0 < slots <= checks.MOST_RANKS
        assert all(checks.is_variable(name) for name in read_env_file(read_lines(folder / ".deepspeed_env"), "it"))

    spared(place, read, ERRORS)
    target = str(place / "none" / "start.sh")
    run_commands(place, [["launch", "--hostfile", str(folder / "hostfile"), "-o", target, "--", "train.py"]])
    Path(target).unlink(missing_ok=True)


def read_lines(path: Path) -> list[str]:
    return read_text(path, "give a file").splitlines()


def check_records(whole: Path, place: Path, draw: random.Random) -> None:
    """A folder of data, with what Hugging Face's datasets write beside it."""
    folder = fresh(whole, place / "records")
    path = draw.choice(sorted(folder.iterdir()))
    if path.suffix in (".jsonl", ".ndjson") and draw.random() < 0.6:
        lines = path.read_text().splitlines()
        number = draw.randrange(len(lines))
        lines[number] = json.dumps(mutated(json.loads(lines[number]), draw))
        path.write_text("\n".join(lines))
    else:
        harm_named(path, draw)
    source = path if draw.random() < 0.8 and path.exists() else folder

    def read() -> None:
        corpus = open_corpus(DataConfig(path=str(source)), takes_chats=draw.random() < 0.5)
        assert all(isinstance(piece.text, str) for piece in read_pieces(corpus, CorpusCounts()))

    spared(place, read, ERRORS, more_bytes=2**27)


def check_resume(whole: Path, place: Path, draw: random.Random) -> None:
    """A run that another is to go on from."""
    runs = fresh(whole, place / "runs")
    (run,) = runs.iterdir()
    path = draw.choice(sorted(each for each in run.rglob("*") if each.is_file()))
    if path.suffix == ".jsonl" and draw.random() < 0.7:
        lines = path.read_text().splitlines()
        number = draw.randrange(len(lines))
        lines[number] = json.dumps(mutated(json.loads(lines[number]), draw))
        path.write_text("\n".join(lines) + "\n")
    else:
        harm(path, draw)
    step = run / "checkpoints" / "step-00000020"

    def take_over() -> None:
        fresh(place / "none", place / "new")
        take_over_metrics(Config(), place / "new", Resumed(step, 20))

    for given in (str(run), str(step), str(runs)):
        spared(place, lambda given=given: resumed_job(None, [], given), ERRORS)
    spared(place, take_over, ERRORS)
    spared(place, lambda: how_to_go_on(Config(), run, step), ERRORS)
    spared(place, lambda: Config.from_toml(run / "config.json"), ERRORS)


def check_answers(whole: Path, place: Path, draw: random.Random) -> None:
    """What the planner wrote, which reports and timelines read again."""
    folder = fresh(whole, place / "answers")
    path = folder / draw.choice(["plan.json"] * 3 + ["plan.toml"])
    harm(path, draw, 0.8)
    if path.is_symlink():
        path.unlink()
    commands = [["report", str(path), "-o", str(place / "none" / "page.html")]]
    commands += [["timeline", str(path)]] if path.suffix == ".toml" else []
    run_commands(place, commands, cpu_s=10.0, more_bytes=2**28)
    (place / "none" / "page.html").unlink(missing_ok=True)


def check_launch(whole: Path, place: Path, draw: random.Random) -> None:
    """A program's arguments, which each target's own parser reads back as they were."""
    folder = fresh(whole, place / "launch")
    with chdir(folder):
        machine = Machine(folder)
        words = ["train.py", *seeded(draw.randrange(2**32)), draw.choice(HOSTILE)]
        with redirect_stderr(io.StringIO()), suppress(ConfigError):
            check(draw.choice(sorted(TARGETS)), words, machine)
    shutil.rmtree(folder)


MORE: tuple[tuple[Callable[[Path, Path, random.Random], None], str], ...] = (
    (check_index, "hub"),
    (check_header, "single"),
    (check_tokenizer, "hub"),
    (check_beside, "hub"),
    (check_tables, "tables"),
    (check_machine, "machine"),
    (check_hosts, "hosts"),
    (check_records, "records"),
    (check_resume, "runs"),
    (check_answers, "answers"),
    (check_launch, "empty"),
)
