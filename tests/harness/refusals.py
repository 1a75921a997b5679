"""Refusals by their code: what a message says may change, the rule that it names does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def refusal_of(run: Callable[[], object]) -> tuple[str, str]:
    """Return the code and the message of the error that `run` raises, for a rank that reports them to the test.

    An error of others has its class in place of a code; where nothing is raised, both are empty.
    """
    try:
        run()
    except CodedError as error:
        return error.code, str(error)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
