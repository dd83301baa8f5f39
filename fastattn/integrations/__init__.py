"""Integration into models of other libraries, which need not know of fastattn."""
