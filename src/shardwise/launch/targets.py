"""This module makes the texts that start a program's ranks on one machine, on hosts or on a cluster, by torchrun.

>>> job = LaunchJob(("train.py", "--lr", "1e-3"), num_nodes=2, num_ranks_per_node=8, name="train")
>>> print(shlex.join(torchrun(job, c10d("n1:29500", "train"))))
torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint n1:29500 --rdzv-id train train.py --lr 1e-3
>>> print(text_for("local", dataclasses.replace(job, num_nodes=1)), end="")
torchrun --standalone --nproc-per-node 8 train.py --lr 1e-3
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from shardwise.config.resolve import ConfigError
from shardwise.launch.hosts import remote_line, ssh_command

PORT: Final = 29500
# What a pre-empted rank has for its step and its save, of the seconds between a cluster's signal and its kill.
NOTICE_S: Final = 300
_TEMPLATES: Final = Path(__file__).with_name("templates")
# torchrun under a name that needs no PATH on the other host.
_MODULE: Final = (sys.executable, "-m", "torch.distributed.run")


@dataclass(frozen=True)
class LaunchJob:
    """Says what is to run, and on what.

    Attributes:
        program: what Python gets: `-m MODULE ...` or `SCRIPT.py ...`.
        num_nodes: machines.
        num_ranks_per_node: one for each GPU.
        name: of the job.
        gpu: the GPUs' name, where a cluster asks for it.
        hosts: by name, with the ranks of each; for ssh.
        max_restarts: how often the ranks are started again after a failure.
        image: of the container.
        time_limit: as Slurm writes it; None for the partition's.
        port: where the ranks meet.
        folder: where the program runs, on every host.
        exports: variables that every host gets by ssh.
    """

    program: tuple[str, ...]
    num_nodes: int
    num_ranks_per_node: int
    name: str
    gpu: str | None = None
    hosts: Mapping[str, int] = field(default_factory=dict)
    max_restarts: int = 0
    image: str | None = None
    time_limit: str | None = None
    port: int = PORT
    folder: str = "."
    exports: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """Says how the text of a target is made, checked and started.

    Attributes:
        write: makes the text.
        start: the command that starts it, given the text's file; empty where the lines of hosts are run.
        needs: attributes of the job that must be given, each with the flag that does.
    """

    write: Callable[[LaunchJob], str]
    start: tuple[str, ...]
    needs: Mapping[str, str] = field(default_factory=dict)


def torchrun(job: LaunchJob, meeting: Sequence[str] = (), num_ranks: int | None = None) -> list[str]:
    """Return the command that starts one node's ranks.

    Args:
        job: what runs.
        meeting: how several nodes meet, as `c10d` or `static` says.
        num_ranks: of this node; None for the job's.
    """
    where = ["--standalone"] if job.num_nodes == 1 else ["--nnodes", str(job.num_nodes)]
    restarts = ["--max-restarts", str(job.max_restarts)] if job.max_restarts else []
    ranks = ["--nproc-per-node", str(num_ranks or job.num_ranks_per_node)]
    return ["torchrun", *where, *ranks, *(meeting if job.num_nodes > 1 else ()), *restarts, *job.program]


def c10d(endpoint: str, run_id: str) -> list[str]:
    """Let nodes meet where each may start the same command: a node whose ranks fail calls the others to a new round."""
    return ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", run_id]


def static(node_rank: str, address: str, port: int) -> list[str]:
    """Let nodes meet that know their rank; what restarts them is outside, such as Kubernetes.

    Args:
        node_rank: of the node that runs the command.
        address: of the node of rank 0.
        port: on that node.
    """
    return ["--node-rank", node_rank, "--master-addr", address, "--master-port", str(port)]


def text_for(target: str, job: LaunchJob) -> str:
    """Return the text that starts a job on a target.

    Raises:
        ConfigError: the job lacks what the target needs.
    """
    for attribute, flag in TARGETS[target].needs.items():
        if not getattr(job, attribute):
            raise ConfigError("target-needs", f"--on {target} needs {flag}; add it")
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", job.name):
        raise ConfigError(
            "job-name", f"--name {job.name} is no name of a cluster's job; use a-z, 0-9 and -, at most 40, a-z first"
        )
    if target == "local" and job.num_nodes > 1:
        raise ConfigError(
            "local-is-one-node", f"--nodes {job.num_nodes} are more than this machine; use --hosts, or --on slurm"
        )
    return TARGETS[target].write(job)


def lines_of_hosts(job: LaunchJob) -> dict[str, str]:
    """Return what the shell of each host runs; the hosts reach each other by the names that the job has for them."""
    names = [host.rpartition("@")[2] for host in job.hosts]
    lines = {}
    for number, (host, num_ranks) in enumerate(job.hosts.items()):
        meeting = [*c10d(f"{names[0]}:{job.port}", job.name), "--rdzv-conf", f"is_host={int(number == 0)}"]
        command = torchrun(job, [*meeting, "--local-addr", names[number]], num_ranks)
        lines[host] = remote_line([*_MODULE, *command[1:]], job.exports, job.folder)
    return lines


def _local(job: LaunchJob) -> str:
    return shlex.join(torchrun(job)) + "\n"


def _ssh(job: LaunchJob) -> str:
    started = [shlex.join(ssh_command(host, line)) + " &" for host, line in lines_of_hosts(job).items()]
    return "\n".join(["#!/bin/sh", *started, "wait", ""])


def _slurm(job: LaunchJob) -> str:
    gpus = f"{job.gpu}:{job.num_ranks_per_node}" if job.gpu else job.num_ranks_per_node
    time = "" if job.time_limit is None else f"#SBATCH --time={job.time_limit}\n"
    head = 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\nport=$((10000 + SLURM_JOB_ID % 20000))\n'
    command = _shell(torchrun(job, c10d("$head:$port", "$SLURM_JOB_ID")))
    return _fill("slurm.sh", job, gpus=gpus, time=time, head=head if job.num_nodes > 1 else "", command=command)


def _trainjob(job: LaunchJob) -> str:
    restarts = ["--max-restarts", str(job.max_restarts)] if job.max_restarts else []
    return _fill("trainjob.yaml", job, command=json.dumps(["torchrun", *restarts, *job.program]))


def _jobset(job: LaunchJob) -> str:
    meeting = static("$(JOB_COMPLETION_INDEX)", f"{job.name}-node-0-0.{job.name}", job.port)
    command = torchrun(dataclasses.replace(job, max_restarts=0), meeting)
    return _fill("jobset.yaml", job, command=json.dumps(command))


def _sky(job: LaunchJob) -> str:
    command = _shell(torchrun(job, static("$SKYPILOT_NODE_RANK", "$head", job.port)))
    head = "" if job.num_nodes == 1 else 'head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n  '
    image = f"  image_id: {json.dumps(f'docker:{job.image}')}" if job.image else ""
    gpus = json.dumps(f"{job.gpu}:{job.num_ranks_per_node}")
    return _fill("sky.yaml", job, gpus=gpus, image=image, head=head, command=command)


def _ray(job: LaunchJob) -> str:
    start = json.dumps(torchrun(dataclasses.replace(job, program=(), max_restarts=0))[1:])
    meeting = ', "--node-rank", str(node), "--master-addr", address, "--master-port", str(port)'
    command = start[:-1] + (meeting if job.num_nodes > 1 else "") + "]"
    return _fill("ray.py.txt", job, program=json.dumps(job.program), command=command)


class _Template(string.Template):
    """Has values as %name, since the texts are full of $."""

    delimiter = "%"


def _fill(template: str, job: LaunchJob, **values: object) -> str:
    """Fill in a template's own values, and those that several templates have."""
    shared = {
        "name": job.name,
        "nodes": job.num_nodes,
        "ranks": job.num_ranks_per_node,
        "restarts": job.max_restarts,
        "image": json.dumps(job.image),
        "port": job.port,
        "notice": NOTICE_S,
        "patience": NOTICE_S - 30,
    }
    return _Template((_TEMPLATES / template).read_text(encoding="utf-8")).substitute(shared | values)


def _shell(words: Sequence[str]) -> str:
    """Join the words of a command; the shell fills in those that begin with $."""
    return " ".join(f'"{word}"' if re.fullmatch(r"(\$\w+:?)+", word) else shlex.quote(word) for word in words)


_GPU: Final = MappingProxyType({"gpu": "the GPUs' name, such as --gpus H100:8"})
_IMAGE: Final = MappingProxyType({"image": "the container with the program, such as --image ghcr.io/me/train:1"})
TARGETS: Final[Mapping[str, Target]] = MappingProxyType(
    {
        "local": Target(_local, ("sh",)),
        "ssh": Target(_ssh, (), MappingProxyType({"hosts": "hosts, such as --hosts a,b or --hostfile FILE"})),
        "slurm": Target(_slurm, ("sbatch",)),
        "trainjob": Target(_trainjob, ("kubectl", "create", "-f"), _IMAGE),
        "jobset": Target(_jobset, ("kubectl", "create", "-f"), _IMAGE),
        "sky": Target(_sky, ("sky", "launch", "--yes"), _GPU),
        "ray": Target(_ray, (sys.executable,)),
    }
)
