"""The files of a model: find them in a folder or the hub's cache, and check their headers before loading."""
