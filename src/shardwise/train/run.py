"""Runs a job from its start to its exit code: it starts ranks here, or is one of the ranks that were started."""

from __future__ import annotations

import errno
import gc
import io
import json
import logging
import math
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final, TextIO

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as ProgressBar

from shardwise.checkpoint.manifest import AbsentRankError, CheckpointError
from shardwise.comm.agreement import Agreement
from shardwise.comm.records import CommError
from shardwise.comm.store import PatientStore
from shardwise.config.errors import CodedError, ConfigError, with_code
from shardwise.config.resolve import Config, ResolvedConfig
from shardwise.config.untrusted_files import as_config_error, read_text
from shardwise.config.written_files import end_with, is_full, open_end
from shardwise.launch.environment import RankEnv
from shardwise.launch.local import default_num_ranks, launch_local
from shardwise.launch.process_group import start_process_group
from shardwise.launch.signals import StopFlag
from shardwise.report.console import Escaped, LogFormatter, progress, write_line
from shardwise.report.panel import TerminalPanel
from shardwise.report.run_folder import TIMELINE_NAME
from shardwise.runtime.device import choose_kind, num_devices
from shardwise.runtime.format import format_bytes, format_count
from shardwise.schedule import TimedAction
from shardwise.tensor.plan_layout import plan_layout
from shardwise.train.checkpoints import (
    Resumed,
    RunCheckpoints,
    checkpoint_root,
    how_to_go_on,
    is_untouched,
    make_root,
    take_over_metrics,
)
from shardwise.train.job_model import job_model, model_name
from shardwise.train.loop import Sample, Trainer, build_trainer
from shardwise.train.metrics import StepRecord
from shardwise.train.needs import shortages
from shardwise.train.prediction import compare, predict
from shardwise.train.prepare import PreparedData, open_data
from shardwise.train.progress import Progress, say
from shardwise.train.rank_watch import note_command
from shardwise.train.recorder import RunRecorder, header_of
from shardwise.train.recording import gather_timeline, write_timeline
from shardwise.train.setup import (
    CONFIG_NAME,
    TOKENIZER_NAME,
    create_folder,
    lent_data_line,
    prepare_job_data,
    resolve_job,
    slow_dtype_line,
    sparse_words,
    with_steps,
)
from shardwise.train.summary import RunOutcome, render_outcome

# A rank that is asked to stop bounds its step itself (`StopFlag.armed`); its save may take long.
STOP_GRACE_S = 1800.0
_STOPPED_BY: Final[Mapping[int, str]] = MappingProxyType(
    {128 + signal.SIGINT: "Ctrl-C", 128 + signal.SIGTERM: "SIGTERM", 128 + signal.SIGHUP: "SIGHUP"}
)
_REFUSED: Final = 2
_FIRST_OF_DATA: Final = "reading the data and learning the tokenizer"
_MAKING: Final = "making the model {} on each rank"
# The Hugging Face folder in a run's folder.
EXPORT_NAME: Final = "model"
# The messages of these errors are enough; for any other error the log gets the traceback.
_EXPECTED = (CodedError, torch.OutOfMemoryError, MemoryError)

log = logging.getLogger("shardwise")


def start(config: Config, console: Console, resume: Path | None = None) -> int:
    """Train on ranks that are started here, and return the exit code.

    Args:
        console: the console for the data's progress; rank 0 shows everything after that on stdout.
        resume: the checkpoint to go on from, or a folder of checkpoints; None starts afresh.

    Raises:
        ConfigError: the config does not fit this machine; it is raised before any process starts.
    """
    num_ranks = config.run.num_procs or default_num_ranks(config.run.device)
    num_gpus = num_devices(choose_kind(config.run.device))
    if 0 < num_gpus < num_ranks:
        raise ConfigError(
            "more-ranks-than-gpus",
            f"run.num_procs={num_ranks} but torch sees {num_gpus} GPUs; use at most one rank a GPU",
        )
    config = config.model_copy(update={"run": config.run.model_copy(update={"num_procs": num_ranks})})
    with progress("checking the model and its layout"):
        config = _resolved_here(config, num_ranks)
    config, folder, shard_path = _prepare(config, console, resume, num_ranks)
    note_command(folder)
    ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    say(console, f"run folder {folder}, starting {ranks}")
    argv = ["-m", "shardwise.cli", "train", "--prepared", str(folder), str(shard_path)]
    exit_code = launch_local(
        argv if resume is None else [*argv, "--resume", str(resume)],
        num_ranks,
        folder,
        threads_per_rank=config.run.num_threads,
        timeout_s=config.run.timeout_s,
        grace_s=STOP_GRACE_S,
    )
    if exit_code in _STOPPED_BY:
        say(console, f"stopped by {_STOPPED_BY[exit_code]}; what was done until then is in {folder}")
    if exit_code == _REFUSED and is_untouched(folder):
        shutil.rmtree(folder, ignore_errors=True)
    elif exit_code:
        write_line(f"shardwise: {how_to_go_on(config, folder, resume)}", to_stderr=True)
    return exit_code


