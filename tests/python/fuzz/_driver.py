"""What the fuzz drivers share: a loop with a seed and a time limit, hostile values, and snapshots.

A driver is a module with a function ``case(rng)``, which tries one thing, returns a word for what
came of it ("refused", "accepted"), and raises AssertionError where the code under test is wrong. It
ends with ``sys.exit(main(case))`` under ``if __name__ == "__main__"``. From the repository root:

    python -m tests.python.fuzz.convert --seconds 600
    python -m tests.python.fuzz.convert --seed 3 --first 1234 --cases 1       # one case again

Case ``i`` of a seed is always the same, whatever came before it. The cases run in a process of
their own, so that a crash or a case that hangs is reported with its number.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import math
import mmap
import os
import random
import signal
import struct
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["changed_tensor", "hostile", "hostile_tensor", "main", "mutated", "snapshot"]

HANG = 120  # seconds that one case may take

# ---- The loop ------------------------------------------------------------------------------------


def main(case: Callable[[random.Random], str], arguments: list[str] | None = None) -> int:
    """Runs cases until the time is up; prints how many there were. 0: none failed."""
    module = sys.modules[case.__module__]
    name = getattr(getattr(module, "__spec__", None), "name", None) or case.__module__
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=module.__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to go on")
    parser.add_argument(
        "--least", type=int, default=1, help="how many cases, however long they take"
    )
    parser.add_argument("--cases", type=int, default=sys.maxsize, help="how many at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--failures", type=int, default=1, help="stop after so many")
    options = parser.parse_args(arguments)
    at = mmap.mmap(-1, 8)  # the number of the case that runs, shared with the child
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = _loop(case, parser.prog, options, at)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    status = _wait(child, at)
    if os.WIFEXITED(status):
        return os.WEXITSTATUS(status)
    number = struct.unpack("q", at[:8])[0]
    how = signal.Signals(os.WTERMSIG(status)).name
    print(f"case {number:,} ended the process with {how}; {_again(parser.prog, options, number)}")
    return 1


def _wait(child: int, at: mmap.mmap) -> int:
    """The status of the child, which is ended where one case takes too long."""
    last, since = at[:8], time.monotonic()
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        if at[:8] != last:
            last, since = at[:8], time.monotonic()
        elif time.monotonic() - since > HANG:
            os.kill(child, signal.SIGABRT)  # faulthandler shows where it was
        time.sleep(0.02)


def _loop(case: Callable, prog: str, options: argparse.Namespace, at: mmap.mmap) -> int:
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    begin, tried, failures, outcomes = time.monotonic(), 0, 0, Counter()
    while tried < options.cases and (
        tried < options.least or time.monotonic() - begin < options.seconds
    ):
        number = options.first + tried
        at[:8] = struct.pack("q", number)
        rng = random.Random(f"{options.seed}/{number}")
        torch.manual_seed(rng.getrandbits(32))
        try:
            outcomes[case(rng)] += 1
        except Exception:  # an AssertionError, or what the code under test should not have raised
            failures += 1
            print(f"case {number:,} failed; {_again(prog, options, number)}")
            traceback.print_exc(file=sys.stdout)
            if failures >= options.failures:
                tried += 1
                break
        tried += 1
        if tried == 1:
            begin = time.monotonic()  # the first case also makes what all share
    seconds = time.monotonic() - begin
    found = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(outcomes.items()))
    print(f"{tried:,} cases in {seconds:.1f} s, seed {options.seed}: {found or 'none passed'}")
    return 1 if failures else 0


def _again(prog: str, options: argparse.Namespace, number: int) -> str:
    return f"again: {prog} --seed {options.seed} --first {number} --cases 1"


# ---- Hostile values ------------------------------------------------------------------------------

NUMBERS = (0, 1, -1, 2, 255, 2**24 + 1, 2**53, 2**63, 2**70, -(2**63))
FLOATS = (0.0, -0.0, 0.5, 1.5, -1.0, 1e-300, 1e300, -1e300, math.nan, math.inf, -math.inf)
DTYPES = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    torch.complex64,
)


def hostile(rng: random.Random) -> Any:
    """A value of any kind, which seldom belongs where it is put."""
    return rng.choice(
        [
            lambda: None,
            lambda: rng.choice([True, False]),
            lambda: rng.choice(NUMBERS),
            lambda: rng.choice(FLOATS),
            lambda: rng.choice(["", "x", "exp_avg", "1e-3", "\0", "é" * 9]),
            lambda: rng.choice([b"", b"\xff"]),
            lambda: rng.choice([[], (), {}, set(), [1], (0.9,), (0.9, 0.99), {"step": 1}, {0: {}}]),
            lambda: rng.choice([1j, object(), torch.float32, torch.device("cpu"), dict, len]),
            lambda: hostile_tensor(rng),
            lambda: hostile_tensor(rng),
        ]
    )()


def hostile_tensor(rng: random.Random) -> Tensor:
    shape = rng.choice([(), (1,), (0,), (3,), (2, 3), (0, 4), (64,), (1, 1, 1)])
    tensor = torch.full(shape, rng.choice([0.0, 1.0, 3.0])).to(rng.choice(DTYPES))
    return changed_tensor(rng, tensor) if rng.random() < 0.4 else tensor


def changed_tensor(rng: random.Random, tensor: Tensor) -> Tensor:
    """A tensor with one property changed: dtype, device, layout, shape, strides, or a value."""
    makes = [
        lambda t: t.to(rng.choice(DTYPES)),
        lambda t: t.to("meta"),
        lambda t: t.to_sparse(),
        lambda t: t.reshape(-1),
        lambda t: t[None],
        lambda t: t.flatten()[: t.numel() // 2],
        lambda t: torch.cat([t.flatten(), t.flatten()]),
        lambda t: t.flatten()[:1].expand(t.shape),
        lambda t: t.repeat_interleave(2, -1)[..., ::2],
        lambda t: t.mT.contiguous().mT,
        lambda t: t.detach().clone().requires_grad_(),
        lambda t: torch.nn.Parameter(t.detach().clone(), t.is_floating_point()),
        lambda t: t * 0 - 1,
        lambda t: t.flatten().index_fill(0, torch.tensor([0]), rng.choice(FLOATS)).view(t.shape),
        lambda t: torch.full_like(t, rng.choice(FLOATS)),
        lambda t: torch.full(t.shape, rng.choice(FLOATS), dtype=torch.float64),
        lambda t: _freed(t),
    ]
    if tensor.layout == torch.strided and not tensor.is_meta and _is_freed(tensor):
        return tensor  # torch does not look before it reads
    for _ in range(10):
        try:
            return rng.choice(makes)(tensor)
        except (RuntimeError, IndexError, TypeError):  # not to be done to a tensor of this kind
            continue
    return tensor


def _is_freed(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _freed(tensor: Tensor) -> Tensor:
    """As FSDP leaves tensors: with a shape and no memory."""
    tensor = tensor.detach().clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def mutated(rng: random.Random, tree: Any, times: int = 1) -> Any:
    """A copy of dicts, lists and tuples with ``times`` places changed. Tensors that are not changed
    are shared with the original."""
    for _ in range(times):
        paths = list(_paths(tree))
        tree = _changed(rng, tree, rng.choice(paths))
    return tree


def _paths(tree: Any, path: tuple = ()):
    yield path
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _paths(value, (*path, key))
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from _paths(value, (*path, index))


def _changed(rng: random.Random, tree: Any, path: tuple) -> Any:
    if not path:
        return _other(rng, tree)
    tree = list(tree) if isinstance(tree, tuple) else copy.copy(tree)
    tree[path[0]] = _changed(rng, tree[path[0]], path[1:])
    return tree


def _other(rng: random.Random, value: Any) -> Any:
    """Something else for a value, most often near to it."""
    if rng.random() < 0.2:
        return hostile(rng)
    if isinstance(value, dict):
        value = dict(value)
        kind = rng.random()
        if value and kind < 0.5:
            del value[rng.choice(list(value))]
        elif value and kind < 0.8:
            key = rng.choice(list(value))
            value[rng.choice([0, 1, 7, -1, "x", str(key), None])] = value.pop(key)
        else:
            value[rng.choice(["x", 0, 1, 99, "step", None])] = hostile(rng)
        return value
    if isinstance(value, (list, tuple)):
        value = list(value)
        kind = rng.random()
        if value and kind < 0.4:
            del value[rng.randrange(len(value))]
        elif value and kind < 0.7:
            value.append(rng.choice(value))
        else:
            value.insert(0, hostile(rng))
        return value
    if isinstance(value, Tensor):
        return changed_tensor(rng, value)
    if isinstance(value, bool) or value is None:
        return rng.choice([True, False, None, 1, "x"])
    if isinstance(value, (int, float)):
        return rng.choice([-value, value + 0.5, str(value), *NUMBERS, *FLOATS])
    return hostile(rng)


# ---- Snapshots -----------------------------------------------------------------------------------


def snapshot(value: Any) -> Any:
    """What a tree of tensors and numbers is, to the bit: two of them compare with ==."""
    if isinstance(value, Tensor):
        kept = (type(value), value.dtype, value.device, tuple(value.shape))
        parts = getattr(value, "tensor_attrs", None)
        if parts:  # torchao's
            return kept, [snapshot(getattr(value, name)) for name in parts]
        if value.is_meta or value.layout != torch.strided:
            return kept, id(value)
        if _is_freed(value):
            return kept, value.stride()
        flat = torch.empty(value.numel(), dtype=value.dtype).copy_(value.detach().reshape(-1))
        return kept, value.stride(), flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {
            id(key) if isinstance(key, Tensor) else key: snapshot(v) for key, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value), [snapshot(item) for item in value]
    if isinstance(value, float):
        return struct.pack("d", value)  # a NaN is itself
    return value
