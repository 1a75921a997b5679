"""What a forward only logs, clears or keeps reaches no result; what code does not show counts as if it did."""

from __future__ import annotations

import inspect
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from shardwise.pipeline.attribute_reads import AttributeReads, Site, site_of

KEPT = {
    "self.v.clear()": set(),
    "del self.v[:]": set(),
    "self.v": set(),
    "if self.v: self.v.clear()": set(),
    "while len(self.v): self.v.pop()": set(),
    "self.v.append(x)": set(),
    "self.v['key'] = x": set(),
    "self.v['key'] += 1": set(),
    "self.v += 1": set(),
    "print(self.v)": set(),
    "print('norm', round(float(self.v), 3), sep=' ')": set(),
    "print(f'{self.v:.3f}')": set(),
    "print('%.3f' % self.v)": set(),
    "log.info('norm %s', self.v)": set(),
    "self.writer.add_scalar('norm', self.v, 1)": set(),
    "print(getattr(self, 'v', None))": set(),
    "print(self.v.mean().item())": set(),
    "print(self.v['key'], len(self.v))": set(),
    "dt = time.time() - self.v\n print('dt', dt)": set(),
    "if self.v > 3 and x > 1:\n  log.warning('big %s', self.v)\n elif x: pass": set(),
    "for key, each in self.v.items(): print(key, each)": set(),
    "print([round(each, 2) for each in self.v])": set(),
    "self.dt = time.time() - self.v": {"dt"},
    "self.dt, self.more = self.v, 1": {"dt", "more"},
    "self.meter.update(time.time() - self.v)": {"meter"},
    "self.times['dt'] = self.v": {"times"},
    "if self.v > 3: self.num += 1": {"num"},
    "if self.v > 3:\n  text = 'big'\n  print(text)": set(),
    "print([item.v for item in [self]])": set(),
    "for key in self.v: print(key, self.v[key])": set(),
    "for key in self.v: self.v[key] = self.v[key] + 1": {"v"},
    "def stats(): return {'norm': self.v}\n print(stats())": set(),
    "def stats(): return self.v\n print(float(stats()))": set(),
}
REACHING = [
    "return self.v",
    "x = x + self.v",
    "x += self.v",
    "x.mul_(self.v)",
    "x[0] = self.v",
    "y = x\n y += self.v",
    "self.kept = x\n self.kept[0] = self.v",
    "print(x.mul_(self.v))",
    "if self.v > 3: x = x * 2",
    "if self.v > 3: x.mul_(2)",
    "if self.v > 3: print(x.mul_(2))",
    "if self.v > 3: return x",
    "self.v > 3 and x.mul_(2)",
    "x = x if self.v > 3 else 2 * x",
    "y = self.v\n x = x * y",
    "y, z = self.v\n x = x * z",
    "use(self.v)",
    "self.use(self.v)",
    "self.log(self.v)",
    "if self.v: self.norm(x)",
    "self.v.apply()",
    "for each in self.v: x = x + each",
    "for each in self.v: x.mul_(2)",
    "y = [each for each in self.v]\n x = x + sum(y)",
    "print([x.mul_(each) for each in self.v])",
    "with self.v: pass",
    "return (lambda: self.v)()",
    "assert self.v",
    "global y\n y = self.v",
    "other.v = self.v",
    "x = x + vars(self.v)['key']",
    "def stats(): return {'norm': self.v}\n x = x + stats()['norm']",
    "def stats(): return self.v\n use(stats())",
    "def stats(): return self.v\n y = [stats() for _ in range(2)]\n x = x * y[0]",
    "x = x + sum([item.v for item in [self]])",
    "for key in self.v: self.kept[key] = self.v[key]",
    "for key in self.v: x[key] = self.v[key]",
]


class Module:
    """Notes who reads its attribute `v`."""

    sites: list[Site]

    def __getattribute__(self, name: str) -> Any:
        if name == "v":
            frame = inspect.currentframe()
            if frame is not None and frame.f_back is not None:
                object.__getattribute__(self, "sites").append(site_of(frame.f_back))
        return object.__getattribute__(self, name) if name in ("sites", "__dict__") else MagicMock()


def reads_of(body: str, folder: Path) -> tuple[AttributeReads, list[Site]]:
    """Run a function of `self` and `x` as far as it goes; return what it reads."""
    file = folder / "code.py"
    file.write_text(f"def forward(self, x):\n {body}\n return x\n")
    module, names = Module(), {name: MagicMock() for name in ("log", "time", "use", "other", "print", "round", "float")}
    module.sites = []
    exec(compile(file.read_text(), str(file), "exec"), names)
    with suppress(TypeError, ValueError, KeyError):  # a mock has no order, and no items
        names["forward"](module, MagicMock())
    reads = AttributeReads()
    for site in module.sites:
        reads.note("part.v", site)
    return reads, module.sites


@pytest.mark.parametrize("body", KEPT)
def test_what_is_logged_cleared_or_kept_reaches_no_result(body: str, tmp_path: Path) -> None:
    reads, sites = reads_of(body, tmp_path)
    assert sites
    assert reads.kept("part.v") == {"part.v", *(f"part.{name}" for name in KEPT[body])}


@pytest.mark.parametrize("body", REACHING)
def test_what_may_reach_a_result_is_found(body: str, tmp_path: Path) -> None:
    reads, sites = reads_of(body, tmp_path)
    assert sites
    assert reads.kept("part.v") is None


def test_what_takes_a_value_over_is_followed(tmp_path: Path) -> None:
    reads, _ = reads_of("self.dt = self.v", tmp_path)
    (tmp_path / "next").mkdir()
    _, sites = reads_of("x = x + self.v", tmp_path / "next")
    reads.note("part.dt", sites[0])
    assert reads.kept("part.v") is None


@pytest.mark.parametrize(("body", "expected"), [("self.v.clear()", True), ("del self.v[:]", True), ("self.v", False)])
def test_clearing_is_no_reading(body: str, expected: bool, tmp_path: Path) -> None:
    reads, sites = reads_of(body, tmp_path)
    assert reads.clears(sites[0], "v") is expected


def test_code_without_source_may_reach_a_result(tmp_path: Path) -> None:
    reads, _ = reads_of("print(self.v)", tmp_path)
    (tmp_path / "code.py").unlink()
    assert reads.kept("part.v") is None
