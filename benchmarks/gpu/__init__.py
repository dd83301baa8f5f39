"""Stages of `make gpu STAGE=...`: whether the kernels are right on a real GPU, and how fast; each stage resumes."""
