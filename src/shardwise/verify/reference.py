"""The plain side of a verification: one process, autograd, a torch optimizer; nothing of the engine.

What it shares with the other side is the model, the batches, the keyed numbers of dropout, the number of targets that a
model's own loss is a mean of, and how a config names an optimizer and a schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardwise.config import Config
from shardwise.context.huggingface import target_counter
from shardwise.dropout import KeyedDraws, key_dropouts
from shardwise.layout.mesh_shape import MeshShape
from shardwise.optim import build_optimizer, own_scheduler
from shardwise.verify.compare import Trace
from shardwise.verify.job import VerifyJob
from shardwise.verify.model import build_whole, loss_of, make_batch
from shardwise.wearing import float64_throughout


def train_reference(job: VerifyJob) -> Trace:
    """Train as the job says, without its layout."""
    config, seed = job.config, job.config.run.seed
    model = build_whole(job.model, seed)
    draws = KeyedDraws(seed)
    key_dropouts(model, draws, {})
    optimizer = build_optimizer(config.optimizer, _param_groups(model, config))
    scheduler = own_scheduler(config, optimizer)
    trace = Trace()
    for step in range(job.num_steps):
        optimizer.zero_grad()
        with float64_throughout():
            trace.losses.append(_accumulate(job, model, draws, step))
        draws.forget()
        if step == 0:
            trace.gradients.update({name: _gradient(each) for name, each in model.named_parameters()})
        limit = config.optimizer.clip_norm
        norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf if limit is None else limit)
        trace.grad_norms.append(norm.item())
        optimizer.step()
        scheduler.step()
        trace.parameters.append({name: each.detach().clone() for name, each in model.named_parameters()})
    return trace


def _accumulate(job: VerifyJob, model: nn.Module, draws: KeyedDraws, step: int) -> float:
    """Leave the gradient of sum / count over all micro-batches of all data ranks in `.grad`; return sum / count."""
    num_data_ranks = MeshShape.from_config(job.config.mesh).num_data_ranks
    micro_size, accumulation = job.config.batch.micro_size or 1, job.config.batch.accumulation or 1
    loss_fn = loss_of(job.model)
    total, total_count = 0.0, 0.0
    for number in range(accumulation * num_data_ranks):
        batch = make_batch(job.model, job.config.run.seed, step, number, (micro_size, job.seq_len))
        with draws.at(step, number // num_data_ranks, number * micro_size, micro_size):
            output = model(batch[0]) if loss_fn is not None else model(**batch)
        loss_sum, count = _own_loss(model, output.loss, batch) if loss_fn is None else loss_fn(output, batch)
        loss_sum.backward()
        total += loss_sum.item()
        total_count += float(count)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= total_count
    return total / total_count


def _own_loss(model: nn.Module, mean: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | int]:
    """Return the sum and the count of a model's own mean over its targets; a mean over something else counts as one."""
    num_targets = target_counter(model)(batch)
    return (mean, 1) if num_targets is None else (mean * num_targets, num_targets)


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def _param_groups(model: nn.Module, config: Config) -> list[dict[str, object]]:
    """Biases and norms are not decayed, unless the config says so."""
    section = config.optimizer
    parameters = [each for each in model.parameters() if each.requires_grad]
    decayed = [each for each in parameters if each.dim() >= 2 or section.decay_1d]
    others = [each for each in parameters if each.dim() < 2 and not section.decay_1d]
    return [{"params": decayed, "weight_decay": section.weight_decay}, {"params": others, "weight_decay": 0.0}]
