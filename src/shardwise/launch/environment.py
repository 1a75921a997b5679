"""This module reads which rank this process is from the environment that its launcher left.

It understands torchrun's contract, which `shardwise.launch.local` and most wrappers follow too, and Slurm's srun. It
is not a launcher and changes nothing.

>>> srun = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_STEP_NUM_TASKS": "4",
...         "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
>>> env = detect(srun)
>>> env.launcher, env.rank, env.world_size, env.local_rank, env.master_addr, env.master_port
('slurm', 3, 4, 1, 'gpu03', 10007)
>>> detect({"RANK": "0"})
Traceback (most recent call last):
    ...
shardwise.config.errors.ConfigError: RANK is set but WORLD_SIZE is not; start with torchrun, which sets all, \
or unset RANK
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import shown_value
from shardwise.launch import checks

Launcher = Literal["local", "torchrun", "slurm", "none"]

# Set by `shardwise.launch.local`: a pipe that ends when the launcher dies, and for how long it may be stopped.
LAUNCHER_FD = "SHARDWISE_LAUNCHER_FD"
LAUNCHER_PATIENCE_S = "SHARDWISE_LAUNCHER_PATIENCE_S"

# How many queues of a GPU take work at the same time. By default they are 8, fewer than a pipeline has streams: streams
# that share one wait for each other, and a receive that is posted early may hold up the send that the other end needs.
QUEUES_NAME, NUM_QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS", 32

# Below the range from which Linux takes the ports of outgoing connections.
_FIRST_PORT, _NUM_PORTS = 10_000, 20_000


@dataclass(frozen=True)
class RankEnv:
    """Holds one rank's place in the world and the address where the ranks meet.

    `attempt` counts a launcher's restarts on this machine only. `agent_store` says that the launcher holds the store,
    and not rank 0. `cache` is the folder for what was measured of this machine; None where none is given.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    attempt: int
    launcher: Launcher
    agent_store: bool = False
    cache: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                "rank-below-world-size",
                f"rank {self.rank} is not below world size {self.world_size}; ranks count from 0 to "
                f"{self.world_size - 1}: give every process its own",
            )
        if not 0 <= self.local_rank < self.local_world_size <= self.world_size:
            raise ConfigError(
                "local-rank-fits",
                f"local rank {self.local_rank} of {self.local_world_size} on this machine does not fit world size "
                f"{self.world_size}; need 0 <= LOCAL_RANK < LOCAL_WORLD_SIZE <= WORLD_SIZE",
            )


