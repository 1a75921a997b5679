"""The engine is what a user calls; `shardwise.engine.initialize.initialize` makes it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import torch
from pydantic import Field
from torch import Tensor, nn

from shardwise.checkpoint.data_position import DataLoaderState
from shardwise.checkpoint.load import LoadReport
from shardwise.checkpoint.manifest import Contents
from shardwise.comm.loss import LossSum
from shardwise.comm.tokens import TokenExchange
from shardwise.config.arguments import FOLDER_NAME, checked
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Dtype
from shardwise.engine.build import EngineInputs, build, release
from shardwise.engine.checkpoint_api import Checkpoints
from shardwise.engine.hf_api import Names, Tokenizer, export_weights, import_weights
from shardwise.engine.runner import as_list, evaluate, forward_plain, log_probs, micro_batches
from shardwise.engine.state_api import gathered_groups, offload
from shardwise.engine.step import backpropagate, check_accumulated, open_loss, run_backward, zero_grad
from shardwise.engine.types import EvalResult, Folder, Scheduler, StepResult, attribute_of
from shardwise.engine.weights import BUCKET_BYTES, WeightSource
from shardwise.launch.signals import watch_signals
from shardwise.layout.layout import Layout
from shardwise.runtime.optimizer_probe import check_scheduler
from shardwise.tensor.token_log_probs import Temperature, TokenLogProbs
from shardwise.zero import state_access
from shardwise.zero.memory_release import ReleaseTarget, Target


class Engine:
    """Trains one model under one layout; made by `initialize`.

    Attributes:
        model: the module as given, its parameters views of the engine's buffers.
        memory: the tracker of live bytes there.
        comm: over all ranks that take the same optimizer step.
        optimizer: the torch optimizer over this rank's shards.
        parts: of which the engine is made, and the state of its step.
    """

    @checked
    def __init__(self, inputs: EngineInputs) -> None:
        self.parts, self.runner, self._cleanup = build(inputs)
        parts, follows_config = self.parts, inputs.optimizer is None and inputs.scheduler is None
        self.model, self.config, self.tiers = parts.model, parts.config, parts.tiers
        self.device, self.memory, self.comm = parts.device, parts.memory, parts.comm
        self.optimizer = parts.optimizer
        self.checkpoints = Checkpoints(parts, follows_config)

    @property
    def layout(self) -> Layout:
        """Return which slice of each state each rank holds; another one after parameters were frozen."""
        return self.parts.layout

    @property
    def num_steps(self) -> int:
        """Return the optimizer steps taken, skipped ones included."""
        return self.parts.state.num_steps

    @property
    def scheduler(self) -> Scheduler:
        """Return the learning-rate schedule, which can be replaced."""
        return self.parts.state.scheduler

    @scheduler.setter
    @checked
    def scheduler(self, scheduler: Scheduler) -> None:
        check_scheduler(scheduler, self.optimizer)
        self.parts.state.scheduler = scheduler

    @property
    def preempted(self) -> bool:
        """Say whether any rank was asked to stop before the last step or evaluation ended, the same on all ranks."""
        return self.parts.state.stops.num_asked > 0

    @checked
    def watch_preemption(self, signals: Sequence[str] = ("SIGTERM", "SIGUSR1")) -> None:
        """Let signals to this rank make `preempted` true on all ranks; a second one, two seconds on, still interrupts.

        Call it on the main thread of all ranks. Once `preempted`, save and end with an exit code other than 0.
        """
        self.parts.state.stops.is_asked = watch_signals(signals).__bool__

    @checked
    def register_token_exchange(self, exchange: TokenExchange | None) -> None:
        """Let a function move rows of tokens between the ranks of `mesh.ep`; None for the exchange of torch again.

        All ranks call it, between steps. docs/experts.md says what the function is called with and must do.

        Raises:
            ConfigError: no rank needs experts of another one.
        """
        tokens = self.parts.comms.tokens
        if tokens is None or tokens.world_size == 1:
            raise ConfigError(
                "no-token-exchange",
                f"mesh.ep={self.config.mesh.ep}: no rank sends tokens to another one's experts; set mesh.ep=2 or more, "
                "or register no exchange",
            )
        tokens.register_token_exchange(exchange)

    @property
    def timeline(self) -> tuple[Any, ...]:
        """Return the timed actions of this rank's last step."""
        return self.parts.timeline.last_step

    def __call__(self, *batch: Any, **inputs: Any) -> Any:
        """Run the model forward and return the mean loss of a batch, a 0-d tensor, for `backward`.

        With a `loss_fn`, a tuple or list is (inputs, what only the loss needs, ...). A dict of inputs goes to the model
        as keyword arguments, a tuple or list as positional ones. Anything but one batch is for `forward`.
        """
        if inputs or len(batch) != 1:
            return self.forward(*batch, **inputs)
        self.runner.check_direct("engine(batch)")
        with self.parts.failures_explained():
            return open_loss(self.parts, batch[0], self.runner.forward(batch[0]))

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """Run the model's own forward and return its output, for scripts that compute and scale the loss themselves.

        From then on any scalar may be given to `backward`, and `loss.backward()` does the same, fp16 excepted: the
        gradient of a step is the mean over the data ranks of the sum over its backwards.

        Args:
            inputs: by name; all of them under `mesh.cp`, where the output is that of this rank's tokens.
        """
        self.runner.check_direct("engine.forward")
        with self.parts.failures_explained():
            return forward_plain(self.parts, args, inputs)

    @checked
    def backward(self, loss: Tensor, *, is_boundary: bool | None = None, retain_graph: bool = False) -> None:
        """Add the gradients of what counted in `loss` to the accumulated ones.

        Args:
            loss: what `engine(batch)` returned, or any scalar once `forward` has run.
            is_boundary: whether the step follows; None where `batch.accumulation` tells. It is only for speed.

        Raises:
            ConfigError: how much counts in the loss is not known.
            torch.OutOfMemoryError: with the table of what holds the memory.
        """
        self.runner.check_direct("engine.backward")
        with self.parts.failures_explained():
            run_backward(self.parts, loss, is_boundary, retain_graph)

    @checked
    def step(self, *, partial: bool = False) -> StepResult:
        """Update the parameters by the clipped mean gradient since the last step, and advance the schedule.

        Args:
            partial: step after fewer backwards than `batch.accumulation` too, such as at the end of an epoch.

        Raises:
            EngineError: there were fewer backwards than `batch.accumulation`; the gradients stay.
            NonFiniteLossError: loss or gradients are not finite; parameters and optimizer stay as they were.
            CheckpointError: a save in the background has failed; call it again to take the step.
        """
        self.parts.status.check()
        check_accumulated(self.parts, partial)
        if self.checkpoints.saver.failure is not None:
            self.checkpoints.saver.poll()
        with self.parts.failures_explained():
            return self.runner.step()

    @checked
    def zero_grad(self) -> None:
        """Forget the gradients since the last step, and a backward that an exception ended. All ranks call it."""
        zero_grad(self.parts)

    @checked
    def train_step(self, batches: Sequence[Any] | Mapping[str, Any] | Tensor) -> StepResult:
        """Take one optimizer step over this data rank's micro-batches.

        Args:
            batches: as many as `batch.accumulation`, each as for `engine(batch)`; a dict or a tensor is one.

        Raises:
            ConfigError: they are more or fewer.
            CheckpointError: a save in the background has failed; nothing was done, call it again to take the step.
        """
        self.parts.status.check()
        if self.checkpoints.saver.failure is not None:
            self.checkpoints.saver.poll()
        with self.parts.failures_explained():
            self.runner.accumulate(micro_batches(self.parts, batches))
            return self.runner.step()

    @checked
    def forward_backward(self, batches: Sequence[Any]) -> None:
        """Run forwards and backwards of this data rank's micro-batches in any layout; `step(partial=True)` follows.

        Args:
            batches: of any number, the same on all ranks, each as for `engine(batch)`. Those of several calls add up;
                a pipeline fills and drains in each.
        """
        self.parts.status.check()
        with self.parts.failures_explained():
            self.runner.accumulate(as_list(batches))

    @checked
    def eval_step(self, batches: Sequence[Any] | Mapping[str, Any] | Tensor) -> EvalResult:
        """Return the mean loss over `batches` of all data ranks, forward only, in the model's eval mode."""
        with self.parts.failures_explained():
            return evaluate(self.parts, self.runner, batches)

    @checked
    def log_probs(self, batch: Any, *, temperature: Temperature = 1.0, entropy: bool = False) -> TokenLogProbs:
        """Return the log-probability of each token of whole sequences, without a graph and without whole logits.

        All ranks call it, each data rank with a batch of its own. In a loss, call `shardwise.token_log_probs`.

        Args:
            batch: (inputs, targets), targets as there; or inputs alone, whose next tokens are the targets: a tensor of
                tokens [B, S], or `input_ids` by name, with `attention_mask` or `labels` that say which count.
            temperature: by which logits are divided, as they are when tokens are sampled.
            entropy: also return the entropy at each place.
        """
        with self.parts.failures_explained():
            return log_probs(self.parts, self.runner, batch, temperature, entropy)

    @checked
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate whole gradients on this rank in the backwards inside, in every stage; `step` reduces them."""
        self.runner.check_direct("engine.no_sync")
        with self.parts.state.without_sync():
            yield

    @checked
    @contextmanager
    def gathered(self, write: bool = False) -> Iterator[nn.Module]:
        """Keep all parameters whole on every rank inside the context: to generate, to inspect. All ranks must enter.

        With `mesh.tp` more than 1, split layers keep this rank's part: `read` and `write` have whole tensors. With
        `mesh.pp` more than 1, the parameters of other ranks' stages are on meta; leave them out of `load_state_dict`.

        Args:
            write: at the end every rank takes what rank 0 has written into the parameters, in the optimizer's masters
                too; after an exception it does not. What rank 0 has no part of is taken from the first rank that has.

        Raises:
            MemoryError: on CUDA, they would not fit into the free memory.
        """
        with gathered_groups(self.parts, write) as model:
            yield model

    @checked
    def read(self, name: str, state: str = "param", *, to_rank: int | None = None) -> Tensor | None:
        """Return a copy of one state of a parameter, whole, on every rank or on one; see
        `zero.state_access.read_state`. All ranks call it.

        Args:
            state: `param`, or one that `states_of` lists.
            to_rank: the only rank that gets it; None for all.
        """
        return state_access.read_state(self.parts.usable_states(), name, state, to_rank)

    @checked
    def write(self, name: str, value: Any, state: str = "param", *, from_rank: int | None = None) -> None:
        """Replace one state of a parameter by every, or one, rank's value; see `zero.state_access.write_state`. All
        ranks call it.

        Args:
            value: the whole state, as a tensor, array or number; None on ranks that give none.
            state: `param`, or one that `states_of` lists.
            from_rank: the only rank whose value counts; None where every rank gives it.
        """
        if state in (state_access.PARAM, state_access.MASTER):
            self.parts.note_update()
        state_access.write_state(self.parts.usable_states(), name, value, state, from_rank)

    @checked
    def states_of(self, name: str) -> tuple[str, ...]:
        """List what `read` and `write` take as `state` of a parameter now. All ranks call it."""
        return state_access.states_of(self.parts.usable_states(), name)

    @checked
    def offload(
        self, include: Sequence[str] | None = None, to: Target = "host", *, path: Folder = None, pin_memory: bool = True
    ) -> Mapping[str, int]:
        """Free memory between phases, as for generation: move states away until `reload`. All ranks call it.

        Without `params` in `include` the model can still be evaluated. Buffers stay.

        Args:
            include: of `optimizer`, `master`, `grads`, `params`; None for all.
            to: "host" moves what is on the device to host memory; "nvme" moves that and what is on the host to a file.
            path: the folder for that file; None for `tiers.nvme_path`.
            pin_memory: pin the host memory, on CUDA: several times as fast, and torch keeps it for the next time.

        Returns:
            the bytes that each state has freed: of the device, and with "nvme" of device and host together.

        Raises:
            ConfigError: there is no such state or target, or no folder is named.
            SwapError, MemoryError: disk or host have too little memory. All states are then as they were.
            EngineError: inside `gathered`, or states are away already.
        """
        target = ReleaseTarget(to, None if path is None else Path(path), pin_memory)
        return offload(self.parts, include, target)

    @checked
    def reload(self) -> None:
        """Move the states back: they are as they were, bit for bit. Do nothing where none are away.

        Raises:
            torch.OutOfMemoryError: call it again once the device has enough.
            SwapError: the file cannot be read; go on with a new engine from the last checkpoint.
        """
        self.parts.status.restore()

    @checked
    @contextmanager
    def offloaded(
        self, include: Sequence[str] | None = None, to: Target = "host", *, path: Folder = None, pin_memory: bool = True
    ) -> Iterator[Mapping[str, int]]:
        """Call `offload` for the context, and `reload` at its end."""
        freed_bytes = self.offload(include, to, path=path, pin_memory=pin_memory)
        try:
            yield freed_bytes
        finally:
            self.reload()

    @checked
    def save(
        self,
        path: str | Path,
        *,
        contents: Contents = "all",
        extra: Any = None,
        wait: bool = True,
        keep_last: int | None = None,
        keep_every: int | None = None,
        tag: str = "",
        data: DataLoaderState | None = None,
    ) -> None:
        """Save into `path/step-<steps taken>`, from which any layout can load. All ranks call it, between steps.

        It appears whole or not at all, and replaces none but one of its tag. `path/latest` names the newest.

        Args:
            path: a folder that all ranks share; made if missing.
            contents: "all"; "trainable", without frozen parameters (adapters alone); or "weights" and buffers only.
            extra: numbers, text, containers, tensors, arrays; that of rank 0 is saved, and `load` returns it as it was.
            wait: return once it is written. Otherwise a copy is written while training goes on, and an error there is
                raised by the next `step`, `save` or `finish_saves`. With states on NVMe it always waits.
            keep_last: how many of the newest stay, besides those of `keep_every`; None for all.
            keep_every: checkpoints whose step is a multiple of this always stay.
            tag: save into `path/<tag>` instead, and replace what is there; it excludes `keep_last` and `keep_every`.
            data: a loader with `state_dict`: each data rank's is saved.

        Raises:
            CheckpointError: on every rank: it exists or cannot be written, or a parameter was moved or written outside.
            EngineError: gradients are accumulated, which a checkpoint does not keep.
        """
        self.checkpoints.save(path, contents, extra, wait, keep_last, keep_every, tag, data)

    @checked
    def finish_saves(self) -> Path | None:
        """Wait until the save under way is written, and return the newest checkpoint of this engine, if there is one.

        Raises:
            CheckpointError: it could not be written.
        """
        return self.checkpoints.saver.wait()

    @checked
    def load(
        self,
        path: str | Path,
        *,
        strict: bool = True,
        weights_only: bool = False,
        tag: Annotated[str, FOLDER_NAME] = "",
        data: DataLoaderState | None = None,
    ) -> LoadReport:
        """Load a checkpoint that any layout saved: its world size, stage, tensor parallelism, precision may differ.

        DeepSpeed's are read too. All ranks call it. Gradients are dropped. After a failure of the host or of NVMe the
        engine can be used again after a load, unless other ranks have given up a collective.

        Args:
            path: a checkpoint, `step-...`; or the folder of several, whose newest that is whole is taken.
            strict: everything must fit; otherwise what fits is loaded, and the report says what was skipped.
            weights_only: take parameters and buffers; optimizer, schedule and number of steps stay as they are.
            tag: the name of the checkpoint's folder in `path`; empty for the newest.
            data: a loader with `load_state_dict`, which goes on where that of the saved run was. With another number of
                data ranks it must count the samples of all of them, as Shardwise's own loaders do.

        Raises:
            CheckpointError: it does not fit the model; nothing has been changed.
            DamagedError: no checkpoint there is whole; it names each with its damage. The engine needs another load.
        """
        return self.checkpoints.load(Path(path, tag), strict, weights_only, data)

    @checked
    def import_weights(self, folder: str | Path, *, names: Names | None = None, strict: bool = True) -> LoadReport:
        """Read a Hugging Face folder straight into the shards: only its parameters and persistent buffers.

        Optimizer states, schedule and number of steps stay; gradients are dropped. All ranks call it.

        Args:
            folder: with `model.safetensors`, or the index and files of a sharded one.
            names: the model's pattern -> the folder's where names differ, such as `{"lm.**": "model.**"}`; see
                `shardwise.checkpoint.hf.key_map`. Differences of the model's family are found without it.
            strict: everything must fit; otherwise what fits is loaded, and the report says what was skipped. Adapters
                added to a base model are missing in its folder.

        Raises:
            CheckpointError: it does not fit the model, is a pickle or quantized; nothing has been changed.
            DamagedError: a file is missing or cut off; if that showed only midway, the engine needs another load.
        """
        return import_weights(self.parts, self.checkpoints, Path(folder), names, strict)

    @checked
    def export_weights(
        self,
        folder: str | Path,
        *,
        dtype: Dtype | None = None,
        names: Names | None = None,
        files: Iterable[str | Path] = (),
        tokenizer: Tokenizer | None = None,
    ) -> Path:
        """Write the weights as a Hugging Face folder, which `from_pretrained` loads; every rank writes its own slices.

        Every layout writes the same bytes. The folder appears whole or not at all, and an existing one is not
        overwritten. All ranks call it.

        Args:
            folder: shared by all ranks; it does not exist yet, or is empty.
            dtype: of the parameters; None for the one in which each is computed. Buffers keep theirs.
            files: of rank 0, to copy next to the weights; one such as config.json replaces the engine's.
            tokenizer: of transformers, so that `AutoTokenizer` loads the folder too; None for none.

        Returns:
            The folder.

        Raises:
            CheckpointError: it cannot be written, on every rank, and nothing is left of it; or it has PEFT's adapters.
        """
        return export_weights(self.parts, Path(folder), dtype, names, files, tokenizer)

    @checked
    def weights(
        self,
        names: Names | Literal["hf"] | None = "hf",
        dtype: Dtype | None = None,
        adapters: Literal["merge", "only"] | None = "merge",
        *,
        to_rank: int | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> WeightSource:
        """Return a source of the weights as a folder has them, to hand them over: to a server, or to files of your own.

        Args:
            names: "hf" for the names of the model's folder; None for the model's own; rules as for `export_weights`.
            dtype: of the parameters; None for the one in which each is computed. Buffers keep theirs.
            adapters: what of PEFT's: "merge" for the model with them merged into its weights, "only" for them alone,
                as their file names them; None for the model without them, or with its own names for all that is there.
            to_rank: the only rank that gets the tensors; None for all.
            bucket_bytes: of the tensors that are gathered at a time; a larger one is gathered alone.
        """
        return WeightSource(self.parts, names, dtype, adapters, to_rank, bucket_bytes)

    @checked
    def close(self, keep_values: bool = True) -> None:
        """Release the model: hooks go, parameters become whole tensors of their own, all other states are dropped.

        All ranks call it; a second call does nothing. An optimizer that was given holds the model's parameters again.

        Args:
            keep_values: False leaves the parameters on meta, where a model is larger than the memory. Save it before.
        """
        if not self.parts.status.close():
            return
        try:
            self.checkpoints.saver.close()
        finally:
            if keep_values:
                self.reload()
            release(self._cleanup, self.tiers, self.parts.sharding, keep_values)

    if not TYPE_CHECKING:  # or a checker would take any name for one of the engine's

        def __getattr__(self, name: str) -> Any:
            return attribute_of(self, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()


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
        engine.parts.status.check()
    of_engines = [engine.parts for engine in engines]
    # An engine without gradients so far can still take the others' normaliser.
    taken = {parts.losses.normaliser for parts in of_engines if not parts.losses.is_empty}
    if len(taken) > 1 or len({parts.scaler.scale for parts in of_engines}) > 1:
        raise ConfigError(
            "gradient-scales-differ",
            "the engines scale their gradients differently, so one backward cannot serve them; let each take its step "
            "before the common loss, and under fp16 set precision.loss_scale to one number",
        )
    total = LossSum(loss.detach().reshape(()) * count, torch.full((), count, device=loss.device))
    normaliser = next(iter(taken or {parts.losses.normaliser for parts in of_engines}))
    for parts in of_engines:
        parts.losses.normaliser = normaliser
        weight = parts.losses.count_in(total) * parts.scaler.scale
        normaliser = parts.losses.normaliser
    backpropagate(of_engines, loss, weight)
