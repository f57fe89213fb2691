"""The entry point of the script draftlab, and of python -m draftlab, which launchers such as accelerate need."""

import sys

from draftlab.errors import UserError, check_platform


def main() -> None:
    try:
        check_platform()
    except UserError as error:
        sys.exit(f"error: {error}")
    # imported after the check, because it needs modules that Windows lacks
    from draftlab.cli import main as run

    run()


if __name__ == "__main__":
    main()
