"""Record the ops that made and wrote a tensor's storage (its tape), so that they can be run again.

The tape is neither a graph of derivatives nor a copy: it holds op names, scalars and the places of random generators.
A replay yields the same bits in any process, because the ops run in their first order from the same inputs.

An `OpHistory` is an attribute of its storage and ends with it. The storage's memory may be freed before that
(`is_released`). Logical clocks (Lamport 1978) keep the order without a counter: an op is later than every op that it
follows on a storage that it reads or writes.

>>> aten = torch.ops.aten
>>> draw = RandomDraw(state=torch.default_generator.get_state())
>>> x = torch.randn(3)
>>> record(aten.randn.default, ([3],), {}, [x], draw=draw)
>>> y = x * 2
>>> record(aten.mul.Tensor, (x, 2), {}, [y])
>>> torch.equal(replay(RecordedView.of(y)), y)
True
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from shardwise.runtime.keyed_rng import derive_seed
from shardwise.runtime.torch_private import OpOverload, pytree, written_tensors

# A tensor that is in memory anyway is not recorded if that would copy larger unrecorded inputs onto the tape.
MAX_CONSTANT_BYTES: Final = 2**20

_MAKERS_OF_UNSET: Final = frozenset(
    f"aten::{name}" for name in ("empty", "empty.memory_format", "empty_like", "empty_strided", "new_empty")
)
_OVERWRITING: Final = frozenset(
    f"aten::{name}"
    for name in (
        *("zero_", "fill_.Scalar", "fill_.Tensor", "copy_", "normal_", "uniform_", "random_", "random_.from"),
        *("random_.to", "bernoulli_.float", "bernoulli_.Tensor", "exponential_", "log_normal_", "cauchy_"),
    )
)
_SLOT: Final = "_shardwise_history"


@dataclass
class RandomDraw:
    """Says where a random op's numbers start: at a generator's state, or else at a seed hashed with a key."""

    state: Tensor | None = None
    seed: int = 0
    key: tuple[int | str, ...] | None = None

    @property
    def is_unnamed(self) -> bool:
        """Return whether it has neither a generator's state nor a key yet."""
        return self.state is None and self.key is None

    def start(self, generator: torch.Generator) -> None:
        """Put a generator where the draw begins."""
        if self.state is not None:
            generator.set_state(self.state)
        elif self.key is not None:
            generator.manual_seed(derive_seed(self.seed, *self.key))
        else:
            raise ValueError("a random op has no key yet; call name_draws first")


@dataclass(eq=False)
class OpHistory:
    """Holds the ops on one storage, oldest first; the first op made it.

    Attributes:
        device: on which it was made.
        num_bytes: of the storage.
        session: the recorder; other sessions do not use it, since they may have written the storage unrecorded.
    """

    device: torch.device
    num_bytes: int
    session: object
    ops: list[RecordedOp] = field(default_factory=list)
    clock: int = 0

    @staticmethod
    def find(tensor: Tensor, session: object) -> OpHistory | None:
        """Return the history of a tensor's storage, if the session recorded it, else None."""
        found = _history(tensor)
        return found if found is not None and found.session is session else None

    def ops_before(self, clock: int) -> Iterator[RecordedOp]:
        """Iterate over the ops that the storage's content before a clock depends on, the newest first."""
        for op in reversed(self.ops):
            if op.clock < clock:
                yield op
                if op.clears is self:
                    yield self.ops[0]
                    return


