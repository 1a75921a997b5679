"""This module reads and writes the states of an engine as checkpoints. See `shardwise.checkpoint`.

>>> import tempfile
>>> import shardwise
>>> def make(stage: int) -> shardwise.Engine:
...     config = {"zero": {"stage": stage}, "run": {"device": "cpu"}}
...     return shardwise.initialize(torch.nn.Linear(2, 1), config, loss_fn=lambda output, batch: output.sum())
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
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from shardwise.checkpoint import data_position, training_state
from shardwise.checkpoint.async_saver import Saver, SaveRequest
from shardwise.checkpoint.commit import candidates, check_tag, read_manifest, step_name, steps_to_delete
from shardwise.checkpoint.data_position import DataLoaderState
from shardwise.checkpoint.find import root_of
from shardwise.checkpoint.hf.config_files import describe
from shardwise.checkpoint.load import LoadPlan, LoadReport, own_tensors, plan_load, rank_name
from shardwise.checkpoint.manifest import CheckpointError, Contents, DamagedError, Manifest, agreed
from shardwise.checkpoint.reader import ChunkReader
from shardwise.checkpoint.safetensors_io import named_dtype
from shardwise.checkpoint.tagged_json import from_json, to_json
from shardwise.checkpoint.training_state import (
    Role,
    SavedBuffer,
    digests,
    held_buffers,
    read_extra_states,
    saved_extra_states,
    set_extra_states,
    whole,
)
from shardwise.comm.agreement import Judge
from shardwise.config.errors import EngineError
from shardwise.config.untrusted_files import check_nesting
from shardwise.engine.parts import EngineParts
from shardwise.engine.step import follow_freezing, zero_grad
from shardwise.layout.layout import Layout
from shardwise.layout.mesh_shape import AXES, DATA_AXES, PIPELINE_AXES, Coordinate, MeshShape
from shardwise.layout.slicing import LocalTensor
from shardwise.runtime.state_shards import PARAM, ScalarState, StateShard
from shardwise.zero import checkpoint_state

log = logging.getLogger("shardwise")

# Prefixes of the names of states that belong to one rank alone.
_GENERATOR, _BUFFER, _STEPPED_WHOLE = "generator.", "buffer.", "optimizer."


class Checkpoints:
    """Saves and loads the states of one engine; every rank makes the same calls in the same order.

    Args:
        follows_config: optimizer and schedule are the config's, so a load does not change their options.

    Attributes:
        may_save_within_step: gradients since the last step do not prevent a save; they are not in it.
    """

    def __init__(self, parts: EngineParts, follows_config: bool) -> None:
        factory, timeout_s = parts.comm_factory, parts.config.run.timeout_s
        self.saver = Saver(factory.store, factory.rank, parts.comm.world_size, timeout_s, parts.device)
        self._parts = parts
        self._follows_config = follows_config
        self.may_save_within_step = False
        self._passed_over: set[Path] = set()  # damaged checkpoints that an older one was loaded instead of

    def save(
        self,
        path: str | Path,
        contents: Contents,
        extra: Any,
        wait: bool,
        keep_last: int | None,
        keep_every: int | None,
        tag: str = "",
        data: DataLoaderState | None = None,
    ) -> None:
        """Save a checkpoint; the arguments are those of `Engine.save`."""
        parts = self._parts
        self._check_can_save()
        if parts.state.num_backwards == 0:
            follow_freezing(parts)
        root, step = Path(path), parts.state.num_steps
        own_folder = root.resolve() / step_name(step)

        def prepare() -> SaveRequest:
            steps_to_delete((), keep_last, keep_every)  # it refuses values out of range
            if data is not None and contents == "weights":
                raise CheckpointError("position-of-weights", "weights alone have no data position; drop data=...")
            check_tag(tag, keep_last is keep_every is None)
            parts.sharding.check_model()
            manifest, position = self._manifest(contents, extra), list[StateShard]()
            if data is not None:
                text, kind = data_position.read_state(data, parts.layout.mesh)
                manifest = replace(manifest, trajectory={**manifest.trajectory, "data": kind})
                position += self._position(text, kind["is_global"])
            buffers = [] if contents == "trainable" else saved_buffers(parts)
            saved = [*self._saved(contents, buffers), *self._own(contents), *position]
            flags = own_folder in self._passed_over and not tag, saves_from_files(parts.layout)
            request = SaveRequest(root, manifest, *self._written(saved), keep_last, keep_every, *flags, tag)
            return self._with_buffers(request, buffers) if contents == "all" else request

        self.saver.start(step, prepare, wait)
        self._passed_over.discard(own_folder)  # the checkpoint there is whole from now on

    def tags_of_ranks(self, tag: str) -> dict[int, str]:
        """Return the tag that each rank gives; all ranks call it."""
        return dict(json.loads(self._agreed("the tags of a checkpoint", lambda: tag, _listed)))

    def load(
        self, path: str | Path, strict: bool, weights_only: bool, data: DataLoaderState | None = None
    ) -> LoadReport:
        """Load a checkpoint; the arguments are those of `Engine.load`."""
        parts = self._parts
        self.begin_load()
        self._recover()
        zero_grad(parts, keeps_forwards=False)
        follow_freezing(parts)
        names = json.loads(self._agreed("the load of a checkpoint", lambda: json.dumps(_names(path))))
        damaged: list[str] = []
        for folder in (Path(path) / name for name in names):
            try:
                report = self.load_folder(folder, read_manifest, strict, weights_only, data)
            except DamagedError as error:
                damaged.append(str(error))
                log.warning("%s", error)
                self._passed_over.add(folder.resolve())
                continue
            self._passed_over.discard(folder.resolve())
            parts.note_failure("")
            return replace(report, damaged=tuple(damaged))
        if not damaged:
            is_hf = any(Path(path).glob("*.safetensors"))
            fix = "; engine.import_weights takes the weights of a Hugging Face folder" if is_hf else ""
            raise CheckpointError(
                "no-checkpoint", f"{path} holds no checkpoint; give a folder of step-... folders, or one of these{fix}"
            )
        raise DamagedError("no-whole-checkpoint", f"no checkpoint in {path} is whole: {'; '.join(damaged)}")

    def begin_load(self) -> None:
        """Refuse a load where states are away, and wait for the save under way."""
        self._parts.status.check_present()
        self._parts.refuse_if_simulated()
        self._parts.note_update()
        self.saver.wait()

    def _recover(self) -> None:
        """Prepare a load after a failure of the host or of NVMe.

        Raises:
            CheckpointError: a collective has failed, and the connections between the ranks with it.
        """
        parts = self._parts
        if parts.tiers.recover().failure is not None:
            parts.status.mix()
        if parts.comm.comm_log.has_failed:
            raise CheckpointError(
                "connections-lost",
                "a collective of this engine has failed, and with it the connections between the ranks; start all "
                "ranks again and load there",
            )

    def load_folder(
        self,
        folder: Path,
        describe_stored: Callable[[Path], Manifest],
        strict: bool,
        weights_only: bool,
        data: DataLoaderState | None = None,
    ) -> LoadReport:
        """Load one folder on all ranks.

        Args:
            folder: of a checkpoint, or of weights.
            describe_stored: makes a manifest of what the folder has.
            strict: as in `Engine.load`, and so are `weights_only` and `data`.

        Raises:
            CheckpointError: it does not fit; nothing has been changed.
            DamagedError: it is damaged. Where that showed only midway, states are mixed until another load.
        """
        parts = self._parts
        plan: LoadPlan | None = None
        extra_states: dict[str, Any] = {}
        num_bytes, buffers = 0, saved_buffers(parts)
        targets = [*checkpoint_state.held_parameters(parts.states()), *(buffer.state_shard for buffer in buffers)]

        def make_plan() -> str:
            nonlocal plan
            plan = self._plan_load(describe_stored(folder), targets, str(folder), strict, weights_only)
            extra_states.update(read_extra_states(parts.model, folder, plan.manifest))
            data_position.restore(data, folder, plan.manifest, parts.layout.mesh, parts.comm.rank)  # it may refuse
            return ""

        self._agreed("the load of a checkpoint", make_plan)
        assert plan is not None, "made on every rank"
        loaded = plan

        def read() -> str:
            nonlocal num_bytes
            states: list[StateShard] = []
            if loaded.with_states:
                checkpoint_state.prepare_optimizer_states(parts.states(), loaded.optimizer_states())
                all_states = checkpoint_state.held_optimizer_states(parts.states())
                states += [state for state in all_states if isinstance(state, StateShard)]
            num_bytes = loaded.read(folder, [*targets, *states], parts.agreement.show_progress)
            for each in buffers:
                each.restore()
            set_extra_states(parts.model, extra_states)
            self._read_own(folder, loaded, buffers)
            return ""

        parts.status.begin_load(loaded.with_states)
        self._agreed("the load of a checkpoint", read)
        with torch.no_grad():
            checkpoint_state.adopt_masters(parts.states())
        if loaded.with_states:
            parts.state.continue_from(loaded.manifest.step)
            self._restore_trajectory(loaded)
        parts.status.end_load(loaded.with_states)
        saved = loaded.manifest
        return LoadReport(folder, saved.step, loaded.match.missing, loaded.skipped, (), saved.extra, num_bytes)

    def _agreed(self, subject: str, work: Callable[[], str], judge: Judge | None = None) -> str:
        """Do the same on all ranks, and return the verdict, without a judge what it returned on rank 0.

        Raises:
            CheckpointError: on every rank, as `agreed`; but a rank that failed in an unforeseen way raises its own.
        """
        agreement = self._parts.agreement
        verdict = agreement.run("states", work, judge, subject)
        is_foreseen = isinstance(verdict.error, (ValueError, OSError)) or verdict.is_without_store
        if verdict.error is not None and not is_foreseen:
            raise verdict.error
        return agreed(verdict, is_plain=len(verdict.failures) == len(agreement.ranks))

    def load_schedule(self, folder: Path) -> None:
        """Load the state of the schedule alone, where the checkpoint in a folder has it.

        Raises:
            CheckpointError: the checkpoint has another schedule.
        """
        manifest = read_manifest(folder)
        if manifest.contents != "weights":
            training_state.restore_scheduler_alone(
                self._parts.optimizer, self._parts.state.scheduler, manifest.trajectory
            )

    def _plan_load(
        self, manifest: Manifest, targets: Sequence[StateShard], where: str, strict: bool, weights_only: bool
    ) -> LoadPlan:
        parts = self._parts
        manifest = replace(manifest, extra=from_json(manifest.extra, "its extra"))
        misfits: Mapping[str, str] = {}
        if not weights_only and manifest.contents != "weights":
            training_state.check_whole(manifest.trajectory)
            misfits = training_state.misfits(
                manifest.trajectory, parts.optimizer, parts.state.scheduler, not self._follows_config
            )
        plan = plan_load(manifest, targets, where, misfits, strict=strict, weights_only=weights_only)
        if plan.with_states:
            options = (
                manifest.trajectory["optimizer"]["groups"]
                if not self._follows_config and "options" not in misfits
                else None
            )
            checkpoint_state.check_optimizer_states(parts.states(), plan.optimizer_states(), options)
        return plan

    def _check_can_save(self) -> None:
        self._parts.status.check()
        self._parts.refuse_if_simulated()
        if self._parts.state.num_backwards > 0 and not self.may_save_within_step:
            raise EngineError(
                "save-before-step",
                "gradients since the last step are in no checkpoint; save after engine.step() or engine.zero_grad()",
            )

    def _saved(self, contents: Contents, buffers: Sequence[SavedBuffer]) -> Iterator[StateShard | ScalarState]:
        """Yield all states of this rank that are saved, except those that belong to this rank alone."""
        states = self._parts.states()
        is_partial = contents == "trainable"
        if not is_partial:
            yield from saved_extra_states(self._parts.model, partial(_role_of, self._parts))
        yield from (param for param in checkpoint_state.held_parameters(states) if param.trainable or not is_partial)
        yield from (buffer.state_shard for buffer in buffers)
        if contents != "weights":
            yield from checkpoint_state.held_optimizer_states(states)

    def _own(self, contents: Contents) -> Iterator[StateShard]:
        """Yield what belongs to this rank alone, except its buffers: its generators, and what one rank alone writes."""
        if contents == "weights":
            return
        rank = self._parts.comm.rank
        for name, state in training_state.generator_states(self._parts.device).items():
            yield whole(rank_name(rank, _GENERATOR + name), state, kind="rank", is_written=True)
        for name, state in checkpoint_state.odd_optimizer_states(self._parts.states()):
            # The first's name is in every layout.
            yield whole(rank_name(0, _STEPPED_WHOLE + name), state, kind="rank", is_written=True)

    def _written(
        self, saved: Sequence[StateShard | ScalarState]
    ) -> tuple[tuple[StateShard, ...], tuple[ScalarState, ...]]:
        """Return the shards of what is saved, and the numbers that this rank writes."""
        shards = tuple(state for state in saved if isinstance(state, StateShard))
        written = {shard.name for shard in shards if shard.written}
        # Of a parameter that one rank steps whole, other ranks may write the elements.
        has_owners = self._parts.states().sharded.whole is not None
        numbers = (state for state in saved if isinstance(state, ScalarState))
        return shards, tuple(number for number in numbers if has_owners or number.name in written)

    def _with_buffers(self, request: SaveRequest, buffers: Sequence[SavedBuffer]) -> SaveRequest:
        """Add the buffers of this rank to its request: those that differ from the written ones are saved too."""
        rank = self._parts.comm.rank
        own = tuple(
            whole(rank_name(rank, _BUFFER + buffer.state_shard.name), buffer.buffer, kind="rank", is_written=True)
            for buffer in buffers
            if buffer.role == "runs"
        )
        written = digests(buffers, "writes") if self._parts.comm.world_size > 1 else {}
        return replace(request, digests=written, own_digests=digests(buffers, "runs"), own=own)

    def _position(self, text: Tensor, is_global: bool) -> Iterator[StateShard]:
        """Yield this rank's position in the data, if it is the first of those that read the same data."""
        rank, mesh = self._parts.comm.rank, self._parts.layout.mesh
        if rank == 0 or (rank in mesh.ranks_along(DATA_AXES, 0) and not is_global):
            yield whole(rank_name(rank, data_position.NAME), text, kind="rank", is_written=True)

    def _read_own(self, folder: Path, plan: LoadPlan, buffers: Sequence[SavedBuffer]) -> None:
        """Restore generators where the world size is that of the save, and the buffers of this rank's data rank.

        Ranks that compute one sample together take the same buffers. A data rank that the saved run did not have keeps
        those that every rank has read, the first's.
        """
        parts = self._parts
        if not plan.with_states:
            return
        rank, mesh = parts.comm.rank, parts.layout.mesh
        saved = MeshShape(**(plan.manifest.layout.get("mesh") or {}))
        is_own = plan.manifest.trajectory.get("world_size") == parts.comm.world_size
        own = own_tensors(plan.manifest, rank) if is_own else {}
        found = {name: each for name, each in own.items() if name.startswith(_GENERATOR)}
        of_first = own_tensors(plan.manifest, 0)
        found |= {name: each for name, each in of_first.items() if name.startswith(_STEPPED_WHOLE)}
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
                elif name.startswith(_STEPPED_WHOLE):
                    values = torch.empty(stored.shape, dtype=named_dtype(stored.states[PARAM].dtype))
                    reader.read(stored, PARAM, pieces, values.view(-1))
                    checkpoint_state.place_odd_state(parts.states(), name.removeprefix(_STEPPED_WHOLE), values)
                elif buffer is not None and buffer.state_shard.global_shape == stored.shape:
                    reader.read(stored, PARAM, pieces, buffer.values)
                    buffer.restore()
        training_state.restore_generators(generators, parts.device)

    def _manifest(self, contents: Contents, extra: Any) -> Manifest:
        """Make the manifest of this rank; that of rank 0 is written."""
        parts = self._parts
        return Manifest(
            step=parts.state.num_steps,
            tensors=(),
            files={},
            contents=contents,
            config=parts.config.model_dump(mode="json"),
            layout=self._described_layout(),
            trajectory={} if contents == "weights" else self._trajectory(),
            extra=_checked(extra),
            model=describe(parts.model),
        )

    def _trajectory(self) -> dict[str, Any]:
        parts = self._parts
        return {
            "world_size": parts.comm.world_size,
            "seed": parts.config.run.seed,
            "normaliser": parts.losses.normaliser,
            "scaler": parts.scaler.state_dict(),
            "optimizer": training_state.optimizer_options(parts.optimizer),
            "scheduler": training_state.scheduler_state(parts.state.scheduler),
        }

    def _restore_trajectory(self, plan: LoadPlan) -> None:
        parts, saved = self._parts, plan.manifest.trajectory
        parts.losses.normaliser = float(saved["normaliser"])
        parts.scaler.load_state_dict(saved["scaler"])
        if self._follows_config and isinstance(parts.state.scheduler, LambdaLR):
            training_state.advance_schedule(parts.state.scheduler, saved["scheduler"], plan.manifest.step)
            return
        if "options" not in plan.misfits:
            training_state.restore_options(parts.optimizer, saved["optimizer"])
        if "scheduler" not in plan.misfits:
            training_state.restore_scheduler(parts.state.scheduler, saved["scheduler"])

    def _described_layout(self) -> dict[str, Any]:
        config, layout = self._parts.config, self._parts.layout
        pipeline = layout.pipeline
        starts = [] if pipeline is None else [units[0] for units in pipeline.units]
        return {
            "mesh": dict(zip(AXES, layout.mesh.sizes, strict=True)),
            "pipeline": {"schedule": config.pipeline.schedule, "starts": starts} if starts else None,
            "stage": config.zero.stage,
            "precision": {key: str(value).lower() for key, value in asdict(layout.precision).items()},
            "wide": layout.wide_names,
            "states": [
                {"name": each.name, "dtype": each.dtype, "codec": "identity" if each.codec is None else each.codec.name}
                for each in layout.states
            ],
            "tiers": {role: getattr(config.tiers, role) for role in ("params", "grads", "optimizer")},
            "num_params": sum(
                torch.Size(spec.global_shape).numel() for group in layout.model_groups for spec in group.params
            ),
        }


