"""Count what the ratchets of `tests/data/ratchets.toml` hold: how large, how tangled and how well said the sources are.

    python benchmarks/house.py                       # this checkout
    python benchmarks/house.py OLD_CHECKOUT .        # two side by side
    python benchmarks/house.py --where small_modules # what is counted, line by line
    python benchmarks/house.py --packages            # lines and files of each package

Each measure reads the sources and imports none of them. `tests/unit/test_ratchets.py` holds them to their numbers.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Final

CORE: Final = frozenset(
    ("config", "layout", "schedule", "runtime", "comm", "optim", "zero", "tensor", "pipeline", "engine", "construction")
)
# Where an order, a wait, a stream or a lifetime matters, so comments say why.
COMMENTED: Final = frozenset(("zero", "comm", "pipeline", "offload"))
MAX_ATTRIBUTES: Final = 20
MAX_BOOLEANS: Final = 3
MAX_NOISE_WORDS: Final = 5
SMALL_MODULE_LINES: Final = 120
# Names that say a role in a sentence, not the thing.
VAGUE_NAMES: Final = frozenset(
    re.findall(r"\w+", "each found given whole part own known held kept here there kind place words")
)
# What a call at the level of a module may make: it is not changed, or is a registration that the language asks for.
FROZEN_CALLS: Final = frozenset(
    re.findall(
        r"\S+",
        """
        frozenset tuple MappingProxyType types.MappingProxyType TypeVar ParamSpec TypedDict TypeAdapter getattr
        logging.getLogger getLogger struct.Struct Path torch.device np.uint32 get_args object tl.constexpr
        re.compile importlib.import_module create_model os.environ.get max min
        """,
    )
)
SECTION: Final = re.compile(r"(Args|Attributes|Returns|Raises|Yields|Examples?|Notes?|Methods|References):")
ENTRY: Final = re.compile(r"    (\*{0,2}\w+(?:, \*{0,2}\w+)*): ?(.*)")
Functions = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Sources:
    """Holds the Python files of a checkout's `src/shardwise`."""

    root: Path

    @cached_property
    def trees(self) -> Mapping[str, ast.Module]:
        """Path below `src/shardwise` -> its syntax tree."""
        return {name: ast.parse(text) for name, text in self.texts.items()}

    @cached_property
    def texts(self) -> Mapping[str, str]:
        folder = self.root / "src" / "shardwise"
        return {
            str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))
        }

    @cached_property
    def modules(self) -> Mapping[str, str]:
        """Dotted name of a module or package -> its path."""
        names = (Path("shardwise", path).with_suffix("").as_posix().replace("/", ".") for path in self.texts)
        return {name.removesuffix(".__init__"): path for name, path in zip(names, self.texts, strict=True)}

    def of(self, packages: frozenset[str]) -> Iterator[tuple[str, ast.Module]]:
        return ((path, tree) for path, tree in self.trees.items() if path.split("/")[0] in packages)


@cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a tree, which many measures look at."""
    return tuple(ast.walk(tree))


def targets(node: ast.AST) -> list[ast.expr]:
    """The expressions that a statement assigns to."""
    if isinstance(node, ast.Assign):
        return [part for target in node.targets for part in (getattr(target, "elts", None) or [target])]
    return [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []


def is_of_self(target: ast.expr) -> bool:
    return (
        isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")
    )


def attributes_of(owner: ast.ClassDef) -> dict[str, str | None]:
    """Attribute of a class's objects -> its type as written, where that can be seen."""
    types: dict[str, str | None] = {
        node.target.id: ast.unparse(node.annotation)
        for node in owner.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if "ClassVar" not in ast.unparse(node.annotation)
    }
    for method in owner.body:
        if isinstance(method, Functions):
            arguments = (*method.args.args, *method.args.kwonlyargs)
            of_arguments = {arg.arg: ast.unparse(arg.annotation) for arg in arguments if arg.annotation}
            for node in ast.walk(method):
                for target in filter(is_of_self, targets(node)):
                    if isinstance(target, ast.Attribute) and types.get(target.attr) is None:
                        types[target.attr] = type_of(node, of_arguments)
    return types


