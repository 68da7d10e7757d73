"""The program's entry; light, so that Ctrl-C is heard from the first import on."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from paceline.cli.main import main as command_line

        command_line()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
