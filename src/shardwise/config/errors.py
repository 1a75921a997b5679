"""Defines errors that carry a code: it names the broken rule, and stays when the message is worded better.

>>> print(printable("a\\x1b[31m red\\nname"))
a\\x1b[31m red\\nname
"""

from __future__ import annotations

import errno
import re
from typing import Final

# The limit for a message: a longer one loses its middle, which is part of some value.
_MAX_LINE: Final = 2000
# Control characters, and those that reorder, hide, are invisible or cannot be written.
_NEVER: Final = (
    "[\x00-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\u3164\ufeff\uffa0\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
# Some scripts, and pictures of several parts, need joiners, between characters that are not ASCII.
_JOINER, _JOINED = "[\u200c\u200d]", "[^\x00-\x7f\u200c\u200d]"
_STEERING: Final = re.compile(f"{_NEVER}|(?<!{_JOINED}){_JOINER}|{_JOINER}(?!{_JOINED})")


class CodedError(Exception):
    """Carries a `code` that names the rule that was broken; `str` gives the message alone.

    Args:
        code: lower-case words with hyphens between them, such as `tp-divides-units`; each stands for one rule.
        message: what was found, the rule, and what helps.

    >>> error = CodedError("tp-divides-units", "tp=3 does not divide num_heads=32; nearest legal: 2, 4")
    >>> error.code, str(error)
    ('tp-divides-units', 'tp=3 does not divide num_heads=32; nearest legal: 2, 4')
    """

    # No __init__: torch's compiler reads errors that are raised while it traces, and follows no constructor.

    @property
    def code(self) -> str:
        """Return the code; empty where the error was made without one."""
        return str(self.args[0]) if len(self.args) > 1 else ""

    def __str__(self) -> str:
        return str(self.args[-1]) if self.args else ""


class OneLineError(CodedError, ValueError):
    """Has a message of one line in which nothing steers a terminal, whatever a foreign file contains."""

    # Not in __init__: torch's compiler reads errors that are raised while it traces, and follows no constructor.
    def __str__(self) -> str:
        line = printable(super().__str__())
        return line if len(line) <= _MAX_LINE else f"{line[: _MAX_LINE // 2]} ... {line[-_MAX_LINE // 2 :]}"


class ConfigError(OneLineError):
    """A config cannot be run; the message states the value, the rule and the fix on one line."""


class EngineError(CodedError, RuntimeError):
    """An engine cannot do now what was asked of it; the message says what must come first."""


def code_of(error: BaseException, otherwise: str) -> str:
    """Return an error's code; `otherwise` for an error that has none."""
    return (error.code if isinstance(error, CodedError) else "") or otherwise


def system_code(error: OSError, otherwise: str) -> str:
    """Return the code for an error of the file system: `disk-full`, or `otherwise` for any other."""
    return "disk-full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else otherwise


def with_code(error: Exception) -> str:
    """Return an error's message for a terminal or a log: the code stands in brackets at the end of the first line.

    >>> with_code(CodedError("tp-divides-heads", "tp=3 does not divide num_heads=32"))
    'tp=3 does not divide num_heads=32 [tp-divides-heads]'
    """
    code = code_of(error, "")
    headline, newline, details = str(error).partition("\n")
    return f"{headline} [{code}]{newline}{details}" if code else str(error)


def steering(text: str) -> str:
    """Return the first character of a text that no path, log or terminal should have; empty where there is none."""
    match = _STEERING.search(text)
    return match[0] if match else ""


def printable(text: str) -> str:
    """Return the text with characters that no terminal should get written as Python writes them."""
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def printable_lines(text: str) -> str:
    """Return what `printable` does, with the ends of lines as they are."""
    return "\n".join(map(printable, text.split("\n")))
