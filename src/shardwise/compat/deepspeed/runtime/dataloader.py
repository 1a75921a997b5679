"""Offer the loader that `deepspeed.initialize` makes of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from shardwise.compat.deepspeed.runtime.engine import DeepSpeedEngine


class DeepSpeedDataLoader:
    """Loads the micro-batches of this data rank, shuffled again in each epoch."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._epoch = 0

    @classmethod
    def of(
        cls, dataset: Any, engine: DeepSpeedEngine, collate_fn: Callable[..., Any] | None = None
    ) -> DeepSpeedDataLoader:
        """Make the loader of a `dataset` for the ranks and micro-batches of an `engine`, with a `collate_fn`."""
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, engine.dp_world_size, engine.get_data_parallel_rank()
        )
        size = engine.train_micro_batch_size_per_gpu()
        drop_last = bool(engine.config.get("dataloader_drop_last", False))
        return cls(DataLoader(dataset, size, sampler=sampler, collate_fn=collate_fn, drop_last=drop_last))

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        sampler = self._loader.sampler
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(self._epoch)
        self._epoch += 1
        return iter(self._loader)


class RepeatingLoader:
    """Starts a loader, or any iterable, again when it ends."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._iterator = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.loader)
            return next(self._iterator)
