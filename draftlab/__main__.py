"""The entry point of python -m draftlab, which launchers such as accelerate need."""

from draftlab.cli import main

if __name__ == "__main__":
    main()
