"""Errors of a single row, raised by code that does not know the row's file and number."""


class BadRow(ValueError):
    """Error of a single row. Its message has the problem and the remedy; the source adds the file and the number of the row."""


class NullValueError(BadRow):
    """Error for a list of numbers that is null or contains a null; ``row`` is its row in the fragment."""

    def __init__(self, row: int) -> None:
        super().__init__(
            "a list of numbers is null or has a null in it. Fill or drop such rows where the files are made, read the other "
            "columns only (columns=...), or leave such rows out: rd.Filter(reader, has_tokens) those whose list is null, "
            "rd.Reader(on_error='skip') those with a null in it."
        )
        self.row = row
