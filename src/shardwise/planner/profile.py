"""Hold what a machine was measured to do: tables of kernels, copies and collectives, written and read as JSON.

`shardwise doctor --calibrate` writes one; the planner looks a time up here before it estimates one.

>>> profile = Profile(device="cpu", num_ranks=2, num_threads=1, memory_bytes=8e9)
>>> Profile.from_json(profile.to_json()) == profile
True
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

from shardwise.config.errors import ConfigError
from shardwise.config.resolve import shown_value
from shardwise.config.untrusted_files import UntrustedFileError, parse_json, read_text
from shardwise.config.written_files import write_whole

SCHEMA: Final = 1
"""The version of the file's format; it changes when a key goes or changes its meaning."""
_FIX: Final = "run shardwise doctor --calibrate"
_MAX_MEASURED: Final = 1e24

Row = TypeVar("Row")


@dataclass(frozen=True, kw_only=True)
class MatmulTime:
    """Time a product [m, k] by [k, n] on one rank, while its neighbours compute too."""

    dtype: str
    m: int
    n: int
    k: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class _PassesTime:
    """Time a unit forward and backward."""

    dtype: str
    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True)
class AttentionTime(_PassesTime):
    """Time causal attention of `num_heads` heads and one sequence."""

    num_heads: int
    head_dim: int
    seq_len: int


@dataclass(frozen=True, kw_only=True)
class BlockTime(_PassesTime):
    """Time one block of our decoder, with all its kernels, of one sequence."""

    seq_len: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int


@dataclass(frozen=True, kw_only=True)
class HeadTime(_PassesTime):
    """Time the last norm, the head and the loss of `num_tokens` tokens."""

    num_tokens: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class CollectiveTime:
    """Time one collective (all_gather, reduce_scatter, all_reduce, all_to_all or send) on a buffer of `num_bytes`.

    Where the group of `num_ranks` is not all ranks, the others form equal groups that are equally busy.
    """

    op: str
    num_ranks: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Hold the measurements of one machine, with `num_ranks` ranks at work at once.

    Attributes:
        device: such as `cpu` or the GPU's name.
        num_ranks: processes that were at work together; `num_threads` of each on a CPU.
        memory_bytes: of a GPU; on a CPU, of the host, which the ranks share.
        stream_bytes_per_s: what an element-wise kernel of one rank reads and writes.
        step_bytes_per_s: all that an optimizer's fused step of one rank reads and writes.
        call_s: seconds that a kernel's call takes beyond its work.
        copies_bytes_per_s: by (from, to), such as `device->host`.
        disk_read_bytes_per_s, disk_write_bytes_per_s: of one rank, without the page cache.
        hidden_share: share of a collective's time that computing beside it hides: 1 where neither slows the other, 0
            where they take turns.
    """

    device: str
    num_ranks: int
    num_threads: int
    memory_bytes: float
    matmuls: tuple[MatmulTime, ...] = ()
    attentions: tuple[AttentionTime, ...] = ()
    blocks: tuple[BlockTime, ...] = ()
    heads: tuple[HeadTime, ...] = ()
    collectives: tuple[CollectiveTime, ...] = ()
    stream_bytes_per_s: float = 0.0
    step_bytes_per_s: float = 0.0
    call_s: float = 0.0
    copies_bytes_per_s: tuple[tuple[str, float], ...] = ()
    disk_read_bytes_per_s: float = 0.0
    disk_write_bytes_per_s: float = 0.0
    hidden_share: float | None = None
    host_memory_bytes: float = 0.0
    torch_version: str = ""

    def to_json(self) -> str:
        """Write it as text that `from_json` reads back equal."""
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read a profile that was written as text.

        Raises:
            ConfigError: it is no profile, or one of another schema.
        """
        try:
            values = parse_json(text, "the profile", _FIX)
            schema = values.pop("schema", None)
        except (ValueError, AttributeError, TypeError) as error:
            raise ConfigError("profile-not-object", f"a profile must be a JSON object; {_FIX}") from error
        if schema != SCHEMA:
            raise ConfigError("profile-schema", f"the profile has schema {schema} and must have {SCHEMA}; {_FIX}")
        try:
            for key, row_class in TABLES.items():
                values[key] = tuple(_checked(row_class(**row)) for row in values.get(key, ()))
            copies = values.get("copies_bytes_per_s", ())
            values["copies_bytes_per_s"] = tuple((name, _measured(speed)) for name, speed in copies)
            return _checked(cls(**values))
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigError("profile-damaged", f"the profile is damaged ({error}); {_FIX}") from error

    def copy_bytes_per_s(self, source: str, target: str) -> float:
        """Return the speed of a copy between two memories; 0 where it was not measured."""
        return dict(self.copies_bytes_per_s).get(f"{source}->{target}", 0.0)


def _checked(row: Row) -> Row:
    """Return a row of a file, of whose fields none may be of another class, negative or infinite."""
    for field in dataclasses.fields(row):  # type: ignore[arg-type]
        value, annotation = getattr(row, field.name), str(field.type)
        if annotation in ("int", "float") or (annotation == "float | None" and value is not None):
            _measured(value, int if annotation == "int" else (int, float), field.name)
        elif annotation == "str" and not isinstance(value, str):
            raise ValueError(f"{field.name} is {shown_value(value)}, no text")
    return row


def _measured(value: Any, kinds: type | tuple[type, ...] = (int, float), name: str = "a copy's speed") -> Any:
    """Return what was measured, or raise a ValueError where nothing measures so."""
    is_number = isinstance(value, kinds) and not isinstance(value, bool)
    if not is_number or not 0 <= float(value) < _MAX_MEASURED:
        raise ValueError(f"{name} is {shown_value(value)}, nothing that is measured")
    return value


TABLES: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        "matmuls": MatmulTime,
        "attentions": AttentionTime,
        "blocks": BlockTime,
        "heads": HeadTime,
        "collectives": CollectiveTime,
    }
)
"""The class of a row of each of a profile's tables, by the field's name."""


def profile_path(folder: Path, device: str, num_ranks: int) -> Path:
    """Return the path in the cache folder of the profile of `num_ranks` ranks on a device.

    >>> print(profile_path(Path("cache"), "NVIDIA H200", 8))
    cache/profiles/nvidia-h200-8.json
    """
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    return folder / "profiles" / f"{slug}-{num_ranks}.json"


def write_profile(profile: Profile, folder: Path) -> Path:
    """Write a profile to its path, wholly or not at all, and return the path.

    Raises:
        OSError: the folder cannot be written to.
    """
    path = profile_path(folder, profile.device, profile.num_ranks)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, profile.to_json(), is_synced=True)
    return path


def find_profile(folder: Path, device: str, num_ranks: int) -> Profile | None:
    """Read from the cache `folder` the profile of a device with `num_ranks` ranks, else with the nearest number.

    It is None where there is none.

    Raises:
        ConfigError: the file is damaged or old.
    """
    path = profile_path(folder, device, num_ranks)
    stem = path.stem.removesuffix(str(num_ranks))
    ends = [other.stem.removeprefix(stem) for other in path.parent.glob(f"{stem}*.json")]
    nearest = min((int(end) for end in ends if end.isdecimal()), key=lambda n: (abs(n - num_ranks), n), default=None)
    if nearest is None:
        return None
    nearest_path = profile_path(folder, device, nearest)
    try:
        return Profile.from_json(read_text(nearest_path, _FIX))
    except (ConfigError, UntrustedFileError) as error:
        raise ConfigError(error.code, f"{nearest_path}: {error}") from error
