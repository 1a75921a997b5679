"""A virtual CUDA device on torch's CPU build, which has none: its streams run late, and in any order that is legal.

`install()` changes torch for the whole process: run what uses it in a process of its own. Tensors say `cuda:0`,
autograd starts its device thread and orders streams as on a GPU, host code that reads a device address faults, and
memory is NaN when it is handed out and when it is freed. There is one device; it has no clock, no
Triton but its interpreter, no cuDNN, no CUDA graphs.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import sys
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from device.virtual.cuda_names import replace_torch_cuda
from device.virtual.operators import Generator, Operators, Region, below_autograd, foreach_operators, is_on_device
from device.virtual.streams import Order, Scheduler

SOURCE = Path(__file__).with_name("memory.cpp")


def reason_to_skip() -> str | None:
    """Why this machine cannot have a virtual device, or None."""
    if torch.version.cuda is not None or torch.version.hip is not None:
        return "torch has a device of its own in the virtual one's places"
    return None if shutil.which("g++") or shutil.which("c++") else "there is no C++ compiler to build the device with"


def build() -> Any:
    """The C++ side: built once a machine, by torch's own loader, in about a minute.

    The loader marks a build by a file, and waits for ever where one was killed. So the mark of a build that is over
    goes, under a lock that the system takes from a process that ends. It builds again where the path is another one, so
    the source goes beside what is made of it: all checkouts that have the same share it.
    """
    from torch.utils.cpp_extension import get_default_build_root, load

    name, text = "shardwise_virtual_device", SOURCE.read_text()
    of_what = f"{sys.implementation.cache_tag}_{torch.__version__}_{sha256(text.encode()).hexdigest()[:12]}"
    folder = Path(get_default_build_root()) / f"{name}_{of_what}"
    folder.mkdir(parents=True, exist_ok=True)
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        source = folder / SOURCE.name
        if not source.exists() or source.read_text() != text:
            source.write_text(text)
        return load(name, [str(source)], extra_cflags=["-O0", "-w"], build_directory=str(folder))


@cache
def install(order: Order = "eager", seed: int = 0) -> Scheduler:
    """Give this process the device, before anything else uses CUDA."""
    native = build()
    scheduler = Scheduler(native, order, seed)
    native.install(scheduler)
    generator = Generator()
    replace_torch_cuda(native, scheduler, generator)
    operators = Operators(native, scheduler, generator)
    fallback = torch.library.Library("_", "IMPL", "CUDA")
    fallback.fallback(operators)
    aten = torch.library.Library("aten", "IMPL", "CUDA")
    aten.impl("copy_", operators.copy_, "CUDA")
    aten.impl("record_stream", lambda tensor, stream: None, "CUDA")
    for op in foreach_operators():  # a GPU has kernels for lists, where torch falls back to one op a tensor
        aten.impl(str(op).removeprefix("aten.").removesuffix(".default"), partial(operators, op), "CUDA")
    plain_resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return plain_resize(storage, num_bytes)
        scheduler.resize_storage(storage._cdata, int(num_bytes))
        return storage

    torch.UntypedStorage.resize_ = resize_
    install.libraries = (fallback, aten)  # they end with their registrations
    atexit.register(native.close)
    native.choose_device()
    os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined
    interpret_in_streams(native, scheduler)
    return scheduler


def interpret_in_streams(native: Any, scheduler: Scheduler) -> None:
    """Let each launch of Triton be one kernel of the device, which its interpreter runs when its stream comes to it.

    The interpreter changes Triton's modules once for each of a launch's functions, not for each call.
    """
    try:
        from triton.runtime import interpreter

        from harness.interpreter import rounding_to_nearest
    except ImportError:
        return
    plain_launch, plain_patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    seen: set[int] = set()

    def launch(self: Any, *args: Any, **options: Any) -> None:
        flat, spec = pytree.tree_flatten(args)
        values = [Region.of(native, value) if is_on_device(value) else value for value in flat]

        def run() -> None:
            seen.clear()
            with below_autograd(), rounding_to_nearest():
                opened = [value.open() if isinstance(value, Region) else value for value in values]
                plain_launch(self, *pytree.tree_unflatten(opened, spec), **options)

        if any(isinstance(value, Region) for value in values):
            scheduler.launch(f"triton:{self.fn.__name__}", run)
        else:
            run()

    def patch(function: Any) -> Any:
        key = id(function.__globals__)
        if key in seen:
            return None  # of calls inside a launch, which are not asked
        seen.add(key)
        return plain_patch(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launch, patch
