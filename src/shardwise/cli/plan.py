"""Runs the command `shardwise plan`: it finds a job's best layout on a cluster, prices one, or simulates its ranks.

Nothing is started. As in `shardwise.cli.main`, errors are one line and exit code 2.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from rich.console import Console, Group, RenderableType
from rich.text import Text

from shardwise.config.resolve import Config, ConfigError, is_config
from shardwise.launch.targets import PORT, LaunchJob, c10d, torchrun
from shardwise.report.console import Terminal, refuse

if TYPE_CHECKING:
    from shardwise.planner.hardware import Cluster
    from shardwise.planner.pricer import Pricer
    from shardwise.planner.results import Estimate
    from shardwise.planner.search import SearchResult
    from shardwise.verify.dry_run import Choice


_EXAMPLES = """\
Settings such as mesh.tp=8 or mesh.tp=4,8 pin what the planner would choose; others, such as optimizer.name=lion, go
into the config. Without --cluster the job is planned for this machine, once it is measured: shardwise doctor
--calibrate.

examples:
  shardwise plan llama-70b h100:512 --tp 8             a model, a cluster and a pin, the batch as usual
  shardwise plan --model llama-70b --cluster h100:512 --global-batch 1024 --seq 8192
  shardwise plan --model config.json --cluster a100-80:8x8 --global-batch 512 --write plan.toml
  shardwise plan --model train_megatron.sh --cluster h200:64    Megatron's flags, as a script, YAML or a string
  shardwise plan my.toml --cluster mine.toml zero.stage=3       our config; a cluster of your own
  shardwise plan --explain plan.toml --cluster h100:512         memory by stage and time by part of one config
  shardwise plan --explain ds.json --model llama-7b --cluster h100:8
  shardwise plan --fit --cluster h100:8 --model llama-70b       the largest model, micro-batch and sequence

a dry run simulates the engine's own ranks: rank 0, or those of --ranks:
  shardwise plan --dry-run my.toml --world-size 512
  shardwise plan --dry-run my.toml --world-size 512 mesh.pp=8 mesh.tp=8 pipeline.schedule=zb-h1
  shardwise plan --dry-run my.toml --ranks stages      one rank of each stage of a pipeline
  shardwise plan --dry-run my.toml --ranks worst       of these the one with the highest peak, in full
  shardwise plan --dry-run my.toml --ranks 0,1,64      these ranks

exit code: 0, 1 where nothing fits, 2 where the question is wrong, 130 after Ctrl-C
"""
_WRITTEN_BY: Final = "# Written by `shardwise plan`"
_MAX_MARGIN: Final = 0.9
_USUAL_LENGTH: Final = 4096
# A written config saves this often: what a failure costs at most.
_SAVED_S: Final = 3600.0
_LONG_NAME: Final = 80
# Python refuses to read a number of thousands of digits.
_MAX_DIGITS: Final = 18
_NO_MODEL: Final = "no model is given; say which, such as --model llama-70b, or a config; see shardwise presets"
# The flags that each question uses; a search uses all but those of a dry run.
_OF_JOB: Final = frozenset({"--model", "--cluster", "--seq", "--margin", "--json"})
_OF_PAGE: Final = frozenset({"--html"})
_HEEDS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "--explain": _OF_JOB | _OF_PAGE | {"--global-batch"},
        "--fit": _OF_JOB,
        "--refit": frozenset(),
        "--dry-run": frozenset({"--world-size", "--ranks"}),
    }
)
_OF_SEARCH: Final = frozenset({"--compare", "--write", "--top", "--more"})

# Names by which people pin what the planner would choose, and the config's keys that they set.
_PINS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "--tp": "mesh.tp",
        "--pp": "mesh.pp",
        "--cp": "mesh.cp",
        "--dp": "mesh.dp_shard",
        "--zero": "zero.stage",
        "--micro-batch": "batch.micro_size",
        "--recompute": "recompute.mode",
    }
)
_CLUSTER: Final = re.compile(r"[\w.-]+:\d+(x\d+)?")

Split = Callable[[Sequence[str]], tuple[str | None, list[str]]]
"""Splits a command's settings into its config file, if there is one, and the assignments."""


