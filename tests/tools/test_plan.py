from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.cli.plan import _size
from paceline.errors import UsageError
from paceline.models.memory import CacheNeeds
from paceline.models.target import NativeTarget
from paceline.tools.plan import Model, plan
from paceline.weights.gguf import GGUFFile
from paceline.weights.quants import TensorType
from support.tiny_models import TinyModel

BIG = Model("big", weights=1000, workspace=100, cache=CacheNeeds(10), context_length=400, vocabulary=50)
SMALL = Model("small", weights=200, workspace=20, cache=CacheNeeds(2), context_length=300, vocabulary=50)


def test_everything_is_added_up():
    found = plan(BIG, available=9999, runtime=50, drafters=[SMALL], context=100, sequences=3)
    assert {part.name: part.bytes for part in found.parts} == {
        "runtime": 50,
        "weights of big": 1000,
        "workspace of big": 100,
        "weights of small": 200,
        "workspace of small": 20,
        "KV cache of big": 3000,
        "KV cache of small": 600,
    }
    assert found.total == 4970
    assert found.fits
    assert found.advice == ()


def test_windows_are_counted_once_and_with_the_rows_of_one_pass():
    windowed = replace(BIG, cache=CacheNeeds(2, window=50, window_per_token=8), context_length=10_000)

    def cache(**options: int) -> int:
        return plan(windowed, available=10**9, runtime=0, **options).parts[-1].bytes

    assert cache(context=40) == 40 * 10
    assert cache(context=594) == 594 * 10  # window, page and a full pass
    assert cache(context=1000) == 1000 * 2 + 594 * 8
    assert cache(context=1000, sequences=3) == 3 * 1000 * 2 + (3 * 82 + 512) * 8
    fits = 1100 + 5000 * 2 + 594 * 8
    assert plan(windowed, available=fits, runtime=0).largest_context == 5000
    assert plan(windowed, available=fits - 1, runtime=0).largest_context == 4999
    everywhere = replace(windowed, cache=CacheNeeds(0, window=50, window_per_token=8))
    assert plan(everywhere, available=1100 + 594 * 8, runtime=0).largest_context == 10_000


def test_the_largest_context_is_the_last_that_fits():
    found = plan(BIG, available=1150 + 10 * 137 + 9, runtime=50)
    assert (found.context, found.largest_context, found.fits) == (137, 137, True)
    assert plan(BIG, available=found.available, runtime=50, context=137).fits
    assert not plan(BIG, available=found.available, runtime=50, context=138).fits


def test_a_drafter_is_silent_beyond_what_it_was_made_for():
    found = plan(BIG, available=10**9, runtime=0, drafters=[SMALL])
    assert found.largest_context == 400
    assert found.parts[-1].bytes == 300 * 2
    assert found.notes == ("beyond 300 tokens of text the small is silent",)
    assert plan(BIG, available=10**9, runtime=0, drafters=[SMALL], context=300).notes == ()
    with pytest.raises(UsageError, match="401"):
        plan(BIG, available=10**9, runtime=0, drafters=[SMALL], context=401)


def test_states_on_their_way_to_a_head_are_counted_for_one_pass():
    head = replace(SMALL, name="head", states=6, most_waiting=5000, context_length=10**6)
    long = replace(BIG, context_length=10**6)
    found = plan(long, available=10**9, runtime=0, drafters=[head], context=700)
    assert {part.name: part.bytes for part in found.parts}["states for head"] == 2 * 512 * 6
    (note,) = found.notes
    assert note.startswith("the states of 512 tokens are counted as waiting for the head; ")
    assert plan(long, available=10**9, runtime=0, drafters=[head], context=512).notes == ()
    assert plan(long, available=10**9, runtime=0, drafters=[replace(head, most_waiting=0)]).notes == ()


def test_advice_names_what_would_help():
    tight = plan(BIG, available=1150 + 10 * 40, runtime=50, context=100, sequences=2)
    assert tight.largest_context == 20
    assert tight.advice[0] == "lower --max-model-len to 20"
    assert tight.advice[1] == "hold fewer than 2 sequences at a time"


def without(missing: int, *drafters: Model) -> list[str]:
    """What is advised to leave out where so many bytes are missing."""
    whole = plan(BIG, available=10**9, runtime=0, drafters=drafters, context=100).total
    found = plan(BIG, available=whole - missing, runtime=0, drafters=drafters, context=100)
    return [line for line in found.advice if line.startswith("do without")]


def test_advice_names_the_smallest_drafter_that_would_do():
    mib = 1 << 20
    free = "n-gram and suffix drafting need no memory to speak of"
    one = replace(SMALL, name="one", weights=3 * mib)
    two = replace(SMALL, name="two", weights=5 * mib, leave_out="--speculate auto:find=false")
    assert without(2 * mib, one, two) == [f"do without the one, 3 MiB; {free}"]
    assert without(4 * mib, one, two) == [f"do without the two (--speculate auto:find=false), 5 MiB; {free}"]
    assert without(8 * mib, one, two) == [f"do without the one and the two, 8 MiB; {free}"]
    assert without(9 * mib, one, two) == []
    assert without(1) == []


@pytest.mark.parametrize("kind", [TensorType.F32, TensorType.Q8_0, TensorType.Q4_0, TensorType.IQ4_XS])
def test_weights_are_counted_as_they_are_packed(tmp_path, kind):
    model = TinyModel(kind=kind, width=256, hidden=512, heads=4, head_dim=64, vocab=512)
    for tied in (True, False):
        path = replace(model, tied=tied).write(tmp_path / f"{tied}.gguf")
        with GGUFFile.open(path) as file:
            target = NativeTarget.load(file, max_model_len=64)
            found = Model.of(file)
        # one row reads all weights; beside them lie the vectors of the norms
        assert 0 <= found.weights - target.weight_bytes <= 256 * 4 * (2 * model.layers + 1)
        assert found.cache == target.cache
        assert found.vocabulary == 512


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("8G", 8 << 30),
        ("8gb", 8 * 10**9),
        ("1.5MiB", 3 << 19),
        ("4096", 4096),
        ("64k", 65536),
    ],
)
def test_sizes(text, size):
    assert _size("--memory", text) == size


@pytest.mark.parametrize("text", ["", "lots", "8XB", "-1G", "8 G B"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError, match="--memory"):
        _size("--memory", text)
