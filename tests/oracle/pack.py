"""The oracle's scripts, in one compressed file.

    python tests/oracle/pack.py unpack FOLDER    scripts.json.xz -> FOLDER/NAME.py
    python tests/oracle/pack.py pack FOLDER      and back; the same texts give the same file
"""
import json
import lzma
import sys
from pathlib import Path

PACKED = Path(__file__).with_name("scripts.json.xz")


def oracle_scripts() -> dict[str, str]:
    "Name -> text of a script."
    return json.loads(lzma.decompress(PACKED.read_bytes()))


def pack(folder: Path) -> None:
    "Every script of a folder into the compressed file."
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py"))}
    PACKED.write_bytes(lzma.compress(json.dumps(texts).encode(), preset=9 | lzma.PRESET_EXTREME))


def unpack(folder: Path) -> None:
    "Every script as a file of a folder."
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in oracle_scripts().items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")


def main(argv: list[str]) -> int:
    if len(argv) != 2 or argv[0] not in ("pack", "unpack"):
        print(__doc__)
        return 2
    work = pack if argv[0] == "pack" else unpack
    work(Path(argv[1]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