def type_of(node: ast.AST, of_arguments: Mapping[str, str]) -> str | None:
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.annotation)
    value = getattr(node, "value", None)
    if isinstance(value, ast.Name):
        return of_arguments.get(value.id)
    is_bool = isinstance(value, ast.Compare) or (isinstance(value, ast.Constant) and isinstance(value.value, bool))
    return "bool" if is_bool or (isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not)) else None


def classes(sources: Sources) -> Iterator[tuple[str, dict[str, str | None]]]:
    for path, tree in sources.trees.items():
        for node in nodes(tree):
            if isinstance(node, ast.ClassDef):
                yield f"{path}: {node.name}", attributes_of(node)


def large_classes(sources: Sources) -> list[str]:
    """Attributes over 20 of each class."""
    return [
        f"{where}: attribute {number} is {name}"
        for where, types in classes(sources)
        for number, name in enumerate(types, start=1)
        if number > MAX_ATTRIBUTES
    ]


def flagged_classes(sources: Sources) -> list[str]:
    """Boolean attributes over three of each class."""
    return [
        f"{where}: boolean {number} is {name}"
        for where, types in classes(sources)
        for number, name in enumerate((name for name, kind in types.items() if kind == "bool"), start=1)
        if number > MAX_BOOLEANS
    ]


def foreign_writes(sources: Sources) -> list[str]:
    """Assignments to a field of another object than self, in the core.

    But for those of `ctx`, which torch gives an `autograd.Function` for its fields.
    """
    return [
        f"{path}:{target.lineno}: {ast.unparse(target)}"
        for path, tree in sources.of(CORE)
        for node in nodes(tree)
        for target in targets(node)
        if isinstance(target, ast.Attribute) and not is_of_self(target) and ast.unparse(target.value) != "ctx"
    ]


def docstrings(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in nodes(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Functions):
            yield getattr(node, "name", "the module"), ast.get_docstring(node) or ""


def entries_of(docstring: str) -> Iterator[tuple[str, str]]:
    """Argument or attribute, and what `Args:` or `Attributes:` says of it."""
    section, entries = "", []
    for line in docstring.splitlines():
        if header := SECTION.fullmatch(line):
            section = header[1]
        elif line and not line.startswith(" "):
            section = ""
        elif section in ("Args", "Attributes"):
            if entry := ENTRY.match(line):
                entries.append([entry[1], entry[2]])
            elif line.strip() and entries:
                entries[-1][1] += f" {line.strip()}"
    return ((name, text) for name, text in entries)


def noise(sources: Sources) -> list[str]:
    """Entries of `Args:` and `Attributes:` of at most five words: a type and a name say as much."""
    return [
        f"{path}: {owner}: {name}: {text}"
        for path, tree in sources.trees.items()
        for owner, docstring in docstrings(tree)
        for name, text in entries_of(docstring)
        if len(text.split()) <= MAX_NOISE_WORDS
    ]


def aliases(sources: Sources) -> list[str]:
    """Imports of our own modules under another name."""
    return [
        f"{path}: {node.module}.{name.name} as {name.asname}"
        for path, tree in sources.trees.items()
        for node in nodes(tree)
        if isinstance(node, ast.ImportFrom)
        for name in node.names
        if name.asname not in (None, name.name) and f"{node.module}.{name.name}" in sources.modules
    ]


def frozen_classes(sources: Sources) -> set[str]:
    """Names of our classes whose objects do not change: frozen dataclasses, named tuples, enums, sections."""
    return {
        node.name
        for tree in sources.trees.values()
        for node in nodes(tree)
        if isinstance(node, ast.ClassDef)
        if any("frozen=True" in ast.unparse(each) for each in node.decorator_list)
        or any(ast.unparse(base) in ("NamedTuple", "Enum", "Section") for base in node.bases)
    }


def module_state(sources: Sources) -> list[str]:
    """Objects at the level of a module that may change: containers, context variables, objects of our classes."""
    frozen = frozen_classes(sources)
    functions = {node.name for tree in sources.trees.values() for node in tree.body if isinstance(node, Functions)}
    return [
        f"{path}:{node.lineno}: {ast.unparse(node)[:80]}"
        for path, tree in sources.trees.items()
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call)
        if (called := ast.unparse(node.value.func)) not in FROZEN_CALLS
        # A config is frozen, and so is what it resolves to.
        if called.rpartition(".")[2] not in frozen | functions | {"resolve"}
        and not called.startswith(("click.", "Path(__file__)"))
    ]


