"""What a function must find as it was: settings, parameters and buffers."""

import warnings

import pytest
import torch
from headroom._core.surroundings import (
    Buffers,
    Parameters,
    Settings,
    is_plain,
    is_trained,
    takes_ops,
    version_of,
    viewed,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel


class Odd(torch.Tensor):
    pass


# ---- Tensors -------------------------------------------------------------------------------------


def test_which_tensors_ops_take():
    x = torch.ones(2, 2)
    for taken in (x, x.bfloat16(), x.half(), nn.Parameter(x), torch.ones(2, device="meta")):
        assert is_plain(taken) and takes_ops(taken)
    with FakeTensorMode():
        assert is_plain(torch.ones(2)) and takes_ops(torch.ones(2))
    nested = torch.nested.nested_tensor([x], layout=torch.jagged)
    for other in (x.double(), x.int(), x.to_sparse(), nested):
        assert not takes_ops(other)
    assert not is_plain(x.as_subclass(Odd)) and not takes_ops(x.as_subclass(Odd))
    assert not is_plain(None) and not takes_ops(3.0)


def test_where_ops_take_tensors():
    x, seen = torch.ones(2), []

    def look(x):
        seen.append(takes_ops(x))
        return 2 * x

    torch.func.vmap(look)(x)
    with forward_ad.dual_level():
        look(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        torch.jit.trace(look, x, check_trace=False)
    assert seen == [False, False, False] and takes_ops(x)

    def asks(x):
        return x + 1 if takes_ops(x) else x - 1

    assert torch.compile(asks, backend="eager", fullgraph=True)(x).eq(2).all()

    class Asks(nn.Module):
        def forward(self, x):
            return asks(x)

    assert torch.export.export(Asks(), (x,), strict=True).module()(x).eq(0).all()


def test_leaves_views_and_versions():
    leaf = torch.ones(4, requires_grad=True)
    assert viewed(leaf) is leaf and viewed(leaf[1:]) is leaf
    assert is_trained(leaf) and is_trained(leaf[1:][:1])
    assert not is_trained(torch.ones(1)) and not is_trained(leaf * 2)
    x = torch.ones(1)
    assert version_of(x) == 0 and version_of(x.add_(1)) == 1
    with torch.inference_mode():
        assert version_of(torch.ones(1)) is None
    assert version_of(nn.LazyLinear(1).weight) is None


# ---- Settings ------------------------------------------------------------------------------------


CHANGES = {
    "autocast on": lambda: torch.autocast("cpu", torch.bfloat16),
    "without its cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "flash": lambda: sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]),
    "efficient": lambda: sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]),
    "cudnn": lambda: sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]),
    "order": lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
}


def state():
    cuda = torch.backends.cuda
    return (
        torch._C._get_sdp_priority_order(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None,
        torch.is_autocast_cache_enabled(),
        *(cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        cuda.cudnn_sdp_enabled(),
    )


@pytest.mark.parametrize("name", CHANGES)
def test_settings_are_put_back(name):
    """Those of inside a context outside of it, and the other way around."""
    change, usual = CHANGES[name], Settings(["cpu"])
    outside = state()
    assert usual.hold()
    with change():
        inside, own = state(), Settings(["cpu"])
        assert own.hold() and not usual.hold()
        with usual.restored():
            assert usual.hold() and state() == outside
        assert own.hold() and state() == inside
    assert not own.hold() and usual.hold()
    with own.restored():
        assert own.hold() and state() == inside
    assert state() == outside


def test_another_dtype_of_autocast_does_not_hold():
    with torch.autocast("cpu", torch.bfloat16):
        own = Settings(["cpu"])
    with torch.autocast("cpu", torch.float16):
        assert not own.hold()
        with own.restored():
            assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert Settings(["cpu", "meta"]).hold()  # of which the second has no autocast


# ---- Parameters and buffers ----------------------------------------------------------------------


def test_parameters_that_change_are_named():
    net = nn.Sequential(nn.Linear(2, 3, bias=False), nn.LayerNorm(3))
    seen, before = Parameters([net, None]), net[1].bias._version
    assert seen.changed() is None
    with torch.no_grad():
        net[1].bias.add_(1)
    versions = f"version {before + 1}, wanted version {before}"
    assert seen.changed() == f"parameter bias of LayerNorm is at {versions}"
    seen = Parameters([net])
    net[0].weight.data = torch.ones(3, 2)
    assert seen.changed() == "parameter weight of Linear has been replaced"
    for other in (nn.Parameter(torch.ones(3, 2)), None):
        seen = Parameters([net])
        net[0].weight = other
        assert seen.changed() == "parameter weight of Linear has been replaced"
    # What FSDP puts there and takes away is not looked at.
    net[0].weight = nn.Parameter(torch.ones(3, 2))
    seen = Parameters([net])
    net[0]._parameters["weight"] = torch.ones(3, 2).as_subclass(Odd)
    assert seen.changed() is None and Parameters([net]).changed() is None
    with torch.inference_mode():
        made = nn.Linear(1, 1)
    assert Parameters([made]).changed() is None


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("small", torch.arange(4.0))
        self.register_buffer("large", torch.ones(100))
        self.register_buffer("nothing", None)
        self.register_buffer("sparse", torch.eye(2).to_sparse())


@pytest.mark.parametrize("limit", [None, 400, 399, 15])
def test_buffers_are_put_back(limit):
    """Up to ``limit`` bytes; a larger one that changes is named."""
    net = nn.Sequential(Buffered())
    seen, part = Buffers([net], limit), net[0]
    small, large = part.small, part.large
    assert seen.lost() is None
    part.register_buffer("more", torch.ones(1))
    part.small = torch.zeros(4)
    large.mul_(2)
    copied = limit is None or limit >= 400
    assert seen.lost() == (None if copied else "buffer large of Buffered")
    seen.restore()
    assert "more" not in part._buffers and part.nothing is None and part.sparse.is_sparse
    assert part.small is small and part.small.equal(torch.arange(4.0))
    assert part.large is large and large.eq(1 if copied else 2).all()
    small.add_(1)
    if limit == 15:
        assert seen.lost() is not None
    seen.restore()
    assert small.equal(torch.arange(4.0) + (limit == 15))


def test_buffers_that_are_as_they_were_are_not_written():
    part = Buffered()
    seen, version = Buffers([part]), part.small._version
    seen.restore()
    assert part.small._version == version
    part.small.resize_(3)
    with pytest.raises(RuntimeError):
        seen.restore()  # another shape is not the same, whatever it holds
    lazy = nn.LazyBatchNorm1d()
    Buffers([lazy]).restore()
    assert Buffers([lazy]).lost() is None
