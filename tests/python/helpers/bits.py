"""The bits of tensors, and values whose bits are lost easily."""

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor):
    """The bits of the elements, in logical order, as integers on the CPU."""
    return tensor.detach().cpu().contiguous().view(_INTEGERS[tensor.element_size()])


def same_bits(left, right):
    return left.dtype == right.dtype and torch.equal(bits(left), bits(right))


def assert_same_bits(left, right):
    """Two samples or lists of tensors, element by element."""
    left, right = (x.tensors() if hasattr(x, "tensors") else list(x) for x in (left, right))
    assert len(left) == len(right)
    for k, (a, b) in enumerate(zip(left, right)):
        assert same_bits(a, b), f"tensor {k} of {len(left)}: {a} is not {b}"


def ulps(left, right):
    """How many representable numbers lie between two tensors of one 16-bit dtype, elementwise."""

    def order(tensor):
        raw = bits(tensor).int()
        return torch.where(raw < 0, -(raw & 0x7FFF), raw)

    assert left.dtype == right.dtype and left.element_size() == 2
    return (order(left) - order(right)).abs()


def special(dtype):
    """Values that a step with lr 0 could spoil: signed zeros, denormals, the largest numbers."""
    info = torch.finfo(dtype)
    values = [0.0, -0.0, info.max, info.min, info.tiny, -info.tiny / 2, info.eps, 1.0, -3.0]
    return torch.tensor(values, dtype=dtype).reshape(9, 1)
