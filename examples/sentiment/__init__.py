"""Sentiment of reviews, and the evidence for it: `python -m examples.sentiment --help`."""
