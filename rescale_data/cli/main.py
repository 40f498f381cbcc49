"""The command ``rescale-data``: look after a run's checkpoints from a terminal or a script."""

from __future__ import annotations

import sys
from io import TextIOWrapper


def main() -> None:
    """Run the command line. Exit codes: 0 fine, 1 damaged, 2 a wrong argument or nothing there."""
    try:
        from rescale_data.cli.commands import app
    except ImportError as error:
        print(f"rescale-data needs its extra ({error}): pip install 'rescale_data[cli]'", file=sys.stderr)
        raise SystemExit(2) from error
    if isinstance(sys.stdout, TextIOWrapper):  # a name need not fit the terminal's encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    app()


if __name__ == "__main__":
    main()
