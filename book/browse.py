"""Open every page of the built site in a headless Chromium, on a desktop and on a phone, light and dark, from the files alone:
nothing fails, nothing is asked of another host, formulas and pictures are there, each with its caption, no code, picture or table is cut off, code has
letters of 14 pixels and a button that copies it, 110 characters fit a line, the chapter is in sight in the sidebar, a lesson is at most 10,000 pixels high and less than
half of that code, and a search shows what it found.

    python book/browse.py [--site _book/html] [--shots FOLDER] [PAGE ...]
"""
import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

sys.path.insert(0, str(Path(__file__).parent))
from names import ROOT

VIEWS = (("desktop", 1280, "light"), ("phone", 390, "dark"))
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
LOOK = r"""() => {
  const box = e => e.getBoundingClientRect(), said = [];
  const formulas = [...document.querySelectorAll('.math')];
  const bare = formulas.filter(m => !m.querySelector('mjx-container'));
  if (bare.length) said.push(`${bare.length} of ${formulas.length} formulas were not rendered: ${bare[0].textContent.slice(0, 60)}`);
  const wrong = document.querySelectorAll('mjx-merror, [data-mjx-error]');
  if (wrong.length) said.push(`a formula has an error: ${wrong[0].textContent.slice(0, 80)}`);
  for (const i of document.querySelectorAll('article img, main img'))
    if (!i.complete || i.naturalWidth < 20 || box(i).width < 20) said.push(`picture ${i.getAttribute('src').slice(0, 60)} was not drawn`);
  for (const i of document.querySelectorAll('article div.cell_output img')) {
    const caption = i.closest('figure') && i.closest('figure').querySelector('figcaption');
    if (!caption || box(caption).height < 10) said.push(`picture ${i.getAttribute('src').slice(0, 60)} has no caption`);
    if (innerWidth < 500 && i.naturalWidth > innerWidth && box(i).width < 0.95 * innerWidth) said.push(`a picture is ${Math.round(box(i).width)} px wide on a screen of ${innerWidth}`);
  }
  const chapter = [...document.querySelectorAll('.bd-sidebar-primary li.current.active > a')].pop();
  if (innerWidth >= 1280 && chapter && (box(chapter).top < 0 || box(chapter).bottom > innerHeight)) said.push(`the sidebar does not show ${chapter.textContent.trim().slice(0, 40)}`);
  const frame = e => { for (let f = e.parentElement; f; f = f.parentElement) if (getComputedStyle(f).overflowX !== 'visible') return box(f); };
  const moved = e => e.matches('pre, table') && !e.querySelector('.golf-line') && [e, e.parentElement].some(f => getComputedStyle(f).overflowX === 'auto');  // a finger moves it sideways
  for (const e of [...document.querySelectorAll('article :is(pre, img, svg, figure, table)')].filter(e => innerWidth >= 500 || !moved(e))) {
    const f = frame(e) || {left: 0, right: innerWidth}, b = box(e), over = Math.max(b.right - Math.min(f.right, innerWidth), Math.max(f.left, 0) - b.left, e.scrollWidth - e.clientWidth);
    if (b.width && over > 1.5) said.push(`${e.tagName.toLowerCase()} is cut off by ${Math.round(over)} px: ${(e.innerText || e.alt || '').replace(/\s+/g, ' ').trim().slice(0, 60)}`);
  }
  const codes = [...document.querySelectorAll('article div.highlight pre')].filter(e => !e.closest('.cell_output, [class*=golf-w]') && box(e).width);  // a drawing in letters keeps its columns and shrinks
  const letters = e => parseFloat(getComputedStyle(e).fontSize), small = codes.filter(e => letters(e) < 14), bald = codes.filter(e => !e.parentElement.querySelector('button.copybtn'));
  if (small.length) said.push(`code has letters of ${letters(small[0])} px, at least 14 are wanted: ${small[0].textContent.trim().slice(0, 40)}`);
  if (bald.length) said.push(`code has no button that copies it: ${bald[0].textContent.trim().slice(0, 40)}`);
  const owns = e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) && !e.closest('mjx-container') && box(e).width;
  const tiny = innerWidth >= 500 ? [] : [...document.querySelectorAll('article :is([class*=golf-w] pre, [class*=golf-w] pre *, .cell_output pre, td, td *, th, th *)')].filter(e => owns(e) && letters(e) < 12);
  if (tiny.length) said.push(`what is printed has letters of ${letters(tiny[0])} px on a phone, at least 12 are wanted: ${tiny[0].textContent.trim().slice(0, 40)}`);
  const heads = innerWidth < 1280 ? [] : [...document.querySelectorAll('article section[id] > h2')].map(h => h.parentElement.id);
  const listed = new Set([...document.querySelectorAll('a[href^="#"]')].filter(a => !a.closest('article') && box(a).width).map(a => decodeURIComponent(a.hash.slice(1))));
  const unlisted = heads.filter(id => !listed.has(id));
  if (unlisted.length) said.push(`the contents of the page do not show ${unlisted[0]}`);
  for (const l of innerWidth < 1280 ? [] : document.querySelectorAll('div.cell_input .golf-line'))
    if (l.textContent.length <= 111 && box(l).height > 1.5 * parseFloat(getComputedStyle(l).lineHeight)) said.push(`a line of ${l.textContent.length - 1} characters folds`);
  if (innerWidth >= 1280 && /\/lesson\d\d_\w+\.html$/.test(location.pathname)) {
    const high = document.documentElement.scrollHeight, code = [...document.querySelectorAll('article div.cell_input')].filter(e => !e.closest('details:not([open])')).reduce((sum, e) => sum + box(e).height, 0);
    if (high > 10000) said.push(`a lesson is ${high} pixels high, at most 10000 are wanted`);
    if (code > high / 2) said.push(`of a lesson's ${high} pixels ${Math.round(code)} are code, at most half are wanted`);
  }
  const walk = document.createTreeWalker(document.querySelector('article') || document.body, NodeFilter.SHOW_TEXT), range = document.createRange();
  while (walk.nextNode()) if (walk.currentNode.parentElement.closest('td, th'))
    for (const m of walk.currentNode.data.matchAll(walk.currentNode.parentElement.closest('th') ? /[\d.,]*\d|\p{L}+/gu : /[\d.,]*\d/g)) {
      range.setStart(walk.currentNode, m.index); range.setEnd(walk.currentNode, m.index + m[0].length);
      if (new Set([...range.getClientRects()].map(r => r.top)).size > 1) said.push(`a table breaks inside ${m[0]}`);
    }
  if (document.documentElement.scrollWidth > window.innerWidth + 1) {
    const wide = [...document.querySelectorAll('main article *')].filter(e => box(e).right > window.innerWidth + 1 && getComputedStyle(e).overflowX === 'visible').sort((a, b) => box(b).right - box(a).right)[0];
    said.push(`the page is ${document.documentElement.scrollWidth} wide on a screen of ${window.innerWidth}` + (wide ? `: ${wide.tagName} ${wide.className}` : ''));
  }
  const dark = matchMedia('(prefers-color-scheme: dark)').matches, back = getComputedStyle(document.body).backgroundColor.match(/\d+/g).map(Number);
  const pale = !dark ? [] : [...document.querySelectorAll('article .cell_output .text_html')].filter(e => { const [r, g, b, a = 1] = getComputedStyle(e).backgroundColor.match(/[\d.]+/g).map(Number); return a > 0 && r + g + b >= 384; });
  if (pale.length) said.push(`an output is pale where the reader asked for dark: ${pale[0].textContent.trim().slice(0, 40)}`);
  if (dark !== (back[0] + back[1] + back[2] < 384)) said.push(`the background is rgb(${back}) where the reader asked for ${dark ? 'dark' : 'light'}`);
  return said;
}"""


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def lost(url: str, failure: str) -> bool:
    "Whether a failed request is a fault of the page: not where the browser itself cut off the reading of a file that is there, as when a page is left while its icon loads."
    return failure != "net::ERR_ABORTED" or not url.startswith("file:") or not Path(url2pathname(urlsplit(url).path)).is_file()


