"""The streams of the virtual device: queues of closures that run as late, or in as odd an order, as events permit.

Whatever order events permit, a GPU may take. Where two orders give other bits, a wait is missing.
"""

from __future__ import annotations

import random
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Order = Literal["eager", "lazy", "side-first", "compute-first", "random"]
Task = Callable[[], object]
COMPUTE = 0
IDLE_S = 0.05  # of a host that waits
PATIENCE_S = 60.0  # with other ranks


class CircleError(RuntimeError):
    """Streams wait for each other in a circle, or for a rank that does not come: on a GPU this hangs."""


@dataclass(eq=False)
class Queue:
    """A stream's work, in the order of its enqueueing; what has run is forgotten."""

    number: int
    tasks: list[Task | Mark | Gate | None] = field(default_factory=list)
    num_done: int = 0

    def next(self) -> Task | Mark | Gate | None:
        return self.tasks[self.num_done] if self.num_done < len(self.tasks) else None


@dataclass(eq=False)
class Mark:
    """A point in a stream's work: what an event records and what another stream waits for."""

    queue: Queue
    position: int
    number: int = 0
    num_queries: int = 0

    @property
    def is_reached(self) -> bool:
        return self.queue.num_done >= self.position


@dataclass(frozen=True)
class Gate:
    """Lets a stream go on once something outside the device has happened: a message of another process has come."""

    is_open: Callable[[], bool]

    @property
    def is_reached(self) -> bool:
        return self.is_open()


