"""Rehearses programs. One process starts the device, and a child of it runs each program, since
torch and the device take seconds to load."""

import json
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


def rehearse_each(programs, folder, *, memory="1 GiB", steps=3):
    """Returns of each program its exit code, its report and what it printed.

    Args:
        programs: by names, the text of each, its arguments, the options of its rehearsal, and the
            words before it, if something starts it.
        folder: which the programs run in.
        memory: of the device.
        steps: after which they end.
    """
    words = {}
    for name, (text, arguments, options, *started) in programs.items():
        (folder / f"{name}.py").write_text(text)
        device = [f"--memory={memory}", "--capability=8.9", f"--steps={steps}"]
        words[name] = [*device, f"--report={name}.json", *options]
        words[name] += [*sum(started, []), f"{name}.py", *map(str, arguments)]
    command = [sys.executable, "-c", DRIVER]
    ended = subprocess.run(
        command, input=json.dumps(words), capture_output=True, text=True, cwd=folder, timeout=500
    )
    assert ended.returncode == 0, ended.stderr
    found = {}
    for line in ended.stdout.splitlines():
        name, code = line.split("\t")
        report, output = folder / f"{name}.json", (folder / f"{name}.txt").read_text()
        found[name] = int(code), json.loads(report.read_text()) if report.exists() else {}, output
    return found