def join(
    config: ResolvedConfig,
    env: RankEnv,
    stop: StopFlag,
    console: Console,
    resume: Path | None = None,
    prepared: tuple[Path, Path] | None = None,
) -> int:
    """Run as one of the ranks that `start`, torchrun or srun started, and return the exit code.

    Args:
        stop: says after each step whether to stop.
        console: the console on which rank 0 shows the run.
        resume: the checkpoint to go on from, or a folder of checkpoints; None starts afresh.
        prepared: the run's folder and the token shard, made by `start`. With None rank 0 makes them, and sends their
            paths to the other ranks through the store.

    Raises:
        ConfigError: this rank has no GPU, or rank 0 could not prepare the run.
        LaunchError: the ranks did not meet.
    """
    start_process_group(env, choose_kind(config.run.device).name, config.run.timeout_s)
    if prepared is None:
        config, folder, shard_path, resume = _agree_on_place(config, env, console, resume)
    else:
        folder, shard_path = prepared
    return run_rank(
        *(config, folder, shard_path),
        env=env,
        stop=stop,
        console=console,
        resume=resume,
        is_launched_here=prepared is not None,
    )


def config_of(folder: Path) -> ResolvedConfig:
    """Return the config that `start` has written to a run's folder.

    Raises:
        ConfigError: the folder holds none, or one that is not resolved.
    """
    with as_config_error():
        text = read_text(folder / CONFIG_NAME, "let shardwise train start its ranks itself")
    return ResolvedConfig.from_json(text)


def run_rank(
    config: ResolvedConfig,
    folder: Path,
    shard_path: Path,
    *,
    env: RankEnv,
    stop: StopFlag,
    console: Console,
    resume: Path | None = None,
    is_launched_here: bool = False,
) -> int:
    """Train on this rank of an existing process group; return the exit code: 0, 1, 2, or 128 + a signal's number.

    The arguments are those of `join`; where `is_launched_here`, `start` says after a stop how to go on.
    """
    trainer: Trainer | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _log_to(folder, env)
        if config.run.num_threads is not None:
            torch.set_num_threads(config.run.num_threads)
        with _saying(_MAKING.format(model_name(config)), env, console) as announce:
            trainer = build_trainer(config, open_data(shard_path, config, is_checked=True))
            log.info("%s", trainer.engine.layout.mesh)
            checkpoints = RunCheckpoints(trainer, checkpoint_root(config, folder))
            announce("loading the checkpoint" if resume is not None else "predicting memory and time of a step")
            resumed = None if resume is None else checkpoints.resume(resume)
            if env.rank == 0:
                prediction = predict(trainer, folder, env.cache)
        if env.rank == 0:
            _begin_folder(trainer, folder, resumed, console)
        recorder = RunRecorder(
            trainer.engine, _first_state(trainer, resumed), folder, console, trainer.mfu, stop.__bool__
        )
        outcome = _train(trainer, checkpoints, folder, recorder, stop)
        if env.rank == 0:
            stopped_by = _stopped_by(stop, env) if trainer.was_stopped else None
            outcome = replace(
                outcome,
                stopped_by=stopped_by,
                says_how_to_go_on=stopped_by is None or not is_launched_here,
                host=trainer.host,
                prediction=prediction,
                measured=compare(trainer, folder, prediction, recorder.step_s),  # which the page shows
            )
            console.print(Escaped(render_outcome(recorder.outcome(outcome))), crop=False)
        if outcome.failure is not None:
            raise outcome.failure
    except KeyboardInterrupt:
        return 128 + signal.Signals[stop.signal_name or "SIGINT"]
    except Exception as error:
        if trainer is not None:
            _finish_save_unless_alone(trainer, error)
        return _fail(error, folder, env, lambda: how_to_go_on(config, folder, resume))
    finally:  # ranks end without the interpreter's own end, which would remove swap files
        if trainer is not None:
            trainer.engine.tiers.close()
        gc.collect()  # an engine that was only half made
    return 128 + signal.Signals[stop.signal_name or "SIGTERM"] if trainer.was_stopped else 0


