"""Print the lines of Python of each part beside the size that the project aims at.

python scripts/quality/count_lines.py
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
AIMS = {
    "verl_ext/core": 1000,
    "verl_ext/estimators verl_ext/registry.py": 550,
    "verl_ext/settings.py verl_ext/errors.py verl_ext/cli.py verl_ext/__init__.py verl_ext/conf": 400,
    "verl_ext/rewards": 800,
    "verl_ext/integration": 1900,
    "verl_ext/cpu": 1200,
    "verl_ext/tools": 1400,
    "verl_ext": 7300,
    "tests": 12000,
    "scripts/bench scripts/quality": 2500,
    "scripts/evidence": None,
    "recipes": None,
}


def lines(place: str) -> int:
    path = ROOT / place
    files = [path] if path.is_file() else path.rglob("*.py")
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def main() -> None:
    for places, aim in AIMS.items():
        total = sum(map(lines, places.split()))
        beside = "" if aim is None else f" (aim {aim:,})"
        print(f"{total:7,}  {places.split()[0]}{' and beside' if ' ' in places else ''}{beside}")


if __name__ == "__main__":
    main()
