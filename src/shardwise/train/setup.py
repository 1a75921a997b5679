"""Sets a run up before its first step: its config over the job's defaults, checked as a whole; its data; its folder.

It finds a user's mistakes before any process starts. `run` and `loop` are what the ranks execute.

>>> config = job_config(None, ["model.preset=25m", "run.device=cpu"])
>>> config.batch.micro_size, config.scheduler.warmup_steps
(8, 10)
>>> resolve_job(config, world_size=2, num_local_ranks=2).batch.global_size
16
"""

from __future__ import annotations

import math
import os
import re
import resource
import shutil
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from shardwise.attention.from_config import structure_of
from shardwise.checkpoint.commit import candidates
from shardwise.checkpoint.manifest import CheckpointError
from shardwise.config.errors import ConfigError, system_code
from shardwise.config.resolve import CompileConfig, Config, PrecisionConfig, ResolvedConfig, Tier, read_toml, set_key
from shardwise.config.written_files import write_whole
from shardwise.context.apply import check_split
from shardwise.engine.initialize import check_tiers
from shardwise.launch.host import usable_bytes
from shardwise.layout.layout import TIERS, Layout
from shardwise.layout.tp_sharding import check_length
from shardwise.offload.nvme import SwapError, SwapFolder
from shardwise.optim.rules import optimizer_kind
from shardwise.planner.results import layout_words
from shardwise.report.page import leaves
from shardwise.runtime.device import choose_kind, kind_of, total_bytes, wanted_kind
from shardwise.runtime.format import format_bytes
from shardwise.runtime.fp8_linears import check_fp8
from shardwise.runtime.recompute import check_backend
from shardwise.tensor.plan_layout import plan_layout
from shardwise.train.job_model import HuggingFaceModel, job_model, model_name
from shardwise.train.needs import check_positions
from shardwise.train.prepare import PreparedData, Progress, prepare_data

CONFIG_NAME = "config.json"
CACHE_NAME = "cache"
TOKENIZER_NAME = "tokenizer"
# A run's folder: the time at which it was made, and a name.
_TIME: Final = "%Y%m%d-%H%M%S"
_RUN_NAME: Final = re.compile(r"(\d{8}-\d{6})-(.+)")

# `shardwise train` uses these values where the user gives none and the library's own defaults do not suit a job.
_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {"batch.micro_size": 8, "optimizer.lr": 6e-4, "scheduler.name": "cosine"}
)
# These are for the preset that a bare `shardwise train` trains. Small batches learn most from few tokens.
_TINY_DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {"batch.micro_size": 2, "optimizer.lr": 1e-3, "run.eval_batches": 32}
)
# Its steps take about two minutes, data and evaluation included, on two cores, and less on a GPU. A CPU with bf16 in
# hardware is 2.4 times as fast with it as with fp32.
_TINY_ON: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "gpu": {"run.steps": 2000, "batch.micro_size": 16},
        "cpu with bf16": {"run.steps": 800},
        "cpu": {"run.steps": 350},
    }
)
_WARMUP_SHARE = 0.05
# What the field fine-tunes with; LoRA's matrices begin at zero and take larger steps (Hu et al. 2021, appendix D).
_TUNING_LR, _LORA_LR = 1e-5, 2e-4
_TUNING_SEQ_LEN = 1024
_MAX_FILES = 4096
# A step that reads the training data more often than this is a mistake in a number.
_MAX_PASSES_A_STEP = 100

_NAMES: tuple[tuple[Tier, str], ...] = (("device", "device"), ("host", "host"), ("nvme", "NVMe"))
_ROLES = (("param", "parameters"), ("grad", "gradients"), ("optimizer", "optimizer"))


def job_config(
    path: str | Path | None,
    assignments: Sequence[str],
    base: Mapping[str, Any] | None = None,
) -> Config:
    """Return a run's config; later ones win: the job's defaults, `base`, the user's TOML file, the user's assignments.

    Args:
        base: sections of a saved run's config.

    Raises:
        ConfigError: a key or a value is wrong.
    """
    values = {section: dict(keys) for section, keys in (base or {}).items()}
    for key, value in leaves(read_toml(path) if path is not None else {}):
        set_key(values, key, value)
    assigned = {assignment.partition("=")[0].strip() for assignment in assignments}
    if "run.steps" in assigned and "run.epochs" not in assigned:  # those of the file, or the saved run, would win
        values.get("run", {}).pop("epochs", None)
    keys_given = assigned.union(key for key, _ in leaves(values))
    config = Config.from_dict(values).override(assignments)
    merged = config.model_dump()
    for key, value in _job_defaults(config, keys_given).items():
        set_key(merged, key, value)
    return Config.from_dict(merged)


