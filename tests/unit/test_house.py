"""The rules of the house that no linter knows: budgets, and who alone may do what."""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from harness.paths import ROOT, SOURCE

pytestmark = pytest.mark.begin

FILES = sorted(SOURCE.rglob("*.py"))
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_ARGUMENTS = 8

# pattern: the only files, or folders, in which it may stand
ALONE = {
    r"\btorch\._(?!foreach_)[a-zA-Z]|from torch\._[a-zA-Z]|\b_execution_engine\b|torch\.utils\._": {
        "runtime/torch_private.py"
    },
    # torch documents its functions over lists.
    r"\btorch\._foreach_": {"runtime/torch_private.py", "optim/"},
    r"dist\.(all_|reduce|broadcast|isend|irecv|send|recv|gather|scatter|barrier|batch_)": {
        "comm/backends.py",
        "launch/",
    },
    r"\.register_(forward|full_backward|post_accumulate|hook)|\.register_hook": {
        "runtime/module_calls.py",
        "runtime/module_hooks.py",
        "runtime/user_hooks.py",
    },
    # Kernels and the doctor name the devices that they are for; a config and a catalogue name what users have.
    r"torch\.(cuda|xpu|npu|mps|accelerator)\b|from torch import .*\b(cuda|xpu|mps)\b|\.is_cuda\b"
    r"|['\"](cuda|xpu|npu|mps|nccl|xccl|hccl)['\":]": {
        "runtime/device.py",
        "runtime/fp8_linears.py",
        "attention/triton/",
        "doctor/",
        "config/sections.py",
        "config/other_tools.py",
        "planner/hardware.py",
    },
    r"\.__class__ = ": {"runtime/class_swap.py", "runtime/torch_private.py"},
    r"os\.environ|os\.getenv": {"cli/", "launch/"},
}

# A word that the glossary does not have: the word that it has.
WORDS = {
    **dict.fromkeys(("room", "rooms"), "space, memory, budget or buffer"),
    **dict.fromkeys(("rest", "rests", "rested", "resting"), "tier, storage or stored; 'the rest of' is allowed"),
    **dict.fromkeys(("holding", "holdings"), "state shard"),
    **dict.fromkeys(("books", "ledger"), "counters, records or memory tracker"),
    **dict.fromkeys(("conceal", "conceals", "concealed"), "reshard"),
    **dict.fromkeys(("wear", "wears", "wearing", "worn", "wore"), "swap the class"),
    **dict.fromkeys(("lane", "lanes"), "stream, worker thread or row"),
    **dict.fromkeys(("travel", "travels", "travelled"), "is sent"),
    **dict.fromkeys(("letter", "letters", "letterbox"), "message"),
    **dict.fromkeys(("flight", "flights"), "micro-batches in flight"),
    **dict.fromkeys(("ghost", "ghosts"), "placeholder"),
    **dict.fromkeys(("told", "untold"), "said, recorded or known"),
    **dict.fromkeys(("outline", "outlines"), "candidate"),
    **dict.fromkeys(("practice", "practices"), "framework traits"),
    **dict.fromkeys(("cure", "cures"), "fix"),
    **dict.fromkeys(("sweep", "sweeps"), "pass"),
    **dict.fromkeys(("whoever", "nobody", "somebody"), "a rank, a user or none"),
    **dict.fromkeys(("anew", "likewise", "alike"), "again, also, equal"),
    **dict.fromkeys(("lies", "befall", "befalls"), "is, happens"),
    "behind": "after",
    "else's": "another rank's",
    "aside": "moved out, kept or renamed",
    "sight": "visibility",
}
# What is written in such words all the same: the field's own phrases, and names that files and users have.
ALLOWED = re.compile(
    r"at[ _]rest|in[ _]?flight|(\b|_)the[ _]rest(\b|_)|\*rest\b|above rest|\"at\", \"rest\""
    r"|(capital|lower-case) letters?|\bin practice\b|\bholding (?=\w)"
    r"|\.aside-|save aside|[\"`](lane|cures?|sweeps)[\"`]|num_outlines|_sweep\b"
    r"|sweeps?( of layouts|, mean|, tau| at a few)",
    re.IGNORECASE,
)
CODE = re.compile(r"(?=.{3,40}$)[a-z0-9]+(-[a-z0-9]+){1,4}")
# Codes of rules that several packages state; any other code is of one package.
SHARED_CODES = frozenset(
    re.findall(
        r"\S+",
        """
    gpu-count-positive batch-equation batch-misfit batch-multiple config-not-resolved cp-divides-tokens dropout-rate
    engine-closed extra-missing extra-not-json file-unreadable heads-divide-hidden kv-heads-divide-heads layout-heads
    layout-length model-not-named no-checkpoint no-swap-folder no-whole-checkpoint not-a-folder not-json
    not-utf8 operand-device optimizer-element-wise options-not-read parameter-released
    parameter-written parts-fill-dim pipeline-rank-alone
    qkv-dtype-device qkv-empty hf-json-malformed model-not-buildable nested-too-deep
    model-size-unknown
    rank-out-of-range sparse-gradient store-silent too-little-space tp-divides-tokens unknown-parameter
    """,
    )
)


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file, which is not to be changed."""
    return ast.parse(text_of(path))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in nodes_of(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's tree; to walk it takes long, and many tests look at each."""
    return tuple(ast.walk(tree_of(path)))


