"""Each pair of options of headroom.linear_cross_entropy, on odd shapes, against the formula in
float64."""

import itertools

import headroom
import pytest
import torch

from helpers.linear_cross_entropy import reduced, reference

# Options of the function, and of the tensors that it is given.
SETTINGS = {
    "bias": {"bias": True},
    "class_weight": {"class_weight": True},
    "token_weight": {"token_weight": True},
    "int32": {"target": torch.int32},
    "ignore_index": {"ignore_index": 2},
    "none": {"reduction": "none"},
    "sum": {"reduction": "sum"},
    "denominator": {"denominator": 7.0},
    "label_smoothing": {"label_smoothing": 0.1},
    "logit_scale": {"logit_scale": -1.5},
    "softcap": {"softcap": 4.0},
    "z_loss": {"z_loss": 0.1},
    "shift": {"shift": True},
    "empty": {"empty": "nan"},
    "tokens": {"mode": "tokens"},
    "vocabulary": {"mode": "vocabulary"},
    "workspace": {"workspace": 1},
    "accumulate_into_grad": {"accumulate_into_grad": True},
    "check_target": {"check_target": True},
    "stats": {"stats": ("lse", "target_logit", "entropy", "argmax", "accuracy")},
    "strided hidden": {"hidden": "strided"},
    "expanded weight": {"weight": "expanded"},
    "transposed weight": {"weight": "transposed"},
    "frozen hidden": {"frozen": "hidden"},
    "frozen weight": {"frozen": "weight"},
    "no row counts": {"ignored": "all"},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
}
SHAPES = (((1,), 1, 1), ((1,), 7, 1), ((3, 5), 9, 13), ((2, 1, 4), 8, 70), ((17,), 1, 5))
OF_TENSORS = ("bias", "class_weight", "token_weight", "target", "hidden", "weight", "frozen")


class Layer:
    """The tensors of a call, the leaves among them, and the options that are left."""

    def __init__(self, settings, shape, device):
        rows, features, classes = shape
        self.options, made = dict(settings), torch.Generator().manual_seed(0)
        how = {name: self.options.pop(name, None) for name in (*OF_TENSORS, "ignored", "dtype")}

        def of(*size, strided=None):
            values = torch.randn(size[::-1] if strided else size, generator=made)
            return values.to(device, how["dtype"] or torch.float32)

        self.leaves = {
            "hidden": of(*rows, features, strided=how["hidden"]),
            "weight": of(*{"expanded": (1, features), "transposed": (features, classes)}.get(
                how["weight"], (classes, features))),
        }  # fmt: skip
        if how["bias"]:
            self.leaves["bias"] = of(classes)
        for name, leaf in self.leaves.items():
            leaf.requires_grad_(name != how["frozen"])
        self.turned, self.weight_is = how["hidden"], how["weight"]
        self.classes = classes
        self.ignore_index = self.options.get("ignore_index", -100)
        target = torch.randint(classes, rows, generator=made)
        if how["ignored"]:
            target[:] = self.ignore_index
        elif self.ignore_index < 0:
            target.view(-1)[1::3] = self.ignore_index
        self.target = target.to(device, how["target"] or torch.int64)
        factors = torch.rand(classes, generator=made), torch.rand(rows, generator=made)
        self.class_weight, self.token_weight = (
            (t + 0.5).to(device) if how[name] else None
            for name, t in zip(("class_weight", "token_weight"), factors)
        )

    def tensors(self, leaves):
        hidden, weight = leaves["hidden"], leaves["weight"]
        if self.turned:
            hidden = hidden.permute([*range(hidden.dim())][::-1])
        if self.weight_is:
            weight = weight.T if self.weight_is == "transposed" else weight.expand(self.classes, -1)
        return hidden, weight, leaves.get("bias")

    def ours(self):
        """The loss and the gradients of the leaves that require them."""
        hidden, weight, bias = self.tensors(self.leaves)
        factors = {"class_weight": self.class_weight, "token_weight": self.token_weight}
        found = headroom.linear_cross_entropy(
            hidden, weight, self.target, bias, **factors, **self.options
        )
        return self.with_gradients(found[0] if "stats" in self.options else found, self.leaves)

    def exact(self):
        leaves = {
            name: leaf.detach().double().requires_grad_(leaf.requires_grad)
            for name, leaf in self.leaves.items()
        }
        hidden, weight, bias = self.tensors(leaves)
        target, token_weight = self.target.long(), self.token_weight
        target = torch.where(target == self.ignore_index, -100, target)
        if self.options.get("shift"):
            none = torch.full_like(target[..., :1], -100)
            target = torch.cat((target[..., 1:], none), -1)
            if token_weight is not None:
                token_weight = torch.cat((token_weight[..., 1:], none.float()), -1)
        names = {"label_smoothing": "eps", "softcap": "cap", "z_loss": "zl", "logit_scale": "scale"}
        given = {names[k]: v for k, v in self.options.items() if k in names}
        parts = reference(hidden, weight, target, bias, self.class_weight, token_weight, **given)
        how = {k: v for k, v in self.options.items() if k in ("reduction", "denominator")}
        if how.get("reduction", "mean") == "mean" and "denominator" not in how:
            if parts[3] == 0:  # no row counts: our loss is 0 or NaN, and the gradient 0
                loss = (parts[0] + parts[1]).sum()
                loss = loss + (float("nan") if self.options.get("empty") == "nan" else 0)
                return self.with_gradients(loss, leaves)
        return self.with_gradients(reduced(parts, **how), leaves)

    @staticmethod
    def with_gradients(loss, leaves):
        needed = [leaf for leaf in leaves.values() if leaf.requires_grad]
        upstream = torch.full((), 1.5, device=loss.device, dtype=loss.dtype).expand(loss.shape)
        loss.backward(upstream)
        return [loss.detach(), *(leaf.grad for leaf in needed)]


def is_refused(settings):
    into_grad = settings.get("accumulate_into_grad")
    return (
        (settings.get("reduction") == "none" and "denominator" in settings)
        or (into_grad and settings.get("dtype") == torch.float16)
        or (into_grad and "weight" in settings)
    )


PAIRS = [
    pytest.param(SETTINGS[a] | SETTINGS[b], SHAPES[k % len(SHAPES)], id=f"{a}, {b}")
    for k, (a, b) in enumerate(itertools.combinations(SETTINGS, 2))
    if not SETTINGS[a].keys() & SETTINGS[b].keys() and not is_refused(SETTINGS[a] | SETTINGS[b])
]


@pytest.mark.parametrize("settings, shape", PAIRS)
def test_pairs(settings, shape, device):
    layer = Layer(settings, shape, device)
    for got, exact in zip(layer.ours(), layer.exact(), strict=True):
        eps = torch.finfo(got.dtype).eps
        size = exact.abs().nan_to_num().max().item()
        if settings.get("weight") == "expanded":
            size = max(size, 1.0)  # what is added up over the classes cancels
        torch.testing.assert_close(
            got.double(), exact, rtol=16 * eps, atol=16 * eps * size + 1e-6, equal_nan=True
        )
