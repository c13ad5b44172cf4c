"""Changes that make the tensor lists or the options of a call bad, and a check that a refused call
has written nothing."""

import torch

from helpers.bits import bits

NAN, INF = float("nan"), float("inf")


def snapshot(tensors):
    """The bits of strided tensors that have some; others cannot be written."""
    real = [
        t for t in tensors if t.layout == torch.strided and not t.is_quantized and not t.is_meta
    ]
    return real, [bits(t).clone() for t in real]


def assert_untouched(kept):
    assert all(torch.equal(bits(now), then) for now, then in zip(*kept))


def put(name, k, make):
    """Replaces tensor k of a list by make(tensor)."""

    def change(lists, options):
        column = getattr(lists, name)
        column[k] = make(column[k])

    return change


def option(**values):
    return lambda lists, options: options.update(values)


def one(value, dtype=torch.float32, shape=()):
    return torch.full(shape, value, dtype=dtype)


def expanded(tensor):
    return tensor[:1].expand(tensor.shape)


def overlapping(tensor):
    return tensor.flatten().as_strided(tensor.shape, (1, 1))


def misaligned(tensor):
    memory = bytearray(tensor.numel() * 4 + 1)
    return torch.frombuffer(memory, dtype=torch.float32, offset=1).view(tensor.shape)


def of_dtype(dtype):
    return lambda tensor: tensor.to(dtype)


def quantized(tensor):
    return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


def sparse(tensor):
    return tensor.to_sparse()


def meta(tensor):
    return tensor.to("meta")