def look(site: Path, chosen: list[str], shots: Path | None, chromium: str) -> list[str]:
    "What is wrong, one sentence each."
    from playwright.sync_api import sync_playwright

    home, found = site.resolve().as_uri() + "/", []
    pages = chosen or sorted(p.relative_to(site).as_posix() for p in site.rglob("*.html") if "_static" not in p.parts)
    with sync_playwright() as play, tempfile.TemporaryDirectory() as profile:
        for view, width, scheme in VIEWS:
            browser = play.chromium.launch_persistent_context(f"{profile}/{view}", executable_path=chromium, args=FLAGS, viewport={"width": width, "height": 900}, color_scheme=scheme)
            tab, here = browser.pages[0], ""
            tab.on("console", lambda m: found.append(f"{view} {here}: console: {m.text[:200]}") if m.type in ("error", "warning") else None)
            tab.on("pageerror", lambda e: found.append(f"{view} {here}: error: {str(e)[:200]}"))
            tab.on("request", lambda r: found.append(f"{view} {here}: asks another host for {r.url[:200]}") if not r.url.startswith((home, "data:", "blob:")) else None)
            tab.on("requestfailed", lambda r: found.append(f"{view} {here}: {r.url[:200]} failed") if lost(r.url, r.failure) else None)
            for here in pages:
                tab.goto(home + here, wait_until="load")
                tab.evaluate("async () => { if (window.MathJax && MathJax.startup) await MathJax.startup.promise; }")
                found += [f"{view} {here}: {s}" for s in tab.evaluate(LOOK)]
                if shots:
                    tab.screenshot(path=str(shots / f"{here.replace('/', '_').removesuffix('.html')}_{view}.png"), full_page=len(chosen) > 0)
            here = "search.html?q=reduce-scatter"
            try:
                tab.goto(home + here, wait_until="load")
                tab.wait_for_selector("#search-results ul.search li p.context mark", timeout=5_000)
                tab.wait_for_load_state("networkidle")  # closing would cut off what is still on its way
            except Exception:
                found.append(f"{view} {here}: the search finds nothing, or does not show it")
            browser.close()
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--site", type=Path, default=ROOT / "_book" / "html", help="the built site")
    parser.add_argument("--shots", type=Path, help="folder for a picture of each page")
    parser.add_argument("pages", nargs="*", help="pages to open (default: all)")
    args = parser.parse_args(argv)
    chromium = find_chromium()
    if not chromium:
        print("book: no Chromium was found; install one (Debian: apt-get install chromium) and run this again", file=sys.stderr)
        return 2
    if not (args.site / "index.html").is_file():
        print(f"book: there is no site in {args.site}; run `make book` first", file=sys.stderr)
        return 2
    if args.shots:
        args.shots.mkdir(parents=True, exist_ok=True)
    found = look(args.site, args.pages, args.shots, chromium)
    for sentence in found:
        print(sentence, file=sys.stderr)
    print(f"{len(found)} problems" if found else "every page opens on desktop and phone, light and dark; nothing failed, nothing was asked of another host")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
