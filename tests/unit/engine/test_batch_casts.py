"""What a model is given moves to its device, and what floats gets its dtype."""

from collections import UserDict
from typing import Any

import torch

from shardwise.engine.runner import to_device

CPU = torch.device("cpu")


def test_to_device_casts_what_floats_and_keeps_the_rest() -> None:
    tree: dict[str, Any] = {
        "x": torch.tensor([1.5]),
        "nested": [torch.tensor([2]), (torch.tensor([True]), torch.tensor([0.5], dtype=torch.float64))],
        "text": "a",
        "none": None,
    }
    cast = to_device(tree, CPU, torch.bfloat16)
    assert cast["x"].dtype == cast["nested"][1][1].dtype == torch.bfloat16
    assert cast["nested"][0].dtype == torch.int64
    assert cast["nested"][1][0].dtype == torch.bool
    assert (cast["x"].item(), cast["nested"][1][1].item()) == (1.5, 0.5)
    assert (cast["text"], cast["none"]) == ("a", None)
    assert tree["x"].dtype == torch.float32
    already = torch.ones(2)
    assert to_device(already, CPU, torch.float32) is already


def test_to_device_keeps_dtypes_where_none_is_given() -> None:
    tree = [torch.ones(1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.int32)]
    assert [tensor.dtype for tensor in to_device(tree, CPU)] == [torch.bfloat16, torch.int32]


def test_to_device_takes_any_mapping_as_a_dict() -> None:
    """As the batches of Hugging Face's tokenizers are, also inside other containers."""
    moved = to_device([UserDict(x=torch.ones(1), inner=UserDict(y=torch.ones(1)))], CPU, torch.float16)
    assert moved == [{"x": torch.ones(1), "inner": {"y": torch.ones(1)}}]
    assert type(moved[0]) is type(moved[0]["inner"]) is dict
    assert moved[0]["x"].dtype == moved[0]["inner"]["y"].dtype == torch.float16


def test_to_device_moves_integers_too() -> None:
    cast = to_device((torch.tensor([1]), torch.tensor([1.0])), torch.device("meta"), torch.float16)
    assert [(tensor.device.type, tensor.dtype) for tensor in cast] == [("meta", torch.int64), ("meta", torch.float16)]


def test_to_device_lets_gradients_through() -> None:
    x = torch.ones(2, requires_grad=True)
    to_device([x], CPU, torch.float64)[0].sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
