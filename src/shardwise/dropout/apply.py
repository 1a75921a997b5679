"""Changes the classes of the modules that may drop, so that they draw keyed numbers.

An `nn.Dropout` draws by its site itself. In a module of the user's a mode replaces torch's dropouts by function, and
attention with dropout by one that stores its probabilities.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shardwise.config.errors import ConfigError
from shardwise.dropout.draws import KeyedDraws
from shardwise.dropout.hash_rng import Hashes, Masked, ShardRegion, probability_hashes
from shardwise.dropout.numbers import TensorPlace
from shardwise.dropout.torch_draws import (
    BACKWARDS,
    DRAWS,
    SPECIAL,
    is_opaque,
    keyed_attention,
    keyed_draw,
    opaque_draw,
    seeded_draw,
    seeded_mask,
    with_own_body,
)
from shardwise.runtime.class_swap import swap_class
from shardwise.runtime.forward_state import STREAMS, CheckpointStates, Stream
from shardwise.runtime.torch_private import is_fake, replaced_checkpoints

Undo = Callable[[], Any]


def key_dropouts(
    model: nn.Module,
    draws: KeyedDraws,
    zones: Mapping[str, ShardRegion] | None = None,
    *,
    must_be_keyed: bool = False,
    compiled: Collection[str] = (),
    shares: str = "",
    stage_units: Collection[str] = (),
    absent_ids: Collection[int] = (),
) -> list[Undo]:
    """Make a model's dropouts, and all else that draws in its forwards, draw keyed numbers.

    Call it before forwards are wrapped for recomputation or compilation: the keyed forward belongs inside the wrapper.

    Args:
        model: its modules' names are the sites' names, so they must be those of the whole model.
        zones: by name of a dropout module on split tensors, or of a module that drops split tensors by function, this
            rank's part of the tensors; None where no tensor is split.
        must_be_keyed: raise an error for a dropout outside of `KeyedDraws.at`, since ranks share a forward and torch's
            own dropouts would differ between them.
        compiled: names of the modules that will be compiled. Those around them keep torch's dropouts by function too:
            the mode that replaces these would be seen by compiled code, which would be compiled twice.
        shares: what ranks share of a forward, as a key of the config says it; "" where each has its own. There a draw
            that is not seen is an error.
        stage_units: names of the model's units, where other ranks compute some of them.
        absent_ids: of the modules that this rank does not run.

    Returns:
        functions that undo it; call them in reverse order.
    """
    zones, undo = zones or {}, list[Undo]()
    outside = DropoutSite(weakref.ref(model), _OUTSIDE, draws, None, False, on_thread := _OnThread())
    kinds: dict[type[nn.Module], type[nn.Module]] = {}  # shared, so that blocks of one class share their compiled code
    watch = _DrawWatch(outside, shares, kinds)
    if not compiled:
        checkpoints = CheckpointStates(model, functools.partial(_resumption, on_thread))
        draws.around += (functools.partial(replaced_checkpoints, checkpoints.first), watch.opened)
        undo.append(draws.stop)
    others: dict[str, Any] = {"model": weakref.ref(model), "stage_units": stage_units}
    for name, module in model.named_modules():
        module_class = type(module)
        is_plain = module_class.forward is nn.Dropout.forward
        may_drop = name in zones or may_drop_by_function(module)
        is_left = not may_drop or any(_is_around(name, unit) for unit in compiled)
        if id(module) in absent_ids or (is_left and not is_plain):
            continue
        if module_class not in kinds:
            kinds[module_class] = _keyed_module(module_class) if is_plain else _keyed_functions(module_class)
        site = DropoutSite(weakref.ref(module), name, draws, zones.get(name), must_be_keyed, on_thread, **others)
        module.__dict__[_SITE] = site
        watch.sites += [] if is_plain else [site]
        watch.has_modules |= is_plain
        undo.append(functools.partial(module.__dict__.pop, _SITE, None))
        undo.append(swap_class(module, kinds[module_class]))
    return undo


def _is_around(name: str, other: str) -> bool:
    return name != other and (not name or other.startswith(f"{name}."))


def may_drop_by_function(module: nn.Module) -> bool:
    """Say whether a module's forward may call a dropout by function, or draw otherwise.

    Any may but most of torch's own, which call modules, and layers that only multiply.
    """
    module_class = type(module)
    is_torchs = module_class.__module__.startswith("torch.") or isinstance(module, nn.Linear | nn.Embedding)
    return isinstance(module, _DRAWING) or (not is_torchs and module_class.forward is not nn.Module.forward)


_DRAWING: Final = (
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)
_OUTSIDE: Final = "(outside modules)"


class _DrawWatch:
    """Finds out whether a model draws by function, and where: so that one that does not is left as it is.

    Args:
        outside: the site of code around the model's forward: hooks of the model, and the loss.
        kinds: class of a module -> the one that draws by its site.

    Attributes:
        sites: of the modules that may draw by function.
        has_modules: the model has dropout modules, which draw by themselves.
    """

    def __init__(self, outside: DropoutSite, shares: str, kinds: dict[type[nn.Module], type[nn.Module]]) -> None:
        self.sites: list[DropoutSite] = []
        self.has_modules = False
        self._outside, self._shares, self._kinds = outside, shares, kinds

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Key what code around the model's forward draws inside the context.

        Raises:
            ConfigError: something has drawn unseen.
        """
        outside, draws = self._outside, self._outside.draws
        on_thread = outside.on_thread
        if on_thread.mode is not None:  # a forward inside a forward
            yield
            return
        if outside.first_step is None:
            outside.first_step = draws.step
        was_quiet = any(site.is_quiet for site in (outside, *self.sites))
        # Of a pipeline's stages the last alone computes the loss, so that only a whole step shows what draws.
        is_first = draws.step == outside.first_step
        outside.is_quiet = not outside.has_dropped and not is_first
        streams, outside.streams = outside.streams or (), None if is_first else outside.streams
        if outside.is_quiet:
            with outside.own_streams():
                yield
        else:
            with _drawing(outside), outside.own_streams():
                yield
        outside.streams = (*streams, *(stream for stream in outside.streams or () if stream not in streams))
        if was_quiet and draws.drew_unseen():
            self._watch_sites()
            self._refuse_late_draws()
        else:
            draws.at_step_end = self._unwatch

    # [Note: A model that draws nothing]
    # Once whole training forwards have drawn nothing by function, the modules get the classes back that they had, and
    # forwards cost what they cost without the library. torch's generator still begins from the forward's seed, so a
    # draw that comes later is noticed at the end of its forward, and from the next step on all is watched again.
    # Classes change between steps only: a recomputation must find those of its forward, by which code may choose what
    # to do (transformers' checkpointed layers ask whether the forward of a module's class is the one that checkpoints).
    def _unwatch(self) -> None:
        """Leave the modules as they are while no forward draws by function."""
        modules = [module for site in self.sites if (module := site.module()) is not None]
        is_over = all(site.is_quiet and site.streams == () for site in (self._outside, *self.sites))
        if is_over and not any({*self._kinds.values()}.isdisjoint(type(module).__mro__) for module in modules):
            for module in modules:
                del module.__dict__[_SITE]
                if type(module) in self._kinds.values():  # a unit of a pipeline has got another class since
                    swap_class(module, type(module).__mro__[1])
            self._outside.draws.unwatch(self.opened, self._begin_again, self.has_modules)

    def _begin_again(self) -> None:
        self._outside.draws.at_step_end = self._watch_modules
        self._refuse_late_draws()

    def _watch_modules(self) -> None:
        for site, module in ((site, site.module()) for site in self.sites):
            if module is not None:
                module_class, module.__dict__[_SITE] = type(module), site
                if {*self._kinds.values()}.isdisjoint(module_class.__mro__):
                    self._kinds[module_class] = self._kinds.get(module_class) or _keyed_functions(module_class)
                    swap_class(module, self._kinds[module_class])
        self._outside.draws.watch(self.opened)
        self._watch_sites()

    def _watch_sites(self) -> None:
        self._outside.first_step = None
        for site in (self._outside, *self.sites):
            site.is_quiet = False

    def _refuse_late_draws(self) -> None:
        if self._shares:
            raise ConfigError(
                "draw-began-late",
                f"the forward of {type(self._outside.module()).__name__} has drawn random numbers, or set torch's "
                f"seed, in a module that did not in its first training forward, so ranks of {self._shares} drew what "
                "they do not share; draw in each forward, if only to drop the numbers",
            )


