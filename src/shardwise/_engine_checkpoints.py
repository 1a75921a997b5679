"""Saving and loading an engine's states: the methods; `Engine` has the attributes. See `shardwise.checkpoint`."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from shardwise._engine_states import EngineStates
from shardwise._torch_private import version
from shardwise.agreement import Meeting
from shardwise.checkpoint import trajectory
from shardwise.checkpoint.folder import candidates, read_manifest
from shardwise.checkpoint.loading import LoadPlan, LoadReport, own_tensors, plan_load, rank_name
from shardwise.checkpoint.manifest import CheckpointError, Contents, DamagedError, Manifest
from shardwise.checkpoint.reading import PieceReader
from shardwise.checkpoint.saver import Saver, SaveRequest
from shardwise.comm import Network
from shardwise.holdings import PARAM, HeldNumber, Holding
from shardwise.layout.pieces import LocalTensor
from shardwise.zero import held

log = logging.getLogger("shardwise")

# The first letter of what a rank says of a load: all went well, the checkpoint is damaged, it does not fit.
_WELL, _DAMAGED, _UNFIT = "w", "d", "u"


class EngineCheckpoints(EngineStates):
    """The methods; `Engine` has the attributes, and makes them."""

    optimizer: Optimizer
    scheduler: Any
    _network: Network
    _saver: Saver
    _num_backwards: int
    _num_agreements: int
    _has_own_schedule: bool
    _buffer_marks: Mapping[str, tuple[int, int]]
    zero_grad: Callable[[], None]

    def _prepare_checkpoints(self, has_own_schedule: bool) -> None:
        network, timeout_s = self._network, self.config.run.timeout_s
        self._saver = Saver(network.store, network.rank, self.comm.world_size, timeout_s, self.device)
        self._has_own_schedule = has_own_schedule
        self._num_agreements = 0
        self._is_half_loaded = False

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
        """Save into `path/step-<steps taken>`, from which any layout can load. All ranks call it alike, between steps.

        The checkpoint appears whole or not at all, and never takes another's place. `path/latest` names the newest.

        Args:
            path: a folder that all ranks share; made where it is not there.
            contents: all that a run needs to go on; "trainable", what is frozen left out (adapters alone); or
                "weights", parameters and buffers only.
            extra: anything that JSON keeps, rank 0's; `load` gives it back.
            wait: until it is written. Otherwise the states are copied, and written while training goes on; an error
                there is raised by the next `step`, `save` or `finish_saves`.
            keep_last: delete all but so many of the newest checkpoints in `path`, once this one is there.
            keep_every: but never one whose step is a multiple of this.

        Raises:
            CheckpointError: it cannot be written, on every rank alike; or the checkpoint of that step is there.
            RuntimeError: gradients are accumulated, which a checkpoint does not keep.
        """
        self._check_usable()
        if self._num_backwards > 0:
            raise RuntimeError(
                "gradients since the last step are in no checkpoint; save after engine.step() or engine.zero_grad()"
            )
        if self._network.store is None and self.comm.world_size > 1:
            raise CheckpointError("a simulated rank has nothing to save; save on real ranks")
        saved = list(self._saved(contents))
        holdings = tuple(each for each in saved if isinstance(each, Holding))
        written = {holding.name for holding in holdings if holding.written}
        numbers = tuple(each for each in saved if isinstance(each, HeldNumber) and each.name in written)
        manifest = Manifest(
            step=self.num_steps,
            tensors=(),
            files={},
            contents=contents,
            config=self.config.model_dump(mode="json"),
            layout=self._described_layout(),
            trajectory={} if contents == "weights" else self._trajectory(),
            extra=_checked(extra),
            model=_described_model(self.model),
        )
        request = SaveRequest(Path(path), manifest, holdings, numbers, keep_last, keep_every)
        self._saver.start(request, wait)

    def finish_saves(self) -> Path | None:
        """Wait until the save under way is written, and return the newest checkpoint of this engine, if there is one.

        Raises:
            CheckpointError: it could not be written.
        """
        return self._saver.wait()

    def load(self, path: str | Path, *, strict: bool = True, weights_only: bool = False) -> LoadReport:
        """Load a checkpoint that any layout saved: its world size, stage, tensor parallelism, precision may differ.

        Each rank reads what it holds, and nothing is gathered. All ranks call it alike. Gradients are dropped.

        Args:
            path: a checkpoint, `step-...`; or the folder of several: the newest that is whole is taken.
            strict: everything must fit; otherwise what fits is taken, and the report says what was skipped.
            weights_only: take parameters and buffers; optimizer, schedule and number of steps stay as they are.

        Raises:
            CheckpointError: it does not fit the model; nothing has been changed.
            DamagedError: no checkpoint there is whole, each named with what is wrong; the engine needs another load.
        """
        self._refuse_if_away()
        self._saver.wait()
        self.zero_grad()
        folders = json.loads(self._meet(json.dumps(_names(path)), lambda notes: notes[0], "the load of a checkpoint"))
        if error := folders.get("error"):
            raise CheckpointError(error)
        damaged: list[str] = []
        for folder in (Path(path) / name for name in folders["names"]):
            report = self._load_one(folder, strict, weights_only, damaged)
            if report is not None:
                return report
            log.warning("%s", damaged[-1])
        if not damaged:
            raise CheckpointError(f"{path} holds no checkpoint; give a folder of step-... folders, or one of these")
        raise DamagedError(f"no checkpoint in {path} is whole: {'; '.join(damaged)}")

    def _load_one(self, folder: Path, strict: bool, weights_only: bool, damaged: list[str]) -> LoadReport | None:
        """Load one checkpoint on all ranks; where it is damaged, add why to `damaged`."""
        plan: LoadPlan | None = None
        num_bytes = 0
        parameters = list(held.held_parameters(self._states()))
        buffers = list(self._held_buffers())

        def make_plan() -> None:
            nonlocal plan
            manifest = read_manifest(folder)
            kind = type(self.optimizer).__name__
            targets = [*parameters, *(holding for holding, _ in buffers)]
            plan = plan_load(manifest, targets, str(folder), kind, strict=strict, weights_only=weights_only)

        if not self._all_well(make_plan, damaged):
            return None
        assert plan is not None, "made on every rank"
        loaded = plan

        def read() -> None:
            nonlocal num_bytes
            targets = [*parameters, *(holding for holding, _ in buffers)]
            if loaded.with_states:
                held.prepare_optimizer_states(self._states(), loaded.optimizer_states())
                states = held.held_optimizer_states(self._states())
                targets += [each for each in states if isinstance(each, Holding)]
            with torch.no_grad():
                num_bytes = loaded.read(folder, targets)
                self._read_own(folder, loaded)

        self._is_half_loaded = True
        if not self._all_well(read, damaged):
            return None
        with torch.no_grad():
            for holding, buffer in buffers:
                if buffer.data_ptr() != holding.tensor.data_ptr():
                    buffer.copy_(holding.tensor.view(buffer.shape))
            held.adopt_masters(self._states())
        if loaded.with_states:
            self.num_steps = loaded.manifest.step
            self._restore_trajectory(loaded.manifest.trajectory)
        self._buffer_marks = self._mark_buffers()
        self._is_half_loaded = False
        manifest, result = loaded.manifest, loaded.match
        return LoadReport(
            folder, manifest.step, result.missing, loaded.skipped, tuple(damaged), manifest.extra, num_bytes
        )

    def _all_well(self, work: Callable[[], None], damaged: list[str]) -> bool:
        """Do something on every rank; say whether it went well on all, else add to `damaged` what did not.

        Raises:
            CheckpointError: it failed somewhere for another reason than damage; on every rank.
        """
        note = _WELL
        try:
            work()
        except DamagedError as error:
            note = f"{_DAMAGED}{error}"
        except (CheckpointError, OSError) as error:
            note = f"{_UNFIT}{error}"
        verdict = self._meet(note, _worst, "the end of a load")
        if verdict.startswith(_UNFIT):
            raise CheckpointError(verdict[1:])
        if verdict.startswith(_DAMAGED):
            damaged.append(verdict[1:])
        return verdict == _WELL

    def _meet(self, note: str, judge: Callable[[Mapping[int, str]], str], subject: str) -> str:
        store = self._network.store
        if store is None:
            return judge({0: note})
        self._num_agreements += 1
        meeting = Meeting(store, tuple(range(self.comm.world_size)), self.comm.rank, self.config.run.timeout_s)
        return meeting.verdict(f"checkpoint/{self._num_agreements}", note, judge, subject)

    def _saved(self, contents: Contents) -> Iterator[Holding | HeldNumber]:
        """All that this rank has of what is saved."""
        states = self._states()
        is_partial = contents == "trainable"
        yield from (each for each in held.held_parameters(states) if each.trainable or not is_partial)
        if not is_partial:
            yield from (holding for holding, _ in self._held_buffers())
        if contents == "weights":
            return
        yield from held.held_optimizer_states(states)
        own = {f"generator.{name}": state for name, state in trajectory.generator_states(self.device).items()}
        if self.comm.rank > 0 and not is_partial:  # such as batch statistics: each rank has its own
            marks = self._mark_buffers()
            touched = [name for name, mark in marks.items() if mark != self._buffer_marks.get(name)]
            own |= {f"buffer.{name}": self.model.get_buffer(name) for name in touched}
        for name, tensor in own.items():
            yield _whole(rank_name(self.comm.rank, name), (), tensor, kind="rank", is_written=True)

    def _held_buffers(self) -> Iterator[tuple[Holding, Tensor]]:
        """The persistent buffers, each with its holding; rank 0 writes them."""
        aliases: dict[int, list[str]] = {}
        named = dict(self.model.named_buffers(remove_duplicate=False))
        saved = self.model.state_dict(keep_vars=True)
        for name in named:
            if name in saved:
                aliases.setdefault(id(named[name]), []).append(name)
        for first, *others in aliases.values():
            buffer = named[first]
            yield _whole(first, tuple(others), buffer, kind="buffer", is_written=self.comm.rank == 0), buffer

    def _mark_buffers(self) -> dict[str, tuple[int, int]]:
        """By which a buffer that somebody has written or replaced since is known."""
        return {name: (id(buffer), version(buffer)) for name, buffer in self.model.named_buffers()}

    def _read_own(self, folder: Path, plan: LoadPlan) -> None:
        """Take over what was this rank's alone, where the ranks are as many as then."""
        if not plan.with_states or plan.manifest.trajectory.get("world_size") != self.comm.world_size:
            return
        values: dict[str, Tensor] = {}
        with PieceReader(folder) as reader:
            for name, stored in own_tensors(plan.manifest, self.comm.rank).items():
                kind, _, own_name = name.partition(".")
                dtype = torch.uint8 if kind == "generator" else self.model.get_buffer(own_name).dtype
                values[name] = torch.empty(stored.shape, dtype=dtype)
                flat = values[name].view(-1)
                reader.read(stored, PARAM, LocalTensor.whole(stored.shape).pieces, flat)
        for name, value in values.items():
            kind, _, own_name = name.partition(".")
            if kind == "buffer":
                self.model.get_buffer(own_name).copy_(value)
        generators = {name.removeprefix("generator."): each for name, each in values.items() if "generator." in name}
        trajectory.restore_generators(generators, self.device)

    def _trajectory(self) -> dict[str, Any]:
        return {
            "world_size": self.comm.world_size,
            "seed": self.config.run.seed,
            "normaliser": self._books.normaliser,
            "scaler": self._scaler.state_dict(),
            "optimizer": trajectory.optimizer_options(self.optimizer),
            "scheduler": trajectory.scheduler_state(self.scheduler),
        }

    def _restore_trajectory(self, saved: Mapping[str, Any]) -> None:
        self._books.normaliser = saved["normaliser"]
        self._scaler.load_state_dict(saved["scaler"])
        if self._has_own_schedule and isinstance(self.scheduler, LambdaLR) and saved["scheduler"] is not None:
            trajectory.advance_schedule(self.scheduler, saved["scheduler"])
            return
        trajectory.restore_options(self.optimizer, saved["optimizer"])
        trajectory.restore_scheduler(self.scheduler, saved["scheduler"])

    def _described_layout(self) -> dict[str, Any]:
        layout = self.layout
        return {
            "mesh": asdict(layout.mesh),
            "stage": self.config.zero.stage,
            "precision": asdict(layout.precision),
            "states": [
                {"name": state.name, "dtype": state.dtype, "tier": state.tier, "codec": state.codec}
                for state in layout.states
            ],
            "num_params": sum(
                torch.Size(spec.global_shape).numel() for group in layout.groups for spec in group.params
            ),
        }


