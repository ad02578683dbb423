"""The small changes that a mutation makes to one node of a syntax tree."""

import ast
from collections.abc import Iterator

COMPARISONS: list[tuple[type[ast.cmpop], type[ast.cmpop]]] = [
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Is, ast.IsNot))
]
OTHER_COMPARISON = dict(COMPARISONS) | {other: one for one, other in COMPARISONS}
OTHER_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    **dict.fromkeys((ast.FloorDiv, ast.Mod), ast.Mult),
}
OTHER_FUNCTION = {"any": "all", "all": "any", "min": "max", "max": "min"}
LOGGING = ("_log", "log", "logger", "logging", "warnings")

Change = tuple[ast.expr | ast.stmt, str]
"""A node, and the text that takes the place of the node's text."""


def changes_of(node: ast.AST) -> Iterator[Change]:
    """Return the changes of one node; none for most nodes."""
    match node:
        case ast.stmt():
            yield from _statements(node)
        case ast.Compare() | ast.BoolOp() | ast.UnaryOp() | ast.BinOp():
            yield from _operators(node)
        case ast.Constant(value=bool() | int() as value):
            yield node, str(not value if isinstance(value, bool) else value + 1)
        case ast.Call(func=ast.Name(id=name) as function) if name in OTHER_FUNCTION:
            yield function, OTHER_FUNCTION[name]
        case ast.Slice():
            yield from _slices(node)
        case ast.IfExp(test=test):
            yield from ((test, text) for text in ("True", "False"))
        case ast.comprehension(ifs=conditions):
            yield from ((condition, "True") for condition in conditions)


def _operators(node: ast.expr) -> Iterator[Change]:
    match node:
        case ast.Compare():
            yield from _comparisons(node)
        case ast.BoolOp(op=op, values=values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield node, ast.unparse(ast.BoolOp(op=other, values=values))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, f"({ast.unparse(operand)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OTHER_ARITHMETIC:
            yield node, ast.unparse(ast.BinOp(left, OTHER_ARITHMETIC[type(op)](), right))


def _statements(node: ast.stmt) -> Iterator[Change]:
    match node:
        case ast.AugAssign(target=target, op=op, value=value) if type(op) in OTHER_ARITHMETIC:
            yield node, ast.unparse(ast.AugAssign(target, OTHER_ARITHMETIC[type(op)](), value))
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) not in ("None", "False"):
            yield value, "None"
        case ast.Expr(value=ast.Call() as call) if not _only_logs(call):
            yield node, "pass"
        case ast.If(test=test):
            yield from ((test, text) for text in ("True", "False"))
        case ast.While(test=test) if not isinstance(test, ast.Constant):
            yield test, "False"
        case ast.Break():
            yield node, "continue"
        case ast.Continue():
            yield node, "break"


def _comparisons(node: ast.Compare) -> Iterator[Change]:
    for place, op in enumerate(node.ops):
        ops = [*node.ops[:place], OTHER_COMPARISON[type(op)](), *node.ops[place + 1 :]]
        yield node, ast.unparse(ast.Compare(node.left, ops, node.comparators))


def _slices(node: ast.Slice) -> Iterator[Change]:
    if node.lower is not None:
        yield node, ast.unparse(ast.Slice(None, node.upper, node.step))
    if node.upper is not None:
        yield node, ast.unparse(ast.Slice(node.lower, None, node.step))


def _only_logs(call: ast.Call) -> bool:
    match call.func:
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            return name in LOGGING and attribute != "warn"
    return False
