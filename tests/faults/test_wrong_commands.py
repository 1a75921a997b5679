"""Wrong command lines: each ends with an exit code and one line with a code that names what is wrong."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.report import console

# A command line, in which {d} is the folder below; and what its one line of error names.
LINES = """
                                                            | Usage
nothing                                                     | nothing
--nothing                                                   | --nothing
trian                                                       | train
config zero.stege=3                                         | zero.stege
config zero.stage=9                                         | zero.stage
config zero.stage                                           | zero.stage
config --markdwn                                            | --markdwn
config {d}/none.toml                                        | none.toml
config {d}/bad.toml                                         | bad.toml
config {d}/sub                                              | sub
config {d}/pipe.toml                                        | pipe.toml
config {d}/a.toml {d}/a.toml                                | two config files
presets tiny                                                | tiny
completion                                                  | bash
completion tcsh                                             | tcsh
as-deepspeed now                                            | now
run                                                         | COMMAND
run --as-deepspeed                                          | COMMAND
run train.py                                                | --as-deepspeed
run --as-deepspeed -- /nowhere/program                      | /nowhere/program
run --as-deepspeed -- {d}/sub                               | sub
train --dta x                                               | --dta
train --lr 1e-3                                             | optimizer.lr
train --world-size 8                                        | --world-size
train --dry-run --world-size 0                              | --world-size
train --dry-run --world-size eight                          | --world-size
train --dry-run --world-size nan                            | --world-size
train --dry-run --world-size 99999999999                    | 99,999,999,999
train --data                                                | --data
train --data {d}/none.txt                                   | none.txt
train --data {d}/empty.txt                                  | empty.txt
train --data {d}/pipe.toml                                  | pipe.toml
train --data {d}/sub                                        | sub
train --data /dev/zero                                      | /dev/zero
train --data {d}/binary.bin                                 | binary.bin
train --model {d}/none                                      | none
train --model {d}/sub                                       | sub
train --model {d}/a.toml                                    | a.toml
train --resume                                              | --resume
train --resume {d}/none                                     | none
train --resume {d}/sub                                      | sub
train --lora=yes                                            | --lora
train {d}/none.toml                                         | none.toml
train {d}/bad.toml                                          | bad.toml
train {d}/list.json                                         | list.json
train {d}/key.toml                                          | zero.stege
train {d}/a.toml {d}/key.toml                               | two config files
train run.steps=0                                           | run.steps
train run.steps=x                                           | run.steps
train run.steps=                                            | run.steps
train run.stps=3                                            | run.steps
train run=3                                                 | run
train =3                                                    | config key
train optimizer.lr=nan                                      | optimizer.lr
train optimizer.lr=-1                                       | optimizer.lr
train optimizer.name=adamx                                  | adamx
train model.preset=lama                                     | lama
train mesh.tp=3 run.num_procs=2                             | tp 3
train batch.global_size=7 run.num_procs=2                   | batch.global_size=7
train scheduler.name=cosine run.epochs=0                    | run.epochs
train run.num_procs=0                                       | run.num_procs
train run.num_procs=100000000                               | run.num_procs
train run.device=tpu                                        | run.device
train run.device=cuda                                       | device
train tiers.optimizer=nvme                                  | tiers.nvme_path
train tiers.optimizer=disk                                  | tiers.optimizer
train data.seq_len=0                                        | data.seq_len
train data.val_fraction=2                                   | data.val_fraction
train data.tokenizer={d}/none                               | none
train precision.param=int3                                  | precision.param
train compile.mode=fastest                                  | compile.mode
train pipeline.schedule=round                               | pipeline.schedule
plan                                                        | --model
plan --model                                                | --model
plan --model lama-7b --cluster h100:8                       | lama-7b
plan --model {d}/none.json --cluster h100:8                 | none.json
plan --model {d}/list.json --cluster h100:8                 | list.json
plan --model {d}/empty.json --cluster h100:8                | empty.json
plan --model {d}/pipe.toml --cluster h100:8                 | pipe.toml
plan --model tiny --cluster z100:8                          | z100
plan --model tiny --cluster h100                            | h100
plan --model tiny --cluster h100:0                          | h100:0
plan --model tiny --cluster h100:-1                         | h100:-1
plan --model tiny --cluster h100:x                          | h100:x
plan --model tiny --cluster {d}/none.toml                   | none.toml
plan --model tiny --cluster {d}/bad.toml                    | bad.toml
plan --model tiny --cluster h100:99999999999999             | 99999999999999
plan tiny llama-7b --cluster h100:8                         | llama-7b
plan --model tiny tiny --cluster h100:8                     | two models
plan --model tiny --cluster h100:8 --tokens nan             | --tokens
plan --model tiny --cluster h100:8 --tokens inf             | --tokens
plan --model tiny --cluster h100:8 --tokens -5              | --tokens
plan --model tiny --cluster h100:8 --tokens many            | --tokens
plan --model tiny --cluster h100:8 --tokens 0               | --tokens
plan --model tiny --cluster h100:8 --margin nan             | --margin
plan --model tiny --cluster h100:8 --margin 1               | --margin
plan --model tiny --cluster h100:8 --margin -0.1            | --margin
plan --model tiny --cluster h100:8 --simulate nan           | --simulate
plan --model tiny --cluster h100:8 --simulate -1            | --simulate
plan --model tiny --cluster h100:8 --simulate x             | --simulate
plan --model tiny --cluster h100:8 --simulate inf           | --simulate
plan --model tiny --cluster h100:8 --seq 0                  | --seq
plan --model tiny --cluster h100:8 --seq 1.5                | --seq
plan --model tiny --cluster h100:8 --global-batch 0         | --global-batch
plan --model tiny --cluster h100:8 --global-batch x         | --global-batch
plan --model tiny --cluster h100:8 --top 0                  | --top
plan --model tiny --cluster h100:8 --tp x                   | mesh.tp
plan --model tiny --cluster h100:8 --tp 0                   | mesh.tp
plan --model tiny --cluster h100:8 --zero 7                 | zero.stage
plan --model tiny --cluster h100:8 --recompute some         | recompute.mode
plan --model tiny --cluster h100:8 --micro-batch -1         | batch.micro_size
plan --model tiny --cluster h100:8 mesh.tq=1                | mesh.tp
plan --model tiny --cluster h100:8 mesh.tp                  | mesh.tp
plan --model tiny --cluster h100:8 --json {d}/no/a.json     | --json
plan --model tiny --cluster h100:8 --json {d}/sub           | --json
plan --model tiny --cluster h100:8 --html {d}/no/a.html     | --html
plan --model tiny --cluster h100:8 --html -                 | --html
plan --model tiny --cluster h100:8 --write {d}/no/a.toml    | --write
plan --model tiny --cluster h100:8 --write {d}/mine.toml    | mine.toml
plan --model tiny --cluster h100:8 --explain {d}/none.toml  | none.toml
plan --model tiny --cluster h100:8 --compare {d}/none.toml  | none.toml
plan --fit --explain {d}/a.toml --cluster h100:8            | --fit
plan --fit --cluster h100:8 mesh.tp=2                       | mesh.tp=2
plan --fit --cluster h100:8 --top 3                         | --top
plan --dry-run {d}/a.toml --cluster h100:8                  | --cluster
plan --dry-run {d}/a.toml --ranks x                         | --ranks
plan --dry-run {d}/a.toml --ranks -1                        | --ranks
plan --dry-run {d}/a.toml --ranks 0,,1                      | --ranks
plan --dry-run {d}/a.toml --world-size 2 --ranks 5          | 5
plan --dry-run {d}/a.toml --world-size 0                    | --world-size
plan --dry-run {d}/none.toml                                | none.toml
plan --model tiny --cluster h100:8 --world-size 8           | --world-size
plan --model tiny --cluster h100:8 --gpus 8                 | --gpus
doctor --quik                                               | --quick
doctor --num-procs 0                                        | --num-procs
doctor --num-procs x                                        | --num-procs
doctor --quick --nvme-path /etc/passwd                      | --nvme-path
doctor --quick --nvme-path {d}/pipe.toml                    | --nvme-path
doctor --quick --nvme-path {d}/a.toml/x                     | --nvme-path
doctor --quick --dir /etc/passwd                            | --dir
doctor --quick --dir {d}/pipe.toml                          | --dir
doctor --quick --num-procs 2                                | --num-procs
doctor --calibrate --quick --nvme-path /etc/passwd          | --nvme-path
doctor --quick {d}/none.toml                                | none.toml
doctor --quick zero.stege=3                                 | zero.stege
doctor --quick tiers.nvme_path=/etc/passwd                  | /etc/passwd
doctor --json=yes                                           | --json
report                                                      | Missing argument
report {d}/none                                             | none
report {d}/sub                                              | sub
report {d}/empty.json                                       | empty
report {d}/list.json                                        | list
report {d}/bad.json                                         | bad.json
report {d}/pipe.toml                                        | pipe.toml
report {d}/bad.toml                                         | bad.toml
report {d}/a.toml                                           | --cluster
report {d}/a.toml --cluster z100:8                          | z100
report {d}/a.toml --cluster h100                            | h100
report {d}/a.toml --cluster h100:8 -o {d}/no/a.html         | -o
report {d}/a.toml --cluster h100:8 -o {d}/sub               | -o
report {d}/sub --compare                                    | --compare
report {d}/sub --html x                                     | --html
report {d}/binary.bin                                       | binary.bin
report /dev/null                                            | /dev/null
verify --steps 0                                            | steps
verify --steps x                                            | --steps
verify --steps -3                                           | steps
verify --processes 0                                        | processes
verify --processes x                                        | --processes
verify --processes -2                                       | processes
verify --world-size 0                                       | --world-size
verify --model {d}/none                                     | --model
verify --model {d}/sub                                      | --model
verify --model {d}/list.json                                | --model
verify --model {d}/empty.json                               | model
verify mesh.tp=0                                            | mesh.tp
verify {d}/none.toml                                        | none.toml
verify {d}/bad.toml                                         | bad.toml
verify --world-size 7 mesh.tp=2                             | 7
verify --wrld 3                                             | --wrld
checkpoint                                                  | Usage
checkpoint list                                             | list
checkpoint show                                             | PATH
checkpoint show {d}/none                                    | none
checkpoint show {d}/sub                                     | sub
checkpoint show {d}/a.toml                                  | a.toml
checkpoint show {d}/sub --step x                            | --step
checkpoint verify                                           | PATH
checkpoint verify {d}/none                                  | none
checkpoint verify {d}/pipe.toml                             | pipe.toml
checkpoint verify {d}/sub --step -1                         | sub
checkpoint diff {d}/sub                                     | B
checkpoint diff {d}/sub {d}/none                            | sub
checkpoint diff {d}/none {d}/none                           | none
checkpoint export {d}/sub                                   | FOLDER
checkpoint export {d}/none {d}/out                          | none
checkpoint export {d}/sub {d}/out --dtype half              | --dtype
checkpoint export {d}/sub {d}/out --weights int2            | --weights
checkpoint export {d}/sub {d}/out --stpe 3                  | --step
launch                                                      | no program
launch -- train.sh                                          | train.sh
launch --on mars -- train.py                                | --on
launch --nodes 0 -- train.py                                | --nodes
launch --nodes -1 -- train.py                               | --nodes
launch --nodes x -- train.py                                | --nodes
launch --gpus 0 -- train.py                                 | --gpus
launch --gpus x -- train.py                                 | --gpus
launch --gpus H100:x -- train.py                            | --gpus
launch --gpus 1e3 -- train.py                               | --gpus
launch --hosts a,a --gpus 8 -- train.py                     | --hosts
launch --hosts a,b -- train.py                              | --gpus
launch --hosts a --hostfile {d}/a.toml -- train.py          | --hostfile
launch --hostfile {d}/none -- train.py                      | none
launch --hostfile {d}/sub -- train.py                       | sub
launch --hostfile {d}/pipe.toml -- train.py                 | pipe.toml
launch --hostfile {d}/empty.txt -- train.py                 | hostfile
launch --hostfile {d}/binary.bin -- train.py                | hostfile
launch --hosts a,b --gpus 8 --nodes 3 -- train.py           | --nodes
launch --on slurm --hosts a --gpus 8 -- train.py            | slurm
launch --on slurm --nodes 2 -- train.py                     | --gpus
launch --max-restarts -1 -- train.py                        | --max-restarts
launch --max-restarts x -- train.py                         | --max-restarts
launch --port x -- train.py                                 | --port
launch -o {d}/no/job.sh -- train.py                         | -o
launch -o {d}/sub -- train.py                               | -o
launch --on jobset --gpus 8 -- train.py                     | --image
timeline {d}/none.toml                                      | none.toml
timeline {d}/bad.toml                                       | bad.toml
timeline mesh.pp=0                                          | mesh.pp
timeline --forward-s nan                                    | --forward-s
timeline --forward-s -1                                     | --forward-s
timeline --forward-s x                                      | --forward-s
timeline --transfer-s inf                                   | --transfer-s
timeline --recorded {d}/none.json                           | --recorded
timeline --recorded {d}/list.json                           | --recorded
timeline --recorded {d}/bad.json                            | --recorded
timeline --recorded {d}/pipe.toml                           | --recorded
timeline --html {d}/no/a.html                               | --html
timeline --html -                                           | --html
timeline --chrome-trace {d}/sub                             | --chrome-trace
timeline --txt                                              | --text
timeline mesh.pp=2 pipeline.schedule=round                  | pipeline.schedule
convert                                                     | DS_CONFIG.JSON
convert {d}/none.json                                       | none.json
convert {d}/bad.json                                        | bad.json
convert {d}/list.json                                       | list.json
convert {d}/pipe.toml                                       | pipe.toml
convert {d}/sub                                             | sub
convert {d}/binary.bin                                      | binary.bin
convert {d}/ds.json --world-size 0                          | --world-size
convert {d}/ds.json --out {d}/no/a.toml                     | --out
convert {d}/ds.json --out {d}/sub                           | --out
convert {d}/ds.json --world 4                               | --world-size
convert {d}/ds.json {d}/ds.json                             | ds.json
convert {d}/wrong-ds.json                                   | zero_optimization
attention                                                   | Usage
checkpoint vrify {d}/sub                                    | verify
checkpoint export {d}/sub {d}/out --dtype bf61              | bf16
completion zhs                                              | zsh
launch --on slrum -- train.py                               | slurm
launch --on                                                 | --on
launch --submit=yes -- train.py                             | --submit
launch --hots a,b -- train.py                               | --hosts
launch --node 2 -- train.py                                 | --nodes
plan --modle tiny --cluster h100:8                          | --model
plan --fit=1 --cluster h100:8                               | --fit
doctor -q                                                   | -q
doctor --calibrat                                           | --calibrate
report {d}/a.toml {d}/a.toml                                | a.toml
report -x {d}/sub                                           | -x
report {d}/a.toml -o                                        | -o
verify --stpes 3                                            | --steps
convert {d}/ds.json --out                                   | --out
timeline -- --html                                          | --html
config --markdown=1                                         | --markdown
presets --long                                              | --long
trian --data x                                              | train
verfy                                                       | verify
checkpoint show {d}/sub --step                              | --step
train --dry_run                                             | --dry-run
"""
CASES = [tuple(part.strip() for part in line.rsplit("|", 1)) for line in LINES.strip("\n").splitlines()]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("files")
    texts = {
        "a.toml": "[zero]\nstage = 1\n",
        "mine.toml": "# my own\n[zero]\nstage = 1\n",
        "bad.toml": "[zero\n",
        "key.toml": "[zero]\nstege = 1\n",
        "empty.txt": "",
        "empty.json": "{}",
        "list.json": "[1, 2]",
        "bad.json": "{",
        "ds.json": json.dumps({"train_batch_size": 8}),
        "wrong-ds.json": json.dumps({"zero_optimization": 3}),
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "binary.bin").write_bytes(bytes(range(256)) * 4)
    (folder / "sub").mkdir()
    os.mkfifo(folder / "pipe.toml")
    before = Path.cwd()
    os.chdir(folder)  # what a command would leave is left there
    yield folder
    os.chdir(before)


@pytest.mark.parametrize(("line", "named"), CASES, ids=[line or "no words" for line, _ in CASES])
def test_a_wrong_command_line_is_one_line_of_error(
    line: str, named: str, files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(files / "cache"))
    monkeypatch.setattr(console, "EVERY_S", 1000.0)  # a slow machine says what it waits for
    code = main(shlex.split(line.format(d=files)))
    printed = capsys.readouterr()
    assert code in (1, 2), f"{code}: {printed.out[:200]}"
    if named == "Usage":  # without a command a group shows its help
        return
    lines = printed.err.strip().splitlines()
    assert len(lines) == 1, printed.err[:600]
    assert re.fullmatch(r"shardwise: .* \[[a-z0-9-]+\]", lines[0]), lines[0]
    assert named in lines[0], lines[0]
    assert len(lines[0]) < 900, lines[0]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("trian", "unknown-command"),
        ("checkpoint shwo", "unknown-command"),
        ("train --rsume", "unknown-option"),
        ("run -- ls", "missing-option"),
        ("convert", "missing-argument"),
        ("launch --on mars -- a.py", "option-value"),
        ("doctor --num-procs 0", "option-value"),
        ("completion tcsh", "argument-value"),
        ("train --data", "option-use"),
        ("train --lora=yes", "option-use"),
        ("presets tiny", "unexpected-argument"),
    ],
)
def test_each_kind_of_wrong_usage_has_its_code(line: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert capsys.readouterr().err.endswith(f"[{code}]\n")