@dataclass(frozen=True)
class RecordedView:
    """Describes a tensor's place in a storage that has a history."""

    history: OpHistory
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor, session: object = None) -> RecordedView:
        """Return the place of a tensor.

        Raises:
            ValueError: the session has not recorded its storage.
        """
        history = OpHistory.find(tensor, session)
        if history is None:
            raise ValueError("the tensor has no history")
        return cls(history, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    @property
    def is_whole(self) -> bool:
        """Return whether it covers the storage, in order."""
        numel = torch.Size(self.size).numel()
        order = tuple(itertools.accumulate(reversed(self.size[1:]), operator.mul, initial=1))[::-1]
        return numel * self.dtype.itemsize == self.history.num_bytes and (self.stride == order or not self.size)

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor at this place of another storage of the same size."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(eq=False)
class RecordedOp:
    """Describes one op on the tape.

    Attributes:
        func: the op.
        args: its arguments, each tensor a `RecordedView`, or itself where it is a constant.
        kwargs: its keyword arguments, in the same form.
        clock: later than that of every op that it follows.
        default_dtype: torch's at that time.
        reads: the views in the arguments, written ones included.
        makes: which of its outputs are new storages.
        clears: the storage whose earlier content it overwrites.
        draw: of a random op.
        has_constants: whether it reads an unrecorded tensor of more than one element.
    """

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    clock: int
    default_dtype: torch.dtype
    reads: tuple[RecordedView, ...]
    makes: tuple[tuple[int, OpHistory], ...]
    clears: OpHistory | None
    draw: RandomDraw | None
    has_constants: bool

    @property
    def histories(self) -> set[OpHistory]:
        """Return the histories of all storages that it reads, writes or makes."""
        return {view.history for view in self.reads} | {history for _, history in self.makes}

    @property
    def is_from_elsewhere(self) -> bool:
        """Return whether another process that runs the same code may get other values."""
        return self.has_constants or (self.draw is not None and self.draw.state is not None)

    @property
    def sources(self) -> list[OpHistory]:
        """Return the histories of all storages whose content it needs."""
        return [view.history for view in self.reads if view.history is not self.clears]

    def run(self, storages: dict[OpHistory, torch.UntypedStorage]) -> None:
        """Run it again on `storages`, and add the storages that it makes."""
        args, kwargs = pytree.tree_map_only(
            RecordedView, lambda view: view.on(storages[view.history]), (self.args, dict(self.kwargs))
        )
        device = (self.makes[0][1] if self.makes else self.reads[0].history).device
        with _default_dtype(self.default_dtype):
            outputs = pytree.tree_leaves(run_drawing(self.func, args, kwargs, self.draw, device))
        for index, history in self.makes:
            if self.func.name() in _MAKERS_OF_UNSET:
                outputs[index].zero_()  # never written, it is otherwise something else on every rank
            storages[history] = outputs[index].untyped_storage()


def record(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    outputs: Sequence[Any],
    *,
    draw: RandomDraw | None = None,
    session: object = None,
) -> None:
    """Put an op that has run, or is to run later, onto the tape.

    Args:
        func: the op.
        args: its arguments; a tensor on meta stands for its shape alone.
        kwargs: its keyword arguments, in the same form.
        outputs: the leaves of what it returned; new storages among them begin a history.
        draw: where a random op's numbers start.
        session: the recorder.
    """
    inputs = tensors_in(args, kwargs)
    written = written_tensors(func, args, kwargs)
    place = {id(each): RecordedView.of(each, session) for each in inputs if OpHistory.find(each, session) is not None}
    constants = [each for each in inputs if id(each) not in place and not each.is_meta]
    is_at_hand = not any(is_released(each) for each in written)
    if is_at_hand and any(_is_no_constant(each, written) for each in constants):
        for each in written:
            forget(each)
        return
    makes = tuple(
        (index, OpHistory(output.device, output.untyped_storage().nbytes(), session))
        for index, output in enumerate(outputs)
        if isinstance(output, Tensor) and _is_new(output, inputs, session)
    )
    changed = {place[id(each)].history for each in written if id(each) in place}
    if not makes and not changed:
        return
    args, kwargs = pytree.tree_map_only(Tensor, lambda each: place.get(id(each)) or _frozen(each), (args, dict(kwargs)))
    reads = tuple(place.values())
    clock = 1 + max((view.history.clock for view in reads), default=0)
    clears = _cleared(func, [place.get(id(each)) for each in written], reads)
    has_constants = any(each.numel() > 1 for each in constants)
    op = RecordedOp(func, args, kwargs, clock, torch.get_default_dtype(), reads, makes, clears, draw, has_constants)
    for index, history in makes:
        setattr(outputs[index].untyped_storage(), _SLOT, history)
    for history in op.histories:
        history.clock = clock
    for history in {*changed, *(new for _, new in makes)}:
        history.ops.append(op)


def is_recorded(tensor: Tensor) -> bool:
    """Return whether a tensor's making was recorded; for one made just now, whether ops are being recorded."""
    return _history(tensor) is not None


def is_released(tensor: Tensor) -> bool:
    """Return whether a recorded tensor's memory is freed, so that its values are on the tape alone."""
    history = None if tensor.is_meta else _history(tensor)
    return history is not None and tensor.untyped_storage().nbytes() < history.num_bytes


def forget(tensor: Tensor) -> None:
    """Drop a tensor's history: its values are in memory, and later ops on it are not recorded."""
    if _history(tensor) is not None:
        delattr(tensor.untyped_storage(), _SLOT)


def tensors_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among an op's arguments."""
    return [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, Tensor)]


