"""Step whole tensors under sharding by any optimizer: one owner has a parameter's states, and steps it whole.

For a step, each rank sends the gradients and the masters of its pieces to the owners, whose optimizer sees parameters
of their own shapes, and gets back its part of the new masters. Between steps the owner's parameters have no values: the
masters are in the pieces alone, so what is written there counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.comm.collectives import Comm
from shardwise.comm.merged import exchange_texts, merge_parts
from shardwise.comm.mesh import CommGroups
from shardwise.layout.matrices import OwnedMatrix, assign_whole
from shardwise.layout.param_groups import ParamSpec
from shardwise.runtime.torch_private import note_step, set_data
from shardwise.zero.group_step import FirstStates, HostUpdate, OptimizerUpdate, TorchStep, odd_states
from shardwise.zero.owner_exchange import OwnerExchange
from shardwise.zero.param_group import ParamGroup
from shardwise.zero.stored_state import ParamPiece


class WholeParameters:
    """Brings whole tensors to their owners for as long as a function runs, and their new values back.

    Attributes:
        views: the parameters that this rank owns, by name, as the optimizer sees them.
    """

    def __init__(self, comms: CommGroups, at_one: bool) -> None:
        assert comms.matrices is not None, "an optimizer of whole tensors has a group of ranks for them"
        self.comm: Comm = comms.matrices
        self.views: dict[str, nn.Parameter] = {}
        self.at_one = at_one
        self._owned: tuple[OwnedMatrix, ...] = ()
        self._pieces: dict[str, ParamPiece] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._exchange = OwnerExchange((), (), self.comm)

    def follow(self, groups: Sequence[ParamGroup], pieces: Sequence[ParamPiece], names: Collection[str]) -> None:
        """Step these parameters from now on; those that were there keep their owners.

        Args:
            groups: all of the engine's groups with gradients.
            pieces: what this rank holds of the parameters.
            names: of the parameters that the optimizer holds.
        """
        kept = self.owners
        specs = [group.spec for group in groups]
        self._owned = assign_whole(specs, names, kept, at_one=self.at_one)
        self._pieces = {piece.name: piece for piece in pieces if piece.name in self.owners}
        self._dtypes = {matrix.place.name: groups[matrix.group].master.dtype for matrix in self._owned}
        self._exchange = OwnerExchange(groups, self._pieces, self.comm)
        before = self.views
        self.views = {}
        for matrix in self._owned:
            name, group = matrix.place.name, groups[matrix.group]
            if matrix.owner == self.comm.rank:
                away = group.spec.tiers.optimizer != "device"
                device = torch.device("cpu") if away else self.comm.device
                empty = _without_values(matrix.place.global_shape, group.master.dtype, device)
                self.views[name] = before[name] if name in before else nn.Parameter(empty)

    @property
    def owners(self) -> dict[str, int]:
        """Return the owners by name of the parameter."""
        return {matrix.place.name: matrix.owner for matrix in self._owned}

    @property
    def places(self) -> dict[str, ParamSpec]:
        """Return by name the parameters that this rank owns."""
        return {matrix.place.name: matrix.place for matrix in self._owned if matrix.place.name in self.views}

    def run(
        self, act: Callable[[], object], used: Mapping[str, bool], gradient_of: Callable[[ParamPiece], Tensor]
    ) -> None:
        """Call `act` while the optimizer's parameters have values and gradients. All ranks that share tensors call it.

        Args:
            used: whether each parameter, by name, got a gradient on some rank; those that are not there did not.
            gradient_of: returns the final gradient of a piece, on the device.
        """
        views, device, dtypes = self.views, self.comm.device, self._dtypes
        stepped = [matrix for matrix in self._owned if used.get(matrix.place.name)]
        masters = {name: _master_of(piece, device) for name, piece in self._pieces.items()}
        gradients = {name: gradient_of(piece) for name, piece in self._pieces.items() if used.get(name)}
        try:
            for name, whole in self._exchange.bring(self._owned, masters, dtypes, "masters to step whole"):
                set_data(views[name], whole.to(views[name].device))
            for name, whole in self._exchange.bring(stepped, gradients, dtypes, "gradients to step whole"):
                views[name].grad = whole.to(views[name].device)
            del masters, gradients
            act()
            made = {name: view.detach().to(device).contiguous() for name, view in views.items()}
        # After an error too: otherwise whole tensors of all that this rank owns would stay in its memory.
        finally:
            for name, place in self.places.items():
                views[name].grad = None
                set_data(views[name], _without_values(place.global_shape, dtypes[name], views[name].device))
        for name, values in self._exchange.give_back(self._owned, made, dtypes, "masters stepped whole"):
            piece = self._pieces[name]
            piece.group.master.write(piece.start, values)

    def close(self) -> None:
        """Forget the parameters."""
        self.views.clear()
        self._pieces.clear()
        self._owned = ()
        self._exchange = OwnerExchange((), (), self.comm)


class WholeStep(TorchStep):
    """Lets torch's optimizer step all parameters whole, at their owners."""

    def __init__(
        self, optimizer: Optimizer, groups: Sequence[ParamGroup], whole: WholeParameters, first_states: FirstStates
    ) -> None:
        super().__init__(optimizer, groups, (), first_states)
        self._whole = whole

    @property
    def views(self) -> Mapping[str, nn.Parameter]:
        return self._whole.views

    def step(self, update: OptimizerUpdate) -> list[HostUpdate]:
        # What is stored off the device is brought there, and written back.
        for group in self._groups:
            group.await_step()
        # One that steps all together may not take none; the others count their steps in their groups.
        steps = bool(self.views) or not self._whole.at_one
        act = update.hooks.step_torch if steps else partial(note_step, self._optimizer)
        self._whole.run(act, update.used, update.means())
        update.gradients.clear()
        return []

    def odd_states(self) -> Iterator[tuple[str, str, Tensor]]:
        for name, view in self.views.items():
            for state, value in odd_states(self._optimizer.state.get(view, {}), view):
                yield name, state, value

    def change_weights(self, change: Callable[[], object]) -> None:
        self._whole.run(change, {}, lambda piece: piece.view)

    def close(self) -> None:
        self._whole.close()


