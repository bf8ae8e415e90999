"""The one error type for everything a user can put right."""


class SpecdecError(ValueError):
    """Raised with a message that says what is wrong, where, and what to do about it."""