def resolve_job(config: Config, world_size: int, num_local_ranks: int) -> ResolvedConfig:
    """Resolve the config, the device too, and check all that can be checked without data and ranks.

    Args:
        world_size: the number of the run's ranks.
        num_local_ranks: the number of ranks that share this machine.

    Raises:
        ConfigError: it does not fit itself or this machine.
    """
    run = config.run.model_copy(update={"device": choose_kind(config.run.device).name})
    _refuse_unknown_homes(config)
    check_tiers(config.tiers)
    if config.compile.enabled or config.compile.backend != CompileConfig().backend:  # the compiler takes a second
        check_backend(config.compile)
    _refuse_missing_weights(config.model.weights)
    check_fp8(config.precision.linears, torch.device(run.device))
    _raise_file_limit()
    resolved, layout = check_job(config.model_copy(update={"run": run}), world_size)
    _refuse_too_large(layout, resolved, num_local_ranks)
    return resolved


def check_job(config: Config, world_size: int) -> tuple[ResolvedConfig, Layout]:
    """Resolve the config and check what does not depend on this machine.

    Raises:
        ConfigError: mesh, batch, model, layout or optimizer do not fit.
    """
    resolved = config.resolve(world_size)
    name = config.run.name
    if name is not None and Path(name).name != name:
        raise ConfigError("run-name", f"run.name={name} is not the name of a folder; leave out the slashes")
    optimizer_kind(config.optimizer.name)  # says why not; none is built here, which takes a second
    job = job_model(config)
    if isinstance(job, HuggingFaceModel):
        check_positions(config, job.name, job.text_config)
    return resolved, job_layout(job.skeleton(), resolved)


def job_layout(model: nn.Module, config: ResolvedConfig) -> Layout:
    """Plan the layout of a job's model, and check that its sequences can be split."""
    if config.tensor.sequence_parallel:
        fix = "or set tensor.sequence_parallel=false"
        check_length(config.data.seq_len, config.mesh.tp, "data.seq_len=", fix, config.mesh.cp)
    layout = plan_layout(model, config)
    check_split(model, config, config.data.seq_len)
    return layout


def _refuse_unknown_homes(config: Config) -> None:
    """Refuse a path such as `~ann/runs` where the system knows no user of that name."""
    for key, value in leaves(config.model_dump()):
        if isinstance(value, str) and value.startswith("~") and os.path.expanduser(value) == value:
            user = value.split("/")[0]
            raise ConfigError("home-unknown", f"{key}={value}: {user} is no user's folder here; write the path out")


def _refuse_missing_weights(path: str | None) -> None:
    """Refuse a path of `model.weights` at which there is nothing, before ranks are started to read it."""
    try:
        if path is not None:
            candidates(Path(path).expanduser())
    except CheckpointError as error:
        raise ConfigError(error.code, f"model.weights={path}: {error}") from None


