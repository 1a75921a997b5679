"""Refusals by their code: what a message says may change, the rule that it names does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shardwise.config.errors import CodedError


@contextmanager
def refused(code: str, *values: str) -> Iterator[pytest.ExceptionInfo[CodedError]]:
    """Expect an error of that code.

    Args:
        code: of the error.
        values: parts that its message has too: the names and numbers of this case, not the words around them.
    """
    with pytest.raises(CodedError) as caught:
        yield caught
    assert caught.value.code == code, str(caught.value)
    for value in values:
        assert value in str(caught.value), f"{value} is not in: {caught.value}"