def _whole(name: str, aliases: tuple[str, ...], tensor: Tensor, *, kind: Any, is_written: bool) -> Holding:
    shape = tuple(tensor.shape)
    pieces = LocalTensor.whole(shape).pieces
    flat = tensor.detach().reshape(-1)
    return Holding(name, aliases, PARAM, shape, flat, pieces, pieces if is_written else (), kind, trainable=False)


def _described_model(model: nn.Module) -> dict[str, Any]:
    """The model's class, and its config where it is a Hugging Face model's or a dataclass."""
    described: dict[str, Any] = {"class": type(model).__name__}
    config = getattr(model, "config", None)
    to_dict = getattr(config, "to_dict", None)
    if callable(to_dict):
        described["config"] = json.loads(json.dumps(to_dict(), default=str))
    elif is_dataclass(config) and not isinstance(config, type):
        described["config"] = json.loads(json.dumps(asdict(config), default=str))
    return described


def _checked(extra: Any) -> Any:
    try:
        return json.loads(json.dumps(extra))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"extra must be what JSON keeps: {error}; give numbers, text, lists and dicts") from None


def _names(path: str | Path) -> dict[str, Any]:
    """The checkpoints at `path`, relative to it: each rank may have its own way there."""
    try:
        return {"names": [os.path.relpath(folder, path) for folder in candidates(Path(path))]}
    except CheckpointError as error:
        return {"error": str(error)}


def _worst(notes: Mapping[int, str]) -> str:
    """Of the ranks' words on a load, the gravest; damage is named by the first rank that met it."""
    for kind in (_UNFIT, _DAMAGED):
        for note in notes.values():
            if note.startswith(kind):
                return note
    return _WELL
