"""The sample of cases that the quick run takes."""

from itertools import combinations, product
from types import SimpleNamespace

from helpers.sampling import sample, sample_slow


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


def test_few_slow_cases_of_each_test_are_kept():
    def slow(test, count):
        for item in cases(test, x=range(count)):
            item.get_closest_marker = {"slow": item}.get
            yield item

    quick = [*cases("quick", x=range(20))]
    for item in quick:
        item.get_closest_marker = {}.get
    items = [*slow("a", 20), *quick, *slow("b", 3), *slow("c", 1)]
    kept, left_out = sample_slow(items, 3, kept_too=["a[(5,)]"])
    assert len(kept) + len(left_out) == len(items)
    named = [item.nodeid for item in kept if item not in quick]
    assert named == [
        "a[(0,)]",
        "a[(5,)]",
        "a[(10,)]",
        "a[(19,)]",
        *(f"b[({k},)]" for k in range(3)),
        "c[(0,)]",
    ]
    assert len([item for item in kept if item in quick]) == 20
    assert [item.nodeid for item in sample_slow(slow("d", 5), 1)[0]] == ["d[(0,)]"]
