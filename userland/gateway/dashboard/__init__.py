"""The dashboard: a page, and the JSON that it draws.  Start with routes.py; the page itself is static/."""
