"""Installation: `pip install -e .` puts the clone on Python's path; any other one is refused."""

import sys

from setuptools.command.bdist_wheel import bdist_wheel


class EditableOnly(bdist_wheel):
    def run(self):
        sys.exit("DeCoRe runs from a clone: git clone it, and in the clone `pip install -e .`")
