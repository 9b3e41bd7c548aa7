"""Tables of tests, written as they are read."""


def rows(text):
    """The cells of each line, which ` | ` separates; a line may go on after a backslash."""
    return [[cell.strip() for cell in line.split(" | ")] for line in text.strip("\n").splitlines()]
