"""This module runs one backward for several engines, such as an encoder's and a decoder's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from shardwise.comm.loss import LossSum
from shardwise.config.arguments import checked
from shardwise.config.resolve import ConfigError
from shardwise.engine.engine import Engine
from shardwise.engine.step_context import backpropagate


@checked
def backward(
    loss: Tensor, engines: Sequence[Engine], *, count: Annotated[float, Field(gt=0, lt=math.inf)] = 1.0
) -> None:
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
        engine.runner.check_direct("shardwise.backward")
        engine.step_context.status.check()
    contexts = [engine.step_context for engine in engines]
    # An engine without gradients so far can still take the others' normaliser.
    taken = {context.losses.normaliser for context in contexts if not context.losses.is_empty}
    if len(taken) > 1 or len({context.scaler.scale for context in contexts}) > 1:
        raise ConfigError(
            "gradient-scales-differ",
            "the engines scale their gradients differently, so one backward cannot serve them; let each take its step "
            "before the common loss, and under fp16 set precision.loss_scale to one number",
        )
    total = LossSum(loss.detach().reshape(()) * count, torch.full((), count, device=loss.device))
    normaliser = next(iter(taken or {context.losses.normaliser for context in contexts}))
    for context in contexts:
        context.losses.normaliser = normaliser
        weight = context.losses.count_in(total) * context.scaler.scale
        normaliser = context.losses.normaliser
    backpropagate(contexts, loss, weight)
