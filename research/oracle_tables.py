"""Print the tables of docs/research/oracle.md, which compare updates by the code of a run with exact gradients.

    python research/oracle_tables.py                # all tables except variance and stop
    python research/oracle_tables.py presets tempflow --reward linear
    python research/oracle_tables.py TABLE --help

TABLE is presets (all presets), texts (text presets in more detail), effects, mixture, late (rewards that late steps
decide), variance or stop (chains that are stopped early).
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
TABLES = {  # modules of tests/
    "presets": "oracle_presets",
    "effects": "oracle_effects",
    "mixture": "oracle_mixture",
    "texts": "oracle_texts",
    "late": "oracle_late",
    "variance": "tree_variance",
    "stop": "oracle_stop",
}


def main() -> None:
    """Run the command line: a table and its own arguments."""
    name, *rest = sys.argv[1:] or [None]
    if name in ("-h", "--help"):
        sys.exit(__doc__)
    if name not in (None, *TABLES):
        sys.stderr.write(f"oracle_tables.py: there is no table {name!r}, choose one of {', '.join(TABLES)}\n")
        sys.exit(2)
    for table in [name] if name else [table for table in TABLES if table not in ("variance", "stop")]:
        sys.argv = [f"oracle_tables.py {table}", *rest]
        import_module(TABLES[table]).main()


if __name__ == "__main__":
    main()
