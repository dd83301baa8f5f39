"""Translation by a Transformer, from two parallel text files."""
