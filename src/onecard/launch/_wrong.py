"""What a command line asks for and cannot be."""


class LaunchError(Exception):
    """The command line asks for something that cannot be; the message says what and what works."""
