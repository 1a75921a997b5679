"""Runs the program `deepspeed`: it starts a script's ranks by torchrun, on several hosts by ssh."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from shardwise.config.errors import ConfigError, OneLineError, printable_lines, with_code
from shardwise.config.resolve import shown_value
from shardwise.config.untrusted_files import read_text
from shardwise.launch import checks, hosts
from shardwise.launch.as_deepspeed import deepspeed_environment
from shardwise.launch.local import default_num_ranks

ENV_FILE_NAME: Final = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
"""The file in the home or the current folder whose lines NAME=value are exported on every node."""

_DEVICES: Final = "CUDA_VISIBLE_DEVICES"

Slots = Mapping[str, Sequence[int]]
"""Holds the devices of each host that take a rank each, in the order of the ranks."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program `deepspeed`: start a script's ranks by torchrun, on several hosts by ssh.

    One host's torchrun takes this process's place.
    """
    try:
        options = _options(argv)
        slots = _slots(options)
        if (len(slots) > 1 or options.force_multi) and not options.no_ssh:
            return _run_by_ssh(options, slots)
        if options.no_ssh and not (0 <= options.node_rank < len(slots) and options.master_addr):
            raise ConfigError("no-ssh-needs-rank", "--no_ssh needs --master_addr and --node_rank of 0 to nodes - 1")
    except OneLineError as error:
        print(printable_lines(f"deepspeed: {with_code(error)}"), file=sys.stderr)
        return 2
    node_rank = options.node_rank if options.no_ssh else 0
    environ = {**os.environ, **deepspeed_environment(os.environ)}
    if options.include or options.exclude or options.num_gpus > 0 or os.path.isfile(options.hostfile):
        environ[_DEVICES] = _joined(list(slots.values())[node_rank])
    command = torchrun(options, slots, node_rank, options.master_addr or "127.0.0.1")
    return os.execve(sys.executable, command, environ)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    options = _parser().parse_args(argv)
    for name, value in vars(options).items():
        if isinstance(value, list) and name != "user_args":  # Python 3.11 reads --name=-- as an empty list
            raise ConfigError("options-not-read", f"--{name} -- is no value; see deepspeed --help")
    return options


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say in a line what is wrong with the options, as every other refusal."""
        raise ConfigError("options-not-read", f"{message}; see deepspeed --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="deepspeed", description="Start a script's ranks, by torchrun and ssh.")
    add = parser.add_argument
    add("-H", "--hostfile", default="/job/hostfile", help="lines HOST slots=N")
    add("-i", "--include", default="", help="HOST[:SLOT,...][@...], the only ones to use")
    add("-e", "--exclude", default="", help="HOST[:SLOT,...][@...], those not to use")
    add("--num_nodes", type=int, default=-1, help="use the first N hosts")
    add("--num_gpus", "--num_accelerators", type=int, default=-1, help="ranks on each host; on GPUs 0 to N - 1")
    add("--master_addr", default="", help="where rank 0 runs; found by ssh if it is not given")
    add("--master_port", type=int, default=29500)
    add("--node_rank", type=int, default=-1, help="this host's place, with --no_ssh")
    for flag in ("module", "no_python", "no_local_rank", "no_ssh", "force_multi"):
        add(f"--{flag}", action="store_true")
    add("--ssh_port", type=int)
    add("--venv_script", help="a file that remote shells source first")
    add("--enable_each_rank_log", metavar="DIR", help="a folder for a log of each rank")
    add("--launcher", default="pdsh", help=argparse.SUPPRESS)
    add("--autotuning", default="", help=argparse.SUPPRESS)
    for flag in ("no_ssh_check", "save_pid", "bind_cores_to_rank"):
        add(f"--{flag}", action="store_true", help=argparse.SUPPRESS)
    add("-q", "--quiet", action="store_true", help=argparse.SUPPRESS)
    for flag in ("launcher_args", "bind_core_list", "log_level"):
        add(f"--{flag}", help=argparse.SUPPRESS)
    add("user_script")
    add("user_args", nargs=argparse.REMAINDER)
    return parser


def _slots(options: argparse.Namespace) -> Slots:
    if options.autotuning:
        raise ConfigError(
            "no-autotuning", "--autotuning is not there; shardwise plan --explain ds_config.json finds layouts"
        )
    if options.launcher.lower() != "pdsh":
        raise ConfigError(
            "launcher-not-known",
            f"--launcher {options.launcher} is not there; leave it out for ssh, or let srun or mpirun start torchrun",
        )
    _check_numbers(options)
    is_cut = options.num_nodes >= 0 or options.num_gpus >= 0
    if is_cut and (options.include or options.exclude):
        raise ConfigError(
            "hosts-said-twice", "--num_nodes and --num_gpus go without --include and --exclude; drop one pair"
        )
    hostfile = Path(options.hostfile)
    if os.path.isfile(hostfile):
        pool = hosts.read_hostfile(read_text(hostfile, "give a file of lines HOST slots=N").splitlines())
    else:
        if options.num_nodes > 1:
            raise ConfigError(
                "no-hostfile", f"--num_nodes {options.num_nodes}: {hostfile} is not there; name one by --hostfile"
            )
        if options.include or options.exclude or options.num_gpus > 0:
            os.environ.pop(_DEVICES, None)  # the options count all devices of the host
        pool = {"localhost": options.num_gpus if options.num_gpus > 0 else default_num_ranks("auto")}
    slots = select_slots(pool, options.include, options.exclude)
    if options.num_nodes > 0:
        slots = dict(list(slots.items())[: options.num_nodes])
    if options.num_gpus > 0:
        slots = {host: list(range(options.num_gpus)) for host in slots}
    return slots


def _check_numbers(options: argparse.Namespace) -> None:
    checks.port(options.master_port, "--master_port")
    if options.ssh_port is not None:
        checks.port(options.ssh_port, "--ssh_port", "ssh-port")
    if options.master_addr:
        checks.host(options.master_addr, "--master_addr", has_user=False)
    for flag, most in (("num_nodes", checks.MOST_NODES), ("num_gpus", checks.MOST_RANKS)):
        if (number := getattr(options, flag)) != -1:
            checks.count(number, f"--{flag}", 1, most)


def select_slots(pool: Mapping[str, int], include: str = "", exclude: str = "") -> dict[str, list[int]]:
    """Return the slots of each host that are left, in the order of the hostfile.

    >>> select_slots({"a": 2, "b": 4}, include="b:3,1@a"), select_slots({"a": 2, "b": 4}, exclude="a@b:0")
    ({'a': [0, 1], 'b': [1, 3]}, {'b': [1, 2, 3]})

    Args:
        pool: the number of slots of each host.
        include: `HOST[:SLOT,...]`, several joined by `@`: nothing else is left; a host without slots has all.
        exclude: the same form: what is not left. Not both.
    """
    if include and exclude:
        raise ConfigError(
            "include-and-exclude", f"--include {include} and --exclude {exclude} exclude each other; give one"
        )
    if not include and not exclude:
        return {host: list(range(count)) for host, count in pool.items()}
    named: dict[str, set[int]] = {}
    for spec in (include or exclude).split("@"):
        host, colon, text = spec.partition(":")
        if host not in pool:
            raise ConfigError("host-not-in-file", f"host {host!r} is not in the hostfile; it has {', '.join(pool)}")
        if colon and not re.fullmatch(r"\d{1,9}(,\d{1,9})*", text, re.ASCII):
            raise ConfigError("slots-not-read", f"{spec!r} is not HOST:SLOT,SLOT; write {host}:0,1")
        named.setdefault(host, set()).update(map(int, text.split(",")) if colon else ())
    left: dict[str, list[int]] = {}
    for host, count in pool.items():
        # A host that is also named with slots has these only, as with DeepSpeed.
        chosen = (named[host] or set(range(count))) if host in named else set()
        if beyond := sorted(slot for slot in chosen if slot >= count):
            raise ConfigError("no-such-slot", f"host {host} has no slot {beyond[0]}; its slots are 0 to {count - 1}")
        left[host] = [slot for slot in range(count) if (slot in chosen) == bool(include)]
    return {host: slots for host, slots in left.items() if slots}


def torchrun(options: argparse.Namespace, slots: Slots, node_rank: int, master_addr: str) -> list[str]:
    """Return the command that starts one host's ranks by `deepspeed`'s options; rank 0 is at `master_addr`."""
    counts = [len(slot) for slot in slots.values()]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(counts)}", f"--node-rank={node_rank}"]
    command += [f"--nproc-per-node={counts[node_rank]}"]
    command += [f"--master-addr={master_addr}", f"--master-port={options.master_port}"]
    if options.enable_each_rank_log not in (None, "None"):
        command += [f"--log-dir={options.enable_each_rank_log}", "--redirects=3"]
    program = [] if options.no_python else [sys.executable, "-u", *(["-m"] if options.module else [])]
    program = [*program, options.user_script]
    if options.no_local_rank:
        return [*command, "--no-python", *program, *options.user_args]
    # torchrun does not give scripts this argument, which those for DeepSpeed may need.
    line = f'exec {shlex.join(program)} --local_rank="$LOCAL_RANK" "$@"'
    return [*command, "--no-python", "sh", "-c", line, options.user_script, *options.user_args]


