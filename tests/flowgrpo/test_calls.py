"""No call hides what its arguments are: at most four of them go by their place, the others by their names."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST = 4
FILES = [str(path.relative_to(ROOT)) for top in ("flowgrpo", "rewards") for path in sorted((ROOT / top).rglob("*.py"))]
EXEMPT = {
    ("rewards/cards.py", "Card"),  # the rows of one table, written below each other
    ("flowgrpo/mdlm/decoding/decoders.py", "build"),  # model cards call it by place
}


def functions(tree):
    """Each function with the number of its arguments that may go by place, an object's own aside."""
    methods = {
        method
        for kind in ast.walk(tree)
        if isinstance(kind, ast.ClassDef)
        for method in kind.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        and "staticmethod" not in map(ast.unparse, method.decorator_list)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield getattr(node, "name", "lambda"), len(node.args.posonlyargs + node.args.args) - (node in methods)


def records(tree):
    """Each dataclass with the number of its fields that may go by place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and (
            made := [d for d in map(ast.unparse, node.decorator_list) if "dataclass" in d]
        ):
            fields = [ast.unparse(field.annotation) for field in node.body if isinstance(field, ast.AnnAssign)]
            placed = fields[: fields.index("KW_ONLY")] if "KW_ONLY" in fields else fields
            yield (
                node.name,
                0 if "kw_only=True" in made[0] else len([f for f in placed if not f.startswith("ClassVar")]),
            )


def test_what_counts():
    tree = ast.parse(
        "def f(a, b, c, *rest, d): ...\n"
        "class A:\n    def g(self, a): ...\n    @staticmethod\n    def h(a, b): ...\n"
        "@dataclass(frozen=True)\nclass B:\n    a: int\n    _: KW_ONLY\n    b: int\n"
        "@dataclass(frozen=True, kw_only=True)\nclass C:\n    a: int\n"
        "@dataclass\nclass D:\n    a: int\n    b: ClassVar[int] = 0\n"
    )
    assert sorted(functions(tree)) == [("f", 3), ("g", 1), ("h", 2)]
    assert sorted(records(tree)) == [("B", 1), ("C", 0), ("D", 1)]


def test_at_most_four_arguments_go_by_place():
    found = set()
    for file in FILES:
        tree = ast.parse((ROOT / file).read_text())
        found |= {(file, name) for name, count in (*functions(tree), *records(tree)) if count > MOST}
    assert found == EXEMPT
