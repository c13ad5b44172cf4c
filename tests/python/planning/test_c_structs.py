"""The structs of headroom.h that planning has once more in Python: a C compiler says how the header
lays them out."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
from headroom.planning import ours

INCLUDE = Path(__file__).resolve().parents[3] / "capi"
MIRRORS = {
    "hr_exec": ours._Exec,
    "hr_mlp_config": ours._Config,
    "hr_mlp_needs": ours._Needs,
    "hr_linear_cross_entropy_config": ours._LossConfig,
    "hr_linear_cross_entropy_needs": ours._LossNeeds,
}


def source_of(name: str, members: list[str]) -> str:
    """A program that prints the struct's size, then place and size of each member. It does not
    compile if the struct has another number of members, even where one fits into padding."""
    places = "".join(
        f'    printf("%zu %zu\\n", offsetof({name}, {member}), sizeof one.{member});\n'
        for member in members
    )
    return (
        '#include <stddef.h>\n#include <stdio.h>\n#include "headroom.h"\nint main(void)\n{\n'
        f"    const {name} one = {{{', '.join('0' for _ in members)}}};\n"
        f'    printf("%zu 0\\n", sizeof one);\n{places}    return 0;\n}}\n'
    )


def layout_in_c(name: str, members: list[str], folder: Path) -> list[tuple[int, ...]]:
    source, program = folder / f"{name}.c", folder / name
    source.write_text(source_of(name, members))
    command = ["cc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-DHR_EXPERIMENTAL", f"-I{INCLUDE}"]
    done = subprocess.run([*command, source, "-o", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = subprocess.check_output([program], text=True).splitlines()
    return [tuple(map(int, line.split())) for line in lines]


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("name", MIRRORS)
def test_a_mirror_has_the_layout_of_the_header(name, tmp_path):
    mirror = MIRRORS[name]
    members = [field[0] for field in mirror._fields_]
    places = [getattr(mirror, member) for member in members]
    wanted = [(ctypes.sizeof(mirror), 0), *((place.offset, place.size) for place in places)]
    assert layout_in_c(name, members, tmp_path) == wanted


def test_every_mirror_is_compared():
    structs = {each for each in vars(ours).values() if isinstance(each, type(ctypes.Structure))}
    assert structs == set(MIRRORS.values())
