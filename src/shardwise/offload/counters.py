"""Count the bytes that move between tiers."""

from __future__ import annotations

import threading
from collections import Counter

from shardwise.config.resolve import Tier


class TransferCounters:
    """Counts moved bytes by (from, to); several threads may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moved_bytes: Counter[tuple[Tier, Tier]] = Counter()
        self._kept_bytes = 0

    @property
    def moved_bytes(self) -> dict[tuple[Tier, Tier], int]:
        """Return the bytes moved since the last `reset`, by (from, to)."""
        with self._lock:
            return dict(self._moved_bytes)

    @property
    def kept_bytes(self) -> int:
        """Return the bytes that were not read from NVMe again, since they were still in host memory."""
        return self._kept_bytes

    def add(self, source: Tier, target: Tier, num_bytes: int) -> None:
        """Count `num_bytes` that move from the tier `source` to the tier `target`."""
        with self._lock:
            self._moved_bytes[source, target] += num_bytes

    def keep(self, num_bytes: int) -> None:
        """Count a read from NVMe that was not needed."""
        with self._lock:
            self._kept_bytes += num_bytes

    def reset(self) -> None:
        """Start at 0."""
        with self._lock:
            self._moved_bytes.clear()
            self._kept_bytes = 0
