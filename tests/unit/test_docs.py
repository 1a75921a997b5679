"""The Python of the pages runs as it stands, block after block; their links, paths and names lead to something."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.paths import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def python_of(page: Path) -> str:
    """The fenced blocks of a page; of the README, its indented example."""
    text = page.read_text()
    fenced = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    indented = re.findall(r"^    import torch, shardwise\n(?:(?:    .*)?\n)*", text, re.M)
    return "\n".join([*fenced, *(re.sub("^    ", "", each, flags=re.M) for each in indented)])


def write_inputs(folder: Path) -> None:
    """Write what the examples read: a folder of a tiny Llama with its tokenizer, and a DeepSpeed config."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = ["[UNK]", "[PAD]", "a", "one", "another", "text", "to", "learn"]
    vocabulary = {word: index for index, word in enumerate(words)}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]", pad_token="[PAD]")
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    for each in (tokenizer, transformers.LlamaForCausalLM(config)):
        each.save_pretrained(folder / "my-llama")
    shutil.copy(ROOT / "examples" / "ds_config.json", folder)


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        pytest.param("docs/start.md", marks=pytest.mark.full),
        pytest.param("docs/concepts.md", marks=pytest.mark.full),
        pytest.param("docs/moving-in.md", marks=pytest.mark.full),
    ],
)
def test_the_python_of_a_page_runs(tmp_path: Path, page: str) -> None:
    write_inputs(tmp_path)
    script = python_of(ROOT / page)
    assert "shardwise" in script
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]


def test_links_lead_to_files() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name} links to {link}"


def spans(page: Path) -> list[str]:
    """The texts in backticks of a page, outside its blocks of code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    prose = "\n".join(line for line in text.split("\n") if not line.startswith("    "))
    return re.findall("`([^`]+)`", prose)


def test_paths_lead_to_files() -> None:
    package = ROOT / "src" / "shardwise"
    folders = "|".join(each.name for each in package.iterdir() if each.is_dir())
    for page in PAGES:
        for span in spans(page):
            ours = re.findall(r"(?<![\w./-])(?:tests|src|docs|benchmarks|examples)/[\w./*-]*", span)
            inside = re.findall(rf"(?<![\w./-])(?:{folders})/[\w/]*\.py\b", span)
            for path, root in [*((each, ROOT) for each in ours), *((each, package) for each in inside)]:
                assert any(root.glob(path.rstrip("./"))), f"{page.name} names `{path}`"


@pytest.mark.parametrize("page", ["docs/architecture.md", "docs/extending.md", "CONTRIBUTING.md", "AGENTS.md"])
def test_names_of_code_are_in_the_code(page: str) -> None:
    """Names in backticks; what an example adds to the library is in italics or in a block of code."""
    files = [each for folder in ("src", "tests", "benchmarks") for each in (ROOT / folder).rglob("*.py")]
    words = {word for each in files for word in re.findall(r"\w+", each.read_text())} | {each.name for each in files}
    for span in spans(ROOT / page):
        if re.fullmatch(r"_?[A-Za-z][\w.]*", span) and not span.endswith((".toml", ".md", ".lock", ".yaml", ".json")):
            parts = [span] if span.endswith(".py") else span.split(".")
            assert words.issuperset(parts), f"{page} names `{span}`"


def test_a_function_named_after_its_file_is_in_it() -> None:
    text = (ROOT / "docs" / "extending.md").read_text()
    pairs = re.findall(r"`([\w/]+\.py)`: `([\w.]+)`", re.sub(r"\s+", " ", text))
    assert pairs
    for path, name in pairs:
        words = re.findall(r"\w+", (ROOT / "src" / "shardwise" / path).read_text())
        assert name.split(".")[-1] in words, f"`{path}` has no `{name}`"
