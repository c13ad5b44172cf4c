"""The loops that have a budget: which kernel, which mix of dtypes, and how long a turn may be."""

from __future__ import annotations

from dataclasses import dataclass, field

from .disassembly import Instruction, Key, kernel_name
from .loops import Turn, hot_loops
from .model import DEVICES

# Opcodes that come with a type of 16 bits.
F16 = ("HADD2.F32", "F2F.F16", "F2FP.F16", "F2FP.PACK")


@dataclass(frozen=True)
class Row:
    """A mix of dtypes in a kernel. The numbers that change with the kernels are the last two."""

    kernel: str
    mix: str
    traffic: float  # bytes of memory per element
    loads: float  # bytes that a thread loads per element; more than is moved where lanes share them
    stores: float
    # Elements of a turn: how many of these opcodes there are, over how many an element takes.
    marker: tuple[str, ...]
    per_element: float
    budget: dict[str, float] = field(default_factory=dict)  # instructions per element, by arch
    wanted: float | None = None  # on a Hopper GPU
    f16: bool = False

    def elements(self, turn: Turn) -> float:
        return turn.count(*self.marker) / self.per_element

    def fits(self, turn: Turn) -> bool:
        """Whether this is a turn over elements of the row's dtypes."""
        if turn.bytes("load") * self.stores != turn.bytes("store") * self.loads:
            return False
        elements = self.elements(turn)
        return (
            elements in POWERS_OF_TWO
            and turn.bytes("load") == self.loads * elements
            and turn.bytes("store") == self.stores * elements
            and (turn.count(*F16) > 0) == self.f16
        )


POWERS_OF_TWO = {2**n for n in range(10)}
SQRT, SQUARE, FACTOR, ADD = ("MUFU.RSQ",), ("FFMA",), ("FMUL",), ("FADD",)
LOGISTIC = ("FFMA", "MUFU")


def evenly(instructions: float) -> dict[str, float]:
    """A budget that is the same on all devices of the model."""
    return {device.arch: instructions for device in DEVICES}


