"""The device code of a built library: its instructions, and what each kernel takes."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Key = tuple[str, str]  # arch such as "90", and the mangled name of a kernel

LINE = re.compile(
    r"arch = sm_(?P<arch>\d+)|Function : (?P<function>\S+)|"
    r"^\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<text>[^;]*?)\s*;",
    re.M,
)
TEXT = re.compile(r"(?:@(?P<guard>!?U?P\w+)\s+)?(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>.*)", re.S)


class MissingTool(FileNotFoundError):
    """There is no disassembler on this machine."""


def cuobjdump() -> str:
    """Returns the path of cuobjdump: of CUDA_HOME, of PATH, or of the triton package.

    Raises:
        MissingTool: it is in none of them.
    """
    places = []
    if home := os.environ.get("CUDA_HOME"):
        places.append(Path(home) / "bin")
    places += [Path(folder) for folder in os.get_exec_path()]
    if triton := importlib.util.find_spec("triton"):
        places.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin")
    for place in places:
        if found := shutil.which("cuobjdump", path=str(place)):
            return found
    raise MissingTool(
        "no cuobjdump in CUDA_HOME, on PATH or in the triton package: install a CUDA toolkit, "
        "or `pip install triton`"
    )


def dump(library: Path, *options: str) -> str:
    """Returns what cuobjdump prints about a library."""
    command = [cuobjdump(), *options, str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def kernel_name(symbol: str) -> str:
    """Returns adamw_kernel of _Z12adamw_kernel12adamw_launch: instances share it."""
    mangled = re.match(r"_ZL?(\d+)(\w+)", symbol)
    return mangled[2][: int(mangled[1])] if mangled else symbol


@dataclass(frozen=True)
class Instruction:
    """One line of the disassembly."""

    address: int
    guard: str  # the predicate under which it takes effect, such as !P0, or ""
    opcode: str  # with its suffixes: LDG.E.128
    operands: str

    @cached_property
    def name(self) -> str:
        """The opcode without its suffixes."""
        return self.opcode.split(".")[0]

    @cached_property
    def predicates(self) -> frozenset[str]:
        """Predicates among its operands, named or, where they are all restored at once, not."""
        if self.name == "R2P":
            return frozenset(f"P{n}" for n in range(7))
        return frozenset(re.findall(r"\bU?P\d\b", self.operands))

    @cached_property
    def target(self) -> int | None:
        """The address that it can go on at instead of the next one."""
        # A call under a predicate is how some compilers leave a loop. It does not come back.
        if self.name not in ("BRA", "JMP") and not (self.name == "CALL" and self.guard):
            return None
        found = re.search(r"(?:0x|\b)([0-9a-f]+)\s*$", self.operands.split("(*")[0].strip())
        return int(found[1], 16) if found and "0x" in self.operands else None

    @cached_property
    def callee(self) -> int | None:
        """The address of the function that it calls."""
        found = re.search(r"0x([0-9a-f]+)\s*$", self.operands) if self.name == "CALL" else None
        return int(found[1], 16) if found else None

    @cached_property
    def access(self) -> tuple[str, int] | None:
        """("load" or "store", bytes of a thread) of an access of global memory, else None."""
        kinds = {"LDG": "load", "LD": "load", "STG": "store", "ST": "store"}
        if self.name not in kinds:
            return None
        bits = re.search(r"\.[US]?(8|16|64|128|256)\b", self.opcode)
        return kinds[self.name], int(bits[1]) // 8 if bits else 4

    @cached_property
    def written(self) -> frozenset[int]:
        """Registers that a load fills."""
        first = re.match(r"R(\d+)", self.operands)
        if first is None or self.access is None or self.access[0] != "load":
            return frozenset()
        return frozenset(range(int(first[1]), int(first[1]) + max(1, self.access[1] // 4)))

    @cached_property
    def read(self) -> frozenset[int]:
        """Registers that it reads, as far as the text names them: of a pair the first."""
        operands = self.operands
        stores = self.name in ("STG", "ST", "STS", "RED", "ATOMG", "BRA")
        if not stores and "," in operands:
            operands = operands.split(",", 1)[1]  # the first one is written
        elif not stores:
            return frozenset()
        found = [int(n) for n in re.findall(r"\bR(\d+)", operands)]
        if self.access is not None and self.access[0] == "store" and found:
            found += range(found[-1], found[-1] + max(1, self.access[1] // 4))
        return frozenset(found)


def instructions(library: Path, arch: str | None = None) -> dict[Key, list[Instruction]]:
    """Returns the instructions of each kernel, of one architecture or of all."""
    options = [] if arch is None else ["--gpu-architecture", f"sm_{arch}"]
    found: dict[Key, list[Instruction]] = {}
    current: list[Instruction] = []
    of_arch = ""
    for match in LINE.finditer(dump(library, "-sass", *options)):
        if match["arch"]:
            of_arch = match["arch"]
        elif match["function"]:
            current = found.setdefault((of_arch, match["function"]), [])
        elif text := TEXT.fullmatch(match["text"]):
            current.append(
                Instruction(
                    int(match["address"], 16),
                    text["guard"] or "",
                    text["opcode"],
                    text["operands"],
                )
            )
    return found


def resources(library: Path) -> dict[Key, dict[str, int]]:
    """Returns what each kernel takes: REG, STACK and LOCAL of a thread, SHARED of a block."""
    found: dict[Key, dict[str, int]] = {}
    arch = ""
    text = dump(library, "--dump-resource-usage")
    for match in re.finditer(r"arch = sm_(\d+)|Function (\S+):\s*(REG:.*)", text):
        if match[1]:
            arch = match[1]
        else:
            usage = re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", match[3])
            found[arch, match[2]] = {name: int(value) for name, value in usage}
    return found
