"""Arguments of another kind: None for a tensor, tensors on several devices, numbers for flags."""

import functools

import headroom
import pytest
import torch
from headroom import functional
from headroom.functional import (
    cross_entropy,
    divergence,
    experts,
    gemm,
    glu,
    layer_norm,
    rms_norm,
    rope,
)
from headroom.loss import linear_cross_entropy, linear_distillation_loss, linear_log_prob
from headroom.nn.functional import mlp_block

X, W, Y = torch.randn(4, 6), torch.randn(5, 6), torch.tensor([1, 0, 4, 2])
CALLS = {
    "rms_norm": (rms_norm, {"x": X, "weight": torch.ones(6), "residual": X}, 1),
    "layer_norm": (layer_norm, {"x": X, "weight": torch.ones(6), "bias": torch.ones(6)}, 1),
    "glu": (glu, {"gate": X, "up": X}, 1),
    "cross_entropy": (cross_entropy, {"logits": X, "target": Y, "weight": torch.ones(6)}, 2),
    "divergence": (divergence, {"student": X, "teacher": X, "target": Y}, 2),
    "rope": (rope, {"q": X[None], "cos": X[:, :3], "sin": X[:, :3], "k": X[None]}, 3),
    "gemm": (gemm, {"a": X, "b": X.T, "c": torch.eye(4), "bias": torch.ones(4)}, 2),
    "linear_cross_entropy": (
        linear_cross_entropy,
        {"hidden": X, "weight": W, "target": Y, "bias": torch.ones(5), "token_weight": X[:, 0]},
        3,
    ),
    "linear_log_prob": (linear_log_prob, {"hidden": X, "weight": W, "target": Y}, 3),
    "linear_distillation_loss": (
        linear_distillation_loss,
        {
            "student_hidden": X,
            "student_weight": W,
            "teacher_hidden": X,
            "teacher_weight": W,
            "target": Y,
        },
        4,
    ),
    "mlp_block": (
        functools.partial(mlp_block, activation="relu"),
        {
            "x": X,
            "gate_up_weight": torch.randn(6, 6),
            "down_weight": torch.randn(6, 3),
            "norm_weight": torch.ones(6),
        },
        3,
    ),
    "experts": (
        experts,
        {
            "x": X,
            "index": torch.tensor([[0, 1], [1, 0], [1, 1], [0, 2]]),
            "weight": torch.rand(4, 2),
            "gate_up": torch.randn(2, 6, 6),
            "down": torch.randn(2, 6, 3),
            "gate_up_bias": torch.randn(2, 6),
            "down_bias": torch.randn(2, 6),
        },
        5,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_something_else_for_a_tensor(name):
    """The error says which argument; the first ones of each row are required."""
    function, tensors, required = CALLS[name]
    function(**tensors)
    for key in list(tensors)[:required]:
        for value, said in ((None, "None"), ([1.0], "a list")):
            with pytest.raises(TypeError, match=rf"^{key} is {said}, wanted a tensor"):
                function(**tensors | {key: value})


@pytest.mark.parametrize("name", CALLS)
def test_devices_that_differ(name):
    """Each op and its fake refuses them, whichever is elsewhere: nothing unwritten is read."""
    function, tensors, _ = CALLS[name]
    for key in tensors:
        with pytest.raises(RuntimeError, match="on (meta|cpu), "):
            function(**tensors | {key: tensors[key].to("meta")})


@pytest.mark.parametrize("q", [W, None, [W], functional.quantize_matrix])
def test_something_else_for_a_matrix_of_few_bits(q):
    for call in (
        lambda: functional.linear_quantized(X, q),
        lambda: functional.dequantize_matrix(q),
    ):
        with pytest.raises(TypeError, match=r"^q is (a|None).*, wanted a QuantizedMatrix, as from"):
            call()


def test_something_else_for_a_tensor_and_numbers_of_adapters():
    lora, a, b = functional.lora_linear, torch.randn(2, 6), torch.randn(5, 2)
    for value in ([1.0], None):
        with pytest.raises(TypeError, match="^x is .*, wanted a tensor"):
            functional.quantize_matrix(value)
    with pytest.raises(ValueError, match="^to is \\['nf4'\\], wanted one of"):
        functional.quantize_matrix(W, ["nf4"])
    with pytest.raises(TypeError, match="^dropout must be a number, got 'x'"):
        lora(X, W, None, a, b, dropout="x")
    with pytest.raises(ValueError, match="^seed is 1180591620717411303424, wanted an integer of"):
        lora(X, W, None, a, b, dropout=0.5, seed=1 << 70)
    with pytest.raises(TypeError, match="^seed is 1.5, wanted an integer"):
        lora(X, W, None, a, b, dropout=0.5, seed=1.5)


def test_none_in_ops():
    ops = torch.ops.headroom
    with pytest.raises(TypeError, match="^dh is None, wanted a tensor"):
        ops.glu_backward(None, X, X, 0, False, False)
    with pytest.raises(TypeError, match="^logits is None, wanted a tensor"):
        ops.cross_entropy_backward_(X[:, 0], None, Y, None, *(X[:, 0],) * 3, 0, 0.0, 0.0, 0.0)


REFUSED = [
    *[(linear_cross_entropy, {"shift": value}, TypeError) for value in (2, 1.5, "x", 1)],
    (linear_cross_entropy, {"check_target": 1}, TypeError),
    (linear_cross_entropy, {"accumulate_into_grad": 1}, TypeError),
    (linear_cross_entropy, {"workspace": 0}, ValueError),
    (linear_cross_entropy, {"workspace": "0.1 B"}, ValueError),
    (linear_cross_entropy, {"class_weight": torch.ones(5) * 1j}, RuntimeError),
    (linear_cross_entropy, {"token_weight": torch.ones(4) * 1j}, RuntimeError),
    (linear_cross_entropy, {"denominator": torch.ones(()) * 1j}, RuntimeError),
    (cross_entropy, {"weight": torch.ones(6) * 1j}, RuntimeError),
    (cross_entropy, {"inplace_backward": 1}, TypeError),
    (cross_entropy, {"return_lse": "yes"}, TypeError),
    (divergence, {"inplace_backward": 0}, TypeError),
    (glu, {"packed": 2}, TypeError),
    (rope, {"interleaved": 1}, TypeError),
    (rope, {"token_major": "x"}, TypeError),
    (rope, {"offset": True}, TypeError),
    (rope, {"offset": 1.5}, TypeError),
    (gemm, {"transpose_a": 2}, TypeError),
    (mlp_block, {"residual": "x"}, TypeError),
    (experts, {"transposed": 1}, TypeError),
    (experts, {"alpha": "x"}, TypeError),
]


@pytest.mark.parametrize(("function", "option", "error"), REFUSED)
def test_options_of_another_kind(function, option, error):
    name = function.__name__
    tensors, (key,) = CALLS[name][1], option
    with pytest.raises(error, match=f"^{key} "):
        function(**tensors | option)


def test_gradients_that_cannot_be_added_to():
    """The forward pass refuses what the backward pass could not write."""
    weight = W.clone().requires_grad_()
    for grad in (torch.zeros(6, 5).T, torch.zeros(10, 6)[::2]):
        weight.grad = grad
        with pytest.raises(ValueError, match=r"weight.grad is .* strides .* wanted a contiguous"):
            headroom.linear_cross_entropy(X, weight, Y, accumulate_into_grad=True)
