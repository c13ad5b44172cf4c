"""The page of a report, read as a person does: in a browser, which also says what it asked for."""

import json
import random
import re

import pytest
from headroom.memory import Allocation, Timeline, format_bytes
from headroom.reports import report

from helpers import report_files
from helpers.browser import Browser, find_browser

HOSTILE = "</script><script>window.hit=1</script><img src=x onerror=window.hit=2>"
FILES = (
    "timeline.json",
    "plan.json",
    "run.pickle",
    "ladder.json",
    "profile.json",
    "rehearsal.json",
)


@pytest.fixture(scope="module")
def browser():
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with Browser(path) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A page with a part of every kind, from files whose texts are markup."""
    folder = tmp_path_factory.mktemp("page")
    report_files.timeline(300, module=HOSTILE + ".layers.{}").save(folder / "timeline.json")
    report_files.plan().save(folder / "plan.json")
    snapshot = report_files.snapshot(3000)
    snapshot["device_traces"][0][0]["frames"] = [
        {"name": HOSTILE, "filename": f"/me/{HOSTILE}.py", "line": 1}
    ]
    report_files.write_snapshot(folder / "run.pickle", snapshot)
    ladder, profile = report_files.ladder(), report_files.profile()
    ladder["rungs"][1]["title"] = profile["modules"][1]["name"] = HOSTILE
    (folder / "ladder.json").write_text(json.dumps(ladder))
    (folder / "profile.json").write_text(json.dumps(profile))
    rehearsal = report_files.rehearsal()
    rehearsal["program"][0] = rehearsal["refused"][0]["line"] = HOSTILE
    rehearsal["at_peak"][0]["stack"][0] = rehearsal["versions"]["trl"] = HOSTILE
    (folder / "rehearsal.json").write_text(json.dumps(rehearsal))
    out = folder / "report.html"
    report([folder / name for name in FILES], out, title=HOSTILE)
    return out


def tab(browser, number):
    browser.run(f"document.querySelectorAll('nav button')[{number}].click()")
    browser.settle()


def text(browser, selector):
    return browser.run(f"document.querySelector({json.dumps(selector)}).innerText")


def press(browser, name):
    """Presses the first button of this text."""
    find = "[...document.querySelectorAll('button')].find(b => b.textContent === %s).click()"
    browser.run(find % json.dumps(name))
    browser.settle()


@pytest.fixture(autouse=True)
def quiet(browser):
    """No page says anything on the console or asks the network for anything."""
    browser.problems.clear()
    browser.requests.clear()
    yield
    assert not browser.problems
    assert all(url.startswith("file:") and url.endswith(".html") for url in browser.requests)


def test_hovering_names_what_is_live_and_who_owns_it(browser, page):
    browser.open(page)
    shown = text(browser, ".tile b")
    timeline = report_files.timeline(300)
    assert shown == format_bytes(timeline.peak_bytes)
    x, y, width, height = browser.place("canvas.timeline")
    last = timeline.events - 1
    at = round(0.6 * last)
    inner = width - 66 - 12
    browser.move(x + 66 + inner * at / last + 0.2, y + height / 2)
    tip = text(browser, "#tip")
    live = timeline.bytes_over_events()[at]
    assert f"{format_bytes(live)} at event {at:,}, {timeline.span(at).phase} of step" in tip
    largest = timeline.owners(at)[0]
    assert format_bytes(largest.bytes) in tip and "train.py:12 main" in tip
    for kind, size in timeline.by_kind(at).items():
        assert not size or f"{kind.replace('_', ' ')}\t{format_bytes(size)}" in tip
    browser.move(5, 5)
    assert browser.run("getComputedStyle(document.getElementById('tip')).display") == "none"


def test_zoom(browser, page):
    browser.open(page)
    events = report_files.timeline(300).events
    assert f"events 0 to {events - 1:,} of {events:,}" == text(browser, ".range")
    x, y, width, height = browser.place("canvas.timeline")
    inner = width - 66 - 12
    browser.drag(x + 66 + inner / 4, y + 90, x + 66 + inner / 2, y + 90)
    low, high = (int(word.replace(",", "")) for word in text(browser, ".range").split()[1:4:2])
    assert abs(low - (events - 1) / 4) <= 2 and abs(high - (events - 1) / 2) <= 2
    press(browser, "all")
    assert f"events 0 to {events - 1:,}" in text(browser, ".range")
    press(browser, "+")
    low, high = (int(word.replace(",", "")) for word in text(browser, ".range").split()[1:4:2])
    assert abs((high - low) - (events - 1) / 2) <= 2
    press(browser, "module")  # another picture of the same range
    assert f"events {low:,} to {high:,}" in text(browser, ".range")


def test_search_and_order_of_the_owners(browser, page):
    browser.open(page)
    rows = "[...document.querySelectorAll('table.owners tbody tr')].map(r => r.innerText)"
    before = browser.run(rows)
    assert len(before) > 30
    browser.type("input[type=search]", "gradients block.py:3")
    found = browser.run(rows)
    assert 0 < len(found) < len(before)
    assert all("gradients" in row and "block.py:3" in row for row in found)
    field = "document.querySelector('input[type=search]')"
    browser.run(f"{field}.value = 'nobody'; {field}.dispatchEvent(new Event('input'))")
    assert browser.run(rows) == [] and text(browser, ".found").startswith("0 of ")


def test_treemap_and_flame_graph(browser, page):
    browser.open(page)
    tab(browser, 1)
    total = report_files.plan().timeline.peak_bytes
    boxes = "[...document.querySelectorAll('.boxes button')]"
    assert browser.run(f"{boxes}.length") > 5
    assert format_bytes(total) in text(browser, ".crumbs")
    # Areas are as large as bytes are: those of the top level fill the treemap.
    box = browser.place(".boxes")
    sizes = f"{boxes}.map(b => b.offsetWidth * b.offsetHeight)"
    assert max(browser.run(sizes)) > 0.02 * box[2] * box[3]
    press(browser, "flame graph")
    press(browser, "stack")
    widths = dict(browser.run(f"{boxes}.map(b => [b.innerText.split(' ')[0], b.offsetWidth])"))
    assert abs(widths["peak"] - widths["train.py:12"]) <= 2  # the outermost line of all stacks
    browser.run(f"{boxes}.find(b => b.innerText.startsWith('model/block.py:1')).click()")
    browser.settle()
    assert "train.py:12 main › model/block.py:1" in text(browser, ".crumbs")


def test_a_rehearsal(browser, page):
    browser.open(page)
    tab(browser, 5)
    tiles = browser.run("[...document.querySelectorAll('.tile b')].map(b => b.innerText)")
    mib = 1 << 20
    held = (92 + 300) * mib
    sizes = [52 * mib + 1024, 92 * mib, 600 * mib - held, 700 * mib]
    assert tiles == ["it does not fit", *map(format_bytes, sizes), "2"]
    # The device, as wide as its memory: what is known of tensors, the rest, and what is left.
    widths = browser.run("[...document.querySelectorAll('.stripe div')].map(d => d.offsetWidth)")
    whole = browser.place(".stripe")[2]
    parts = (20 * mib, 16 * mib, 10 * mib, 6 * mib + 1000, 40 * mib - 1000, 300 * mib, 208 * mib)
    assert widths == pytest.approx([whole * size / (600 * mib) for size in parts], abs=1.5)
    assert "300 MiB\t52.0 MiB\t" in text(browser, "tbody")
    rows = browser.run("[...document.querySelectorAll('table.owners tr')].map(r => r.innerText)")
    assert [row.split("\t")[2] for row in rows[1:]] == [
        "20.0 MiB",
        "16.0 MiB",
        "10.0 MiB",
        "6.00 MiB",
    ]


def test_small_boxes_have_names_and_are_no_tab_stops(browser, page):
    browser.open(page)
    boxes = "[...document.querySelectorAll('.boxes button')]"
    # What a legend only explains is no button.
    assert browser.run("[...document.querySelectorAll('.legend button')].every(b => b.ariaPressed)")
    for view in ("treemap", "flame graph"):
        press(browser, view)
        found = browser.run(f"{boxes}.map(b => [b.innerText, b.tabIndex, b.ariaLabel])")
        assert {stop for shown, stop, _ in found if shown} == {0}
        assert {stop for shown, stop, _ in found if not shown} <= {-1}
        assert all(re.fullmatch(r".+, [\d.]+ ([KMG]i)?B", name, re.S) for _, _, name in found)
        if view == "treemap":
            assert any(not shown for shown, _, _ in found)  # there are small boxes


@pytest.mark.parametrize("grows", [False, True])
def test_what_the_allocator_holds(browser, tmp_path, grows):
    value = report_files.snapshot(500)
    size = 8 << 30  # a segment in which nothing is
    block = {"address": 1 << 20, "size": size, "requested_size": 0, "state": "inactive"}
    empty = {"address": 1 << 20, "total_size": size, "blocks": [block | {"frames": []}]}
    value["segments"].append(value["segments"][0] | empty)
    for segment in value["segments"]:
        segment["is_expandable"] = grows
    taken = {"action": "segment_alloc", "addr": 1 << 20, "size": size, "stream": 0, "frames": []}
    value["device_traces"][0].insert(0, taken | {"time_us": 0})
    report_files.write_snapshot(tmp_path / "run.pickle", value)
    report([tmp_path / "run.pickle"], tmp_path / "run.html")
    browser.open(tmp_path / "run.html")
    advice = "[...document.querySelectorAll('p')].map(p => p.innerText).join('\\n')"
    shown = browser.run(advice)
    assert "Much is held and not used" in shown
    assert ("expandable_segments:True" in shown) is not grows
    # Nobody has said what this memory is for.
    press(browser, "kind")
    whole = browser.run("document.body.innerText")
    assert "temporaries" not in whole and "unknown" in whole
    # What is reserved can be hidden, and the scale then is that of what is live.
    browser.run(
        "(() => { const p = CanvasRenderingContext2D.prototype, old = p.fillText; "
        "window.labels = []; p.fillText = function (text, x, y) { labels.push(text); "
        "old.call(this, text, x, y); }; })()"
    )
    for name, expected in (("reserved", False), ("reserved", True)):
        browser.run("window.labels.length = 0")
        find = f".find(b => b.textContent === {json.dumps(name)}).click()"
        browser.run("[...document.querySelectorAll('.legend button')]" + find)
        browser.settle()
        labels = browser.run("window.labels")
        assert any("GiB" in label for label in labels) is expected, labels


def test_what_is_on_the_host_is_a_line_of_its_own(browser, tmp_path):
    timeline = report_files.timeline(300)
    host = Allocation(0, 64 * timeline.peak_bytes, 0, None, "optimizer_state")
    timeline.host = Timeline([host], timeline.spans, "host")
    timeline.save(tmp_path / "timeline.json")
    report([tmp_path / "timeline.json"], tmp_path / "run.html")
    browser.open(tmp_path / "run.html")
    shown = browser.run("document.body.innerText")
    assert f"{format_bytes(host.bytes)}\nat most on the host" in shown
    assert "The dashed line is what arenas of the host hold." in shown
    stroke = "document.querySelectorAll('.legend .dot.dashed').length"
    assert browser.run(stroke) == 1
    browser.run(
        "(() => { const p = CanvasRenderingContext2D.prototype, old = p.fillText; "
        "window.labels = []; p.fillText = function (text, x, y) { labels.push(text); "
        "old.call(this, text, x, y); }; })()"
    )
    seen = []
    for _ in range(2):  # it is hidden, and shown again
        browser.run("window.labels.length = 0")
        press(browser, "on the host")
        seen.append(browser.run("window.labels.join()"))
    assert seen[0] != seen[1]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_every_part_fits_the_screen_in_light_and_dark(browser, page, width, dark):
    browser.open(page, width=width, height=844, dark=dark)
    paper = "getComputedStyle(document.body).backgroundColor"
    for number in range(6):
        tab(browser, number)
        assert browser.run("document.querySelectorAll('.tile').length") >= 3, number
        assert browser.run("document.documentElement.scrollWidth") <= width, number
        light = sum(int(n) for n in browser.run(paper)[4:-1].split(",")) > 380
        assert light != dark
    browser.click("#theme")
    assert (sum(int(n) for n in browser.run(paper)[4:-1].split(",")) > 380) == dark


def test_texts_of_files_are_texts(browser, page):
    browser.open(page)
    for number in range(6):
        tab(browser, number)
        shown = browser.run("document.body.textContent")
        assert "<img src=x onerror" in shown, number
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("window.hit === undefined")
    assert browser.run("document.querySelectorAll('script').length") == 2
    # What a hole in the page would let through stays without effect, and is reported.
    browser.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=window.hit=3>')")
    browser.settle()
    assert browser.run("window.hit === undefined")
    browser.run("fetch('http://127.0.0.1:9/').catch(() => 0)")
    assert any("Content Security Policy" in problem for problem in browser.problems)
    browser.problems.clear()
    browser.requests.clear()


def test_the_same_files_give_the_same_page(page, tmp_path):
    again = tmp_path / "again.html"
    report([page.parent / name for name in FILES], again, title=HOSTILE)
    assert again.read_bytes() == page.read_bytes()
    assert HOSTILE.encode() not in page.read_bytes()
    assert b"http" not in page.read_bytes().replace(b"http-equiv", b"")


def test_numbers_of_the_page_are_those_of_python(browser, page):
    browser.open(page)
    rng = random.Random(0)
    sizes = [rng.randrange(1 << rng.randrange(1, 50)) for _ in range(500)] + [999, 1000, 1023]
    shown = browser.run(f"{json.dumps(sizes)}.map(bytes)")
    assert shown == [format_bytes(size) for size in sizes]
