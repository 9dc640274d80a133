"""How a run ended: exit codes, and the file that tells its launcher.

torchrun turns every failing worker's code into 1, so the code and the error travel in ``<dump_folder>/end.json``.
What ends a run is not decided here.
"""

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

DONE, FAILED, BAD_CONFIG, STOPPED = 0, 1, 2, 75
LAUNCHER = "TORCHTITAN_LAUNCHER"
"""Set in the environment of ranks whose launcher reads end.json and shows the error itself."""
_FILE = "end.json"


@dataclass(frozen=True)
class End:
    """Why and at which step a run ended; ``error`` and ``rank`` of the first rank that failed, if one did."""

    reason: str
    exit_code: int
    step: int | None = None
    error: str | None = None
    rank: int | None = None

    def write(self, folder: Path) -> bool | None:
        """Leave it in the folder; False if another rank had done so before, None if nothing can be written there.

        One rank fails, then the others fail because it did: only the first is what the user wants to read.
        """
        path = folder / _FILE
        own = folder / f".{_FILE}.{os.getpid()}"
        try:
            own.write_text(json.dumps(asdict(self)))
            os.link(own, path)  # whole or not at all, and only if nobody has
        except FileExistsError:
            return False
        except OSError:  # no room, or no folder
            return None
        finally:
            with contextlib.suppress(OSError):
                own.unlink(missing_ok=True)
        return True

    @staticmethod
    def read(folder: Path, since: float) -> "End | None":
        """What was left in the folder at the time ``since`` or later, None if nothing was."""
        path = folder / _FILE
        try:
            return End(**json.loads(path.read_text())) if path.stat().st_mtime >= since else None
        except (OSError, ValueError, TypeError):
            return None

    @staticmethod
    def forget(folder: Path) -> None:
        """Remove what an earlier run left."""
        (folder / _FILE).unlink(missing_ok=True)
