"""The page ledger as a state machine, and the cases that a random walk might miss.

With a window there is a second memory, of which a sequence needs no more than its next row sees.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.core import WindowPages
from paceline.models.kv import KVCache, KVSequence

PAGE = 4
PAGES = 12
ROWS = 9
"""Most rows of a pass."""

WINDOWS = [1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 11, 1000]


class Memory:
    """Slots as the target has them: what was last written where.

    Args:
        window: positions that a row sees in the second memory; 0 for none.
        window_pages: of the second memory; None means as many as the first one has.
    """

    def __init__(self, pages: int = PAGES, window: int = 0, window_pages: int | None = None) -> None:
        self.slots = [[-1] * PAGE for _ in range(pages)]
        self.near = [[-1] * PAGE for _ in range(window_pages or pages)]
        self.sight = window
        self.touched: set[int] = set()
        spec = WindowPages(window, len(self.near), ROWS, self.copy_near) if window else None
        self.cache = KVCache(pages, PAGE, self.copy_page, spec)

    def copy_page(self, source: int, target: int) -> None:
        self.slots[target] = list(self.slots[source])

    def copy_near(self, source: int, target: int) -> None:
        self.near[target] = list(self.near[source])
        self.touched.add(target)

    def write(self, sequence: KVSequence, slot: int, token: int) -> None:
        self.slots[int(sequence.table[slot // PAGE])][slot % PAGE] = token
        if sequence.window_table is not None:
            page = int(sequence.window_table[slot // PAGE])
            self.near[page][slot % PAGE] = token
            self.touched.add(page)

    def read(self, sequence: KVSequence) -> list[int]:
        table = sequence.table.tolist()
        return [self.slots[table[i // PAGE]][i % PAGE] for i in range(len(sequence))]

    def read_near(self, sequence: KVSequence, row: int | None = None) -> list[int]:
        """What the row at this position sees of those before it; None means the next one."""
        assert sequence.window_table is not None
        table = sequence.window_table.tolist()
        row = len(sequence) if row is None else row
        return [self.near[table[i // PAGE]][i % PAGE] for i in range(max(0, row + 1 - self.sight), row)]

    def fill(self, sequence: KVSequence, tokens: list[int]) -> None:
        """Write rows behind the committed ones, pass by pass; each must find what it sees."""
        text = [*sequence.tokens, *tokens]
        for start in range(len(sequence), len(text), ROWS):
            end = min(start + ROWS, len(text))
            for slot in range(start, end):
                self.write(sequence, slot, text[slot])
            for row in range(start, end) if self.sight else ():
                assert self.read_near(sequence, row) == text[max(0, row + 1 - self.sight) : row]

    def run(self, sequence: KVSequence, tokens: list[int]) -> None:
        assert self.cache.reserve(sequence, len(tokens))
        self.fill(sequence, tokens)
        self.cache.commit(sequence, tokens)

    def held(self, sequence: KVSequence) -> int:
        """Pages of the second memory that a sequence holds."""
        assert sequence._near is not None
        return sum(sequence._near.held)

    def prompt(self, tokens: list[int]) -> KVSequence:
        sequence = self.cache.open(tokens)
        self.run(sequence, tokens[len(sequence) :])
        return sequence


# Two tokens: prefixes collide all the time.
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=18)
PROMPTS = st.one_of(TOKENS, st.builds(lambda n, t: [t] * n, st.integers(19, 44), st.integers(0, 1)))


class Ledger:
    """Sequences and the tokens that each must hold, over one memory."""

    def __init__(self, window: int, window_pages: int | None = None) -> None:
        self.memory = Memory(window=window, window_pages=window_pages)
        self.cache = self.memory.cache
        self.expected: dict[KVSequence, list[int]] = {}

    def admit(self, tokens: list[int]) -> None:
        sequence = self.cache.open(tokens)
        assert len(sequence) < len(tokens)
        assert sequence.tokens == tokens[: len(sequence)]
        self.expected[sequence] = tokens[: len(sequence)]
        self.step(sequence, tokens[len(sequence) :], [])

    def step(self, sequence: KVSequence, kept: list[int], rejected: list[int]) -> bool:
        """Write provisional rows, keep some, roll the rest back. False if there is no room."""
        before = self.cache.available
        if not self.cache.reserve(sequence, len(kept) + len(rejected)):
            assert self.cache.available == before
            return False
        kept, rejected = [*kept, *rejected[:-ROWS]], rejected[-ROWS:]
        self.memory.fill(sequence, [*kept, *(token + 100 for token in rejected)])
        self.cache.commit(sequence, kept)
        self.expected[sequence] += kept
        return True

    def extend(self, sequence: KVSequence, behind: list[int]) -> None:
        tokens, before = self.expected[sequence] + behind, len(sequence)
        self.cache.extend(sequence, tokens)
        assert before <= len(sequence) < max(len(tokens), before + 1)
        assert len(sequence) == before or len(sequence) % PAGE == 0
        self.expected[sequence] = tokens[: len(sequence)]

    def fork(self, sequence: KVSequence, length: int) -> None:
        twin = self.cache.fork(sequence, length)
        assert len(twin) in (length, length // PAGE * PAGE) or self.memory.sight
        assert len(twin) <= length
        self.expected[twin] = self.expected[sequence][: len(twin)]

    def free(self, sequence: KVSequence) -> None:
        self.cache.free(sequence)
        del self.expected[sequence]

    def use_room(self, sequence: KVSequence, rows: int) -> None:
        """What fits can be had, pass by pass."""
        if self.cache.fits([(sequence, rows)], spare=1):
            for start in range(0, rows, 2):
                assert self.step(sequence, [start % 2] * min(2, rows - start), [])

    def evict_everything(self) -> None:
        """One greedy sequence takes all that can be taken, then gives it back."""
        hog = self.cache.open([7])
        assert self.cache.reserve(hog, self.cache.available * PAGE)
        assert self.cache.available == 0 or self.memory.sight
        self.cache.free(hog)

    def check(self) -> None:
        """Every page has one owner, and every sequence reads its own tokens."""
        self.cache.check_integrity()
        for sequence, tokens in self.expected.items():
            assert sequence.tokens == tokens
            assert self.memory.read(sequence) == tokens
            if sight := self.memory.sight:
                assert self.memory.read_near(sequence) == tokens[max(0, len(tokens) + 1 - sight) :]
                full, first = -(-len(tokens) // PAGE), max(0, len(tokens) - sight + 1) // PAGE
                reserved = len(sequence.table) - full
                assert 0 <= self.memory.held(sequence) - (full - first) <= reserved


class LedgerMachine(RuleBasedStateMachine):
    @initialize(window=st.sampled_from([0, *WINDOWS]), window_pages=st.integers(4, PAGES))
    def start(self, window: int, window_pages: int) -> None:
        self.ledger = Ledger(window, window_pages)

    def pick(self, data: st.DataObject) -> KVSequence:
        return data.draw(st.sampled_from(list(self.ledger.expected)))

    @rule(tokens=PROMPTS)
    def admit(self, tokens: list[int]) -> None:
        self.ledger.admit(tokens)

    @precondition(lambda self: self.ledger.expected)
    @rule(data=st.data(), draft=TOKENS, kept=st.integers(0, 18))
    def check_draft(self, data: st.DataObject, draft: list[int], kept: int) -> None:
        self.ledger.step(self.pick(data), draft[:kept], draft[kept:])

    @precondition(lambda self: self.ledger.expected)
    @rule(data=st.data(), behind=TOKENS)
    def extend(self, data: st.DataObject, behind: list[int]) -> None:
        self.ledger.extend(self.pick(data), behind)

    @precondition(lambda self: self.ledger.expected)
    @rule(data=st.data(), rows=st.integers(0, 40), loose=st.integers(0, 9), roll_back=st.booleans())
    def reserve_and_use_it_or_not(self, data: st.DataObject, rows: int, loose: int, roll_back: bool) -> None:
        sequence = self.pick(data)
        if self.ledger.cache.reserve(sequence, rows, loose):
            assert self.ledger.cache.slack(sequence) >= rows
        if roll_back or rows > ROWS:  # more are not given up later
            self.ledger.cache.rollback(sequence)

    @precondition(lambda self: self.ledger.expected)
    @rule(data=st.data(), share=st.floats(0, 1))
    def fork(self, data: st.DataObject, share: float) -> None:
        sequence = self.pick(data)
        self.ledger.fork(sequence, round(share * len(sequence)))

    @precondition(lambda self: self.ledger.expected)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.ledger.free(self.pick(data))

    @rule()
    def evict_everything(self) -> None:
        self.ledger.evict_everything()

    @precondition(lambda self: self.ledger.expected)
    @rule(data=st.data(), rows=st.integers(0, 30))
    def use_room(self, data: st.DataObject, rows: int) -> None:
        self.ledger.use_room(self.pick(data), rows)

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        self.ledger.check()


LedgerMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLedger = LedgerMachine.TestCase


@pytest.mark.parametrize("window", [0, *WINDOWS])
def test_a_walk_among_texts_that_are_nearly_the_same(window: int) -> None:
    """Of one token with another now and then: nearly every page is shared, taken over or parted from."""
    rng = random.Random(window)

    def some(most: int) -> list[int]:
        return [int(rng.random() < 0.03) for _ in range(rng.randint(1, most))]

    for _ in range(6):
        ledger = Ledger(window, rng.randint(4, PAGES))
        for _ in range(250):
            sequences = list(ledger.expected)
            turn = rng.random() if sequences else 0.0
            if turn < 0.2:
                ledger.admit(some(40))
                continue
            sequence = rng.choice(sequences)
            if turn < 0.5:
                ledger.step(sequence, some(6), some(12))
            elif turn < 0.65:
                ledger.extend(sequence, some(20))
            elif turn < 0.75:
                ledger.fork(sequence, rng.randint(0, len(sequence)))
            elif turn < 0.8:
                ledger.use_room(sequence, rng.randint(0, 30))
            elif turn < 0.98:
                ledger.free(sequence)
            else:
                ledger.evict_everything()
            ledger.check()


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


@pytest.mark.parametrize("window", WINDOWS)
def test_a_long_text_takes_window_pages_for_what_is_seen(window: int) -> None:
    memory = Memory(pages=100, window=window)
    sequence = memory.prompt([i % 2 for i in range(40)])
    for turn in range(100):
        memory.run(sequence, [turn % 2] * (1 + turn % 3))
        assert memory.held(sequence) <= (window - 2) // PAGE + 2
    memory.cache.check_integrity()
    most = -(-(window - 1 + ROWS) // PAGE) + 2
    assert len(memory.touched) <= most
    assert memory.cache.used == pytest.approx(len(sequence.table) / 100)


def test_a_text_goes_on_behind_what_its_window_still_sees() -> None:
    memory = Memory(pages=40, window=6, window_pages=6)
    prompt = list(range(30))
    memory.cache.free(memory.prompt(prompt))
    again = memory.cache.open([*prompt, 1, 2])
    assert len(again) == 30
    memory.cache.free(again)
    assert len(memory.cache.open([*prompt[:29], 7, 8])) == 29
    # Its first pages were written over: what begins like it must be computed.
    assert len(memory.cache.open([*prompt[:10], 1, 2])) == 0
    memory.cache.check_integrity()


def test_what_a_text_left_behind_is_read_until_it_is_needed() -> None:
    memory = Memory(pages=40, window=6)
    text = list(range(60))
    first = memory.prompt(text[:40])  # its passes have written more pages than are seen now
    for token in text[40:52]:
        memory.run(first, [token])
    again = memory.cache.open([*text[:44], 99])
    assert len(again) == 44
    memory.cache.free(again)
    assert len(memory.cache.open([*text[:20], 99])) == 0
    memory.cache.check_integrity()


def test_what_texts_left_behind_goes_before_what_finished_ones_ended_with() -> None:
    memory = Memory(pages=60, window=6, window_pages=9)
    done, growing = list(range(100, 112)), list(range(60))
    memory.cache.free(memory.prompt(done))
    text = memory.prompt(growing[:9])
    for token in growing[9:]:
        memory.run(text, [token])
    assert len(memory.cache.open([*done, 1])) == 12
    memory.cache.check_integrity()


def test_where_texts_part_their_windows_stay() -> None:
    """A front that many share, such as a system prompt, is computed twice and never again."""
    memory = Memory(pages=400, window=6, window_pages=12)
    front = list(range(4 * PAGE))
    lengths = []
    for turn in range(5):
        text = memory.cache.open([*front, 100 + turn])
        lengths.append(len(text))
        for token in [*front[len(text) :], *([100 + turn] * 30)]:
            memory.run(text, [token])
        memory.cache.free(text)
    assert lengths == [0, 0, 16, 16, 16]
    memory.cache.check_integrity()


def test_a_text_that_goes_on_keeps_no_more_than_its_end() -> None:
    """Turns of one conversation part from nothing."""
    memory = Memory(pages=400, window=6)
    text = [i % 7 for i in range(9)]
    for turn in range(30):
        one = memory.cache.open([*text, turn])
        assert len(one) == (len(text) if turn else 0)
        fresh = [*text[len(one) :], turn, *(i % 5 for i in range(8))]
        memory.run(one, fresh)
        text = list(one.tokens)
        memory.cache.free(one)
    assert len(memory.touched) <= -(-(6 - 1 + ROWS) // PAGE) + 2
    memory.cache.check_integrity()


def test_a_reservation_of_any_length_takes_the_window_pages_of_a_pass() -> None:
    memory = Memory(pages=60, window=6)
    for front in ([], [1, 2, 3], [1] * 9):
        memory.cache.clear()
        memory.touched.clear()
        sequence = memory.prompt(front) if front else memory.cache.open([0])
        assert memory.cache.reserve(sequence, 90, loose=3)
        memory.cache.check_integrity()
        assert memory.cache.reserve(sequence, 130, loose=9)  # it may grow before it is used
        memory.cache.check_integrity()
        memory.fill(sequence, [i % 3 for i in range(130)])
        memory.cache.commit(sequence, [i % 3 for i in range(130 - ROWS - 9)])
        memory.cache.check_integrity()
        text = [*front, *(i % 3 for i in range(130 - ROWS - 9))]
        assert memory.read_near(sequence) == text[-5:]
        assert len(memory.touched) <= -(-(6 - 1 + ROWS) // PAGE) + 5 + -(-len(front) // PAGE)


def test_a_fork_behind_a_window_that_moved_on_is_shorter() -> None:
    memory = Memory(pages=60, window=6, window_pages=8)
    text = memory.prompt(list(range(60)))
    twin = memory.cache.fork(text, 10)
    assert len(twin) == 0
    assert len(memory.cache.fork(text, 58)) == 58
    memory.cache.check_integrity()
