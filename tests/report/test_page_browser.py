"""The page in a real browser: it renders without complaint on a desk and on a phone, and can be worked with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import CHROMIUM, Browser
from jcl.commands.report import write_report
from page_tools import EVIL_CLASS

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium here (Debian: apt-get install chromium), so no page was opened"
)
WIDTHS = {"desk": 1280, "phone": 390}
CUT_OFF = (  # texts that reach beyond their card, unless it scrolls
    "[...document.querySelectorAll('th, td, text, figcaption, span, code')].filter(e => {"
    "const card = e.closest('.scroll, .chart, .card, .strip'), r = e.getBoundingClientRect();"
    "return card && r.width && !(card.scrollWidth > card.clientWidth && card.matches('.scroll'))"
    " && (r.left < card.getBoundingClientRect().left - 1 || r.right > card.getBoundingClientRect().right + 1);"
    "}).map(e => e.textContent)"
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, page_runs: Path) -> Path:
    """Two runs side by side, one of them on images whose names are markup."""
    paths, names = [page_runs / "arrays/run", page_runs / "evil/run"], ["MoCo v2", f"JCL {EVIL_CLASS}"]
    file = tmp_path_factory.mktemp("page") / "page.html"
    write_report(paths, file, names=names, device="cpu")
    return file


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def shown_panels(browser: Browser) -> list[str]:
    """The runs of the panels that can be seen."""
    return browser.run(
        "[...new Set([...document.querySelectorAll('.panel')].filter(p => p.offsetHeight > 0).map(p => p.dataset.run))]"
    )


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_it_renders_without_complaint(browser: Browser, page: Path, width: int, dark: bool, tmp_path: Path) -> None:
    browser.complaints.clear()
    browser.requested.clear()
    browser.open(page, width, dark=dark)
    assert browser.run("innerWidth") == width
    assert browser.run("document.documentElement.scrollWidth") <= width  # nothing reaches beyond the side
    assert browser.run(CUT_OFF) == []
    assert browser.run("window.hacked === undefined")
    assert browser.complaints == []
    assert all(address.startswith(("file:", "data:")) for address in browser.requested)
    color = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (color == "rgb(18, 22, 27)") is dark
    browser.picture(tmp_path / "page.png", whole=False)
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_every_figure_has_its_picture(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.run("for (const panel of document.querySelectorAll('.panel')) panel.hidden = false")
    figures = browser.run(
        "[...document.querySelectorAll('figure')].map(f => [...f.querySelectorAll(':scope > svg, img')].map(p =>"
        "p.tagName === 'IMG' ? (p.complete ? p.naturalWidth : 0) : Math.min(p.getBoundingClientRect().height,"
        " p.querySelectorAll('path').length * 100)))"
    )
    assert len(figures) > 20
    assert all(pictures and min(pictures) > 0 for pictures in figures)
    assert browser.run("[...document.images].every(i => i.alt)")


def test_a_click_switches_runs(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert shown_panels(browser) == ["0"]
    browser.click(".switch label:nth-of-type(2)")
    assert shown_panels(browser) == ["1"]
    assert EVIL_CLASS in browser.run("document.querySelector('#neighbors').innerText")
    browser.press("ArrowLeft")  # the switch has the focus, and arrows move within it
    assert shown_panels(browser) == ["0"]


def test_a_run_can_be_taken_out_of_the_charts(browser: Browser, page: Path) -> None:
    browser.open(page)
    count = "[...document.querySelectorAll('.curve[data-run=\"1\"]')].filter(c => c.getClientRects().length).length"
    assert browser.run(count) > 5
    browser.click('#training [data-toggle-run="1"]')
    assert browser.run(count) == 0
    assert browser.run("[...document.querySelectorAll('[data-toggle-run=\"1\"]')].every(b => !b.checked)")


def test_values_can_be_read_by_pointer_and_by_key(browser: Browser, page: Path) -> None:
    browser.open(page)
    readout = "document.querySelector('[data-chart=loss] .readout').innerText"
    assert browser.run(readout) == ""
    browser.point_at("[data-chart=loss] svg")
    pointed = browser.run(readout)
    assert pointed.startswith("epoch 1.") and "MoCo v2" in pointed and EVIL_CLASS in pointed
    browser.run("document.querySelector('[data-chart=loss] svg').focus()")
    browser.press("ArrowRight")
    assert browser.run(readout) not in ("", pointed)


def test_the_map_has_two_layouts_and_names(browser: Browser, page: Path) -> None:
    browser.open(page)
    shown = "[...document.querySelectorAll('#map figure > svg')].filter(s => s.getClientRects().length)"
    assert browser.run(f"{shown}.map(s => s.dataset.layout)") == ["tsne", "principal"]
    boxes = browser.run(f"{shown}.map(s => s.getBoundingClientRect().toJSON())")
    assert boxes[0]["top"] == boxes[1]["top"] and boxes[1]["right"] - boxes[0]["left"] > 1000  # they fill the row
    browser.run("document.querySelector('#map figure > svg').focus()")
    browser.press("ArrowRight")
    names = browser.run("[...document.querySelectorAll('#map .panel:not([hidden]) .readout')].map(o => o.innerText)")
    assert len(names) == 2 and len(set(names)) == 1 and "number" in names[0]


def test_everything_is_printed(browser: Browser, page: Path, tmp_path: Path) -> None:
    browser.open(page)
    browser.pdf(tmp_path / "page.pdf")
    content = (tmp_path / "page.pdf").read_bytes()
    assert content.startswith(b"%PDF") and len(content) > 50_000
    browser.ask("Emulation.setEmulatedMedia", media="print")
    assert shown_panels(browser) == ["0", "1"]
    assert browser.run("[...document.querySelectorAll('details')].every(d => d.open)")
    browser.ask("Emulation.setEmulatedMedia", media="")
