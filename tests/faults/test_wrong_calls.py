"""Wrong calls of the public functions: each is refused in one line with a code, and right calls of all kinds go on."""

from __future__ import annotations

import copy
import io
import math
import pickle
import signal
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise
from harness.refusals import refused
from shardwise.attention import BlockLayout, FixedSparsityConfig, block_sparse_attention
from shardwise.config.errors import CodedError
from shardwise.planner.search import Limits
from shardwise.train.loaders import EngineDataLoader, StreamLoader

CPU = {"run": {"device": "cpu"}, "optimizer": {"name": "sgd", "lr": 0.1}}


class Net(nn.Module):
    """A small model of one input of width 4."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(width, 8)
        self.last = nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(inputs)))


def loss_of(output: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return output.square().sum(), len(batch)


def batch(width: int = 4) -> Tensor:
    return torch.ones(2, width)


def start(model: Any = None, config: Any = CPU, **options: Any) -> Any:
    model = Net() if model is None else model
    return shardwise.initialize(model, config, **{"loss_fn": loss_of, **options})


def with_loss(loss_fn: Any) -> None:
    """Take a step with a loss function; the engine is closed after it, whatever happens."""
    engine = start(loss_fn=loss_fn)
    try:
        engine.train_step([batch()])
    finally:
        engine.close()


def embedded(tokens: Tensor) -> None:
    """Take a step of an embedding of four tokens."""
    engine = start(nn.Embedding(4, 2), loss_fn=loss_of)
    try:
        engine.train_step([tokens])
    finally:
        engine.close()


def inside(context: Any) -> Any:
    with context as value:
        return value


def cut(number: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(number)))


QUIET = Console(file=io.StringIO())


class WithInts(nn.Module):
    """Has a parameter of integers that is used like any other."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, dtype=torch.int64), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.table


class Rows:
    """Has rows by number, and no class of its own that anyone knows."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        if index >= 8:
            raise IndexError
        return torch.ones(4) * index


class Stream:
    """Begins again at each iteration."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.ones(4) for _ in range(4))


@dataclass(frozen=True)
class World:
    """What the calls of the table use."""

    engine: shardwise.Engine
    folder: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    engine = start()
    engine.train_step([batch()])
    folder = tmp_path_factory.mktemp("saved")
    engine.save(folder / "good")
    yield World(engine, folder)
    engine.close()


Call = Callable[[World], object]


def calls_of(table: dict[str, Call]) -> Callable[[Any], Any]:
    return pytest.mark.parametrize("call", table.values(), ids=list(table))


INITIALIZE: dict[str, Call] = {
    "no model": lambda w: shardwise.initialize(),
    "None": lambda w: shardwise.initialize(None, CPU),
    "a class": lambda w: start(Net),
    "a text": lambda w: start("gpt2"),
    "a state dict": lambda w: start(Net().state_dict()),
    "a list of modules": lambda w: start([nn.Linear(2, 2)]),
    "an optimizer": lambda w: start(torch.optim.SGD(Net().parameters())),
    "a tensor": lambda w: start(torch.ones(2)),
    "a function": lambda w: start(lambda x: x),
    "DataParallel": lambda w: start(nn.DataParallel(Net())),
    "a scripted model": lambda w: start(torch.jit.trace(Net(), batch())),
    "a lazy model": lambda w: start(nn.LazyLinear(2)),
    "an engine by hand": lambda w: shardwise.Engine(Net()),
    "no parameters": lambda w: start(nn.ReLU()),
    "parameters of integers": lambda w: start(WithInts()).train_step([batch()]),
    "config None in place of the model": lambda w: shardwise.initialize(CPU, Net()),
    "config text": lambda w: start(config="zero.stage=3"),
    "config list": lambda w: start(config=["zero.stage=3"]),
    "config number": lambda w: start(config=3),
    "config path": lambda w: start(config=Path("a.toml")),
    "config section": lambda w: start(config={"zero": 3}),
    "config int key": lambda w: start(config={3: {}}),
    "config key": lambda w: start(config={"zero": {"stagee": 3}}),
    "config stage": lambda w: start(config={"zero": {"stage": 7}}),
    "config class": lambda w: start(config=shardwise.Config),
    "config of another's": lambda w: start(config={"zero_optimization": {"stage": 3}}),
    "config nan": lambda w: start(config={"optimizer": {"lr": float("nan")}}),
    "config three arguments": lambda w: shardwise.initialize(Net(), CPU, loss_of),
    "loss class": lambda w: start(loss_fn=nn.MSELoss),
    "loss text": lambda w: start(loss_fn="mse"),
    "loss number": lambda w: start(loss_fn=1.0),
    "loss tensor": lambda w: start(loss_fn=torch.ones(())),
    "loss of one argument": lambda w: start(loss_fn=lambda output: output.sum()),
    "loss of three arguments": lambda w: start(loss_fn=lambda model, output, batch: output.sum()),
    "loss of none": lambda w: start(loss_fn=lambda: 0),
    "loss fuction": lambda w: shardwise.initialize(Net(), CPU, loss_fun=loss_of),
    "loss called": lambda w: start(loss_fn=loss_of(batch(), batch())),
    "optimizer text": lambda w: start(optimizer="adamw"),
    "optimizer dict": lambda w: start(optimizer={"name": "adamw"}),
    "optimizer number": lambda w: start(optimizer=1e-3),
    "optimizer of another model": lambda w: start(optimizer=torch.optim.SGD(Net().parameters(), lr=0.1)),
    "optimizer of no arguments": lambda w: start(optimizer=lambda: None),
    "optimizer that returns None": lambda w: start(optimizer=lambda groups: None),
    "optimizer that returns a class": lambda w: start(optimizer=lambda groups: torch.optim.SGD),
    "optimizer is a module's class": lambda w: start(optimizer=Net),
    "optimizer list": lambda w: start(optimizer=[torch.optim.SGD(Net().parameters(), lr=0.1)]),
    "scheduler text": lambda w: start(scheduler="cosine"),
    "scheduler class": lambda w: start(scheduler=torch.optim.lr_scheduler.LambdaLR),
    "scheduler function": lambda w: start(scheduler=lambda step: 1.0),
    "scheduler number": lambda w: start(scheduler=3),
    "plan text": lambda w: start(plan="auto"),
    "plan list": lambda w: start(plan=[("a", "column")]),
    "plan number": lambda w: start(plan=2),
    "plan style": lambda w: start(plan={"first": "diagonal"}),
    "plan style number": lambda w: start(plan={"first": 3}),
    "plan name": lambda w: start(plan={"nothing": "column"}),
    "plan key": lambda w: start(plan={3: "column"}),
    "weights number": lambda w: start(weights=123),
    "weights bytes": lambda w: start(weights=b"folder"),
    "weights list": lambda w: start(weights=["a"]),
    "weights dict": lambda w: start(weights=Net().state_dict()),
    "weights missing": lambda w: start(weights="/nowhere/at/all"),
    "weights empty": lambda w: start(weights=w.folder),
    "weights NUL": lambda w: start(weights="a\0b"),
    "names list": lambda w: start(weights=w.folder, names=["a"]),
    "names text": lambda w: start(weights=w.folder, names="a"),
    "names number": lambda w: start(weights=w.folder, names=3),
    "names value": lambda w: start(weights=w.folder, names={"a": 3}),
    "a config for 512 ranks": lambda w: start(config={**CPU, "mesh": {"tp": 512}}),
}

