"""The compatibility table of docs/e2b-compatibility.md: which operation of E2B's API which test has exercised. What tests asked for is in the
gateway's log at the level debug, between the marks that marks.py and marks.mjs leave there.

    python table.py --modules NODE_MODULES --document DOCUMENT --log LOG [--write | --check] PAGE

DOCUMENT is what `basalt-gateway openapi` prints.

With --check it fails if the page says that an operation is exercised which was not, or lacks one; with --write it writes the page.
"""

import argparse
import collections
import json
import pathlib
import re
import sys

import facts
from compare import Document

# What the SDKs and their Connect client call themselves: a test's own requests do not count.
SDK = re.compile(r"e2b-|connectrpc/")
# JavaScript's client of volumes' files says nothing of itself, and its runtime this.
NAMELESS = re.compile(r"\w+ /volumecontent/.* undici")
COLUMNS = {"python": "Python", "python-async": "Python, asyncio", "javascript": "JavaScript"}
NO, NONE = "no", "—"
LINE = re.compile(r'request (?:(api|envd) (?:[0-9a-f]{12} )?(\w+) (\S+)|.*) (\d{3}) \d+ us "(.*)"$')
MARK = re.compile(r"basalt-test/(begin|end)(?: (\S+) (.*))?$")
BEGIN, END = "<!-- made by cargo xtask e2b-table: do not edit -->", "<!-- end of what is made -->"


def envd_operations(modules):
    """What envd answers: its HTTP, and its services."""
    _, http = facts.types_of_javascript(modules)
    return sorted(http) + [f"POST /{call}" for call in facts.calls()]


def exercised(lines, known):
    """By column and operation, the tests that had it answered with a status below 300."""
    found = {column: collections.defaultdict(set) for column in COLUMNS}
    shapes = {kind: [(key, _pattern(key)) for key in keys] for kind, keys in known.items()}
    column = test = None
    for line in lines:
        if not (read := LINE.search(line)):
            continue
        kind, method, path, status, agent = read.groups()
        if mark := MARK.match(agent):
            column, test = mark.groups()[1:] if mark[1] == "begin" else (None, None)
        elif column in COLUMNS and kind and int(status) < 300 and (SDK.search(agent) or NAMELESS.fullmatch(f"{method} {path} {agent}")):
            matches = [key for key, pattern in shapes[kind] if pattern.fullmatch(f"{method} {path}")]
            if matches:
                # A name in a path is none where the path is one of its own: /sandboxes/metrics.
                found[column][min(matches, key=lambda key: key.count("{}"))].add(test)
    return found


def _pattern(key):
    return re.compile(re.escape(key).replace(re.escape("{}"), "[^/]+"))


def cell(tests, breadth):
    """The test that does the least besides, and how many others there are."""
    if not tests:
        return NO
    first = min(tests, key=lambda test: (breadth[test], test))
    return f"{first}" + (f" +{len(tests) - 1}" if len(tests) > 1 else "")


def rows(keys, found, reasons):
    breadth = {column: collections.Counter(test for tests in of.values() for test in tests) for column, of in found.items()}
    for key in keys:
        if key in reasons:
            yield key, [f"answers 501: {reasons[key]}"] + [NONE] * (len(COLUMNS) - 1)
        else:
            yield key, [cell(found[column].get(key, ()), breadth[column]) for column in COLUMNS]


def table(rows, names):
    lines = ["| operation | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for key, cells in rows:
        lines.append(f"| `{names.get(key, key)}` | " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def page_rows(text):
    """The rows of a page, by operation."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| `") and len(cells) == len(COLUMNS) + 1:
            found[facts.shape(cells[0].strip("`"))] = cells[1:]
    return found


def wrong(page, known, found, reasons):
    """What a page says that this run does not bear out."""
    said = page_rows(page)
    for key in [*known["api"], *known["envd"]]:
        if key not in said:
            yield f"the page has no row for {key}"
    for key, cells in said.items():
        reason = f"answers 501: {reasons[key]}" if key in reasons else None
        if (cells[0] if cells[0].startswith("answers 501: ") else None) != reason:
            yield f"{key}: the page has `{cells[0]}`, and the API `{reason or 'serves it'}`"
            continue
        for column, text in zip(COLUMNS, cells):
            is_said = reason is None and text not in (NO, NONE)
            # How many others there are depends on how often a test had to look.
            test = re.sub(r" \+\d+$", "", text.replace("\\|", "|"))
            if is_said and test not in found[column].get(key, ()):
                yield f"{key}: the page says that `{test}` exercises it in {COLUMNS[column]}, and in this run it did not"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modules", required=True)
    parser.add_argument("--document", required=True, type=pathlib.Path)
    parser.add_argument("--log", required=True, type=pathlib.Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("page", type=pathlib.Path)
    asked = parser.parse_args()
    document = Document(json.loads(asked.document.read_text()))
    reasons = {key: document.unserved(key) for key in document.operations if document.unserved(key)}
    javascript, _ = facts.types_of_javascript(asked.modules)
    api = javascript | set(facts.operations()) | set(reasons)
    known = {"api": sorted(api, key=lambda key: (key.split(" ")[1], key)), "envd": envd_operations(asked.modules)}
    found = exercised(asked.log.read_text(errors="replace").splitlines(), known)
    for column, of in found.items():
        print(f"{COLUMNS[column]}: {len(of)} operations in {len(set().union(*of.values()))} tests")
    text = asked.page.read_text()
    if asked.write:
        # Those of the SDKs where they have any.
        names = document.names | facts.names(asked.modules)
        made = {kind: table(rows(known[kind], found, reasons), names) for kind in known}
        parts = f"{BEGIN}\n\n## The REST API\n\n{made['api']}\n\n## Processes and files, at port 49983\n\n{made['envd']}\n\n{END}"
        before, _, rest = text.partition(BEGIN)
        asked.page.write_text(before + parts + rest.partition(END)[2])
        return 0
    failures = list(wrong(text, known, found, reasons))
    for failure in failures:
        print(failure)
    more = [key for key, cells in page_rows(text).items() for column, text in zip(COLUMNS, cells) if text == NO and found[column].get(key)]
    if more:
        print(f"the page says 'no' for {len(more)} that this run exercised: `cargo xtask e2b-table` writes it anew")
    return 1 if failures and asked.check else 0


if __name__ == "__main__":
    sys.exit(main())
