"""Packings: what pytrees pass, that they come back as they were, and that nothing unknown is looked for."""

from __future__ import annotations

import json
import math
from collections import OrderedDict, defaultdict, deque
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_outputs import BaseModelOutputWithPast

from harness.refusals import refused
from shardwise.pipeline.pytree_codec import PytreeSpec, containers_in, put_together, take_apart, tensors_in


class Point(NamedTuple):
    x: Any
    y: Any


class Colour(StrEnum):
    RED = "red"


def passed(value: Any, *types: type) -> Any:
    """The value after it has been on the wire."""
    spec, tensors = take_apart(value)
    return put_together(PytreeSpec.from_json(spec.to_json()), tensors, types)


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())


@given(
    st.recursive(
        PLAIN | st.sampled_from([torch.bfloat16, torch.Size([2, 3])]),
        lambda children: (
            st.lists(children)
            | st.tuples(children, children)
            | st.dictionaries(KEYS, children)
            | st.builds(Point, children, children)
            | st.dictionaries(KEYS, children).map(OrderedDict)
            | st.lists(children).map(deque)
        ),
        max_leaves=12,
    )
)
def test_plain_values_and_containers_come_back(value: Any) -> None:
    received = passed(value, Point)
    assert received == value
    assert repr(received) == repr(value)  # which tells tuples from sizes, 1 from True and 0.0 from -0.0


def test_tensors_are_handed_over_in_order() -> None:
    a, b = torch.ones(2, 0, requires_grad=True), torch.zeros((), dtype=torch.int64)
    value = {"b": (b, math.nan), "a": [a]}
    spec, tensors = take_apart(value)
    assert [tensor is each for tensor, each in zip(tensors_in(value), tensors, strict=True)] == [True, True]
    assert [tensor is each for tensor, each in zip(tensors, (b, a), strict=True)] == [True, True]
    assert [(part.shape, part.dtype, part.requires_grad) for part in spec.tensors] == [
        ((), torch.int64, False),
        ((2, 0), torch.float32, True),
    ]
    assert math.isnan(passed(value)["b"][1])
    assert [part.num_bytes for part in spec.tensors] == [8, 0]


def test_model_outputs_pass() -> None:
    output = BaseModelOutputWithPast(last_hidden_state=torch.ones(2), hidden_states=(torch.zeros(1), None))
    received = passed(output)
    assert type(received) is BaseModelOutputWithPast
    assert received.last_hidden_state is output.last_hidden_state
    assert received.hidden_states[1] is None
    assert received.past_key_values is None
    assert containers_in(output) == {BaseModelOutputWithPast, tuple}


def test_factories_are_known_types_only() -> None:
    received = passed(defaultdict(list, {"a": 1}))
    assert received.default_factory is list
    with refused("boundary-type-unknown", "builtins.set"):
        passed(defaultdict(set, {"a": 1}))


def test_plain_values_and_shapes_change_the_spec() -> None:
    assert take_apart([1, torch.ones(2)])[0] == take_apart([1, torch.zeros(2)])[0]
    assert take_apart([1, torch.ones(2)])[0] != take_apart([True, torch.ones(2)])[0]
    assert take_apart([1, torch.ones(2)])[0] != take_apart([1, torch.ones(3)])[0]


def test_what_cannot_pass_is_named() -> None:
    with refused("boundary-value-type", "value['a'][1]", "builtins.object"):
        take_apart({"a": (1, object())})
    with refused("boundary-value-type", f"{Colour.__module__}.Colour"):
        take_apart(Colour.RED)
    with refused("boundary-tensor-layout", "torch.sparse_coo"):
        take_apart([torch.ones(2).to_sparse()])


def test_nothing_is_imported_for_the_wire() -> None:
    spec, tensors = take_apart(Point(torch.ones(1), 2))
    assert put_together(spec, tensors, [Point]).y == 2
    with refused("boundary-type-unknown", f"{Point.__module__}.Point"):
        put_together(spec, tensors)
    for name in ("os.system", "builtins.eval", "subprocess.Popen"):
        with refused("boundary-type-unknown", name):
            put_together(PytreeSpec(json.dumps([name, None, []]), ()), [])
    with refused("boundary-dtype-unknown", "'load'"):
        PytreeSpec.from_json(json.dumps(["0", [[[1], "load", False]]]))
