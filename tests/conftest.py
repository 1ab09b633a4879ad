"""One thread a process, set before numpy and torch start their pools: repeatable to the last bit."""

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"
