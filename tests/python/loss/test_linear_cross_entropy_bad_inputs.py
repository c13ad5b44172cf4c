"""What headroom.linear_cross_entropy refuses, and the error that it gives."""

import headroom
import pytest
import torch

from helpers.linear_cross_entropy import CLASSES, sample


def test_bad_inputs():
    leaves, target, _ = sample()
    x, w, b = leaves
    call = headroom.linear_cross_entropy
    wrong = target.clone()
    wrong[7] = CLASSES
    refused = [
        (RuntimeError, rf"target\[7\] is {CLASSES}, wanted a class", lambda: call(x, w, wrong)),
        (RuntimeError, "weight must be a matrix", lambda: call(x, w[:, 1:], target)),
        (RuntimeError, "weight has dtype", lambda: call(x, w.double(), target)),
        (RuntimeError, "bias must be a tensor", lambda: call(x, w, target, b[1:])),
        (RuntimeError, "target must have the shape", lambda: call(x, w, target[1:])),
        (RuntimeError, "target has dtype", lambda: call(x, w, target.float())),
        (RuntimeError, "wanted float32, bfloat16", lambda: call(x.double(), w.double(), target)),
        (
            RuntimeError,
            "class_weight must",
            lambda: call(x, w, target, class_weight=b.detach()[1:]),
        ),
        (RuntimeError, "token_weight requires", lambda: call(x, w, target, token_weight=x[:, 0])),
        (
            RuntimeError,
            "token_weight has shape",
            lambda: call(x, w, target, token_weight=torch.ones(1, *target.shape)),
        ),
        (
            RuntimeError,
            "denominator requires grad",
            lambda: call(x, w, target, denominator=x.sum()),
        ),
        (RuntimeError, "label_smoothing is 2", lambda: call(x, w, target, label_smoothing=2.0)),
        (RuntimeError, "softcap is -1", lambda: call(x, w, target, softcap=-1.0)),
        (RuntimeError, "logit_scale is 0", lambda: call(x, w, target, logit_scale=0.0)),
        (RuntimeError, "dimension of a sequence", lambda: call(x[0], w, target[0], shift=True)),
        (ValueError, "reduction is 'max'", lambda: call(x, w, target, reduction="max")),
        (ValueError, "mode is 'rows'", lambda: call(x, w, target, mode="rows")),
        (ValueError, "empty is 'one'", lambda: call(x, w, target, empty="one")),
        (ValueError, "stats is 'lse'", lambda: call(x, w, target, stats="lse")),
        (ValueError, "workspace is 'much'", lambda: call(x, w, target, workspace="much")),
        (
            ValueError,
            "denominator is given",
            lambda: call(x, w, target, reduction="none", denominator=3.0),
        ),
        (
            RuntimeError,
            "needs all classes at once",
            lambda: call(x, w, target, stats=("rank",), mode="vocabulary", workspace=1),
        ),
        (
            ValueError,
            "weight is not a leaf",
            lambda: call(x, w * 1, target, accumulate_into_grad=True),
        ),
    ]
    for name in ("shift", "accumulate_into_grad", "check_target"):
        words = f"{name} is 2, wanted True or False"
        refused.append((TypeError, words, lambda name=name: call(x, w, target, **{name: 2})))
    refused.append(
        (ValueError, "workspace is 0, wanted 1 byte", lambda: call(x, w, target, workspace=0))
    )
    for error, message, refuse in refused:
        with pytest.raises(error, match=message):
            refuse()
