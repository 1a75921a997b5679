"""This module runs a command line on each of several hosts by ssh, and reads files that list hosts.

>>> read_hostfile(["# two machines", "worker-0 slots=4", "worker-1 slots=2"])
{'worker-0': 4, 'worker-1': 2}
>>> remote_line(["python", "train.py", "a b"], {"NCCL_DEBUG": "INFO"}, "/home/me")
"cd /home/me && export NCCL_DEBUG=INFO && exec python train.py 'a b'"
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from secrets import token_hex
from types import MappingProxyType
from typing import Final

from shardwise.config.errors import ConfigError, printable
from shardwise.config.resolve import shown_value
from shardwise.launch import checks

EXPORTED: Final = ("MLFLOW", "NCCL", "PYTHON", "MV2", "UCX")
"""What the names of those variables begin with that every host gets."""

# With a terminal the remote ranks get a hang-up when this end goes; a host that is cut off ends its ssh in 90 s.
_TERMINAL: Final = "-tt"
_SSH: Final = ("ssh", _TERMINAL, "-o", "PasswordAuthentication=no", "-o", "ServerAliveInterval=30")
_NO_SECRETS: Final[Mapping[str, str]] = MappingProxyType({})
# What follows the number, such as OpenMPI's max_slots, is not read, as with DeepSpeed.
_HOSTFILE_LINE: Final = re.compile(r"(\S+)\s+slots=(\d{1,999})(?:[\s#].*)?", re.ASCII)
_POLL_S: Final = 0.2
_GRACE_S: Final = 10.0


def read_hostfile(lines: Iterable[str]) -> dict[str, int]:
    """Return the number of slots of each host; a line is `HOST slots=N`, a comment or empty."""
    pool: dict[str, int] = {}
    for line in filter(None, (raw.strip() for raw in lines if not raw.lstrip().startswith("#"))):
        match = _HOSTFILE_LINE.fullmatch(line)
        if match is None:
            raise ConfigError(
                "hostfile-line", f"the hostfile's line {shown_value(line)} is not HOST slots=N; correct it"
            )
        host = checks.host(match[1], "the hostfile")
        if host in pool:
            raise ConfigError("hostfile-host-twice", f"the hostfile has {host} twice; give it one line with all slots")
        pool[host] = checks.count(int(match[2]), f"the hostfile: {host} slots=", 1, checks.MOST_RANKS)
    if not pool:
        raise ConfigError("hostfile-empty", "the hostfile names no host; write lines HOST slots=N")
    return pool


def exported(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that every host gets; those that no shell could set are left out, which is said."""
    chosen = {name: value for name, value in environ.items() if name.startswith(EXPORTED)}
    good = {name: value for name, value in chosen.items() if checks.is_variable(name) and checks.is_text(value)}
    if odd := [shown_value(name) for name in chosen if name not in good]:
        print(printable(f"shardwise: the hosts do not get {', '.join(odd)}, which no shell can set"), file=sys.stderr)
    return good


