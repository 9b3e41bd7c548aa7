"""What the programs share: the way into each of them, their options, and loading models."""
