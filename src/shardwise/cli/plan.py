"""Run the command `shardwise plan`: it finds a job's best layout on a cluster, prices one, or simulates its ranks."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Literal

import click
from rich.console import Group, RenderableType
from rich.text import Text

from shardwise.cli.command import Amount, Choice, Count, OutputFile, Seconds, as_written, settings, show_dry_run, split
from shardwise.config.errors import ConfigError
from shardwise.config.resolve import Config, is_config
from shardwise.config.untrusted_files import read_text
from shardwise.config.written_files import write_asked
from shardwise.launch.targets import PORT, LaunchJob, c10d, torchrun
from shardwise.report.console import Terminal, progress, write_line

if TYPE_CHECKING:
    from shardwise.planner.hardware import Cluster
    from shardwise.planner.results import Estimate
    from shardwise.planner.search import Pricer, SearchResult

_WRITTEN_BY: Final = "# Written by `shardwise plan`"
# A written config saves this often: what a failure costs at most.
_SAVED_S: Final = 3600.0
_LONG_NAME: Final = 80
_NO_MODEL: Final = "no model is given; say which, such as --model llama-70b, or a config; see shardwise presets"
_CLUSTER: Final = re.compile(r"[\w. -]+:-?\d+(x\d+)?")
# How lines begin in configs of other tools that are not read.
_FOREIGN: Final = MappingProxyType({"distributed_type:": "Accelerate", "[parallelism]": "torchtitan"})
# What people call the config's keys that pin what the planner would choose.
_PINS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "tp": "mesh.tp",
        "pp": "mesh.pp",
        "cp": "mesh.cp",
        "dp": "mesh.dp_shard",
        "zero": "zero.stage",
        "micro_batch": "batch.micro_size",
        "recompute": "recompute.mode",
        "lora_rank": "lora.rank",
        "lora_base": "lora.base",
    }
)
# The flags that each question heeds; without a question, a search heeds all but those of a dry run.
_NUM_SIMULATED: Final = 3
_OF_JOB: Final = frozenset({"model", "cluster", "seq", "margin", "json"})
_OF_DRY_RUN: Final = frozenset({"world_size", "ranks"})
_OF_RUN: Final = frozenset({"tokens", "examples", "lengths", "epochs"})
_EVERY: Final = _OF_JOB | _OF_DRY_RUN | _OF_RUN | {"global_batch", "html", "compare", "write", "top", "more"}
_HEEDS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "": _EVERY - _OF_DRY_RUN,
        "explain": _OF_JOB | {"html", "global_batch"},
        "fit": _OF_JOB,
        "dry_run": _OF_DRY_RUN,
    }
)


@click.command(
    epilog=as_written("""
examples:
  shardwise plan llama-70b h100:512 --tp 8             a model, a cluster and a pin, the batch as usual
  shardwise plan --model llama-70b --cluster h100:512 --global-batch 1024 --seq 8192
  shardwise plan --model config.json --cluster a100-80:8x8 --global-batch 512 --write plan.toml
  shardwise plan --model train_megatron.sh --cluster h200:64    Megatron's flags, as a script, YAML or a string
  shardwise plan my.toml --cluster mine.toml zero.stage=3       our config; a cluster of your own
  shardwise plan --explain plan.toml --cluster h100:512         memory by stage and time by part of one config
  shardwise plan --explain ds.json --model llama-7b --cluster h100:8
  shardwise plan --fit --cluster h100:8 --model llama-70b       the largest model, micro-batch and sequence
  shardwise plan llama-3-8b rtx-4090:1 --lora --examples 10000 --lengths 400    does it fit, how long does it take

a dry run simulates the engine's own ranks: rank 0, or those of --ranks:
  shardwise plan --dry-run my.toml --world-size 512
  shardwise plan --dry-run my.toml --world-size 512 mesh.pp=8 mesh.tp=8 pipeline.schedule=zb-h1
  shardwise plan --dry-run my.toml --ranks stages      one rank of each stage of a pipeline

