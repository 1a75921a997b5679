"""Gather a group's parameters: as they are or encoded, from all ranks or from the few that share a secondary shard.

With `precision.gather`, ranks send codes, and each decodes all slices, its own too: so every rank computes with the
same bits, in every stage. The shard, or the master, keeps the exact values.

With `zero.secondary_shard = k`, a rank keeps a k-th of what it has gathered. Until the parameters change, they are
gathered again among the k ranks that have all of them: inside a node, where the first gather crosses nodes. Here 4
ranks have a shard each, and k = 2:

    first gather    ranks 0 1 2 3   each sends its shard
                    ranks 0 and 2 keep the first half, ranks 1 and 3 the second
    later gathers   ranks 0 1       each sends its half, and so do ranks 2 3 among each other
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from shardwise.comm.collectives import AsyncWork, Comm
from shardwise.layout.codec import BLOCK_NUMEL
from shardwise.layout.layout import Layout
from shardwise.layout.param_groups import GroupSpec
from shardwise.layout.wire_codec import WireCodec, part_numel
from shardwise.offload.step_pipeline import CHUNK_NUMEL
from shardwise.offload.storage import StateStorage
from shardwise.runtime.memory_tracker import Category
from shardwise.runtime.streams import Event
from shardwise.zero.resources import ShardingResources

MOST_DECODING: Final = 2
"""Groups whose codes are under way at once, after a step or where all are gathered: more would take memory alone."""


class GroupGather:
    """Gathers the parameters of one group into its flat buffer.

    Args:
        spec: the group's spec.
        layout: says how they are sent.
        resources: shared by the engine's groups.
        full: the flat buffer.

    Attributes:
        codec: how they are encoded; None for as they are.
        secondary: the secondary shard, 1-D; None without any.
    """

    def __init__(self, spec: GroupSpec, layout: Layout, resources: ShardingResources, full: Tensor) -> None:
        self.codec = layout.gather_codec(spec)
        self.secondary: Tensor | None = None
        self._is_current = False  # what the secondary shard holds
        self._name = f"unshard {spec.name}"
        self._full = full
        self._slice = slice(*spec.shard_range(resources.comms.shards.rank))
        self._wire_bytes = layout.gather_bytes(spec) * spec.num_shards
        self._shards: Comm = resources.comms.shards
        self._near: Comm | None = resources.comms.secondary
        self._is_simulated = self._shards.is_simulated  # then codecs take memory, and need not work on all of it
        self._pool = resources.pool
        self._decoding = resources.decoding
        self._errors = resources.codec_errors
        if num_bytes := layout.secondary_bytes(spec):
            dtype = full.dtype if self.codec is None else torch.uint8
            self.secondary = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=full.device)
            resources.tracker.track(self.secondary, Category.PARAMETERS)

    @property
    def has_copies(self) -> bool:
        """Say whether what is written into `full` or the shard alone does not count: it exists in another form too."""
        return self.codec is not None or self.secondary is not None

    def forget(self) -> None:
        """Note that the parameters have changed: the next gather is from all ranks."""
        self._is_current = False

    def start(self, shard: StateStorage | None, allocate: Callable[[], None]) -> AsyncWork:
        """Start to make all of `full` valid.

        Args:
            shard: this rank's exact slice; None if it is in `full`.
            allocate: called before `full` is written.
        """
        near = self._near if self._is_current else None
        comm = near or self._shards
        if self.codec is None:
            allocate()
            wire = self._full
        else:
            wire = self._pool.acquire(self._wire_bytes, torch.uint8)
        own, fetched = wire.view(comm.world_size, -1)[comm.rank], Event(None)
        if near is not None and self.secondary is not None:
            own.copy_(self.secondary)
        elif self.codec is not None:
            self._encode(self.codec, shard, own)
        elif shard is not None:
            fetched = shard.fetch(own)
        gathered = comm.all_gather(wire, self._name)

        def finish() -> None:
            fetched.wait()
            gathered.wait()
            self._keep(wire)
            if self.codec is not None:
                allocate()
                self._decode(self.codec, wire)
                self._pool.release(wire)

        work = AsyncWork(finish)
        if self.codec is not None:
            self._decoding.append(work)
            while len(self._decoding) > MOST_DECODING:
                self._decoding.popleft().wait()
        return work

    def recode(self) -> None:
        """Encode and decode all of `full`, where it has exact values."""
        for part in self._full.split(CHUNK_NUMEL):
            if self.codec is not None:
                sent = self.codec.encode(part)
                self._measure(self.codec, part, sent)
                self.codec.decode(sent, part)
            if self._is_simulated:
                return  # one is as large as another

    def shown(self, values: Tensor) -> Tensor:
        """Return values as the model computes with them.

        Args:
            values: 1-D, of one parameter or of the flat buffer, from a block's border on.
        """
        rounded = values.to(self._full.dtype)
        if self.codec is None:
            return rounded
        padded = torch.nn.functional.pad(rounded, (0, -rounded.numel() % BLOCK_NUMEL))
        return self.codec.decode(self.codec.encode(padded), torch.empty_like(padded))[: rounded.numel()]

    def _keep(self, wire: Tensor) -> None:
        """Keep this rank's part of what was gathered."""
        if self.secondary is not None and self._near is not None and not self._is_current:
            self.secondary.copy_(wire.view(self._near.world_size, -1)[self._near.rank])
            self._is_current = True

    def _encode(self, codec: WireCodec, shard: StateStorage | None, out: Tensor) -> None:
        if shard is None or shard.tier == "device":
            exact = self._full[self._slice] if shard is None else shard.read(0, shard.numel)
        else:
            exact = self._pool.acquire(shard.numel, self._full.dtype)
            shard.fetch(exact).wait()
        numel = self._num_coded(exact)
        self._measure(codec, exact, codec.encode(exact[:numel], out[: codec.num_bytes(numel)]))
        if shard is not None and shard.tier != "device":
            self._pool.release(exact)

    def _measure(self, codec: WireCodec, exact: Tensor, sent: Tensor) -> None:
        if self._errors.is_on and not self._is_simulated:
            self._errors.add("gather", exact, codec.decode(sent, torch.empty_like(exact)))

    def _decode(self, codec: WireCodec, wire: Tensor) -> None:
        if self._is_simulated:
            numel = self._num_coded(self._full)
            codec.decode(wire[: codec.num_bytes(numel)], self._full[:numel])
            return
        num_shards = self._shards.world_size
        codec.decode(wire.view(num_shards, -1), self._full.view(num_shards, -1))

    def _num_coded(self, values: Tensor) -> int:
        """Return how many values a codec is given: where there are none in fact, as many as it takes at a time."""
        return min(values.numel(), part_numel(values.device)) if self._is_simulated else values.numel()
