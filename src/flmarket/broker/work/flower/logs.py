"""What Flower said of a task's run, for the operator: the command that asked for it, and the run itself.

The first is a file of ours (`run-<attempt>.log`), there whether or not a SuperLink answers. The second is asked of the
SuperLink (`flwr log`), which may take seconds and may fail; then its own words say why.
"""

import re
import subprocess
import tempfile
from pathlib import Path

from flmarket.broker.requests import without_invisible
from flmarket.broker.settings import Settings
from flmarket.broker.work.flower import runs
from flmarket.broker.work.flower.files import task_folder

_LINES, _WIDEST, _MOST_BYTES = 200, 500, 1 << 18
_SECONDS = 20.0
_LOOKED_AT = 3  # attempts
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def asked(settings: Settings, task_id: str, attempt: int) -> tuple[str, ...]:
    """The last lines of the command that asked for a run, or of the last one that said anything; none if it was never
    asked for, or elsewhere."""
    folder = task_folder(settings.flower_folder, task_id)
    said = (_tail(folder / f"run-{one}.log") for one in range(attempt, max(0, attempt - _LOOKED_AT), -1))
    return next(filter(None, said), ())


def said(settings: Settings, run_id: str) -> tuple[str, ...]:
    """The last lines of the run itself, as the SuperLink has them now, or why it does not give them."""
    if not settings.superlink or not run_id.isdigit():
        return ("There is no run to ask for.",)
    with tempfile.TemporaryDirectory(prefix="flmarket-log-") as folder:
        path = Path(folder) / "log"
        process = runs._flwr(path, "log", run_id, settings.superlink, "--show")
        try:
            process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return (*_tail(path), f"The SuperLink did not answer within {_SECONDS:.0f} seconds.")
        return _tail(path) or ("The run has said nothing.",)


def _tail(path: Path) -> tuple[str, ...]:
    try:
        with path.open("rb") as handle:
            handle.seek(max(0, path.stat().st_size - _MOST_BYTES))
            text = handle.read(_MOST_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ()
    plain = without_invisible(_HIDDEN.sub("", _COLOURS.sub("", text)))
    return tuple(line.rstrip()[:_WIDEST] for line in plain.splitlines() if line.strip())[-_LINES:]
