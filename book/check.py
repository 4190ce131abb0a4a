"""What must hold of the built site, read from its files: links, anchors, nothing from another host, alt texts, every public name."""
import re
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

sys.path.insert(0, str(Path(__file__).parent))
from names import places

LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src", "audio": "src", "object": "data", "embed": "src", "use": "href"}
SILENT_LINKS = {"canonical", "next", "prev", "index", "search", "author", "help"}  # relations that a browser does not fetch


PLAIN = re.compile(r'</?(?:code|div|em|i|li|p|pre|span|strong|td|tr|ul)(?: class="[^"]*")?>')


def without_plain_tags(text: str) -> str:
    "HTML without the tags that only say how something looks, nine tenths of all: no link, anchor, picture or section is among them."
    return PLAIN.sub("", text)


class Page(HTMLParser):
    "Anchors, links, what is loaded, and pictures of one page."

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.ids, self.links, self.loads, self.pictures = set(), set(), set(), []
        self.feed(without_plain_tags(text))

    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        self.ids |= {a[k] for k in ("id", "name") if a.get(k)}
        if tag == "a" and a.get("href"):
            self.links.add(a["href"])
        if tag in LOADS and a.get(LOADS[tag]) and not (tag == "link" and set(a.get("rel", "").split()) & SILENT_LINKS):
            self.loads.add(a[LOADS[tag]])
        if a.get("srcset"):
            self.loads |= {part.split()[0] for part in a["srcset"].split(",")}
        if tag == "img":
            self.pictures.append((a.get("src", ""), a.get("alt")))


def outside(url: str) -> bool:
    return bool(re.match(r"(?:[a-z][a-z0-9+.-]*:)?//", url, re.I))


def problems(site: Path) -> list[str]:
    "One sentence for each thing that is wrong."
    site = site.resolve()

    @cache  # most links of a page are those of every page
    def file_at(folder: Path, path: str) -> Path | None:
        "The file to which a link in a folder leads, if it is there."
        file = (folder / path).resolve()
        return file if file.is_file() else None

    pages = {p.relative_to(site).as_posix(): Page(p.read_text(encoding="utf-8")) for p in sorted(site.rglob("*.html")) if "_static" not in p.parts}
    found = []
    for name, page in pages.items():
        for url in sorted(page.loads):
            if outside(url):
                found.append(f"{name} loads {url} from another host")
            elif not url.startswith("data:") and not file_at((site / name).parent, unquote(re.sub(r"[?#].*", "", url))):
                found.append(f"{name} loads {url}, which is not there")
        for url in sorted(page.links):
            if outside(url) or re.match(r"[a-z]+:", url):
                continue
            path, _, anchor = url.partition("#")
            file = file_at((site / name).parent, unquote(re.sub(r"\?.*", "", path))) if path else site / name
            if not file:
                found.append(f"{name} links to {url}, which is not there")
            elif anchor and file.suffix == ".html" and unquote(anchor) not in pages[file.relative_to(site).as_posix()].ids:
                found.append(f"{name} links to {url}, which has no such anchor")
        for source, alt in page.pictures:
            if not alt or len(alt) < 20 and source.startswith("_images"):
                found.append(f"{name}: picture {source} says {alt!r} instead of what it shows: write `#| fig-cap: ...` into its cell")
    for name, place in places().items():
        path, _, anchor = place.partition("#")
        if path not in pages or anchor and anchor not in pages[path].ids:
            found.append(f"{place}: {name} has no place there")
    for style in site.rglob("*.css"):
        for url in re.findall(r"""(?:url\(\s*|@import\s+)['"]?([^'")\s;]+)""", style.read_text(encoding="utf-8", errors="replace")):
            if outside(url):
                found.append(f"{style.relative_to(site)} loads {url} from another host")
    return found


if __name__ == "__main__":
    for line in (result := problems(Path(sys.argv[1]))):
        print(line)
    raise SystemExit(1 if result else 0)