def add_command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], split: Split, environ: Mapping[str, str]
) -> None:
    """Add `plan` to the commands of `shardwise`.

    Args:
        commands: the parser's commands.
        split: splits a command's settings.
        environ: the process's environment.
    """
    parser = commands.add_parser(
        "plan",
        help="find the best layout of a job, or say what one takes",
        description="Find the best layout of a job that fits, with reasons; or say what a given one takes.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    words = "config.toml | model | gpu:n | key=value"
    parser.add_argument("settings", nargs="*", metavar=words, help="as for train, or as for --model and --cluster")
    job = parser.add_argument_group("the job")
    job.add_argument("--model", metavar="NAME | FILE", help="a preset, our config, config.json, or Megatron's flags")
    job.add_argument("--cluster", metavar="GPU:N | FILE", help="such as h100:512, h100:64x8, or a TOML file")
    job.add_argument("--global-batch", metavar="N", help="sequences of a step (default: 64 Ki tokens a GPU, to 4 Mi)")
    job.add_argument("--seq", metavar="N", help="tokens of a sequence (default: the model's longest)")
    pins = parser.add_argument_group("what is pinned, as by key=value")
    for flag, key in _PINS.items():
        pins.add_argument(flag, metavar="N" if flag != "--recompute" else "MODE", help=key)
    what = parser.add_argument_group("the answer")
    what.add_argument("--more", action="store_true", help="all of the answer: where time goes, what each change does")
    what.add_argument("--top", metavar="N", help="layouts to show (default: 3, with --more 5)")
    what.add_argument("--margin", metavar="SHARE", help="of a device's memory kept free (default: 0.06)")
    what.add_argument("--json", type=Path, metavar="OUT", help="write all of it as JSON; - for the terminal")
    what.add_argument("--html", type=Path, metavar="FILE", help="write it as a page, as shardwise report does")
    what.add_argument("--write", type=Path, metavar="TOML", help="write the best as a config for shardwise train")
    what.add_argument("--explain", metavar="FILE", help="price one config: ours, DeepSpeed's or Megatron's")
    what.add_argument("--compare", metavar="FILE", help="a config of yours, as for --explain, to show beside the best")
    what.add_argument("--fit", action="store_true", help="say how large a model, micro-batch and sequence may be")
    what.add_argument("--refit", type=Path, metavar="RUNS", help="improve this machine's profile by runs' measurements")
    dry = parser.add_argument_group("a dry run")
    dry.add_argument("--dry-run", action="store_true", help="simulate the config as it is; start nothing")
    dry.add_argument("--world-size", type=int, metavar="N", help="ranks of the job (default: what the mesh says)")
    dry.add_argument("--ranks", metavar="0,1,... | worst | stages", help="which ranks to simulate (default: 0)")
    parser.set_defaults(run=partial(_plan, split=split, environ=environ))


def _positive(text: str | None, flag: str) -> int | None:
    if text is None:
        return None
    digits = text.replace(",", "").replace("_", "")
    if not _is_number(digits) or int(digits) < 1:
        raise ConfigError(
            "flag-whole-number", f"{flag} {_shown(text)} must be a whole number >= 1, such as {flag} 1024"
        )
    return int(digits)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS


def _shown(text: str) -> str:
    return text if len(text) <= _LONG_NAME else f"{text[:_LONG_NAME]}..."


def _share(text: str | None) -> float:
    from shardwise.planner.memory_limit import USUAL_MARGIN

    if text is None:
        return USUAL_MARGIN
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _MAX_MARGIN:
        raise ConfigError(
            "margin-share", f"--margin {text} must be a share between 0 and {_MAX_MARGIN}, such as 0.06 or 6%"
        )
    return value


def _plan(arguments: argparse.Namespace, split: Split, environ: Mapping[str, str]) -> int:
    try:
        _check_flags(arguments)
        path, assignments = split(_with_words(arguments))
        if arguments.dry_run:
            return _dry_run(arguments, path, assignments)
        if arguments.refit is not None:
            return _refit(arguments.refit, environ)
        if arguments.model is not None and path is not None:
            raise ConfigError("two-models", f"--model {arguments.model} and {path} are two models; give one of them")
        if arguments.fit and assignments:
            raise ConfigError(
                "fit-takes-no-settings",
                f"{assignments[0]} pins nothing of --fit, which has setups of its own; leave one of them out",
            )
        _refuse_place(arguments.write, "--write", "plan.toml")
        _refuse_place(arguments.json, "--json", "plan.json")
        _refuse_place(arguments.html, "--html", "plan.html")
        _refuse_taken(arguments.write)
        return _answer(arguments, arguments.model or path, assignments, environ)
    except ConfigError as error:
        return refuse(error)
    except KeyboardInterrupt:
        print("shardwise: stopped by Ctrl-C", file=sys.stderr)
        return 130


def _with_words(arguments: argparse.Namespace) -> list[str]:
    """Return the settings with those of the flags that pin; take a cluster among them for that of `--cluster`."""
    words = [each for each in arguments.settings if _CLUSTER.fullmatch(each)]
    if len(words) > 1 or (words and arguments.cluster is not None):
        both = " and ".join(dict.fromkeys((*words, arguments.cluster or "")))
        raise ConfigError("two-clusters", f"{both.removesuffix(' and ')} are two clusters; give one of them")
    arguments.cluster = words[0] if words else arguments.cluster
    given = {key: getattr(arguments, flag[2:].replace("-", "_")) for flag, key in _PINS.items()}
    pinned = [f"{key}={value}" for key, value in given.items() if value is not None]
    return [each for each in arguments.settings if each not in words] + pinned


def _answer(
    arguments: argparse.Namespace, model: str | None, assignments: Sequence[str], environ: Mapping[str, str]
) -> int:
    """Answer a question about a job; refuse an incomplete one before torch is imported, which takes seconds."""
    from shardwise.planner.hardware import parse_cluster

    named = None if arguments.cluster is None else parse_cluster(arguments.cluster)
    num_procs = None if named is not None else _num_procs(arguments.explain or model, assignments)
    if arguments.fit:
        return _fit(arguments, named or _here(environ, num_procs), model)
    if arguments.explain is not None:
        return _explain(arguments, named or _here(environ, num_procs), model, assignments)
    if model is None:
        raise ConfigError("plan-needs-model", _NO_MODEL)
    return _search(arguments, named or _here(environ, num_procs), model, assignments)


def _num_procs(source: str | None, assignments: Sequence[str]) -> int | None:
    """Return the ranks that the config or a setting wants on this machine; None where neither says it."""
    config = Config.from_toml(source) if source is not None and is_config(source) else Config()
    return config.override([each for each in assignments if each.startswith("run.num_procs=")]).run.num_procs


def _check_flags(arguments: argparse.Namespace) -> None:
    """Refuse flags that do not go together, and read their numbers."""
    modes = {
        "--dry-run": arguments.dry_run,
        "--explain": arguments.explain is not None,
        "--fit": arguments.fit,
        "--refit": arguments.refit is not None,
    }
    chosen = [name for name, is_chosen in modes.items() if is_chosen]
    if len(chosen) > 1:
        raise ConfigError("two-questions", f"{chosen[0]} and {chosen[1]} are two questions; ask one at a time")
    _refuse_unheeded(arguments, chosen[0] if chosen else "")
    arguments.global_batch = _positive(arguments.global_batch, "--global-batch")
    arguments.seq = _positive(arguments.seq, "--seq")
    arguments.top = _positive(arguments.top, "--top")
    arguments.margin = _share(arguments.margin)


def _refuse_unheeded(arguments: argparse.Namespace, question: str) -> None:
    """Refuse a flag that would change nothing.

    Args:
        arguments: the command's arguments.
        question: the flag that asks for something other than a search; empty for a search.
    """
    every = _OF_JOB | _OF_PAGE | _OF_SEARCH | {"--global-batch"} | _HEEDS["--dry-run"]
    heeded = _HEEDS.get(question, every - _HEEDS["--dry-run"])
    for flag in sorted(every - heeded):
        if getattr(arguments, flag.removeprefix("--").replace("-", "_")) in (None, False):
            continue
        if flag in _HEEDS["--dry-run"]:
            raise ConfigError(
                "flag-of-dry-run", f"{flag} is of a dry run; add --dry-run, or say the GPUs by --cluster h100:512"
            )
        if flag in _OF_SEARCH:
            raise ConfigError(
                "flag-of-search", f"{flag} is of a search, and {question} makes none; leave one of them out"
            )
        raise ConfigError("flag-unheeded", f"{flag} says nothing to {question}; leave one of them out")


def _refuse_place(path: Path | None, flag: str, example: str) -> None:
    """Refuse a file that cannot be written, before the search whose result it would hold."""
    if path is None or (str(path) == "-" and flag == "--json"):
        return
    if str(path) == "-":
        raise ConfigError("output-names-no-file", f"{flag} - names no file; give one, such as {example}")
    if path.is_dir():
        raise ConfigError("output-is-folder", f"{flag} {path} is a folder; give a file, such as {path / example}")
    if not path.parent.is_dir():
        raise ConfigError(
            "output-folder-absent", f"{flag} {path}: there is no folder {path.parent}; make it, or give another path"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError("output-not-writable", f"{flag} {path} may not be written; give a path that you may write to")


def _refuse_taken(path: Path | None) -> None:
    """Refuse to write over a file that a person wrote."""
    if path is None or not path.is_file():
        return
    try:
        with path.open(encoding="utf-8") as file:
            is_ours = file.read(len(_WRITTEN_BY)) == _WRITTEN_BY
    except (OSError, UnicodeDecodeError):
        is_ours = False
    if not is_ours:
        raise ConfigError("output-taken", f"--write {path} is there already, and not from a plan; give another path")


def _here(environ: Mapping[str, str], num_procs: int | None) -> Cluster:
    with Console(stderr=True).status("starting torch"):
        from shardwise.cli.this_machine import this_machine
        from shardwise.launch.environment import cache_folder

        return this_machine(cache_folder(environ), num_procs)


def _search(arguments: argparse.Namespace, cluster: Cluster, model: str, assignments: Sequence[str]) -> int:
    with Console(stderr=True).status("starting torch") as status:
        from shardwise.planner.expert_parallel import expert_notes
        from shardwise.planner.explain import reasons_of
        from shardwise.planner.plan_view import page_dict, plan_dict, plan_view
        from shardwise.planner.pricer import Pricer
        from shardwise.planner.request import ask, is_split, read_model
        from shardwise.planner.search import Limits, search
        from shardwise.train.imported_plan import named_batch

        known, own = read_model(model), arguments.compare
        batch = arguments.global_batch or known.global_batch or (own and named_batch(own, cluster.num_gpus))
        asked = ask(known, cluster, seq_len=arguments.seq, global_batch=batch, settings=assignments)
        pricer = Pricer(asked.job)
        yours, note = _yours(pricer, own, model if is_split(known) else None)
        status.update(f"searching layouts of {cluster.num_gpus:,} {cluster.gpu.name}")
        limits = Limits(num_best=max(10, arguments.top or 0), margin_share=arguments.margin)
        plan = search(asked.job, asked.space, limits, pricer)
        status.update("looking at what else could be")
        reasons = reasons_of(plan, pricer, yours=yours)
    console = Terminal()
    view = plan_view(
        plan,
        reasons,
        width=console.width,
        is_coloured=_is_coloured(console),
        num_shown=arguments.top,
        is_whole=arguments.more,
        yours=yours,
        notes=(*asked.notes, *note, *expert_notes(plan, pricer)),
    )
    answer = plan_dict(plan, reasons, yours)
    if plan.winner is not None:
        answer["best"][0] |= page_dict(plan.winner, pricer)
    try:
        _give(arguments, Group(view, *_footer(arguments, plan.winner)), answer)
    finally:
        _write_config(arguments, plan, asked.base, pricer)
    return 0 if plan.winner is not None else 1


def _footer(arguments: argparse.Namespace, winner: Estimate | None) -> Iterator[Text]:
    """Yield the lines that are printed nearest to the prompt."""
    from shardwise.planner.format import layout_words

    if winner is None:
        return
    if arguments.more:
        yield Text(f" best  {layout_words(winner.strategy)}", style="bold")
    if arguments.write is None:
        more = "" if arguments.more else "; --more tells more"
        yield Text(f" --write plan.toml makes it a config for shardwise train{more}", style="dim")


def _yours(pricer: Pricer, own: str | None, model: str | None) -> tuple[Estimate | None, tuple[str, ...]]:
    """Return the price of the user's own strategy, or notes on why it has none here.

    Args:
        pricer: prices the job's strategies.
        own: the file that was given to compare; a mistake in it is an error.
        model: the model's file, where it also has a strategy; that it does not fit the cluster is a note.
    """
    from shardwise.train.imported_plan import strategy_for

    source = own or model
    if source is None:
        return None, ()
    try:
        return pricer.price(strategy_for(source, pricer.job)), ()
    except ConfigError as error:
        name = Path(source).name if len(source) < _LONG_NAME else "the layout of your flags"
        if own is not None:
            why = str(error).removeprefix(f"{name}: ")
            raise ConfigError(error.code, f"{name} cannot be compared: {why}") from None
        return None, (f"{name} itself has no price here: {str(error).removeprefix(f'{name}: ')}",)


def _write_config(arguments: argparse.Namespace, plan: SearchResult, base: Any, pricer: Pricer) -> None:
    from shardwise.planner.configs import ALWAYS_WRITTEN, config_of, to_toml
    from shardwise.planner.format import layout_words
    from shardwise.report.planned import HERE, PlanNote
    from shardwise.runtime.format import format_s
    from shardwise.train.setup import check_job

    price = plan.winner
    if price is None or arguments.write is None:
        return
    job, cluster = plan.job, plan.job.cluster
    config = config_of(job, price.strategy, base)
    if arguments.cluster is None:
        config = config.override([f"run.num_procs={cluster.num_gpus}"])
    if config.checkpoint.every is None:
        config = config.override([f"checkpoint.every={max(1, round(_SAVED_S / price.time.step_s))}"])
    check_job(config, cluster.num_gpus)
    strategy = price.strategy
    times = pricer.time.op_times(strategy)
    note = PlanNote(arguments.cluster or HERE, strategy.pp, strategy.num_micro_batches, times)
    head = (
        f"{_WRITTEN_BY}: {job.shape.name} on {cluster.num_gpus:,} x {cluster.gpu.name}\n"
        f"# {layout_words(strategy)}; {format_s(price.time.step_s)} a step\n{note.line}\n"
    )
    always = ALWAYS_WRITTEN if config.model.path is None else ALWAYS_WRITTEN - {"model.preset"}
    _write_text(arguments.write, f"{head}\n{to_toml(config, always)}", "--write")
    line = f"wrote {arguments.write}; {_start_words(arguments.write, cluster, is_here=arguments.cluster is None)}"
    Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)


def _start_words(path: Path, cluster: Cluster, *, is_here: bool) -> str:
    """Say how the config is started."""
    if is_here:
        return f"start it by shardwise train {path}"
    num_nodes, num_ranks = cluster.num_gpus // cluster.gpus_per_node, cluster.gpus_per_node
    job = LaunchJob(("-m", "shardwise", "train", str(path)), num_nodes, num_ranks, "job")
    line = shlex.join(torchrun(job, c10d(f"NODE0:{PORT}", path.stem)))
    if num_nodes == 1:
        return f"start it by {line}"
    return f"start it on each node, the first of which is NODE0, by {line}; shardwise launch writes it for clusters"


def _explain(arguments: argparse.Namespace, cluster: Cluster, model: str | None, assignments: Sequence[str]) -> int:
    with Console(stderr=True).status("starting torch"):
        from shardwise.planner.memory_limit import missing_memory
        from shardwise.planner.plan_view import explain_view, job_dict, page_dict, price_dict
        from shardwise.planner.pricer import Pricer
        from shardwise.planner.suggestions import suggest
        from shardwise.train.imported_plan import read_explained

        batch = arguments.global_batch
        asked = read_explained(
            arguments.explain, model, cluster, seq_len=arguments.seq, global_batch=batch, settings=assignments
        )
        pricer = Pricer(asked.job)
        price = pricer.price(asked.strategy)
        missing = missing_memory(price.memory, cluster, arguments.margin)
        found = () if missing is None else tuple(suggest(price, missing, pricer, Pricer, arguments.margin))
    is_coloured, margin = _is_coloured(Terminal()), arguments.margin
    view = explain_view(
        price, pricer, is_coloured=is_coloured, margin_share=margin, notes=asked.notes, suggestions=found
    )
    answer = {"job": job_dict(price.job), **price_dict(price), **page_dict(price, pricer), "cures": list(found)}
    _give(arguments, view, answer)
    return 0 if missing_memory(price.memory, cluster, 0.0) is None else 1


def _fit(arguments: argparse.Namespace, cluster: Cluster, model: str | None) -> int:
    with Console(stderr=True).status("starting torch") as status:
        from shardwise.planner.fit import fit
        from shardwise.planner.plan_view import fit_dict, fit_view
        from shardwise.planner.request import read_model, usual_dtype

        known = None if model is None else read_model(model)
        seq_len = arguments.seq or (known and (known.seq_len or known.longest)) or _USUAL_LENGTH
        shape = None if known is None else known.shape
        fits = []
        status.update("trying sizes")
        dtype = usual_dtype(cluster)
        for found in fit(cluster, seq_len=seq_len, shape=shape, margin_share=arguments.margin, param=dtype):
            fits.append(found)
            status.update(f"trying sizes: {found.setup.name}")
    _give(arguments, fit_view(fits, cluster, seq_len, shape), fit_dict(fits, cluster, seq_len, shape))
    return 0


def _refit(runs_folder: Path, environ: Mapping[str, str]) -> int:
    """Correct the profile of each machine that the runs were on."""
    with Console(stderr=True).status("starting torch"):
        from shardwise.launch.environment import cache_folder
        from shardwise.planner.profile import find_profile, write_profile
        from shardwise.planner.recalibrate import read_runs, refit

        runs, folder = read_runs(runs_folder), cache_folder(environ)
        found = (find_profile(folder, *each) for each in sorted({(run.device, run.world_size) for run in runs}))
        profiles = {(each.device, each.num_ranks): each for each in found if each is not None}
        if not profiles:
            raise ConfigError(
                "machine-not-measured",
                "the machine of these runs was not measured; run shardwise doctor --calibrate first",
            )
        refits = [refit(profile, runs) for profile in profiles.values()]
    for each in refits:
        try:
            words = f"wrote {write_profile(each.profile, folder)}" if each.is_changed else "nothing was written"
        except OSError as error:
            raise ConfigError(
                "profile-not-writable", f"the profile cannot be kept: {error}; set XDG_CACHE_HOME to a writable folder"
            ) from None
        Terminal().print(f"{each}\n{words}", markup=False, highlight=False, soft_wrap=True)
    return 0


def _is_coloured(console: Console) -> bool:
    """Say whether the console shows colours: not where NO_COLOR is set, even if the terminal can show them."""
    return console.color_system is not None and not console.no_color


def _give(arguments: argparse.Namespace, view: RenderableType, values: Mapping[str, Any]) -> None:
    """Show an answer, or print it as JSON; write the file that was asked for even if the reader closes the pipe."""
    text, path = json.dumps(values, indent=2) + "\n", arguments.json
    try:
        if str(path) == "-":
            print(text, end="")
        else:
            Terminal().print(view)
    finally:
        if path is not None and str(path) != "-":
            _write_text(path, text, "--json")
        if arguments.html is not None:
            _write_page(arguments.html, values)


def _write_page(path: Path, answer: Mapping[str, Any]) -> None:
    """Write the page of an answer; one without a layout that fits is none."""
    from shardwise.report import page
    from shardwise.report.plan_answer import plan_source

    if answer.get("best", [answer]):
        _write_text(path, page.draw([plan_source(path.stem, answer, None, page.share_of(1))]), "--html")


def _write_text(path: Path, text: str, flag: str) -> None:
    """Write a file wholly or not at all; write directly to what is no regular file, such as a pipe."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}") if path.is_file() or not path.exists() else path
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(
            "output-not-writable", f"{flag} {path} cannot be written: {error.strerror}; give another path"
        ) from None
    finally:
        if temporary != path:
            with suppress(OSError):
                temporary.unlink()


def _dry_run(arguments: argparse.Namespace, path: str | None, assignments: Sequence[str]) -> int:
    ranks = parse_ranks(arguments.ranks)
    # torch takes seconds to import.
    from shardwise.train.setup import job_config
    from shardwise.verify.dry_run import dry_run, dry_run_size, render

    config = job_config(path, assignments)
    with Console(stderr=True).status("reading the config") as status:
        run = dry_run(config, dry_run_size(config, arguments.world_size), ranks, status.update)
    Terminal().print(render(run))
    return 0


def parse_ranks(text: str | None) -> list[int] | Choice:
    """Return the ranks that `--ranks` asks for.

    >>> parse_ranks("0,8, 16"), parse_ranks("worst"), parse_ranks(None)
    ([0, 8, 16], 'worst', [0])

    Raises:
        ConfigError: it is something else.
    """
    if text is None:
        return [0]
    if text == "worst":
        return "worst"
    if text == "stages":
        return "stages"
    parts = [part.strip() for part in text.split(",")]
    if not all(map(_is_number, parts)):
        raise ConfigError(
            "ranks-to-simulate",
            f"--ranks {_shown(text)} names no ranks; give numbers such as 0,8,16, or worst, or stages",
        )
    return [int(part) for part in parts]
