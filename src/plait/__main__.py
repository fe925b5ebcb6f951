"""`plait`, and `python -m plait`: imports little, so that Ctrl-C is answered in the first moments too."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; Ctrl-C before a verb has taken over ends it with status 130."""
    try:
        from plait.cli import main as run

        run()
    except KeyboardInterrupt:
        print("plait: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        # The current folder, in which anybody's module would come before Python's own.
        del sys.path[0]
    main()
