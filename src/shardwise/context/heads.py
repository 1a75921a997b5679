"""Which heads each of the ranks has that exchange heads for tokens (Ulysses; Jacobs et al. 2023, arXiv 2309.14509).

Neighbouring ranks of the `cp` axis, `heads_over` of them, make a team: each gives the others the heads that are theirs,
of its own tokens, and gets its own heads of all the team's tokens. Where there are fewer KV heads than ranks, several
get the same one, and their gradients are summed.

>>> [heads_of(8, 4, index) for index in range(4)], [heads_of(2, 4, index) for index in range(4)]
([(0, 2), (2, 2), (4, 2), (6, 2)], [(0, 1), (0, 1), (1, 1), (1, 1)])
"""

from __future__ import annotations

from shardwise.config import ConfigError, ContextConfig


def team_size(section: ContextConfig, degree: int) -> int:
    """Neighbouring ranks that exchange heads; 1 where none do.

    Args:
        section: of the config.
        degree: ranks of the `cp` axis.
    """
    return section.heads_over or (degree if section.transport == "ulysses" else 1)


def heads_of(num_heads: int, size: int, index: int) -> tuple[int, int]:
    """The first head and the number of heads of a rank, of query heads or of key and value heads.

    Args:
        num_heads: before the exchange.
        size: of the team.
        index: of the rank in its team.
    """
    if num_heads < size:
        return index * num_heads // size, 1
    return index * (num_heads // size), num_heads // size


def check_team(section: ContextConfig, degree: int) -> None:
    """Raise unless the ranks of the axis make teams.

    Args:
        section: of the config.
        degree: ranks of the `cp` axis.

    Raises:
        ConfigError: `heads_over` does not divide them, or is not all of them for ulysses.
    """
    size = team_size(section, degree)
    if section.transport == "ulysses" and size != degree:
        raise ConfigError(
            f"context.heads_over={size} with transport=ulysses is not all ranks of mesh.cp={degree}; leave it out, or "
            "set transport=ring for teams that exchange heads inside a ring"
        )
    if degree % size:
        legal = [each for each in range(1, degree + 1) if degree % each == 0]
        raise ConfigError(
            f"context.heads_over={size} does not divide mesh.cp={degree}; nearest legal: {_nearest(size, legal)}"
        )


def check_heads(num_heads: int, num_kv_heads: int, section: ContextConfig, degree: int, tp: int = 1) -> None:
    """Raise unless a model's heads can be exchanged over the ranks of the `cp` axis.

    Args:
        num_heads: query heads of the whole model.
        num_kv_heads: key and value heads of the whole model.
        section: of the config.
        degree: ranks of the `cp` axis.
        tp: tensor-parallel ranks, each of which has its part of the heads.

    Raises:
        ConfigError: the teams do not divide the query heads, or they and the KV heads do not divide each other.
    """
    check_team(section, degree)
    size = team_size(section, degree)
    own, own_kv = num_heads // tp, max(1, num_kv_heads // tp)
    if _fits(own, own_kv, size):
        return
    is_all = section.transport == "ulysses"
    legal = [each for each in range(1, own + 1) if _fits(own, own_kv, each) and (is_all or degree % each == 0)]
    name = "mesh.cp" if is_all else "context.heads_over"
    of_rank = f" of each of tp={tp} ranks" if tp > 1 else ""
    if own % size:
        rule = f"does not divide {own} query heads{of_rank}"
    else:
        rule = f"and {own_kv} KV heads{of_rank} do not divide each other"
    other = "; or set context.transport=ring, which exchanges no heads" if is_all else ""
    raise ConfigError(f"{name}={size} {rule}; nearest legal: {_nearest(size, legal)}{other}")


def _fits(num_heads: int, num_kv_heads: int, size: int) -> bool:
    return num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0)


def _nearest(given: int, legal: list[int]) -> str:
    """The next one on each side."""
    below, above = [each for each in legal if each < given], [each for each in legal if each > given]
    return ", ".join(map(str, below[-1:] + above[:1]))