def _train(
    trainer: Trainer, checkpoints: RunCheckpoints, folder: Path, recorder: RunRecorder, stop: StopFlag
) -> RunOutcome:
    """Take the steps, save, evaluate and write the sample; every rank calls it."""
    armed = ExitStack()
    checkpoints.say = recorder.note

    def save(step: int) -> None:
        if step == trainer.first_step + 1:
            # Until then there is nothing to save, and a first step may take as long as it likes.
            armed.enter_context(stop.armed(trainer.config.run.timeout_s))
        if step == trainer.config.run.record_timeline:
            _keep_timeline(trainer, recorder, folder, gather_timeline(trainer.engine))
        if not checkpoints.is_due(step):
            return
        if trainer.was_stopped:
            recorder.say(f"saving step {step} into {checkpoints.root}")
        elif checkpoints.waits(step):
            recorder.announce(f"saving step {step}")
        with stop.saving():
            checkpoints.save(step)

    with armed, recorder:
        if trainer.config.compile.enabled:
            recorder.announce("compiling the blocks in the first step, which takes minutes for large ones")
        for record in trainer.steps(stop.__bool__, recorder.announce, save, checkpoints.survived):
            recorder.see(record)
            _log_step(record)
        sample = None if trainer.was_stopped else _evaluate_and_sample(trainer, recorder)
        with stop.saving():
            saved = checkpoints.finish()
    if trainer.was_stopped:  # the last line of the log, which the local launcher quotes if it stopped no rank itself
        stops = trainer.engine.parts.state.stops
        who = f"rank {stops.rank_sum} was" if stops.num_asked == 1 else f"{stops.num_asked} ranks were"
        log.info("stopped after step %d, as %s asked to", trainer.engine.num_steps, who)
    exported, failure = None, checkpoints.failure
    if not isinstance(failure, AbsentRankError):  # its folder may have space where that of the checkpoints has none
        exported, not_exported = _export(trainer, folder / EXPORT_NAME, stop)
        failure = failure or not_exported
    pipeline = _keep_last_step(trainer, recorder, folder)
    return RunOutcome(
        recorder.state,
        folder,
        sample=sample,
        saved=saved,
        failure=failure,
        exported=exported,
        pipeline=pipeline,
    )


def _saying(doing: str, env: RankEnv, console: Console) -> AbstractContextManager[Callable[[str], None]]:
    """Say on rank 0 what is being done before the first step, if that takes long."""
    return progress(doing, console.file) if env.rank == 0 else nullcontext(lambda doing: None)


def _begin_folder(trainer: Trainer, folder: Path, resumed: Resumed | None, console: Console) -> None:
    """Write and say on rank 0 what comes before the first step."""
    config = trainer.config
    if resumed is not None:
        take_over_metrics(config, folder, resumed)
        for note in resumed.notes:
            say(console, note)
    if (pipeline := trainer.engine.layout.pipeline) is not None:
        say(console, pipeline.summary)
    trainer.model.save_tokenizer(folder / TOKENIZER_NAME, trainer.data.tokenizer)


def _first_state(trainer: Trainer, resumed: Resumed | None) -> Progress:
    """Return the state of a run before its first step; `resumed` is the checkpoint that it goes on from, if any."""
    config, first_step = trainer.config, trainer.first_step
    header = header_of(
        trainer.engine,
        model=f"{trainer.model.words}{sparse_words(config, trainer.model.num_heads)}",
        tokens=f", {config.data.seq_len} tokens each",
        data=f"{trainer.data.index.source}, {format_count(trainer.data.index.num_tokens)} tokens",
        resumed="" if resumed is None else f"from step {resumed.step} of {resumed.path.parent}",
    )
    return Progress(header, config.run.steps, step=first_step, first_step=first_step)


def _keep_timeline(trainer: Trainer, recorder: RunRecorder, folder: Path, actions: Sequence[TimedAction]) -> None:
    recorder.keep(TIMELINE_NAME, lambda: write_timeline(trainer.engine, folder / TIMELINE_NAME, actions))