@cache
def one_line(path: Path) -> str:
    """A file's text in a single line, in which an expression is found however it is broken."""
    return re.sub(r"\s*\n\s*", "", text_of(path))


@cache
def code_lines(path: Path) -> list[str]:
    """The lines of a file without its docstrings and comments, which may name anything."""
    tree = ast.parse(text_of(path))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [
                each for each in body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
            ] or [ast.Pass()]
    return ast.unparse(tree).splitlines()


def test_budgets() -> None:
    over = []
    for path in FILES:
        name, text = path.relative_to(SOURCE), text_of(path)
        if text.count("\n") > MAX_FILE_LINES:
            over.append(f"{name} has {text.count(chr(10))} lines")
        for node in functions(path):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                over.append(f"{name}: {node.name} has {length} lines")
            arguments = [each for each in (*node.args.args, *node.args.kwonlyargs) if each.arg not in ("self", "cls")]
            # What another library's callers pass is its choice.
            if len(arguments) > MAX_ARGUMENTS and name.parts[0] != "compat":
                over.append(f"{name}: {node.name} takes {len(arguments)} arguments")
    assert not over


@pytest.mark.parametrize("pattern", ALONE, ids=lambda pattern: pattern[:24])
def test_only_one_place_may(pattern: str) -> None:
    for path in FILES:
        name = str(path.relative_to(SOURCE))
        is_allowed = any(name == place or (place.endswith("/") and name.startswith(place)) for place in ALONE[pattern])
        if not is_allowed and re.search(pattern, one_line(path)):
            found = [line for line in code_lines(path) if re.search(pattern, line)]
            assert not found, f"{name}: {found[0].strip()}"


def test_a_layout_reads_no_module() -> None:
    """It is resolved from the facts of a model, which `construction/scan.py` reads."""
    for path in SOURCE.glob("layout/*.py"):
        found = [line for line in code_lines(path) if re.search(r"\bnn\b|\.named_|\b(inspect|ast)\b", line)]
        assert not found, f"{path.name}: {found[0].strip()}"


def test_no_module_level_mutable_state() -> None:
    found = []
    for path in FILES:
        tree = tree_of(path)
        for node in tree.body:
            value = getattr(node, "value", None) if isinstance(node, ast.Assign | ast.AnnAssign) else None
            names = [ast.unparse(each) for each in getattr(node, "targets", [getattr(node, "target", None)]) if each]
            is_read_only = "Mapping" in ast.unparse(getattr(node, "annotation", ast.Pass()))
            is_mutable = isinstance(value, ast.Dict | ast.List | ast.Set | ast.ListComp | ast.DictComp)
            if is_mutable and names != ["__all__"] and not is_read_only:
                found.append((str(path), names))
        found += [(str(path), node.names) for node in nodes_of(path) if isinstance(node, ast.Global)]
    assert not found


def test_no_work_inside_assert() -> None:
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.Assert):
                calls = [ast.unparse(each.func) for each in ast.walk(node.test) if isinstance(each, ast.Call)]
                assert set(calls) <= {"isinstance", "len"}, f"{path}, line {node.lineno} calls {calls}"


# What a test calls, or writes, that can fail.
CHECKS = re.compile(r"\b(assert|raise|check(?!point)|refuse|require|verify|fail)")


