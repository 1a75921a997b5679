"""A plugin of pytest that runs tests of a GPU on the virtual device, in one process: `make virtual-gpu`.

What the virtual device has no kernel for is skipped, and the reason names it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from contextlib import nullcontext
from pathlib import Path
from types import MappingProxyType

import pytest

from device.process import SCHEDULER
from shardwise.attention.api import attention_backend

SITE = Path(__file__).parent / "site"
# By what matches a test's name.
NOT_THERE = MappingProxyType(
    {
        r"test_flex_equals|\bflex\b": "FlexAttention's, which torch.compile makes for Triton",
        "test_kernels_equal_the_reference": "Triton's but by its interpreter, which takes minutes a case",
        "test_compiled_code_holds": "torch.compile's, made for Triton",
        "test_memory_grows_with_the_length_alone": "Triton's of 64k tokens: its interpreter would take days",
        "test_every_launch_gives_the_same_bits": "Triton's side by side: its interpreter has one thread, and no races",
        "test_products_copies_and_collectives": "fast products in bf16: the CPU takes minutes for one",
        "test_every_gpu_is_a_fact": "none of NVIDIA's driver is here: nvidia-smi says its version",
    }
)


def pytest_configure() -> None:
    """Processes that the tests start have a virtual device too."""
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys((str(SITE), *before)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for pattern, reason in NOT_THERE.items():
            if re.search(pattern, item.name):
                item.add_marker(pytest.mark.skip(reason=f"no such kernels on the virtual device: {reason}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """In tests of exchanges attention is torch's operators where these can: Triton's interpreter takes far longer.

    What is left on the streams of a test's engines is done after it, or their memory would be looked through for ever.
    """
    is_dense = item.path.name == "test_context_cuda.py" and "sparse" not in item.name
    with attention_backend("dense") if is_dense else nullcontext():
        try:
            return (yield)
        finally:
            SCHEDULER.finish_all()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What the tests made the device do."""
    num_kernels, num_waits = (sum(counts.values()) for counts in (SCHEDULER.kernels, SCHEDULER.host_waits))
    terminalreporter.write_line(f"virtual device, {SCHEDULER.order}: {num_kernels} kernels, {num_waits} host waits")
    for call, count in SCHEDULER.foreign_calls.most_common():
        terminalreporter.write_line(f"by a thread that chose no device, {count} times: {call}")
