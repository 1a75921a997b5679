"""A parameter group at run time: its parameters, its gradients, and the actions on both, each one recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from shardwise.layout.groups import GroupSpec
from shardwise.layout.layout import Layout
from shardwise.schedule.actions import Kind
from shardwise.tiers.lane import Task
from shardwise.zero.grads import GroupGrads
from shardwise.zero.params import GroupParams
from shardwise.zero.resources import Resources


class ParamGroup:
    """Idempotent actions on one group: unshard, wait, reshard, reduce.

    Args:
        spec: of the group.
        layout: stage and precision.
        parameters: the module's, in the order of `spec.params`.
        resources: shared by the engine's groups.
        released: the class of a parameter whose storage is freed.
    """

    def __init__(
        self,
        spec: GroupSpec,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        resources: Resources,
        released: type[nn.Parameter],
    ) -> None:
        self.spec = spec
        self.holders = layout.holders(spec)
        self.params = GroupParams(spec, layout, parameters, resources, released)
        self.grads = GroupGrads(spec, layout, resources) if spec.trainable else None
        self.is_pinned = False
        self.is_ahead = False  # stepped in the backward that is under way
        self._stepping: Task | None = None
        self._catch_up: Callable[[], None] | None = None
        self._overlap = resources.overlap
        self._timeline = resources.timeline
        self._unshard_start_s = 0.0
        self._reduce_start_s: float | None = None

    def unshard(self) -> None:
        """Start to gather the parameters where they are sharded."""
        self.catch_up()
        self._refuse_if_ahead()
        self._unshard_start_s = self._timeline.now()
        self.params.unshard()
        if not self._overlap:
            self.wait()

    def wait(self) -> None:
        """Have the parameters present; what nobody unsharded ahead is unsharded now."""
        self.catch_up()
        self._refuse_if_ahead()
        start_s = self._unshard_start_s if self.params.is_unsharding else self._timeline.now()
        if self.params.wait():
            if self.params.is_released_between_uses and self.params.shard.tier != "device":
                self._timeline.add(Kind.FETCH, self.spec.name, start_s)
            self._timeline.add(Kind.UNSHARD, self.spec.name, start_s)

    def expose(self) -> None:
        """Let the parameters be plain: who uses them from now on is known to need them."""
        if self.params.is_released_between_uses:
            self.params.expose()

    def keep(self) -> None:
        """Have the parameters present, and keep them so."""
        self.wait()
        self.expose()
        self.is_pinned = True

    def conceal(self) -> None:
        """Have every further use of the parameters reported, unless they are pinned."""
        if self.params.is_released_between_uses and not self.is_pinned:
            self.params.conceal()

    def reshard(self) -> None:
        """Release the parameters where they rest as shards and nobody has pinned them."""
        start_s = self._timeline.now()
        if not self.is_pinned and self.params.reshard():
            self._timeline.add(Kind.RESHARD, self.spec.name, start_s)

    def prefetch(self) -> None:
        """Start what `unshard` would have to wait for on the host, if the last step is over."""
        is_stepping = self.is_ahead or not (self._stepping is None or self._stepping.is_done)
        if not is_stepping:
            self.params.prefetch()

    def refresh(self) -> None:
        """Take over the optimizer's update; where parameters rest whole, start to gather the other ranks'."""
        if self.params.refresh():
            self.unshard()
        self._show_if_pinned()

    def refresh_behind(self, stepping: Task, catch_up: Callable[[], None] | None) -> None:
        """As `refresh`, for an update that is under way on the host; whoever needs the parameters first waits for it.

        Args:
            stepping: the update.
            catch_up: called before the parameters are used, if they rest whole: gathers those of all groups in the
                order that all ranks have in common, as far as this one.
        """
        self._stepping, self.is_ahead = stepping, False
        if self.params.refresh(is_narrowed=True):
            self._catch_up = catch_up
        self._show_if_pinned()

    def await_step(self) -> None:
        """Return once no update of the group is under way on the host."""
        stepping, self._stepping = self._stepping, None
        if stepping is not None:
            stepping.wait()

    def gather_update(self) -> None:
        """Start to gather an update from the host; does nothing where parameters do not rest whole."""
        self.await_step()
        if self._catch_up is not None:
            self._catch_up = None
            self.unshard()

    def catch_up(self) -> None:
        """Have the last update of the parameters done, and its gather begun where they rest whole."""
        if self._catch_up is not None:
            self._catch_up()
        self.await_step()

    def _refuse_if_ahead(self) -> None:
        if self.is_ahead and self.params.is_released:
            raise RuntimeError(
                f"the parameters of {self.spec.name} are needed again in a backward that has stepped them already; "
                "set tiers.step_in_backward=false"
            )

    def _show_if_pinned(self) -> None:
        if self.is_pinned:  # inside `gathered`
            self.wait()
            self.expose()

    def adopt_master(self) -> None:
        """Take over values that were written into the master on every rank. All ranks call it."""
        self.catch_up()
        self.params.adopt_master()
        self._show_if_pinned()

    def add_gradient(self, index: int, gradient: Tensor, will_reduce: bool) -> bool:
        """Take one parameter's gradient; say whether the current backward has now given all of the group's."""
        if self.grads is None:
            return False
        self.grads.add(index, gradient, will_reduce)
        return self.grads.is_complete

    def reduce(self, is_last: bool) -> None:
        """Start to reduce the gradients of the bucket; over the replicas too where this is the last before the step."""
        if self.grads is not None:
            self._reduce_start_s = self._timeline.now()
            self.await_step()  # which reads the gradients where these are to come
            self.grads.reduce(is_last)
            if not self._overlap:
                self.finish_reduce()

    @property
    def awaits_replicas(self) -> bool:
        """Whether the gradients are reduced over the shard group but not over the replicas."""
        return self.grads is not None and self.grads.is_partial

    def reduce_replicas(self) -> None:
        """Start to sum over the replicas what no last reduction has."""
        if self.grads is not None:
            self._reduce_start_s = self._timeline.now()
            self.grads.reduce_replicas()

    def advance_reduce(self) -> None:
        """Start the next collective of the reduction under way, if there is one."""
        if self.grads is not None:
            self.grads.advance_reduce()

    def finish_reduce(self) -> None:
        """Wait for the reduction under way."""
        if self.grads is not None and self._reduce_start_s is not None:
            self.grads.finish_reduce()
            self._timeline.add(Kind.REDUCE, self.spec.name, self._reduce_start_s)
            if self.grads.is_away:
                self._timeline.add(Kind.EVICT, self.spec.name, self._reduce_start_s)
            self._reduce_start_s = None

    def end_backward(self) -> None:
        """Expect every parameter's gradient anew."""
        if self.grads is not None:
            self.grads.end_backward()

    def release(self, keep_values: bool = True) -> None:
        """Give the parameters plain tensors of their own again, whole; the group is of no use afterwards.

        Args:
            keep_values: False leaves them on meta, and brings nothing together.
        """
        if keep_values:
            self.catch_up()
        else:
            self.await_step()
        self.params.release(keep_values)
        if self.grads is not None:
            self.grads.close()
