"""Every operator on a tensor of the virtual device: its shapes now, its values when its stream comes to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from device.virtual.streams import Scheduler

DEVICE = torch.device("cuda", 0)
# Their results' shapes or values depend on the values of their inputs: the host waits for those.
READS_VALUES = frozenset(
    [
        "_local_scalar_dense",
        "equal",
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "repeat_interleave",
        "bincount",
        "is_nonzero",
        "nonzero_static",
        "_assert_async",
    ]
)
INDEXED_BY_MASK = frozenset(["index", "index_put", "index_put_", "_unsafe_index", "_unsafe_index_put"])


@dataclass(frozen=True)
class Region:
    """Where a tensor's values are and how they are read; keeps neither alive, as enqueued kernels do not on a GPU."""

    native: Any
    address: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, native: Any, tensor: Tensor) -> Region:
        return cls(native, *native.region(tensor), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    def open(self) -> Tensor:
        """The values, as a tensor of the CPU over their memory."""
        return self.native.open_view(self.address, self.offset, list(self.shape), list(self.strides), self.dtype)


@dataclass(frozen=True)
class Shaped:
    """What torch says of an operator's results before there are values.

    Attributes:
        results: a tuple or list of metas and other values, or one; the metas are never written.
        grown: the shapes that arguments get, by their index, where these are others: an `out` may grow.
    """

    results: Any
    grown: dict[int, torch.Size]


@dataclass(frozen=True)
class Signature:
    """What of an operator's schema matters: for each result, the argument that it is, if it is one."""

    name: str
    returned_arguments: tuple[tuple[int, str] | None, ...]
    scalar_positions: frozenset[int]  # of arguments that are tensors by the schema

    @property
    def is_in_place(self) -> bool:
        return self.name.endswith("_") and len(self.returned_arguments) == 1 and self.returned_arguments[0] is not None


@cache
def signature(op: Any) -> Signature:
    by_label = {}
    for index, argument in enumerate(op._schema.arguments):
        for label in argument.alias_info.before_set if argument.alias_info is not None else ():
            by_label[label] = (index, argument.name)
    returned = []
    for result in op._schema.returns:
        labels = result.alias_info.before_set if result.alias_info is not None else ()
        returned.append(next((by_label[label] for label in labels if label in by_label), None))
    tensors = frozenset(index for index, argument in enumerate(op._schema.arguments) if str(argument.type) == "Tensor")
    return Signature(op._schema.name.removeprefix("aten::"), tuple(returned), tensors)


@contextmanager
def below_autograd() -> Iterator[None]:
    with torch._C._AutoDispatchBelowAutograd(), _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def foreach_operators() -> Iterator[Any]:
    """torch's operators over lists of tensors."""
    for name in sorted(name for name in dir(torch._C._VariableFunctions) if name.startswith("_foreach_")):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            if not overload.endswith("out"):
                yield getattr(packet, overload)


def is_on_device(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "cuda"


@dataclass
class Call:
    """One call of an operator, its arguments flat."""

    op: Any
    signature: Signature
    flat: list[Any]
    spec: Any
    regions: dict[int, Region]
    seed: int | None = None  # of what draws numbers: they are those of when it was enqueued

    def with_values(self, replace: Callable[[int, Any], Any]) -> Any:
        """The results of the operator over other arguments."""
        args, kwargs = pytree.tree_unflatten(
            [replace(index, value) for index, value in enumerate(self.flat)], self.spec
        )
        with below_autograd():
            return self.op(*args, **kwargs)

    def computed(self) -> Any:
        """The results on the CPU, over the values as they are now."""

        def on_cpu(index: int, value: Any) -> Any:
            if index in self.regions:
                return self.regions[index].open()
            if isinstance(value, torch.Generator):
                return None
            return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value

        if self.seed is None:
            return self.with_values(on_cpu)
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(self.seed)
        try:
            return self.with_values(on_cpu)
        finally:
            torch.set_rng_state(state)

    def key(self) -> tuple[Any, ...]:
        """What the shapes of the results depend on."""
        same: dict[int, int] = {}  # the first place of each tensor among the arguments

        def of(index: int, value: Any) -> Any:
            if isinstance(value, Tensor):
                place = same.setdefault(id(value), index)
                return value.device.type, value.dtype, value.shape, value.stride(), place
            return None if isinstance(value, torch.Generator) else (type(value), value)

        return self.op, self.spec, *(of(index, value) for index, value in enumerate(self.flat))

    def shaped(self) -> Shaped:
        """Ask torch for the results' shapes, on the meta device."""
        metas: dict[int, Tensor] = {}

        def on_meta(index: int, value: Any) -> Any:
            if index in self.regions:
                same = next((metas[known] for known in metas if self.flat[known] is value), None)
                made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
                metas[index] = made if same is None else same
                return metas[index]
            if isinstance(value, torch.Generator):
                return None
            return torch.device("meta") if isinstance(value, torch.device) and value.type == "cuda" else value

        results = self.with_values(on_meta)
        grown = {index: meta.shape for index, meta in metas.items() if meta.shape != self.flat[index].shape}
        return Shaped(results, grown)

    def argument(self, place: tuple[int, str]) -> Any:
        args, kwargs = pytree.tree_unflatten(self.flat, self.spec)
        return args[place[0]] if place[0] < len(args) else kwargs[place[1]]


class Generator:
    """The device's generator of random numbers: a seed, and how many operators have drawn."""

    def __init__(self) -> None:
        self._state = torch.zeros(2, dtype=torch.int64)

    def draw(self, flat: Sequence[Any]) -> int:
        """A seed for one operator: of the generator that is among its arguments, or of this one."""
        given = next((value for value in flat if isinstance(value, torch.Generator)), None)
        if given is not None:
            return int(torch.randint(2**62, (), generator=given))
        self._state[1] += 1
        return hash((int(self._state[0]), int(self._state[1]))) & (2**62 - 1)

    def manual_seed(self, seed: int) -> None:
        self._state = torch.tensor([int(seed) & (2**62 - 1), 0])

    def get_state(self, device: Any = None) -> Tensor:
        return self._state.view(torch.uint8).clone()

    def set_state(self, state: Tensor, device: Any = None) -> None:
        self._state = state.clone().view(torch.int64)


class Operators:
    """Enqueues the operators of one scheduler's device."""

    def __init__(self, native: Any, scheduler: Scheduler, generator: Generator) -> None:
        self._native = native
        self._scheduler = scheduler
        self.generator = generator
        self._shaped: dict[tuple[Any, ...], Shaped | None] = {}  # by `Call.key`: layers and steps ask the same

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Run any operator that the C++ side does not."""
        self._scheduler.spoil_freed()
        known = signature(op)
        args = tuple(
            torch.tensor(value, dtype=torch.float64 if type(value) is float else None)
            if index in known.scalar_positions and type(value) in (int, float, bool)
            else value
            for index, value in enumerate(args)
        )
        flat, spec = pytree.tree_flatten((args, kwargs))
        regions = {index: Region.of(self._native, value) for index, value in enumerate(flat) if is_on_device(value)}
        seed = self.generator.draw(flat) if torch.Tag.nondeterministic_seeded in op.tags else None
        call = Call(op, known, flat, spec, regions, seed)
        is_by_mask = known.name in INDEXED_BY_MASK and any(
            is_on_device(value) and value.dtype in (torch.bool, torch.uint8) for value in flat[1:]
        )
        if known.name in READS_VALUES or is_by_mask:
            stream = self._native.current_stream()
            self._scheduler.wait_on_host("item", self._scheduler.record(stream))
            return self._run_now(call)
        return self._enqueue(call)

    def _enqueue(self, call: Call) -> Any:
        known = call.signature
        if known.is_in_place:
            place = known.returned_arguments[0]
            assert place is not None
            results: Any = call.argument(place)
            self._launch(call, ())
            return results
        if known.name.endswith("_") and not known.returned_arguments:
            self._launch(call, ())
            return None
        known_shapes = self._shapes_of(call)
        if known_shapes is None:
            self._scheduler.run_to_here()  # torch knows no shapes of it without values; a GPU would
            return self._run_now(call)
        shaped = known_shapes.results
        for index, shape in known_shapes.grown.items():
            call.flat[index].resize_(shape)
            call.regions[index] = Region.of(self._native, call.flat[index])
        outputs, targets = self._make(call, shaped if isinstance(shaped, (tuple, list)) else (shaped,))
        self._launch(call, targets)
        if not isinstance(shaped, (tuple, list)):
            return outputs[0]
        return tuple(outputs) if isinstance(shaped, tuple) else outputs

    def _shapes_of(self, call: Call) -> Shaped | None:
        key = call.key()
        if key not in self._shaped:
            try:
                self._shaped[key] = call.shaped()
            except (NotImplementedError, RuntimeError, TypeError, IndexError):
                self._shaped[key] = None
        return self._shaped[key]

    def _make(self, call: Call, shaped: Sequence[Any]) -> tuple[list[Any], tuple[Region | None, ...]]:
        """The results, with memory of the device that the kernel will fill."""
        places = call.signature.returned_arguments if len(call.signature.returned_arguments) == len(shaped) else ()
        outputs: list[Any] = []
        targets: list[Region | None] = []
        for index, result in enumerate(shaped):
            place = places[index] if places else None
            target = None
            if place is not None and isinstance(call.argument(place), Tensor):
                result = call.argument(place)
            elif isinstance(result, Tensor):
                result = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=DEVICE)
                target = Region.of(self._native, result)
            outputs.append(result)
            targets.append(target)
        return outputs, tuple(targets)

    def _launch(self, call: Call, targets: Sequence[Region | None]) -> None:
        name = call.signature.name
        # Enqueued work keeps no tensor of the device alive.
        flat = [None if index in call.regions else value for index, value in enumerate(call.flat)]
        late = Call(call.op, call.signature, flat, call.spec, call.regions, call.seed)

        def run() -> None:
            if name == "native_layer_norm_backward":  # the CPU wants statistics in the dtype of the input
                self._match_statistics(late)
            results = late.computed()
            for target, result in zip(
                targets, results if isinstance(results, (tuple, list)) else (results,), strict=False
            ):
                if target is not None and isinstance(result, Tensor):
                    target.open().copy_(result)

        self._scheduler.launch(name, run)

    @staticmethod
    def _match_statistics(call: Call) -> None:
        dtype = call.regions[1].dtype
        for index in [index for index in call.regions if call.regions[index].dtype != dtype]:
            call.flat[index] = call.regions.pop(index).open().to(dtype)

    def _run_now(self, call: Call) -> Any:
        """Compute at once, after the stream has been brought here."""
        results = call.computed()
        is_single = not isinstance(results, (tuple, list))
        outputs: list[Any] = []
        places = call.signature.returned_arguments
        for index, result in enumerate((results,) if is_single else results):
            place = places[index] if index < len(places) else None
            if place is not None:
                target = call.argument(place)
                if target.shape != result.shape:
                    target.resize_(result.shape)
                    Region.of(self._native, target).open().copy_(result)
                outputs.append(target)
            elif isinstance(result, Tensor):
                made = torch.empty_strided(result.shape, result.stride(), dtype=result.dtype, device=DEVICE)
                Region.of(self._native, made).open().copy_(result)
                outputs.append(made)
            else:
                outputs.append(result)
        return outputs[0] if is_single else type(results)(outputs)

    def copy_(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy within the device, to it, or from it; pinned memory is read and written when the stream comes to it."""
        self._scheduler.spoil_freed()
        source = source.expand(target.shape) if source.shape != target.shape else source
        stays = non_blocking and self._native.is_pinned((source if is_on_device(target) else target).data_ptr())
        if is_on_device(target) and is_on_device(source):
            into, out_of = Region.of(self._native, target), Region.of(self._native, source)
            self._launch_copy("copy_", into.open, out_of.open)
        elif is_on_device(target):
            into, held = Region.of(self._native, target), source.detach() if stays else source.detach().clone()
            self._launch_copy("copy to device", into.open, lambda: held)
        else:
            held, out_of = target.detach(), Region.of(self._native, source)
            self._launch_copy("copy to host", lambda: held, out_of.open)
        crosses = is_on_device(target) != is_on_device(source)
        if crosses and not stays and target.numel():
            # torch takes no note of one that was asked not to block: the driver waits.
            why = "pageable copy" if non_blocking else "copy"
            self._scheduler.wait_on_host(why, self._scheduler.record(self._native.current_stream()))
        return target

    def _launch_copy(self, name: str, target: Callable[[], Tensor], source: Callable[[], Tensor]) -> None:
        def run() -> None:
            with below_autograd():
                target().copy_(source())

        self._scheduler.launch(name, run)
