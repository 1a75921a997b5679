"""The page of experts lists the families that are tried, and those that are refused."""

from __future__ import annotations

import re

from harness.moe_models import MOE_FAMILIES, OTHER_FAMILIES
from harness.paths import ROOT


def test_the_page_has_the_families_that_are_tried() -> None:
    table = (ROOT / "docs" / "experts.md").read_text(encoding="utf-8").partition("<!-- families -->")[2]
    found = dict(re.findall(r"^\| ([\w-]+) \| (equal|refused) \|", table, re.M))
    assert found == {**dict.fromkeys(MOE_FAMILIES, "equal"), **dict.fromkeys(OTHER_FAMILIES, "refused")}
