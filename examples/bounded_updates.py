"""Shows why a second moment must not round to zero: the largest update of Adam with 8-bit moments.

The gradients of one block of 256 elements have a scale of their own per element, as in a layer
whose inputs differ in size: g_i ~ N(0, 1) * 1e-3 * s_i with log s_i ~ N(0, sigma^2). Adam's updates
are bounded by about lr, whatever the gradients. The bound is lost if a second moment that is small
beside the largest of its block is stored as zero, as bitsandbytes' rule allows: the next step then
divides by eps.

    python examples/bounded_updates.py OUT.png      # also prints a table over several seeds
"""

import argparse
from pathlib import Path

import headroom
import torch
from torch import Tensor

# (sigma, share of gradients that are zero)
SETTINGS = {
    "σ = 1": (1.0, 0.0),
    "σ = 2": (2.0, 0.0),
    "σ = 2, half the gradients 0": (2.0, 0.5),
    "σ = 3": (3.0, 0.0),
}
RULES = {  # the options of adamw8bit_, or None: adamw_
    "float32": None,
    "8-bit": {},
    "8-bit, bitsandbytes' rule": {"bnb_exact": True},
}
COLORS = dict(zip(RULES, ("#56B4E9", "#009E73", "#D55E00")))
STEPS, WARM_UP, BLOCK, SEEDS = 600, 20, 256, 10
HYPER = {"lr": 1.0, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}


def gradients(seed: int = 0) -> Tensor:
    """float32 [steps, settings, elements]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (STEPS, len(SETTINGS), BLOCK)
    sigmas, zeros = torch.tensor(list(SETTINGS.values())).T
    scales = torch.exp(torch.randn(shape[1:], generator=generator) * sigmas[:, None])
    kept = torch.rand(shape, generator=generator) >= zeros[:, None]
    return torch.randn(shape, generator=generator) * 1e-3 * scales * kept


def largest_updates(rule: str, grads: Tensor) -> Tensor:
    """max |update| / lr of every step and setting, float32 [steps, settings].

    Parameters are zero before each step and lr is 1, so a parameter is its update afterwards.
    """
    count = grads.shape[1]
    params = [torch.zeros(BLOCK) for _ in range(count)]
    steps = [torch.zeros((), dtype=torch.float64) for _ in range(count)]

    def zeros(numel: int, dtype: torch.dtype) -> list[Tensor]:
        return [torch.zeros(numel, dtype=dtype) for _ in range(count)]

    moments = []
    for _ in ("exp_avg", "exp_avg_sq"):
        if RULES[rule] is None:
            moments += [zeros(BLOCK, torch.float32)]
        else:
            moments += [zeros(BLOCK, torch.uint8), zeros(1, torch.float32)]
    largest = torch.empty(len(grads), count)
    for t, now in enumerate(grads):
        for param in params:
            param.zero_()
        if RULES[rule] is None:
            headroom.functional.adamw_(params, list(now), *moments, [], steps, **HYPER)
        else:
            headroom.functional.adamw8bit_(
                params, list(now), *moments, steps, **RULES[rule], **HYPER
            )
        largest[t] = torch.stack([param.abs().amax() for param in params])
    return largest


def worst(rule: str, seeds: int = SEEDS) -> Tensor:
    """The largest after the warm-up, float32 [seeds, settings]."""
    curves = [largest_updates(rule, gradients(seed)) for seed in range(seeds)]
    return torch.stack([curve[WARM_UP:].amax(0) for curve in curves])


def draw(curves: dict[str, Tensor], path: Path) -> None:
    from chart import FAINT, INK, plt  # needs matplotlib, which the numbers do not

    figure, panels = plt.subplots(
        1, len(SETTINGS), figsize=(10, 3.5), dpi=160, sharey=True, layout="constrained"
    )
    for k, (name, axes) in enumerate(zip(SETTINGS, panels)):
        for z, (rule, curve) in zip((2, 3, 1), curves.items()):
            axes.plot(
                range(1, STEPS + 1), curve[:, k], color=COLORS[rule], lw=1, label=rule, zorder=z
            )
        axes.set_yscale("log")
        axes.set_title(name, fontsize=9.5, color=INK, loc="left")
        axes.set_xlabel("step", color=FAINT, fontsize=8.5)
        axes.tick_params(which="both", length=0, colors=FAINT, labelsize=8.5)
        axes.grid(axis="y", color="#d0d7de", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[:].set_visible(False)
    panels[0].set_ylabel("largest |update| / lr", color=FAINT, fontsize=8.5)
    figure.suptitle(
        "Adam's largest update, one block of 256 elements with gradients of unequal scale",
        x=0.01, ha="left", fontsize=11.5, fontweight="bold", color=INK,
    )  # fmt: skip
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=len(curves),
        frameon=False, fontsize=9, labelcolor=INK,
    )  # fmt: skip
    figure.savefig(path, facecolor="white")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the PNG to write")
    out = parser.parse_args().out
    print(f"largest |update| / lr after step {WARM_UP}: median of {SEEDS} seeds (largest)")
    print(f"{'':<30}" + "".join(f"{rule:>27}" for rule in RULES))
    found = [worst(rule) for rule in RULES]
    for k, name in enumerate(SETTINGS):
        cells = [f"{t[:, k].quantile(0.5):,.2f} ({t[:, k].amax():,.2f})" for t in found]
        print(f"{name:<30}" + "".join(f"{cell:>27}" for cell in cells))
    out.parent.mkdir(parents=True, exist_ok=True)
    draw({rule: largest_updates(rule, gradients()) for rule in RULES}, out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
