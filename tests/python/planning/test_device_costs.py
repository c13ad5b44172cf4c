"""The fixed costs of a GPU, and what cuBLAS takes for products."""

import headroom
import pytest
import torch
import torch.nn.functional as F
from headroom._core.contexts import context
from headroom.planning import products
from headroom.planning.products import Products, cublas_workspace, keeps_workspaces
from torch import nn

KIB, MIB = 1 << 10, 1 << 20
SIZE = 8 * MIB + 128 * KIB  # of cuBLAS, on a device of compute capability 8.0


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "DISABLE_ADDMM_CUDA_LT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("TORCH_CUBLAS_WORKSPACE_CACHE", raising=False)


def test_workspaces_of_cublas():
    assert cublas_workspace((8, 0)) == 4096 * 1024 * 2 + 16 * 1024 * 8 == SIZE
    assert cublas_workspace((9, 0)) == cublas_workspace((12, 0)) == 32 * MIB
    assert cublas_workspace((9, 0), config=":4096:2:16:8") == SIZE
    assert cublas_workspace((9, 0), config=":0:0") == 0
    assert cublas_workspace((9, 0), config="no sizes") == 32 * MIB


def test_whether_they_are_kept_is_asked_of_torch(monkeypatch):
    can_give_back = hasattr(torch.backends.cuda, "blas_workspace_size") and (
        "TORCH_CUBLAS_WORKSPACE_CACHE" in torch.backends.cuda.blas_workspace_size.__doc__
    )
    assert keeps_workspaces() != can_give_back
    for value, kept in (("1", True), ("0", not can_give_back)):
        monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", value)
        assert keeps_workspaces() == kept
    older = torch.backends.cuda.__class__("torch.backends.cuda")  # which describes no such thing
    monkeypatch.setattr(torch.backends, "cuda", older)
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "0")
    assert keeps_workspaces()


