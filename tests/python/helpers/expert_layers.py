"""Calls of experts: their cases, their tensors, and the same in torch, one expert after another."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from headroom.functional import experts
from headroom.functional.experts import ACTIVATIONS, BITS
from headroom.functional.experts import SAVES as SAVE_NUMBERS
from headroom.functional.quantize_matrix import layout_of

TOKENS, SLOTS, EXPERTS, HIDDEN, FEATURES = 37, 3, 6, 40, 24
SAVES = ("L0", "L1", "L2")
NAMES = ("x", "weight", "gate_up", "down", "gate_up_bias", "down_bias")
ADAPTERS = ("gate_up_a", "gate_up_b", "down_a", "down_b")
SCALES = {"gate_up": 0.75, "down": -1.5}  # of adapters

# Options of experts, and whether a case has biases: families of transformers.
CASES = {
    "mixtral": {},
    "gemma4": {"activation": "gelu_tanh", "biases": True},
    "nemotron": {"activation": "relu_squared", "gated": False},
    "gpt_oss": {
        "activation": "swiglu_clamped",
        "transposed": True,
        "interleaved": True,
        "limit": 1.0,
        "biases": True,
    },
    "deepseek_v4": {"limit": 0.75},
    "llama4": {"transposed": True},
}


def options_of(case):
    return {name: value for name, value in CASES[case].items() if name != "biases"}


def sample(case, dtype, device="cpu", tokens=TOKENS, index=None, weight=None, rank=0, adapter=None):
    """The tensors of a case by name, the experts of each token, and dy. Expert 3 has no rows, some
    rows are dropped, and some tokens have an expert twice. With a rank both stacks have adapters,
    the second of one more."""
    generator = torch.Generator().manual_seed(tokens)
    given = CASES[case]
    width = FEATURES * (2 if given.get("gated", True) else 1)

    def made(*shape, scale=1.0, dtype=dtype):
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    if index is None:
        index = torch.randint(-1, EXPERTS + 1, (tokens, SLOTS), generator=generator)
        index[index == 3] = 2
    gate_up, down = made(EXPERTS, width, HIDDEN, scale=0.2), made(EXPERTS, HIDDEN, FEATURES)
    if given.get("transposed"):
        gate_up, down = gate_up.mT.contiguous(), down.mT.contiguous()
    tensors = {
        "x": made(tokens, HIDDEN),
        "weight": made(*index.shape, dtype=weight or dtype).sigmoid(),
        "gate_up": gate_up,
        "down": down,
    }
    if given.get("biases"):
        tensors |= {"gate_up_bias": made(EXPERTS, width), "down_bias": made(EXPERTS, HIDDEN)}
    dy = made(tokens, HIDDEN)
    if rank:
        own = {"dtype": adapter or dtype, "scale": 0.3}
        sizes = ((rank, HIDDEN), (width, rank), (rank + 1, FEATURES), (HIDDEN, rank + 1))
        tensors |= {n: made(EXPERTS, *size, **own) for n, size in zip(ADAPTERS, sizes)}
    return tensors, index.to(device), dy


def function_of(case, index, stacks=None, **more):
    """The op as a function of a case's tensors; ``stacks`` are of few bits, and no leaves."""

    def call(**tensors):
        tensors |= stacks or {}
        required = [tensors.pop(name) for name in ("x", "weight", "gate_up", "down")]
        x, weight, gate_up, down = required
        for name, scale in SCALES.items():
            a, b = (tensors.pop(f"{name}_{factor}", None) for factor in "ab")
            if a is not None:
                tensors[f"{name}_adapter"] = (a, b, scale)
        return experts(x, index, weight, gate_up, down, **tensors, **(options_of(case) | more))

    return call


def reference(x, index, weight, gate_up, down, gate_up_bias=None, down_bias=None, **options):
    """In the dtype of x; of adapters with their sum with the stacks."""
    gated, limit = options.get("gated", True), options.get("limit")
    activation, y = options.get("activation", "silu"), torch.zeros_like(x)
    if not options.get("transposed"):
        gate_up, down = gate_up.mT, down.mT
    if "gate_up_a" in options:
        gate_up = gate_up + SCALES["gate_up"] * (options["gate_up_b"] @ options["gate_up_a"]).mT
    if "down_a" in options:
        down = down + SCALES["down"] * (options["down_b"] @ options["down_a"]).mT
    for e in range(len(down)):
        for slot in range(index.shape[1]):
            tokens = (index[:, slot] == e).nonzero()[:, 0]
            both = x[tokens] @ gate_up[e].to(x.dtype)
            if gate_up_bias is not None:
                both = both + gate_up_bias[e]
            gate, up = both, None
            if gated and options.get("interleaved"):
                gate, up = both[:, ::2], both[:, 1::2]
            elif gated:
                gate, up = both.chunk(2, -1)
            if limit is not None:
                gate = gate.clamp(max=limit)
                up = None if up is None else up.clamp(-limit, limit)
            if activation == "swiglu_clamped":
                h = gate * torch.sigmoid(options.get("alpha", 1.702) * gate)
                up = up + 1
            elif activation == "relu_squared":
                h = F.relu(gate) ** 2
            elif activation == "gelu_tanh":
                h = F.gelu(gate, approximate="tanh")
            else:
                h = F.silu(gate)
            out = (h if up is None else h * up) @ down[e].to(x.dtype)
            if down_bias is not None:
                out = out + down_bias[e]
            y = y.index_add(0, tokens, (out * weight[tokens, slot, None]).to(x.dtype))
    return y


