"""Training of the TraceLock controller, which judges which proposals of a decode are final."""
