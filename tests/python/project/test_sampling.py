"""The sample of cases that the quick run takes."""

from itertools import combinations, product
from types import SimpleNamespace

from helpers.sampling import sample


def cases(test, **values):
    for chosen in product(*values.values()):
        params = dict(zip(values, chosen))
        yield SimpleNamespace(nodeid=f"{test}[{chosen}]", callspec=SimpleNamespace(params=params))


def test_every_value_of_every_parameter_is_kept():
    values = {"dtype": ["f32", "bf16", "f16"], "size": [1, 7, 64], "flag": [False, True]}
    plain = SimpleNamespace(nodeid="plain")
    items = [*cases("a", **values), plain, *cases("b", **values), *cases("c", one=["x", "y"])]
    kept, left_out = sample(items)
    assert len(kept) + len(left_out) == len(items) and plain in kept
    for test in ("a", "b"):
        own = [item.callspec.params for item in kept if item.nodeid.startswith(test)]
        assert len(own) < 18
        for name, wanted in values.items():
            assert {params[name] for params in own} == set(wanted)
    assert sum(item.nodeid.startswith("c") for item in kept) == 2  # nothing to combine


def test_every_pair_of_values_is_kept():
    values = {"dtype": ["f32", "bf16", "f16"], "size": [1, 7, 64], "flag": [False, True]}
    items = [*cases("a", **values), *cases("b", x=[1, 2], y=[3, 4]), *cases("c", one=["x", "y"])]
    kept, _ = sample(items, 2)
    own = [item.callspec.params for item in kept if item.nodeid.startswith("a")]
    assert len(own) < 18
    for (a, some), (b, others) in combinations(values.items(), 2):
        assert {(params[a], params[b]) for params in own} == set(product(some, others))
    assert len(kept) == len(own) + 4 + 2
