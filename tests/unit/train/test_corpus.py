"""What is read and what is refused: every kind of path, streaming, and each error's words."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.refusals import refused
from harness.waiting import wait_until
from shardwise.config.resolve import DataConfig
from shardwise.train import corpus as corpus_module
from shardwise.train.corpus import STDLIB_BYTES, CorpusCounts, open_corpus, read_pieces, sample_texts


def read(path, text_key: str = "text", exclude=()) -> tuple[list[str], CorpusCounts]:
    tally = CorpusCounts()
    data = DataConfig(path=str(path), text_key=text_key)
    documents, parts = [], []
    for piece in read_pieces(open_corpus(data, exclude), tally):
        parts.append(piece.text)
        if piece.ends_document:
            documents.append("".join(parts))
            parts = []
    assert parts == [], "the last piece must end its document"
    return documents, tally


def check_refused(path, code: str, *values: str) -> None:
    with refused(code, *values) as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_text_file_is_one_document(tmp_path):
    text = "Grüße, 世界 🌍\r\nsecond line\n"
    file = tmp_path / "a.txt"
    file.write_bytes(text.encode())
    documents, tally = read(file)
    assert documents == [text]
    assert (tally.num_documents, tally.num_skipped) == (1, 0)
    assert tally.num_read_bytes == len(text.encode())


def test_byte_order_mark_is_not_text(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfabc")
    assert read(file)[0] == ["abc"]


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0\ufeff"), min_size=1))
def test_long_texts_are_cut_without_loss(tmp_path_factory, text):
    """Catches a cut inside a character, a piece too long, and a document ended early or twice."""
    file = tmp_path_factory.mktemp("cut") / "a.txt"
    file.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "PIECE_CHARS", 5)
        tally = CorpusCounts()
        pieces = list(read_pieces(open_corpus(DataConfig(path=str(file))), tally))
    assert tally.num_documents == 1
    assert "".join(piece.text for piece in pieces) == text
    assert all(0 < len(piece.text) <= 5 for piece in pieces)
    assert [piece.ends_document for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_pieces_end_at_lines_where_they_can(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text(("x" * 999 + "\n") * 1000)
    pieces = list(read_pieces(open_corpus(DataConfig(path=str(file))), CorpusCounts()))
    assert len(pieces) > 3
    assert all(piece.text.endswith("\n") for piece in pieces)


def test_a_file_is_offloaded(tmp_path):
    """Catches reading the whole file before the first piece."""
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": "y" * 1000}) + "\n" for _ in range(100)))
    tally = CorpusCounts()
    next(read_pieces(open_corpus(DataConfig(path=str(file))), tally))
    assert tally.num_read_bytes < 2000


def test_folder_is_read_in_order_without_binary_hidden_and_excluded(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two.md").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "c.bin").write_bytes(b"text\0with zero")
    (tmp_path / "latin.txt").write_bytes("Grüße".encode("latin-1"))
    (tmp_path / "broken.txt").symlink_to(tmp_path / "missing")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tokenizer.json").write_text("excluded")
    documents, tally = read(tmp_path, exclude=[tmp_path / "cache"])
    assert documents == ["one", "two"]
    assert (tally.num_documents, tally.num_skipped) == (2, 2)


def test_an_excluded_folder_may_itself_be_the_data(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    assert read(tmp_path, exclude=[tmp_path])[0] == ["one"]


def test_jsonl_takes_one_document_a_line(tmp_path):
    file = tmp_path / "a.jsonl"
    lines = [json.dumps({"body": "é\n2"}), "", json.dumps({"body": ""}), json.dumps({"body": "3", "id": 1})]
    file.write_text("\n".join(lines))
    documents, tally = read(file, text_key="body")
    assert documents == ["é\n2", "3"]
    assert tally.num_read_bytes == file.stat().st_size


def test_half_a_surrogate_pair_is_replaced(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a\\ud800b \\ud83d\\ude00"}')
    assert read(file)[0] == ["a\ufffdb 😀"]


def test_standard_library_is_the_default():
    corpus = open_corpus(DataConfig())
    names = [file.name for file in corpus.files]
    assert "argparse.py" in names
    assert not [name for name in names if "site-packages" in name or "/test/" in name]
    assert 2_000_000 < corpus.num_bytes <= STDLIB_BYTES
    assert corpus == open_corpus(DataConfig())


def test_standard_library_cap_leaves_a_sample_of_all(monkeypatch):
    monkeypatch.setattr(corpus_module, "STDLIB_BYTES", 1_000_000)
    corpus = open_corpus(DataConfig())
    assert 800_000 < corpus.num_bytes <= 1_000_000
    initials = {file.name[0] for file in corpus.files}
    assert len(initials) > 10


def test_sample_is_bounded_and_spread(tmp_path):
    for number in range(50):
        (tmp_path / f"{number:02}.txt").write_text(f"{number:02}" * 500)
    corpus = open_corpus(DataConfig(path=str(tmp_path)))
    sample = list(sample_texts(corpus, 10_000))
    assert 9_000 <= sum(map(len, sample)) <= 12_000
    assert {text[0] for text in sample} == set("01234")
    assert len(list(sample_texts(corpus, 1 << 30))) == 50


def test_fingerprint_follows_the_files_and_the_key(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}')
    data = DataConfig(path=str(file))
    before = open_corpus(data).fingerprint()
    assert before == open_corpus(data).fingerprint()
    assert before != open_corpus(DataConfig(path=str(file), text_key="body")).fingerprint()
    os.utime(file, ns=(1, 1))
    assert before != open_corpus(data).fingerprint()


def test_fingerprint_follows_a_file_whose_size_and_time_are_set_back(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one")
    status, before = file.stat(), open_corpus(DataConfig(path=str(file))).fingerprint()

    def was_changed() -> bool:  # clocks of file systems tick some times in a hundredth of a second
        file.write_text("two")
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        return file.stat().st_ctime_ns != status.st_ctime_ns

    assert wait_until(was_changed)
    assert open_corpus(DataConfig(path=str(file))).fingerprint() != before


def test_missing_path(tmp_path):
    path = tmp_path / "nowhere"
    check_refused(path, "data-missing", f"data.path={path}")


def test_empty_file_and_folder(tmp_path):
    check_refused(tmp_path, "no-text", f"data.path={tmp_path}", "no files")
    file = tmp_path / "a.txt"
    file.touch()
    check_refused(file, "no-text", f"data.path={file}")
    check_refused(tmp_path, "no-text", f"data.path={tmp_path}", "1 files")


def test_neither_file_nor_folder(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    check_refused(tmp_path / "pipe", "data-not-a-file", f"data.path={tmp_path / 'pipe'}")


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"a\0b", "it holds zero bytes"), ("é".encode("latin-1"), "unexpected end of data")],
)
def test_single_file_that_is_not_text(tmp_path, content, reason):
    file = tmp_path / "a.txt"
    file.write_bytes(content)
    check_refused(file, "not-utf8", f"data.path={file}", reason)


def test_nothing_decodable(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\0\1")
    (tmp_path / "b.bin").write_bytes(b"\xff")
    check_refused(tmp_path, "no-text", f"data.path={tmp_path}", "2 files read, 2 of them", "data.text_key=text")


@pytest.mark.parametrize(
    ("line", "refusal"),
    [
        (b"{", ("not-json", "Expecting property name")),
        (b"[1]", ("jsonl-not-object", "list")),
        (
            b'{"body": 1, "id": 2}',
            ("jsonl-key-missing", "text", "body, id", "data.text_key"),
        ),
        (b'{"text": 7}', ("jsonl-text-type", "int", "data.text_key")),
        (b"\xff", ("not-utf8", "invalid start byte")),
    ],
)
def test_bad_jsonl_lines(tmp_path, line, refusal):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    check_refused(file, *refusal, "a.jsonl line 2")


@pytest.fixture
def locked(tmp_path, monkeypatch):
    """A folder with a file that may not be read; root reads everything, so opening it is made to fail."""
    file = tmp_path / "locked.txt"
    file.write_text("secret")
    file.chmod(0)
    true_open = Path.open

    def refusing_open(path, *args, **kwargs):
        if path == file:
            raise PermissionError(13, "Permission denied", str(path))
        return true_open(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refusing_open)
    return file


def test_unreadable_file(locked):
    for path in (locked, locked.parent):
        check_refused(path, "file-unreadable", str(locked), "Permission denied")


def test_unreadable_folder(tmp_path, monkeypatch):
    def refusing_scandir(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refusing_scandir)
    check_refused(tmp_path, "file-unreadable", str(tmp_path), "Permission denied")


def test_python_without_its_source(monkeypatch, tmp_path):
    monkeypatch.setattr(corpus_module.sysconfig, "get_path", lambda name: str(tmp_path / name))
    with refused("no-default-data", str(tmp_path), "data.path"):
        open_corpus(DataConfig())
