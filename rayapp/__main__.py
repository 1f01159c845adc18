"""`python -m rayapp` is `rayapp`."""

from rayapp.cli.main import main

if __name__ == "__main__":
    main()
