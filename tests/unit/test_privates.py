"""No class reads the private attributes of another."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from harness.paths import SOURCE

PACKAGES = ("engine", "zero", "pipeline", "comm")
# Public all the same: of named tuples, and of Python itself.
PUBLIC = frozenset(("_asdict", "_fields", "_make", "_replace", "_current_frames"))


def own_names(owner: ast.ClassDef) -> set[str]:
    """The private names that a class itself defines: it may read them of another object of its class."""
    methods = {each.name for each in owner.body if isinstance(each, ast.FunctionDef)}
    declared = [each.target for each in owner.body if isinstance(each, ast.AnnAssign)]
    fields = {ast.unparse(each) for each in declared}
    assigned = {
        each.attr
        for each in ast.walk(owner)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self"
    }
    return methods | fields | assigned


def foreign_privates(node: ast.AST, own: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield each `x._y` where x is not self, cls or super(), and `_y` is not of the class around it."""
    if isinstance(node, ast.ClassDef):
        own = own | own_names(node)
    if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
        owner = node.value.func if isinstance(node.value, ast.Call) else node.value
        is_own = isinstance(owner, ast.Name) and (owner.id in ("self", "cls", "super") or node.attr in own)
        if not is_own and node.attr not in PUBLIC:
            yield f"{node.lineno}: {ast.unparse(node)}"
    for child in ast.iter_child_nodes(node):
        yield from foreign_privates(child, own)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_class_reads_the_privates_of_another(package: str) -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{each}"
        for path in sorted((SOURCE / package).rglob("*.py"))
        for each in foreign_privates(ast.parse(path.read_text()))
    ]
    assert not found, "\n".join(["give what is read here a public name:", *found])
