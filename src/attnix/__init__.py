"""attnix: an operating system for attention state."""

__version__ = "0.1.0.dev0"
