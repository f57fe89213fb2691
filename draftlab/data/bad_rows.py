"""Bad rows of text, which a parser, a chat template or a tokenizer refuses. A few bad rows are left out and named."""

import contextlib
import re
from collections.abc import Iterator

from draftlab.console import note_once
from draftlab.errors import UserError

MOST_BAD = 0.01  # largest share of a source's rows that may be left out because they are bad
HOPELESS = 1000  # a source whose first rows are all bad is not read any further than this many rows
NAMED = 3  # number of rows named for each reason
# what differs between rows that are bad for the same reason: quoted words, lists in brackets, and numbers
VALUES = re.compile(r"'[^']*'|\"[^\"]*\"|\([^)]*\)|\d+")


class BadRows:
    """The account of a source's bad rows.

    At most MOST_BAD of the rows may be bad, or a single row.

    Attributes:
        source: Name of the source in messages.
        total: Number of rows that were read, including bad rows.
    """

    def __init__(self, source: str, total: int = 0) -> None:
        self.source = source
        self.total = total
        # reason without values -> name of each row with this reason -> the whole reason
        self._by_reason: dict[str, dict[str, str]] = {}
        self._unlimited = set[str]()  # names of rows that may be bad in any number
        self._settled = 0

    @property
    def count(self) -> int:
        """Return the number of bad rows."""
        return sum(map(len, self._by_reason.values()))

    def __contains__(self, row: str) -> bool:
        return any(row in rows for rows in self._by_reason.values())

    @property
    def hopeless(self) -> bool:
        """Return whether so many rows were read, all of them bad, that no good row can be expected."""
        return self.count == self.total >= HOPELESS

    @contextlib.contextmanager
    def leaving_out(self, row: str) -> Iterator[None]:
        """Count a row as bad if the block raises UserError.

        row: Name of the row, FILE:NUMBER, with which the message of the error begins.
        """
        try:
            yield
        except UserError as error:
            self.leave_out(row, str(error).removeprefix(f"{row}: "))

    def leave_out(self, row: str, reason: str, *, limited: bool = True) -> None:
        """Count a row as bad.

        Args:
            row: Name of the row, such as FILE:NUMBER.
            limited: Whether too many of these rows are an error.
        """
        self._by_reason.setdefault(VALUES.sub("", reason), {})[row] = reason
        if not limited:
            self._unlimited.add(row)

    def check(self) -> None:
        """Check that not too many rows are bad. Raises UserError if they are."""
        if self.count - len(self._unlimited) > max(1, MOST_BAD * self.total):
            self.refuse()

    def settle(self) -> None:
        """Name the bad rows in a note. Call this after the last row.

        Raises:
            UserError: Too many rows are bad, or all of them.
        """
        self.check()
        count = self.count
        if count >= max(1, self.total):
            self.refuse()
        if count > self._settled:
            self._settled = count
            note_once(f"{self._share} left out: {self._reasons()}")

    def refuse(self) -> None:
        """Raise UserError with the number of bad rows for each reason. Without bad rows, do nothing."""
        rows = [f"{row}: {reason}" for each in self._by_reason.values() for row, reason in each.items()]
        if len(rows) == 1:
            raise UserError(rows[0])
        if rows:
            raise UserError(f"{self._share} bad, more than {MOST_BAD:.0%}, so the command stops: {self._reasons()}")

    @property
    def _share(self) -> str:
        """Return the number of bad rows as the start of a sentence."""
        count = self.count
        return f"{self.source}: {count:,} of {self.total:,} rows {'is' if count == 1 else 'are'}"

    def _reasons(self) -> str:
        """Return the reasons, the most frequent reason first, each with its first rows."""
        parts: list[str] = []
        for rows in sorted(self._by_reason.values(), key=len, reverse=True):
            names = [row.rpartition("/")[2] for row in list(rows)[:NAMED]]
            more = ", ..." if len(rows) > NAMED else ""
            times = f"{len(rows):,} x " if self.count > 1 else ""
            parts.append(f"{times}{next(iter(rows.values()))} ({', '.join(names)}{more})")
        return "; ".join(parts)
