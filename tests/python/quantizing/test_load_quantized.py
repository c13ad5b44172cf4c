"""Models that are filled from safetensors files, whose weights are quantized as they are read."""

import json
import struct

import headroom
import pytest
import torch
from headroom.nn import Linear4bit
from torch import nn

from helpers.bits import assert_same_bits
from helpers.fresh import run_fresh

safetensors = pytest.importorskip("safetensors.torch")


class Model(nn.Module):
    """Layers, a tied head, and buffers of both kinds."""

    def __init__(self, width=32):
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.up = nn.Linear(width, 2 * width + 8)
        self.down = nn.Linear(2 * width + 8, width, bias=False)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(self.norm(x + self.down(self.up(x).relu())))


def on_meta(kind=Model, **options):
    with torch.device("meta"):
        return kind(**options)


def state_of(model):
    state = {k: v.detach().clone() for k, v in model.state_dict().items()}
    state.pop("head.weight", None)
    return state


def save(state, path):
    safetensors.save_file(state, path)
    return path


def assert_same_state(got, wanted):
    got, wanted = got.state_dict(), wanted.state_dict()
    assert list(got) == list(wanted)
    for key, value in wanted.items():
        assert got[key].dtype == value.dtype and torch.equal(got[key], value), key


@pytest.mark.parametrize("to", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("search", [False, True])
def test_a_file_of_weights(to, dtype, search, tmp_path):
    model = Model().to(dtype)
    path = save(state_of(model), tmp_path / "model.safetensors")
    loaded = on_meta()
    report = headroom.load_quantized(loaded, path, to, block_size=32, search=search)
    wanted = headroom.quantize(model, to, block_size=32, search=search)
    assert_same_state(loaded, model)
    assert str(report) == str(wanted)
    assert loaded.head.weight is loaded.embedding.weight and loaded.embedding.weight.requires_grad
    assert_same_bits(loaded.eval()(torch.arange(4)), model.eval()(torch.arange(4)))


@pytest.mark.parametrize("form", ["folder", "index", "list", "str"])
def test_shards(form, tmp_path):
    model = Model()
    state = state_of(model)
    names = [f"model-{k}-of-3.safetensors" for k in range(3)]
    places = {key: names[k % 3] for k, key in enumerate(state)}
    for name in names:
        save({key: state[key] for key in state if places[key] == name}, tmp_path / name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    given = {
        "folder": tmp_path,
        "str": str(tmp_path),
        "index": index,
        "list": [tmp_path / name for name in names],
    }
    loaded = on_meta()
    headroom.load_quantized(loaded, given[form])
    headroom.quantize(model)
    assert_same_state(loaded, model)


@pytest.mark.parametrize("to", ["nf4", "int8"])
def test_what_was_quantized_comes_as_it_is(to, tmp_path):
    """With its own format, and its other weights as they are."""
    model = Model()
    headroom.quantize(model, to, block_size=128, double=False, skip=["up", "head"])
    path = save(state_of(model), tmp_path / "model.safetensors")
    loaded = on_meta()
    report = headroom.load_quantized(loaded, path)
    assert_same_state(loaded, model)
    assert [one.name for one in report.quantized] == ["down"]
    assert {one.name: one.reason for one in report.left}["up.weight"] == "the files have it so"
    again = on_meta()
    headroom.quantize(again, to, skip=["up", "head"])  # layers of few bits, without values
    headroom.load_quantized(again, path)
    assert_same_state(again, model)


def test_one_layer_can_be_the_model(tmp_path):
    layer = nn.Linear(5, 7)
    path = save(layer.state_dict(), tmp_path / "layer.safetensors")
    with torch.device("meta"):
        loaded, again = nn.Linear(5, 7), nn.Linear(5, 7)
    headroom.load_quantized(loaded, path, skip=())
    headroom.quantize(layer, skip=())
    assert_same_state(loaded, layer)
    path = save(layer.state_dict(), tmp_path / "packed.safetensors")
    headroom.load_quantized(again, path)
    assert type(again) is Linear4bit
    assert_same_state(again, layer)


def test_weights_of_other_dtypes_are_left(tmp_path):
    state = state_of(Model())
    state["up.weight"] = state["up.weight"].to(torch.float8_e4m3fn)
    loaded = on_meta()
    report = headroom.load_quantized(loaded, save(state, tmp_path / "model.safetensors"))
    assert [one.name for one in report.quantized] == ["down"]
    assert loaded.up.weight.dtype == torch.float8_e4m3fn


def edited(path, change, entry):
    """Writes a file whose tensors, of few bits, have been changed."""
    state = safetensors.load_file(path)
    key = next(key for key in state if entry in key)
    state[key] = change(state[key])
    return save(state, path)


def as_json(change):
    def changed(text):
        fields = json.loads(bytes(text.tolist())) | change
        return torch.frombuffer(bytearray(json.dumps(fields).encode()), dtype=torch.uint8)

    return changed


@pytest.mark.parametrize(
    ("to", "entry", "change", "message"),
    [
        ("int8", "SCB", lambda x: x.index_fill(0, torch.tensor([3]), torch.nan), "'SCB' must have"),
        ("int8", "SCB", lambda x: x * torch.inf, "'SCB' must have finite numbers"),
        ("nf4", "nested_absmax", lambda x: x * torch.nan, "'weight.absmax' and what belongs to it"),
        ("nf4", "quant_state", as_json({"nested_offset": torch.nan}), "'nested_offset' is nan"),
        ("nf4", "quant_state", as_json({"nested_offset": 1e39}), "'nested_offset' is 1e.39, want"),
        ("nf4", "quant_state", as_json({"nested_offset": 10**400}), "'nested_offset' is 1000"),
    ],
)
def test_scales_that_are_not_finite_are_refused(to, entry, change, message, tmp_path):
    model = Model()
    headroom.quantize(model, to, block_size=32)
    path = save(state_of(model), tmp_path / "model.safetensors")
    edited(path, change, entry)
    loaded = on_meta()
    with pytest.raises(ValueError, match=message):
        headroom.load_quantized(loaded, path)
    assert all(param.is_meta for param in loaded.parameters()) and type(loaded.up) is nn.Linear
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(safetensors.load_file(path), strict=False)


# ---- tied and not -------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["nf4", "int8", None])
def test_a_head_of_its_own_in_a_model_that_ties_it(to, tmp_path):
    """As transformers: what the files have twice, with other numbers, is not tied."""
    model = Model()
    model.head.weight = nn.Parameter(torch.randn(20, 32))
    if to is not None:
        headroom.quantize(model, to, skip=())
    state = {key: value.clone() for key, value in model.state_dict().items()}
    path = save(state, tmp_path / "model.safetensors")
    loaded = on_meta()
    headroom.load_quantized(loaded, path)
    if to is None:
        headroom.quantize(model, "nf4")
    assert_same_state(loaded, model)
    assert type(loaded.head) is type(model.head)
    assert_same_bits(loaded.eval()(torch.arange(4)), model.eval()(torch.arange(4)))
    state["head.weight"] = state["embedding.weight"].clone()  # a file that has it twice
    if to is None:
        loaded = on_meta()
        headroom.load_quantized(loaded, save(state, path))
        assert loaded.head.weight is loaded.embedding.weight


def test_codes_are_no_embedding(tmp_path):
    model = Model()
    model.head.weight = nn.Parameter(torch.randn(20, 32))
    headroom.quantize(model, "int8", skip=())
    state = state_of(model) | {"head.weight": model.head.weight.detach()}
    for key in ("embedding.weight", "head.weight"):
        missing = {name: value for name, value in state.items() if name != key}
        with pytest.raises(ValueError, match=f"such as '{key}'"):
            headroom.load_quantized(on_meta(), save(missing, tmp_path / "model.safetensors"))


class Buffered(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.arange(4), persistent=False)


def test_buffers_that_no_file_has(tmp_path):
    path = save(state_of(Model()), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="'positions' is on the meta device, and no file holds it"):
        headroom.load_quantized(on_meta(Buffered), path)
    model = on_meta(Buffered)
    model.positions = torch.arange(4)
    headroom.load_quantized(model, path)
    assert_same_bits(model.positions, torch.arange(4))


# ---- what is refused -----------------------------------------------------------------------------


def test_names_and_shapes_are_compared_before_anything_is_read(tmp_path):
    state = state_of(Model())
    cases = [
        ({k: v for k, v in state.items() if k != "up.bias"}, "1 tensors .*such as 'up.bias'"),
        (state | {"other": torch.ones(1)}, "and 1 of the files .*such as 'other'"),
        (state | {"up.bias": torch.ones(3)}, r"'up.bias' is \[3\] in the files"),
        (state | {"norm.SCB": torch.ones(3)}, "'norm' is in few bits in the files"),
        (state | {"up.weight": torch.full((72, 32), torch.nan)}, "'up.weight' cannot be quantized"),
    ]
    for k, (changed, message) in enumerate(cases):
        model = on_meta()
        with pytest.raises(ValueError, match=message):
            headroom.load_quantized(model, save(changed, tmp_path / f"{k}.safetensors"))
        if "cannot" not in message:
            assert all(param.is_meta for param in model.parameters())
    path = save(state, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="' is in .*model.safetensors and in "):
        headroom.load_quantized(on_meta(), [path, path])
    with pytest.raises(FileNotFoundError):
        headroom.load_quantized(on_meta(), tmp_path / "nowhere")
    with pytest.raises(ValueError, match="to is 'int4'"):
        headroom.load_quantized(on_meta(), path, "int4")


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw[:4],
        lambda raw: raw[:40],
        lambda raw: raw[:-1],
        lambda raw: struct.pack("<Q", 2**60) + raw[8:],
        lambda raw: raw[:8] + b"[" + raw[9:],
        lambda raw: raw.replace(b'"F32"', b'"F99"'),
        lambda raw: raw.replace(b'"shape":[72]', b'"shape":[-2]'),
        lambda raw: raw.replace(b'"shape":[72]', b'"shape":[71]'),
        lambda raw: raw.replace(b'"shape":[72]', b'"shape":1234'),
        lambda raw: raw[:8] + (b"[" * (len(raw) - 8)),
    ],
)
def test_damaged_files_are_refused(change, tmp_path):
    path = save(state_of(Model()), tmp_path / "model.safetensors")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=r"model.safetensors (is no|is malformed)"):
        headroom.load_quantized(on_meta(), path)


