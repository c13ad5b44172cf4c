"""The op headroom::adamw8bit_ under torch.compile and torch.export."""

import io

import headroom
import pytest
import torch

from helpers.bits import assert_same_bits, same_bits
from helpers.reference8bit import (
    OPTIONS,
    sample,
)


def step_op(*lists, **options):
    headroom.functional.adamw8bit_(*lists, **(OPTIONS | options))


pytestmark = pytest.mark.usefixtures("fresh_dynamo")
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
COMPILED = {
    "default": {},
    "bnb_exact": {"bnb_exact": True},
    "stochastic": {"seeds": [2**64 - 1, 3, 4]},
    "L2, skip_nonfinite": {"decoupled": False, "skip_nonfinite": True},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", COMPILED.values(), ids=COMPILED)
def test_compiled(backend, options):
    eager = sample(param=torch.bfloat16)
    compiled = eager.clone()
    addresses = [t.data_ptr() for t in compiled.tensors()]
    step = torch.compile(step_op, backend=backend, fullgraph=True)
    for lr in (1e-2, 1e-2, 1e-3):
        step_op(*eager.lists(), lr=lr, **options)
        step(*compiled.lists(), lr=lr, **options)
        assert_same_bits(eager.tensors(), compiled.tensors())
    assert addresses == [t.data_ptr() for t in compiled.tensors()]


def test_compiled_with_dynamic_shapes():
    step = torch.compile(step_op, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (5, 90, 300):
        eager = sample([(n, 3), (n,)])
        compiled = eager.clone()
        step_op(*eager.lists())
        step(*compiled.lists())
        assert_same_bits(eager.tensors(), compiled.tensors())


def test_the_map_in_a_compiled_function():
    decode = torch.compile(
        lambda codes: headroom.functional.dynamic_map(True)[codes.int()],
        backend="aot_eager",
        fullgraph=True,
    )
    codes = torch.arange(256, dtype=torch.uint8)
    assert same_bits(decode(codes), headroom.functional.dynamic_map(True))


class Stepper(torch.nn.Module):
    """An update whose parameters and states are buffers."""

    def __init__(self):
        super().__init__()
        for name, (tensor,) in zip("pgmavbt", sample([(20, 30)]).lists()):
            self.register_buffer(name, tensor)

    def forward(self, grad):
        step_op(*([t] for t in (self.p, grad, self.m, self.a, self.v, self.b, self.t)))
        return self.p * 2


def test_export():
    module = Stepper()
    file = io.BytesIO()
    torch.export.save(torch.export.export(module, (torch.ones(20, 30),)), file)
    file.seek(0)
    exported = torch.export.load(file).module()
    for _ in range(3):
        grad = torch.randn(20, 30)
        assert torch.equal(module(grad), exported(grad))
    assert_same_bits(module.buffers(), exported.buffers())
