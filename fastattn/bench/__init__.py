"""`fastattn bench`: cases -> rivals -> timing -> report, one file for each step, joined in run.py."""