def test_tensors_that_overlap_are_refused(tmp_path):
    path = save({"a": torch.ones(4), "b": torch.zeros(4)}, tmp_path / "model.safetensors")
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b"[16,32]", b"[12,28]"))
    with pytest.raises(ValueError, match="'a' and 'b' overlap in .*model.safetensors"):
        headroom.load_quantized(nn.Linear(2, 2), path)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "\\udcff"])
def test_a_malformed_index_is_named(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="index.json is malformed: "):
        headroom.load_quantized(on_meta(), tmp_path)


@pytest.mark.parametrize("files", [None, 3, [3], [None]])
def test_files_that_are_none(files):
    with pytest.raises(TypeError, match="files is .*, wanted a path of a file or a folder, or sev"):
        headroom.load_quantized(on_meta(), files)


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": {"a": 1}}'])
def test_a_bad_index_is_refused(text, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="has no 'weight_map'"):
        headroom.load_quantized(on_meta(), tmp_path)


# ---- memory --------------------------------------------------------------------------------------


def measure(path, first, to):
    """Prints the peak of resident memory above that before, and the bytes of the result.

    ``first`` is a small model of the same dtypes, which is loaded before: imports, pages of code
    that come into memory when they are first run, and threads are not of the load.
    """
    import headroom

    torch.set_num_threads(1)
    with torch.device("meta"):
        layers = [nn.Linear(2048, 4096, bias=False, dtype=torch.bfloat16) for _ in range(8)]
        model = nn.Sequential(*layers)
    headroom.load_quantized(on_meta(), first, to)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = resident("VmRSS")
    report = headroom.load_quantized(model, path, to)
    print(json.dumps([resident("VmHWM") - before, report.after]))


def resident(key):
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(key))


@pytest.mark.parametrize("to", ["nf4", "int8"])
def test_the_peak_is_that_of_the_result_and_one_tensor(to, memory_path, tmp_path):
    layers = [nn.Linear(2048, 4096, bias=False, dtype=torch.bfloat16) for _ in range(8)]
    path = save(nn.Sequential(*layers).state_dict(), memory_path / "model.safetensors")
    first = save(state_of(Model().bfloat16()), tmp_path / "first.safetensors")
    peaks = []
    for _ in range(2):  # other memory of the process only ever adds to a peak
        status, printed = run_fresh(tmp_path, measure, path, first, to)
        assert status == 0, printed
        peak, result = json.loads(printed.splitlines()[-1])
        peaks.append(peak)
    largest = 2 * 2048 * 4096
    assert min(peaks) <= result + 1.1 * largest + (4 << 20), (peaks, result)
