"""The bits that headroom::adamw_ writes: rounded to nearest even, and the same on every instruction
set, any number of threads, and CUDA."""

import pytest
import torch
from headroom._core.binaries import _C

from helpers.bits import assert_same_bits, bits, same_bits
from helpers.reference import torch_fused
from helpers.samples import FLOATS, MIXES, Sample, mix_name, name_of, run, sample

# --- Rounding ------------------------------------------------------------------------------------


def all_values(dtype):
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def hard_cases(dtype):
    """float32 numbers: every value of a 16-bit type, the midpoints between them, and what lies next
    to either; and the ends of the float32 range."""
    values = all_values(dtype).float()
    values = values[values.isfinite()].sort().values
    middle = values[:-1] / 2 + values[1:] / 2
    centers = torch.cat([values, middle]).view(torch.int32)
    near = torch.cat([centers, centers + 1, centers - 1]).view(torch.float32)
    ends = torch.tensor([3.4028235e38, -3.4028235e38, float("inf"), -float("inf"), 1e-45, -1e-45])
    near = torch.cat([near, ends, torch.tensor([65519.996, 65520.0, 65536.0, 5.9e-8, 2.9e-8])])
    return near[~near.isnan()]


def flat(values, grads, moments):
    """A sample of one parameter: `values`, `grads`, and both moments as given."""
    step = torch.zeros((), dtype=torch.float64, device=values.device)
    return Sample([values], [grads], [moments], [torch.zeros_like(moments)], [], [step])


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=name_of)
def test_all_values_survive_a_step_of_nothing(dtype, device):
    """lr 0 and zero gradients: every one of the 65,536 values comes back, NaNs as one NaN."""
    values = all_values(dtype).to(device)
    lists = flat(values.clone(), torch.zeros_like(values), torch.zeros_like(values))
    run(lists, lr=0.0, weight_decay=0.0)
    want = torch.where(values.isnan().cpu(), torch.tensor(0x7FFF, dtype=torch.int16), bits(values))
    assert torch.equal(bits(lists.params[0]), want)


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=name_of)
def test_rounding_is_to_nearest_even_as_torch_rounds(dtype, device):
    """With beta1 = 0 the first moment is the gradient, so it shows how a float32 is rounded."""
    grads = hard_cases(dtype).to(device)
    grads = grads[grads.isfinite()]  # 0 * inf is NaN, here as in torch's lerp
    zeros = torch.zeros_like(grads, dtype=dtype).copysign(grads.to(dtype))  # keeps the sign of -0.0
    lists = flat(torch.zeros_like(grads), grads, zeros)
    run(lists, lr=0.0, beta1=0.0)
    assert torch.equal(bits(lists.exp_avgs[0]), bits(grads.to(dtype)))


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=name_of)
def test_parameters_round_to_nearest_even_as_torch_rounds(dtype, device):
    """Zero gradients and lr * decay = 1/2 halve the parameter, and do nothing else to it."""
    values = all_values(dtype)
    values = values[values.isfinite()].to(device)
    lists = flat(values.clone(), torch.zeros_like(values), torch.zeros_like(values))
    run(lists, lr=0.25, weight_decay=2.0)
    assert torch.equal(bits(lists.params[0]), bits((values.float() * 0.5).to(dtype)))


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_every_nan_is_stored_as_one(dtype, device):
    nan = {4: 0x7FFFFFFF, 2: 0x7FFF}[torch.empty(0, dtype=dtype).element_size()]
    grads = torch.tensor([float("nan"), 1.0, float("inf")], device=device)
    params = torch.tensor([1.0, float("nan"), 1.0], device=device).to(dtype)
    lists = flat(params, grads, torch.zeros(3, dtype=dtype, device=device))
    run(lists)
    assert bits(lists.params[0]).tolist() == [nan] * 3  # inf / inf in the last
    assert bits(lists.exp_avgs[0])[0] == nan and bits(lists.exp_avg_sqs[0])[0] == nan


def test_nan_stays_in_the_maximum(device):
    """As in torch.maximum: a NaN in either operand of amsgrad's maximum is not lost."""
    lists = sample([(3,)], device=device, amsgrad=True)
    lists.max_exp_avg_sqs[0][0] = float("nan")
    lists.grads[0][1] = float("nan")
    run(lists, amsgrad=True)
    assert lists.max_exp_avg_sqs[0].isnan().tolist() == [True, True, False]
    assert lists.params[0].isnan().tolist() == [True, True, False]


def test_zero_gradients_change_nothing_for_500_steps(device):
    lists = flat(
        torch.randn(100, device=device),
        torch.zeros(100, device=device),
        torch.zeros(100, device=device),
    )
    start = lists.params[0].clone()
    for _ in range(500):
        run(lists, weight_decay=0.0)
    assert same_bits(lists.params[0], start)
    assert not lists.exp_avgs[0].any() and not lists.exp_avg_sqs[0].any()
    assert lists.steps[0] == 500


