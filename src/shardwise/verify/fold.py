"""From the mesh of a run to the smallest one that still exercises its layout: pure integers.

Axes stay what they are, of one rank or of several. 512 GPUs become 16 processes:

>>> mesh = MeshShape(pp=8, dp_shard=8, tp=8)
>>> folded = fold_mesh(mesh, num_kv_heads=8)
>>> folded.sizes, folded.world_size
((4, 1, 2, 1, 2), 16)
>>> fold_micro_batches(64, num_ranks=8, num_folded_ranks=4)
12
"""

from __future__ import annotations

from typing import Final

from shardwise.config import ConfigError
from shardwise.layout.mesh_shape import AXES, MeshShape

MOST_PROCESSES: Final = 16
MOST_VIRTUAL_STAGES: Final = 2
# With four ranks a pipeline has a first, a last, and two whose neighbours are both inner ones or ends.
_MOST_PP: Final = 4
# What is made smaller where the product is still too large: axis, from, to; in this order. A mesh in which all five
# axes are in use does not fit otherwise than without its replicas.
_SHRINKS: Final = (("tp", 4, 2), ("pp", 4, 3), ("pp", 3, 2), ("dp_replicate", 2, 1))


def fold_mesh(mesh: MeshShape, num_kv_heads: int | None = None, most: int = MOST_PROCESSES) -> MeshShape:
    """The smallest mesh in which every axis of several ranks has several.

    Such an axis gets 2, but `pp` up to 4, whose schedule has inner ranks. `tp` gets 4 where its ranks share KV heads of
    which there are several, so that some share one and some do not.

    Args:
        mesh: of the run.
        num_kv_heads: of the model; None where that plays no part.
        most: ranks of the folded mesh.

    Raises:
        ConfigError: it does not fit into `most`.
    """
    shares_some = num_kv_heads is not None and 1 < num_kv_heads < mesh.tp
    limits = {**dict.fromkeys(AXES, 2), "pp": _MOST_PP, "tp": 4 if shares_some else 2}
    sizes = {axis: min(size, limits[axis]) for axis, size in zip(AXES, mesh.sizes, strict=True)}
    for axis, size, smaller in _SHRINKS:
        # Replicas go only where nothing else can, and never for a limit that the user has set.
        may_shrink = smaller > 1 or most == MOST_PROCESSES
        if may_shrink and sizes[axis] == size and MeshShape(**sizes).world_size > most:
            sizes[axis] = smaller
    folded = MeshShape(**sizes)
    if folded.world_size > most:
        used = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
        raise ConfigError(
            f"{most} processes do not hold {used} = {folded.world_size}, which the layout's axes need at least; "
            f"allow {folded.world_size}"
        )
    return folded


def fold_micro_batches(num_micro_batches: int, num_ranks: int, num_folded_ranks: int) -> int:
    """As many micro-batches a step as bring a folded pipeline into its steady state: 2 p + 1 or a few more.

    Even numbers stay even and odd ones odd; multiples of the pipeline's ranks stay multiples where both can be.
    """
    enough = 2 * num_folded_ranks + 1
    if num_micro_batches <= enough:
        return num_micro_batches
    fits = range(enough, enough + 2 * num_folded_ranks)
    same_parity = [number for number in fits if number % 2 == num_micro_batches % 2]
    is_multiple = num_micro_batches % num_ranks == 0
    alike = [number for number in same_parity if (number % num_folded_ranks == 0) == is_multiple]
    return min(num_micro_batches, (alike or same_parity)[0])


def fold_virtual_stages(virtual_stages: int) -> int:
    """Stages a rank: several stay several.

    >>> [fold_virtual_stages(number) for number in (1, 2, 6)]
    [1, 2, 2]
    """
    return min(virtual_stages, MOST_VIRTUAL_STAGES)
