"""This module has the methods that save and load an engine's states; `Engine` has the attributes. See
`shardwise.checkpoint`.

>>> import tempfile
>>> import shardwise
>>> def make(stage: int) -> shardwise.Engine:
...     config = {"zero": {"stage": stage}, "run": {"device": "cpu"}}
...     return shardwise.initialize(nn.Linear(2, 1), config, loss_fn=lambda output, batch: output.sum())
>>> with tempfile.TemporaryDirectory() as root, make(stage=3) as first, make(stage=1) as second:
...     result = first.train_step([torch.ones(1, 2)])
...     first.save(root, extra={"tokens": 512})
...     report = second.load(root)
...     report.path.name, report.extra, second.num_steps
...     torch.equal(second.read("weight", "exp_avg"), first.read("weight", "exp_avg"))
('step-00000001', {'tokens': 512}, 1)
True
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shardwise.checkpoint import training_state as trajectory
from shardwise.checkpoint.async_saver import Saver, SaveRequest
from shardwise.checkpoint.commit import candidates, read_manifest, step_name, steps_to_delete
from shardwise.checkpoint.coordination import StoreBarrier
from shardwise.checkpoint.hf import describe
from shardwise.checkpoint.load import LoadPlan, LoadReport, own_tensors, plan_load, rank_name
from shardwise.checkpoint.manifest import CheckpointError, Contents, DamagedError, Manifest
from shardwise.checkpoint.reader import ChunkReader
from shardwise.checkpoint.training_state import Role, SavedBuffer, differing, digests, held_buffers, whole
from shardwise.comm.collectives import CommFactory
from shardwise.comm.store import PatientStore
from shardwise.comm.watchdog import watch_patience_s
from shardwise.config.errors import EngineError, code_of
from shardwise.config.untrusted_files import check_nesting
from shardwise.engine.state_api import StateApi
from shardwise.layout.mesh_shape import DATA_AXES, PIPELINE_AXES, MeshShape
from shardwise.layout.slicing import LocalTensor
from shardwise.runtime.state_shards import PARAM, ScalarState, StateShard
from shardwise.zero import checkpoint_state as held

log = logging.getLogger("shardwise")

# Called when work makes progress, so that the other ranks go on waiting.
Progress = Callable[[], None]

# The first character of a verdict on a save or a load: all went well, the checkpoint is damaged, it does not fit.
_WELL, _DAMAGED, _UNFIT = "w", "d", "u"
# Prefixes of the names of states that belong to one rank alone.
_GENERATOR, _BUFFER = "generator.", "buffer."


class CheckpointApi(StateApi):
    """Provides the methods that save and load; `Engine` has the attributes and makes them."""

    optimizer: Optimizer
    scheduler: Any
    _comm_factory: CommFactory
    _saver: Saver
    _num_backwards: int
    _num_agreements: int
    _follows_config: bool
    _has_mixed_states: bool  # half loaded; a load of weights alone cannot repair it
    zero_grad: Callable[[], None]
    _follow_freezing: Callable[[], None]
    _has_warned: bool

    def _prepare_checkpoints(self, follows_config: bool) -> None:
        comm_factory, run = self._comm_factory, self.config.run
        self._saver = Saver(
            comm_factory.store,
            comm_factory.rank,
            self.comm.world_size,
            run.timeout_s,
            self.device,
            watch_patience_s(run),
        )
        self._follows_config = follows_config
        self._num_agreements = 0
        self._is_half_loaded = self._has_mixed_states = False
        self._has_warned = False
        self._passed_over: set[Path] = set()  # damaged checkpoints that an older one was loaded instead of

    def save(
        self,
        path: str | Path,
        *,
        contents: Contents = "all",
        extra: Any = None,
        wait: bool = True,
        keep_last: int | None = None,
        keep_every: int | None = None,
    ) -> None:
        """Save into `path/step-<steps taken>`, from which any layout can load. All ranks call it, between steps.

        The checkpoint appears whole or not at all, and never replaces another: one of this step that `load` found
        damaged is renamed first. `path/latest` names the newest.

        Args:
            path: a folder that all ranks share; it is made where it is missing.
            contents: "all", what a run needs to go on; "trainable", without frozen parameters (adapters alone); or
                "weights", parameters and buffers only.
            extra: any JSON value; that of rank 0 is saved, and `load` returns it.
            wait: return once it is written. Otherwise the states are copied, and written while training goes on; an
                error there is raised by the next `step`, `save` or `finish_saves`. Where states are stored on NVMe it
                always waits, because there is too little memory for a copy.
            keep_last: how many of the newest checkpoints in `path` stay once this one is written; None for all.
            keep_every: checkpoints whose step is a multiple of this always stay; None for no such rule.

        Raises:
            CheckpointError: on every rank: it cannot be written, the checkpoint of that step exists already, or a
                parameter was moved or written outside the engine.
            EngineError: gradients are accumulated, which a checkpoint does not keep.
            CommError: not all ranks call it within `run.timeout_s`; `load` raises it for the same reason.
        """
        self._check_can_save()
        self._follow_freezing()
        self._warn_of_extra_states()
        saved: list[StateShard | ScalarState] = []
        buffers: list[SavedBuffer] = []
        manifest = Manifest(self.num_steps, (), {})

        def prepare(_: Progress) -> str:
            nonlocal manifest, buffers
            _check_choices(contents, keep_last, keep_every)
            self._sharding.check_model()
            manifest = self._manifest(contents, extra)
            buffers = self._buffers() if contents != "trainable" else []
            saved.extend(self._saved(contents, buffers))
            is_compared = self.comm.world_size > 1 and contents == "all"
            return json.dumps(digests(buffers) if is_compared else {})

        written_digests = json.loads(self._do_on_all(prepare, "the save of a checkpoint", _joined)[1:])
        saved += self._own(contents, buffers, written_digests)
        state_shards = tuple(each for each in saved if isinstance(each, StateShard))
        written = {state_shard.name for state_shard in state_shards if state_shard.written}
        numbers = tuple(each for each in saved if isinstance(each, ScalarState) and each.name in written)
        own = Path(path).resolve() / step_name(self.num_steps)
        flags = own in self._passed_over, self._has_states_in_files
        request = SaveRequest(Path(path), manifest, state_shards, numbers, keep_last, keep_every, *flags)
        self._saver.start(request, wait)
        self._passed_over.discard(own)  # the checkpoint there is whole from now on

    def finish_saves(self) -> Path | None:
        """Wait until the save under way is written, and return the newest checkpoint of this engine, if there is one.

        Raises:
            CheckpointError: it could not be written.
        """
        return self._saver.wait()

    def load(self, path: str | Path, *, strict: bool = True, weights_only: bool = False) -> LoadReport:
        """Load a checkpoint that any layout saved: its world size, stage, tensor parallelism, precision may differ.

        Each rank reads its own shards, and nothing is gathered. All ranks call it. Gradients are dropped. After a
        failure of the host or of NVMe the engine can be used again once a checkpoint is loaded, unless other ranks have
        given up a collective in between: then a new engine is needed.

        Args:
            path: a checkpoint, `step-...`; or the folder of several: the newest that is whole is taken.
            strict: everything must fit; otherwise what fits is loaded, and the report says what was skipped.
            weights_only: take parameters and buffers; optimizer, schedule and number of steps stay as they are.

        Raises:
            CheckpointError: it does not fit the model; nothing has been changed.
            DamagedError: no checkpoint there is whole; it names each with its damage. The engine needs another load.
        """
        self._refuse_if_away()
        self._refuse_if_simulated()
        self._saver.wait()
        self._recover()
        self.zero_grad()
        self._follow_freezing()
        verdict = self._do_on_all(lambda _: json.dumps(_names(path)), "the load of a checkpoint")
        damaged: list[DamagedError] = []
        for folder in (Path(path) / name for name in json.loads(verdict[1:])):
            report = self._load_one(folder, read_manifest, damaged, strict=strict, weights_only=weights_only)
            if report is not None:
                self._passed_over.discard(folder.resolve())
                if self._watchdog is not None:
                    self._watchdog.note_failure("")
                return report
            self._passed_over.add(folder.resolve())
            log.warning("%s", damaged[-1])
        if not damaged:
            is_hf = any(Path(path).glob("*.safetensors"))
            fix = "; engine.import_weights takes the weights of a Hugging Face folder" if is_hf else ""
            raise CheckpointError(
                "no-checkpoint", f"{path} holds no checkpoint; give a folder of step-... folders, or one of these{fix}"
            )
        raise DamagedError("no-whole-checkpoint", f"no checkpoint in {path} is whole: {'; '.join(map(str, damaged))}")

    def _recover(self) -> None:
        """Prepare a load after a failure of the host or of NVMe.

        Raises:
            CheckpointError: a collective has failed, and the connections between the ranks with it.
        """
        if self.tiers.recover().failure is not None:
            self._is_half_loaded = self._has_mixed_states = True
        if self.comm.comm_log.has_failed:
            raise CheckpointError(
                "connections-lost",
                "a collective of this engine has failed, and with it the connections between the ranks; start all "
                "ranks again and load there",
            )

    def _load_one(
        self,
        folder: Path,
        describe_stored: Callable[[Path], Manifest],
        damaged: list[DamagedError],
        *,
        strict: bool,
        weights_only: bool,
    ) -> LoadReport | None:
        """Load one folder on all ranks by the manifest `describe_stored` makes; if damaged, add why to `damaged`."""
        plan: LoadPlan | None = None
        num_bytes = 0
        parameters = list(held.held_parameters(self._states()))
        buffers = self._buffers()
        targets = [*parameters, *(each.state_shard for each in buffers)]

        def make_plan(_: Progress) -> None:
            nonlocal plan
            plan = self._plan_load(describe_stored(folder), targets, str(folder), strict, weights_only)

        if not self._all_well(make_plan, damaged):
            return None
        assert plan is not None, "made on every rank"
        loaded = plan

        def read(progress: Progress) -> None:
            nonlocal num_bytes
            states: list[StateShard] = []
            if loaded.with_states:
                held.prepare_optimizer_states(self._states(), loaded.optimizer_states())
                all_states = held.held_optimizer_states(self._states())
                states += [each for each in all_states if isinstance(each, StateShard)]
            num_bytes = loaded.read(folder, [*targets, *states], progress)
            for each in buffers:
                each.restore()
            self._read_own(folder, loaded, buffers)

        self._is_half_loaded = True
        self._has_mixed_states |= loaded.with_states
        if not self._all_well(read, damaged):
            return None
        with torch.no_grad():
            held.adopt_masters(self._states())
        if loaded.with_states:
            self.num_steps = loaded.manifest.step
            self._restore_trajectory(loaded)
            self._has_mixed_states = False
        self._is_half_loaded = self._has_mixed_states
        manifest, result = loaded.manifest, loaded.match
        return LoadReport(
            folder, manifest.step, result.missing, loaded.skipped, tuple(map(str, damaged)), manifest.extra, num_bytes
        )

    def _plan_load(
        self, manifest: Manifest, targets: Sequence[StateShard], where: str, strict: bool, weights_only: bool
    ) -> LoadPlan:
        misfits: Mapping[str, str] = {}
        takes_options = not self._follows_config
        if not weights_only and manifest.contents != "weights":
            trajectory.check_whole(manifest.trajectory)
            misfits = trajectory.misfits(manifest.trajectory, self.optimizer, self.scheduler, takes_options)
        plan = plan_load(manifest, targets, where, misfits, strict=strict, weights_only=weights_only)
        if plan.with_states:
            options = manifest.trajectory["optimizer"]["groups"] if takes_options and "options" not in misfits else None
            held.check_optimizer_states(self._states(), plan.optimizer_states(), options)
        return plan

    def _all_well(self, work: Callable[[Progress], None], damaged: list[DamagedError]) -> bool:
        """Run `work` on every rank; say whether it went well on all, else add to `damaged` what did not.

        Raises:
            CheckpointError: on every rank: it failed on some rank for another reason than damage.
        """

        def do(progress: Progress) -> str:
            work(progress)
            return ""

        verdict = self._do_on_all(do, "the end of a load")
        if verdict.startswith(_DAMAGED):
            code, _, text = verdict[1:].partition(" ")
            damaged.append(DamagedError(code, text))
        return verdict == _WELL

    def _do_on_all(
        self, work: Callable[[Progress], str], subject: str, judge: Callable[[Mapping[int, str]], str] | None = None
    ) -> str:
        """Run `work` on every rank; return `_WELL` and what it returned on rank 0, or `_DAMAGED`, code and message.

        Args:
            work: is given a function to call at each progress; returns a text for `judge`.
            subject: for messages.
            judge: makes one verdict of those of all ranks; None for `_worst`.

        Raises:
            CheckpointError: on every rank, so that none waits for another: it failed on some rank for another reason.
        """
        failure: Exception | None = None
        rounds = self._new_rounds(subject)

        def attempt() -> str:
            nonlocal failure
            try:
                return _WELL + work(rounds.show_progress)
            except DamagedError as error:
                return f"{_DAMAGED}{error.code} {error}"
            except (ValueError, OSError) as error:
                return f"{_UNFIT}{code_of(error, 'rank-failed')} {error}"
            except Exception as error:  # an unforeseen one
                failure = error
                return f"{_UNFIT}rank-failed rank {self.comm.rank} failed: {type(error).__name__}: {error}"

        verdict = rounds.run("outcome", attempt, judge or _worst)
        rounds.finish()
        if failure is not None:
            raise failure
        if verdict.startswith(_UNFIT):
            code, _, text = verdict[1:].partition(" ")
            raise CheckpointError(code, text)
        return verdict

    def _new_rounds(self, subject: str) -> StoreBarrier:
        """Make the barrier for something that all ranks do now, other than a save."""
        self._num_agreements += 1
        store, run = self._comm_factory.store, self.config.run
        own_store = None if store is None else PatientStore(store, run.timeout_s, "agreement")
        timeouts = {"timeout_s": run.timeout_s, "patience_s": watch_patience_s(run)}
        return StoreBarrier(
            own_store, self._num_agreements, self.comm.rank, self.comm.world_size, subject=subject, **timeouts
        )

    def _check_can_save(self) -> None:
        self._check_usable()
        self._refuse_if_simulated()
        if self._num_backwards > 0:
            raise EngineError(
                "save-before-step",
                "gradients since the last step are in no checkpoint; save after engine.step() or engine.zero_grad()",
            )

    def _refuse_if_simulated(self) -> None:
        if self._comm_factory.store is None and self.comm.world_size > 1:
            raise CheckpointError(
                "simulated-rank", "a simulated rank has no states to save or load; do so on real ranks"
            )

    @property
    def _has_states_in_files(self) -> bool:
        """Say whether any rank saves from files, by the layout: this rank may hold nothing of what is stored there."""
        groups = self.layout.model_groups
        return "nvme" in (each.tiers.optimizer if each.trainable else each.tiers.params for each in groups)

    def _warn_of_extra_states(self) -> None:
        modules = self.model.named_modules() if self.comm.rank == 0 and not self._has_warned else ()
        own = [name for name, each in modules if type(each).get_extra_state is not nn.Module.get_extra_state]
        if own:
            log.warning("get_extra_state of %s is in no checkpoint; give it to save(extra=...)", own[0] or "the model")
        self._has_warned = True

    def _buffers(self) -> list[SavedBuffer]:
        """Return the persistent buffers; this rank writes those that it is the first to run."""
        comms, pipeline = self._comms, self.layout.pipeline

        def role_of(name: str) -> Role:
            running = None if pipeline is None else pipeline.rank_running(name)
            if running is None:
                return "writes" if comms.all.rank == 0 else "runs"
            if running != comms.pipeline.rank:
                return "keeps"
            return "writes" if comms.model.rank == 0 else "runs"

        return held_buffers(self.model, role_of)

    def _saved(self, contents: Contents, buffers: Sequence[SavedBuffer]) -> Iterator[StateShard | ScalarState]:
        """Yield all states of this rank that are saved, except those that belong to this rank alone."""
        states = self._states()
        is_partial = contents == "trainable"
        yield from (each for each in held.held_parameters(states) if each.trainable or not is_partial)
        yield from (each.state_shard for each in buffers)
        if contents != "weights":
            yield from held.held_optimizer_states(states)

    def _own(
        self, contents: Contents, buffers: Sequence[SavedBuffer], written_digests: Mapping[str, str]
    ) -> Iterator[StateShard]:
        """Yield what belongs to this rank alone: its generators, and its buffers that differ from the written ones."""
        if contents == "weights":
            return
        rank = self.comm.rank
        for name, state in trajectory.generator_states(self.device).items():
            yield whole(rank_name(rank, _GENERATOR + name), state, kind="rank", is_written=True)
        for each in differing(buffers, written_digests) if contents == "all" else ():
            yield whole(rank_name(rank, _BUFFER + each.state_shard.name), each.buffer, kind="rank", is_written=True)

    def _read_own(self, folder: Path, plan: LoadPlan, buffers: Sequence[SavedBuffer]) -> None:
        """Restore generators where the world size is that of the save, and the buffers of this rank's data rank.

        Ranks that compute one sample together take the same buffers. A data rank that the saved run did not have keeps
        those that every rank has read, the first's.
        """
        if not plan.with_states:
            return
        rank, mesh, saved = self.comm.rank, self.layout.mesh, MeshShape(**(plan.manifest.layout.get("mesh") or {}))
        is_own = plan.manifest.trajectory.get("world_size") == self.comm.world_size
        own = own_tensors(plan.manifest, rank) if is_own else {}
        found = {name: each for name, each in own.items() if name.startswith(_GENERATOR)}
        firsts = saved.ranks_along(DATA_AXES, 0)[mesh.data_index(rank) :][:1]
        for source in (each for first in firsts for each in saved.ranks_along(PIPELINE_AXES, first)):
            theirs = own_tensors(plan.manifest, source)
            found |= {name: each for name, each in theirs.items() if name.startswith(_BUFFER)}
        by_name = {name: each for each in buffers for name in (each.state_shard.name, *each.state_shard.aliases)}
        generators: dict[str, Tensor] = {}
        with ChunkReader(folder) as reader:
            for name, stored in found.items():
                pieces = LocalTensor.whole(stored.shape).pieces
                buffer = by_name.get(name.removeprefix(_BUFFER))
                if name.startswith(_GENERATOR):
                    state = generators[name.removeprefix(_GENERATOR)] = torch.empty(stored.shape, dtype=torch.uint8)
                    reader.read(stored, PARAM, pieces, state)
                elif buffer is not None and buffer.state_shard.global_shape == stored.shape:
                    reader.read(stored, PARAM, pieces, buffer.values)
                    buffer.restore()
        trajectory.restore_generators(generators, self.device)

    def _manifest(self, contents: Contents, extra: Any) -> Manifest:
        """Make the manifest of this rank; that of rank 0 is written."""
        return Manifest(
            step=self.num_steps,
            tensors=(),
            files={},
            contents=contents,
            config=self.config.model_dump(mode="json"),
            layout=self._described_layout(),
            trajectory={} if contents == "weights" else self._trajectory(),
            extra=_checked(extra),
            model=describe(self.model),
        )

    def _trajectory(self) -> dict[str, Any]:
        return {
            "world_size": self.comm.world_size,
            "seed": self.config.run.seed,
            "normaliser": self._losses.normaliser,
            "scaler": self._scaler.state_dict(),
            "optimizer": trajectory.optimizer_options(self.optimizer),
            "scheduler": trajectory.scheduler_state(self.scheduler),
        }

    def _restore_trajectory(self, plan: LoadPlan) -> None:
        saved = plan.manifest.trajectory
        self._losses.normaliser = float(saved["normaliser"])
        self._scaler.load_state_dict(saved["scaler"])
        if self._follows_config and isinstance(self.scheduler, LambdaLR):
            trajectory.advance_schedule(self.scheduler, saved["scheduler"], plan.manifest.step)
            return
        if "options" not in plan.misfits:
            trajectory.restore_options(self.optimizer, saved["optimizer"])
        if "scheduler" not in plan.misfits:
            trajectory.restore_scheduler(self.scheduler, saved["scheduler"])

    def _described_layout(self) -> dict[str, Any]:
        layout, pipeline = self.layout, self.layout.pipeline
        starts = [] if pipeline is None else [units[0] for units in pipeline.units]
        return {
            "mesh": asdict(layout.mesh),
            "pipeline": {"schedule": self.config.pipeline.schedule, "starts": starts} if starts else None,
            "stage": self.config.zero.stage,
            "precision": asdict(layout.precision),
            "wide": layout.wide_names,
            "states": [{"name": state.name, "dtype": state.dtype, "codec": state.codec} for state in layout.states],
            "tiers": {role: getattr(self.config.tiers, role) for role in ("params", "grads", "optimizer")},
            "num_params": sum(
                torch.Size(spec.global_shape).numel() for group in layout.model_groups for spec in group.params
            ),
        }


def _check_choices(contents: str, keep_last: int | None, keep_every: int | None) -> None:
    if contents not in (known := get_args(Contents)):
        raise CheckpointError(
            "checkpoint-contents", f"contents={contents!r} is not known; choose one of {', '.join(known)}"
        )
    steps_to_delete((), keep_last, keep_every)  # it refuses values out of range


def _checked(extra: Any) -> Any:
    try:
        text = json.dumps(extra)
        check_nesting(f"[{text}]", "it", "keep it flatter")
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "extra-not-json", f"extra must be what JSON keeps: {error}; give numbers, text, lists and dicts"
        ) from None


def _names(path: str | Path) -> list[str]:
    """Return the checkpoints at `path`, relative to it: each rank may reach them by a path of its own."""
    return [os.path.relpath(folder, path) for folder in candidates(Path(path))]


def _joined(notes: Mapping[int, str]) -> str:
    """Return the verdict of `_worst`; where all is well, merge the JSON dicts that all ranks have returned into one."""
    worst = _worst(notes)
    if not worst.startswith(_WELL):
        return worst
    return _WELL + json.dumps({key: value for note in notes.values() for key, value in json.loads(note[1:]).items()})


def _worst(notes: Mapping[int, str]) -> str:
    """Return the gravest verdict of the ranks, that of the first rank that has it; rank 0's where all is well."""
    for kind in (_UNFIT, _DAMAGED):
        for note in notes.values():
            if note.startswith(kind):
                return note
    return notes[0]
