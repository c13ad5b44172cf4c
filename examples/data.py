"""Loads text to train on: the Python standard library's own sources, or any that the user names.

A batch is a pure function of (text, seed, step), so every rung sees the same data whatever its
memory settings, and a resumed run sees the data of the uninterrupted one.
"""

import math
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from words import Vocabulary

HELD_OUT_SHARE = 20  # one file in 20 (of a single file, its last 20th) is held out
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}


@dataclass(frozen=True)
class Text:
    tokens: Tensor  # uint8 or int32 [tokens]
    bytes_of: Tensor  # int64 [vocabulary]: how many bytes each token stands for

    def bits_per_byte(self, nats: float, targets: Tensor) -> float:
        """Of `targets`, given the mean of their cross entropies, in nats per token."""
        per_byte = targets.numel() / self.bytes_of[targets.cpu()].sum().item()
        return nats * per_byte / math.log(2)


def load(path: str | None, context: int, vocab: int = 256) -> tuple[Text, Text]:
    """Training and held-out text. `path`: a file, a folder, None: the library. A vocabulary of more
    than the 256 bytes holds the most common words of the training text too."""
    root = Path(path) if path else Path(os.__file__).parent
    if not root.exists():
        raise FileNotFoundError(f"--data {path}: no such file or folder")
    texts = [root.read_bytes()] if root.is_file() else read_folder(root, "*" if path else "*.py")
    parts = split_files(texts) if len(texts) > 1 else split_bytes(b"".join(texts))
    vocabulary = Vocabulary(parts[0], vocab)
    bytes_of = torch.tensor([len(word) for word in vocabulary.words])
    texts = [Text(encoded(part, vocabulary), bytes_of) for part in parts]
    for text, name in zip(texts, ("training", "held-out")):
        if len(text.tokens) <= context:
            found = f"{len(text.tokens)} tokens of {name} text"
            raise ValueError(f"{root}: {found}, but one sequence needs {context + 1}")
    return tuple(texts)


def encoded(text: bytes, vocabulary: Vocabulary) -> Tensor:
    tokens = vocabulary.encode(text)
    return torch.frombuffer(tokens, dtype=torch.uint8 if tokens.itemsize == 1 else torch.int32)


def read_folder(root: Path, pattern: str) -> list[bytes]:
    """Contents of the text files below `root`, in an order that only their names decide."""
    names = [p.relative_to(root) for p in root.rglob(pattern) if p.is_file() and not p.is_symlink()]
    names = [n for n in names if not SKIPPED.intersection(n.parts)]
    names.sort(key=lambda n: (zlib.crc32(n.as_posix().encode()), n.as_posix()))
    contents = ((root / n).read_bytes() for n in names)
    return [c for c in contents if c and b"\0" not in c]  # a zero byte: not a text file


def split_files(texts: list[bytes]) -> tuple[bytes, bytes]:
    held = max(1, len(texts) // HELD_OUT_SHARE)
    return b"\n".join(texts[held:]), b"\n".join(texts[:held])


def split_bytes(text: bytes) -> tuple[bytes, bytes]:
    cut = len(text) - len(text) // HELD_OUT_SHARE
    return text[:cut], text[cut:]


def windows(text: Text, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, the tokens after them, int64 [len(starts), context] each."""
    rows = text.tokens[starts[:, None] + torch.arange(context + 1)].long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def batch(text: Text, seed: int, step: int, size: int, context: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text.tokens) - context, (size,), generator=generator)
    return windows(text, starts, context)


def held_out(text: Text, count: int, context: int) -> tuple[Tensor, Tensor]:
    """`count` windows spread evenly over the held-out text, the same for every rung."""
    return windows(text, torch.linspace(0, len(text.tokens) - context - 1, count).long(), context)
