"""Errors of one row, raised where its file and its number in the source are not known."""


class BadRow(ValueError):
    """Error of one row. The message has the problem and the cure; the source adds the file and the row."""


class NullValueError(BadRow):
    """A list of numbers is null or has a null in it, which an array of numbers cannot show; carries the row in the fragment."""

    def __init__(self, row: int) -> None:
        super().__init__(
            "a list of numbers is null or has a null in it. Fill or drop such rows where the files are made, read the other "
            "columns only (columns=...), or leave such rows out: rd.Filter(reader, has_tokens) those whose list is null, "
            "rd.Reader(on_error='skip') those with a null in it."
        )
        self.row = row