def rows(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


A, B, BIAS = rows(512, 256), rows(256, 384), rows(384)
LT = MIB
ADDMM, MM, BMM = torch.ops.aten.addmm, torch.ops.aten.mm, torch.ops.aten.bmm
# What torch 2.15 allocates besides the result of each product: of operands that are copied, and of
# workspaces; read from the history of its allocator on a device of software.
SEEN = {
    "mm": (MM.default, (A, B), {}, ([], SIZE)),
    "of a transposed matrix": (MM.default, (B.t(), A.t()), {}, ([], SIZE)),
    "of every second row": (MM.default, (rows(1024, 256)[::2], B), {}, ([], SIZE)),
    "of every second column": (MM.default, (rows(512, 512)[:, ::2], B), {}, ([256 * KIB], SIZE)),
    "of one row for all": (MM.default, (A[:1].expand(512, 256), B), {}, ([256 * KIB], SIZE)),
    "of no columns": (MM.default, (A[:, :0], B[:0]), {}, None),
    "of no rows": (MM.default, (A[:0], B), {}, None),
    "a bias": (ADDMM.default, (BIAS, A, B), {}, ([], LT)),
    "a bias of one row": (ADDMM.default, (BIAS[None], A, B), {}, ([], LT)),
    "a bias, scaled": (ADDMM.default, (BIAS, A, B), {"alpha": 2}, ([], LT)),
    "a bias twice": (ADDMM.default, (BIAS, A, B), {"beta": 2}, ([], SIZE)),
    "a bias with gaps": (ADDMM.default, (rows(768)[::2], A, B), {}, ([], SIZE)),
    "a bias per row": (ADDMM.default, (rows(512, 1), A, B), {}, ([], SIZE)),
    "a number": (ADDMM.default, (rows(1, 1)[0, 0], A, B), {}, ([], SIZE)),
    "a matrix in 16 bits": (ADDMM.default, (rows(512, 384), A, B), {}, ([], LT)),
    "twice": (ADDMM.default, (rows(512, 384), A, B), {"beta": 2}, ([], LT)),
    "never": (ADDMM.default, (rows(512, 384), A, B), {"beta": 0}, ([], SIZE)),
    "a transposed matrix": (ADDMM.default, (rows(384, 512).t(), A, B), {}, ([], SIZE)),
    "a matrix": (
        ADDMM.default, (rows(512, 384).float(), A.float(), B.float()), {}, ([], SIZE)
    ),
    "in place": (torch.ops.aten.addmm_.default, (rows(512, 384), A, B), {}, ([], SIZE)),
    "one column": (ADDMM.default, (BIAS[:1], A, B[:, :1]), {}, ([], SIZE)),
    "an inner size of one": (ADDMM.default, (BIAS, A[:, :1], B[:1]), {}, ([], SIZE)),
    "one row": (ADDMM.default, (BIAS, A[:1], B), {}, ([], LT)),
    "bmm": (BMM.default, (rows(3, 512, 256), rows(3, 256, 384)), {}, ([], SIZE)),
    "bmm of one matrix": (
        BMM.default, (A.expand(3, 512, 256), rows(3, 256, 384)), {}, ([], SIZE)
    ),
    "bmm with gaps": (
        BMM.default, (rows(3, 512, 512)[:, :, ::2], rows(3, 256, 384)), {}, ([768 * KIB], SIZE)
    ),
    "a vector": (torch.ops.aten.mv.default, (A, rows(256)), {}, ([], SIZE)),
    "complex": (
        MM.default, (A.to(torch.complex64), B.to(torch.complex64)), {}, ([], SIZE)
    ),
    "integers": (MM.default, (A.to(torch.int64), B.to(torch.int64)), {}, None),
    "no product": (torch.ops.aten.add.Tensor, (A, A), {}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEN)
def test_what_a_product_takes(name, monkeypatch):
    monkeypatch.setattr(products, "keeps_workspaces", lambda: False)
    func, args, kwargs, wanted = SEEN[name]
    found = Products().scratch(func, args, kwargs, func(*args, **kwargs))
    assert (None if found is None else (found.copies, found.workspace)) == wanted


def planned(monkeypatch, keeps, **settings):
    monkeypatch.setattr(products, "keeps_workspaces", lambda: keeps)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    model = nn.Linear(64, 64, bias=False)
    x = (torch.zeros(8, 64), torch.zeros(8, 64))
    return headroom.plan(model, torch.optim.SGD(model.parameters()), x, loss=F.mse_loss,
                         device="cuda")  # fmt: skip


def test_they_are_given_back_after_each_product(monkeypatch):
    plan = planned(monkeypatch, False)
    # Of the product that runs while most is there.
    assert SIZE - 64 * KIB < plan.device_share.workspaces <= SIZE
    assert {(a.bytes, a.end is None) for a in plan.timeline.workspaces} == {(SIZE, False)}
    small = planned(monkeypatch, False, CUBLAS_WORKSPACE_CONFIG=":64:1")
    assert {a.bytes for a in small.timeline.workspaces} == {64 * KIB}
    assert small.peak_bytes == plan.peak_bytes  # of tensors
    assert plan.allocated_bytes - small.allocated_bytes == pytest.approx(SIZE - 64 * KIB, rel=0.01)


def test_they_are_kept_for_each_thread_that_multiplies(monkeypatch):
    plan = planned(monkeypatch, True)
    kept = [(a.bytes, a.end, a.phase) for a in plan.timeline.workspaces]
    assert kept == [(SIZE, None, "forward"), (SIZE, None, "backward")]
    assert plan.device_share.workspaces == 2 * SIZE


def test_a_setting_makes_bias_products_those_of_cublas(monkeypatch):
    monkeypatch.setattr(products, "keeps_workspaces", lambda: False)
    func, args, kwargs, _ = SEEN["a bias"]
    result = func(*args)
    monkeypatch.setenv("CUBLASLT_WORKSPACE_SIZE", "2048")
    assert Products().scratch(func, args, kwargs, result).workspace == 2 * MIB
    monkeypatch.setenv("DISABLE_ADDMM_CUDA_LT", "1")
    assert Products().scratch(func, args, kwargs, result).workspace == SIZE


def test_context_grows_with_the_generation():
    costs = [
        context(capability) for capability in [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (12, 0)]
    ]
    sizes = [size for size, _ in costs]
    assert sizes == sorted(sizes) and 200 * MIB < sizes[0] < sizes[-1] < 1024 * MIB
    assert all(source for _, source in costs)


def test_a_plan_for_a_gpu_that_is_named(monkeypatch):
    monkeypatch.setattr(products, "keeps_workspaces", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(2)))

    def planned(capability):
        x, forward = torch.empty(64, 256), lambda model, x: model(x).mean()
        options = dict(forward=forward, device="cuda", capability=capability)
        return headroom.plan(model, torch.optim.AdamW, x, **options)

    plain = planned(None).device_share
    for capability, workspace in (((7, 5), SIZE), ((8, 0), SIZE), ((9, 0), 32 * MIB)):
        plan = planned(capability)
        assert plan.device_share.context == context(capability)[0]
        assert plan.device_share.workspaces - plain.workspaces == workspace - SIZE
        assert "{}.{}".format(*capability) in str(plan)
    (advice,) = plan.advice(top=1)
    assert advice.plan.device_share.context == context((9, 0))[0]
    assert planned(None).device_share == plain == planned((8, 0)).device_share


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(capability="9.0"), "capability is '9.0', wanted a pair such as \\(9, 0\\)"),
        (dict(capability=(9, 0.0)), "capability is .*, wanted a pair"),
        (dict(capability=(0, 0)), "capability is .*, wanted a pair"),
        (dict(device="cpu"), "capability is of a GPU, and device is 'cpu': leave one of both"),
        (dict(measure=True), "capability is of a plan, and measure=True runs steps"),
    ],
)
def test_capabilities_that_are_refused(options, words):
    options = dict(device="cuda", capability=(9, 0)) | options
    with pytest.raises(ValueError, match=words):
        headroom.plan(nn.Linear(8, 8), None, torch.empty(2, 8), **options)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_workspace_is_what_torch_takes():
    if not hasattr(torch.backends.cuda, "cublas_workspace_size"):
        pytest.skip("this torch cannot say")
    capability = torch.cuda.get_device_capability()
    assert cublas_workspace(capability) == torch.backends.cuda.cublas_workspace_size()