def saved_buffers(parts: EngineParts) -> list[SavedBuffer]:
    """Return the persistent buffers; this rank writes those that it is the first to run."""
    return held_buffers(parts.model, partial(_role_of, parts))


def buffer_writer(layout: Layout, name: str) -> int:
    """Return the rank whose values of a buffer count: the first of those that run its module.

    Args:
        name: of the buffer, or of anything within its module.
    """
    pipeline = layout.pipeline
    if pipeline is None:
        return 0
    running = pipeline.rank_running(name)
    if running is None:  # code around the units has written it, and all of that code runs in the last stage
        running = pipeline.placement.rank_of(pipeline.num_stages - 1)
    return layout.mesh.rank_of(Coordinate(pp=running))


def _role_of(parts: EngineParts, name: str) -> Role:
    """Return this rank's role for what has a name within a module: one of all ranks writes it."""
    writer = buffer_writer(parts.layout, name)
    if writer == parts.comm.rank:
        return "writes"
    runs = parts.layout.mesh.coordinate(writer).pp == parts.comms.pipeline.rank
    return "runs" if runs else "keeps"


def saves_from_files(layout: Layout) -> bool:
    """Say whether any rank saves from files on NVMe, so that training waits for every save."""
    groups = layout.model_groups
    return "nvme" in (group.tiers.optimizer if group.trainable else group.tiers.params for group in groups)


def _checked(extra: Any) -> Any:
    try:
        text = json.dumps(to_json(extra, "extra"))
        check_nesting(f"[{text}]", "it", "keep it flatter")
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            "extra-not-json",
            f"{error}, which would not come back as it is; give numbers, text, containers, tensors and arrays",
        ) from None


def _names(path: str | Path) -> list[str]:
    """Return the checkpoints at `path`, relative to it: each rank may reach them by a path of its own."""
    return [os.path.relpath(folder, path) for folder in candidates(root_of(Path(path)))]


def _listed(tags: Mapping[int, str]) -> str:
    return json.dumps(sorted(tags.items()))
