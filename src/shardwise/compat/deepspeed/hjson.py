"""Turns HJSON into JSON: comments, commas left out or at the end, keys and strings without quotes, no outer braces.

>>> to_json("stage: 2 # of ZeRO\\n type: AdamW\\n betas: [0.9, 0.95,]")
'{"stage":2,"type":"AdamW","betas":[0.9,0.95]}'
"""

from __future__ import annotations

import json
import re
from textwrap import dedent
from typing import Final

_BLANK: Final = re.compile(r"(?:\s|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_QUOTED: Final = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'')
_LINES: Final = re.compile(r"'''(.*?)'''", re.DOTALL)
_KEY: Final = re.compile(r"[^\s,:\[\]{}\"'#/][^\s,:\[\]{}]*")
_LITERAL: Final = re.compile(r"(?:true|false|null|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)(?=[^\S\n]*(?:[,\]}\n#]|//|/\*|$))")
_LINE: Final = re.compile(r"[^\s,:\[\]{}][^\n]*")
_MOST_NESTED: Final = 64


def to_json(text: str) -> str:
    """Return HJSON as JSON.

    Raises:
        ValueError: it is none.
    """
    try:
        return _Reader(text).document()
    except ValueError:
        return _Reader(f"{{{text}\n}}").document()  # the braces around all may be left out


class _Reader:
    """Reads a text from its beginning on."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def document(self) -> str:
        """Return all of it as JSON."""
        value = self._value()
        if self._next() != "":
            raise ValueError("there is more after the end")
        return value

    def _next(self) -> str:
        """Go to the next character that is not blank, and return it; none at the end."""
        match = _BLANK.match(self._text, self._at)
        self._at = match.end() if match else self._at
        return self._text[self._at : self._at + 1]

    def _take(self, pattern: re.Pattern[str]) -> str | None:
        match = pattern.match(self._text, self._at)
        if match is None:
            return None
        self._at = match.end()
        return match[match.re.groups]

    def _value(self) -> str:
        start = self._next()
        if start in ("{", "["):
            return self._container(start)
        if (lines := self._take(_LINES)) is not None:
            return json.dumps(dedent(lines).strip("\n"))
        if (quoted := self._take(_QUOTED)) is not None:
            return _in_double_quotes(quoted)
        if (literal := self._take(_LITERAL)) is not None:
            return literal
        if (line := self._take(_LINE)) is not None:
            return json.dumps(line.strip())
        raise ValueError(f"no value at {self._at}")

    def _container(self, start: str) -> str:
        self._depth += 1
        if self._depth > _MOST_NESTED:
            raise ValueError("it is nested too deep")
        self._at += 1
        end, items = {"{": "}", "[": "]"}[start], list[str]()
        while (following := self._next()) != end:
            if not following:
                raise ValueError(f"{end} is missing")
            items.append(self._member() if start == "{" else self._value())
            if self._next() == ",":
                self._at += 1
        self._at += 1
        self._depth -= 1
        return f"{start}{','.join(items)}{end}"

    def _member(self) -> str:
        quoted = self._take(_QUOTED)
        key = _in_double_quotes(quoted) if quoted is not None else json.dumps(self._take(_KEY))
        if key == "null" or self._next() != ":":
            raise ValueError(f"no key at {self._at}")
        self._at += 1
        return f"{key}:{self._value()}"


def _in_double_quotes(quoted: str) -> str:
    return quoted if quoted[0] == '"' else json.dumps(quoted[1:-1].replace("\\'", "'"))
