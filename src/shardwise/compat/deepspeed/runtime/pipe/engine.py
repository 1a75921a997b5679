"""Offer `PipelineEngine`, which trains a `PipelineModule` by whole batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardwise.compat.deepspeed.finder import answers
from shardwise.compat.deepspeed.runtime.dataloader import RepeatingLoader
from shardwise.compat.deepspeed.runtime.engine import DeepSpeedEngine
from shardwise.compat.deepspeed.runtime.pipe.module import HELD
from shardwise.compat.deepspeed.runtime.pipe.topology import PipelineParallelGrid
from shardwise.config.errors import ConfigError

__getattr__ = answers(__name__)


class PipelineEngine(DeepSpeedEngine):
    """Trains by `train_batch`, which takes all micro-batches of a step; arguments are those of `DeepSpeedEngine`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.inner.parts.losses.plain.is_on = False
        self.inner.parts.state.loss_fn = self._loss
        self._batches: Iterator[Any] | None = None
        self._change: Callable[[Any], Any] | None = None
        self._outputs: list[Any] | None = None  # of an evaluation that returns them
        self._losses: list[Tensor] = []  # of the same
        self._has_loss = True
        groups_held = self.inner.layout.groups
        self.module.__dict__[HELD] = frozenset(
            name for group in groups_held for spec in group.params for name in (spec.name, *spec.aliases)
        )
        self.mpu = self.grid = PipelineParallelGrid(self.module.topology())
        self.num_stages, self.stage_id = self.grid.pipe_parallel_size, self.grid.stage_id
        self.is_pipe_parallel = self.num_stages > 1
        self.is_data_parallel = self.grid.data_parallel_size > 1
        self.is_model_parallel = self.grid.model_parallel_size > 1
        self.has_attention_mask = False

    @property
    def micro_batches(self) -> int:
        """Return the micro-batches of a step."""
        return self.gradient_accumulation_steps()

    @property
    def micro_batch_size(self) -> int:
        """Return the samples of a micro-batch."""
        return self.train_micro_batch_size_per_gpu()

    @property
    def log_batch_step_id(self) -> int:
        """Return the steps taken."""
        return self.global_steps

    def get_pipeline_parallel_rank(self) -> int:
        """Return this rank's stage."""
        return self.stage_id

    def set_has_attention_mask(self, value: bool) -> None:
        """Note that masks are sent between stages, which needs no word: boundaries take any tensors."""
        self.has_attention_mask = value

    def reset_activation_shape(self) -> None:
        """Do nothing: shapes are agreed again where they change."""

    def get_additional_losses(self) -> None:
        """Return None: a loss function returns one loss."""

    def destroy(self) -> None:
        """Give the module all its layers back."""
        super().destroy()
        self.module.__dict__.pop(HELD, None)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Take a step over the next micro-batches, each (inputs, labels); return the mean loss over all data ranks.

        `data_iter` is the same on every stage; None is for the one of before, or of `training_data`.
        """
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        result = self.inner.train_step(self._take(self.gradient_accumulation_steps()))
        self._count(result)
        self.micro_steps += self.gradient_accumulation_steps()
        return self._scalar(result.loss / self._sum_over)

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Return the mean loss over micro-batches and data ranks, on every stage; the arguments are those of DeepSpeed.

        With `return_logits` it is (loss, outputs by micro-batch), and without `compute_loss` the mean of the outputs.
        Without `reduce_output` it is a list by micro-batch. The last stage has outputs and lists; others have None.
        `bcast_loss` has no effect.
        """
        is_mean = str(reduce_output).lower() == "avg"
        if reduce_output is not None and not (is_mean and (compute_loss or not self.is_data_parallel)):
            over = "over data ranks " if is_mean else ""
            raise ConfigError(
                "eval-reduction",
                f"reduce_output={reduce_output!r} of {'losses' if compute_loss else 'outputs'} {over}is not there; "
                "pass reduce_output=None and reduce the list",
            )
        before, self._batches = self._batches, iter(data_iter)
        self._outputs, self._losses, self._has_loss = [], [], compute_loss
        try:
            loss = self.inner.eval_step(self._take(num_micro_batches or self.gradient_accumulation_steps())).loss
            outputs, losses = (self._outputs, self._losses) if self.is_last_stage() else (None, None)
        finally:
            self._batches, self._outputs, self._has_loss = before, None, True
        if compute_loss:
            reduced: Any = self._scalar(loss) if is_mean else losses
        else:
            reduced = sum(outputs) / len(outputs) if outputs and is_mean else outputs
        return (reduced, outputs) if return_logits else reduced

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        self._batches = iterator

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Take the batches of the next steps from a loader, again and again."""
        self._batches = iter(RepeatingLoader(loader))

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        self._change = fn

    def is_first_stage(self) -> bool:
        pipeline = self.inner.layout.pipeline
        return pipeline is None or 0 in pipeline.held

    def is_last_stage(self) -> bool:
        """Say whether this rank has the last layers, and the loss."""
        pipeline = self.inner.layout.pipeline
        return pipeline is None or pipeline.has_last

    def forward(self, *inputs: Any, **kwargs: Any) -> NoReturn:
        """Refuse a forward, a backward or a step alone: a rank has some of the layers."""
        raise ConfigError("pipeline-whole-batches", "a PipelineEngine trains by whole batches; call train_batch")

    backward = step = forward

    def _take(self, count: int) -> list[Any]:
        """Return the next micro-batches as the engine takes them: what the first layer gets is one argument."""
        if self._batches is None:
            if self.training_dataloader is None:
                raise ConfigError("pipeline-no-data", "a stage has no data; pass the same data_iter on all")
            self.set_dataloader(self.training_dataloader)
        taken = []
        for _ in range(count):
            batch = next(self._batches)  # type: ignore[arg-type]
            inputs, labels = (self._change(batch) if self._change is not None else batch)[:2]
            taken.append(((_fixed(inputs),), _fixed(labels)))
        return taken

    def _loss(self, output: Any, batch: Any) -> Any:
        if self._outputs is not None:
            self._outputs.append(output)
        if not self._has_loss:
            return torch.zeros((), device=self.device)
        loss_fn: Any = self.module.loss_fn
        loss = output if loss_fn is None else loss_fn(output, batch[1])
        if self._outputs is not None:
            self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
        return (loss, 1 / self._sum_over) if self._sum_over > 1 and self._outputs is None else loss

    def _scalar(self, loss: float) -> Tensor:
        dtype = torch.float64 if self.inner.layout.precision.param == "fp64" else torch.float32
        return torch.tensor(loss, dtype=dtype, device=self.device)


def _fixed(value: Any) -> Any:
    """Return a value as layers take it: loaders make lists of tuples."""
    return tuple(value) if isinstance(value, list) else value