# The budgets are what the kernels take today and 3 % for other versions of the compiler. After a
# change of a kernel `python -m benchmarks.instructions` prints what it takes now.
ADAMW, REMAINDER16 = {"90": 43.9, "86": 44.1}, {"90": 59.2, "86": 59.3, "75": 61.1}
ADAMW8BIT = {"90": 77, "86": 74.2, "75": 85}
F32_NORM, NORM = evenly(4.1), evenly(4.9)
REMAINDER16_8BIT = {"90": 91, "86": 87.6, "75": 91.3}
UNSCALE_BF16 = {"90": 6.2, "86": 6.2, "75": 13.5}
UNSCALE = {"90": 8.3, "86": 8.3, "75": 9.4}
SUM, COMPENSATED = {"90": 7.1, "86": 7.1, "75": 7.4}, {"90": 14, "86": 14, "75": 15.5}
SOFTMAX = {"90": 20, "86": 20}
EXP, FORWARD, BACKWARD = ("FFMA",), "cross_entropy_forward_kernel", "cross_entropy_backward_kernel"
GLU, GLU_BACK = {"90": 33.2, "86": 33.4, "75": 36.2}, {"90": 49.9, "86": 48.6, "75": 51.3}
NORM_Y = {"90": 11.9, "86": 11.9, "75": 18.9}
DIVERGENCE, DIVERGENCE_BACK = "divergence_forward_kernel", "divergence_backward_kernel"
ROWS = [
    Row("adamw_kernel", "f32", 28, 16, 12, SQRT, 1, ADAMW | {"75": 45.5}, 55),
    Row("adamw_kernel", "all bf16", 14, 8, 6, SQRT, 1, ADAMW | {"75": 65.8}, 58),
    Row("adamw_kernel", "all f16", 14, 8, 6, SQRT, 1, ADAMW | {"75": 47.2}, 58, f16=True),
    Row("adamw_kernel", "bf16, f32 moments", 22, 12, 10, SQRT, 1, ADAMW | {"75": 53.2}, 58),
    Row("adamw_kernel", "f16, f32 moments", 22, 12, 10, SQRT, 1, ADAMW | {"75": 47}, 58, f16=True),
    Row("adamw_kernel", "f32, bf16 moments", 20, 12, 8, SQRT, 1, ADAMW | {"75": 58.9}),
    Row("adamw_kernel", "remainder16", 18, 10, 8, SQRT, 1, REMAINDER16 | {"75": 73.4}, 75),
    Row("adamw_kernel", "remainder16, f32 moments", 26, 14, 12, SQRT, 1, REMAINDER16, 75),
    Row("adamw8bit_kernel", "f32", 16.06, 11, 6, SQRT, 1, {"90": 80, "86": 77.4, "75": 81}, 80),
    Row("adamw8bit_kernel", "bf16", 10.06, 7, 4, SQRT, 1, ADAMW8BIT, 75),
    Row("adamw8bit_kernel", "f16", 10.06, 7, 4, SQRT, 1, ADAMW8BIT | {"75": 79}, 75, f16=True),
    Row("adamw8bit_kernel", "remainder16", 14.06, 9, 6, SQRT, 1, REMAINDER16_8BIT, 95),
    Row("unscale_norm_kernel", "f32, norm", 4, 4, 0, SQUARE, 0.5, F32_NORM),
    Row("unscale_norm_kernel", "bf16, norm", 2, 2, 0, SQUARE, 0.5, NORM, 6),
    Row("unscale_norm_kernel", "f16, norm", 2, 2, 0, SQUARE, 0.5, NORM, 6, f16=True),
    Row("unscale_norm_kernel", "bf16, norm and unscale", 4, 2, 2, SQUARE, 0.5, UNSCALE_BF16),
    Row("unscale_norm_kernel", "f16, norm and unscale", 4, 2, 2, SQUARE, 0.5, UNSCALE, f16=True),
    Row("accumulate_kernel", "f32", 12, 8, 4, FACTOR, 1, {"90": 6.1, "86": 6.1, "75": 6.4}),
    Row("accumulate_kernel", "bf16", 10, 6, 4, FACTOR, 1, SUM),
    Row("accumulate_kernel", "f16", 10, 6, 4, FACTOR, 1, SUM, f16=True),
    Row("accumulate_kernel", "bf16, compensated", 18, 10, 8, FACTOR, 1, COMPENSATED),
    Row("rope_kernel", "f32", 8, 4, 4, ADD, 1, evenly(6.3)),
    Row("rope_kernel", "bf16", 4, 2, 2, ADD, 1, {"90": 5.7, "86": 5.7, "75": 12.9}),
    Row("rope_kernel", "f16", 4, 2, 2, ADD, 1, {"90": 5.7, "86": 5.7, "75": 6.7}, f16=True),
    Row("adafactor_sums_kernel", "f32", 8, 8, 0, FACTOR, 3, evenly(9.4)),
    Row("adafactor_sums_kernel", "bf16", 4, 4, 0, FACTOR, 3, evenly(11)),
    Row("adafactor_norm_kernel", "f32", 4, 4, 0, ADD, 1, evenly(7.2)),
    Row("adafactor_norm_kernel", "bf16", 2, 2, 0, ADD, 1, evenly(8.2)),
    Row("adafactor_apply_kernel", "f32", 12, 8, 4, ADD, 1, evenly(10.9)),
    Row("adafactor_apply_kernel", "bf16", 6, 4, 2, ADD, 1, {"90": 11, "86": 11, "75": 18.3}),
    Row("adafactor_apply_kernel", "f16", 6, 4, 2, ADD, 1, {"90": 11, "86": 11, "75": 12}, f16=True),
    Row(FORWARD, "f32", 4, 4, 0, EXP, 8, {"90": 19, "86": 19, "75": 20.1}),
    Row(FORWARD, "bf16", 2, 2, 0, EXP, 8, SOFTMAX | {"75": 21.1}),
    Row(FORWARD, "f16", 2, 2, 0, EXP, 8, SOFTMAX | {"75": 21.1}, f16=True),
    Row(BACKWARD, "f32", 8, 4, 4, EXP, 8, {"90": 20.5, "86": 20.5, "75": 21.7}),
    Row(BACKWARD, "bf16", 4, 2, 2, EXP, 8, SOFTMAX | {"75": 27.9}),
    Row(BACKWARD, "f16", 4, 2, 2, EXP, 8, SOFTMAX | {"75": 21.7}, f16=True),
    Row(BACKWARD, "f32 to bf16", 6, 4, 2, EXP, 8, SOFTMAX | {"75": 27.9}),
    # The loop of log-sum-exps, and what follows it where the mixture has to be computed.
    Row(DIVERGENCE, "f32, log-sum-exp", 4, 4, 0, EXP, 9, {"90": 21.8, "86": 21, "75": 21.7}),
    Row(DIVERGENCE, "bf16, log-sum-exp", 2, 2, 0, EXP, 9, {"90": 22.1, "86": 21.9, "75": 23.1}),
    Row(DIVERGENCE, "f32, mixture", 8, 8, 0, EXP, 34, {"90": 126, "86": 126.1, "75": 128.3}),
    Row(DIVERGENCE, "bf16, mixture", 4, 4, 0, EXP, 34, {"90": 127.9, "86": 128, "75": 130}),
    Row(DIVERGENCE_BACK, "f32, forward", 12, 8, 4, EXP, 19, {"90": 59, "86": 58.5, "75": 60.9}),
    Row(DIVERGENCE_BACK, "bf16, forward", 6, 4, 2, EXP, 19, {"90": 59, "86": 58.6, "75": 68.8}),
    Row(DIVERGENCE_BACK, "f32, mixture", 12, 8, 4, EXP, 34, {"90": 116, "86": 116.6, "75": 118.8}),
    Row(DIVERGENCE_BACK, "bf16, mixture", 6, 4, 2, EXP, 34, {"90": 121.8, "86": 121.3, "75": 131}),
    Row("glu_kernel", "silu, f32", 12, 8, 4, SQUARE, 10, GLU),
    Row("glu_kernel", "silu, bf16", 6, 4, 2, SQUARE, 10, GLU | {"75": 42.4}, 36),
    Row("glu_kernel", "silu, f16", 6, 4, 2, SQUARE, 10, GLU, 36, f16=True),
    Row("glu_kernel", "silu, f32, backward", 20, 12, 8, LOGISTIC, 12, GLU_BACK),
    Row("glu_kernel", "silu, bf16, backward", 10, 6, 4, LOGISTIC, 12, GLU_BACK | {"75": 63.8}, 60),
    Row("glu_kernel", "silu, f16, backward", 10, 6, 4, LOGISTIC, 12, GLU_BACK, 60, f16=True),
    # RMS norms: y from a row and its weights; and the pass of a gradient that finds its means, a
    # loop where rows do not fit in registers. The next pass has too many ways to be found.
    Row("norm_forward_kernel", "f32", 8, 8, 4, FACTOR, 2, evenly(11.1)),
    Row("norm_forward_kernel", "bf16", 4, 4, 2, FACTOR, 2, NORM_Y),
    Row("norm_forward_kernel", "f16", 4, 4, 2, FACTOR, 2, NORM_Y | {"75": 12.3}, f16=True),
    Row("norm_backward_long_kernel", "f32, means", 8, 12, 0, FACTOR, 3, evenly(11.9)),
    Row("norm_backward_long_kernel", "bf16, means", 4, 6, 0, FACTOR, 3, evenly(13.5)),
]