TRAIN: dict[str, Call] = {
    "none given": lambda w: w.engine.train_step(),
    "None": lambda w: w.engine.train_step(None),
    "a generator": lambda w: w.engine.train_step(batch() for _ in range(1)),
    "an iterator": lambda w: w.engine.train_step(iter([batch()])),
    "a map": lambda w: w.engine.train_step(map(torch.ones, [2])),
    "numpy": lambda w: w.engine.train_step(np.ones((1, 2, 4), dtype=np.float32)),
    "a numpy scalar": lambda w: w.engine.train_step(np.float32(1)),
    "a number": lambda w: w.engine.train_step(3),
    "a text": lambda w: w.engine.train_step("batch"),
    "bytes": lambda w: w.engine.train_step(b"b"),
    "a set": lambda w: w.engine.train_step({1}),
    "a class": lambda w: w.engine.train_step(list),
    "a loader": lambda w: w.engine.train_step(torch.utils.data.DataLoader([batch()])),
    "a token beyond the vocabulary": lambda w: embedded(torch.full((2,), 9)),
    "tokens as floats": lambda w: embedded(torch.ones(2)),
    "plain forward of a width": lambda w: w.engine.forward(batch(5)),
    "plain forward by name": lambda w: w.engine.forward(input_ids=batch()),
    "an empty list": lambda w: w.engine.train_step([]),
    "two batches": lambda w: w.engine.train_step([batch(), batch()]),
    "two arguments": lambda w: w.engine.train_step([batch()], [batch()]),
    "an unknown argument": lambda w: w.engine.train_step(batch=[batch()]),
    "a list of None": lambda w: w.engine.train_step([None]),
    "a list of numpy": lambda w: w.engine.train_step([np.ones((2, 4), dtype=np.float32)]),
    "a list of texts": lambda w: w.engine.train_step(["batch"]),
    "a list of numbers": lambda w: w.engine.train_step([3.0]),
    "a list of lists of numbers": lambda w: w.engine.train_step([[[1.0, 2.0, 3.0, 4.0]]]),
    "a list of generators": lambda w: w.engine.train_step([batch() for _ in range(1)] and [(x for x in [batch()])]),
    "a list of a class": lambda w: w.engine.train_step([Tensor]),
    "a width": lambda w: w.engine.train_step([batch(5)]),
    "no dims": lambda w: w.engine.train_step([torch.ones(())]),
    "integers": lambda w: w.engine.train_step([torch.ones(2, 4, dtype=torch.int64)]),
    "bools": lambda w: w.engine.train_step([torch.ones(2, 4, dtype=torch.bool)]),
    "complex numbers": lambda w: w.engine.train_step([torch.ones(2, 4, dtype=torch.complex64)]),
    "a batch by another name": lambda w: w.engine.train_step([{"input": batch()}]),
    "a batch of two inputs": lambda w: w.engine.train_step([{"inputs": batch(), "labels": batch()}]),
    "on meta": lambda w: w.engine.train_step([torch.ones(2, 4, device="meta")]),
    "a sparse batch": lambda w: w.engine.train_step([torch.ones(2, 5).to_sparse()]),
    "eval None": lambda w: w.engine.eval_step(None),
    "eval a generator": lambda w: w.engine.eval_step(batch() for _ in range(2)),
    "eval numpy": lambda w: w.engine.eval_step(np.ones((1, 2, 4), dtype=np.float32)),
    "eval a number": lambda w: w.engine.eval_step(3),
    "eval a text": lambda w: w.engine.eval_step("a"),
    "eval a width": lambda w: w.engine.eval_step([batch(5)]),
    "eval a list of None": lambda w: w.engine.eval_step([None]),
    "eval two arguments": lambda w: w.engine.eval_step([batch()], 2),
    "forward of a width": lambda w: w.engine(batch(3)),
    "forward of None": lambda w: w.engine(None),
    "forward of numpy": lambda w: w.engine(np.ones((2, 4), dtype=np.float32)),
    "forward of a text": lambda w: w.engine("a"),
    "loss detached": lambda w: with_loss(lambda output, batch: output.detach().sum()),
    "loss of a number": lambda w: with_loss(lambda output, batch: output.sum().item()),
    "loss None": lambda w: with_loss(lambda output, batch: None),
    "loss of rows": lambda w: with_loss(lambda output, batch: output.sum(dim=1)),
    "loss of an array": lambda w: with_loss(lambda output, batch: np.float32(1)),
    "loss text": lambda w: with_loss(lambda output, batch: "loss"),
    "loss of integers": lambda w: with_loss(lambda output, batch: torch.ones((), dtype=torch.int64)),
    "loss complex": lambda w: with_loss(lambda output, batch: output.sum() * 1j),
    "loss of a dict": lambda w: with_loss(lambda output, batch: {"loss": output.sum()}),
    "count is a text": lambda w: with_loss(lambda output, batch: (output.sum(), "2")),
    "count is negative": lambda w: with_loss(lambda output, batch: (output.sum(), -2)),
    "count is nan": lambda w: with_loss(lambda output, batch: (output.sum(), float("nan"))),
    "count is None": lambda w: with_loss(lambda output, batch: (output.sum(), None)),
    "sum and count are numbers": lambda w: with_loss(lambda output, batch: (1.0, 2)),
    "three values": lambda w: with_loss(lambda output, batch: (output.sum(), 2, output)),
    "loss of a parameter elsewhere": lambda w: with_loss(
        lambda output, batch: torch.ones((), requires_grad=True).detach()
    ),
}

STEP: dict[str, Call] = {
    "backward None": lambda w: w.engine.backward(None),
    "backward a number": lambda w: w.engine.backward(1.0),
    "backward nothing": lambda w: w.engine.backward(),
    "backward numpy": lambda w: w.engine.backward(np.float32(1)),
    "backward a list": lambda w: w.engine.backward([w.engine(batch())]),
    "backward a text": lambda w: w.engine.backward("loss"),
    "backward the loss function": lambda w: w.engine.backward(loss_of),
    "backward detached": lambda w: w.engine.backward(w.engine(batch()).detach()),
    "backward of ones": lambda w: w.engine.backward(torch.ones(())),
    "backward of a vector": lambda w: w.engine.backward(torch.ones(2, requires_grad=True)),
    "backward is_boundary text": lambda w: w.engine.backward(w.engine(batch()), is_boundary="yes"),
    "backward retain_graph text": lambda w: w.engine.backward(w.engine(batch()), retain_graph="no"),
    "backward retain_graph None": lambda w: w.engine.backward(w.engine(batch()), retain_graph=None),
    "backward by position": lambda w: w.engine.backward(w.engine(batch()), True),
    "backward gradient": lambda w: w.engine.backward(w.engine(batch()), gradient=torch.ones(())),
    "step partial text": lambda w: w.engine.step(partial="no"),
    "step closure": lambda w: w.engine.step(lambda: 0),
    "step alone": lambda w: w.engine.step(),
    "zero_grad set_to_none": lambda w: w.engine.zero_grad(set_to_none=True),
    "no_sync argument": lambda w: w.engine.no_sync(True),
    "close text": lambda w: w.engine.close(keep_values="no"),
    "close None": lambda w: w.engine.close(keep_values=None),
    "scheduler text": lambda w: setattr(w.engine, "scheduler", "cosine"),
    "scheduler None": lambda w: setattr(w.engine, "scheduler", None),
    "scheduler class": lambda w: setattr(w.engine, "scheduler", torch.optim.lr_scheduler.LambdaLR),
    "signals number": lambda w: w.engine.watch_preemption(15),
    "signals text": lambda w: w.engine.watch_preemption("SIGTERM"),
    "signals unknown": lambda w: w.engine.watch_preemption(["SIGNONE"]),
    "signals kill": lambda w: w.engine.watch_preemption(["SIGKILL"]),
    "signals stop": lambda w: w.engine.watch_preemption(["SIGTERM", "SIGSTOP"]),
    "signals numbers": lambda w: w.engine.watch_preemption([15]),
    "signals enum": lambda w: w.engine.watch_preemption(signal.SIGTERM),
    "signals None": lambda w: w.engine.watch_preemption(None),
    "signals lower case": lambda w: w.engine.watch_preemption(["sigterm"]),
    "several: one engine": lambda w: shardwise.backward(w.engine(batch()), w.engine),
    "several: no engine": lambda w: shardwise.backward(torch.ones((), requires_grad=True), []),
    "several: None": lambda w: shardwise.backward(torch.ones((), requires_grad=True), None),
    "several: models": lambda w: shardwise.backward(torch.ones((), requires_grad=True), [Net()]),
    "several: loss": lambda w: shardwise.backward(1.0, [w.engine]),
    "several: loss None": lambda w: shardwise.backward(None, [w.engine]),
    "several: detached": lambda w: shardwise.backward(torch.ones(()), [w.engine]),
    "several: a vector": lambda w: shardwise.backward(torch.ones(2, requires_grad=True), [w.engine]),
    "several: count text": lambda w: shardwise.backward(torch.ones((), requires_grad=True), [w.engine], count="2"),
    "several: count 0": lambda w: shardwise.backward(torch.ones((), requires_grad=True), [w.engine], count=0),
    "several: count nan": lambda w: shardwise.backward(
        torch.ones((), requires_grad=True), [w.engine], count=float("nan")
    ),
}

