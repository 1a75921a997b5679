"""Judges from source code whether what a forward reads from an attribute can reach its results.

A value that is only printed, logged, cleared, appended to or kept cannot. What the code does not show counts as one
that can: calls of functions that are not known, values that are returned, conditions around anything but logging.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FrameType
from typing import Final

from shardwise.runtime.class_swap import watch_attributes

Place = tuple[CodeType, int]
"""Names a place in code: the code, and the index of the instruction."""

Site = tuple[Place, ...]
"""Names a place that reads an attribute, and those that have called it, from the inside out."""

_MOST_CALLS: Final = 4


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LOGS: Final = _words(
    "print pprint log debug info warn warning error exception critical write info_once warning_once log_dict "
    "log_metric log_metrics add_scalar add_scalars add_text add_histogram"
)
_KEEPS: Final = _words(
    "clear append appendleft extend add update insert discard pop popleft popitem reset start stop tick zero_"
)
_COMPUTES: Final = _words(
    "abs bool float int str repr format round len min max sum sorted list tuple isinstance type hasattr getattr "
    "time perf_counter monotonic process_time sqrt log log10 exp isnan isinf isfinite fmean get keys values items "
    "copy join item tolist detach cpu clone mean norm std var numel size dim median total_seconds now strftime"
)
_PASSED_ON: Final = (
    ast.BinOp,
    ast.UnaryOp,
    ast.Compare,
    ast.JoinedStr,
    ast.FormattedValue,
    ast.Tuple,
    ast.List,
    ast.Set,
    ast.Dict,
    ast.Starred,
    ast.Slice,
    ast.keyword,
)
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_UNSEEN: Final = (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)


def site_of(frame: FrameType) -> Site:
    """Return the place that a frame is at, with its callers in code of users."""
    site, caller = [(frame.f_code, frame.f_lasti)], frame.f_back
    while caller is not None and len(site) < _MOST_CALLS:
        module = caller.f_globals.get("__name__", "")
        if module != watch_attributes.__module__:  # whose code is between a property and what reads it
            if _is_others(module):
                break
            site.append((caller.f_code, caller.f_lasti))
        caller = caller.f_back
    return tuple(site)


def _is_others(module: str) -> bool:
    """Say whether a Python module is torch's, the library's, or one of Python's own that are under classes."""
    return module.startswith(("torch.", "shardwise.", "builtins", "typing", "abc"))


class AttributeReads:
    """Holds the places that read attributes of modules, and knows the source files of these."""

    def __init__(self) -> None:
        self._sites: dict[str, set[Site]] = {}  # by the full name of the attribute
        self._judged: dict[tuple[Site, str], frozenset[str] | None] = {}

    def note(self, label: str, site: Site) -> None:
        """Take note that an attribute is read.

        Args:
            label: the full name of the attribute.
        """
        self._sites.setdefault(label, set()).add(site)

    def kept(self, label: str) -> frozenset[str] | None:
        """Return the attributes that take the value of one over; None where it may reach the results."""
        taken, left = {label}, [label]
        prefix = label[: label.rfind(".") + 1]
        while left:
            reader = left.pop()
            for site in self._sites.get(reader, ()):
                names = self.judge(site, reader.removeprefix(prefix))
                if names is None:
                    return None
                new = {f"{prefix}{name}" for name in names} - taken
                taken |= new
                left += new
        return frozenset(taken)

    def labels(self) -> list[str]:
        """Return the full names of the attributes that are read."""
        return sorted(self._sites)

    def are_harmless_in(self, kind: type, name: str, is_variable: bool = False) -> bool:
        """Say whether no code of a class lets an attribute reach its results.

        Args:
            is_variable: it is a variable of the Python module.
        """
        for each in own_classes(kind):
            try:
                file = _file_of(inspect.getsourcefile(each) or "")
            except (TypeError, OSError):  # it was typed in
                return False
            nodes = file.reads_in(each.__qualname__, name, is_variable)
            if any(_Flow(file, node, node).kept() is None for node in nodes):
                return False
        return True

    def judge(self, site: Site, name: str) -> frozenset[str] | None:
        """Return the same for one place that reads the attribute."""
        if (site, name) not in self._judged:
            file, node = self._find(site[0], name)
            flow = None if node is None or file is None else _Flow(file, node, node, site[1:])
            self._judged[site, name] = None if flow is None else flow.kept()
        return self._judged[site, name]

    def clears(self, site: Site, name: str) -> bool:
        """Say whether the place reads the attribute only to empty it."""
        file, node = self._find(site[0], name)
        if file is None or node is None:
            return False
        parent = file.parents[node]
        if isinstance(parent, ast.Subscript):
            is_slice = isinstance(parent.slice, ast.Slice) and parent.slice.lower is parent.slice.upper is None
            return is_slice and isinstance(file.parents[parent], ast.Delete)
        return isinstance(parent, ast.Attribute) and parent.attr == "clear" and file.is_called_alone(parent)

    def _find(self, place: Place, name: str) -> tuple[_File | None, ast.expr | None]:
        """Return the file of a place, and the expression there that reads the attribute."""
        file, nodes = _nodes_at(place)
        for node in nodes:
            named = node.args[1] if isinstance(node, ast.Call) and len(node.args) > 1 else None
            is_getattr = isinstance(named, ast.Constant) and named.value == name
            if is_getattr or (isinstance(node, ast.Attribute) and node.attr == name):
                return file, node
        return None, None


