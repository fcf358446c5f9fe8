"""Commands that do something: get a model, boot, talk to it, stop it."""
