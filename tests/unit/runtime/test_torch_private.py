"""Torch's private names do on this torch what the library takes them to do."""

import itertools
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle

from shardwise.runtime.batch_errors import check_indices
from shardwise.runtime.module_hooks import uncompiled
from shardwise.runtime.torch_private import (
    NO_VALUE_ERRORS,
    OpMode,
    abort_backend,
    compiler_errors,
    constant_in_graphs,
    container_types,
    cpu_flash_attention,
    cpu_flash_attention_backward,
    fake_copy,
    fake_tensors,
    file_offset,
    has_cpu_flash_attention,
    in_backward,
    in_fake_mode,
    in_op_mode,
    is_fake,
    is_plain,
    is_transformed,
    named_backend,
    on_backward_end,
    parameter_class,
    plain_torch_functions,
    pytree,
    pytree_node,
    returned,
    set_data,
    set_unsharded_storage,
    step_hooks,
    unseen_by_op_modes,
    version,
    view_base,
    wrapper_like,
    written_tensors,
)


def test_an_assertion_stays_in_compiled_code() -> None:
    def check(indices: Tensor) -> Tensor:
        check_indices(indices, 4)
        return indices + 1

    compiled = torch.compile(check, backend="aot_eager", fullgraph=True)
    assert compiled(torch.tensor([0, 3])).tolist() == [1, 4]
    for call, wrong in itertools.product((check, compiled), ([4, 0], [0, -1])):
        with pytest.raises((IndexError, RuntimeError), match="index out of range in self"):
            call(torch.tensor(wrong))


def test_in_backward_is_true_in_hooks_and_recomputation_only() -> None:
    seen = []

    def forward(x: Tensor) -> Tensor:
        seen.append(("forward", in_backward()))
        return x.exp()

    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: seen.append(("hook", in_backward())))
    y = checkpoint(forward, x, use_reentrant=False).sum()
    assert not in_backward()
    y.backward()
    assert not in_backward()
    assert seen == [("forward", False), ("forward", True), ("hook", True)]


def test_in_backward_is_false_again_after_a_backward_that_failed() -> None:
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        x.sum().backward()
    assert not in_backward()


def test_ops_inside_are_shown_to_no_op_mode() -> None:
    shown = []

    class Mode(OpMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            shown.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Mode():
        x.exp()
        with unseen_by_op_modes():
            x.sin()
        x.cos()
    assert shown == ["aten.exp.default", "aten.cos.default"]


def test_fake_tensors_stay_fake_where_no_op_mode_sees_them() -> None:
    with fake_tensors():
        with unseen_by_op_modes(), pytest.raises(NO_VALUE_ERRORS):
            torch.ones(()).item()
        with unseen_by_op_modes(is_real=True):
            assert torch.ones(()).item() == 1.0


def test_on_backward_end_runs_once_after_every_gradient() -> None:
    events = []
    used, unused = (nn.Parameter(torch.ones(2)) for _ in range(2))
    for name, parameter in (("used", used), ("unused", unused)):
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: events.append(name))
    y = used * 2
    y.register_hook(lambda grad: on_backward_end(lambda: events.append("end")))
    y.sum().backward()
    assert events == ["used", "end"]
    (used * 3).sum().backward()
    assert events == ["used", "end", "used"]


def test_on_backward_end_outside_a_backward_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="during backward pass"):
        on_backward_end(lambda: None)


def test_storage_is_freed_and_allocated_again_under_its_views() -> None:
    flat = torch.arange(6.0)
    view = flat[2:].view(2, 2)
    parameter = nn.Parameter(view)
    num_bytes = flat.untyped_storage().nbytes()
    set_unsharded_storage(flat.untyped_storage(), 0)
    assert parameter.untyped_storage().nbytes() == 0
    assert parameter.shape == (2, 2)
    set_unsharded_storage(flat.untyped_storage(), num_bytes)
    flat.copy_(torch.arange(6.0) * 10)
    assert parameter.tolist() == view.tolist() == [[20, 30], [40, 50]]


