"""Store the numbers of tests/golden anew, after a number was changed on purpose.

python scripts/quality/make_golden.py --only '^021|whiten.*token'   # only cases that match, printing old and new
python scripts/quality/make_golden.py                               # all of them

A pattern is searched in the line that the test prints for a case: its name, estimator and settings. The cases that
differ and do not match are listed and stay as they are.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.golden import store
from tests.golden.cases import Case, Outcome
from tests.golden.compare import differences
from tests.golden.paths import PATHS, has, through


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="PATTERN", help="a regular expression for the cases to store")
    parser.add_argument("--path", choices=PATHS, help="store the numbers of this path only")
    given = parser.parse_args()
    logging.getLogger("verl_ext").setLevel(logging.ERROR)
    cases, stored = store.read()
    kept = 0
    for path in PATHS if given.path is None else (given.path,):
        for case in (case for case in cases if has(path, case)):
            found, before = through(path)(case), stored[path][case.name]
            changed = list(differences(path, case, before, found))
            if changed and re.search(given.only, case.text):
                stored[path][case.name] = found
                report(path, case, changed, before, found)
            elif changed:
                kept += 1
                print(f"differs, does not match: {path} {case.name}")
    store.write(cases, stored)
    print(f"{store.FILE}: {len(cases)} cases, {store.FILE.stat().st_size / 2**20:.2f} MB; {kept} differ and were kept")


def report(path: str, case: Case, changed: list[str], before: list[Outcome], found: list[Outcome]) -> None:
    """Print what changed, with the old and the new advantages."""
    print(f"{path} {case.text}")
    for line in changed:
        print(f"    {line}")
    for number, (old, new) in enumerate(zip(before, found, strict=True)):
        if any(line.startswith((f"batch {number} ", f"batch {number},")) and "advantages" in line for line in changed):
            print(f"    batch {number} old {old.advantages.tolist()}")
            print(f"    batch {number} new {new.advantages.tolist()}")


if __name__ == "__main__":
    main()
