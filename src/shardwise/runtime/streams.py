"""CUDA streams run work beside the compute stream, and one rule says how buffers pass between them.

The rule: storage is allocated and freed in compute-stream order only. The stream that hands a buffer to another one
records an event after its last use (`Event.record`), and the receiver waits for that event before its first use. On
the CPU all work runs on the calling thread and events do nothing, so the same code runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

StreamName = Literal["gather", "reduce", "tensor", "context", "offload", "reload"]


@dataclass(frozen=True)
class P2PStreamKey:
    """Names the stream of messages to or from one other rank: after those of another they might wait in a circle."""

    end: Literal["send", "receive"]
    peer: int


@dataclass(frozen=True)
class Event:
    """Marks a point in a stream's work; does nothing on the CPU."""

    cuda_event: torch.cuda.Event | None

    @classmethod
    def record(cls, device: torch.device) -> Event:
        """Mark the current stream's position."""
        return cls(torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None)

    def wait(self) -> None:
        """Make the current stream wait for the point; the host goes on."""
        if self.cuda_event is not None:
            self.cuda_event.wait()

    def wait_on_host(self) -> None:
        """Block the calling thread until the device has reached the point."""
        if self.cuda_event is not None:
            self.cuda_event.synchronize()

    def is_reached(self) -> bool:
        """Say whether the device has reached the point; never wait."""
        return self.cuda_event is None or self.cuda_event.query()


class Streams:
    """Holds an engine's side streams: for unshards, reductions, transfers of split layers and between the ranks of a
    sequence, copies to the host and back.

    On the CPU there are none.

    Args:
        overlap: False keeps all work on the compute stream, for comparison and debugging.
    """

    def __init__(self, device: torch.device, overlap: bool = True) -> None:
        self.device = device
        self._side_streams: dict[StreamName | P2PStreamKey, torch.cuda.Stream] = {}
        if device.type == "cuda" and overlap:
            # Only reductions are not on the critical path of the computation, and no other work may queue after them.
            self._side_streams = {
                "gather": torch.cuda.Stream(device, priority=-1),
                "reduce": torch.cuda.Stream(device),
                "tensor": torch.cuda.Stream(device, priority=-1),
                "context": torch.cuda.Stream(device, priority=-1),
                # A bus carries as much in both directions at once as in one.
                "offload": torch.cuda.Stream(device),
                "reload": torch.cuda.Stream(device),
            }

    @contextmanager
    def side_stream(self, name: StreamName | P2PStreamKey | None, after: Event | None = None) -> Iterator[None]:
        """Enqueue what follows on the named stream, or on the current one for None.

        It runs after all that the current stream holds so far; or after the event `after`, where that is given.
        """
        # Without overlap too: a receive that the computation waits for may wait for what that computes.
        if isinstance(name, P2PStreamKey) and self.device.type == "cuda" and name not in self._side_streams:
            self._side_streams[name] = torch.cuda.Stream(self.device, priority=-1)
        stream = None if name is None else self._side_streams.get(name)
        if stream is None:
            if after is not None:
                after.wait()
            yield
            return
        if after is None:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        elif after.cuda_event is not None:
            stream.wait_event(after.cuda_event)
        with torch.cuda.stream(stream):
            yield
