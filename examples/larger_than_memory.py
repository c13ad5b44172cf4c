"""Trains a model that is larger than the memory that its process may have, on a CPU.

    python examples/larger_than_memory.py [--layers 12] [--hidden 512]

Each row is a process of its own. The limit, three fifths of the weights alone, is the system's: on
memory that is in no file. With it the model trains only if its weights stream from a folder on the
disk, where the states of the optimizer are, too; and it computes the same losses, bit for bit, as
without a limit. A full fine-tune also releases each gradient as soon as it has been used.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import resource
import tempfile
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import headroom
import torch
from headroom.nn import Transformer, TransformerConfig

STEPS = 3
M_MMAP_THRESHOLD = -3  # of malloc.h


def private_bytes() -> int:
    """Returns the bytes that the limit counts: memory that is private and can be written."""
    with open("/proc/self/status") as lines:
        found = dict(line.split(":", 1) for line in lines)
    return int(found["VmData"].split()[0]) << 10


def made(kind: str, stream: bool, layers: int, hidden: int, folder: str) -> tuple[Any, Any]:
    """Returns a model, and an optimizer for it.

    Args:
        kind: "full", or "lora", over weights that are frozen.
        stream: whether weights, and states, are in files of the folder.
    """
    torch.manual_seed(0)
    config = TransformerConfig(
        vocab_size=256, hidden_size=hidden, layers=layers, heads=8, features=hidden * 8 // 3
    )
    model = Transformer(config, save="L5")
    if kind == "lora":
        headroom.lora(model, rank=4)
    disk = headroom.HostArena(file=folder)
    if stream:
        headroom.patch(model, save="L5", weights="host", host=disk)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = headroom.optim.AdamW(trained, lr=1e-3)
    if kind == "full":
        headroom.release_gradients(model, optimizer)
        if stream:
            headroom.optim.offload(optimizer, host=disk, bucket_bytes=1 << 20)
    return model, optimizer


def losses_of(model: Any, optimizer: Any) -> list[str]:
    """Trains for some steps, and returns the losses, all of their digits."""
    ids = torch.randint(256, (2, 32))
    losses = []
    for _ in range(STEPS):
        loss = model(ids, labels=ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def train(kind: str, stream: bool, share: float | None, layers: int, hidden: int) -> dict[str, Any]:
    """Returns the losses of a training, and the bytes of the weights.

    Args:
        share: of the bytes of the weights, that the process may have beside what it has before the
            model is made; None: as many as it wants.
    """
    torch.set_num_threads(1)
    # Large tensors come from the system and go back to it, so that the limit sees what is used.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 18)
    with tempfile.TemporaryDirectory() as folder:
        losses_of(*made(kind, stream, 2, 64, folder))  # all modules and threads are there then
        before = private_bytes()
        model, optimizer = made(kind, stream, layers, hidden, folder)
        weights = sum(p.nbytes for p in model.parameters())
        if share is not None:
            limit = before + int(share * weights)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        return {"losses": losses_of(model, optimizer), "weights": weights}


def run(*arguments: Any) -> dict[str, Any] | None:
    """Returns what :func:`train` does in a process of its own; None if it was refused memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
        try:
            return process.submit(train, *arguments).result()
        except MemoryError:
            return None
        except RuntimeError as error:  # that of torch
            if "allocate memory" in str(error):
                return None
            raise


def main(layers: int, hidden: int) -> None:
    share = 0.6
    print(f"{'training':10} {'weights':12} {'limit':10} loss")
    for kind in ("full", "lora"):
        found = {}
        for stream, limited in ((False, False), (False, True), (True, True)):
            result = run(kind, stream, share if limited else None, layers, hidden)
            found[stream, limited] = result
            where = "stream" if stream else "in memory"
            weights = found[False, False]["weights"]
            limit = f"{share * weights / 1e6:.0f} MB" if limited else "none"
            loss = "out of memory"
            if result is not None:
                loss = f"{float.fromhex(result['losses'][-1]):.6f}"
            print(f"{kind:10} {where:12} {limit:10} {loss}", flush=True)
        assert found[False, True] is None, "the model fits the limit as it is"
        assert found[True, True] == found[False, False], "the losses are others"
    print(f"{weights / 1e6:.0f} MB of weights; the losses are the same, bit for bit")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=512)
    given = parser.parse_args()
    main(given.layers, given.hidden)
