"""The report's page in a browser."""

import json
import re
from importlib import resources
from pathlib import Path

import pytest
import synthetic
from browser import Browser, Unusable
from torch_tandem._report import page as pages
from torch_tandem._report.types import (
    Report,
)
from typed import empty


@pytest.fixture(scope="module")
def one_browser(tmp_path_factory):
    try:
        browser = Browser(tmp_path_factory.mktemp("browser"))
    except Unusable as reason:
        pytest.skip(str(reason))
    yield browser
    browser.close()


@pytest.fixture
def browser(one_browser):
    yield one_browser
    assert not one_browser.errors, one_browser.errors


VIOLATIONS = """axe.run().then((results) => {
    if (results.passes.length < 10) throw new Error("axe has checked nothing");
    return results.violations.map((v) => `${v.help}: ${v.nodes.map((n) => n.target.join(" ")).join(", ")}`);
})"""


@pytest.mark.parametrize("address", ["", "#graph=trace", "#graph=symbolic&search=lstm_cell"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_everybody_can_read_the_page(browser, address, scheme, width):
    try:
        browser.show_as(scheme, width)
        browser.open(synthetic.page(), address)
        axe = resources.files("axe_playwright_python") / "axe.min.js"
        browser.run(f"{axe.read_text()}; 0")
        assert browser.run(VIOLATIONS) == []
        # Without colors that differ and names of buttons, the same check finds something.
        grey = "(e) => { e.style.color = 'rgb(128 128 128 / 40%)'; }"
        browser.run(f"document.querySelectorAll('p, td').forEach({grey})")
        assert browser.run(VIOLATIONS) != []
    finally:
        browser.show_as("light", 1400)


@pytest.mark.parametrize("nodes", [300, 2_000, 20_000])
@pytest.mark.parametrize("view", ["trace", "symbolic"])
def test_search_finds_an_operators_nodes(browser, nodes, view):
    browser.open(synthetic.page(nodes), f"#graph={view}&search=lstm_cell")
    wanted = [n["id"] for n in synthetic.graphs(nodes)["nodes"] if n["op"] == "aten::lstm_cell"]
    assert hits(browser) == wanted and len(wanted) == 1
    assert browser.texts(".tally") == ["1 operator"]


def hits(browser):
    return browser.run("[...document.querySelectorAll('.hits button')].map((e) => Number(e.dataset.node))")


def test_search_by_line_and_function(browser):
    nodes = synthetic.graphs(300)["nodes"]
    browser.open(synthetic.page())
    for wanted, matches in (
        ("train.py:35", [n for n in nodes if "train.py:35" in n["line"]]),
        ("decoder.FORWARD", [n for n in nodes if any("Decoder.forward" in frame for frame in n["stack"])]),
        ("_call_impl", []),  # PyTorch's function that calls a module
        ("no such thing", []),
    ):
        browser.run(f"location.hash = 'search=' + encodeURIComponent({json.dumps(wanted)})")
        browser.drawn()
        assert sorted(hits(browser)) == sorted(n["id"] for n in matches), wanted


def test_a_kernel_leads_to_its_nodes(browser):
    browser.open(synthetic.page())
    browser.click("#kernels tbody tr:nth-child(2) td:nth-child(2) button.link")
    assert browser.texts(".tally") == ["1 of 4 operators"]  # the kernel of nodes 11 to 14
    found = browser.run("[...document.querySelectorAll('.hits button')].map(b => b.dataset.node)")
    assert sorted(map(int, found)) == [11, 12, 13, 14]


def test_nodes_and_boxes_have_times(browser):
    nodes = synthetic.graphs(300)["nodes"]
    hottest = max(nodes, key=lambda node: node["exec_us"])
    browser.open(synthetic.page(), f"#node={hottest['id']}")
    (details,) = browser.texts(".details")
    share = 100 * hottest["exec_us"] / sum(node["exec_us"] for node in nodes)
    assert f"1.96 ms, {share:.1f} % of the kernels' time" in details.replace("\u00a0", " ")


def test_hits_lead_to_nodes(browser):
    browser.open(synthetic.page(2_000), "#search=batch_norm")
    number = len(hits(browser))
    browser.click(".hits button")
    assert browser.texts(".details h3") == ["aten::native_batch_norm"]
    assert browser.texts(".tally") == [f"1 of {number} operators"]
    browser.click('button[title="Next"]')
    assert browser.texts(".tally") == [f"2 of {number} operators"]
    # The keyboard then moves the selection along an edge, so that the details of the next operator are shown.
    browser.run("document.querySelector('.stage canvas').focus()")
    browser.press("ArrowDown")
    assert browser.texts(".details h3") == ["aten::relu"]


def test_findings_lead_to_their_lines(browser):
    browser.open(synthetic.page())
    browser.click(".findings button.link")
    assert browser.run("document.querySelector('.finder input').value").endswith("train.py:35")
    assert browser.texts(".details h3") == ["aten::_local_scalar_dense"]


def test_a_node_is_described(browser):
    scaled = next(n for n in synthetic.graphs(300)["nodes"] if n["op"] == "aten::mul.Tensor")
    browser.open(synthetic.page(), f"#node={scaled['id']}")
    (details,) = browser.texts(".details")
    for part in (
        "aten::mul.Tensor",
        "state, such as a parameter",
        "model.py:266 in ResNet.forward",
        "float32[32,64,56,56]",
    ):
        assert part in details


def test_a_selected_node_is_in_the_middle_of_the_picture(browser):
    browser.open(synthetic.page(2_000), "#node=900")
    browser.run("document.querySelector('.details').replaceChildren()")
    browser.click(".stage canvas")
    (details,) = browser.texts(".details")
    assert "#900" in details


@pytest.mark.parametrize("view", ["trace", "symbolic"])
def test_boxes_open_and_close(browser, view):
    browser.open(synthetic.page(2_000), f"#graph={view}")
    for title in (
        "Close all boxes",
        "Open all boxes",
        "Zoom in",
        "Show all",
        "Fill the window",
        "Fill the window",
    ):
        browser.click(f'.graphs button[title="{title}"]')
    browser.run("document.querySelector('.stage canvas').focus()")
    for key in ("Enter", "ArrowDown", "ArrowRight", "ArrowLeft", "ArrowUp", "+", "-", "0", "Escape"):
        browser.press(key)


@pytest.mark.parametrize("address", ["#arrows=data&open=all", "#graph=none&node=x&arrows=x", "#tables", "#%"])
def test_any_address_draws(browser, address):
    browser.open(synthetic.page(2_000), address)
    assert browser.texts("#divergences h3") == ["Divergences"]


def test_timeline_zooms(browser):
    browser.open(synthetic.page())
    assert "Iterations 1 to 400" in browser.texts(".readout")[0]
    browser.click('#timeline button[title="Zoom in"]')
    assert "Iterations 81 to 320" in browser.texts(".readout")[0]
    browser.click('#timeline button[title="Show all"]')
    assert "Iterations 1 to 400" in browser.texts(".readout")[0]
    browser.click("#timeline .choice button:last-child")
    browser.click("#timeline .chart canvas:last-of-type")


def test_kernels_are_set_beside_what_the_machine_reaches(browser):
    browser.open(synthetic.page())
    rows = browser.texts("#kernels tbody td:nth-child(2)")
    assert rows[0] == "mul.Tensor" and len(rows) == 12  # the kernel that took most time
    assert browser.texts("#kernels tbody td:nth-child(5)")[0] == "15 %"  # 12 of 78
    assert browser.texts("#kernels tbody td:nth-child(7)")[0].startswith("75 %")
    assert browser.texts("#kernels tbody td:nth-child(8)")[0].startswith("30 %")


def test_kernels_come_first_and_lead_to_the_graph(browser):
    browser.open(synthetic.page())
    assert browser.texts(".tables h3")[0] == "Kernels"
    assert browser.run("document.querySelector('#kernels th:nth-child(5) button').title")
    browser.click("#kernels tbody td:first-child button.link")
    assert browser.run("document.querySelector('.finder input').value")


def calculated(browser, expression, *names):
    """The value of an expression that calls functions of the page's scripts."""
    scripts = "".join(
        (Path(pages.__file__).parent / f"{name}.js").read_text() for name in ("basics", "timeline")
    )
    functions = "".join(
        re.search(rf"^function {name}\(.*?^}}$", scripts, re.M | re.S)[0] + "\n" for name in names
    )
    return browser.run(f"(() => {{ {functions} return {expression}; }})()")


@pytest.mark.parametrize(
    ("times", "lowest", "highest"),
    [([5000], 5000, 6000), ([90_000, 20, 21], 21, 30), ([20, 21, 22, 23], 23, 30), ([], 1, 2)],
)
def test_an_axis_shows_all_iterations_but_few_long_ones(browser, times, lowest, highest):
    browser.open(synthetic.page())
    assert lowest <= calculated(browser, f"axisEnd({times})", "axisEnd") <= highest


def test_times_on_a_long_axis_differ(browser):
    browser.open(synthetic.page())

    def shown(times, step):
        expression = f"{times}.map((at) => axisTime(at, {step}))"
        return calculated(browser, expression, "axisTime", "roundDuration", "duration")

    assert shown([106.2e6, 106.3e6], 1e5) == ["106.2 s", "106.3 s"]
    assert shown([0, 250, 7e6], 5e6) == ["0", "250 µs", "7 s"]


def test_no_label_of_an_axis_is_cut(browser):
    before = {"left": 0, "center": 30, "right": 60}  # pixels of a label that are left of its place
    for x in range(100, 901, 10):
        side = calculated(browser, f"axisSide({x}, 100, 900)", "axisSide")
        assert 100 <= x - before[side] <= 900 - 60


def test_functions_are_listed_by_the_time_that_they_saved(browser):
    browser.open(synthetic.page())
    cells = browser.texts("#functions tbody tr:first-child td")
    assert cells[:3] == ["train_step", "3,120", "80"] and cells[-2:] == ["12.4 s", ""]
    assert "reads a value" in browser.texts("#functions tbody tr:last-child td:last-child")[0]


def test_tables_sort_and_filter(browser):
    browser.open(synthetic.page())
    names = "#operators tbody td:first-child"
    by_time = browser.texts(names)
    assert by_time[:2] == ["aten::convolution", "aten::convolution_backward"]
    browser.click("#operators th button")
    by_name = browser.texts(names)
    assert by_name[0].startswith("aten::add") and by_name[-1] == "aten::threshold_backward"
    browser.click("#operators input")
    for letter in "norm":
        browser.press(letter)
    assert browser.texts(names) == ["aten::native_batch_norm"]
    # An operator's name links to its nodes in the graph.
    browser.click("#operators button.link")
    assert browser.texts(".details h3") == ["aten::native_batch_norm"]


def test_hostile_text_in_a_browser(browser):
    browser.open(synthetic.page(hostile=True), "#search=script&open=all")
    assert browser.run("document.title").startswith("Tandem: ")
    assert browser.run("document.querySelectorAll('img').length") == 0
    assert browser.run("document.scripts.length") == 3
    assert any(synthetic.HOSTILE in text for text in browser.texts("td"))


@pytest.mark.parametrize("nodes", [0, 1])
def test_small_pages_in_a_browser(browser, nodes):
    browser.open(synthetic.small_page(empty(Report, ops_captured=nodes), nodes), "#graph=symbolic")
    assert len(browser.texts("#graph")) == nodes


@pytest.mark.parametrize("width", [1400, 500])
def test_nothing_is_wider_than_the_window(browser, width):
    browser.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
    )
    try:
        browser.open(synthetic.page(hostile=True))
        assert browser.run("document.documentElement.scrollWidth") <= width
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")
