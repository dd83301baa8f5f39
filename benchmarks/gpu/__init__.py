"""What `make gpu STAGE=...` runs: whether the kernels are right on a real GPU, and how fast, in stages that resume."""
