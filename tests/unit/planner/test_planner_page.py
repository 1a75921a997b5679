"""The plan that the planner's page shows is today's answer, and its commands are files of this repository."""

from __future__ import annotations

import html
import re
import runpy

import pytest

from harness.paths import ROOT
from shardwise.planner.render import VALIDATION

MAKE = ROOT / "docs" / "images" / "make.py"


def words_of(svg: str) -> list[str]:
    """Words and numbers; bars and frames are neither."""
    text = " ".join(html.unescape(each) for each in re.findall(r"<text[^>]*>([^<]*)</text>", svg))
    return re.findall(r"[A-Za-z][\w/+-]*|\d[\d,.]*\d|\d", text)


def test_the_picture_of_a_plan_is_todays_answer() -> None:
    kept = words_of((ROOT / "docs" / "images" / "plan.svg").read_text())
    made = words_of(runpy.run_path(str(MAKE))["plan_picture"]())
    fix = "docs/images/plan.svg is of another day; python docs/images/make.py plan draws it again"
    assert [each for each in kept if each[0].isalpha()] == [each for each in made if each[0].isalpha()], fix
    numbers = [[float(each.replace(",", "")) for each in words if not each[0].isalpha()] for words in (kept, made)]
    # Differences of times move more than the times.
    assert numbers[0] == pytest.approx(numbers[1], rel=0.1, abs=0.1), fix


def test_the_number_beside_a_step_is_that_of_the_rows_nothing_is_fitted_to() -> None:
    page = (ROOT / "docs" / "planner-accuracy.md").read_text()
    held_out = page[page.index("## Rows that were held out") :]
    found = re.search(r"time +n +(\d+) +mean +([\d.]+)%", held_out)
    assert found is not None
    assert f"{found[2]} % off on average of {found[1]} published runs" in VALIDATION
    held_out = held_out[: held_out.index("###")]
    mean = re.search(r"mean +tau +\S+ +regret +([\d.]+)%", held_out)
    assert mean is not None
    num_jobs = len(re.findall(r"^  .*regret", held_out, re.MULTILINE))
    assert f"in {num_jobs} comparisons of layouts was {mean[1]} % slower" in VALIDATION
