"""fastattn inside the models of others, which need not know it."""
