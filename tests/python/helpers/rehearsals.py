"""Rehearses programs. One process starts the device, and a child of it runs each program, since
torch and the device take seconds to load."""

import json
import re
import subprocess
import sys

DRIVER = """
import argparse, json, os, sys
from headroom_rehearsal import command

parser = argparse.ArgumentParser()
command.add_arguments(parser)
every = {name: parser.parse_args(words) for name, words in json.load(sys.stdin).items()}
first = next(iter(every.values()))
wanted = command._device(first)
command._begin(first, wanted)
import torch._dynamo  # which every optimizer imports when it is first used
from headroom.cli.programs import starting
from headroom_rehearsal.report import rehearse

for name, options in every.items():
    child = os.fork()
    if child == 0:
        out = os.open(f"{name}.txt", os.O_CREAT | os.O_WRONLY)
        os.dup2(out, 1), os.dup2(out, 2)
        # This device is a GPU to a program that is not rehearsed.
        on = None if options.on_gpu else wanted
        sys.exit(rehearse(starting(options.program, options.is_module), options, on))
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sep="\\t", flush=True)
"""


def rehearse_each(programs, folder, *, memory="1 GiB", steps=3, python=sys.executable):
    """Returns of each program its exit code, its report and what it printed.

    Args:
        programs: by names, the text or the path of each, its arguments, the options of its
            rehearsal, and the words before it, if something starts it.
        folder: which the programs run in.
        memory: of the device.
        steps: after which they end.
        python: that runs them.
    """
    words = {}
    for name, (program, arguments, options, *started) in programs.items():
        path = program
        if isinstance(program, str):
            path = f"{name}.py"
            (folder / path).write_text(program)
        device = [f"--memory={memory}", "--capability=8.9", f"--steps={steps}"]
        words[name] = [*device, f"--report={name}.json", *options]
        words[name] += [*sum(started, []), str(path), *map(str, arguments)]
    command = [str(python), "-c", DRIVER]
    ended = subprocess.run(
        command, input=json.dumps(words), capture_output=True, text=True, cwd=folder, timeout=900
    )
    assert ended.returncode == 0, ended.stderr
    found = {}
    for line in ended.stdout.splitlines():
        name, code = line.split("\t")
        report, output = folder / f"{name}.json", (folder / f"{name}.txt").read_text()
        found[name] = int(code), json.loads(report.read_text()) if report.exists() else {}, output
    return found


def parameters(output):
    """Returns the bytes of its parameters that a program has printed."""
    return int(re.search(r"^parameters (\d+)$", output, re.MULTILINE)[1])


def check_steps(code, report, output, *, steps=2):
    """Checks that a program made its steps, and that the report has its tensors."""
    assert code == 0 and report["fits"] is True and report["steps"] == steps, output
    held = report["after_step"]
    assert held["parameters"] == parameters(output)
    assert held["gradients"] > 0 and held["optimizer_state"] > 0
    rows = report["at_peak"]
    total = sum(row["bytes"] for row in rows)
    kept = sum(row["bytes"] for row in rows if row["kind"] == "parameters")
    assert held["parameters"] == kept < total
    assert 0.9 * report["peak_allocated"] < total <= report["peak_allocated"]  # in whole blocks


def check_started(plain, started):
    """Checks that a program which `headroom run` starts takes what it takes without."""
    more = started[1]["peak_allocated"] - plain[1]["peak_allocated"]
    assert 0 <= more <= 512  # a block of the allocator
