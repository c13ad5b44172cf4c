"""The container of saved states: a safetensors file with a checksum for every byte.

The file has the layout of safetensors, so any tool can read the tensors: the length of the header
in 8 bytes, the header in JSON, the data of the tensors one after the other. ``__metadata__`` holds

- ``crc32``, first, so that it lies at a fixed place: the CRC-32 of length and header, computed with
  zeros in this field;
- ``sequence``, behind it, in 16 digits: higher than that of any state file that was in the folder
  when this one was saved. It orders the files of a folder whatever the clock does. Files of format
  1 have none, and count as older than all that have one;
- ``headroom``, a JSON document (:data:`~.layout.DOCUMENT`): ``format`` (:data:`~.layout.FORMAT`),
  the ``tree`` that refers to tensors, ``piece`` (a number of bytes), and ``tensors``: for each the
  CRC-32 of each of its pieces, and its strides if its memory is dense in another order than that of
  its indices, which is the order of the file.

CRC-32 finds every flipped bit and every burst of up to 32. It is in the standard library, keeps up
with disks, and releases the interpreter's lock, so that pieces are summed while others are written
or read. Where the package isal is installed, its CRC-32 keeps up with memory.

The checksums are of the very bytes that are written and read: every piece is copied to memory that
belongs to the save before it is summed and written, so that a thread that goes on training does no
harm, and read to memory that belongs to the load before it is checked and used, so that no other
process can change it in between. Nothing is mapped.
"""

from .layout import MALFORMED, StateFileError
from .reading import StateFile, is_state_file
from .tensors import check_storage, check_tensor, identity
from .writing import write

__all__ = [
    "MALFORMED",
    "StateFile",
    "StateFileError",
    "check_storage",
    "check_tensor",
    "identity",
    "is_state_file",
    "write",
]
