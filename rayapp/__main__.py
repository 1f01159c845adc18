"""The program's entry point; `python -m rayapp` is `rayapp`."""

import sys


def main() -> None:
    """Run the program. Ctrl-C while it is still loading also ends it without a traceback."""
    try:
        from rayapp.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
