"""What torch does not promise and we rest on: each of these fails when a torch changes it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from telemetry import torch_internals as internals


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputation_is_told_from_a_forward(use_reentrant):
    seen = []

    def block(x):
        seen.append(internals.is_recomputing())
        return x.exp()

    checkpoint(block, torch.ones(1, requires_grad=True), use_reentrant=use_reentrant).backward()
    assert seen == [False, True]
    assert not internals.is_recomputing()


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_reading_leaves_no_trace_in_autograd_or_in_a_dispatch_mode_and_gives_the_mode_back():
    x = torch.ones(1, requires_grad=True)
    with Counting() as mode:
        with internals.reading():
            assert not (x * 2).requires_grad
        assert mode.count == 0
        _ = x * 2
        assert mode.count == 1
    with internals.reading():
        assert not (x * 2).requires_grad


def test_a_fake_tensor_is_told_from_a_real_one():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert internals.is_fake(torch.ones(1))
    assert not internals.is_fake(torch.ones(1))


def test_hooks_under_our_key_run_and_two_keys_differ():
    module, seen = nn.Identity(), []
    first, second = internals.new_hook_key(), internals.new_hook_key()
    assert first != second
    internals.add_hook(module, first, lambda *_: seen.append("after"), before=False)
    internals.add_hook(module, second, lambda *_: seen.append("before"), before=True)
    module(torch.ones(1))
    internals.remove_hook(module, first, before=False)
    internals.remove_hook(module, second, before=True)
    internals.remove_hook(module, second, before=True)
    module(torch.ones(1))
    assert seen == ["before", "after"]


def test_this_torch_can_show_tensors_inside_of_compiled_code():
    assert internals.compile_obstacle() == ""


def test_compiled_code_under_ddp_is_refused_while_torch_would_split_its_graphs():
    ddp = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(ddp)
    ddp.module = nn.Linear(1, 1)
    model = nn.ModuleList([ddp])
    assert "optimize_ddp = False" in internals.ddp_obstacle([model])
    # The loop may call the wrapper while the session was given what is inside of it.
    assert "optimize_ddp = False" in internals.ddp_obstacle([ddp.module])
    assert internals.ddp_obstacle([nn.Linear(1, 1)]) == ""
    with torch._dynamo.config.patch(optimize_ddp=False):
        assert internals.ddp_obstacle([model]) == ""


def test_a_compiled_region_is_found_with_its_root_and_what_is_inside():
    inner = nn.Sequential(nn.Linear(1, 1))
    model = nn.ModuleList([torch.compile(inner), nn.Linear(1, 1)])
    (region,) = internals.compiled_regions(model)
    assert (region.root, region.inside) == (inner, (inner[0],))
    in_place = nn.Sequential(nn.Linear(1, 1))
    in_place.compile()
    (region,) = internals.compiled_regions(in_place)
    assert (region.root, region.inside) == (in_place, (in_place[0],))