def _master_of(piece: ParamPiece, device: torch.device) -> Tensor:
    return piece.group.master.read(piece.start, piece.stop).to(device)


def _without_values(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor that has a shape and takes no memory; writing into it raises."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape))


@dataclass(frozen=True)
class StateKind:
    """Describes an optimizer's state.

    Attributes:
        value: of a state that is one number; None for a tensor.
        shape: of a tensor that has not the parameter's shape; None for one that has.
    """

    dtype: str
    value: float | None
    shape: tuple[int, ...] | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the dtype."""
        return getattr(torch, self.dtype)


def kinds_of(whole: WholeParameters, optimizer: Optimizer, name: str) -> dict[str, StateKind]:
    """Return the states of a parameter, which ranks learn from its owner. All ranks that share tensors call it."""
    view = whole.views.get(name)
    own = {} if view is None else {key: asdict(kind) for key, kind in _own_kinds(optimizer, view)}
    texts = exchange_texts(whole.comm, json.dumps(own), f"optimizer states of {name}")
    known = {key: each for text in texts for key, each in json.loads(text).items()}
    return {
        key: StateKind(each["dtype"], each["value"], None if each["shape"] is None else tuple(each["shape"]))
        for key, each in known.items()
    }


def read_whole(
    whole: WholeParameters, optimizer: Optimizer, name: str, state: str, kind: StateKind, numel: int
) -> Tensor:
    """Return a tensor state from its owner, 1-D. All ranks that share tensors call it."""
    view = whole.views.get(name)
    own = None if view is None else optimizer.state[view][state].detach().to(whole.comm.device)
    length = numel if kind.shape is None else torch.Size(kind.shape).numel()
    return merge_parts(whole.comm, own, 0, length, kind.torch_dtype, f"{state} of {name}")


def _own_kinds(optimizer: Optimizer, view: nn.Parameter) -> Iterator[tuple[str, StateKind]]:
    for key, value in optimizer.state.get(view, {}).items():
        if isinstance(value, int | float) or (isinstance(value, Tensor) and not value.dim()):
            yield key, StateKind(_dtype_name(torch.as_tensor(value)), float(value))
        elif isinstance(value, Tensor):
            shape = None if value.shape == view.shape else tuple(value.shape)
            yield key, StateKind(_dtype_name(value), None, shape)


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