STATES: dict[str, Call] = {
    "gathered text": lambda w: w.engine.gathered("yes").__enter__(),
    "gathered None": lambda w: w.engine.gathered(None).__enter__(),
    "gathered parameters": lambda w: w.engine.gathered(list(w.engine.model.parameters())).__enter__(),
    "read nothing": lambda w: w.engine.read(),
    "read None": lambda w: w.engine.read(None),
    "read number": lambda w: w.engine.read(0),
    "read parameter": lambda w: w.engine.read(w.engine.model.first.weight),
    "read unknown": lambda w: w.engine.read("first.weigth"),
    "read empty": lambda w: w.engine.read(""),
    "read a module": lambda w: w.engine.read("first"),
    "read state": lambda w: w.engine.read("first.weight", "velocity"),
    "read state close": lambda w: w.engine.read("first.weight", "parm"),
    "read state None": lambda w: w.engine.read("first.weight", None),
    "read state number": lambda w: w.engine.read("first.weight", 3),
    "read state empty": lambda w: w.engine.read("first.weight", ""),
    "read rank": lambda w: w.engine.read("first.weight", to_rank=1),
    "read rank negative": lambda w: w.engine.read("first.weight", to_rank=-1),
    "read rank text": lambda w: w.engine.read("first.weight", to_rank="0"),
    "read rank float": lambda w: w.engine.read("first.weight", to_rank=0.0),
    "read rank by position": lambda w: w.engine.read("first.weight", "param", 0),
    "write nothing": lambda w: w.engine.write("first.weight"),
    "write None": lambda w: w.engine.write("first.weight", None),
    "write shape": lambda w: w.engine.write("first.weight", torch.ones(3)),
    "write text": lambda w: w.engine.write("first.weight", "ones"),
    "write a function": lambda w: w.engine.write("first.weight", torch.zeros),
    "write a number": lambda w: w.engine.write("first.weight", 1.0),
    "write a dict": lambda w: w.engine.write("first.weight", {}),
    "write a ragged list": lambda w: w.engine.write("first.weight", [[1.0], [1.0, 2.0]]),
    "write meta": lambda w: w.engine.write("first.weight", torch.ones(8, 4, device="meta")),
    "write complex": lambda w: w.engine.write("first.weight", torch.ones(8, 4, dtype=torch.complex64)),
    "write unknown": lambda w: w.engine.write("nothing", torch.ones(1)),
    "write name None": lambda w: w.engine.write(None, torch.ones(1)),
    "write state": lambda w: w.engine.write("first.weight", torch.ones(8, 4), "velocity"),
    "write state number": lambda w: w.engine.write("first.weight", torch.ones(8, 4), 3),
    "write rank": lambda w: w.engine.write("first.weight", torch.ones(8, 4), from_rank=3),
    "write rank text": lambda w: w.engine.write("first.weight", torch.ones(8, 4), from_rank="0"),
    "states_of unknown": lambda w: w.engine.states_of("nothing"),
    "states_of None": lambda w: w.engine.states_of(None),
    "states_of nothing": lambda w: w.engine.states_of(),
    "offload text": lambda w: w.engine.offload("optimizer"),
    "offload unknown": lambda w: w.engine.offload(["optimiser"]),
    "offload number": lambda w: w.engine.offload(3),
    "offload numbers": lambda w: w.engine.offload([3]),
    "offload to": lambda w: w.engine.offload(to="cpu"),
    "offload to None": lambda w: w.engine.offload(to=None),
    "offload to a device": lambda w: w.engine.offload(to=torch.device("cpu")),
    "offload path number": lambda w: w.engine.offload(to="nvme", path=3),
    "offload path of host": lambda w: w.engine.offload(path="a"),
    "offload no path": lambda w: w.engine.offload(to="nvme"),
    "offload path is a file": lambda w: w.engine.offload(to="nvme", path="/etc/passwd"),
    "offload pin text": lambda w: w.engine.offload(pin_memory="no"),
    "offloaded text": lambda w: w.engine.offloaded("params").__enter__(),
    "offloaded to": lambda w: w.engine.offloaded(to="disk").__enter__(),
    "reload argument": lambda w: w.engine.reload("all"),
    "gathered() nothing": lambda w: shardwise.gathered(),
    "gathered() None": lambda w: shardwise.gathered(None).__enter__(),
    "gathered() a module": lambda w: shardwise.gathered(Net()).__enter__(),
    "gathered() names": lambda w: shardwise.gathered(["first.weight"]).__enter__(),
    "gathered() a text": lambda w: shardwise.gathered("first.weight").__enter__(),
    "gathered() a tensor": lambda w: shardwise.gathered(torch.ones(2)).__enter__(),
    "gathered() tensors": lambda w: shardwise.gathered([torch.ones(2)]).__enter__(),
    "gathered() named_parameters": lambda w: shardwise.gathered(w.engine.model.named_parameters()).__enter__(),
    "gathered() a dict": lambda w: shardwise.gathered(dict(w.engine.model.named_parameters())).__enter__(),
    "gathered() numbers": lambda w: shardwise.gathered([1, 2]).__enter__(),
    "gathered() the engine": lambda w: shardwise.gathered(w.engine).__enter__(),
    "gathered() rank": lambda w: shardwise.gathered(w.engine.model.parameters(), 3).__enter__(),
    "gathered() rank text": lambda w: shardwise.gathered(w.engine.model.parameters(), "0").__enter__(),
}

CHECKPOINTS: dict[str, Call] = {
    "save nothing": lambda w: w.engine.save(),
    "save None": lambda w: w.engine.save(None),
    "save a number": lambda w: w.engine.save(3),
    "save bytes": lambda w: w.engine.save(b"folder"),
    "save a list": lambda w: w.engine.save(["folder"]),
    "save NUL": lambda w: w.engine.save("fol\0der"),
    "save into a file": lambda w: w.engine.save("/etc/passwd"),
    "save an open file": lambda w: w.engine.save(io.StringIO()),
    "save tag number": lambda w: w.engine.save(w.folder, tag=5),
    "save tag None": lambda w: w.engine.save(w.folder, tag=None),
    "save tag path": lambda w: w.engine.save(w.folder, tag="../out"),
    "save tag latest": lambda w: w.engine.save(w.folder, tag="latest"),
    "save tag Path": lambda w: w.engine.save(w.folder, tag=Path("best")),
    "save keep_last text": lambda w: w.engine.save(w.folder, keep_last="3"),
    "save keep_last 0": lambda w: w.engine.save(w.folder, keep_last=0),
    "save keep_last negative": lambda w: w.engine.save(w.folder, keep_last=-1),
    "save keep_last float": lambda w: w.engine.save(w.folder, keep_last=3.0),
    "save keep_last bool": lambda w: w.engine.save(w.folder, keep_last=True),
    "save keep_every text": lambda w: w.engine.save(w.folder, keep_every="10"),
    "save keep_every 0": lambda w: w.engine.save(w.folder, keep_every=0),
    "save tag and keep": lambda w: w.engine.save(w.folder, tag="best", keep_last=2),
    "save contents": lambda w: w.engine.save(w.folder, contents="model"),
    "save contents None": lambda w: w.engine.save(w.folder, contents=None),
    "save contents list": lambda w: w.engine.save(w.folder, contents=["weights"]),
    "save contents case": lambda w: w.engine.save(w.folder, contents="All"),
    "save wait text": lambda w: w.engine.save(w.folder, wait="no"),
    "save wait None": lambda w: w.engine.save(w.folder, wait=None),
    "save data number": lambda w: w.engine.save(w.folder, data=3),
    "save data list": lambda w: w.engine.save(w.folder, data=[1]),
    "save data class": lambda w: w.engine.save(w.folder, data=StreamLoader),
    "save data loader of torch": lambda w: w.engine.save(w.folder, data=torch.utils.data.DataLoader([1])),
    "save extra function": lambda w: w.engine.save(w.folder, extra=loss_of),
    "save extra object": lambda w: w.engine.save(w.folder, extra=Net()),
    "save by position": lambda w: w.engine.save(w.folder, "all"),
    "save unknown argument": lambda w: w.engine.save(w.folder, keep_lsat=3),
    "save epoch": lambda w: w.engine.save(w.folder, epoch=3),
    "finish_saves argument": lambda w: w.engine.finish_saves(3),
    "load nothing": lambda w: w.engine.load(),
    "load None": lambda w: w.engine.load(None),
    "load a number": lambda w: w.engine.load(3),
    "load bytes": lambda w: w.engine.load(b"a"),
    "load NUL": lambda w: w.engine.load("a\0b"),
    "load missing": lambda w: w.engine.load("/nowhere/at/all"),
    "load a file": lambda w: w.engine.load("/etc/passwd"),
    "load a state dict": lambda w: w.engine.load(Net().state_dict()),
    "load strict text": lambda w: w.engine.load(w.folder / "good", strict="no"),
    "load strict None": lambda w: w.engine.load(w.folder / "good", strict=None),
    "load strict number": lambda w: w.engine.load(w.folder / "good", strict=2),
    "load weights_only text": lambda w: w.engine.load(w.folder / "good", weights_only="false"),
    "load tag number": lambda w: w.engine.load(w.folder / "good", tag=5),
    "load tag None": lambda w: w.engine.load(w.folder / "good", tag=None),
    "load tag unknown": lambda w: w.engine.load(w.folder / "good", tag="best"),
    "load tag elsewhere": lambda w: w.engine.load(w.folder / "nothing", tag="../good"),
    "load tag absolute": lambda w: w.engine.load(w.folder / "nothing", tag=str(w.folder / "good")),
    "load data number": lambda w: w.engine.load(w.folder / "good", data=3),
    "load data of another": lambda w: w.engine.load(w.folder / "good", data=Rows()),
    "load by position": lambda w: w.engine.load(w.folder / "good", True),
    "load map_location": lambda w: w.engine.load(w.folder / "good", map_location="cpu"),
    "import nothing": lambda w: w.engine.import_weights(),
    "import None": lambda w: w.engine.import_weights(None),
    "import a number": lambda w: w.engine.import_weights(3),
    "import missing": lambda w: w.engine.import_weights("/nowhere/at/all"),
    "import a file": lambda w: w.engine.import_weights("/etc/passwd"),
    "import a state dict": lambda w: w.engine.import_weights(Net().state_dict()),
    "import names list": lambda w: w.engine.import_weights(w.folder, names=["a"]),
    "import names text": lambda w: w.engine.import_weights(w.folder, names="a"),
    "import names value": lambda w: w.engine.import_weights(w.folder, names={"first.*": 3}),
    "import names key": lambda w: w.engine.import_weights(w.folder, names={3: "first.*"}),
    "import strict text": lambda w: w.engine.import_weights(w.folder, strict="no"),
    "export nothing": lambda w: w.engine.export_weights(),
    "export None": lambda w: w.engine.export_weights(None),
    "export a number": lambda w: w.engine.export_weights(3),
    "export NUL": lambda w: w.engine.export_weights("a\0b"),
    "export into a full folder": lambda w: w.engine.export_weights(w.folder),
    "export into a file": lambda w: w.engine.export_weights("/etc/passwd"),
    "export dtype": lambda w: w.engine.export_weights(w.folder / "out", dtype="half"),
    "export torch dtype": lambda w: w.engine.export_weights(w.folder / "out", dtype=torch.bfloat16),
    "export dtype number": lambda w: w.engine.export_weights(w.folder / "out", dtype=16),
    "export names": lambda w: w.engine.export_weights(w.folder / "out", names=["a"]),
    "export files text": lambda w: w.engine.export_weights(w.folder / "out", files="config.json"),
    "export files number": lambda w: w.engine.export_weights(w.folder / "out", files=3),
    "export files numbers": lambda w: w.engine.export_weights(w.folder / "out", files=[3]),
    "export files missing": lambda w: w.engine.export_weights(w.folder / "out", files=["/nowhere/config.json"]),
    "export tokenizer text": lambda w: w.engine.export_weights(w.folder / "out", tokenizer="gpt2"),
    "export tokenizer class": lambda w: w.engine.export_weights(w.folder / "out", tokenizer=Net),
    "export by position": lambda w: w.engine.export_weights(w.folder / "out", "bf16"),
}


