"""This module computes log-probabilities of tokens by an engine, in any layout, forward only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.config.errors import ConfigError
from shardwise.context.batch import IGNORED
from shardwise.engine.parts import EngineParts
from shardwise.engine.runner import StepRunner, evaluate
from shardwise.tensor.chunked import deferred_head
from shardwise.tensor.token_log_probs import TokenLogProbs, token_log_probs


def engine_log_probs(
    parts: EngineParts, runner: StepRunner, batch: Any, temperature: float, entropy: bool
) -> TokenLogProbs:
    """Return those of whole sequences on every rank; see `Engine.log_probs`."""
    inputs, targets = _inputs_and_targets(batch)
    recorder = _Recorder(temperature, entropy)
    # Each rank computes some of the tokens, or none: these say which, since they are cut as the targets are.
    places = torch.arange(targets.numel(), device=targets.device).view(targets.shape)
    with deferred_head(parts.model, parts.layout), parts.state.with_own_loss(recorder):
        evaluate(parts, runner, [(inputs, targets, places)])
    values = recorder.spread(targets, parts)
    for comm in (parts.comms.context, parts.comms.pipeline):
        if comm.world_size > 1:
            comm.sum_in_place(values, "log-probabilities")  # of each token one rank has a value, the others 0
    log_probs, *entropies = values.view(-1, *targets.shape).unbind()
    return TokenLogProbs(log_probs, entropies[0] if entropy else None)


def _inputs_and_targets(batch: Any) -> tuple[Any, Tensor]:
    """Return what is for the model, and the target of each place.

    Raises:
        ConfigError: the batch has no tokens from which targets follow.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[1], Tensor):
        return batch[0], batch[1]
    is_named = isinstance(batch, Mapping)
    tokens = (batch.get("labels", batch.get("input_ids")) if is_named else batch) if batch is not None else None
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.is_floating_point():
        raise ConfigError(
            "log-probs-batch",
            f"a batch of type {type(batch).__name__} has no tokens [B, S]; give (inputs, targets), input_ids by name, "
            "or a tensor of tokens",
        )
    mask = batch.get("attention_mask") if is_named and "labels" not in batch else None
    if mask is not None:
        tokens = tokens.where(mask.bool(), IGNORED)
    targets = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=IGNORED)
    return ({name: value for name, value in batch.items() if name != "labels"} if is_named else batch), targets


class _Recorder:
    """Is a `loss_fn` that remembers the log-probabilities of its one call."""

    def __init__(self, temperature: float, entropy: bool) -> None:
        self._temperature, self._entropy = temperature, entropy
        self._seen: tuple[TokenLogProbs, Tensor] | None = None

    def __call__(self, output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        _, targets, places = batch
        of_tokens = token_log_probs(output, targets, temperature=self._temperature, entropy=self._entropy)
        self._seen = of_tokens, places
        return -of_tokens.log_probs.sum(), (targets != IGNORED).sum()

    def spread(self, targets: Tensor, parts: EngineParts) -> Tensor:
        """Return log-probabilities and entropies of this rank at their places among all targets, [1 or 2, B * S]."""
        wide = torch.promote_types(parts.param_dtype, torch.float32)
        values = torch.zeros(1 + self._entropy, targets.numel(), dtype=wide, device=parts.device)
        if self._seen is not None:
            of_tokens, places = self._seen
            for row, found in zip(values, (of_tokens.log_probs, of_tokens.entropies), strict=False):
                if found is not None:
                    row[places.flatten()] = found.detach().to(wide).flatten()
        return values.view(-1)
