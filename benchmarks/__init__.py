"""Benchmarks that need a checkout: suites for pytest, studies of single questions, and what runs on a GPU."""
