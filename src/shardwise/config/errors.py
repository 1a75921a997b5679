"""Defines errors that carry a code: it names the broken rule, and stays when the message is worded better."""

from __future__ import annotations

import errno


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
