"""Real programs on real data, each run as `python -m examples.NAME --help`."""
