"""The folder into which one start of a run writes its dumps. A resume is a start, too."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.files import replacing


@dataclass(frozen=True)
class DumpFolder:
    """The folder of one start. The metadata of every file state when the start began, so that starts have an order."""

    path: Path
    after_step: int
    """The step after which the start begins: 0, or the step of the checkpoint from which it resumes."""
    started_at: float
    """When the folder was made, in seconds since 1970 by the clock of this machine."""

    @classmethod
    def make(cls, dump_dir: Path, after_step: int) -> DumpFolder:
        """Make the folder `from-<after_step>-<n>` in `dump_dir`, where `n` is the first free number.

        Two starts that do this at the same time have different folders.
        """
        number = 0
        while True:
            path = dump_dir / f"from-{after_step}-{number}"
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                number += 1
            else:
                return cls(path, after_step, started_at=time.time())

    def save(self, step: int, update: int, columns: dict[str, Any], settings: dict[str, Any]) -> None:
        """Write the columns of one update to a parquet file, whole or not at all.

        The metadata, as JSON under the key `verl_ext`, hold the settings of the run and what `compare` needs to order
        the starts of the run.
        """
        import pyarrow
        import pyarrow.parquet

        metadata: dict[str, Any] = {"step": step, "update": update}
        metadata.update(settings)
        metadata["after_step"] = self.after_step
        metadata["started_at"] = self.started_at
        metadata["written_at"] = time.time()
        table = pyarrow.table(columns).replace_schema_metadata({"verl_ext": json.dumps(metadata)})
        path = self.path / f"advantages-{step:08d}-{update:03d}.parquet"
        with replacing(path) as temporary:
            pyarrow.parquet.write_table(table, temporary, compression="zstd")
