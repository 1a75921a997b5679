"""Times the path of a new user: from the built wheel in an empty environment to a fine-tuned model that generates.

It runs the commands that docs/finetune.md gives, as a user types them, away from the sources. The model is the tiny one
of `examples/toy.py`, since nothing is downloaded but packages. The seconds are those of the machine, its network and
its package index.

    python benchmarks/new_user.py
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GENERATE = """\
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = AutoModelForCausalLM.from_pretrained(sys.argv[1]), AutoTokenizer.from_pretrained(sys.argv[1])
tokens = tokenizer("3 + 4 =", return_tensors="pt", add_special_tokens=False)["input_ids"]
print(tokenizer.decode(model.generate(input_ids=tokens, max_new_tokens=4, do_sample=False)[0]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="torch==2.13.0", help="what pip installs first, such as a CPU build")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path, help="where to write the commands and their seconds")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        wheel = build_wheel(place)
        shutil.copy(ROOT / "examples" / "toy.py", place)
        (place / "generate.py").write_text(GENERATE)
        commands = [
            f"{sys.executable} -m venv venv",
            f"venv/bin/pip install --quiet --disable-pip-version-check {arguments.torch} {wheel.name}[hf]",
            "venv/bin/python toy.py my-model",
            "venv/bin/shardwise train --model my-model --data my-model/texts.jsonl "
            f"run.steps={arguments.steps} optimizer.lr=3e-3 data.seq_len=64 zero.stage=3 run.name=first",
            "venv/bin/python generate.py {run}/model",
        ]
        timed = [run(command, place) for command in commands]
    minutes = sum(each["seconds"] for each in timed) / 60
    print(f"\n{len(timed)} commands, {minutes:.1f} minutes in all")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(timed, indent=1) + "\n")


def build_wheel(place: Path) -> Path:
    """Build the wheel beside the commands; a user gets it from an index."""
    command = ["uv", "build", "--quiet", "--wheel", "--no-build-isolation", "--python", sys.executable]
    subprocess.run(
        [str(Path(sys.executable).parent / command[0]), *command[1:], "--out-dir", place], cwd=ROOT, check=True
    )
    (wheel,) = place.glob("*.whl")
    return wheel


def run(command: str, place: Path) -> dict[str, Any]:
    """Run one command in the folder, and print it with its seconds and the end of what it says."""
    runs = sorted(place.glob("runs/*-first"))
    command = command.format(run=runs[0].relative_to(place) if runs else "")
    start_s = time.monotonic()
    done = subprocess.run(command, shell=True, cwd=place, capture_output=True, text=True)
    seconds = time.monotonic() - start_s
    print(f"{seconds:7.1f} s  $ {command}", flush=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    if done.stdout.strip():
        print(f"{'':11}{done.stdout.strip().splitlines()[-1].strip()}", flush=True)
    return {"command": command, "seconds": round(seconds, 1)}


if __name__ == "__main__":
    main()
