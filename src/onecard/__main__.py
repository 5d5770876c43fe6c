"""`python -m onecard` is the `onecard` command, for environments whose scripts are not on the path."""

from onecard.cli import process

if __name__ == "__main__":
    process()