def _keep_last_step(trainer: Trainer, recorder: RunRecorder, folder: Path) -> str:
    """Write the last step's timeline, unless the run has recorded another; return words on a pipeline's bubble."""
    engine, recorded = trainer.engine, trainer.config.run.record_timeline or 0
    if engine.num_steps == trainer.first_step:
        return ""
    actions = gather_timeline(engine)
    if not trainer.first_step < recorded <= engine.num_steps:
        _keep_timeline(trainer, recorder, folder, actions)
    bubble = TerminalPanel("the last step", actions).bubble_line
    return "" if engine.layout.pipeline is None else f"bubble of the last step {bubble}"


def _export(trainer: Trainer, folder: Path, stop: StopFlag) -> tuple[Path | None, CheckpointError | None]:
    """Write the Hugging Face folder, if the run is to have one; return it, or why it could not be written."""
    if not trainer.config.checkpoint.export or trainer.was_stopped:
        return None, None
    try:
        with stop.saving():
            return trainer.model.export(trainer.engine, folder), None
    except CheckpointError as error:
        return None, error


def _log_step(record: StepRecord) -> None:
    if record.skipped:
        log.warning("step %d: fp16 overflow, skipped", record.step)
    if record.peak_bytes is not None:
        peak = format_bytes(sum(record.peak_bytes.values()))
        log.info("step %d: loss %.4f, %.3f s, peak %s", record.step, record.loss, record.step_s, peak)


def _evaluate_and_sample(trainer: Trainer, recorder: RunRecorder) -> Sample | None:
    if trainer.engine.num_steps == trainer.first_step:  # else the last step has been evaluated
        recorder.announce("evaluating on held-out data")
        recorder.state = replace(recorder.state, eval_loss=(trainer.first_step, trainer.evaluate()))
    if trainer.engine.layout.pipeline is not None:
        log.info("no sample is written under mesh.pp, where no rank has all layers; export the weights to generate")
        return None
    if not trainer.config.run.sample_tokens:
        return None
    recorder.announce("writing a sample")
    return trainer.sample()


def _finish_save_unless_alone(trainer: Trainer, error: Exception) -> None:
    """Let the save in progress finish before this rank ends, unless it would wait for a rank that is gone.

    Where all ranks fail in the same way (the loss is not finite) all wait here. Where one fails alone, the other ranks'
    saves go on while they wait for it in a collective.
    """
    if isinstance(error, CommError):
        return
    try:
        trainer.engine.finish_saves()
    except CheckpointError as failure:
        log.error("%s", failure)


def _resolved_here(config: Config, num_ranks: int) -> ResolvedConfig:
    """Resolve a config for ranks that are started here; where their number is wrong, say which key sets it."""
    try:
        return resolve_job(config, num_ranks, num_ranks)
    except ConfigError as error:
        fix = "; run.num_procs is how many are started here" if error.code == "mesh-size" else ""
        raise ConfigError(error.code, f"{error}{fix}") from error.__cause__


def _prepare(
    config: ResolvedConfig, console: Console, resume: Path | None, num_local_ranks: int
) -> tuple[ResolvedConfig, Path, Path]:
    """Tokenize the data and make the run's folder; return the config with its steps, the folder and the token shard."""
    if line := slow_dtype_line(config):
        say(console, line)
    if line := lent_data_line(config):
        say(console, line)
    make_root(config, resume)
    start_s = time.monotonic()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with ExitStack() as stack:
        bars = ProgressBar(*columns, console=console, transient=True, disable=not console.is_terminal)
        announce = stack.enter_context(bars if console.is_terminal else progress(_FIRST_OF_DATA, console.file))
        task = bars.add_task(_FIRST_OF_DATA, total=None)

        def show(num_done_bytes: int, num_bytes: int) -> None:
            bars.update(task, description="tokenizing", completed=num_done_bytes, total=num_bytes)
            if callable(announce):
                announce(f"tokenizing, {num_done_bytes / max(1, num_bytes):.0%}")

        def check(num_done_bytes: int, num_bytes: int) -> None:
            bars.update(task, description="checking the prepared data", completed=num_done_bytes, total=num_bytes)
            if callable(announce):
                announce(f"checking the prepared data, {num_done_bytes / max(1, num_bytes):.0%}")

        data = prepare_job_data(config, show, checking=check, say=partial(say, bars.console))
    say(console, f"{data.words}, {time.monotonic() - start_s:.1f} s")
    config = with_steps(config, data)
    for error in _shortages(config, data, num_local_ranks):
        if config.run.on_shortage == "refuse":
            raise error
        say(console, f"warning: {error}")
    return config, create_folder(config, datetime.now()), data.path


