"""Error types. Nothing is imported here, so that code that needs no jax can raise them."""


class InputError(ValueError):
    """The input is at fault, not the program. The message gives the value, what was expected, and the fix.

    The command line prints the message as one line and exits with status 2.
    """
