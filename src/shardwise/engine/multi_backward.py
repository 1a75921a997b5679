"""This module runs the backward of one loss through the models of several engines."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.comm.loss import LossSum
from shardwise.config.resolve import ConfigError
from shardwise.engine.engine import Engine, backpropagate


def backward(loss: Tensor, engines: Sequence[Engine], *, count: float = 1.0) -> None:
    """Add the gradients of one loss, computed from the models of several engines, to what each has accumulated.

    Each engine counts it as a loss of mean `loss` over `count`, and each takes its own `step`. The models are called
    directly, or through `engine(batch)`; a frozen engine may take part, such as a teacher's.

    >>> from torch import nn
    >>> from shardwise import initialize
    >>> config = {"run": {"device": "cpu"}}
    >>> with initialize(nn.Linear(4, 3), config) as encoder, initialize(nn.Linear(3, 1), config) as decoder:
    ...     backward(decoder.model(encoder.model(torch.ones(2, 4))).square().mean(), [encoder, decoder])
    ...     encoder.step().loss == decoder.step().loss
    True

    Args:
        loss: a scalar.
        engines: all engines whose models took part and are to learn from it.
        count: what `loss` is the mean of, such as target tokens, against the step's other losses.

    Raises:
        ConfigError: `loss` is no scalar, no engine is given, or one scales its gradients differently from the others.
    """
    if loss.numel() != 1 or not engines or len(set(map(id, engines))) < len(engines):
        raise ConfigError(
            "backward-arguments",
            f"backward takes a scalar loss and engines, each once; got shape {tuple(loss.shape)} and {len(engines)}",
        )
    for engine in engines:
        engine._run.check_direct("shardwise.backward")
        engine._check_usable()
    # An engine without gradients so far can still take the others' normaliser.
    taken = {engine._losses.normaliser for engine in engines if not engine._losses.is_empty}
    if len(taken) > 1 or len({engine._scaler.scale for engine in engines}) > 1:
        raise ConfigError(
            "gradient-scales-differ",
            "the engines scale their gradients differently, so one backward cannot serve them; let each take its step "
            "before the common loss, and under fp16 set precision.loss_scale to one number",
        )
    total = LossSum(loss.detach().reshape(()) * count, torch.full((), count, device=loss.device))
    normaliser = next(iter(taken or {engine._losses.normaliser for engine in engines}))
    for engine in engines:
        engine._losses.normaliser = normaliser
        weight = engine._losses.count_in(total) * engine._scaler.scale
        normaliser = engine._losses.normaliser
    backpropagate(engines, loss, weight)