def _raise_file_limit() -> None:
    """Raise the limit of open files of this process and its ranks as far as the system allows, up to `_MAX_FILES`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(_MAX_FILES, hard)
    if 0 <= soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _refuse_too_large(layout: Layout, config: ResolvedConfig, num_local_ranks: int) -> None:
    """Refuse states that the memories which store them cannot hold even without activations."""
    device_bytes, host_bytes, nvme_bytes = (sum(layout.bytes_at_rest(tier=tier).values()) for tier in TIERS)
    host_bytes *= num_local_ranks
    memories = []
    if not kind_of(config.run.device).is_cpu:
        memories.append((device_bytes, total_bytes(torch.device(config.run.device, 0)), "a GPU"))
    else:
        host_bytes += num_local_ranks * device_bytes
    memories.append((host_bytes, usable_bytes(), "this machine"))
    model = config.model
    named = f"model.preset={model.preset}" if model.path is None else f"model.path={model.path}"
    for needed_bytes, held_bytes, what in memories:
        if needed_bytes > held_bytes:
            raise ConfigError(
                "states-exceed-memory",
                f"{named} needs {format_bytes(needed_bytes)} for its states under zero.stage={config.zero.stage} over "
                f"{layout.mesh.world_size} ranks, but {what} has {format_bytes(held_bytes)}; use a smaller model, "
                "zero.stage=3, more ranks, or another tier for states",
            )
    if config.tiers.nvme_path is not None and nvme_bytes:
        try:
            SwapFolder.check_free_space(Path(config.tiers.nvme_path), num_local_ranks * nvme_bytes)
        except SwapError as error:
            raise ConfigError(error.code, str(error)) from None


def layout_line(config: Config, world_size: int) -> str:
    """Describe the layout of a run as the planner does.

    >>> layout_line(Config.from_dict({"mesh": {"tp": 2}, "tensor": {"sequence_parallel": True}}), 8)
    '8 ranks: TP 2+SP, ZeRO-2 over 4, micro-batch 1'
    """
    ranks = "1 rank" if world_size == 1 else f"{world_size:,} ranks"
    return f"{ranks}: {layout_words(config.resolve(world_size))}"


def precision_line(precision: PrecisionConfig) -> str:
    """Say in which dtype a run computes, and what is stored or sent in another.

    >>> precision_line(PrecisionConfig(param="bf16", states="int8", reduce="int4"))
    'bf16 with fp32 master, states in int8, gradients sent in int4'
    """
    master = " with fp32 master" if precision.param in ("bf16", "fp16") else ""
    sent = ("parameters sent", precision.gather), ("gradients sent", precision.reduce)
    others = (("states", precision.states), *sent, ("linear layers", precision.linears))
    coded = (f", {what} in {how}" for what, how in others if how not in ("master", "param", "keep"))
    return f"{precision.param}{master}{''.join(coded)}"


def tiers_line(layout: Layout) -> str:
    """Return the bytes of rank 0's states by tier as text; empty where all are stored on the device."""
    by_tier = layout.bytes_by_tier()
    if not by_tier.keys() - {"device"}:
        return ""
    parts = []
    for tier, tier_name in _NAMES:
        by_role = by_tier.get(tier, {})
        states = ", ".join(f"{name} {format_bytes(by_role[role])}" for role, name in _ROLES if by_role.get(role))
        parts += [f"{tier_name}: {states}"] if states else []
    return "; ".join(parts)


def sparse_words(config: Config, num_heads: int) -> str:
    """Return words on a run's sparse attention that follow other words in a line; empty where it is dense."""
    structure = structure_of(config.attention, num_heads)
    if structure is None:
        return ""
    share = 100 * structure.layout(config.data.seq_len).causal_density
    return f", {config.attention.kind} attention over {share:.3g} % of the causal half"


def prepare_job_data(config: ResolvedConfig, progress: Progress | None = None, **shown: Any) -> PreparedData:
    """Tokenize the data into the cache beside the runs' folders, unless the cache has it, and open it.

    `shown` are the other arguments of `prepare_data` that show what it does.
    """
    data = prepare_data(config, Path(config.run.dir) / CACHE_NAME, progress, **shown)
    num_sequences, global_size = data.train.num_sequences(config.data.seq_len), config.batch.global_size or 1
    if global_size > _MAX_PASSES_A_STEP * num_sequences:
        raise ConfigError(
            "batch-exceeds-data",
            f"batch.global_size={global_size:,} would read the {num_sequences:,} sequences of the training data "
            f"{global_size // num_sequences:,} times in each step; use {num_sequences:,} or less, or give more data",
        )
    return data


def lent_data_line(config: Config) -> str:
    """Return a line where a model of the user's is fine-tuned without data of theirs, which may be an oversight."""
    if config.model.path is None or config.data.path is not None:
        return ""
    return (
        f"no data is given (--data, data.path): {config.model.path} trains on the source of Python's standard library"
    )


def with_steps(config: ResolvedConfig, data: PreparedData) -> ResolvedConfig:
    """Return the config with the steps that its epochs take, and a warm-up of a share of them where it has none."""
    run, scheduler, global_size = config.run, config.scheduler, config.batch.global_size or 1
    if run.epochs is None:
        return config
    num_steps = max(1, math.ceil(run.epochs * data.train.num_sequences(config.data.seq_len) / global_size))
    warmup_steps = scheduler.warmup_steps or max(1, round(_WARMUP_SHARE * num_steps))
    return ResolvedConfig.of(config.override([f"run.steps={num_steps}", f"scheduler.warmup_steps={warmup_steps}"]))


