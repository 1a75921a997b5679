"""Runs the DeepSpeed tests of other projects on the drop-in, and counts what passes.

It fetches nothing: each option names a checkout of the project, and a suite that is not given is skipped with that
reason. The tests are copied away from the project's sources first, so that `import deepspeed` finds the drop-in alone.
`suites.toml` sorts files and tests: what a user's script touches, internals of DeepSpeed, what is refused by design,
what needs CUDA or a download. Of the first class each failure must pass or have a reason there.

    python benchmarks/suites.py --deepspeed ~/DeepSpeed --accelerate ~/accelerate --json after.json
    python benchmarks/suites.py --deepspeed ~/DeepSpeed --every 4 --before before.json

The tests need what their projects' own setup installs, such as parameterized and datasets. Other sources of this
library run by `PYTHONPATH=OTHER/src`.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

HERE: Final = Path(__file__).parent
CLASSES: Final = ("user", "internal", "refused", "elsewhere")


@dataclass(frozen=True)
class Suite:
    """Says where a project keeps the tests of its DeepSpeed integration.

    Attributes:
        name: of the project, and of the option.
        folder: of all its tests, which is copied.
        root: where pytest starts, in the copy.
        files: patterns of the files that run, from `root` on.
        harness: file -> text put before it. It gives the suite's own harness what no script of a user asks for.
        models: name on the Hub -> class and arguments of the config of a tiny random model that stands for it.
    """

    name: str
    folder: str
    root: str
    files: tuple[str, ...]
    harness: Mapping[str, str]
    models: Mapping[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)


_GPT2: Final = ("GPT2", {"n_layer": 2, "n_head": 2, "n_embd": 16})
_T5_SIZES: Final = {"num_layers": 2, "num_heads": 2, "d_model": 16, "d_kv": 8, "d_ff": 32, "vocab_size": 128}
_T5: Final = ("T5", {**_T5_SIZES, "decoder_start_token_id": 0})
_GPTJ: Final = ("GPTJ", {"n_layer": 2, "n_head": 2, "n_embd": 16, "rotary_dim": 4, "vocab_size": 128})
_NECK: Final = [16, 16, 24, 48, 64, 80, 320]
_MOE: Final = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "moe_intermediate_size": 16,
    "vocab_size": 128,
    "shared_expert_intermediate_size": 16,
}
SUITES: Final = (
    Suite(
        "deepspeed",
        "tests",
        "tests",
        ("unit/**/test_*.py",),
        {
            "tests/unit/__init__.py": (
                "import sys, types, torch\n"
                "import deepspeed.accelerator as _a\n"
                "_a.__dict__.setdefault('is_current_accelerator_supported', lambda: True)\n"
                "import os\n"
                "if 'SUITES_DEVICES' in os.environ:\n"
                "    type(_a.get_accelerator()).device_count = lambda self: int(os.environ['SUITES_DEVICES'])\n"
                "_info = types.ModuleType('deepspeed.git_version_info')\n"
                "_info.torch_info = dict(version=torch.__version__, cuda_version='0.0', nccl_version='0.0',\n"
                "                        bf16_support=True, hip_version='0.0')\n"
                "sys.modules['deepspeed.git_version_info'] = _info\n"
            )
        },
    ),
    Suite(
        "accelerate",
        "tests",
        "",
        ("tests/deepspeed/test_*.py",),
        {
            "conftest.py": (
                "import accelerate.test_utils.testing as _t\n"
                "_t.require_non_cpu = _t.require_fp16 = lambda test: test\n"
                "from accelerate import state as _s\n"
                "_init = _s.AcceleratorState.__init__\n"
                "def _on_cpu(self, *args, **keys):\n"
                "    _s.PartialState(cpu=True)\n"
                "    _init(self, *args, **keys)\n"
                "_s.AcceleratorState.__init__ = _on_cpu\n"
            )
        },
        {
            "hf-internal-testing/tiny-random-gpt2": _GPT2,
            "sshleifer/tiny-gpt2": _GPT2,
            "gpt2": _GPT2,
            "apple/mobilevit-xx-small": ("MobileViT", {"hidden_sizes": [64, 80, 96], "neck_hidden_sizes": _NECK}),
            "peft-internal-testing/tiny-random-qwen-1.5-MoE": ("Qwen2Moe", _MOE),
        },
    ),
    Suite(
        "transformers",
        "tests",
        "",
        ("tests/deepspeed/test_*.py",),
        {
            "conftest.py": (
                "import transformers, transformers.testing_utils as _t\n"
                "_t.require_torch_accelerator = _t.require_torch_fp16 = lambda test: test\n"
                "_init = transformers.TrainingArguments.__post_init__\n"
                "def _on_cpu(self):\n"
                "    self.use_cpu = True\n"
                "    _init(self)\n"
                "transformers.TrainingArguments.__post_init__ = _on_cpu\n"
            )
        },
        {
            "patrickvonplaten/t5-tiny-random": _T5,
            "sshleifer/tiny-gpt2": _GPT2,
            "hf-internal-testing/tiny-random-gptj": _GPTJ,
        },
    ),
    Suite(
        "lightning",
        "tests",
        "tests",
        ("tests_fabric/**/test_deepspeed*.py", "tests_pytorch/**/test_deepspeed*.py"),
        {},
    ),
    Suite("trl", "tests", "", ("tests/distributed/test_*.py",), {}),
)


# As a plug-in of pytest in the processes that the rest starts: `-p suites`.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", type=int, default=1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    every = config.getoption("--every")
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % every == 0]


# What runs them.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for suite in SUITES:
        parser.add_argument(f"--{suite.name}", type=Path, metavar="DIR", help=f"a checkout of {suite.name}")
    parser.add_argument("--only", default="*", help="pattern of the files that run")
    parser.add_argument("--every", type=int, default=1, help="run one test in so many, the same in each run")
    parser.add_argument("--limit", type=int, default=120, help="seconds of a test; a file has ten times as many")
    parser.add_argument("--json", type=Path, help="where to write the outcome of each test")
    parser.add_argument("--before", type=Path, help="what --json has written, to show beside it")
    arguments = parser.parse_args()
    outcomes: dict[str, dict[str, list[str]]] = {}
    for suite in SUITES:
        checkout = getattr(arguments, suite.name)
        if checkout is None or not (checkout / suite.folder).is_dir():
            reason = "no checkout is given" if checkout is None else f"{checkout} has no folder {suite.folder}"
            print(f"skipped {suite.name}: {reason}; --{suite.name} DIR runs it", flush=True)
            continue
        outcomes[suite.name] = run_suite(suite, checkout, arguments.only, arguments.every, arguments.limit)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(outcomes, indent=1) + "\n")
    before = json.loads(arguments.before.read_text()) if arguments.before is not None else None
    show(outcomes, before)


def run_suite(suite: Suite, checkout: Path, only: str, every: int, limit: int) -> dict[str, list[str]]:
    """Return test -> its outcome and the last line of its error."""
    outcomes: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(checkout / suite.folder, copy / suite.folder, symlinks=True)
        if (checkout / "examples").is_dir() and suite.name in ("transformers", "accelerate"):
            shutil.copytree(checkout / "examples", copy / "examples", symlinks=True)
        for name, text in suite.harness.items():
            own = (copy / name).read_text() if (copy / name).exists() else ""
            (copy / name).write_text(text + own)
        (copy / "src").mkdir(exist_ok=True)  # transformers' tests know by it where the project begins
        root = copy / suite.root
        for name, (kind, sizes) in suite.models.items():
            save_model(root / name, kind, sizes)
        for path in sorted({path for pattern in suite.files for path in root.glob(pattern)}):
            name = path.relative_to(root).as_posix()
            if fnmatch.fnmatch(name, only) and class_of(suite.name, name)[0] != "elsewhere":
                found = run_file(root, name, every, limit)
                outcomes |= found
                counts = Counter(outcome for outcome, _ in found.values())
                print(suite.name, name, dict(counts), flush=True)
    return outcomes


def save_model(folder: Path, kind: str, sizes: Mapping[str, Any]) -> None:
    """Save a tiny random model where the tests run: a folder of its name is taken in place of the Hub's."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**sizes)
    transformers.AutoModel.from_config(config).save_pretrained(folder)