class Scheduler:
    """Decides when enqueued work runs, and counts kernels and waits of the host by the line that asked.

    - eager: as soon as it may, the reference;
    - lazy: only what is needed, when it is needed;
    - side-first: before any work of the compute stream, all that other streams may do; compute-first: the reverse;
    - random: any stream that may go on, by a seed.
    """

    def __init__(self, native: Any, order: Order = "eager", seed: int = 0) -> None:
        self.order: Order = order
        self.random = random.Random(seed)
        self.kernels: Counter[str] = Counter()
        self.host_waits: Counter[str] = Counter()
        self.foreign_calls: Counter[str] = Counter()  # of threads that chose no device
        self.debug_mode = "default"  # of waits of the host: also "warn" and "error", as torch.cuda says
        self.trace: Any = None  # torch.cuda._gpu_trace, where CUDA's sanitizer is on
        # Called at each wait of the host: who asked for it, and whether the device had come so far already.
        self.on_wait: Callable[[str, bool], object] = lambda why, is_over: None
        self._native = native
        self._lock = threading.Condition()  # let go of while other ranks are waited for
        self._num_marks = 0
        self._queues = [Queue(COMPUTE)]
        self._busy: dict[int, Queue] = {}  # those with work, by number: engines that have ended leave their streams
        self._num_enqueued = 0
        self._freed: list[tuple[int, list[Mark]]] = []
        self._goes_on = False

    def restart(self, order: Order, seed: int = 0) -> None:
        """Finish all work, and go on in another order."""
        self.finish_all()
        self.order, self.random = order, random.Random(seed)
        for counter in (self.kernels, self.host_waits, self.foreign_calls):
            counter.clear()

    # What the library enqueues.

    def new_stream(self) -> int:
        with self._lock:
            self._queues.append(Queue(len(self._queues)))
            return self._queues[-1].number

    def launch(self, kernel: str, task: Task) -> None:
        """Enqueue a kernel on the current stream."""
        self.spoil_freed()
        self.kernels[f"{kernel} {caller()}"] += 1
        self._enqueue(task, self._native.current_stream())

    def record(self, stream: int) -> Mark:
        with self._lock:
            queue = self._queues[stream]
            self._num_marks += 1
            mark = Mark(queue, len(queue.tasks), self._num_marks)
        if self.trace is not None:
            self.trace.EventRecordCallbacks.fire_callbacks(mark.number, stream)
        return mark

    def wait(self, mark: Mark, stream: int) -> None:
        """Let a stream wait for a point of another."""
        if self.trace is not None:
            self.trace.EventWaitCallbacks.fire_callbacks(mark.number, stream)
        if mark.queue.number != stream and not mark.is_reached:
            self._enqueue(mark, stream)

    def wait_at(self, gate: Gate, stream: int) -> None:
        """Let a stream wait until a gate opens."""
        self._enqueue(gate, stream)

    def _enqueue(self, task: Task | Mark | Gate, stream: int) -> None:
        with self._lock:
            queue = self._queues[stream]
            queue.tasks.append(task)
            self._busy[stream] = queue
            self._num_enqueued += 1
            if self.order == "eager":
                self._run_able(queue)

    # What the host asks for.

    def query(self, mark: Mark) -> bool:
        """Whether a point is reached; says no twice before it lets the work run, as a busy device does."""
        self.note_foreign("query")
        with self._lock:
            mark.num_queries += 1
            if not mark.is_reached and mark.num_queries > 2 and not self._goes_on:
                self._reach(mark.queue, mark.position)
            return mark.is_reached

    def synchronize_event(self, mark: Mark) -> None:
        self.wait_on_host("event", mark)

    def synchronize_stream(self, stream: int) -> None:
        self.wait_on_host("stream", self.record(stream))

    def synchronize_device(self) -> None:
        self.wait_on_host("device")

    def wait_on_host(self, why: str, mark: Mark | None = None) -> None:
        """Block the host until a point is reached; without one, until all is done."""
        self.spoil_freed()
        self.host_waits[f"{why} {caller()}"] += 1
        self.on_wait(f"{why} {caller()}", mark is not None and mark.is_reached)
        if self.debug_mode == "error" and why in ("item", "copy"):
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.debug_mode == "warn" and why in ("item", "copy"):
            place, line = f"{caller()}:0".split(":")[:2]
            warnings.warn_explicit("called a synchronizing CUDA operation", UserWarning, place, int(line))
        with self._lock:
            if mark is not None:
                self._reach(mark.queue, mark.position)
            else:
                self.finish_all()
            self._drop_freed()
        if self.trace is not None and mark is not None:
            self.trace.EventSynchronizationCallbacks.fire_callbacks(mark.number)
        elif self.trace is not None:
            self.trace.DeviceSynchronizationCallbacks.fire_callbacks()

    def finish_all(self) -> None:
        self.spoil_freed()
        with self._lock:
            for queue in self._ordered():
                self._reach(queue, len(queue.tasks))
            self._drop_freed()

    def run_to_here(self) -> None:
        """Run the current stream's work, without a wait of the host: for what a GPU would do by itself."""
        mark = self.record(self._native.current_stream())
        with self._lock:
            self._reach(mark.queue, mark.position)

    def go_on_by_itself(self) -> None:
        """Let work run, from now on, while the host waits for something else: another rank may need what is sent."""

        def run() -> None:
            while threading.main_thread().is_alive():  # after it what moves messages has ended
                num_before = self._num_enqueued
                time.sleep(IDLE_S)
                with self._lock:
                    while self._num_enqueued == num_before and (able := self._able()):
                        self._run_next(self._choose(able))

        self._goes_on = True
        threading.Thread(target=run, daemon=True).start()

    def note_foreign(self, call: str) -> None:
        """Count a call of a thread that chose no device: it would make a context on the first GPU."""
        if threading.current_thread() is not threading.main_thread() and not self._native.has_chosen_device():
            self.foreign_calls[f"{call} {threading.current_thread().name} {caller()}"] += 1

    # How work runs.

    def _reach(self, queue: Queue, position: int) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        if self.order in ("eager", "lazy"):
            self._run_needed(queue, position, (), deadline_s)
            return
        while queue.num_done < position:
            able = self._able()
            if able:
                self._run_next(self._choose(able))
            else:
                self._wait_for_gates(deadline_s)

    def _run_needed(self, queue: Queue, position: int, above: tuple[Queue, ...], deadline_s: float) -> None:
        if queue in above and queue.num_done < position:
            raise CircleError("streams wait in a circle")
        while queue.num_done < position:
            task = queue.next()
            if isinstance(task, Mark):
                self._run_needed(task.queue, task.position, (*above, queue), deadline_s)
            elif isinstance(task, Gate) and not task.is_reached:
                # Another rank may wait for what this one has not done yet: on a GPU all streams go on.
                able = self._able()
                if able:
                    self._run_next(able[0])
                else:
                    self._wait_for_gates(deadline_s)
                continue
            if queue.num_done < position and queue.next() is task:
                self._run_next(queue)

    def _run_able(self, queue: Queue) -> None:
        """Run what a stream holds until it has to wait; and what it waits for, as far as that may run."""
        while True:
            while self._may_go_on(queue):
                self._run_next(queue)
            task = queue.next()
            if not isinstance(task, Mark):
                return
            self._run_able(task.queue)
            if not task.is_reached:
                return

    def _wait_for_gates(self, deadline_s: float) -> None:
        """Let time pass. CircleError where no stream waits for another rank, or none comes."""
        if not any(isinstance(queue.next(), Gate) for queue in self._busy.values()):
            raise CircleError("no stream can go on")
        if time.monotonic() > deadline_s:
            raise CircleError("another rank does not come")
        self._lock.wait(1e-4)

    def _choose(self, able: list[Queue]) -> Queue:
        if self.order == "random":
            return self.random.choice(able)
        return able[-1] if self.order == "side-first" else able[0]

    def _ordered(self) -> list[Queue]:
        return [self._busy[number] for number in sorted(self._busy)]

    def _able(self) -> list[Queue]:
        return [queue for queue in self._ordered() if self._may_go_on(queue)]

    @staticmethod
    def _may_go_on(queue: Queue) -> bool:
        task = queue.next()
        return task is not None and (not isinstance(task, (Mark, Gate)) or task.is_reached)

    def _run_next(self, queue: Queue) -> None:
        task = queue.tasks[queue.num_done]
        queue.tasks[queue.num_done] = None
        if task is not None and not isinstance(task, (Mark, Gate)):
            task()
        queue.num_done += 1
        if queue.num_done == len(queue.tasks):
            self._busy.pop(queue.number, None)

    # Memory.

    def spoil_freed(self) -> None:
        """Overwrite freed memory in the order of the stream that it was allocated on: its next owner writes there."""
        for address, stream in self._native.take_freed():
            self._enqueue(lambda address=address: self._native.spoil(address), stream)
            with self._lock:
                ends = [Mark(queue, len(queue.tasks)) for queue in self._busy.values()]
                self._freed.append((address, ends))

    def _drop_freed(self) -> None:
        """Unmap what no enqueued work may name any more."""
        kept = []
        for address, ends in self._freed:
            if all(mark.is_reached for mark in ends):
                self._native.drop(address)
            else:
                kept.append((address, ends))
        self._freed = kept

    def resize_storage(self, storage: int, num_bytes: int) -> None:
        """Give a storage other memory, with the values that fit into both."""
        import torch

        self.spoil_freed()
        before, after, num_common, former = self._native.replace_storage(storage, num_bytes)
        if num_common and before and after:
            view = self._native.open_view

            def copy() -> None:
                source = view(before, 0, [num_common], [1], torch.uint8)
                view(after, 0, [num_common], [1], torch.uint8).copy_(source)

            self.launch("resize", copy)
        del former
        self.spoil_freed()


def caller() -> str:
    """The innermost line of the library or the tests that led here, as `package/file.py:line`."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        for root in ("/src/shardwise/", "/tests/"):
            if root in name and not name.endswith("/runtime/device.py") and "/device/virtual/" not in name:
                return f"{name.split(root)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
