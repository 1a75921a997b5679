"""What the host has read of a tensor is kept as long as it is true, for all views of the tensor."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise.runtime.host_reads import HostReads


class Reader:
    """Sums a tensor, and counts how often."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, tensor: Tensor) -> float:
        self.num_calls += 1
        return float(tensor.sum())


def test_layers_that_take_turns_with_two_masks_read_each_once() -> None:
    reads, reader, masks = HostReads(), Reader(), (torch.ones(2, 3), torch.zeros(2, 3))
    for _ in range(3):
        assert [reads.of(mask, reader) for mask in masks] == [6.0, 0.0]
    assert reader.num_calls == 2


def test_views_of_one_place_are_one_and_others_are_not() -> None:
    reads, reader, mask = HostReads(), Reader(), torch.ones(2, 3)
    assert [reads.of(mask[:, :2], reader) for _ in range(3)] == [4.0] * 3
    assert reader.num_calls == 1
    assert [reads.of(mask[:, 1:], reader), reads.of(mask.int(), reader), reads.of(mask, reader)] == [4.0, 6.0, 6.0]
    assert reader.num_calls == 4


def test_what_is_written_is_read_again() -> None:
    reads, reader, mask = HostReads(), Reader(), torch.ones(2, 3)
    assert reads.of(mask[0], reader) == 3.0
    mask[1].zero_()
    mask[0, 0] = 4.0
    assert [reads.of(mask[0], reader), reads.of(mask[0], reader)] == [6.0, 6.0]
    assert reader.num_calls == 2


def test_writes_that_torch_does_not_count_are_seen() -> None:
    reads = HostReads()
    with torch.inference_mode():
        mask = torch.ones(3)
        assert reads.of(mask, Reader()) == 3.0
        mask.zero_()
        assert reads.of(mask, Reader()) == 0.0


def test_two_functions_have_results_of_their_own() -> None:
    reads, mask = HostReads(), torch.tensor([2, 1])
    assert (reads.of(mask, Tensor.tolist), reads.of(mask, len)) == ([2, 1], 2)


def test_a_tensor_is_not_kept_alive() -> None:
    reads, mask = HostReads(), torch.ones(2)
    alive = weakref.ref(mask)
    reads.of(mask, Reader())
    del mask
    gc.collect()
    assert alive() is None


def test_a_selective_recomputation_may_read_what_its_forward_has_not() -> None:
    """As the second layer does, whose mask the first one had read; a write has made the result old by then."""
    reads, reader, mask, x = HostReads(), Reader(), torch.ones(2), torch.ones(2, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        return (x * reads.of(mask, reader)).sin()  # whose backward needs its input

    reads.of(mask, reader)

    def save_all(*_: Any, **__: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    contexts = partial(create_selective_checkpoint_contexts, save_all)
    out = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
    mask.mul_(1)
    out.sum().backward()
    assert reader.num_calls == 2
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * torch.tensor([2.0, 2.0]).cos())
