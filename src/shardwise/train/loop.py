"""Runs the training loop of one rank: steps, evaluation, a sample of text. Every rank makes the same calls.

It prints nothing and writes nothing: it returns values, which rank 0 shows and keeps.

    trainer = build_trainer(config, data)
    for record in trainer.steps(should_stop, announce=print):
        print(record.step, record.loss)
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.checkpoint.manifest import CheckpointError
from shardwise.config.resolve import ResolvedConfig
from shardwise.engine.engine import Engine
from shardwise.engine.types import StepResult
from shardwise.planner.hardware import known_gpu
from shardwise.runtime.device import device_name
from shardwise.runtime.memory_tracker import MemorySnapshot, first_line, is_out_of_memory
from shardwise.train.dataset import PackedDataset, TokenDataset, batches_for_step, sample_order
from shardwise.train.job_model import JobModel, job_model
from shardwise.train.metrics import StepRecord
from shardwise.train.prepare import PreparedData

# The first two: the first may be the one that runs out of memory, the second holds the optimizer's states too.
NUM_FIRST_METERED = 2
METER_EVERY = 50


@dataclass(frozen=True)
class Sample:
    """Holds text that the model wrote after a prompt from the held-out data."""

    prompt: str
    text: str


class StepMeter:
    """Measures each step's time, and the memory of some: a meter slows every op on the CPU.

    Attributes:
        peak: the memory of the last step that was metered.
    """

    def __init__(self, engine: Engine) -> None:
        self.peak: MemorySnapshot | None = None
        self._engine = engine
        self._num_begun = 0
        self._is_metered = False
        self._meter = ExitStack()
        self._start_s = 0.0

    def begin(self, may_meter: bool = True) -> None:
        """Begin a step, the reading of its batch included; no meter follows what comes after the last one."""
        self._num_begun += 1
        is_due = self._num_begun <= NUM_FIRST_METERED or (self._engine.num_steps + 1) % METER_EVERY == 0
        self._is_metered = may_meter and is_due
        if self._is_metered:
            self._engine.memory.reset_peak()
            self._meter.enter_context(self._engine.memory.meter())
        self._start_s = time.perf_counter()

    def end(self, result: StepResult) -> StepRecord:
        """Return the record of the step that has just been taken."""
        step_s = max(1e-9, self._engine.parts.timeline.clock.closed_s - self._start_s)
        self.close()
        snapshot = self._engine.memory.snapshot()
        self.peak = snapshot if self._is_metered else self.peak
        peak_bytes = {category.value: num_bytes for category, num_bytes in snapshot.peak_live_bytes.items()}
        return StepRecord(
            step=result.step,
            loss=result.loss,
            count=result.count,
            grad_norm=result.grad_norm,
            lr=result.lr,
            skipped=result.skipped,
            step_s=step_s,
            tokens_per_s=result.count / step_s,
            memory_bytes={category.value: num_bytes for category, num_bytes in snapshot.live_bytes.items()},
            peak_bytes=peak_bytes if self._is_metered else None,
            expert_skew=result.expert_skew or None,
        )

    def close(self) -> None:
        """Stop to meter a step that did not end."""
        self._meter.close()


class Trainer:
    """Trains a model on its data, from the first step to the last.

    Args:
        engine: the model's engine; its config is resolved.
        data: the data, opened on this rank.

    Attributes:
        was_stopped: whether the ranks agreed to stop before the last step.
        first_step: how many steps were taken before this run: 0, or those of the checkpoint that it goes on from.
    """

    def __init__(self, engine: Engine, data: PreparedData, model: JobModel) -> None:
        self.engine = engine
        self.data = data
        self.model = model
        self.was_stopped = False
        self.first_step = self._num_samples_before = 0
        self._meter = StepMeter(engine)

    @property
    def config(self) -> ResolvedConfig:
        """Return the engine's config, which is resolved."""
        return self.engine.config

    @property
    def peak(self) -> MemorySnapshot | None:
        """Return the memory of the last step that was metered."""
        return self._meter.peak

    def steps(
        self,
        should_stop: Callable[[], bool],
        announce: Callable[[str], None],
        after_step: Callable[[int], None] = lambda step: None,
        survived: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Iterator[StepRecord]:
        """Take the steps that are left and yield a record of each, until the last one or until some rank should stop.

        Args:
            should_stop: called on every rank in each step and evaluation.
            announce: called with a few words on work other than steps.
            after_step: called on every rank with the number of a step that was taken, before anything is evaluated.
            survived: a context that may take the error of a save in the background, after which the step is taken.
        """
        run = self.config.run
        self.engine.parts.state.stops.is_asked = should_stop
        while self.engine.num_steps < run.steps and not self.was_stopped:
            record = None
            with survived():  # a save's error comes before anything is done
                record = self._take_step()
            record = record or self._take_step()
            self.was_stopped = self.engine.preempted and record.step < run.steps
            after_step(record.step)
            is_due = record.step == run.steps or (run.eval_every is not None and record.step % run.eval_every == 0)
            eval_loss = None
            if is_due and not self.was_stopped:
                announce("evaluating on held-out data")
                eval_loss = self.evaluate()
            yield replace(record, eval_loss=eval_loss)

    def position(self) -> dict[str, Any]:
        """Return the run's position in the data, as JSON: the samples taken, and the hash of the data's tokens."""
        return {"num_samples": self._num_samples(self.engine.num_steps), "tokens_hash": self.data.index.tokens_hash}

    def go_on_from(self, position: Mapping[str, Any]) -> None:
        """Continue the data at `position`, whatever the ranks and the batch were.

        Raises:
            CheckpointError: `position` is one in other data, or names no data.
        """
        index = self.data.index
        if position.get("tokens_hash") != index.tokens_hash:
            raise CheckpointError(
                "checkpoint-of-other-tokens",
                f"the checkpoint is of a run on other tokens ({position.get('tokens_hash')}) than these of "
                f"{index.source} ({index.tokens_hash}); give the same data.path and data.tokenizer, or load its "
                "weights in a script of your own",
            )
        self.first_step, self._num_samples_before = self.engine.num_steps, int(position["num_samples"])

    def evaluate(self) -> float:
        """Return the mean loss over `run.eval_batches` global batches of held-out data, the same in every layout."""
        there_are = self.data.val.num_sequences(self.config.data.seq_len) // self._global_size()
        num_batches = min(self.config.run.eval_batches, max(1, there_are))
        batches = itertools.chain.from_iterable(
            self._batches(self.data.val, number * self._global_size()) for number in range(num_batches)
        )
        return self.engine.eval_step(list(batches)).loss

    def sample(self) -> Sample:
        """Let the model continue held-out text, or answer a held-out chat, by `run.sample_tokens` tokens.

        All ranks write the same.
        """
        val, seq_len = self.data.val, self.config.data.seq_len
        number = sample_order(self.config.run.seed, 0, val.num_sequences(seq_len))
        prompt_ids = val.prompt(number, seq_len).astype(np.int64)
        prompt = torch.from_numpy(prompt_ids).to(self.engine.device).unsqueeze(0)  # [1, S]
        with self.engine.gathered() as model:
            tokens = self.model.generate(model, prompt, self.config.run.sample_tokens, self.config)
        ids = tokens[0].tolist()
        tokenizer = self.data.tokenizer
        return Sample(tokenizer.decode(ids[: len(prompt_ids)]), tokenizer.decode(ids[len(prompt_ids) :]))

    @property
    def host(self) -> MemorySnapshot | None:
        """Return the memory of the host tier until now; None where all states are stored on the device."""
        is_away = self.engine.layout.bytes_by_tier().keys() - {"device"}
        return self.engine.tiers.memory.snapshot() if is_away else None

    def mfu(self, tokens_per_s: float) -> float | None:
        """Return the model FLOPs utilisation, a share of the devices' dense peak; None where the peak is not known."""
        if self.config.precision.param not in ("bf16", "fp16"):
            return None
        return mfu_of(self.engine, self.model.flops_per_token(self.config.data.seq_len) * tokens_per_s)

    def _take_step(self) -> StepRecord:
        number = self.engine.num_steps + 1
        with closing(self._meter):
            self._meter.begin()
            return self._meter.end(
                self.engine.train_step(self._batches(self.data.train, self._num_samples(number - 1)))
            )

    def _num_samples(self, num_steps: int) -> int:
        """Return the samples that the run has taken after so many steps."""
        return self._num_samples_before + (num_steps - self.first_step) * self._global_size()

    def _batches(self, dataset: TokenDataset | PackedDataset, first: int) -> list[Any]:
        mesh = self.engine.layout.mesh
        batches = batches_for_step(
            dataset,
            first,
            self.config.batch,
            data_rank=mesh.data_index(self.engine.comm.rank),
            num_data_ranks=mesh.num_data_ranks,
            seed=self.config.run.seed,
            seq_len=self.config.data.seq_len,
        )
        return [self.model.batch(columns) for columns in batches]

    def _global_size(self) -> int:
        size = self.config.batch.global_size
        assert size is not None, "the engine resolves the batch"
        return size


def build_trainer(config: ResolvedConfig, data: PreparedData) -> Trainer:
    """Build the config's model, draw its weights by parameter name or read them, and shard it.

    Raises:
        ConfigError: model, data and world do not fit each other.
        CheckpointError: the checkpoint of `model.weights` does not fit, or cannot be read.
        torch.OutOfMemoryError: the states do not fit.
    """
    torch.manual_seed(config.run.seed)  # checkpoints hold the generators' states: equal runs have equal ones
    random.seed(config.run.seed)
    np.random.seed(config.run.seed % 2**32)
    model = job_model(config).for_tokens(data.index.vocab_size)
    try:
        engine = model.initialize(config)
        if config.model.weights is not None:
            engine.load(Path(config.model.weights).expanduser(), weights_only=True)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(
            f"out of memory before the first step, while the states were made: {first_line(error)}; "
            "use a smaller model, zero.stage=3 over more ranks, or optimizer.name=sgd"
        ) from error
    return Trainer(engine, data, model)


def peak_flops(device_name: str) -> float | None:
    """Return a device's dense FLOP/s in bf16, or fp16 if it has no bf16; None for a device that the planner lacks."""
    device = known_gpu(device_name)
    return None if device is None else device.peak_flops_per_s.get("bf16", device.peak_flops_per_s["fp16"])


def mfu_of(engine: Engine, flops_per_s: float) -> float | None:
    """Return the share of the devices' dense peak that a speed is; None on a CPU, and where the peak is not known."""
    peak = peak_flops(device_name(engine.device))
    return None if peak is None else flops_per_s / (peak * engine.comm.world_size)