def planned(model: Any = "tiny", cluster: Any = "h100:1", **options: Any) -> object:
    return shardwise.plan(model, cluster, **options)


def simulated(model: Any = Net, config: Any = CPU, make_batch: Any = batch, **options: Any) -> object:
    return shardwise.simulate(model, config, make_batch, **{"rank": 0, "world_size": 1, "loss_fn": loss_of, **options})


def estimated(model: Any = 1000, **options: Any) -> object:
    return shardwise.estimate_model_states(model, **{"num_gpus": 2, **options})


PLANNER: dict[str, Call] = {
    "plan nothing": lambda w: shardwise.plan(),
    "plan no cluster": lambda w: shardwise.plan("llama-7b"),
    "plan None": lambda w: planned(None),
    "plan a number": lambda w: planned(7),
    "plan a class": lambda w: planned(Net),
    "plan a module without config": lambda w: planned(Net()),
    "plan an empty dict": lambda w: planned({}),
    "plan unknown": lambda w: planned("lama-7b"),
    "plan empty": lambda w: planned(""),
    "plan NUL": lambda w: planned("a\0b"),
    "plan a list": lambda w: planned(["tiny"]),
    "plan bytes": lambda w: planned(b"tiny"),
    "cluster None": lambda w: planned(cluster=None),
    "cluster number": lambda w: planned(cluster=8),
    "cluster unknown": lambda w: planned(cluster="z100:8"),
    "cluster zero": lambda w: planned(cluster="h100:0"),
    "cluster text": lambda w: planned(cluster="h100:many"),
    "cluster empty": lambda w: planned(cluster=""),
    "cluster dict": lambda w: planned(cluster={"gpu": "h100"}),
    "cluster negative": lambda w: planned(cluster="h100:-8"),
    "global_batch text": lambda w: planned(global_batch="64"),
    "global_batch 0": lambda w: planned(global_batch=0),
    "global_batch negative": lambda w: planned(global_batch=-1),
    "global_batch float": lambda w: planned(global_batch=64.0),
    "global_batch nan": lambda w: planned(global_batch=float("nan")),
    "seq_len text": lambda w: planned(seq_len="4096"),
    "seq_len 0": lambda w: planned(seq_len=0),
    "seq_len negative": lambda w: planned(seq_len=-3),
    "seq_len bool": lambda w: planned(seq_len=True),
    "settings text": lambda w: planned(settings="mesh.tp=1"),
    "settings dict": lambda w: planned(settings={"mesh.tp": 1}),
    "settings number": lambda w: planned(settings=[3]),
    "settings unknown": lambda w: planned(settings=["mesh.tq=1"]),
    "settings no assignment": lambda w: planned(settings=["mesh.tp"]),
    "settings value": lambda w: planned(settings=["mesh.tp=x"]),
    "limits number": lambda w: planned(limits=3),
    "limits dict": lambda w: planned(limits={"num": 3}),
    "limits best": lambda w: planned(limits=Limits(num_best=0)),
    "limits text": lambda w: planned(limits=Limits(num_best="3")),
    "limits margin": lambda w: planned(limits=Limits(margin_share=2.0)),
    "limits nan": lambda w: planned(limits=Limits(margin_share=float("nan"))),
    "plan unknown argument": lambda w: planned(batch=64),
    "plan three by position": lambda w: shardwise.plan("tiny", "h100:1", 64),
    "simulate nothing": lambda w: shardwise.simulate(),
    "simulate no rank": lambda w: shardwise.simulate(Net, CPU, batch),
    "simulate None": lambda w: simulated(None),
    "simulate text": lambda w: simulated("gpt2"),
    "simulate makes None": lambda w: simulated(lambda: None),
    "simulate makes a class": lambda w: simulated(lambda: Net),
    "simulate a number": lambda w: simulated(3),
    "simulate model of arguments": lambda w: simulated(lambda width: Net(width)),
    "simulate 0 ranks": lambda w: simulated(world_size=0),
    "simulate negative ranks": lambda w: simulated(world_size=-4),
    "simulate ranks text": lambda w: simulated(world_size="8"),
    "simulate ranks float": lambda w: simulated(world_size=8.0),
    "simulate too many ranks": lambda w: simulated(world_size=10**12),
    "simulate rank outside": lambda w: simulated(rank=1),
    "simulate rank negative": lambda w: simulated(rank=-1),
    "simulate rank text": lambda w: simulated(rank="0"),
    "simulate rank None": lambda w: simulated(rank=None),
    "simulate batch": lambda w: simulated(make_batch=batch()),
    "simulate batch None": lambda w: simulated(make_batch=None),
    "simulate batch of arguments": lambda w: simulated(make_batch=lambda step: batch()),
    "simulate makes no batch": lambda w: simulated(make_batch=lambda: None),
    "simulate width": lambda w: simulated(make_batch=lambda: batch(5)),
    "simulate config text": lambda w: simulated(config="zero3"),
    "simulate config list": lambda w: simulated(config=[]),
    "simulate loss class": lambda w: simulated(loss_fn=nn.MSELoss),
    "simulate loss text": lambda w: simulated(loss_fn="mse"),
    "simulate optimizer text": lambda w: simulated(optimizer="adamw"),
    "simulate optimizer given": lambda w: simulated(optimizer=torch.optim.SGD(Net().parameters(), lr=0.1)),
    "simulate device_gib text": lambda w: simulated(device_gib="80"),
    "simulate device_gib negative": lambda w: simulated(device_gib=-1),
    "simulate device_gib nan": lambda w: simulated(device_gib=float("nan")),
    "simulate ranks": lambda w: simulated(ranks=8),
    "estimate nothing": lambda w: shardwise.estimate_model_states(),
    "estimate None": lambda w: estimated(None),
    "estimate text": lambda w: estimated("7b"),
    "estimate class": lambda w: estimated(Net),
    "estimate 0": lambda w: estimated(0),
    "estimate negative": lambda w: estimated(-5),
    "estimate float": lambda w: estimated(7e9),
    "estimate nan": lambda w: estimated(float("nan")),
    "estimate no gpus": lambda w: estimated(num_gpus=0),
    "estimate gpus text": lambda w: estimated(num_gpus="8"),
    "estimate gpus None": lambda w: estimated(num_gpus=None),
    "estimate gpus_per_node 0": lambda w: estimated(gpus_per_node=0),
    "estimate gpus_per_node text": lambda w: estimated(gpus_per_node="8"),
    "estimate stage 4": lambda w: estimated(stages=[4]),
    "estimate stage text": lambda w: estimated(stages=["3"]),
    "estimate stage number": lambda w: estimated(stages=3),
    "estimate stages text": lambda w: estimated(stages="3"),
    "estimate config text": lambda w: estimated(config="a"),
    "estimate config section": lambda w: estimated(config={"zero": 3}),
    "estimate config precision": lambda w: estimated(config={"precision": "bf16"}),
    "estimate config key": lambda w: estimated(config={"zro": {}}),
    "estimate block": lambda w: estimated(largest_block=2000),
    "estimate block negative": lambda w: estimated(largest_block=-2),
    "estimate block text": lambda w: estimated(largest_block="2"),
}