def test_backward_takes_a_storage_that_was_freed_and_refilled_since_the_forward() -> None:
    """ZeRO-3 relies on it: autograd keeps views of the weight, and refilling `flat` bumps no version of theirs."""
    flat = torch.tensor([2.0, 3.0])
    weight = nn.Parameter(torch.empty(1, 2))
    weight.data = flat.view(1, 2)
    x = torch.ones(1, 2, requires_grad=True)
    loss = nn.functional.linear(x, weight).sum()
    set_unsharded_storage(flat.untyped_storage(), 0)
    set_unsharded_storage(flat.untyped_storage(), 8)
    flat.copy_(torch.tensor([2.0, 3.0]))
    loss.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[2.0, 3.0]]


def test_version_counts_writes_in_place_but_not_through_data() -> None:
    parameter = nn.Parameter(torch.ones(2))
    before = version(parameter)
    parameter.data.mul_(2)
    parameter.data = torch.ones(2)
    assert version(parameter) == before
    with torch.no_grad():
        parameter.mul_(2)
        parameter.view(-1)[0] = 3
    assert version(parameter) == before + 2


class Recorder(Tensor):
    calls: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs)


def test_plain_torch_functions_asks_no_subclass_inside_the_context() -> None:
    Recorder.calls = []
    tensor = torch.ones(2).as_subclass(Recorder)
    with plain_torch_functions():
        assert torch.add(tensor, 1).tolist() == [2.0, 2.0]
    assert Recorder.calls == []
    torch.add(tensor, 1)
    assert Recorder.calls == ["add"]


def test_op_mode_sees_forward_and_backward_ops_of_its_context() -> None:
    class Names(OpMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func.name())
            return func(*args, **kwargs or {})

    names: list[str] = []
    x = torch.ones(2, requires_grad=True)
    with Names():
        y = x.sin()
        y.backward(torch.ones(2))
    x.detach().cos()
    assert names.index("aten::sin") < names.index("aten::cos")  # the derivative
    assert names.count("aten::cos") == 1


def test_op_mode_keeps_its_dispatch_free_of_dynamo() -> None:
    """Torch's wrapper around it would import all of dynamo at the first op, which takes a second."""

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})

    mode = type("Mode", (OpMode,), {"__torch_dispatch__": dispatch})
    assert mode.__torch_dispatch__ is dispatch


def test_pytree_finds_tensors_in_nested_containers_and_puts_them_back() -> None:
    tree = {"a": [torch.zeros(1), (torch.ones(1), None)], "b": 3}
    assert [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)] == [torch.zeros(1), torch.ones(1)]
    doubled = pytree.tree_map(lambda leaf: leaf * 2 if isinstance(leaf, Tensor) else leaf, tree)
    assert doubled == {"a": [torch.zeros(1), (torch.full((1,), 2.0), None)], "b": 3}


def test_set_data_keeps_hooks_and_lets_others_be_added() -> None:
    parameter = nn.Parameter(torch.ones(3))
    calls: list[str] = []

    def add(name: str) -> RemovableHandle:
        return parameter.register_post_accumulate_grad_hook(lambda _: calls.append(name))

    add("removed").remove()
    kept = add("kept")
    for device in ("meta", "cpu"):
        set_data(parameter, torch.ones(3, device=device))
    parameter.sum().backward()
    kept.remove()
    add("new")
    parameter.sum().backward()
    assert calls == ["kept", "new"]


def test_set_data_keeps_the_object_and_its_references_between_devices() -> None:
    parameter = nn.Parameter(torch.ones(2, 3), requires_grad=False)
    parameter.note = "kept"
    reference = weakref.ref(parameter)
    flat = torch.zeros(6)
    for data in (torch.empty(2, 3, device="meta"), flat.view(2, 3)):
        set_data(parameter, data)
        assert reference() is parameter
        assert (parameter.note, parameter.is_meta, parameter.requires_grad) == ("kept", data.is_meta, False)
    seen = version(parameter)
    flat.fill_(3.0)
    assert parameter.sum() == 18
    assert version(parameter) == seen  # else no backward could follow a gather


