"""Lists the public classes and functions of DeepSpeed by module, as `compat/deepspeed/names.txt` has them: names alone.

In the folder `tests`, with the unpacked source of a release, which is read and not imported:

    python -m harness.deepspeed_names deepspeed-0.19.8 > ../src/shardwise/compat/deepspeed/names.txt
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from shardwise.compat.deepspeed.names import answer_of

# Folders of the source, and the module that an installation makes of each.
ROOTS = {"deepspeed": "", "accelerator": "accelerator", "op_builder": "ops.op_builder"}


def definitions(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.If | ast.Try):
            yield from definitions([*node.body, *node.orelse])


def imports(tree: ast.Module, package: str) -> Iterator[tuple[str, str]]:
    """Yield the names that a package takes from its own modules, each with the module; `*` is all of them."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("deepspeed")):
            module = (node.module or "").removeprefix("deepspeed").removeprefix(".")
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            home = ".".join(each for each in (base, module) if each) if node.level else module
            yield from ((alias.asname or alias.name, home) for alias in node.names)


def names_by_module(source: Path) -> dict[str, set[str]]:
    trees: dict[str, ast.Module] = {}
    packages = set()
    for folder, root in ROOTS.items():
        for path in sorted((source / folder).rglob("*.py")):
            parts = [root, *path.relative_to(source / folder).with_suffix("").parts]
            module = ".".join(each for each in parts if each and each != "__init__")
            trees[module] = ast.parse(path.read_text())
            if path.stem == "__init__":
                packages.add(module)
    found = {module: set(definitions(tree.body)) for module, tree in trees.items()}
    for module in packages:
        for name, home in imports(trees[module], module):
            found[module] |= found.get(home, set()) if name == "*" else {name}
    # That package imports its builders when it is imported itself, by their files.
    of_package = (names for module, names in found.items() if module.startswith("ops.op_builder."))
    found["ops.op_builder"] |= {name for names in of_package for name in names if name.endswith("Builder")}
    return found


if __name__ == "__main__":
    for module, found in sorted(names_by_module(Path(sys.argv[1])).items()):
        is_test = "test" in module.rpartition(".")[2].split("_")
        if not is_test and not (module and answer_of(module).fails_at_import):
            print(f"{module}:", *sorted(name for name in found if not name.startswith("_") or name[1:2].isupper()))
