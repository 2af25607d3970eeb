"""Check that subjects of commits have at most 72 characters.

    python ci/commit_subjects.py [FOLDER]

Commits up to SINCE keep theirs. A checkout without SINCE (a shallow clone, an unpacked archive) is not checked, which is said.
"""

from __future__ import annotations

import sys
from pathlib import Path

import repository

LIMIT = 72
SINCE = "4fde04cbfb21b538a552e5d617896ffcb9372426"


def too_long(folder: Path, since: str) -> list[str] | None:
    """Commits after `since` with longer subjects, as hash and subject; None if the history does not go back that far."""
    log = repository.git(folder, "log", "--format=%h %s", f"{since}..HEAD")
    if log is None:
        return None
    return [line for line in log.splitlines() if len(line.partition(" ")[2]) > LIMIT]


def main(argv: list[str]) -> int:
    """Print the commits that are at fault; 1 if there are any."""
    found = too_long(Path(argv[0] if argv else "."), SINCE)
    if found is None:
        print(f"commit subjects: not checked, this checkout has no history back to {SINCE}")
    return repository.report(
        f"{line}: {len(line.partition(' ')[2])} characters, at most {LIMIT} are allowed: git commit --amend or git rebase -i"
        for line in found or ()
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