def grouped_mm(case, index):
    """What transformers runs by default."""
    from transformers.integrations.moe import _default_apply_gate, grouped_mm_experts_forward

    given = CASES[case]
    activations = {"silu": F.silu, "relu_squared": lambda x: F.relu(x) ** 2}
    own = SimpleNamespace(
        num_experts=EXPERTS,
        has_gate=given.get("gated", True),
        has_bias=bool(given.get("biases")),
        is_transposed=bool(given.get("transposed")),
        has_post_expert_norm=False,
        _is_expert_parallel=False,
        act_fn=activations.get(
            given.get("activation", "silu"), lambda x: F.gelu(x, approximate="tanh")
        ),
    )

    def apply_gate(both):
        if given.get("activation") != "swiglu_clamped":
            return _default_apply_gate(own, both)
        gate = both[..., ::2].clamp(max=given["limit"])
        up = both[..., 1::2].clamp(-given["limit"], given["limit"])
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))

    own._apply_gate = apply_gate

    def call(x, weight, gate_up, down, gate_up_bias=None, down_bias=None):
        own.gate_up_proj = own.up_proj = gate_up
        own.gate_up_proj_bias = own.up_proj_bias = gate_up_bias
        own.down_proj, own.down_proj_bias = down, down_bias
        return grouped_mm_experts_forward(own, x, index, weight)

    return call


def run(function, tensors, dy):
    """The result and the gradients of all tensors, by name."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    y = function(**leaves)
    grads = torch.autograd.grad(y, list(leaves.values()), dy.to(y.dtype))
    return {"y": y.detach()} | dict(zip(leaves, grads))


def exact(case, index, tensors, dy):
    double = {name: t.double() for name, t in tensors.items()}
    return run(
        lambda x, weight, **rest: reference(x, index, weight, **rest, **options_of(case)),
        double,
        dy.double(),
    )


def kept_bytes(function, tensors, known=()):
    """What autograd holds between the passes, without stacks, adapters, and tensors that the caller
    knows."""
    kept = []
    given = [t for n, t in tensors.items() if n not in ("x", "weight")] + [*known]
    apart = {t.untyped_storage().data_ptr() for t in given}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        function(**tensors)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    return sum(size for address, size in storages.items() if address not in apart)


def errors(got, wanted):
    """Root mean squares: a largest error is that of one element by chance."""
    return {n: (got[n].double() - wanted[n]).square().mean().sqrt().item() for n in wanted}


def op_arguments(case, tensors, index, save, stacks=None):
    """The arguments of the op by name, with tiles of 4 rows."""
    stacks = stacks or {}
    given = dict.fromkeys((*NAMES, *ADAPTERS, "gate_up_scales", "down_scales")) | tensors
    for name in ("gate_up", "down"):
        layout = (0, 0, False)
        if name in stacks:
            given[name], given[f"{name}_scales"] = stacks[name].codes, stacks[name].scales
            layout = layout_of(stacks[name])
        given |= {f"{name}_{k}": v for k, v in zip(("format", "block_size", "nested"), layout)}
        given[f"{name}_adapter_scale"] = SCALES[name]
    options = {"activation": "silu", "gated": True, "transposed": False, "interleaved": False}
    options |= {"alpha": 1.702, "limit": 0.0} | options_of(case)
    return (
        given
        | options
        | {"index": index, "activation": ACTIVATIONS[options["activation"]], "tile_rows": 4}
        | {"experts": EXPERTS, "features": FEATURES, "save": SAVE_NUMBERS[save], "precision": 0}
        | {"wanted": sum(bit for name, bit in BITS.items() if name in tensors)}
    )


def op_calls(case, tensors, index, dy, save, stacks=None):
    """The arguments of the ops of experts by their names, for opcheck."""
    leaves = {name: t.detach().requires_grad_() for name, t in tensors.items()}
    calls = {"experts": op_arguments(case, leaves, index, save, stacks)}
    detached = {name: t.detach() for name, t in tensors.items()}
    given = op_arguments(case, detached, index, save, stacks)
    names = ("gates", "activated", "order", "offsets")
    kept = dict(zip(names, torch.ops.headroom.experts(**given)[1:]))
    del given["index"]
    given |= kept | {"dy": dy, "gradients": given["wanted"]}
    calls["experts_backward"] = given
    numbers = {n: v for n, v in given.items() if v is not None and not torch.is_tensor(v)}
    del numbers["gate_up_adapter_scale"], numbers["down_adapter_scale"], numbers["gradients"]
    for name in ("gate_up", "down"):
        a = tensors.get(f"{name}_a")
        numbers |= {f"{name}_dtype": 0, f"{name}_rank": 0 if a is None else a.shape[1]}
        numbers[f"{name}_adapter_dtype"] = 0
    sizes = {"tokens": len(dy), "slots": index.shape[1], "hidden": HIDDEN}
    own = {"dtype": 0, "weight_dtype": 0, "is_cuda": False}
    return calls | {"experts_workspace": numbers | sizes | own}


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, expected[name]), name
