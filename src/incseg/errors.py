"""The error that people can put right. Apart from types.py, because a command line must start without torch."""


class UserError(ValueError):
    """Something the user can put right. Shown as one line: what came, what is allowed, what to do."""
