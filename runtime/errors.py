"""The error that every room raises for a mistake of the user."""


class UserError(Exception):
    """A mistake that the user can fix. The message has the fix.

    A script prints it and exits with code 2.
    """
