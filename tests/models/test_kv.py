"""The page ledger as a state machine, and the cases that a random walk might miss."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.models.kv import KVCache, KVSequence

PAGE = 4
PAGES = 12


class Memory:
    """Slots as the target has them: what was last written where."""

    def __init__(self, pages: int = PAGES) -> None:
        self.slots = [[-1] * PAGE for _ in range(pages)]
        self.cache = KVCache(pages, PAGE, self.copy_page)

    def copy_page(self, source: int, target: int) -> None:
        self.slots[target] = list(self.slots[source])

    def write(self, sequence: KVSequence, slot: int, token: int) -> None:
        self.slots[int(sequence.table[slot // PAGE])][slot % PAGE] = token

    def read(self, sequence: KVSequence) -> list[int]:
        table = sequence.table.tolist()
        return [self.slots[table[i // PAGE]][i % PAGE] for i in range(len(sequence))]

    def run(self, sequence: KVSequence, tokens: list[int]) -> None:
        assert self.cache.reserve(sequence, len(tokens))
        for i, token in enumerate(tokens):
            self.write(sequence, len(sequence) + i, token)
        self.cache.commit(sequence, tokens)

    def prompt(self, tokens: list[int]) -> KVSequence:
        sequence = self.cache.open(tokens)
        self.run(sequence, tokens[len(sequence) :])
        return sequence


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=18)  # two tokens: prefixes collide all the time


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()
        self.cache = self.memory.cache
        self.expected: dict[KVSequence, list[int]] = {}

    def pick(self, data: st.DataObject) -> KVSequence:
        return data.draw(st.sampled_from(list(self.expected)))

    @rule(tokens=TOKENS)
    def admit(self, tokens: list[int]) -> None:
        sequence = self.cache.open(tokens)
        assert len(sequence) < len(tokens)
        assert sequence.tokens == tokens[: len(sequence)]
        self.expected[sequence] = tokens[: len(sequence)]
        self.step(sequence, tokens[len(sequence) :], [])

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), draft=TOKENS, kept=st.integers(0, 18))
    def check_draft(self, data: st.DataObject, draft: list[int], kept: int) -> None:
        """Write provisional rows, keep some, roll the rest back."""
        self.step(self.pick(data), draft[:kept], draft[kept:])

    def step(self, sequence: KVSequence, kept: list[int], rejected: list[int]) -> None:
        before = self.cache.available
        if not self.cache.reserve(sequence, len(kept) + len(rejected)):
            assert self.cache.available == before
            return
        for i, token in enumerate([*kept, *(token + 100 for token in rejected)]):
            self.memory.write(sequence, len(sequence) + i, token)
        self.cache.commit(sequence, kept)
        self.expected[sequence] += kept

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), behind=TOKENS)
    def extend(self, data: st.DataObject, behind: list[int]) -> None:
        sequence = self.pick(data)
        tokens, before = self.expected[sequence] + behind, len(sequence)
        self.cache.extend(sequence, tokens)
        assert before <= len(sequence) < len(tokens)
        assert len(sequence) == before or len(sequence) % PAGE == 0
        self.expected[sequence] = tokens[: len(sequence)]

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), rows=st.integers(0, 9))
    def reserve_and_roll_back(self, data: st.DataObject, rows: int) -> None:
        sequence = self.pick(data)
        if self.cache.reserve(sequence, rows):
            assert self.cache.slack(sequence) >= rows
        self.cache.rollback(sequence)

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), share=st.floats(0, 1))
    def fork(self, data: st.DataObject, share: float) -> None:
        sequence = self.pick(data)
        length = round(share * len(sequence))
        self.note_cut(self.cache.fork(sequence, length), sequence, length)

    def note_cut(self, twin: KVSequence, sequence: KVSequence, length: int) -> None:
        assert len(twin) in (length, length // PAGE * PAGE)
        self.expected[twin] = self.expected[sequence][: len(twin)]

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = self.pick(data)
        self.cache.free(sequence)
        del self.expected[sequence]

    @rule()
    def evict_everything(self) -> None:
        """One greedy sequence takes all that can be taken, then gives it back."""
        hog = self.cache.open([7])
        assert self.cache.reserve(hog, self.cache.available * PAGE)
        assert self.cache.available == 0
        self.cache.free(hog)

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        self.cache.check_integrity()
        for sequence, tokens in self.expected.items():
            assert sequence.tokens == tokens
            assert self.memory.read(sequence) == tokens


LedgerMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLedger = LedgerMachine.TestCase


def test_finished_prompt_is_reused_but_for_its_last_token() -> None:
    memory = Memory()
    prompt = list(range(11))
    memory.cache.free(memory.prompt(prompt))
    again = memory.cache.open(prompt)
    assert len(again) == 10
    assert memory.read(again) == prompt[:10]


@pytest.mark.parametrize("length", range(1, 2 * PAGE + 2))
def test_at_least_one_token_is_left_to_compute_at_every_length(length: int) -> None:
    memory = Memory()
    prompt = list(range(length))
    memory.cache.free(memory.prompt(prompt))
    assert len(memory.cache.open(prompt)) == length - 1


def test_a_running_sequence_shares_its_full_pages_at_once() -> None:
    memory = Memory()
    first = memory.prompt(list(range(10)))
    second = memory.cache.open(list(range(10)))
    assert len(second) == 2 * PAGE
    assert second.table.tolist() == first.table[:2].tolist()


def test_a_prefix_that_another_computes_meanwhile_is_taken_over() -> None:
    memory = Memory()
    tokens = list(range(3 * PAGE + 2))
    first, second = memory.cache.open(tokens), memory.cache.open(tokens)
    memory.run(first, tokens[: PAGE + 1])
    memory.run(second, tokens[:2])
    memory.cache.extend(second, tokens)
    assert len(second) == PAGE  # the page that is full; what it had of its own is given back
    memory.run(first, tokens[PAGE + 1 :])
    memory.cache.extend(second, tokens)
    assert len(second) == 3 * PAGE
    assert second.table.tolist() == first.table[:3].tolist()
    memory.cache.check_integrity()
    memory.cache.extend(second, tokens[: 3 * PAGE + 1])
    assert len(second) == 3 * PAGE


def test_the_last_token_is_left_to_compute_also_when_taken_over() -> None:
    memory = Memory()
    waiting = memory.cache.open(list(range(2 * PAGE)))
    memory.prompt(list(range(2 * PAGE)))
    memory.cache.extend(waiting, list(range(2 * PAGE)))
    assert len(waiting) == PAGE


def test_writing_behind_a_partial_match_leaves_the_original_alone() -> None:
    memory = Memory()
    first = memory.prompt([0, 1, 2, 3, 4, 5, 6, 7, 8])
    second = memory.cache.open([0, 1, 2, 3, 4, 5, 60, 70])
    assert len(second) == 6
    memory.run(second, [60, 70, 80])
    assert memory.read(first) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert memory.read(second) == [0, 1, 2, 3, 4, 5, 60, 70, 80]
    memory.cache.check_integrity()


def test_equal_pages_computed_apart_become_one() -> None:
    memory = Memory()
    twins = [memory.cache.open(list(range(9))) for _ in range(2)]
    for twin in twins:
        memory.run(twin, list(range(9)))
    assert twins[0].table[:2].tolist() == twins[1].table[:2].tolist()
    assert memory.cache.available == PAGES - 4
    memory.cache.check_integrity()


def test_least_recently_used_prefix_goes_first() -> None:
    memory = Memory(pages=6)
    for start in (10, 20, 30):
        memory.cache.free(memory.prompt([start + i for i in range(2 * PAGE)]))
    touched = memory.cache.open([10 + i for i in range(2 * PAGE)] + [0])
    memory.cache.free(touched)
    hog = memory.cache.open([99])
    assert memory.cache.reserve(hog, 2 * PAGE)
    lengths = [len(memory.cache.open([start + i for i in range(2 * PAGE)] + [0])) for start in (10, 20, 30)]
    assert lengths == [8, 0, 8]


def test_a_chain_is_evicted_from_its_end() -> None:
    memory = Memory(pages=4)
    prompt = list(range(4 * PAGE))
    memory.cache.free(memory.prompt(prompt))
    hog = memory.cache.open([99])
    assert memory.cache.reserve(hog, 1)
    assert len(memory.cache.open([*prompt, 0])) == 3 * PAGE


def test_reserve_refuses_whole_and_changes_nothing() -> None:
    memory = Memory(pages=3)
    sequence = memory.prompt([1, 2, 3, 4, 5])
    assert memory.cache.available == 1
    assert not memory.cache.reserve(sequence, 8)
    assert memory.cache.available == 1
    assert memory.cache.reserve(sequence, 7)
    memory.cache.check_integrity()


def test_ten_thousand_turns_keep_the_ledger_bounded() -> None:
    memory = Memory()
    for turn in range(10_000):
        memory.cache.free(memory.prompt([turn % 7, turn % 5, 1, 2, 3, turn % 3]))
    memory.cache.check_integrity()
    assert memory.cache.available == PAGES
    assert len(memory.cache._idle) <= PAGES
