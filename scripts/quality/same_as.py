"""Compare this checkout with a commit: run both on the same seeded cases and print what differs.

    python scripts/quality/same_as.py COMMIT [--batches N] [--kinds core,ray] [--case KIND:SEED] [--expect KIND]

The exit status is 1 if anything differs. `scripts/quality/same_as/` has the code, and its `renamed.py` the names that
differ between versions.
"""

import sys

from same_as.command import main

if __name__ == "__main__":
    sys.exit(main())
