"""Settings of every test run."""

import os

# Before any test imports torch. Thread pools that spin while they wait make everything ten times slower on a busy host.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