SPLIT = {"first": "column", "last": "row"}


def proved(model: Any = None, given: Any = None, plan: Any = SPLIT, tp: Any = 2, **options: Any) -> object:
    return shardwise.prove_plan(
        Net() if model is None else model, batch() if given is None else given, plan, tp, **options
    )


def resolved(**sections: Any) -> shardwise.Config:
    return shardwise.Config.from_dict({**CPU, **sections}).resolve(1)


PLANS: dict[str, Call] = {
    "propose nothing": lambda w: shardwise.propose_plan(),
    "propose None": lambda w: shardwise.propose_plan(None, batch(), 2),
    "propose class": lambda w: shardwise.propose_plan(Net, batch(), 2),
    "propose wrapped": lambda w: shardwise.propose_plan(nn.DataParallel(Net()), batch(), 2),
    "propose text": lambda w: shardwise.propose_plan("gpt2", batch(), 2),
    "propose tp 0": lambda w: shardwise.propose_plan(Net(), batch(), 0),
    "propose tp negative": lambda w: shardwise.propose_plan(Net(), batch(), -2),
    "propose tp text": lambda w: shardwise.propose_plan(Net(), batch(), "2"),
    "propose tp float": lambda w: shardwise.propose_plan(Net(), batch(), 2.0),
    "propose tp None": lambda w: shardwise.propose_plan(Net(), batch(), None),
    "propose tp 3": lambda w: shardwise.propose_plan(Net(), batch(), 3),
    "propose batch None": lambda w: shardwise.propose_plan(Net(), None, 2),
    "propose batch text": lambda w: shardwise.propose_plan(Net(), "a", 2),
    "propose batch numpy": lambda w: shardwise.propose_plan(Net(), np.ones((2, 4)), 2),
    "propose batch width": lambda w: shardwise.propose_plan(Net(), batch(5), 2),
    "propose batch names": lambda w: shardwise.propose_plan(Net(), {"input_ids": batch()}, 2),
    "propose small module": lambda w: shardwise.propose_plan(Net(), batch(), 2, small=Net()),
    "propose small one": lambda w: shardwise.propose_plan(Net(), batch(), 2, small=(Net(),)),
    "propose small text": lambda w: shardwise.propose_plan(Net(), batch(), 2, small="tiny"),
    "propose small class": lambda w: shardwise.propose_plan(Net(), batch(), 2, small=(Net, batch())),
    "propose nothing to split": lambda w: shardwise.propose_plan(nn.ReLU(), batch(), 2),
    "prove nothing": lambda w: shardwise.prove_plan(),
    "prove class": lambda w: proved(Net),
    "prove text": lambda w: proved("gpt2"),
    "prove batch text": lambda w: proved(given="a"),
    "prove batch numpy": lambda w: proved(given=np.ones((2, 4), dtype=np.float32)),
    "prove batch width": lambda w: proved(given=batch(5)),
    "prove plan text": lambda w: proved(plan="auto"),
    "prove plan list": lambda w: proved(plan=["column"]),
    "prove plan style": lambda w: proved(plan={"first": "columns", "last": "row"}),
    "prove plan style number": lambda w: proved(plan={"first": 1}),
    "prove plan module": lambda w: proved(plan={"second": "column"}),
    "prove plan key": lambda w: proved(plan={1: "column"}),
    "prove plan half": lambda w: proved(plan={"first": "column"}),
    "prove plan none": lambda w: proved(plan=None),
    "prove tp text": lambda w: proved(tp="2"),
    "prove tp 0": lambda w: proved(tp=0),
    "prove tp negative": lambda w: proved(tp=-2),
    "prove tp 3": lambda w: proved(tp=3),
    "prove sequence_parallel text": lambda w: proved(sequence_parallel="no"),
    "prove large_plan text": lambda w: proved(large_plan="auto"),
    "plan_layout nothing": lambda w: shardwise.plan_layout(),
    "plan_layout None": lambda w: shardwise.plan_layout(None, resolved()),
    "plan_layout dict": lambda w: shardwise.plan_layout(Net(), CPU),
    "plan_layout config None": lambda w: shardwise.plan_layout(Net(), None),
    "plan_layout unresolved": lambda w: shardwise.plan_layout(Net(), shardwise.Config()),
    "plan_layout rank": lambda w: shardwise.plan_layout(Net(), resolved(), rank="0"),
    "plan_layout rank outside": lambda w: shardwise.plan_layout(Net(), resolved(), rank=5),
    "plan_layout plan": lambda w: shardwise.plan_layout(Net(), resolved(), "auto"),
    "build_layout nothing": lambda w: shardwise.build_layout(),
    "build_layout class": lambda w: shardwise.build_layout(Net, resolved()),
    "build_layout dict": lambda w: shardwise.build_layout(Net(), CPU),
    "build_layout unresolved": lambda w: shardwise.build_layout(Net(), shardwise.Config()),
    "build_layout trained": lambda w: shardwise.build_layout(Net(), resolved(), trained="first"),
    "measure nothing": lambda w: shardwise.measure_units(),
    "measure class": lambda w: shardwise.measure_units(Net, batch()),
    "measure runs 0": lambda w: shardwise.measure_units(Net(), batch(), num_runs=0),
    "measure no runs": lambda w: shardwise.measure_units(cut(2), batch(), num_runs=0),
    "measure runs text": lambda w: shardwise.measure_units(Net(), batch(), num_runs="5"),
    "measure units text": lambda w: shardwise.measure_units(Net(), batch(), units="first"),
    "measure units unknown": lambda w: shardwise.measure_units(Net(), batch(), units=["second"]),
    "measure batch None": lambda w: shardwise.measure_units(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), None),
    "measure batch width": lambda w: shardwise.measure_units(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), batch(5)),
    "measure loss class": lambda w: shardwise.measure_units(Net(), batch(), loss_fn=nn.MSELoss),
    "measure loss text": lambda w: shardwise.measure_units(Net(), batch(), loss_fn="mse"),
}

