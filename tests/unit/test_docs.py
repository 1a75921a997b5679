"""Every block of code of the pages runs, or is read as it would be; their links, paths and names lead somewhere."""

from __future__ import annotations

import configparser
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest

from harness.pages import PAGES, PRELUDES, arguments_of_shardwise, blocks_of, commands_in, outside_blocks
from harness.paths import ROOT
from house import CORE
from shardwise import Config, Engine
from shardwise.cli.main import cli
from shardwise.config.resolve import all_keys
from shardwise.planner.hardware import parse_cluster
from shardwise.train.setup import job_config

# A program writes the other.
WRITTEN = [page for page in PAGES if page.name != "planner-accuracy.md"]


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
    for name in ("my-llama", "Llama-3.2-1B"):
        for each in (tokenizer, transformers.LlamaForCausalLM(config)):
            each.save_pretrained(folder / name)
    shutil.copy(ROOT / "examples" / "ds_config.json", folder)
    for name in ("nvme", "shared"):
        (folder / name).mkdir()


def pages_with(*languages: str) -> list[Path]:
    return [page for page in PAGES if any(block.language in languages for block in blocks_of(page))]


def named(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda page: page.stem)


# The engines of a page share its process, and a page may leave one open.
@pytest.mark.filterwarnings("ignore")
@named([page for page in pages_with("python") if page.stem != "attention"])  # test_attention_docs.py runs that
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run its blocks one after another in one process; those that cannot run here say why: `python no-run: why`."""
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    blocks = [block for block in blocks_of(page) if block.language == "python"]
    names: dict[str, object] = {"__name__": f"docs_{page.stem}"}
    preludes = PRELUDES.get(page.stem, {})
    for number, block in enumerate(blocks):
        exec(preludes.get(number, ""), names)
        if block.note:
            assert re.fullmatch("no-run: .{8,}", block.note), f"{page.name}:{block.line}: {block.note}"
            compile(block.text, page.name, "exec")
            continue
        # Places of a cluster are folders here.
        text = re.sub(r'"/(shared|nvme)\b', lambda found: f'"{tmp_path}/{found[1]}', block.text)
        try:
            exec(compile("\n" * (block.line - 1) + text, str(page), "exec"), names)
        except Exception as error:
            error.add_note(f"{page.name}, the block of line {block.line}")
            raise
        if isinstance(config := names.get("config"), dict):
            Config.from_dict(config)
    for engine in [each for each in names.values() if isinstance(each, Engine)]:
        engine.close()


def test_the_toml_of_the_pages_is_legal(tmp_path: Path) -> None:
    for page in pages_with("toml"):
        for block in blocks_of(page):
            if block.language == "toml":
                path = tmp_path / "block.toml"
                path.write_text(block.text)
                if "gpu" in tomllib.loads(block.text):
                    assert parse_cluster(str(path)).num_gpus
                else:
                    Config.from_toml(path)


def test_the_commands_of_the_pages_are_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parse each command of `shardwise` as it does, and its keys; the targets of `make` and the files exist."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text("")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    num_checked = 0
    for page in pages_with("sh", "console"):
        for block in blocks_of(page):
            for command in commands_in(block) if block.language in ("sh", "console") else ():
                where = f"{page.name}:{block.line}: {' '.join(command)}"
                for word in command:
                    if re.match(r"(tests|src|docs|benchmarks|examples)/", word):
                        assert (ROOT / word).exists(), where
                if command[0] == "make":
                    assert command[1] in targets, where
                arguments = arguments_of_shardwise(command)
                if arguments is not None:
                    check_command(arguments, where)
                    num_checked += 1
    assert num_checked > 50
    capsys.readouterr()


def parse(arguments: list[str]) -> dict[str, Any]:
    """Parse a command line of `shardwise` as it does, and run nothing."""
    command: click.Command = cli
    context = click.Context(cli, **cli.context_settings)
    while isinstance(command, click.Group):
        name, *arguments = arguments
        command = command.commands[name]
    # A command keeps the names of its help option, which it has from the context above.
    return command.make_context(name, arguments, parent=context).params


def check_command(arguments: list[str], where: str) -> None:
    """Parse the arguments of `shardwise`; nothing runs. A key that is wrong on purpose has an error under it."""
    if arguments == ["--version"]:
        return
    settings = parse(arguments).get("settings", ())
    for setting in settings:
        key, is_setting, _ = setting.partition("=")
        if is_setting:
            assert key in all_keys() or key == "zero.stge", f"{where}: no key {key}"
    if arguments[0] in ("train", "verify", "timeline"):
        files = [text for text in settings if "=" not in text]
        assert len(files) <= 1, where
        job_config(next(iter(files), None), [each for each in settings if "=" in each and "stge" not in each])


def test_code_is_fenced_with_its_language() -> None:
    """An indented block is a drawing or an output: neither a command, nor TOML or Python."""
    for page in WRITTEN:
        for block in blocks_of(page):
            assert block.language in ("python", "toml", "sh", "console", "text"), f"{page.name}:{block.line}"
        for indented in re.findall(r"(?:^    .*\n)+", outside_blocks(page), re.M):
            first = indented.strip().partition("\n")[0]
            assert not re.match(r"(\$ |(shardwise|torchrun|srun|make|pip|python|import|from|with) [\w-]+)", first), (
                f"{page.name}: {first}"
            )


def test_links_lead_to_files() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name} links to {link}"


def spans(page: Path) -> list[str]:
    """The texts in backticks of a page, outside its blocks of code; those of a list's indented lines are among them."""
    prose, is_list = [], False
    for line in outside_blocks(page).split("\n"):
        if line and not line.startswith(" "):
            is_list = re.match(r"(-|\d+\.) ", line) is not None
        if is_list or not line.startswith("    "):
            prose.append(line.strip())
    return re.findall("`([^`]+)`", "\n".join(prose))


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


