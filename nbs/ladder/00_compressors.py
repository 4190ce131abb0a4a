"""Before the first rung: what compressors need for the same text, without any training."""
import json
import lzma
import zlib
from importlib.resources import files

# xz's own filter at its best, without the container; the dictionary reaches back over all of the text
XZ = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 2**23}]


def read(split):
    "The stories of a split as one text."
    stories = sorted((files("golfnb") / "prose" / split).iterdir(), key=lambda path: path.name)
    return "\n".join(story.read_text(encoding="utf-8") for story in stories).encode()


def xz(text):
    return len(lzma.compress(text, format=lzma.FORMAT_RAW, filters=XZ))


def compressors():
    "Bits per byte of the validation text: zlib, xz, and xz that has read the training text before."
    train, validation = read("train"), read("validation")
    needed = {
        "zlib": len(zlib.compress(validation, 9)),
        "xz": xz(validation),
        "primed xz": xz(train + validation) - xz(train),  # what the validation text adds
    }
    return {name: 8 * count / len(validation) for name, count in needed.items()}


if __name__ == "__main__":
    print(json.dumps(compressors()))