FEED: dict[str, Call] = {
    "data nothing": lambda w: shardwise.data_loader(),
    "data no engine": lambda w: shardwise.data_loader([1, 2]),
    "data engine None": lambda w: shardwise.data_loader(None, Rows()),
    "data engine model": lambda w: shardwise.data_loader(Net(), Rows()),
    "data swapped": lambda w: shardwise.data_loader(Rows(), w.engine),
    "data None": lambda w: shardwise.data_loader(w.engine, None),
    "data generator": lambda w: shardwise.data_loader(w.engine, (x for x in [1])),
    "data set": lambda w: shardwise.data_loader(w.engine, {1, 2}),
    "data number": lambda w: shardwise.data_loader(w.engine, 3),
    "data class": lambda w: shardwise.data_loader(w.engine, Rows),
    "data empty": lambda w: shardwise.data_loader(w.engine, []),
    "data text": lambda w: shardwise.data_loader(w.engine, "rows.txt"),
    "data collate text": lambda w: shardwise.data_loader(w.engine, Rows(), collate_fn="default"),
    "data collate number": lambda w: shardwise.data_loader(w.engine, Rows(), collate_fn=3),
    "data collate of two": lambda w: shardwise.data_loader(w.engine, Rows(), collate_fn=lambda a, b: a),
    "data shuffle text": lambda w: shardwise.data_loader(w.engine, Rows(), shuffle="no"),
    "data shuffle None": lambda w: shardwise.data_loader(w.engine, Rows(), shuffle=None),
    "data seed text": lambda w: shardwise.data_loader(w.engine, Rows(), seed="a"),
    "data seed float": lambda w: shardwise.data_loader(w.engine, Rows(), seed=0.5),
    "data seed negative": lambda w: list(shardwise.data_loader(w.engine, Rows(), seed=-(2**70))),
    "data batch_size": lambda w: shardwise.data_loader(w.engine, Rows(), batch_size=2),
    "data sampler": lambda w: shardwise.data_loader(w.engine, Rows(), sampler=[1]),
    "data unknown option": lambda w: shardwise.data_loader(w.engine, Rows(), num_worker=2),
    "data num_workers text": lambda w: shardwise.data_loader(w.engine, Rows(), num_workers="2"),
    "data num_workers negative": lambda w: shardwise.data_loader(w.engine, Rows(), num_workers=-2),
    "data position": lambda w: shardwise.data_loader(w.engine, Rows()).load_state_dict(3),
    "data position empty": lambda w: shardwise.data_loader(w.engine, Rows()).load_state_dict({}),
    "data position None": lambda w: shardwise.data_loader(w.engine, Rows()).load_state_dict(None),
    "data position text": lambda w: shardwise.data_loader(w.engine, Rows(), seed=0).load_state_dict(
        {"num_samples": "x", "num_rows": 8, "seed": 0}
    ),
    "data position negative": lambda w: shardwise.data_loader(w.engine, Rows(), seed=0).load_state_dict(
        {"num_samples": -1, "num_rows": 8, "seed": 0}
    ),
    "stream nothing": lambda w: shardwise.stream_loader(),
    "stream engine": lambda w: shardwise.stream_loader(None, Stream()),
    "stream None": lambda w: shardwise.stream_loader(w.engine, None),
    "stream number": lambda w: shardwise.stream_loader(w.engine, 3),
    "stream generator": lambda w: shardwise.stream_loader(w.engine, (x for x in [1])),
    "stream iterator": lambda w: shardwise.stream_loader(w.engine, iter([1])),
    "stream text": lambda w: shardwise.stream_loader(w.engine, "rows"),
    "stream class": lambda w: shardwise.stream_loader(w.engine, Stream),
    "stream function": lambda w: shardwise.stream_loader(w.engine, lambda: iter([1])),
    "stream collate None": lambda w: shardwise.stream_loader(w.engine, Stream(), collate_fn=None),
    "stream collate text": lambda w: shardwise.stream_loader(w.engine, Stream(), collate_fn="a"),
    "stream shuffle": lambda w: shardwise.stream_loader(w.engine, Stream(), shuffle=True),
    "stream position": lambda w: shardwise.stream_loader(w.engine, Stream()).load_state_dict({}),
    "stream position list": lambda w: shardwise.stream_loader(w.engine, Stream()).load_state_dict([1]),
    "stream position text": lambda w: shardwise.stream_loader(w.engine, Stream()).load_state_dict(
        {"num_samples": "a", "epoch": 0}
    ),
    "stream position float": lambda w: shardwise.stream_loader(w.engine, Stream()).load_state_dict(
        {"num_samples": 0.5, "epoch": 0}
    ),
    "progress nothing": lambda w: shardwise.progress(),
    "progress engine": lambda w: shardwise.progress(Net()),
    "progress steps text": lambda w: shardwise.progress(w.engine, "400"),
    "progress steps 0": lambda w: shardwise.progress(w.engine, 0),
    "progress steps float": lambda w: shardwise.progress(w.engine, 4.5),
    "progress folder number": lambda w: shardwise.progress(w.engine, 4, 3),
    "progress flops text": lambda w: shardwise.progress(w.engine, 4, flops_per_token="6e9"),
    "progress flops negative": lambda w: shardwise.progress(w.engine, 4, flops_per_token=-1.0),
    "progress console text": lambda w: shardwise.progress(w.engine, 4, console="stderr"),
    "progress unknown": lambda w: shardwise.progress(w.engine, total=4),
    "a record of nothing": lambda w: inside(shardwise.progress(w.engine, 4, console=QUIET)).log(3),
    "steps of nothing": lambda w: inside(shardwise.progress(w.engine, 4, console=QUIET)).steps(3),
    "timeline nothing": lambda w: shardwise.save_timeline(),
    "timeline engine": lambda w: shardwise.save_timeline(None, w.folder / "a.json"),
    "timeline path": lambda w: shardwise.save_timeline(w.engine, None),
    "timeline path number": lambda w: shardwise.save_timeline(w.engine, 3),
    "timeline no path": lambda w: shardwise.save_timeline(w.engine),
    "init seed text": lambda w: shardwise.init(seed="a").__enter__(),
    "init seed float": lambda w: shardwise.init(0.5).__enter__(),
    "init seed bool": lambda w: shardwise.init(True).__enter__(),
    "init model": lambda w: shardwise.init(Net()).__enter__(),
    "init two": lambda w: shardwise.init(1, 2).__enter__(),
    "init device": lambda w: shardwise.init(device="meta").__enter__(),
}

LAYOUT = BlockLayout.from_blocks(torch.ones(2, 2).tril(), block=16, causal=True)
Q = torch.ones(1, 2, 32, 8)


def attended(q: Any = Q, k: Any = Q, v: Any = Q, layout: Any = LAYOUT, **options: Any) -> object:
    return block_sparse_attention(q, k, v, layout, **options)


MODELS: dict[str, Call] = {
    "layers nothing": lambda w: shardwise.LayerList(),
    "layers None": lambda w: shardwise.LayerList(None),
    "layers empty": lambda w: shardwise.LayerList([]),
    "layers text": lambda w: shardwise.LayerList("abc"),
    "layers number": lambda w: shardwise.LayerList([3]),
    "layers None inside": lambda w: shardwise.LayerList([nn.Linear(2, 2), None]),
    "layers class": lambda w: shardwise.LayerList([nn.Linear]),
    "layers module": lambda w: shardwise.LayerList(nn.Linear(2, 2)),
    "layers texts": lambda w: shardwise.LayerList(["linear"]),
    "spec nothing": lambda w: shardwise.LayerSpec(),
    "spec None": lambda w: shardwise.LayerSpec(None),
    "spec module": lambda w: shardwise.LayerList([shardwise.LayerSpec(nn.Linear(2, 2))]),
    "spec text": lambda w: shardwise.LayerSpec("linear"),
    "spec name number": lambda w: shardwise.LayerSpec(nn.Linear, 2, 2, name=3),
    "spec tied number": lambda w: shardwise.LayerSpec(nn.Linear, 2, 2, tied=3),
    "spec forward text": lambda w: shardwise.LayerSpec(nn.Linear, 2, 2, forward_fn="forward"),
    "spec arguments": lambda w: shardwise.LayerSpec(nn.Linear, 2).build(),
    "spec keyword": lambda w: shardwise.LayerSpec(nn.Linear, 2, 2, biass=False).build(),
    "spec name dotted": lambda w: shardwise.LayerList([shardwise.LayerSpec(nn.Linear, 2, 2, name="a.b")]),
    "q None": lambda w: attended(q=None),
    "q numpy": lambda w: attended(q=np.ones((1, 2, 32, 8))),
    "q dims": lambda w: attended(q=torch.ones(2, 32, 8)),
    "q integers": lambda w: attended(*[torch.ones(1, 2, 32, 8, dtype=torch.int64)] * 3),
    "k heads": lambda w: attended(k=torch.ones(1, 3, 32, 8), v=torch.ones(1, 3, 32, 8)),
    "k list": lambda w: attended(k=[1]),
    "v shape": lambda w: attended(v=torch.ones(1, 2, 32, 4)),
    "v dtype": lambda w: attended(v=Q.double()),
    "structure's length": lambda w: FixedSparsityConfig(num_heads=2).layout("100"),
    "structure without length": lambda w: FixedSparsityConfig(num_heads=2).layout(),
    "layout None": lambda w: attended(layout=None),
    "layout tensor": lambda w: attended(layout=torch.ones(2, 2)),
    "layout length": lambda w: attended(*[torch.ones(1, 2, 48, 8)] * 3),
    "dropout text": lambda w: attended(dropout="0.1"),
    "dropout 1": lambda w: attended(dropout=1.0),
    "dropout negative": lambda w: attended(dropout=-0.1),
    "dropout nan": lambda w: attended(dropout=float("nan")),
    "dropout None": lambda w: attended(dropout=None),
    "scale text": lambda w: attended(scale="8"),
    "scale nan": lambda w: attended(scale=float("nan")),
    "padding list": lambda w: attended(key_padding=[True] * 32),
    "padding integers": lambda w: attended(key_padding=torch.ones(1, 32)),
    "padding shape": lambda w: attended(key_padding=torch.ones(2, 32, dtype=torch.bool)),
    "bias text": lambda w: attended(bias="a"),
    "bias shape": lambda w: attended(bias=torch.ones(3)),
    "blocks text": lambda w: BlockLayout.from_blocks("a", block=16),
    "blocks None": lambda w: BlockLayout.from_blocks(None, block=16),
    "blocks dims": lambda w: BlockLayout.from_blocks(torch.ones(2), block=16),
    "block 0": lambda w: BlockLayout.from_blocks(torch.ones(2, 2), block=0),
    "block text": lambda w: BlockLayout.from_blocks(torch.ones(2, 2), block="16"),
    "sdpa nothing": lambda w: shardwise.sparse_sdpa(),
    "sdpa None": lambda w: shardwise.sparse_sdpa(None).__enter__(),
    "sdpa text": lambda w: shardwise.sparse_sdpa("fixed").__enter__(),
    "sdpa class": lambda w: shardwise.sparse_sdpa(BlockLayout).__enter__(),
    "sdpa otherwise": lambda w: shardwise.sparse_sdpa(LAYOUT, otherwise="error").__enter__(),
    "sdpa otherwise None": lambda w: shardwise.sparse_sdpa(LAYOUT, otherwise=None).__enter__(),
    "sdpa module class": lambda w: shardwise.sparse_sdpa_module(Net, LAYOUT),
    "sdpa module None": lambda w: shardwise.sparse_sdpa_module(None, LAYOUT),
    "sdpa module swapped": lambda w: shardwise.sparse_sdpa_module(LAYOUT, Net()),
    "sdpa module structure": lambda w: shardwise.sparse_sdpa_module(Net(), 3),
}

