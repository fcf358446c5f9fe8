"""The inspector: one command per file.  Each looks through system calls, prints a table or JSON, and changes nothing."""