def blocks_of(path: Path) -> dict[str, str]:
    """Name of a function, class or constant of a module -> its text, without a function's signature."""
    blocks = {}
    for block in re.split(
        r'(?<!"""\n)^(?=(?:async )?def |class |[A-Z_]+\b.* = )', path.read_text(), flags=re.MULTILINE
    ):
        name = re.match(r"(?:async def |def |class )?(\w+)", block)
        is_function = "def " in block.partition("\n")[0]
        if name is not None:
            blocks[name[1]] = re.split(r":\n", block, maxsplit=1)[-1] if is_function else block
    return blocks


def can_fail(name: str, blocks: dict[str, str]) -> bool:
    others = {other: text for other, text in blocks.items() if other != name and not other.startswith("test_")}
    called = sorted(set(re.findall(r"\w+", blocks[name])) & set(others))
    return CHECKS.search(blocks[name]) is not None or any(can_fail(each, others) for each in called)


def test_every_test_can_fail() -> None:
    blocks = {path: blocks_of(path) for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    tests = [(path, name) for path, of_path in blocks.items() for name in of_path if name.startswith("test_")]
    assert len(tests) > 3000
    found = [f"{path.relative_to(ROOT)}: {name}" for path, name in tests if not can_fail(name, blocks[path])]
    assert not found, "\n".join(["assert something in:", *found])


def words_in(line: str) -> list[str]:
    """The words of a line, or of lines, in lower case, those of its names too: `_HostRooms` has host and rooms."""
    spaced = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", ALLOWED.sub(" ", line)).replace("_", " ")
    return re.findall(r"else's|[a-z]+", spaced.lower())


def test_the_words_are_those_of_the_glossary() -> None:
    pages = [
        *sorted((ROOT / "docs").glob("*.md")),
        *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "AGENTS", "CHANGELOG")),
        *(path for folder in ("tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))),
    ]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {word!r} is not a word of ours; {WORDS[word]}: {line.strip()}"
        for path in (*FILES, *pages)
        if path.name != Path(__file__).name and not WORDS.keys().isdisjoint(words_in(text_of(path)))
        for number, line in enumerate(text_of(path).splitlines(), start=1)
        for word in words_in(line)
        if word in WORDS
    ]
    assert not found, "\n".join(found)


def coded_errors(nodes: Iterable[ast.AST]) -> set[str]:
    """The names of the classes that derive from CodedError."""
    bases = {
        node.name: {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }
    found = {"CodedError"}
    while more := {name for name, its in bases.items() if its & found} - found:
        found |= more
    return found


def called(node: ast.Call) -> str:
    """The last name of what is called."""
    return getattr(node.func, "attr", "") or getattr(node.func, "id", "")


def literals(code: ast.expr) -> list[str]:
    """The codes that an expression may be: a literal, either branch of a choice, what `code_of` falls back to."""
    if isinstance(code, ast.IfExp):
        return literals(code.body) + literals(code.orelse)
    if isinstance(code, ast.Call):
        return literals(code.args[-1])
    return [code.value] if isinstance(code, ast.Constant) else []


def test_notes_that_are_referred_to_exist_once() -> None:
    """`[Note: Title]` begins a note, and other places say `see [Note: Title]`; a title may go on in the next line."""
    text = "\n".join(re.sub(r"\n *# ", " ", text_of(path)) for path in FILES)
    found = re.findall(r"(see )?\[Note: ([^]]+)\]", text)
    notes = [title for see, title in found if not see]
    assert len(notes) == len(set(notes)) > 30
    assert {title for see, title in found if see} <= set(notes)


def test_every_error_has_a_code_and_a_code_is_one_rule() -> None:
    nodes = {path.relative_to(SOURCE): nodes_of(path) for path in FILES}
    errors, wrong, packages_of = coded_errors(itertools.chain(*nodes.values())), [], defaultdict(set)
    for path, its in nodes.items():
        for node in its:
            if isinstance(node, ast.Call) and called(node) in errors:
                codes = literals(node.args[0]) if len(node.args) > 1 else [""]
                if not all(CODE.fullmatch(code) for code in codes):
                    wrong.append(f"{path}:{node.lineno}: {ast.unparse(node)[:80]}")
                for code in codes:
                    packages_of[code].add(path.parts[0])
    assert not wrong, "\n".join(["the first argument of an error is no code of two to five words:", *wrong])
    shared = {code for code, packages in packages_of.items() if len(packages) > 1}
    assert sorted(shared - SHARED_CODES) == [], "list them above, if they state one rule in several packages"
