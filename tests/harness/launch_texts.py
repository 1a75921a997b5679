"""Reads launch texts as their targets do: by bash with stand-ins for programs, YAML, Kubernetes' and sbatch's rules."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from torch.distributed.run import get_args_parser

from shardwise.cli.main import main

# Arguments of a script that mean something to a shell, a batch script, YAML, Kubernetes, Python or a template.
HOSTILE = (
    "", " ", "a b", "\t", "a\tb", "\n", "a\nb", "a\n", "\n#SBATCH --nodes=99", "x\nsetup: touch pwned", "a\r\nb", "\r",
    "'", '"', "it's", "''\"\"", "\\", "a\\nb", "\\'", "$HOME", "${HOME}", "$(NAME)", "$(touch pwned)", "$$(NAME)", "$$",
    "$$$(NAME)", "$é", "$", "$head:$port", "$SLURM_JOB_ID", "$(JOB_COMPLETION_INDEX)", "`touch pwned`", ";", "; exit 3",
    "&", "| cat", "> pwned", "--", "-", "-x", "--nnodes", "--help", "-m", "#", "# no comment", ": ", "a: b", "- a", "%",
    "%name", "%{head}", "%T", "{{}}", "{a: 1}", "[a]", "!tag", "&anchor", "*", "*.py", "~", "yes", "null", "1e-3",
    "012", "0x1f", "2026-01-01", "=", "😀", "é", "𝔘nicode", "\u2028", "a\u2029b", "\x85", "\xa0", "\ufeff", "\x07",
    "\x1b[31m", "\x7f", "!", "!!", "^", "|", ">", "|\n  a", "---", "...", "a\n---\nb", "EOF", "a,b", "@x", "?",
    "\u202e", "a\\",
)  # fmt: skip
_PRINTS_ITS_WORDS = '#!/bin/sh\nprintf "%s\\0" "$#" "$@" >> {}\n'
_PROGRAMS = {
    "srun": '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nexec "$@"\n',
    # As sshd does it: the words after the host are joined, and the shell of the user reads them.
    "ssh": '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do case "$1" in -o|-p) shift 2;; *) shift;; esac; done\n'
    'shift\nexec sh -c "$*"\n',
    "scontrol": "#!/bin/sh\necho n1\n",
    "squeue": "#!/bin/sh\n",
}
_FAKE_RUN = """
import sys
with open({!r}, "ab") as file:
    file.write(b"".join(word.encode() + bytes([0]) for word in [str(len(sys.argv) - 1), *sys.argv[1:]]))
"""


def seeded(seed: int) -> list[str]:
    """Some arguments made of hostile pieces and of any characters that an argument may have."""
    draw = random.Random(seed)
    words = []
    for _ in range(draw.randint(1, 4)):
        pieces = draw.choices(HOSTILE, k=draw.randint(0, 4))
        pieces += [
            chr(draw.choice((draw.randint(1, 0x7F), draw.randint(0x80, 0xD7FF), draw.randint(0xE000, 0x10FFFF))))
        ]
        draw.shuffle(pieces)
        words.append("".join(pieces))
    return words


class Machine:
    """A folder with stand-ins for the programs that texts start; they note what torchrun is given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._said = folder / "said"
        programs = folder / "bin"
        programs.mkdir()
        for name, text in {**_PROGRAMS, "torchrun": _PRINTS_ITS_WORDS.format(self._said)}.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        # What runs as `python -m torch.distributed.run` in this folder.
        module = folder / "torch" / "distributed" / "run.py"
        module.parent.mkdir(parents=True)
        for package in (module.parent, module.parent.parent):
            (package / "__init__.py").touch()
        module.write_text(_FAKE_RUN.format(str(self._said)))
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self._environ = {**environ, "PATH": f"{programs}{os.pathsep}{environ['PATH']}", "HOME": "/expanded"}

    def run(self, script: str, shell: str = "bash", **variables: str) -> list[list[str]]:
        """Run a script, and return the words of each torchrun that it has started."""
        said = iter(self.said(script, shell, **variables))
        return [[next(said) for _ in range(int(count))] for count in said]

    def said(self, script: str, shell: str = "bash", **variables: str) -> list[str]:
        """Run a script, and return what was written into `said`, a text that ends by NUL each."""
        path = self.folder / "script"
        path.write_bytes(script.encode())
        self._said.unlink(missing_ok=True)
        done = subprocess.run(
            [shell, path], cwd=self.folder, env={**self._environ, **variables}, capture_output=True, timeout=30
        )
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        assert not (self.folder / "pwned").exists()
        return self._said.read_bytes().decode().split("\0")[:-1]


def program_of(words: list[str]) -> tuple[str, ...]:
    """The program that torchrun's own parser finds in its words."""
    options = get_args_parser().parse_args(words)
    return (*(["-m"] if options.module else []), options.training_script, *options.training_script_args)