def secrets(exports: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that must not be written where others may read them."""
    return [name for name, value in exports.items() if checks.is_secret(name, value)]


def remote_line(command: Sequence[str], exports: Mapping[str, str], folder: str, first: Sequence[str] = ()) -> str:
    """Return what the shell of a host runs: it goes to a folder and becomes a command."""
    return " && ".join([f"cd {shlex.quote(folder)}", *first, *_exports(exports), f"exec {shlex.join(command)}"])


def _exports(variables: Mapping[str, str]) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


def ssh_command(host: str, line: str, port: int | None = None, sent: Sequence[str] = ()) -> list[str]:
    """Return the command that runs a line on a host.

    Args:
        port: of ssh; None for its own.
        sent: variables that ssh is to send itself, by name; the host's sshd must accept them.
    """
    send = [word for name in sent for word in ("-o", f"SendEnv={name}")]
    return [*_SSH, *send, *(["-p", str(port)] if port else []), host, line]


def find_address(host: str, port: int | None = None) -> str:
    """Ask a host for its first address.

    Raises:
        ConfigError: it cannot be reached.
    """
    with _start(ssh_command(host, "hostname -I", port), stdout=subprocess.PIPE) as asking:
        answer = asking.communicate()[0].decode(errors="replace").split()
    if asking.returncode or not answer:
        raise ConfigError(
            "host-unreachable", f"ssh {host} hostname -I gave no address; set up ssh keys, or --master_addr"
        )
    return checks.host(answer[0], f"ssh {host} hostname -I", has_user=False)


def _start(command: Sequence[str], stdin: int | None = None, stdout: int | None = None) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, stdin=stdin, stdout=stdout)
    except FileNotFoundError:
        raise ConfigError("ssh-not-found", f"{command[0]} is not on PATH; install OpenSSH's client") from None


def run_by_ssh(lines: Mapping[str, str], port: int | None = None, hidden: Mapping[str, str] = _NO_SECRETS) -> int:
    """Run a line on each host, and end all once one of them fails; return 0 or the exit code of the first that failed.

    Call it on the main thread: SIGTERM ends the hosts' commands too.

    Args:
        port: of ssh; None for its own.
        hidden: variables that every host gets but that no command line has, where everybody on a machine reads them.
    """
    if hidden:
        lines = _with_hidden(lines, port, hidden)
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for host, line in lines.items():
            running[host] = _start(ssh_command(host, line, port), stdin=subprocess.DEVNULL)
        codes: dict[str, int | None] = dict.fromkeys(running)
        while None in codes.values() and not any(codes.values()):
            time.sleep(_POLL_S)
            codes = {host: process.poll() for host, process in running.items()}
        failed = {host: code for host, code in codes.items() if code}
        for host, code in failed.items():
            lost = "; it cannot be reached, or was cut off" if code == 255 else ""
            print(printable(f"shardwise: host {host} ended with exit code {code}{lost}"), file=sys.stderr)
        return next((abs(code) for code in failed.values()), 0)
    finally:
        for process in running.values():
            process.terminate()
        deadline = time.monotonic() + _GRACE_S
        for process in running.values():
            try:
                process.wait(max(deadline - time.monotonic(), 0))
            except subprocess.TimeoutExpired:  # torchrun hears nothing while it waits for the other hosts' end
                process.kill()
        signal.signal(signal.SIGTERM, previous)


def _with_hidden(lines: Mapping[str, str], port: int | None, hidden: Mapping[str, str]) -> dict[str, str]:
    """Send variables to every host by standard input, and return lines that first read them, and leave nothing of them.

    They are in a new file that only its owner reads, under a name that no one can guess. The terminal that the ranks
    need would echo its input.

    Raises:
        ConfigError: a host did not take them.
    """
    files = {host: f'"$HOME/.shardwise-{token_hex(16)}"' for host in lines}
    text = "".join(f"{line}\n" for line in _exports(hidden)).encode()
    sending = {}
    for host, file in files.items():
        command = _without_terminal(ssh_command(host, f"umask 077 && set -C && cat > {file}", port))
        sending[host] = _start(command, stdin=subprocess.PIPE)
    for process in sending.values():
        process.communicate(text)
    failed = [host for host, process in sending.items() if process.returncode]
    for host in [file for file in files if failed and file not in failed]:
        _start(_without_terminal(ssh_command(host, f"rm -f {files[host]}", port)), stdin=subprocess.DEVNULL).wait()
    if failed:
        raise ConfigError(
            "host-unreachable", f"ssh {failed[0]} did not take the variables {', '.join(hidden)}; set up ssh keys"
        )
    return {host: f". {files[host]} && rm -f {files[host]} && {line}" for host, line in lines.items()}


def _without_terminal(command: Sequence[str]) -> list[str]:
    return [word for word in command if word != _TERMINAL]
