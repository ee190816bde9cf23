"""Makes of pytest's JUnit file a table with a row for each file of tests, and says what failed unexpectedly.

table.py JUNIT KNOWN TABLE: KNOWN has extended regular expressions of names of tests that are known to fail, and
comments. Prints five numbers: tests that were run, passed, were skipped, failed as known, failed otherwise. Writes the
table, and behind it the names of unexpected failures, to TABLE. The exit status is 1 if there are any, or no tests.
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict

# The later one counts where a test has two: its end may fail as well.
KINDS = ("passed", "skipped", "known", "failed")


def file_of(case):
    """The module of a test, without the classes in it."""
    parts = case.get("classname").split(".") if case.get("classname") else [case.get("name")]
    ends = [place for place, part in enumerate(parts) if part.startswith("test_")]
    return ".".join(parts[: ends[0] + 1] if ends else parts)


def kind_of(case, name, known):
    """What became of a test, and why. One that its suite expects to fail has passed when it does."""
    for child in case:
        if child.tag in ("failure", "error"):
            return ("known" if any(k.search(name) for k in known) else "failed"), child.get("message", "")
        if child.tag == "skipped":
            return ("passed" if child.get("type") == "pytest.xfail" else "skipped"), ""
    return "passed", ""


def main(junit, known, table):
    with open(known) as lines:
        known = [re.compile(line.rstrip("\n")) for line in lines if line.strip() and not line.startswith("#")]
    files = defaultdict(lambda: defaultdict(float))
    kinds, whys = {}, {}
    for case in ElementTree.parse(junit).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        kind, why = kind_of(case, name, known)
        files[file_of(case)]["seconds"] += float(case.get("time", 0))
        if KINDS.index(kind) >= KINDS.index(kinds.get(name, KINDS)[0]):
            kinds[name] = (kind, file_of(case))
            whys[name] = why.splitlines()[0] if why else ""
    for kind, file in kinds.values():
        files[file][kind] += 1
    with open(table, "w") as out:
        print("| file | run | passed | skipped | failed, known | failed | seconds |", file=out)
        print("|---|---|---|---|---|---|---|", file=out)
        for file, counts in sorted(files.items()):
            numbers = [round(counts[kind]) for kind in KINDS]
            row = [file, sum(numbers) - numbers[1], *numbers, round(counts["seconds"])]
            print("|", " | ".join(map(str, row)), "|", file=out)
        for name, (kind, _) in kinds.items():
            if kind == "failed":
                print(f"not expected to fail: {name}: {whys[name][:150]}", file=out)
    numbers = [sum(kind == wanted for kind, _ in kinds.values()) for wanted in KINDS]
    print(sum(numbers) - numbers[1], *numbers)
    return numbers[-1] > 0 or sum(numbers) == 0


sys.exit(main(*sys.argv[1:]))