def create_folder(config: ResolvedConfig, now: datetime) -> Path:
    """Make the run's folder, `<run.dir>/<time>-<name>`, with the config in it; existing folders stay as they are.

    The time is never before that of a run in the folder, so a clock that is set back leaves the runs in order, and of
    two runs of one name the later has the later time.

    Raises:
        ConfigError: the folder cannot be made or written to.
    """
    root = Path(config.run.dir).expanduser()
    folder = None
    try:
        root.mkdir(parents=True, exist_ok=True)
        start = max([f"{now:{_TIME}}", *(time for time, _, _ in runs_in(root))])
        while folder is None:
            try:
                candidate = root / f"{start}-{config.run.name or model_name(config)}"
                candidate.mkdir()
                folder = candidate
            except FileExistsError:
                start = f"{datetime.strptime(start, _TIME) + timedelta(seconds=1):{_TIME}}"
        write_whole(folder / CONFIG_NAME, config.to_json() + "\n")
    except OSError as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        raise ConfigError(
            system_code(error, "folder-not-writable"),
            f"cannot write run.dir={config.run.dir}: {error.strerror}; set run.dir to a folder with free space that "
            "you may write to",
        ) from None
    return folder


def runs_in(root: Path) -> list[tuple[str, str, Path]]:
    """Return the time, the name and the folder of each run in `root`, newest first."""
    folders = [(_RUN_NAME.fullmatch(folder.name), folder) for folder in root.iterdir()] if root.is_dir() else []
    return sorted(((match[1], match[2], folder) for match, folder in folders if match), reverse=True)


def _job_defaults(config: Config, given: set[str]) -> dict[str, Any]:
    """Return default values by dotted key, for the keys that the user has not given."""
    row = wanted_kind(config.run.device)
    hardware = ("cpu with bf16" if has_fast_bf16() else "cpu") if row.is_cpu else "gpu"
    defaults: dict[str, Any] = {**_DEFAULTS, "precision.param": "fp32" if hardware == "cpu" else "bf16"}
    if config.model.path is not None:
        defaults |= _tuning_defaults(config)
        if "run.steps" in given:
            del defaults["run.epochs"]
    elif config.model.preset == "tiny":
        defaults |= {**_TINY_DEFAULTS, **_TINY_ON[hardware]}
    num_steps = config.run.steps if "run.steps" in given else defaults.get("run.steps", config.run.steps)
    if "run.epochs" not in given and "run.epochs" not in defaults:
        defaults["scheduler.warmup_steps"] = max(1, round(_WARMUP_SHARE * num_steps))
    if "batch.global_size" in given:
        del defaults["batch.micro_size"]  # it might contradict what the user gave
    return {key: value for key, value in defaults.items() if key not in given}


def _tuning_defaults(config: Config) -> dict[str, Any]:
    """Return what suits a model that knows its language already: a lower rate, longer samples, an epoch."""
    longest = HuggingFaceModel.open(config).longest or _TUNING_SEQ_LEN
    defaults = {"batch.micro_size": 1, "optimizer.lr": _LORA_LR if config.lora.rank else _TUNING_LR}
    return defaults | {"data.seq_len": min(longest, _TUNING_SEQ_LEN), "run.epochs": 1.0, "optimizer.weight_decay": 0.0}


def slow_dtype_line(config: Config) -> str:
    """Warn that a run on this CPU computes in a dtype that the CPU lacks; empty where it does not."""
    dtype = config.precision.param
    row = wanted_kind(config.run.device)
    if not row.is_cpu or dtype not in ("bf16", "fp16") or _has_in_hardware(dtype):
        return ""
    return (
        f"warning: precision.param={dtype}, which this CPU computes in software, up to a hundred times more slowly "
        "than fp32; set precision.param=fp32"
    )


def has_fast_bf16() -> bool:
    """Say whether this CPU multiplies bf16 in hardware, so that it is faster than fp32; False under an older torch."""
    return _has_in_hardware("bf16")


def _has_in_hardware(dtype: str) -> bool:
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(capabilities.get(f"avx512_{dtype}") or capabilities.get(f"amx_{dtype}"))
