"""The plan for 15 minutes of a GPU: it fits, what it calls exists, and a part that hangs or fails stops no other."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_plan import CALL_LIMITS_S, PARTS, ROOT, Part, keep_json, main, run_part, table

SLEEPER = Part("sleeper", "figures", 0.3, "-c __import__('time').sleep(60)", "")
LIAR = Part("broken", "figures", 30.0, "-c print('before');1/0", "")
FINE = Part(
    "fine",
    "figures",
    30.0,
    """-c open(r'{out}/fine.json','w').write('{{"rows":[{{"model":"1b","mode":"plain"}}]}}')""",
    "",
)


@pytest.mark.parametrize("call", CALL_LIMITS_S)
def test_the_limits_of_a_call_leave_time_for_its_start(call: str) -> None:
    assert 0 < sum(part.limit_s for part in PARTS if part.call == call) <= CALL_LIMITS_S[call] - 15


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_what_a_part_calls_exists(part: Part) -> None:
    for command in (part.command, part.tiny):
        words = command.format(out="out").split()
        for word in words:
            assert not word.startswith(("benchmarks/", "tests/")) or Path(ROOT, word).exists()
        if words[0].startswith("benchmarks/"):
            text = Path(ROOT, words[0]).read_text()
            assert [word for word in words if word.startswith("--") and f'"{word}"' not in text] == []


def test_each_part_leaves_a_json_and_a_line(tmp_path: Path) -> None:
    parts = (SLEEPER, LIAR, FINE)
    ended = [run_part(part, tmp_path, is_tiny=False) for part in parts]
    for part, each in zip(parts, ended, strict=True):
        keep_json(part, each, tmp_path)
    assert [each.how for each in ended] == ["out of time", "failed (1)", "ok"]
    assert ended[0].took_s < 30
    assert "before" in json.loads((tmp_path / "broken.json").read_text())["last_lines"]
    lines = table(ended, tmp_path)
    assert [line.split()[0] for line in lines[1:]] == ["sleeper", "broken", "fine", "1b"]


def test_the_table_reads_what_the_programs_write(tmp_path: Path) -> None:
    found = {
        "nccl": {"failed": ["broadcast: wrong values"], "took_s": 1.0},
        "results": [
            {
                "timings": [{"system": "fsdp2", "step_s": 0.2}, {"system": "shardwise-3", "step_s": 0.1}],
                "failed": {"ddp": "RuntimeError: no"},
            }
        ],
        "decision": {"verdict": "ours stay", "num_masks": 3},
        "rows": [{"system": "int8 kernel", "num_pieces": 300, "ms": 1.0, "host_ms": 2.0}],
    }
    (tmp_path / "all.json").write_text(json.dumps(found))
    (tmp_path / "all.txt").write_text("")
    ended = replace(run_part(replace(FINE, name="fine"), tmp_path, is_tiny=False), name="all")
    text = "\n".join(table([ended], tmp_path))
    for expected in ("1 failed", "0.500 of fsdp2", "ddp failed", "ours stay (3 masks)", "int8 kernel, 300 pieces"):
        assert expected in text


def test_parts_that_are_not_there_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_plan.py", "figures", str(tmp_path), "--only", "nothing"])
    with pytest.raises(SystemExit):
        main()
