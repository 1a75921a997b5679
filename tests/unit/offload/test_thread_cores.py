"""Work on the host keeps to its cores: OpenMP's threads of the bound thread do too, and no other thread is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.usefixtures("warm_python")

# Prints, as JSON, what each thread of a process may run on and how many threads kernels use, by who asks.
PROGRAM = """
import json, os, sys, threading
from pathlib import Path
import torch
from shardwise.offload.cpu_optimizer import bind_this_thread

def read(path):
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
        return None

def cores_by_thread():
    texts = {int(path.parent.name): read(path) for path in Path("/proc/self/task").glob("*/status")}
    texts = {thread: text for thread, text in texts.items() if text is not None}
    return {thread: text.split("Cpus_allowed_list:")[1].split()[0] for thread, text in texts.items()}

def in_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]

cores, process_threads, main_first = json.loads(sys.argv[1])
if process_threads:
    torch.set_num_threads(process_threads)
if main_first:
    torch.ones(2**22).add_(1)
before = cores_by_thread()

def work():
    bind_this_thread(None if cores is None else tuple(cores))
    torch.ones(2**22).add_(1)  # large enough for all threads
    new = {thread: text for thread, text in cores_by_thread().items() if thread not in before}
    return torch.get_num_threads(), sorted(set(new.values())), len(new)

num_threads, bound, num_new = in_thread(work)
after = cores_by_thread()
torch.ones(2**22).add_(1)
print(json.dumps({
    "bound": bound, "num_threads": num_threads, "num_new": num_new, "main_threads": torch.get_num_threads(),
    "later_threads": in_thread(torch.get_num_threads),
    "others_stay": all(after[each] == before[each] for each in before),
}))
"""


def run(cores: list[int] | None, process_threads: int | None = None, main_first: bool = True) -> dict[str, object]:
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([cores, process_threads, main_first])],
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


@pytest.mark.quick(1)
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no threads")
@pytest.mark.parametrize("main_first", [True, False])
def test_threads_of_the_bound_thread_keep_to_its_cores(main_first: bool) -> None:
    core = max(os.sched_getaffinity(0))
    found = run([core, core], main_first=main_first)  # twice: two threads, on whatever machine
    assert found.pop("num_new") >= 2, "OpenMP has started one"
    assert found == {
        "bound": [str(core)],
        "num_threads": 2,
        "main_threads": 2,
        "later_threads": 2,
        "others_stay": True,
    }


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no threads")
def test_the_number_of_threads_is_that_of_the_cores_and_only_there() -> None:
    core = max(os.sched_getaffinity(0))
    found = run([core])
    assert (found["num_threads"], found["bound"]) == (1, [str(core)])
    assert (found["main_threads"], found["later_threads"]) == (2, 2)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("process_threads", "expected"), [(None, 2), (3, 3)])
def test_without_cores_a_thread_works_as_the_process_does(process_threads, expected) -> None:
    found = run(None, process_threads)
    assert (found["num_threads"], found["main_threads"], found["later_threads"]) == (expected,) * 3
    assert found["others_stay"]
