"""`shardwise checkpoint` as a user meets it: what it prints, its exit codes, and that it leaves nothing half done."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from harness.checkpoints import SHAPES, flip, save, values_of
from shardwise.checkpoint import show
from shardwise.checkpoint.commit import read_manifest
from shardwise.checkpoint.compare import ChangedState, ChangedValues, StateDifference
from shardwise.checkpoint.manifest import MANIFEST_NAME, Manifest, StoredChunk, StoredState, StoredTensor
from shardwise.checkpoint.offline import Damage, Verification
from shardwise.checkpoint.reader import ChunkReader
from shardwise.cli import main as cli
from shardwise.layout.slicing import Rect
from shardwise.train.tokenizer import byte_tokenizer, load_tokenizer

pytestmark = pytest.mark.usefixtures("warm_python")

ABOUT = {
    "layout": {"mesh": {"pp": 1, "dp_shard": 2, "tp": 2}, "stage": 3, "precision": {"param": "bf16", "master": "fp32"}},
    "config": {"zero": {"stage": 3}, "optimizer": {"lr": 0.1}},
    "trajectory": {"optimizer": {"kind": "AdamW"}},
    "model": {"class": "Decoder"},
    "saved_at": "2026-11-21T18:00:00+00:00",
    "library": "0.1.0",
}


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """Checkpoints of the steps 100 and 200 in `runs/a`, which is where the commands run."""
    monkeypatch.chdir(tmp_path)
    for step in (100, 200):
        save(Path("runs/a"), values_of(), step=step, **ABOUT)
    return Path("runs/a")


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["checkpoint", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_show_says_what_is_damaged_and_goes_on_with_the_newest_whole_one(root, capsys):
    (root / "step-00000200" / "rank-00001-of-00002.safetensors").unlink()
    code, out, _ = call(capsys, "show", "runs/a")
    assert code == 0
    assert "damaged: rank-00001-of-00002.safetensors" in out
    assert "AdamW, step 100" in out
    code, _, err = call(capsys, "show", "runs/a", "--step", "200")
    assert code == 1
    assert err.count("\n") == 1
    (root / "step-00000100" / MANIFEST_NAME).unlink()
    code, out, err = call(capsys, "show", "runs/a")
    assert (code, err.count("\n")) == (1, 1)
    assert "step-00000200" in err
    assert MANIFEST_NAME in out


def test_show_answers_other_programs(root, capsys):
    (root / "step-00000100" / "rank-00001-of-00002.safetensors").unlink()
    shown = json.loads(call(capsys, "show", "runs/a", "--tensors", "up", "--json")[1])
    assert [(each["step"], each["is_latest"], bool(each["damage"])) for each in shown["checkpoints"]] == [
        (200, True, False),
        (100, False, True),
    ]
    newest = shown["newest"]
    assert (newest["step"], newest["num_parameters"], newest["num_buffers"]) == (200, 600648, 1)
    assert newest["files"] == dict(read_manifest(root / "step-00000200").files)
    assert [tensor["name"] for tensor in newest["tensors"]] == ["up.weight", "up.bias"]
    assert newest["tensors"][0]["states"] == {
        "param": {"dtype": "F32", "num_pieces": 2},
        "exp_avg": {"dtype": "F32", "num_pieces": 2},
        "step": {"dtype": "F32", "value": 200.0},
    }
    assert json.loads(call(capsys, "show", "runs/a", "--step", "200", "--json")[1])["step"] == 200


COMMANDS = ("show runs/b", "verify runs/b", "diff runs/b runs/b", "show runs/b --json")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.split()[0])
def test_the_folder_of_a_run_stands_for_its_checkpoints(root, capsys, command):
    Path("runs/b/tokenizer").mkdir(parents=True)
    root.rename("runs/b/checkpoints")
    code, out, err = call(capsys, *command.split())
    assert (code, err) == (0, "")
    _, of_root, _ = call(capsys, *command.replace("runs/b", "runs/b/checkpoints").split())
    assert len(out.splitlines()) == len(of_root.splitlines())


def test_verify_says_whole_or_names_the_damages(root, capsys):
    code, out, err = call(capsys, "verify", "runs/a")
    assert (code, err) == (0, "")
    path = root / "step-00000200" / "rank-00000-of-00002.safetensors"
    flip(path, path.stat().st_size - 1)
    code, out, _ = call(capsys, "verify", "runs/a")
    assert code == 1
    assert out.startswith(f"step-00000200/{path.name}: rng of rank 0 param ")
    assert call(capsys, "verify", "runs/a", "--step", "100")[0] == 0
    (root / "step-00000200" / MANIFEST_NAME).write_text("torn")
    code, out, _ = call(capsys, "verify", "runs/a")
    assert code == 1
    assert out.startswith("runs/a/step-00000200/manifest.json does not match")


def test_diff_has_the_exit_codes_of_diff(root, capsys):
    values = values_of()
    values["up.bias", "exp_avg"][2] += 0.5
    save(Path("runs/b"), values, 3, step=200, **ABOUT | {"config": {"zero": {"stage": 3}, "optimizer": {"lr": 0.2}}})
    save(Path("runs/c"), values_of(), 1, step=200, **ABOUT)
    assert call(capsys, "diff", "runs/a", "runs/c")[0] == 0
    assert call(capsys, "diff", "runs/a", "runs/b")[0] == 1
    assert call(capsys, "diff", "runs/a", "runs/b", "--weights")[0] == 0
    path = Path("runs/b/step-00000200/rank-00000-of-00003.safetensors")
    flip(path, path.stat().st_size - 1)
    code, _, err = call(capsys, "diff", "runs/a", "runs/b")
    assert code == 2
    assert path.name in err


def test_ctrl_c_leaves_nothing_half_written(root, capsys, monkeypatch):
    save(Path("runs/b"), values_of(), 3, step=7, **ABOUT | {"model": LLAMA})
    read, calls = ChunkReader.read, []

    def interrupted(self, *arguments) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        read(self, *arguments)

    monkeypatch.setattr(ChunkReader, "read", interrupted)
    code, _, err = call(capsys, "export", "runs/b", "elsewhere/hf")
    assert (code, err) == (130, "shardwise: stopped by Ctrl-C\n")
    assert list(Path("elsewhere").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_not_wrong_use(root, capsys):
    save(Path("runs/b"), values_of(), 3, step=7, **ABOUT | {"model": LLAMA})
    Path("file").write_text("")
    code, _, err = call(capsys, "export", "runs/b", "file/below")
    assert code == 1
    assert err.count("\n") == 1


@pytest.mark.cold
def test_show_needs_no_torch(root):
    script = "import sys, shardwise.cli.main as cli; cli.main(['checkpoint', 'show', 'runs/a']); print('torch' in sys.modules)"  # noqa: E501
    environ = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1])}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environ)
    assert run.stdout.splitlines()[-1] == "False"


# ---------------------------------------------------------------- pictures


def picture(renderable, width: int) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_pictures_fit_the_terminal(root, width):
    manifest = read_manifest(root / "step-00000200")
    names = [f"model.layers.{i}.post_attention_layernorm.weight" for i in range(300)]
    values = tuple(ChangedValues(name, "exp_avg_sq", 10**8, 10**8, 1.5e-7 * i) for i, name in enumerate(names))
    for renderable in (
        show.render_checkpoint(root, manifest),
        show.render_tensors(manifest.tensors),
        show.render_difference(root, root, StateDifference(values=values)),
        show.render_verification(root, Verification(manifest, (Damage("a" * 40, "b" * 90),) * 30), 1.0),
    ):
        lines = picture(renderable, width)
        assert max(len(line) for line in lines) <= width
        assert not any("…" in line for line in lines)


def rows_of(lines: list[str]) -> list[str]:
    """The tensors t0, t1, ... in the order in which they are listed."""
    return [line.split()[0] for line in lines if line.startswith("t") and " param " in line]


def test_long_lists_end_unless_all_is_asked_for(root):
    values = tuple(ChangedValues(f"t{i}", "param", 9, 1, float(i)) for i in range(50))
    tensors = tuple(ChangedState(f"layers.{i}.weight step", "1 (F32)", "2 (F32)") for i in range(30))
    tensors = (*tensors, ChangedState("a.weight shape", (2,), (3,)))
    found = StateDifference(tensors, values, num_states=60)
    lines = picture(show.render_difference(root, root, found), 80)
    assert "and 30 more states" in lines
    assert rows_of(lines) == [f"t{i}" for i in range(49, 29, -1)], "the largest first"
    words = [line.split() for line in lines]
    assert ["step", "of", "30", "tensors", "1", "(F32)", "2", "(F32)"] in words
    assert ["a.weight", "shape", "(2,)", "(3,)"] in words
    assert len(rows_of(picture(show.render_difference(root, root, found, True), 80))) == 50
    lines = picture(show.render_verification(root, Verification(None, (Damage("a", "a is torn"),) * 23), 1.0), 80)
    assert lines[:20] == ["a is torn"] * 20
    assert lines[20] == "and 3 more damages"


def test_many_files_and_sparse_manifests_are_shown():
    files = {f"rank-{rank:05d}-of-00512.safetensors": 1000 for rank in range(512)}
    piece = StoredChunk(Rect((0,), (2,)), "rank-00000-of-00512.safetensors", 80)
    tensors = (StoredTensor("w", (), (2,), {"param": StoredState("BF16", (piece,))}, trainable=False),)
    text = "\n".join(picture(show.render_checkpoint(Path("x"), Manifest(7, tensors, files)), 80))
    assert "512, 512.0 kB in all" in text
    assert "an unknown layout" in text
    assert "1 tensor, of which 1 frozen" in text
    assert "saved at an unknown time" in text


SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4, "num_hidden_layers": 1}
LLAMA = {"class": "LlamaForCausalLM", "config": {"model_type": "llama", "dtype": "float32", **SIZES}}


def test_export_writes_a_folder_that_other_libraries_read(root, capsys):
    save(Path("runs/b"), values_of(), 3, step=7, **ABOUT | {"model": LLAMA})
    code, out, err = call(capsys, "export", "runs/b", "hf")
    assert (code, err) == (0, "")
    assert "--tokenizer" in out
    tensors, expected = load_file("hf/model.safetensors"), values_of()
    assert sorted(tensors) == ["embed.weight", "positions", "scale", "up.bias", "up.weight"]
    assert tensors["positions"].dtype == torch.int64
    for name in SHAPES:
        assert torch.equal(tensors[name], expected[name, "param"].bfloat16()), name
    config = json.loads(Path("hf/config.json").read_text())
    added = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    assert config == {"model_type": "llama", **SIZES} | added


def test_export_says_what_is_wrong_and_leaves_nothing(root, capsys):
    save(Path("runs/b"), values_of(), step=7, **ABOUT | {"model": LLAMA, "contents": "trainable"})
    save(Path("runs/c"), values_of(), step=7, **ABOUT | {"model": LLAMA})
    Path("torn.json").write_text("{")
    Path("taken").mkdir()
    Path("taken/mine").touch()
    for arguments, parts in {
        ("runs/a", "hf"): ("[model-class-unknown]", "of Decoder", "--hf-config"),
        ("runs/b", "hf"): ("[trainable-weights-only]", "engine.export_weights"),
        ("runs/c", "hf", "--hf-config", "torn.json"): ("[not-json]", "torn.json"),
        ("runs/c", "taken"): ("[export-exists]", "taken"),
        ("runs/nowhere", "hf"): ("[no-such-path]", "runs/nowhere"),
    }.items():
        code, out, err = call(capsys, "export", *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1), arguments
        assert all(part in err for part in parts), err
    piece, *_ = read_manifest(Path("runs/c/step-00000007")).tensors[1].states["param"].pieces
    flip(Path("runs/c/step-00000007") / piece.file, piece.offset)
    code, _, err = call(capsys, "export", "runs/c", "hf")
    assert code == 1
    assert "[checksum-differs]" in err
    assert not list(Path().glob("*hf*"))


def test_export_puts_a_tokenizer_beside_the_weights(root, capsys):
    save(Path("runs/d/checkpoints"), values_of(), step=7, **ABOUT | {"model": LLAMA})
    byte_tokenizer().save(Path("runs/d/tokenizer"))
    Path("base").mkdir()
    for name in ("tokenizer.model", "model.safetensors"):
        Path("base", name).write_text("of base")
    for options in ([], ["--tokenizer", "base"]):
        folder = f"hf{len(options)}"
        code, out, err = call(capsys, "export", "runs/d/checkpoints", folder, *options)
        assert (code, out.count("\n"), err) == (0, 1, "")
    assert load_tokenizer("hf0").encode("né") == byte_tokenizer().encode("né")
    assert json.loads(Path("hf0/tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"
    assert {each.name for each in Path("hf2").iterdir()} == {"config.json", "model.safetensors", "tokenizer.model"}
    code, _, err = call(capsys, "export", "runs/d/checkpoints", "hf3", "--tokenizer", "runs/d")
    assert (code, err.count("\n"), Path("hf3").exists()) == (2, 1, False)


@pytest.mark.timeout(60)  # nothing ever writes into the pipe
@pytest.mark.parametrize("put", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.mkdir()])
def test_export_refuses_a_tokenizer_that_is_no_regular_file(root, capsys, put):
    save(Path("runs/d/checkpoints"), values_of(), step=7, **ABOUT | {"model": LLAMA})
    byte_tokenizer().save(Path("base"))
    Path("base/tokenizer.json").unlink()
    put(Path("base/tokenizer.json"))
    code, out, err = call(capsys, "export", "runs/d/checkpoints", "hf", "--tokenizer", "base")
    assert (code, out, err.count("\n"), list(Path().glob("*hf*"))) == (2, "", 1, [])
    assert "base/tokenizer.json" in err
    assert "[file-unreadable]" in err


def test_export_takes_the_config_of_another_folder(root, capsys):
    Path("config.json").write_text(json.dumps({"model_type": "mine", "architectures": ["Mine"], "dtype": "float16"}))
    code, _, err = call(capsys, "export", "runs/a", "hf", "--hf-config", "config.json", "--dtype", "fp32")
    assert (code, err) == (0, "")
    expected = {"model_type": "mine", "architectures": ["Mine"], "torch_dtype": "float32"}
    assert json.loads(Path("hf/config.json").read_text()) == expected
