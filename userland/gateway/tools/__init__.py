"""How models of each family are told of tools, and how they ask for one."""
