"""Small changes to a Python file: cosmic-ray's operators, and those that it lacks."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.operators.provider import OperatorProvider
from parso.python.tree import Keyword, Name

__all__ = ["Change", "changes_of"]

# Of the pairs that cosmic-ray makes, those that leave a program which runs: most others raise at
# once, and any test would notice.
COMPARISONS = (
    "Lt_LtE LtE_Lt Gt_GtE GtE_Gt Lt_Gt Gt_Lt LtE_GtE GtE_LtE Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is"
)
ARITHMETIC = "Add_Sub Sub_Add Mul_FloorDiv Mul_Div FloorDiv_Mul Div_Mul Mod_FloorDiv Pow_Mul "
ARITHMETIC += "BitOr_BitAnd BitAnd_BitOr LShift_RShift RShift_LShift"
NAMES = [f"ReplaceComparisonOperator_{pair}" for pair in COMPARISONS.split()]
NAMES += [f"ReplaceBinaryOperator_{pair}" for pair in ARITHMETIC.split()]
NAMES += ["ReplaceUnaryOperator_Delete_Not", "ReplaceUnaryOperator_Delete_USub", "AddNot"]
NAMES += ["ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"]
NAMES += ["ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "NumberReplacer"]
NAMES += ["RemoveDecorator", "ZeroIterationForLoop"]


class _Own(Operator):
    """An operator that changes each node it fits in one way."""

    def mutation_positions(self, node):
        if self.fits(node):
            yield node.start_pos, node.end_pos

    @classmethod
    def examples(cls):
        return ()


class NegateIn(_Own):
    """``a in b`` becomes ``a not in b``, and back."""

    def fits(self, node):
        return node.type == "comparison" and _is_in(node.children[1])

    def mutate(self, node, index):
        is_in = node.children[1].get_code().split() == ["in"]
        node.children[1] = Name("not in" if is_in else "in", node.start_pos, prefix=" ")
        return node


def _is_in(node):
    return node.get_code().split() in (["in"], ["not", "in"])


class DropKeyword(_Own):
    """``f(a, b=c)`` becomes ``f(a)``."""

    def fits(self, node):
        if node.type not in ("arglist", "trailer"):
            return False
        return any(map(_is_keyword, node.children))

    def mutation_positions(self, node):
        if self.fits(node):
            for child in filter(_is_keyword, node.children):
                yield child.start_pos, child.end_pos

    def mutate(self, node, index):
        at = [i for i, child in enumerate(node.children) if _is_keyword(child)][index]
        comma = getattr(node.children[min(at + 1, len(node.children) - 1)], "value", "") == ","
        del node.children[at : at + 1 + comma]
        return node


def _is_keyword(node):
    return node.type == "argument" and len(node.children) == 3 and node.children[1].value == "="


class DeleteStatement(_Own):
    """An assignment, a call or a ``raise`` becomes ``pass``."""

    def fits(self, node):
        if node.type not in ("expr_stmt", "atom_expr", "raise_stmt", "del_stmt"):
            return False
        return node.parent.type == "simple_stmt"

    def mutate(self, node, index):
        return Keyword("pass", node.start_pos, prefix=node.get_first_leaf().prefix)


class ReturnNone(_Own):
    """``return x`` becomes ``return None``."""

    def fits(self, node):
        if node.type != "return_stmt":
            return False
        return len(node.children) == 2 and node.children[1].get_code().strip() != "None"

    def mutate(self, node, index):
        node.children[1] = Name("None", node.children[1].start_pos, prefix=" ")
        return node


OPERATORS = [OperatorProvider()[name] for name in NAMES]
OPERATORS += [NegateIn, DropKeyword, DeleteStatement, ReturnNone]


@dataclass(frozen=True)
class Change:
    path: Path
    line: int
    operator: type[Operator]
    occurrence: int

    @cached_property
    def source(self) -> str | None:
        """The changed file, or None if it is no program. Made for the few that are drawn."""
        changed = mutate_code(self.path.read_text(), self.operator(), self.occurrence)
        return changed if changed is not None and _compiles(changed) else None

    @property
    def lines(self) -> tuple[str, str]:
        """The lines that are changed, before and after."""
        before, after = self.path.read_text().splitlines(), self.source.splitlines()
        found = [line for line in difflib.unified_diff(before, after, n=0, lineterm="")][2:]
        return tuple(" ".join(line[1:].strip() for line in found if line[0] == s) for s in "-+")


def changes_of(path: Path, random, lines=None):
    """Yields changes to a file in a random order, one for each place and kind, so that what has
    many forms is not drawn more often. ``lines`` are the only ones to change, or None for all."""
    places: dict[tuple, list] = {}
    tree = get_ast(path.read_text())
    for operator in OPERATORS:
        occurrence = 0
        for node in ast_nodes(tree):
            for start, _ in operator().mutation_positions(node):
                if not _is_left_alone(node) and (lines is None or start[0] in lines):
                    kind = operator.__name__.partition("_")[0]
                    places.setdefault((start, kind), []).append((operator, occurrence))
                occurrence += 1
    chosen = [(place, random.choice(forms)) for place, forms in sorted(places.items())]
    random.shuffle(chosen)
    for (start, _), (operator, occurrence) in chosen:
        yield Change(path, start[0], operator, occurrence)


def _compiles(source):
    try:
        compile(source, "changed", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def _is_left_alone(node):
    """Whether a change there changes no program that runs: types, names for ``import *``, slots."""
    while node is not None:
        if node.type in ("annassign", "import_from", "import_name"):
            return True
        if node.parent is not None:
            siblings = node.parent.children
            if node.parent.type == "tfpdef" and node is not siblings[0]:
                return True
            if (
                node.parent.type == "funcdef"
                and getattr(node.get_previous_sibling(), "value", "") == "->"
            ):
                return True
            if node.parent.type == "if_stmt" and "TYPE_CHECKING" in siblings[1].get_code():
                return True
        if node.type == "expr_stmt" and node.children[0].get_code().strip() in (
            "__all__",
            "__slots__",
        ):
            return True
        if node.type == "expr_stmt" and node.children[1].type == "annassign":
            if len(node.children[1].children) == 2:  # a declaration
                return True
        if node.type == "decorator" and "overload" in node.get_code():
            return True
        node = node.parent
    return False
