"""Run the command `launch`: it prints, writes or starts what starts a program's ranks here or on a cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from shardwise.cli.command import FILE, OUTPUT, as_written, write_file
from shardwise.config.resolve import ConfigError, read_toml
from shardwise.launch.hosts import EXPORTED, read_hostfile, run_by_ssh
from shardwise.launch.local import default_num_ranks
from shardwise.launch.targets import PORT, TARGETS, LaunchJob, lines_of_hosts, text_for


@click.command(
    epilog=as_written("""
COMMAND is what Python gets, or shardwise train:

  shardwise launch --hosts n1,n2 --gpus 8 -- train.py --lr 1e-4               one line of ssh for each host
  shardwise launch --hosts n1,n2 --gpus 8 --submit -- train.py --lr 1e-4      starts it
  shardwise launch --on slurm --nodes 4 --gpus 8 -o job.sh -- shardwise train my.toml --resume auto
  shardwise launch --on jobset --nodes 4 --gpus 8 --image ghcr.io/me/train:1 -- -m my.module
  shardwise launch --on sky --nodes 2 --gpus H100:8 -- train.py
""")
)
@click.option("--on", type=click.Choice(tuple(TARGETS)), help="where (default: ssh with hosts, else local)")
@click.option("--nodes", type=int, metavar="N", help="machines (default: those of the hosts, else 1)")
@click.option("--gpus", metavar="[NAME:]N", help="GPUs of a node, a rank each")
@click.option("--hosts", metavar="A,B", help="machines to reach by ssh; the ranks meet at the first")
@click.option("--hostfile", type=FILE, help="the same as lines HOST slots=N")
@click.option("--max-restarts", type=int, default=0, metavar="N", help="start the ranks again after a failure")
@click.option("--name", metavar="NAME", help="of the job (default: after the program)")
@click.option("--image", metavar="IMAGE", help="of the container, on Kubernetes and SkyPilot")
@click.option("--time", metavar="D-HH:MM:SS", help="limit of Slurm's job")
@click.option("--port", type=int, default=PORT, help="where the ranks meet")
@click.option("-o", "--output", type=OUTPUT, help="write the text into a file")
@click.option("--submit", is_flag=True, help="start it")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
def launch(**given: Any) -> int:
    """Write what starts a program's ranks by torchrun: on hosts, Slurm, Kubernetes, SkyPilot or Ray."""
    arguments = SimpleNamespace(**given)
    job = _job(arguments)
    target = arguments.on or ("ssh" if job.hosts else "local")
    text = text_for(target, job)
    if arguments.output is not None:
        write_file(arguments.output, text)
    elif not arguments.submit:
        print(text, end="")
    return _submit(target, job, text) if arguments.submit else 0


def _job(arguments: SimpleNamespace) -> LaunchJob:
    program = program_of(arguments.command)
    match = re.fullmatch(r"(?:([\w.-]+):)?([1-9]\d{0,3})", arguments.gpus or "1", re.ASCII)
    if match is None:
        raise ConfigError("gpus-of-a-node", f"--gpus {arguments.gpus} is not N or NAME:N; write --gpus 8 or H100:8")
    hosts = _hosts(arguments, int(match[2]))
    if arguments.on not in (None, "ssh") and hosts:
        raise ConfigError("hosts-of-ssh", f"hosts are of --on ssh, which --on {arguments.on} is not; drop one")
    num_nodes = len(hosts) or arguments.nodes or 1
    for flag, number, least in (("nodes", arguments.nodes, 1), ("max-restarts", arguments.max_restarts, 0)):
        if number is not None and number < least:
            raise ConfigError("launch-number", f"--{flag} {number} is below {least}; give at least {least}")
    if hosts and arguments.nodes not in (None, num_nodes):
        raise ConfigError("nodes-are-hosts", f"--nodes {arguments.nodes} and {num_nodes} hosts; drop --nodes")
    if arguments.gpus is None and not arguments.hostfile and arguments.on not in (None, "local"):
        raise ConfigError("gpus-of-a-node", f"--on {arguments.on} needs the GPUs of a node; add --gpus 8")
    is_here = arguments.gpus is None and not hosts
    return LaunchJob(
        program,
        num_nodes,
        default_num_ranks("auto") if is_here else int(match[2]),
        arguments.name or _name_of(program),
        match[1],
        hosts,
        arguments.max_restarts,
        arguments.image,
        arguments.time,
        arguments.port,
        os.getcwd(),
        {name: value for name, value in os.environ.items() if name.startswith(EXPORTED)},
    )


