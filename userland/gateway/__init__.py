"""`attnix serve`: OpenAI's and Anthropic's HTTP interfaces, and the dashboard, as a program over the socket."""
