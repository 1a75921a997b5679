"""This module makes the texts that start a program's ranks on one machine, on hosts or on a cluster, by torchrun.

>>> job = LaunchJob(("train.py", "--lr", "1e-3"), num_nodes=2, num_ranks_per_node=8, name="train")
>>> print(shlex.join(torchrun(job, c10d("n1:29500", "train"))))
torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint n1:29500 --rdzv-id train train.py --lr 1e-3
>>> print(text_for("local", dataclasses.replace(job, num_nodes=1)), end="")
torchrun --standalone --nproc-per-node 8 train.py --lr 1e-3

A text is in a language: of a shell, YAML, Python. Each value is checked when the job is made, and written by the
language's own writer, so that what comes from outside is data in it. The words that a target is to fill in, such as the
number of the node, are marked (`_Filled`): whatever else looks like one is written so that the target leaves it alone.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import shown_value
from shardwise.launch import checks
from shardwise.launch.hosts import remote_line, secrets, ssh_command

PORT: Final = 29500
# What a pre-empted rank has for its step and its save, of the seconds between a cluster's signal and its kill.
NOTICE_S: Final = 300
_SAVED_S: Final = 30
_TEMPLATES: Final = Path(__file__).with_name("templates")
# torchrun under a name that needs no PATH on the other host.
_MODULE: Final = (sys.executable, "-m", "torch.distributed.run")
_NAME: Final = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
# Where Kubernetes would read more than the character: $$ is its $, $(NAME) a value. Its reader takes the first byte
# after another $ for a character, which breaks those of several bytes.
_READ_BY_KUBERNETES: Final = re.compile(r"\$(?=[$(]|[^\x00-\x7f])")


@dataclass(frozen=True)
class LaunchJob:
    """Says what is to run, and on what.

    Attributes:
        program: what Python gets: `-m MODULE ...` or `SCRIPT.py ...`.
        num_ranks_per_node: one for each GPU of a machine.
        gpu: the GPUs' name, where a cluster asks for it.
        hosts: by name, with the ranks of each; for ssh.
        max_restarts: how often the ranks are started again after a failure.
        time_limit: as Slurm writes it; None for the partition's.
        port: where the ranks meet, on the host of rank 0.
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

    def __post_init__(self) -> None:
        for argument in self.program:
            checks.word(argument, "the argument")
        checks.python_file(self.program)
        checks.count(self.num_nodes, "--nodes", 1, checks.MOST_NODES)
        checks.count(self.num_ranks_per_node, "--gpus", 1, checks.MOST_RANKS)
        checks.count(self.max_restarts, "--max-restarts", 0, checks.MOST_RESTARTS)
        checks.port(self.port, "--port")
        for host, num_ranks in self.hosts.items():
            checks.host(host, "--hosts")
            checks.count(num_ranks, f"{host} slots", 1, checks.MOST_RANKS)
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                "job-name",
                f"--name {shown_value(self.name)} is no name of a cluster's job; use a-z, 0-9 and -, at most 40, a-z "
                "first",
            )
        if self.time_limit is not None:
            checks.time_limit(self.time_limit, "--time")
        if self.image is not None:
            checks.image(self.image, "--image")


@dataclass(frozen=True)
class Target:
    """Says how the text of a target is made, checked and started.

    Attributes:
        start: the command that starts it, given the text's file; empty where the lines of hosts are run.
        needs: attributes of the job that must be given, each with the flag that does.
        takes: of the attributes that not every target has a use for, those that it also takes.
    """

    write: Callable[[LaunchJob], str]
    start: tuple[str, ...]
    needs: Mapping[str, str] = field(default_factory=dict)
    takes: frozenset[str] = frozenset()


class _Filled(str):
    """A word that the target fills in, where all others are what the user gave."""


def torchrun(job: LaunchJob, meeting: Sequence[str] = (), num_ranks: int | None = None) -> list[str]:
    """Return the command that starts one node's ranks.

    Args:
        meeting: how several nodes meet, as `c10d` or `static` says.
        num_ranks: of this node; None for the job's.
    """
    where = ["--standalone"] if job.num_nodes == 1 else ["--nnodes", str(job.num_nodes)]
    ranks = ["--nproc-per-node", str(num_ranks or job.num_ranks_per_node)]
    return ["torchrun", *where, *ranks, *(meeting if job.num_nodes > 1 else ()), *_restarts(job), *_program(job)]


def _restarts(job: LaunchJob) -> list[str]:
    return ["--max-restarts", str(job.max_restarts)] if job.max_restarts else []


