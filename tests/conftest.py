"""One thread: the models of the tests are tiny, and threads wait for each other longer than they compute."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")           # before torch is loaded, and for the programs that tests start
