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

from shardwise.cli.command import FILE, Choice, OutputFile, as_written
from shardwise.config.errors import ConfigError, printable
from shardwise.config.resolve import read_toml, shown_value
from shardwise.config.untrusted_files import read_text
from shardwise.config.written_files import write_asked
from shardwise.launch.checks import folder_here, host, python_file
from shardwise.launch.hosts import exported, read_hostfile, run_by_ssh, secrets
from shardwise.launch.local import default_num_ranks
from shardwise.launch.targets import PORT, TARGETS, LaunchJob, left_out, lines_of_hosts, text_for


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
@click.option("--on", type=Choice(tuple(TARGETS)), help="where (default: ssh with hosts, else local)")
@click.option("--nodes", type=int, metavar="N", help="machines (default: those of the hosts, else 1)")
@click.option("--gpus", metavar="[NAME:]N", help="GPUs of a node, a rank each")
@click.option("--hosts", metavar="A,B", help="machines to reach by ssh; the ranks meet at the first")
@click.option("--hostfile", type=FILE, help="the same as lines HOST slots=N")
@click.option("--max-restarts", type=int, default=0, metavar="N", help="start the ranks again after a failure")
@click.option("--name", metavar="NAME", help="of the job (default: after the program)")
@click.option("--image", metavar="IMAGE", help="of the container, on Kubernetes and SkyPilot")
@click.option("--time", metavar="D-HH:MM:SS", help="limit of Slurm's job")
@click.option("--port", type=int, default=PORT, help="where the ranks meet")
@click.option("-o", "--output", type=OutputFile(), help="write the text into a file")
@click.option("--submit", is_flag=True, help="start it")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
def launch(**given: Any) -> int:
    """Write what starts a program's ranks by torchrun: on hosts, Slurm, Kubernetes, SkyPilot or Ray."""
    arguments = SimpleNamespace(**given)
    job = _job(arguments)
    target = arguments.on or ("ssh" if job.hosts else "local")
    text = text_for(target, job)
    for flag in left_out(target, job):
        _note(f"--on {target} has no use for {flag}")
    if arguments.output is not None:
        # Only its owner may read what holds values of the environment.
        write_asked(arguments.output, text, 0o700 if target == "ssh" else 0o666)
    elif not arguments.submit:
        print(text, end="")
    if target == "ssh" and (arguments.output is not None or not arguments.submit):
        _tell_secrets(secrets(job.exports))
    return _submit(target, job, text) if arguments.submit else 0


def _note(words: str) -> None:
    print(printable(f"shardwise: {words}"), file=sys.stderr)


def _tell_secrets(names: Sequence[str]) -> None:
    if names:
        listed = " ".join(names)
        _note(
            f"the text does not have the values of {listed}, which look like secrets; ssh sends them where a host's "
            f"sshd has AcceptEnv {listed}, else set them on the hosts, or start with --submit"
        )


def _job(arguments: SimpleNamespace) -> LaunchJob:
    program = program_of(arguments.command)
    match = re.fullmatch(r"(?:([\w.-]+):)?([1-9]\d{0,3})", "1" if arguments.gpus is None else arguments.gpus, re.ASCII)
    if match is None:
        raise ConfigError(
            "gpus-of-a-node", f"--gpus {shown_value(arguments.gpus)} is not N or NAME:N; write --gpus 8 or H100:8"
        )
    hosts = _hosts(arguments, int(match[2]))
    if arguments.on not in (None, "ssh") and hosts:
        raise ConfigError("hosts-of-ssh", f"hosts are of --on ssh, which --on {arguments.on} is not; drop one")
    if hosts and arguments.nodes not in (None, len(hosts)):
        raise ConfigError("nodes-are-hosts", f"--nodes {arguments.nodes} and {len(hosts)} hosts; drop --nodes")
    if arguments.gpus is None and not arguments.hostfile and arguments.on not in (None, "local"):
        raise ConfigError("gpus-of-a-node", f"--on {arguments.on} needs the GPUs of a node; add --gpus 8")
    is_here = arguments.gpus is None and not hosts
    return LaunchJob(
        program,
        len(hosts) or (1 if arguments.nodes is None else arguments.nodes),
        default_num_ranks("auto") if is_here else int(match[2]),
        _name_of(program) if arguments.name is None else arguments.name,
        match[1],
        hosts,
        arguments.max_restarts,
        arguments.image,
        arguments.time,
        arguments.port,
        folder_here(),
        exported(os.environ) if hosts else {},
    )


