"""Drivers: processes that hold frames, move bytes and compute, and decide nothing (see docs/writing-a-driver.md)."""
