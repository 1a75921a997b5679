"""This module makes an engine's micro-batches of a stream: each rank takes its samples of every global batch.

    loader = shardwise.stream_loader(engine, stream)
    for batches in loader:
        engine.train_step(batches)
    engine.save("checkpoints", data=loader)

Sample i of the stream has one place in one global batch, whatever the number of ranks. So a run may go on, as often as
it likes and on any number of ranks, with exactly the samples that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import default_collate

from shardwise.config.resolve import ConfigError
from shardwise.engine.engine import Engine
from shardwise.train.dataset import sample_positions


class StreamLoader:
    """Yields this rank's micro-batches of one optimizer step after the other; made by `stream_loader`.

    An iteration is one pass over the stream, or what is left of it; samples that fill no global batch are left out.
    Every rank reads the whole stream and keeps its own samples.

    Args:
        engine: whose mesh and batch sizes count.
        stream: begins again at each `iter`, with the same samples; its `set_epoch`, if it has one, numbers the pass.
        collate: makes a micro-batch of samples.

    Attributes:
        num_samples: of this pass, that all ranks together have taken.
        epoch: the number of the pass.
    """

    def __init__(self, engine: Engine, stream: Iterable[Any], collate: Callable[[list[Any]], Any]) -> None:
        mesh, batch = engine.layout.mesh, engine.config.batch
        self.num_samples = self.epoch = 0
        self._stream = stream
        self._collate = collate
        self._shares = sample_positions(batch, mesh.data_index(engine.comm.rank), mesh.num_data_ranks)
        self._global_size = batch.global_size or 1

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
        own = {position for share in self._shares for position in share}
        while True:
            taken: dict[int, Any] = {}
            num_read = 0
            for position, sample in enumerate(islice(samples, self._global_size)):
                num_read += 1
                if position in own:
                    taken[position] = sample
            if num_read < self._global_size:
                break
            self.num_samples += self._global_size  # before the step: who saves after it goes on after it
            yield [self._collate([taken[position] for position in share]) for share in self._shares]
        self.num_samples, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON, in samples of all ranks: it means the same on any number of them."""
        return {"num_samples": self.num_samples, "epoch": self.epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position in the next iteration.

        Args:
            state: what `state_dict` returned.
        """
        self.num_samples, self.epoch = int(state["num_samples"]), int(state["epoch"])


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
