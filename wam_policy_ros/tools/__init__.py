"""The ``wam`` command line, one file per sub-command."""