def _hosts(arguments: SimpleNamespace, num_ranks: int) -> Mapping[str, int]:
    if arguments.hosts is not None and arguments.hostfile is not None:
        raise ConfigError("hosts-and-hostfile", "--hosts and --hostfile both name hosts; drop one")
    if arguments.hostfile is not None:
        hosts = read_hostfile(read_text(arguments.hostfile, "give --hostfile lines HOST slots=N").splitlines())
        return dict.fromkeys(hosts, num_ranks) if arguments.gpus else hosts
    if arguments.hosts is None:
        return {}
    names = [host(name.strip(" "), "--hosts") for name in arguments.hosts.removesuffix(",").split(",")]
    if arguments.gpus is None:
        raise ConfigError("gpus-of-a-node", "--hosts needs the GPUs of a host; add --gpus 8, or use a --hostfile")
    if len(set(names)) < len(names):
        raise ConfigError("host-twice", f"--hosts {shown_value(arguments.hosts)} has a host twice; name each once")
    return dict.fromkeys(names, num_ranks)


def program_of(command: Sequence[str]) -> tuple[str, ...]:
    """Return what Python gets of a command line.

    >>> program_of(["--", "shardwise", "train", "my.toml"])
    ('-m', 'shardwise', 'train', 'my.toml')
    >>> program_of(["python", "train.py"])
    ('train.py',)
    """
    arguments = list(command[command[:1] == ["--"] :])
    if arguments and re.fullmatch(r"python[\d.]*", Path(arguments[0]).name):
        del arguments[0]
    if arguments[:1] == ["shardwise"]:
        arguments[:0] = ["-m"]
    if not arguments:
        raise ConfigError("no-program", "no program was given; write shardwise launch ... -- train.py")
    return python_file(tuple(arguments))


def _name_of(program: Sequence[str]) -> str:
    """Return a job's name: that of the run of `shardwise train`, else the program's.

    >>> _name_of(("-m", "shardwise", "train", "my.toml", "run.name=Big_1"))
    'big-1'
    >>> _name_of(("-m", "shardwise", "train", "my.toml", "--resume", "auto"))
    'my'
    >>> _name_of(("train_all.py", "--lr", "1"))
    'train-all'
    """
    arguments = [word for word in program if not word.startswith("-")]
    if arguments[:2] == ["shardwise", "train"]:
        files = [word for word in arguments[2:] if "=" not in word and Path(word).suffix in (".toml", ".json")]
        run_names = [word.partition("=")[2] for word in arguments[2:] if word.startswith("run.name=")]
        for file in files[:1]:
            with suppress(ConfigError):
                run = read_toml(file).get("run")
                run_names.insert(0, str(run.get("name") or "") if isinstance(run, dict) else "")
        # What a run's config.json is called says nothing.
        arguments = [
            *filter(None, reversed(run_names)),
            *(file for file in files if Path(file).stem != "config"),
            "train",
        ]
    name = re.sub(r"[^a-z0-9]+", "-", Path(arguments[0]).stem.lower()) if arguments else ""
    return name.lstrip("-0123456789")[:40].strip("-") or "train"


def _submit(target: str, job: LaunchJob, text: str) -> int:
    if target == "ssh":
        return run_by_ssh(lines_of_hosts(job), hidden={name: job.exports[name] for name in secrets(job.exports)})
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
