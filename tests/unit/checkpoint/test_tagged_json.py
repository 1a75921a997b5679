"""What a checkpoint's JSON gives back: values of any type that has a word, as they were; the others are refused."""

from __future__ import annotations

import json
import math
import random
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch

from harness.mutations import ended_after
from shardwise.checkpoint.tagged_json import TAGGED, NoWordError, from_json, to_json

Point = namedtuple("Point", "x y")
ZONE = timezone(timedelta(hours=-5))


class Phase(Enum):
    WARM = "warm"


class Level(IntEnum):
    HIGH = 3


class Options(dict[str, Any]):
    """A dict with attributes, as libraries of configs have it."""


@dataclass
class Args:
    lr: float = 0.1
    betas: tuple[float, ...] = (0.9, 0.95)
    names: list[str] = field(default_factory=lambda: ["a"])


@dataclass(slots=True)
class Slotted:
    lr: float = 0.1


def there_and_back(value: Any) -> Any:
    return from_json(json.loads(json.dumps(to_json(value, "extra"))), "extra")


PLAIN = (None, True, 3, -0.0, float("inf"), "text", "\ud800", [], {"a": [1, {"b": 2.5}]})
TYPED = (
    *((1, (2,)), (), {1: 2, None: 3, (1, 2): 4}, {1, 2}, frozenset({1}), 2**200, 1 - 2j, b"\x00\xff", bytearray(b"a")),
    *(range(1, 5, 2), slice(None, 3), Decimal("1.10"), Fraction(1, 3), UUID(int=5), Path("/a"), PureWindowsPath("c:")),
    *(date(2026, 1, 2), time(1, 2, 3), datetime(2026, 1, 2, 3), datetime(2026, 1, 2, tzinfo=ZONE), timedelta(1, 2, 3)),
    *(datetime(2026, 1, 2, tzinfo=UTC), datetime(2026, 7, 2, tzinfo=ZoneInfo("Europe/Berlin"))),
    *(OrderedDict(b=1, a=2), defaultdict(list, {"a": [1]}), Counter("aab"), deque([1, 2], 5), deque()),
    *(Namespace(lr=(1,)), SimpleNamespace(a=1), random.getstate(), [[(1,)]], {"__tagged__": 1}, {"__tensor__": [1]}),
    *(torch.float8_e4m3fn, torch.device("cuda:1"), torch.Size([2, 3]), torch.channels_last),
    *(np.float64(1.5), np.int8(-3), np.bool_(True), np.str_("é"), np.str_(""), np.datetime64("2026-01-02")),
    *(Phase.WARM, Level.HIGH, Options(a=(1,)), Args(), Point(1, (2,))),
)


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_what_json_gives_back_stays_as_it_is(value: Any) -> None:
    assert to_json(value, "extra") is value


@pytest.mark.parametrize("value", TYPED, ids=lambda value: type(value).__name__)
def test_values_come_back_with_their_types(value: Any) -> None:
    for given in (value, {"deep": [value, 1]}):
        found = there_and_back(given)
        assert (found, repr(found), type(found)) == (given, repr(given), type(given))


def test_not_a_number_comes_back() -> None:
    assert math.isnan(there_and_back((float("nan"),))[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "complex64", "bool", "uint8", "float8_e5m2"])
@pytest.mark.parametrize("shape", [(), (2, 3), (0, 2)])
def test_tensors_come_back(dtype: str, shape: tuple[int, ...]) -> None:
    value = torch.ones(shape).to(getattr(torch, dtype))
    found = there_and_back([value])[0]
    assert (found.dtype, found.shape, found.tolist()) == (value.dtype, value.shape, value.tolist())


def test_tensors_keep_being_parameters() -> None:
    found = there_and_back([torch.nn.Parameter(torch.ones(2)), torch.zeros(2, requires_grad=True)])
    assert type(found[0]) is torch.nn.Parameter
    assert type(found[1]) is torch.Tensor
    assert found[0].requires_grad
    assert found[1].requires_grad


def test_random_states_of_numpy_and_torch_can_be_set_again() -> None:
    before = np.random.get_state(), torch.get_rng_state()
    states = there_and_back(before)
    drawn = np.random.rand(), torch.rand(())
    np.random.set_state(states[0])
    torch.set_rng_state(states[1])
    assert drawn == (np.random.rand(), torch.rand(()))
    np.random.set_state(before[0])
    torch.set_rng_state(before[1])