def _shortages(config: ResolvedConfig, data: PreparedData, num_local_ranks: int) -> Iterator[ConfigError]:
    """Yield what a run with its data lacks on this machine."""
    model = job_model(config).for_tokens(data.index.vocab_size)
    root = checkpoint_root(config, Path(config.run.dir).expanduser() / "new")
    layout = plan_layout(model.skeleton(), config)
    return shortages(config, model.vocab_size, model.num_params, layout, root, num_local_ranks)


def _agree_on_place(
    config: ResolvedConfig, env: RankEnv, console: Console, resume: Path | None
) -> tuple[ResolvedConfig, Path, Path, Path | None]:
    """Return rank 0's config, run folder, token shard and checkpoint; the other ranks get them from rank 0.

    The config of a resumed run depends on the checkpoint, and another rank may have found another checkpoint.
    """
    group = dist.group.WORLD
    assert group is not None, "the process group stands by now"
    store = PatientStore(group.get_group_store(), config.run.timeout_s)
    # Rank 0 may tokenize for hours; the store's own death or silence ends the others' wait.
    timeout_s = config.run.timeout_s if env.rank == 0 else math.inf

    def prepare() -> str:
        if env.rank:
            return ""
        ready, folder, shard_path = _prepare(config, console, resume, env.local_world_size)
        past = None if resume is None else str(resume.absolute())
        return json.dumps([ready.to_json(), str(folder.absolute()), str(shard_path), past])

    verdict = Agreement(store, range(env.world_size), env.rank, timeout_s, "shardwise/place").run("place", prepare)
    if verdict.error is not None and env.rank == 0:
        raise verdict.error
    if verdict.failures and verdict.failures[0].rank == 0 and not verdict.is_without_store:
        raise ConfigError(
            "rank-0-failed", f"rank {env.rank} ends because rank 0 could not prepare the run; see what rank 0 says"
        )
    config_text, folder_text, shard_text, past = json.loads(verdict.checked())
    if env.rank == 0 or past is not None or resume is not None or config.run.epochs is not None:
        config = ResolvedConfig.from_json(config_text)
    if env.rank:
        resume = None if past is None else Path(past)
    return config, Path(folder_text), Path(shard_text), resume


class _LogFile(logging.StreamHandler[TextIO]):
    """Writes to a rank's log; a full disk is said elsewhere, and not with a traceback for every line."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 its name in logging
        """Say nothing of an error of the disk."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def _log_to(folder: Path, env: RankEnv) -> None:
    """Log to `rank-N.log`: the local launcher has made it this rank's stderr; other launchers have not."""
    path = folder / f"rank-{env.rank}.log"
    handler = _LogFile() if env.launcher == "local" else _LogFile(io.TextIOWrapper(open_end(path), encoding="utf-8"))
    handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    log.setLevel(logging.INFO)


def _fail(error: Exception, folder: Path, env: RankEnv, how_to_go_on: Callable[[], str]) -> int:
    """Print on stderr why this rank ends, log a traceback if the error was not expected, and return the exit code.

    The local launcher quotes the last line of the log, says who speaks, and how to go on.
    """
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        message = (
            f"no space left for the run's files in {folder}: {error.strerror}; free some, or set run.dir [disk-full]"
        )
    elif isinstance(error, _EXPECTED) and str(error):
        headline, *details = with_code(error).splitlines()
        message = "\n".join([*details, headline])  # a log is read from its end
    else:
        log.error("rank %d failed", env.rank, exc_info=error)
        message = f"rank {env.rank} failed: {type(error).__name__}: {error}; the traceback is in rank-{env.rank}.log"
    code = _REFUSED if isinstance(error, ConfigError) else 1
    if env.launcher != "local":  # the local launcher quotes the last line of the log, and says who speaks
        message = f"shardwise: {message}"
        if code == _REFUSED and is_untouched(folder):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            message += f"\nshardwise: {how_to_go_on()}"
    with suppress(OSError):  # the log may be on the disk that is full
        write_line(message, to_stderr=True)
    if env.launcher == "local" and is_full(folder):
        with suppress(OSError):
            end_with(folder / f"rank-{env.rank}.log", message)
    return code


def _stopped_by(stop: StopFlag, env: RankEnv) -> str:
    """Say what asked this rank to stop; empty under the local launcher, which says so and always sends SIGTERM."""
    if stop.signal_name is None:
        return "a signal to another rank"
    if env.launcher == "local":
        return ""
    return "Ctrl-C" if stop.signal_name == "SIGINT" else stop.signal_name
