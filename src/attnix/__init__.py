"""attnix: an operating system for attention state."""