def remote_line(
    command: Sequence[str], devices: Sequence[int], options: argparse.Namespace, exports: Mapping[str, str]
) -> str:
    """Return what the shell of a host runs: it goes to this folder and starts the ranks with what is exported."""
    first = [f". {shlex.quote(checks.word(options.venv_script, '--venv_script'))}"] if options.venv_script else []
    checked = [checks.word(word, "the argument") for word in command]
    return hosts.remote_line(checked, {**exports, _DEVICES: _joined(devices)}, checks.folder_here(), first)


def _exported() -> dict[str, str]:
    """Return the variables that every host gets: those of this environment, and those of the user's files."""
    exported = hosts.exported({**os.environ, **deepspeed_environment(os.environ)})
    exported["PYTHONPATH"] = os.pathsep.join([checks.folder_here(), exported["PYTHONPATH"]])
    for file in (Path.home() / ENV_FILE_NAME, Path(ENV_FILE_NAME)):
        if file.is_file():
            exported.update(read_env_file(read_text(file, "give a file of lines NAME=value").splitlines(), str(file)))
    return exported


def read_env_file(lines: Iterable[str], name: str) -> dict[str, str]:
    """Return the variables of a file of lines `NAME=value`; other lines and comments say nothing.

    >>> read_env_file(["# for our network", "NCCL_DEBUG=INFO", "export A=b=c"], "file")
    {'NCCL_DEBUG': 'INFO', 'A': 'b=c'}
    """
    option_values = {}
    for line in lines:
        variable, is_set, value = line.partition("=")
        variable = variable.removeprefix("export ").strip()
        if not is_set or variable.startswith("#"):
            continue
        if not checks.is_variable(variable):
            raise ConfigError(
                "variable-name",
                f"{name}: {shown_value(variable)} is no name that a shell can set; use A-Z, a-z, 0-9 and _",
            )
        option_values[variable] = checks.word(value, f"{name}: {variable}")
    return option_values


def _run_by_ssh(options: argparse.Namespace, slots: Slots) -> int:
    address = options.master_addr or hosts.find_address(next(iter(slots)), options.ssh_port)
    exported = _exported()
    hidden = {name: exported.pop(name) for name in hosts.secrets(exported)}
    lines = {
        host: remote_line(torchrun(options, slots, node_rank, address), devices, options, exported)
        for node_rank, (host, devices) in enumerate(slots.items())
    }
    return hosts.run_by_ssh(lines, options.ssh_port, hidden)


def _joined(devices: Sequence[int]) -> str:
    return ",".join(map(str, devices))