def lone_rank() -> RankEnv:
    """Return the environment of a process that no launcher started: rank 0 of 1."""
    return RankEnv(0, 0, 1, 1, "127.0.0.1", 0, attempt=0, launcher="none")


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder for what was measured of this machine, by the XDG base directory specification.

    >>> print(cache_folder({"XDG_CACHE_HOME": "/fast/cache"}))
    /fast/cache/shardwise
    """
    folder = environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else Path.home() / ".cache") / "shardwise"


def detect(environ: Mapping[str, str]) -> RankEnv | None:
    """Read which rank a launcher made this process; None where no launcher did.

    A Slurm allocation without srun (a batch script, an interactive shell) and a step of one task are no launch: ranks
    may still be started from there.

    Raises:
        ConfigError: the environment is incomplete or contradicts itself.
    """
    # torchrun inside srun sets RANK; an srun step may carry MASTER_ADDR or WORLD_SIZE that its script exported.
    if "RANK" in environ:
        return _from_torchrun(environ)
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        env = _from_srun(environ)
        return env if env.world_size > 1 else None
    for name in ("LOCAL_RANK", "WORLD_SIZE"):
        if name in environ:
            raise ConfigError(
                "rank-unset", f"{name} is set but RANK is not; start with torchrun, which sets all, or unset {name}"
            )
    return None


def _from_torchrun(environ: Mapping[str, str]) -> RankEnv:
    for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        if name not in environ:
            raise ConfigError(
                "launcher-variable-unset",
                f"RANK is set but {name} is not; start with torchrun, which sets all, or unset RANK",
            )
    is_local = LAUNCHER_FD in environ
    world_size = _integer(environ, "WORLD_SIZE")
    return RankEnv(
        rank=_integer(environ, "RANK"),
        local_rank=_integer(environ, "LOCAL_RANK"),
        world_size=world_size,
        local_world_size=_integer(environ, "LOCAL_WORLD_SIZE", default=world_size),
        master_addr=_address(environ),
        master_port=_port(environ),
        attempt=_integer(environ, "TORCHELASTIC_RESTART_COUNT", default=0),
        launcher="local" if is_local else "torchrun",
        agent_store=is_local or environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _from_srun(environ: Mapping[str, str]) -> RankEnv:
    names = ("SLURM_JOB_ID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")
    for name in (*names, "SLURM_STEP_TASKS_PER_NODE"):
        if name not in environ:
            raise ConfigError(
                "slurm-variable-unset",
                f"SLURM_PROCID is set but {name} is not; start with srun or torchrun, which set all",
            )
    tasks_per_node = _tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
    node = _integer(environ, "SLURM_NODEID")
    if node >= len(tasks_per_node):
        raise ConfigError(
            "slurm-node-id",
            f"SLURM_NODEID={node} is not one of the {len(tasks_per_node)} nodes of SLURM_STEP_TASKS_PER_NODE="
            f"{environ['SLURM_STEP_TASKS_PER_NODE']}; start with srun and pass its variables on unchanged",
        )
    # Steps of one job, and jobs with neighbouring ids, may share the first node: their ports must differ.
    offset = _integer(environ, "SLURM_JOB_ID") + 1009 * _integer(environ, "SLURM_STEP_ID")
    return RankEnv(
        rank=_integer(environ, "SLURM_PROCID"),
        local_rank=_integer(environ, "SLURM_LOCALID"),
        world_size=_integer(environ, "SLURM_STEP_NUM_TASKS"),
        local_world_size=tasks_per_node[node],
        master_addr=_address(environ) if environ.get("MASTER_ADDR") else first_host(environ["SLURM_STEP_NODELIST"]),
        master_port=_port(environ) if "MASTER_PORT" in environ else _FIRST_PORT + offset % _NUM_PORTS,
        attempt=_integer(environ, "SLURM_RESTART_COUNT", default=0),
        launcher="slurm",
    )


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list; srun puts rank 0 there.

    >>> first_host("rack[1-2]n[007-009,12],login1")
    'rack1n007'
    """
    match = re.match(r"(?:[^\[\],]|\[[^\[\]]+\])+", nodelist)
    if match is None or nodelist[match.end() :][:1] not in ("", ","):
        raise ConfigError(
            "slurm-node-list",
            f"SLURM_STEP_NODELIST={shown_value(nodelist)} is not a node list such as n[1-4,7],m1; set MASTER_ADDR",
        )
    host = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match.group())
    return checks.host(host, "SLURM_STEP_NODELIST", has_user=False)


def _tasks_per_node(text: str) -> list[int]:
    """Read a list of Slurm's: `2(x3),1` is 2, 2, 2, 1."""
    counts: list[int] = []
    for field in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:\(x(\d{1,9})\))?", field, re.ASCII)
        if match is None or len(counts) + int(match[2] or 1) > checks.MOST_NODES:
            raise ConfigError(
                "slurm-tasks-per-node",
                f"SLURM_STEP_TASKS_PER_NODE={shown_value(text)} is not a list such as 2(x3),1; start with srun",
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"\d{1,18}", text, re.ASCII):
        raise ConfigError(
            "launcher-number", f"{name}={shown_value(text)} is not a whole number from 0; let the launcher set it"
        )
    return int(text)


def _address(environ: Mapping[str, str]) -> str:
    return checks.host(environ["MASTER_ADDR"], "MASTER_ADDR", has_user=False)


def _port(environ: Mapping[str, str]) -> int:
    return checks.port(_integer(environ, "MASTER_PORT"), "MASTER_PORT=")
