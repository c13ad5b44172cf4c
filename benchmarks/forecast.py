"""How far off the forecast of an epoch is: its largest steps are run and compared with what the
forecast says, and others, drawn at random, may take no more than it says of them."""

from __future__ import annotations

import ast
import dataclasses
import gc
import importlib.util
import pathlib
import random
import re
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from . import _report
from .harness import rows_of

WORST, ERROR = 20, 0.01  # steps that are compared, and the bar of their errors
OTHERS = 100  # that are run besides
ROUNDING = 1e-5  # within which a step takes what is said of it
LONGEST = 1500
FILES = 40  # of the standard library


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    what: str
    make: Callable[[], tuple[Any, Any]]  # a model and its optimizer
    collate: Callable[[list[int]], Any]
    needs: str = "headroom"
    rows: int = 4
    steps: int = 1000


def lengths_of_functions() -> list[int]:
    """Returns the tokens (words and signs) of functions of the standard library."""
    found = []
    for path in sorted(pathlib.Path(ast.__file__).parent.glob("*.py"))[:FILES]:
        source = path.read_text(encoding="utf-8", errors="replace")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                text = ast.get_source_segment(source, node) or ""
                found.append(min(LONGEST, max(2, len(re.findall(r"\w+|[^\w\s]", text)))))
    return found


def epoch(case: Case, steps: int) -> list[list[int]]:
    """Returns the lengths in each batch, drawn from those of functions."""
    draws = random.Random(0)
    known = lengths_of_functions()
    return [[draws.choice(known) for _ in range(case.rows)] for _ in range(steps)]


def _gpt() -> tuple[Any, Any]:
    import headroom

    config = headroom.nn.TransformerConfig(
        vocab_size=512, hidden_size=64, layers=2, heads=4, kv_heads=4, features=256
    )
    model = headroom.nn.Transformer(config, save="L1")
    return model, headroom.optim.AdamW8bit(model.parameters())


def _padded(lengths: list[int]) -> dict[str, Any]:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    tokens = mask.long()
    labels = torch.where(mask, tokens, -100)
    return {"input_ids": tokens, "labels": labels, "attention_mask": tokens.clone()}


def _of_ours(lengths: list[int]) -> dict[str, Any]:
    found = _padded(lengths)
    return {"ids": found["input_ids"], "labels": found["labels"]}


def _llama() -> tuple[Any, Any]:
    import headroom
    import transformers

    sizes = dict(hidden_size=64, intermediate_size=172, num_hidden_layers=2)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    config = transformers.LlamaConfig(vocab_size=512, use_cache=False, **sizes, **heads)
    model = transformers.LlamaForCausalLM(config)
    headroom.patch(model)
    return model, headroom.optim.AdamW(model.parameters())


def _packed(lengths: list[int]) -> dict[str, Any]:
    import transformers

    rows = [{"input_ids": [1] * length} for length in lengths]
    return dict(transformers.DataCollatorWithFlattening()(rows))


def _bert() -> tuple[Any, Any]:
    import transformers

    sizes = dict(hidden_size=64, intermediate_size=256, num_hidden_layers=2)
    config = transformers.BertConfig(
        vocab_size=512, max_position_embeddings=LONGEST, num_attention_heads=4, **sizes
    )
    model = transformers.BertForMaskedLM(config)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def cases(device: torch.device, quick: bool) -> list[Case]:
    found = [
        Case("gpt-padded", "ours, GPT at L1, 8-bit AdamW", _gpt, _of_ours),
        Case("llama-packed", "patched Llama, packed rows", _llama, _packed, "transformers"),
        Case("bert-masked", "BERT with masks, torch's AdamW", _bert, _padded, "transformers"),
    ]
    found = [case for case in found if importlib.util.find_spec(case.needs)]
    return found[:1] if quick else found


def _loss(model: Any, batch: Any) -> torch.Tensor:
    """Returns the loss alone: logits that a loop holds are no part of a plan."""
    output = model(**batch)
    return getattr(output, "loss", output)


def _stepped(model: Any, optimizer: Any, batch: Any) -> int:
    """Returns the peak of a step."""
    from headroom.memory import track

    with track(model, optimizer, batch=batch, stacks=False) as tracked:
        _loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return tracked.peak_bytes


def compared(case: Case, device: torch.device, quick: bool) -> dict[str, Any]:
    """Returns the row of a case."""
    import headroom

    torch.manual_seed(0)
    model, optimizer = case.make()
    lengths = epoch(case, 30 if quick else case.steps)
    start = time.perf_counter()
    found = headroom.forecast(model, optimizer, lengths, collate=case.collate, progress=False)
    seconds = time.perf_counter() - start
    peaks = {}
    worst = found.worst(WORST)
    others = random.Random(1).sample(range(len(lengths)), min(OTHERS, len(lengths)))
    # The first step, which makes the optimizer's state, is run first.
    for count, step in enumerate(sorted({0, *worst, *others})):
        peaks[step] = _stepped(model, optimizer, found.batch(step))
        if count % 100 == 0:
            gc.collect()
    errors = [found.peak_bytes[step] / peaks[step] - 1 for step in worst]
    order = [peaks[step] for step in worst]
    return {
        "steps": len(lengths),
        "run": len(peaks),
        "distinct_sizes": len({tuple(sizes.items()) for sizes in found.sizes}),
        "plans": found.plans,
        "forecast_seconds": seconds,
        "foretold": [found.peak_bytes[step] for step in worst],
        "measured": order,
        "error": max(errors, key=abs),
        "same_order": order == sorted(order, reverse=True),
        "exact": sum(found.is_exact),
        "above": sum(
            peak > found.peak_bytes[step] * (1 + ROUNDING) for step, peak in peaks.items()
        ),
    }


def show(row: dict[str, Any]) -> None:
    head = f"{row['name']:<14}{row['what']:<32}"
    if "failed" in row:
        print(f"{head}{row['failed'][:200]}", flush=True)
        return
    print(
        f"{head}{row['steps']:>6}{row['distinct_sizes']:>7}{row['plans']:>7}"
        f"{row['forecast_seconds']:>8.1f}{100 * row['error']:>+9.2f} %"
        f"{'yes' if row['same_order'] else 'no':>7}{row['above']:>7}",
        flush=True,
    )


def compare(options: Namespace, chosen: list[Case]) -> int:
    """Runs the cases and prints the table: what ``python -m benchmarks forecast`` does."""
    device = torch.device(options.device)
    head = _report.header("forecast", device, options.quick)
    _report.show_header(head)
    print(
        f"\n{'':<46}{'steps':>6}{'sizes':>7}{'plans':>7}{'s':>8}{'error':>11}{'order':>7}{'above':>7}"
    )
    rows = rows_of(
        chosen,
        lambda case: compared(case, device, options.quick),
        show,
        lambda rows: {**head, "cases": rows},
        options.json,
    )
    failed = [row["name"] for row in rows if "failed" in row]
    if failed:
        print(f"\ndid not run: {', '.join(failed)}")
    missed = [
        row["name"]
        for row in rows
        if "failed" not in row
        and (abs(row["error"]) > ERROR or not row["same_order"] or row["above"])
    ]
    return 1 if failed or not rows or (options.check and missed) else 0