def test_written_tensors_are_those_an_op_changes_and_maybe_returns() -> None:
    aten = torch.ops.aten
    x, y = torch.zeros(2), torch.ones(2)
    for func, args, kwargs, written, result in (
        (aten.copy_.default, (x, y), {}, [x], x),
        (aten.add.Tensor, (x, y), {}, [], None),
        (aten.add.out, (x, y), {"out": y}, [y], y),
        (aten._foreach_mul_.Scalar, ([x, y], 2), {}, [x, y], None),
    ):
        found = written_tensors(func, args, kwargs)
        assert [id(each) for each in found] == [id(each) for each in written]
        if found:
            assert returned(func, found) is result


def test_uncompiled_runs_as_it_is_inside_compiled_code_and_outside() -> None:
    seen = []

    def inner(x: Tensor) -> None:
        seen.append(
            (torch.compiler.is_compiling(), type(x) is Tensor, torch._C._dynamo.eval_frame.set_eval_frame(None))
        )

    hook = uncompiled(inner)

    def outer(x: Tensor) -> Tensor:
        y = x + 1
        hook(y)
        return y * 2

    compiled = torch.compile(outer, backend="eager")
    for _ in range(2):
        assert compiled(torch.ones(2)).tolist() == [4.0, 4.0]
    outer(torch.ones(2))
    torch._dynamo.reset()
    # The last is the frame hook that was set: none, so nothing that the function calls is compiled either.
    assert seen == [(False, True, None)] * 3


def test_in_fake_mode_tells_whether_new_tensors_are_fake() -> None:
    assert not in_fake_mode()
    with fake_tensors():
        assert in_fake_mode()
    assert not in_fake_mode()


def test_in_op_mode_tells_whether_a_mode_sees_the_ops() -> None:
    assert not in_op_mode()
    with OpMode():
        assert in_op_mode()
    assert not in_op_mode()


def test_compiler_errors_are_those_of_a_graph_break_and_of_too_many_compilations() -> None:
    cannot_compile, compiled_too_often = compiler_errors()
    torch._dynamo.reset()
    with pytest.raises(cannot_compile):
        torch.compile(lambda x: x.sum().item() > 0 or x, backend="eager", fullgraph=True)(torch.ones(2))

    def by_value(x: Tensor) -> list[Tensor]:
        return [part.relu() for part in x.split(torch.bincount(x.long(), minlength=3).tolist()) if len(part)]

    with pytest.raises(cannot_compile):
        torch.compile(by_value, backend="aot_eager", fullgraph=True)(torch.ones(2))

    def scaled(x: Tensor, factor: str) -> Tensor:
        return x * len(factor)

    compiled = torch.compile(scaled, backend="eager", fullgraph=True)
    with pytest.raises(compiled_too_often):
        [compiled(torch.ones(2), "a" * length) for length in range(20)]
    torch._dynamo.reset()


def test_fake_tensors_have_storages_that_are_one_object_and_resize() -> None:
    """The memory tracker and the buffers of `full` rely on it; they are freed too, which a cache of ops may prevent."""
    with fake_tensors():
        full = torch.empty(2**40, dtype=torch.uint8)
        view = full[:16].view(torch.float32)
        assert (view.device.type, view.untyped_storage().nbytes()) == ("cpu", 2**40)
        assert view.untyped_storage() is full.untyped_storage()
        set_unsharded_storage(full.untyped_storage(), 0)
        assert view.untyped_storage().nbytes() == 0
        storage = weakref.ref(full.untyped_storage())
        del full, view
        assert storage() is None


