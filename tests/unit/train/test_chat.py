"""Chats become tokens, those of the assistant count, and whole chats are packed into sequences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.hf_folders import TEMPLATE, make_folder, make_tokenizer, write_chats
from harness.refusals import refused
from shardwise.cli.main import main
from shardwise.config.resolve import Config
from shardwise.planner.hardware import parse_cluster
from shardwise.planner.request import job_of
from shardwise.train.chat import ChatEncoder
from shardwise.train.dataset import PackedDataset, pack
from shardwise.train.prepare import prepare_data
from shardwise.train.setup import check_job, job_config, lent_data_line, with_steps

pytest.importorskip("transformers")

ROUNDS = [
    {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"},
    {"role": "user", "content": "and"}, {"role": "assistant", "content": "so"},
]  # fmt: skip
# As Qwen3's, which leaves the thoughts of earlier answers out.
REWRITING = TEMPLATE.replace(
    "{{ message.content }}",
    "{% if loop.last and message.role == 'assistant' %}(thought){% endif %}{{ message.content }}",
)
MARKED = TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
    "{% else %}{{ message.content }}{% endif %}",
)


def counted(record: dict, template: str | None = TEMPLATE, train_on: str = "completions") -> str:
    """The text of the tokens that count."""
    tokenizer = make_tokenizer(template)
    ids, counts = ChatEncoder(tokenizer, train_on, "it").encode(record, "line 1")  # type: ignore[arg-type]
    assert len(ids) == len(counts)
    return tokenizer.decode(ids[counts.astype(bool)])


@pytest.mark.parametrize(
    ("record", "template", "expected"),
    [
        ({"messages": ROUNDS}, TEMPLATE, "ho<|im_end|>\nso<|im_end|>\n"),
        ({"messages": ROUNDS}, REWRITING, "(thought)so<|im_end|>\n"),
        ({"messages": ROUNDS}, MARKED, "hoso"),
        ({"prompt": ROUNDS[:3], "completion": ROUNDS[3:]}, TEMPLATE, "so<|im_end|>\n"),
        ({"prompt": "hi ", "completion": "ho"}, None, "ho<|im_end|>"),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
            TEMPLATE,
            "ho<|im_end|>\n",
        ),
    ],
)
def test_the_answers_count(record: dict, template: str | None, expected: str) -> None:
    assert counted(record, template) == expected


def test_all_tokens_count_where_the_config_says_so() -> None:
    assert counted({"messages": ROUNDS[:2]}, train_on="all") == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"
    )


PARTS = [{"type": "text", "text": "h"}, {"type": "output_text", "text": "o"}, "!"]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{{ a }}{% endfor %}" + (
    "{% endfor %}{% endfor %}"
)
GROWING = "{% set a = namespace(b='x' * 1000) %}{% for c in range(99) %}{% set a.b = a.b ~ a.b %}{% endfor %}"


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
def test_parts_of_text_are_the_text_that_they_make(template: str) -> None:
    whole = [ROUNDS[0], {"role": "assistant", "content": "ho!"}]
    parts = [ROUNDS[0], {"role": "assistant", "content": PARTS}]
    theirs = [{"from": "human", "value": [{"type": "text", "text": "hi"}]}, {"from": "gpt", "value": PARTS}]
    expected = counted({"messages": whole}, template)
    for record in ({"messages": parts}, {"conversations": theirs}, {"prompt": parts[:1], "completion": parts[1:]}):
        assert counted(record, template) == expected


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "chat-part-not-text"),
        ([{"type": "text", "text": 5}], "chat-part-not-text"),
        ([{"text": "no type"}], "chat-part-not-text"),
        ([["hi"]], "chat-part-not-text"),
        ([None], "chat-part-not-text"),
        (5, "chat-messages"),
        ({"type": "text", "text": "hi"}, "chat-messages"),
    ],
)
def test_contents_that_are_no_text_are_refused(content: object, code: str) -> None:
    for record in (
        {"messages": [{"role": "user", "content": content}, ROUNDS[1]]},
        {"conversations": [{"from": "human", "value": content}, {"from": "gpt", "value": "ho"}]},
    ):
        with refused(code, "line 1"):
            counted(record)


def test_half_a_surrogate_pair_is_replaced() -> None:
    text = counted({"messages": [ROUNDS[0], {"role": "assistant", "content": "a\ud800"}]})
    assert text == counted({"messages": [ROUNDS[0], {"role": "assistant", "content": "a\ufffd"}]})
    assert counted({"prompt": "a\ud800", "completion": "b"}) == "b<|im_end|>"


@pytest.mark.parametrize("mark", ["", "{% generation %}{% endgeneration %}"])
@pytest.mark.parametrize(("template", "why"), [(ENDLESS, "not done after"), (GROWING, "memory")])
def test_a_template_without_an_end_is_ended(
    template: str, why: str, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.train.chat._TEMPLATE_S", 0.3 if why.startswith("not") else 5.0)
    with refused("chat-template-endless", "line 1", why):
        counted({"messages": ROUNDS}, mark + template)


def test_records_that_are_no_chats_are_refused_by_their_place() -> None:
    for code, record, template in (
        ("no-chat-template", {"messages": ROUNDS}, None),
        ("chat-without-answer", {"messages": ROUNDS[:1]}, TEMPLATE),
        ("chat-messages", {"messages": "hi"}, TEMPLATE),
        ("chat-messages", {"messages": [{"text": "hi"}]}, TEMPLATE),
        ("chat-template-refuses", {"messages": ROUNDS}, "{{ raise_exception('no') }}"),
        ("chat-template-rewrites", {"messages": ROUNDS}, "{{ messages | length }}{{ add_generation_prompt }}"),
    ):
        with refused(code, "line 1"):
            counted(record, template)


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 40))
def test_packing_keeps_every_document_once_within_each_sequence(lengths: list[int], seq_len: int) -> None:
    rows = pack(np.array(lengths, dtype=np.int64), seq_len)
    assert sorted(document for row in rows for document in row) == list(range(len(lengths)))
    assert all(sum(lengths[document] for document in row) <= seq_len for row in rows)
    # Best fit leaves at most one sequence half empty.
    assert sum(2 * sum(lengths[document] for document in row) <= seq_len for row in rows) <= 1


def open_chats(tmp_path: Path, seq_len: int = 64, **data: object) -> tuple[Config, PackedDataset, PackedDataset]:
    folder = make_folder("llama", tmp_path / "llama")
    path = write_chats(tmp_path / "chats.jsonl")
    config = Config.from_dict(
        {
            "model": {"path": str(folder)},
            "data": {"path": str(path), "seq_len": seq_len, "cache_dir": str(tmp_path / "cache"), **data},
        }
    )
    opened = prepare_data(config, tmp_path)
    assert isinstance(opened.train, PackedDataset)
    assert isinstance(opened.val, PackedDataset)
    assert prepare_data(config, tmp_path).path == opened.path
    return config, opened.train, opened.val


def test_packed_sequences_hold_the_chats_and_predict_within_each(tmp_path: Path) -> None:
    _, train, val = open_chats(tmp_path)
    tokenizer = make_tokenizer()
    seen = []
    for split in (train, val):
        for number in range(split.num_sequences(64)):
            tokens, targets, positions = split.sample(number, 64)
            starts = np.flatnonzero(positions == 0)
            for start, stop in zip(starts, [*starts[1:], 64], strict=True):
                predicted = targets[start:stop] >= 0
                assert not predicted[-1]
                assert (targets[start : stop - 1][predicted[:-1]] == tokens[start + 1 : stop][predicted[:-1]]).all()
                if predicted.any():
                    seen.append(tokenizer.decode(tokens[start:stop]))
                    answers = tokenizer.decode(targets[start:stop][predicted])
                    assert answers.count("it is") == seen[-1].count("assistant")
    lines = [json.loads(line) for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    written = [tokenizer.apply_chat_template(line["messages"], tokenize=False) for line in lines]
    assert sorted(seen) == sorted(written)


def test_longer_chats_lose_their_end_and_are_counted(tmp_path: Path) -> None:
    _, train, val = open_chats(tmp_path, seq_len=24)
    assert train.num_cut + val.num_cut > 0
    assert all(len(train.sample(number, 24)[0]) == 24 for number in range(train.num_sequences(24)))


def test_a_prompt_ends_before_the_answer(tmp_path: Path) -> None:
    _, _, val = open_chats(tmp_path)
    text = make_tokenizer().decode(val.prompt(0, 64))
    assert text.endswith("<|im_start|>assistant\n")
    assert text.count("user") == 1


def test_epochs_give_the_steps(tmp_path: Path) -> None:
    folder, path = make_folder("llama", tmp_path / "llama"), write_chats(tmp_path / "chats.jsonl")
    settings = [f"model.path={folder}", f"data.path={path}", f"data.cache_dir={tmp_path}", "batch.global_size=2"]
    config = job_config(None, [*settings, "run.epochs=3"]).resolve(1)
    data = prepare_data(config, tmp_path)
    steps = with_steps(config, data).run.steps
    assert steps == -(-3 * data.train.num_sequences(config.data.seq_len) // 2)
    assert with_steps(job_config(None, [*settings, "run.steps=7"]).resolve(1), data).run.steps == 7


def test_a_plan_of_a_folder_trains_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
    folder = make_folder("llama", tmp_path / "llama")
    cluster = ["--cluster", "h100:2", "--global-batch", "4"]
    assert main(["plan", "--model", str(folder), *cluster, "--write", str(tmp_path / "my.toml")]) == 0
    config = Config.from_toml(tmp_path / "my.toml")
    assert config.model.path == str(folder)
    resolved, layout = check_job(config, 2)
    assert sum(param.numel for group in layout.groups for param in group.params) > 0
    assert resolved.data.seq_len == 64
    assert job_of(config, parse_cluster("h100:2")).shape.hidden_size == 32


@pytest.mark.parametrize(("values", "is_said"), [({"model": {"path": "my-llama"}}, True), ({}, False)])
def test_a_model_of_the_users_without_data_says_what_it_trains_on(values: dict[str, Any], is_said: bool) -> None:
    assert bool(lent_data_line(Config.from_dict(values))) is is_said
    assert not lent_data_line(Config.from_dict(values | {"data": {"path": "mine.txt"}}))


def test_text_gets_the_models_first_and_last_token(tmp_path: Path) -> None:
    folder = make_folder("llama", tmp_path / "llama")
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps({"text": f"line {n}"}) + "\n" for n in range(60)))
    data = {"path": str(tmp_path / "lines.jsonl"), "seq_len": 16, "cache_dir": str(tmp_path / "cache")}
    opened = prepare_data(Config.from_dict({"model": {"path": str(folder)}, "data": data}), tmp_path)
    tokenizer = make_tokenizer()
    text = tokenizer.decode(np.asarray(opened.train.tokens[:40]))
    assert text.startswith("<s>line 0<|im_end|><s>line 2<|im_end|>")  # line 1 is held out


def test_parquet_is_read_as_records(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder = make_folder("llama", tmp_path / "llama")
    lines = [json.loads(line) for line in write_chats(tmp_path / "chats.jsonl").read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(lines), tmp_path / "chats.parquet")
    hashes = []
    for name in ("chats.jsonl", "chats.parquet"):
        data = {"path": str(tmp_path / name), "seq_len": 64, "cache_dir": str(tmp_path / "cache")}
        opened = prepare_data(Config.from_dict({"model": {"path": str(folder)}, "data": data}), tmp_path)
        hashes.append(opened.index.tokens_hash)
    assert hashes[0] == hashes[1]


def test_chats_beside_text_and_chats_for_a_preset_are_refused(tmp_path: Path) -> None:
    folder = make_folder("llama", tmp_path / "llama")
    path = write_chats(tmp_path / "chats.jsonl")
    path.write_text(path.read_text() + json.dumps({"text": "a text"}) + "\n")
    data = {"path": str(path), "cache_dir": str(tmp_path / "cache")}
    with refused("chats-beside-text"):
        prepare_data(Config.from_dict({"model": {"path": str(folder)}, "data": data}), tmp_path)
    with refused("chats-need-model", "chats.jsonl line 1"):
        prepare_data(Config.from_dict({"data": data}), tmp_path)
