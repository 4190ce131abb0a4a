"""Make golfnb/prose, the book's text, from the Standard Ebooks sources of Conan Doyle's stories.

    python tests/prose.py FOLDER     FOLDER holds a git clone of each of SOURCES, bare or not
"""
import hashlib
import html
import json
import re
import subprocess
import sys
from pathlib import Path

PROSE = Path(__file__).parents[1] / "golfnb" / "prose"
SOURCES = {name: f"arthur-conan-doyle_the-{name}-of-sherlock-holmes" for name in ("adventures", "memoirs", "return")}
VALIDATION = ("the-redheaded-league", "the-musgrave-ritual", "the-adventure-of-the-six-napoleons")  # never trained on
LEFT_OUT = ("the-adventure-of-the-dancing-men", "the-adventure-of-the-priory-school",
            "the-adventure-of-the-golden-pince-nez", "the-adventure-of-the-second-stain")  # pictures, and for size
ASCII = {"“": '"', "”": '"', "‘": "'", "’": "'", "…": "...", "\u2060": "", "\u200a": "", "\ufeff": "", "\u00a0": " ",
         "\u2009": " ", "′": "'"}
BLOCK = re.compile(r"<(p|h2|h3|h4|li)\b[^>]*>(.*?)</\1>", re.S)


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True, text=True).stdout


def plain(markup: str) -> str:
    "The text of a paragraph: no tags, straight quotes, single spaces."
    text = html.unescape(re.sub(r"<[^>]+>", "", re.sub(r"<br/>", " ", markup)))
    for old, new in ASCII.items():
        text = text.replace(old, new)
    return " ".join(text.split())


def story(page: str) -> str:
    "A story as paragraphs with an empty line between them, its title first."
    paragraphs = [plain(found[2]) for found in BLOCK.finditer(page)]
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def main(folder: Path) -> None:
    facts = {"what": "stories of Sherlock Holmes by Arthur Conan Doyle, cut to paragraphs with straight quotes",
             "licence": "the stories are in the public domain in the United States; what Standard Ebooks added to "
                        "them is dedicated to it by CC0 1.0 (https://creativecommons.org/publicdomain/zero/1.0/)",
             "made_by": "tests/prose.py", "sources": {}, "files": {}}
    for old in PROSE.glob("*/*.txt"):
        old.unlink()
    for name, ebook in SOURCES.items():
        clone = next(p for p in (folder / ebook, folder / f"standardebooks+{ebook}" / "repo") if p.exists())
        commit, day = git(clone, "log", "-1", "--format=%H %cs").split()
        facts["sources"][name] = {"from": f"https://github.com/standardebooks/{ebook}", "commit": commit, "date": day}
        for path in git(clone, "ls-tree", "--name-only", "HEAD", "src/epub/text/").split():
            page, stem = git(clone, "show", f"HEAD:{path}"), Path(path).stem
            if "se:short-story" not in page or stem in LEFT_OUT:
                continue
            target = PROSE / ("validation" if stem in VALIDATION else "train") / f"{stem}.txt"
            target.parent.mkdir(parents=True, exist_ok=True)
            data = story(page).encode()
            target.write_bytes(data)
            facts["files"][f"{target.parent.name}/{target.name}"] = {
                "source": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    PROSE.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