def _program(job: LaunchJob) -> list[str]:
    """Return the program as torchrun takes it: the first -- after a script is lost there, unless one is before it."""
    flags = int(job.program[0] == "-m")
    first = ["--"] if job.program[flags + 1 : flags + 2] == ("--",) else []
    return [*job.program[:flags], *first, *job.program[flags:]]


def c10d(endpoint: str, run_id: str) -> list[str]:
    """Let nodes meet where each may start the same command: a node whose ranks fail calls the others to a new round."""
    return ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", run_id]


def static(node_rank: str, address: str, port: int) -> list[str]:
    """Let nodes meet that know their rank; what restarts them is outside, such as Kubernetes.

    Args:
        node_rank: of the node that runs the command.
        address: of the node of rank 0.
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
    if target == "local" and job.num_nodes > 1:
        raise ConfigError(
            "local-is-one-node", f"--nodes {job.num_nodes} are more than this machine; use --hosts, or --on slurm"
        )
    return TARGETS[target].write(job)


def left_out(target: str, job: LaunchJob) -> list[str]:
    """Return the flags of a job that a target has no use for."""
    uses = {*TARGETS[target].takes, *TARGETS[target].needs}
    keys_given = {"gpu": job.gpu, "image": job.image, "time_limit": job.time_limit, "port": job.port != PORT}
    flags = {"gpu": f"{job.gpu}: of --gpus", "image": "--image", "time_limit": "--time", "port": "--port"}
    return [flags[name] for name, is_given in keys_given.items() if is_given and name not in uses]


def lines_of_hosts(job: LaunchJob) -> dict[str, str]:
    """Return what the shell of each host runs; the hosts reach each other by the names that the job has for them.

    It has no secrets: others may read it, be it in a file or among a machine's processes.
    """
    left = frozenset(secrets(job.exports))
    exports = {name: value for name, value in job.exports.items() if name not in left}
    names = [host.rpartition("@")[2] for host in job.hosts]
    endpoint = f"[{names[0]}]:{job.port}" if ":" in names[0] else f"{names[0]}:{job.port}"
    lines = {}
    for number, (host, num_ranks) in enumerate(job.hosts.items()):
        meeting = [*c10d(endpoint, job.name), "--rdzv-conf", f"is_host={int(number == 0)}"]
        command = torchrun(job, [*meeting, "--local-addr", names[number]], num_ranks)
        lines[host] = remote_line([*_MODULE, *command[1:]], exports, job.folder)
    return lines


def _local(job: LaunchJob) -> str:
    return shlex.join(torchrun(job)) + "\n"


def _ssh(job: LaunchJob) -> str:
    lines = lines_of_hosts(job)
    started = [shlex.join(ssh_command(host, line, sent=secrets(job.exports))) + " &" for host, line in lines.items()]
    return "\n".join(["#!/bin/sh", *started, "wait", ""])


def _slurm(job: LaunchJob) -> str:
    gpus = f"{job.gpu}:{job.num_ranks_per_node}" if job.gpu else job.num_ranks_per_node
    time = "" if job.time_limit is None else f"#SBATCH --time={job.time_limit}\n"
    head = 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\nport=$((10000 + SLURM_JOB_ID % 20000))\n'
    command = _shell(torchrun(job, c10d(_Filled("$head:$port"), _Filled("$SLURM_JOB_ID"))))
    return _fill("slurm.sh", job, gpus=gpus, time=time, head=head if job.num_nodes > 1 else "", command=command)


def _trainjob(job: LaunchJob) -> str:
    return _fill_yaml("trainjob.yaml", job, command=_kubernetes(["torchrun", *_restarts(job), *_program(job)]))


def _jobset(job: LaunchJob) -> str:
    meeting = static(_Filled("$(JOB_COMPLETION_INDEX)"), f"{job.name}-node-0-0.{job.name}", job.port)
    return _fill_yaml(
        "jobset.yaml", job, command=_kubernetes(torchrun(dataclasses.replace(job, max_restarts=0), meeting))
    )


def _sky(job: LaunchJob) -> str:
    lines = [] if job.num_nodes == 1 else ['head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)']
    lines.append(f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={NOTICE_S - _SAVED_S}")
    lines.append(_shell(torchrun(job, static(_Filled("$SKYPILOT_NODE_RANK"), _Filled("$head"), job.port))))
    text = "".join(f"{line}\n" for line in lines)
    image = f"docker:{job.image}" if job.image else None
    return _fill_yaml("sky.yaml", job, gpus=f"{job.gpu}:{job.num_ranks_per_node}", image=image, run=text)


def _ray(job: LaunchJob) -> str:
    program = _program(job)
    start = torchrun(dataclasses.replace(job, max_restarts=0))[1 : -len(program)]
    meeting = ', "--node-rank", str(node), "--master-addr", address, "--master-port", str(port)'
    command = repr(start)[:-1] + (meeting if job.num_nodes > 1 else "") + "]"
    return _fill("ray.py.txt", job, program=repr(program), command=command)


class _Template(string.Template):
    """Has values as %name, since the texts are full of $."""

    delimiter = "%"


def _values(job: LaunchJob) -> dict[str, object]:
    """Return the values that several templates have."""
    return {
        "name": job.name,
        "nodes": job.num_nodes,
        "ranks": job.num_ranks_per_node,
        "restarts": job.max_restarts,
        "image": job.image,
        "port": job.port,
        "notice": NOTICE_S,
        "patience": str(NOTICE_S - _SAVED_S),
    }


def _fill(template: str, job: LaunchJob, **values: object) -> str:
    """Fill in a template with what is written in its language already."""
    return _Template((_TEMPLATES / template).read_text(encoding="utf-8")).substitute(_values(job) | values)


def _fill_yaml(template: str, job: LaunchJob, **values: object) -> str:
    """Fill in the places of a tree, which a writer of YAML writes: None leaves its key out."""
    import yaml

    class Writer(yaml.SafeDumper):
        pass

    text = (_TEMPLATES / template).read_text(encoding="utf-8")
    comments = "".join(f"{line}\n" for line in text.splitlines() if line.startswith("#"))
    tree = _filled(yaml.safe_load(text), _values(job) | values)
    # In quotes: what is a string to this writer alone, such as 1e-3, is one to every reader then.
    Writer.add_representer(
        _Given, lambda writer, value: writer.represent_scalar("tag:yaml.org,2002:str", str(value), style=_style(value))
    )
    return comments + yaml.dump(tree, Dumper=Writer, sort_keys=False, allow_unicode=True, width=sys.maxsize)


class _Given(str):
    """A string of a tree that is no part of its template."""


def _style(text: str) -> str:
    """Return how YAML writes a string: lines are for people to read, where all readers agree on what a line is."""
    return "|" if "\n" in text and all(char == "\n" or char.isprintable() for char in text) else '"'


def _filled(node: Any, values: Mapping[str, object]) -> Any:
    if isinstance(node, dict):
        filled = {key: _filled(value, values) for key, value in node.items()}
        return {key: value for key, value in filled.items() if value is not None}
    if isinstance(node, list):
        return [_filled(item, values) for item in node]
    value = values[node[1:]] if isinstance(node, str) and node.startswith("%") else node
    if isinstance(value, list):
        return [_Given(item) for item in value]
    return _Given(value) if isinstance(value, str) and value is not node else value


def _shell(words: Sequence[str]) -> str:
    """Join the words of a command of bash, in which the shell fills in those that are marked.

    sbatch refuses a script with a carriage return at the end of a line, so it is written as an escape.
    """
    return " ".join(
        f'"{word}"' if isinstance(word, _Filled) else shlex.quote(word).replace("\r", "'$'\\r''") for word in words
    )


def _kubernetes(words: Sequence[str]) -> list[str]:
    """Return the words of a container's command, in which Kubernetes fills in those that are marked."""
    return [word if isinstance(word, _Filled) else _READ_BY_KUBERNETES.sub("$$", word) for word in words]


_GPU: Final = MappingProxyType({"gpu": "the GPUs' name, such as --gpus H100:8"})
_IMAGE: Final = MappingProxyType({"image": "the container with the program, such as --image ghcr.io/me/train:1"})
_HOSTS: Final = MappingProxyType({"hosts": "hosts, such as --hosts a,b or --hostfile FILE"})
TARGETS: Final[Mapping[str, Target]] = MappingProxyType(
    {
        "local": Target(_local, ("sh",)),
        "ssh": Target(_ssh, (), _HOSTS, frozenset({"port"})),
        "slurm": Target(_slurm, ("sbatch",), takes=frozenset({"gpu", "time_limit"})),
        "trainjob": Target(_trainjob, ("kubectl", "create", "-f"), _IMAGE),
        "jobset": Target(_jobset, ("kubectl", "create", "-f"), _IMAGE, frozenset({"port"})),
        "sky": Target(_sky, ("sky", "launch", "--yes"), _GPU, frozenset({"image", "port"})),
        "ray": Target(_ray, (sys.executable,)),
    }
)
