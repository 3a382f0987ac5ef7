"""Store what the finished runs of tools.sh wrote: small files without weights and without texts of a data set.

    python scripts/evidence/collect_tools.py outputs/evidence scripts/evidence/tools --judge .venv-bfcl/bin/python

For each run: `metrics.jsonl`; `rewards.parquet`, a row a response, which `verl-ext compare` reads with
`--prompt uid --step step`; `verdicts-0.jsonl` and `verdicts-40.jsonl`, BFCL's and the recipe's verdicts on the test
entries before and after; `config.yaml`, `starts.txt` and `versions.txt`. `--judge` is the Python of BFCL's environment
(see judge_tools.py). Machine paths become `OUT`, `TASK` and `.`.
"""

from __future__ import annotations

import argparse
import json
import re
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
    task = Path(re.search(r"train_files: (\S+)/train\.parquet", config)[1])  # type: ignore[index]
    places = {str(run.parent): "OUT", str(task): "TASK", str(run.parents[2]): "."}
    for name in ("metrics.jsonl", "config.yaml", "starts.txt", "versions.txt"):
        text = (run / name).read_text(encoding="utf-8")
        for path, word in places.items():
            text = re.sub(r"^-e .*\n", "", text.replace(path, word), flags=re.MULTILINE)  # starts.txt has the commit
        (target / name).write_text(text, encoding="utf-8")
    # After an interrupt some steps were dumped twice: the last file counts.
    dumps = {
        file.name: file for file in sorted(run.glob("dump/from-*/*.parquet"), key=lambda file: file.stat().st_mtime)
    }
    rows = pd.concat([pd.read_parquet(dumps[name]) for name in sorted(dumps)])
    rows = rows.rename(columns=lambda name: name.removeprefix("reward/"))
    columns = ["step", "uid", "correctness", "format", "advantage", "tokens"]
    rows[columns].to_parquet(target / "rewards.parquet", index=False)
    for file in run.glob("validation/*.jsonl"):
        verdicts = target / f"verdicts-{file.stem}.jsonl"
        command = [str(judge), str(HERE / "judge_tools.py"), str(task), str(file), "--verdicts", str(verdicts)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in verdicts.read_text(encoding="utf-8").splitlines()]
        kept = ("id", "bfcl", "format", "correctness")
        verdicts.write_text("".join(json.dumps({name: line[name] for name in kept}) + "\n" for line in lines))


if __name__ == "__main__":
    main()
