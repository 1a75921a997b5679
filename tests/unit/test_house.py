"""The rules of the house that no linter knows: budgets, and who alone may do what."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from harness.paths import SOURCE

FILES = sorted(SOURCE.rglob("*.py"))
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_ARGUMENTS = 8

# pattern: the only files, or folders, in which it may stand
ALONE = {
    r"\btorch\._[a-zA-Z]|from torch\._[a-zA-Z]|\b_execution_engine\b|torch\.utils\._": {"runtime/torch_private.py"},
    r"dist\.(all_|reduce|broadcast|isend|irecv|send|recv|gather|scatter|barrier|batch_)": {
        "comm/backends.py",
        "launch/",
    },
    r"\.register_(forward|full_backward|post_accumulate|hook)|\.register_hook": {"runtime/module_hooks.py"},
    r"torch\.cuda\.Stream\(": {"runtime/streams.py"},
    r"\.__class__ = ": {"runtime/class_swap.py", "runtime/param_guard.py"},
    r"os\.environ|os\.getenv": {"cli/", "launch/"},
}


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@cache
def code_lines(path: Path) -> list[str]:
    """The lines of a file without its docstrings and comments, which may name anything."""
    tree = ast.parse(path.read_text())
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
        name, text = path.relative_to(SOURCE), path.read_text()
        if text.count("\n") > MAX_FILE_LINES:
            over.append(f"{name} has {text.count(chr(10))} lines")
        for node in functions(ast.parse(text)):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                over.append(f"{name}: {node.name} has {length} lines")
            arguments = [each for each in (*node.args.args, *node.args.kwonlyargs) if each.arg not in ("self", "cls")]
            if len(arguments) > MAX_ARGUMENTS:
                over.append(f"{name}: {node.name} takes {len(arguments)} arguments")
    assert not over


@pytest.mark.parametrize("pattern", ALONE, ids=lambda pattern: pattern[:24])
def test_only_one_place_may(pattern: str) -> None:
    for path in FILES:
        name = str(path.relative_to(SOURCE))
        if not any(name == place or (place.endswith("/") and name.startswith(place)) for place in ALONE[pattern]):
            found = [line for line in code_lines(path) if re.search(pattern, line)]
            assert not found, f"{name}: {found[0].strip()}"


def test_no_module_level_mutable_state() -> None:
    found = []
    for path in FILES:
        tree = ast.parse(path.read_text())
        for node in tree.body:
            value = getattr(node, "value", None) if isinstance(node, ast.Assign | ast.AnnAssign) else None
            names = [ast.unparse(each) for each in getattr(node, "targets", [getattr(node, "target", None)]) if each]
            is_read_only = "Mapping" in ast.unparse(getattr(node, "annotation", ast.Pass()))
            is_mutable = isinstance(value, ast.Dict | ast.List | ast.Set | ast.ListComp | ast.DictComp)
            if is_mutable and names != ["__all__"] and not is_read_only:
                found.append((str(path), names))
        found += [(str(path), node.names) for node in ast.walk(tree) if isinstance(node, ast.Global)]
    assert not found


def test_no_work_inside_assert() -> None:
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assert):
                calls = [ast.unparse(each.func) for each in ast.walk(node.test) if isinstance(each, ast.Call)]
                assert set(calls) <= {"isinstance", "len"}, f"{path}, line {node.lineno} calls {calls}"
