"""What becomes of the KV of a context that waits for a tool: one policy per file behind protocol.py."""