@dataclass(frozen=True)
class Found:
    """A row in the device code of one architecture."""

    row: Row
    turn: Turn

    @property
    def elements(self) -> float:
        return self.row.elements(self.turn)

    @property
    def instructions(self) -> float:
        return len(self.turn.instructions) / self.elements

    @property
    def branches(self) -> float:
        return self.turn.branches / self.elements

    @property
    def rank(self) -> tuple[float, float]:
        return -self.elements, self.instructions


def find(code: dict[Key, list[Instruction]]) -> dict[tuple[str, str, str], Found]:
    """Returns the main loop of each row: {(arch, kernel, mix): Found}.

    That is the one with most elements per turn, because others do what is left of a tensor, and of
    those the shortest, because a loop for any mix of dtypes fits rows that have an instance too. A
    number of elements that is no power of two comes from a way through a loop in the loop.
    """
    found: dict[tuple[str, str, str], Found] = {}
    kernels = {row.kernel for row in ROWS}
    for (arch, symbol), instructions in code.items():
        if (name := kernel_name(symbol)) not in kernels:
            continue
        for turn in (turn for loop in hot_loops(instructions) for turn in loop):
            for row in (row for row in ROWS if row.kernel == name and row.fits(turn)):
                key, fresh = (arch, name, row.mix), Found(row, turn)
                if key not in found or fresh.rank < found[key].rank:
                    found[key] = fresh
    return found
