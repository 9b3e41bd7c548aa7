"""What the paper measures: its benchmarks and their runs, its numbers, and reports."""
