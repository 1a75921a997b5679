"""`shardwise plan` as users call it: searches, explanations, sizes, files, and one line for each mistake."""

import json
from pathlib import Path

import pytest

from harness.paths import DOCS
from shardwise.cli import main as cli
from shardwise.config.resolve import Config
from shardwise.planner.profile import CollectiveTime, MatmulTime, Profile, write_profile
from shardwise.train.setup import check_job

SMALL = ["--model", "25m", "--cluster", "h100:4", "--global-batch", "16", "--seq", "512"]
MEGATRON = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --vocab-size 32000 --swiglu "
    "--disable-bias-linear --use-rotary-position-embeddings --tensor-model-parallel-size 2 --sequence-parallel "
    "--use-distributed-optimizer --micro-batch-size 2 --global-batch-size 32 --bf16"
)
OURS = """
[model]
preset = "25m"
[data]
seq_len = 512
[batch]
global_size = 16
micro_size = 2
[mesh]
tp = 2
[optimizer]
lr = 0.002
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def printed(capsys, *arguments: str, exit_code: int = 0) -> str:
    assert cli.main(["plan", *arguments]) == exit_code
    captured = capsys.readouterr()
    assert max(map(len, captured.out.splitlines())) <= 80
    return " ".join(captured.out.split())


def test_the_best_is_shown_with_its_price(capsys):
    text = printed(capsys, *SMALL, "--json", "plan.json", "--more")
    plan = json.loads(Path("plan.json").read_text())
    best = plan["best"][0]
    assert best["layout"] in text
    assert f"{best['tokens_per_s_per_gpu']:,.0f} tokens/s a GPU" in text
    assert "for a million tokens" in text
    assert plan["why"] in text
    assert "what many would start with" in text
    assert all(sentence in text for sentence in plan["defaults"].values())
    assert text.endswith(f"best {best['layout']} --write plan.toml makes it a config for shardwise train")
    assert plan["job"] | {"num_gpus": 4, "global_batch": 16, "seq_len": 512} == plan["job"]
    assert best["step_s"] == pytest.approx(sum(best["parts_s"].values()))
    steps = [each["step_s"] for each in plan["best"]]
    assert steps == sorted(steps)
    assert all(each["margin_gib"] > 0 for each in plan["best"])
    documents = (DOCS / "planner.md").read_text()
    assert [key for key in (*plan, *best) if f"`{key}`" not in documents] == []


def test_your_own_layout_stands_beside_the_best(capsys):
    Path("mine.toml").write_text(OURS)
    given = ["--cluster", "h100:4", "--json", "plan.json"]
    text = printed(capsys, "mine.toml", *given)
    yours = json.loads(Path("plan.json").read_text())["yours"]
    assert f"yours {yours['layout']}" in text
    assert (yours["config"]["mesh"]["tp"], yours["config"]["batch"]["micro_size"]) == (2, 2)
    printed(capsys, "--explain", "mine.toml", *given)
    assert json.loads(Path("plan.json").read_text())["step_s"] == yours["step_s"]
    # A config of another tool's says the batch, too.
    zero = {"stage": 3, "reduce_bucket_size": 500}
    Path("ds.json").write_text(json.dumps({"train_batch_size": 24, "zero_optimization": zero}))
    text = printed(capsys, "--model", "25m", "--seq", "512", "--compare", "ds.json", *given)
    assert "yours ZeRO-3 over 4, micro-batch 1 x 6" in text
    assert "24 sequences of 512 tokens" in text
    assert "no effect here: zero_optimization.reduce_bucket_size" in text
    Path("ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}))
    text = printed(capsys, "--model", "25m", "--seq", "512", "--compare", "ds.json", *given)
    assert "yours DDP over 4, micro-batch 2 x 3" in text
    # One that does not go with the cluster is an error where it was asked for, else a note.
    text = printed(capsys, "mine.toml", *given[:1], "h100:1", *given[2:])
    assert "mine.toml itself has no price here: " in text
    assert cli.main(["plan", *SMALL, "--compare", "mine.toml", "--cluster", "h100:1"]) == 2
    assert "mine.toml cannot be compared: " in capsys.readouterr().err


def test_the_answer_is_shown_where_it_cannot_be_written(capsys):
    Path("ds.json").write_text(json.dumps({"train_batch_size": 16}))
    for asked in (SMALL, ["--explain", "ds.json", *SMALL[:4]], ["--fit", *SMALL[2:4]]):
        assert cli.main(["plan", *asked, "--json", "/dev/full"]) == 1
        captured = capsys.readouterr()
        assert "4 x h100" in captured.out
        assert captured.err == "shardwise: /dev/full: No space left on device [disk-full]\n"


def test_files_are_written_though_who_reads_has_seen_enough(monkeypatch):
    def refuse(self, *args, **kwargs):
        raise BrokenPipeError

    monkeypatch.setattr("shardwise.report.console.Terminal.print", refuse)
    monkeypatch.setattr("os.dup2", lambda *descriptors: None)
    assert cli.main(["plan", *SMALL, "--write", "best.toml", "--json", "plan.json"]) == 141
    assert sorted(each.name for each in Path().iterdir()) == ["best.toml", "plan.json"]


def test_settings_pin_what_is_chosen(capsys):
    printed(capsys, *SMALL, "--json", "plan.json", "mesh.tp=2", "zero.stage=3", "recompute.mode=none,full")
    for each in json.loads(Path("plan.json").read_text())["best"]:
        config = each["config"]
        assert (config["mesh"]["tp"], config["zero"]["stage"]) == (2, 3)
        assert config["recompute"]["mode"] in ("none", "full")


def test_what_is_written_is_what_train_runs(capsys):
    Path("mine.toml").write_text(OURS)
    printed(capsys, "mine.toml", "--cluster", "h100:4", "--write", "best.toml", "--json", "plan.json", "run.steps=7")
    config, _ = check_job(Config.from_toml("best.toml"), 4)
    best = json.loads(Path("plan.json").read_text())["best"][0]["config"]
    assert (config.mesh.tp, config.mesh.pp) == (best["mesh"]["tp"], best["mesh"]["pp"])
    assert config.zero.stage == best["zero"]["stage"]
    assert Path("best.toml").read_text().startswith("# Written by `shardwise plan`")
    assert (config.batch.global_size, config.data.seq_len, config.precision.param) == (16, 512, "bf16")
    # What the planner does not choose stays the user's.
    assert (config.optimizer.lr, config.run.steps) == (0.002, 7)
    # It may be written over again, for it is a plan's.
    printed(capsys, "mine.toml", "--cluster", "h100:4", "--write", "best.toml")
    assert cli.main(["plan", "mine.toml", "--cluster", "h100:4", "--write", "mine.toml"]) == 2
    assert "not from a plan" in capsys.readouterr().err
    assert Path("mine.toml").read_text() == OURS


def test_the_explained_best_costs_what_the_search_said(capsys):
    printed(capsys, *SMALL, "--write", "best.toml", "--json", "plan.json")
    printed(capsys, "--explain", "best.toml", "--cluster", "h100:4", "--json", "explained.json")
    best = json.loads(Path("plan.json").read_text())["best"][0]
    explained = json.loads(Path("explained.json").read_text())
    assert explained["config"] == best["config"]
    assert explained["step_s"] == pytest.approx(best["step_s"])
    assert explained["ranks"] == best["ranks"]


def test_configs_of_other_tools_and_of_a_run_are_explained(capsys):
    config, _ = check_job(Config.from_dict({"model": {"preset": "25m"}, "zero": {"stage": 3}, "mesh": {"tp": 2}}), 4)
    Path("config.json").write_text(config.to_json())
    Path("ds.json").write_text(json.dumps({"train_batch_size": 16, "zero_optimization": {"stage": 3}}))
    for asked, words in (
        (["ds.json", "--model", "25m"], "ZeRO-3 over 4, micro-batch 1 x 4"),
        ([MEGATRON], "TP 2+SP, ZeRO-1 over 2, micro-batch 2 x 8"),
        (["config.json"], "TP 2, ZeRO-3 over 2"),
    ):
        assert words in printed(capsys, "--explain", *asked, "--cluster", "h100:4")


def test_models_of_other_tools_are_planned(capsys):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8}
    Path("config.json").write_text(json.dumps({"model_type": "gpt_neox", "vocab_size": 32000, **sizes}))
    arguments = ["--cluster", "h100:2", "--global-batch", "8", "--seq", "256"]
    assert "gpt_neox" in printed(capsys, "--model", "config.json", *arguments)
    assert cli.main(["plan", "--model", "config.json", *arguments, "--write", "best.toml"]) == 2
    assert "has a feed-forward of two matrices" in capsys.readouterr().err
    assert "32 sequences of 1,024 tokens" in printed(capsys, "--model", MEGATRON, "--cluster", "h100:4")


def test_what_does_not_fit_is_said(capsys):
    text = printed(
        capsys, "--model", "llama-405b", "--cluster", "l4:1", "--global-batch", "1", "mesh.tp=1", exit_code=1
    )
    assert "nothing fits" in text
    assert "out of memory by" in text
    Path("big.toml").write_text(OURS.replace("25m", "llama-70b").replace("seq_len = 512", "seq_len = 4096"))
    text = printed(capsys, "--explain", "big.toml", "--cluster", "h100:2", exit_code=1)
    assert "look at out of memory by" in text
    assert "GPUs would fit it" in text
    lacking = json.dumps({"train_batch_size": 2, "zero_optimization": {"stage": 1}})
    Path("ds.json").write_text(lacking)
    text = printed(capsys, "--model", "llama-7b", "--compare", "ds.json", "--cluster", "h100:2")
    assert "yours out of memory by" in text
    assert "would fit, at" in text


def test_every_stage_has_its_memory_at_80_columns(capsys):
    pinned = ["mesh.pp=4", "mesh.dp_shard=2", "recompute.mode=none", "pipeline.schedule=1f1b", "zero.stage=3"]
    sizes = ["--model", "llama-7b", "--cluster", "a100-80:8", "--global-batch", "16"]
    printed(capsys, *sizes, *pinned, "--write", "best.toml", "--json", "plan.json")
    printed(capsys, "--explain", "best.toml", "--cluster", "a100-80:8")
    assert cli.main(["plan", "--explain", "best.toml", "--cluster", "a100-80:8"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert all(len(line) <= 80 for line in lines)
    ranks = json.loads(Path("plan.json").read_text())["best"][0]["ranks"]
    for number, rank in enumerate(ranks):
        (line,) = (each for each in lines if each.startswith(f"rank {number}"))
        shown = float(line.split()[2])
        assert shown == pytest.approx(sum(rank["peak_bytes"].values()) / 2**30, rel=0.01)


def test_what_is_assumed_of_a_host_is_said(capsys):
    asked = ["--model", "llama-7b", "--global-batch", "8", "--seq", "2048", "tiers.optimizer=host"]
    text = printed(capsys, "--cluster", "l40s:1", *asked)
    assert "GiB of an assumed 192 GiB on host" in text
    Path("mine.toml").write_text('gpu = "rtx-4090"\nnum_gpus = 1\nhost_memory_gib = 200\n')
    text = printed(capsys, "--cluster", "mine.toml", *asked)
    assert "GiB of 200 GiB on host" in text


@pytest.mark.parametrize(("name", "mark"), [("FORCE_COLOR", "\u2588"), ("NO_COLOR", "ppp")])
def test_bars_differ_by_characters_where_there_is_no_colour(name, mark, capsys, monkeypatch):
    for other in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv(name, "1")
    Path("ds.json").write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 0}}))
    cli.main(["plan", "--explain", "ds.json", "--model", "1b", "--cluster", "a100-80:8"])
    bars = [line for line in capsys.readouterr().out.splitlines() if "\u2588\u2588\u2588" in line or "ppp" in line]
    assert bars
    assert all(mark in line for line in bars)


def test_sizes_are_printed_as_json_too(capsys):
    assert (
        cli.main(["plan", "--fit", "--cluster", "a100-40:8", "--model", "llama-7b", "--seq", "2048", "--json", "-"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert (found["gpu"], found["num_gpus"], found["seq_len"]) == ("a100-40", 8, 2048)
    by_name = {each["setup"]: each for each in found["fits"]}
    assert by_name["DDP"]["num_params"] < by_name["ZeRO-3"]["num_params"]
    assert by_name["DDP"]["micro_size"] is None
    assert by_name["ZeRO-3"]["micro_size"] >= 1


def test_this_machine_needs_a_profile(capsys):
    assert cli.main(["plan", "--model", "25m", "--global-batch", "8"]) == 2
    assert "shardwise doctor --calibrate" in capsys.readouterr().err


def measured() -> Profile:
    """A CPU that multiplies 1e11 numbers a second."""
    sizes = ((256, 256, 256), (512, 512, 512), (1024, 1024, 1024))
    products = [MatmulTime(dtype="fp32", m=m, n=n, k=k, seconds=2 * m * n * k / 1e11) for m, n, k in sizes]
    return Profile(
        device="cpu",
        num_ranks=2,
        num_threads=1,
        memory_bytes=2**34,
        matmuls=tuple(products),
        collectives=tuple(
            CollectiveTime(op=op, num_ranks=2, num_bytes=2**20, seconds=0.002)
            for op in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
        ),
        stream_bytes_per_s=5e9,
        step_bytes_per_s=5e9,
        copies_bytes_per_s=(("host->host", 5e9),),
    )


def test_a_measured_machine_needs_no_cluster(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("shardwise.cli.this_machine.default_num_ranks", lambda device: 2)
    write_profile(measured(), tmp_path / "cache" / "shardwise")
    text = printed(capsys, *SMALL[:2], *SMALL[4:], "--write", "best.toml")
    assert "2 processes on this machine's CPU" in text
    config = Config.from_toml("best.toml")
    assert (config.run.num_procs, config.precision.param) == (2, "fp32")
    for wanted in (["run.num_procs=4"], ["mine.toml"]):
        Path("mine.toml").write_text("[run]\nnum_procs = 4\n")
        model = SMALL[:2] if "mine.toml" not in wanted else []
        assert "4 processes on this machine's CPU" in printed(capsys, *model, *wanted, "--global-batch", "8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "25n", "--cluster", "h100:8", "--global-batch", "8"], "did you mean 25m?"),
        (["--model", "none.json", "--cluster", "h100:8"], "cannot read none.json"),
        (["--model", ".", "--cluster", "h100:8", "--global-batch", "8"], "the folder . has no config.json"),
        (["--model", "meta/llama", "--cluster", "h100:8", "--global-batch", "8"], "nothing is downloaded"),
        (["--model", "none.sh", "--cluster", "h100:8"], "cannot read none.sh"),
        (["--model", "25m", "--cluster", "h1000:8"], "h1000 is no device"),
        ([*SMALL, "mesh.tq=2"], "did you mean mesh.tp?"),
        ([*SMALL, "mesh.tp=3"], "no layout of 4 GPUs goes with mesh.tp=3; give another value"),
        ([*SMALL, "optimizer.name=adm"], "optimizer.name='adm' is unknown; choose one of"),
        ([*SMALL, "tiers.optimizer_on_device=0.5"], "tiers.optimizer_on_device is chosen last"),
        ([*SMALL, "mine.toml"], "are two models"),
        (["--explain", "model.json", "--cluster", "h100:8"], "is a model and says not how it is split"),
        (["--explain", "notes.txt", "--cluster", "h100:8"], "holds no flags"),
        ([*SMALL, "--compare", "x.json"], "cannot read x.json"),
        (["--explain", "none.toml", "--cluster", "h100:8"], "cannot read none.toml"),
        ([*SMALL, "--json", "none/plan.json"], "--json none/plan.json names no file that can be written"),
        ([*SMALL, "--write", "none/plan.toml"], "--write none/plan.toml names no file that can be written"),
        ([], "no model is given; say which, such as --model llama-70b"),
        (["--fit", "--cluster", "h100:8", "mesh.tp=2"], "mesh.tp=2 pins nothing of --fit"),
    ],
)
def test_each_mistake_is_one_line(arguments, message, capsys):
    Path("model.json").write_text(json.dumps({"hidden_size": 64}))
    Path("notes.txt").write_text("what to buy")
    assert cli.main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("shardwise: ")
    assert error.count("\n") == 1


def test_a_model_and_a_cluster_are_enough(capsys):
    text = printed(capsys, "25m", "h100:4", "--seq", "512", "--tp", "2", "--json", "plan.json")
    plan = json.loads(Path("plan.json").read_text())
    assert plan["job"]["global_batch"] == 512
    assert "a batch of 512 sequences, 262 k tokens" in text
    assert {each["config"]["mesh"]["tp"] for each in plan["best"]} == {2}


def test_a_written_config_saves_once_an_hour(capsys):
    printed(capsys, *SMALL, "--write", "plan.toml", "--json", "plan.json")
    step_s = json.loads(Path("plan.json").read_text())["best"][0]["step_s"]
    every = Config.from_toml("plan.toml").checkpoint.every
    assert every is not None
    assert every * step_s == pytest.approx(3600, rel=0.01)
    printed(capsys, *SMALL, "checkpoint.every=7", "--write", "plan.toml")
    assert Config.from_toml("plan.toml").checkpoint.every == 7
