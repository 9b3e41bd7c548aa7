"""What a person reads while a program runs: notes and a bar, on standard error."""

import sys

from tqdm import tqdm


def say(text):
    """Print a note."""
    print(text, file=sys.stderr)


class Bar(tqdm):
    """A bar of items that also moves by parts of them: `update(1 / 50)` for one of 50 tokens."""

    def __init__(self, **options):
        counts = "{n:.1f}/{total} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
        form = "{desc}: {percentage:3.0f}%|{bar}| " + counts
        super().__init__(bar_format=form, miniters=0, **options)  # a small move counts too
        self.complete = self.n  # items

    def update(self, n=1):
        """Move by n, up to the total: items of a batch may be there, and parts are rounded."""
        super().update(min(n, self.total - self.n))

    def add(self, n):
        """Count n more complete items, whatever was counted of them."""
        self.complete += n
        self.update(self.complete - self.n)
