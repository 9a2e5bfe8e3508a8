"""The root of every error this project raises on purpose, and the envelope's own leaves."""

from __future__ import annotations


class PPOLibError(Exception):
    """A fault with a known cause. The message says what was found, what was expected and what to change."""


class BatchMismatchError(PPOLibError, ValueError):
    """Rows, shapes, dtypes or values of two things that must fit together do not."""


class FieldMissingError(PPOLibError, KeyError):
    """A field that an operation needs is not in the envelope."""

    __str__ = Exception.__str__  # KeyError would show the repr of the message


class NotEqualError(BatchMismatchError, AssertionError):
    """Two things that were asserted to be equal are not."""


class NotStorableError(PPOLibError, TypeError):
    """A value that a file which executes nothing cannot hold."""


class FileFormatError(PPOLibError, OSError):
    """A file that does not hold a whole envelope."""
