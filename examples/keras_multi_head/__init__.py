"""The multi-head layer of Keras BERT (the package keras-multi-head) in PyTorch, on fused attention."""
