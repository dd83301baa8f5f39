"""What `fastattn bench` runs: cases -> rivals -> timing -> report, each stage one file, joined in run.py."""
