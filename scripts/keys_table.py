"""The table of `vertical_schedule` keys in README.md, made from the fields of `VerticalConfig`.

    python scripts/keys_table.py            # print it
    python scripts/keys_table.py --write    # put it into README.md, between its two markers

A row is the key, its default as JSON, and the first sentence of the field's docstring, of at most 12 words.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ds_vertical.config.section import VerticalConfig  # noqa: E402

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- keys: made by scripts/keys_table.py -->\n", "<!-- /keys -->"
MAX_WORDS = 12


def first_sentence(text: str) -> str:
    """Up to the first full stop that ends a word. Raises ValueError where that is more than a row of the table holds."""
    sentence = re.split(r"\.(?:\s|$)", text, maxsplit=1)[0]
    if len(sentence.split()) > MAX_WORDS:
        raise ValueError(f"{sentence!r} has more than {MAX_WORDS} words; shorten the first sentence of the field's docstring")
    return sentence


def default_of(name: str) -> str:
    """The default as one writes it in the JSON."""
    default = VerticalConfig.model_fields[name].default
    if hasattr(default, "model_dump"):
        default = {key: value for key, value in default.model_dump().items() if value is None}
    return json.dumps(default)


def table() -> str:
    """The whole table, in the order of the fields."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in VerticalConfig.model_fields.items():
        rows.append(f"| `{name}` | `{default_of(name)}` | {first_sentence(field.description or '')} |")
    return "\n".join(rows) + "\n"


def replaced(text: str) -> str:
    """README's text with the table as it is now."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md needs the lines {BEGIN.strip()} and {END}, the table goes between them")
    return before + BEGIN + table() + END + after


def main() -> None:
    """Prints the table, or writes it into README.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write it into README.md")
    if parser.parse_args().write:
        README.write_text(replaced(README.read_text()))
    else:
        print(table(), end="")


if __name__ == "__main__":
    main()
