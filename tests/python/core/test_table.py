"""Tables of plain tensors: what they hold, and all that is not plain."""

import headroom
import pytest
import torch
from headroom._core.table import joined, table_of
from torch import nn

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint8: 3, torch.float64: 6}


def columns(device, shapes=((3, 4), (), (5,), (0, 2)), dtype=torch.float32):
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def rows(table):
    """(addresses, sizes, dtypes) of each list."""
    count = table.shape[2]
    return [(a.tolist(), n.tolist(), d.view(torch.int32)[:count].tolist()) for a, n, d in table]


def expected(tensors):
    return (
        [t.data_ptr() for t in tensors],
        [t.numel() for t in tensors],
        [DTYPES[t.dtype] for t in tensors],
    )


def test_a_table_holds_addresses_sizes_and_dtypes(device):
    params = [nn.Parameter(t) for t in columns(device)]
    grads = columns(device, dtype=torch.bfloat16)
    state = {
        p: {
            "codes": torch.zeros_like(p, dtype=torch.uint8),
            "step": torch.zeros((), dtype=torch.float64, device=device),
            "scales": torch.zeros(7, device=device),
        }
        for p in params
    }
    table = table_of((params, grads), state, ("codes",), ("step", "scales"))
    names = ("codes", "step", "scales")
    lists = [params, grads, *([state[p][name] for p in params] for name in names)]
    assert rows(table) == [expected(tensors) for tensors in lists]


def test_views_and_orders_of_memory(device):
    base = torch.randn(40, device=device)
    views = [base[1:7].view(2, 3), base[8:20].view(3, 4).t(), base[20:38].view(3, 3, 2)[1:]]
    assert rows(table_of((views,))) == [expected(views)]
    image = torch.randn(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last)
    other = image.clone()
    assert rows(table_of(([image], [other]))) == [expected([image]), expected([other])]
    assert table_of(([image], [image.contiguous()])) is None  # lies in another order


PLAIN = torch.randn(3, 4)
NOT_PLAIN = {
    "gaps": PLAIN[:, ::2],
    "expanded": PLAIN[0].expand(3, 4),
    "float64": PLAIN.double(),
    "int64": PLAIN.long(),
    "bool": PLAIN.bool(),
    "complex": PLAIN.cfloat(),
    "sparse": PLAIN.to_sparse(),
    "meta": PLAIN.to("meta"),
    "negated": torch._neg_view(PLAIN),
    "subclass": PLAIN.as_subclass(type("Mine", (torch.Tensor,), {})),
    "None": None,
    "a number": 1.0,
}


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_is_not_plain_has_no_table(name):
    odd = NOT_PLAIN[name]
    if isinstance(odd, torch.Tensor):
        assert table_of(([odd],)) is None
        assert table_of(([PLAIN, odd],)) is None
        assert table_of(([odd], [PLAIN])) is None
    param = nn.Parameter(PLAIN.clone())
    for key in ("m", "step"):
        entry = {"m": torch.zeros(3, 4), "step": torch.zeros(())}
        assert table_of(([param], [PLAIN]), {param: entry}, ("m",), ("step",)) is not None
        entry[key] = odd
        found = table_of(([param], [PLAIN]), {param: entry}, ("m",), ("step",))
        # A state may be of another float type, or hold codes; negated ones are nobody's.
        assert found is None or name in ("float64", "negated")


def test_states_that_are_missing_or_unlike(device):
    param = nn.Parameter(torch.randn(3, 4, device=device))
    grad = torch.randn(3, 4, device=device)
    lists = ([param], [grad])
    good = torch.zeros(3, 4, device=device)
    assert table_of(lists, {param: {"m": good}}, ("m",)) is not None
    assert table_of(lists, {}, ("m",)) is None
    assert table_of(lists, {param: {}}, ("m",)) is None
    assert table_of(lists, {param: {"m": good[:2]}}, ("m",)) is None
    assert table_of(lists, {param: {"m": good.view(4, 3)}}, ("m",)) is None
    assert table_of(lists, {param: {"m": good.view(4, 3)}}, (), ("m",)) is not None
    assert table_of(([param], [grad[:2]])) is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_devices_do_not_mix():
    here, there = torch.randn(3), torch.randn(3, device="cuda")
    assert table_of(([there, there],)) is not None
    assert table_of(([here, there],)) is None
    assert table_of(([there], [here])) is None


def test_the_default_device_is_not_the_table_s():
    with torch.device("meta"):
        assert table_of(([PLAIN],)).device.type == "cpu"


def test_without_the_exchange_api_steps_go_through_lists(monkeypatch, device):
    """As on a Python that headroom._C was not built for. The same bits."""

    def run():
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(s, device=device)) for s in ((3, 4), (7,))]
        optimizer = headroom.optim.AdamW(params, lr=0.1, max_grad_norm=1.0)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn_like(p)
            headroom.clip_grad_norm_(params, 2.0)
            optimizer.step()
        return params

    with torch.profiler.profile() as profile:
        with_tables = run()
    names = {event.key for event in profile.key_averages()}
    assert "headroom::_adamw_table_" in names and "headroom::adamw_" not in names
    monkeypatch.setattr("headroom._core.table._exchange", None)
    with torch.profiler.profile() as profile:
        with_lists = run()
    names = {event.key for event in profile.key_averages()}
    assert "headroom::adamw_" in names and "headroom::_adamw_table_" not in names
    assert all(torch.equal(a, b) for a, b in zip(with_tables, with_lists))


def test_tables_that_are_joined(device):
    """Entries of each table at their places: the table of all of them in that order."""
    dtypes = torch.float32, torch.bfloat16, torch.float16
    sizes = (3, 1, 4, 2, 5)
    lists = [[torch.ones(n, dtype=d, device=device) for n in sizes] for d in dtypes[:2]]
    lists[0][2] = lists[0][2].half()
    whole = table_of(tuple(lists))
    places = [torch.tensor([4, 0]), torch.tensor([2]), torch.tensor([1, 3])]
    parts = [table_of(tuple([one[i] for i in where] for one in lists)) for where in places]
    got = joined(parts, places)
    assert torch.equal(got[:, :-1], whole[:, :-1])
    of_dtypes = (table.view(torch.int32)[:, -1, : len(sizes)] for table in (got, whole))
    assert torch.equal(*of_dtypes)
    assert joined([whole], [torch.arange(5)]) is whole