def test_fake_tensors_of_a_file_say_where_their_elements_are(tmp_path: Path) -> None:
    """A reader takes the bytes of any slice from there."""
    table = torch.arange(12.0).view(3, 4)
    torch.save({"rows": table[1:], "sign": torch.tensor([-1], dtype=torch.int8)}, tmp_path / "a.pt")
    with fake_tensors():
        found = torch.load(tmp_path / "a.pt")
    content = (tmp_path / "a.pt").read_bytes()
    rows, sign = (content[file_offset(each) :] for each in found.values())
    assert torch.equal(torch.frombuffer(bytearray(rows[:32]), dtype=torch.float32), table[1:].flatten())
    assert sign[0] == 255


def test_only_fake_tensors_and_their_views_are_fake() -> None:
    assert not any(map(is_fake, (torch.empty(1), torch.empty(1, device="meta"), nn.Parameter(torch.empty(1)))))
    with fake_tensors():
        assert all(map(is_fake, (torch.empty(2), torch.empty(2)[:1], nn.Parameter(torch.empty(1)))))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_fake_copy_has_the_shape_and_the_role_and_is_its_own(device: str) -> None:
    parameter = nn.Parameter(torch.ones(3, 2, device=device).t(), requires_grad=False)
    with fake_tensors():
        copy = fake_copy(parameter)
        assert isinstance(copy, nn.Parameter)
        assert (copy.shape, copy.stride(), copy.device.type, copy.requires_grad) == ((2, 3), (1, 2), "cpu", False)
        assert fake_copy(copy) is copy
        assert parameter_class(copy) is type(copy) is not nn.Parameter
        assert not isinstance(fake_copy(torch.ones(2)), nn.Parameter)
    assert parameter_class(parameter) is nn.Parameter


def test_fake_tensors_refuse_to_give_values_and_shapes_that_follow_from_them() -> None:
    with fake_tensors():
        for ask in (lambda x: bool(x.sum() > 0), lambda x: x[x > 0]):
            with pytest.raises(NO_VALUE_ERRORS):
                ask(torch.ones(3))


