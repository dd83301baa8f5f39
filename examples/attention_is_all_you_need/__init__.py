"""The Transformer of "Attention Is All You Need" as the early PyTorch implementations taught it, on fused attention."""