CONFIG: dict[str, Call] = {
    "dict nothing": lambda w: shardwise.Config.from_dict(),
    "dict None": lambda w: shardwise.Config.from_dict(None),
    "dict list": lambda w: shardwise.Config.from_dict([1]),
    "dict text": lambda w: shardwise.Config.from_dict("zero"),
    "dict number key": lambda w: shardwise.Config.from_dict({1: 2}),
    "dict None section": lambda w: shardwise.Config.from_dict({"zero": None}),
    "dict list section": lambda w: shardwise.Config.from_dict({"zero": [1]}),
    "dict number leaf": lambda w: shardwise.Config.from_dict({"zero": {1: 2}}),
    "dict tensor": lambda w: shardwise.Config.from_dict({"optimizer": {"lr": torch.ones(2)}}),
    "dict bool": lambda w: shardwise.Config.from_dict({"zero": {"stage": True}}),
    "dict text number": lambda w: shardwise.Config.from_dict({"zero": {"stage": "3"}}),
    "dict object": lambda w: shardwise.Config.from_dict({"run": {"dir": Net()}}),
    "constructor": lambda w: shardwise.Config(zeroo={}),
    "constructor section": lambda w: shardwise.Config(zero=3),
    "constructor positional": lambda w: shardwise.Config({"zero": {"stage": 3}}),
    "toml None": lambda w: shardwise.Config.from_toml(None),
    "toml number": lambda w: shardwise.Config.from_toml(3),
    "toml missing": lambda w: shardwise.Config.from_toml("/nowhere.toml"),
    "toml folder": lambda w: shardwise.Config.from_toml(w.folder),
    "toml NUL": lambda w: shardwise.Config.from_toml("a\0.toml"),
    "json None": lambda w: shardwise.Config.from_json(None),
    "json dict": lambda w: shardwise.Config.from_json({"zero": {}}),
    "json list": lambda w: shardwise.Config.from_json("[]"),
    "json text": lambda w: shardwise.Config.from_json("zero"),
    "json bytes": lambda w: shardwise.Config.from_json(b"{}"),
    "override text": lambda w: shardwise.Config().override("zero.stage=3"),
    "override None": lambda w: shardwise.Config().override(None),
    "override dict": lambda w: shardwise.Config().override({"zero.stage": 3}),
    "override number": lambda w: shardwise.Config().override([3]),
    "override key": lambda w: shardwise.Config().override(["zero.stege=3"]),
    "override empty": lambda w: shardwise.Config().override(["="]),
    "override section": lambda w: shardwise.Config().override(["zero=3"]),
    "override deep": lambda w: shardwise.Config().override(["zero.stage.a=3"]),
    "resolve nothing": lambda w: shardwise.Config().resolve(),
    "resolve text": lambda w: shardwise.Config().resolve("8"),
    "resolve 0": lambda w: shardwise.Config().resolve(0),
    "resolve None": lambda w: shardwise.Config().resolve(None),
    "resolve float": lambda w: shardwise.Config().resolve(2.0),
    "resolve bool": lambda w: shardwise.Config().resolve(True),
}


def assert_refused(call: Call, world: World) -> None:
    got: object = None
    try:
        got = call(world)
    except CodedError as error:
        got = error
    except Exception as error:
        pytest.fail(f"{type(error).__name__}: {str(error)[:200]}")
    finally:
        world.engine.zero_grad()
    assert isinstance(got, CodedError), f"was taken, and gave {str(got)[:80]!r}"
    text = str(got)
    assert got.code, f"has no code: {text}"
    assert "\n" not in text, text
    assert 10 < len(text) < 700, text


@calls_of(INITIALIZE)
def test_starting(call: Call, world: World) -> None:
    assert_refused(call, world)


@calls_of(TRAIN)
def test_training(call: Call, world: World) -> None:
    assert_refused(call, world)


@calls_of(STEP)
def test_steps_of_own_loops(call: Call, world: World) -> None:
    assert_refused(call, world)


@calls_of(STATES)
def test_states(call: Call, world: World) -> None:
    assert_refused(call, world)


@calls_of(CHECKPOINTS)
def test_checkpoints(call: Call, world: World) -> None:
    assert_refused(call, world)


@calls_of(PLANNER)
def test_planner(call: Call, world: World) -> None:
    assert_refused(call, world)


@calls_of(PLANS)
def test_plans(call: Call, world: World) -> None:
    assert_refused(call, world)


@calls_of(FEED)
def test_loaders_and_records(call: Call, world: World) -> None:
    assert_refused(call, world)


@calls_of(MODELS)
def test_layers_and_attention(call: Call, world: World) -> None:
    assert_refused(call, world)


@calls_of(CONFIG)
def test_configs(call: Call, world: World) -> None:
    assert_refused(call, world)


def step_with(config: Any = CPU, **options: Any) -> object:
    engine = start(config=config, **options)
    try:
        return engine.train_step([batch()])
    finally:
        engine.close()


def scaled(scale: float, output: Tensor, batch: Tensor) -> Tensor:
    return output.sum() * scale


class Sub(Net):
    """A subclass of a model."""


class Loss:
    """A loss that is an object."""

    def __call__(self, output: Tensor, batch: Tensor) -> Tensor:
        return output.square().mean()


