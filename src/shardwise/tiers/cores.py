"""Keeping the threads of host work to the cores of this rank.

torch's kernels on the CPU run on the threads that OpenMP starts for the thread that calls them. Such threads inherit
the affinity of their caller, and their number is the caller's too; the main thread keeps its own cores and number.

>>> import os, threading, torch
>>> found = []
>>> def work():
...     bind_this_thread((min(os.sched_getaffinity(0)),))
...     found.append(torch.get_num_threads())
>>> thread = threading.Thread(target=work)
>>> thread.start(); thread.join()
>>> found
[1]
"""

from __future__ import annotations

import os
import threading

import torch


def bind_this_thread(cores: tuple[int, ...] | None) -> None:
    """Keep the calling thread, and those that OpenMP starts for it, to `cores`; to be called before its first kernel.

    Args:
        cores: that this process may use, each with a thread; None for those of the process, and as many threads as it
            has. Where the system binds no threads, only their number counts.
    """
    if cores is None:
        return  # a new thread has the process's number and its starter's cores
    keep_to(cores)
    num_process_threads = torch.get_num_threads()
    torch.set_num_threads(len(cores))
    # What is set last is also what threads yet to come start with, as those of autograd; this thread keeps its own.
    restorer = threading.Thread(target=torch.set_num_threads, args=(num_process_threads,))
    restorer.start()
    restorer.join()


def keep_to(cores: tuple[int, ...] | None) -> None:
    """Keep the calling thread to `cores`, where the system binds threads; None for those that it has."""
    if cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)  # 0 is the calling thread, not the process
