"""Answer every name of DeepSpeed's that has no file here, by the tables of `names`.

`sys.meta_path` gets one finder. A module of the tables is made of nothing but a `__getattr__`; what is neither there
nor in a file raises one sentence that says who answers for it. A class or function that is only imported, or compared
by `isinstance`, does no harm: a placeholder stands for it, which raises where it is called.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final, NoReturn

from shardwise.compat.deepspeed import names
from shardwise.config.errors import CodedError

_PREFIX: Final = "shardwise.compat.deepspeed"
_NOTHING: Final = object()


class MissingNameError(CodedError, NotImplementedError):
    """A name of DeepSpeed's is used that is not here; the message says who answers for it."""


class MissingModuleError(ModuleNotFoundError):
    """A module of DeepSpeed's is imported that is not here, or a name of one; the message says who answers for it."""


class _Placeholder(type):
    """Is the class of placeholders: it raises where one is called, and nothing is an instance of one."""

    sentence: str

    def __call__(cls, *args: Any, **options: Any) -> NoReturn:
        raise MissingNameError("deepspeed-name-missing", cls.sentence)

    def __getattr__(cls, name: str) -> NoReturn:
        raise AttributeError(f"no {name}: {cls.sentence}")


class _Module(ModuleType):
    """Is a module of the tables, and may be called where it has a function of its own name.

    A package's attribute is that function, or the module once it is imported.
    """

    def __call__(self, *args: Any, **options: Any) -> Any:
        return getattr(self, self.__name__.rpartition(".")[2])(*args, **options)


class Finder(MetaPathFinder, Loader):
    """Makes the modules that the tables have, and raises for those that are nowhere."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a module to make, or None for what DeepSpeed has no module of; the arguments are those of Python."""
        if not fullname.startswith(f"{_PREFIX}."):
            return None
        inner = fullname.removeprefix(f"{_PREFIX}.")
        if names.is_module(inner):
            return ModuleSpec(fullname, self, is_package=True)
        parent, _, name = inner.rpartition(".")
        # Python asks for a name of a module in the end, in `from module import name`.
        is_name = names.is_module(parent) if parent else name.isupper() or name.startswith("_")
        if is_name or names.answer_of(inner).fails_at_import:
            raise MissingModuleError(names.sentence(inner))
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module."""
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Give a module its `__getattr__`."""
        module.__getattr__ = answers(module.__name__)  # type: ignore[method-assign]


@cache
def placeholder(path: str) -> Any:
    """Return what stands for a class or function of DeepSpeed's, by its dotted name."""
    module, _, name = path.rpartition(".")
    return _Placeholder(name, (), {"__module__": _full("deepspeed", module), "sentence": names.sentence(path)})


def answers(module: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a module, by the module's own name.

    The module also gets a `__path__`, where it has none: without it Python asks no finder for `from module import
    name`, and says "cannot import name" itself.
    """
    path = module.removeprefix(_PREFIX).removeprefix(".")
    namespace = sys.modules[module]
    if not hasattr(namespace, "__path__"):
        namespace.__path__ = []

    def get(name: str) -> Any:
        if name.startswith("__") and not names.homes_of(path, name):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        for home in names.homes_of(path, name):
            if (member := _at_home(*home)) is not _NOTHING:
                return member
        inner = f"{path}.{name}".lstrip(".")
        try:
            if find_spec(_full(_PREFIX, inner)) is not None:
                return importlib.import_module(_full(_PREFIX, inner))
        except MissingModuleError:
            if name not in names.public_names(path) or name.isupper():
                raise AttributeError(names.sentence(inner)) from None
            return placeholder(inner)
        if name in names.public_names(path) and not name.isupper():
            return placeholder(inner)
        raise AttributeError(f"module {_full('deepspeed', path)!r} has no attribute {name!r}")

    return get


def _at_home(home: str, name: str) -> Any:
    is_outside = home.partition(".")[0] in ("torch", "shardwise")
    imported = importlib.import_module(home if is_outside else _full(_PREFIX, home))
    return getattr(imported, name, _NOTHING) if name else imported


def _full(prefix: str, path: str) -> str:
    return f"{prefix}.{path}" if path else prefix
