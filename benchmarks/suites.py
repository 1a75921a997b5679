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
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

import suites_ranks

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
_NAMES: Final = (
    "import sys, types, torch\n"
    "import deepspeed.accelerator as _a\n"
    "_a.__dict__.setdefault('is_current_accelerator_supported', lambda: True)\n"
    "import os\n"
    "if 'SUITES_DEVICES' in os.environ:\n"
    "    type(_a.get_accelerator()).device_count = lambda self: int(os.environ['SUITES_DEVICES'])\n"
    "    type(_a.get_accelerator()).current_device = lambda self: self.device_name()\n"  # tensors go there
    "_info = types.ModuleType('deepspeed.git_version_info')\n"
    "_info.torch_info = dict(version=torch.__version__, cuda_version='0.0', nccl_version='0.0',\n"
    "                        bf16_support=True, hip_version='0.0')\n"
    "sys.modules['deepspeed.git_version_info'] = _info\n"
    "_swap = types.ModuleType('deepspeed.runtime.swap_tensor')\n"
    "_swap.MIN_SWAPPABLE_BYTES = 1024\n"
    "sys.modules['deepspeed.runtime.swap_tensor'] = _swap\n"
    # The plain engine of tests that compare: it takes no device_ids on a CPU.
    "_ddp = torch.nn.parallel.DistributedDataParallel\n"
    "_init = _ddp.__init__\n"
    "_ddp.__init__ = lambda self, module, device_ids=None, output_device=None, **keys: _init(self, module, **keys)\n"
    # Private names that a file imports, so that its other tests run; a test that uses one fails.
    "import importlib\n"
    "for _path, _value in {\n"
    "    'runtime.pipe.topology._prime_factors': None,\n"
    "    'runtime.zero.partition_parameters.partitioned_param_data_shape': [0],\n"
    "    'runtime.zero.partition_parameters.zero3_linear_wrap': None,\n"
    "    'runtime.zero.leaf_module_config.DEFAULT_LEAF_MODULE_CLASSES': None,\n"
    "    'runtime.zero.leaf_module_config.DEFAULT_LEAF_MODULE_NAMES': None,\n"
    "    'runtime.zero.leaf_module_config.DEFAULT_LEAF_MODULE_NAME_SUFFIXES': None,\n"
    "    'runtime.config.ADAM_OPTIMIZER': 'Adam',\n"
    "    'runtime.config.get_gradient_clipping': None,\n"
    "    'runtime.config.get_log_level': None,\n"
    "    'runtime.constants.GRADIENT_CLIPPING_DEFAULT': 1.0,\n"
    "    'runtime.constants.LOG_LEVEL_DEFAULT': None,\n"
    "    'runtime.torch_autocast.PARAM_COMM_DTYPE_ATTR_NAME': 'comm_dtype',\n"
    "    'runtime.torch_autocast.get_comm_dtype': None,\n"
    "}.items():\n"
    "    _module, _, _name = _path.rpartition('.')\n"
    "    _value = f'private: {_path}' if _value is None else _value\n"
    "    setattr(importlib.import_module(f'deepspeed.{_module}'), _name, _value)\n"
)
SUITES: Final = (
    Suite(
        "deepspeed",
        "tests",
        "tests",
        ("unit/**/test_*.py",),
        {
            "tests/conftest.py": _NAMES,
            "tests/unit/__init__.py": _NAMES,  # of the ranks' processes
            # Its comparison of two engines reads DeepSpeed's private buffers of fp32: the public calls give the values.
            "tests/unit/checkpoint/common.py": (
                "from deepspeed.runtime.engine import DeepSpeedEngine as _E, DeepSpeedOptimizer as _O\n"
                "from deepspeed.utils import safe_get_full_fp32_param as _read\n"
                "_values = property(lambda self: [_read(p) for p in self._engine.module.parameters()])\n"
                "for _name in ('fp32_partitioned_groups_flat', 'single_partition_of_fp32_groups', 'fp32_groups_flat',\n"
                "              'fp32_groups'):\n"
                "    setattr(_O, _name, _values)\n"
                "_E._get_optimizer_ckpt_name = lambda self, *given: ''\n"
            ),
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


# As a plug-in of pytest in the processes that the rest starts: `-p suites`. It writes a line for each test that ends.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", type=int, default=1)
    parser.addoption("--outcomes", type=Path, default=Path(os.devnull))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Writer(config.getoption("--outcomes")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    suites_ranks.replace_pool()
    every = config.getoption("--every")
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % every == 0]


@dataclass(frozen=True)
class Writer:
    """Writes which tests there are, and how each has ended."""

    path: Path

    def write(self, **line: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.write(expected=[item.nodeid for item in session.items])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed" and report.nodeid.endswith(".py"):
            self.write(test=report.nodeid, outcome=report.outcome, text=reason_of(report))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.write(test=report.nodeid, outcome=report.outcome, text=reason_of(report))


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the last line of an error, or the reason of a skip."""
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2][:300]
    lines = re.sub(r"\x1b\[[0-9;]*m", "", report.longreprtext).splitlines() or [""]
    errors = [line for line in lines if line.startswith("E  ")]
    return (errors[-1][1:].strip() if errors else lines[0])[:300]


# What runs them.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for suite in SUITES:
        parser.add_argument(f"--{suite.name}", type=Path, metavar="DIR", help=f"a checkout of {suite.name}")
    parser.add_argument("--only", default="*", help="pattern of the files that run")
    parser.add_argument("--classes", nargs="+", choices=CLASSES[:3], default=CLASSES[:3], help="of the files that run")
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
        outcomes[suite.name] = {}
        for found in run_suite(suite, checkout, arguments):
            outcomes[suite.name] |= found
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(outcomes, indent=1) + "\n")
    before = json.loads(arguments.before.read_text()) if arguments.before is not None else None
    show(outcomes, before)


def run_suite(suite: Suite, checkout: Path, arguments: argparse.Namespace) -> Iterator[dict[str, list[str]]]:
    """Yield of each file: test -> its outcome and the last line of its error."""
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
        files = sorted({path.relative_to(root) for pattern in suite.files for path in root.glob(pattern)})
        for _, group in itertools.groupby(files, key=lambda path: path.parent):
            names = [path.as_posix() for path in group if fnmatch.fnmatch(path.as_posix(), arguments.only)]
            names = [name for name in names if class_of(suite.name, name)[0] in arguments.classes]
            found = run_files(root, names, arguments.every, arguments.limit)
            for name in names:
                counts = Counter(row[0] for test, row in found.items() if test.partition("::")[0] == name)
                print(suite.name, name, dict(counts), flush=True)
            yield found


def save_model(folder: Path, kind: str, sizes: Mapping[str, Any]) -> None:
    """Save a tiny random model where the tests run: a folder of its name is taken in place of the Hub's."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**sizes)
    transformers.AutoModel.from_config(config).save_pretrained(folder)


def run_files(root: Path, names: Sequence[str], every: int, limit: int) -> dict[str, list[str]]:
    """Run files of tests in one process under the drop-in; a test that ends the process fails, with its file."""
    found: dict[str, list[str]] = {}
    left = list(names)
    while left:
        lines, output = run_pytest(root, left, every, limit)
        found |= {line["test"]: [line["outcome"], line["text"]] for line in lines if "test" in line}
        expected = next((line["expected"] for line in lines if "expected" in line), None)
        if expected is None:
            return found | {name: ["failed", output] for name in left if name not in found}
        missing = [test for test in expected if test not in found]
        if not missing:
            break
        ended = missing[0].partition("::")[0]
        found |= {test: ["failed", f"the process ends: {output}"] for test in missing if test.startswith(f"{ended}::")}
        left = left[left.index(ended) + 1 :]
    return found


def run_pytest(root: Path, names: Sequence[str], every: int, limit: int) -> tuple[list[dict[str, Any]], str]:
    """Return the lines that the plug-in has written, and the last line of the output."""
    written = root / "outcomes.jsonl"
    written.write_text("")
    options = [
        "-q",
        "-p",
        "suites",
        f"--every={every}",
        f"--timeout={2 * limit}",
        f"--outcomes={written}",
        f"--rootdir={root}",
    ]
    options += ["-p", "no:cacheprovider", "-o", "log_cli=false", "--continue-on-collection-errors"]
    command = [sys.executable, "-m", "shardwise", "run", "--as-deepspeed", "--", sys.executable, "-m", "pytest"]
    paths = [str(HERE), str(root), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "DS_UNITTEST_TIMEOUT": str(limit)}
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, *options, *names], cwd=root, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            process.wait(timeout=10 * limit * len(names))
            log.seek(0)
            output = (log.read().decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        except subprocess.TimeoutExpired:
            output = f"does not end within {10 * limit * len(names)} s"
        finally:
            subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
    return [json.loads(line) for line in written.read_text().splitlines()], output[:300]


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
