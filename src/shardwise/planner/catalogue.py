"""The devices that are for sale, by name, from `catalogue.toml`, each figure with its source.

>>> find_gpu("NVIDIA A100-SXM4-80GB").name
'a100-80'
>>> find_gpu("h100").peak_flops_per_s["bf16"]
989000000000000.0
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from shardwise.config import ConfigError
from shardwise.planner.hardware import GIB, Fitted, Gpu

# Words of a device's name that say nothing of which it is.
_NOISE: Final = frozenset(
    {"nvidia", "amd", "instinct", "geforce", "tesla", "quadro", "rtx", "gpu", "generation", "gb", "superchip", "nvl72"}
)
_FORMS: Final = re.compile(r"sxm\d?|pcie|nvl|hbm\d\w?|oam|leonardo")
_SIZE: Final = re.compile(r"(\d{1,3})(?:gb|gib|g)?")
# More is the memory of the host's half of a superchip.
_MAX_SIZE_GB: Final = 300


@dataclass(frozen=True)
class Entry:
    """One device as `catalogue.toml` has it.

    Attributes:
        model: the words that a name must have, and no others but noise, a size and forms.
        sold_gb: the memory that its name gives.
        forms: words that tell it from others of its model.
        sources: where each figure is from.
    """

    gpu: Gpu
    model: frozenset[str]
    sold_gb: int
    forms: frozenset[str]
    sources: Mapping[str, str]


@dataclass(frozen=True)
class _Words:
    """A name taken apart."""

    model: frozenset[str]
    size_gb: int | None
    forms: frozenset[str]


def find_gpu(name: str) -> Gpu:
    """The device that a name means: the catalogue's own, a driver's, or a paper's.

    Args:
        name: such as `h100`, `A100-80GB`, `NVIDIA GeForce RTX 4090`; where it leaves the size or the form open, the
            usual one is taken.

    Raises:
        ConfigError: no such device is known.
    """
    found = known_gpu(name)
    if found is not None:
        return found
    close = difflib.get_close_matches(name.lower(), GPUS, n=1, cutoff=0.5)
    cure = f"did you mean {close[0]}?" if close else f"use one of {', '.join(GPUS)}"
    raise ConfigError(f"{name} is no device that the planner knows; {cure}")


def known_gpu(name: str) -> Gpu | None:
    """The same, or None where none is known.

    >>> known_gpu("NVIDIA RTX A4000") is None
    True
    """
    if name in ENTRIES:
        return ENTRIES[name].gpu
    words = _words_of(name)
    alike = [entry for entry in ENTRIES.values() if entry.model == words.model]
    return min(alike, key=lambda entry: _distance(entry, words)).gpu if alike else None


def _distance(entry: Entry, words: _Words) -> tuple[float, bool, int]:
    """Of a device of the right model: the size counts first, then whether a form is named, then one that is not."""
    size = 0.0 if words.size_gb is None else abs(entry.sold_gb / words.size_gb - 1)
    return size, bool(words.forms) and not words.forms & entry.forms, len(words.forms - entry.forms)


def _words_of(name: str) -> _Words:
    """Leave out what stands in brackets and the count of `8xA100`."""
    bare = re.sub(r"\(.*?\)", " ", name.lower())
    bare = re.sub(r"^\s*\d+\s*x\s*", "", bare)
    words = [word for word in re.findall(r"[a-z0-9]+", re.sub(r"rtx(?=\d)", "rtx ", bare)) if word not in _NOISE]
    sizes = [match for word in words if (match := _SIZE.fullmatch(word))]
    forms = frozenset(word for word in words if _FORMS.fullmatch(word))
    used = forms | {match[0] for match in sizes}
    sizes_gb = [int(match[1]) for match in sizes if int(match[1]) <= _MAX_SIZE_GB]
    return _Words(frozenset(words) - used, sizes_gb[0] if sizes_gb else None, forms)


def _read_entries(path: Path) -> Mapping[str, Entry]:
    """All devices of a file, in its order."""
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    sources = tables.pop("sources")
    return MappingProxyType({name: _entry(name, table, sources) for name, table in tables.items()})


def _entry(name: str, table: Mapping[str, Any], sources: Mapping[str, str]) -> Entry:
    device = Gpu(
        name=name,
        memory_bytes=table["memory_gib"] * GIB,
        memory_bytes_per_s=table["memory_gb_per_s"] * 1e9,
        peak_flops_per_s=_tera(table["peak_tflops"]),
        ceiling_flops_per_s=_tera(table.get("ceiling_tflops", {})),
        link_bytes_per_s=table.get("link_gb_per_s", 0.0) * 1e9,
        link_domain=table.get("link_domain", 1),
        has_pairwise_links=table.get("has_pairwise_links", False),
        host_bytes_per_s=table["host_gb_per_s"] * 1e9,
        nic_bytes_per_s=table["nic_gb_per_s"] * 1e9,
        num_cores=table["num_cores"],
        price_per_hour=table.get("price_per_hour", 0.0),
        fitted=Fitted(**table.get("fitted", {})),
    )
    return Entry(
        gpu=device,
        model=frozenset(table["model"].split()),
        sold_gb=table["sold_gb"],
        forms=frozenset(table["forms"]),
        sources=MappingProxyType({figure: sources[key] for figure, key in table["source"].items()}),
    )


def _tera(flops: Mapping[str, float]) -> dict[str, float]:
    return {dtype: value * 1e12 for dtype, value in flops.items()}


ENTRIES: Final = _read_entries(Path(__file__).with_name("catalogue.toml"))
GPUS: Final[Mapping[str, Gpu]] = MappingProxyType({name: entry.gpu for name, entry in ENTRIES.items()})
