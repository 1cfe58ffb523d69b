"""A real browser that opens pages of files: the system's Chromium, driven by Playwright."""

import shutil
from contextlib import contextmanager

from cases import cases

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
MISSING = "no Chromium is installed here (on Debian: apt install chromium), so no page is opened in a browser"
QUIET = (  # it asks nobody for anything by itself
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
WILD = "<img src=x onerror=alert(1)></script><script>alert(2)</script>&amp; " + 4000 * "w"  # as a prompt may be
PLAIN = [(1400, "light"), (390, "dark")]
LOOKS = cases([*PLAIN, (1400, "dark"), (390, "light")], PLAIN)
# The least contrast of all visible letters with what is behind them, and whose it is (WCAG 2.2, 1.4.3).
CONTRAST = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = colour => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].map(x => x / 255);
  };
  const over = (top, below) => top.slice(0, 3).map((x, i) => x * top[3] + below[i] * (1 - top[3]));
  const light = colour => {
    const [r, g, b] = colour.map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = element => {
    const own = rgba(getComputedStyle(element).backgroundColor);
    return own[3] === 1 || !element.parentElement ? over(own, [1, 1, 1]) : over(own, behind(element.parentElement));
  };
  let least = [99, "nothing"];
  for (const element of document.querySelectorAll("body *")) {
    const words = [...element.childNodes].filter(n => n.nodeType === 3).map(n => n.textContent.trim()).join("");
    if (!words || !element.checkVisibility() || element.closest("script, style, title")) continue;
    const style = getComputedStyle(element);
    const ink = rgba(element.closest("svg") ? style.fill : style.color), paper = behind(element);
    for (let at = element; at; at = at.parentElement) ink[3] *= +getComputedStyle(at).opacity;
    const [a, b] = [light(over(ink, paper)), light(paper)].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    if (ratio < least[0]) least = [ratio, `${element.tagName} ${element.className} ${words.slice(0, 40)}`];
  }
  return least;
}"""


@contextmanager
def opened(browser, file, width=1400, scheme="light"):
    """Open a file or URL. The page's `told` lists console messages and requests to other places."""
    url = file if isinstance(file, str) else file.as_uri()
    own = ("file:", "data:", *([url] if url.startswith("http") else []))
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    try:
        page = context.new_page()
        page.told = []
        page.on("console", lambda message: page.told.append(message.text))
        page.on("pageerror", lambda error: page.told.append(str(error)))
        page.on("request", lambda asked: asked.url.startswith(own) or page.told.append(asked.url[:200]))
        page.goto(url)
        yield page
    finally:
        context.close()