def test_a_wrapper_has_what_it_is_given_and_no_data() -> None:
    class Wrapper(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            raise AssertionError

    wrapper = wrapper_like(Wrapper, [2, 3], torch.bfloat16, torch.device("meta"))
    assert type(wrapper) is Wrapper
    assert (wrapper.shape, wrapper.dtype, wrapper.device.type, wrapper.requires_grad) == (
        *((2, 3), torch.bfloat16, "meta"),
        False,
    )


def test_what_transforms_follow_is_transformed() -> None:
    seen: list[bool] = []

    def look(tensor: Tensor) -> Tensor:
        seen.append(is_transformed(tensor))
        return tensor.sum()

    x = torch.ones(2, 2, requires_grad=True)
    look(x)
    assert seen == [False]
    torch.vmap(look)(x)
    torch.func.grad(look)(x)
    torch.func.jvp(look, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        look(torch.autograd.forward_ad.make_dual(x, x))
        assert seen[1:] == [True] * 4
        look(x)
    assert seen[-1] is False
    with fake_tensors():
        assert not is_transformed(torch.ones(2))


def test_what_is_plain_is_memory_and_no_more() -> None:
    x = torch.ones(2, 4)
    with fake_tensors():
        assert is_plain(torch.ones(2))
    assert is_plain(x)
    assert is_plain(x.t()[:2])
    assert not is_plain(nn.Parameter(x))
    assert not is_plain(x.to_sparse())
    assert not is_plain(torch.complex(x, x).conj())
    assert not is_plain(torch.complex(x, x).conj().imag)
    assert not is_plain(x.as_subclass(type("Subclass", (Tensor,), {})))


def test_view_base_is_what_a_view_was_made_of() -> None:
    parameter = nn.Parameter(torch.ones(2, 3))
    assert view_base(parameter.t()) is parameter
    assert view_base(parameter) is None
    assert view_base(parameter.detach()) is None


def test_pytree_nodes_take_one_level_apart_and_put_it_together() -> None:
    node = pytree_node(dict)
    children, context = node.flatten_fn({"a": [1], "b": 2})
    assert (list(children), context) == ([[1], 2], ["a", "b"])
    assert node.unflatten_fn(children, context) == {"a": [1], "b": 2}
    assert pytree_node(set) is None
    assert {dict, list, tuple} < set(container_types())


def test_constants_in_graphs_are_made_once_in_python() -> None:
    class Owner:
        def __init__(self) -> None:
            self.made: list[int] = []

        @constant_in_graphs
        def constant(self, number: int) -> tuple[Tensor, ...]:
            self.made.append(number)
            return (torch.tensor(float(str(number))),)  # no compiler follows this

    owner = Owner()
    compiled = torch.compile(lambda x: x + owner.constant(3)[0], fullgraph=True, backend="eager")
    assert [compiled(torch.tensor(value)).item() for value in (1.0, 2.0)] == [4.0, 5.0]
    assert owner.made == [3]


def test_cpu_flash_attention_is_attention() -> None:
    assert has_cpu_flash_attention()
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 3, num, 8, dtype=torch.float64) for num in (5, 7, 7, 5))
    mask = torch.zeros(2, 1, 5, 7, dtype=torch.float64)
    mask[:, :, 0] = mask[:, :, :, 2] = -torch.inf
    out, lse = cpu_flash_attention(q, k, v, mask, 0.3)
    leaves = [leaf.clone().requires_grad_() for leaf in (q, k, v)]
    scores = (leaves[0] @ leaves[1].mT * 0.3 + mask)[:, :, 1:]  # [2, 3, 4, 7]: the first row sees nothing
    expected = scores.softmax(-1) @ leaves[2]
    torch.testing.assert_close(out[:, :, 1:], expected)
    torch.testing.assert_close(lse[:, :, 1:], scores.logsumexp(-1))
    expected_grads = torch.autograd.grad(expected, leaves, grad[:, :, 1:])
    out[:, :, 0], lse[:, :, 0] = 0, torch.inf
    for mine, theirs in zip(
        cpu_flash_attention_backward(grad, q, k, v, out, lse, mask, 0.3), expected_grads, strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_cpu_flash_attention_backward_adds_up_over_parts_of_the_keys() -> None:
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, 6, 8, dtype=torch.float64) for _ in range(4))
    out, lse = cpu_flash_attention(q, k, v, None, 0.3)
    whole = cpu_flash_attention_backward(grad, q, k, v, out, lse, None, 0.3)
    parts = [
        cpu_flash_attention_backward(grad, q, k[:, :, part], v[:, :, part], out, lse, None, 0.3)
        for part in (slice(0, 2), slice(2, 6))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], whole[0])
    torch.testing.assert_close(torch.cat([parts[0][1], parts[1][1]], 2), whole[1])


def test_step_hooks_are_those_of_the_optimizer_and_of_all() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    handles = [optimizer.register_step_pre_hook(lambda *_: None) for _ in range(2)]
    assert [list(hooks) for hooks in step_hooks(optimizer)] == [[each.id for each in handles], [], []]


def test_a_named_backend_compiles() -> None:
    for name, mode in (("eager", None), ("inductor", "default")):
        backend, graphs = named_backend(name, mode, None), []

        def noted(graph: Any, inputs: Any, backend: Any = backend, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return backend(graph, inputs)

        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(torch.sin, backend=noted)(torch.ones(2)), torch.ones(2).sin())
        assert len(graphs) == 1


def test_a_back_end_is_aborted_for_one_device() -> None:
    aborted: list[str] = []
    back_ends = {name: SimpleNamespace(abort=lambda name=name: aborted.append(name)) for name in ("cpu", "cuda")}
    abort_backend(SimpleNamespace(_get_backend=lambda device: back_ends[device.type]), torch.device("cuda", 0))
    assert aborted == ["cuda"]
    assert hasattr(dist.ProcessGroup, "_get_backend")