def sbatch_options(script: str) -> dict[str, str]:
    """The options of a batch script by Slurm's rule: of lines #SBATCH up to the first command.

    Slurm refuses scripts with a NUL or the line ends of DOS. A # begins a comment there, and blanks end an option.
    """
    assert "\0" not in script
    assert "\r\n" not in script
    lines = script.split("\n")
    assert lines[0].startswith("#!")
    options = {}
    for line in lines:
        if line.startswith("#SBATCH"):
            match = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=([\w.:@/-]+))?", line, re.ASCII)
            assert match is not None, line
            options[match[1]] = match[2] or ""
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return options


def kubelet(word: str, variables: Mapping[str, str]) -> str:
    """A word of a container's command as Kubernetes gives it: $$ is $, $(NAME) the value where there is one.

    It goes by bytes, as Kubernetes does: after any other $ it takes one byte for a character.
    """
    data, out, place = word.encode(), b"", 0
    while place < len(data):
        if data[place : place + 1] != b"$" or place + 1 == len(data):
            out, place = out + data[place : place + 1], place + 1
            continue
        end = data.find(b")", place)
        if data[place + 1 : place + 2] == b"$":
            out, place = out + b"$", place + 2
        elif data[place + 1 : place + 2] == b"(" and end > 0:
            name = data[place + 2 : end].decode()
            out, place = out + variables.get(name, f"$({name})").encode(), end + 1
        else:
            out, place = out + b"$" + chr(data[place + 1]).encode(), place + 2
    return out.decode()


def container_of(text: str) -> dict[str, Any]:
    """The container that a TrainJob or a JobSet describes."""
    spec = yaml.safe_load(text)["spec"]
    if "trainer" in spec:
        return spec["trainer"]
    (container,) = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    return container


def run_ray(text: str) -> list[str]:
    """What a worker of the text for Ray starts, by stand-ins for Ray and a process group."""
    started: list[list[str]] = []
    names = ("ray", "ray.train", "ray.train.torch")
    modules = {name: mock.MagicMock(__name__=name) for name in names}
    modules["ray.train"].get_context().get_world_rank.return_value = 1
    modules["ray"].util.get_node_ip_address.return_value = "n1"
    trainer = mock.Mock(side_effect=lambda work, **_: types.SimpleNamespace(fit=work))
    modules["ray.train.torch"].TorchTrainer = trainer
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch("torch.distributed.broadcast_object_list"),
        mock.patch("subprocess.run", side_effect=lambda command, **_: started.append(command)),
    ):
        exec(compile(text.encode(), "launch.py", "exec"), {"__name__": "__main__"})
    (command,) = started
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    return command[3:]


Read = Callable[[str, Machine], list[list[str]]]


def read_slurm(text: str, machine: Machine) -> list[list[str]]:
    options = sbatch_options(text)
    assert list(options) == [
        *("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "exclusive", "time", "requeue", "open-mode"),
        "signal",
    ]
    (words,) = machine.run(text, SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n[1-2]")
    assert (words[words.index("--rdzv-endpoint") + 1], words[words.index("--rdzv-id") + 1]) == ("n1:10007", "7")
    return [words]


def read_pod(text: str, machine: Machine) -> list[list[str]]:
    variables = {"JOB_COMPLETION_INDEX": "1", "NAME": "expanded", "HOME": "expanded"}
    words = [kubelet(word, variables) for word in container_of(text)["command"]]
    assert words[0] == "torchrun"
    assert "--node-rank" not in words or words[words.index("--node-rank") + 1] == "1"
    return [words[1:]]


def read_sky(text: str, machine: Machine) -> list[list[str]]:
    task = yaml.safe_load(text)
    assert list(task) == ["name", "num_nodes", "workdir", "resources", "run"]
    (words,) = machine.run(task["run"], SKYPILOT_NODE_RANK="1", SKYPILOT_NODE_IPS="n1\nn2")
    assert (words[words.index("--node-rank") + 1], words[words.index("--master-addr") + 1]) == ("1", "n1")
    return [words]


def read_ray(text: str, machine: Machine) -> list[list[str]]:
    return [run_ray(text)]


TARGETS: dict[str, tuple[str, Read]] = {
    "local": ("--gpus 2", lambda text, machine: machine.run(text, "sh")),
    "ssh": ("--hosts n1,me@n2 --gpus 2", lambda text, machine: machine.run(text, "sh")),
    "slurm": ("--on slurm --nodes 2 --gpus 2 --time 1:00:00", read_slurm),
    "trainjob": ("--on trainjob --nodes 2 --gpus 2 --image a/b:1", read_pod),
    "jobset": ("--on jobset --nodes 2 --gpus 2 --image a/b:1", read_pod),
    "sky": ("--on sky --nodes 2 --gpus H100:2", read_sky),
    "ray": ("--on ray --nodes 2 --gpus 2", read_ray),
}


def check(target: str, program: Sequence[str], machine: Machine) -> None:
    """Write a text for a target, and read it by the target's own rules: the program gets what was given."""
    options, read = TARGETS[target]
    path = machine.folder / "text"
    assert main(["launch", *options.split(), "-o", str(path), "--", *program]) == 0
    calls = read(path.read_bytes().decode(), machine)
    assert [program_of(words) for words in calls] == [tuple(program)] * (2 if target == "ssh" else 1)
