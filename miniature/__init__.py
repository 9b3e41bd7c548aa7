import runtime  # noqa: F401  (it says what is not installed)
