"""Run the command `shardwise report`: it writes runs and plans as one HTML page that needs no network.

torch is imported only for the price of a plan's config.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from shardwise.cli.command import FILE, OutputFile, as_written
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config
from shardwise.config.untrusted_files import read_json
from shardwise.config.written_files import write_asked
from shardwise.report import page
from shardwise.report.console import progress, write_line
from shardwise.report.planned import PlanNote, plan_source
from shardwise.report.run_folder import is_run, run_source

if TYPE_CHECKING:
    from shardwise.planner.hardware import Cluster

_MAX_ANSWER_BYTES: Final = 64 * 2**20


@click.command(
    epilog=as_written("""
examples:
  shardwise report runs/a                          writes runs/a/report.html
  shardwise report runs/a --compare runs/b -o ab.html     curves over each other, and how the configs differ
  shardwise report plan.toml                       what shardwise plan --write wrote: memory, time, timeline
  shardwise report plan.toml --cluster h100:512    a config, priced for a cluster
  shardwise report plan.json                       what shardwise plan --json wrote
""")
)
@click.argument("source", type=FILE, metavar="RUN|PLAN")
@click.argument("others", type=FILE, nargs=-1, metavar="[OTHER]...")
@click.option("--compare", type=FILE, multiple=True, help="a further run or plan; OTHER means the same")
@click.option("-o", "--out", type=OutputFile(), help="the page (default: report.html in the run)")
@click.option("--cluster", metavar="GPU:N|FILE", help="what a config is priced for (default: its plan's)")
def report(source: Path, others: Sequence[Path], compare: Sequence[Path], out: Path | None, cluster: str | None) -> int:
    """Write runs or plans as one HTML page that needs no network: curves, memory, timelines.

    The page also holds bytes sent, the config and the environment; open it in any browser. A run that goes on may be
    given, too: what is there is shown. `shardwise train` writes this page at its end.
    """
    paths = [source, *compare, *others]
    sources = [_source(path, page.share_of(len(paths)), cluster) for path in paths]
    for path, shown in zip(paths, sources, strict=True):
        if path.is_dir() and shown["what"] != "run":
            write_line(f"{path}: {shown['what']}", to_stderr=True)
    if out is None:
        out = source / "report.html" if source.is_dir() else source.with_suffix(".html")
        page.write(out, sources)
    else:
        write_asked(out, page.draw(sources))
    write_line(f"wrote {out}")
    return 0


def _source(path: Path, max_bytes: int, cluster: str | None) -> page.Source:
    if path.is_dir():
        if not is_run(path):
            missing = "it has neither a run's config.json nor steps in metrics.jsonl"
            raise ConfigError("not-a-run", f"{path} is no run's folder: {missing}; give the folder of a run")
        return run_source(path, max_bytes)
    if not path.exists():
        fix = "give the folder of a run, or a file that shardwise plan has written"
        raise ConfigError("file-unreadable", f"cannot read {path}: No such file or directory; {fix}")
    if path.suffix == ".json":
        answer = read_json(path, "give what shardwise plan --json wrote", max_bytes=_MAX_ANSWER_BYTES)
        return plan_source(path.stem, answer, None, max_bytes)
    return _of_config(path, max_bytes, cluster)


def _of_config(path: Path, max_bytes: int, cluster: str | None) -> page.Source:
    config = Config.from_toml(path)
    note = PlanNote.of(path.read_text(encoding="utf-8"))
    cluster = cluster or (note.cluster if note is not None else None)
    if cluster is None:
        raise ConfigError(
            "cluster-not-known",
            f"{path} was not written by shardwise plan; add its cluster, such as --cluster h100:512, or draw its "
            "schedule by shardwise timeline --html",
        )
    from shardwise.cli.this_machine import read_cluster

    cluster_found = read_cluster(cluster)
    with progress("starting torch"):
        answer = _priced(path, cluster_found)
    return plan_source(path.stem, answer, config.model_dump(mode="json"), max_bytes)


def _priced(path: Path, cluster: Cluster) -> dict[str, Any]:
    """Return the planner's answer about a config, as `shardwise plan --explain --json` writes it."""
    from shardwise.planner.render import explain_dict
    from shardwise.planner.search import Pricer
    from shardwise.train.imported_plan import read_explained

    asked = read_explained(str(path), None, cluster)
    pricer = Pricer(asked.job)
    return explain_dict(pricer.price(asked.config), pricer)
