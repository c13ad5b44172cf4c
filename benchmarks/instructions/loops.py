"""Hot loops of device code, and what a thread does in one turn of them.

A hot loop is one that accesses global memory. Where a kernel has none, it is one turn. Of all
ways through a turn that make the same accesses and as many multiplications, the shortest counts:
what is left out are blocks that call a function (roots and divisions of denormal numbers, accesses
one by one) and the longer sides of branches, so the figure is right for loops whose dtypes are
literal and a lower bound for those that test them per element. Loops within a loop count once, if
the way leads through them. Of an access or branch under a predicate both ways are followed; under
one that the loop does not change, the same way each time.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from .disassembly import Instruction

Access = tuple[str, int]  # ("load" or "store", bytes of a thread)
Signature = tuple[tuple[Access, int], ...]
State = tuple  # see _Ways
Arrival = tuple[int, int, State]

MOST_WAYS = 1000  # through a turn; of more, those with the fewest instructions
COUNTED = "FMUL"  # of which ways with the same accesses may have more or fewer, as options ask for
READERS = ("BRA", "SEL", "FSEL", "USEL", "FMNMX", "VOTE", "BREAK")  # of predicates, which they keep
BRANCHES = ("BRA", "JMP")
UNIFORM = ("BRXU", "JMXU")
INDIRECT = ("BRX", "JMX", *UNIFORM)  # branches through a table, as of a switch
LEAVING = ("EXIT", "RET", "KILL", *INDIRECT)


@dataclass(frozen=True)
class Turn:
    """One turn of a loop: the blocks of instructions in their order."""

    blocks: list[list[Instruction]]
    length: int  # instructions
    signature: Signature
    is_loop: bool

    @cached_property
    def instructions(self) -> list[Instruction]:
        return [i for block in self.blocks for i in block if i.name != "NOP"]

    def bytes(self, kind: str, least: int = 1) -> int:
        """What a thread loads or stores in a turn, by accesses of at least so many bytes."""
        return sum(
            size * count for (of, size), count in self.signature if of == kind and size >= least
        )

    def accesses(self, kind: str) -> str:
        """Such as 4x16: four accesses of 16 bytes."""
        parts = [f"{count}x{size}" for (of, size), count in self.signature[::-1] if of == kind]
        return "+".join(parts) or "-"

    def count(self, *names: str) -> int:
        """How many opcodes begin with one of the names."""
        return sum(i.opcode.startswith(names) for i in self.instructions)

    @cached_property
    def branches(self) -> int:
        return self.count("BRA", "BRX")

    @cached_property
    def flights(self) -> list[int]:
        """How many loads are in flight each time that the thread has to wait for one of them.

        A loop is followed from its first load on, twice, because compilers move the loads for the
        next turn to the end of one.
        """
        code = list(self.instructions)
        if self.is_loop:
            loads = [n for n, i in enumerate(code) if i.access and i.access[0] == "load"]
            code = code[loads[0] :] + code[: loads[0]] if loads else code
        waits: list[int] = []
        flying: list[frozenset[int]] = []
        for instruction in code:
            if any(instruction.read & registers for registers in flying):
                waits.append(len(flying))
                flying = []
            if instruction.written:
                flying.append(instruction.written)
        if flying:
            waits.append(len(flying))
        return waits


class _Flow:
    """Blocks of instructions between branches, and how they follow each other.

    Args:
        code: the instructions of a kernel.
        through_tables: whether an indirect branch leads to every block that nothing else leads to,
            or a uniform one to the block behind it alone: its table is not in the listing.
    """

    def __init__(self, code: list[Instruction], through_tables: bool):
        self.code, self.through_tables = code, through_tables
        addresses = [i.address for i in code]
        at = {address: n for n, address in enumerate(addresses)}
        starts = {0}
        for n, instruction in enumerate(code):
            if instruction.target in at:
                starts.add(at[instruction.target])
            if instruction.target is not None or instruction.name in (*LEAVING, *BRANCHES):
                starts.add(n + 1)
        self.starts = sorted(s for s in starts if s < len(code))
        self.ends = [*self.starts[1:], len(code)]
        self.blocks = [code[start:end] for start, end in zip(self.starts, self.ends)]
        self.next = [self._following(b, at) for b in range(len(self.starts))]
        unclaimed = self._unclaimed() if through_tables else []
        for b in range(len(self.starts)):
            if self.block(b)[-1].name in INDIRECT:
                self.next[b] += unclaimed
        self.order = self._postorder()[::-1]
        self._dominators()

    def block(self, n: int) -> list[Instruction]:
        return self.blocks[n]

    def _following(self, b: int, at: dict[int, int]) -> list[int]:
        last = self.code[self.ends[b] - 1]
        found = []
        if last.target in at:
            found.append(bisect.bisect_right(self.starts, at[last.target]) - 1)
        # A branch can have a second predicate among its operands, or be one of divergent threads.
        leaves = last.name in (*LEAVING, *BRANCHES) and not last.guard
        if last.name == "BRA" and ("," in last.operands or "DIV" in last.opcode):
            leaves = False
        if last.name in UNIFORM and not self.through_tables:
            leaves = False
        if not leaves and self.ends[b] < len(self.code):
            found.append(b + 1)
        return found

    def _unclaimed(self) -> list[int]:
        """The blocks that nothing leads to and no call begins: those of the tables of indirect
        branches, which are not in the listing."""
        claimed = {0} | {other for following in self.next for other in following}
        called = {i.callee for i in self.code}
        return [
            b
            for b, start in enumerate(self.starts)
            if b not in claimed and self.code[start].address not in called
        ]

    def _postorder(self) -> list[int]:
        seen, done = {0}, []
        stack = [(0, iter(self.next[0]))]
        while stack:
            block, following = stack[-1]
            for other in following:
                if other not in seen:
                    seen.add(other)
                    stack.append((other, iter(self.next[other])))
                    break
            else:
                done.append(block)
                stack.pop()
        return done

    def _dominators(self) -> None:
        self.rank = rank = {block: n for n, block in enumerate(self.order)}
        before: dict[int, list[int]] = {block: [] for block in self.order}
        for block in self.order:
            for other in self.next[block]:
                before[other].append(block)
        nearest = {0: 0}
        changed = True
        while changed:
            changed = False
            for block in self.order[1:]:
                known = [p for p in before[block] if p in nearest]
                found = known[0]
                for other in known[1:]:
                    while found != other:
                        if rank[found] > rank[other]:
                            found = nearest[found]
                        else:
                            other = nearest[other]
                changed |= nearest.get(block) != found
                nearest[block] = found
        self.before, self.nearest = before, nearest

    def dominates(self, a: int, b: int) -> bool:
        while b != a and b != 0:
            b = self.nearest[b]
        return a == b

    def loops(self) -> dict[int, set[int]]:
        """The blocks of each loop, by the block that it begins with."""
        found: dict[int, set[int]] = {}
        for block in self.order:
            for header in self.next[block]:
                if not self.dominates(header, block):
                    continue
                body = found.setdefault(header, {header})
                stack = [block]
                while stack:
                    if (one := stack.pop()) not in body:
                        body.add(one)
                        stack += self.before[one]
        return found

    def turns(self, header: int, body: set[int], is_loop: bool, most: int) -> list[Turn]:
        """The shortest way through a turn for each set of accesses, and number of multiplications,
        that a turn can have."""
        counted = _Ways(self, body)
        # By block: {state on entry: (length so far, the block before, its state on entry)}
        ways: dict[int, dict[State, tuple[int, int, State]]] = {
            header: {counted.start: (0, -1, ())}
        }
        ends: dict[State, tuple[int, int, State]] = {}
        for block in self.order:
            if block not in body or block not in ways or counted.is_cold(block):
                continue
            arrivals = sorted(ways[block].items(), key=lambda item: item[1][0])[:most]
            is_end = header in self.next[block] if is_loop else self.block(block)[-1].name == "EXIT"
            for start, (cost, _, _) in arrivals:
                arrival = (cost + counted.length[block], block, start)
                after = counted.states_after(start, block)
                for state in after if is_end else ():
                    if state not in ends or arrival[0] < ends[state][0]:
                        ends[state] = arrival
                for other, states in counted.leaving(after, block):
                    if other not in body or self.rank[other] <= self.rank[block]:
                        continue  # it leaves the loop, or begins another turn
                    table = ways.setdefault(other, {})
                    for state in states:
                        if state not in table or arrival[0] < table[state][0]:
                            table[state] = arrival
        shortest: dict[tuple[Signature, int], Arrival] = {}
        for state, end in ends.items():
            key = counted.signature(state), state[0]
            if key[0] and (key not in shortest or end[0] < shortest[key][0]):
                shortest[key] = end
        return [
            Turn(self._blocks(ways, end), end[0], signature, is_loop)
            for (signature, _), end in shortest.items()
        ]

    def _blocks(self, ways, end) -> list[list[Instruction]]:
        blocks = []
        _, block, start = end
        while block >= 0:
            blocks.append(self.block(block))
            _, block, start = ways[block][start]
        return blocks[::-1]


class _Ways:
    """What happens to a state on its way through the blocks of a turn. A state is how many
    multiplications and accesses of each kind were made, and what was decided about predicates that
    stay the same in the loop."""

    def __init__(self, flow: _Flow, body: set[int]):
        self.flow = flow
        code = [i for block in body for i in flow.block(block)]
        self.kinds = sorted({i.access for i in code if i.access})
        written = {p for i in code if i.name not in READERS for p in i.predicates}
        self.fixed = sorted({i.guard.strip("!") for i in code if i.guard} - written - {"PT", "UPT"})
        self.start: State = (0,) * (1 + len(self.kinds)) + (None,) * len(self.fixed)
        self.multiplications = {b: sum(i.name == COUNTED for i in flow.block(b)) for b in body}
        self.length = {b: sum(i.name != "NOP" for i in flow.block(b)) for b in body}
        place = {kind: 1 + n for n, kind in enumerate(self.kinds)}
        self.accesses = {
            b: [(place[i.access], i.guard) for i in flow.block(b) if i.access] for b in body
        }

    def signature(self, state: State) -> Signature:
        return tuple((kind, count) for kind, count in zip(self.kinds, state[1:]) if count)

    def is_cold(self, block: int) -> bool:
        return any(i.name == "CALL" and i.target is None for i in self.flow.block(block))

    def decide(self, state: State, guard: str) -> list[tuple[bool, State]]:
        """Whether a predicate holds: as decided before, or both."""
        if not guard or guard.endswith("PT"):
            return [(not guard.startswith("!"), state)]
        if guard.strip("!") not in self.fixed:
            return [(True, state), (False, state)]
        place = 1 + len(self.kinds) + self.fixed.index(guard.strip("!"))
        holds = not guard.startswith("!")
        if state[place] is not None:
            return [(state[place] == holds, state)]
        return [
            (taken, (*state[:place], taken == holds, *state[place + 1 :]))
            for taken in (True, False)
        ]

    def states_after(self, start: State, block: int) -> list[State]:
        """The states at the end of a block, before its branch."""
        found = [(start[0] + self.multiplications[block], *start[1:])]
        for place, guard in self.accesses[block]:
            found = [
                (*s[:place], s[place] + taken, *s[place + 1 :])
                for state in found
                for taken, s in self.decide(state, guard)
            ]
        return list(dict.fromkeys(found)) if len(found) > 1 else found

    def leaving(self, after: list[State], block: int) -> list[tuple[int, list[State]]]:
        """The blocks that can follow, and the states on entry there."""
        last, following = self.flow.block(block)[-1], self.flow.next[block]
        if not last.guard or len(following) < 2 or "," in last.operands:
            return [(other, after) for other in following]
        decided = [way for state in after for way in self.decide(state, last.guard)]
        return [
            (other, [state for taken, state in decided if taken == is_taken])
            for other, is_taken in zip(following, (True, False))
        ]


def hot_loops(code: list[Instruction], most: int = MOST_WAYS) -> list[list[Turn]]:
    """Returns the turns of each hot loop of a kernel, the shortest first.

    Some loops are only reached through the table of an indirect branch. Others are no loops any
    more where such a branch is taken to lead into them. So the kernel is read in both ways.
    """
    found = _hot_loops(_Flow(code, through_tables=False), most)
    if any(instruction.name in INDIRECT for instruction in code):
        through = _hot_loops(_Flow(code, through_tables=True), most)
        found += [loop for loop in through if loop not in found]
    return found or whole(code, most)


def _hot_loops(flow: _Flow, most: int) -> list[list[Turn]]:
    def accesses(blocks) -> bool:
        return any(i.access for block in blocks for i in flow.block(block))

    loops = {header: body for header, body in flow.loops().items() if accesses(body)}
    return _sorted(flow.turns(header, body, True, most) for header, body in loops.items())


def whole(code: list[Instruction], most: int) -> list[list[Turn]]:
    """Returns the ways through a kernel, with one turn of each loop on them, as turns."""
    flow = _Flow(code, through_tables=True)
    return _sorted([flow.turns(0, set(flow.order), False, most)])


def _sorted(found: Iterable[list[Turn]]) -> list[list[Turn]]:
    return [sorted(turns, key=lambda turn: turn.length) for turns in found if turns]
