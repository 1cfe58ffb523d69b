"""Commands that prepare, run, export and upload a run: `train`, `plan`, `export`."""
