"""Finds what other code writes into the parameters of a group, of which their master and shard know nothing."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shardwise.comm.consistency import hash_of_bits
from shardwise.config.resolve import ConfigError
from shardwise.layout.param_groups import GroupSpec
from shardwise.runtime.torch_private import plain_torch_functions, set_data, version, versions


class ParamWrites:
    """Says whether the parameters of a group were written: in place by their versions, else where `data` was read."""

    def __init__(self, spec: GroupSpec, parameters: Sequence[nn.Parameter], full: Tensor) -> None:
        self._spec = spec
        self._parameters = parameters
        self._full = full
        self._versions = versions(parameters)
        self._is_refused = False  # the new versions are
        self._hashes: dict[int, Tensor | None] = {}  # of the parameters whose `data` was read

    def note_data(self, index: int, value: Tensor | None, is_held: bool) -> None:
        """Note that a present parameter's `data` is read, or set it: no version counts what is written there.

        Args:
            value: what it is set to; None where it is read.
            is_held: the parameter is inside `gathered`, at whose end what was written is asked for.
        """
        if index not in self._hashes:
            self._hashes[index] = self._hash(index) if is_held else None
        if value is not None:
            self._assign(index, value)

    def check(self) -> None:
        """Raise where the engine cannot follow what other code has done to a parameter.

        Raises:
            ConfigError: a parameter was moved since the engine was made, or a trained one was written inside
                `gathered` that takes nothing over; names the parameter.
        """
        storage = self._full.untyped_storage()
        with plain_torch_functions():
            for index, (parameter, place) in enumerate(zip(self._parameters, self._spec.params, strict=True)):
                if parameter.untyped_storage() is not storage and not self._adopt(index):
                    raise ConfigError(
                        "parameter-moved",
                        f"parameter {place.name} was moved or converted after initialize (model.to, model.half, "
                        "p.data = ...), but the engine keeps it in a buffer of its own; convert the model before "
                        "initialize, and set precision.param",
                    )
                if self._is_refused and version(parameter) != self._versions[index]:
                    raise ConfigError(
                        "parameter-written",
                        f"parameter {place.name} was written inside engine.gathered(), but the engine trains a master "
                        "of its own; write inside `with engine.gathered(write=True):`",
                    )

    @property
    def are_followed(self) -> bool:
        """Say whether a parameter may have been written in a way that the engine follows."""
        return not self._is_refused and (bool(self._hashes) or self._has_new_version)

    @property
    def are_there(self) -> bool:
        """Say whether a parameter was written in place since the engine was made, or in `data` inside `gathered`."""
        return self._has_new_version or self.written_data is not None

    @property
    def written_data(self) -> str | None:
        """Return the name of a parameter that was written through its `data` inside `gathered`; None for none."""
        for index, before in self._hashes.items():
            if before is not None and not torch.equal(before, self._hash(index)):
                return self._spec.params[index].name
        return None

    def refuse_new(self) -> None:
        """Let `check` refuse what has been written into trained parameters, which are not taken over."""
        self._is_refused = self._spec.trainable and self._has_new_version

    def forget_data(self) -> None:
        """Take over nothing of what has been written through `data`."""
        self._hashes.clear()

    def accept(self, index: int | None = None) -> None:
        """Accept values as they are, of one parameter or of all: they were written on purpose, the master with them."""
        if index is None:
            self._hashes.clear()
            self._is_refused = False
        for each in range(len(self._parameters)) if index is None else (index,):
            self._versions[each] = version(self._parameters[each])

    @property
    def _has_new_version(self) -> bool:
        with plain_torch_functions():
            return versions(self._parameters) != self._versions

    def _assign(self, index: int, value: Tensor) -> None:
        """Set a parameter's `data`; where nothing trains it, its values go where they are stored."""
        parameter = self._parameters[index]
        with plain_torch_functions(), torch.no_grad():
            if self._spec.trainable or not _is_like(value, parameter):
                set_data(parameter, value)
            elif value.data_ptr() != parameter.data_ptr():
                parameter.view_as(parameter).copy_(value)

    def _adopt(self, index: int) -> bool:
        """Put a frozen parameter's new data where its values are stored; say whether it could be."""
        parameter, place = self._parameters[index], self._spec.params[index]
        if self._spec.trainable or self._spec.is_opaque or self._full.untyped_storage().nbytes() == 0:
            return False
        view = self._full[place.offset : place.offset + place.numel].view(place.shape)
        if not _is_like(parameter, view):
            return False
        with torch.no_grad():
            view.copy_(parameter)
        set_data(parameter, view)
        return True

    def _hash(self, index: int) -> Tensor:
        """Return a number that changes with the parameter's bits."""
        place = self._spec.params[index]
        return hash_of_bits(self._full[place.offset : place.offset + place.numel])


def _is_like(value: Tensor, target: Tensor) -> bool:
    return (value.shape, value.dtype, value.device) == (target.shape, target.dtype, target.device)
