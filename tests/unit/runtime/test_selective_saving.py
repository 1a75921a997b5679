"""Selective recomputation gives the gradients of no recomputation, whatever writes into the products that it saves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardwise.runtime.recompute import recompute_forward, selective_contexts

WIDTH = 6


class Between(nn.Module):
    """Writes into the product of one layer before the next one reads it."""

    def __init__(self, write: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.first, self.second, self.write = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), write

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        written = self.write(y)
        return x + self.second(y if written is None else written).tanh()


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: float) -> None:
        super().__init__()
        self.layer = kind(WIDTH, WIDTH, num_layers=2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)[0].tanh()


class Cell(nn.Module):
    def __init__(self, kind: type[nn.RNNCellBase]) -> None:
        super().__init__()
        self.cell = kind(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for token in x.unbind(1):
            state = self.cell(token, state)
        return x + (state[0] if isinstance(state, tuple) else state)[:, None]


class Convolution(nn.Sequential):
    def __init__(self) -> None:
        layers = nn.Conv1d(4, 4, 3, padding=1), nn.ReLU(inplace=True), nn.Conv1d(4, 4, 3, padding=1)
        super().__init__(*layers)


def write_parts(x: Tensor) -> None:
    for part in torch.unsafe_chunk(x, 2, -1):  # torch's recurrent layers do so: these views have versions of their own
        part.mul_(2)


def write_slice(x: Tensor) -> None:
    x[..., :2] *= 2


CASES: dict[str, Callable[[], nn.Module]] = {
    "relu_": lambda: Between(torch.relu_),
    "dropout_": lambda: Between(lambda x: nn.functional.dropout(x, 0.3, inplace=True)),
    "slice": lambda: Between(write_slice),
    "parts": lambda: Between(write_parts),
    "data": lambda: Between(lambda x: x.data.mul_(2) * 0 + x),
    "convolution": Convolution,
    **{
        f"{kind.__name__} {options}": lambda kind=kind, options=options: Recurrent(kind, **options)  # type: ignore[misc]
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
        for options in ({}, {"dropout": 0.3})
    },
    **{
        kind.__name__: lambda kind=kind: Cell(kind)  # type: ignore[misc]
        for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
    },
}


def gradients(make: Callable[[], nn.Module], mode: str, after: Callable[[Tensor], Tensor]) -> list[Tensor]:
    torch.manual_seed(0)
    block = make().double()
    if mode != "none":
        recompute_forward(block, mode)
    x = torch.randn(2, 4, WIDTH, dtype=torch.float64, requires_grad=True)
    after(block(x * 2)).square().sum().backward()
    return [each.grad for each in (x, *block.parameters())]


@pytest.mark.parametrize("name", list(CASES))
def test_a_saved_product_that_is_written_into_is_computed_again(name: str) -> None:
    expected = gradients(CASES[name], "none", torch.tanh)
    torch.testing.assert_close(gradients(CASES[name], "selective", torch.tanh), expected, rtol=1e-12, atol=1e-12)


def test_code_after_a_block_may_write_into_its_output() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    expected = gradients(make, "none", lambda y: y.add_(1))
    torch.testing.assert_close(gradients(make, "selective", lambda y: y.add_(1)), expected, rtol=1e-12, atol=1e-12)


class Two(nn.Module):
    def __init__(self, multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.multiply = nn.Parameter(torch.randn(WIDTH, WIDTH)), multiply

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        product = self.multiply(x, self.weight)
        return product.square(), product


def write_product(outputs: tuple[Tensor, Tensor]) -> Tensor:
    squares, product = outputs
    return squares + product.mul_(2)


@pytest.mark.parametrize("multiply", [nn.functional.linear, torch.matmul])
def test_code_after_a_block_may_write_into_a_saved_product(multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Without recomputation torch refuses this, so whole recomputation is what to equal."""
    expected = gradients(lambda: Two(multiply), "full", write_product)
    found = gradients(lambda: Two(multiply), "selective", write_product)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_products_that_nothing_writes_into_are_saved() -> None:
    first, again = selective_contexts()
    x, weight = torch.randn(2, 3), torch.randn(3, 3)
    with first:
        kept, written = x @ weight, x @ weight.t()
        written.relu_()
    with again:
        assert (x @ weight).data_ptr() == kept.data_ptr()
        assert (x @ weight.t()).data_ptr() != written.data_ptr()
