"""Reads any dataset with rows by number for an engine: the right rows for each rank, in an order of no layout.

    loader = shardwise.data_loader(engine, dataset, collate_fn=collate)
    for batches in loader:                        # one pass over the data, in an order of its own
        engine.train_step(batches)
    engine.save("checkpoints", extra=loader.state_dict())

Ranks that compute a micro-batch together (along tp, pp, cp) get the same rows, other ranks get others. Which rows make
the global batch of a step depends on the seed and on how many rows were taken before, not on the number of ranks. So a
run may go on from `state_dict` on any number of ranks, in the midst of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, Final, Protocol, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from shardwise.config.resolve import ConfigError
from shardwise.engine.engine import Engine
from shardwise.train.dataset import sample_order, sample_positions

# Of torch's loader, these are given by what the engine knows.
_OURS: Final = ("batch_size", "batch_sampler", "sampler", "drop_last", "generator")


class MapDataset(Protocol):
    """Has rows by number: torch's datasets, Hugging Face's, a list."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def __getitem__(self, index: int, /) -> Any:
        """Return a row."""


class EngineDataLoader:
    """Yields this rank's micro-batches of one optimizer step after the other; made by `data_loader`.

    An iteration is one pass over the data. Rows that do not fill a global batch are left to the next pass, which begins
    with them. Each pass has its own order.

    Args:
        engine: whose mesh and batch sizes count.
        dataset: the rows.
        seed: of the order; None keeps the order of the dataset.
        options: for torch's `DataLoader`.

    Attributes:
        num_samples: rows that all ranks together have taken.
    """

    def __init__(self, engine: Engine, dataset: MapDataset, seed: int | None, options: Mapping[str, Any]) -> None:
        mesh, batch = engine.layout.mesh, engine.config.batch
        self.num_samples = 0
        self._dataset = dataset
        self._seed = seed
        self._options = dict(options)
        self._data_rank = mesh.data_index(engine.comm.rank)
        self._shares = sample_positions(batch, self._data_rank, mesh.num_data_ranks)
        self._global_size = batch.global_size or 1
        if len(dataset) < self._global_size:
            raise ConfigError(
                "dataset-below-batch",
                f"batch.global_size={self._global_size} is more than the {len(dataset)} rows of the dataset; use "
                f"{len(dataset)} or less, or give more rows",
            )

    def __len__(self) -> int:
        """Return the steps of the pass that begins, or goes on, at the present row."""
        return (self._end_of_pass() - self.num_samples) // self._global_size

    def __iter__(self) -> Iterator[list[Any]]:
        starts = [self.num_samples + number * self._global_size for number in range(len(self))]
        # It seeds worker processes: equally on ranks that compute the same rows, and without torch's own numbers.
        generator = torch.Generator().manual_seed((self._seed or 0) + self._data_rank + self.num_samples)
        rows = _MicroBatches(starts, self._shares, self._row)
        dataset = cast("Dataset[Any]", self._dataset)
        loader = iter(DataLoader(dataset, batch_sampler=rows, generator=generator, **self._options))
        for start in starts:
            batches = [next(loader) for _ in self._shares]
            self.num_samples = start + self._global_size  # before the step: who saves after it goes on after it
            yield batches

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON, in rows of all ranks: it means the same on any number of them."""
        return {"num_samples": self.num_samples, "num_rows": len(self._dataset), "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position.

        Args:
            state: what `state_dict` returned.

        Raises:
            ConfigError: it is a position in other data, or in another order.
        """
        own = self.state_dict()
        for name, fix in (("num_rows", "give the same dataset"), ("seed", "give the same seed and shuffle")):
            if state[name] != own[name]:
                raise ConfigError(
                    "position-of-other-data",
                    f"the position is one of {name}={state[name]}, and this loader has {own[name]}; {fix}",
                )
        self.num_samples = int(state["num_samples"])

    def _end_of_pass(self) -> int:
        """Return after how many rows the pass ends, which has space for one global batch at least."""
        num_rows = len(self._dataset)
        end = (self.num_samples // num_rows + 1) * num_rows
        return end if self.num_samples + self._global_size <= end else end + num_rows

    def _row(self, position: int) -> int:
        num_rows = len(self._dataset)
        return position % num_rows if self._seed is None else sample_order(self._seed, position, num_rows)


class _MicroBatches(Sampler[list[int]]):
    """Lists the rows of this rank's micro-batches, step after step."""

    def __init__(self, starts: Sequence[int], shares: Sequence[range], row: Callable[[int], int]) -> None:
        self._starts, self._shares, self._row = starts, shares, row

    def __iter__(self) -> Iterator[list[int]]:
        for start in self._starts:
            for share in self._shares:
                yield [self._row(start + position) for position in share]

    def __len__(self) -> int:
        return len(self._starts) * len(self._shares)


def data_loader(
    engine: Engine,
    dataset: MapDataset,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    shuffle: bool = True,
    seed: int | None = None,
    **options: Any,
) -> EngineDataLoader:
    """Return a loader whose items are this rank's list of micro-batches for one `engine.train_step`.

    Args:
        engine: whose mesh and `batch` section say which rows are this rank's.
        dataset: has `len` and rows by index.
        collate_fn: makes a micro-batch of `batch.micro_size` rows; None for torch's.
        shuffle: whether each pass has a random order; otherwise the dataset's own.
        seed: of the order; None for `run.seed`.
        options: others of torch's `DataLoader`, such as `num_workers` and `pin_memory`.

    Raises:
        ConfigError: the dataset has no length, or fewer rows than a global batch; an option is not the user's to give.
    """
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            "dataset-without-rows",
            f"{type(dataset).__name__} has no length or no rows by number; give a dataset with both, such as a list",
        )
    if given := [name for name in _OURS if name in options]:
        raise ConfigError(
            "loader-option-taken",
            f"{given[0]}={options[given[0]]!r} of a data loader follows from the engine; set batch.micro_size and "
            "batch.accumulation, or shuffle and seed",
        )
    number = engine.config.run.seed if seed is None else seed
    return EngineDataLoader(engine, dataset, number if shuffle else None, {"collate_fn": collate_fn, **options})
