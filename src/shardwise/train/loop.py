"""Runs the training loop of one rank: steps, evaluation, a sample of text. Every rank makes the same calls.

It prints nothing and writes nothing: it returns values, which rank 0 shows and keeps. Processes, folders and exit
codes are the work of `run` and `setup`.

    trainer = build_trainer(config, data)
    for record in trainer.steps(should_stop, announce=print):
        print(record.step, record.loss)
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shardwise.checkpoint.manifest import CheckpointError
from shardwise.config.resolve import Config, ConfigError
from shardwise.engine.engine import Engine
from shardwise.planner.hardware import known_gpu
from shardwise.runtime.memory_tracker import Category, MemorySnapshot, first_line, is_out_of_memory
from shardwise.train.dataset import PackedDataset, TokenDataset, batches_for_step, sample_order
from shardwise.train.job_model import JobModel, job_model
from shardwise.train.metrics import StepRecord, record_of
from shardwise.train.prepare import PreparedData

# The first two: the first may be the one that runs out of memory, the second holds the optimizer's states too.
NUM_FIRST_METERED = 2
METER_EVERY = 50
PROMPT_TOKENS = 24
BASELINE_TOKENS = 1 << 27


@dataclass(frozen=True)
class Sample:
    """Holds text that the model wrote after a prompt from the held-out data."""

    prompt: str
    text: str


@dataclass(frozen=True)
class StoredBytes:
    """Holds one state's bytes between steps on rank 0, as the Layout predicts and as the memory tracker counts them.

    The tracker does not count states on NVMe.
    """

    name: str
    predicted_bytes: int
    measured_bytes: int | None


class Trainer:
    """Trains a model on its data, from the first step to the last.

    Args:
        engine: the model's engine; its config is resolved.
        data: the data, opened on this rank.
        model: what the engine trains.

    Attributes:
        peak: the memory of the last step that was metered.
    """

    def __init__(self, engine: Engine, data: PreparedData, model: JobModel) -> None:
        self.engine = engine
        self.data = data
        self.model = model
        self.peak: MemorySnapshot | None = None
        self._rank = engine.comm.rank
        self._was_stopped = False
        self._first_step = self._num_samples_before = 0

    @property
    def config(self) -> Config:
        """Return the engine's config, which is resolved."""
        return self.engine.config

    @property
    def was_stopped(self) -> bool:
        """Say whether the ranks agreed to stop before the last step."""
        return self._was_stopped

    @property
    def first_step(self) -> int:
        """Return how many steps were taken before this run: 0, or those of the checkpoint that it goes on from."""
        return self._first_step

    def steps(
        self,
        should_stop: Callable[[], bool],
        announce: Callable[[str], None],
        after_step: Callable[[int], None] = lambda step: None,
    ) -> Iterator[StepRecord]:
        """Take the steps that are left and yield a record of each, until the last one or until some rank should stop.

        Args:
            should_stop: called on every rank in each step and evaluation.
            announce: called with a few words on work other than steps.
            after_step: called on every rank with the number of a step that was taken, before anything is evaluated.

        Raises:
            NonFiniteLossError: as `Engine.step`.
            torch.OutOfMemoryError: as the engine's methods.
        """
        run = self.config.run
        self.engine.step_context.should_stop = should_stop
        while self.engine.num_steps < run.steps and not self._was_stopped:
            record = self._take_step()
            self._was_stopped = self.engine.preempted and record.step < run.steps
            after_step(record.step)
            is_due = record.step == run.steps or (run.eval_every is not None and record.step % run.eval_every == 0)
            eval_loss = None
            if is_due and not self._was_stopped:
                announce("evaluating on held-out data")
                eval_loss = self.evaluate()
            yield replace(record, eval_loss=eval_loss)

    def position(self) -> dict[str, Any]:
        """Return the run's position in the data, as JSON: the samples taken, and the hash of the data's tokens."""
        tokens_hash = self.data.train.index.tokens_hash
        return {"num_samples": self._num_samples(self.engine.num_steps), "tokens_hash": tokens_hash}

    def go_on_from(self, position: Mapping[str, Any]) -> None:
        """Continue the data at `position`, whatever the ranks and the batch were.

        Raises:
            CheckpointError: `position` is one in other data, or names no data.
        """
        own_hash = self.data.train.index.tokens_hash
        if position.get("tokens_hash") != own_hash:
            raise CheckpointError(
                "checkpoint-of-other-tokens",
                f"the checkpoint is of a run on other tokens ({position.get('tokens_hash')}) than these of "
                f"{self.data.source} ({own_hash}); give the same data.path and data.tokenizer, or load its weights in "
                "a script of your own",
            )
        self._first_step, self._num_samples_before = self.engine.num_steps, int(position["num_samples"])

    def evaluate(self) -> float:
        """Return the mean loss over `run.eval_batches` global batches of held-out data, the same in every layout."""
        num_batches = self._num_eval_sequences() // self._global_size()
        batches = itertools.chain.from_iterable(
            self._batches(self.data.val, number * self._global_size()) for number in range(num_batches)
        )
        return self.engine.eval_step(list(batches)).loss

    def unigram_loss(self) -> float | None:
        """Return the loss that token frequencies alone reach on the tokens of `evaluate`; None for chats."""
        val, seq_len = self.data.val, self.config.data.seq_len
        if not isinstance(val, TokenDataset) or not isinstance(self.data.train, TokenDataset):
            return None
        order = [self._held_out_sequence(position) for position in range(self._num_eval_sequences())]
        targets = np.concatenate([val.sample(index, seq_len)[1] for index in order])
        return unigram_loss(self.data.train.read(0, BASELINE_TOKENS), targets, self.data.vocab_size)

    def sample(self) -> Sample:
        """Let the model continue held-out text, or answer a held-out chat, by `run.sample_tokens` tokens.

        All ranks write the same.
        """
        val, number = self.data.val, self._held_out_sequence(0)
        if isinstance(val, TokenDataset):
            prompt_ids = val.sample(number, self.config.data.seq_len)[0][:PROMPT_TOKENS].astype(np.int64)
        else:
            prompt_ids = val.prompt(number).astype(np.int64)
        prompt = torch.from_numpy(prompt_ids).to(self.engine.device).unsqueeze(0)  # [1, S]
        with self.engine.gathered() as model:
            tokens = self.model.generate(model, prompt, self.config.run.sample_tokens, self.config)
        ids = tokens[0].tolist()
        tokenizer = self.data.tokenizer
        return Sample(tokenizer.decode(ids[: len(prompt_ids)]), tokenizer.decode(ids[len(prompt_ids) :]))

    def at_rest(self) -> list[StoredBytes]:
        """Return the bytes of each state between steps, predicted and measured."""
        by_tier = self.engine.layout.bytes_by_tier()
        live = {
            "device": self.engine.memory.snapshot().live_bytes,
            "host": self.engine.tiers.memory.snapshot().live_bytes,
        }
        roles = (("param", Category.PARAMETERS), ("grad", Category.GRADIENTS), ("optimizer", Category.OPTIMIZER))
        states = []
        for role, category in roles:
            for tier, predicted in by_tier.items():
                if predicted[role] or len(by_tier) == 1:
                    where = "" if len(by_tier) == 1 else f" ({'NVMe' if tier == 'nvme' else tier})"
                    measured_bytes = live[tier][category] if tier in live else None
                    states.append(StoredBytes(category.value + where, predicted[role], measured_bytes))
        return states

    @property
    def host(self) -> MemorySnapshot | None:
        """Return the memory of the host tier until now; None where all states are stored on the device."""
        is_away = self.engine.layout.bytes_by_tier().keys() - {"device"}
        return self.engine.tiers.memory.snapshot() if is_away else None

    def mfu(self, tokens_per_s: float) -> float | None:
        """Return the model FLOPs utilisation, a share of the devices' dense peak; None where the peak is not known."""
        if self.engine.device.type != "cuda" or self.config.precision.param not in ("bf16", "fp16"):
            return None
        peak = peak_flops(torch.cuda.get_device_name(self.engine.device))
        flops = self.model.flops_per_token(self.config.data.seq_len) * tokens_per_s
        return None if peak is None else flops / (peak * self.engine.comm.world_size)

    def _take_step(self) -> StepRecord:
        number = self.engine.num_steps + 1
        is_metered = number - self._first_step <= NUM_FIRST_METERED or number % METER_EVERY == 0
        memory = self.engine.memory
        if is_metered:
            memory.reset_peak()
        start_s = time.perf_counter()
        # On the CPU a meter slows every op, so activations are counted in a few steps only.
        with memory.meter() if is_metered else nullcontext():
            result = self.engine.train_step(self._batches(self.data.train, self._num_samples(number - 1)))
        step_s = time.perf_counter() - start_s
        snapshot = memory.snapshot()
        if is_metered:
            self.peak = snapshot
        return record_of(result, step_s, snapshot, is_metered)

    def _num_samples(self, num_steps: int) -> int:
        """Return the samples that the run has taken after so many steps."""
        return self._num_samples_before + (num_steps - self._first_step) * self._global_size()

    def _batches(self, dataset: TokenDataset | PackedDataset, first: int) -> list[Any]:
        mesh = self.engine.layout.mesh
        batches = batches_for_step(
            dataset,
            first,
            self.config.batch,
            data_rank=mesh.data_index(self._rank),
            num_data_ranks=mesh.num_data_ranks,
            seed=self.config.run.seed,
            seq_len=self.config.data.seq_len,
        )
        return [self.model.batch(columns) for columns in batches]

    def _global_size(self) -> int:
        size = self.config.batch.global_size
        assert size is not None, "the engine resolves the batch"
        return size

    def _num_eval_sequences(self) -> int:
        """Return the sequences of `run.eval_batches` batches, or of as many as the data fill; at least one batch."""
        global_size = self._global_size()
        there_are = self.data.val.num_sequences(self.config.data.seq_len) // global_size
        return global_size * min(self.config.run.eval_batches, max(1, there_are))

    def _held_out_sequence(self, position: int) -> int:
        return sample_order(self.config.run.seed, position, self.data.val.num_sequences(self.config.data.seq_len))


