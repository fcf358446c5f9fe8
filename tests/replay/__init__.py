"""Replay: the kernel under a simulated clock."""
