"""Store what the finished runs of tools.sh wrote: small files without weights and without texts of a data set.

    python scripts/evidence/collect_tools.py outputs/evidence scripts/evidence/tools --judge .venv-bfcl/bin/python

For each run: `metrics.jsonl`; `rewards.parquet`, a row a response, which `verl-ext compare` reads with
`--prompt uid --step step`; `verdicts-0.jsonl` and `verdicts-40.jsonl`, BFCL's and the recipe's verdicts on the test
entries before and after; `starts.txt` (commit, command, processor). The commit and the command compose the run's
configuration. `versions.txt` is one for all runs; a run that used other versions has its own. `--judge` is the Python
of BFCL's environment (see judge_tools.py).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--judge", type=Path, required=True)
    options = parser.parse_args()
    for finished in sorted(options.runs.glob("*/finished")):
        store(finished.parent.resolve(), options.target / finished.parent.name, options.judge)
        print(options.target / finished.parent.name)


def store(run: Path, target: Path, judge: Path) -> None:
    """Write the small files of one run."""
    target.mkdir(parents=True, exist_ok=True)
    config = (run / "config.yaml").read_text(encoding="utf-8")
    task = re.search(r"train_files: (\S+)/train\.parquet", config)[1]  # type: ignore[index]
    shutil.copy(run / "starts.txt", target)
    # A resumed run began a new file; the last record of a step counts.
    records = {}
    for file in (*sorted(run.glob("earlier/metrics-*.jsonl")), run / "metrics.jsonl"):
        records |= {json.loads(line)["step"]: line for line in file.read_text(encoding="utf-8").splitlines()}
    text = "".join(f"{records[step]}\n" for step in sorted(records))
    (target / "metrics.jsonl").write_text(text, encoding="utf-8")
    versions = (run / "versions.txt").read_text(encoding="utf-8").splitlines()
    kept = [line for line in versions if not line.startswith("-e")]  # starts.txt has the commit
    text, common = "\n".join([*kept, ""]), target.with_name("versions.txt")
    if not common.exists():
        common.write_text(text, encoding="utf-8")
    elif common.read_text(encoding="utf-8") != text:
        (target / "versions.txt").write_text(text, encoding="utf-8")
    # After an interrupt some steps were dumped twice: the last file counts.
    written = sorted(run.glob("dump/from-*/*.parquet"), key=lambda file: file.stat().st_mtime)
    dumps = {file.name: file for file in written}
    rows = pd.concat([pd.read_parquet(dumps[name]) for name in sorted(dumps)])
    rows = rows.rename(columns=lambda name: name.removeprefix("reward/"))
    columns = ["step", "uid", "correctness", "format", "advantage", "tokens"]
    rows[columns].to_parquet(target / "rewards.parquet", index=False)
    for file in run.glob("validation/*.jsonl"):
        verdicts = target / f"verdicts-{file.stem}.jsonl"
        command = [str(judge), str(HERE / "judge_tools.py"), task, str(file), "--verdicts", str(verdicts)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        judged = pd.read_json(verdicts, lines=True)[["id", "bfcl", "format", "correctness"]]
        judged.to_json(verdicts, orient="records", lines=True)


if __name__ == "__main__":
    main()
