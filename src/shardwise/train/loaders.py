"""Makes an engine's micro-batches of any dataset with rows by number, or of a stream: each rank gets its own rows.

    loader = shardwise.data_loader(engine, dataset, collate_fn=collate)     # or shardwise.stream_loader(engine, stream)
    for batches in loader:                        # one pass over the data
        engine.train_step(batches)
    engine.save("checkpoints", data=loader)

Ranks that compute a micro-batch together (along tp, pp, cp) get the same rows, other ranks get others. Which rows make
the global batch of a step does not depend on the number of ranks. So a run may go on from `state_dict` on any number of
them, in the midst of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Annotated, Any, Final, Protocol, cast

import torch
from pydantic import Field
from torch.utils.data import DataLoader, Dataset, default_collate

from shardwise.config.arguments import check, checked
from shardwise.config.errors import ConfigError
from shardwise.config.sections import NotNegative
from shardwise.engine.engine import Engine
from shardwise.train.dataset import sample_order, sample_positions

Seed = Annotated[int, Field(ge=-(2**62), le=2**62)]

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
        seed: of the order; None keeps the order of the dataset.
        options: further keyword arguments for torch's `DataLoader`.

    Attributes:
        num_samples: rows that all ranks together have taken.
    """

    def __init__(self, engine: Engine, dataset: MapDataset, seed: int | None, options: Mapping[str, Any]) -> None:
        self.num_samples = 0
        self._dataset = dataset
        self._seed = seed
        self._options = dict(options)
        self._data_rank = engine.layout.mesh.data_index(engine.comm.rank)
        self._shares, self._global_size = _shares_of(engine)
        if len(dataset) < self._global_size:
            raise ConfigError(
                "dataset-below-batch",
                f"batch.global_size={self._global_size} is more than the {len(dataset)} rows of the dataset; use "
                f"{len(dataset)} or less, or give more rows",
            )

    def __len__(self) -> int:
        """Return the steps of the pass that begins, or goes on, at the present row."""
        num_rows = len(self._dataset)
        end = (self.num_samples // num_rows + 1) * num_rows
        end += 0 if self.num_samples + self._global_size <= end else num_rows  # a pass has one step at least
        return (end - self.num_samples) // self._global_size

    def __iter__(self) -> Iterator[list[Any]]:
        starts = [self.num_samples + number * self._global_size for number in range(len(self))]
        # It seeds worker processes: equally on ranks that compute the same rows, and without torch's own numbers.
        generator = torch.Generator().manual_seed((self._seed or 0) + self._data_rank + self.num_samples)
        rows = ([self._row(start + position) for position in share] for start in starts for share in self._shares)
        dataset = cast("Dataset[Any]", self._dataset)
        loader = iter(DataLoader(dataset, batch_sampler=rows, generator=generator, **self._options))
        for start in starts:
            batches = [next(loader) for _ in self._shares]
            self.num_samples = start + self._global_size  # before the step: who saves after it goes on after it
            yield batches

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON, in rows of all ranks: it means the same on any number of them."""
        return {"num_samples": self.num_samples, "num_rows": len(self._dataset), "seed": self._seed}

    @checked
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position that `state_dict` returned.

        Raises:
            ConfigError: it is a position in other data, or in another order.
        """
        own_position = self.state_dict()
        _check_position(state, own_position)
        for name, fix in (("num_rows", "give the same dataset"), ("seed", "give the same seed and shuffle")):
            if state[name] != own_position[name]:
                raise ConfigError(
                    "position-of-other-data",
                    f"the position is one of {name}={state[name]}, and this loader has {own_position[name]}; {fix}",
                )
        self.num_samples = int(state["num_samples"])

    def _row(self, position: int) -> int:
        num_rows = len(self._dataset)
        return position % num_rows if self._seed is None else sample_order(self._seed, position, num_rows)


class StreamLoader:
    """Yields this rank's micro-batches of one optimizer step after the other; made by `stream_loader`.

    An iteration is one pass over the stream, or what is left of it; samples that fill no global batch are left out.
    Every rank reads the whole stream and keeps its own samples. `set_epoch` of the stream is called with the number of
    the pass, if it has one.

    Args:
        engine: whose mesh and batch sizes count.
        stream: begins again at each `iter`, with the same samples.

    Attributes:
        num_samples: of this pass, that all ranks together have taken.
    """

    def __init__(self, engine: Engine, stream: Iterable[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.num_samples = self.epoch = 0
        self._stream = stream
        self._collate = collate
        self._shares, self._global_size = _shares_of(engine)

    def __iter__(self) -> Iterator[list[Any]]:
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(self.epoch)
        samples = iter(self._stream)
        num_passed = sum(1 for _ in islice(samples, self.num_samples))
        if num_passed < self.num_samples:
            raise ConfigError(
                "stream-too-short",
                f"the stream ended after {num_passed} samples, and the run had taken {self.num_samples}; give the same "
                "stream",
            )
        own_samples = {position for share in self._shares for position in share}
        while True:
            window = islice(samples, self._global_size)
            taken = [sample if position in own_samples else None for position, sample in enumerate(window)]
            if len(taken) < self._global_size:
                break
            self.num_samples += self._global_size  # before the step: who saves after it goes on after it
            yield [self._collate([taken[position] for position in share]) for share in self._shares]
        self.num_samples, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON, in samples of all ranks: it means the same on any number of them."""
        return {"num_samples": self.num_samples, "epoch": self.epoch}

    @checked
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position that `state_dict` returned, in the next iteration."""
        _check_position(state, self.state_dict())
        self.num_samples, self.epoch = int(state["num_samples"]), int(state["epoch"])


def _check_position(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuse a position that is not such as `own`."""
    for name in own:
        check("load_state_dict", name, state.get(name), NotNegative | None if name == "seed" else NotNegative)


def _shares_of(engine: Engine) -> tuple[list[range], int]:
    """Return which positions of a global batch are this rank's, by micro-batch, and the size of that batch."""
    mesh, batch = engine.layout.mesh, engine.config.batch
    return sample_positions(batch, mesh.data_index(engine.comm.rank), mesh.num_data_ranks), batch.global_size or 1


@checked
def data_loader(
    engine: Engine,
    dataset: MapDataset,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    shuffle: bool = True,
    seed: Seed | None = None,
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
    if ours := [name for name in _OURS if name in options]:
        raise ConfigError(
            "loader-option-taken",
            f"{ours[0]}={options[ours[0]]!r} of a data loader follows from the engine; set batch.micro_size and "
            "batch.accumulation, or shuffle and seed",
        )
    options = {"collate_fn": collate_fn, **options}
    try:
        DataLoader(cast("Dataset[Any]", dataset), batch_sampler=[], **options)
    except (TypeError, ValueError) as error:
        raise ConfigError("loader-option", f"data_loader: {error}; give options of torch's DataLoader") from None
    number = engine.config.run.seed if seed is None else seed
    return EngineDataLoader(engine, dataset, number if shuffle else None, options)


@checked
def stream_loader(
    engine: Engine, stream: Iterable[Any], *, collate_fn: Callable[[list[Any]], Any] = default_collate
) -> StreamLoader:
    """Return a loader whose items are this rank's list of micro-batches for one `engine.train_step`.

    Args:
        engine: whose mesh and `batch` section say which samples are this rank's.
        stream: any iterable that gives the same samples each time, such as a streaming dataset of Hugging Face's. It is
            not split over ranks before.
        collate_fn: makes a micro-batch of `batch.micro_size` samples.

    Raises:
        ConfigError: it is an iterator, which cannot begin again.
    """
    if iter(stream) is stream:
        raise ConfigError(
            "stream-begins-once", f"a {type(stream).__name__} cannot be read again; give what makes it, by __iter__"
        )
    return StreamLoader(engine, stream, collate_fn)
