"""Processes that are forked from a server, which has imported torch and done nothing with it: a new
interpreter would take seconds to import it."""

import multiprocessing
import os
import sys

IMPORTED = ["torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo", "pytest"]
IMPORTED += ["headroom.optim", "headroom.state"]


def context():
    """How to start such a process. Functions are sent to it by their names, as with spawn."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def run_fresh(folder, function, *arguments, seconds=300):
    """Returns the exit status of a function that returns one, and what it printed, to both streams.
    ``folder`` is for a file. A process that a signal ends has its negative number as status."""
    path = folder / "printed"
    process = context().Process(target=_run, args=(path, function, arguments), daemon=False)
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        raise TimeoutError(f"{function.__name__} took more than {seconds} s\n{path.read_text()}")
    return process.exitcode, path.read_text()


def _run(path, function, arguments):
    with open(path, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(function(*arguments))
