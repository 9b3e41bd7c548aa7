import runtime  # noqa: F401