def test_the_pictures_of_the_packages_are_those_of_the_linter() -> None:
    """A row for each layer: in the page with a star at each package of the core, in AGENTS.md between `>`."""
    linter = configparser.ConfigParser()
    linter.read(ROOT / ".importlinter")
    layers = [
        {name.strip().removeprefix("shardwise.") for name in line.split("|")}
        for line in linter["importlinter:contract:house"]["layers"].split("\n")
        if line
    ]
    page = (ROOT / "docs" / "architecture.md").read_text().partition("## Import layers")[2].partition("## ")[0]
    rows = [row.split(" | ") for row in re.findall(r"^    (\S+(?: \| \S+)*)  ", page, re.M)]
    assert [{name.removesuffix("*") for name in row} for row in rows] == layers
    assert {name[:-1] for row in rows for name in row if name.endswith("*")} == CORE
    (line,) = re.findall(r"^    (cli > .+\n.+)$", (ROOT / "AGENTS.md").read_text(), re.M)
    assert [set(re.findall(r"\w+", layer)) for layer in line.split(">")] == layers


def test_a_function_named_after_its_file_is_in_it() -> None:
    text = (ROOT / "docs" / "extending.md").read_text()
    pairs = re.findall(r"`([\w/]+\.py)`: `([\w.]+)`", re.sub(r"\s+", " ", text))
    assert pairs
    for path, name in pairs:
        words = re.findall(r"\w+", (ROOT / "src" / "shardwise" / path).read_text())
        assert name.split(".")[-1] in words, f"`{path}` has no `{name}`"


def test_the_script_of_own_loops_is_as_long_as_it_says() -> None:
    page = ROOT / "docs" / "own-loops.md"
    script = next(block for block in blocks_of(page) if block.language == "python")
    assert re.findall(r"has (\d+) lines", page.read_text()) == [str(len(script.text.splitlines()))]
