"""The accel driver's CUDA engine: docs/cuda.md says what runs where.  Start with forward.py."""
