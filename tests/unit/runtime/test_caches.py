"""Recomputed blocks are handed no cache in training, which the recomputation would fill once more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shardwise import Config
from shardwise.construction.scan import build_layout
from shardwise.runtime.recompute import replace_forwards


class Cache(list[Tensor]):
    """Keys, which a block appends to, as Hugging Face's blocks do."""

    def get_seq_length(self) -> int:
        return len(self)


class CachingBlock(nn.Module):
    """Sums all keys that its cache, where it has one, has ever been given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, past_key_values: Cache | None = None) -> Tensor:
        keys = past_key_values if past_key_values is not None else Cache()
        keys.append((x * self.weight).exp())
        return torch.stack(list(keys)).sum(0).sin()


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("num_cached", [0, 1])
def test_a_recomputation_writes_into_no_cache(mode: str, by_name: bool, training: bool, num_cached: int) -> None:
    def run(block: nn.Module) -> tuple[int, list[Tensor]]:
        x, cache = torch.ones(3), Cache([torch.ones(3)] * num_cached)
        y = block(x, past_key_values=cache) if by_name else block(x, cache)
        (gradient,) = torch.autograd.grad(y.sum(), list(block.parameters()))
        return len(cache), [y, gradient]

    expected_length, expected = run(CachingBlock())
    blocks = nn.ModuleList([CachingBlock()]).train(training)
    config = Config.from_dict({"recompute": {"mode": mode}, "run": {"device": "cpu"}}).resolve(1)
    undo = replace_forwards(blocks, build_layout(blocks, config), config)
    length, values = run(blocks[0])
    # In training an empty cache stays so; one that is read, now or later, gets each key once.
    assert length == (0 if training and num_cached == 0 else expected_length)
    assert all(map(torch.equal, values, expected))
    for each in reversed(undo):
        each()
    assert "forward" not in blocks[0].__dict__
