"""Decoders besides DeCoRe's own, scoring, and sweeps."""