@pytest.mark.parametrize("value", [1e-45, 1e-30, 1e30, 3e38], ids=str)
def test_gradients_whose_squares_leave_float32(value, device):
    """g * g underflows to 0 or overflows to inf; the update stays finite and as torch has it."""
    grads = torch.tensor([value, -value], device=device)
    lists = flat(torch.ones(2, device=device), grads, torch.zeros(2, device=device))
    theirs = torch_fused(lists.clone())
    run(lists)
    assert lists.params[0].isfinite().all()
    torch.testing.assert_close(lists.params[0], theirs.params[0], rtol=2**-22, atol=0)


# --- The same bits everywhere --------------------------------------------------------------------


def wild(mix, device="cpu", count=70001):
    """Random bit patterns (NaN, inf, denormal, huge) in all lists, in tensors of several sizes."""
    generator = torch.Generator().manual_seed(1)

    def raw(dtype, k):
        width = torch.empty(0, dtype=dtype).element_size()
        whole = torch.randint(-(2**31), 2**31, (k,), generator=generator)
        data = whole.to({2: torch.int16, 4: torch.int32}[width]).view(dtype)
        usual = torch.randn(k, generator=generator).to(dtype)
        return torch.where(torch.rand(k, generator=generator) < 0.3, data, usual).to(device)

    param, grad, state = mix
    lists = Sample()
    for k in (count, 1, 0, 33, count // 3):
        lists.params.append(raw(param, k))
        lists.grads.append(raw(grad, k))
        lists.exp_avgs.append(raw(state, k))
        lists.exp_avg_sqs.append(raw(state, k))
        lists.max_exp_avg_sqs.append(raw(state, k))
        lists.steps.append(torch.tensor(float(k), dtype=torch.float64, device=device))
    return lists


BIT_OPTIONS = {
    "plain": {},
    "L2, amsgrad, maximize": {"decoupled": False, "amsgrad": True, "maximize": True},
}


@pytest.fixture
def cpu_levels():
    """The instruction sets that this CPU has; the one in use is put back afterwards."""
    if _C is None:
        pytest.skip("headroom._C is not built")
    before, levels = _C.get_cpu_level(), []
    for level in _C.CpuLevel:
        try:
            _C.set_cpu_level(level)
        except ValueError:
            continue
        levels.append(level)
    yield levels
    _C.set_cpu_level(before)


@pytest.mark.parametrize("options", BIT_OPTIONS.values(), ids=BIT_OPTIONS)
@pytest.mark.parametrize("mix", MIXES, ids=mix_name)
def test_every_instruction_set_gives_the_same_bits(mix, options, cpu_levels):
    assert _C.CpuLevel.BASELINE in cpu_levels
    if len(cpu_levels) == 1:
        pytest.skip("this CPU has one instruction set only")
    lists = wild(mix, count=1009)
    if not options:
        lists.max_exp_avg_sqs = []
    results = []
    for level in cpu_levels:
        _C.set_cpu_level(level)
        results.append(run(lists.clone(), **options))
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize("mix", MIXES[::5], ids=mix_name)
def test_any_number_of_threads_gives_the_same_bits(mix):
    lists = wild(mix)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(run(lists.clone(), amsgrad=True))
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


def test_threads_divide_a_list_at_any_element(device):
    """Many tensors of odd sizes, larger than one task: the same bits as one call per tensor."""
    lists = sample([(7919,)] * 20 + [(3,)] * 100, device=device)
    torch.set_num_threads(2)
    together = run(lists.clone())
    alone = lists.clone()
    for k in range(len(alone.params)):
        run(Sample(*(column[k : k + 1] for column in alone.lists())))
    assert_same_bits(together, alone)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", BIT_OPTIONS.values(), ids=BIT_OPTIONS)
@pytest.mark.parametrize("mix", MIXES, ids=mix_name)
def test_cuda_gives_the_bits_of_the_cpu(mix, options):
    lists = wild(mix, count=10007)
    if not options:
        lists.max_exp_avg_sqs = []
    on_gpu = run(lists.map(lambda t: t.cuda()), **options)
    assert_same_bits(on_gpu.map(lambda t: t.cpu()), run(lists, **options))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_side_streams_and_graphs():
    lists = sample([(1000,), (3,)] * 300, device="cuda")
    want = lists.clone()
    for _ in range(4):
        run(want)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(lists)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(lists)
    for _ in range(3):
        graph.replay()
    assert_same_bits(lists, want)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_cuda_runs_on_the_device_of_its_tensors():
    lists = sample(device="cuda:1")
    want = run(lists.map(lambda t: t.cpu()))
    with torch.cuda.device(0):
        run(lists)
    assert_same_bits(lists.map(lambda t: t.cpu()), want)
