"""Runs the command `shardwise report`: it writes runs and plans as one HTML page that needs no network.

torch is imported only for the price of a plan's config. Errors are one line and an exit code, as in
`shardwise.cli.main`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console

from shardwise.config.resolve import Config, ConfigError
from shardwise.config.untrusted_files import UntrustedFileError, read_json
from shardwise.report import page
from shardwise.report.console import refuse
from shardwise.report.plan_answer import config_source, plan_source
from shardwise.report.planned import HERE, PlanNote
from shardwise.report.run_folder import is_run, run_source

if TYPE_CHECKING:
    from shardwise.planner.hardware import Cluster

_EXAMPLES = """\
The page holds curves, memory, timelines, bytes sent, the config and the environment; open it in any browser. A run that
goes on may be given, too: what is there is shown. `shardwise train` keeps the page of its run up to date.

examples:
  shardwise report runs/a                          writes runs/a/report.html
  shardwise report runs/a --compare runs/b -o ab.html     curves over each other, and how the configs differ
  shardwise report plan.toml                       what shardwise plan --write wrote: memory, time, timeline
  shardwise report plan.toml --cluster h100:512    a config, priced for a cluster
  shardwise report plan.json                       what shardwise plan --json wrote
"""
_MAX_ANSWER_BYTES: Final = 64 * 2**20


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser], environ: Mapping[str, str]) -> None:
    """Add `report` to the commands of `shardwise`.

    Args:
        commands: the parser's commands.
        environ: the process's environment.
    """
    parser = commands.add_parser(
        "report",
        help="write a run or a plan as a page: curves, memory, timelines",
        description="Write a run or a plan, or several beside each other, as one HTML page that needs no network.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, metavar="RUN | PLAN", help="a run's folder, or a plan's TOML or JSON")
    parser.add_argument("--compare", type=Path, nargs="+", default=[], metavar="OTHER", help="further runs or plans")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="the page (default: report.html in the run)")
    parser.add_argument("--cluster", metavar="GPU:N | FILE", help="what a config is priced for (default: its plan's)")
    parser.set_defaults(run=partial(_report, environ=environ))


def _report(arguments: argparse.Namespace, environ: Mapping[str, str]) -> int:
    paths = [arguments.source, *arguments.compare]
    try:
        share = page.share_of(len(paths))
        sources = [_source(path, share, arguments.cluster, environ) for path in paths]
    except (ConfigError, UntrustedFileError) as error:
        return refuse(error)
    first = arguments.source
    out = arguments.out or (first / "report.html" if first.is_dir() else first.with_suffix(".html"))
    try:
        page.write(out, sources)
    except OSError as error:
        print(f"shardwise: cannot write {out}: {error.strerror}; give another file by -o FILE", file=sys.stderr)
        return 1
    print(f"wrote {out}")
    return 0


def _source(path: Path, max_bytes: int, cluster: str | None, environ: Mapping[str, str]) -> page.Source:
    if path.is_dir():
        if not is_run(path):
            missing = "it has neither metrics.jsonl nor config.json"
            raise ConfigError("not-a-run", f"{path} is no run's folder: {missing}; give the folder of a run")
        return run_source(path, max_bytes)
    if path.suffix == ".json":
        answer = read_json(path, "give what shardwise plan --json wrote", max_bytes=_MAX_ANSWER_BYTES)
        return plan_source(path.stem, answer, None, max_bytes)
    return _of_config(path, max_bytes, cluster, environ)


def _of_config(path: Path, max_bytes: int, cluster: str | None, environ: Mapping[str, str]) -> page.Source:
    config = Config.from_toml(path)
    note = PlanNote.of(path.read_text(encoding="utf-8"))
    cluster = cluster or (note.cluster if note is not None else None)
    if cluster is None:
        return config_source(path.stem, config, None, max_bytes)
    with Console(stderr=True).status("starting torch"):
        answer = _priced(path, _cluster(cluster, environ))
    return plan_source(path.stem, answer, config.model_dump(mode="json"), max_bytes)


def _priced(path: Path, cluster: Cluster) -> dict[str, Any]:
    """Return the planner's answer about a config, as `shardwise plan --explain --json` writes it."""
    from shardwise.planner.plan_view import job_dict, page_dict, price_dict
    from shardwise.planner.pricer import Pricer
    from shardwise.train.imported_plan import read_explained

    asked = read_explained(str(path), None, cluster)
    pricer = Pricer(asked.job)
    price = pricer.price(asked.strategy)
    return {"job": job_dict(price.job), **price_dict(price), **page_dict(price, pricer)}


def _cluster(text: str, environ: Mapping[str, str]) -> Cluster:
    """Return the cluster of a plan; "here" is this machine."""
    from shardwise.planner.hardware import parse_cluster

    if text != HERE:
        return parse_cluster(text)
    from shardwise.cli.this_machine import this_machine
    from shardwise.launch.environment import cache_folder

    return this_machine(cache_folder(environ))
