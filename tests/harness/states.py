"""All states of an engine, bit for bit; and small engines on one rank to save and load."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import Engine, initialize
from shardwise.layout.slicing import LocalTensor, intersect
from shardwise.zero.state_access import GRAD

States = dict[tuple[str, str], Tensor]


def whole_states(engine: Engine) -> States:
    """Every state of every parameter, and the buffers."""
    names = [name for name, _ in engine.model.named_parameters()]
    found: States = {}
    for name in names:
        for state in engine.states_of(name):
            value = engine.read(name, state) if state != GRAD else None
            if value is not None:
                found[name, state] = value.clone()
    return found | {(name, "buffer"): buffer.clone() for name, buffer in engine.model.named_buffers()}


def assert_same_bits(actual: States, expected: States) -> None:
    """They have the same names, dtypes and values."""
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert actual[key].dtype == value.dtype, key
        assert torch.equal(actual[key], value), key


def options(engine: Engine) -> str:
    """Options, schedule, step and loss scale, as text that can be compared."""
    groups = [
        {key: value for key, value in group.items() if key != "params"} for group in engine.optimizer.param_groups
    ]
    schedule = engine.scheduler.state_dict() if hasattr(engine.scheduler, "state_dict") else None
    return json.dumps([groups, schedule, engine.num_steps, engine.parts.scaler.state_dict()], default=str)


class Net(nn.Module):
    """Two layers and a frozen scale."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(3, width)
        self.down = nn.Linear(width, 2)
        self.scale = nn.Parameter(torch.rand(()) + 0.5, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale  # [b, 2]


def square_loss(output: Tensor, batch: Any) -> Tensor:
    return output.double().square().mean()


@contextmanager
def engine_of(
    model: nn.Module | Callable[[], nn.Module] = Net, *, seed: int = 0, arguments: Any = None, **sections: Any
) -> Iterator[Engine]:
    """An engine on the CPU, closed at the end.

    Args:
        model: or what makes it, from `seed`.
        seed: of the model.
        arguments: from the model to further arguments of `initialize`, such as its optimizer.
        sections: of the config.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = model if isinstance(model, nn.Module) else model()
    config = {"optimizer": {"lr": 0.05}, "run": {"device": "cpu", "timeout_s": 30.0}, **sections}
    engine = initialize(module, config, loss_fn=square_loss, **(arguments(module) if arguments else {}))
    try:
        yield engine
    finally:
        engine.close()


def take_steps(engine: Engine, num_steps: int, shape: tuple[int, ...] = (2, 3)) -> list[float]:
    """Steps over inputs that depend on the step's number and the rank alone."""
    losses = []
    for _ in range(num_steps):
        generator = torch.Generator().manual_seed(100 * engine.num_steps + engine.comm.rank)
        losses.append(engine.train_step([torch.randn(shape, generator=generator)]).loss)
    return losses


def fuse(parts: Sequence[LocalTensor], num_rows: int = 1) -> tuple[LocalTensor, ...]:
    """Put local tensors into one buffer, as in a fused QKV matrix, and return each with its offsets in that buffer.

    The buffer has `num_rows` rows, each a row of every part in turn. With one row, the parts are concatenated along
    dim 0. To concatenate along dim d, take as many rows as the local tensors have indices in the dims before d; for a
    QKV matrix interleaved by heads, as many as it has local KV heads.

    Raises:
        ValueError: a part does not divide into `num_rows`.
    """
    if num_rows < 1 or any(part.numel % num_rows for part in parts):
        numels = ", ".join(str(part.numel) for part in parts)
        raise ValueError(f"num_rows={num_rows} does not divide the parts' {numels} elements; give a divisor")
    numel = sum(part.numel for part in parts)
    fused, column = [], 0
    for part in parts:
        width = part.numel // num_rows
        pieces = tuple(
            piece.shifted(row * (numel // num_rows) + column)
            for row in range(num_rows)
            for piece in intersect(part, row * width, (row + 1) * width)
        )
        fused.append(LocalTensor(part.global_shape, pieces, numel))
        column += width
    return tuple(fused)
