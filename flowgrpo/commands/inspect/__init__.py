"""Commands that look at a run: `explain`, `report`, `watch` and `vote`."""