exit code: 0, 1 where nothing fits, 2 where the question is wrong, 130 after Ctrl-C
""")
)
@settings("[CONFIG.TOML | MODEL] [GPU:N] [KEY=VALUE]...")
@click.option("--model", metavar="NAME|FILE", help="a preset, our config, config.json, or Megatron's flags")
@click.option("--cluster", metavar="GPU:N|FILE", help="such as h100:512, h100:64x8, or a TOML file (default: this one)")
@click.option("--global-batch", type=Count(1), help="sequences of a step (default: 64 Ki tokens a GPU, to 4 Mi)")
@click.option("--seq", type=Count(1), help="tokens of a sequence (default: the model's longest)")
@click.option("--tp", metavar="N", help="pins mesh.tp")
@click.option("--pp", metavar="N", help="pins mesh.pp")
@click.option("--cp", metavar="N", help="pins mesh.cp")
@click.option("--dp", metavar="N", help="pins mesh.dp_shard")
@click.option("--zero", metavar="N", help="pins zero.stage")
@click.option("--micro-batch", metavar="N", help="pins batch.micro_size")
@click.option("--recompute", metavar="MODE", help="pins recompute.mode")
@click.option("--lora", is_flag=True, help="train adapters of rank 16 (lora.rank)")
@click.option("--lora-rank", metavar="N", help="train adapters of rank N")
@click.option("--lora-targets", metavar="NAME,...", help="layers with adapters, such as q_proj,v_proj (default: all)")
@click.option("--lora-base", type=Choice(["keep", "nf4"]), help="nf4 packs the frozen weights in 4 bits (QLoRA)")
@click.option("--examples", type=Count(1), metavar="N", help="of a fine-tuning: how long they take")
@click.option("--lengths", metavar="N|FILE", help="their tokens: the mean, or a file with a number for each")
@click.option("--epochs", type=Amount(0, min_open=True), metavar="N", help="how often each is seen (default: 1)")
@click.option(
    "--tokens", type=Amount(0.0, min_open=True), help="of the run, such as 300e9: what it costs and how long it takes"
)
@click.option(
    "--simulate", type=Seconds(), default=30.0, metavar="S", help="seconds for exact memory, then estimates; 0: none"
)
@click.option("--more", is_flag=True, help="all of the answer: where time goes, every fix, what was searched")
@click.option("--top", type=Count(1), help="layouts to show (default: 3, with --more 5)")
@click.option("--margin", type=Amount(0, 0.9), help="share of memory kept free (default: 0.06)")
@click.option("--json", type=OutputFile(takes_dash=True), help="write all of it as JSON; - for the terminal")
@click.option("--html", type=OutputFile(), help="write it as a page, as shardwise report does")
@click.option("--write", type=OutputFile(), help="write the best as a config for shardwise train")
@click.option("--explain", metavar="FILE", help="price one config: ours, DeepSpeed's or Megatron's")
@click.option("--compare", metavar="FILE", help="a config of yours, as for --explain, to show beside the best")
@click.option("--fit", is_flag=True, help="say how large a model, micro-batch and sequence may be")
@click.option("--dry-run", is_flag=True, help="simulate the config as it is; start nothing")
@click.option("--world-size", type=Count(1), help="ranks of the dry run (default: what the mesh says)")
@click.option("--ranks", metavar="0,1,...|stages", help="which ranks to simulate (default: 0)")
def plan(**given: Any) -> int:
    """Find the best layout of a job that fits, with reasons; or say what a given one takes.

    Settings such as mesh.tp=8 or mesh.tp=4,8 pin what the planner would choose; others, such as optimizer.name=lion,
    go into the config. Without --cluster the job is planned for this machine, once it is measured: shardwise doctor
    --calibrate.
    """
    arguments = SimpleNamespace(**given)
    check_flags(arguments)
    path, assignments = split(with_words(arguments))
    if arguments.dry_run:
        return _dry_run(arguments, path, assignments)
    if arguments.model is not None and path is not None:
        raise ConfigError("two-models", f"--model {arguments.model} and {path} are two models; give one of them")
    if arguments.fit and assignments:
        raise ConfigError(
            "fit-takes-no-settings",
            f"{assignments[0]} pins nothing of --fit, which has setups of its own; leave one of them out",
        )
    _refuse_taken(arguments.write)
    return _answer(arguments, arguments.model or path, assignments)


def check_flags(arguments: SimpleNamespace) -> None:
    """Refuse two questions at once, and a flag that would change nothing."""
    from shardwise.planner.results import USUAL_MARGIN

    def is_given(name: str) -> bool:
        value = getattr(arguments, name)
        return value is not None and value is not False

    chosen = [name for name in _HEEDS if name and is_given(name)]
    if len(chosen) > 1:
        raise ConfigError("two-questions", f"{' and '.join(map(_flag, chosen))} are two questions; ask one at a time")
    question = chosen[0] if chosen else ""
    for name in sorted(_EVERY - _HEEDS[question]):
        if is_given(name):
            asked = _flag(question) if question else "a search"
            raise ConfigError("flag-unheeded", f"{_flag(name)} says nothing to {asked}; leave one of them out")
    arguments.margin = USUAL_MARGIN if arguments.margin is None else arguments.margin


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def with_words(arguments: SimpleNamespace) -> list[str]:
    """Return the settings with those of the flags that pin; take a cluster among them for that of `--cluster`."""
    cluster_keys = [setting for setting in arguments.settings if _CLUSTER.fullmatch(setting)]
    bare_settings = [setting for setting in arguments.settings if "=" not in setting]
    if (
        len(bare_settings) > 1 and not cluster_keys
    ):  # one may be a device whose count was left out, which is refused as that
        from shardwise.planner.hardware import known_gpu

        cluster_keys = [setting for setting in bare_settings if known_gpu(setting)]
    clusters = [*cluster_keys, *([] if arguments.cluster is None else [arguments.cluster])]
    if len(clusters) > 1:
        raise ConfigError("two-clusters", f"{' and '.join(clusters)} are two clusters; give one of them")
    arguments.cluster = next(iter(clusters), None)
    pinned = [f"{key}={getattr(arguments, name)}" for name, key in _PINS.items() if getattr(arguments, name)]
    adapts = arguments.lora or arguments.lora_base or arguments.lora_targets
    pinned += ["lora.rank=16"] * bool(adapts and not arguments.lora_rank)
    if arguments.lora_targets:
        pinned.append(f"lora.targets={json.dumps([name.strip() for name in arguments.lora_targets.split(',')])}")
    return [setting for setting in arguments.settings if setting not in cluster_keys] + pinned


def _answer(arguments: SimpleNamespace, model: str | None, assignments: Sequence[str]) -> int:
    """Answer a question about a job; refuse an incomplete one before torch is imported, which takes seconds."""
    from shardwise.cli.this_machine import read_cluster

    model = model or arguments.compare  # its own, where it names one
    if model is None and arguments.explain is None and not arguments.fit:
        raise ConfigError("plan-needs-model", _NO_MODEL)
    for source in filter(None, (model, arguments.explain, arguments.compare)):
        _refuse_foreign(Path(source))
    num_procs = None if arguments.cluster else _num_procs(arguments.explain or model, assignments)
    cluster = read_cluster(arguments.cluster, num_procs)
    if arguments.fit:
        return _fit(arguments, cluster, model)
    if arguments.explain is not None:
        return _explain(arguments, cluster, model, assignments)
    assert model is not None
    return _search(arguments, cluster, model, assignments)


def _refuse_foreign(path: Path) -> None:
    """Refuse by its tool's name a config that would be read as if it were ours, or Megatron's."""
    if path.suffix not in (".yaml", ".yml", ".toml") or not path.is_file():
        return
    lines = read_text(path, "give a config", max_bytes=2**18).splitlines()
    if tool := next((tool for start, tool in _FOREIGN.items() if any(line.startswith(start) for line in lines)), None):
        raise ConfigError(
            "foreign-config",
            f"{path.name} is a config of {tool}'s, which is not read; pin its layout by flags, such as --zero 3 "
            "--recompute full, or give our TOML, DeepSpeed's JSON or Megatron's flags",
        )


def _num_procs(source: str | None, assignments: Sequence[str]) -> int | None:
    """Return the ranks that the config or a setting wants on this machine; None where neither says it."""
    config = Config.from_toml(source) if source is not None and is_config(source) else Config()
    return config.override(
        [assignment for assignment in assignments if assignment.startswith("run.num_procs=")]
    ).run.num_procs


def _refuse_taken(path: Path | None) -> None:
    """Refuse to write over a file that a person wrote."""
    if path is None or not path.is_file():
        return
    try:
        with path.open("rb") as file:
            is_ours = file.read(len(_WRITTEN_BY)) == _WRITTEN_BY.encode()
    except OSError:
        is_ours = False
    if not is_ours:
        raise ConfigError("output-taken", f"--write {path} is there already, and not from a plan; give another path")


def _search(arguments: SimpleNamespace, cluster: Cluster, model: str, assignments: Sequence[str]) -> int:
    with progress("reading the question") as say:
        from shardwise.planner.explain import reasons_of
        from shardwise.planner.fit import notes_of, read_examples, verdict
        from shardwise.planner.plan import find
        from shardwise.planner.render import plan_dict, plan_view
        from shardwise.planner.request import PlanRequest, Question, is_split, read_model
        from shardwise.planner.search import Limits, Pricer, search

        source_model, own = read_model(model), arguments.compare
        batch = arguments.global_batch or source_model.global_batch
        if own and batch is None:
            from shardwise.train.imported_plan import named_batch

            batch = named_batch(own, cluster.num_gpus)
        limits = Limits(num_best=max(10, arguments.top or 0), margin_share=arguments.margin)

        def look(asked: PlanRequest) -> SearchResult:
            if arguments.write is not None and asked.plan_only:
                fix = "leave --write out, or give the model's folder with its safetensors"
                raise ConfigError("no-config-for-model", f"{asked.plan_only}; {fix}")
            say(f"searching layouts of {cluster.num_gpus:,} {cluster.gpu.name} for {asked.job.seq_len:,} tokens")
            return search(asked.job, asked.space, limits)

        examples, notes = read_examples(arguments.examples, arguments.lengths, arguments.epochs)
        sizes_asked = (arguments.seq, batch, tuple(assignments), examples is not None)
        asked, plan = find(Question(source_model, cluster, *sizes_asked), look)
        notes += tuple(notes_of(examples, asked.job.seq_len)) if examples is not None else ()
        pricer = Pricer(plan.job, arguments.margin)
        yours, note = _yours(pricer, own, model if is_split(source_model) else None)
        plan = _settled(arguments, plan, say)
        say("looking at what else could be")
        reasons = reasons_of(plan, pricer, yours=yours)
    ruling = verdict(plan, reasons, pricer, examples) if examples or asked.job.base.lora.rank else None
    view = plan_view(
        plan,
        reasons,
        num_shown=arguments.top,
        is_whole=arguments.more,
        notes=tuple(dict.fromkeys((*asked.notes, *notes, *note, *filter(None, [asked.plan_only])))),
        verdict=ruling,
        num_tokens=arguments.tokens,
    )
    answer = plan_dict(plan, reasons, pricer, verdict=ruling, num_tokens=arguments.tokens)
    try:
        _give(arguments, Group(view, *_footer(arguments, plan.winner, asked.plan_only)), answer)
    finally:
        _write_config(arguments, plan, pricer)
    return 0 if plan.winner is not None else 1


def _settled(arguments: SimpleNamespace, plan: SearchResult, say: Callable[[str], None]) -> SearchResult:
    """Return the plan with the exact memory of what will be shown; say meanwhile what was found."""
    from shardwise.planner.results import layout_words
    from shardwise.planner.search import settle
    from shardwise.runtime.format import format_s
    from shardwise.verify.finalists import simulate_finalists

    price = plan.winner
    found = "" if price is None else f"{layout_words(price.config)}, {format_s(price.time.step_s)} a step; "
    shown = (*plan.best[:1], *plan.runners_up)[: arguments.top or _NUM_SIMULATED]
    wanted = (*shown, *plan.near_misses)
    return settle(plan, simulate_finalists(wanted, arguments.simulate, lambda doing: say(f"{found}{doing}")))


def _footer(arguments: SimpleNamespace, winner: Estimate | None, plan_only: str) -> Iterator[Text]:
    """Yield the lines that are printed nearest to the prompt."""
    if winner is None:
        return
    if arguments.more:
        yield Text(f" best  {winner.layout}", style="bold")
    if arguments.write is None and not plan_only:
        more = "" if arguments.more else "; --more tells more"
        yield Text(f" --write plan.toml makes it a config for shardwise train{more}", style="dim")


def _yours(pricer: Pricer, own: str | None, model: str | None) -> tuple[Estimate | None, tuple[str, ...]]:
    """Return the price of the user's own config, and notes on how it was read or on why it has none here.

    Args:
        own: the file that was given to compare; a mistake in it is an error.
        model: the model's file, where it also says how the job is split; that it does not fit the cluster is a note.
    """
    source = own or model
    if source is None:
        return None, ()
    from shardwise.planner.search import Pricer
    from shardwise.train.imported_plan import split_for

    try:
        asked = split_for(source, pricer.job)
        return (pricer if asked.job is pricer.job else Pricer(asked.job)).price(asked.config), asked.notes
    except ConfigError as error:
        name = Path(source).name if len(source) < _LONG_NAME else "the layout of your flags"
        if own is not None:
            why = str(error).removeprefix(f"{name}: ")
            raise ConfigError(error.code, f"{name} cannot be compared: {why}") from None
        return None, (f"{name} itself has no price here: {str(error).removeprefix(f'{name}: ')}",)


def _write_config(arguments: SimpleNamespace, plan: SearchResult, pricer: Pricer) -> None:
    price = plan.winner
    if price is None or arguments.write is None:
        return
    from shardwise.config.toml_text import to_toml
    from shardwise.planner.request import ALWAYS_WRITTEN, written
    from shardwise.report.planned import HERE, PlanNote
    from shardwise.runtime.format import format_s
    from shardwise.train.setup import check_job

    job, cluster = plan.job, plan.job.cluster
    config = written(job, price.config)
    if arguments.cluster is None:
        config = config.override([f"run.num_procs={cluster.num_gpus}"])
    if config.checkpoint.every is None:
        config = config.override([f"checkpoint.every={max(1, round(_SAVED_S / price.time.step_s))}"])
    check_job(config, cluster.num_gpus)
    times = pricer.time.op_times(price.config)
    note = PlanNote(arguments.cluster or HERE, price.config.mesh.pp, price.config.batch.accumulation, times)
    head = (
        f"{_WRITTEN_BY}: {job.shape.name} on {cluster.num_gpus:,} x {cluster.gpu.name}\n"
        f"# {price.layout}; {format_s(price.time.step_s)} a step\n{note.line}\n"
    )
    always = ALWAYS_WRITTEN if config.model.path is None else ALWAYS_WRITTEN - {"model.preset"}
    write_asked(arguments.write, f"{head}\n{to_toml(config, always)}")
    line = f"wrote {arguments.write}; {start_words(arguments.write, cluster, is_here=arguments.cluster is None)}"
    write_line(line, to_stderr=True)


def start_words(path: Path, cluster: Cluster, *, is_here: bool) -> str:
    """Say how a config is started: the file of `path` on a `cluster`, which may be this machine (`is_here`)."""
    # A person copies the words into a shell: a path is one word there, and no flag.
    file_name = os.fsencode(path).decode(errors="replace")
    file_name = f"./{file_name}" if file_name.startswith("-") else file_name
    if is_here:
        return f"start it by shardwise train {shlex.quote(file_name)}"
    num_nodes, num_ranks = cluster.num_gpus // cluster.gpus_per_node, cluster.gpus_per_node
    job = LaunchJob(("-m", "shardwise", "train", file_name), num_nodes, num_ranks, "job")
    line = shlex.join(torchrun(job, c10d(f"NODE0:{PORT}", path.stem.lstrip("-") or job.name)))
    if num_nodes == 1:
        return f"start it by {line}"
    return f"start it on each node, the first of which is NODE0, by {line}; shardwise launch writes it for clusters"


def _explain(arguments: SimpleNamespace, cluster: Cluster, model: str | None, assignments: Sequence[str]) -> int:
    with progress("starting torch"):
        from shardwise.planner.explain import fixes
        from shardwise.planner.render import explain_dict, explain_view
        from shardwise.planner.results import missing_memory
        from shardwise.planner.search import Pricer
        from shardwise.train.imported_plan import read_explained

        batch = arguments.global_batch
        asked = read_explained(
            arguments.explain, model, cluster, seq_len=arguments.seq, global_batch=batch, settings=assignments
        )
        pricer = Pricer(asked.job, arguments.margin)
        price = pricer.price(asked.config)
        missing = pricer.missing(price.memory)
        suggestions = () if missing is None else tuple(map(str, fixes(price, missing, pricer)))
    view = explain_view(price, pricer, notes=asked.notes, suggestions=suggestions)
    _give(arguments, view, explain_dict(price, pricer, suggestions))
    return 0 if missing_memory(price.memory, cluster, 0.0) is None else 1


def _fit(arguments: SimpleNamespace, cluster: Cluster, model: str | None) -> int:
    with progress("reading the question") as say:
        from shardwise.planner.fit import fit
        from shardwise.planner.render import fit_dict, fit_view
        from shardwise.planner.request import USUAL_LENGTH, read_model, usual_dtype

        source_model = None if model is None else read_model(model)
        seq_len = arguments.seq or (source_model and (source_model.seq_len or source_model.longest)) or USUAL_LENGTH
        shape = None if source_model is None else source_model.shape
        fits = []
        say("trying sizes")
        dtype = usual_dtype(cluster)
        for fitting in fit(cluster, seq_len=seq_len, shape=shape, margin_share=arguments.margin, param=dtype):
            fits.append(fitting)
            say(f"trying sizes: {fitting.name}")
    _give(arguments, fit_view(fits, cluster, seq_len, shape), fit_dict(fits, cluster, seq_len, shape))
    return 0


def _give(arguments: SimpleNamespace, view: RenderableType, values: Mapping[str, Any]) -> None:
    """Show an answer, or print it as JSON; write the file that was asked for even if the reader closes the pipe."""
    text, path = json.dumps(values, indent=2) + "\n", arguments.json
    try:
        if str(path) == "-":
            print(text, end="")
        else:
            Terminal().print(view)
    finally:
        if path is not None and str(path) != "-":
            write_asked(path, text)
        if arguments.html is not None:
            _write_page(arguments.html, values)


def _write_page(path: Path, answer: Mapping[str, Any]) -> None:
    """Write the page of an answer; one without a layout that fits is none."""
    from shardwise.report import page
    from shardwise.report.planned import plan_source

    if answer.get("best", [answer]):
        write_asked(path, page.draw([plan_source(path.stem, answer, None, page.share_of(1))]))


def _dry_run(arguments: SimpleNamespace, path: str | None, assignments: Sequence[str]) -> int:
    ranks = parse_ranks(arguments.ranks)
    with progress("starting torch"):  # seconds
        from shardwise.train.setup import job_config
        from shardwise.verify.dry_run import dry_run_size

        config = job_config(path, assignments)
    return show_dry_run(config, dry_run_size(config, arguments.world_size), ranks, arguments.simulate)


def parse_ranks(text: str | None) -> list[int] | Literal["stages"]:
    """Return the ranks that `--ranks` asks for.

    >>> parse_ranks("0,8, 16"), parse_ranks("stages"), parse_ranks(None)
    ([0, 8, 16], 'stages', [0])

    Raises:
        ConfigError: it is something else.
    """
    if text is None:
        return [0]
    if text == "stages":
        return "stages"
    parts = [number.strip() for number in text.split(",")]
    if not all(re.fullmatch(r"\d{1,18}", number, re.ASCII) for number in parts):
        raise ConfigError("ranks-to-simulate", f"--ranks {text} names no ranks; give numbers such as 0,8,16, or stages")
    return [int(number) for number in parts]