def importers(sources: Sources) -> Mapping[str, set[str]]:
    """Path of a module -> paths of the modules that import it."""
    found: dict[str, set[str]] = defaultdict(set)
    for path, tree in sources.trees.items():
        for node in nodes(tree):
            names = [name.name for name in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}", *(f"{node.module}.{name}" for name in names)]
            for name in names:
                if name in sources.modules and name != "shardwise":
                    found[sources.modules[name]].add(path)
    return found


def small_modules(sources: Sources) -> list[str]:
    """Modules of under 120 lines that one other module imports, where what is one page could be one file."""
    of = importers(sources)
    return [
        f"{path}, for {min(of[path])}"
        for path, text in sources.texts.items()
        if not path.endswith("__init__.py") and text.count("\n") < SMALL_MODULE_LINES and len(of[path]) == 1
        if not path.startswith(("cli/", "compat/"))  # a file is a command, or a module that scripts import
        and "\nimport triton\n" not in text  # what needs Triton is imported when a kernel is first launched
    ]


def vague_names(sources: Sources) -> list[str]:
    """Bindings of names that say a role in a sentence."""
    return [
        f"{path}:{node.lineno}: {node.id}"
        for path, tree in sources.trees.items()
        for node in nodes(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE_NAMES
    ]


def lines(sources: Sources) -> list[str]:
    """Lines of all files."""
    return [line for text in sources.texts.values() for line in text.splitlines()]


def comment_lines(text: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = (token for token in tokens if token.type == tokenize.COMMENT)
    return len({token.start[0] for token in comments if not re.match(r"#\s*(type:|noqa|pragma|fmt)", token.string)})


def comment_permille(sources: Sources) -> int:
    """Lines with a comment, of a thousand, in zero, comm, pipeline and offload."""
    texts = [sources.texts[path] for path, _ in sources.of(COMMENTED)]
    return 1000 * sum(map(comment_lines, texts)) // sum(text.count("\n") for text in texts)


# May only fall.
COUNTS: Final[Mapping[str, Callable[[Sources], list[str]]]] = MappingProxyType(
    {
        measure.__name__: measure
        for measure in (
            lines,
            large_classes,
            flagged_classes,
            foreign_writes,
            noise,
            aliases,
            module_state,
            small_modules,
            vague_names,
        )
    }
)


def measure_all(sources: Sources) -> dict[str, int]:
    """Measure -> its number; `comment_permille` may only rise, the others only fall."""
    return {name: len(count(sources)) for name, count in COUNTS.items()} | {
        "comment_permille": comment_permille(sources)
    }


def packages_table(sources: Sources) -> dict[str, str]:
    total, files = Counter[str](), Counter[str]()
    for path, text in sources.texts.items():
        package = path.split("/")[0] if "/" in path else "top"
        total[package] += text.count("\n")
        files[package] += 1
    return {name: f"{number:,} in {files[name]}" for name, number in sorted(total.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[Path(__file__).parents[1]])
    parser.add_argument("--where", choices=COUNTS, help="list what this measure counts in the last checkout")
    parser.add_argument("--packages", action="store_true", help="lines and files of each package")
    options = parser.parse_args()
    all_sources = [Sources(checkout) for checkout in options.checkouts]
    if options.where:
        print(*COUNTS[options.where](all_sources[-1]), sep="\n")
        return
    tables = [packages_table(each) if options.packages else measure_all(each) for each in all_sources]
    for name in dict.fromkeys(name for table in tables for name in table):
        print(f"{name:18}", *(f"{table.get(name, 0):>16}" for table in tables))


if __name__ == "__main__":
    main()
