"""The op headroom::newton_schulz_: both variants against the iteration in float64 and the polar
factor, its memory and operations, registration, and what it refuses."""

import pytest
import torch
from headroom.functional import newton_schulz_, newton_schulz_workspace
from torch.utils.flop_counter import FlopCounterMode

from helpers.muon import JORDAN, orthogonalized

# Polar Express, arXiv:2505.16932, without its factor of safety.
EXPRESS = [
    (8.2872, -23.5959, 17.3004),
    (4.1071, -2.9478, 0.5448),
    (3.9487, -2.9089, 0.5518),
    (3.3184, -2.4885, 0.5100),
    (2.3007, -1.6689, 0.4188),
]


def matrices(batch=3, m=20, n=50, dtype=torch.float32, device="cpu"):
    x = torch.randn(batch, m, n, generator=torch.Generator().manual_seed(0))
    return x.to(device, dtype)


def squares_of(x):
    return x.float().square().sum((1, 2))


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("variant", ["standard", "gram"])
def test_float32_follows_the_iteration(variant, steps, device):
    x = matrices(device=device)
    wanted = orthogonalized(x, EXPRESS[:steps])
    got = newton_schulz_(x, squares_of(x), coefficients=EXPRESS[:steps], variant=variant)
    assert got is x
    assert (x.double() - wanted).abs().max() < 2e-5


@pytest.mark.parametrize("variant", ["standard", "gram"])
def test_symmetric_products_in_blocks(variant, device):
    """Of more rows than one block has, on the CPU, the last of them smaller."""
    x = matrices(2, 300, 310, device=device)
    wanted = orthogonalized(x, EXPRESS[:3])
    newton_schulz_(x, squares_of(x), coefficients=EXPRESS[:3], variant=variant)
    assert (x.double() - wanted).abs().max() < 2e-5


def test_small_matrices_are_shared_among_threads():
    """More than one thread takes at a time: each is what it is in a batch with fewer others."""
    x = matrices(300, 64, 72)
    apart = [part.clone() for part in x.split(50)]
    newton_schulz_(x, squares_of(x), coefficients=JORDAN)
    for part in apart:
        newton_schulz_(part, squares_of(part), coefficients=JORDAN)
    assert (x - torch.cat(apart)).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_as_close_as_torchs(dtype, device):
    x = matrices(1, 48, 96, dtype, device)
    wanted = orthogonalized(x, JORDAN)
    theirs = x[0] / x[0].norm().clamp(min=1e-7)
    for a, b, c in JORDAN:
        gram = theirs @ theirs.T
        theirs = torch.addmm(theirs, torch.addmm(gram, gram, gram, beta=b, alpha=c), theirs, beta=a)
    newton_schulz_(x, squares_of(x), coefficients=JORDAN)
    ours = (x.double() - wanted).norm()
    assert ours <= 2 * (theirs.double() - wanted[0]).norm()


def test_the_result_is_near_the_polar_factor(device):
    x = matrices(2, 30, 60, device=device)
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    # The last polynomials are Newton-Schulz's own, whose fixed point is 1.
    coefficients = [*EXPRESS, *[(1.875, -1.25, 0.375)] * 3]
    newton_schulz_(x, squares_of(x), coefficients=coefficients)
    assert (x.double() - u @ vh).norm() < 1e-5 * (u @ vh).norm()


def test_columns_of_zeros_stay_so_and_change_nothing(device):
    x = matrices(device=device)
    padded = torch.nn.functional.pad(x, (0, 14))
    newton_schulz_(padded, squares_of(x), coefficients=JORDAN)
    newton_schulz_(x, squares_of(x), coefficients=JORDAN)
    torch.testing.assert_close(padded[..., :50], x, rtol=1e-5, atol=1e-5)
    assert (padded[..., 50:] == 0).all()


@pytest.mark.parametrize("variant, squares", [("standard", 2), ("gram", 4)])
def test_workspace(variant, squares):
    x = matrices()
    needed = newton_schulz_workspace(3, 20, 50, torch.float32, variant)
    assert needed == 12032 + squares * 4864
    more = newton_schulz_workspace(3, 20, 50, torch.float32, variant, "cuda")
    assert more == needed + (32 << 20)
    exact, less = (torch.empty(n, dtype=torch.uint8) for n in (needed, needed - 1))
    newton_schulz_(x, squares_of(x), coefficients=JORDAN, variant=variant, workspace=exact)
    with pytest.raises(RuntimeError, match=f"workspace_bytes is {needed - 1}, wanted {needed}"):
        newton_schulz_(x, squares_of(x), coefficients=JORDAN, variant=variant, workspace=less)


@pytest.mark.parametrize("variant, squares", [("standard", 5 * 2), ("gram", 2 * (5 + 9))])
def test_operations_are_counted(variant, squares):
    x, times = matrices(), {"standard": 5, "gram": 2}[variant]
    with FlopCounterMode(display=False) as counter:
        newton_schulz_(x, squares_of(x), coefficients=JORDAN, variant=variant)
    wanted = 3 * (times * 4 * 20 * 20 * 50 + squares * 20**3)
    assert counter.get_total_flops() == wanted


def test_opcheck():
    x = matrices()
    for gram in (False, True):
        workspace = torch.zeros(1 << 16, dtype=torch.uint8)
        options = {"coefficients": [3.4445, -4.775, 2.0315] * 2, "eps": 1e-7}
        torch.library.opcheck(
            torch.ops.headroom.newton_schulz_.default,
            (x, squares_of(x), workspace),
            options | {"gram": gram, "precision": 0},
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
        )


def test_a_compiled_call_has_the_bits_of_the_eager_one(fresh_dynamo):
    def call(x, squares):
        return newton_schulz_(x, squares, coefficients=JORDAN)

    x, y = matrices(), matrices()
    call(x, squares_of(x))
    torch.compile(call, backend="aot_eager", fullgraph=True)(y, squares_of(y))
    assert torch.equal(x, y)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"x": torch.ones(3, 50, 20)}, "m is 50 and n 20"),
        ({"x": torch.ones(20, 50)}, "batch, m, n"),
        ({"x": torch.ones(3, 50, 20).mT}, "contiguous"),
        ({"squares": torch.ones(2)}, "squares must be"),
        ({"coefficients": [(1.0, 2.0)]}, "wanted three for each step"),
        ({"coefficients": [(1.0, float("nan"), 2.0)]}, "coefficients.1. is nan"),
        ({"eps": 0.0}, "eps is 0"),
        ({"workspace": torch.empty(9, dtype=torch.float32)}, "workspace must be"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_it_refuses(change, words):
    x = matrices()
    space = torch.empty(1 << 16, dtype=torch.uint8)
    given = {"x": x, "squares": squares_of(x), "coefficients": JORDAN, "workspace": space}
    before = x.clone()
    with pytest.raises(RuntimeError, match=words):
        newton_schulz_(**given | change)
    assert torch.equal(x, before)


def test_an_unknown_variant():
    with pytest.raises(ValueError, match="variant is 'fast'"):
        newton_schulz_(matrices(), torch.ones(3), coefficients=JORDAN, variant="fast")