def build_trainer(config: Config, data: PreparedData) -> Trainer:
    """Build the config's model, draw its weights by parameter name or read them, and shard it.

    Args:
        config: the config, for as many ranks as the process group has.
        data: the data, opened on this rank; its tokenizer gives the size of the vocabulary.

    Raises:
        ConfigError: model, data and world do not fit each other.
        CheckpointError: the checkpoint of `model.weights` does not fit, or cannot be read.
        torch.OutOfMemoryError: the states do not fit.
    """
    torch.manual_seed(config.run.seed)  # checkpoints hold the generators' states: equal runs have equal ones
    random.seed(config.run.seed)
    np.random.seed(config.run.seed % 2**32)
    model = job_model(config).for_tokens(data.vocab_size)
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
    """Return a device's dense FLOP/s in bf16, or fp16 if it has no bf16; None for a device that the planner lacks.

    >>> peak_flops("NVIDIA H100 80GB HBM3")
    989000000000000.0
    """
    device = known_gpu(device_name)
    return None if device is None else device.peak_flops_per_s.get("bf16", device.peak_flops_per_s["fp16"])


_CHUNK_TOKENS = 1 << 22


def unigram_loss(
    train_tokens: NDArray[np.unsignedinteger], held_out_tokens: NDArray[np.unsignedinteger], vocab_size: int
) -> float:
    """Return nats a held-out token, under token frequencies of the training split with add-one smoothing.

    Args:
        train_tokens: [T] token ids; read in chunks, so it may be a memory map.
        held_out_tokens: [H] token ids, H > 0.
        vocab_size: number of ids; tokens never seen in training get 1 / (T + vocab_size).

    Raises:
        ConfigError: there is no held-out token, or an id is not below `vocab_size`.
    """
    if not len(held_out_tokens):
        raise ConfigError(
            "no-held-out-tokens", "the held-out split has no tokens; raise data.val_fraction or give more data"
        )
    probability = (_count(train_tokens, vocab_size) + 1) / (len(train_tokens) + vocab_size)
    share = _count(held_out_tokens, vocab_size) / len(held_out_tokens)
    return float(-(share * np.log(probability)).sum())


def _count(tokens: NDArray[np.unsignedinteger], vocab_size: int) -> NDArray[np.int64]:
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        chunk = np.bincount(tokens[start : start + _CHUNK_TOKENS], minlength=vocab_size)
        if len(chunk) > vocab_size:
            raise ConfigError(
                "token-id-range",
                f"token id {len(chunk) - 1} is not below vocab_size={vocab_size}; use the tokenizer's own",
            )
        counts += chunk
    return counts
