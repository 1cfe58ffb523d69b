"""Files of a model, in a folder or at the hub: their choice, and checks of their headers before loading."""
