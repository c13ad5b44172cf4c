"""The functions of headroom.h that take lists of tensors, or matrices of rows and their sizes, one
config and an exec: their arguments, as their contracts and declarations say. c_abi.py and _rows.py
call them from that alone."""

from __future__ import annotations

import re
from ctypes import Structure, c_double, c_int32, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path

HEADER = Path(__file__).resolve().parents[3] / "capi/headroom.h"
KINDS = {
    "size_t": c_size_t,
    "double": c_double,
    "int64_t": c_int64,
    "int32_t": c_int32,
    "const float *": c_void_p,
}
DTYPES = ("f32", "bf16", "f16", "u8", "i8", "i16", "f64")  # in the order of hr_dtype


@dataclass
class ListFunction:
    name: str
    lists: dict[str, list[int]]  # the types that each takes
    may_be_null: set[str]
    config: type[Structure]
    defaults: dict[str, float]  # what the INIT macro gives, but for the size and what is NULL


def status_functions(text: str) -> dict[str, list[str]]:
    """The declarations: the parameters of each function that returns a status."""
    found = re.findall(r"^HR_API hr_status (hr_\w+)\((.*?)\);", text, re.MULTILINE | re.DOTALL)
    return {name: re.split(r",\s*", re.sub(r"\s+", " ", body)) for name, body in found}


def list_functions() -> dict[str, ListFunction]:
    text = HEADER.read_text()
    found = {}
    for name, parameters in status_functions(text).items():
        shape = (
            r"(const hr_tensor_list \*\w+;)+const (hr_\w+_config) \*config;const hr_exec \*exec;"
        )
        if match := re.fullmatch(shape, "".join(f"{each};" for each in parameters)):
            lists = [each.split("*")[1] for each in parameters[:-2]]
            config = _config(text, match[2])
            if config is not None:
                contract = text[: text.index(f"hr_status {name}(")].rpartition("/*")[2]
                found[name] = _function(name, lists, contract, *config)
    return found


@dataclass
class RowFunction:
    name: str
    outputs: list[str]  # come first
    inputs: list[str]
    may_be_null: set[str]
    config: type[Structure]
    enums: dict[str, int]  # members of the config, and how many values they have


def row_functions() -> list[RowFunction]:
    """Returns those that take matrices of one dtype, and nothing else."""
    text = HEADER.read_text()
    found: list[RowFunction] = []
    sizes = r"int64_t rows;int64_t cols;const (hr_\w+_config) \*config;const hr_exec \*exec;"
    for name, parameters in status_functions(text).items():
        shape = rf"(?:const hr_rows \*\w+;)+{sizes}"
        if not (match := re.fullmatch(shape, "".join(f"{each};" for each in parameters))):
            continue
        contract = text[: text.index(f"hr_status {name}(")].rpartition("/*")[2]
        words = {
            argument: line
            for names, line in re.findall(r"^ \* ([\w, ]+?)  +((?:in|out):.*)$", contract, re.M)
            for argument in names.split(", ")
        }
        matrices = [each.split("*")[1] for each in parameters[:-4]]
        before = {n for f in found if f.config.__name__ == match[1] for n in f.may_be_null}
        nullable = {each for each in matrices if "NULL" in words[each]}
        nullable |= {n for n in matrices if "as in the forward call" in words[n] and n in before}
        members = _members(text, match[1])
        found.append(
            RowFunction(
                name,
                [each for each in matrices if words[each].startswith("out")],
                [each for each in matrices if words[each].startswith("in")],
                nullable,
                type(match[1], (Structure,), {"_fields_": [(m, _kind(k)) for m, k in members]}),
                {m: _values(text, kind) for m, kind in members if kind.startswith("hr_")},
            )
        )
    return found


def _kind(name: str) -> type:
    return KINDS.get(name, c_int32)  # others are enums


def _values(text: str, enum: str) -> int:
    """How many values an enum has; the kernels take the first three dtypes."""
    body = re.search(rf"typedef enum {enum} {{(.*?)}} {enum};", text, re.DOTALL)
    return 3 if enum == "hr_dtype" else len(re.findall(r"\bHR_\w+ =", body[1]))


def _members(text: str, config: str) -> list[tuple[str, str]]:
    """Returns the names and types of the members of a config."""
    body = re.search(rf"typedef struct {config} {{(.*?)}} {config};", text, re.DOTALL)
    code = re.sub(r"/\*.*?\*/", "", body[1], flags=re.DOTALL)
    found = re.findall(r"([\w ]+?(?: \*| ))(\w+);", code)
    return [(member, kind.strip()) for kind, member in found]


def _config(text: str, name: str) -> tuple[type[Structure], dict[str, float]] | None:
    kinds = [(member, KINDS.get(kind)) for member, kind in _members(text, name)]
    if None in (kind for _, kind in kinds):  # it holds structs: a call of it has to be written
        return None
    macro = re.search(rf"#define {name.upper()}_INIT.*?{{(.*?)}}", text, re.DOTALL)
    values = [value.strip() for value in macro[1].replace("\\", "").split(",")]
    pairs = [(member, value) for (member, _), value in zip(kinds, values)]
    defaults = {member: float(value) for member, value in pairs[1:] if value != "NULL"}
    return type(name, (Structure,), {"_fields_": kinds}), defaults


def _function(name, lists, contract, config, defaults) -> ListFunction:
    types, may_be_null = {}, set()
    for each in lists:
        words = re.search(rf"^ \* {each} +(.*?)(?=^ \* \w+  |^ \*$|\Z)", contract, re.M | re.DOTALL)
        assert words, f"the contract of {name} does not say what {each} is"
        types[each] = [
            DTYPES.index(word) for word in re.findall(rf"\b({'|'.join(DTYPES)})\b", words[1])
        ]
        assert types[each], f"the contract of {name} does not say which types {each} has"
        if "NULL" in words[1]:
            may_be_null.add(each)
    return ListFunction(name, types, may_be_null, config, defaults)