def run_file(root: Path, name: str, every: int, limit: int) -> dict[str, list[str]]:
    """Run one file of tests under the drop-in; one that does not import or end is one failure of its name."""
    report = root / "report.xml"
    report.unlink(missing_ok=True)
    options = ["-q", "-p", "suites", f"--every={every}", f"--timeout={limit}", f"--junitxml={report}"]
    pytest_command = [sys.executable, "-m", "pytest", name, *options, "-p", "no:cacheprovider", "-o", "log_cli=false"]
    command = [sys.executable, "-m", "shardwise", "run", "--as-deepspeed", "--", *pytest_command]
    paths = [str(HERE), str(root), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "DS_UNITTEST_TIMEOUT": str(limit)}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        output = process.communicate(timeout=10 * limit)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        output = f"does not end within {10 * limit} s"
    finally:
        subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
    if process.returncode == 5 and report.exists():
        return {}
    outcomes = dict(read_report(report, name)) if report.exists() else {}
    return outcomes or {name: ["failed", output.strip().splitlines()[-1] if output.strip() else "no output"]}


def read_report(report: Path, name: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the tests of a JUnit report."""
    for case in ElementTree.parse(report).iter("testcase"):
        kind = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        what = "passed" if kind is None else "skipped" if kind.tag == "skipped" else "failed"
        lines = [line for line in ("" if kind is None else kind.text or "").splitlines() if line.startswith("E  ")]
        message = (kind.get("message") or "") if kind is not None else ""
        text = lines[-1][1:].strip() if lines and what == "failed" else message
        class_name = (case.get("classname") or "").rpartition(".")[2]
        title = case.get("name") or ""
        test = "::".join(part for part in (name, class_name if class_name[:4] == "Test" else "", title) if part)
        yield test if title and title != name else name, [what, text.splitlines()[0][:300] if text else ""]


def rules() -> dict[str, Any]:
    with (HERE / "suites.toml").open("rb") as file:
        return tomllib.load(file)


def class_of(suite: str, test: str) -> tuple[str, str]:
    """Return the class of a file or test, and why; the last pattern that fits counts."""
    found = "user", ""
    for row in rules().get(suite, ()):
        if any(fnmatch.fnmatch(test, pattern) for pattern in row["tests"]):
            found = row["class"], row["reason"]
    return found


def show(outcomes: Mapping[str, Mapping[str, Sequence[str]]], before: Mapping[str, Any] | None) -> None:
    """Print a table of counts, then each failure of what a user touches without a reason."""
    header = ("suite", "class", "tests", "skipped", "passed", *(("passed before",) if before is not None else ()))
    print("\n| " + " | ".join(header) + " |\n|" + "---|" * len(header))
    unexplained = []
    for suite, tests in outcomes.items():
        for kind in CLASSES[:3]:
            rows = {test: row for test, row in tests.items() if class_of(suite, test)[0] == kind}
            counts = Counter(row[0] for row in rows.values())
            cells = [suite, kind, len(rows), counts["skipped"], counts["passed"]]
            if before is not None:
                cells.append(sum(before.get(suite, {}).get(test, ("",))[0] == "passed" for test in rows))
            if rows:
                print("| " + " | ".join(map(str, cells)) + " |")
            if kind == "user":
                unexplained += [(suite, test, row[1]) for test, row in rows.items() if row[0] == "failed"]
    for suite, test, text in unexplained:
        print(f"FAILED {suite} {test}: {text}")
    print(f"\n{len(unexplained)} failures of what a user touches have no reason in suites.toml")


if __name__ == "__main__":
    main()
