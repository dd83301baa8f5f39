"""fastattn inside models of other libraries. Nothing here is imported by `import fastattn`."""
