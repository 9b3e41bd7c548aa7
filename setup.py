"""Lets `pip install -e .` put the clone on Python's path, and refuses any other installation."""

import sys

from setuptools import setup

if "bdist_wheel" in sys.argv:
    sys.exit("DeCoRe runs from a clone: git clone it, and in the clone `pip install -e .`")
setup()