def _nodes_at(place: Place) -> tuple[_File, list[ast.expr]]:
    """Return the file of a place, and the expressions there."""
    code, instruction = place
    file = _file_of(code.co_filename)
    span = [*code.co_positions()][instruction // 2] if instruction >= 0 else ()
    return file, file.by_span.get(span, [])


class _File:
    """Holds the expressions of a source file by their place, and the node around each node."""

    def __init__(self, name: str) -> None:
        self.parents: dict[ast.AST, ast.AST] = {}
        self.by_span: dict[tuple[int | None, ...], list[ast.expr]] = {}
        try:
            tree = ast.parse("".join(linecache.getlines(name)))
        except (SyntaxError, ValueError):
            return
        for node in ast.walk(tree):
            self.parents.update(dict.fromkeys(ast.iter_child_nodes(node), node))
            if isinstance(node, ast.Attribute | ast.Call):
                span = node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
                self.by_span.setdefault(span, []).append(node)

    def reads_in(self, class_name: str, name: str, is_variable: bool) -> list[ast.expr]:
        """Return the reads of an attribute, or of a variable, in the code of a class.

        Args:
            class_name: qualified by what it is in.
        """
        kind, field_name = (ast.Name, "id") if is_variable else (ast.Attribute, "attr")
        return [
            node
            for node in self.parents
            if isinstance(node, kind) and getattr(node, field_name) == name and isinstance(node.ctx, ast.Load)
            if self._class_of(node) == class_name
        ]

    def _class_of(self, node: ast.AST) -> str:
        """Return the qualified name of the class that a node is in."""
        outer = self.around(node, (ast.ClassDef,))
        names: list[str] = []
        while isinstance(outer, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names[:0] = [outer.name] if isinstance(outer, ast.ClassDef) else [outer.name, "<locals>"]
            outer = self.around(self.parents[outer], (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        return ".".join(names)

    def is_called_alone(self, function: ast.expr) -> bool:
        """Say whether an expression is called, and nothing takes what the call returns."""
        call = self.parents[function]
        return isinstance(call, ast.Call) and call.func is function and isinstance(self.parents[call], ast.Expr)

    def around(self, node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> ast.AST | None:
        """Return the innermost node of some kind around a node."""
        outer: ast.AST | None = node
        while outer is not None and not isinstance(outer, kinds):
            outer = self.parents.get(outer)
        return outer


@lru_cache(maxsize=64)  # to parse a model's file takes a part of a second
def _file_of(name: str) -> _File:
    return _File(name)


@dataclass
class _Flow:
    """Follows a value through a function.

    Attributes:
        start: the expression whose value it is.
        read: the one that reads it from an attribute of the module.
        callers: the places that have called the function.
        keys: parameters of the function that are names of items.
        is_in_method: it is followed in a method that is called with it.
        names: local variables that take it over.
        attributes: of the same module that take it over.
    """

    file: _File
    start: ast.expr
    read: ast.expr
    callers: Site = ()
    keys: frozenset[str] = frozenset()
    is_in_method: bool = False
    names: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)

    def kept(self) -> frozenset[str] | None:
        """Return the attributes of the module that take the value over; None where it may reach the results."""
        return frozenset(self.attributes) if self._ends(self.start) else None

    def _ends(self, node: ast.AST) -> bool:
        """Say whether the value of an expression is followed to ends that reach no result."""
        parent = self.file.parents.get(node)
        if isinstance(parent, ast.Expr):
            return True
        if isinstance(parent, ast.Attribute):
            return self._ends_in_part(parent)
        if isinstance(parent, ast.Subscript):
            return self._ends_in_item(parent, node)
        if isinstance(parent, ast.Call):
            return self._ends_in_call(parent, node)
        if isinstance(parent, _PASSED_ON):
            return self._ends(parent)
        if isinstance(parent, ast.Return):
            return self._ends_in_caller()
        if isinstance(parent, ast.BoolOp | ast.IfExp):
            return all(map(self._only_computes, ast.iter_child_nodes(parent))) and self._ends(parent)
        if isinstance(parent, ast.Assign | ast.AnnAssign | ast.AugAssign):
            return self._ends_in_assignment(parent, node)
        if isinstance(parent, ast.If | ast.While):
            return all(map(self._is_quiet, [*parent.body, *parent.orelse]))
        if isinstance(parent, ast.For):
            return self._takes(parent.target) and all(map(self._is_quiet, [*parent.body, *parent.orelse]))
        if isinstance(parent, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            return self._ends(parent)
        if isinstance(parent, ast.comprehension):  # all that is made of its items is in its value
            made = self.file.parents[parent]
            return self._only_computes(made) and self._ends(made)
        return False

    def _ends_in_assignment(self, parent: ast.Assign | ast.AnnAssign | ast.AugAssign, node: ast.AST) -> bool:
        targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
        if node in targets:
            return True
        # Another name may stand for the object that is added to.
        is_added = isinstance(parent, ast.AugAssign) and isinstance(parent.target, ast.Name)
        return not is_added and all(map(self._takes, targets))

    def _ends_in_caller(self) -> bool:
        """Follow what the function returns, which is a property's or has been called by a name that is not known."""
        file, nodes = _nodes_at(self.callers[0]) if self.callers else (self.file, [])
        function = self.file.around(self.read, _FUNCTIONS)
        for node in nodes:
            read = node.func if isinstance(node, ast.Call) else node
            if isinstance(function, ast.FunctionDef) and _name_of(read) == function.name:
                return self._adds(_Flow(file, node, read, self.callers[1:]))
        return False

    def _adds(self, other: _Flow) -> bool:
        """Add what the flow of the value in another function has found."""
        kept = other.kept()
        self.attributes |= kept or set()
        return kept is not None

    def _ends_in_part(self, part: ast.Attribute) -> bool:
        call = self.file.parents[part]
        if isinstance(call, ast.Call) and call.func is part:
            if self.file.is_called_alone(part):
                return part.attr in _KEEPS | _LOGS
            return part.attr in _COMPUTES and self._ends(call)
        return not isinstance(part.ctx, ast.Load) or self._ends(part)

    def _ends_in_item(self, item: ast.Subscript, node: ast.AST) -> bool:
        if isinstance(item.ctx, ast.Load):
            return self._ends(item)
        if item.value is not node:  # it is the key
            return isinstance(item.ctx, ast.Store) and self._takes(item)
        return isinstance(item.ctx, ast.Store) or isinstance(item.slice, ast.Slice)

    def _ends_in_call(self, call: ast.Call, node: ast.AST) -> bool:
        """Follow an argument."""
        if self._only_logs(call) or self._ends_in_method(call, node):
            return True
        return _name_of(call.func) in _COMPUTES and not self._is_own(call.func) and self._ends(call)

    def _ends_in_method(self, call: ast.Call, argument: ast.AST) -> bool:
        """Follow an argument into a method of the same class, whose call stands alone."""
        outer = self.file.around(self.read, (ast.ClassDef,))
        body = outer.body if isinstance(outer, ast.ClassDef) and self._is_own(call.func) else []
        named = (node for node in body if isinstance(node, ast.FunctionDef) and not node.decorator_list)
        method = next((node for node in named if node.name == _name_of(call.func)), None)
        if method is None or self.is_in_method or not isinstance(self.file.parents[call], ast.Expr):
            return False
        own, *names = [arg.arg for arg in method.args.args]
        given = dict(zip(names, call.args, strict=False))
        name = next((name for name, value in given.items() if value is argument), "")
        read = ast.Attribute(ast.Name(own, ast.Load()), name, ast.Load())  # as if the method read it itself
        self.file.parents[read] = method
        keys = (name for name, each in given.items() if isinstance(each, ast.Constant) and isinstance(each.value, str))
        flow = _Flow(self.file, read, read, keys=frozenset(keys), is_in_method=True)
        is_followed = bool(name) and flow._ends_in_name(name)
        self.attributes |= flow.attributes
        return is_followed

    def _only_logs(self, call: ast.Call) -> bool:
        """Say whether a call only logs its arguments, or keeps them in an attribute of the module."""
        function, name = call.func, _name_of(call.func)
        if not isinstance(self.file.parents[call], ast.Expr) or self._is_own(function):
            return False
        is_kept = isinstance(function, ast.Attribute) and name in _KEEPS and self._is_own(function.value)
        return name in _LOGS or (is_kept and isinstance(function, ast.Attribute) and self._takes(function.value))

    def _takes(self, target: ast.AST) -> bool:
        """Follow what is assigned to a target, or written into it."""
        if isinstance(target, ast.Tuple | ast.List):
            return all(map(self._takes, target.elts))
        if isinstance(target, ast.Subscript):  # of a dict: an item of a tensor may be that of another one, too
            key = target.slice.value if isinstance(target.slice, ast.Constant) else None
            is_key = isinstance(key, str) or (isinstance(target.slice, ast.Name) and self._is_key(target))
            return is_key and self._is_own(target.value) and self._takes(target.value)
        if isinstance(target, ast.Attribute) and self._is_own(target):
            self.attributes.add(target.attr)
            return True
        return isinstance(target, ast.Name) and self._ends_in_name(target.id)

    def _is_key(self, item: ast.Subscript) -> bool:
        """Say whether a variable is a key: a parameter that is given as one, or what a loop over the dict gives."""
        name = ast.dump(item.slice)
        loop = self.file.around(item, (ast.For,))
        while isinstance(loop, ast.For) and name != ast.dump(loop.target).replace("Store()", "Load()"):
            loop = self.file.around(self.file.parents[loop], (ast.For,))
        is_loop = isinstance(loop, ast.For) and ast.dump(loop.iter) == ast.dump(item.value)
        return is_loop or (isinstance(item.slice, ast.Name) and item.slice.id in self.keys)

    def _ends_in_name(self, name: str) -> bool:
        function = self.file.around(self.read, _FUNCTIONS)
        if name in self.names or function is None:
            return function is not None
        self.names.add(name)
        for node in ast.walk(function):
            if isinstance(node, ast.Global | ast.Nonlocal) and name in node.names:
                return False
            is_read = isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load)
            if is_read and not self._ends(node):
                return False
        return True

    def _is_own(self, node: ast.AST) -> bool:
        """Say whether a node is an attribute of the module whose attribute is read."""
        base = self.read.args[0] if isinstance(self.read, ast.Call) else self.read
        module = base.value if base is self.read and isinstance(base, ast.Attribute) else base
        return isinstance(node, ast.Attribute) and ast.dump(node.value) == ast.dump(module)

    def _is_quiet(self, node: ast.stmt) -> bool:
        """Say whether a statement that may run or not reaches no result."""
        if isinstance(node, ast.Pass):
            return True
        if isinstance(node, ast.If):
            return self._only_computes(node.test) and all(map(self._is_quiet, [*node.body, *node.orelse]))
        if isinstance(node, ast.Assign | ast.AugAssign) and self._only_computes(node.value):
            return self._ends_in_assignment(node, node.value)
        if not isinstance(node, ast.Expr) or isinstance(node.value, ast.Constant):
            return isinstance(node, ast.Expr)
        call = node.value
        if not isinstance(call, ast.Call) or not self._only_logs(call):
            return False
        return all(map(self._only_computes, [*call.args, *(keyword.value for keyword in call.keywords)]))

    def _only_computes(self, expression: ast.AST) -> bool:
        """Say whether an expression does nothing but compute its value."""
        for inner in ast.walk(expression):
            if isinstance(inner, _UNSEEN):
                return False
            if isinstance(inner, ast.Call) and (_name_of(inner.func) not in _COMPUTES or self._is_own(inner.func)):
                return False
        return True


def own_classes(kind: type, with_joined: bool = False) -> list[type]:
    """Return the classes of the user in the bases of one: not torch's, Python's or the library's.

    Args:
        with_joined: also those that the library has joined with one of the user's, and that have its name.
    """
    own = [base for base in kind.__mro__ if not _is_others(base.__module__)]
    return [
        each for each in own if with_joined or each.__qualname__ not in {base.__qualname__ for base in each.__bases__}
    ]


def _name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""
