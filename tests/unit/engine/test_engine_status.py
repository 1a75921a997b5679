"""What an engine's status allows after each change of it."""

from __future__ import annotations

import pytest

from harness.refusals import refused
from shardwise.engine.parts import EngineStatus
from shardwise.offload.worker import HostWorkError, WorkerOutcome


def test_a_load_of_weights_repairs_what_a_load_of_weights_has_mixed_and_no_more() -> None:
    status = EngineStatus(WorkerOutcome())
    status.begin_load(with_states=False)
    with refused("states-mixed"):
        status.check()
    status.begin_load(with_states=False)
    status.end_load(with_states=False)
    status.check()
    status.begin_load(with_states=True)
    status.begin_load(with_states=False)
    status.end_load(with_states=False)
    with refused("states-mixed"):
        status.check()
    status.begin_load(with_states=True)
    status.end_load(with_states=True)
    status.check()


def test_gradients_of_a_backward_that_has_not_ended_allow_a_read_and_no_step() -> None:
    status = EngineStatus(WorkerOutcome())
    status.begin_backward()
    status.check_present()
    with refused("gradients-incomplete", "engine.zero_grad()"):
        status.check()
    status.end_backward()
    status.check()


def test_a_closed_engine_stays_closed() -> None:
    status = EngineStatus(WorkerOutcome())
    assert status.close()
    assert not status.close()
    with refused("engine-closed"):
        status.check_present()


def test_a_failure_of_the_host_is_raised_last() -> None:
    status = EngineStatus(WorkerOutcome(OSError("disk")))
    status.check_present()
    with pytest.raises(HostWorkError, match="disk"):
        status.check()
