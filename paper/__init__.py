"""What the paper measures: its other decoders, its benchmarks and their runs, its numbers, and
reports."""