def _hosts(arguments: SimpleNamespace, num_ranks: int) -> Mapping[str, int]:
    if arguments.hosts and arguments.hostfile:
        raise ConfigError("hosts-and-hostfile", "--hosts and --hostfile both name hosts; drop one")
    if arguments.hostfile is not None:
        found = read_hostfile(arguments.hostfile.read_text(encoding="utf-8").splitlines())
        return dict.fromkeys(found, num_ranks) if arguments.gpus else found
    names = [name for name in (arguments.hosts or "").split(",") if name]
    if names and arguments.gpus is None:
        raise ConfigError("gpus-of-a-node", "--hosts needs the GPUs of a host; add --gpus 8, or use a --hostfile")
    if len(set(names)) < len(names):
        raise ConfigError("host-twice", f"--hosts {arguments.hosts} has a host twice; name each once")
    return dict.fromkeys(names, num_ranks)


def program_of(command: Sequence[str]) -> tuple[str, ...]:
    """Return what Python gets of a command line.

    >>> program_of(["--", "shardwise", "train", "my.toml"])
    ('-m', 'shardwise', 'train', 'my.toml')
    >>> program_of(["python", "train.py"])
    ('train.py',)
    """
    words = list(command[command[:1] == ["--"] :])
    if words and re.fullmatch(r"python[\d.]*", Path(words[0]).name):
        del words[0]
    if words[:1] == ["shardwise"]:
        words[:0] = ["-m"]
    if not words:
        raise ConfigError("no-program", "no program was given; write shardwise launch ... -- train.py")
    if words[0] != "-m" and not words[0].endswith(".py"):
        raise ConfigError(
            "program-not-python", f"{words[0]} is no script of Python; write -- train.py, -m module or shardwise train"
        )
    return tuple(words)


def _name_of(program: Sequence[str]) -> str:
    """Return a job's name: that of the run of `shardwise train`, else the program's.

    >>> _name_of(("-m", "shardwise", "train", "my.toml", "run.name=Big_1"))
    'big-1'
    >>> _name_of(("-m", "shardwise", "train", "my.toml", "--resume", "auto"))
    'my'
    >>> _name_of(("train_all.py", "--lr", "1"))
    'train-all'
    """
    words = [word for word in program if not word.startswith("-")]
    if words[:2] == ["shardwise", "train"]:
        files = [word for word in words[2:] if "=" not in word and Path(word).suffix in (".toml", ".json")]
        given = [word.partition("=")[2] for word in words[2:] if word.startswith("run.name=")]
        for file in files[:1]:
            with suppress(ConfigError):
                run = read_toml(file).get("run")
                given.insert(0, str(run.get("name") or "") if isinstance(run, dict) else "")
        # What a run's config.json is called says nothing.
        words = [*filter(None, reversed(given)), *(file for file in files if Path(file).stem != "config"), "train"]
    name = re.sub(r"[^a-z0-9]+", "-", Path(words[0]).stem.lower()) if words else ""
    return name.lstrip("-0123456789")[:40].strip("-") or "train"


def _submit(target: str, job: LaunchJob, text: str) -> int:
    if target == "ssh":
        return run_by_ssh(lines_of_hosts(job))
    command = TARGETS[target].start
    # The text names torchrun: this interpreter's is the one that sees this library.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    suffix = {"slurm": ".sh", "ray": ".py"}.get(target, ".yaml")
    with tempfile.NamedTemporaryFile("w", prefix=f"{job.name}-", suffix=suffix, encoding="utf-8") as file:
        file.write(text)
        file.flush()
        try:
            return subprocess.run([*command, file.name], check=False, env={**os.environ, "PATH": path}).returncode
        except FileNotFoundError:
            raise ConfigError(
                "submitter-not-found", f"--on {target} is started by {command[0]}, which is not on PATH; install it"
            ) from None
