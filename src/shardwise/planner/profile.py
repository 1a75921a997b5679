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
from typing import Annotated, Any, ClassVar, Final

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from shardwise.config.errors import ConfigError
from shardwise.config.untrusted_files import UntrustedFileError, mismatch, parse_json, read_text
from shardwise.config.written_files import write_whole

SCHEMA: Final = 1
"""The version of the file's format; it changes when a key goes or changes its meaning."""
_FIX: Final = "run shardwise doctor --calibrate"
Count = Annotated[int, Field(ge=0, lt=2**63)]
Measured = Annotated[float, Field(ge=0, lt=1e24, allow_inf_nan=False)]


class _Checked:
    """Have a file's values checked: the fields and no others, of their own types."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, kw_only=True)
class MatmulTime(_Checked):
    """Time a product [m, k] by [k, n] on one rank, while its neighbours compute too."""

    dtype: str
    m: Count
    n: Count
    k: Count
    seconds: Measured


@dataclass(frozen=True, kw_only=True)
class _PassesTime(_Checked):
    """Time a unit forward and backward."""

    dtype: str
    forward_s: Measured
    backward_s: Measured


@dataclass(frozen=True, kw_only=True)
class AttentionTime(_PassesTime):
    """Time causal attention of `num_heads` heads and one sequence."""

    num_heads: Count
    head_dim: Count
    seq_len: Count


@dataclass(frozen=True, kw_only=True)
class BlockTime(_PassesTime):
    """Time one block of our decoder, with all its kernels, of one sequence."""

    seq_len: Count
    hidden_size: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    ffn_size: Count


@dataclass(frozen=True, kw_only=True)
class HeadTime(_PassesTime):
    """Time the last norm, the head and the loss of `num_tokens` tokens."""

    num_tokens: Count
    hidden_size: Count
    vocab_size: Count


@dataclass(frozen=True, kw_only=True)
class CollectiveTime(_Checked):
    """Time one collective (all_gather, reduce_scatter, all_reduce, all_to_all or send) on a buffer of `num_bytes`.

    Where the group of `num_ranks` is not all ranks, the others form equal groups that are equally busy.
    """

    op: str
    num_ranks: Count
    num_bytes: Count
    seconds: Measured


@dataclass(frozen=True, kw_only=True)
class Profile(_Checked):
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
    num_ranks: Count
    num_threads: Count
    memory_bytes: Measured
    matmuls: tuple[MatmulTime, ...] = ()
    attentions: tuple[AttentionTime, ...] = ()
    blocks: tuple[BlockTime, ...] = ()
    heads: tuple[HeadTime, ...] = ()
    collectives: tuple[CollectiveTime, ...] = ()
    stream_bytes_per_s: Measured = 0.0
    step_bytes_per_s: Measured = 0.0
    call_s: Measured = 0.0
    copies_bytes_per_s: tuple[tuple[str, Measured], ...] = ()
    disk_read_bytes_per_s: Measured = 0.0
    disk_write_bytes_per_s: Measured = 0.0
    hidden_share: Measured | None = None
    host_memory_bytes: Measured = 0.0
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
            return TypeAdapter(Profile).validate_json(json.dumps(values))
        except ValidationError as error:
            raise ConfigError("profile-damaged", f"the profile is damaged ({mismatch(error)}); {_FIX}") from error

    def copy_bytes_per_s(self, source: str, target: str) -> float:
        """Return the speed of a copy between two memories; 0 where it was not measured."""
        return dict(self.copies_bytes_per_s).get(f"{source}->{target}", 0.0)


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