def test_arrays_come_back_and_can_be_written() -> None:
    for value in (np.arange(6.0).reshape(2, 3), np.zeros((0, 2), ">i2"), np.array(["a", "bcd"]), np.array(1.0)):
        found = there_and_back({"a": value})["a"]
        assert (found.dtype, found.shape, found.tolist()) == (value.dtype, value.shape, value.tolist())
        assert found.flags.writeable


def test_what_occurs_often_is_written_once() -> None:
    shared: list[Any] = [0.5]
    for _ in range(6):
        shared = [shared] * 10  # a million leaves
    found = there_and_back(shared)
    assert found[0] is found[9]
    assert len(json.dumps(to_json(shared, "extra"))) < 1000


SHARED: dict[str, Any] = {
    "lists": [0.5, *(["list", *[number] * 10] for number in range(12))],
    "tuples": [0.5, *(["tuple", number, number] for number in range(60))],
    "dicts": [0.5, "a", "b", ["dict", 1, 0, 2, 0], *(["dict", 1, number, 2, number] for number in range(3, 43))],
    "a set of tuples": [0.5, *(["tuple", number, number] for number in range(24)), ["set", 24]],
    "many sets of a tuple": [0.5, *(["tuple", number, number] for number in range(20)), *[["set", 20]] * 100],
    "a key of tuples": [0.5, *(["tuple", number, number] for number in range(30)), ["dict", 30, 0]],
    "a deque": [0.5, *(["deque", None, number, number] for number in range(40))],
    "10,000 lists in one another": [[], *(["list", number] for number in range(10_000))],
    "10,000 tuples in one another": [["tuple"], *(["tuple", number] for number in range(10_000)), ["set", 9999]],
    "a number of a million digits": [["int", "0x" + "f" * 1_000_000]],
    "a fraction of such": [["Fraction", "0x" + "f" * 1_000_000, "0x" + "e" * 999_999]],
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_what_a_few_nodes_make_is_bounded(name: str) -> None:
    """No time and no memory goes into it: tuples are walked over when they are hashed, printed or compared."""
    with ended_after(5.0), pytest.raises(ValueError, match=r"node .* of extra"):
        from_json({TAGGED: SHARED[name]}, "extra")


def test_nothing_is_written_that_cannot_be_read() -> None:
    shared: Any = [0.5]
    for _ in range(9):
        shared = [shared] * 10  # a thousand million leaves
    for value, what in ((shared, "values"), (1 << 100_000, "bits")):
        with pytest.raises(NoWordError, match=what):
            to_json({"a": value}, "extra")


def test_depth_is_no_limit_of_the_format() -> None:
    deep: list[Any] = []
    for _ in range(150):
        deep = [deep]
    assert there_and_back(deep) == deep


def infinite() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


REFUSED = (
    *(lambda: print, object, infinite, Slotted, lambda: random.Random(0), lambda: ValueError("x"), lambda: Phase),
    *(lambda: np.array([object()]), lambda: np.zeros(2, [("a", "i4")]), lambda: defaultdict(lambda: 1)),
    *(lambda: torch.empty(2, device="meta"), lambda: torch.ones(2).to_sparse(), lambda: torch.zeros(2**25)),
)


@pytest.mark.parametrize("make", REFUSED)
def test_what_would_not_come_back_is_refused_with_its_place(make: Callable[[], Any]) -> None:
    with pytest.raises(NoWordError, match=r"^extra\['a'\]\[1\]"):
        to_json({"a": [0, make()]}, "extra")


def test_earlier_tensors_are_read() -> None:
    found = from_json({"best": {"__tensor__": ["float32", [1.5]]}}, "extra")
    assert found["best"].tolist() == [1.5]
    with pytest.raises(ValueError, match="extra cannot be read"):
        from_json({"best": {"__tensor__": ["float32", "x"]}}, "extra")


FORGED = (
    *(
        [],
        [["list", 0]],
        [["list", 5]],
        [["list", -1]],
        [["eval", "1"]],
        [["device"]],
        [["Tensor", "load", [1], "", 0]],
    ),
    *([["Tensor", "float32", [1 << 40], "", False]], [["ndarray", "O", [1], ""]], [["ndarray", "<U0", [1 << 40], ""]]),
    *([None, {}, ["instance", "subprocess", "Popen", "dict", 1, 1]], [["enum", "os", "system", "x"]], 3),
    *([None, {}, ["instance", "no.such.module", "Args", None, 0, 1]], [["enum", __name__, "Phase", "GONE"]]),
)


@pytest.mark.parametrize("nodes", FORGED, ids=repr)
def test_forged_nodes_are_errors(nodes: Any) -> None:
    with pytest.raises(ValueError, match=r"extra|import"):
        from_json({"__tagged__": nodes}, "extra")
