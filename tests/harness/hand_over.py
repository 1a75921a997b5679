"""Receivers of weights as servers are: they obey the phases of vLLM's protocol and of SGLang's, and can fail at a step.

Neither server is imported. A trainer's part of each protocol is here too, as these servers' own code would play it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.deltas import digest_of


class ReceiverError(RuntimeError):
    """The server has failed."""


class Receiver:
    """Counts its steps, and fails at one of them; None for at none."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.weights: dict[str, Tensor] = {}
        self.num_steps = 0
        self.fails_at = fails_at

    def _step(self) -> None:
        self.num_steps += 1
        if self.num_steps - 1 == self.fails_at:
            raise ReceiverError(f"the server fails at step {self.fails_at}")


class VllmReceiver(Receiver):
    """Init, start, updates of what was announced, in that order, finish; a layer's tensors come together.

    It answers prompts between updates, and keeps its answers until its cache is reset, as a server keeps prefixes.
    """

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__(fails_at)
        self.phase = "new"
        self._expected: list[tuple[str, str, list[int]]] = []
        self._layers: list[str] = []
        self._answers: dict[str, str] = {}

    def answer(self, prompt: str) -> str:
        """An answer of the weights, or of those that there were when it was kept."""
        if self.phase != "ready":
            raise ValueError(f"asked in phase {self.phase}: weights of two steps")
        return self._answers.setdefault(prompt, prompt + digest_of_all(self.weights))

    def reset_prefix_cache(self) -> None:
        self._go("ready", "ready")
        self._answers.clear()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._go("new", "ready")

    def start_weight_update(self) -> None:
        self._go("ready", "updating")
        self._layers.clear()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Announce what comes, as names, dtypes and shapes."""
        self._go("updating", "updating")
        table = (update_info["names"], update_info["dtype_names"], update_info["shapes"])
        self._expected = [*zip(*table, strict=True)]

    def load_weight(self, name: str, tensor: Tensor) -> None:
        """Take the next tensor, element for element what was announced."""
        self._go("updating", "updating")
        expected = self._expected.pop(0)
        found = name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        if found != expected:
            raise ValueError(f"{found} came where {expected} was announced")
        layer = layer_of(name)
        if layer and layer in self._layers[:-1]:
            raise ValueError(f"{name} of {layer} came after other layers")
        self._layers += [layer] if layer and layer not in self._layers else []
        self.weights[name] = tensor.clone()

    def finish_weight_update(self) -> None:
        self._go("updating", "ready")
        if self._expected:
            raise ValueError(f"{self._expected[0]} has not come")

    def _go(self, before: str, after: str) -> None:
        self._step()
        if self.phase != before:
            raise ValueError(f"in phase {self.phase}, not {before}")
        self.phase = after


def digest_of_all(weights: Mapping[str, Tensor]) -> str:
    """One digest of all weights, whatever their order."""
    return str(sorted((name, digest_of(tensor)) for name, tensor in weights.items()))


def layer_of(name: str) -> str:
    """The name up to its first number; empty where it has none."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else ""


def send_to_vllm(source: Any, receiver: VllmReceiver | None) -> None:
    """What vLLM's trainer does on every rank; only the sender has a receiver."""
    if receiver is not None:
        begin(source, receiver)
    for name, tensor in source:
        if receiver is not None:
            receiver.load_weight(name, tensor)
    if receiver is not None:
        receiver.finish_weight_update()


def deliver_to_vllm(source: Any, receiver: VllmReceiver | None) -> None:
    """The same by `deliver`, so that all ranks know of each failure."""
    server = receiver or VllmReceiver()

    def send(names: list[str], tensors: list[Tensor]) -> None:
        for name, tensor in zip(names, tensors, strict=True):
            server.load_weight(name, tensor)

    source.deliver(send, lambda: begin(source, server), server.finish_weight_update)


def begin(source: Any, receiver: VllmReceiver) -> None:
    """Start an update, and announce what comes."""
    metadata = source.metadata()
    receiver.start_weight_update()
    receiver.update_weights(
        {
            "names": [each.name for each in metadata],
            "dtype_names": [str(each.dtype).removeprefix("torch.") for each in metadata],
            "shapes": [list(each.shape) for each in metadata],
        }
    )


class SglangReceiver(Receiver):
    """Takes buckets, each one flat tensor with its table, and a version with the last of them."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__(fails_at)
        self.version = ""
        self.num_flushes = 0
        self._loading: dict[str, Tensor] = {}

    def update_weights_from_tensor(
        self, flat: Tensor, table: Sequence[Any], *, flush_cache: bool, weight_version: str = ""
    ) -> None:
        self._step()
        for name, tensor in unflattened(flat, table):
            self._loading[name] = tensor.clone()
        self.num_flushes += flush_cache
        if flush_cache:
            self.weights, self._loading, self.version = self._loading, {}, weight_version


def unflattened(flat: Tensor, table: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket."""
    assert flat.dtype == torch.uint8
    for each in table:
        assert each.numel == each.end_idx - each.start_idx
        yield each.name, flat[each.start_idx : each.end_idx].view(each.dtype).reshape(each.shape)


def send_to_sglang(source: Any, receiver: SglangReceiver | None, version: str) -> None:
    """What a trainer does with SGLang on every rank; only the sender has a receiver."""
    num_left = len(source.metadata())
    for flat, table in source.buckets():
        num_left -= len(table)
        if receiver is not None and flat is not None:
            receiver.update_weights_from_tensor(flat, table, flush_cache=num_left == 0, weight_version=version)