def ops_after(view: RecordedView) -> list[RecordedOp]:
    """Return the ops that a view's content depends on, in their order."""
    found: set[RecordedOp] = set()
    pending = [(view.history, view.history.clock + 1)]
    while pending:
        history, before = pending.pop()
        for op in history.ops_before(before):
            if op not in found:
                found.add(op)
                pending += [(source, op.clock) for source in op.sources]
    return sorted(found, key=lambda op: op.clock)


def name_draws(view: RecordedView, keys: Iterable[tuple[int | str, ...]]) -> None:
    """Give keys, in order, to the random ops that a view depends on and that have none yet."""
    draws = [op.draw for op in ops_after(view) if op.draw is not None and op.draw.is_unnamed]
    for draw, key in zip(draws, keys, strict=False):
        draw.key = key


@torch.no_grad()
def replay(view: RecordedView) -> Tensor:
    """Run again the ops that a view's content depends on; each intermediate's memory is freed after its last use."""
    ops = ops_after(view)
    last_use = {history: index for index, op in enumerate(ops) for history in op.histories}
    storages: dict[OpHistory, torch.UntypedStorage] = {}
    for index, op in enumerate(ops):
        op.run(storages)
        for history in op.histories:
            if last_use[history] == index and history is not view.history:
                storages.pop(history, None)
    return view.on(storages[view.history])


def run_drawing(
    func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], draw: RandomDraw | None, device: torch.device
) -> Any:
    """Call an op whose random numbers start at `draw`; torch's own generator keeps its state.

    Args:
        func: the op.
        args: its arguments.
        kwargs: its keyword arguments; a `generator` among them is replaced.
        draw: None runs the op as it is.
        device: whose default generator an op without `generator` uses.
    """
    if draw is None:
        return func(*args, **kwargs)
    if kwargs.get("generator") is not None:
        own = torch.Generator(device)
        draw.start(own)
        return func(*args, **{**kwargs, "generator": own})
    generator = default_generator(device)
    before = generator.get_state()
    try:
        draw.start(generator)
        return func(*args, **kwargs)
    finally:
        generator.set_state(before)


def default_generator(device: torch.device) -> torch.Generator:
    """Return the generator that ops on a device use if they are given none."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _cleared(
    func: OpOverload, written: Sequence[RecordedView | None], reads: Sequence[RecordedView]
) -> OpHistory | None:
    """Return the history of the storage that an op overwrites without reading it, else None."""
    if func.name() not in _OVERWRITING or len(written) != 1 or written[0] is None or not written[0].is_whole:
        return None
    history = written[0].history
    return history if sum(view.history is history for view in reads) == 1 else None


def _history(tensor: Tensor) -> OpHistory | None:
    if tensor.layout is not torch.strided:
        return None
    return getattr(tensor.untyped_storage(), _SLOT, None)


def _is_new(output: Tensor, inputs: Sequence[Tensor], session: object) -> bool:
    if output.is_meta or output.layout is not torch.strided or OpHistory.find(output, session) is not None:
        return False
    storage = output.untyped_storage()
    return all(each.layout is not torch.strided or each.untyped_storage() is not storage for each in inputs)


def _is_no_constant(tensor: Tensor, written: Sequence[Tensor]) -> bool:
    """Return whether an unrecorded input was overwritten, or is too large to keep for a tensor in memory."""
    if tensor.layout is not torch.strided or any(each is tensor for each in written):
        return True
    return tensor.untyped_storage().nbytes() > MAX_CONSTANT_BYTES


def _frozen(tensor: Tensor) -> Tensor:
    """Return a copy of the tensor as it is now; one on meta is returned as it is."""
    if tensor.is_meta:
        return tensor
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(tensor.untyped_storage().clone(), tensor.storage_offset(), tensor.shape, tensor.stride())


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