def _resumption(on_thread: _OnThread) -> Callable[[], AbstractContextManager[None]]:
    """Return what opens the site that is drawn for now again, in the second pass of code that is no module's."""
    site = None if on_thread.mode is None else on_thread.mode.site
    return nullcontext if site is None else functools.partial(_drawing, site)


@contextmanager
def _drawing_for(site: DropoutSite | None, on_thread: _OnThread) -> Iterator[None]:
    """Let the mode that the thread is in, if any, draw for another site inside the context; None drops as torch."""
    mode = on_thread.mode
    if mode is None:
        yield
        return
    outer, mode.site = mode.site, site
    try:
        yield
    finally:
        mode.site = outer


@contextmanager
def _drawing(site: DropoutSite) -> Iterator[None]:
    """Let this thread draw for a site inside the context."""
    on_thread = site.on_thread
    if on_thread.mode is not None:
        with _drawing_for(site, on_thread):
            yield
        return
    on_thread.mode = KeyedFunctions(site)
    try:
        with on_thread.mode:
            yield
    finally:
        on_thread.mode = None


@dataclass(eq=False)
class DropoutSite:
    """Describes the site of one module. A copy of the module has this object too, but does not own it, and drops as
    torch does.

    Attributes:
        name: fully qualified, of the module that owns the site.
        zone: this rank's part of its tensors; None where they are whole.
        on_thread: the mode in which dropouts by function are replaced, common to a model's sites.
        has_dropped: a dropout of a rate above 0 was called, or another function that draws.
        is_quiet: a whole training forward of the module dropped nothing by function, so the next ones are spared the
            mode, which costs about a microsecond for each call of torch.
        first_step: the step whose forwards show whether code outside modules draws.
        streams: of Python and NumPy, from which the module draws; None before its first training forward.
        stage_units: names of the units, where other ranks compute some of them.
    """

    module: weakref.ref[nn.Module]
    name: str
    draws: KeyedDraws
    zone: ShardRegion | None
    must_be_keyed: bool
    on_thread: _OnThread
    has_dropped: bool = False
    is_quiet: bool = False
    first_step: int | None = None
    streams: tuple[Stream, ...] | None = None
    model: Callable[[], nn.Module | None] = lambda: None
    stage_units: Collection[str] = ()

    @property
    def own_zone(self) -> ShardRegion | None:
        """Return the zone of the tensors that code sees now."""
        return None if self.draws.are_whole else self.zone

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def drop(self, values: Tensor, p: float, inplace: bool = False) -> Tensor:
        """Apply torch's dropout of rate p to values, in place if `inplace`, with keyed numbers.

        Raises:
            ConfigError: no forward is open to draw for.
        """
        self.has_dropped |= p > 0
        if not 0.0 < p < 1.0 or values.numel() == 0:
            return F.dropout(values, p, True, inplace)
        if self.draws.is_seeded:
            self.check_seed()
            mask = seeded_mask(self, values, p)
        else:
            self._check_is_open()
            if not inplace:
                return self.draws.drop(self.name, values, p, self.own_zone)
            mask = self.draws.mask(self.name, values.shape, p, self.own_zone, values.device)
        scale = 1.0 / (1.0 - p)
        if inplace:
            return values.mul_(mask.to(values.dtype).mul_(scale))
        dropped: Tensor = Masked.apply(values, mask, scale)
        return dropped

    def hashes(self, shape: Sequence[int], device: torch.device, first_row: int) -> Hashes:
        """Return the hashes of `probability_hashes` for shape, device and first_row.

        Raises:
            ConfigError: no forward is open to draw for.
        """
        self.has_dropped = True
        self._check_is_open()
        return self.draws.hashes(self.name, shape, self.own_zone, device, first_row)

    def numbers(self, kind: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        self.has_dropped = True
        return self.draws.numbers(self.name, kind, shape, dtype, device, self.own_zone)

    def place(self, shape: Sequence[int]) -> TensorPlace:
        self.has_dropped = True
        return self.draws.place(shape, self.own_zone)

    def reseeded(self) -> AbstractContextManager[None]:
        self.has_dropped = True
        return self.draws.reseeded(self.name)

    def check_generator(self, generator: torch.Generator) -> None:
        """Make sure that a generator which code draws from by name gives what it gives in one process.

        Raises:
            ConfigError: the stages of a pipeline would draw from generators that are one generator elsewhere.
        """
        root = self.model()
        if root is None:
            return
        unit = next((name for name in self.stage_units if f"{self.name}.".startswith(f"{name}.")), None)
        is_own = unit is not None and not any(
            any(attribute is generator for attribute in vars(module).values())
            for name, module in root.named_modules()
            if not f"{name}.".startswith(f"{unit}.")
        )
        is_held = unit is None or any(
            any(attribute is generator for attribute in vars(module).values())
            for module in root.get_submodule(unit).modules()
        )
        if (unit is not None and not (is_own and is_held)) or self.draws.is_second_pass:
            raise ConfigError(
                "generator-over-stages",
                f"{self.name or 'the model'} draws from a torch.Generator that is no attribute of this unit alone, and "
                "under mesh.pp each rank has a generator of its own; leave generator= out (run.seed and the step key "
                "all draws), give each unit its own, or use mesh.dp_shard in place of mesh.pp",
            )

    def check_seed(self) -> None:
        """Make sure that code of the same unit has set torch's seed.

        Raises:
            ConfigError: the stages of a pipeline would go on from other draws.
        """
        self.has_dropped = self.draws.has_own_seed = True
        if self.on_thread.is_seeded_outside:
            raise _seed_error(self.name)

    def count_call(self) -> None:
        """Count a draw of placeholders."""
        self.has_dropped = True
        self.draws.count_call(self.name)

    @contextmanager
    def own_streams(self) -> Iterator[None]:
        """Let the module draw from Python's and NumPy's streams what it draws in every layout; others go on after it.

        Its first forward shows from which it draws.
        """
        watched = STREAMS if self.streams is None else self.streams
        if not watched or not self.draws.is_open:
            yield
            return
        before = [stream.get() for stream in watched]
        seed = self.draws.stream_seed(self.name)
        for stream in watched:
            stream.seed(seed)
        begun = [stream.contents(stream.get()) for stream in watched] if self.streams is None else []
        try:
            yield
        finally:
            if self.streams is None:
                self.streams = tuple(
                    stream
                    for stream, state in zip(watched, begun, strict=True)
                    if stream.contents(stream.get()) != state
                )
            for stream, state in zip(watched, before, strict=True):
                stream.put(state)

    def _check_is_open(self) -> None:
        if not self.draws.is_open:
            raise ConfigError(
                "dropout-outside-forward",
                f"{self.name or type(self.module()).__name__} drops, and ranks that share a layer must drop the same, "
                "which they know of the engine's own forwards only; call engine(batch) in place of the model, or "
                "model.eval() first",
            )


_SITE: Final = "_shardwise_dropout_site"


def _open_site(module: nn.Module) -> DropoutSite | None:
    """Return the site by which a module draws now; None where it drops as torch does."""
    site: DropoutSite | None = module.__dict__.get(_SITE)
    if site is None or not module.training or site.module() is not module:
        return None
    return site if site.draws.is_open or site.must_be_keyed or site.draws.is_seeded else None


def _seed_error(name: str) -> ConfigError:
    return ConfigError(
        "seed-over-stages",
        f"torch's seed is set in a forward, and {name or 'the model'} draws after that or leaves it so, where under "
        "mesh.pp another stage would go on from it; set it inside torch.random.fork_rng(), draw from a torch.Generator "
        "of the module, or leave it out (run.seed and the step key all draws)",
    )


@contextmanager
def _own_seed(site: DropoutSite | None) -> Iterator[None]:
    """Let a unit of a pipeline set torch's seed for itself alone."""
    if site is None or site.name not in site.stage_units:
        yield
        return
    was_seeded, outer = site.draws.is_seeded, site.on_thread.is_seeded_outside
    site.on_thread.is_seeded_outside = was_seeded
    try:
        yield
        if site.draws.is_seeded and not was_seeded:
            raise _seed_error(site.name)
    finally:
        site.on_thread.is_seeded_outside = outer


def _keyed_module(own: type[nn.Module]) -> type[nn.Module]:
    """Make a subclass of a dropout module's class that draws by its site."""

    @functools.wraps(own.forward)
    def forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002
        if not torch.compiler.is_compiling() and (site := _open_site(self)) is not None:
            return site.drop(input, self.p, self.inplace)
        is_site = not torch.compiler.is_compiling() and _SITE in self.__dict__
        with _drawing_for(None, self.__dict__[_SITE].on_thread) if is_site else nullcontext():
            result: Tensor = own.forward(self, input)
        return result

    return _subclass(own, forward)


def _keyed_functions(own: type[nn.Module]) -> type[nn.Module]:
    """Make a subclass of a module's class in which the dropouts that its forward calls by function draw by its site."""

    @functools.wraps(own.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _SITE not in self.__dict__:
            return own.forward(self, *args, **kwargs)
        site, on_thread = _open_site(self), self.__dict__[_SITE].on_thread
        has_streams = site is not None and site.streams != ()
        if on_thread.mode is not None:  # nested modes would double the cost of torch's calls
            streams = site.own_streams() if has_streams and site else nullcontext()
            with _own_seed(site), _drawing_for(site, on_thread), streams:
                result = own.forward(self, *args, **kwargs)
        elif site is None or (site.is_quiet and not has_streams):
            return own.forward(self, *args, **kwargs)
        else:
            with _own_seed(site), _drawing(site), site.own_streams():
                result = own.forward(self, *args, **kwargs)
        if site is not None:
            site.is_quiet = not site.has_dropped
        return result

    return _subclass(own, forward)


class _OnThread(threading.local):
    """Holds the mode that this thread is in, None for none, and where torch's seed was set."""

    mode: KeyedFunctions | None = None
    is_seeded_outside = False  # code around the unit that runs has set torch's seed


def _subclass(own: type[nn.Module], forward: Callable[..., Any]) -> type[nn.Module]:
    names = {"forward": forward, "__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    return type(own.__name__, (own,), names)


class KeyedFunctions(TorchFunctionMode):
    """Replaces torch's dropouts by function, in attention too, with those of a site.

    Args:
        site: of the module whose forward runs; None while one runs that drops as torch does.
    """

    def __init__(self, site: DropoutSite | None) -> None:
        super().__init__()
        self.site = site

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        site, keywords = self.site, kwargs or {}
        if torch.compiler.is_compiling():  # the compiler traces this method too
            return func(*args, **keywords)
        # The modules that a backward recomputes have sites of their own, and torch would run it with this mode off.
        if func not in BACKWARDS and (site is None or site.draws.has_placeholders):
            return func(*args, **keywords)
        if site is not None and func in _REPLACED:
            return _REPLACED[func](site, func, *args, **keywords)
        if site is not None and (func in DRAWS or func in SPECIAL or is_opaque(func, args, keywords)):
            if site.draws.is_seeded and keywords.get("generator") is None:
                site.check_seed()
                return seeded_draw(site, func, args, keywords)
            return self._draw(site, func, args, keywords) if site.draws.is_open else func(*args, **keywords)
        own_body = with_own_body(func)
        if own_body is None:
            return func(*args, **keywords)
        with self:
            return own_body(*args, **keywords)

    def _draw(self, site: DropoutSite, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        device = kwargs.get("device")
        if any(is_fake(arg) or arg.is_meta for arg in args if isinstance(arg, Tensor)) or (
            device is not None and torch.device(device).type == "meta"
        ):  # of what another stage computes
            if not site.draws.is_simulated:
                site.count_call()
            return func(*args, **kwargs)
        if func in SPECIAL:
            return SPECIAL[func](site, func, args, kwargs)
        if kwargs.get("generator") is not None:
            site.check_generator(kwargs["generator"])
        return keyed_draw(site, func, args, kwargs) if func in DRAWS else opaque_draw(site, func, args, kwargs)


def _dropout(
    site: DropoutSite,
    func: Any,
    input: Tensor,  # noqa: A002
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Replace `F.dropout`, and `torch.dropout` and `torch.dropout_`, whose third argument is `train`."""
    if not kwargs.get("train", training):
        return input
    return site.drop(input, p, inplace or func is torch.dropout_)


def _attention(
    site: DropoutSite,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Replace `F.scaled_dot_product_attention`; with dropout its probabilities are stored, as no kernel takes a mask.

    The arguments after `func`, torch's own, are those of `keyed_attention`.
    """
    is_refused = is_causal and attn_mask is not None  # torch raises the error
    if dropout_p == 0.0 or is_refused or query.is_nested:
        attended: Tensor = func(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
        return attended
    return keyed_attention(site, query, key, value, attn_mask, dropout_p, is_causal, **kwargs)


_REPLACED: Final[Mapping[Any, Callable[..., Tensor]]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    torch.dropout_: _dropout,
    F.scaled_dot_product_attention: _attention,
    probability_hashes: lambda site, func, shape, device, first_row: site.hashes(shape, device, first_row),
}
