"""What makers of GPUs publish of them: the table in `capi/core/gpus.h`, from which the library
computes costs too, and what is reached of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_TABLE = (Path(__file__).parents[2] / "capi/core/gpus.h").read_text()
_ROW = re.compile(
    r'\{"(?P<name>[^"]+)", (?P<capability>\d+), (?P<half>[\d.]+), (?P<tf32>[\d.]+), '
    r"(?P<single>[\d.]+), (?P<bandwidth>[\d.]+)\},\s*/\* (?P<source>.*?) \*/"
)


def _share(name: str) -> float:
    return float(re.search(rf"#define GPU_OF_{name} +([\d.]+)", _TABLE)[1])


OF_PRODUCTS, OF_COPIES = _share("PRODUCTS"), _share("COPIES")
COPIED = {"H200": 4.3e12}  # bytes/s of a copy, where it was measured


@dataclass(frozen=True)
class Gpu:
    """A row of the table: operations/s of products by the type of their factors, and bytes/s."""

    name: str
    capability: int
    half: float
    tf32: float
    single: float
    bandwidth: float
    source: str

    @property
    def products(self) -> float:
        """Operations/s that large products of 16 bits reach."""
        return OF_PRODUCTS * self.half

    @property
    def copies(self) -> float:
        """Bytes/s that a copy reaches."""
        return COPIED.get(self.name, OF_COPIES * self.bandwidth)


def _gpu(row: re.Match) -> Gpu:
    rates = [1e12 * float(row[kind]) for kind in ("half", "tf32", "single")]
    return Gpu(
        row["name"], int(row["capability"]), *rates, 1e9 * float(row["bandwidth"]), row["source"]
    )


GPUS = {gpu.name: gpu for gpu in map(_gpu, _ROW.finditer(_TABLE))}