class Place:
    """A path of another library."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)


def kept(path: Any, world: World, **options: Any) -> object:
    world.engine.save(path, **options)
    return world.engine.load(path, tag=options.get("tag", ""))


def own_optimizer(model: nn.Module, scheduled: bool = False) -> object:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer) if scheduled else None
    return start(model, optimizer=optimizer, scheduler=scheduler).close()


def several(world: World) -> object:
    loss = world.engine.model(batch()).square().mean()
    return shardwise.backward(loss, (world.engine,), count=np.float32(2))


RIGHT: dict[str, Call] = {
    "a subclass": lambda w: start(Sub()).close(),
    "no config": lambda w: shardwise.initialize(Net()).close(),
    "a Config": lambda w: step_with(shardwise.Config.from_dict(CPU)),
    "a UserDict": lambda w: step_with(UserDict(CPU)),
    "an OrderedDict": lambda w: step_with(OrderedDict(CPU)),
    "config by name": lambda w: shardwise.initialize(model=Net(), config=CPU, loss_fn=loss_of).close(),
    "a loss that is a module": lambda w: start(loss_fn=nn.MSELoss()).close(),
    "a loss that is an object": lambda w: step_with(loss_fn=Loss()),
    "a loss that is a partial": lambda w: step_with(loss_fn=partial(scaled, 2.0)),
    "a loss with a default": lambda w: step_with(loss_fn=lambda output, batch, scale=2.0: output.sum() * scale),
    "a loss of any arguments": lambda w: step_with(loss_fn=lambda *args: args[0].sum()),
    "a loss from torch": lambda w: start(loss_fn=F.mse_loss).close(),
    "a bound method": lambda w: step_with(loss_fn=Loss().__call__),
    "an optimizer's class": lambda w: step_with(optimizer=torch.optim.SGD),
    "an optimizer by partial": lambda w: step_with(optimizer=partial(torch.optim.AdamW, lr=1e-3)),
    "an optimizer by a function": lambda w: step_with(optimizer=lambda groups: torch.optim.Adam(groups, lr=1e-3)),
    "an optimizer": lambda w: own_optimizer(Net()),
    "a scheduler": lambda w: own_optimizer(Net(), scheduled=True),
    "a plan that is not used": lambda w: step_with(plan=SPLIT),
    "a plan of lists": lambda w: step_with(plan={"first": ["column"], "last": "row"}),
    "a tuple of batches": lambda w: w.engine.train_step((batch(),)),
    "a tensor": lambda w: w.engine.train_step(batch()),
    "batches by name": lambda w: w.engine.train_step(batches=[batch()]),
    "a batch of a tuple": lambda w: with_loss(lambda output, given: (output.sum(), 2)),
    "fp64 inputs": lambda w: w.engine.train_step([batch().double()]),
    "eval of a tuple": lambda w: w.engine.eval_step((batch(),)),
    "eval of a tensor": lambda w: w.engine.eval_step(batch()),
    "flags as 0 and 1": lambda w: w.engine.load(w.folder / "good", strict=1, weights_only=0),
    "flags of numpy": lambda w: w.engine.load(w.folder / "good", strict=np.bool_(True)),
    "save by str": lambda w: kept(str(w.folder / "s"), w),
    "save by Path": lambda w: kept(w.folder / "p", w),
    "save by another path": lambda w: kept(Place(w.folder / "o"), w),
    "save by tag": lambda w: kept(w.folder / "t", w, tag="best"),
    "save keep numpy": lambda w: kept(w.folder / "k", w, keep_last=np.int64(2), keep_every=np.int32(10)),
    "save extra": lambda w: kept(w.folder / "e", w, extra={"tokens": 3}, contents="all", wait=True),
    "save data": lambda w: w.engine.save(w.folder / "d", data=shardwise.data_loader(w.engine, Rows())),
    "import": lambda w: w.engine.import_weights(str(w.engine.export_weights(str(w.folder / "x"), dtype="fp32"))),
    "import names": lambda w: w.engine.import_weights(w.engine.export_weights(w.folder / "y"), names={"a": "b"}),
    "export files": lambda w: w.engine.export_weights(w.folder / "z", files=(str(p) for p in [])),
    "read numpy rank": lambda w: w.engine.read("first.weight", to_rank=np.int64(0)),
    "read state": lambda w: w.engine.read("first.weight", "master"),
    "write array": lambda w: w.engine.write("first.weight", np.zeros((8, 4), dtype=np.float32)),
    "write list": lambda w: w.engine.write("last.bias", [0.5, 1.0]),
    "write integers": lambda w: w.engine.write("last.bias", torch.ones(2, dtype=torch.int64)),
    "write parameter": lambda w: w.engine.write("last.bias", nn.Parameter(torch.ones(2))),
    "write rank": lambda w: w.engine.write("last.bias", torch.ones(2), from_rank=0),
    "offload": lambda w: (w.engine.offload(("optimizer",), "host", pin_memory=False), w.engine.reload()),
    "offload a set": lambda w: inside(w.engine.offloaded(["grads"])),
    "gathered": lambda w: inside(w.engine.gathered(write=False)),
    "gathered() a generator": lambda w: inside(shardwise.gathered(w.engine.model.parameters())),
    "gathered() one": lambda w: inside(shardwise.gathered(w.engine.model.first.weight, modifier_rank=0)),
    "gathered() another's": lambda w: inside(shardwise.gathered(list(Net().parameters()))),
    "gathered() none": lambda w: inside(shardwise.gathered([])),
    "gathered() values": lambda w: inside(shardwise.gathered(dict(w.engine.model.named_parameters()).values())),
    "several engines in a tuple": several,
    "several: count of numpy": several,
    "plan": lambda w: planned("tiny", "h100:1", global_batch=np.int64(8), seq_len=256, settings=("mesh.tp=1",)),
    "simulate a class": lambda w: simulated(Net),
    "simulate a module": lambda w: simulated(Net()),
    "simulate numpy": lambda w: simulated(rank=np.int64(1), world_size=np.int64(2), device_gib=1),
    "simulate a partial": lambda w: simulated(partial(Net, 4), make_batch=partial(batch, 4)),
    "simulate a default": lambda w: simulated(lambda width=4: Net(width), make_batch=lambda width=4: batch(width)),
    "simulate an optimizer": lambda w: simulated(optimizer=torch.optim.AdamW),
    "estimate": lambda w: estimated(np.int64(1000), num_gpus=np.int32(2), stages=(np.int64(0), 3)),
    "estimate a module": lambda w: estimated(Net(), stages=range(1, 4), config={"tiers": {"optimizer": "host"}}),
    "propose": lambda w: shardwise.propose_plan(Net(), batch(), np.int64(2)),
    "propose small": lambda w: shardwise.propose_plan(Net(), batch(), tp=2, small=[Net(), batch()]),
    "prove": lambda w: proved(tp=np.int64(2)),
    "layouts": lambda w: (shardwise.plan_layout(Net(), resolved()), shardwise.build_layout(Net(), resolved())),
    "trained": lambda w: shardwise.build_layout(Net(), resolved(), trained={"first.weight"}),
    "measure": lambda w: shardwise.measure_units(cut(2), batch(), num_runs=np.int64(1), units=("0", "1")),
    "data": lambda w: next(iter(shardwise.data_loader(w.engine, Rows(), shuffle=False))),
    "data list": lambda w: next(iter(shardwise.data_loader(w.engine, [torch.ones(4)] * 4, seed=np.int64(3)))),
    "data options": lambda w: next(
        iter(shardwise.data_loader(w.engine, Rows(), num_workers=0, collate_fn=torch.stack))
    ),
    "data tuple": lambda w: next(iter(shardwise.data_loader(w.engine, tuple(torch.ones(4, 4)), shuffle=1))),
    "data of torch": lambda w: shardwise.data_loader(w.engine, torch.utils.data.TensorDataset(torch.ones(4, 4))),
    "data numpy": lambda w: next(iter(shardwise.data_loader(w.engine, np.ones((4, 4))))),
    "data position": lambda w: shardwise.data_loader(w.engine, Rows()).load_state_dict(
        shardwise.data_loader(w.engine, Rows()).state_dict()
    ),
    "data position unshuffled": lambda w: shardwise.data_loader(w.engine, Rows(), shuffle=False).load_state_dict(
        shardwise.data_loader(w.engine, Rows(), shuffle=False).state_dict()
    ),
    "stream": lambda w: next(iter(shardwise.stream_loader(w.engine, Stream(), collate_fn=torch.stack))),
    "stream list": lambda w: next(iter(shardwise.stream_loader(w.engine, [torch.ones(4)] * 4))),
    "stream range": lambda w: next(iter(shardwise.stream_loader(w.engine, range(4)))),
    "stream position": lambda w: shardwise.stream_loader(w.engine, Stream()).load_state_dict(
        {"num_samples": 2, "epoch": 0}
    ),
    "progress": lambda w: shardwise.progress(w.engine, np.int64(400), flops_per_token=10**6),
    "timeline": lambda w: shardwise.save_timeline(w.engine, str(w.folder / "timeline.json")),
    "init": lambda w: inside(shardwise.init()),
    "init seed": lambda w: inside(shardwise.init(np.int64(-3))),
    "layers": lambda w: shardwise.LayerList(each for each in (nn.Linear(4, 4), torch.tanh)),
    "layers of specs": lambda w: shardwise.LayerList((shardwise.LayerSpec(nn.Linear, 4, 4, bias=False, name="a"),)),
    "layers of functions": lambda w: shardwise.LayerList([shardwise.LayerSpec(lambda width: Net(width), 4)]),
    "attention": lambda w: attended(dropout=0, scale=1),
    "attention of numpy": lambda w: attended(dropout=np.float64(0.0), scale=np.float64(0.5)),
    "blocks": lambda w: BlockLayout.from_blocks(torch.ones(2, 2), block=np.int64(16)),
    "sdpa": lambda w: inside(shardwise.sparse_sdpa(LAYOUT, otherwise="dense")),
    "config sections": lambda w: shardwise.Config(zero={"stage": 3}),
    "config override": lambda w: shardwise.Config().override(("zero.stage=3",)).resolve(np.int64(2)),
    "config copies": lambda w: copy.deepcopy(pickle.loads(pickle.dumps(resolved()))),
    "config round trip": lambda w: shardwise.Config.from_json(resolved().to_json()),
}


@calls_of(RIGHT)
def test_right_calls_go_on(call: Call, world: World) -> None:
    call(world)
    world.engine.zero_grad()
    assert math.isfinite(world.engine.train_step([batch()]).loss)


def test_a_number_of_numpy_is_taken_as_one_of_python(world: World) -> None:
    loader = shardwise.data_loader(world.engine, Rows(), seed=np.int64(3))
    assert isinstance(loader, EngineDataLoader)
    assert type(loader.state_dict()["seed"]) is int


def test_a_state_that_comes_later_is_no_unknown_one() -> None:
    with start(config={"run": {"device": "cpu"}}) as engine:
        assert engine.read("last.bias", "exp_avg") is None
        with refused("unknown-state", "velocity", "param, master, grad"):
            engine.read("last.bias", "velocity")
