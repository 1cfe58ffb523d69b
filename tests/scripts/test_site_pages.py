"""The site of docs/: it builds without a broken link, and no page of it asks another host for anything."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
import browsing

ROOT = Path(__file__).parents[2]
MISSING = "mkdocs-material and mkdocstrings are not installed here (make docs installs them), so no site is built"
IMPORTED = [importlib.util.find_spec(name) for name in ("mkdocs", "material", "mkdocstrings_handlers")]
pytestmark = pytest.mark.skipif(None in IMPORTED, reason=MISSING)
# What a page loads by itself: sources of elements, links of style and icons, and addresses within styles.
LOADED = re.compile(
    r"<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|<link\b(?=[^>]*rel=[\"']?(?:stylesheet|icon|preconnect|preload|prefetch|modulepreload))"
    r"[^>]*href=[\"']?((?:https?:)?//[^\"'\s>]+)"
    r"|(?:url\(|@import\s+)[\"']?((?:https?:)?//[^\"')\s]+)"
)


def asked(text):
    """The addresses on other hosts that a page or a style loads."""
    return ["".join(found) for found in LOADED.findall(text)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the site, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_of_the_repository_is_in_the_site(site):
    pages = {str(page.relative_to(ROOT / "docs").with_suffix(".html")) for page in ROOT.glob("docs/**/*.md")}
    pages |= {"index.html", "contributing.html", "source/rewards/served/server.py.html"}
    assert {page for page in pages if not (site / page).is_file()} == set()


def test_the_home_is_the_readme_with_its_links_turned(site):
    home = (site / "index.html").read_text()
    assert "Two commands" in home
    assert 'href="reference/presets.html"' in home
    assert 'src="figures/gallery.png"' in home
    assert 'href="contributing.html"' in home
    assert 'href="docs/' not in home


def test_docstrings_are_in_the_site(site):
    axes = (site / "reference/api/axes.html").read_text()
    assert 'id="flowgrpo.flow.methods.credit.rules.Terminal"' in axes
    assert "FlowSDEScheduler" in (site / "reference/api/samplers.html").read_text()


def test_no_page_and_no_style_loads_from_another_host(site):
    files = [file for file in site.rglob("*") if file.suffix in (".html", ".css")]
    assert len(files) > 40
    assert {str(file): found for file in files if (found := asked(file.read_text()))} == {}
    assert not [file for file in files if 'class="mermaid"' in file.read_text()]


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://cdn.example/a.js"></script>',
        "<link href=https://fonts.example/css rel=stylesheet>",
        '<link rel="preconnect" href="//fonts.example">',
        "@font-face { src: url(https://fonts.example/a.woff2) }",
        '@import "https://fonts.example/css";',
    ],
)
def test_a_request_to_another_host_is_found(text):
    assert asked(text)


def test_a_link_to_another_host_is_no_request():
    assert not asked('<a href="https://arxiv.org/abs/2505.05470">paper</a> <link rel=canonical href="//a.example">')


def test_pages_open_from_the_disk_and_are_searched(site):
    sync = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[browser]'")
    if browsing.CHROMIUM is None:
        pytest.skip(browsing.MISSING)
    with sync.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browsing.CHROMIUM, args=list(browsing.QUIET))
        for name in ("index.html", "reference/presets.html", "reference/api/axes.html"):
            with browsing.opened(browser, site / name, width=390) as page:
                assert page.evaluate("document.documentElement.scrollWidth") == 390
                page.wait_for_load_state("networkidle")
                assert page.told == []
        with browsing.opened(browser, site / "research/methods/chains.html") as page:
            page.wait_for_load_state("networkidle")
            page.click(".md-search__input")
            page.keyboard.type("staleness", delay=50)
            page.locator(".md-search-result__link[href*='staleness.html']").first.wait_for(state="attached")
            assert page.told == []
        browser.close()
